"""The position in anything that can be iterated: what was seen is loaded again and thrown away."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import final

from composerlite.errors import IncompatibleCheckpointError
from composerlite.trainer.data_position import RewindingPosition
from composerlite.types import Batch, StateDict

__all__ = ["ReplayPosition"]

log = logging.getLogger(__name__)


@final
class ReplayPosition(RewindingPosition):
    """Anything else that can be iterated: the batches already seen are loaded again and thrown away."""

    def _start(self, skip: int) -> Iterator[Batch]:
        batches = iter(self._loader)
        self._restored = None
        if isinstance(self._loader, Sequence):
            return itertools.islice(batches, skip, None)
        if skip:
            _replay(batches, skip, type(self._loader).__name__)
        return batches

    def _own_state(self) -> StateDict:
        return {}


def _replay(batches: Iterator[Batch], count: int, kind: str) -> None:
    from rich.console import Console
    from rich.progress import track

    log.info("replaying %d batches: a %s cannot skip by index and has no state_dict", count, kind)
    console = Console(stderr=True, quiet=not sys.stderr.isatty())
    for done in track(range(count), description="replaying data", console=console):
        try:
            next(batches)
        except StopIteration as e:
            raise IncompatibleCheckpointError(
                f"the data loader ended after {done} batches, before the {count} that the interrupted run had seen of "
                "this epoch: the data set has become smaller. To start the epoch's data afresh pass "
                "spin_dataloaders=False."
            ) from e

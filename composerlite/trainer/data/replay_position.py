"""The position in anything that can be iterated: what was seen is loaded again and thrown away."""

from __future__ import annotations

import copy
import itertools
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

from torch.utils.data import DataLoader, IterableDataset

from composerlite._torch_compat import forget_workers
from composerlite.errors import IncompatibleCheckpointError
from composerlite.trainer.data.data_position import RewindingPosition
from composerlite.trainer.data.dealing import Share
from composerlite.trainer.data.persistent_workers import PersistentWorkers, has_persistent_workers
from composerlite.types import Batch, StateDict

__all__ = ["ReplayPosition"]

log = logging.getLogger(__name__)


@final
class ReplayPosition(RewindingPosition):
    """Anything else that can be iterated: the batches already seen are loaded again and thrown away.

    Workers that load a map-style data set end with each epoch: what persisting ones keep of the epochs before would not
    be there after a resume.
    """

    def __init__(self, loader: Iterable[Batch], *, seed: int, share: Share = Share()) -> None:  # noqa: B008 - frozen
        super().__init__(loader, share)
        self._iterated = loader
        self._persistent: PersistentWorkers | None = None
        if not has_persistent_workers(loader):
            return
        own: Any = loader
        if isinstance(own.dataset, IterableDataset) or type(own).__iter__ is not DataLoader.__iter__:
            self._persistent = PersistentWorkers(own, seed)
        else:
            self._iterated = own = copy.copy(own)  # the user's is left as it is
            forget_workers(own)
            vars(own)["persistent_workers"] = False

    def close(self) -> None:
        """See :meth:`DataPosition.close`."""
        if self._persistent is not None:
            self._persistent.close()

    def _start(self, skip: int) -> Iterator[Batch]:
        batches = iter(self._iterated) if self._persistent is None else self._persistent.begin(self._number)
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

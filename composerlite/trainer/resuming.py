"""What autoresume goes on from: the newest good checkpoint of the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import download_bar, newest_good, take_leases, together
from composerlite.core import State
from composerlite.errors import ConfigError

__all__ = ["newest_checkpoint"]

log = logging.getLogger(__name__)


def newest_checkpoint(
    state: State, savers: Sequence[CheckpointSaver], *, progress_bar: bool, timeout: float
) -> Path | str | None:
    """The newest good checkpoint of this run that any of its ``savers`` wrote.

    From now on no other process can be given the run: see :mod:`composerlite.checkpoint.lease`.

    Args:
        state: of the run. savers: where to look.
        progress_bar: show one while a checkpoint is fetched.
        timeout: seconds to wait for another process that has the run.

    Raises:
        RunInUseError: another process has the run and goes on with it.
        ConfigError: none of them saves what a run could be resumed from.
    """
    savers = [saver for saver in savers if not saver.weights_only]
    if not savers:
        raise ConfigError(
            "autoresume=True needs checkpoints to resume from: pass save_folder, or a CheckpointSaver that saves "
            "more than weights."
        )
    with together("taking the lease of the run"):
        if state.rank == 0:
            leases = [lease for saver in savers for lease in saver.leases(state.run_name)]
            take_leases(leases, f"run {state.run_name!r}", timeout)
    with download_bar(progress_bar) as tell:
        found = newest_good(
            [saver.catalog for saver in savers],
            state.run_name,
            templates=[saver.filename.filename for saver in savers],
            buckets=[bucket for saver in savers for bucket in saver.buckets],
            progress=tell,
        )
    if found is None:
        log.info("autoresume: run %r has no checkpoint yet", state.run_name)
    return found

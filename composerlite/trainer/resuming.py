"""What autoresume goes on from: the newest good checkpoint of the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from composerlite import dist
from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint.load.resolve import download_bar
from composerlite.checkpoint.load.resume import Choice, begin_attempt, choose
from composerlite.core import State
from composerlite.errors import ConfigError
from composerlite.types import Lineage

__all__ = ["new_lineage", "newest_checkpoint"]

log = logging.getLogger(__name__)


def newest_checkpoint(state: State, savers: Sequence[CheckpointSaver], *, progress_bar: bool, timeout: float) -> Choice:
    """Choose the newest good checkpoint of this run that any of its ``savers`` wrote.

    From now on no other process can be given the run: see :mod:`composerlite.checkpoint.place.lease`.

    Args:
        state: of the run. savers: where to look.
        progress_bar: show one while a checkpoint is fetched.
        timeout: seconds to wait for another process that has the run.

    Raises:
        RunInUseError: another process has the run and goes on with it.
        CheckpointError: there are checkpoints, and none of them is good.
        ConfigError: none of them saves what a run could be resumed from.
    """
    savers = [saver for saver in savers if not saver.weights_only]
    if not savers:
        raise ConfigError(
            "autoresume=True needs checkpoints to resume from: pass save_folder, or a CheckpointSaver that saves "
            "more than weights."
        )
    with dist.get_group().all_or_none("taking the lease of the run"):
        if state.rank == 0:
            for saver in savers:
                saver.take_leases(state.run_name, timeout)
    with download_bar(progress_bar) as tell:
        choice = choose(
            [saver.catalog for saver in savers],
            state.run_name,
            templates=[saver.filename.filename for saver in savers],
            links=[None if saver.latest_filename is None else saver.latest_filename.filename for saver in savers],
            buckets=[bucket for saver in savers for bucket in saver.buckets],
            progress=tell,
        )
    if choice.place is None:
        log.info("autoresume: run %r has no checkpoint yet", state.run_name)
    return choice


def new_lineage(state: State, savers: Sequence[CheckpointSaver], *, load_path: str | None) -> Lineage:
    """Begin an attempt of a run that does not resume from its newest checkpoint.

    Args:
        state: of the run. savers: whose folders and buckets may hold earlier attempts.
        load_path: the checkpoint that training goes on from; ``None``: it starts from scratch, or with weights alone.
    """
    catalogs = [saver.catalog for saver in savers]
    buckets = [bucket for saver in savers for bucket in saver.buckets]
    return begin_attempt(catalogs, state.run_name, buckets=buckets, origin=load_path)

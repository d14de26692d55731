"""What keeps other processes, and other runs, from the names of a saver; and the saver from theirs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, SupportsInt, final

from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.place.lease import Lease, take_leases
from composerlite.checkpoint.record.contents import TrainingState
from composerlite.checkpoint.record.lineage import may_be_replaced
from composerlite.checkpoint.record.naming import TimestampLike, ensure_no_conflict
from composerlite.checkpoint.save.publishing import Publisher
from composerlite.errors import CheckpointError
from composerlite.types import Lineage

__all__ = ["Claims", "SavedState", "refuse_conflicts"]

log = logging.getLogger(__name__)


class SavedTimestamp(TimestampLike, Protocol):
    """What a saver needs of a timestamp."""

    @property
    def batch(self) -> SupportsInt: ...


class SavedState(TrainingState, Protocol):
    """What a saver needs of a training state."""

    lineage: Lineage
    world_size: int

    @property
    def timestamp(self) -> SavedTimestamp: ...


@final
class Claims:
    """The leases of a saver on its run and on its names, on rank 0."""

    def __init__(self) -> None:
        self._leases: list[Lease] = []

    def take(
        self, root: Path, run_name: str, names: Mapping[str, str], of_buckets: Sequence[Lease], timeout: float
    ) -> None:
        """Take those of the folder ``root`` and ``of_buckets``, unless they are held.

        Args:
            root: the folder. run_name: of the run. names: of files, each with its path for messages.
            of_buckets: the leases of the run there.
            timeout: seconds to wait for the end of another process.

        Raises:
            RunInUseError: another process has the run, or writes files of the same names to the same folder.
        """
        if self._leases:
            return
        own: list[Lease] = [Folder(root).lock(run_name), *of_buckets]
        take_leases(own, f"run {run_name!r}", timeout)
        self._leases = own
        advice = "each would replace the other's files. Give this run a save_folder or names of its own, or stop it."
        for name, path in names.items():
            lease = Folder(root).lock(f"{name}.name")
            try:
                take_leases([lease], f"{path!r}", timeout, advice)
            except OSError as e:  # a full disk, as it may be later on: saves say so, and may be tolerated
                log.warning("nothing keeps another run from writing %s: %s", path, e)
            else:
                self._leases.append(lease)

    def check(self) -> None:
        """See that the run is still this process's; CheckpointError if it is not."""
        for lease in self._leases:
            if lease.lost_to is not None:
                raise CheckpointError(
                    f"{lease.lost_to} has taken this run over: it had not heard of this process for long. It goes on "
                    "from the newest checkpoint, and this process must not write there any more."
                )

    def keep(self) -> bool:
        """Take each lease again whose file is gone; whether all were there."""
        kept = [lease.keep() for lease in self._leases]
        return all(kept)

    def release(self) -> None:
        """Let other processes have the run."""
        leases, self._leases = self._leases, []
        for lease in leases:
            lease.release()


def refuse_conflicts(
    state: SavedState, catalog: Catalog, template: str, folder: str, publishers: Sequence[Publisher]
) -> None:
    """Refuse names of which files are in ``folder``, or in a bucket, that this run would come to overwrite.

    Raises:
        CheckpointExistsError: there are.
    """
    here = (catalog, template, folder)
    for places, its_template, where in (here, *((p.remote, p.template, p.bucket.uri()) for p in publishers)):
        ensure_no_conflict(
            places.names(),
            its_template,
            run_name=state.run_name,
            timestamp=state.timestamp,
            folder=where,
            may_replace=functools.partial(_may_replace, state, places),
        )


def _may_replace(state: SavedState, places: Catalog, name: str) -> bool:
    """Check that the checkpoint ``name`` is one that autoresume passed over, and that the run comes to save again."""
    try:
        manifest = places.manifest_of(name)
    except CheckpointError:
        return False
    return manifest is not None and may_be_replaced(state.lineage, manifest)

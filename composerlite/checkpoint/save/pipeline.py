"""Saves checkpoints one after the other: snapshot → write → commit → publish.

The training thread takes the snapshot and goes on; everything else happens behind it. Where there is no memory for a
snapshot, the same bytes stream to the file through a ring of buffers, and the training thread waits until the last of
them is in the ring.
"""

from __future__ import annotations

import functools
import logging
import math
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch.optim import Optimizer

from composerlite import dist
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.checkpoint.place.node_disks import ONE_DISK, DiskCommit, Disks, check_one_disk, disks_of
from composerlite.checkpoint.record import rng
from composerlite.checkpoint.record.contents import IgnoreKeys, TrainingState, gather
from composerlite.checkpoint.record.manifest import Manifest, plain_timestamp, versions
from composerlite.checkpoint.record.naming import (
    FIRST_RANK,
    archive_template,
    check_template,
    directory_template,
    format_name_with_dist_and_time,
    names_of_ranks,
)
from composerlite.checkpoint.save.monolith import Monolith, NothingToWrite
from composerlite.checkpoint.save.save_job import LONGEST_WORK, Body, SaveJob, SaveReport
from composerlite.checkpoint.save.snapshot import Snapshot, Staging
from composerlite.errors import ConfigError, SaveError
from composerlite.storage import start_threads
from composerlite.types import Lineage, StateDict

if TYPE_CHECKING:
    from composerlite.checkpoint.save.sharded import saving as sharded_saving

__all__ = ["PendingSave", "Pipeline", "save", "save_checkpoint"]

log = logging.getLogger(__name__)
_PREVIOUS_SECONDS = 3600.0
"""How long a save waits for the one before it. A disk that takes longer hangs."""


@final
class PendingSave:
    """A save that goes on behind training.

    To be made on the training thread.

    Args:
        snapshot: what it writes, if a copy.

    Attributes:
        name: of the checkpoint to come, below its folder.
    """

    def __init__(self, name: str, snapshot: Snapshot | None = None) -> None:
        self.name = name
        self._snapshot = snapshot
        self._training_thread = threading.get_ident()
        self._future: Future[SaveReport] = Future()
        self._tidied = threading.Event()
        self.deletion_error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self, timeout: float | None = _PREVIOUS_SECONDS) -> SaveReport:
        """Wait until the checkpoint is committed, at most ``timeout`` seconds.

        Raises:
            TimeoutError: it is not.
            SaveError: its contents could not be written.
            OSError: no space, no permission, and the like.
        """
        if not self.join(timeout):
            raise TimeoutError(f"checkpoint {self.name!r} is not written after {timeout} s: does the disk hang?")
        return self._future.result()

    def join(self, timeout: float | None = _PREVIOUS_SECONDS) -> bool:
        """Wait until it has ended, well or not; whether it has."""
        if self._snapshot is not None and threading.get_ident() == self._training_thread:
            self._snapshot.complete()
        try:
            self._future.exception(timeout)
        except TimeoutError:
            return self._future.done()
        return True

    @property
    def is_tidy(self) -> bool:
        """Whether older checkpoints are deleted."""
        return self._tidied.is_set()

    def settle(self, run: Callable[[], SaveReport]) -> None:
        """Run what is left of the save, and keep what comes of it for who waits."""
        try:
            report = run()
        except BaseException as e:  # noqa: BLE001 - wait() raises it, in the thread that can do something about it
            self._future.set_exception(e)
        else:
            self._future.set_result(report)

    def tidy(self, delete_old: Callable[[], object]) -> None:
        """Delete older checkpoints, after the save has ended: neither training nor the next snapshot waits for that."""
        try:
            delete_old()
        except Exception as e:  # noqa: BLE001 - who saves asks for it
            self.deletion_error = e
        finally:
            self._tidied.set()

    def wait_until_tidy(self) -> None:
        """Wait until older checkpoints are deleted.

        Raises:
            SaveError: that does not end.
        """
        if not self._tidied.wait(_PREVIOUS_SECONDS):
            raise SaveError(f"older checkpoints than {self.name!r} are not deleted after {_PREVIOUS_SECONDS} s.")


@final
class Pipeline:
    """Saves checkpoints one after the other, each behind training.

    Args:
        staging_bytes: memory for the copy of what is saved, kept from save to save. ``None`` takes what a checkpoint
            needs if that is at most half of what is free. Where it does not suffice, the training thread waits while
            the bytes go through a ring of that size.
    """

    def __init__(self, staging_bytes: int | None = None) -> None:
        self._staging = Staging(staging_bytes)
        self._pending: PendingSave | None = None
        self._given_up: set[str] = set()  # by the save before, and perhaps not deleted yet
        self._previous: dict[str, SaveReport] = {}
        self._waited = 0.0

    def prepare(self, state: TrainingState, *, weights_only: bool = False, ignore_keys: IgnoreKeys = None) -> None:
        """Get the memory for checkpoints of ``state`` ready, in the background, so that the first costs no more.

        One that comes before that is written as it is, as :class:`HandOver` says, and memory is got ready at its end.

        Raises:
            SaveError: the contents of its checkpoints cannot be pickled.
        """
        if self._pending is not None:
            return  # it found memory, or gets some for the next at its end
        if state.sharding == "sharded":
            from composerlite.checkpoint.save.sharded.saving import expected_bytes  # slow to import

            self._staging.prepare(expected_bytes(gather(state, weights_only=weights_only, ignore_keys=ignore_keys)))
        elif dist.get_global_rank() == 0 and state.sharding is None:
            contents = gather(state, weights_only=weights_only, ignore_keys=ignore_keys)
            self._staging.prepare(_image(contents, "checkpoint").size_bytes)

    def prepared(self, timeout: float = 60.0) -> bool:
        """Wait for :meth:`prepare`; whether it is done."""
        return self._staging.prepared(timeout)

    def save(
        self,
        state: TrainingState,
        *,
        catalog: Catalog,
        template: str,
        weights_only: bool = False,
        ignore_keys: IgnoreKeys = None,
        overwrite: bool = False,
        latest: str | None = None,
        asynchronous: bool = True,
        lazy: bool = False,
        ephemeral: bool = False,
        after_crash: bool = False,
        metrics: Mapping[str, float] | None = None,
        publish: Callable[[Manifest], object] | None = None,
        give_up: Callable[[], Sequence[Manifest]] | None = None,
        disks: Disks = ONE_DISK,
    ) -> PendingSave:
        """Save a checkpoint of ``state``; training may go on when this returns.

        After an exception or a kill at any point there is either the whole checkpoint or none of it, and ``latest``
        points to the newest whole one.

        Args:
            state: what to save.
            catalog: the folder it goes to.
            template: its name, with format variables.
            weights_only: leave out everything but the model.
            ignore_keys: leave out these keys.
            overwrite: replace a checkpoint of the same name.
            latest: name of the symbolic link to point to it, with format variables.
            asynchronous: return when the snapshot is taken; otherwise when the checkpoint is committed.
            lazy: return before weights and optimizer state are copied: the next step of an optimizer waits for that.
                Nothing but optimizers may change them in between.
            ephemeral: it is given up as soon as a newer one is committed.
            after_crash: the state is that in which an exception left it; nobody resumes from it unasked.
            metrics: metric values to keep with it, by name; those that are no finite numbers are left out.
            publish: called with the manifest after the commit, perhaps on another thread.
            give_up: called after that: which checkpoints to delete.
            disks: which ranks see the same folder, where all write to it.

        Raises:
            CheckpointExistsError: there is one of that name and ``overwrite`` is false.
            SaveError: its contents cannot be pickled.
            OSError: no space, no permission, and the like. What goes wrong in the background, and all that goes wrong
                after the snapshot, comes out of :meth:`PendingSave.wait`.
        """
        group = dist.get_group()
        self.wait_for_previous()
        waiting, self._waited = self._waited, 0.0
        started = time.perf_counter() - waiting
        if state.sharding == "sharded":
            template = directory_template(template)
        elif state.sharding == "deepspeed":
            template = archive_template(template)
            _check_whole(weights_only=weights_only, ignore_keys=ignore_keys)
        names = _names(template, state)
        name = names[0]
        previous = self._pending
        if previous is not None and not self._given_up.isdisjoint(names):
            previous.wait_until_tidy()  # one of this name is about to go
        # First of all: votes are counted on each rank.
        several = disks.are_several
        votes = [group.vote(f"checkpoint {name!r}", longest_work=LONGEST_WORK) for _ in range(3 if several else 1)]
        # Before the ranks meet to gather: a name that is taken is told as that.
        with group.all_or_none(f"checkpoint {name!r}"):
            for one in names if disks.is_keeper else ():
                catalog.reserve(one, overwrite=overwrite)
        body: Body
        on_disks: DiskCommit | None = None
        with group.all_or_none(f"checkpoint {name!r}"):
            gathered = functools.partial(gather, state, weights_only=weights_only, ignore_keys=ignore_keys)
            if state.sharding == "sharded":
                folder = ShardedDirectory.on_disk(catalog.folder / name, catalog.folder)
                shards = _shards(gathered, folder, overwrite=overwrite, disks=disks)
                body, on_disks = shards, DiskCommit(body=shards, votes=votes) if several else None
            elif state.sharding == "deepspeed":
                contents = gathered(generators=_generators(weights_only))
                body = _archive(state, contents, catalog, names, overwrite=overwrite)
            else:
                contents = gathered(generators=_generators(weights_only))
                body = _file(state, contents, catalog, name, template, overwrite=overwrite)
        job = SaveJob(
            manifest=Manifest(
                name=name,
                kind="crash" if after_crash else _kind(state, weights_only=weights_only),
                template=template,
                run_name=state.run_name,
                timestamp=plain_timestamp(state.timestamp.state_dict()),
                fit_calls=len(state.fit_starts),
                world_size=group.size,
                files=(),
                left_out=("<function>",) if callable(ignore_keys) else tuple(ignore_keys or ()),
                metrics={name: value for name, value in (metrics or {}).items() if math.isfinite(value)},
                ephemeral=ephemeral,
                versions=versions(),
                lineage=getattr(state, "lineage", Lineage()),  # a loop of the user's own may have none
            ),
            catalog=catalog,
            body=body,
            started=started,
            waiting_seconds=waiting,
            ring_bytes=self._staging.ring_bytes,
            latest={} if latest is None else dict(zip(_names(latest, state), names, strict=True)),
            publish=publish,
            give_up=give_up,
            vote=votes[0],
            on_disks=on_disks,
            disks=disks,
            blocking=not asynchronous,
        )
        if asynchronous:
            late = lazy and state.sharding != "deepspeed"  # whose engine changes more than its optimizer's step does
            self._stage(job, state.optimizers if late else ())
        pending = self._pending = PendingSave(name, job.snapshot)
        job.stall_seconds = time.perf_counter() - started
        if job.snapshot is not None:  # it counts its own, later ones too
            job.stall_seconds -= job.snapshot.stall_seconds

        def finish() -> None:
            pending.settle(lambda: self._finish(job, previous))
            pending.tidy(job.delete_old)

        # Not a daemon: a program that ends waits until its last checkpoint is committed.
        if not asynchronous or not start_threads(finish, 1, name="checkpoint-save", daemon=False):
            job.blocking = True
            finish()
        return pending

    def _stage(self, job: SaveJob, lazy: Sequence[Optimizer]) -> None:
        """Copy what ``job`` writes, or have it written now. With several ranks, what fails is for the vote."""
        try:
            # While older checkpoints are being deleted, there may be no room for the file yet.
            is_tidy = self._pending is None or self._pending.is_tidy
            streams = job.body.is_plain and is_tidy and self._staging.would_be_new(job.body)
            copies = not streams and self._staging.reserve(job.body.size_bytes)
            if job.body.gathers:
                streams, copies = dist.get_group().broadcast((streams, copies))
            if copies:
                job.memory, job.snapshot = self._staging.take(job.body, lazy)
                return
            if not streams:
                log.info("no memory for a copy of %s: training waits while it is written", job.path)
                self.wait_until_tidy()
            with self._staging.paused():
                job.write(may_grow=streams)
            job.streamed = streams
        except BaseException as e:
            job.body.close(may_be_committed=False)
            if job.manifest.world_size == 1:
                raise
            job.failure = e

    def close(self) -> None:
        """Wait for the save that goes on and give the memory back. Errors of the save are left to who waits for it."""
        self.wait_for_previous()
        self.wait_until_tidy()
        self._staging.close()

    def _finish(self, job: SaveJob, previous: PendingSave | None) -> SaveReport:
        if previous is not None:
            previous.wait_until_tidy()  # the disk has room for no more than one checkpoint too many
        try:
            report = job.run()
        finally:
            if job.streamed:
                self._staging.prepare(job.body.size_bytes)
        self._given_up = set(report.deleted)
        before = self._previous.get(job.manifest.template)
        if (
            before is not None
            and report.batch > before.batch
            and len(report.weights_crc) > 0
            and (list(before.weights_crc) == list(report.weights_crc))
            and dist.get_global_rank() == 0
        ):
            log.warning(
                "checkpoint %s holds exactly the weights of %s, %d steps before it: is the model trained? Look at the "
                "learning rate, at requires_grad, and whether the optimizer has the model's parameters.",
                report.path,
                before.path.name,
                report.batch - before.batch,
            )
        self._previous[job.manifest.template] = report
        return report

    def wait_until_tidy(self) -> None:
        """Wait until the checkpoints that the save before gave up are deleted.

        Raises:
            SaveError: that does not end.
        """
        if self._pending is not None:
            self._pending.wait_until_tidy()

    def wait_for_previous(self) -> None:
        """Wait until the save before has ended, well or not. The next one counts the time as its own.

        Raises:
            SaveError: it does not end.
        """
        pending = self._pending
        if pending is None or pending.done:
            return
        started = time.perf_counter()
        if not pending.join():
            raise SaveError(f"checkpoint {pending.name!r} is not written after {_PREVIOUS_SECONDS} s: the disk hangs.")
        seconds = time.perf_counter() - started
        self._waited += seconds
        log.info("waited %.2f s for the save of %s to end", seconds, pending.name)


def _shards(
    gathered: Callable[..., StateDict], folder: ShardedDirectory, *, overwrite: bool, disks: Disks
) -> sharded_saving.Shards:
    """What this rank is to write of a directory."""
    from composerlite.checkpoint.save.sharded.saving import Shards  # slow to import

    own = {str(dist.get_global_rank()): rng.packed(rng.of_training())}
    return Shards(lambda: gathered(generators=own), folder, overwrite=overwrite, disks=disks)


def _file(
    state: TrainingState, contents: StateDict, catalog: Catalog, name: str, template: str, *, overwrite: bool
) -> Body:
    """What this rank is to write of a file with ``contents``."""
    gathering = None
    if state.sharding == "full":
        from composerlite.checkpoint.save.sharded.gathering import Gathering

        gathering = Gathering(contents)
        contents = gathering.contents
    if dist.get_global_rank() != 0:
        return NothingToWrite(gathering)
    image = _image(contents, f"checkpoint {str(catalog.folder / name)!r}")
    weights = contents.get("state", {}).get("model", {}).values()
    return Monolith(
        image, catalog, name=name, template=template, overwrite=overwrite, weights=weights, gathering=gathering
    )


def _archive(
    state: TrainingState, contents: StateDict, catalog: Catalog, names: Sequence[str], *, overwrite: bool
) -> Body:
    """What this rank is to write of a checkpoint of DeepSpeed."""
    from composerlite.checkpoint.save.rank_archive import RankArchive  # most runs are without

    assert state.deepspeed is not None, "its engine is made before anything is saved"
    files = state.deepspeed.saved()
    return RankArchive(contents, files, catalog, names=names, rank=dist.get_global_rank(), overwrite=overwrite)


def _check_whole(*, weights_only: bool, ignore_keys: IgnoreKeys) -> None:
    """See that all of a checkpoint of DeepSpeed is to be saved. Its files hold what they hold."""
    if weights_only:
        raise ConfigError(
            "weights_only=True (save_weights_only=True in the Trainer): DeepSpeed has the weights in pieces, with the "
            "state of the optimizer, and saves both. Save whole checkpoints, and make a file of the weights of one "
            "with composerlite.checkpoint.unshard_zero."
        )
    for glob in () if ignore_keys is None or callable(ignore_keys) else ignore_keys:
        if glob.startswith(("state/model", "state/optimizers")):
            raise ConfigError(
                f"save_ignore_keys: {glob!r} is in the files of DeepSpeed, which saves "
                "weights and optimizer as a whole. Leave it out."
            )


def _kind(state: TrainingState, *, weights_only: bool) -> str:
    if weights_only:
        return "weights"
    return state.sharding if state.sharding in ("sharded", "deepspeed") else "monolithic"


def _generators(weights_only: bool) -> list[dict[str, Any]] | None:
    """The random generators of all ranks; ``None`` where there is one, or they are not saved."""
    if weights_only or dist.get_world_size() == 1:
        return None
    states = dist.get_group().gather(bytes(rng.packed(rng.of_training()).numpy()))
    return [rng.unpacked(torch.frombuffer(bytearray(state), dtype=torch.uint8)) for state in states]


def _name(template: str, state: TrainingState) -> str:
    """The name that a checkpoint gets: that of rank 0."""
    return format_name_with_dist_and_time(template, state.run_name, state.timestamp, **FIRST_RANK)


def _names(template: str, state: TrainingState) -> list[str]:
    """The names of the files of a checkpoint, that of rank 0 first; of all ranks where each writes one."""
    if state.sharding != "deepspeed":
        return [_name(template, state)]
    return names_of_ranks(template, state.run_name, state.timestamp, dist.get_world_size())


def _image(contents: StateDict, what: str) -> TorchImage:
    try:
        return TorchImage(contents)
    except (pickle.PickleError, AttributeError, TypeError, ValueError) as e:  # what cannot be pickled raises any
        raise SaveError(f"{what}: its contents cannot be written: {e}") from e


def save(state: TrainingState, **arguments: Any) -> Path:
    """Save a checkpoint of ``state`` and return its path when it is committed. Arguments as :meth:`Pipeline.save`."""
    return Pipeline().save(state, **arguments, asynchronous=False).wait().path


def save_checkpoint(
    state: TrainingState,
    filename: str | Path = "ep{epoch}-ba{batch}-rank{rank}",
    *,
    weights_only: bool = False,
    ignore_keys: IgnoreKeys = None,
) -> str:
    """Save a checkpoint of ``state`` to ``filename``, replacing what is there, and return its path.

    When this returns, the checkpoint is durable and committed. ``filename`` may contain the format variables
    ``{run_name} {rank} {epoch} {batch}`` … and folders. See :meth:`Pipeline.save` for what is guaranteed and raised.
    """
    template = check_template(Path(filename).name, argument="filename")
    if state.sharding == "deepspeed":
        template = archive_template(template, argument="filename")
    folder = Path(_name(str(Path(filename).parent), state))
    several = state.sharding in ("sharded", "deepspeed") and dist.get_world_size() > 1
    path = save(
        state,
        catalog=Catalog(folder),
        template=template,
        weights_only=weights_only,
        ignore_keys=ignore_keys,
        overwrite=True,
        disks=_disks(folder, state) if several else ONE_DISK,
    )
    return str(path)


def _disks(folder: Path, state: TrainingState) -> Disks:
    disks = disks_of(folder)
    return check_one_disk(disks, folder) if state.sharding == "deepspeed" else disks

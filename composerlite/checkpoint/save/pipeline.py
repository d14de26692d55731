"""Saves the checkpoints of a run one after the other, each a ``SaveJob`` in the background.

Which :class:`Form` they have, a file, a directory of all ranks or an archive of each, follows from how the model is
spread over ranks: :func:`form_of`, and nothing else in this package, asks for that.
"""

from __future__ import annotations

import logging
import math
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from composerlite import dist
from composerlite.checkpoint.format.archive import DEEPSPEED, DEEPSPEED_TYPES, STATES
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.node_disks import Disks, check_one_disk, disks_of
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
from composerlite.checkpoint.save.file_writer import Gathering, NullWriter, RankArchiveWriter, SingleFileWriter
from composerlite.checkpoint.save.job import (
    LONGEST_WORK,
    PREVIOUS_SECONDS,
    FollowUp,
    PendingSave,
    RankWriter,
    SaveJob,
    SaveReport,
)
from composerlite.checkpoint.save.staging import Staging
from composerlite.devices import rng
from composerlite.errors import ConfigError, SaveError
from composerlite.types import Lineage, StateDict

__all__ = ["Form", "Pipeline", "form_of", "save", "save_checkpoint"]

log = logging.getLogger(__name__)
_LONG_WAIT_SECONDS = 1.0
"""A wait for the save before that takes longer is told in the log."""


# ── the forms that a checkpoint may have ─────────────────────────────────────────────────────────────────────────────
Gathered = Callable[..., StateDict]
"""Gives what is saved; ``generators`` are those of all ranks, in some form."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What a run wants to have saved.

    Attributes:
        state: of the run. gathered: makes what is saved of it.
        catalog: the folder. names: of the files of the checkpoint, as :meth:`Form.names` gives them.
        template: of these names.
        weights_only: nothing but the model is saved.
        overwrite: replace what has these names.
        disks: which ranks see the same folder, where not all see one.
    """

    state: TrainingState
    gathered: Gathered
    catalog: Catalog
    names: Sequence[str]
    template: str
    weights_only: bool
    overwrite: bool
    disks: Disks | None


class Form(ABC):
    """How a run's checkpoints lie in their folder.

    Attributes:
        kind: as manifests say it.
        may_be_lazy: nothing but its optimizers' steps changes the state that is saved.
        is_spread: the model is spread over ranks. is_shared: several ranks write to the folder.
        has_names_of_ranks: each rank has a file, and a link, with a name of its own.
    """

    kind: str
    may_be_lazy = True
    is_spread = True
    is_shared = False
    has_names_of_ranks = False

    def template(self, template: str, argument: str = "save_filename") -> str:
        """Return the template of names in this form for that of a file; ``argument`` is for errors."""
        return template

    def names(self, template: str, state: TrainingState) -> list[str]:
        """Return the names of the files of a checkpoint, that of rank 0 first; of all ranks where each writes one."""
        return [first_name(template, state)]

    def check(self, *, weights_only: bool, ignore_keys: IgnoreKeys) -> None:
        """See that what is to be saved can be; ConfigError."""

    def disks(self, folder: Path) -> Disks | None:
        """Find out which ranks see the same ``folder``; ``None``: all see one. Every rank calls it."""
        return None

    @abstractmethod
    def expected_bytes(self, gathered: Gathered) -> int | None:
        """Return about how much memory a copy takes on this rank; ``None`` where that is not known before a save."""

    @abstractmethod
    def writer(self, request: SaveRequest) -> RankWriter:
        """Return what this rank is to write; all ranks call it."""


def form_of(state: TrainingState) -> Form:
    """Return the form of the checkpoints of ``state``."""
    if state.sharding == "sharded":
        return _Directory()
    if state.sharding == "deepspeed":
        return _Archives()
    return _File(gathers=state.sharding == "full")


@final
class _File(Form):
    """One file, which rank 0 writes.

    Args:
        gathers: what is spread over ranks is gathered for it.
    """

    kind = "monolithic"

    def __init__(self, *, gathers: bool) -> None:
        self._gathers = self.is_spread = gathers

    def expected_bytes(self, gathered: Gathered) -> int | None:
        if self._gathers or dist.get_global_rank() != 0:
            return None
        return _image(gathered(), "checkpoint").size_bytes

    def writer(self, request: SaveRequest) -> RankWriter:
        contents = request.gathered(generators=_generators(request.weights_only))
        gathering = Gathering(contents) if self._gathers else None
        if gathering is not None:
            contents = gathering.contents
        if dist.get_global_rank() != 0:
            return NullWriter(gathering)
        image = _image(contents, f"checkpoint {str(request.catalog.folder / request.names[0])!r}")
        return SingleFileWriter(
            image,
            request.catalog,
            name=request.names[0],
            template=request.template,
            overwrite=request.overwrite,
            weights=contents.get("state", {}).get("model", {}).values(),
            gathering=gathering,
        )


@final
class _Directory(Form):
    """A directory, to which all ranks write."""

    kind = "sharded"
    is_shared = True

    def template(self, template: str, argument: str = "save_filename") -> str:
        return directory_template(template, argument=argument)

    def disks(self, folder: Path) -> Disks | None:
        return disks_of(folder) if dist.get_world_size() > 1 else None

    def expected_bytes(self, gathered: Gathered) -> int | None:
        from composerlite.checkpoint.save.sharded_writer import expected_bytes  # slow to import

        return expected_bytes(gathered())

    def writer(self, request: SaveRequest) -> RankWriter:
        from composerlite.checkpoint.place.directory import ShardedDirectory  # as slow
        from composerlite.checkpoint.save.sharded_writer import ShardWriter

        own = {str(dist.get_global_rank()): rng.packed(rng.of_training())}
        return ShardWriter(
            lambda: request.gathered(generators=own),
            ShardedDirectory.on_disk(request.catalog.folder / request.names[0], request.catalog.folder),
            overwrite=request.overwrite,
            disks=request.disks,
            of_run=True,
            reuse_plan=True,
        )


@final
class _Archives(Form):
    """An archive for each rank, with the files of DeepSpeed."""

    kind = "deepspeed"
    may_be_lazy = False  # the engine changes more than its optimizer's step does
    is_shared = True
    has_names_of_ranks = True

    def template(self, template: str, argument: str = "save_filename") -> str:
        return archive_template(template, argument=argument)

    def names(self, template: str, state: TrainingState) -> list[str]:
        return names_of_ranks(template, state.run_name, state.timestamp, dist.get_world_size())

    def check(self, *, weights_only: bool, ignore_keys: IgnoreKeys) -> None:
        if weights_only:
            raise ConfigError(
                "weights_only=True (save_weights_only=True in the Trainer): DeepSpeed has the weights in pieces, with "
                "the state of the optimizer, and saves both. Save whole checkpoints, and make a file of the weights of "
                "one with composerlite.checkpoint.unshard_zero."
            )
        for glob in () if ignore_keys is None or callable(ignore_keys) else ignore_keys:
            if glob.startswith(("state/model", "state/optimizers")):
                raise ConfigError(
                    f"save_ignore_keys: {glob!r} is in the files of DeepSpeed, which saves "
                    "weights and optimizer as a whole. Leave it out."
                )

    def disks(self, folder: Path) -> Disks | None:
        if dist.get_world_size() > 1:
            check_one_disk(folder)
        return None

    def expected_bytes(self, gathered: Gathered) -> int | None:
        return None

    def writer(self, request: SaveRequest) -> RankWriter:
        engine = request.state.deepspeed
        assert engine is not None, "it is made before anything is saved"
        images = {STATES: TorchImage(request.gathered(generators=_generators(request.weights_only)))}
        for name, contents in engine.saved().items():
            images[f"{DEEPSPEED}/{name}"] = TorchImage(contents, DEEPSPEED_TYPES)
        return RankArchiveWriter(
            images, request.catalog, names=request.names, rank=dist.get_global_rank(), overwrite=request.overwrite
        )


def first_name(template: str, state: TrainingState) -> str:
    """Return the name that ``template`` gives now on rank 0."""
    return format_name_with_dist_and_time(template, state.run_name, state.timestamp, **FIRST_RANK)


def _gathering(
    state: TrainingState, state_dict: StateDict | None, *, weights_only: bool, ignore_keys: IgnoreKeys
) -> Gathered:
    """Return what gathers a checkpoint of ``state_dict``; of what ``state`` holds then, if there is none."""

    def gathered(**generators: Any) -> StateDict:
        held = state_dict
        if held is None:
            held = state.weights_state_dict() if weights_only else state.state_dict()
        return gather(held, weights_only=weights_only, ignore_keys=ignore_keys, **generators)

    return gathered


def _generators(weights_only: bool) -> list[dict[str, Any]] | None:
    """Return the random generators of all ranks; ``None`` where there is one, or they are not saved."""
    if weights_only or dist.get_world_size() == 1:
        return None
    states = dist.get_group().gather(bytes(rng.packed(rng.of_training()).numpy()))
    return [rng.unpacked(torch.frombuffer(bytearray(state), dtype=torch.uint8)) for state in states]


def _image(contents: StateDict, what: str) -> TorchImage:
    try:
        return TorchImage(contents)
    except (pickle.PickleError, AttributeError, TypeError, ValueError) as e:  # what cannot be pickled raises any
        raise SaveError(f"{what}: its contents cannot be written: {e}") from e


# ── saves ────────────────────────────────────────────────────────────────────────────────────────────────────────────
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

    def prepare(
        self,
        state: TrainingState,
        *,
        weights_only: bool = False,
        ignore_keys: IgnoreKeys = None,
        state_dict: StateDict | None = None,
    ) -> None:
        """Get the memory for checkpoints of ``state`` ready, in the background, so that the first costs no more.

        One that comes before that is written as it is, as :class:`HandOver` says, and memory is got ready at its end.
        ``state_dict`` is what ``state`` holds, where the caller has it already.

        Raises:
            SaveError: the contents of its checkpoints cannot be pickled.
        """
        if self._pending is not None:
            return  # it found memory, or gets some for the next at its end
        gathered = _gathering(state, state_dict, weights_only=weights_only, ignore_keys=ignore_keys)
        if (size_bytes := form_of(state).expected_bytes(gathered)) is not None:
            self._staging.prepare(size_bytes)

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
        disks: Disks | None = None,
        is_routine: bool = False,
        state_dict: StateDict | None = None,
        started: float | None = None,
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
            disks: which ranks see the same folder, where all write to it and not all see one.
            is_routine: its line in the log is below INFO.
            state_dict: what ``state`` holds, or its weights; ``None``: it is asked for that.
            started: when gathering it began, as ``time.perf_counter`` counts; ``None``: now.

        Raises:
            CheckpointExistsError: there is one of that name and ``overwrite`` is false.
            SaveError: its contents cannot be pickled.
            OSError: no space, no permission, and the like. What goes wrong in the background, and all that goes wrong
                after the snapshot, comes out of :meth:`PendingSave.wait`.
        """
        group = dist.get_group()
        self.wait_for_previous()
        waiting, self._waited = self._waited, 0.0
        started = (time.perf_counter() if started is None else started) - waiting
        form = form_of(state)
        template = form.template(template)
        form.check(weights_only=weights_only, ignore_keys=ignore_keys)
        names = form.names(template, state)
        name = names[0]
        is_leader = group.is_first if disks is None else disks.is_folder_leader
        previous = self._pending
        if previous is not None and not self._given_up.isdisjoint(names):
            previous.wait_until_tidy()  # one of this name is about to go
        # First of all: votes are counted on each rank.
        rounds = 1 if disks is None else 3
        votes = [group.vote(f"checkpoint {name!r}", longest_work=LONGEST_WORK) for _ in range(rounds)]
        # Before the ranks meet to gather: a name that is taken is told as that.
        with group.all_or_none(f"checkpoint {name!r}"):
            for one in names if is_leader else ():
                catalog.reserve(one, overwrite=overwrite)
        with group.all_or_none(f"checkpoint {name!r}"):
            gathered = _gathering(state, state_dict, weights_only=weights_only, ignore_keys=ignore_keys)
            request = SaveRequest(
                state=state,
                gathered=gathered,
                catalog=catalog,
                names=names,
                template=template,
                weights_only=weights_only,
                overwrite=overwrite,
                disks=disks,
            )
            writer = form.writer(request)
        job = SaveJob(
            manifest=Manifest(
                name=name,
                kind="crash" if after_crash else "weights" if weights_only else form.kind,
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
                not_finite=tuple(getattr(state, "not_finite", ())),
                lineage=getattr(state, "lineage", Lineage()),  # a loop of the user's own may have none
            ),
            path=catalog.folder / name,
            writer=writer,
            votes=votes,
            group=group,
            follow_up=FollowUp(
                catalog=catalog,
                latest={} if latest is None else dict(zip(form.names(latest, state), names, strict=True)),
                publish=publish,
                give_up=give_up,
                is_leader=is_leader,
                is_routine=is_routine,
            ),
            started=started,
            waiting_seconds=waiting,
            ring_bytes=self._staging.ring_bytes,
            blocking=not asynchronous,
        )
        if asynchronous:
            # While older checkpoints are being deleted, there may be no room for the file yet.
            has_room = previous is None or previous.is_tidy
            job.stage(
                self._staging,
                state.optimizers if lazy and form.may_be_lazy else (),
                has_room=has_room,
                make_room=self.wait_until_tidy,
            )
        job.stall_seconds = time.perf_counter() - started
        if job.snapshot is not None:  # it counts its own, later ones too
            job.stall_seconds -= job.snapshot.stall_seconds
        pending = PendingSave(name, job)
        try:
            self._pending = pending
            pending.start(lambda: self._finish(job, previous))
        except BaseException:
            pending.cancel()
            raise
        return pending

    def close(self) -> None:
        """Wait for the save that goes on and give the memory back. Errors of the save are left to who waits for it."""
        self.wait_for_previous()
        self.wait_until_tidy()
        self._pending = None  # what is saved after this is a first save again, whose memory can be prepared
        self._staging.close()

    def _finish(self, job: SaveJob, previous: PendingSave | None) -> SaveReport:
        if previous is not None:
            previous.wait_until_tidy()  # the disk has room for no more than one checkpoint too many
        report = job.run()
        self._given_up = set(report.deleted)
        before = self._previous.get(job.manifest.template)
        if (
            before is not None
            and report.batch > before.batch
            and len(report.weights_crc) > 0
            and not job.manifest.not_finite  # what is NaN stays so, and that was said
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
            raise SaveError(f"checkpoint {pending.name!r} is not written after {PREVIOUS_SECONDS} s: the disk hangs.")
        seconds = time.perf_counter() - started
        self._waited += seconds
        level = logging.INFO if seconds >= _LONG_WAIT_SECONDS else logging.DEBUG
        log.log(level, "waited %.2f s for the save of %s to end", seconds, pending.name)


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
    form = form_of(state)
    template = form.template(check_template(Path(filename).name, argument="filename"), "filename")
    folder = Path(first_name(str(Path(filename).parent), state))
    path = save(
        state,
        catalog=Catalog(folder),
        template=template,
        weights_only=weights_only,
        ignore_keys=ignore_keys,
        overwrite=True,
        disks=form.disks(folder),
    )
    return str(path)

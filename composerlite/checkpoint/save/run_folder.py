"""Folder of a manager: names, ownership of the checkpoints, ``latest``, and leases."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol, SupportsInt, final

import xxhash

from composerlite import dist
from composerlite.checkpoint.contents import TrainingState
from composerlite.checkpoint.memory.folder import MARK, make_private, mark_of
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import delete_checkpoint, garbage
from composerlite.checkpoint.place.lease import FileLease, HeartbeatLease, Lease, take_leases
from composerlite.checkpoint.place.node_disks import Disks
from composerlite.checkpoint.place.place import set_link
from composerlite.checkpoint.record.manifest import (
    Manifest,
    Position,
    highest_attempt,
    may_be_replaced,
    new_attempt,
    new_id,
    new_name,
)
from composerlite.checkpoint.record.naming import (
    FIRST_RANK,
    PartialFilePath,
    TimestampLike,
    check_template,
    data_file_id,
    ensure_no_conflict,
    format_name_with_dist,
    name_pattern,
)
from composerlite.checkpoint.save.form import Form, first_name, form_of, names_of_ranks
from composerlite.checkpoint.save.options import SaveOptions
from composerlite.errors import CheckpointError, ConfigError, CorruptCheckpointError, RunInUseError, SaveError
from composerlite.storage import atomic_write, make_folder
from composerlite.types import Lineage

__all__ = ["RunFolder", "SavedState", "begin_attempt", "position_of"]

log = logging.getLogger(__name__)


class SavedTimestamp(TimestampLike, Protocol):
    """Timestamp interface for a manager."""

    @property
    def batch(self) -> SupportsInt: ...


class SavedState(TrainingState, Protocol):
    """Training state interface for a manager."""

    lineage: Lineage
    world_size: int

    @property
    def timestamp(self) -> SavedTimestamp: ...


def position_of(state: SavedState) -> Position:
    """Return the position of ``state`` in training."""
    return Position(state.run_name, (len(state.fit_starts), int(state.timestamp.batch)), state.lineage)


@final
class RunFolder:
    """Save folder of a manager. All ranks must call every method, unless the method says otherwise.

    Attributes:
        folder: path in the user's notation, with './' if given. :meth:`name` fills in the variables.
        filename: name of each checkpoint. latest_filename: name of the link to the newest checkpoint.
        disks: groups of ranks with the same folder, if all ranks write and not all see the same folder.
        is_leader: true if this rank begins, commits and deletes checkpoints in the folder on the rank's disk.
    """

    def __init__(self, options: SaveOptions) -> None:
        self._options = options
        self.folder = self._template = options.names.local_folder
        self.filename = PartialFilePath(options.names.filename, self.folder)
        self.latest_filename = (
            None if options.names.latest is None else PartialFilePath(options.names.latest, self.folder)
        )
        self.disks: Disks | None = None
        self.is_leader = False
        self._run_name = ""
        self._started_in = Path() if Path(self.folder).is_absolute() else Path.cwd()
        self._leases: list[Lease] = []
        self._note: Path | None = None

    @property
    def is_open(self) -> bool:
        """True after :meth:`name`."""
        return bool(self._run_name)

    # ── where ────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def root(self) -> Path:
        """Full path of the folder, even after a change of the working directory."""
        return self._started_in / self.folder

    @property
    def catalog(self) -> Catalog:
        """Catalog of the checkpoints, by the user's path. Each node may have another folder at this path."""
        try:
            is_here = Path(self.folder).is_absolute() or Path.cwd() == self._started_in
        except FileNotFoundError:  # the working directory was removed
            is_here = False
        return Catalog(self.folder if is_here else self.root)

    @property
    def own_catalog(self) -> Catalog:
        """Catalog of the checkpoints, by full path. For saves: the working directory may change before the end."""
        return Catalog(self.root)

    def path(self, name: str) -> str:
        """Return the path of the checkpoint ``name``, below the user's path of the folder."""
        return f"{self.folder.rstrip('/')}/{name}"

    def name_now(self, state: SavedState) -> str:
        """Return the name of a checkpoint of ``state``. If each rank has a file: the name of rank 0's file."""
        return first_name(self.filename.filename, state)

    def manifests(self, state: SavedState) -> list[Manifest]:
        """Return the records of this manager's checkpoints, also from before a resume, oldest first."""
        return position_of(state).own(self.catalog.manifests(), self.filename.filename)

    # ── before training ──────────────────────────────────────────────────────────────────────────────────────────
    def name(self, state: SavedState, others: Iterable[RunFolder], *, directory: str | None) -> Form:
        """Fill in the names, and return the form of the checkpoints.

        Args:
            state: state of the run.
            others: folders of the run's other managers.
            directory: name of each checkpoint if checkpoints are directories, in place of the file name.

        Raises:
            ConfigError: another manager has the same names, checkpoints of this form cannot have the names, or the
                state cannot be saved.
        """
        self._run_name = state.run_name
        self.folder = format_name_with_dist(self._template, state.run_name, **FIRST_RANK)
        try:
            new_name(first_name(self.filename.filename, state))  # the name must be readable from a record
        except ValueError as e:
            raise ConfigError(
                f"save_filename={self.filename.filename!r} in run {state.run_name!r}: {e}. Choose another run_name or "
                "save_filename."
            ) from e
        self._check_names_are_its_own(state, others)
        form = form_of(state)
        form.check(weights_only=self._options.weights_only, ignore_keys=self._options.ignore_keys)
        template = form.template(self.filename.filename)
        if form.kind == "sharded" and directory is not None:
            name = check_template(directory, argument="sharded_ckpt_prefix_dir")
            template = str(Path(template).with_name(name))
        self.filename = PartialFilePath(template, self._template)
        if self.latest_filename is not None:
            latest = form.template(self.latest_filename.filename, "save_latest_filename")
            self.latest_filename = PartialFilePath(latest, self._template)
            self._check_latest_is_no_checkpoint(template, latest, state)
        return form

    def _check_latest_is_no_checkpoint(self, template: str, latest: str, state: SavedState) -> None:
        """Refuse a link name that a checkpoint will have. If all checkpoints have the name, the link is left out."""
        name = first_name(latest, state)
        if template != latest and name_pattern(template, state.run_name).fullmatch(name):
            raise ConfigError(
                f"save_latest_filename={latest!r} is a name that checkpoints have with save_filename={template!r}, and "
                "the link to the newest would be in the way of one. Choose another."
            )

    def _check_names_are_its_own(self, state: SavedState, others: Iterable[RunFolder]) -> None:
        """Refuse names if another manager of this run would replace the files or the link."""
        own = self._places(state)
        for other in others:
            for argument, place in other._places(state).items():
                if own.get(argument) == place:
                    raise ConfigError(
                        f"two CheckpointSavers have {argument}={getattr(self, argument).filename!r} in "
                        f"{self.folder!r}, and each would replace what is the other's. Give one of them another "
                        f"{argument}, or another folder."
                    )

    def _places(self, state: SavedState) -> dict[str, Path]:
        """Return the paths of a checkpoint and link with the current time in the names, by argument name."""
        root = self._started_in / format_name_with_dist(self._template, state.run_name, **FIRST_RANK)
        names = {"filename": self.filename, "latest_filename": self.latest_filename}
        return {
            argument: root.resolve() / first_name(name.filename, state)
            for argument, name in names.items()
            if name is not None
        }

    def check_remote_name(self) -> None:
        """Raise ConfigError if names vary in the folder but not in the bucket, unless the run may overwrite."""
        remote = PartialFilePath(self._options.names.remote_filename)
        if self.filename.varies and not remote.varies and not self._options.overwrite:
            raise ConfigError(
                f"save_remote_file_name={remote.filename!r} is the same each time, and save_filename="
                f"{self.filename.filename!r} is not: the second checkpoint would replace the first in the bucket. Put "
                "{epoch} or {batch} into it, or pass save_overwrite=True to have the newest alone there."
            )

    def key(self, buckets: Sequence[Bucket]) -> str:
        """Return a unique key of the folder, or of the bucket if the folder stages uploads. Call on rank 0.

        An earlier folder at the same path had another key. ``buckets``: targets of uploads.
        """
        number = mark_of(self.own_catalog.place if self._options.names.bucket is None else buckets[0])
        uris = " ".join(bucket.uri() for bucket in buckets)
        return xxhash.xxh3_64_hexdigest(number + os.fsencode(self.root.resolve()) + uris.encode())

    def share_key(self) -> None:
        """Copy the key's random number to the folder of each node without a number: a node may be lost."""
        if self._options.names.bucket is not None:  # the bucket has the number
            return
        group, place = dist.get_group(), self.own_catalog.place
        with group.all_or_none("marking the folder of checkpoints on all nodes"):
            known = place.read(MARK) if dist.get_local_rank() == 0 and place.exists(MARK) else None
        number = next((mark for mark in group.gather(known) if mark is not None), group.broadcast(new_id().encode()))
        with group.all_or_none("marking the folder of checkpoints on all nodes"):
            if dist.get_local_rank() == 0:
                mark_of(place, number)

    def keep_in_memory(self, state: SavedState, key: str) -> None:
        """Add ``key``, the key of the run's other folder, to the name. Make the folder, private to this user."""
        self.folder = f"{self.folder}-{key}"
        with dist.get_group().all_or_none("preparing the folder in memory"):
            if dist.get_local_rank() == 0:
                make_private(self.root, levels=len(Path(state.run_name).parts) + 1)

    def prepare(self, state: SavedState) -> None:
        """Make the folder, check writes and the name of the link, and note the target bucket. Call on rank 0.

        Raises:
            ConfigError: the folder cannot be made or written to, has checkpoints of this run for another bucket, or has
                a file or directory with the name of the link to the newest checkpoint.
        """
        try:
            make_folder(self.root)
            with tempfile.TemporaryFile(dir=self.root):
                pass
            if self._options.names.bucket is not None:
                self._stage_for(self._options.names.bucket, state.run_name)
        except OSError as e:
            raise ConfigError(f"save_folder={self.folder!r} cannot be written to: {e}. Choose another folder.") from e
        if self.latest_filename is not None:
            self.own_catalog.place.check_link(first_name(self.latest_filename.filename, state))

    def _sweep(self) -> list[str]:
        """Remove the temporary files of killed processes, and return the data files of killed saves.

        Call on a single rank for each disk.
        """
        place = self.own_catalog.place
        place.sweep(timedelta())
        names = name_pattern(self.filename.filename, self._run_name)
        return garbage(place, place.files(), names)

    def _stage_for(self, bucket: str, run_name: str) -> None:
        """Write a note with the target bucket of ``run_name`` to the folder: another run may have the same name.

        Raises:
            ConfigError: the folder has checkpoints of ``run_name`` for another bucket.
        """
        note = self._note = self.root / f".bucket-{xxhash.xxh3_64_hexdigest(run_name.encode())}"
        before = note.read_bytes().decode(errors="replace") if note.is_file() else bucket
        if before != bucket and any(one.run_name == run_name for one in self.catalog.manifests()):
            raise ConfigError(
                f"save_folder={self._options.names.folder!r}: {self.folder!r} on this machine has checkpoints of the "
                f"run {run_name!r} that were saved for {before}, not for {bucket}. Give this run another run_name or "
                f"save_staging_folder; or remove {str(note)!r} if they are its own."
            )
        if before != bucket or not note.is_file():
            make_folder(note.parent)
            with atomic_write(note) as file:
                file.write(bucket.encode())

    def find_disks(self, form: Form) -> None:
        """Find the ranks with the same folder, make missing folders, and remove files of killed processes.

        Raises:
            ConfigError: ranks write together, and a rank shares no folder with any other rank of the node.
        """
        if form.is_shared:
            self.disks = form.disks(self.catalog.folder)
        self.is_leader = dist.get_group().is_first if self.disks is None else self.disks.is_folder_leader
        group = dist.get_group()
        own: list[Manifest] = []
        unnamed: list[str] = []
        with group.all_or_none("looking for what killed processes have left"):
            if self.is_leader:
                own = [one for one in self.catalog.manifests() if one.run_name == self._run_name]
                unnamed = self._sweep()
        if self.disks is not None:
            self._delete_partial(own, unnamed)
        with group.all_or_none("removing what killed processes have left"):
            self.own_catalog.place.delete(unnamed, folders=True)

    def _delete_partial(self, own: Sequence[Manifest], unnamed: Sequence[str]) -> None:
        """Delete the checkpoints that a killed process left on some disks, and not on all.

        If a disk has data files of a save without the record, a kill interrupted the save or a deletion.

        Args:
            own: records of the run on this disk; empty unless this rank is the leader of a folder.
            unnamed: data files on this disk without a record. Keep the files until all ranks return.
        """
        group = dist.get_group()
        first = group.broadcast({one.id for one in own})
        partial = set[str | None]().union(*group.gather({data_file_id(path) for path in unnamed}))
        with group.all_or_none("removing checkpoints that some disks lack"):
            for one in own:
                is_deleted = not group.is_first and first and one.id not in first
                if one.node is not None and (one.id in partial or is_deleted):
                    delete_checkpoint(self.catalog.place, one)

    # ── the link to the newest ───────────────────────────────────────────────────────────────────────────────────
    def catch_up(self, newest: Manifest, state: SavedState) -> None:
        """Point ``latest`` to ``newest`` if a kill came between the commit and the link. Also makes a missing link."""
        if self.latest_filename is None:
            return
        name = first_name(self.latest_filename.filename, state)
        link = self.root / name
        behind = not os.path.lexists(link)
        if link.is_symlink():
            target = self.own_catalog.place.target_of(name)
            own = {m.name: m.order for m in self.catalog.manifests() if m.run_name == newest.run_name}
            order = own.get(target)  # keep links of other runs; this run may have had another save_filename
            behind = order is not None and order < newest.order
        if not behind:
            return
        set_link(self.catalog.place, name, newest.name)
        if newest.kind == "deepspeed":  # each rank has a file and a link
            links = names_of_ranks(self.latest_filename.filename, state, len(newest.files))
            for its_link, file in zip(links, newest.files, strict=True):
                set_link(self.catalog.place, its_link, file.path)

    def follow(self, saved: Sequence[str], state: SavedState, *, deletes: bool) -> None:
        """Repair ``latest`` and complete deletions on the disk of a node other than the first.

        Args:
            saved: paths of the run's checkpoints, oldest first.
            state: state of the run.
            deletes: true if retention deletes checkpoints.
        """
        for manifest in self.manifests(state) if saved else ():
            path = self.path(manifest.name)
            if path == saved[-1]:
                self.catch_up(manifest, state)
            if deletes and manifest.node is not None and path not in saved:
                delete_checkpoint(self.catalog.place, manifest)

    # ── other processes, and other runs ──────────────────────────────────────────────────────────────────────────
    def refuse_conflicts(self, state: SavedState, buckets: Iterable[tuple[Catalog, str]]) -> None:
        """Refuse to start if this run would later overwrite files in the folder or in ``buckets``.

        Args:
            state: state of the run.
            buckets: catalogs of the buckets, each with the template of the names.

        Raises:
            CheckpointExistsError: the run would overwrite a file.
        """
        places: list[tuple[Catalog, str, str]] = [(self.catalog, self.filename.filename, self.folder)]
        places += [(remote, template, remote.place.uri()) for remote, template in buckets]
        for place, template, where in places:
            ensure_no_conflict(
                place.names(),
                template,
                run_name=state.run_name,
                timestamp=state.timestamp,
                folder=where,
                may_replace=functools.partial(_may_replace, state, place),
            )

    def may_replace(self, state: SavedState, name: str) -> bool:
        """Return true if autoresume skipped the checkpoint ``name``, and left the checkpoint in the folder."""
        return _may_replace(state, self.catalog, name)

    def take_leases(self, run_name: str, bucket_leases: Mapping[str, Lease], timeout: float) -> None:
        """Take the leases of this manager's names in the folder and in buckets. Call on rank 0.

        The leases are held until :meth:`release`. Two launches of a run use the same names. So do two runs with files
        that would replace each other.

        Args:
            run_name: name of the run.
            bucket_leases: leases of names in buckets, by URI.
            timeout: seconds to wait for the end of another process.

        Raises:
            RunInUseError: another process writes files of the same names, or took over a lease of this process.
        """
        if self._leases:
            self.check_leases()
            return
        templates = [self.filename] if self.latest_filename is None else [self.filename, self.latest_filename]
        names = [template.filename.replace("{run_name}", run_name) for template in templates]
        leases = {self.path(name): self.own_catalog.place.lock(name) for name in names} | dict(bucket_leases)
        take_leases(leases, f"run {run_name!r}", timeout)
        self._leases = list(leases.values())

    def check_leases(self) -> None:
        """Raise if a lease is known to be lost. Makes no request to a store.

        Raises:
            RunInUseError: another process took a lease over. This process must not write any more.
        """
        for lease in self._leases:
            if lease.lost_to is not None:
                raise RunInUseError(
                    f"{lease.lost_to} has taken over this run, or the names of its files, because this process gave no "
                    "sign of life for a long time. This process must not write there: start the run again."
                )

    def confirm_leases(self) -> None:
        """Check the leases as :meth:`check_leases` does, and ask the store first if the last answer is old.

        Call right before a write that makes a checkpoint visible: this process may have been suspended.

        Raises:
            RunInUseError: another process took a lease over.
            ObjectStoreError: the store does not answer.
        """
        for lease in self._leases:
            if isinstance(lease, HeartbeatLease):
                lease.confirm()
        self.check_leases()

    def check_folder(self) -> None:
        """Raise if the folder was removed or replaced. Call before a save.

        Raises:
            SaveError: the folder was removed or replaced. Another process may have the folder by now.
        """
        for lease in self._leases:
            if isinstance(lease, FileLease) and lease.is_gone:
                raise SaveError(
                    f"save_folder={self.folder!r} was removed or replaced while this run saves to it: {lease.uri!r} is "
                    "gone. Checkpoints that were in it are gone, too, and another process may have the folder by now. "
                    "Put it back, or start the run again."
                )

    def release(self) -> None:
        """Release the leases of the run. If retention keeps no checkpoints here and none is left, delete the note."""
        if self._note is not None and self._options.keep.none_here and not self.own_catalog.manifests():
            with contextlib.suppress(OSError):
                self._note.unlink(missing_ok=True)
        leases, self._leases = self._leases, []
        for lease in reversed(leases):
            lease.release()


def begin_attempt(
    folders: Sequence[Catalog],
    buckets: Sequence[tuple[Catalog, str | None]],
    run_name: str,
    *,
    origin: str | Path | None = None,
) -> Lineage:
    """Begin an attempt of ``run_name`` that does not resume from the newest checkpoint. The same on every rank.

    Args:
        folders: folders of the savers. buckets: buckets of the savers, each with the name of the link to the latest.
        run_name: name of the run.
        origin: the checkpoint to resume from. If the same run saved the checkpoint, and ``folders`` or ``buckets``
            have the record, the checkpoints up to ``origin`` belong to the new attempt, too.
    """

    def begun() -> Lineage:
        known: list[Manifest] = []
        links: list[tuple[Catalog, str | None]] = [*((folder, None) for folder in folders), *buckets]
        for place, link in links:
            latest = None if link is None else place.latest(link, run_name)
            manifests, faults = place.manifests_and_faults() if latest is None else ([latest], {})
            for fault in faults.values():  # the attempt number in the record must not be reused
                if isinstance(fault, OSError):
                    raise fault
            known += manifests
        parent = None if origin is None else _manifest_at(str(origin), folders, buckets)
        of_run = parent if parent is not None and parent.run_name == run_name else None
        return new_attempt(highest_attempt([one for one in known if one.run_name == run_name]), of_run)

    return dist.get_group().from_first("looking for earlier attempts", begun)


def _manifest_at(
    origin: str, folders: Sequence[Catalog], buckets: Sequence[tuple[Catalog, str | None]]
) -> Manifest | None:
    """Return the record of the checkpoint ``origin``; ``None``: not in the folders or buckets, or damaged."""
    try:
        for bucket, _ in buckets:
            root = bucket.place.uri().rstrip("/") + "/"
            if origin.startswith(root) and (there := bucket.manifest_of(origin.removeprefix(root))) is not None:
                return there
        path = Path(origin).resolve()
        for catalog in folders:
            folder = catalog.folder.resolve()
            if path.is_relative_to(folder) and (here := catalog.manifest_of(str(path.relative_to(folder)))) is not None:
                return here
    except CorruptCheckpointError as e:
        log.warning("the record of %s cannot be read: %s", origin, e)
    return None


def _may_replace(state: SavedState, place: Catalog, name: str) -> bool:
    """Return true if autoresume skipped the checkpoint ``name``: the run will save this checkpoint again."""
    if not any(ancestor.passed_over for ancestor in state.lineage.ancestors):
        return False
    try:
        manifest = place.manifest_of(name)
    except CorruptCheckpointError:
        return True
    except OSError:
        if place.place.path_of(name) is None:
            raise
        return True
    except CheckpointError:  # a newer version wrote the record
        return False
    if manifest is None:  # incomplete after a kill; in a folder such a file was renamed
        return place.place.path_of(name) is None
    return may_be_replaced(state.lineage, manifest)

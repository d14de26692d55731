"""The folder to which a manager saves: names, ownership of the checkpoints, and ``latest``."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import final

import xxhash

from composerlite import dist
from composerlite.checkpoint.contents import TrainingState
from composerlite.checkpoint.memory import make_private
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import delete_checkpoint, garbage
from composerlite.checkpoint.place.place import check_name, set_link
from composerlite.checkpoint.record.history import ancestor_in, highest_attempt, new_attempt
from composerlite.checkpoint.record.naming import (
    FIRST_RANK,
    check_template,
    data_file_id,
    format_name_with_dist,
    name_pattern,
    names_ahead,
    names_of_ranks,
)
from composerlite.checkpoint.record.record import Manifest, new_id
from composerlite.checkpoint.save.form import Form
from composerlite.checkpoint.save.options import SaveOptions
from composerlite.errors import CheckpointExistsError, ConfigError, CorruptCheckpointError
from composerlite.storage import make_folder
from composerlite.types import Lineage

_MARK = ".memory-id"
"""Name of the file with the random number of a folder or bucket. :meth:`RunFolder.key` hashes this number."""


@final
class RunFolder:
    """Save folder of a manager. Every rank has a ``RunFolder``.

    All ranks call :meth:`name`, :meth:`key`, :meth:`keep_in_memory` and :meth:`find_disks` together. The other
    methods are not collective: rank 0, or the leader of each disk, changes files.

    Attributes:
        folder: path in the user's notation, with './' if given. :meth:`name` fills in the variables.
        catalog: catalog of the checkpoints. A later change of the working directory does not change the path.
        filename: template of the names of checkpoints.
        latest: template of the name of the link to the newest checkpoint; ``None``: no link.
        form: form of the checkpoints, after :meth:`name`.
        run_name: name of the run; empty before :meth:`name`.
        is_leader: true if this rank begins, commits and deletes checkpoints in the folder on the rank's disk.
    """

    def __init__(self, options: SaveOptions) -> None:
        self._options = options
        self._started_in = Path() if Path(options.names.local_folder).is_absolute() else Path.cwd()
        self._move_to(options.names.local_folder)
        self.filename, self.latest = options.names.filename, options.names.latest
        self.is_leader = False
        self.run_name = ""

    def _move_to(self, folder: str) -> None:
        self.folder = folder
        self.catalog = Catalog(self._started_in / folder)

    # ── before training ──────────────────────────────────────────────────────────────────────────────────────────
    def name(self, state: TrainingState, *, directory: str | None) -> None:
        """Choose the form of the checkpoints, and fill in the names.

        Args:
            state: state of the run.
            directory: name of each checkpoint if checkpoints are directories, in place of the file name.

        Raises:
            ConfigError: checkpoints of this form cannot have the names, or the state cannot be saved.
        """
        self.run_name = state.run_name
        self._move_to(format_name_with_dist(self._options.names.local_folder, state.run_name, **FIRST_RANK))
        try:
            check_name(self.catalog.place, names_of_ranks(self.filename, state)[0])  # must be readable from a record
        except ConfigError as e:
            raise ConfigError(f"save_filename={self.filename!r} in run {state.run_name!r}: {e}") from e
        self.form = form = Form(state)
        form.check(weights_only=self._options.weights_only, ignore_keys=self._options.ignore_keys)
        template = form.template(self.filename)
        if form.kind == "sharded" and directory is not None:
            template = str(Path(template).with_name(check_template(directory, argument="sharded_ckpt_prefix_dir")))
        self.filename = template
        if self.latest is not None:
            self.latest = form.template(self.latest, "save_latest_filename")
            name = names_of_ranks(self.latest, state)[0]
            if template != self.latest and name_pattern(template, state.run_name).fullmatch(name):
                raise ConfigError(
                    f"save_latest_filename={self.latest!r} is also the name of a checkpoint with "
                    f"save_filename={template!r}. Choose another name for the link."
                )

    def key(self, buckets: Sequence[Bucket], *, share: bool) -> str:
        """Return a unique key of the folder, or of the bucket if the folder stages uploads. Collective.

        The key is a hash of a random number in a file, the path of the folder and the URIs of ``buckets``. So a folder
        that was removed and created again, or copied, has another key.

        Args:
            buckets: targets of uploads; needed on rank 0.
            share: copy the random number to the folder of each node that lacks the number, since a node may be lost.
        """
        group, place = dist.get_group(), self.catalog.place
        in_bucket = self._options.names.bucket is not None
        if in_bucket and group.is_first:
            place = buckets[0]
        writes = group.is_first or (share and not in_bucket and dist.get_local_rank() == 0)
        step = "preparing the folder of checkpoints of this run"
        known = group.agree(step, lambda: place.read(_MARK) if writes and place.exists(_MARK) else None)
        number = next((mark for mark in group.gather(known) if mark is not None), group.broadcast(new_id().encode()))
        with group.all_or_none(step):
            if writes and known is None:
                with contextlib.suppress(FileExistsError):  # another rank or another launch was first
                    place.put(_MARK, number, create_only=True)

        def hashed() -> str:
            folder, uris = os.fsencode(self.catalog.folder.resolve()), " ".join(bucket.uri() for bucket in buckets)
            return xxhash.xxh3_64_hexdigest(place.read(_MARK) + folder + uris.encode())

        return group.from_first("identifying the folder in memory", hashed)

    def keep_in_memory(self, state: TrainingState, key: str) -> None:
        """Add ``key``, the :meth:`key` of the run's other folder, to the name of this folder. Collective.

        Also create the folder, accessible to this user only.

        Raises:
            ConfigError: another user owns the folder or may write to the folder.
        """
        self._move_to(f"{self.folder}-{key}")
        make_private(self.catalog.folder, levels=len(Path(state.run_name).parts) + 1)

    def prepare(self, state: TrainingState) -> None:
        """Create the folder, check writes and the name of the link, and store the target bucket. Call on rank 0.

        A file in the folder, the note, stores the target bucket of the run, since another run may have the same name.

        Raises:
            ConfigError: the folder cannot be made or written to, has checkpoints of this run for another bucket, or has
                a file or directory with the name of the link to the newest checkpoint.
        """
        names, place, note = self._options.names, self.catalog.place, self._note(state.run_name)
        try:
            make_folder(self.catalog.folder)
            with tempfile.TemporaryFile(dir=self.catalog.folder):
                pass
            if names.bucket is not None:
                before = place.read(note).decode(errors="replace") if place.exists(note) else names.bucket
                if before != names.bucket and any(one.run_name == state.run_name for one in self.catalog.manifests()):
                    raise ConfigError(
                        f"save_folder={names.folder!r}: {self.folder!r} on this machine has checkpoints of the run "
                        f"{state.run_name!r} that were saved for {before}, not for {names.bucket}. Give this run "
                        f"another run_name or save_staging_folder; or remove {place.uri(note)!r} if they belong to it."
                    )
                place.put(note, names.bucket.encode())
        except OSError as e:
            raise ConfigError(f"save_folder={self.folder!r} cannot be written to: {e}. Choose another folder.") from e
        if self.latest is not None:
            place.check_link(names_of_ranks(self.latest, state)[0])

    def find_disks(self) -> None:
        """Find the ranks with the same folder, make missing folders, and remove files of killed processes. Collective.

        If a disk has data files of a save without the record, a kill interrupted the save or a deletion: the checkpoint
        is deleted on all disks. A checkpoint that the disk of rank 0 lacks is deleted, too, unless that disk has no
        checkpoint of the run.

        Raises:
            ConfigError: ranks write together, and a rank shares no folder with any other rank of the node.
        """
        self.form.find_disks(Path(self.folder))
        disks = self.form.disks
        self.is_leader = dist.get_group().is_first if disks is None else disks.is_folder_leader
        group, place = dist.get_group(), self.catalog.place
        own: list[Manifest] = []
        unnamed: list[str] = []
        with group.all_or_none("finding leftovers of killed processes"):
            if self.is_leader:
                own = [one for one in self.catalog.manifests() if one.run_name == self.run_name]
                place.sweep(timedelta())  # temporary files of killed processes
                unnamed = garbage(place, place.files(), name_pattern(self.filename, self.run_name))
        if disks is not None:
            first = group.broadcast({one.id for one in own})
            partial = set[str | None]().union(*group.gather({data_file_id(path) for path in unnamed}))
            with group.all_or_none("removing checkpoints that are missing on some disks"):
                for one in own:
                    if one.node is not None and (one.id in partial or (first and one.id not in first)):
                        delete_checkpoint(place, one)
        with group.all_or_none("removing leftovers of killed processes"):
            place.delete(unnamed, folders=True)  # last: from these files a later start finds the partial checkpoints

    # ── the link to the newest ───────────────────────────────────────────────────────────────────────────────────
    def catch_up(self, newest: Manifest | None, state: TrainingState) -> None:
        """Point ``latest`` to the newest checkpoint of the run if a kill came between the commit and the link.

        Also makes a missing link, and replaces a broken link, unless the link leads out of the folder. If the newest
        checkpoint has another template, because the run had another ``save_filename``, only a broken link is replaced.
        A broken link is removed if ``newest`` is ``None``. Every leader of a disk calls this method.
        """
        if self.latest is None:
            return
        place, name = self.catalog.place, names_of_ranks(self.latest, state)[0]
        path = self.catalog.folder / name
        leads_to = place.target_of(name) if path.is_symlink() else None
        if leads_to is not None and leads_to.startswith("../"):
            return
        is_broken = leads_to is not None and not path.exists()
        if newest is None:
            if is_broken:
                path.unlink()
            return
        if not place.exists(newest.files[0].path) or (newest.template != self.filename and not is_broken):
            return
        if leads_to is not None and not is_broken:
            target = self.catalog.manifests([leads_to])
            # Keep links of other runs, and links to newer checkpoints. This run may have had another save_filename.
            if not target or target[0].run_name != newest.run_name or target[0].order >= newest.order:
                return
        # With archives, each rank has an archive and a link.
        targets = [file.path for file in newest.files] if newest.form == "archives" else [newest.name]
        links = dict(zip(names_of_ranks(self.latest, state, len(targets)), targets, strict=True))
        for link in reversed(links):  # rank 0 last: after a kill the next start finds an old link of rank 0
            set_link(place, link, links[link])

    # ── other processes, and other runs ──────────────────────────────────────────────────────────────────────────
    def refuse_conflicts(self, state: TrainingState, buckets: Iterable[tuple[Catalog, str]]) -> None:
        """Refuse to start if this run would later overwrite files in the folder or in ``buckets``.

        Args:
            state: state of the run.
            buckets: catalogs of the buckets, each with the template of the names.

        Raises:
            CheckpointExistsError: the run would overwrite a file.
        """
        now = state.timestamp.state_dict()
        for catalog, template in [(self.catalog, self.filename), *buckets]:
            for name in names_ahead(catalog.names(), template, state.run_name, state.timestamp):
                if not may_replace(state, catalog, name):
                    raise CheckpointExistsError(
                        f"save_folder={catalog.place.uri()!r} already holds {name!r}, which this run (now at epoch "
                        f"{now['epoch']}, batch {now['batch']}) would overwrite later. Resume from it with load_path "
                        "or autoresume=True, choose another save_folder, delete it, or pass save_overwrite=True."
                    )

    def _note(self, run_name: str) -> str:
        return f".bucket-{xxhash.xxh3_64_hexdigest(run_name.encode())}"

    def close(self) -> None:
        """Delete the note if the folder is to keep no checkpoint and has none. Call on rank 0, holding the leases."""
        if self._options.keep.none_here and not self.catalog.manifests():
            self.catalog.place.delete([self._note(self.run_name)])


def begin_attempt(places: Sequence[tuple[Catalog, str | None]], run_name: str, *, origin: str | None = None) -> Lineage:
    """Begin an attempt of ``run_name`` without a resume from the newest checkpoint.

    Collective. All ranks return the same lineage. An attempt has a number, and the lineage lists the attempts before.

    Args:
        places: folders and buckets of the savers, each with the name of the link to the latest checkpoint in a bucket,
            or ``None``.
        run_name: name of the run.
        origin: the checkpoint to resume from. If the same run saved the checkpoint, and ``places`` have the record, the
            checkpoints up to ``origin`` belong to the new attempt, too.

    Raises:
        OSError, ObjectStoreError: a record cannot be read, and may have the highest attempt number.
    """

    def begun() -> Lineage:
        known: list[Manifest] = []
        for place, link in places:
            latest = None if link is None else place.latest(link, run_name)
            manifests, faults = place.manifests_and_faults() if latest is None else ([latest], {})
            for fault in faults.values():  # the attempt number in the record must not be reused
                if isinstance(fault, OSError):
                    raise fault
            known += [one for one in manifests if one.run_name == run_name]
        found = () if origin is None else (_manifest_at(place, origin) for place, _ in places)
        parent = next((one for one in found if one is not None and one.run_name == run_name), None)
        return new_attempt(highest_attempt(known), parent)

    return dist.get_group().from_first("finding earlier attempts", begun)


def _manifest_at(catalog: Catalog, origin: str) -> Manifest | None:
    """Return the record of the checkpoint ``origin``; ``None``: not in ``catalog``."""
    is_folder = catalog.place.path_of("") is not None
    root = f"{catalog.folder.resolve()}/" if is_folder else f"{catalog.place.uri().rstrip('/')}/"
    path = str(Path(origin).resolve()) if is_folder else origin
    return catalog.manifest_of(path.removeprefix(root)) if path.startswith(root) else None


def may_replace(state: TrainingState, catalog: Catalog, name: str) -> bool:
    """Return true if autoresume skipped the checkpoint ``name``: the run will save this checkpoint again.

    If autoresume skipped any checkpoint, also true for ``name`` with a damaged record, with an unreadable record in a
    folder, or without a record in a bucket.

    Raises:
        OSError: the record in a bucket cannot be read.
    """
    skipped = [ancestor for ancestor in state.lineage.ancestors if ancestor.passed_over]
    if not skipped:
        return False
    in_bucket = catalog.place.path_of(name) is None
    try:
        manifest = catalog.manifest_of(name)
    except CorruptCheckpointError:
        return True
    except OSError:
        if in_bucket:
            raise
        return True  # a folder lets this user replace a file that this user cannot read
    # Without a record, a checkpoint in a bucket is incomplete after a kill. A file in a folder was renamed.
    return in_bucket if manifest is None else ancestor_in(state.lineage, manifest) in skipped

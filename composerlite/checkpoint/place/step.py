"""The directory of a step in any place: ``train/rank*.pt``, ``model_and_optim/`` and, last of all, ``.metadata.json``.

The record is in ``model_and_optim/.metadata``, and names the files in ``train/``, too. ``.metadata.json`` marks the
step as a checkpoint for OLMo-core. Files of ranks have fixed names, which cannot be switched at one instant, so a save
that replaces a step deletes that one first.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, final

import xxhash

from composerlite.checkpoint.format import MARKER, MODEL, TRAIN
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import record_in
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.checkpoint.place.directory import INDEX, ShardedDirectory, text_of
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.place.place import Place
from composerlite.checkpoint.record.manifest import FileRecord, Manifest
from composerlite.errors import CheckpointExistsError, CorruptCheckpointError, ObjectStoreError
from composerlite.storage import FileDigest, chunk_bytes_for, is_uri, open_store, parse_uri

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_file import TorchImage

__all__ = ["MARKER", "MODEL", "TRAIN", "StepFolder", "step_folder_of"]

log = logging.getLogger(__name__)


@final
class StepFolder:
    """The directory of one step. Used as a context manager, or until :meth:`close`.

    Args:
        place: that it is in; closed with it.
        name: of the directory; empty: the place itself.

    Attributes:
        uri: of the directory.
    """

    def __init__(self, place: Place, name: str) -> None:
        self.uri = place.uri(name)
        self._place = place
        self._name = name
        self._written: list[str] = []

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _path(self, name: str) -> str:
        return "/".join(part for part in (self._name, name) if part)

    def has(self, name: str) -> bool:
        """Return true if there is the file ``name``."""
        return self._place.exists(self._path(name))

    def names(self, folder: str) -> list[str]:
        """Return the names of the files and folders in ``folder`` of the step."""
        return self._place.names(self._path(folder))

    def read(self, name: str) -> bytes:
        """Return the bytes of the small file ``name``; FileNotFoundError."""
        return self._place.read(self._path(name))

    @contextlib.contextmanager
    def opened(self, name: str, digest: FileDigest | None = None) -> Generator[Path]:
        """Provide the file ``name`` on this machine, verified by ``digest``; FileNotFoundError."""
        with self._place.lent(self._path(name), digest) as path:
            yield path

    def record(self) -> Manifest | None:
        """Return the record of the step; ``None`` if another program wrote it, or there is no model.

        Raises:
            CorruptCheckpointError: it is damaged.
        """
        found = record_in(self._place, self._path(f"{MODEL}/{INDEX}"))
        return found if found is not None and found.form == "step" else None

    def model(self, *, bare: bool = False) -> ShardedDirectory:
        """Return the directory of the model and the optimizer; ``bare``: this directory is that of a model alone."""
        if bare:
            return ShardedDirectory(self._place.inside(""), self._name)
        return ShardedDirectory(self._place.inside(""), self._path(MODEL))

    def steps(self) -> list[str]:
        """Return the names of the directories in this one that have a file ``.metadata.json``."""
        every = self.names("")
        return [name for name, is_one in zip(every, self._place.each(self._is_step, every), strict=True) if is_one]

    def _is_step(self, name: str) -> bool:
        return self.step(name).has(MARKER)

    def step(self, name: str) -> StepFolder:
        """Return the directory ``name`` in this one, until this one is closed."""
        return StepFolder(self._place.inside(self._name), name)

    def is_checkpoint(self) -> bool:
        """Return true if there is all that a checkpoint has, or that of a model alone."""
        return self.has(INDEX) or all(self.has(name) for name in (MARKER, f"{MODEL}/{INDEX}", f"{TRAIN}/rank0.pt"))

    def version(self) -> str:
        """Digest of this checkpoint: equal on every rank, and another once the checkpoint is replaced."""
        digest = xxhash.xxh3_128()
        for name in (MARKER, f"{MODEL}/{INDEX}", INDEX):
            with contextlib.suppress(FileNotFoundError):
                digest.update(self.read(name))
        return digest.hexdigest()

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def check_free(self, *, overwrite: bool) -> None:
        """See that a checkpoint may be saved here. Files of a save that did not end are no checkpoint.

        Raises:
            CheckpointExistsError: there is one, and ``overwrite`` is false.
            ConfigError: a checkpoint cannot have this name.
        """
        if self._name:  # else a bucket
            self._place.check_name(self._name)
        if not overwrite and (self.has(MARKER) or self.has(INDEX) or self._has_model_alone()):
            raise CheckpointExistsError(
                f"{self.uri!r} holds a checkpoint. Give another directory, delete it, or set save_overwrite=True."
            )

    def _has_model_alone(self) -> bool:
        """Return true if there is a model that was saved alone, and not by a save of a step that did not end."""
        with contextlib.suppress(CorruptCheckpointError):  # a damaged one says nothing
            found = record_in(self._place, self._path(f"{MODEL}/{INDEX}"))
            return found is not None and found.form != "step"
        return False

    def uncommit(self) -> None:
        """Delete the step that is there, in one process for all, and what a killed save has left of its model."""
        self._place.delete(self._path(MARKER), durable=True)
        old: Manifest | None = None
        with contextlib.suppress(CorruptCheckpointError):  # nothing says which files it has
            old = record_in(self._place, self._path(f"{MODEL}/{INDEX}"))
        if old is not None and old.form == "step":
            delete_checkpoint(self._place, replace(old, name=self._name))
        self.model().sweep()

    def write(self, name: str, image: TorchImage) -> FileDigest:
        """Make a durable file ``name`` of a rank of ``image``, on any rank, in place of that of a killed save."""
        path, size = self._path(name), image.size_bytes
        self._place.delete(path)
        self._written.append(path)
        return self._place.write(path, size, image.write, chunk_bytes=chunk_bytes_for(size))

    def record_of(self, train: tuple[FileRecord, ...], world_size: int, *, ephemeral: bool) -> Manifest:
        """Return the record of the step, with the files ``train`` of the ranks, by their paths in the step."""
        number = self._name.rpartition("step")[2]
        return Manifest(
            name=self._name or "step",
            kind="step",
            form="step",
            template="step{step}",
            run_name="",
            timestamp={"batch": int(number) if number.isdecimal() else 0},
            files=tuple(FileRecord.of(self._path(file.path), file.digest) for file in train),
            world_size=world_size,
            ephemeral=ephemeral,
        )

    def mark(self, marker: bytes) -> None:
        """Mark the step as a checkpoint, once the model is committed."""
        self._place.put(self._path(MARKER), marker)
        self._written = []

    def abandon(self) -> None:
        """Remove the files that this process wrote, after an error, when no rank writes any more. Raises nothing."""
        written, self._written = self._written, []
        try:
            self._place.delete_all(written)
        except (OSError, ObjectStoreError) as e:  # the save's own error is the one that counts
            log.warning("%s: files of a save that failed are left behind: %s", self.uri, e)

    def put(self, name: str, contents: bytes, *, overwrite: bool) -> str:
        """Write ``contents`` atomically to the file ``name``; return its path. FileExistsError, ConfigError."""
        path = self._path(name)
        self._place.check_name(path)
        try:
            self._place.put(path, contents, create_only=not overwrite)
        except FileExistsError as e:
            raise FileExistsError(
                f"there is a file {self._place.uri(path)!r} already. Give another name, or set save_overwrite=True."
            ) from e
        return self._place.uri(path)

    def close(self) -> None:
        """Close connections. May be called twice."""
        self._place.close()

    def __enter__(self) -> StepFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def step_folder_of(place: str | os.PathLike[str]) -> StepFolder:
    """Return the directory at the path or URI ``place``.

    Raises:
        ConfigError: it is no path, or the URI names no store.
    """
    text = text_of(place)
    if is_uri(text):
        above, _, name = parse_uri(text)[2].strip("/").rpartition("/")
        return StepFolder(Bucket.of(open_store(text), above), name)
    path = Path(os.path.realpath(parse_uri(text)[2]))
    return StepFolder(Folder(path.parent), path.name)

"""The directory of a step in any place: ``train/rank*.pt``, ``model_and_optim/`` and, last of all, ``.metadata.json``.

On a disk a save goes to ``.<name>.saving-<id>`` beside the directory and gets its name as a whole. In a bucket its
objects come under their own names, and are a checkpoint when ``.metadata.json``, the marker, is there. Where they
replace a checkpoint, files of ranks come under names with a suffix, ``.metadata.json.next`` holds the new marker, and
the index of the model decides: from the moment that it is another one than ``.metadata.json.next`` replaces, the new
checkpoint is there. Its files get their names after that; a reader, and the next save, find them under either.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
from collections.abc import Generator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, final

import xxhash

from composerlite.checkpoint.format import SUFFIX
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import (
    MARKER,
    MODEL,
    OF_RANKS,
    SAVING,
    STEP_MODEL,
    TRAIN,
    remove_manifest,
    write_manifest,
)
from composerlite.checkpoint.place.directory import INDEX, ShardedDirectory, text_of
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.place.place import Place, SaveHandle
from composerlite.checkpoint.record.manifest import CheckpointMetadata, record_path
from composerlite.errors import CheckpointExistsError, CorruptCheckpointError, ObjectStoreError
from composerlite.storage import FileDigest, chunk_bytes_for, is_uri, open_store, parse_uri

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_file import TorchImage

__all__ = ["MARKER", "MODEL", "NEXT", "TRAIN", "StepFolder", "Successor", "step_folder_of"]

log = logging.getLogger(__name__)
NEXT = f"{MARKER}.next"
"""The file of a step that tells what takes its place."""
_OURS = re.compile(
    rf"{MODEL}/(?:{re.escape(INDEX)}|[^/]*{re.escape(SUFFIX)})|{OF_RANKS.pattern}|{re.escape(NEXT)}"
    rf"|{re.escape(record_path(MODEL))}\..*"
)
"""What a save writes that makes no step by itself; all else in the directory is the user's."""


class Successor(NamedTuple):
    """A checkpoint that is about to take the place of another in a bucket, or has.

    Attributes:
        replaces: the digest of the index of the model that it replaces.
        suffix: of the names of its files of ranks, until they have their own.
        marker: it, as it will be.
    """

    replaces: str
    suffix: str
    marker: str

    @classmethod
    def from_json(cls, data: bytes, source: str) -> Successor:
        """Parse ``data``, the content of ``source``. Raises CorruptCheckpointError."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError) as e:
            raise CorruptCheckpointError(f"{source!r} is damaged: {e}") from e

    def staged(self, name: str) -> str:
        """Return the temporary name of a rank's file ``name`` before the commit."""
        return _with_suffix(name, self.suffix)

    @property
    def metadata(self) -> CheckpointMetadata:
        """Contents of the marker."""
        return CheckpointMetadata.from_json(self.marker.encode(), NEXT)


@final
class StepFolder:
    """The directory of one step. Used as a context manager, or until :meth:`close`.

    Args:
        place: that it is in; closed with it.
        name: of it; empty: the place itself.

    Attributes:
        uri: where it is.
    """

    def __init__(self, place: Place, name: str) -> None:
        self.uri = place.uri(name)
        self._place = place
        self._name = name
        self._handle: SaveHandle | None = None
        self._has_claimed = self._overwrite = False

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _path(self, name: str) -> str:
        """Return the path to read the file ``name`` from."""
        return "/".join(part for part in (self._shown, name) if part)

    @property
    def _shown(self) -> str:
        path = self._place.path_of(self._name)
        if path is None or path.exists():
            return self._name
        return next(self._place.between_names(self._name), self._name)

    def has(self, name: str) -> bool:
        """Return true if there is the file ``name``."""
        return self._place.exists(self._path(name))

    def names(self, folder: str) -> list[str]:
        """Return the names of what is in ``folder`` of it."""
        if folder == TRAIN and (new := self._next()) is not None:
            return [PurePosixPath(record.path).name for record in new.metadata.train]
        return self._place.names(self._path(folder))

    def read(self, name: str) -> bytes:
        """Return the bytes of the small file ``name``; FileNotFoundError."""
        if name == MARKER and (new := self._next()) is not None:
            return new.marker.encode()
        return self._place.read(self._path(name))

    @contextlib.contextmanager
    def opened(self, name: str) -> Generator[Path]:
        """Return the file ``name``, on this machine; FileNotFoundError."""
        with contextlib.ExitStack() as stack:
            path: Path | None = None
            if (new := self._next()) is not None:
                with contextlib.suppress(FileNotFoundError):  # it has its own name by now
                    path = stack.enter_context(self._place.lent(self._path(new.staged(name))))
            yield path or stack.enter_context(self._place.lent(self._path(name)))

    def model(self, handle: SaveHandle | None = None, *, bare: bool = False) -> ShardedDirectory:
        """Return the directory of the model and the optimizer: in the checkpoint, or in a save.

        Args:
            handle: of the save.
            bare: whether this directory is that of a model and its optimizer alone.
        """
        if bare:
            return ShardedDirectory(self._place.inside(""), self._shown)
        model = ShardedDirectory(self._place.inside(self._shown if handle is None else self._staging(handle)), MODEL)
        model.template = STEP_MODEL
        return model

    def steps(self) -> list[str]:
        """Return the names of the directories in this one that have a file ``.metadata.json``."""
        names = self.names("")
        hidden = (match[1] for name in names if (match := SAVING.fullmatch(name)) and match[2] == "-old")
        every = sorted({*names, *hidden})
        return [name for name, is_one in zip(every, self._place.each(self._is_step, every), strict=True) if is_one]

    def _is_step(self, name: str) -> bool:
        return self.step(name).has(MARKER)

    def step(self, name: str) -> StepFolder:
        """Return the directory ``name`` in this one, until this one is closed."""
        return StepFolder(self._place.inside(self._shown), name)

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

    def _next(self) -> Successor | None:
        """Return the checkpoint that has taken the place of what the marker says, if its files have yet to follow."""
        new = self._announced()
        return None if new is None or new.replaces == self._index_digest() else new

    def _announced(self) -> Successor | None:
        try:
            data = self._place.read(self._path(NEXT))
        except FileNotFoundError:
            return None
        return Successor.from_json(data, self._place.uri(self._path(NEXT)))

    def _index_digest(self) -> str:
        try:
            return xxhash.xxh3_128_hexdigest(self._place.read(self._path(f"{MODEL}/{INDEX}")))
        except FileNotFoundError:
            return ""

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def check_free(self, *, overwrite: bool) -> bool:
        """See that a checkpoint may be saved here; return whether one is there. What did not end is nothing.

        Raises:
            CheckpointExistsError: there is one, and ``overwrite`` is false.
            ConfigError: a checkpoint cannot have this name.
        """
        if self._name:  # else a bucket
            self._place.check_name(self._name)
        is_there = self.has(MARKER) or self.has(INDEX) or self._has_model_alone()
        if is_there and not overwrite:
            raise CheckpointExistsError(
                f"{self.uri!r} holds a checkpoint. Give another directory, delete it, or set save_overwrite=True."
            )
        return is_there

    def _has_model_alone(self) -> bool:
        """Return true if there is a model that was saved alone, and not by a save of a step that did not end."""
        with contextlib.suppress(CorruptCheckpointError):  # a damaged one says nothing
            manifest = Catalog(self._place.inside(self._shown)).manifest_of(MODEL)
            return manifest is not None and manifest.template != STEP_MODEL
        return False

    def claim(self, *, overwrite: bool) -> SaveHandle:
        """Begin a save, in one process for all: where all write to. Raises as :meth:`check_free` does."""
        self.check_free(overwrite=overwrite)
        self._sweep()
        check = functools.partial(self.check_free, overwrite=overwrite)
        handle = self._handle = self._place.begin(self._name, check, overwrite=False)
        self._overwrite, self._has_claimed = overwrite, True
        try:
            if handle.suffix:
                self._settle()
            elif self._staging(handle) == self._name:  # what a save has left that did not end
                for path in self._place.files(self._name):
                    inside = path.removeprefix(f"{self._name}/")
                    if inside in (MARKER, record_path(MODEL)):
                        remove_manifest(self._place, path)
                    elif _OURS.fullmatch(inside):
                        self._place.delete(path)
        except BaseException:
            self.abandon()
            raise
        return handle

    def _sweep(self) -> None:
        """Remove leftovers of killed saves of other steps, and of killed writers of files beside them."""
        Catalog(self._place).tidy()
        if (folder := self._place.path_of("")) is not None:
            for step in {folder / self._name, *folder.glob("step*/")}:
                Catalog(step).tidy()

    def _staging(self, handle: SaveHandle) -> str:
        return str(PurePosixPath(self._name).with_name(handle.place))

    def write(self, handle: SaveHandle, name: str, image: TorchImage) -> FileDigest:
        """Make a durable file ``name`` of a rank of ``image``, on any rank."""
        self._handle = handle
        path = f"{self._staging(handle)}/{_with_suffix(name, handle.suffix)}"
        size = image.size_bytes
        return self._place.write(path, size, image.write, chunk_bytes=chunk_bytes_for(size))

    def prepare(self, handle: SaveHandle, marker: bytes) -> None:
        """Write down which checkpoint will replace the one there, before the model is committed."""
        if handle.suffix:
            announced = Successor(self._index_digest(), handle.suffix, marker.decode())
            self._place.put(self._path(NEXT), json.dumps(announced._asdict()).encode())

    def commit(self, handle: SaveHandle, marker: bytes) -> None:
        """Make the checkpoint exist whose model is committed, in the process that claimed."""
        if handle.suffix:
            try:
                self._settle()
            except (OSError, ObjectStoreError) as e:  # it is there: see the top of the page
                log.warning("%s: could not rename its files, which the next save will do: %s", self.uri, e)
        else:
            parts = self._place.parts(self._name, handle, MARKER, marker)
            self.check_free(overwrite=self._overwrite)  # another process may have saved here meanwhile
            with self._place.commit(self._name, parts, overwrite=self._overwrite, record=None) as commit:
                commit.commit()
        self._handle, self._has_claimed = None, False
        self._place.release(self._name)

    def _settle(self) -> None:
        """Give the files of a checkpoint that has taken the place of another their names, or forget one that has not.

        Each is there under the other name until all have their own.
        """
        new = self._announced()
        if new is None:
            return
        records = new.metadata.train
        if self._next() is not None:
            before = {f"{TRAIN}/{name}" for name in self._place.names(self._path(TRAIN))}
            self._place.each(lambda record: self._give_name(new.staged(record.path), record.path), records)
            write_manifest(self._place, self._path(MARKER), new.marker.encode())
            kept = {name for record in records for name in (record.path, new.staged(record.path))}
            for name in before - kept:
                self._place.delete(self._path(name))
        self._place.delete(self._path(NEXT))
        for record in records:
            self._place.delete(self._path(new.staged(record.path)))

    def _give_name(self, staged: str, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._place.lent(self._path(staged)) as path:
            self._place.send(path, self._path(name))

    def abandon(self) -> None:
        """Remove the files of this process, after an error, when no rank writes any more. Raises nothing."""
        handle, self._handle = self._handle, None
        if handle is None or (handle.suffix and not self._has_claimed):
            return  # the process that claimed removes the files of all ranks
        try:
            if handle.suffix:
                self._settle()
                for name in self._place.names(self._path(TRAIN)):
                    if PurePosixPath(name).stem.endswith(handle.suffix):
                        self._place.delete(self._path(f"{TRAIN}/{name}"))
            self._place.abandon(self._name, handle)
        except (OSError, ObjectStoreError, CorruptCheckpointError) as e:  # the save's own error is the one that counts
            log.warning("%s: the next save settles what is there: %s", self.uri, e)
            self._place.release(self._name)

    def put(self, name: str, contents: bytes, *, overwrite: bool) -> str:
        """Write ``contents`` atomically to the file ``name``; return its path. FileExistsError, ConfigError."""
        path = str(PurePosixPath(self._name, name))
        self._place.check_name(path)
        Catalog(self._place.inside(str(PurePosixPath(path).parent))).tidy()
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


def _with_suffix(name: str, suffix: str) -> str:
    path = PurePosixPath(name)
    return str(path.with_name(f"{path.stem}{suffix}{path.suffix}"))

"""The directory of one step: ``train/rank*.pt``, ``model_and_optim/`` and, last of all, ``.metadata.json``.

On a disk a save goes to ``.<name>.saving-<id>`` beside the directory and gets its name as a whole. In an object store
its objects come under their own names, and are a checkpoint when ``.metadata.json`` is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar, final

import xxhash

from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import MANIFESTS, MARKER, SAVING, FolderCommit, between_names
from composerlite.checkpoint.place.directory import (
    INDEX,
    CheckpointFolder,
    Claim,
    LocalFolder,
    RemoteFolder,
)
from composerlite.checkpoint.place.remote import RemoteCatalog
from composerlite.errors import CheckpointExistsError, ConfigError, ObjectStoreError
from composerlite.storage import (
    FileDigest,
    ObjectStore,
    StreamWriter,
    Transfer,
    atomic_write,
    check_name,
    chunk_bytes_for,
    fsync_folder,
    is_uri,
    make_folder,
    open_store,
    parse_uri,
)

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_file import TorchImage

__all__ = ["MARKER", "MODEL", "TRAIN", "StepFolder", "step_folder_of"]

log = logging.getLogger(__name__)
F = TypeVar("F", bound="StepFolder")
MODEL = "model_and_optim"
TRAIN = "train"
_OURS = (TRAIN, MODEL, MANIFESTS, MARKER)
_SEEN_SECONDS = 20.0


class StepFolder(ABC):
    """The directory of one step. Used as a context manager, or until :meth:`close`."""

    uri: str
    """Where it is."""

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is the file ``name``."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """The names of the files in ``folder`` of it."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The bytes of the file ``name``; FileNotFoundError."""

    @abstractmethod
    def opened(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """The file ``name``, on this machine; FileNotFoundError."""

    @abstractmethod
    def model(self, place: str | None = None, *, bare: bool = False) -> CheckpointFolder:
        """The directory of the model and the optimizer: in the checkpoint, or in the save at ``place``.

        Args:
            place: where a save goes to.
            bare: whether this directory is that of a model and its optimizer alone.
        """

    @abstractmethod
    def steps(self) -> list[str]:
        """The names of the directories in this one that have a file ``.metadata.json``."""

    @abstractmethod
    def step(self: F, name: str) -> F:
        """The directory ``name`` in this one, until this one is closed."""

    def is_checkpoint(self) -> bool:
        """Whether there is all that a checkpoint has, or that of a model alone."""
        return self.has(INDEX) or all(self.has(name) for name in (MARKER, f"{MODEL}/{INDEX}", f"{TRAIN}/rank0.pt"))

    def version(self) -> str:
        """Return what tells this checkpoint from another in its place; the same wherever it is seen."""
        digest = xxhash.xxh3_128()
        for name in (MARKER, f"{MODEL}/{INDEX}", INDEX):
            with contextlib.suppress(FileNotFoundError):
                digest.update(self.read(name))
        return digest.hexdigest()

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def check_free(self, *, overwrite: bool) -> None:
        """See that a checkpoint may be saved here. What a save has left that did not end is nothing.

        Raises:
            CheckpointExistsError: there is one, and ``overwrite`` is false.
        """
        if not overwrite and (self.has(MARKER) or self.has(INDEX)):
            raise CheckpointExistsError(
                f"{self.uri!r} holds a checkpoint. Give another directory, delete it, or set save_overwrite=True."
            )

    @abstractmethod
    def claim(self, *, overwrite: bool) -> str:
        """Begin a save, in one process for all: the place that all write to. Raises as :meth:`check_free` does."""

    @abstractmethod
    def write(self, place: str, name: str, image: TorchImage) -> FileDigest:
        """Make a durable file of ``image``, on any rank."""

    @abstractmethod
    def commit(self, place: str, marker: bytes) -> None:
        """Make the checkpoint exist, in the process that claimed."""

    @abstractmethod
    def abandon(self) -> None:
        """After an error, when no rank writes any more: remove what this process has written. Raises nothing."""

    @abstractmethod
    def put(self, name: str, contents: bytes, *, overwrite: bool) -> str:
        """Make ``contents`` the file ``name``, whole or not at all; where it is. FileExistsError."""

    def close(self) -> None:
        """Let go of connections; twice is fine."""

    def __enter__(self: F) -> F:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def step_folder_of(place: str | os.PathLike[str]) -> StepFolder:
    """The directory at the path or URI ``place``.

    Raises:
        ConfigError: the URI names no store.
    """
    text = os.fspath(place)
    if is_uri(text):
        return _RemoteStep(open_store(text), parse_uri(text)[2])
    return _LocalStep(Path(parse_uri(text)[2]))


def _write_image(path: Path, image: TorchImage) -> FileDigest:
    path.open("xb").close()
    with StreamWriter(path, image.size_bytes, chunk_bytes=chunk_bytes_for(image.size_bytes)) as sink:
        image.write(sink)
        return sink.finish()


# ── on a disk ────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class _LocalStep(StepFolder):
    def __init__(self, path: Path) -> None:
        self._path = Path(os.path.realpath(path))
        self.uri = str(self._path)
        self._folder: LocalFolder | None = None
        self._claim: Claim | None = None
        self._overwrite = False

    @property
    def _shown(self) -> Path:
        """Where it is to be read."""
        return self._path if self._path.exists() else next(between_names(self._path), self._path)

    def has(self, name: str) -> bool:
        return (self._shown / name).is_file()

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(path.name for path in (self._shown / folder).iterdir())
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes:
        return (self._shown / name).read_bytes()

    @contextlib.contextmanager
    def opened(self, name: str) -> Generator[Path]:
        yield self._shown / name

    def model(self, place: str | None = None, *, bare: bool = False) -> CheckpointFolder:
        return LocalFolder(self._shown if bare else Path(place or self._shown) / MODEL)

    def steps(self) -> list[str]:
        hidden = (match[1] for name in self.names(".") if (match := SAVING.fullmatch(name)) and match[2] == "-old")
        return sorted({name for name in (*self.names("."), *hidden) if self.step(name).has(MARKER)})

    def step(self, name: str) -> _LocalStep:
        return _LocalStep(self._shown / name)

    def claim(self, *, overwrite: bool) -> str:
        self.check_free(overwrite=overwrite)
        self._overwrite = overwrite
        self._sweep()
        self._folder = LocalFolder(self._path)
        self._claim = self._folder.claim(overwrite=True)  # what is there was looked at above
        place = self._path.with_name(self._claim.place)
        make_folder(place / TRAIN)
        return str(place)

    def _sweep(self) -> None:
        """Remove what saves of other steps have left whose processes are dead, and writers of files beside them."""
        Catalog(self._path.parent).tidy()
        for step in {self._path, *self._path.parent.glob("step*/")}:
            Catalog(step).tidy()

    def write(self, place: str, name: str, image: TorchImage) -> FileDigest:
        path = Path(place) / name
        deadline = time.monotonic() + _SEEN_SECONDS
        while not path.parent.is_dir():  # made on another machine: a network file system shows it some time later
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{str(path.parent)!r} is not seen here, and the first rank made it {_SEEN_SECONDS:g} s ago. Want "
                    "a directory on a disk that all machines share, or a URI."
                )
            time.sleep(0.05)
        return _write_image(path, image)

    def commit(self, place: str, marker: bytes) -> None:
        staged = Path(place)
        with atomic_write(staged / MARKER) as file:
            file.write(marker)
        fsync_folder(staged / TRAIN)
        self.check_free(overwrite=self._overwrite)  # another process may have saved here meanwhile
        with FolderCommit({self._path: staged}, None, overwrite=self._overwrite) as commit:
            commit.commit()
        self.abandon()

    def abandon(self) -> None:
        if self._folder is not None and self._claim is not None:
            self._folder.abandon(self._claim)
        self._folder = self._claim = None

    def put(self, name: str, contents: bytes, *, overwrite: bool) -> str:
        path = self._path / name
        if not overwrite and path.exists():
            raise _exists(str(path))
        make_folder(path.parent)
        Catalog(path.parent).tidy()
        with atomic_write(path) as file:
            file.write(contents)
        return str(path)


def _exists(place: str) -> FileExistsError:
    return FileExistsError(f"there is a file {place!r} already. Give another name, or set save_overwrite=True.")


# ── in an object store ───────────────────────────────────────────────────────────────────────────────────────────────
@final
class _RemoteStep(StepFolder):
    def __init__(self, store: ObjectStore, root: str) -> None:
        self._root = root.strip("/")
        self.uri = store.get_uri(self._root)
        self._store = store
        self._transfer = Transfer(store)
        above, _, self._name = self._root.rpartition("/")
        self._catalog = RemoteCatalog(self._transfer, above)
        self._written: list[str] = []

    def _full(self, name: str) -> str:
        return check_name(f"{self._root}/{name}" if self._root else name)

    def has(self, name: str) -> bool:
        return self._transfer.exists(self._full(name))

    def names(self, folder: str) -> list[str]:
        prefix = f"{self._full(folder)}/"
        return sorted(info.name.removeprefix(prefix) for info in self._transfer.list(prefix))

    def read(self, name: str) -> bytes:
        return self._transfer.read_all(self._full(name))

    @contextlib.contextmanager
    def opened(self, name: str) -> Generator[Path]:
        with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
            path = Path(folder) / PurePosixPath(name).name
            self._transfer.download(self._full(name), path)
            yield path

    def model(self, place: str | None = None, *, bare: bool = False) -> CheckpointFolder:
        return RemoteFolder(self._store, self._root if bare else self._full(MODEL))

    def steps(self) -> list[str]:
        prefix = f"{self._root}/" if self._root else ""
        parts = [info.name.removeprefix(prefix).split("/") for info in self._transfer.list(prefix)]
        return sorted(name for name, *rest in parts if rest == [MARKER])

    def step(self, name: str) -> _RemoteStep:
        return _RemoteStep(self._store, f"{self._root}/{name}")

    def claim(self, *, overwrite: bool) -> str:
        self._catalog.claim(self._name)  # decided, before anything of it goes
        try:
            self.check_free(overwrite=overwrite)
        except BaseException:
            self._catalog.end(self._name)
            raise
        self._transfer.delete(self._full(MARKER))  # it is no checkpoint before anything of it goes
        prefix = f"{self._root}/"
        for info in self._transfer.list(prefix):
            if info.name.removeprefix(prefix).partition("/")[0] in _OURS:
                self._transfer.delete(info.name)
        return self.uri

    def write(self, place: str, name: str, image: TorchImage) -> FileDigest:
        with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
            path = Path(folder) / PurePosixPath(name).name
            digest = _write_image(path, image)
            self._written.append(self._full(name))
            self._transfer.upload(self._full(name), path)
        return digest

    def commit(self, place: str, marker: bytes) -> None:
        try:
            self._transfer.put_bytes(self._full(MARKER), marker, create_only=True)
        except FileExistsError as e:
            raise CheckpointExistsError(f"{self.uri!r} was saved by another process meanwhile.") from e
        self._written = []
        self._catalog.end(self._name)

    def abandon(self) -> None:
        written, self._written = self._written, []
        for name in written:
            try:
                self._transfer.delete(name)
            except Exception as e:  # noqa: BLE001 - the save's own error is the one that counts
                log.warning("%s cannot be removed and is left behind: %s", self._store.get_uri(name), e)
        with contextlib.suppress(ObjectStoreError, OSError):  # the next one waits a little then
            self._catalog.end(self._name)

    def put(self, name: str, contents: bytes, *, overwrite: bool) -> str:
        full = self._full(name)
        try:
            self._transfer.put_bytes(full, contents, create_only=not overwrite)
        except FileExistsError as e:
            raise _exists(self._store.get_uri(full)) from e
        return self._store.get_uri(full)

    def close(self) -> None:
        self._transfer.close()
        self._store.close()

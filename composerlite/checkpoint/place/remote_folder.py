"""The directory of a sharded checkpoint in an object store."""

from __future__ import annotations

import contextlib
import logging
import secrets
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, final

from composerlite.checkpoint.place.bucket import VerifiedObject
from composerlite.checkpoint.place.checkpoint_folder import (
    INDEX,
    SUFFIX,
    CheckpointFolder,
    Claim,
    checked_record,
    write_file,
)
from composerlite.checkpoint.place.remote import RemoteCatalog
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.errors import CheckpointExistsError, ConfigError
from composerlite.storage import FileDigest, ObjectStore, Sink, Transfer, check_name, verify_file

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_reader import ByteSource

__all__ = ["RemoteFolder"]

log = logging.getLogger(__name__)
_MOST_INDEX_BYTES = 1 << 30


@final
class RemoteFolder(CheckpointFolder):
    """The objects below ``root/`` in ``store``.

    There are no renames: data come under names that are free, then ``.metadata``, then the commit record; what was
    there before goes at last.

    Args:
        store: keeps the objects.
        root: a name in it, not empty.
        threads: that move bytes at the same time.
        closes: whether the store is closed with this.
    """

    def __init__(self, store: ObjectStore, root: str, *, threads: int = 8, closes: bool = False) -> None:
        self._root = root.strip("/")
        if not self._root:
            raise ConfigError(f"{store.get_uri('x')[:-1]!r} is a bucket: give a directory in it, as 'run/step100'.")
        self.name = PurePosixPath(self._root).name
        self._store = store
        self._closes = closes
        self._transfer = Transfer(store, threads=threads)
        self._catalog = RemoteCatalog(self._transfer, self._root.removesuffix(self.name))
        self._written: list[str] = []
        self._before: list[str] = []
        self._index_before: bytes | None = None

    @property
    def uri(self) -> str:
        return self._store.get_uri(self._root)

    def identity(self) -> str:
        return self.uri

    def names(self) -> list[str]:
        prefix = f"{self._root}/"
        return [info.name.removeprefix(prefix) for info in self._transfer.list(prefix)]

    def _full(self, name: str) -> str:
        return check_name(f"{self._root}/{name}")

    def manifest(self) -> Manifest | None:
        manifest = self._catalog.manifest_of(self.name)
        return None if manifest is None else checked_record(manifest, self.name, self.uri)

    def begun(self) -> Iterable[Manifest]:
        return self._catalog.begun(self.name)

    def index(self) -> bytes:
        return self._transfer.read_all(self._full(INDEX), most_bytes=_MOST_INDEX_BYTES)

    @contextlib.contextmanager
    def opened(self, name: str, digest: FileDigest | None, *, threads: int) -> Generator[ByteSource]:
        yield VerifiedObject(self._transfer, self._full(name), digest)

    def fetch(self, name: str, digest: FileDigest | None, target: Path) -> None:
        size = None if digest is None else digest.size_bytes
        check = None if digest is None else lambda path: verify_file(path, digest)
        self._transfer.download(self._full(name), target, overwrite=True, size_bytes=size, check=check)

    def claim(self, *, overwrite: bool) -> Claim:
        self._catalog.claim(self.name)
        try:
            self._before = self.check_free(overwrite=overwrite)
        except BaseException:
            self._catalog.end(self.name)
            raise
        return Claim("", f"_{secrets.token_hex(4)}" if self._before else "")

    def write(self, claim: Claim, name: str, most_bytes: int, fill: Callable[[Sink], object]) -> FileDigest:
        with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
            path = Path(folder) / name
            digest = write_file(path, most_bytes, fill)
            self._written.append(self._full(name))
            self._transfer.upload(self._full(name), path)
        return digest

    def commit(self, claim: Claim, index: bytes, files: Mapping[str, FileDigest], facts: Mapping[str, object]) -> None:
        manifest = self._manifest_of(index, files, facts)
        before: bytes | None = None
        if INDEX in self._before:
            before, there = self.described()
            if there is not None:
                self._catalog.announce(manifest, there)
        self._index_before = before
        try:
            self._transfer.put_bytes(self._full(INDEX), index, create_only=before is None)
        except FileExistsError as e:
            raise CheckpointExistsError(f"{self.uri!r} was saved by another process meanwhile.") from e
        self._written += [] if before is not None else [self._full(INDEX)]
        self._catalog.commit(manifest)
        self._written, self._index_before = [], None
        for name in self._before:
            if name.endswith(SUFFIX) and name not in files:
                self._transfer.delete(self._full(name))
        self._catalog.end(self.name)

    def abandon(self, claim: Claim) -> None:
        index, written = self._index_before, self._written
        self._index_before, self._written = None, []
        if index is not None:
            self._tidy(self._full(INDEX), lambda: self._transfer.put_bytes(self._full(INDEX), index))
        for name in reversed(written):  # the index first
            self._tidy(name, lambda name=name: self._transfer.delete(name))
        self._tidy(self._root, lambda: self._catalog.withdraw(self.name))
        self._tidy(self._root, lambda: self._catalog.end(self.name))

    def _tidy(self, name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as e:  # noqa: BLE001 - the save's own error is the one that counts
            log.warning("%s cannot be put back as it was: %s", self._store.get_uri(name), e)

    def close(self) -> None:
        self._transfer.close()
        if self._closes:
            self._store.close()

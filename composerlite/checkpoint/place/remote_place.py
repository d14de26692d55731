"""The checkpoints that a bucket has below a prefix."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import final

import xxhash

from composerlite.checkpoint.place.places import Leftover, Place, StoredFile
from composerlite.checkpoint.place.remote import LINK_SUFFIX
from composerlite.checkpoint.record.manifest import FileRecord
from composerlite.errors import CorruptCheckpointError
from composerlite.storage import ObjectStore, Transfer, check_name, make_folder, verify_file

__all__ = ["RemotePlace"]

_READERS = 16
_MOST_SMALL_BYTES = 1 << 30
_STEP_BYTES = 64 << 20
"""What is in memory while an object is verified."""


@final
class RemotePlace(Place):
    """The checkpoints below ``root`` in ``store``, which is closed with this.

    Args:
        store: keeps the objects.
        root: what stands before the names of checkpoints; may be empty.
    """

    where = "remote"

    def __init__(self, store: ObjectStore, root: str) -> None:
        self.store = store
        self.root = root.strip("/")
        self.transfer = Transfer(store)

    def at(self, root: str) -> RemotePlace:
        """What the same bucket has below another prefix, until this one is closed."""
        other = copy.copy(self)
        other.root = root.strip("/")
        return other

    def uri(self, path: str = "") -> str:
        if path or self.root:
            return self.store.get_uri(self.name_of(path) if path else self.root)
        return self.store.get_uri("x").removesuffix("x")

    def name_of(self, path: str) -> str:
        """The full name of the object ``path``."""
        return check_name(f"{self.root}/{path}" if self.root else path)

    def files(self) -> Mapping[str, StoredFile]:
        prefix = self._prefix
        return {
            path: StoredFile(path, info.size_bytes, info.modified_at)
            for info in self.transfer.list(prefix)
            if (path := info.name.removeprefix(prefix))
        }

    def inside(self, path: str) -> RemotePlace:
        return self.at(self.name_of(path))

    def above(self) -> Iterator[tuple[RemotePlace, str]]:
        for parent in PurePosixPath(self.root).parents if self.root else ():
            root = "" if str(parent) == "." else str(parent)
            yield self.at(root), self.root.removeprefix(root).strip("/") + "/"

    def exists(self, path: str) -> bool:
        return self.transfer.exists(self.name_of(path))

    def read(self, path: str) -> bytes:
        return self.transfer.read_all(self.name_of(path), most_bytes=_MOST_SMALL_BYTES)

    def read_all(self, paths: Iterable[str]) -> Iterator[bytes | None]:
        def read(path: str) -> bytes | None:
            try:
                return self.read(path)
            except FileNotFoundError:
                return None

        with ThreadPoolExecutor(_READERS) as pool:
            yield from pool.map(read, paths)

    def verify(self, record: FileRecord, progress: Callable[[int], object] = int) -> None:
        name = self.name_of(record.path)
        uri = self.uri(record.path)
        if (size := self.transfer.size(name)) != record.size_bytes:
            raise CorruptCheckpointError(f"{uri!r} has {size} bytes and was saved with {record.size_bytes}.")
        digest = xxhash.xxh3_128()
        for start in range(0, size, _STEP_BYTES):
            data = self.transfer.read(name, start, min(_STEP_BYTES, size - start))
            digest.update(data)
            progress(len(data))
        if digest.hexdigest() != record.xxh3_128:
            raise CorruptCheckpointError(f"the bytes of {uri!r} are not those that were saved.")

    def write_to(self, target: Path, record: FileRecord, progress: Callable[[int], object] = int) -> None:
        make_folder(target.parent)
        told = 0

        def tell(done: int, _: int) -> None:
            nonlocal told
            progress(done - told)
            told = done

        self.transfer.download(
            self.name_of(record.path),
            target,
            overwrite=True,
            size_bytes=record.size_bytes,
            callback=tell,
            check=lambda file: verify_file(file, record.digest),
        )

    @contextlib.contextmanager
    def lent(self, record: FileRecord) -> Generator[Path]:
        with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
            path = Path(folder) / PurePosixPath(record.path).name
            self.write_to(path, record)
            yield path

    def take(self, source: Place, record: FileRecord, progress: Callable[[int], object] = int) -> None:
        told = 0

        def tell(done: int, _: int) -> None:
            nonlocal told
            progress(done - told)
            told = done

        with source.lent(record) as path:
            self.transfer.upload(self.name_of(record.path), path, tell)

    def put(self, path: str, data: bytes, *, create_only: bool) -> None:
        self.transfer.put_bytes(self.name_of(path), data, create_only=create_only)

    def remove(self, path: str) -> None:
        self.transfer.delete(self.name_of(path))

    def point(self, link: str, name: str) -> None:
        self.put(link + LINK_SUFFIX, self.name_of(name).encode(), create_only=False)

    def in_use(self) -> set[str]:
        paths = [path for path in self.files() if path.endswith((LINK_SUFFIX, ".next"))]
        targets = (data.decode(errors="replace").strip() for data in self.read_all(paths) if data is not None)
        return {target.removeprefix(self._prefix) for target in targets}

    def leftovers(self, older_than: timedelta) -> list[Leftover]:
        return [
            Leftover(self.store.get_uri(upload.name), f"the parts of an upload that was started {upload.started_at}", 0)
            for upload in self.transfer.stale(self._prefix, older_than)
        ]

    def sweep(self, older_than: timedelta) -> None:
        self.transfer.abort_stale(self._prefix, older_than)

    @property
    def _prefix(self) -> str:
        return f"{self.root}/" if self.root else ""

    def close(self) -> None:
        self.transfer.close()
        self.store.close()

"""Writing a checkpoint that is a file, or a file for each rank: one rank's part of it.

A file of one rank holds the whole; what is sharded over ranks is gathered for it, one tensor at a time, so that memory
is bounded. With DeepSpeed each rank has an archive of its own.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

import torch
from torch import Tensor

from composerlite._torch_compat import storage_id
from composerlite.checkpoint.format.archive import tar_bytes
from composerlite.checkpoint.format.packing import format_of
from composerlite.checkpoint.format.torch_file import StorageCopy, TorchImage
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.record.manifest import FileRecord, Manifest
from composerlite.errors import ConfigError, SaveError
from composerlite.storage import FileDigest, HostMemory, Sink, StagedFile, StreamWriter
from composerlite.types import StateDict, with_items

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Gathering", "NullWriter", "RankArchiveWriter", "SingleFileWriter", "plain_writer", "write_torch"]

log = logging.getLogger(__name__)

_ALIGNMENT = 4096


# ── what is sharded over ranks ────────────────────────────────────────────────────────────────────────────────────────
@final
class Gathering:
    """The distributed tensors in ``contents``, to be gathered one after the other, on every rank in the same order.

    Attributes:
        contents: the same with a tensor without contents in the place of each of them.
    """

    def __init__(self, contents: StateDict) -> None:
        from torch.distributed.tensor import DTensor  # slow to import

        self._kind = DTensor
        self._waiting: deque[DTensor] = deque()
        self._places: set[int] = set()
        self.contents: StateDict = self._with_places(contents)

    def _with_places(self, node: Any) -> Any:
        if isinstance(node, self._kind):
            place = torch.empty(node.shape, dtype=node.dtype)  # takes no memory before it is touched
            self._waiting.append(node)
            self._places.add(storage_id(place.untyped_storage()))
            return place
        return with_items(node, lambda _, value: self._with_places(value))

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return true if ``storage`` belongs to a tensor without contents."""
        return storage_id(storage) in self._places

    def next(self) -> Tensor:
        """Gather the next one, together with all ranks, in the main thread; the whole of it in this machine's memory.

        Raises:
            RuntimeError: a rank is gone. Nothing is left to be gathered then.
        """
        try:
            return self._waiting.popleft().full_tensor().detach().cpu().contiguous()
        except BaseException:
            self._waiting.clear()
            raise

    def finish(self) -> None:
        """Take part in gathering the remaining tensors, which other ranks need."""
        while self._waiting:
            self.next()


@final
class NullWriter:
    """The part of a rank that votes and helps to gather, and no more."""

    def __init__(self, gathering: Gathering | None = None) -> None:
        self.gathers = gathering is not None
        self.may_stream = True
        self._gathering = gathering
        self.size_bytes = 0
        self.seconds: dict[str, float] = {}
        self.weights_crc: Sequence[int] = ()

    def storages(self) -> list[StorageCopy]:
        """Return an empty list."""
        return []

    def staged_in(self, memory: HostMemory) -> None:
        """The other ranks' part of gathering."""
        self._gather()

    def write(self, memory: HostMemory | None, ring_bytes: int, *, may_grow: bool = False) -> None:
        """The same, where it is gathered as it is written."""
        self._gather()

    def _gather(self) -> None:
        if self._gathering is not None:
            self._gathering.finish()

    def finish(self) -> None:
        """Do nothing: there is no file to make durable."""

    def commit(self, manifest: Manifest, parts: Sequence[Any]) -> Manifest:
        """Rank 0 has something to write."""
        raise AssertionError("unreachable")

    def close(self, *, may_be_committed: bool) -> None:
        """Take part in gathering the remaining tensors."""
        self._gather()


# ── one file ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class _Written(NamedTuple):
    """Facts about a rank's file that rank 0 needs for the manifest."""

    name: str
    temporary: Path
    digest: FileDigest
    unpacked_bytes: int
    not_finite: str | None


@final
class _FileBeingWritten:
    """A file of a checkpoint under a temporary name: who takes its bytes, and how it becomes a part of the whole.

    Args:
        catalog: the folder of the checkpoint.
        name: of the file.
        overwrite: replace what has the names of the checkpoint.

    Attributes:
        seconds: spent by name, after :meth:`finish`.
    """

    def __init__(self, catalog: Catalog, name: str, *, overwrite: bool) -> None:
        self.seconds: dict[str, float] = {}
        self._catalog = catalog
        self._name = name
        self._overwrite = overwrite
        self._path = catalog.folder / name
        self._stack = ExitStack()
        self._sink: Sink | None = None
        self._data: StagedFile | None = None

    def write(self, open_sink: Callable[[Path], AbstractContextManager[Sink]], fill: Callable[[Sink], object]) -> None:
        """Hand all bytes to the sink. After an error nothing is left."""
        with ExitStack() as stack:
            self._data = stack.enter_context(StagedFile(self._path))
            self._sink = stack.enter_context(open_sink(self._data.temporary))
            with self._named():
                fill(self._sink)
            self._stack = stack.pop_all()

    def finish(self, images: Sequence[TorchImage], unpacked_bytes: int) -> _Written:
        """Wait until it is durable; what rank 0 needs to know of it, which holds ``images``."""
        assert self._sink is not None
        assert self._data is not None
        try:
            with self._named():
                digest = self._sink.finish()
        except BaseException as e:
            self._leave(e)
            raise
        self.seconds.update(self._sink.seconds)
        not_finite = next((image.not_finite for image in images if image.not_finite is not None), None)
        return _Written(self._name, self._data.temporary, digest, unpacked_bytes, not_finite)

    def commit(self, manifest: Manifest, parts: Sequence[_Written | None]) -> Manifest:
        """Rename the files of all ranks to their names, then write their manifest. On rank 0."""
        assert self._data is not None
        written = [one for one in parts if one is not None]
        manifest = dataclasses.replace(
            manifest,
            files=tuple(FileRecord.of(one.name, one.digest) for one in written),
            unpacked_bytes=max(one.unpacked_bytes for one in written),
        ).marked([one.not_finite for one in written])
        try:
            self._catalog.commit(manifest, {one.name: one.temporary for one in written}, overwrite=self._overwrite)
            self._data.leave_behind()  # it has its name
        except BaseException as e:
            self._leave(e)
            raise
        return manifest

    def close(self, *, may_be_committed: bool) -> None:
        """Remove it unless it has its name, or may have: then the next start finds out. Twice is fine."""
        if may_be_committed and self._data is not None:
            self._data.leave_behind()
        self._leave()

    def _leave(self, error: BaseException | None = None) -> None:
        stack, self._stack = self._stack, ExitStack()
        stack.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)

    @contextmanager
    def _named(self) -> Generator[None]:
        """Name the checkpoint in an error of what compresses it."""
        try:
            yield
        except SaveError as e:
            raise SaveError(f"checkpoint {str(self._path)!r}: {e}") from e


@final
class SingleFileWriter:
    """The whole of a checkpoint as a file ``name`` in the folder of ``catalog``.

    Args:
        overwrite: replace a checkpoint of that name.
        weights: tensors whose checksums are wanted.
        gathering: of what is sharded over ranks; the image has places for it.
    """

    def __init__(
        self,
        image: TorchImage,
        catalog: Catalog,
        *,
        name: str,
        template: str,
        overwrite: bool,
        weights: Iterable[Any] = (),
        gathering: Gathering | None = None,
    ) -> None:
        self._format = format_of(template)
        self.gathers = gathering is not None
        self.size_bytes = image.size_bytes
        self.may_stream = self._format.compressor is None
        self.weights_crc: Sequence[int] = ()
        self._image = image
        self._gathering = gathering
        self._weights = image.numbers_of(weights)
        self._file = _FileBeingWritten(catalog, name, overwrite=overwrite)
        self.seconds = self._file.seconds

    def storages(self) -> list[StorageCopy]:
        """Return the storages to copy before training changes them, except those that are gathered."""
        gathering = self._gathering
        return [copy for copy in self._image.storages() if gathering is None or not gathering.holds(copy.storage)]

    def staged_in(self, memory: HostMemory) -> None:
        """Read the bytes from ``memory`` from now on. Sharded tensors are gathered there."""
        if self._gathering is not None:
            for storage, offset in self._image.storages():
                if self._gathering.holds(storage):
                    whole = self._gathering.next().untyped_storage()
                    if whole.nbytes():
                        torch.frombuffer(memory.view(offset, whole.nbytes()), dtype=torch.uint8).copy_(_bytes_of(whole))
        self._image.staged_in(memory)

    def write(self, memory: HostMemory | None, ring_bytes: int, *, may_grow: bool = False) -> None:
        """Hand all bytes to the file's writer. What is sharded over ranks is gathered as it comes, if it is not yet."""
        self._image.stand_in = self._gathered

        def fill(sink: Sink) -> None:
            crcs = self._image.write(sink)
            self.weights_crc = [crcs[number] for number in self._weights]

        self._file.write(
            lambda path: self._format.open_sink(
                path, self.size_bytes, memory=memory, ring_bytes=ring_bytes, may_grow=may_grow
            ),
            fill,
        )

    def _gathered(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if self._gathering is None or not self._gathering.holds(storage):
            return storage
        return self._gathering.next().untyped_storage()

    def finish(self) -> _Written:
        """Wait until the file is durable; what rank 0 needs to know of it."""
        return self._file.finish([self._image], self.size_bytes)

    def commit(self, manifest: Manifest, parts: Sequence[Any]) -> Manifest:
        """Give the file its name and its manifest."""
        return self._file.commit(manifest, parts)

    def close(self, *, may_be_committed: bool) -> None:
        """Remove the file unless it has its name, or may have."""
        self._file.close(may_be_committed=may_be_committed)
        if self._gathering is not None:
            self._gathering.finish()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # pyright: ignore[reportArgumentType]


# ── a file for each rank ─────────────────────────────────────────────────────────────────────────────────────────────
@final
class RankArchiveWriter:
    """Writer of this rank's files of a DeepSpeed checkpoint, as an archive of its own.

    Args:
        images: the files in it, by name.
        catalog: the folder of the checkpoint.
        names: of the archives of all ranks.
        rank: this one.
        overwrite: replace what has these names.
    """

    def __init__(
        self, images: Mapping[str, TorchImage], catalog: Catalog, *, names: Sequence[str], rank: int, overwrite: bool
    ) -> None:
        self._format = format_of(names[rank])
        self.gathers = False
        self.may_stream = self._format.compressor is None
        self.weights_crc: Sequence[int] = ()
        self._images = dict(images)
        self._starts: dict[str, int] = {}
        self.size_bytes = 0
        for name, image in self._images.items():
            self._starts[name] = self.size_bytes
            self.size_bytes += -(-image.size_bytes // _ALIGNMENT) * _ALIGNMENT
        self._file = _FileBeingWritten(catalog, names[rank], overwrite=overwrite)
        self.seconds = self._file.seconds

    def storages(self) -> list[StorageCopy]:
        """Return the storages to copy before training changes them."""
        return [
            StorageCopy(storage, self._starts[name] + offset)
            for name, image in self._images.items()
            for storage, offset in image.storages()
        ]

    def staged_in(self, memory: HostMemory) -> None:
        """Read the bytes from ``memory`` from now on."""
        for name, image in self._images.items():
            image.staged_in(memory, self._starts[name])

    def write(self, memory: HostMemory | None, ring_bytes: int, *, may_grow: bool = False) -> None:
        """Hand all bytes to the file's writer."""
        members = [(name, image.size_bytes) for name, image in self._images.items()]
        self._file.write(
            lambda path: self._format.open_archive(path, members, ring_bytes=ring_bytes, may_grow=may_grow),
            lambda sink: [image.write(sink) for image in self._images.values()],
        )

    def finish(self) -> _Written:
        """Wait until the archive is durable; what rank 0 needs to know of it."""
        images = list(self._images.values())
        return self._file.finish(images, tar_bytes(*(image.size_bytes for image in images)))

    def commit(self, manifest: Manifest, parts: Sequence[Any]) -> Manifest:
        """Give the archives of all ranks their names, and then their manifest."""
        return self._file.commit(manifest, parts)

    def close(self, *, may_be_committed: bool) -> None:
        """Remove the archive unless it has its name, or may have."""
        self._file.close(may_be_committed=may_be_committed)


# ── files that are no checkpoints of a run: a state dict, for torch or for safetensors ───────────────────────────────
def plain_writer(*, use_safetensors: bool) -> Callable[[Path, Any], None]:
    """Return a function that writes a file atomically.

    Raises:
        ConfigError: safetensors is not installed.
    """
    return _safetensors_writer() if use_safetensors else write_torch


def write_torch(path: Path, contents: Any) -> None:
    """Make the file ``path`` that ``torch.load`` opens."""
    image = TorchImage(contents)
    with StagedFile(path) as staged:
        with StreamWriter(staged.temporary, image.size_bytes) as sink:
            image.write(sink)
            sink.finish()
        staged.publish()


def _safetensors_writer() -> Callable[[Path, Any], None]:
    try:
        library: ModuleType = importlib.import_module("safetensors.torch")
    except ImportError as e:
        raise ConfigError(
            "use_safetensors=True: safetensors is not installed: pip install 'composerlite[safetensors]'"
        ) from e
    save_file = cast("Callable[..., None]", library.save_file)

    def write(path: Path, contents: Any) -> None:
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        for key, value in contents.items():
            if isinstance(value, Tensor):
                tensor = value.contiguous()
                address = tensor.untyped_storage().data_ptr()
                tensors[key] = tensor.clone() if address in seen else tensor  # the library takes none that share memory
                seen.add(address)
        if left_out := sorted(set(contents) - set(tensors)):
            log.warning("%s: left out what is no tensor: %s", path, ", ".join(left_out[:20]))
        with StagedFile(path) as staged:
            save_file(tensors, staged.temporary, metadata={"format": "pt"})
            staged.flush()
            staged.publish()

    return write

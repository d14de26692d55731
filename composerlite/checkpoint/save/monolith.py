"""A checkpoint that is one file, written by one rank; the others have nothing to write."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, final

import torch

from composerlite.checkpoint.format.packing import format_of
from composerlite.checkpoint.format.torch_file import StorageCopy, TorchImage
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.record.manifest import FileRecord, Manifest
from composerlite.errors import SaveError
from composerlite.storage import FileDigest, HostMemory, Sink, StagedFile

if TYPE_CHECKING:
    from composerlite.checkpoint.save.sharded.gathering import Gathering

__all__ = ["Monolith", "NothingToWrite"]


@final
class Monolith:
    """The whole of a checkpoint as a file ``name`` in the folder of ``catalog``.

    Args:
        overwrite: replace a checkpoint of that name.
        weights: tensors whose checksums are wanted.
        gathering: of what is spread over ranks; the image has places for it.
    """

    def __init__(
        self,
        image: TorchImage,
        catalog: Catalog,
        *,
        name: str,
        template: str,
        overwrite: bool,
        weights: Iterable[Any],
        gathering: Gathering | None = None,
    ) -> None:
        self.gathers = gathering is not None
        self.size_bytes = image.size_bytes
        self.is_plain = format_of(template).compressor is None
        self.seconds: dict[str, float] = {}
        self.weights_crc: Sequence[int] = ()
        self._image = image
        self._gathering = gathering
        self._weights = image.numbers_of(weights)
        self._catalog = catalog
        self._overwrite = overwrite
        self._path = catalog.folder / name
        self._format = format_of(template)
        self._stack = ExitStack()
        self._data: StagedFile | None = None
        self._sink: Sink | None = None

    def storages(self) -> list[StorageCopy]:
        """What is to be copied before training changes it, but for what is to be gathered."""
        gathering = self._gathering
        return [copy for copy in self._image.storages() if gathering is None or not gathering.holds(copy.storage)]

    def staged_in(self, memory: HostMemory) -> None:
        """From now on the bytes are those in ``memory``. What is spread over ranks is gathered there."""
        if self._gathering is not None:
            for storage, offset in self._image.storages():
                if self._gathering.holds(storage):
                    whole = self._gathering.next().untyped_storage()
                    if whole.nbytes():
                        torch.frombuffer(memory.view(offset, whole.nbytes()), dtype=torch.uint8).copy_(_bytes_of(whole))
        self._image.staged_in(memory)

    def write(self, memory: HostMemory | None, ring_bytes: int, *, may_grow: bool = False) -> None:
        """Hand all bytes to the file's writer. What is spread over ranks is gathered as it comes, if it is not yet."""
        self._image.stand_in = self._gathered
        with ExitStack() as stack:
            self._data = stack.enter_context(StagedFile(self._path))
            self._sink = stack.enter_context(
                self._format.open_sink(
                    self._data.temporary, self.size_bytes, memory=memory, ring_bytes=ring_bytes, may_grow=may_grow
                )
            )
            with self._named():
                crcs = self._image.write(self._sink)
            self.weights_crc = [crcs[number] for number in self._weights]
            self._stack = stack.pop_all()

    def _gathered(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if self._gathering is None or not self._gathering.holds(storage):
            return storage
        return self._gathering.next().untyped_storage()

    def finish(self) -> FileDigest:
        """Wait until the file is durable; what it contains."""
        assert self._sink is not None
        try:
            with self._named():
                digest = self._sink.finish()
        except BaseException as e:
            self._leave(e)
            raise
        self.seconds = self._sink.seconds
        return digest

    def commit(self, manifest: Manifest, parts: Sequence[Any]) -> Manifest:
        """Give the file its name and its manifest."""
        digest: FileDigest = parts[0]
        record = FileRecord(manifest.name, digest.size_bytes, digest.xxh3_128, digest.chunk_bytes, digest.chunks)
        manifest = dataclasses.replace(manifest, files=(record,), unpacked_bytes=self.size_bytes)
        assert self._data is not None
        try:
            self._catalog.commit(manifest, {manifest.name: self._data.temporary}, overwrite=self._overwrite)
            self._data.leave_behind()  # it has its name
        except BaseException as e:
            self._leave(e)
            raise
        self._leave()
        return manifest

    def close(self, *, may_be_committed: bool) -> None:
        """Remove the file unless it has its name. This rank commits, so it knows."""
        self._leave()
        if self._gathering is not None:
            self._gathering.finish()

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
class NothingToWrite:
    """The part of a rank that votes and helps to gather, and no more."""

    def __init__(self, gathering: Gathering | None = None) -> None:
        self.gathers = gathering is not None
        self.is_plain = True
        self._gathering = gathering
        self.size_bytes = 0
        self.seconds: dict[str, float] = {}
        self.weights_crc: Sequence[int] = ()

    def storages(self) -> list[StorageCopy]:
        """There are none."""
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
        """Nothing has to become durable."""

    def commit(self, manifest: Manifest, parts: Sequence[Any]) -> Manifest:
        """Rank 0 has something to write."""
        raise AssertionError("unreachable")

    def close(self, *, may_be_committed: bool) -> None:
        """Gather what is left."""
        self._gather()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # pyright: ignore[reportArgumentType]

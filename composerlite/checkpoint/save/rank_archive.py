"""A checkpoint of DeepSpeed: archives, of which each rank copies and writes its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, final

from composerlite.checkpoint.format.archive import DEEPSPEED, DEEPSPEED_TYPES, STATES, tar_bytes
from composerlite.checkpoint.format.packing import format_of
from composerlite.checkpoint.format.torch_file import StorageCopy, TorchImage
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.record.manifest import FileRecord, Manifest
from composerlite.storage import FileDigest, HostMemory, Sink, StagedFile
from composerlite.types import StateDict

__all__ = ["RankArchive"]

_ALIGNMENT = 4096


class _Written(NamedTuple):
    """What rank 0 needs to know of an archive."""

    name: str
    temporary: Path
    digest: FileDigest
    unpacked_bytes: int


@final
class RankArchive:
    """What this rank writes of a checkpoint: an archive of its own.

    Args:
        contents: of ``composer_states.pt``.
        files: of DeepSpeed, by name.
        catalog: the folder of the checkpoint.
        names: of the archives of all ranks.
        rank: this one.
        overwrite: replace what has these names.
    """

    def __init__(
        self,
        contents: StateDict,
        files: Mapping[str, StateDict],
        catalog: Catalog,
        *,
        names: Sequence[str],
        rank: int,
        overwrite: bool,
    ) -> None:
        self.gathers = False
        self.is_plain = format_of(names[rank]).compressor is None
        self.seconds: dict[str, float] = {}
        self.weights_crc: Sequence[int] = ()
        self._images = {STATES: TorchImage(contents)}
        self._images |= {f"{DEEPSPEED}/{name}": TorchImage(its, DEEPSPEED_TYPES) for name, its in files.items()}
        self._starts: dict[str, int] = {}
        self.size_bytes = 0
        for name, image in self._images.items():
            self._starts[name] = self.size_bytes
            self.size_bytes += -(-image.size_bytes // _ALIGNMENT) * _ALIGNMENT
        self._catalog = catalog
        self._names = list(names)
        self._name = names[rank]
        self._overwrite = overwrite
        self._stack = ExitStack()
        self._data: StagedFile | None = None
        self._sink: Sink | None = None

    def storages(self) -> list[StorageCopy]:
        """What is to be copied before training changes it."""
        return [
            StorageCopy(storage, self._starts[name] + offset)
            for name, image in self._images.items()
            for storage, offset in image.storages()
        ]

    def staged_in(self, memory: HostMemory) -> None:
        """From now on the bytes are those in ``memory``."""
        for name, image in self._images.items():
            image.staged_in(memory, self._starts[name])

    def write(self, memory: HostMemory | None, ring_bytes: int, *, may_grow: bool = False) -> None:
        """Hand all bytes to the file's writer."""
        members = [(name, image.size_bytes) for name, image in self._images.items()]
        with ExitStack() as stack:
            self._data = stack.enter_context(StagedFile(self._catalog.folder / self._name))
            self._sink = stack.enter_context(
                format_of(self._name).open_archive(
                    self._data.temporary, members, ring_bytes=ring_bytes, may_grow=may_grow
                )
            )
            for image in self._images.values():
                image.write(self._sink)
            self._stack = stack.pop_all()

    def finish(self) -> _Written:
        """Wait until the archive is durable; what rank 0 needs to know of it."""
        assert self._sink is not None
        assert self._data is not None
        try:
            digest = self._sink.finish()
        except BaseException as e:
            self._leave(e)
            raise
        self.seconds = self._sink.seconds
        unpacked_bytes = tar_bytes(*(image.size_bytes for image in self._images.values()))
        return _Written(self._name, self._data.temporary, digest, unpacked_bytes)

    def commit(self, manifest: Manifest, parts: Sequence[Any]) -> Manifest:
        """Give the archives of all ranks their names, and then their manifest."""
        written: list[_Written] = list(parts)
        records = tuple(
            FileRecord(one.name, one.digest.size_bytes, one.digest.xxh3_128, one.digest.chunk_bytes, one.digest.chunks)
            for one in written
        )
        manifest = dataclasses.replace(
            manifest, files=records, unpacked_bytes=max(one.unpacked_bytes for one in written)
        )
        assert self._data is not None
        self._catalog.commit(manifest, {one.name: one.temporary for one in written}, overwrite=self._overwrite)
        self._data.leave_behind()  # it has its name
        return manifest

    def close(self, *, may_be_committed: bool) -> None:
        """Remove the archive unless it has its name, or may have: then the next start finds out."""
        if may_be_committed and self._data is not None:
            self._data.leave_behind()
        self._leave()

    def _leave(self, error: BaseException | None = None) -> None:
        stack, self._stack = self._stack, ExitStack()
        stack.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)

"""Writing safetensors from all ranks: each tensor is whole in a file, and a single rank writes each file.

Ranks with parts of a tensor send the parts to the rank with the file. A rank has one received tensor in memory at a
time: docs/adr/0005.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from composerlite import dist
from composerlite.checkpoint.foreign.keys import tensors_of
from composerlite.checkpoint.format import WEIGHTS_INDEX
from composerlite.checkpoint.format.safetensors_file import TensorEntry, header_of, laid_out, write_tensor
from composerlite.checkpoint.format.sharded_index import leaves
from composerlite.checkpoint.format.sharded_layout import MOST_CHUNKS, StatePiece
from composerlite.checkpoint.place.directory import LEAST_CHUNK_BYTES, SaveHandle, ShardedDirectory
from composerlite.checkpoint.place.place import NewFile
from composerlite.checkpoint.record.record import Manifest
from composerlite.checkpoint.save.form import RankWriter
from composerlite.checkpoint.save.sharded_plan import RankState, merge_pieces
from composerlite.errors import ConfigError, SaveError
from composerlite.storage import FileDigest, HostMemory, StreamWriter, chunk_bytes_for
from composerlite.types import StateDict, batches

LARGEST_FILE_BYTES = 5 * 10**9
"""As in ``save_pretrained``: every tool and hub takes files of this size."""
_CHUNKS_OF_A_TENSOR = 128
"""Chunks allowed for each tensor. A reader of a part verifies whole chunks: about a hundredth of a tensor more."""


# ── rank 0 divides the work ──────────────────────────────────────────────────────────────────────────────────────────
@final
class _Division(NamedTuple):
    """The work of all ranks.

    Attributes:
        handle: of the save.
        files: name and tensors of each file, by rank.
        parts: the parts of each tensor with several parts, by name of the tensor. A part is a rank and a piece.
        content: of the index.
    """

    handle: SaveHandle
    files: list[list[tuple[str, list[TensorEntry]]]]
    parts: dict[str, list[tuple[int, StatePiece]]]
    content: StateDict


def _divide(tables: Sequence[Sequence[StatePiece]], handle: SaveHandle, largest_bytes: int) -> _Division:
    """Divide the tensors among the ranks: about equal bytes for all, and a whole tensor stays on its rank."""
    written, stored = merge_pieces(tables)
    entries = {key: TensorEntry(key, one.properties.dtype, tuple(one.size)) for key, one in stored.items()}
    parts: dict[str, list[tuple[int, StatePiece]]] = {key: [] for key in entries}
    for rank, (pieces, numbers) in enumerate(zip(tables, written, strict=True)):
        for piece in (pieces[number] for number in numbers):
            parts[piece.key].append((rank, piece))
    loads = [0] * len(tables)
    owned: list[list[TensorEntry]] = [[] for _ in tables]
    for entry in sorted(entries.values(), key=lambda entry: (len(parts[entry.name]) > 1, -entry.size_bytes)):
        owner = min({rank for rank, _ in parts[entry.name]}, key=lambda rank: (loads[rank], rank))
        owned[owner].append(entry)
        loads[owner] += entry.size_bytes
    groups = [
        (owner, laid_out(group))
        for owner, tensors in enumerate(owned)
        for group in batches(tensors, largest_bytes, lambda entry: entry.size_bytes)
    ]
    files: list[list[tuple[str, list[TensorEntry]]]] = [[] for _ in tables]
    places: dict[str, str] = {}
    for number, (owner, tensors) in enumerate(groups, 1):
        order = "" if len(groups) == 1 else f"-{number:05}-of-{len(groups):05}"
        name = f"model{order}{handle.suffix}.safetensors"
        files[owner].append((name, tensors))
        places.update({entry.name: name for entry in tensors})
    split = {name: found for name, found in parts.items() if entries[name].size_bytes and len(found) > 1}
    total = {"total_size": sum(entry.size_bytes for entry in entries.values())}
    return _Division(handle, files, split, {"metadata": total, "weight_map": places})


def most_chunks(size_bytes: int, tensors: int) -> int:
    """Return the largest count of chunks of a file: some for each tensor, or a chunk for each MiB if this is more."""
    return min(MOST_CHUNKS, max(_CHUNKS_OF_A_TENSOR * tensors, size_bytes >> 20))


# ── a rank ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class SafetensorsWriter(RankWriter):
    """Writer of this rank's files of the weights in ``folder``. All ranks create the writer, in the main thread.

    There is no copy: training waits until the tensors are written.

    Args:
        contents: makes the state dict of a model. Keys of nested dicts are joined by dots. Values other than tensors
            are left out, with a warning.
        folder: the directory. The caller closes the directory.
        overwrite: replace weights in the directory.
        largest_file_bytes: largest size of a file with several tensors.
    """

    def __init__(
        self, contents: Callable[[], StateDict], folder: ShardedDirectory, *, overwrite: bool, largest_file_bytes: int
    ) -> None:
        self._folder = folder
        self._group = dist.group_of()
        self._rank = self._group.rank
        self._own: Mapping[MetadataIndex, Any] = {}

        def pieces() -> list[StatePiece]:
            state = RankState(_savable_tensors(contents(), folder.uri), self._group)
            self._own = state.data
            return state.pieces

        def divide(tables: list[list[StatePiece]]) -> _Division:
            handle = SaveHandle(overwrite=overwrite, decider=WEIGHTS_INDEX)
            folder.begin(handle)
            return _divide(tables, handle, largest_file_bytes)

        self._plan = self._group.all_reduce("planning a save", pieces, divide)
        self._split = [
            deque(entry for _, tensors in files for entry in tensors if entry.name in self._plan.parts)
            for files in self._plan.files
        ]
        """Tensors with several parts in the files of each rank, in order. The rank of the file gathers the parts. The
        ranks exchange the first tensor of each rank, then the second, and so on."""

    def write(self, manifest: Manifest, memory: HostMemory | None = None) -> list[tuple[str, FileDigest]]:
        """Write the files of this rank, send parts to other ranks, and return names and digests of the files.

        Collective: the ranks exchange parts. After an error this rank still sends and receives, so no rank waits
        forever.
        """
        files = self._plan.files[self._rank]
        try:
            return [(name, self._folder.write(self._plan.handle, self._new_file(name, own))) for name, own in files]
        finally:
            while any(self._split):
                self._exchange()

    def _new_file(self, name: str, tensors: Sequence[TensorEntry]) -> NewFile:
        header = header_of(tensors)

        def fill(sink: StreamWriter) -> None:
            sink.write(header)
            for entry in tensors:
                if entry.name in self._plan.parts:
                    tensor = self._exchange()
                else:  # a tensor without elements may be on no rank
                    tensor = self._own.get(MetadataIndex(entry.name, torch.Size([0] * len(entry.shape))))
                if tensor is not None:
                    write_tensor(sink, tensor)

        size = len(header) + sum(entry.size_bytes for entry in tensors)
        return NewFile(name, size, fill, chunk_bytes_for(size, LEAST_CHUNK_BYTES, most_chunks(size, len(tensors))))

    def _exchange(self) -> Tensor | None:
        """Make the next exchange with all ranks. Return this rank's whole tensor; ``None``: no tensor is left."""
        whole: Tensor | None = None
        transfers: list[dist.TensorTransfer] = []
        for owner, entry in [(rank, queue.popleft()) for rank, queue in enumerate(self._split) if queue]:
            if owner == self._rank:
                whole = torch.empty(entry.shape, dtype=entry.dtype)
            for rank, part in self._plan.parts[entry.name]:
                own: Any = self._own[part.metadata_index] if rank == self._rank else None
                numbers = own
                if owner == self._rank and whole is not None:
                    spans = zip(part.offsets, part.sizes, strict=True)
                    numbers = whole[tuple(slice(first, first + size) for first, size in spans)]
                if rank == owner and numbers is not None:
                    numbers.copy_(own)
                elif numbers is not None:
                    transfers.append(dist.TensorTransfer(rank, (rank, owner), [numbers]))
        if self._group.exchanges:
            dist.exchange(f"writing {self._folder.uri}", transfers)
        return whole

    def commit(self, manifest: Manifest, parts: Sequence[Any]) -> Manifest:
        """Commit on rank 0: write the index with the record."""
        files = {name: (digest, None) for name, digest in itertools.chain.from_iterable(parts)}
        return self._folder.commit(self._plan.content, files, manifest)

    def close(self, *, may_be_committed: bool) -> None:
        """Remove the files unless the checkpoint is or may be committed. May be called twice."""
        if not may_be_committed:
            self._folder.abandon()


def _savable_tensors(state: StateDict, uri: str) -> dict[str, Tensor]:
    """Return the tensors of ``state`` by their keys.

    Raises:
        SaveError: safetensors does not support a tensor.
        ConfigError: there are no tensors.
    """
    found = tensors_of(leaves(state, as_dcp=True).values, uri)
    for name, value in found.items():
        if not dist.is_dense(value):
            raise SaveError(
                f"{name!r}: safetensors cannot store {type(value).__name__} of {value.layout}: it stores dense tensors."
            )
        TensorEntry(name, value.dtype, tuple(value.shape)).check(value.layout)
    if not found:
        raise ConfigError(f"{uri!r}: no tensors to write. Expected the state dict of a model.")
    return found

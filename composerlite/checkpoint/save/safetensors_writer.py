"""Writing safetensors from all ranks: each tensor is whole in a file, and a single rank writes each file.

Ranks with parts of a tensor send the parts to the rank with the file. A rank has one received tensor in memory at a
time: docs/adr/0078.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from composerlite import dist
from composerlite.checkpoint.format import WEIGHTS_INDEX
from composerlite.checkpoint.format.safetensors_file import TensorEntry, header_of, laid_out, write_tensor
from composerlite.checkpoint.format.sharded_index import leaves
from composerlite.checkpoint.format.sharded_layout import StatePiece
from composerlite.checkpoint.format.torch_file import StorageCopy
from composerlite.checkpoint.place.directory import LEAST_CHUNK_BYTES, MOST_CHUNKS, SaveHandle, ShardedDirectory
from composerlite.checkpoint.place.place import NewFile
from composerlite.checkpoint.record.record import Manifest
from composerlite.checkpoint.save.sharded_plan import RankState, merge_pieces
from composerlite.errors import ConfigError, SaveError
from composerlite.storage import FileDigest, HostMemory, StreamWriter, chunk_bytes_for
from composerlite.types import StateDict, batches

log = logging.getLogger(__name__)
LARGEST_FILE_BYTES = 5 * 10**9
"""As in ``save_pretrained``: every tool and hub takes files of this size."""
_CHUNKS_OF_A_TENSOR = 128
"""Most chunks of a tensor. A reader of a part verifies whole chunks: about a hundredth more of the tensor."""


# ── rank 0 divides the work ──────────────────────────────────────────────────────────────────────────────────────────
class _Assembly(NamedTuple):
    """A tensor of several ranks, put together on the rank ``owner``. Each part has the number of its rank."""

    owner: int
    entry: TensorEntry
    parts: list[tuple[int, StatePiece]]


@final
@dataclass
class _Share:
    """Work of a rank.

    Attributes:
        handle: of the save.
        files: of the rank: name and tensors.
        rounds: exchanges of all ranks. Each has at most one tensor for a rank, in the order of its files. A rank gets
            the assemblies with a part of the rank, or for the rank.
        index: the content of the index, on rank 0.
    """

    handle: SaveHandle
    files: list[tuple[str, list[TensorEntry]]] = field(default_factory=list[tuple[str, list[TensorEntry]]])
    rounds: deque[list[_Assembly]] = field(default_factory=deque[list[_Assembly]])
    index: bytes = b""


def _divide(tables: Sequence[Sequence[StatePiece]], handle: SaveHandle, largest_bytes: int) -> list[_Share]:
    """Divide the tensors among the ranks: about equal bytes for all, and a whole tensor stays on its rank."""
    written, _ = merge_pieces(tables)
    entries: dict[str, TensorEntry] = {}
    parts: dict[str, list[tuple[int, StatePiece]]] = {}
    for rank, (pieces, numbers) in enumerate(zip(tables, written, strict=True)):
        for piece in (pieces[number] for number in numbers):
            assert piece.dtype is not None
            assert piece.shape is not None
            entries.setdefault(piece.key, TensorEntry(piece.key, piece.dtype, piece.shape))
            parts.setdefault(piece.key, []).append((rank, piece))
    loads = [0] * len(tables)
    owned: list[list[TensorEntry]] = [[] for _ in tables]
    for entry in sorted(entries.values(), key=lambda entry: (len(parts[entry.name]) > 1, -entry.size_bytes)):
        owner = min({rank for rank, _ in parts[entry.name]}, key=lambda rank: (loads[rank], rank))
        owned[owner].append(entry)
        loads[owner] += entry.size_bytes
    files = [
        (owner, laid_out(group))
        for owner, tensors in enumerate(owned)
        for group in batches(tensors, largest_bytes, lambda entry: entry.size_bytes)
    ]
    shares = [_Share(handle) for _ in tables]
    places: dict[str, str] = {}
    received = [0] * len(tables)  # number of tensors so far
    for number, (owner, tensors) in enumerate(files, 1):
        order = "" if len(files) == 1 else f"-{number:05}-of-{len(files):05}"
        name = f"model{order}{handle.suffix}.safetensors"
        shares[owner].files.append((name, tensors))
        places.update({entry.name: name for entry in tensors})
        for entry in tensors:
            own = parts[entry.name]
            if len(own) == 1 or not entry.size_bytes:
                continue
            if received[owner] == len(shares[0].rounds):
                for share in shares:
                    share.rounds.append([])
            for rank in {owner, *(rank for rank, _ in own)}:
                shares[rank].rounds[received[owner]].append(_Assembly(owner, entry, own))
            received[owner] += 1
    total = {"total_size": sum(entry.size_bytes for entry in entries.values())}
    shares[0].index = json.dumps({"metadata": total, "weight_map": places}, indent=1, sort_keys=True).encode()
    return shares


def most_chunks(size_bytes: int, tensors: int) -> int:
    """Return the most chunks of a file: some for each tensor, and at least a chunk for each MiB."""
    return min(MOST_CHUNKS, max(_CHUNKS_OF_A_TENSOR * tensors, size_bytes >> 20))


# ── a rank ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class SafetensorsWriter:
    """Writer of this rank's files of the weights in ``folder``. All ranks create the writer, in the main thread.

    Args:
        contents: makes the state dict of a model. Keys of nested dicts are joined by dots. Values other than tensors
            are left out, with a warning.
        folder: the directory. The caller closes the directory.
        overwrite: replace weights in the directory.
        largest_file_bytes: largest size of a file with several tensors.

    Attributes:
        size_bytes: 0, so there is no copy: training waits until the tensors are written.
        seconds: always empty.
    """

    def __init__(
        self,
        contents: Callable[[], StateDict],
        folder: ShardedDirectory,
        *,
        overwrite: bool,
        largest_file_bytes: int = LARGEST_FILE_BYTES,
    ) -> None:
        self.size_bytes = 0
        self.seconds: Mapping[str, float] = {}
        self._folder = folder
        self._group = dist.group_of()
        self._rank = self._group.rank
        self._own: dict[tuple[str, tuple[int, ...]], Tensor] = {}

        def pieces() -> list[StatePiece]:
            state = RankState(_tensors_of(contents(), folder.uri), self._group)
            for piece in state.pieces:
                tensor = state.data[piece.metadata_index]
                assert isinstance(tensor, Tensor)
                self._own[piece.key, piece.offsets] = tensor
            return state.pieces

        def divide(tables: list[list[StatePiece]]) -> list[_Share]:
            handle = SaveHandle(overwrite=overwrite, decider=WEIGHTS_INDEX)
            folder.begin(handle)
            return _divide(tables, handle, largest_file_bytes)

        self._share = self._group.reduce_scatter("planning a save", pieces, divide)

    def storages(self) -> list[StorageCopy]:
        """Return nothing: the tensors themselves are written."""
        return []

    def staged_in(self, memory: HostMemory) -> None:
        """Do nothing: see :meth:`storages`."""

    def write(self, manifest: Manifest) -> list[tuple[str, FileDigest]]:
        """Write the files of this rank, send parts to other ranks, and return names and digests of the files.

        Collective: the ranks exchange parts. After an error this rank still sends and receives, so no rank waits
        forever.
        """
        digests: list[FileDigest] = []
        failure: BaseException | None = None
        try:
            digests = self._folder.write(self._share.handle, itertools.starmap(self._new_file, self._share.files))
        except BaseException as e:  # noqa: BLE001 - raised below
            failure = e
        try:
            while self._share.rounds:
                self._exchange()
        except BaseException as e:  # noqa: BLE001 - raised below
            failure = failure or e
        self._own.clear()
        if failure is not None:
            raise failure
        return list(zip([name for name, _ in self._share.files], digests, strict=True))

    def _new_file(self, name: str, tensors: Sequence[TensorEntry]) -> NewFile:
        header = header_of(tensors)

        def fill(sink: StreamWriter) -> None:
            sink.write(header)
            for entry in tensors:
                own = self._own.get((entry.name, (0,) * len(entry.shape)))
                is_whole = own is not None and tuple(own.shape) == entry.shape
                if entry.size_bytes and (tensor := own if is_whole else self._exchange()) is not None:
                    write_tensor(sink, tensor)

        size = len(header) + sum(entry.size_bytes for entry in tensors)
        return NewFile(name, size, fill, chunk_bytes_for(size, LEAST_CHUNK_BYTES, most_chunks(size, len(tensors))))

    def _exchange(self) -> Tensor | None:
        """Make the next exchange with all ranks, and return the tensor for this rank, if there is a tensor."""
        found: Tensor | None = None
        transfers: list[dist.TensorTransfer] = []
        for owner, entry, parts in self._share.rounds.popleft():
            whole = torch.empty(entry.shape, dtype=entry.dtype) if owner == self._rank else None
            for rank, part in parts:
                numbers = self._own[entry.name, part.offsets] if rank == self._rank else None
                if whole is not None:
                    target = whole
                    for dim, (first, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
                        target = target.narrow(dim, first, size)
                    if numbers is None:
                        numbers = target
                    else:
                        target.copy_(numbers)
                if numbers is not None and rank != owner:
                    transfers.append(dist.TensorTransfer(rank, (rank, owner), [numbers]))
            found = whole if found is None else found
        if self._group.exchanges:
            dist.exchange(f"writing {self._folder.uri}", transfers)
        return found

    def commit(self, manifest: Manifest, parts: Sequence[Any]) -> Manifest:
        """Commit on rank 0: write the index with the record."""
        files = {name: (digest, None) for name, digest in itertools.chain.from_iterable(parts)}
        return self._folder.commit(self._share.index, files, manifest)

    def close(self, *, may_be_committed: bool) -> None:
        """Remove the files unless the checkpoint is or may be committed. May be called twice."""
        if not may_be_committed:
            self._folder.abandon()


def _tensors_of(state: StateDict, uri: str) -> dict[str, Tensor]:
    """Return the tensors of ``state`` by their keys.

    Raises:
        SaveError: safetensors does not support a tensor.
        ConfigError: there are no tensors.
    """
    found: dict[str, Tensor] = {}
    for name, value in leaves(state, as_dcp=True).values.items():
        if not isinstance(value, Tensor):
            log.warning("%s: left out a value that is no tensor: %s", uri, name)
        elif not dist.is_dense(value):
            raise SaveError(
                f"{name!r}: safetensors has no tensors such as {type(value).__name__} of {value.layout}: it takes "
                "dense ones."
            )
        else:
            TensorEntry(name, value.dtype, tuple(value.shape)).check(value.layout)
            found[name] = value
    if not found:
        raise ConfigError(f"{uri!r}: there are no tensors to write: expected the state dict of a model.")
    return found

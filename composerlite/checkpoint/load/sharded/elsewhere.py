"""Parts of a sharded checkpoint that lie on the disks of other nodes: brought here before they are read."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import final

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from composerlite import dist
from composerlite.checkpoint.load.sharded import reader as sharded
from composerlite.checkpoint.place.directory import ON_ALL_NODES, CheckpointFolder, LocalFolder
from composerlite.checkpoint.record.manifest import FileRecord, Manifest
from composerlite.checkpoint.trust.validation import validate
from composerlite.errors import CheckpointNotFoundError, IncompatibleCheckpointError
from composerlite.types import StateDict

__all__ = ["Elsewhere"]

log = logging.getLogger(__name__)
Ranges = dict[str, list[tuple[int, int]]]
"""By file: where a range begins, and where it ends."""
Node = tuple[int, str]


@final
@dataclass(frozen=True)
class _Told:
    """What a rank tells the others.

    Attributes:
        node: on which it is: its number, which not every launcher gives, and its name.
        has: files of the checkpoint on it.
        lacks: what it needs of the others.
        place: the folder on its node that what is brought goes to.
    """

    node: Node
    has: frozenset[str]
    lacks: Ranges
    place: Path | None


@final
class Elsewhere:
    """The parts of a checkpoint that this node's disk does not have. Used as a context manager, on every rank.

    Where all files are in one folder there is nothing to do. Else a rank of a node that has a part sends it to one of
    the node that needs it, where it lies in a temporary folder until the block ends; it is verified when it is read.

    Args:
        folder: of the checkpoint.
        reader: of it.
        source: the checkpoint, for messages.

    Attributes:
        are_apart: whether files lie on several disks; the same on every rank.
    """

    def __init__(self, folder: CheckpointFolder, reader: sharded.RemoteFileSystemReader, source: str) -> None:
        self._reader = reader
        self._source = source
        self._stack = contextlib.ExitStack()
        self._place: Path | None = None
        self._folder = folder if isinstance(folder, LocalFolder) else None
        self._manifest: Manifest | None = None
        self.are_apart = False

    def __enter__(self) -> Elsewhere:
        group = dist.get_group()
        if group.size > 1 and self._folder is not None:
            folder = self._folder
            self.are_apart = group.from_first(f"finding the disks of {self._source}", lambda: _is_apart(folder))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.are_apart and error is None:
            dist.barrier(f"reading {self._source}")  # others of this node read what this rank is about to remove
        self._stack.close()

    def bring_values(self, keys: Iterable[str]) -> None:
        """Have what is no tensor where rank 0 reads it. Every rank calls it."""
        wanted: StateDict = dict.fromkeys(keys) if dist.get_global_rank() == 0 else {}
        self._bring(wanted)

    def bring_tensors(self, targets: Mapping[str, Tensor]) -> None:
        """Have what ``targets`` are to be filled with where this rank reads it. Every rank calls it."""
        self._bring(dict(targets))

    def _bring(self, wanted: StateDict) -> None:
        group = dist.get_group()
        if not self.are_apart:
            return
        assert self._folder is not None
        with group.all_or_none(f"looking for the parts of {self._source}"):
            told = self._told(wanted)
        everyone = group.gather(told)
        with group.all_or_none(f"looking for the parts of {self._source}"):
            moves = self._moves(everyone)
            for name in {one.name for one in moves if one.source == group.rank}:
                validate(self._folder.path / name)
        with group.all_or_none(f"bringing parts of {self._source} to the nodes that need them"), self._files() as files:
            dist.move(f"bringing parts of {self._source}", moves, files.read, files.write)
        first = _first_of_node(everyone, told.node)
        self._folder.brought = everyone[first].place
        if size := sum(one.size_bytes for one in moves if one.target == group.rank):
            log.info("brought %.1f MB of %s from the disks of other nodes", size / 1e6, self._source)

    def _told(self, wanted: StateDict) -> _Told:
        assert self._folder is not None
        self._manifest = self._manifest or self._folder.manifest()
        if self._manifest is None:
            raise CheckpointNotFoundError(
                f"{self._source} is there for rank 0, and has no manifest in {self._folder.uri!r}"
            )
        has = frozenset(name for name in self._records if self._folder.has(name))
        lacks: Ranges = {}
        for name, begin, end in self._needed(wanted):
            if name not in has:
                lacks.setdefault(name, []).append((begin, end))
        if self._place is None and dist.get_local_rank() == 0:
            self._place = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="composerlite-")))
        return _Told((dist.get_node_rank(), socket.gethostname()), has, lacks, self._place)

    @property
    def _records(self) -> dict[str, FileRecord]:
        assert self._manifest is not None
        return {record.path.removeprefix(f"{self._manifest.name}/"): record for record in self._manifest.files}

    def _needed(self, wanted: StateDict) -> Iterable[tuple[str, int, int]]:
        """The file and the range of each item that is read for ``wanted``."""
        metadata = self._reader.read_metadata()
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(wanted, metadata, is_coordinator=False)
        for item in planner.create_local_plan().items:
            place = metadata.storage_data[item.storage_index]
            yield place.relative_path, place.offset, place.offset + place.length

    def _moves(self, everyone: Sequence[_Told]) -> list[dist.Move]:
        """What goes from which rank to which, the same on every rank: to one of each node, from all that have it."""
        lacks: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for told in everyone:
            for name, ranges in told.lacks.items():
                lacks.setdefault((_first_of_node(everyone, told.node), name), []).extend(ranges)
        moves: list[dist.Move] = []
        for (target, name), ranges in sorted(lacks.items()):
            record = self._records[name]
            holders = [rank for rank, told in enumerate(everyone) if name in told.has]
            if not holders:
                raise self._lost(record)
            for begin, end in _merged(ranges, record):
                moves.append(dist.Move(holders[len(moves) % len(holders)], target, name, begin, end - begin))
        return moves

    def _lost(self, record: FileRecord) -> IncompatibleCheckpointError:
        return IncompatibleCheckpointError(
            f"{self._source}: its file {record.path!r} was saved to the disk of node {record.node} of its run, and no "
            f"rank of this one has it. {ON_ALL_NODES}"
        )

    @contextlib.contextmanager
    def _files(self) -> Generator[_Files]:
        assert self._folder is not None
        with contextlib.ExitStack() as stack:
            sizes = {name: record.size_bytes for name, record in self._records.items()}
            yield _Files(stack, self._folder.path, self._place, sizes)


@final
class _Files:
    """The files of a checkpoint, and those that parts of them are brought to: with holes, as large as the whole."""

    def __init__(self, stack: contextlib.ExitStack, here: Path, place: Path | None, sizes: Mapping[str, int]) -> None:
        self._stack = stack
        self._here = here
        self._place = place
        self._sizes = sizes
        self._open: dict[str, int] = {}

    def read(self, name: str, offset: int, size: int) -> bytes:
        """So many bytes of the file on this disk."""
        data = os.pread(self._descriptor(self._here / name, os.O_RDONLY), size, offset)
        if len(data) != size:
            raise OSError(f"{str(self._here / name)!r} ends before byte {offset + size}")
        return data

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Put them where this node finds them."""
        assert self._place is not None
        descriptor = self._descriptor(self._place / name, os.O_WRONLY | os.O_CREAT)
        os.truncate(descriptor, self._sizes[name])
        while data:
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written

    def _descriptor(self, path: Path, flags: int) -> int:
        if str(path) not in self._open:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = self._open[str(path)] = os.open(path, flags)
            self._stack.callback(os.close, descriptor)
        return self._open[str(path)]


def _is_apart(folder: LocalFolder) -> bool:
    manifest = folder.manifest()
    return manifest is not None and manifest.node is not None


def _first_of_node(everyone: Sequence[_Told], node: Node) -> int:
    """The lowest rank that keeps what is brought to ``node``."""
    return min(rank for rank, told in enumerate(everyone) if told.node == node and told.place is not None)


def _merged(ranges: Iterable[tuple[int, int]], record: FileRecord) -> list[tuple[int, int]]:
    """Ranges as they are verified, by whole chunks, and each byte once."""
    chunk = record.chunk_bytes or max(1, record.size_bytes)
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        begin, end = begin // chunk * chunk, min(-(-end // chunk) * chunk, record.size_bytes)
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged

"""One checkpoint file for all ranks: a rank of each node reads it, at most, and the others get what it reads."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import xxhash

from composerlite import dist
from composerlite.checkpoint.format.torch_reader import Piece, TorchFile
from composerlite.checkpoint.format.zip_directory import entries
from composerlite.checkpoint.load.progress import Progress, progress_of
from composerlite.checkpoint.load.reading import RawFile, opened_as
from composerlite.errors import CheckpointError

__all__ = ["opened_together", "spread_file"]

log = logging.getLogger(__name__)
Known = dict[tuple[int, int], bytes]


@contextlib.contextmanager
def opened_together(
    path: Path | None, name: str, *, trust: bool = False, progress_bar: bool = False, rank0_only: bool = False
) -> Generator[tuple[TorchFile, Progress]]:
    """The file of rank 0, on every rank: all call the same methods of it in the same order.

    Rank 0 reads it, and so does the first rank of each other node that has the very same file under that path; what a
    rank reads the others of its node get from it, and those of nodes that have no such file from rank 0. Tensors come
    in pieces, straight to where they belong.

    Args:
        path: on this machine; ``None``: only rank 0 has it.
        name: of the checkpoint, for messages.
        trust: load any type, **running whatever code the file holds**.
        progress_bar: show one on a terminal, on rank 0.
        rank0_only: no other rank reads.

    Raises:
        CheckpointError: as :func:`~composerlite.checkpoint.load.reading.opened`, on every rank.
    """
    group = dist.get_group()
    rank = group.rank
    with contextlib.ExitStack() as stack:
        mine: _Primed | None = None
        progress: Progress | None = None
        with group.all_or_none(f"opening {name}"):
            if rank == 0:
                assert path is not None
                mine, progress = stack.enter_context(
                    opened_as(lambda raw: _Primed.of(raw, trust=trust), path, progress_bar=progress_bar)
                )
        if rank != 0 and dist.get_local_rank() == 0 and path is not None and not rank0_only:
            mine = _opened_here(stack, path, trust=trust)
        if progress is None:
            progress = stack.enter_context(progress_of(name, 0, False))
        sources = _sources_of(None if mine is None else mine.digest)
        spread = stack.enter_context(dist.node_broadcast(f"reading {name}", sources))
        raw, known = spread.object(lambda: _shared(mine))
        source = _SpreadSource(spread, mine.raw if spread.is_source and mine is not None else None, known)
        with group.all_or_none(f"reading {name}"):
            yield RawFile(source, raw[0], source.read, raw[1] and spread.is_source).torch_file(trust=trust), progress


def spread_file(raw: RawFile | None, what: str, *, trust: bool = False) -> Any:
    """What a torch file holds that rank 0 has, on every rank; all of it is read there, once.

    Args:
        raw: the file, on rank 0. what: it is, for messages.
        trust: load any type, **running whatever code the file holds**.

    Raises:
        CheckpointError: it cannot be read, on every rank.
    """
    mine: _Primed | None = None
    with dist.get_group().all_or_none(f"opening {what}"):
        if raw is not None:
            mine = _Primed.of(raw, trust=trust)
    with dist.node_broadcast(f"reading {what}", [0] * dist.get_world_size()) as spread:
        shared, known = spread.object(lambda: _shared(mine))
        source = _SpreadSource(spread, None if mine is None else mine.raw, known)
        file = RawFile(source, shared[0], source.read, shared[1] and spread.is_source).torch_file(trust=trust)
        file.read()
        return file.contents


def _opened_here(stack: contextlib.ExitStack, path: Path, *, trust: bool) -> _Primed | None:
    """The file of this node, if it can be read."""
    if not path.is_file():
        return None
    try:
        return stack.enter_context(opened_as(lambda raw: _Primed.of(raw, trust=trust), path))[0]
    except (CheckpointError, OSError) as e:
        log.warning("this node's file is not used, but that of rank 0: %s", e)
        return None


def _sources_of(digest: str | None) -> list[int]:
    """For each rank, the one that reads for it: the first of its node that has what rank 0 has, else rank 0.

    Args:
        digest: of what this rank could read; ``None``: nothing.
    """
    if dist.get_local_world_size() == dist.get_world_size():
        return [0] * dist.get_world_size()
    told = dist.get_group().gather((dist.get_node_rank(), digest))
    readers: dict[int, int] = {}
    for rank, (node, theirs) in enumerate(told):
        if theirs is not None and theirs == told[0][1]:
            readers.setdefault(node, rank)
    return [readers.get(node, 0) for node, _ in told]


class _Primed(NamedTuple):
    """A file, and what was read of it to see what it holds."""

    raw: RawFile
    known: Known

    @classmethod
    def of(cls, raw: RawFile, *, trust: bool) -> _Primed:
        known: Known = {}

        def remembered(read: Callable[[int, int], bytes]) -> Callable[[int, int], bytes]:
            def reading(offset: int, size: int) -> bytes:
                known[offset, size] = data = read(offset, size)
                return data

            return reading

        source = _Remembering(remembered(raw.source.read))
        if trust:  # its code would run here, and again on every rank
            entries(raw.size_bytes, source.read, remembered(raw.peek))
        else:
            TorchFile(source, raw.size_bytes, peek=remembered(raw.peek), map_location="meta")
        return cls(raw, known)

    @property
    def digest(self) -> str:
        """What two files have in common that are the same: names, sizes and sums of records."""
        digest = xxhash.xxh3_128(str(self.raw.size_bytes).encode())
        for place in sorted(self.known):
            digest.update(self.known[place])
        return digest.hexdigest()


@final
class _Remembering:
    """Reads what lies beside the tensors."""

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read = read

    def read(self, offset: int, size: int) -> bytes:
        """Exactly so many bytes."""
        return self._read(offset, size)

    def read_into(self, targets: Sequence[Piece], progress: Callable[[int], object] = int) -> None:
        """Tensors are not read here."""
        raise AssertionError("read before it is known where to")


def _shared(mine: _Primed | None) -> tuple[tuple[int, bool], Known]:
    assert mine is not None
    return (mine.raw.size_bytes, mine.raw.check_sums), mine.known


@final
class _SpreadSource:
    """The bytes of a file that one rank reads."""

    def __init__(self, spread: dist.NodeBroadcast, raw: RawFile | None, known: Known) -> None:
        self._spread = spread
        self._raw = raw
        self._known = known

    def read(self, offset: int, size: int) -> bytes:
        """Exactly so many bytes."""
        data = self._known.get((offset, size))
        return self._spread.object(lambda: self._read(offset, size)) if data is None else data

    def _read(self, offset: int, size: int) -> bytes:
        assert self._raw is not None
        return self._raw.source.read(offset, size)

    def read_into(self, targets: Sequence[Piece], progress: Callable[[int], object] = int) -> None:
        """Fill memory on every rank."""

        def read(pieces: Sequence[Piece]) -> None:
            assert self._raw is not None
            self._raw.source.read_into(pieces, progress)

        self._spread.fill(targets, read)

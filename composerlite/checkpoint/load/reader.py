"""Opening a checkpoint file: its required contents, its manifest, and access to its bytes.

On several ranks one rank of each node reads it, at most, and the others get what it reads.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast, final

import xxhash

from composerlite import dist
from composerlite.checkpoint.format.packing import is_packed, unpacked
from composerlite.checkpoint.format.torch_reader import ByteSource, MapLocation, TorchFile, UnverifiedFile
from composerlite.checkpoint.format.zip_file import entries
from composerlite.checkpoint.load.resolve import progress_of, what_is_there
from composerlite.checkpoint.place.catalog import Catalog, home_of
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.place.place import OnBytes
from composerlite.checkpoint.trust.trusted import RefusedError
from composerlite.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    UntrustedCheckpointError,
)
from composerlite.storage import ParallelReader
from composerlite.types import Piece

__all__ = [
    "OpenCheckpoint",
    "RawFile",
    "opened",
    "opened_together",
    "readable",
    "safe_torch_load",
    "spread_file",
    "validate",
]

log = logging.getLogger(__name__)

T = TypeVar("T")
_ATTEMPTS = 20


class RawFile(NamedTuple):
    """The bytes of a torch file.

    Attributes:
        source: of all bytes; verified where there is something to compare them with.
        size_bytes: how many there are.
        peek: reads bytes that are verified later, or not at all.
        check_sums: whether nothing but the sums in the file verifies them.
        comment_bytes: size of the zip comment behind them.
        expect: is called with the bytes that ``peek`` will be asked for.
        verified: numbers of the chunks of the file that were read and verified so far.
    """

    source: ByteSource
    size_bytes: int
    peek: Callable[[int, int], bytes]
    check_sums: bool
    expect: Callable[[int, int], object] | None = None
    comment_bytes: int = 0
    verified: Collection[int] = ()

    def torch_file(self, *, map_location: MapLocation = "cpu", trust: bool = False) -> TorchFile:
        """Return its contents."""
        return TorchFile(
            self.source,
            self.size_bytes,
            peek=self.peek,
            expect=self.expect,
            map_location=map_location,
            trust=trust,
            check_sums=self.check_sums,
            comment_bytes=self.comment_bytes,
        )


@final
class OpenCheckpoint(NamedTuple):
    """A checkpoint file that is open.

    Attributes:
        file: its contents.
        progress: to be called with each number of bytes read.
        verified: numbers of the chunks of this rank's file that were read and verified so far.
    """

    file: TorchFile
    progress: OnBytes
    verified: Collection[int]


@contextlib.contextmanager
def opened(
    path: Path, *, map_location: MapLocation = "cpu", trust: bool = False, progress_bar: bool = False
) -> Generator[OpenCheckpoint]:
    """Open the checkpoint file ``path``.

    A file with a record is verified: by chunks as they are read, or before that if it is compressed. One without is
    compared with its own checksums, and a warning says that this is all. The function that the environment variable
    ``CHECKPOINT_VALIDATION_FUNCTION`` names is asked first.

    Raises:
        CheckpointNotFoundError: there is no such file; the message lists what the folder has.
        CorruptCheckpointError: the bytes are not those that were saved, or the function says so.
        UntrustedCheckpointError: it holds a type that is not known to be safe.
        ConfigError: the function cannot be imported.
    """

    def torch_file(raw: RawFile) -> tuple[TorchFile, Collection[int]]:
        return raw.torch_file(map_location=map_location, trust=trust), raw.verified

    with opened_as(torch_file, path, progress_bar=progress_bar) as ((file, verified), progress):
        yield OpenCheckpoint(file, progress, verified)


@contextlib.contextmanager
def opened_as(make: Callable[[RawFile], T], path: Path, *, progress_bar: bool = False) -> Generator[tuple[T, OnBytes]]:
    """:func:`opened`, but what ``make`` makes of the file's bytes. It may be called several times."""
    if not path.is_file():
        raise CheckpointNotFoundError(f"there is no checkpoint file {str(path)!r}.{what_is_there(path)}")
    path = path.resolve()
    validate(path)
    with (
        progress_of(f"reading {path.name}", path.stat().st_size, progress_bar) as progress,
        readable(path),
        contextlib.ExitStack() as stack,
    ):
        yield _opened_whole(stack, path, make), progress


def _opened_whole(stack: contextlib.ExitStack, path: Path, make: Callable[[RawFile], T]) -> T:
    """Call ``make`` on one version of the file, the old or the new one, if it is replaced meanwhile."""
    for left in reversed(range(_ATTEMPTS)):
        before = _version(path)
        with contextlib.ExitStack() as opening:
            try:
                made = make(_raw_file(opening, path))
            except (CorruptCheckpointError, FileNotFoundError):
                if not left or _version(path) == before:
                    raise
            else:
                if not left or _version(path) == before:
                    stack.enter_context(opening.pop_all())
                    return made
        log.info("%s was replaced while it was opened: opening it again", path)
    raise AssertionError("unreachable")


def _version(path: Path) -> tuple[int, int, int, int] | None:
    """Device, inode, size and time of a file: they change when it is replaced."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _raw_file(stack: contextlib.ExitStack, path: Path) -> RawFile:
    """The bytes of the torch file: compared with its record as they are read, or all before if it is packed."""
    place, name = home_of(Folder(path.parent), path.name)
    catalog = Catalog(place)
    manifest = catalog.manifest_of(name)
    if manifest is None:
        log.warning("checkpoint %s has no record: loading it unverified", path)
    if is_packed(path):
        verified: Collection[int] = ()
        if manifest is not None:
            catalog.verify(manifest)
            verified = range(max(1, len(manifest.files[0].digest.chunk_digests())))
        size_bytes = None if manifest is None else manifest.unpacked_bytes or None
        file = stack.enter_context(unpacked(path, size_bytes=size_bytes))
        beside, size_bytes = UnverifiedFile(file), file.seek(0, os.SEEK_END)
        return RawFile(beside, size_bytes, beside.read, manifest is None, beside.expect, verified=verified)
    beside = UnverifiedFile(stack.enter_context(path.open("rb", buffering=0)))
    source = stack.enter_context(ParallelReader(path, None if manifest is None else manifest.files[0].digest))
    tail_bytes, verified = source.tail_bytes, source.verified
    return RawFile(source, source.size_bytes, beside.read, manifest is None, beside.expect, tail_bytes, verified)


def safe_torch_load(path: str | Path, map_location: MapLocation = "cpu", *, trust_checkpoint: bool = False) -> Any:
    """The contents of the torch file ``path``, checkpoint or not, compared with nothing but its own checksums.

    Args:
        path: a local file.
        map_location: where tensors go, as ``torch.load`` takes it.
        trust_checkpoint: load any type, **running whatever code the file holds**. Only for files you made yourself.

    Returns:
        The object that was saved.

    Raises:
        CheckpointNotFoundError: there is no such file.
        UntrustedCheckpointError: it holds a type that is not known to be safe.
        CorruptCheckpointError: it is damaged, or no torch file at all.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointNotFoundError(f"there is no checkpoint {str(path)!r}.")
    with readable(path), path.open("rb", buffering=0) as file:
        source = UnverifiedFile(file)
        raw = RawFile(source, file.seek(0, os.SEEK_END), source.read, check_sums=True)
        torch_file = raw.torch_file(map_location=map_location, trust=trust_checkpoint)
        torch_file.read()
        return torch_file.contents


@contextlib.contextmanager
def readable(path: Path) -> Generator[None]:
    """Within it, whatever damaged bytes make the reader raise says that ``path`` is damaged, or what it refuses."""
    try:
        yield
    except RefusedError as e:
        raise UntrustedCheckpointError(
            f"checkpoint {str(path)!r} holds {e.name}, {_way_out(e)}load with trust_checkpoint=True, which runs "
            "whatever code the file holds."
        ) from e
    except CorruptCheckpointError as e:
        if str(path) in str(e):
            raise
        raise CorruptCheckpointError(f"checkpoint {str(path)!r} cannot be read, it is damaged or foreign: {e}") from e


def _way_out(refused: RefusedError) -> str:
    """Advice on a refused type, up to the word "or", for an error message."""
    if refused.allowable:
        kind = refused.name.rsplit(".", 1)[-1]
        return (
            "which is not known to be safe to load. If it is yours, allow the type with "
            f"torch.serialization.add_safe_globals([{kind}]), or "
        )
    return "which is not known to be safe to load in that form. Only if the file is yours "


# ── one file for all ranks ───────────────────────────────────────────────────────────────────────────────────────────
Known = dict[tuple[int, int], bytes]


@contextlib.contextmanager
def opened_together(
    path: Path | None, name: str, *, trust: bool = False, progress_bar: bool = False, rank0_only: bool = False
) -> Generator[OpenCheckpoint]:
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
        CheckpointError: as :func:`~composerlite.checkpoint.load.reader.opened`, on every rank.
    """
    group = dist.get_group()
    rank = group.rank
    with contextlib.ExitStack() as stack:
        mine: _Primed | None = None
        progress: OnBytes | None = None
        with group.all_or_none(f"opening {name}"):
            if rank == 0:
                assert path is not None
                mine, progress = stack.enter_context(
                    opened_as(lambda raw: _Primed(raw, trust=trust), path, progress_bar=progress_bar)
                )
        if rank != 0 and dist.get_local_rank() == 0 and path is not None and not rank0_only:
            mine = _opened_here(stack, path, trust=trust)
        if progress is None:
            progress = stack.enter_context(progress_of(name, 0, False))
        sources = _sources_of(None if mine is None else mine.digest)
        spread = stack.enter_context(dist.node_broadcast(f"reading {name}", sources))
        raw = _shared(spread, mine)
        with group.all_or_none(f"reading {name}"):
            yield OpenCheckpoint(raw.torch_file(trust=trust), progress, () if mine is None else mine.raw.verified)


def spread_file(raw: RawFile | None, what: str, *, trust: bool = False) -> Any:
    """Read a torch file that rank 0 has; what it holds, on every rank.

    Args:
        raw: the file, on rank 0. what: it is, for messages.
        trust: load any type, **running whatever code the file holds**.

    Raises:
        CheckpointError: it cannot be read, on every rank.
    """
    mine: _Primed | None = None
    with dist.get_group().all_or_none(f"opening {what}"):
        if raw is not None:
            mine = _Primed(raw, trust=trust)
    with dist.node_broadcast(f"reading {what}", [0] * dist.get_world_size()) as spread:
        file = _shared(spread, mine).torch_file(trust=trust)
        file.read()
        return file.contents


def _opened_here(stack: contextlib.ExitStack, path: Path, *, trust: bool) -> _Primed | None:
    """The file of this node, if it can be read."""
    if not path.is_file():
        return None
    try:
        return stack.enter_context(opened_as(lambda raw: _Primed(raw, trust=trust), path))[0]
    except (CheckpointError, OSError) as e:
        log.warning("using rank 0's file, not this node's: %s", e)
        return None


def _sources_of(digest: str | None) -> list[int]:
    """Map each rank to the one that reads for it: the first of its node that sees rank 0's file, else rank 0.

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


@final
class _Primed:
    """A file, and what was read of it to see what it holds: all that lies beside the tensors."""

    def __init__(self, raw: RawFile, *, trust: bool) -> None:
        self.raw = raw
        self.known: Known = {}
        if trust:  # its code would run here, and again on every rank
            entries(raw.size_bytes, self.read, self._peek, comment_bytes=raw.comment_bytes)
        else:
            TorchFile(self, raw.size_bytes, peek=self._peek, map_location="meta", comment_bytes=raw.comment_bytes)

    @property
    def digest(self) -> str:
        """Digest of what two files have in common that are the same: names, sizes and sums of records."""
        digest = xxhash.xxh3_128(str(self.raw.size_bytes).encode())
        for place in sorted(self.known):
            digest.update(self.known[place])
        return digest.hexdigest()

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly ``size`` bytes and keep them."""
        self.known[offset, size] = data = self.raw.source.read(offset, size)
        return data

    def _peek(self, offset: int, size: int) -> bytes:
        self.known[offset, size] = data = self.raw.peek(offset, size)
        return data

    def read_into(self, targets: Sequence[Piece], progress: Callable[[int], object] = int) -> None:
        """Tensors are not read here."""
        raise AssertionError("read before it is known where to")


def _shared(spread: dist.NodeBroadcast, mine: _Primed | None) -> RawFile:
    """The file on every rank, of which the sources of ``spread`` have it as ``mine``."""

    def told() -> tuple[int, bool, Known, int]:
        assert mine is not None
        return mine.raw.size_bytes, mine.raw.check_sums, mine.known, mine.raw.comment_bytes

    size_bytes, check_sums, known, comment_bytes = spread.object(told)
    source = _SpreadSource(spread, mine.raw.source if mine is not None and spread.is_source else None, known)
    return RawFile(source, size_bytes, source.read, check_sums and spread.is_source, comment_bytes=comment_bytes)


@final
@dataclass(frozen=True)
class _SpreadSource:
    """The bytes of a file that one rank reads, from its ``source``; ``known`` ones all ranks have."""

    spread: dist.NodeBroadcast
    source: ByteSource | None
    known: Known

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly ``size`` bytes."""
        data = self.known.get((offset, size))
        return self.spread.object(lambda: self._read(offset, size)) if data is None else data

    def _read(self, offset: int, size: int) -> bytes:
        assert self.source is not None
        return self.source.read(offset, size)

    def read_into(self, targets: Sequence[Piece], progress: Callable[[int], object] = int) -> None:
        """Fill memory on every rank."""

        def read(pieces: Sequence[Piece]) -> None:
            assert self.source is not None
            self.source.read_into(pieces, progress)

        self.spread.fill(targets, read)


# ── the user's own check ─────────────────────────────────────────────────────────────────────────────────────────────
_VALIDATION = "CHECKPOINT_VALIDATION_FUNCTION"


def validate(path: Path) -> None:
    """Call the function that ``CHECKPOINT_VALIDATION_FUNCTION`` names, if it names one, before ``path`` is read.

    Raises:
        UntrustedCheckpointError: the function returns false. A resume ends with this error and renames no file.
        ConfigError: the function cannot be imported.
    """
    name = os.environ.get(_VALIDATION)
    if name and not _function(name)(path, None):  # None: the file as a whole, as Composer calls it
        raise UntrustedCheckpointError(f"checkpoint {str(path)!r} was refused by {name}, which {_VALIDATION} names.")


@functools.cache
def _function(name: str) -> Callable[[Path, None], bool]:
    module, _, attribute = name.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(
            f"{_VALIDATION}={name!r} cannot be imported: {e}. Expected 'package.module.function', a function of "
            "(path, specs) that returns whether the file may be read."
        ) from e
    if not callable(found):
        raise ConfigError(f"{_VALIDATION}={name!r} is {type(found).__name__} and no function.")
    return cast("Callable[[Path, None], bool]", found)

"""Opening a checkpoint file: what it must contain, who vouches for it, and how its bytes are reached.

On several ranks one rank of each node reads it, at most, and the others get what it reads.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast, final

import xxhash

from composerlite import dist
from composerlite.checkpoint.format.packing import is_packed, unpacked
from composerlite.checkpoint.format.torch_reader import ByteSource, FileSource, MapLocation, Piece, TorchFile
from composerlite.checkpoint.format.zip_file import entries
from composerlite.checkpoint.load.resolve import Progress, progress_of
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.checkpoint.trust.trusted import RefusedError
from composerlite.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    UntrustedCheckpointError,
)
from composerlite.storage import FileDigest, ParallelReader

__all__ = [
    "RawFile",
    "home_of",
    "opened",
    "opened_as",
    "opened_together",
    "readable",
    "safe_torch_load",
    "spread_file",
    "validate",
    "what_is_there",
]

log = logging.getLogger(__name__)

T = TypeVar("T")


class RawFile(NamedTuple):
    """The bytes of a torch file.

    Attributes:
        source: of all bytes; verified where there is something to compare them with.
        size_bytes: how many there are.
        peek: reads bytes that are verified later, or not at all.
        check_sums: whether nothing but the sums in the file verifies them.
        expect: is told which bytes ``peek`` will be asked for.
    """

    source: ByteSource
    size_bytes: int
    peek: Callable[[int, int], bytes]
    check_sums: bool
    expect: Callable[[int, int], object] | None = None

    def torch_file(self, *, map_location: MapLocation = "cpu", trust: bool = False) -> TorchFile:
        """What is in it."""
        return TorchFile(
            self.source,
            self.size_bytes,
            peek=self.peek,
            expect=self.expect,
            map_location=map_location,
            trust=trust,
            check_sums=self.check_sums,
        )


@contextlib.contextmanager
def opened(
    path: Path, *, map_location: MapLocation = "cpu", trust: bool = False, progress_bar: bool = False
) -> Generator[tuple[TorchFile, Progress]]:
    """The checkpoint file ``path``, and what is to be told of the bytes that are read of it.

    What has a manifest is verified: by chunks as they are read, or before that where the manifest is an old one or the
    file is compressed. What has none is compared with its own checksums, and a warning says that this is all. The
    function that the environment variable ``CHECKPOINT_VALIDATION_FUNCTION`` names is asked first.

    Raises:
        CheckpointNotFoundError: there is no such file; the message lists what the folder has.
        CorruptCheckpointError: the bytes are not those that were saved, or the function says so.
        UntrustedCheckpointError: it holds a type that is not known to be safe.
        ConfigError: the function cannot be imported.
    """

    def torch_file(raw: RawFile) -> TorchFile:
        return raw.torch_file(map_location=map_location, trust=trust)

    with opened_as(torch_file, path, progress_bar=progress_bar) as found:
        yield found


@contextlib.contextmanager
def opened_as(make: Callable[[RawFile], T], path: Path, *, progress_bar: bool = False) -> Generator[tuple[T, Progress]]:
    """:func:`opened`, but what ``make`` makes of the file's bytes. It may be called twice."""
    if not path.is_file():
        raise CheckpointNotFoundError(f"there is no checkpoint file {str(path)!r}.{what_is_there(path)}")
    path = path.resolve()
    validate(path)
    catalog, name = home_of(path)
    manifest = catalog.manifest_of(name)
    with progress_of(f"reading {path.name}", path.stat().st_size, progress_bar) as progress, readable(path):
        if is_packed(path):
            _check_whole(catalog, manifest, path)
            size_bytes = manifest.unpacked_bytes if manifest is not None and manifest.unpacked_bytes else None
            with unpacked(path, size_bytes=size_bytes) as file:
                yield make(_raw_file(FileSource(file), file, check_sums=manifest is None)), progress
            return
        with contextlib.ExitStack() as stack:
            yield _verified(stack, path, catalog, manifest, make), progress


def _verified(
    stack: contextlib.ExitStack, path: Path, catalog: Catalog, manifest: Manifest | None, make: Callable[[RawFile], T]
) -> T:
    """What ``make`` makes of the file, whose bytes are compared with the manifest as they are read."""
    file = stack.enter_context(path.open("rb", buffering=0))

    def made(digest: FileDigest | None, *, check_sums: bool = False) -> T:
        reader = stack.enter_context(ParallelReader(path, digest))
        return make(_raw_file(reader, file, check_sums=check_sums))

    if manifest is None:
        log.warning("checkpoint %s has no manifest: it is loaded unverified", path)
        return made(None, check_sums=True)
    try:
        return made(_digest(catalog, manifest, path))
    except CorruptCheckpointError:
        if not catalog.is_replaced(manifest):
            raise
        return made(None)


def _raw_file(source: ByteSource, file: IO[bytes], *, check_sums: bool) -> RawFile:
    beside = FileSource(file)
    return RawFile(source, file.seek(0, os.SEEK_END), beside.read, check_sums, beside.expect)


def _digest(catalog: Catalog, manifest: Manifest, path: Path) -> FileDigest:
    """What ``path`` must contain."""
    for record in manifest.files:
        if (catalog.folder / record.path).resolve() == path:
            return record.digest
    raise CorruptCheckpointError(f"the manifest of checkpoint {str(path)!r} does not have it among its files.")


def _check_whole(catalog: Catalog, manifest: Manifest | None, path: Path) -> None:
    """Compare all bytes with the manifest before one of them is used."""
    if manifest is None:
        log.warning("checkpoint %s has no manifest: it is loaded unverified", path)
        return
    try:
        catalog.verify(manifest)
    except CorruptCheckpointError:
        if not catalog.is_replaced(manifest):
            raise


# ── finding it ───────────────────────────────────────────────────────────────────────────────────────────────────────
def home_of(path: Path) -> tuple[Catalog, str]:
    """The catalog that knows ``path`` and the name it has there: its folder, or one above for names with folders."""
    for folder in path.parents:
        if (folder / ".manifest" / f"{path.relative_to(folder)}.json").is_file():
            return Catalog(folder), str(path.relative_to(folder))
    return Catalog(path.parent), path.name


def what_is_there(path: Path) -> str:
    """What a user may have meant by ``path``, where there is no checkpoint: a sentence, with a space before it."""
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return f" The folder {str(folder)!r} does not exist either."
    names = [manifest.name for manifest in Catalog(folder).manifests()]
    if not names:
        return f" The folder {str(folder)!r} holds no checkpoint."
    kind = "is a folder that holds" if path.is_dir() else "does not exist; the folder holds"
    return f" {str(path)!r} {kind}: {', '.join(names[-8:])}. Give one of these files."


def safe_torch_load(path: str | Path, map_location: MapLocation = "cpu", *, trust_checkpoint: bool = False) -> Any:
    """The contents of the torch file ``path``, checkpoint or not, compared with nothing but its own checksums.

    Args:
        path: a local file.
        map_location: where tensors go, as ``torch.load`` takes it.
        trust_checkpoint: load any type, **running whatever code the file holds**. Only for files you made yourself.

    Raises:
        CheckpointNotFoundError: there is no such file.
        UntrustedCheckpointError: it holds a type that is not known to be safe.
        CorruptCheckpointError: it is damaged, or no torch file at all.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointNotFoundError(f"there is no checkpoint {str(path)!r}.")
    with readable(path), path.open("rb", buffering=0) as raw:
        source = FileSource(raw)
        size = raw.seek(0, 2)
        file = TorchFile(
            source, size, peek=source.read, map_location=map_location, trust=trust_checkpoint, check_sums=True
        )
        file.read()
        return file.contents


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
    """What to do about it, up to the word "or"."""
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
        CheckpointError: as :func:`~composerlite.checkpoint.load.reader.opened`, on every rank.
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


# ── the user's own check ─────────────────────────────────────────────────────────────────────────────────────────────
_VALIDATION = "CHECKPOINT_VALIDATION_FUNCTION"


def validate(path: Path) -> None:
    """Ask the function that ``CHECKPOINT_VALIDATION_FUNCTION`` names, if it names one, whether ``path`` may be read.

    Raises:
        CorruptCheckpointError: it says no.
        ConfigError: it cannot be imported.
    """
    name = os.environ.get(_VALIDATION)
    if name and not _function(name)(path, None):  # None: the file as a whole, as Composer calls it
        raise CorruptCheckpointError(f"checkpoint {str(path)!r} was refused by {name}, which {_VALIDATION} names.")


@functools.cache
def _function(name: str) -> Callable[[Path, None], bool]:
    module, _, attribute = name.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(
            f"{_VALIDATION}={name!r} cannot be imported: {e}. Want 'package.module.function', a function of "
            "(path, specs) that returns whether the file may be read."
        ) from e
    if not callable(found):
        raise ConfigError(f"{_VALIDATION}={name!r} is {type(found).__name__} and no function.")
    return cast("Callable[[Path, None], bool]", found)

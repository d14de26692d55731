"""Opening a checkpoint file: what it must contain, who vouches for it, and how its bytes are reached."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from composerlite.checkpoint.format.packing import is_packed, unpacked
from composerlite.checkpoint.format.torch_reader import ByteSource, FileSource, MapLocation, TorchFile
from composerlite.checkpoint.load.progress import Progress, progress_of
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.checkpoint.trust.trusted import RefusedError
from composerlite.checkpoint.trust.validation import validate
from composerlite.errors import CheckpointNotFoundError, CorruptCheckpointError, UntrustedCheckpointError
from composerlite.storage import FileDigest, ParallelReader

__all__ = ["RawFile", "home_of", "opened", "opened_as", "readable", "safe_torch_load", "what_is_there"]

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

"""Open a checkpoint file: verify the bytes by the record, refuse unknown types, and read the contents."""

from __future__ import annotations

import contextlib
import logging
import os
import pkgutil
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast, final

from composerlite import dist
from composerlite.checkpoint.foreign.deepspeed import merged_contents
from composerlite.checkpoint.format.archive import stand_ins
from composerlite.checkpoint.format.byte_sources import ByteSource, Window
from composerlite.checkpoint.format.packing import unpacked
from composerlite.checkpoint.format.torch_reader import MapLocation, TorchFile, untrusted
from composerlite.checkpoint.format.zip_file import entries
from composerlite.checkpoint.place.catalog import record_in
from composerlite.checkpoint.place.place import Folder, OnBytes, Place
from composerlite.checkpoint.trust.unpickler import RefusedError
from composerlite.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError, UntrustedCheckpointError
from composerlite.storage import ParallelReader
from composerlite.storage.progress import progress_of
from composerlite.types import Piece, StateDict

log = logging.getLogger(__name__)


class RawFile(NamedTuple):
    """The bytes of a torch file.

    Attributes:
        source: reads bytes, verified if the checkpoint has a record.
        check_sums: compare the bytes with the checksums in the file, since no record verifies the bytes.
        progress: shows the bytes read in the progress bar.
    """

    source: ParallelReader | Window
    check_sums: bool
    progress: OnBytes = int


@contextlib.contextmanager
def opened(
    path: Path,
    *,
    map_location: MapLocation = "cpu",
    trust: bool = False,
    progress_bar: bool = False,
    together: str = "",
) -> Generator[TorchFile]:
    """Open the checkpoint file ``path``.

    A file with a record is verified: by chunks during reads, or first as a whole if compressed. A file without a record
    is only compared with its own checksums, with a warning. The function in the environment variable
    ``CHECKPOINT_VALIDATION_FUNCTION`` is called first.

    Args:
        path: the file. With ``together`` the path is the same on every rank, and rank 0 reads the file.
        map_location: device of the tensors, as in ``torch.load``; not used with several ranks.
        trust: load any type, **running any code in the file**.
        progress_bar: show a progress bar on a terminal.
        together: name of the checkpoint, for messages. If given, every rank calls this function, and all ranks call the
            same methods of the file in the same order. Rank 0 reads the file once, and broadcasts each piece. Tensors
            arrive in pieces, directly in their destination. Empty: this process alone opens the file.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: the bytes differ from the saved bytes.
        UntrustedCheckpointError: the file holds a type that is not known to be safe, or the validation function
            returned false.
        ConfigError: the validation function cannot be imported, or is no function.
    """
    group = dist.get_group() if together else dist.Group()
    with readable(Path(os.path.realpath(path))), contextlib.ExitStack() as stack:
        raw: RawFile | None = None
        with group.all_or_none(f"opening {together}"):
            if group.is_first:
                raw = stack.enter_context(_opened_bytes(path, progress_bar=progress_bar))
        if raw is not None and group.size == 1:
            source, check_sums = raw.source, raw.check_sums
            file = TorchFile(source, source.size_bytes, map_location=map_location, trust=trust, check_sums=check_sums)
        else:
            file = shared_file(raw, together, trust=trust)
        if raw is not None:
            file.progress, file.verified = raw.progress, raw.source.verified
        with group.all_or_none(f"reading {together}"):
            yield file


@contextlib.contextmanager
def _opened_bytes(path: Path, *, progress_bar: bool) -> Generator[RawFile]:
    """Open ``path`` without reading contents."""
    check_exists(path)
    path = path.resolve()
    validate(path)
    with progress_of(f"reading {path.name}", path.stat().st_size, progress_bar) as progress:
        manifest = record_in(Folder(path.parent), path.name)
        digest = None if manifest is None else manifest.files[0].digest
        if digest is None:
            log.warning("checkpoint %s has no record: loading it unverified", path)
        size_bytes = None if manifest is None else manifest.unpacked_bytes or None
        with path.open("rb") as file:
            is_zip = file.read(2) == b"PK"
        with ParallelReader(path, digest) if is_zip else unpacked(path, digest, size_bytes=size_bytes) as source:
            yield RawFile(source, digest is None, progress)


def check_exists(path: Path) -> None:
    """Raise CheckpointNotFoundError if there is no file ``path``."""
    if not path.is_file():
        raise CheckpointNotFoundError(
            f"there is no checkpoint file {str(path)!r}. 'composerlite checkpoint ls' lists checkpoints in a folder."
        )


def safe_torch_load(path: str | Path, map_location: MapLocation = "cpu", *, trust_checkpoint: bool = False) -> Any:
    """Load the torch file ``path``, checkpoint or not. The bytes are compared only with the checksums in the file.

    Args:
        path: a local file.
        map_location: device of the tensors, as in ``torch.load``.
        trust_checkpoint: load any type, **running any code in the file**. Only for files you made yourself.

    Returns:
        The object that was saved.

    Raises:
        CheckpointNotFoundError: there is no such file.
        UntrustedCheckpointError: the file holds a type that is not known to be safe.
        CorruptCheckpointError: the file is damaged, or no torch file.
    """
    path = Path(path)
    check_exists(path)
    with readable(path), ParallelReader(path) as source:
        file = TorchFile(source, source.size_bytes, map_location=map_location, trust=trust_checkpoint, check_sums=True)
        file.read()
        return file.contents


@contextlib.contextmanager
def readable(path: Path) -> Generator[None]:
    """Add ``path`` to errors about damaged bytes and refused types in the block, and how to load such types."""
    try:
        yield
    except RefusedError as e:
        raise untrusted(f"checkpoint {str(path)!r}", e, may_trust=True) from e
    except CorruptCheckpointError as e:
        if str(path) not in str(e):  # change this object: every rank may have raised the same error
            e.args = (f"checkpoint {str(path)!r} cannot be read. It is damaged or has another format: {e}",)
        e.add_note("If another process replaced the file while it was read, load it again.")
        raise


# ── one file for all ranks ───────────────────────────────────────────────────────────────────────────────────────────
def shared_file(raw: RawFile | None, what: str, *, trust: bool = False) -> TorchFile:
    """Open a torch file on every rank; rank 0 reads the file. Collective, as are all methods of the result.

    Args:
        raw: the file on rank 0; ``None`` on the other ranks.
        what: name of the file, for messages.
        trust: load any type, **running any code in the file**.

    Raises:
        CheckpointError: the file cannot be read; on every rank.
    """
    group = dist.get_group()
    headers: dict[tuple[int, int], bytes] = {}  # by offset and size

    def described() -> tuple[int, bool, dict[tuple[int, int], bytes]]:
        """Read the headers; return the size of the file, whether to compare checksums, and the headers."""
        assert raw is not None
        file = raw.source

        def read(offset: int, size: int) -> bytes:
            return headers.setdefault((offset, size), file.read(offset, size))

        try:
            if trust:  # do not unpickle: the code in the file would run here, and later on every rank
                entries(file.size_bytes, read, is_whole=raw.check_sums)
            else:
                noted: Any = SimpleNamespace(read=read)  # no tensor is read here
                TorchFile(noted, file.size_bytes, map_location="meta", check_sums=raw.check_sums)
        except RefusedError as e:  # this error of rank 0 cannot be sent to the other ranks
            raise untrusted(f"checkpoint {what!r}", e, may_trust=True) from e
        return file.size_bytes, raw.check_sums, headers

    size_bytes, check_sums, headers = group.from_first(f"opening {what}", described)
    source = _SharedBytes(cast("ByteSource", None if raw is None else raw.source), headers, f"reading {what}")
    # The other ranks get bytes that rank 0 has compared with the sums.
    return TorchFile(source, size_bytes, trust=trust, check_sums=check_sums and group.is_first)


@final
class _SharedBytes(NamedTuple):
    """The bytes of a file that rank 0 reads for all ranks. Reads are collective.

    Rank 0 first reads the headers, everything except tensors, to broadcast all headers at once: otherwise each small
    read of a header would be a separate broadcast.

    Attributes:
        source: the bytes of the file, used on rank 0 alone.
        headers: the headers, by offset and size.
        what: the operation, for errors of ranks.
    """

    source: ByteSource
    headers: Mapping[tuple[int, int], bytes]
    what: str

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly ``size`` bytes."""
        if (data := self.headers.get((offset, size))) is not None:
            return data
        return dist.get_group().from_first(self.what, lambda: self.source.read(offset, size))

    def read_into(self, targets: Sequence[Piece], progress: Callable[[int], object] = int) -> None:
        """Fill ``targets`` on every rank. ``progress`` is called on rank 0, with each number of bytes read."""
        dist.transfers.broadcast_memory(self.what, targets, lambda pieces: self.source.read_into(pieces, progress))


# ── files of DeepSpeed's engine ──────────────────────────────────────────────────────────────────────────────────────
def deepspeed_contents(place: Place, folder: str, *, trust: bool = False) -> StateDict:
    """Return the contents of one save of DeepSpeed's engine, with weights and optimizer merged from all ranks.

    All contents are in memory at once, twice for a moment.

    Args:
        place: the place with the folder.
        folder: path of the folder of the save, in that place.
        trust: load any type, **running any code in the files**.

    Raises:
        CorruptCheckpointError: a file is missing or damaged, or the files do not fit together.
        IncompatibleCheckpointError: layers or experts are split over ranks.
        UntrustedCheckpointError: a file holds a type that is not known to be safe.
    """
    source = f"checkpoint {place.uri(folder)!r}"

    def read(name: str) -> StateDict:
        path = f"{folder}/{name}"
        if (here := place.path_of(path)) is not None:
            validate(here)
        with readable(Path(place.uri(path))), place.opened(path, None, threads=1) as data:
            return read_states(TorchFile(data, place.size(path), trust=trust, check_sums=True, types=stand_ins()))

    contents = merged_contents(place.names(folder), read, source)
    log.info("%s of DeepSpeed: merged the files of all ranks", source)
    return contents


def read_states(file: TorchFile, prune: Callable[[StateDict], StateDict] | None = None) -> StateDict:
    """Read a file of DeepSpeed and return the dict in the file; ``prune`` selects the parts to read.

    Raises:
        CorruptCheckpointError: the bytes are damaged, or hold no dict.
    """
    if not isinstance(file.contents, dict):
        raise CorruptCheckpointError(f"it holds {type(file.contents).__name__} and not a dict")
    file.contents = file.contents if prune is None else prune(file.contents)
    file.read()
    return file.contents


# ── the user's own check ─────────────────────────────────────────────────────────────────────────────────────────────
_VALIDATION = "CHECKPOINT_VALIDATION_FUNCTION"


def validate(path: Path) -> None:
    """Call the function in ``CHECKPOINT_VALIDATION_FUNCTION``, if any, before ``path`` is read.

    Raises:
        UntrustedCheckpointError: the function returns false. A resume ends with this error and renames no file.
        ConfigError: the function cannot be imported, or is no function.
    """
    name = os.environ.get(_VALIDATION)
    if not name:
        return
    try:
        function: Any = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(
            f"{_VALIDATION}={name!r} cannot be imported: {e}. Expected 'package.module.function', a function of "
            "(path, specs) that returns whether the file may be read."
        ) from e
    if not callable(function):
        raise ConfigError(f"{_VALIDATION}={name!r} is {type(function).__name__} and not a function.")
    if not function(path, None):  # None, as in Composer's call: check the file as a whole
        raise UntrustedCheckpointError(f"checkpoint {str(path)!r} was refused by {name}, which {_VALIDATION} names.")

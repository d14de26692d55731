"""The archives of a checkpoint of DeepSpeed, one for each rank, and how one is read: in place, nothing is extracted.

Each holds ``composer_states.pt``, the same in all, and below ``deepspeed/`` the files that DeepSpeed writes on that
rank, as it writes them: what was extracted from the archives of all ranks is a folder that DeepSpeed's tools read.

Pickles in them go through the restricted reader: beside what every checkpoint may hold they hold a few classes of
DeepSpeed, which are its own or, where it is not installed, stand-ins without a life of their own.
"""

from __future__ import annotations

import contextlib
import re
import tarfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from composerlite.checkpoint.format.packing.archive import STATES, is_tar_header, next_member
from composerlite.checkpoint.format.packing.compression import codec_of
from composerlite.checkpoint.format.packing.unpacking import is_packed, uncompressed
from composerlite.checkpoint.format.torch_reader import ByteSource, FileSource, Piece, TorchFile
from composerlite.errors import CorruptCheckpointError, IncompatibleCheckpointError
from composerlite.storage import FileDigest, ParallelReader, verify_file
from composerlite.types import StateDict

__all__ = ["DEEPSPEED_TYPES", "FOLDER", "Member", "RankFiles", "holds_deepspeed", "opened_archive", "stand_ins"]

FOLDER = "deepspeed"
"""The folder in an archive, and the tag under which DeepSpeed knows the checkpoint."""
DEEPSPEED_TYPES = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""The classes of DeepSpeed that its files hold."""
_BLOCK = tarfile.BLOCKSIZE
_FILE = re.compile(rf"{FOLDER}/([A-Za-z0-9_-][A-Za-z0-9_.-]*\.pt)")
_HEAD_BYTES = 512


def _all(contents: StateDict) -> StateDict:
    return contents


def stand_ins() -> dict[str, type]:
    """Classes in the place of those of DeepSpeed, by the full names of these. They keep what they are given."""
    return {full: _stand_in(full) for full in DEEPSPEED_TYPES}


def _stand_in(full: str) -> type:
    def keep(self: Any, *arguments: Any) -> None:
        self.arguments = arguments

    return type(full.rpartition(".")[2], (), {"__init__": keep})


@final
class Member:
    """A file within an archive, as the bytes of a torch file.

    Args:
        source: the archive.
        start: where in it the file begins.
        size_bytes: of the file.
    """

    def __init__(self, source: ByteSource, start: int, size_bytes: int) -> None:
        self._source = source
        self._start = start
        self.size_bytes = size_bytes

    def read(self, offset: int, size: int) -> bytes:
        """Exactly so many bytes."""
        self._check(offset, size)
        return self._source.read(self._start + offset, size)

    def read_into(self, targets: Sequence[Piece], progress: Callable[[int], object] = int) -> None:
        """Fill memory."""
        for offset, _, size in targets:
            self._check(offset, size)
        self._source.read_into([(self._start + offset, address, size) for offset, address, size in targets], progress)

    def _check(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size_bytes:
            raise CorruptCheckpointError(f"it has no bytes {offset} to {offset + size}")


@final
class RankFiles:
    """What is in the archive of a rank.

    Attributes:
        names: of DeepSpeed's files in it.
        check_sums: whether nothing but sums in the files verifies them.

    Args:
        source: the archive, out of its compression.
        size_bytes: of it.
        path: of it, for messages.

    Raises:
        CorruptCheckpointError: it is damaged, or holds something else than files.
        IncompatibleCheckpointError: it is no archive of DeepSpeed.
    """

    def __init__(self, source: ByteSource, size_bytes: int, path: Path, *, check_sums: bool) -> None:
        self.path = path
        self.check_sums = check_sums
        if size_bytes < _HEAD_BYTES or not is_tar_header(source.read(0, _HEAD_BYTES)):
            raise IncompatibleCheckpointError(
                f"checkpoint {str(path)!r} was saved without DeepSpeed: it is no archive."
            )
        self._members = dict(_members(source, size_bytes))
        self.names = sorted(match[1] for name in self._members if (match := _FILE.fullmatch(name)) is not None)
        if not self.names:
            raise IncompatibleCheckpointError(
                f"checkpoint {str(path)!r} was saved without DeepSpeed: it has no {FOLDER!r} in it."
            )

    def member(self, name: str) -> Member:
        """One of DeepSpeed's files."""
        return self._members[f"{FOLDER}/{name}"]

    def contents(
        self,
        name: str,
        types: Mapping[str, type] | None = None,
        *,
        trust: bool = False,
        prune: Callable[[StateDict], StateDict] = _all,
    ) -> StateDict:
        """What one of DeepSpeed's files holds.

        Args:
            name: of the file.
            types: the classes that it may hold; by default stand-ins for them.
            trust: load any type, **running whatever code the file holds**.
            prune: is given what it holds, and gives what of it is wanted: only that is read.

        Raises:
            CorruptCheckpointError, RefusedError: as :class:`TorchFile`.
        """
        return self._read(f"{FOLDER}/{name}", stand_ins() if types is None else types, trust, prune)

    def states(self, *, trust: bool = False) -> StateDict:
        """What ``composer_states.pt`` holds.

        Raises:
            CorruptCheckpointError, RefusedError: as :class:`TorchFile`.
        """
        return self._read(STATES, {}, trust, _all)

    def _read(
        self, name: str, types: Mapping[str, type], trust: bool, prune: Callable[[StateDict], StateDict]
    ) -> StateDict:
        member = self._members.get(name)
        if member is None:
            raise CorruptCheckpointError(f"it has no {name!r} in it")
        try:
            file = TorchFile(
                member,
                member.size_bytes,
                peek=member.read,
                trust=trust,
                check_sums=self.check_sums,
                types=types,
            )
            file.contents = prune(file.contents)
            file.read()
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"its {name!r}: {e}") from e
        return file.contents


@contextlib.contextmanager
def opened_archive(path: Path, digest: FileDigest | None = None, *, unpacked_bytes: int = 0) -> Generator[RankFiles]:
    """The archive ``path``, compressed or not.

    Args:
        path: of it.
        digest: what it must contain; ``None``: only the sums in it say that.
        unpacked_bytes: what it may unpack to in any case.

    Raises:
        CorruptCheckpointError: its bytes are not those that were saved, or it is damaged.
        IncompatibleCheckpointError: it is no archive of DeepSpeed.
        OSError: it is not there, cannot be read, or there is no space to unpack it.
    """
    with path.open("rb") as file:
        is_compressed = codec_of(file.read(_HEAD_BYTES)) is not None
    with contextlib.ExitStack() as stack:
        if is_compressed:
            if digest is not None:
                verify_file(path, digest)
            file = stack.enter_context(uncompressed(path, most_bytes=unpacked_bytes))
            size_bytes = file.seek(0, 2)
            source: ByteSource = FileSource(file)
        else:
            reader = stack.enter_context(ParallelReader(path, digest))
            source, size_bytes = reader, reader.size_bytes
        yield RankFiles(source, size_bytes, path, check_sums=digest is None)


def holds_deepspeed(path: Path) -> bool:
    """Whether the file ``path`` is an archive with files of DeepSpeed in it.

    Raises:
        CorruptCheckpointError: it is an archive, and damaged.
        OSError: it is not there or cannot be read.
    """
    if not is_packed(path):
        return False
    with contextlib.suppress(IncompatibleCheckpointError), opened_archive(path):
        return True
    return False


def _members(source: ByteSource, size_bytes: int) -> Iterator[tuple[str, Member]]:
    """Files in an archive by their names, each once. Folders are passed over; there is nothing else in it."""
    position = _Position(source, size_bytes)
    seen: set[str] = set()
    while (member := next_member(position)) is not None:
        if member.isdir():
            continue
        name = member.name.removeprefix("./")
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or name in seen:
            what = "twice" if name in seen else "as a link, a device or a sparse file"
            raise CorruptCheckpointError(f"it is an archive that holds {member.name!r} {what}")
        seen.add(name)
        if position.at + member.size > size_bytes:
            raise CorruptCheckpointError("it is an archive that is cut off")
        yield name, Member(source, position.at, member.size)
        position.at += member.size + -member.size % _BLOCK


@final
class _Position:
    """A place in an archive, from where on headers are read."""

    def __init__(self, source: ByteSource, size_bytes: int) -> None:
        self.at = 0
        self._source = source
        self._size_bytes = size_bytes

    def read(self, size: int) -> bytes:
        """So many bytes, or fewer at the end."""
        size = max(0, min(size, self._size_bytes - self.at))
        data = self._source.read(self.at, size) if size else b""
        self.at += size
        return data

    def take(self, most: int) -> bytes:
        """Some bytes, none at the end."""
        return self.read(most)

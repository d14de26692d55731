"""Tar archives that contain ``composer_states.pt``, alone or with the files of DeepSpeed."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from composerlite.checkpoint.format import MOST_TAIL_BYTES, TAIL_START
from composerlite.checkpoint.format.compression import PackedSink, PiecesReader
from composerlite.errors import CorruptCheckpointError, IncompatibleCheckpointError
from composerlite.storage import FileDigest, Seal, StreamWriter

__all__ = [
    "DEEPSPEED",
    "DEEPSPEED_TYPES",
    "STATES",
    "TarSink",
    "is_tar_header",
    "next_member",
    "stand_ins",
    "tar_bytes",
    "tar_member",
]

STATES = "composer_states.pt"
"""The file in every archive."""
DEEPSPEED = "deepspeed"
"""The folder of DeepSpeed's files in an archive, and the tag under which DeepSpeed knows the checkpoint."""
DEEPSPEED_TYPES = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""The classes of DeepSpeed with objects in these files."""
_BLOCK = tarfile.BLOCKSIZE
_MOST_HEADER_BYTES = 64 << 10
_PIECE_BYTES = 1 << 20
_PLAIN_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE)


def stand_ins() -> dict[str, type]:
    """Return placeholders for the classes of DeepSpeed, by full name. A placeholder keeps its arguments."""

    def keep(self: Any, *arguments: Any) -> None:
        self.arguments = arguments

    return {full: type(full.rpartition(".")[2], (), {"__init__": keep}) for full in DEEPSPEED_TYPES}


def tar_bytes(*sizes: int) -> int:
    """Return the size in bytes of an archive of files of ``sizes`` bytes."""
    used = sum(_BLOCK + size + -size % _BLOCK for size in sizes) + 2 * _BLOCK
    return used + -used % tarfile.RECORDSIZE


@final
class TarSink:
    """Writes an archive of several files to ``inner``. Takes the bytes of the files in order.

    Args:
        inner: takes the archive.
        members: names and sizes of the files. A call of :meth:`write` appends to a single file.

    Attributes:
        size_bytes: number of bytes taken.
        piece_bytes, seconds: as in ``inner``.
    """

    def __init__(self, inner: StreamWriter | PackedSink, members: Sequence[tuple[str, int]]) -> None:
        self.size_bytes = 0
        self.piece_bytes = inner.piece_bytes
        self.seconds = inner.seconds
        self._inner = inner.__enter__()
        self._members = list(members)
        self._archive_bytes = tar_bytes(*(size for _, size in members))
        self._end = 0  # of the current file, in the bytes taken
        self._begin_next()

    def _begin_next(self) -> None:
        """Begin the next file when all bytes of the current file were taken."""
        while self.size_bytes == self._end and self._members:
            member = tarfile.TarInfo(self._members[0][0])
            member.size, member.mtime = self._members.pop(0)[1], int(time.time())
            self._inner.write(bytes(-self._inner.size_bytes % _BLOCK) + member.tobuf(tarfile.GNU_FORMAT))
            self._end += member.size

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        self._inner.write(data)
        self.size_bytes += len(data)
        self._begin_next()

    def copy(self, address: int, size: int, crc: int | None = 0) -> int:
        """Append ``size`` bytes of memory at ``address``, and return their CRC-32, continued from ``crc``."""
        crc = self._inner.copy(address, size, crc)
        self.size_bytes += size
        self._begin_next()
        return crc

    def finish(self, seal: Seal | None = None) -> FileDigest:
        """End the archive, append the tail from ``seal``, and return the digest of the durable file."""
        assert (self.size_bytes, self._members) == (self._end, []), f"{self.size_bytes} bytes for {self._end}"
        self._inner.write(bytes(self._archive_bytes - self._inner.size_bytes))
        return self._inner.finish(seal)

    def __enter__(self) -> TarSink:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._inner.__exit__(*exception)


def is_tar_header(block: bytes) -> bool:
    """Check that ``block`` is the first block of an archive."""
    try:
        tarfile.TarInfo.frombuf(block[:_BLOCK], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def tar_member(source: io.BufferedReader[PiecesReader]) -> Iterator[bytes]:
    """Yield the bytes of ``composer_states.pt`` in the archive ``source``, in pieces of at most 1 MiB.

    The archive may contain this file and its folder, and nothing else. The record of the checkpoint may follow the
    archive. Nothing is extracted to a path. Memory use does not depend on sizes in headers.

    Raises:
        CorruptCheckpointError: the archive is damaged, cut off, or contains something else.
        IncompatibleCheckpointError: the archive contains DeepSpeed's files.
    """
    found = False
    while (member := next_member(source.read)) is not None:
        if member.isdir() and member.name.rstrip("/") in ("", "."):
            continue
        if member.name.removeprefix("./").split("/")[0] == DEEPSPEED:
            raise IncompatibleCheckpointError(
                "it is an archive of DeepSpeed. Load it in a run with deepspeed_config=…; or make a file of its "
                "weights with composerlite.checkpoint.unshard_zero"
            )
        plain = member.type in _PLAIN_FILES
        if not plain or member.name not in (STATES, f"./{STATES}"):
            kind = "file" if plain else "folder" if member.isdir() else "link, device or sparse file"
            raise CorruptCheckpointError(
                f"it is an archive that holds the {kind} {member.name!r}; expected {STATES!r} alone"
            )
        if found:
            raise CorruptCheckpointError(f"it is an archive that holds {STATES!r} twice")
        found = True
        left = member.size
        while left:
            if not (piece := source.read1(min(left, _PIECE_BYTES))):
                raise _cut_off()
            yield piece
            left -= len(piece)
        _exactly(source.read, -member.size % _BLOCK)
    end = b""
    while len(end) <= MOST_TAIL_BYTES and (piece := source.read1(_PIECE_BYTES)):
        end = (end + piece).lstrip(b"\0")
    if end and (not end.startswith(TAIL_START) or len(end) > MOST_TAIL_BYTES):
        raise CorruptCheckpointError("it is an archive with something behind its end")
    if not found:
        raise CorruptCheckpointError(f"it is an archive that holds no {STATES!r}")


def next_member(read: Callable[[int], bytes]) -> tarfile.TarInfo | None:
    """Return the next header, with the name and size of extended headers; ``None`` at the end of the archive.

    Args:
        read: returns the requested number of bytes, or fewer at the end.

    Raises:
        CorruptCheckpointError: the header is damaged or cut off, or belongs to a sparse file.
    """
    name, size = None, None
    while (block := _exactly(read, _BLOCK)).strip(b"\0"):
        try:
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as e:
            raise CorruptCheckpointError(f"it is an archive with a damaged header: {e}") from e
        if member.size < 0:
            raise CorruptCheckpointError("it is an archive with a member of less than 0 bytes")
        is_pax = member.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE)
        if not is_pax and member.type not in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            member.name = member.name if name is None else name
            member.size = member.size if size is None else size
            return member
        if member.size > _MOST_HEADER_BYTES:
            raise CorruptCheckpointError(f"it is an archive with an extended header of {member.size} bytes")
        data = _exactly(read, member.size + -member.size % _BLOCK)[: member.size]
        if is_pax:
            records = _pax_records(data)
            name = records.get("path", name)
            size = int(records["size"]) if "size" in records else size
        elif member.type == tarfile.GNUTYPE_LONGNAME:
            name = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
    return None


def _pax_records(data: bytes) -> dict[str, str]:
    """Return the records of an extended header, such as ``"30 mtime=1700000000.1234567\\n"``."""
    records = dict[str, str]()
    while data:
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or not len(length) < int(length[:9]) <= len(data):
            raise CorruptCheckpointError("it is an archive with a damaged extended header")
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        records[key.decode(errors="replace")] = value.decode(errors="replace")
        data = data[int(length) :]
    if any(key.startswith("GNU.sparse") for key in records):
        raise CorruptCheckpointError("it is an archive with a sparse file; pack it without that option of tar")
    if not (size := records.get("size", "0")).isdecimal() or len(size) > 18:
        raise CorruptCheckpointError(f"it is an archive with a member of {size[:40]!r} bytes")
    return records


def _exactly(read: Callable[[int], bytes], size: int) -> bytes:
    data = read(size)
    if len(data) != size:
        raise _cut_off()
    return data


def _cut_off() -> CorruptCheckpointError:
    return CorruptCheckpointError("it is an archive that is cut off")

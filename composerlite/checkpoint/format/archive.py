"""Tar archives that hold ``composer_states.pt``, alone or with the files of DeepSpeed."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
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
"""The folder of DeepSpeed's files in an archive, and the tag under which it knows the checkpoint."""
DEEPSPEED_TYPES = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""The classes of DeepSpeed that its files hold."""
_BLOCK = tarfile.BLOCKSIZE
_MOST_HEADER_BYTES = 64 << 10
_PIECE_BYTES = 1 << 20
_LONG_NAME, _LONG_LINK = tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK


def stand_ins() -> dict[str, type]:
    """Classes in the place of those of DeepSpeed, by the full names of these. They keep what they are given."""
    return {full: _stand_in(full) for full in DEEPSPEED_TYPES}


def _stand_in(full: str) -> type:
    def keep(self: Any, *arguments: Any) -> None:
        self.arguments = arguments

    return type(full.rpartition(".")[2], (), {"__init__": keep})


def tar_bytes(*sizes: int) -> int:
    """The size of an archive that holds files of ``sizes``."""
    used = sum(_BLOCK + size + -size % _BLOCK for size in sizes) + 2 * _BLOCK
    return used + -used % tarfile.RECORDSIZE


@final
class TarSink:
    """Takes the bytes of files, one after the other, and writes an archive of them to ``inner``.

    Args:
        inner: takes the archive.
        members: names and sizes of the files. What is appended at once belongs to one of them.

    Attributes:
        size_bytes: taken so far.
        piece_bytes, seconds: those of ``inner``.
    """

    def __init__(self, inner: StreamWriter | PackedSink, members: Sequence[tuple[str, int]]) -> None:
        self.size_bytes = 0
        self.piece_bytes = inner.piece_bytes
        self.seconds = inner.seconds
        self._inner = inner
        self._sizes = [size for _, size in members]
        self._coming = list(members)
        self._left = 0
        self._begin_next()
        self._stack = ExitStack()
        self._stack.enter_context(inner)

    def _begin_next(self) -> None:
        name, self._left = self._coming.pop(0)
        member = tarfile.TarInfo(name)
        member.size = self._left
        member.mtime = int(time.time())
        self._inner.write(member.tobuf(tarfile.GNU_FORMAT))

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        self._inner.write(data)
        self._took(len(data))

    def copy(self, address: int, size: int, crc: int | None = 0) -> int:
        """Append ``size`` bytes of memory at ``address``; their CRC-32."""
        crc = self._inner.copy(address, size, crc)
        self._took(size)
        return crc

    def _took(self, size: int) -> None:
        self.size_bytes += size
        self._left -= size
        assert self._left >= 0, f"{-self._left} bytes more than were to come"
        if self._left == 0 and self._coming:
            self._inner.write(bytes(-self._sizes[-len(self._coming) - 1] % _BLOCK))
            self._begin_next()

    def finish(self, seal: Seal | None = None) -> FileDigest:
        """End the archive, append the tail that ``seal`` makes, and return the digest of the durable file."""
        assert self._left == len(self._coming) == 0, f"{self._left} bytes, {len(self._coming)} files are to come"
        used = sum(_BLOCK + size + -size % _BLOCK for size in self._sizes) - -self._sizes[-1] % _BLOCK
        self._inner.write(bytes(tar_bytes(*self._sizes) - used))
        return self._inner.finish(seal)

    def __enter__(self) -> TarSink:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


def is_tar_header(block: bytes) -> bool:
    """Check that a file that begins with ``block`` is an archive."""
    try:
        tarfile.TarInfo.frombuf(block[:_BLOCK], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def tar_member(source: io.BufferedReader[PiecesReader]) -> Iterator[bytes]:
    """The bytes of ``composer_states.pt`` in the archive ``source``, in pieces of 1 MiB at most.

    The archive may hold that file and the folder it is in, and nothing else: nothing is extracted to a path, and what
    a header asks for is not allocated before it is there. The record of the checkpoint may follow the archive.

    Raises:
        CorruptCheckpointError: cut off, damaged, or it holds something else.
        IncompatibleCheckpointError: DeepSpeed's files are in it.
    """
    found = False
    while (member := next_member(source.read)) is not None:
        if _is_its_folder(member):
            continue
        _check(member)
        if found:
            raise CorruptCheckpointError(f"it is an archive that holds {STATES!r} twice")
        found = True
        yield from _pieces(source, member.size)
        if len(source.read(-member.size % _BLOCK)) != -member.size % _BLOCK:
            raise _cut_off()
    end = b""
    while len(end) <= MOST_TAIL_BYTES and (piece := source.read1(_PIECE_BYTES)):
        end = (end + piece).lstrip(b"\0")
    if end and (not end.startswith(TAIL_START) or len(end) > MOST_TAIL_BYTES):
        raise CorruptCheckpointError("it is an archive with something behind its end")
    if not found:
        raise CorruptCheckpointError(f"it is an archive that holds no {STATES!r}")


def next_member(read: Callable[[int], bytes]) -> tarfile.TarInfo | None:
    """Return the next header, with what extended headers before it say; ``None`` at the end of the archive.

    ``read`` returns the requested number of bytes, or fewer at the end.
    """
    name, size = None, None
    while True:
        block = read(_BLOCK)
        if len(block) != _BLOCK:
            raise _cut_off()
        if not block.strip(b"\0"):
            return None
        try:
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as e:
            raise CorruptCheckpointError(f"it is an archive with a damaged header: {e}") from e
        if member.size < 0:
            raise CorruptCheckpointError("it is an archive with a member of less than 0 bytes")
        if member.type in (_LONG_NAME, _LONG_LINK):
            text = _extended(read, member).rstrip(b"\0")
            name = text.decode("utf-8", "surrogateescape") if member.type == _LONG_NAME else name
        elif member.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE):
            records = _records(_extended(read, member))
            name = records.get("path", name)
            size = _size(records["size"]) if "size" in records else size
        else:
            member.name = member.name if name is None else name
            member.size = member.size if size is None else size
            return member


def _check(member: tarfile.TarInfo) -> None:
    parts = member.name.split("/")
    if parts[0] == "deepspeed" or parts[:2] == [".", "deepspeed"]:
        raise IncompatibleCheckpointError(
            "it is an archive of DeepSpeed. Load it in a run with deepspeed_config=…; or make a file of its weights "
            "with composerlite.checkpoint.unshard_zero"
        )
    plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
    if not plain or member.name not in (STATES, f"./{STATES}"):
        kind = "file" if plain else "folder" if member.isdir() else "link, device or sparse file"
        raise CorruptCheckpointError(
            f"it is an archive that holds the {kind} {member.name!r}; expected {STATES!r} alone"
        )


def _is_its_folder(member: tarfile.TarInfo) -> bool:
    return member.isdir() and member.name.rstrip("/") in ("", ".")


def _extended(read: Callable[[int], bytes], member: tarfile.TarInfo) -> bytes:
    if member.size > _MOST_HEADER_BYTES:
        raise CorruptCheckpointError(f"it is an archive with an extended header of {member.size} bytes")
    padded = member.size + -member.size % _BLOCK
    data = read(padded)
    if len(data) != padded:
        raise _cut_off()
    return data[: member.size]


def _records(data: bytes) -> dict[str, str]:
    """The records of an extended header: ``"30 mtime=1700000000.1234567\\n"`` and so on."""
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
    return records


def _size(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise CorruptCheckpointError(f"it is an archive with a member of {text[:40]!r} bytes")
    return int(text)


def _pieces(source: io.BufferedReader[PiecesReader], size: int) -> Iterator[bytes]:
    while size:
        piece = source.read1(min(size, _PIECE_BYTES))
        if not piece:
            raise _cut_off()
        yield piece
        size -= len(piece)


def _cut_off() -> CorruptCheckpointError:
    return CorruptCheckpointError("it is an archive that is cut off")

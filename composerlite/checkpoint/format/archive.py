"""Tar archives that contain ``composer_states.pt``, alone or with the files of DeepSpeed."""

from __future__ import annotations

import tarfile
import time
from typing import Any, cast

from composerlite.checkpoint.format.byte_sources import ByteSource, Window
from composerlite.checkpoint.format.zip_file import SourceFile
from composerlite.errors import CorruptCheckpointError

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
"""Classes of DeepSpeed. DeepSpeed's files contain instances of these classes."""
_BLOCK = tarfile.BLOCKSIZE


def stand_ins() -> dict[str, type]:
    """Return placeholders for the classes of DeepSpeed, by full name. A placeholder keeps its arguments."""

    def keep(self: Any, *arguments: Any) -> None:
        self.arguments = arguments

    return {full: type(full.rpartition(".")[2], (), {"__init__": keep}) for full in DEEPSPEED_TYPES}


def tar_bytes(*sizes: int) -> int:
    """Return the size in bytes of an archive of files of ``sizes`` bytes."""
    used = sum(_BLOCK + size + -size % _BLOCK for size in sizes) + 2 * _BLOCK
    return used + -used % tarfile.RECORDSIZE


def tar_header(name: str, size_bytes: int, *, at: int) -> bytes:
    """Return the bytes before a file in an archive: padding after the previous file, and the header.

    Args:
        name: of the file.
        size_bytes: size of the file.
        at: size of the archive so far.
    """
    member = tarfile.TarInfo(name)
    member.size, member.mtime = size_bytes, int(time.time())
    return bytes(-at % _BLOCK) + member.tobuf(tarfile.GNU_FORMAT)


def is_tar_header(block: bytes) -> bool:
    """Return true if ``block`` is the first block of an archive."""
    try:
        tarfile.TarInfo.frombuf(block[:_BLOCK], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def members_of(source: ByteSource, size_bytes: int) -> dict[str, Window]:
    """Return the files in an archive by name. Nothing is extracted. Folders are left out.

    Args:
        source: bytes of the archive. The record of the checkpoint may follow the archive.
        size_bytes: size of the archive.

    Raises:
        CorruptCheckpointError: the archive is damaged or cut off, or contains a link, a device or a sparse file, or two
            files of the same name.
    """
    found: dict[str, Window] = {}
    try:
        with tarfile.open(fileobj=cast("Any", SourceFile(source.read, size_bytes)), mode="r:") as archive:
            for member in archive:
                if member.size < 0 or member.offset_data + member.size > size_bytes:
                    raise CorruptCheckpointError(f"it is an archive that is cut off or does not hold {member.name!r}")
                if member.isdir():
                    continue
                name = member.name.removeprefix("./")
                if not member.isreg() or member.sparse is not None or name in found:
                    kind = "twice" if name in found else "as a link, a device or a sparse file"
                    raise CorruptCheckpointError(f"it is an archive that holds {member.name!r} {kind}")
                found[name] = Window(source, member.offset_data, member.size)
            if source.read(archive.offset, _BLOCK).strip(b"\0"):  # tarfile takes a damaged header for the end
                raise CorruptCheckpointError(f"it is an archive with a damaged header at {archive.offset}")
    except (tarfile.TarError, ValueError, IndexError, OverflowError) as e:
        raise CorruptCheckpointError(f"it is an archive that is damaged or cut off: {e}") from e
    return found

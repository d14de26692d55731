"""Formats of a checkpoint's file. A writer chooses the format by the end of the name, a reader by the first bytes.

============================================== ========================================================================
``.pt`` and endings of no known kind           the file that ``torch.load`` opens
``.tar .tar.gz .tgz .tar.bz2 .tar.lzma``       an archive with this file as ``composer_states.pt``
``.pt.gz .pt.bz2 .pt.xz .pt.lz4 .pt.zst``      the file, compressed
============================================== ========================================================================
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple, final

from composerlite.checkpoint.format.archive import DEEPSPEED, STATES, is_tar_header, members_of
from composerlite.checkpoint.format.byte_sources import Window
from composerlite.checkpoint.format.compression import KNOWN_COMPRESSORS, Compressor, PackedSink, codec_of
from composerlite.errors import ConfigError, CorruptCheckpointError, IncompatibleCheckpointError
from composerlite.storage import FileDigest, HostMemory, ParallelReader, StreamWriter

Sink = StreamWriter | PackedSink
"""Takes the bytes of a file in order, and writes them plain or compressed."""

_OTHER_KINDS = re.compile(
    r"(?:\.(?:pt|tar)\.[^./]+|\.(?:zip|7z|rar|gz|bz2?|xz|lzma|lz4?|zst|lzo|br|z|tbz2?|txz|tlz|tzst|safetensors))$"
)


@final
class Format(NamedTuple):
    """The layout of a checkpoint's bytes in a file.

    Attributes:
        suffix: end of the file names; empty for files of no known kind.
        compressor: the codec, if the file is compressed.
        archive: whether the file, after decompression, is a tar archive.
    """

    suffix: str
    compressor: Compressor | None = None
    archive: bool = False

    def open_sink(self, path: Path, size_bytes: int, memory: HostMemory | None = None) -> Sink:
        """Open a sink for the bytes of a ``.pt`` file, or of an archive. The sink writes the file ``path``.

        Args:
            path: an existing file, empty.
            size_bytes: exact size of the ``.pt`` file, or of the archive.
            memory: a copy of the bytes, at the offsets of the ``.pt`` file; ``None`` for an archive.

        Raises:
            OSError: no space. Raised at once unless the file is compressed.
        """
        if self.compressor is None:
            return StreamWriter(path, size_bytes, memory=memory)
        return PackedSink(path, self.compressor, most_bytes=size_bytes)

    def frame(self, data: bytes) -> bytes:
        """Return ``data`` as the bytes to append to a file of this format: a frame, if the file is compressed."""
        return data if self.compressor is None else self.compressor.frame(data)


_CODECS = {compressor.extension: compressor for compressor in KNOWN_COMPRESSORS}
# '.tar.lzma' contains xz: Composer writes xz under this name, and readers of archives detect the codec.
_CODECS_OF_ARCHIVES = {".tar": "", ".tar.gz": "gz", ".tgz": "gz", ".tar.bz2": "bz2", ".tar.lzma": "xz"}
_FORMATS = (
    Format(".pt"),
    *(Format(f".pt.{extension}", compressor) for extension, compressor in _CODECS.items()),
    *(Format(suffix, _CODECS.get(codec), archive=True) for suffix, codec in _CODECS_OF_ARCHIVES.items()),
)


def is_tar(name: str | Path) -> bool:
    """Return true if ``name`` has the suffix of a tar archive."""
    return str(name).lower().endswith(tuple(_CODECS_OF_ARCHIVES))


def format_of(name: str | Path) -> Format:
    """Return the format in which to write the file ``name``. The name may be a template.

    Raises:
        ConfigError: the suffix belongs to a format without a writer, or the library of the codec is not installed.
    """
    file_name = Path(name).name.lower()
    for known in _FORMATS:
        if file_name.endswith(known.suffix):
            if known.compressor is not None:
                known.compressor.imported()
            return known
    if (other := _OTHER_KINDS.search(file_name)) is not None:
        raise ConfigError(
            f"{str(name)!r}: unknown checkpoint format {other[0]!r}. Names end in "
            f"{', '.join(known.suffix for known in _FORMATS)}, or have no such ending."
        )
    return Format("")


# ── reading files ────────────────────────────────────────────────────────────────────────────────────────────────────
HEADER_BYTES = 512
"""Number of bytes at the start of a file that show whether the file is compressed or an archive."""
_ALWAYS_BYTES = 1 << 30
_RATIO = 100
_ARCHIVE_BYTES = 1 << 20  # upper limit of headers and padding


def is_packed(path: Path) -> bool:
    """Check whether the file ``path`` is compressed or an archive, by its first bytes. The name does not matter.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return is_packed_beginning(file.read(HEADER_BYTES))


def is_packed_beginning(beginning: bytes) -> bool:
    """Check whether a file is compressed or an archive. ``beginning``: the first 512 bytes, or the whole file."""
    return not beginning.startswith(b"PK") and (codec_of(beginning) is not None or is_tar_header(beginning))


@contextlib.contextmanager
def unpacked(
    path: Path, digest: FileDigest | None = None, *, size_bytes: int | None = None, keep_archive: bool = False
) -> Generator[Window]:
    """Open the ``.pt`` file in the checkpoint ``path`` for reading.

    A compressed file is verified as a whole, and decompressed to a temporary file without a name
    (:meth:`Compressor.decompress`). The system removes the temporary file when the block or the process ends. A file
    without compression, or a file in an archive without compression, is read in place, and verified by chunks during
    reads. Memory use does not depend on the contents.

    Args:
        path: the checkpoint.
        digest: expected digest of ``path``; ``None``: nothing is verified.
        size_bytes: size of the file after unpacking; ``None``: unknown, and the limit is the larger of 1 GiB and a
            hundred times the size of ``path``.
        keep_archive: only decompress, and open the archive itself, with the record after the archive. The archive may
            be smaller than ``size_bytes``.

    Raises:
        CorruptCheckpointError: the file is damaged or cut off; the unpacked size exceeds the limit or differs from
            ``size_bytes``; or an archive holds other files than ``composer_states.pt``.
        IncompatibleCheckpointError: the file is an archive of DeepSpeed.
        ConfigError: the library of the codec is not installed.
        OSError: the file cannot be read, or there is no space to unpack it.
    """
    with contextlib.ExitStack() as stack:
        packed = source = stack.enter_context(ParallelReader(path, digest))
        with path.open("rb") as head:  # a read of ``packed`` would read and verify a whole chunk
            beginning = head.read(HEADER_BYTES)
        try:
            if (codec := codec_of(beginning)) is not None:
                packed.verify(skip=packed.verified)
                packed.close()  # with hundreds of archives open, each descriptor counts
                most = max(_ALWAYS_BYTES, _RATIO * path.stat().st_size)
                if size_bytes is not None:
                    most = max(most if keep_archive else 0, size_bytes + _ARCHIVE_BYTES)
                file = stack.enter_context(codec.decompress(path, most_bytes=most))
                source = stack.enter_context(ParallelReader(Path(f"/proc/self/fd/{file.fileno()}")))
                beginning = source.read(0, min(HEADER_BYTES, source.size_bytes))
            found = Window(source, 0, source.size_bytes)
            if is_archive := not keep_archive and is_tar_header(beginning):
                members = members_of(source, source.size_bytes)
                if any(name.startswith(f"{DEEPSPEED}/") for name in members):
                    raise IncompatibleCheckpointError(
                        "it is an archive of DeepSpeed. Load it in a run with deepspeed_config=…, or write its "
                        "weights to a file with composerlite.checkpoint.unshard_zero"
                    )
                if list(members) != [STATES]:
                    names = ", ".join(map(repr, list(members)[:8])) or "nothing"
                    raise CorruptCheckpointError(f"it is an archive that holds {names}; expected {STATES!r} alone")
                found = members[STATES]
            is_one_file = is_archive or (codec is not None and not keep_archive)
            if is_one_file and size_bytes not in (None, found.size_bytes):
                raise CorruptCheckpointError(f"it unpacks to {found.size_bytes} bytes instead of {size_bytes}")
        except (CorruptCheckpointError, IncompatibleCheckpointError, ConfigError) as e:
            raise type(e)(f"checkpoint {str(path)!r} cannot be unpacked: {e}") from e
        yield found._replace(verified=packed.verified)

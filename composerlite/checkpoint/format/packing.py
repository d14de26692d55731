"""Formats of a checkpoint's file, chosen by the end of its name.

============================================== ========================================================================
``.pt`` and endings of no known kind           the file that ``torch.load`` opens
``.tar .tar.gz .tgz .tar.bz2 .tar.lzma``       an archive that holds it as ``composer_states.pt``
``.pt.gz .pt.bz2 .pt.xz .pt.lz4 .pt.zst``      the file, compressed
============================================== ========================================================================
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, final

from composerlite.checkpoint.format.archive import STATES, TarSink, is_tar_header, tar_bytes, tar_member
from composerlite.checkpoint.format.compression import KNOWN_COMPRESSORS, Compressor, PackedSink, PiecesReader, codec_of
from composerlite.errors import ConfigError, CorruptCheckpointError, IncompatibleCheckpointError
from composerlite.storage import RING_BYTES, HostMemory, Sink, StreamWriter

__all__ = ["Format", "format_of", "is_packed", "is_packed_beginning", "is_tar", "uncompressed", "unpacked"]

# '.tar.lzma' holds xz: that is what Composer writes under the name, and every reader of archives looks at the content.
_ARCHIVES = {".tar": None, ".tar.gz": "gz", ".tgz": "gz", ".tar.bz2": "bz2", ".tar.lzma": "xz"}
_OTHER_KINDS = re.compile(
    r"(?:\.(?:pt|tar)\.[^./]+|\.(?:zip|7z|rar|gz|bz2?|xz|lzma|lz4?|zst|lzo|br|z|tbz2?|txz|tlz|tzst|safetensors))$"
)
_UNREADABLE = {b"\x89LZO": "lzop", b"]\0\0": "lzma"}
"""Programs with which Composer compresses what is not read here, by the first bytes of their files."""


@final
@dataclass(frozen=True, slots=True)
class Format:
    """The layout of a checkpoint's bytes in a file.

    Attributes:
        suffix: of its files; empty for those of no known kind.
        compressor: the codec, if there is one.
        archive: whether the file is a tar archive, inside the compression.
    """

    suffix: str
    compressor: Compressor | None = None
    archive: bool = False

    def check(self) -> None:
        """Raise an error unless files can be written here.

        Raises:
            ConfigError: what compresses them is not installed. The message says how to get it.
        """
        if self.compressor is not None:
            self.compressor.check_exists()

    def open_sink(
        self,
        path: Path,
        size_bytes: int,
        *,
        memory: HostMemory | None = None,
        ring_bytes: int = RING_BYTES,
    ) -> Sink:
        """Open a sink for the bytes of a ``.pt`` file, which writes ``path``.

        Args:
            path: an existing file, empty.
            size_bytes: of the ``.pt`` file to come, exactly.
            memory: where the bytes are already, at their offsets in the ``.pt`` file.
            ring_bytes: memory to write with where they are not.

        Raises:
            ConfigError: see :meth:`check`.
            OSError: no space, which is known at once where the file is not compressed.
        """
        if self.archive:
            return self.open_archive(path, [(STATES, size_bytes)], ring_bytes=ring_bytes)
        if self.compressor is None:
            return StreamWriter(path, size_bytes, memory=memory, ring_bytes=ring_bytes)
        return PackedSink(path, self.compressor, most_bytes=size_bytes)

    def frame(self, data: bytes) -> bytes:
        """Return ``data`` as the bytes to append to a file of this format: a frame, if the file is compressed."""
        return data if self.compressor is None else self.compressor.frame(data)

    def open_archive(self, path: Path, members: Sequence[tuple[str, int]], *, ring_bytes: int = RING_BYTES) -> Sink:
        """Open a sink for the bytes of several files, one after the other, which writes the archive ``path``.

        Args:
            path: an existing file, empty.
            members: names and sizes of the files.
            ring_bytes: memory to write with.

        Raises:
            ConfigError, OSError: as :meth:`open_sink`.
        """
        size_bytes = tar_bytes(*(size for _, size in members))
        if self.compressor is None:
            return TarSink(StreamWriter(path, size_bytes, ring_bytes=ring_bytes), members)
        return TarSink(PackedSink(path, self.compressor, most_bytes=size_bytes), members)


def is_tar(name: str | Path) -> bool:
    """Check that the name is that of an archive."""
    return str(name).lower().endswith(tuple(_ARCHIVES))


def format_of(name: str | Path) -> Format:
    """The format of the file ``name``, which may be a template.

    Raises:
        ConfigError: its ending promises a format that is not written.
    """
    file_name = Path(name).name.lower()
    known = {f".pt.{compressor.extension}": compressor for compressor in KNOWN_COMPRESSORS}
    for suffix, compressor in known.items():
        if file_name.endswith(suffix):
            return Format(suffix, compressor)
    for suffix, extension in _ARCHIVES.items():
        if file_name.endswith(suffix):
            return Format(suffix, None if extension is None else known[f".pt.{extension}"], archive=True)
    if file_name.endswith(".pt"):
        return Format(".pt")
    if (other := _OTHER_KINDS.search(file_name)) is not None:
        raise ConfigError(
            f"{str(name)!r}: there is no format {other[0]!r} of checkpoints. Names end in .pt (or in nothing in "
            f"particular), in {', '.join(_ARCHIVES)} for an archive, or in {', '.join(known)} for a compressed file."
        )
    return Format("")


# ── reading them ─────────────────────────────────────────────────────────────────────────────────────────────────────
_TORCH_FILES = (b"PK", b"\x80")  # a .pt file is a zip archive, and an older one begins with a pickle
_PIECE_BYTES = 64 << 10
_HEADER_BYTES = 512
_MOST_BYTES = 1 << 20
_ALWAYS_BYTES = 1 << 30
_RATIO = 100
_SHARE_OF_DISK = 0.95
_ARCHIVE_BYTES = 1 << 20  # more than an archive adds to the file in it


def is_packed(path: Path) -> bool:
    """Check whether the file ``path`` is compressed or an archive, by its first bytes: its name may say something else.

    Raises:
        IncompatibleCheckpointError: it is compressed with a program whose files are not read.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        beginning = file.read(_HEADER_BYTES)
    for magic, program in _UNREADABLE.items():
        if beginning.startswith(magic):
            raise IncompatibleCheckpointError(
                f"checkpoint {str(path)!r} was compressed with {program}: decompress it with '{program} -d'. Codecs "
                f"that are read: {', '.join(known.extension for known in KNOWN_COMPRESSORS)}."
            )
    return is_packed_beginning(beginning)


def is_packed_beginning(beginning: bytes) -> bool:
    """Check whether a file with these first 512 bytes, or all that it has, is compressed or an archive."""
    if beginning.startswith(_TORCH_FILES):
        return False
    return codec_of(beginning) is not None or is_tar_header(beginning)


@contextlib.contextmanager
def unpacked(
    path: Path, *, size_bytes: int | None = None, progress: Callable[[int], object] = int
) -> Generator[IO[bytes]]:
    """The ``.pt`` file in the checkpoint ``path``, open for reading, at its beginning.

    It is unpacked into a file without a name, which is gone with the block, or with the process: in the folder that
    ``TMPDIR`` names, else beside ``path``, else where the system has temporary files. A ``.pt`` file that is neither
    compressed nor in an archive is opened as it is. Memory is bounded whatever the file holds.

    Args:
        path: the checkpoint.
        size_bytes: what it unpacks to, if that is known. If not, more than a hundred times its size and more than
            1 GiB is taken for an attack.
        progress: is called with each number of bytes read.

    Raises:
        CorruptCheckpointError: it is damaged, cut off, unpacks to too much, or holds something else.
        IncompatibleCheckpointError: it is an archive of DeepSpeed.
        ConfigError: what unpacks it is not installed.
        OSError: it cannot be read, or there is no space to unpack it.
    """
    with _expanded(path, _inner_bytes, size_bytes=size_bytes, progress=progress) as file:
        yield file


@contextlib.contextmanager
def uncompressed(path: Path, *, most_bytes: int = 0) -> Generator[IO[bytes]]:
    """The file ``path`` out of its compression, open for reading: as :func:`unpacked`, but an archive stays one.

    Args:
        path: the file.
        most_bytes: what it may unpack to in any case.
    """
    with _expanded(path, _decoded_bytes, least_limit=most_bytes) as file:
        yield file


@contextlib.contextmanager
def _expanded(
    path: Path,
    inner: Callable[[IO[bytes], _Limit, Callable[[int], object]], Generator[bytes]],
    *,
    size_bytes: int | None = None,
    least_limit: int = 0,
    progress: Callable[[int], object] = int,
) -> Generator[IO[bytes]]:
    """Open the output of ``inner`` for the file, in a nameless temporary; the file itself if it is not packed."""
    with contextlib.ExitStack() as stack:
        packed = stack.enter_context(path.open("rb", buffering=0))
        if not is_packed(path):
            yield packed
            return
        folder = _scratch_folder(path)
        target = stack.enter_context(tempfile.TemporaryFile(dir=folder, prefix=f".{path.name}."))
        limit = _Limit(
            path,
            packed_bytes=path.stat().st_size,
            size_bytes=size_bytes,
            folder=folder,
            least_bytes=least_limit,
        )
        try:
            with contextlib.closing(inner(packed, limit, progress)) as pieces:
                for piece in pieces:
                    target.write(piece)
            target.flush()
            limit.check_size(target.tell())
        except (CorruptCheckpointError, IncompatibleCheckpointError) as e:
            raise type(e)(f"checkpoint {str(path)!r} cannot be unpacked: {e}") from e
        except ConfigError as e:
            raise ConfigError(f"checkpoint {str(path)!r} cannot be unpacked: {e}") from e
        target.seek(0)
        yield target


def _decoded_bytes(packed: IO[bytes], limit: _Limit, progress: Callable[[int], object]) -> Generator[bytes]:
    """Contents of the file, out of its compression."""

    def pieces() -> Generator[bytes]:
        while piece := packed.read(_PIECE_BYTES):
            progress(len(piece))
            yield piece

    beginning = packed.read(_HEADER_BYTES)
    packed.seek(0)
    codec = codec_of(beginning)
    with contextlib.closing(pieces() if codec is None else codec.decoded(pieces())) as decoded:
        yield from limit.counted(decoded)


def _inner_bytes(packed: IO[bytes], limit: _Limit, progress: Callable[[int], object]) -> Generator[bytes]:
    """Contents of the file, out of its compression and out of its archive."""
    with contextlib.closing(_decoded_bytes(packed, limit, progress)) as decoded:
        beginning = b""
        while len(beginning) < _HEADER_BYTES and (piece := next(decoded, None)) is not None:
            beginning += piece
        source = io.BufferedReader(PiecesReader(itertools.chain([beginning], decoded)))
        if is_tar_header(beginning) and not beginning.startswith(_TORCH_FILES):
            yield from tar_member(source)
        else:
            yield from iter(lambda: source.read1(_MOST_BYTES), b"")


def _scratch_folder(path: Path) -> Path:
    if folder := os.environ.get("TMPDIR"):
        return Path(folder)
    # The folder of a large file is on a disk for large files, and temporary folders may be in memory.
    return path.parent if os.access(path.parent, os.W_OK) else Path(tempfile.gettempdir())


@final
class _Limit:
    """The limit of what a file may unpack to."""

    def __init__(
        self, path: Path, *, packed_bytes: int, size_bytes: int | None, folder: Path, least_bytes: int = 0
    ) -> None:
        self._path = path
        self._expected = size_bytes
        self._most = max(_ALWAYS_BYTES, _RATIO * packed_bytes, least_bytes)
        if size_bytes is not None:
            self._most = size_bytes + _ARCHIVE_BYTES
        self._folder = folder
        self._room = int(_SHARE_OF_DISK * shutil.disk_usage(folder).free)
        self._size = 0

    def counted(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """``pieces``, until there are too many."""
        for piece in pieces:
            self._size += len(piece)
            if self._size > self._most:
                raise CorruptCheckpointError(
                    f"it unpacks to more than {self._most} bytes, and a checkpoint of its size holds less. If you "
                    "trust it, unpack it with the tool of its format and load the .pt file."
                )
            if self._size > self._room:
                raise OSError(
                    errno.ENOSPC,
                    f"No space left on device to unpack {str(self._path)!r}; TMPDIR=… names another",
                    str(self._folder),
                )
            yield piece

    def check_size(self, size_bytes: int) -> None:
        """Raise an error if that is not what was known."""
        if self._expected is not None and size_bytes != self._expected:
            raise CorruptCheckpointError(f"it unpacks to {size_bytes} bytes and not to {self._expected}")

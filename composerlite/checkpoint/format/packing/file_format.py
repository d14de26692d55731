"""How a checkpoint's bytes are laid out in a file, chosen by the end of its name.

============================================== ========================================================================
``.pt`` and endings of no known kind           the file that ``torch.load`` opens
``.tar .tar.gz .tgz .tar.bz2 .tar.lzma``       an archive that holds it as ``composer_states.pt``
``.pt.gz .pt.bz2 .pt.xz .pt.lzma``             the file, compressed
``.pt.lz4 .pt.zst .pt.lzo``
============================================== ========================================================================
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from composerlite.checkpoint.format.packing.archive import STATES, TarSink, tar_bytes
from composerlite.checkpoint.format.packing.compression import KNOWN_COMPRESSORS, Compressor
from composerlite.checkpoint.format.packing.packed_sink import PackedSink
from composerlite.errors import ConfigError
from composerlite.storage import RING_BYTES, HostMemory, Sink, StreamWriter

__all__ = ["Format", "format_of", "is_tar"]

# '.tar.lzma' holds xz: that is what Composer writes under the name, and every reader of archives looks at the content.
_ARCHIVES = {".tar": None, ".tar.gz": "gz", ".tgz": "gz", ".tar.bz2": "bz2", ".tar.lzma": "xz"}
_OTHER_KINDS = re.compile(
    r"(?:\.(?:pt|tar)\.[^./]+|\.(?:zip|7z|rar|gz|bz2?|xz|lzma|lz4?|zst|lzo|br|z|tbz2?|txz|tlz|tzst|safetensors))$"
)


@final
@dataclass(frozen=True, slots=True)
class Format:
    """How a checkpoint's bytes are laid out in a file.

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
        may_grow: bool = False,
    ) -> Sink:
        """What takes the bytes of a ``.pt`` file and writes ``path``.

        Args:
            path: an existing file, empty.
            size_bytes: of the ``.pt`` file to come, exactly.
            memory: where the bytes are already, at their offsets in the ``.pt`` file.
            ring_bytes: memory to write with where they are not.
            may_grow: take more rather than wait for the disk; of no effect where the file is compressed.

        Raises:
            ConfigError: see :meth:`check`.
            OSError: no space, which is known at once where the file is not compressed.
        """
        if self.archive:
            return self.open_archive(path, [(STATES, size_bytes)], ring_bytes=ring_bytes, may_grow=may_grow)
        if self.compressor is None:
            return StreamWriter(path, size_bytes, memory=memory, ring_bytes=ring_bytes, may_grow=may_grow)
        return PackedSink(path, self.compressor.encoder(size_bytes), most_bytes=size_bytes)

    def open_archive(
        self, path: Path, members: Sequence[tuple[str, int]], *, ring_bytes: int = RING_BYTES, may_grow: bool = False
    ) -> Sink:
        """What takes the bytes of several files, one after the other, and writes the archive ``path``.

        Args:
            path: an existing file, empty.
            members: names and sizes of the files.
            ring_bytes: memory to write with.
            may_grow: as :meth:`open_sink`.

        Raises:
            ConfigError, OSError: as :meth:`open_sink`.
        """
        size_bytes = tar_bytes(*(size for _, size in members))
        if self.compressor is None:
            return TarSink(StreamWriter(path, size_bytes, ring_bytes=ring_bytes, may_grow=may_grow), members)
        return TarSink(PackedSink(path, self.compressor.encoder(size_bytes), most_bytes=size_bytes), members)


def is_tar(name: str | Path) -> bool:
    """Whether the name is that of an archive."""
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

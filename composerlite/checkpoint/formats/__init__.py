"""The formats of checkpoints: how their bytes are laid out in a file, and how they are read out of one."""

from composerlite.checkpoint.formats.compression import (
    KNOWN_COMPRESSORS,
    Compressor,
    get_compressor,
    is_compressed_pt,
)
from composerlite.checkpoint.formats.file_format import Format, format_of, is_tar
from composerlite.checkpoint.formats.unpacking import is_packed, is_packed_beginning, unpacked

__all__ = [
    "KNOWN_COMPRESSORS",
    "Compressor",
    "Format",
    "format_of",
    "get_compressor",
    "is_compressed_pt",
    "is_packed",
    "is_packed_beginning",
    "is_tar",
    "unpacked",
]

"""What may be around the file of a checkpoint: archives and compression, which its name asks for."""

from composerlite.checkpoint.format.packing.compression import (
    KNOWN_COMPRESSORS,
    Compressor,
    get_compressor,
    is_compressed_pt,
)
from composerlite.checkpoint.format.packing.file_format import Format, format_of, is_tar
from composerlite.checkpoint.format.packing.unpacking import is_packed, is_packed_beginning, unpacked

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

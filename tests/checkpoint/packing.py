"""Files of every format, written through the sinks that a save writes to, and read by the tools of those formats."""

from __future__ import annotations

import bz2
import contextlib
import ctypes
import gzip
import io
import lzma
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import torch

from composerlite.checkpoint.format.archive import tar_bytes, tar_header
from composerlite.checkpoint.format.packing import Sink, format_of
from composerlite.storage import FileDigest, Seal, StagedFile

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.lzma")
TOOLS = {
    ".pt.bz2": "bzip2",
    ".pt.gz": "gzip",
    ".pt.lz4": "lz4",
    ".pt.xz": "xz",
    ".pt.zst": "zstd",
}
SUFFIXES = (".pt", *ARCHIVES, *TOOLS)
MEMBER = "composer_states.pt"


def torch_bytes(*, megabytes: float) -> bytes:
    """What plain ``torch.save`` writes of noise, as weights are, and seven times the zeros, as fresh moments are."""
    noise = torch.randn(int(megabytes * 1e6 / 32), generator=torch.Generator().manual_seed(17))
    file = io.BytesIO()
    torch.save({"state": {"model": {"weight": noise}}, "zeros": torch.zeros(7 * len(noise))}, file)
    return file.getvalue()


def fill(sink: Sink, data: bytes) -> int:
    """Write ``data`` in the way a save does: small pieces, and one from memory, whose CRC-32 is returned."""
    middle = data[1000:-1000]
    memory = ctypes.create_string_buffer(middle, len(middle))
    sink.write(data[:1000])
    crc = sink.copy(ctypes.addressof(memory), len(middle))
    sink.write(data[-1000:])
    return crc


def pack(path: Path, data: bytes, seal: Seal | None = None) -> FileDigest:
    """Write the checkpoint ``path`` with ``data`` for its ``.pt`` bytes, in the format of its name, with a tail."""
    is_archive = format_of(path).archive
    size = tar_bytes(len(data)) if is_archive else len(data)
    with StagedFile(path) as staged:
        with format_of(path).open_sink(staged.temporary, size) as sink:
            sink.write(tar_header(MEMBER, len(data), at=0) if is_archive else b"")
            fill(sink, data)
            sink.write(bytes(size - sink.size_bytes))
            digest = sink.finish(seal)
        staged.publish()
    return digest


def suffix_of(name: str) -> str:
    """The suffix of a format."""
    return max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default="")


def independent_read(path: Path) -> bytes:
    """The ``.pt`` bytes of the checkpoint ``path``, by the standard library or the program of its format."""
    suffix = suffix_of(path.name)
    if suffix in ARCHIVES:
        with tarfile.open(path) as archive:
            assert archive.getnames() == [MEMBER]
            member = archive.extractfile(MEMBER)
            assert member is not None
            return member.read()
    if suffix == ".pt.gz":
        return gzip.decompress(path.read_bytes())
    if suffix == ".pt.bz2":
        return bz2.decompress(path.read_bytes())
    if suffix == ".pt.xz":
        return lzma.decompress(path.read_bytes())
    if suffix == ".pt":
        return path.read_bytes()
    return tool_output(TOOLS[suffix], "-d", "-c", stdin=path.read_bytes())


def tool_output(tool: str, *arguments: str | Path, stdin: bytes | None = None) -> bytes:
    """What a program writes. Skips the test where there is none."""
    if shutil.which(tool) is None:
        pytest.skip(f"the program {tool} is not installed")
    return subprocess.run([tool, *map(str, arguments)], input=stdin, capture_output=True, check=True).stdout


def children() -> list[int]:
    """The processes that this process has started and that still run."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            found += map(int, (task / "children").read_text().split())
    return found

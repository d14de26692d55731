"""Large files are written whole, digested and durable, on file systems of every kind."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from composerlite.storage.stream_writer import StreamWriter

MiB = 1 << 20


def write(path: Path, pieces: list[bytes], reserve: int = 0) -> str:
    """Write ``pieces`` one after the other; the digest that the writer gives."""
    path.touch()
    with StreamWriter(path, reserve) as writer:
        for piece in pieces:
            writer.write(piece)
        return writer.finish()


def open_files() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def pieces_of(sizes: list[int]) -> list[bytes]:
    return [random.Random(size).randbytes(size) for size in sizes]


@pytest.mark.parametrize(
    "sizes",
    [[], [1], [4096], [4095, 2, 4096], [8 * MiB], [8 * MiB - 1, 3], [MiB + 1] * 40, [1] * 5000],
    ids=["empty", "byte", "block", "odd", "buffer", "buffer-edge", "more-than-the-ring", "many-small"],
)
def test_the_file_is_what_was_written(sizes: list[int], tmp_path: Path) -> None:
    """Any sequence of pieces gives the file that plain writes give, its size and its digest."""
    pieces = pieces_of(sizes)
    digest = write(tmp_path / "file", pieces, reserve=sum(sizes))
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert digest == xxhash.xxh3_128_hexdigest(b"".join(pieces))


def test_too_much_reserved_is_given_back(tmp_path: Path) -> None:
    """Space that was reserved and not used does not stay in the file."""
    write(tmp_path / "file", [b"abc"], reserve=5 * MiB)
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_memory_is_copied_from_where_it_is(tmp_path: Path) -> None:
    """``copy`` takes memory by address and shows each piece on its way, all of it once."""
    data = random.Random(1).randbytes(3 * MiB + 17)
    source = ctypes.create_string_buffer(data, len(data))
    path = tmp_path / "file"
    path.touch()
    seen = b""
    with StreamWriter(path, len(data)) as writer:
        for offset, size in writer.copy(ctypes.addressof(source), len(data)):
            seen += bytes(writer.view(offset, size))
        writer.finish()
    assert seen == data == path.read_bytes()


def test_leaving_without_finishing_leaves_no_thread(tmp_path: Path) -> None:
    """An exception in the block ends the thread behind and closes the file; the police of this suite sees threads."""
    path = tmp_path / "file"
    path.touch()
    before = open_files()
    with StreamWriter(path, MiB) as writer:
        writer.write(bytes(20 * MiB))
    assert open_files() == before


@pytest.fixture
def mounted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of the kind that the test asks for."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder = tmp_path / "mounted"
    folder.mkdir()
    kind, options = request.param
    done = subprocess.run(
        ["mount", "-t", kind, "-o", options, kind, str(folder)], check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount a {kind} here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    "mounted", [("tmpfs", "size=64m"), ("ramfs", "mode=755")], indirect=True, ids=["tmpfs", "ramfs"]
)
def test_file_systems_in_memory_work_too(mounted: Path) -> None:
    """tmpfs; and ramfs, which refuses O_DIRECT: there the page cache is used."""
    pieces = pieces_of([5 * MiB + 3, 4 * MiB])
    write(mounted / "file", pieces, reserve=9 * MiB + 3)
    assert (mounted / "file").read_bytes() == b"".join(pieces)


@pytest.mark.parametrize("mounted", [("tmpfs", "size=8m")], indirect=True, ids=["8MiB"])
def test_a_full_disk_is_known_before_a_byte_is_written(mounted: Path) -> None:
    """Reserving more than there is raises ENOSPC with the path, at once."""
    path = mounted / "file"
    path.touch()
    with pytest.raises(OSError, match="cannot reserve") as caught:
        StreamWriter(path, 20 * MiB)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)


@pytest.mark.parametrize("mounted", [("tmpfs", "size=12m")], indirect=True, ids=["12MiB"])
def test_a_disk_that_fills_up_while_writing_is_an_error(mounted: Path) -> None:
    """Without a reservation the write that fails is raised to the caller, with the path."""
    with pytest.raises(OSError) as caught:
        write(mounted / "file", [bytes(MiB)] * 60)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(mounted / "file")

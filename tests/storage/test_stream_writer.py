"""Large files are written whole, digested and durable, on file systems of every kind."""

from __future__ import annotations

import base64
import errno
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import xxhash
from left_open import opened

from composerlite.storage import FileDigest, HostMemory, StreamWriter
from composerlite.storage.disk.files import set_direct, write_window
from composerlite.storage.disk.memory import address_of

MiB = 1 << 20


def write(path: Path, pieces: list[bytes], reserve: int = 0) -> FileDigest:
    """Write ``pieces`` one after the other; the digest that the writer gives."""
    path.touch()
    with StreamWriter(path, reserve) as writer:
        for piece in pieces:
            writer.write(piece)
        return writer.finish()


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
    assert digest == digest_of(b"".join(pieces), MiB)


def test_too_much_reserved_is_given_back(tmp_path: Path) -> None:
    """Space that was reserved and not used does not stay in the file."""
    write(tmp_path / "file", [b"abc"], reserve=5 * MiB)
    assert (tmp_path / "file").read_bytes() == b"abc"


def digest_of(data: bytes, chunk_bytes: int) -> FileDigest:
    """The digest of ``data``, by plain means."""
    chunks = [xxhash.xxh3_64_digest(data[at : at + chunk_bytes]) for at in range(0, len(data), chunk_bytes)]
    text = base64.b64encode(b"".join(chunks)).decode()
    return FileDigest(len(data), xxhash.xxh3_128_hexdigest(data), chunk_bytes, text)


@pytest.mark.parametrize("size", [3 * MiB + 17, 20 * MiB + 17], ids=["small", "large"])
def test_memory_is_copied_from_where_it_is(size: int, tmp_path: Path) -> None:
    """``copy`` takes memory by address and gives the CRC-32 of it; what happens to it afterwards does not matter."""
    data = random.Random(1).randbytes(size)
    source = bytearray(data)
    path = tmp_path / "file"
    path.touch()
    with StreamWriter(path, size) as writer:
        writer.write(b"before")
        assert writer.copy(address_of(source), size) == zlib.crc32(data)
        source[:] = bytes(size)
        digest = writer.finish()
    assert path.read_bytes() == b"before" + data
    assert digest == digest_of(b"before" + data, MiB)


@pytest.mark.parametrize("cores", [2, 64])
@pytest.mark.parametrize("size", [0, 1, 5 * MiB, 8 * MiB, 8 * MiB + 1, 20 * MiB + 17])
def test_what_lies_in_memory_as_in_the_file_is_written_from_there(
    size: int, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that are in place, parts from elsewhere and headers give one file; the memory then holds its image. On many
    cores threads write the file, on two cores the caller.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    data = random.Random(size).randbytes(size)
    path = tmp_path / "file"
    path.touch()
    with closing(HostMemory(size)) as memory, StreamWriter(path, size, memory=memory) as writer:
        memory.view(0, size)[:] = data
        memory.view(0, size)[: size // 7] = bytes(size // 7)
        writer.write(data[: size // 7])
        middle = data[size // 7 : size // 2]
        assert writer.copy(memory.address + size // 7, len(middle)) == zlib.crc32(middle)
        end = bytearray(data[size // 2 :])
        memory.view(0, size)[size // 2 :] = bytes(len(end))
        assert writer.copy(address_of(end) if end else 0, len(end)) == zlib.crc32(end)
        digest = writer.finish()
        assert bytes(memory.view(0, size)) == data
    assert path.read_bytes() == data
    assert digest == digest_of(data, MiB)


def test_memory_that_is_too_small_is_refused(tmp_path: Path) -> None:
    """At once, with both numbers, and nothing stays open."""
    path = tmp_path / "file"
    path.touch()
    before = opened()
    with closing(HostMemory(MiB)) as memory, pytest.raises(ValueError, match="expected at least as many"):
        StreamWriter(path, MiB + 1, memory=memory)
    assert opened() <= before


def test_the_memory_of_a_large_file_is_that_of_the_ring(tmp_path: Path) -> None:
    """400 MiB go through 48 MiB: the process does not grow by more than that and a little."""
    done = subprocess.run([sys.executable, "-c", GROWTH, str(tmp_path / "file")], check=True, capture_output=True)
    assert int(done.stdout) < 56 * MiB


GROWTH = """
import resource, sys
from pathlib import Path
from composerlite.storage import StreamWriter
path, piece = Path(sys.argv[1]), bytes(4 << 20)
path.touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with StreamWriter(path, 400 << 20) as writer:
    for _ in range(100):
        writer.write(piece)
    writer.finish()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""


def test_seconds_say_what_took_how_long(tmp_path: Path) -> None:
    """Hashing, writing and making durable each took some time; all names are there from the start."""
    path = tmp_path / "file"
    path.touch()
    with StreamWriter(path, 20 * MiB) as writer:
        assert writer.seconds == {"hash": 0.0, "write": 0.0, "wait": 0.0, "flush": 0.0}
        writer.write(bytes(20 * MiB))
        writer.finish()
    assert min(writer.seconds[name] for name in ("hash", "write", "flush")) > 0


def test_leaving_without_finishing_leaves_no_thread(tmp_path: Path) -> None:
    """An exception in the block ends the thread behind and closes the file; the police of this suite sees threads."""
    path = tmp_path / "file"
    path.touch()
    before = opened()
    with StreamWriter(path, MiB) as writer:
        writer.write(bytes(20 * MiB))
    assert opened() <= before


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


def test_a_refused_direct_write_goes_through_the_page_cache(tmp_path: Path) -> None:
    """Some file systems accept O_DIRECT and refuse to write. This one refuses memory that is not aligned."""
    data = memoryview(bytearray(random.Random(1).randbytes(2 * MiB + 1)))[1:]
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        set_direct(file, True)
        with suppress(OSError):  # this disk takes any memory
            assert os.pwrite(file.fileno(), data, 0) == len(data)
            pytest.skip("the file system takes memory that is not aligned")
        write_window(file, data, 0, MiB + 5)
        file.truncate(MiB + 5)
    assert (tmp_path / "file").read_bytes() == data[: MiB + 5]


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
@pytest.mark.parametrize("reserve", [0, 11 * MiB], ids=["small", "threads"])
def test_a_disk_that_fills_up_while_writing_is_an_error(mounted: Path, reserve: int) -> None:
    """Without enough reserved the write that fails is raised to the caller, with the path; nobody waits for ever."""
    path = mounted / "file"
    path.touch()
    before = opened()

    def fill() -> None:
        with StreamWriter(path, reserve) as writer:
            for _ in range(100):
                writer.write(bytes(MiB))

    with pytest.raises(OSError) as caught:
        fill()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert opened() <= before


def fill_up(folder: Path) -> None:
    """Leave no space in the file system of ``folder``."""
    left = os.statvfs(folder)
    (folder / "filler").write_bytes(bytes(left.f_bavail * left.f_frsize))


@pytest.mark.parametrize("mounted", [("tmpfs", "size=12m")], indirect=True, ids=["12MiB"])
def test_a_failed_write_is_raised_by_finish_if_by_nothing_before(mounted: Path) -> None:
    """The last bytes do not fit: whoever finishes the file is told."""
    path = mounted / "file"
    path.touch()
    with StreamWriter(path, 10 * MiB) as writer:
        writer.write(bytes(10 * MiB))
        fill_up(mounted)
        writer.write(bytes(MiB))
        with pytest.raises(OSError) as caught:
            writer.finish()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))


@pytest.mark.parametrize("mounted", [("tmpfs", "size=12m")], indirect=True, ids=["12MiB"])
def test_giving_up_on_a_full_disk_does_not_wait(mounted: Path) -> None:
    """An exception of the caller's own while the threads fail: it is what is raised, and nothing stays open."""
    path = mounted / "file"
    path.touch()
    before = opened()

    def give_up() -> None:
        with StreamWriter(path, 11 * MiB) as writer:
            with suppress(OSError):  # a thread may have failed before the last byte is taken
                writer.write(bytes(20 * MiB))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        give_up()
    assert opened() <= before

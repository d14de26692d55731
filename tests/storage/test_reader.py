"""Parts of a file are read into place, and only if they are what was saved."""

from __future__ import annotations

import _thread
import dataclasses
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from left_open import opened

from composerlite.errors import CorruptCheckpointError
from composerlite.storage import FileDigest, ParallelReader, chunk_bytes_for, verify_file
from composerlite.storage.disk import reader as reader_module
from composerlite.storage.disk.memory import address_of
from composerlite.storage.disk.writer import Digester

MiB = 1 << 20
SIZE = 11 * MiB + 12_345


def digest_of(data: bytes, chunk_bytes: int = MiB) -> FileDigest:
    digester = Digester(chunk_bytes)
    digester.update(data)
    return digester.finish()


@pytest.fixture(scope="module")
def data() -> bytes:
    """What the files of these tests hold."""
    return random.Random(0).randbytes(SIZE)


@pytest.fixture
def file(tmp_path: Path, data: bytes) -> Path:
    """A file, in the page cache."""
    path = tmp_path / "file"
    path.write_bytes(data)
    return path


def forget(path: Path) -> None:
    """Have the system drop what it keeps of a file in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


DIGESTS = {
    "unverified": lambda data: None,
    "chunks": digest_of,
    "large-chunks": lambda data: digest_of(data, 8 * MiB),
    "odd-chunks": lambda data: digest_of(data, 70_001),
    "whole": lambda data: dataclasses.replace(digest_of(data), chunk_bytes=0, chunks=""),
}


@pytest.fixture(params=list(DIGESTS))
def digest(request: pytest.FixtureRequest, data: bytes) -> FileDigest | None:
    """Each kind of digest that a file may have, and none."""
    return DIGESTS[request.param](data)


@pytest.fixture(params=["warm", "cold"])
def cache(request: pytest.FixtureRequest, file: Path) -> None:
    """With the file in the page cache, and without."""
    if request.param == "cold":
        forget(file)


@pytest.mark.usefixtures("cache")
def test_any_part_is_read(file: Path, data: bytes, digest: FileDigest | None) -> None:
    """Bytes, none, over the edges of chunks and blocks, the end, everything."""
    with ParallelReader(file, digest) as reader:
        assert reader.size_bytes == SIZE
        for offset, size in [(0, 1), (7, 0), (MiB - 1, 2), (4 * MiB - 5, 3 * MiB), (SIZE - 1, 1), (SIZE, 0), (0, SIZE)]:
            assert reader.read(offset, size) == data[offset : offset + size]


def scattered(seed: int) -> list[tuple[int, int]]:
    """Parts of a file, thousands small and some large, with gaps of all sizes, in no order."""
    rng = random.Random(seed)
    cuts = {rng.randrange(SIZE) for _ in range(40)} | {2 * MiB + rng.randrange(20_000) for _ in range(3000)}
    parts = [(start, end) for start, end in pairwise(sorted(cuts)) if rng.random() < 0.8]
    rng.shuffle(parts)
    return parts


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_memory_is_filled_and_nothing_beside_it(
    file: Path, data: bytes, digest: FileDigest | None, threads: int
) -> None:
    """Thousands of parts in any order arrive at their places; what was between the places stays."""
    memory, expected = bytearray(b"-" * SIZE), bytearray(b"-" * SIZE)
    targets: list[tuple[int, int, int]] = []
    for start, end in scattered(threads):
        expected[start:end] = data[start:end]
        targets.append((start, address_of(memory) + start, end - start))
    with ParallelReader(file, digest, threads=threads) as reader:
        reader.read_into(targets)
    assert memory == expected


def test_a_part_may_be_wanted_twice(file: Path, data: bytes, digest: FileDigest | None) -> None:
    """In two places, wholly or in part."""
    one, two = bytearray(3 * MiB), bytearray(2 * MiB)
    with ParallelReader(file, digest) as reader:
        reader.read_into([(5, address_of(one), 3 * MiB), (MiB, address_of(two), 2 * MiB), (7, address_of(one) + 2, 1)])
    assert one == data[5 : 5 + 3 * MiB]
    assert two == data[MiB : 3 * MiB]


@settings(max_examples=60)
@given(
    chunk_bytes=st.integers(1, 9000),
    parts=st.lists(st.tuples(st.integers(0, 70_000), st.integers(0, 70_000)), max_size=12),
    verified=st.booleans(),
)
def test_parts_of_any_shape_arrive(
    tmp_path_factory: pytest.TempPathFactory, chunk_bytes: int, parts: list[tuple[int, int]], verified: bool
) -> None:
    """Whatever chunks and parts there are, overlapping or not: each place holds its part."""
    content = random.Random(1).randbytes(70_000)
    path = tmp_path_factory.mktemp("parts") / "file"
    path.write_bytes(content)
    ranges = [(min(part), max(part)) for part in parts]
    places = [bytearray(end - start) for start, end in ranges]
    targets = [
        (start, address_of(place), end - start) for (start, end), place in zip(ranges, places, strict=True) if place
    ]
    with ParallelReader(path, digest_of(content, chunk_bytes) if verified else None) as reader:
        reader.read_into(targets)
    assert places == [content[start:end] for start, end in ranges]


def test_progress_tells_of_all_that_is_read(file: Path, data: bytes) -> None:
    """In the caller's own thread; whole chunks where those are verified."""
    told: list[int] = []
    threads: set[int] = set()

    def progress(count: int) -> None:
        told.append(count)
        threads.add(threading.get_ident())

    memory = bytearray(SIZE)
    with ParallelReader(file, digest_of(data)) as reader:
        reader.read_into([(0, address_of(memory), SIZE)], progress)
        assert sum(told) == SIZE
        reader.read_into([(5 * MiB, address_of(memory), 1)], progress)
        assert sum(told) == SIZE + MiB
    verify_file(file, digest_of(data), progress)
    verify_file(file, DIGESTS["whole"](data), progress)
    assert sum(told) == 3 * SIZE + MiB
    assert threads == {threading.get_ident()}


def test_an_exception_of_progress_ends_the_reading(file: Path, data: bytes) -> None:
    """An interrupt while gigabytes are read: it is raised, and no thread goes on."""

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    before = opened()
    memory = bytearray(SIZE)
    with ParallelReader(file, digest_of(data)) as reader, pytest.raises(KeyboardInterrupt):
        reader.read_into([(0, address_of(memory), SIZE)], interrupt)
    assert opened() <= before


def test_other_threads_read_on_while_the_caller_is_slow(tmp_path: Path) -> None:
    """A caller that is held up in ``progress`` finds everything else in place afterwards."""
    content = random.Random(4).randbytes(80 * MiB + 5)
    path, memory = tmp_path / "file", bytearray(80 * MiB + 5)
    path.write_bytes(content)
    loaders: list[threading.Thread] = []

    def progress(_: int) -> None:
        if not loaders:
            loaders.extend(thread for thread in threading.enumerate() if thread.name == "checkpoint-reader")
            for loader in loaders:
                loader.join(30)

    for _ in range(5):  # on a busy machine they may have done everything before this thread is first called
        memory[:] = bytes(len(memory))
        forget(path)
        with ParallelReader(path, digest_of(content), threads=2) as reader:
            reader.read_into([(0, address_of(memory), len(memory))], progress)
        assert memory == content
        if loaders:
            break
    assert loaders
    assert not any(loader.is_alive() for loader in loaders)


@pytest.mark.parametrize("chunk_bytes", [MiB, 8 * MiB])
def test_an_interrupt_ends_the_threads_that_read(tmp_path: Path, chunk_bytes: int) -> None:
    """None is left that fills the memory of the caller."""
    content = random.Random(5).randbytes(40 * MiB)
    path, memory = tmp_path / "file", bytearray(40 * MiB)
    path.write_bytes(content)
    forget(path)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    before = opened()
    reader = ParallelReader(path, digest_of(content, chunk_bytes))
    with reader, pytest.raises(KeyboardInterrupt):
        reader.read_into([(0, address_of(memory), len(memory))], interrupt)
    assert opened() <= before


def test_a_second_interrupt_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The memory of the caller is not filled any more when the interrupt is raised, however often Ctrl-C is pressed."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    path, memory = tmp_path / "file", bytearray(40 * MiB)
    path.write_bytes(memory)
    reading, may_end = threading.Event(), threading.Event()
    fill = ParallelReader._fill

    def slowly(*arguments: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            assert reading.wait(30)
            threading.Timer(0.1, _thread.interrupt_main).start()
            threading.Timer(0.3, may_end.set).start()
            raise KeyboardInterrupt
        reading.set()
        may_end.wait(30)
        fill(*arguments)

    monkeypatch.setattr(ParallelReader, "_fill", slowly)
    with ParallelReader(path) as reader, pytest.raises(KeyboardInterrupt):
        reader.read_into([(0, address_of(memory), len(memory))])
    assert may_end.is_set()
    assert not any(thread.name.startswith("checkpoint-") for thread in threading.enumerate())


def test_an_older_kernel_tells_what_is_cached(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux before 6.5 has no cachestat: a file that is not in the page cache is still read past the cache."""
    monkeypatch.setattr(reader_module, "_CACHESTAT", -1)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        try:
            os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError as e:
            pytest.skip(f"the file system does not tell: {e}")
        assert reader_module.cached_share(descriptor, 0, SIZE) == 1.0
        for _ in range(20):  # the question starts a read, which a fast disk may finish before the kernel answers
            forget(file)
            share = reader_module.cached_share(descriptor, 0, SIZE)
            if share == 0.0:
                break
        assert share == 0.0
    finally:
        os.close(descriptor)


@pytest.fixture(scope="module")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of many units."""
    path = tmp_path_factory.mktemp("large") / "file"
    path.write_bytes(random.Random(6).randbytes(80 * MiB + 12_345))
    return path


@pytest.mark.parametrize("chunk_bytes", [None, 70_001, MiB, 8 * MiB, 20 * MiB])
def test_a_large_file_arrives_whole(large_file: Path, chunk_bytes: int | None) -> None:
    """From the disk, whatever the size of chunks."""
    content = large_file.read_bytes()
    digest = None if chunk_bytes is None else digest_of(content, chunk_bytes)
    memory, told = bytearray(len(content)), 0

    def progress(count: int) -> None:
        nonlocal told
        told += count

    forget(large_file)
    with ParallelReader(large_file, digest) as reader:
        reader.read_into([(0, address_of(memory), len(memory))], progress)
    assert memory == content
    assert told == len(content)


@pytest.mark.parametrize("position", [31 * MiB, 33 * MiB, 80 * MiB + 5])
def test_a_wrong_bit_is_found_in_each_part(large_file: Path, tmp_path: Path, position: int) -> None:
    """The error names where; no thread is left that fills memory."""
    content = large_file.read_bytes()
    digest, path, memory = digest_of(content), tmp_path / "file", bytearray(len(content))
    path.write_bytes(content)
    damage(path, position)
    forget(path)
    start = position // MiB * MiB
    with ParallelReader(path, digest) as reader:
        with pytest.raises(CorruptCheckpointError, match=f"between {start} and"):
            reader.read_into([(0, address_of(memory), len(memory))])
        assert not any(thread.name.startswith("checkpoint-") for thread in threading.enumerate())


# ── damage ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def damage(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("position", [0, MiB - 1, MiB, 5 * MiB + 7, SIZE - 1])
@pytest.mark.parametrize("state", ["warm", "cold"])
def test_one_wrong_bit_is_found_wherever_it_is(file: Path, data: bytes, position: int, state: str) -> None:
    """Reading everything, reading its chunk without itself, verifying: each names the file and the bytes."""
    damage(file, position)
    start = position // MiB * MiB
    message = rf"the bytes of '.*file' differ from the saved bytes between {start} and {min(start + MiB, SIZE)}"
    memory = bytearray(SIZE)
    beside = start if position > start else start + 1
    if state == "cold":
        forget(file)
    with ParallelReader(file, digest_of(data)) as reader:
        with pytest.raises(CorruptCheckpointError, match=message):
            reader.read_into([(0, address_of(memory), SIZE)])
        with pytest.raises(CorruptCheckpointError, match=message):
            reader.read(beside, 1)
        with pytest.raises(CorruptCheckpointError, match=message):
            reader.verify()


def test_damage_elsewhere_does_not_keep_a_part_from_being_read(file: Path, data: bytes) -> None:
    """Only the chunks that are touched are read and have to be good."""
    damage(file, 5 * MiB)
    with ParallelReader(file, digest_of(data)) as reader:
        assert reader.read(0, 5 * MiB) == data[: 5 * MiB]
        assert reader.read(6 * MiB, MiB) == data[6 * MiB : 7 * MiB]


def test_without_chunks_damage_anywhere_is_found_before_a_part_is_read(file: Path, data: bytes) -> None:
    """A file of an older version: it is all or nothing, at every attempt."""
    damage(file, 5 * MiB)
    with ParallelReader(file, DIGESTS["whole"](data)) as reader:
        for _ in range(2):
            with pytest.raises(CorruptCheckpointError, match=r"the bytes of '.*file' differ from the saved bytes"):
                reader.read(0, 1)


@pytest.mark.parametrize("state", ["warm", "cold"])
def test_every_wrong_bit_is_found(tmp_path: Path, data: bytes, state: str) -> None:
    """Two hundred single bits anywhere: none is read over; and the good file is never refused."""
    rng = random.Random(3)
    path = tmp_path / "file"
    content = data[: 3 * MiB + 17]
    digest = digest_of(content)
    path.write_bytes(content)
    for _ in range(200):
        position = rng.randrange(len(content))
        damage(path, position)
        if state == "cold":
            forget(path)
        with pytest.raises(CorruptCheckpointError):
            verify_file(path, digest)
        damage(path, position)
        verify_file(path, digest)


@pytest.mark.parametrize("change", [-SIZE, -1, 1], ids=["empty", "shorter", "longer"])
def test_a_file_of_another_size_is_refused_at_once(file: Path, data: bytes, change: int) -> None:
    """Both sizes are named."""
    os.truncate(file, SIZE + change)
    with pytest.raises(CorruptCheckpointError, match=f"has {SIZE + change} bytes and was saved with {SIZE}"):
        ParallelReader(file, digest_of(data))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("kind", ["unverified", "chunks"])
def test_a_file_that_becomes_shorter_is_damaged(file: Path, data: bytes, kind: str) -> None:
    """Cut off by somebody while it is open: an error that says where it ends, and nobody waits."""
    memory = bytearray(SIZE)
    with ParallelReader(file, DIGESTS[kind](data)) as reader:
        os.truncate(file, 5 * MiB + 7)
        with pytest.raises(CorruptCheckpointError, match=rf"'.*file' ends at byte {5 * MiB + 7}"):
            reader.read_into([(4 * MiB, address_of(memory), 4 * MiB)])


@pytest.mark.parametrize(("offset", "size"), [(SIZE, 1), (-1, 1), (0, SIZE + 1), (0, -1), (0, 1 << 60)])
def test_what_is_not_in_the_file_is_not_read(file: Path, offset: int, size: int) -> None:
    """An error before memory is taken for it, and before a byte is read."""
    memory = bytearray(1)
    with ParallelReader(file) as reader:
        with pytest.raises(CorruptCheckpointError, match="bytes"):
            reader.read(offset, size)
        with pytest.raises(CorruptCheckpointError, match="bytes"):
            reader.read_into([(0, address_of(memory), 1), (offset, address_of(memory), size)])
    assert memory == b"\0"


@pytest.mark.parametrize("chunks", ["", "AAAA", "not base 64!", "é"])
def test_digests_that_are_not_those_of_a_file_are_damage(file: Path, data: bytes, chunks: str) -> None:
    """Too few, or no digests at all: nothing is read with them."""
    with pytest.raises(CorruptCheckpointError, match=r"digests of '.*file'"):
        ParallelReader(file, dataclasses.replace(digest_of(data), chunks=chunks))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A folder, and a pipe, which nobody writes to: an error, at once. Nothing there: the system's own."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(CorruptCheckpointError, match="is not a file"):
            ParallelReader(path)
    with pytest.raises(FileNotFoundError):
        ParallelReader(tmp_path / "none")


def test_nothing_stays_open(file: Path, data: bytes) -> None:
    """After the block, after a refusal, after a second close."""
    before = opened()
    with ParallelReader(file, digest_of(data)) as reader:
        reader.read(0, SIZE)
    reader.close()
    with pytest.raises(CorruptCheckpointError):
        ParallelReader(file, digest_of(data + b"x"))
    assert opened() <= before


def test_an_empty_file_is_read(tmp_path: Path) -> None:
    """There is nothing in it, and that is right."""
    (tmp_path / "file").touch()
    verify_file(tmp_path / "file", digest_of(b""))
    with ParallelReader(tmp_path / "file", digest_of(b"")) as reader:
        assert reader.read(0, 0) == b""


def test_a_file_that_is_replaced_is_read_on(file: Path, data: bytes) -> None:
    """A new file gets the name while the old one is read: the old bytes come, not a mixture."""
    forget(file)
    with ParallelReader(file, digest_of(data)) as reader:
        new = file.with_name("new")
        new.write_bytes(bytes(SIZE))
        new.replace(file)
        assert reader.read(0, SIZE) == data


@pytest.fixture
def ramfs(tmp_path: Path) -> Iterator[Path]:
    """A file system that refuses O_DIRECT."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder = tmp_path / "ramfs"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "ramfs", "ramfs", str(folder)], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a ramfs here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_file_system_without_direct_reads_will_do(ramfs: Path, data: bytes) -> None:
    """The page cache is used there."""
    (ramfs / "file").write_bytes(data)
    with ParallelReader(ramfs / "file", digest_of(data)) as reader:
        assert reader.read(0, SIZE) == data


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_ten_thousand_damages_are_found(tmp_path: Path, data: bytes, seed: int) -> None:
    """Bits, zeroed pages, swapped chunks, torn ends, warm and cold: each is found, and the good file never refused."""
    rng = random.Random(seed)
    path = tmp_path / "file"
    content = data[: 2 * MiB + 4096 * rng.randrange(64) + rng.randrange(4096)]
    digest = digest_of(content, chunk_bytes_for(len(content)))
    for _ in range(500):
        bad = bytearray(content)
        at = rng.randrange(len(bad))
        kind = rng.choice(["bit", "zeros", "swap", "tail"])
        if kind == "bit":
            bad[at] ^= 1 << rng.randrange(8)
        elif kind == "zeros":
            start = at - at % 4096
            bad[start : start + 4096] = bytes(len(bad[start : start + 4096]))
        elif kind == "swap":
            bad[:MiB], bad[MiB : 2 * MiB] = bad[MiB : 2 * MiB], bad[:MiB]
        else:
            bad[at:] = bytes(len(bad) - at)
        path.write_bytes(bad)
        if rng.random() < 0.3:
            forget(path)
        if bad == content:
            verify_file(path, digest)
            continue
        with pytest.raises(CorruptCheckpointError):
            verify_file(path, digest)

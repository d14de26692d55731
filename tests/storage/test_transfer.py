"""Objects come and go whole, in parts, by several threads, and what was sent once is not sent again."""

from __future__ import annotations

import _thread
import dataclasses
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from storage.memory_store import MemoryStore

from composerlite.errors import ConfigError, CorruptCheckpointError, ObjectStoreError, ObjectStoreTransientError
from composerlite.storage import RetryPolicy, Transfer
from composerlite.storage.disk.memory import address_of
from composerlite.storage.transfer import VerifiedObject, part_bytes_for
from composerlite.testing import Fault, FaultyStore

MiB = 1 << 20
QUICK = RetryPolicy(attempts=4, first_delay_seconds=0.001, longest_delay_seconds=0.01)
SIZE = 5 * MiB + 4321
PARTS = 6
WAIT = 20.0


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def store(memory: MemoryStore) -> FaultyStore:
    """A store in memory, without faults so far."""
    return FaultyStore(memory)


def small_parts(store: FaultyStore) -> Transfer:
    """Parts of 1 MiB, three at a time."""
    return Transfer(store, threads=3, retry=QUICK, part_bytes=MiB)


@pytest.fixture
def transfer(store: FaultyStore) -> Iterator[Transfer]:
    with small_parts(store) as transfer:
        yield transfer


@pytest.fixture(scope="module")
def data() -> bytes:
    """What the objects of these tests hold: six parts."""
    return random.Random(4).randbytes(SIZE)


@pytest.fixture
def file(quick_folder: Path, data: bytes) -> Path:
    """A file with the data."""
    (path := quick_folder / "file").write_bytes(data)
    return path


def content(store: FaultyStore, name: str) -> bytes:
    return store.read_range(name, 0, 2 * SIZE)


def stop_after(store: FaultyStore, file: Path, sent: int) -> None:
    """Have an upload of ``run/a`` fail for the moment after so many parts; none is on its way any more."""
    store.faults = [Fault("send", after=sent, times=1000)]
    with small_parts(store) as earlier, pytest.raises(ObjectStoreTransientError):
        earlier.upload("run/a", file)
    store.faults = []
    store.calls.clear()
    store.sent_bytes = 0


# ── uploads ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("size", [0, 1, MiB, MiB + 1, 2 * MiB, SIZE])
def test_a_file_arrives_whole(store: FaultyStore, transfer: Transfer, file: Path, data: bytes, size: int) -> None:
    """Files of all sizes become objects with the same bytes, in parts where they are larger than one; no parts stay."""
    file.write_bytes(data[:size])
    transfer.upload("run/a", file)
    assert content(store, "run/a") == data[:size]
    assert store.count("send") == (-(-size // MiB) if size > MiB else 0)
    assert list(store.unfinished_parts("")) == []


def test_progress_is_told_in_order_and_to_the_end(transfer: Transfer, file: Path, quick_folder: Path) -> None:
    """Callbacks hear growing numbers, in the caller's thread, and in the end that all is there."""
    told: list[tuple[int, int]] = []
    threads: set[int] = set()

    def callback(done: int, total: int) -> None:
        told.append((done, total))
        threads.add(threading.get_ident())

    for move in (
        lambda: transfer.upload("run/a", file, callback),
        lambda: transfer.download("run/a", quick_folder / "copy", callback=callback),
    ):
        told.clear()
        move()
        assert told == sorted(told)
        assert told[-1] == (SIZE, SIZE)
    assert threads == {threading.get_ident()}


def test_memory_is_sent_in_parts(store: FaultyStore, transfer: Transfer, data: bytes) -> None:
    """Large bytes go as a large file does; small ones in one request."""
    transfer.put_bytes("run/large", memoryview(data))
    transfer.put_bytes("run/small", data[:100])
    assert content(store, "run/large") == data
    assert content(store, "run/small") == data[:100]
    assert (store.count("send"), store.count("put_bytes")) == (PARTS, 1)


def test_failed_parts_are_sent_again(store: FaultyStore, transfer: Transfer, file: Path, data: bytes) -> None:
    """What fails for a moment, at any step, is tried again; only what failed is sent twice."""
    store.faults = [
        Fault("unfinished_parts"),
        Fault("start_parts"),
        Fault("send", after=2, times=2),
        Fault("complete"),
        Fault("get_object_size"),
    ]
    transfer.upload("run/a", file)
    assert content(store, "run/a") == data
    assert store.count("send") == PARTS + 2
    assert list(store.unfinished_parts("")) == []


def test_a_completion_whose_answer_was_lost_is_one(
    store: FaultyStore, transfer: Transfer, file: Path, data: bytes
) -> None:
    """If the store does not know the upload any more because it is complete, nothing is sent again."""
    store.faults = [Fault("complete", lost_answer=True)]
    transfer.upload("run/a", file)
    assert content(store, "run/a") == data
    assert store.count("send") == PARTS


def test_a_forgotten_upload_is_not_taken_for_complete(
    store: FaultyStore, transfer: Transfer, file: Path, data: bytes
) -> None:
    """An older object of the same size is not taken for the new one when the store forgets the upload."""
    old = bytes([data[0], *bytes(SIZE - 1)])
    store.put_bytes("run/a", old)
    store.faults = [Fault("complete"), Fault("complete", error=lambda: FileNotFoundError("no such upload"))]
    with pytest.raises(FileNotFoundError, match="no such upload"):
        transfer.upload("run/a", file)
    assert content(store, "run/a") == old
    transfer.upload("run/a", file)
    assert content(store, "run/a") == data
    assert list(store.unfinished_parts("")) == []


def test_an_upload_is_gone_on_with(
    memory: MemoryStore, store: FaultyStore, transfer: Transfer, file: Path, data: bytes
) -> None:
    """The next upload of the name sends only what the store has not got yet."""
    stop_after(store, file, 4)
    (left,) = store.unfinished_parts("run/a")
    store.calls.clear()
    transfer.upload("run/a", file)
    assert content(store, "run/a") == data
    assert memory.sent_parts == PARTS
    assert store.count("start_parts") == 0
    assert list(store.unfinished_parts("")) == []
    assert left.upload_id


def test_other_bytes_are_sent_again(store: FaultyStore, transfer: Transfer, file: Path, data: bytes) -> None:
    """A part is not taken for sent because it has the number and the size: its bytes count."""
    stop_after(store, file, 4)
    changed = data[:10] + b"!" + data[11:]
    file.write_bytes(changed)
    transfer.upload("run/a", file)
    assert content(store, "run/a") == changed


def test_only_uploads_of_this_very_name_are_touched(
    store: FaultyStore, transfer: Transfer, file: Path, data: bytes
) -> None:
    """Older unfinished uploads of the name are aborted; those of names that begin like it stay."""
    for name in ("run/a", "run/a", "run/abc", "run/a/b"):
        upload = store.start_parts(name)
        assert upload is not None
        upload.send(1, memoryview(b"other"))
    transfer.upload("run/a", file)
    assert content(store, "run/a") == data
    assert sorted(upload.name for upload in store.unfinished_parts("")) == ["run/a/b", "run/abc"]


def test_what_will_not_pass_is_aborted(store: FaultyStore, transfer: Transfer, file: Path) -> None:
    """After a 403 there is neither an object nor a part, and nothing is tried twice."""
    store.faults = [Fault("send", after=3, times=1000, error=lambda: PermissionError("403 on 'run/a'"))]
    with pytest.raises(PermissionError, match="run/a"):
        transfer.upload("run/a", file)
    assert store.count("send") <= PARTS
    store.faults = []
    assert list(store.unfinished_parts("")) == []
    with pytest.raises(FileNotFoundError):
        store.get_object_size("run/a")


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError("no such upload"), ObjectStoreError("400: other checksums"), PermissionError("may not list")],
)
def test_resumed_parts_of_no_use_are_sent_anew(
    store: FaultyStore, transfer: Transfer, file: Path, data: bytes, error: Exception
) -> None:
    """If the store forgets or refuses the upload that was gone on with, all parts are sent, to a new one."""
    stop_after(store, file, 4)
    store.faults = [Fault("send", error=lambda: error)]
    transfer.upload("run/a", file)
    assert content(store, "run/a") == data
    assert store.count("start_parts") == 1


@pytest.mark.parametrize("error", [PermissionError("may not list"), ObjectStoreError("501: there is no list")])
def test_who_may_not_list_can_upload(
    store: FaultyStore, transfer: Transfer, file: Path, data: bytes, error: Exception
) -> None:
    """Where unfinished uploads cannot be listed all parts are sent."""
    store.faults = [Fault("unfinished_parts", times=1000, error=lambda: error), Fault("send", times=2)]
    transfer.upload("run/a", file)
    assert content(store, "run/a") == data


def test_a_file_that_shrinks_is_no_object(
    store: FaultyStore, transfer: Transfer, file: Path, quick_folder: Path
) -> None:
    """A file that becomes shorter while it is uploaded is an error that names it, and no parts stay."""
    store.faults = [Fault("send", error=None, times=1000, first=lambda: file.write_bytes(b"short"))]
    with pytest.raises(ObjectStoreError, match=r"file.*now ends"):
        transfer.upload("run/a", file)
    assert list(store.unfinished_parts("")) == []


def test_a_missing_file_is_not_found(store: FaultyStore, transfer: Transfer, quick_folder: Path) -> None:
    """An upload of no file does not reach the store."""
    with pytest.raises(FileNotFoundError, match="nothing"):
        transfer.upload("run/a", quick_folder / "nothing")
    assert store.calls == []


def test_stale_parts_are_removed(store: FaultyStore, transfer: Transfer) -> None:
    """Uploads of dead runs are aborted when they are old enough, below the prefix only."""
    for name in ("run1/a", "run1/b", "run2/a"):
        assert store.start_parts(name) is not None
    assert len(transfer.abort_stale("run1/", timedelta(hours=1))) == 0
    assert len(transfer.abort_stale("run1/", timedelta())) == 2
    assert [upload.name for upload in store.unfinished_parts("")] == ["run2/a"]


def test_several_files_at_once(store: FaultyStore, transfer: Transfer, file: Path, data: bytes) -> None:
    """Threads share a transfer, and its threads: uploads and downloads do not see each other's bytes."""
    (other := file.with_name("other")).write_bytes(data[::-1])
    store.faults = [Fault("send", after=4, times=3), Fault("read_range", after=3, times=3)]

    def use(number: int) -> bool:
        source, expected = (file, data) if number % 2 else (other, data[::-1])
        transfer.upload(f"run/{number}", source)
        return transfer.read(f"run/{number}", 0, SIZE) == expected

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, range(8)))


def test_a_small_upload_does_not_wait_for_a_large_one(store: FaultyStore, file: Path, data: bytes) -> None:
    """Transfers take turns in using the threads."""
    begun, small_is_there = threading.Event(), threading.Event()

    def take_long() -> None:
        begun.set()
        small_is_there.wait(0.4)

    store.faults = [Fault("send", name="large", error=None, times=1000, first=take_long)]
    with Transfer(store, threads=1, retry=QUICK, part_bytes=MiB) as transfer, ThreadPoolExecutor(1) as pool:
        large = pool.submit(transfer.upload, "large", file)
        assert begun.wait(WAIT)
        transfer.put_bytes("small", data[: MiB + 1])
        assert store.calls.count(("send", "large")) < PARTS
        small_is_there.set()
        large.result(WAIT)


# ── create only ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_creation_whose_answer_was_lost_is_one(store: FaultyStore, transfer: Transfer) -> None:
    """That the object is there on a second try, with the same bytes, is success."""
    store.faults = [Fault("put_bytes", lost_answer=True)]
    transfer.put_bytes("run/a", b"ours", create_only=True)
    assert content(store, "run/a") == b"ours"


def test_a_creation_that_came_second_is_none(store: FaultyStore, transfer: Transfer) -> None:
    """Other bytes, or the same at the first try, are FileExistsError."""
    store.put_bytes("run/a", b"ours and more")
    store.faults = [Fault("put_bytes")]
    with pytest.raises(FileExistsError):
        transfer.put_bytes("run/a", b"ours", create_only=True)
    with pytest.raises(FileExistsError):
        transfer.put_bytes("run/a", b"ours and more", create_only=True)
    assert content(store, "run/a") == b"ours and more"


@pytest.mark.parametrize("size", [100, SIZE], ids=["whole", "in parts"])
def test_an_upload_that_creates_only_replaces_nothing(
    store: FaultyStore, transfer: Transfer, file: Path, data: bytes, size: int
) -> None:
    """An object that appears while the file is sent stays, and no parts are left of the file."""
    file.write_bytes(data[:size])
    verb = "complete" if size > MiB else "upload_object"
    store.faults = [Fault(verb, lost_answer=True)]
    transfer.upload("run/a", file, create_only=True)
    assert content(store, "run/a") == data[:size]
    store.faults = [Fault(verb, error=None, first=lambda: store.put_bytes("run/b", b"b"))]
    with pytest.raises(FileExistsError, match="run/b"):
        transfer.upload("run/b", file, create_only=True)
    assert content(store, "run/b") == b"b"
    assert list(store.unfinished_parts("")) == []


# ── swaps, tails and levels ──────────────────────────────────────────────────────────────────────────────────────────
def test_a_swap_whose_answer_was_lost_has_succeeded(store: FaultyStore, transfer: Transfer) -> None:
    """The retry finds another version, reads the object, and finds the bytes of this swap."""
    store.put_bytes("lease", b"first")
    data, version = transfer.read_versioned("lease")
    assert data == b"first"
    store.faults = [Fault("swap_bytes", lost_answer=True)]
    transfer.swap_bytes("lease", b"ours", version)
    assert store.count("swap_bytes") == 2
    assert content(store, "lease") == b"ours"


@pytest.mark.parametrize("other", [b"other", None])
def test_a_swap_that_came_second_fails(store: FaultyStore, transfer: Transfer, other: bytes | None) -> None:
    """Another process replaced or deleted the object, before the first try or between two tries."""

    def interfere() -> None:
        store.put_bytes("lease", other) if other is not None else store.delete_object("lease")

    store.put_bytes("lease", b"first")
    _, version = transfer.read_versioned("lease")
    store.faults = [Fault("swap_bytes", first=interfere)]
    with pytest.raises(FileExistsError, match="lease: swap"):
        transfer.swap_bytes("lease", b"ours", version)
    assert store.count("swap_bytes") == 2
    if other is not None:
        with pytest.raises(FileExistsError, match="lease: swap"):  # the same bytes are no success at the first try
            transfer.swap_bytes("lease", other, version)
        assert content(store, "lease") == other


def test_tails_versions_and_levels_are_retried(store: FaultyStore, transfer: Transfer) -> None:
    """Each verb that reads succeeds after a transient error, with one further call."""
    store.put_bytes("run/ep1/a", b"0123456789")
    store.faults = [Fault("read_tail"), Fault("read_versioned"), Fault("list_level")]
    assert transfer.read_tail("run/ep1/a", 3) == (10, b"789")
    assert transfer.read_versioned("run/ep1/a")[0] == b"0123456789"
    assert transfer.list_level("run/") == ([], ["run/ep1/"])
    assert [store.count(verb) for verb in ("read_tail", "read_versioned", "list_level")] == [2, 2, 2]


# ── downloads ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("size", [0, 1, MiB, 3 * MiB, SIZE])
@pytest.mark.parametrize("known", [True, False])
def test_an_object_comes_whole(
    store: FaultyStore, transfer: Transfer, quick_folder: Path, data: bytes, size: int, known: bool
) -> None:
    """Objects of all sizes are files with the same bytes; what fails on the way is read again, and no more."""
    store.put_bytes("run/a", data[:size])
    store.faults = [Fault("read_range", after=1, times=2)]
    transfer.download("run/a", quick_folder / "copy", size_bytes=size if known else None)
    assert (quick_folder / "copy").read_bytes() == data[:size]
    assert sorted(path.name for path in quick_folder.iterdir()) == ["copy"]
    assert store.count("get_object_size") == (0 if known else 1)


def test_a_file_is_not_overwritten(store: FaultyStore, transfer: Transfer, quick_folder: Path) -> None:
    """A download refuses to replace a file, unless it is told to."""
    store.put_bytes("run/a", b"new")
    (copy := quick_folder / "copy").write_bytes(b"old")
    with pytest.raises(FileExistsError, match="copy"):
        transfer.download("run/a", copy)
    assert copy.read_bytes() == b"old"
    transfer.download("run/a", copy, overwrite=True)
    assert copy.read_bytes() == b"new"


@pytest.mark.parametrize("lost", [False, True], ids=["", "and the connection is lost"])
@pytest.mark.parametrize("grown", [0, 1, 2 * MiB, -1, -2 * MiB])
def test_an_object_that_is_replaced_meanwhile_is_not_downloaded(
    store: FaultyStore, transfer: Transfer, quick_folder: Path, data: bytes, grown: int, lost: bool
) -> None:
    """The file never has bytes of two uploads: the download fails and leaves nothing."""
    store.put_bytes("run/a", b"a" * SIZE)
    newer = (data + data)[: SIZE + grown]
    replace = Fault("read_range", first=lambda: store.put_bytes("run/a", newer), after=3)
    store.faults = [replace if lost else dataclasses.replace(replace, error=None)]
    with pytest.raises((ObjectStoreError, CorruptCheckpointError), match="'run/a'"):
        transfer.download("run/a", quick_folder / "copy")
    assert list(quick_folder.iterdir()) == []
    transfer.download("run/a", quick_folder / "copy")
    assert (quick_folder / "copy").read_bytes() == newer


def test_what_no_digest_verifies_is_read_of_one_upload(store: FaultyStore, transfer: Transfer, data: bytes) -> None:
    """Who reads a file of others where it is gets an error if it is replaced between two reads, never a mixture."""
    store.put_bytes("run/a", data)
    opened = VerifiedObject(transfer, "run/a", None)
    assert opened.read(0, 10) == data[:10]
    assert opened.read(SIZE - 10, 10) == data[-10:]
    store.put_bytes("run/a", b"a" * SIZE)
    with pytest.raises(ObjectStoreError, match="'run/a' was replaced while it was read"):
        opened.read(MiB, 10)


@pytest.mark.parametrize(
    "error",
    [PermissionError("403 of 'run/a'"), FileNotFoundError("404 of 'run/a'"), ObjectStoreError("400 of 'run/a'")],
)
def test_a_failed_download_leaves_nothing(
    store: FaultyStore, transfer: Transfer, quick_folder: Path, data: bytes, error: Exception
) -> None:
    """What will not pass is raised at once, and there is neither a file nor a part of one."""
    store.put_bytes("run/a", data)
    store.faults = [Fault("read_range", after=2, times=1000, error=lambda: error)]
    with pytest.raises(type(error), match="run/a"):
        transfer.download("run/a", quick_folder / "copy")
    assert [path.name for path in quick_folder.iterdir()] == []


@pytest.mark.parametrize("wrong", [-1, 1])
def test_an_object_of_an_unexpected_size_is_refused(
    store: FaultyStore, transfer: Transfer, quick_folder: Path, data: bytes, wrong: int
) -> None:
    """An object that is shorter or longer than what was saved is never taken for it."""
    store.put_bytes("run/a", data)
    with pytest.raises(CorruptCheckpointError, match=str(SIZE)):
        transfer.download("run/a", quick_folder / "copy", size_bytes=SIZE + wrong)
    assert not (quick_folder / "copy").exists()


def test_a_check_decides(store: FaultyStore, transfer: Transfer, quick_folder: Path, data: bytes) -> None:
    """A download whose bytes the caller refuses does not appear."""
    store.put_bytes("run/a", data)
    seen: list[bytes] = []

    def refuse(path: Path) -> None:
        seen.append(path.read_bytes())
        raise CorruptCheckpointError("not what was saved")

    with pytest.raises(CorruptCheckpointError, match="not what"):
        transfer.download("run/a", quick_folder / "copy", check=refuse)
    assert seen == [data]
    assert [path.name for path in quick_folder.iterdir()] == []


def test_parts_are_read_into_place(store: FaultyStore, transfer: Transfer, data: bytes) -> None:
    """Memory is filled with the parts that were asked for, in any order, also overlapping ones, and nothing else is."""
    store.put_bytes("run/a", data)
    chance = random.Random(7)
    memory = bytearray(b"\xaa" * (4 * MiB))
    address, at, targets, expected = address_of(memory), 0, [], bytearray(memory)
    while len(targets) < 40:
        size = chance.choice([0, 1, 7, 1000, 70_000, 300_000])
        offset = chance.randrange(SIZE - size)
        if at + size > len(memory):
            break
        targets.append((offset, address + at, size))
        expected[at : at + size] = data[offset : offset + size]
        at += size + 3
    chance.shuffle(targets)
    read: list[int] = []
    store.faults = [Fault("read_range", after=2, times=2)]
    transfer.read_into("run/a", targets, read.append)
    assert memory == expected
    assert sum(read) >= sum(size for _, _, size in targets)


def test_near_parts_are_read_together(store: FaultyStore, transfer: Transfer, data: bytes) -> None:
    """Many small parts that are near each other are one request; one that is far is another."""
    store.put_bytes("run/a", data)
    memory = bytearray(1000)
    offsets = [*range(0, 400_000, 4000), 4 * MiB]
    transfer.read_into("run/a", [(offset, address_of(memory) + i, 1) for i, offset in enumerate(offsets)])
    assert memory[: len(offsets)] == bytes(data[offset] for offset in offsets)
    assert store.count("read_range") == 2


@pytest.mark.parametrize(
    ("offset", "size"), [(SIZE - 5, 10), (SIZE + 10, 1), (0, SIZE + 1), (-1, 5), (-2 * MiB, 5 * MiB)]
)
def test_bytes_that_are_not_there_are_not_read(
    store: FaultyStore, transfer: Transfer, data: bytes, offset: int, size: int
) -> None:
    """A range that the object has not got is an error that names it, at once."""
    store.put_bytes("run/a", data)
    with pytest.raises(CorruptCheckpointError, match="run/a"):
        transfer.read("run/a", offset, size)


def test_small_objects_come_at_once(store: FaultyStore, transfer: Transfer) -> None:
    """A small object is one request; one that is larger than expected is refused."""
    store.put_bytes("run/a", b"0123456789")
    store.calls.clear()
    assert transfer.read_all("run/a") == b"0123456789"
    assert store.calls == [("read_range", "run/a")]
    with pytest.raises(CorruptCheckpointError, match="more than the allowed 9 bytes"):
        transfer.read_all("run/a", most_bytes=9)


def test_the_other_verbs_are_tried_again(store: FaultyStore, transfer: Transfer) -> None:
    """Listing, looking and deleting pass over what may pass."""
    store.faults = [Fault(verb, times=3) for verb in ("put_bytes", "list_objects", "get_object_size", "delete_object")]
    transfer.put_bytes("run/a", b"x")
    assert [info.name for info in transfer.list("run/")] == ["run/a"]
    assert transfer.size("run/a") == 1
    transfer.delete("run/a")
    assert list(transfer.list("run/")) == []


# ── ending ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_error_ends_the_others_quickly(store: FaultyStore, file: Path, data: bytes) -> None:
    """When one range fails for good, those that wait for another try do not: the error comes at once."""
    store.put_bytes("run/a", data)
    slow = RetryPolicy(attempts=2, first_delay_seconds=1e5, longest_delay_seconds=1e5, budget_seconds=1e9)
    store.faults = [
        Fault("read_range", times=2),
        Fault("read_range", error=lambda: PermissionError("403 of 'run/a'"), times=1000, seconds=0.05),
    ]
    began = time.monotonic()
    with Transfer(store, threads=3, retry=slow) as transfer, pytest.raises(PermissionError, match="403"):
        transfer.read("run/a", 0, SIZE)
    assert time.monotonic() - began < 30


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C works, also where a shell that started these tests in the background has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def stuck(verb: str, answered: threading.Event, waited: list[bool], after: int = 0) -> list[Fault]:
    """A store that does not answer before it is told to; at the first such call there is a Ctrl-C."""

    def interrupt_and_wait() -> None:
        _thread.interrupt_main()
        wait()

    def wait() -> None:
        waited.append(answered.wait(WAIT))

    return [
        Fault(verb, error=None, after=after, first=interrupt_and_wait),
        Fault(verb, error=None, after=after, times=1000, first=wait),
    ]


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_a_download(store: FaultyStore, transfer: Transfer, quick_folder: Path, data: bytes) -> None:
    """Ctrl-C does not wait for the network, and leaves no file; the transfer can be used on."""
    store.put_bytes("run/a", data)
    answered, waited = threading.Event(), list[bool]()
    store.faults = stuck("read_range", answered, waited)
    with pytest.raises(KeyboardInterrupt):
        transfer.download("run/a", quick_folder / "copy")
    assert waited == []
    assert [path.name for path in quick_folder.iterdir()] == []
    answered.set()
    store.faults = []
    assert transfer.read("run/a", 0, SIZE) == data


def test_interrupted_memory_is_left_alone(store: FaultyStore, data: bytes) -> None:
    """After an error, bytes that come late are not written to the memory that was asked for."""
    store.put_bytes("run/a", data)
    late, waited = threading.Event(), list[bool]()
    store.faults = [
        Fault("read_range", error=None, first=lambda: waited.append(late.wait(WAIT))),
        Fault("read_range", error=lambda: ObjectStoreError("400")),
    ]
    memory = bytearray(2 * MiB)
    with Transfer(store, threads=2, retry=QUICK) as transfer:
        with pytest.raises(ObjectStoreError, match="400"):
            transfer.read_into("run/a", [(0, address_of(memory), 2 * MiB)])
        assert waited == []
        late.set()
    assert waited == [True]  # close has waited for it
    assert memory == bytes(2 * MiB)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_upload_is_gone_on_with(
    memory: MemoryStore, store: FaultyStore, transfer: Transfer, file: Path, data: bytes
) -> None:
    """Ctrl-C leaves the parts: the next upload goes on with them."""
    answered, waited = threading.Event(), list[bool]()
    store.faults = stuck("send", answered, waited, after=3)
    with pytest.raises(KeyboardInterrupt):
        transfer.upload("run/a", file)
    answered.set()
    transfer.close()  # waits for the parts that are on their way
    assert all(waited)
    store.faults = []
    with Transfer(store, threads=3, retry=QUICK, part_bytes=MiB) as another:
        another.upload("run/a", file)
    assert content(store, "run/a") == data
    assert memory.sent_parts == PARTS


def test_a_closed_transfer_says_so(store: FaultyStore, transfer: Transfer, data: bytes) -> None:
    """After ``close``, which may be called twice, no threads are left and nothing is moved."""
    before = threading.enumerate()
    transfer.put_bytes("run/a", data)
    assert any(thread.name == "transfer" for thread in threading.enumerate() if thread not in before)
    transfer.close()
    transfer.close()
    assert [thread for thread in threading.enumerate() if thread not in before] == []
    with pytest.raises(RuntimeError, match="closed"):
        transfer.read("run/a", 0, SIZE)


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"part_bytes": 0}])
def test_wrong_values_are_refused(store: FaultyStore, wrong: dict[str, int]) -> None:
    """A value that makes no sense is a ConfigError that names it."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Transfer(store, **wrong)  # type: ignore[arg-type]


# ── sizes of parts ───────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("size", "expected"),
    [(17 * MiB, 8 * MiB), (1 << 30, 8 * MiB), (3 << 30, 16 * MiB), (50 << 30, 16 * MiB), (1 << 40, 105 * MiB)],
)
def test_parts_are_sized_by_the_object(store: FaultyStore, size: int, expected: int) -> None:
    """Parts are 8 to 16 MiB, larger only where there would be too many."""
    assert part_bytes_for(size, store) == expected
    assert -(-size // expected) <= store.most_parts

"""Contracts: what every implementation of an interface must do, as tests that run on any of them."""

from __future__ import annotations

import os
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from composerlite.errors import ConfigError, ObjectStoreTransientError
from composerlite.storage import ObjectStore
from composerlite.storage.retry import RetryPolicy

_BAD_NAMES = ["", "/", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", "..", "a\0b", "a\udcff", "x" * 1025]
_ODD_NAMES = ["plain", "a/b/c.pt", "with space", "ep1-ba2-rank0.pt", "ünï/cödé", "50%", "a&b=c", "a+b", "q?x#y", "~t"]


class ObjectStoreContract(ABC):
    """Contract of every :class:`~composerlite.storage.ObjectStore`. Derive a test class and say how to open a store::

        class TestMyStore(ObjectStoreContract):
            @pytest.fixture
            def store(self):
                with MyStore("bucket") as store:
                    yield store

            @pytest.fixture
            def missing_bucket(self):
                with MyStore("no-such-bucket") as store:
                    yield store

    Each test gets names of its own below :attr:`prefix`: the bucket need not be empty.
    """

    # ── what a store is ──────────────────────────────────────────────────────────────────────────────────────────
    @pytest.fixture
    @abstractmethod
    def store(self) -> Generator[ObjectStore]:
        """A store that can be read and written."""

    @pytest.fixture
    @abstractmethod
    def missing_bucket(self) -> Generator[ObjectStore]:
        """A store whose bucket, container or folder does not exist."""

    @pytest.fixture
    def prefix(self) -> str:
        """Below which the names of one test are."""
        return f"contract-{os.urandom(6).hex()}"

    # ── bytes in, bytes out ──────────────────────────────────────────────────────────────────────────────────────
    @pytest.mark.parametrize("size", [0, 1, 1000, (1 << 20) + 7])
    def test_a_file_comes_back_as_it_was(self, store: ObjectStore, prefix: str, tmp_path: Path, size: int) -> None:
        """A file that was uploaded is what is downloaded, for every size from none on."""
        (tmp_path / "source").write_bytes(data := os.urandom(size))
        store.upload_object(f"{prefix}/a.bin", tmp_path / "source")
        store.download_object(f"{prefix}/a.bin", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == data
        assert store.get_object_size(f"{prefix}/a.bin") == size

    def test_bytes_come_back_as_they_were(self, store: ObjectStore, prefix: str) -> None:
        """Bytes that were put are those that are read."""
        store.put_bytes(f"{prefix}/a", b"some bytes")
        assert store.read_range(f"{prefix}/a", 0, 100) == b"some bytes"

    @pytest.mark.parametrize("name", _ODD_NAMES)
    def test_names_may_have_any_characters(self, store: ObjectStore, prefix: str, name: str) -> None:
        """A name is listed and read as it was written."""
        store.put_bytes(f"{prefix}/{name}", name.encode())
        assert store.read_range(f"{prefix}/{name}", 0, 100) == name.encode()
        assert [info.name for info in store.list_objects(f"{prefix}/")] == [f"{prefix}/{name}"]

    def test_an_upload_replaces_what_was_there(self, store: ObjectStore, prefix: str, tmp_path: Path) -> None:
        """The newest content wins, also where it is shorter."""
        (tmp_path / "long").write_bytes(b"x" * 5000)
        (tmp_path / "short").write_bytes(b"y")
        for source in ("long", "short"):
            store.upload_object(f"{prefix}/a", tmp_path / source)
        assert store.read_range(f"{prefix}/a", 0, 6000) == b"y"

    def test_progress_ends_at_the_size(self, store: ObjectStore, prefix: str, tmp_path: Path) -> None:
        """A callback hears how many bytes of how many were moved, and in the end that all were."""
        (tmp_path / "source").write_bytes(bytes(300_000))
        told: list[tuple[int, int]] = []
        store.upload_object(f"{prefix}/a", tmp_path / "source", lambda done, total: told.append((done, total)))
        assert told[-1] == (300_000, 300_000)
        told.clear()
        store.download_object(f"{prefix}/a", tmp_path / "copy", callback=lambda done, total: told.append((done, total)))
        assert told[-1] == (300_000, 300_000)

    # ── ranges ───────────────────────────────────────────────────────────────────────────────────────────────────
    @pytest.mark.parametrize(
        ("offset", "size", "expected"),
        [(0, 3, b"012"), (4, 2, b"45"), (8, 9, b"89"), (0, 10, b"0123456789"), (10, 5, b""), (50, 5, b""), (3, 0, b"")],
    )
    def test_a_range_is_what_lies_there(
        self, store: ObjectStore, prefix: str, offset: int, size: int, expected: bytes
    ) -> None:
        """A range has exactly its bytes; past the end there are fewer or none."""
        name = f"{prefix}/a"
        store.put_bytes(name, b"0123456789")
        retried = RetryPolicy().run  # a service that refuses a range may drop the connection that the next read uses
        assert retried(lambda: store.read_range(name, offset, size), "read") == expected
        found = retried(lambda: store.open_range(name, offset, size), "read")
        assert (found.size_bytes, found.read()) == (10, expected)

    def test_ranges_tell_of_which_upload_they_are(self, store: ObjectStore, prefix: str) -> None:
        """Ranges of one upload have the same version, and those of the next another; or the store has no versions."""
        name, versions = f"{prefix}/a", list[str]()
        for content in (b"first", b"second"):  # of another size: some stores know no more within a second
            store.put_bytes(name, content)
            for offset in (0, 3):
                found = store.open_range(name, offset, 2)
                versions.append(found.version)
                assert found.read() == content[offset : offset + 2]
        assert versions[0] == versions[1]
        assert versions[2] == versions[3]
        assert versions[0] != versions[2] or set(versions) == {""}

    @pytest.mark.parametrize(
        ("content", "most_bytes", "tail"),
        [(b"0123456789", 4, b"6789"), (b"0123456789", 10, b"0123456789"), (b"012", 65536, b"012"), (b"", 5, b"")],
    )
    def test_a_tail_has_the_size_and_the_last_bytes(
        self, store: ObjectStore, prefix: str, content: bytes, most_bytes: int, tail: bytes
    ) -> None:
        """``read_tail`` returns the size and the last bytes; of a smaller or empty object all bytes."""
        store.put_bytes(f"{prefix}/a", content)
        retried = RetryPolicy().run  # a service that refuses a range may drop the connection that the next read uses
        assert retried(lambda: store.read_tail(f"{prefix}/a", most_bytes), "read") == (len(content), tail)

    # ── listing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def test_a_listing_has_names_and_sizes_in_order(self, store: ObjectStore, prefix: str) -> None:
        """Everything below a prefix is listed, at any depth, in the order of the names."""
        for size, name in enumerate(["b", "a/z", "a-", "c/d/e", "B"]):
            store.put_bytes(f"{prefix}/{name}", bytes(size))
        listed = [(info.name.removeprefix(f"{prefix}/"), info.size_bytes) for info in store.list_objects(f"{prefix}/")]
        assert listed == [("B", 4), ("a-", 2), ("a/z", 1), ("b", 0), ("c/d/e", 3)]

    def test_a_listing_tells_how_old_objects_are(self, store: ObjectStore, prefix: str) -> None:
        """Times are in UTC, where the store knows them: what is swept by age is not swept too early."""
        store.put_bytes(f"{prefix}/new", b"")
        (info,) = store.list_objects(f"{prefix}/")
        assert info.modified_at is None or abs(datetime.now(UTC) - info.modified_at) < timedelta(minutes=10)

    def test_a_prefix_is_any_beginning_of_a_name(self, store: ObjectStore, prefix: str) -> None:
        """A prefix need not end at a slash."""
        for name in ("run1/a", "run10/a", "run2/a"):
            store.put_bytes(f"{prefix}/{name}", b"")
        assert [info.name for info in store.list_objects(f"{prefix}/run1")] == [
            f"{prefix}/run1/a",
            f"{prefix}/run10/a",
        ]

    def test_nothing_is_listed_where_nothing_is(self, store: ObjectStore, prefix: str) -> None:
        """An empty prefix in a bucket that exists is no error."""
        assert list(store.list_objects(f"{prefix}/nothing/")) == []
        assert store.list_level(f"{prefix}/nothing/") == ([], [])

    def test_a_level_has_its_objects_and_folders(self, store: ObjectStore, prefix: str) -> None:
        """``list_level`` lists objects directly below a prefix, and folders once each; the prefix may end anywhere."""
        for size, name in enumerate(["run/b", "run/ep1/x", "run/ep1/y/z", "run/ep2/x", "run/a", "run10/a", "top"]):
            store.put_bytes(f"{prefix}/{name}", bytes(size))
        for begin, objects, folders in (
            ("run/", [("run/a", 4), ("run/b", 0)], ["run/ep1/", "run/ep2/"]),
            ("run/ep1/", [("run/ep1/x", 1)], ["run/ep1/y/"]),
            ("run/ep", [], ["run/ep1/", "run/ep2/"]),
            ("", [("top", 6)], ["run/", "run10/"]),
            ("t", [("top", 6)], []),
        ):
            found, below = store.list_level(f"{prefix}/{begin}")
            assert [(info.name.removeprefix(f"{prefix}/"), info.size_bytes) for info in found] == objects
            assert [name.removeprefix(f"{prefix}/") for name in below] == folders
        assert f"{prefix}/" in store.list_level()[1]

    def test_long_listings_are_complete(self, store: ObjectStore, prefix: str) -> None:
        """More objects than a service returns at once are all listed, once each."""
        names = [f"{prefix}/{number:04}" for number in range(1100)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: store.put_bytes(name, b""), names))
        assert [info.name for info in store.list_objects(f"{prefix}/")] == names
        assert [info.name for info in store.list_level(f"{prefix}/")[0]] == names

    # ── deleting ─────────────────────────────────────────────────────────────────────────────────────────────────
    def test_what_was_deleted_is_gone(self, store: ObjectStore, prefix: str) -> None:
        """A deleted object is neither listed nor read; to delete it again is fine."""
        store.put_bytes(f"{prefix}/a", b"x")
        store.delete_object(f"{prefix}/a")
        store.delete_object(f"{prefix}/a")
        assert list(store.list_objects(f"{prefix}/")) == []
        with pytest.raises(FileNotFoundError):
            store.read_range(f"{prefix}/a", 0, 1)

    # ── create only ──────────────────────────────────────────────────────────────────────────────────────────────
    def test_create_only_refuses_what_exists(self, store: ObjectStore, prefix: str, tmp_path: Path) -> None:
        """``create_only`` writes where nothing is and leaves what is there as it was."""
        (tmp_path / "file").write_bytes(b"file")
        store.put_bytes(f"{prefix}/a", b"first", create_only=True)
        store.upload_object(f"{prefix}/b", tmp_path / "file", create_only=True)
        with pytest.raises(FileExistsError, match="a"):
            store.put_bytes(f"{prefix}/a", b"second", create_only=True)
        with pytest.raises(FileExistsError, match="a"):
            store.upload_object(f"{prefix}/a", tmp_path / "file", create_only=True)
        assert store.read_range(f"{prefix}/a", 0, 10) == b"first"
        assert store.read_range(f"{prefix}/b", 0, 10) == b"file"

    def test_one_of_many_creates(self, store: ObjectStore, prefix: str, tmp_path: Path) -> None:
        """Exactly one of eight threads that create the same name at once succeeds, and its bytes are there.

        Half of them upload a file.
        """
        for number in range(8):
            (tmp_path / str(number)).write_text(str(number))
        if not store.creates_atomically:
            pytest.skip("this store cannot create atomically, and says so")
        for attempt in range(3):
            name, start = f"{prefix}/{attempt}", threading.Barrier(8)

            def create(number: int, name: str = name, start: threading.Barrier = start) -> int | None:
                start.wait(10)
                try:
                    if number % 2:
                        store.put_bytes(name, str(number).encode(), create_only=True)
                    else:
                        store.upload_object(name, tmp_path / str(number), create_only=True)
                except FileExistsError:
                    return None
                return number

            with ThreadPoolExecutor(8) as pool:
                winners = [number for number in pool.map(create, range(8)) if number is not None]
            assert len(winners) == 1
            assert store.read_range(name, 0, 10) == str(winners[0]).encode()

    # ── swaps ────────────────────────────────────────────────────────────────────────────────────────────────────
    def test_a_swap_replaces_only_the_version_that_was_read(self, store: ObjectStore, prefix: str) -> None:
        """A swap with the version that was read succeeds, a second one with that version leaves the object alone."""
        name = f"{prefix}/a"
        store.put_bytes(name, b"")
        content, version = store.read_versioned(name)
        assert content == b""
        store.swap_bytes(name, b"first", version)
        with pytest.raises(FileExistsError, match="a: swap"):
            store.swap_bytes(name, b"second", version)
        content, later = store.read_versioned(name)
        assert content == b"first"
        assert later != version
        store.swap_bytes(name, b"third", later)
        assert store.read_versioned(name)[0] == b"third"

    def test_a_swap_sees_other_writers(self, store: ObjectStore, prefix: str) -> None:
        """A swap fails if the object was put again or deleted since; the swap writes nothing."""
        name = f"{prefix}/a"
        store.put_bytes(name, b"first")
        _, version = store.read_versioned(name)
        store.put_bytes(name, b"other")
        with pytest.raises(FileExistsError, match="a: swap"):
            store.swap_bytes(name, b"mine", version)
        assert store.read_range(name, 0, 10) == b"other"
        _, version = store.read_versioned(name)
        store.delete_object(name)
        with pytest.raises(FileExistsError, match="a: swap"):
            store.swap_bytes(name, b"mine", version)
        assert list(store.list_objects(f"{prefix}/")) == []

    def test_one_of_many_swaps(self, store: ObjectStore, prefix: str) -> None:
        """Exactly one of eight threads that swap the same version at once succeeds, and its bytes are there."""
        if not store.swaps_atomically:
            pytest.skip("this store cannot swap atomically, and says so")
        name = f"{prefix}/a"
        store.put_bytes(name, b"first")
        for _ in range(3):
            (_, version), start = store.read_versioned(name), threading.Barrier(8)

            def swap(number: int, version: str = version, start: threading.Barrier = start) -> int | None:
                start.wait(10)
                try:
                    store.swap_bytes(name, f"{number} after {version}".encode(), version)
                except (FileExistsError, ObjectStoreTransientError):  # transient: another swap is under way
                    return None
                return number

            with ThreadPoolExecutor(8) as pool:
                winners = [number for number in pool.map(swap, range(8)) if number is not None]
            assert len(winners) == 1
            assert store.read_versioned(name)[0] == f"{winners[0]} after {version}".encode()

    # ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────
    def test_a_missing_object_is_not_found(self, store: ObjectStore, prefix: str, tmp_path: Path) -> None:
        """Reading a missing object raises FileNotFoundError with its name, and leaves no file."""
        name = f"{prefix}/missing"
        for read in (
            lambda: store.get_object_size(name),
            lambda: store.read_range(name, 0, 1),
            lambda: store.read_tail(name, 1),
            lambda: store.read_versioned(name),
            lambda: store.open_range(name, 0, 1),
            lambda: store.download_object(name, tmp_path / "copy"),
        ):
            with pytest.raises(FileNotFoundError, match="missing"):
                read()
        assert list(tmp_path.iterdir()) == []

    def test_a_missing_bucket_is_not_found(self, missing_bucket: ObjectStore, tmp_path: Path) -> None:
        """Every operation on a missing bucket raises FileNotFoundError; a listing is no exception."""
        (tmp_path / "source").write_bytes(b"x")
        for use in (
            lambda: missing_bucket.list_objects("a"),
            lambda: missing_bucket.list_level("a"),
            lambda: missing_bucket.read_tail("a", 1),
            lambda: missing_bucket.read_versioned("a"),
            lambda: missing_bucket.put_bytes("a", b""),
            lambda: missing_bucket.upload_object("a", tmp_path / "source"),
            lambda: missing_bucket.read_range("a", 0, 1),
            lambda: missing_bucket.check_writable("a"),
        ):
            with pytest.raises(FileNotFoundError):
                use()

    def test_a_local_file_is_not_overwritten(self, store: ObjectStore, prefix: str, tmp_path: Path) -> None:
        """A download refuses to replace a file without ``overwrite``."""
        store.put_bytes(f"{prefix}/a", b"new")
        (tmp_path / "copy").write_bytes(b"old")
        with pytest.raises(FileExistsError, match="copy"):
            store.download_object(f"{prefix}/a", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == b"old"
        store.download_object(f"{prefix}/a", tmp_path / "copy", overwrite=True)
        assert (tmp_path / "copy").read_bytes() == b"new"

    def test_a_missing_local_file_uploads_nothing(self, store: ObjectStore, prefix: str, tmp_path: Path) -> None:
        """An upload of no file is FileNotFoundError, and there is no object."""
        with pytest.raises(FileNotFoundError, match="nothing"):
            store.upload_object(f"{prefix}/a", tmp_path / "nothing")
        assert list(store.list_objects(f"{prefix}/")) == []

    @pytest.mark.parametrize("name", _BAD_NAMES)
    def test_names_that_are_none_are_refused(self, store: ObjectStore, name: str) -> None:
        """A name with '..', an empty part, too many bytes or what is no text is a ConfigError for every verb."""
        for use in (
            lambda: store.put_bytes(name, b""),
            lambda: store.read_range(name, 0, 1),
            lambda: store.get_object_size(name),
            lambda: store.read_tail(name, 1),
            lambda: store.swap_bytes(name, b"", "version"),
            lambda: store.delete_object(name),
        ):
            with pytest.raises(ConfigError, match="name"):
                use()

    # ── writing is possible ──────────────────────────────────────────────────────────────────────────────────────
    def test_a_check_leaves_nothing_behind(self, store: ObjectStore, prefix: str) -> None:
        """``check_writable`` succeeds where writing does, and there is no object and no upload afterwards."""
        store.check_writable(f"{prefix}/run")
        assert list(store.list_objects(prefix)) == []
        assert list(store.unfinished_parts(prefix)) == []

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────
    def test_parts_become_one_object(self, store: ObjectStore, prefix: str) -> None:
        """Parts that were sent in any order by several threads are one object, in order, when they are completed."""
        name = f"{prefix}/parts"
        if (upload := store.start_parts(name)) is None:
            pytest.skip("this store takes objects as a whole only")
        size = max(store.least_part_bytes, 1000)
        parts = [os.urandom(size), os.urandom(size), os.urandom(17)]
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda n: upload.send(n, memoryview(parts[n - 1])), [3, 1, 2]))
        with pytest.raises(FileNotFoundError):
            store.get_object_size(name)
        upload.complete(count=3)
        again = store.start_parts(name)
        assert again is not None
        again.send(1, memoryview(b"other"))
        with pytest.raises(FileExistsError):
            again.complete(count=1, create_only=True)
        again.abort()
        assert store.read_range(name, 0, 3 * size) == b"".join(parts)
        assert list(store.unfinished_parts(prefix)) == []

    def test_another_process_goes_on_with_parts(self, store: ObjectStore, prefix: str) -> None:
        """An unfinished upload is found by its name. A part with other bytes replaces the part that the store has."""
        name = f"{prefix}/parts"
        if (upload := store.start_parts(name)) is None:
            pytest.skip("this store takes objects as a whole only")
        size = max(store.least_part_bytes, 1000)
        first, second = os.urandom(size), os.urandom(20)
        upload.send(1, memoryview(first))
        (found,) = store.unfinished_parts(prefix)
        assert (found.name, found.upload_id) == (name, upload.upload_id)
        found.send(1, memoryview(os.urandom(size)))
        found.send(1, memoryview(first))
        found.send(2, memoryview(second))
        found.complete(count=2)
        assert store.read_range(name, 0, 2 * size) == first + second

    def test_aborted_parts_are_gone(self, store: ObjectStore, prefix: str) -> None:
        """An abort leaves neither an object nor an unfinished upload; to abort again is no error."""
        if (upload := store.start_parts(f"{prefix}/parts")) is None:
            pytest.skip("this store takes objects as a whole only")
        upload.send(1, memoryview(b"x"))
        upload.abort()
        upload.abort()
        assert list(store.list_objects(prefix)) == []
        assert list(store.unfinished_parts(prefix)) == []

    # ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────
    def test_threads_share_a_store(self, store: ObjectStore, prefix: str) -> None:
        """Several threads that write and read at once do not see each other's bytes."""

        def use(number: int) -> bool:
            data = os.urandom(50_000)
            store.put_bytes(f"{prefix}/{number}", data)
            return store.read_range(f"{prefix}/{number}", 0, 60_000) == data

        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(use, range(24)))

    def test_training_does_not_notice(self, store: ObjectStore, prefix: str, tmp_path: Path) -> None:
        """No verb draws from Python's generator: uploads do not change the random numbers of training."""
        (tmp_path / "source").write_bytes(os.urandom(300_000))
        before = random.getstate()
        store.check_writable(f"{prefix}/run")
        store.upload_object(f"{prefix}/a", tmp_path / "source")
        store.put_bytes(f"{prefix}/b", b"x", create_only=True)
        if (upload := store.start_parts(f"{prefix}/c")) is not None:
            upload.send(1, memoryview(b"x"))
            upload.complete(count=1)
        store.download_object(f"{prefix}/a", tmp_path / "copy")
        store.read_range(f"{prefix}/b", 0, 1)
        store.get_object_size(f"{prefix}/b")
        store.list_objects(prefix)
        store.delete_object(f"{prefix}/b")
        assert random.getstate() == before

    def test_closing_twice_is_fine(self, store: ObjectStore) -> None:
        """``close`` may be called again."""
        store.close()
        store.close()

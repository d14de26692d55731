"""Tests for every implementation of an interface."""

from __future__ import annotations

import os
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
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
    """Tests for an :class:`~composerlite.storage.ObjectStore`. Derive a test class with two fixtures::

        class TestMyStore(ObjectStoreContract):
            @pytest.fixture
            def store(self):
                with MyStore("bucket") as store:
                    yield store

            @pytest.fixture
            def missing_bucket(self):
                with MyStore("no-such-bucket") as store:
                    yield store

    Each test uses its own names below :attr:`prefix`, so the bucket may contain other objects.
    """

    @pytest.fixture
    @abstractmethod
    def store(self) -> Generator[ObjectStore]:
        """Open a writable store."""

    @pytest.fixture
    @abstractmethod
    def missing_bucket(self) -> Generator[ObjectStore]:
        """Open a store with a missing bucket, container or folder."""

    @pytest.fixture
    def prefix(self) -> str:
        """Return a unique prefix for the names of a test."""
        return f"contract-{os.urandom(6).hex()}"

    def test_a_file_comes_back_as_it_was(self, store: ObjectStore, prefix: str, tmp_path: Path) -> None:
        """A downloaded file equals the last uploaded file, also an empty file. Progress ends at the full size."""
        for size in ((1 << 20) + 7, 1000, 1, 0):
            (tmp_path / "source").write_bytes(data := os.urandom(size))
            calls: list[tuple[int, int]] = []
            store.upload_object(f"{prefix}/a", tmp_path / "source", lambda *call, calls=calls: calls.append(call))
            assert size == 0 or calls[-1] == (size, size)
            calls.clear()
            copy = tmp_path / str(size)
            store.download_object(f"{prefix}/a", copy, callback=lambda *call, calls=calls: calls.append(call))
            assert size == 0 or calls[-1] == (size, size)
            assert copy.read_bytes() == data
            assert store.get_object_size(f"{prefix}/a") == size

    @pytest.mark.parametrize("name", _ODD_NAMES)
    def test_names_may_have_any_characters(self, store: ObjectStore, prefix: str, name: str) -> None:
        """A name with any characters is listed and read unchanged."""
        store.put_bytes(f"{prefix}/{name}", name.encode())
        assert store.read_range(f"{prefix}/{name}", 0, 100) == name.encode()
        assert [info.name for info in store.list_objects(f"{prefix}/")] == [f"{prefix}/{name}"]

    def test_a_range_is_what_lies_there(self, store: ObjectStore, prefix: str) -> None:
        """A range has the requested bytes, fewer or none past the end. ``read_tail`` also returns the size."""
        name, data = f"{prefix}/a", b"0123456789"
        retried = RetryPolicy().run  # a service may drop the connection after an invalid range
        store.put_bytes(name, data)
        for offset, size in ((0, 3), (4, 2), (8, 9), (0, 10), (10, 5), (50, 5), (3, 0)):
            expected = data[offset : offset + size]
            assert retried(lambda o=offset, n=size: store.read_range(name, o, n), "read") == expected
            found = retried(lambda o=offset, n=size: store.open_range(name, o, n), "read")
            assert (found.size_bytes, found.read()) == (10, expected)
        for content, most_bytes, tail in ((data, 4, b"6789"), (data, 10, data), (b"012", 65536, b"012"), (b"", 5, b"")):
            store.put_bytes(name, content)
            assert retried(lambda n=most_bytes: store.read_tail(name, n), "read") == (len(content), tail)

    def test_ranges_tell_of_which_upload_they_are(self, store: ObjectStore, prefix: str) -> None:
        """Ranges of one upload have the same version, and ranges of the next upload another version, or none."""
        name, versions = f"{prefix}/a", list[str]()
        for content in (b"first", b"second"):  # different sizes: some stores compare size and second
            store.put_bytes(name, content)
            for offset in (0, 3):
                found = store.open_range(name, offset, 2)
                versions.append(found.version)
                assert found.read() == content[offset : offset + 2]
        assert versions[0] == versions[1]
        assert versions[2] == versions[3]
        assert versions[0] != versions[2] or set(versions) == {""}

    def test_a_listing_has_names_and_sizes_in_order(self, store: ObjectStore, prefix: str) -> None:
        """All objects below a prefix are listed, at any depth, sorted by name. A prefix may end inside a name.

        Known times are in UTC, so deletion by age is never too early.
        """
        for size, name in enumerate(["b", "a/z", "a-", "c/d/e", "B"]):
            store.put_bytes(f"{prefix}/{name}", bytes(size))
        for begin, expected in (
            ("", [("B", 4), ("a-", 2), ("a/z", 1), ("b", 0), ("c/d/e", 3)]),
            ("a", [("a-", 2), ("a/z", 1)]),
            ("nothing/", []),
        ):
            listed = store.list_objects(f"{prefix}/{begin}")
            assert [(info.name.removeprefix(f"{prefix}/"), info.size_bytes) for info in listed] == expected
            times = [info.modified_at for info in listed if info.modified_at is not None]
            assert all(abs(datetime.now(UTC) - time) < timedelta(minutes=10) for time in times)

    def test_a_level_has_its_objects_and_folders(self, store: ObjectStore, prefix: str) -> None:
        """``list_level`` lists objects directly below a prefix, and each folder once."""
        for size, name in enumerate(["run/b", "run/ep1/x", "run/ep1/y/z", "run/ep2/x", "run/a", "run10/a", "top"]):
            store.put_bytes(f"{prefix}/{name}", bytes(size))
        for begin, objects, folders in (
            ("run/", [("run/a", 4), ("run/b", 0)], ["run/ep1/", "run/ep2/"]),
            ("run/ep1/", [("run/ep1/x", 1)], ["run/ep1/y/"]),
            ("run/ep", [], ["run/ep1/", "run/ep2/"]),
            ("", [("top", 6)], ["run/", "run10/"]),
            ("t", [("top", 6)], []),
            ("nothing/", [], []),
        ):
            found, below = store.list_level(f"{prefix}/{begin}")
            assert [(info.name.removeprefix(f"{prefix}/"), info.size_bytes) for info in found] == objects
            assert [name.removeprefix(f"{prefix}/") for name in below] == folders
        assert f"{prefix}/" in store.list_level()[1]

    def test_long_listings_are_complete(self, store: ObjectStore, prefix: str) -> None:
        """More objects than a service returns per request are all listed once."""
        names = [f"{prefix}/{number:04}" for number in range(1100)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: store.put_bytes(name, b""), names))
        assert [info.name for info in store.list_objects(f"{prefix}/")] == names
        assert [info.name for info in store.list_level(f"{prefix}/")[0]] == names

    def test_what_was_deleted_is_gone(self, store: ObjectStore, prefix: str) -> None:
        """A deleted object is neither listed nor read. A second deletion succeeds."""
        store.put_bytes(f"{prefix}/a", b"x")
        store.delete_object(f"{prefix}/a")
        store.delete_object(f"{prefix}/a")
        assert list(store.list_objects(f"{prefix}/")) == []
        with pytest.raises(FileNotFoundError):
            store.read_range(f"{prefix}/a", 0, 1)

    def test_create_only_refuses_what_exists(self, store: ObjectStore, prefix: str, tmp_path: Path) -> None:
        """``create_only`` writes new objects and does not change existing objects."""
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
        """Exactly one of eight threads succeeds to create the same name. Half of the threads upload a file."""
        if not store.creates_atomically:
            pytest.skip("the store does not create atomically")
        for number in range(8):
            (tmp_path / str(number)).write_text(str(number))
        for attempt in range(3):
            name = f"{prefix}/{attempt}"

            def create(number: int, name: str = name) -> None:
                if number % 2:
                    store.put_bytes(name, str(number).encode(), create_only=True)
                else:
                    store.upload_object(name, tmp_path / str(number), create_only=True)

            winner = _winner(create)
            assert store.read_range(name, 0, 10) == str(winner).encode()

    def test_a_swap_replaces_only_the_version_that_was_read(self, store: ObjectStore, prefix: str) -> None:
        """A swap succeeds with the current version only: not after another swap, a put or a deletion."""
        name = f"{prefix}/a"
        store.put_bytes(name, b"")
        content, version = store.read_versioned(name)
        assert content == b""
        for change, expected in (
            (lambda version: store.swap_bytes(name, b"first", version), b"first"),
            (lambda _: store.put_bytes(name, b"other"), b"other"),
            (lambda _: store.delete_object(name), None),
        ):
            _, version = store.read_versioned(name)
            change(version)
            with pytest.raises(FileExistsError, match="a: swap"):
                store.swap_bytes(name, b"mine", version)
            if expected is None:
                assert list(store.list_objects(f"{prefix}/")) == []
            else:
                content, later = store.read_versioned(name)
                assert (content, later != version) == (expected, True)

    def test_one_of_many_swaps(self, store: ObjectStore, prefix: str) -> None:
        """Exactly one of eight threads succeeds to swap the same version."""
        if not store.swaps_atomically:
            pytest.skip("the store does not swap atomically")
        name = f"{prefix}/a"
        store.put_bytes(name, b"first")
        for _ in range(3):
            _, version = store.read_versioned(name)

            def swap(number: int, version: str = version) -> None:
                store.swap_bytes(name, f"{number} after {version}".encode(), version)

            winner = _winner(swap)
            assert store.read_versioned(name)[0] == f"{winner} after {version}".encode()

    def test_a_missing_object_is_not_found(self, store: ObjectStore, prefix: str, tmp_path: Path) -> None:
        """A read of a missing object raises FileNotFoundError with the name, and writes no file."""
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
        """Every operation on a missing bucket raises FileNotFoundError, including lists."""
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
        """A download replaces a local file only with ``overwrite``."""
        store.put_bytes(f"{prefix}/a", b"new")
        (tmp_path / "copy").write_bytes(b"old")
        with pytest.raises(FileExistsError, match="copy"):
            store.download_object(f"{prefix}/a", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == b"old"
        store.download_object(f"{prefix}/a", tmp_path / "copy", overwrite=True)
        assert (tmp_path / "copy").read_bytes() == b"new"

    def test_a_missing_local_file_uploads_nothing(self, store: ObjectStore, prefix: str, tmp_path: Path) -> None:
        """An upload of a missing file raises FileNotFoundError and creates no object."""
        with pytest.raises(FileNotFoundError, match="nothing"):
            store.upload_object(f"{prefix}/a", tmp_path / "nothing")
        assert list(store.list_objects(f"{prefix}/")) == []

    @pytest.mark.parametrize("name", _BAD_NAMES)
    def test_names_that_are_none_are_refused(self, store: ObjectStore, name: str) -> None:
        """A name with '..', an empty part, invalid text or too many bytes is a ConfigError in every method."""
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

    def test_a_check_leaves_nothing_behind(self, store: ObjectStore, prefix: str) -> None:
        """``check_writable`` succeeds and leaves neither object nor upload."""
        store.check_writable(f"{prefix}/run")
        assert list(store.list_objects(prefix)) == []
        assert list(store.unfinished_parts(prefix)) == []

    def test_parts_become_one_object(self, store: ObjectStore, prefix: str) -> None:
        """Parts sent by several threads in any order become one object at completion."""
        name = f"{prefix}/parts"
        if (upload := store.start_parts(name)) is None:
            pytest.skip("the store does not support parts")
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
        """Another process finds an unfinished upload by name, and replaces a part."""
        name = f"{prefix}/parts"
        if (upload := store.start_parts(name)) is None:
            pytest.skip("the store does not support parts")
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
        """An abort leaves neither object nor upload. A second abort succeeds."""
        if (upload := store.start_parts(f"{prefix}/parts")) is None:
            pytest.skip("the store does not support parts")
        upload.send(1, memoryview(b"x"))
        upload.abort()
        upload.abort()
        assert list(store.list_objects(prefix)) == []
        assert list(store.unfinished_parts(prefix)) == []

    def test_threads_share_a_store(self, store: ObjectStore, prefix: str) -> None:
        """Concurrent threads read their own bytes."""

        def use(number: int) -> bool:
            data = os.urandom(50_000)
            store.put_bytes(f"{prefix}/{number}", data)
            return store.read_range(f"{prefix}/{number}", 0, 60_000) == data

        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(use, range(24)))

    def test_training_does_not_notice(self, store: ObjectStore, prefix: str, tmp_path: Path) -> None:
        """No method uses Python's global random generator, so training is reproducible."""
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
        """A second ``close`` succeeds."""
        store.close()
        store.close()


def _winner(use: Callable[[int], None]) -> int:
    """Call ``use`` in eight threads at once, and return the number of the only successful thread."""
    start = threading.Barrier(8)

    def run(number: int) -> int | None:
        start.wait(10)
        try:
            use(number)
        except (FileExistsError, ObjectStoreTransientError):  # transient: another thread is running
            return None
        return number

    with ThreadPoolExecutor(8) as pool:
        (winner,) = [number for number in pool.map(run, range(8)) if number is not None]
    return winner

"""LocalObjectStore: the contract of every store, and what is special where objects are files."""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from composerlite.errors import ConfigError, ObjectStoreError, ObjectStoreTransientError
from composerlite.storage import StagedFile, parse_uri
from composerlite.storage.stores.local import LocalObjectStore
from composerlite.testing.contracts import ObjectStoreContract


class TestLocalObjectStore(ObjectStoreContract):
    @pytest.fixture
    def store(self, quick_folder: Path) -> Generator[LocalObjectStore]:
        with LocalObjectStore(quick_folder) as store:
            yield store

    @pytest.fixture
    def missing_bucket(self, quick_folder: Path) -> Generator[LocalObjectStore]:
        with LocalObjectStore(quick_folder / "missing") as store:
            yield store


@pytest.fixture
def store(quick_folder: Path) -> LocalObjectStore:
    (quick_folder / "bucket").mkdir()
    return LocalObjectStore(quick_folder / "bucket")


def test_no_name_leads_out_of_the_folder(store: LocalObjectStore, quick_folder: Path) -> None:
    """A symbolic link is neither read, nor written through, nor listed, nor is anything behind it deleted."""
    (quick_folder / "secret").mkdir()
    (quick_folder / "secret" / "key").write_bytes(b"secret")
    (store.folder / "out").symlink_to(quick_folder / "secret")
    (store.folder / "key").symlink_to(quick_folder / "secret" / "key")
    for name in ("out/key", "key"):
        with pytest.raises((ObjectStoreError, FileNotFoundError), match="link"):
            store.read_range(name, 0, 6)
    with pytest.raises(ObjectStoreError, match="link"):
        store.put_bytes("out/key", b"changed")
    with pytest.raises(ObjectStoreError, match="link"):
        store.delete_object("out/key")
    store.put_bytes("key", b"mine")
    assert [info.name for info in store.list_objects()] == ["key"]
    assert list(store.list_objects("../secret/")) == list(store.list_objects("out/")) == []
    assert (quick_folder / "secret" / "key").read_bytes() == b"secret"


def test_an_object_is_not_a_folder_of_objects(store: LocalObjectStore) -> None:
    """Where ``a`` is an object ``a/b`` cannot be, and the other way round; both say why."""
    store.put_bytes("a", b"")
    store.put_bytes("c/d", b"")
    for name in ("a/b", "c"):
        with pytest.raises(ObjectStoreError, match="a name cannot be that of an object and of a folder"):
            store.put_bytes(name, b"")
        with pytest.raises(FileNotFoundError):
            store.get_object_size(name)
        store.delete_object(name)
    assert [info.name for info in store.list_objects()] == ["a", "c/d"]


def test_what_is_being_written_is_no_object(store: LocalObjectStore) -> None:
    """Temporaries and parts are not listed, and have names that no object can have."""
    store.start_parts("run/big").send(1, memoryview(b"part"))
    with StagedFile(store.folder / "a") as staged:
        assert store.list_objects() == []
        with pytest.raises(ConfigError, match="not written to its end"):
            store.read_range(staged.temporary.name, 0, 1)
    with pytest.raises(ConfigError, match="not written to its end"):
        store.put_bytes(".composerlite-parts/x", b"")


def test_a_check_sweeps_what_killed_writers_left(store: LocalObjectStore) -> None:
    """``check_writable`` removes the temporaries of the dead below the prefix, and not those of the living."""
    store.put_bytes("run/ep1/a", b"")
    with StagedFile(store.folder / "run" / "ep1" / "dead") as dead:
        dead.leave_behind()
    with StagedFile(store.folder / "run" / "ep1" / "living") as living:
        store.check_writable("run/")
        assert living.temporary.exists()
        assert not dead.temporary.exists()


def test_a_swap_during_another_is_transient(store: LocalObjectStore) -> None:
    """A swap that meets the lock of another swap changes nothing and can be tried again."""
    store.put_bytes("lease", b"first")
    _, version = store.read_versioned("lease")
    with (store.folder / "lease").open("rb+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ObjectStoreTransientError, match="lease: swap"):
            store.swap_bytes("lease", b"second", version)
    store.swap_bytes("lease", b"second", version)
    assert store.read_range("lease", 0, 10) == b"second"


def test_no_empty_folders_remain(store: LocalObjectStore) -> None:
    """With its last object a folder goes, and with a check those that it made."""
    store.put_bytes("run/ep1/a", b"")
    store.delete_object("run/ep1/a")
    store.check_writable("new/run/")
    assert list(store.folder.iterdir()) == []


def test_who_writes_and_who_deletes_do_not_meet(store: LocalObjectStore) -> None:
    """A folder that goes with its last object is there again for who writes into it at that moment."""

    def use(number: int) -> None:
        for _ in range(30):
            store.put_bytes(f"run/ep1/{number}", b"")
            store.delete_object(f"run/ep1/{number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    assert list(store.folder.iterdir()) == []


def test_a_uri_leads_to_the_file(store: LocalObjectStore) -> None:
    """``get_uri`` is the address of the file, whatever is in its name."""
    assert store.get_uri("a b/50%.pt").startswith("file:///")
    assert parse_uri(store.get_uri("a b/50%.pt")) == ("", "", str(store.folder / "a b/50%.pt"))


def test_a_folder_that_cannot_be_written_is_found_by_the_check() -> None:
    """No permission is PermissionError with the path, before anything is written."""
    with pytest.raises(PermissionError, match="/sys/kernel"):
        LocalObjectStore("/sys/kernel").check_writable("run/")


def test_parts_of_an_upload_that_ended_are_refused(store: LocalObjectStore) -> None:
    """A part or a completion that comes after the end is FileNotFoundError, and changes nothing."""
    upload = store.start_parts("a")
    upload.send(1, memoryview(b"x"))
    upload.complete(count=1)
    with pytest.raises(FileNotFoundError, match="completed or aborted"):
        upload.send(2, memoryview(b"y"))
    with pytest.raises(FileNotFoundError, match="completed or aborted"):
        upload.complete(count=2)
    assert store.read_range("a", 0, 9) == b"x"


def test_a_part_that_is_missing_makes_no_object(store: LocalObjectStore) -> None:
    """``complete`` refuses to leave out a part; what was sent stays."""
    upload = store.start_parts("a")
    upload.send(2, memoryview(b"y"))
    with pytest.raises(ObjectStoreError, match="part 1 of 2"):
        upload.complete(count=2)
    assert store.list_objects() == []
    assert upload.has(2, memoryview(b"y"))

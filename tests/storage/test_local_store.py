"""LocalObjectStore: the contract of every store, and what is special where objects are files."""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from composerlite.errors import ConfigError, ObjectStoreError, ObjectStoreTransientError
from composerlite.storage import RetryPolicy, StagedFile, Transfer, parse_uri
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
    """Temporaries are not listed, and have names that no object can have."""
    with StagedFile(store.folder / "a") as staged:
        assert store.list_objects() == []
        with pytest.raises(ConfigError, match="name of an unfinished file"):
            store.read_range(staged.temporary.name, 0, 1)


def test_the_temporaries_of_killed_writers_are_unfinished_uploads(store: LocalObjectStore) -> None:
    """They are found by the name of the object and removed when they are aborted; those of the living are not."""
    store.put_bytes("run/ep1/a", b"")
    with StagedFile(store.folder / "run" / "ep1" / "dead") as dead:
        dead.leave_behind()
    with StagedFile(store.folder / "run" / "ep1" / "living") as living, Transfer(store) as transfer:
        assert [upload.name for upload in transfer.abort_stale("run/", timedelta())] == ["run/ep1/dead"]
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
    """A folder that goes with its last object is made again for a writer at that moment, by a retry."""

    def use(number: int) -> None:
        for _ in range(30):
            transfer.put_bytes(f"run/ep1/{number}", b"")
            store.delete_object(f"run/ep1/{number}")

    retry = RetryPolicy(attempts=100, first_delay_seconds=0.001, longest_delay_seconds=0.001)
    with ThreadPoolExecutor(4) as pool, Transfer(store, retry=retry) as transfer:
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

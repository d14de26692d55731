"""Contract of a place: what a folder and a bucket must both do, as tests that run on any of them."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from composerlite.checkpoint.place.catalog import Catalog, map_reads
from composerlite.checkpoint.place.commit import delete_checkpoint, fetch_checkpoint, garbage
from composerlite.checkpoint.place.directory import SaveHandle, ShardedDirectory
from composerlite.checkpoint.place.place import NewFile, Place, local_copy, set_link
from composerlite.checkpoint.record.record import FileRecord
from composerlite.checkpoint.save.sharded_writer import record_of_directory
from composerlite.errors import CheckpointExistsError, CorruptCheckpointError
from composerlite.storage import FileDigest, StreamWriter, parse_uri
from composerlite.storage.disk.writer import Digester

__all__ = ["PlaceContract"]

_SIZES = [0, 1, 1000, (1 << 20) + 7]


def record_of(path: str, data: bytes) -> FileRecord:
    """Return the record of a file ``path`` that holds ``data``."""
    digest = digest_of(data)
    return FileRecord(path, digest.size_bytes, digest.xxh3_128, digest.chunk_bytes, digest.chunks)


def digest_of(data: bytes) -> FileDigest:
    """Return what a file that holds ``data`` must contain."""
    digester = Digester(64 << 10)
    digester.update(data)
    return digester.finish()


class PlaceContract(ABC):
    """Tests of every :class:`~composerlite.checkpoint.place.place.Place`. Derive a test class and say how to make one::

    class TestFolder(PlaceContract):
        @pytest.fixture
        def place(self, tmp_path):
            with Folder(tmp_path) as place:
                yield place
    """

    @pytest.fixture
    @abstractmethod
    def place(self) -> Generator[Place]:
        """An empty place."""

    # ── bytes in, bytes out ──────────────────────────────────────────────────────────────────────────────────────
    def test_what_was_put_is_read(self, place: Place) -> None:
        """At any depth; the second bytes replace the first, also where they are fewer."""
        place.put("a/b/c.json", b"first, and longer")
        place.put("a/b/c.json", b"second")
        assert place.read("a/b/c.json") == b"second"
        assert place.exists("a/b/c.json")
        assert place.size("a/b/c.json") == 6
        assert not place.exists("a/b")

    def test_files_that_are_written_hold_what_they_were_given(self, place: Place) -> None:
        """Small and large ones, empty ones, and such that were to be longer; each with its size and its digest."""
        contents = {"a/small": b"abc", "a/large": bytes(range(256)) * (40 << 10), "b/none": b"", "b/odd": b"x" * 8191}
        for path, content in contents.items():
            fill = functools.partial(StreamWriter.write, data=content)
            digest = place.write(NewFile(path, len(content) + (5 << 20), fill, 64 << 10))
            assert place.read(path) == content
            assert digest == digest_of(content)
            place.verify(FileRecord(path, **dataclasses.asdict(digest)))

    def test_an_error_of_who_fills_a_file_comes_out(self, place: Place) -> None:
        """As it is."""

        def fail(sink: StreamWriter) -> None:
            sink.write(b"some")
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            place.write(NewFile("second", 9, fail, 64 << 10))

    def test_nothing_is_not_found(self, place: Place) -> None:
        """What is not there is FileNotFoundError, and nothing to delete."""
        place.put("there", b"x")
        for verb in (place.read, place.size):
            with pytest.raises(FileNotFoundError):
                verb("not/there")
        with pytest.raises(FileNotFoundError):
            place.verify(record_of("not/there", b""))
        with pytest.raises(FileNotFoundError), local_copy(place, "not/there"):
            pass
        assert not place.exists("not/there")
        assert not place.exists("there/not")
        place.delete(["not/there", "there/not"], durable=True, folders=True)
        assert place.exists("there")

    def test_one_of_many_creates(self, place: Place) -> None:
        """Of eight threads that create one file exactly one succeeds, and its bytes are there."""
        start = threading.Barrier(8)

        def create(number: int) -> int | None:
            start.wait(10)
            try:
                place.put("once", str(number).encode(), create_only=True)
            except FileExistsError:
                return None
            return number

        with ThreadPoolExecutor(8) as pool:
            (winner,) = [number for number in pool.map(create, range(8)) if number is not None]
        assert place.read("once") == str(winner).encode()

    def test_what_is_deleted_is_gone(self, place: Place) -> None:
        """Others stay."""
        place.put("a/b", b"1")
        place.put("a/c", b"2")
        place.delete(["a/b"])
        assert list(place.files()) == ["a/c"]
        place.delete(["a/c"], folders=True)
        assert dict(place.files()) == {}
        assert place.names("a") == []

    # ── names ────────────────────────────────────────────────────────────────────────────────────────────────────
    def test_files_are_listed_with_their_sizes(self, place: Place) -> None:
        """In order, hidden ones too; below a folder only those in it, by whole names."""
        for size, path in enumerate(["b", ".hidden/b.json", "run/a", "run/sub/c", "run2/a"]):
            place.put(path, bytes(size))
        sizes = {path: file.size_bytes for path, file in place.files().items()}
        assert sizes == {"b": 0, ".hidden/b.json": 1, "run/a": 2, "run/sub/c": 3, "run2/a": 4}
        assert list(place.files("run")) == ["run/a", "run/sub/c"]
        assert dict(place.files("none")) == {}

    def test_places_lie_in_places(self, place: Place) -> None:
        """What is inside is the same files by shorter names; and a place is reached from its top."""
        place.put("run/sub/c", b"x")
        inner = place.inside("run/sub")
        assert inner.read("c") == b"x"
        assert inner.uri("c") == place.uri("run/sub/c")
        top = f"/{parse_uri(place.uri())[2].strip('/')}"
        assert inner.exists(f"{top}/run/sub/c")
        assert inner.inside(top).uri("run/sub/c") == place.uri("run/sub/c")

    def test_links_lead_to_names(self, place: Place) -> None:
        """And are moved; what one leads to is in use."""
        for name in ("ba1.pt", "sub/ba2.pt"):
            place.put(name, name.encode())
            set_link(place, "sub/latest.pt", name)
            assert place.links() == {"sub/latest.pt": name}
            assert place.target_of("sub/latest.pt") == name

    # ── verified ─────────────────────────────────────────────────────────────────────────────────────────────────
    @pytest.mark.parametrize("size", _SIZES)
    def test_files_are_verified(self, place: Place, size: int) -> None:
        """Whole ones pass, and progress adds up to their size; a flipped bit, a missing or a further byte does not."""
        data = os.urandom(size)
        place.put("file", data)
        told: list[int] = []
        place.verify(record_of("file", data), told.append)
        assert sum(told) == size
        others = [data + b"x", data[:-1], data[:-1] + bytes([data[-1] ^ 1])] if data else [b"x"]
        for other in others:
            with pytest.raises(CorruptCheckpointError):
                place.verify(record_of("file", other))

    @pytest.mark.parametrize("size", _SIZES)
    def test_ranges_are_read_into_memory(self, place: Place, size: int) -> None:
        """Into memory of the caller, verified as they pass."""
        data = os.urandom(size)
        place.put("file", data)
        memory = (ctypes.c_char * max(1, size))()
        for digest in (None, digest_of(data)):
            ctypes.memset(memory, 0, max(1, size))
            with place.opened("file", digest) as source:
                source.read_into([(0, ctypes.addressof(memory), size)])
                assert source.read(size // 2, size - size // 2) == data[size // 2 :]
            assert memory.raw[:size] == data
        if size:
            with (
                pytest.raises(CorruptCheckpointError),
                place.opened("file", digest_of(data[:-1] + bytes([data[-1] ^ 1]))) as source,
            ):
                source.read(0, size)

    @pytest.mark.parametrize("size", _SIZES)
    def test_files_come_here_and_go_there(self, place: Place, size: int, tmp_path: Path) -> None:
        """Whole and verified, or not at all."""
        data = os.urandom(size)
        place.put("file", data)
        target = tmp_path / "brought" / "copy"
        place.fetch("file", target, digest_of(data))
        assert target.read_bytes() == data
        with pytest.raises(CorruptCheckpointError):
            place.fetch("file", target, digest_of(data + b"x"))
        assert target.read_bytes() == data
        assert [path.name for path in target.parent.iterdir()] == ["copy"]
        with local_copy(place, "file", digest_of(data)) as here:
            assert here.read_bytes() == data

    def test_a_checkpoint_is_fetched_from_another_place(self, place: Place) -> None:
        """Under its own name; a damaged one is not."""
        source, target = place.inside("from"), place.inside("to")
        source.put("sub/file", b"data")
        told: list[int] = []
        manifest = dataclasses.replace(record_of_directory("sub/file", 1), form="file")
        good, bad = (dataclasses.replace(manifest, files=(record_of("sub/file", data),)) for data in (b"data", b"else"))
        fetch_checkpoint(source, good, target, told.append)
        assert place.read("to/sub/file") == b"data"
        assert sum(told) == 4
        with pytest.raises(CorruptCheckpointError):
            fetch_checkpoint(source, bad, target)
        assert place.read("to/sub/file") == b"data"

    # ── commits ──────────────────────────────────────────────────────────────────────────────────────────────────
    @staticmethod
    def save(place: Place, value: bytes, *, overwrite: bool, until: str = "") -> None:
        """Save the directory ``run/c`` with ``value`` in it; stop before the step ``until``."""
        directory = ShardedDirectory(place, "run/c")
        handle = SaveHandle(overwrite=overwrite)
        directory.begin(handle)
        name = f"__0_0{handle.suffix}.distcp"
        try:
            digest = directory.write(handle, NewFile(name, len(value), lambda sink: sink.write(value), 64 << 10))
            if until == "commit":
                raise InterruptedError
            record = record_of_directory("run/c", 1)
            directory.commit(b"index of " + value, {name: (digest, None)}, record)
        except BaseException:
            directory.abandon()
            raise

    @staticmethod
    def saved(place: Place) -> bytes:
        """Return the value of ``run/c``, which is whole."""
        index, manifest = ShardedDirectory(place, "run/c").described()
        assert manifest is not None
        Catalog(place).verify(manifest)
        assert sorted(place.files()) == sorted(record.path for record in manifest.files)
        return index.removeprefix(b"index of ")

    def test_a_commit_makes_a_checkpoint_exist(self, place: Place) -> None:
        """Whole, with a record; another takes its place, and nothing of the first is left."""
        self.save(place, b"first", overwrite=False)
        assert self.saved(place) == b"first"
        assert [manifest.name for manifest in Catalog(place).manifests()] == ["run/c"]
        self.save(place, b"second", overwrite=True)
        assert self.saved(place) == b"second"

    def test_a_checkpoint_is_not_replaced_unasked(self, place: Place) -> None:
        """Not before anything is written, and not by who was there at the same time."""
        self.save(place, b"first", overwrite=False)
        with pytest.raises(CheckpointExistsError, match="holds a checkpoint"):
            self.save(place, b"second", overwrite=False)
        assert self.saved(place) == b"first"

    def test_a_save_that_is_abandoned_leaves_what_was_there(self, place: Place) -> None:
        """Nothing where there was nothing; and the next one can be saved."""
        with pytest.raises(InterruptedError):
            self.save(place, b"first", overwrite=False, until="commit")
        assert dict(place.files()) == {}
        self.save(place, b"second", overwrite=False)
        with pytest.raises(InterruptedError):
            self.save(place, b"third", overwrite=True, until="commit")
        assert self.saved(place) == b"second"

    def test_a_deletion_leaves_files_of_the_user(self, place: Place) -> None:
        """They are no checkpoint."""
        self.save(place, b"first", overwrite=False)
        place.put("run/c/config.json", b"{}")
        (manifest,) = Catalog(place).manifests()
        delete_checkpoint(place, manifest)
        assert list(place.files()) == ["run/c/config.json"]
        assert Catalog(place).manifests() == []

    # ── one at a time ────────────────────────────────────────────────────────────────────────────────────────────
    def test_a_lock_is_released(self, place: Place) -> None:
        """And can be had again; others are had meanwhile; nobody took it."""
        lock, other = place.lock("run"), place.lock("other/run")
        assert lock.try_to_take() is None
        assert other.try_to_take() is None
        assert lock.lost_to is None
        for one in (lock, other, lock):
            one.release()
        again = place.lock("run")
        assert again.try_to_take() is None
        again.release()
        assert [path for path in place.files() if path.endswith(".lease")] == []

    def test_many_reads_are_done_in_their_order(self, place: Place) -> None:
        """Whichever ends first; and what one raises is raised."""

        def fails(number: int) -> int:
            if number == 7:
                raise ValueError(str(number))
            return number

        double: Callable[[int], int] = lambda number: 2 * number
        assert map_reads(place, double, range(40)) == [2 * number for number in range(40)]
        with pytest.raises(ValueError, match="7"):
            map_reads(place, fails, range(40))

    def test_the_end_of_a_file_is_read(self, place: Place) -> None:
        """With the size of the whole; a file that is shorter is read whole."""
        place.put("file", b"0123456789")
        assert place.end("file", 3) == (10, b"789")
        assert place.end("file", 100) == (10, b"0123456789")
        with pytest.raises(FileNotFoundError):
            place.end("none", 3)

    def test_data_files_that_no_record_names_are_garbage(self, place: Place) -> None:
        """Those of the checkpoint are not, nor those beside a damaged record, nor files of other names."""
        self.save(place, b"first", overwrite=False)
        left = "run/c/__0_0_0123456789abcdef.distcp"
        others = ["run/c/__0_0.distcp", "run/other/__0_0_0123456789abcdef.distcp", "run/c/notes/a_0123456789abcdef"]
        for path in (left, *others):
            place.put(path, b"x")

        def found() -> list[str]:
            return garbage(place, place.files(), re.compile("run/c"))

        assert found() == [left]
        data = bytearray(place.read("run/c/.metadata"))
        data[-100] ^= 1
        place.put("run/c/.metadata", bytes(data))
        assert found() == []

    def test_there_is_nothing_to_sweep(self, place: Place) -> None:
        """Where every write has ended; what is there stays."""
        place.put("a", b"x")
        assert place.sweep(timedelta(0), dry_run=True) == []
        assert place.sweep(timedelta(0)) == []
        assert list(place.files()) == ["a"]

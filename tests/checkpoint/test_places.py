"""Both places keep the contract: a folder, and a bucket of a real S3 server."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from parts import save_batch
from place_contract import PlaceContract

from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.resume import choose
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.place import Folder, Place
from composerlite.storage import open_store


class TestFolder(PlaceContract):
    """On the disk of this machine."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> Generator[Place]:
        with Folder(tmp_path / "place") as place:
            yield place


class TestBucket(PlaceContract):
    """Below a prefix, with other objects beside it."""

    @pytest.fixture
    def place(self, s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Generator[Place]:
        for name, value in s3_server.environment.items():
            monkeypatch.setenv(name, value)
        with Bucket.of(open_store(f"s3://{s3_server.new_bucket()}"), "some/run") as place:
            assert isinstance(place, Bucket)
            place.transfer.put_bytes("some/run-beside/file", b"x")
            yield place

    def test_a_record_that_one_machine_cannot_read_stays(self, place: Place, tmp_path: Path) -> None:
        """Its memory, or a proxy, may be what damages the bytes that it reads: a resume renames nothing there."""
        self.save(place, b"first", overwrite=False)
        data = bytearray(place.read("run/c/.metadata"))
        data[-100] ^= 1
        place.put("run/c/.metadata", bytes(data))
        good = save_batch(tmp_path, 1)
        places = [RunPlace(Catalog(tmp_path), buckets=[RunPlace(Catalog(place), "run/c")])]
        assert choose(places, "run").path == good
        assert place.read("run/c/.metadata") == bytes(data)
        assert ".metadata" in place.names("run/c")

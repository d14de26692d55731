"""The store on a folder that other tests use in place of a service keeps the contract of every store."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from storage.local_store import LocalObjectStore

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

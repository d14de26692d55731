"""The store that other tests use in place of a service keeps the contract of every store."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from storage.memory_store import MemoryStore

from composerlite.storage import ObjectStore
from composerlite.testing.contracts import ObjectStoreContract


class TestMemoryStore(ObjectStoreContract):
    @pytest.fixture
    def store(self) -> Generator[ObjectStore]:
        with MemoryStore() as store:
            yield store

    @pytest.fixture
    def missing_bucket(self) -> ObjectStore:  # pyright: ignore[reportIncompatibleMethodOverride]
        pytest.skip("it has one bucket")

"""Runs and savers that would write the same objects of a bucket."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from tiny_training import train

from composerlite import Callback, Logger, State
from composerlite.callbacks import CheckpointSaver
from composerlite.storage import ObjectStore, open_store

LONGER_THAN_A_HEARTBEAT = 7.0


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: Any) -> None:  # pyright: ignore[reportUnusedFunction]
    """The service is found by the environment."""
    monkeypatch.chdir(tmp_path)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bucket(s3_server: Any) -> str:
    return f"s3://{s3_server.new_bucket()}"


@pytest.fixture
def store(bucket: str) -> Generator[ObjectStore]:
    with open_store(bucket) as store:
        yield store


class Sleep(Callback):
    """Sleeps for longer than the time between two heartbeats of a lease, in the middle of training."""

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == 5:
            time.sleep(LONGER_THAN_A_HEARTBEAT)


def objects(store: ObjectStore) -> list[str]:
    """The names of all objects that are not about checkpoints."""
    return [info.name for info in store.list_objects() if "/.manifest/" not in info.name]


def leases(store: ObjectStore) -> list[str]:
    """The names of what is left of leases."""
    return [info.name for info in store.list_objects() if ".lease" in info.name]


# ── two savers of one trainer ────────────────────────────────────────────────────────────────────────────────────────
def test_two_savers_of_a_trainer_share_the_lease_of_the_run(bucket: str, store: ObjectStore) -> None:
    """Below one prefix, with names of their own: training is not ended by the other saver's heartbeat."""
    full = CheckpointSaver(f"{bucket}/run", filename="full/ep{epoch}.pt")
    weights = CheckpointSaver(
        f"{bucket}/run", filename="weights/ep{epoch}.pt", latest_filename="weights.pt", weights_only=True
    )
    train(callbacks=[Sleep(), full, weights])
    assert {"run/full/ep3.pt", "run/weights/ep3.pt"} <= set(objects(store))
    assert leases(store) == []

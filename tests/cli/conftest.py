"""A folder of checkpoints that a run has left, and a bucket."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended. Not to be changed."""
    folder = tmp_path_factory.mktemp("trained") / "demo"
    train(folder)
    return folder


@pytest.fixture
def demo(trained: Path, tmp_path: Path) -> Path:
    """The folder of a run, for one test: ``demo`` in its own folder."""
    shutil.copytree(trained, tmp_path / "demo", symlinks=True)
    return tmp_path / "demo"


@pytest.fixture
def bucket(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of an empty bucket, on a service that the environment names."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_server.new_bucket()}"

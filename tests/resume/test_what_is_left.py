"""What a run goes on from where its newest checkpoints are damaged everywhere, or its clock has gone back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sealed_files import record_in, rewrite_record
from test_preemption import launch

from composerlite.checkpoint import Catalog
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.storage import Transfer, open_store


def flip(data: bytearray) -> bytes:
    """One bit of it is another."""
    data[len(data) // 2] ^= 4
    return bytes(data)


def test_the_newest_is_damaged_in_both_places(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On the disk and in the bucket: the run goes on from the one before it, and the log names both."""
    server = request.getfixturevalue("s3_server")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    uri = f"s3://{server.new_bucket()}/run"
    order: dict[str, Any] = {"save_folder": uri}
    one = launch(tmp_path, at=["batch_end", 40, 1], signals=["SIGTERM"], **order)
    assert one.code == 143, one.log
    catalog = Catalog(tmp_path / "staged" / "run")
    *_, before, newest = catalog.manifests()
    path = catalog.folder / newest.name
    path.write_bytes(flip(bytearray(path.read_bytes())))
    with Transfer(open_store(uri.removesuffix("/run"))) as transfer:
        remote = Bucket(transfer, "run")
        transfer.put_bytes(remote.name_of(newest.name), path.read_bytes())
        two = launch(tmp_path, **order)
    assert two.code == 0, two.log
    assert two.batches[0] == before.batch + 1
    assert two.log.count("skipped") == 2
    assert str(path) in two.log
    assert remote.uri(newest.name) in two.log


def test_a_clock_that_goes_back_changes_nothing(tmp_path: Path) -> None:
    """The newest is that of the most training, whatever the time at which it says that it was saved."""
    one = launch(tmp_path, at=["batch_end", 30, 1])
    assert one.code == 143
    catalog = Catalog(tmp_path)
    manifests = catalog.manifests()
    for year, manifest in zip(range(2050, 2000, -10), manifests, strict=False):
        path = catalog.folder / manifest.name
        rewrite_record(path, saved_at=f"{year}-01-01T00:00:00.000+00:00")
        assert record_in(path).saved_at.startswith(str(year))
    two = launch(tmp_path)
    assert two.batches[0] == one.batches[-1] + 1

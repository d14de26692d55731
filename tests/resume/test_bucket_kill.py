"""Runs whose checkpoints are in a bucket go on on another machine as if nothing had happened."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

import bucket_run
import pytest
import torch
from relaunch import Ended, run
from small_run import BATCHES, differences

STORES = ["s3", "gcs", "oci", "sftp", "libcloud"]


def place(store: str, request: pytest.FixtureRequest) -> tuple[str, dict[str, str]]:
    """An address in a running store of that kind, and the environment that it takes to reach it."""
    if store == "libcloud":
        root = Path(request.getfixturevalue("tmp_path")) / "libcloud"
        (root / "container").mkdir(parents=True)
        kwargs = {"provider": "local", "container": "container", "provider_kwargs": {"key": str(root)}}
        return "libcloud://container", {"BACKEND_KWARGS": json.dumps(kwargs)}
    server = request.getfixturevalue(f"{store}_server")
    if store == "sftp":
        return f"sftp://{server.bucket}/{server.new_folder()}/run", dict(server.environment)
    bucket = server.new_bucket()
    scheme = {"s3": "s3", "gcs": "gs", "oci": "oci"}[store]
    return f"{scheme}://{bucket}/run", dict(server.environment)


def launch(work: Path, uri: str, environment: Mapping[str, str], die: str = "", *, fork: bool = True) -> Ended:
    """Run the program once on a machine whose disk is ``work``."""
    work.mkdir(exist_ok=True)
    return run(bucket_run.main, [str(work), uri, die], environment, fork=fork)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, str], Path]:
    """What the program says of each batch, and its end, if nothing happens to it."""
    work = tmp_path_factory.mktemp("uninterrupted")
    code, said, _ = launch(work, "run", {})
    assert (code, len(said)) == (0, BATCHES)
    return said, work / "final.pt"


@pytest.mark.parametrize("store", STORES)
def test_a_killed_run_goes_on_from_the_bucket(
    store: str, uninterrupted: tuple[dict[int, str], Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """SIGKILL, twice, each time with a new empty disk: the run ends bit for bit like one that was not interrupted."""
    whole, whole_final = uninterrupted
    uri, environment = place(store, request)
    for number, die in enumerate(["batch_end:18", "batch_checkpoint:42", ""]):
        code, said, _ = launch(tmp_path / f"machine{number}", uri, environment, die, fork=bool(die) or store != "s3")
        assert code == (-signal.SIGKILL if die else 0)
        assert said.items() <= whole.items()
        if number:
            assert min(said) > 1, "it started afresh although the bucket has a checkpoint"
    final = [torch.load(path, weights_only=True) for path in (tmp_path / "machine2" / "final.pt", whole_final)]
    assert differences(*final) == []
    code, said, _ = launch(tmp_path / "machine3", uri, environment)
    assert (code, said) == (0, {}), "a finished run that is started again does nothing"


@pytest.mark.parametrize("left", ["nothing", "a half", "all but the end of the record"])
@pytest.mark.parametrize("link", ["as it was", "leads to the one before"])
def test_a_file_cut_short_by_a_kill_does_not_stop_later_runs(
    link: str, left: str, uninterrupted: tuple[dict[int, str], Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A store that does not write at once has a part of the newest: the run goes on from the one before."""
    uri, environment = place("libcloud", request)
    assert launch(tmp_path / "machine0", uri, environment, "batch_checkpoint:42")[0] == -signal.SIGKILL
    run_folder = tmp_path / "libcloud" / "container" / "run"
    *_, before, newest = sorted(run_folder.glob("ep*.pt"), key=lambda path: batch_of(path.name))
    data = newest.read_bytes()
    newest.write_bytes(data[: {"nothing": 0, "a half": len(data) // 2}.get(left, -100)])
    if link != "as it was":  # it is moved after the file is there
        (run_folder / "latest-rank0.pt.symlink").write_text(f"run/{before.name}")
    code, said, log = launch(tmp_path / "machine1", uri, environment)
    assert (code, min(said)) == (0, batch_of(before.name) + 1)
    assert ("cannot be read" if "record" in left else "has no record") in log
    final = [torch.load(path, weights_only=True) for path in (tmp_path / "machine1" / "final.pt", uninterrupted[1])]
    assert differences(*final) == []
    assert launch(tmp_path / "machine2", uri, environment)[1] == {}, "what was damaged was published anew"


def batch_of(name: str) -> int:
    """The batch of the checkpoint ``ep<epoch>-ba<batch>-rank0.pt``."""
    return int(name.split("-")[1].removeprefix("ba"))


def test_what_was_not_uploaded_when_it_died_is_uploaded_by_the_next(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A run that is killed with a checkpoint on its disk alone goes on from that one and publishes it."""
    uri, environment = place("s3", request)
    work = tmp_path / "machine"
    assert launch(work, uri, environment, "batch_checkpoint:28")[0] == -signal.SIGKILL
    newest = max((path.name for path in (work / "run").glob("ep*.pt")), key=batch_of)
    client, bucket = request.getfixturevalue("s3_server").client(), uri.split("/")[2]
    client.delete_object(Bucket=bucket, Key="run/latest-rank0.pt.symlink")
    client.delete_object(Bucket=bucket, Key=f"run/{newest}")
    code, said, _ = launch(work, uri, environment)
    assert code == 0
    assert min(said) == batch_of(newest) + 1
    names = [item["Key"] for item in client.list_objects_v2(Bucket=bucket)["Contents"]]
    assert f"run/{newest}" in names


def test_a_damaged_newest_is_passed_over(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A checkpoint in the bucket with a flipped bit is found out, and the run goes on from the one before it."""
    uri, environment = place("s3", request)
    assert launch(tmp_path / "a", uri, environment)[0] == 0
    client, bucket = request.getfixturevalue("s3_server").client(), uri.split("/")[2]
    key = client.get_object(Bucket=bucket, Key="run/latest-rank0.pt.symlink")["Body"].read().decode()
    assert "ba60" in key
    data = bytearray(client.get_object(Bucket=bucket, Key=key)["Body"].read())
    data[len(data) // 2] ^= 1
    client.put_object(Bucket=bucket, Key=key, Body=bytes(data))
    code, said, log = launch(tmp_path / "b", uri, environment)
    assert code == 0
    assert min(said) == 57, "the checkpoint before the damaged one is that of batch 56"
    assert "skipped" in log
    shutil.rmtree(tmp_path / "b")
    assert launch(tmp_path / "b", uri, environment)[1] == {}, "what was damaged was published anew"

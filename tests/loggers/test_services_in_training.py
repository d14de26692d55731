"""W&B and MLflow in real trainings: killed and resumed, on two ranks, with files for several destinations."""

from __future__ import annotations

import signal
from pathlib import Path

import logged_run
import pytest
from forked import run_forked
from logged_run import BATCHES
from wandb_files import OfflineRun, offline_runs

from composerlite.loggers import FileLogger, InMemoryLogger, RemoteUploaderDownloader, TensorboardLogger
from composerlite.storage import open_store
from composerlite.testing import run_ranks

pytestmark = pytest.mark.usefixtures("wandb_offline", "mlflow_files")
LOSS = "loss/train/total"


def mlflow_runs(folder: Path):
    """The client of a folder of runs, and the runs."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=folder.as_uri())
    return client, client.search_runs([client.get_experiment_by_name("Default").experiment_id])


def test_a_run_that_is_killed_and_resumed_is_one_run(tmp_path: Path, monkeypatch) -> None:
    """SIGKILL after batch 5, saved at 4: the next launch goes on with the W&B run and the MLflow run of the first one,
    and every batch is in both."""
    with monkeypatch.context() as patch:
        patch.delenv("WANDB_SERVICE")  # it starts W&B's service for itself, as a process of its own does
        died = run_forked(logged_run.main, str(tmp_path), "1", "5", cwd=tmp_path)
    assert died.returncode == -signal.SIGKILL, died.stderr
    logged_run.main(str(tmp_path), "2")

    (folder,) = (tmp_path / "wandb1" / "wandb").glob("offline-run-*")
    killed = OfflineRun(folder)
    (resumed,) = offline_runs(tmp_path / "wandb2")
    assert killed.id == resumed.id
    assert [batch for batch, _ in killed.values(LOSS)] == [1, 2, 3, 4, 5][: len(killed.values(LOSS))]
    assert {batch for batch, _ in killed.values(LOSS)} >= {1, 2, 3, 4}
    assert [batch for batch, _ in resumed.values(LOSS)] == list(range(5, BATCHES + 1))
    assert resumed.exit_code == 0
    client, (found,) = mlflow_runs(tmp_path / "mlflow")
    assert found.info.status == "FINISHED"
    steps = [metric.step for metric in client.get_metric_history(found.info.run_id, LOSS)]
    assert steps == list(range(1, BATCHES + 1))


def test_two_ranks_log_once(tmp_path: Path) -> None:
    """With rank_zero_only there is one run in each service and the file of rank 0 in it; without it each rank has its
    own."""
    once, each = tmp_path / "once", tmp_path / "each"
    ids = run_ranks(logged_run.on_a_rank, 2, once, True)
    assert ids[1] == []
    (found,) = offline_runs(once / "wandb")
    client, (run,) = mlflow_runs(once / "mlflow")
    assert [found.id, run.info.run_id] == ids[0]
    assert [batch for batch, _ in found.values(LOSS)] == [1, 2]
    assert list(found.artifacts) == ["log-0.txt"]
    assert len(client.get_metric_history(run.info.run_id, LOSS)) == 2

    ids = run_ranks(logged_run.on_a_rank, 2, each, False)
    found = offline_runs(each / "wandb")
    assert sorted((one.id, one.name, one.group) for one in found) == [
        (ids[0][0], "fox-rank0", "fox"),
        (ids[1][0], "fox-rank1", "fox"),
    ]
    _, runs = mlflow_runs(each / "mlflow")
    assert {(run.info.run_id, run.info.run_name) for run in runs} == {
        (ids[0][1], "fox-rank0"),
        (ids[1][1], "fox-rank1"),
    }


def test_a_file_reaches_every_destination(tmp_path: Path, s3_server) -> None:
    """The log of a run is kept in a bucket, in MLflow and in W&B; a destination that fails keeps it from none."""
    bucket = f"s3://{s3_server.new_bucket()}"
    log_file = FileLogger(str(tmp_path / "log.txt"), remote_file_name="{run_name}/log.txt")
    uploader = RemoteUploaderDownloader(bucket, backend_kwargs=s3_server.store_kwargs)
    with logged_run.build(loggers=[uploader, *logged_run.services(tmp_path), log_file]) as trainer:
        trainer.fit(duration="2ba")
    with open_store(bucket, **s3_server.store_kwargs) as store:
        kept = store.read_range("fox/log.txt", 0, 1 << 20).decode()

    assert LOSS in kept
    assert [contents[-1] for contents in offline_runs(tmp_path / "wandb")[0].artifacts.values()] == [kept]
    (in_mlflow,) = (tmp_path / "mlflow").glob("**/artifacts/fox/log.txt")
    assert in_mlflow.read_text() == kept


def test_what_checkpoints_cost_reaches_every_logger(tmp_path: Path, s3_server, monkeypatch) -> None:
    """Stall, bytes and lags of each save and each upload, in files, memory, TensorBoard, W&B and MLflow: also of a save
    that is asked for by hand."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for variable, value in s3_server.environment.items():
        monkeypatch.setenv(variable, value)
    memory = InMemoryLogger()
    loggers = [FileLogger(str(tmp_path / "log.txt")), memory, TensorboardLogger(tmp_path / "board")]
    with logged_run.build(
        loggers=[*loggers, *logged_run.services(tmp_path)],
        save_folder=f"s3://{s3_server.new_bucket()}/{{run_name}}",
        save_staging_folder=str(tmp_path / "staging"),
        save_interval="2ba",
    ) as trainer:
        trainer.fit(duration="3ba")
        trainer.fit(duration="1ba")
        trainer.save_checkpoint_to_save_folder()

    names = ["batch", "bytes", "stall_seconds", "snapshot_seconds", "commit_seconds", "total_seconds"]
    names += ["uploaded_batch", "uploaded_bytes", "upload_seconds", "upload_lag_seconds"]
    names = [f"checkpoint/{name}" for name in names]
    values = {name: [value for _, value in memory.data[name]] for name in names}
    assert values["checkpoint/batch"] == values["checkpoint/uploaded_batch"] == [2, 3, 4, 4]
    sizes = [Path(path).stat().st_size for path in trainer.saved_checkpoints]
    assert values["checkpoint/bytes"][1:3] == sizes[1:3]
    assert values["checkpoint/uploaded_bytes"] == values["checkpoint/bytes"]
    for total, stall, lag, upload in zip(
        *(values[f"checkpoint/{name}_seconds"] for name in ("total", "stall", "upload_lag", "upload")), strict=True
    ):
        assert stall >= 0
        assert total > 0
        assert 0 < upload <= lag + 0.01, "the lag counts from the save, by a clock of milliseconds"

    page = Path(logged_run.__file__).parents[2] / "docs" / "logging.md"
    logged = {name for name in memory.data if name.startswith("checkpoint/")}
    assert [name for name in sorted(logged) if f"`{name}`" not in page.read_text()] == []

    lines = (tmp_path / "log.txt").read_text()
    board = EventAccumulator(str(tmp_path / "board" / "fox"), size_guidance={"scalars": 0}).Reload()
    (wandb_run,) = offline_runs(tmp_path / "wandb")
    client, (mlflow_run,) = mlflow_runs(tmp_path / "mlflow")
    for name in names:
        assert lines.count(f'"{name}"') == 4, name
        assert [event.value for event in board.Scalars(name)] == pytest.approx(values[name]), name
        assert [value for _, value in wandb_run.values(name)][-1] == pytest.approx(values[name][-1]), name
        history = client.get_metric_history(mlflow_run.info.run_id, name)
        assert [metric.value for metric in history] == pytest.approx(values[name]), name

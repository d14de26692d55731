"""Promises of every logger that keeps metrics, read back from what the loggers have written."""

from __future__ import annotations

import csv
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb_files import offline_runs

from composerlite.core import Callback, LoggerDestination, seed_all
from composerlite.errors import ConfigError
from composerlite.loggers import (
    ConsoleLogger,
    CSVLogger,
    FileLogger,
    JSONLLogger,
    MLFlowLogger,
    ProgressBarLogger,
    PrometheusLogger,
    RemoteUploaderDownloader,
    SlackLogger,
    TensorboardLogger,
    WandBLogger,
)
from composerlite.types import CheckpointNews

pytestmark = pytest.mark.usefixtures("wandb_offline", "mlflow_files", "tensorboard_files")
LOSS = "loss/train/total"


def from_file(folder: Path, name: str) -> list[tuple[int, Any]]:
    lines = [line for line in (folder / "log.txt").read_text().splitlines() if line.startswith("[metric]")]
    logged = [(int(line.split("=")[1].split("]")[0]), json.loads(line.split("] ", 1)[1])) for line in lines]
    return [(batch, metrics[name]) for batch, metrics in logged if name in metrics]


def from_jsonl(folder: Path, name: str) -> list[tuple[int, Any]]:
    lines = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    return [(line["batch"], line["metrics"][name]) for line in lines if name in line.get("metrics", ())]


def from_csv(folder: Path, name: str) -> list[tuple[int, Any]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [(int(row["batch"]), float(row[name])) for row in csv.DictReader(file) if row.get(name)]


def from_tensorboard(folder: Path, name: str) -> list[tuple[int, Any]]:
    shown = EventAccumulator(str(folder / "fox"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in shown.Scalars(name)] if name in shown.Tags()["scalars"] else []


def from_wandb(folder: Path, name: str) -> list[tuple[int, Any]]:
    return [value for run in offline_runs(folder) for value in run.values(name)]


def from_mlflow(folder: Path, name: str) -> list[tuple[int, Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=folder.as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]


class Case(NamedTuple):
    """A logger that writes below a folder, and a function that returns (batch, value) of a metric there."""

    make: Callable[[Path], Any]
    read: Callable[[Path, str], list[tuple[int, Any]]]
    after_resume: list[int]
    """Batches with a loss, after batches 1 to 4, a kill, and batches 3 to 5 of the resumed run."""


TWICE, ONCE = [1, 2, 3, 4, 3, 4, 5], [1, 2, 3, 4, 5]
CASES = {
    "file": Case(lambda folder: FileLogger(str(folder / "log.txt")), from_file, TWICE),
    "jsonl": Case(lambda folder: JSONLLogger(folder / "record.jsonl"), from_jsonl, TWICE),
    "csv": Case(lambda folder: CSVLogger(folder / "metrics.csv"), from_csv, ONCE),
    "tensorboard": Case(lambda folder: TensorboardLogger(folder), from_tensorboard, ONCE),
    "wandb": Case(lambda folder: WandBLogger(init_kwargs={"dir": str(folder)}), from_wandb, TWICE),
    "mlflow": Case(lambda folder: MLFlowLogger(tracking_uri=folder), from_mlflow, TWICE),
}


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def case(name: str) -> Case:
    return CASES[name]


def test_metrics_at_their_batches(run: Any, case: Case, tmp_path: Path) -> None:
    """Each value is there once, at the batch of the call."""
    run(case.make(tmp_path)).epoch(acc=0.75).finish()
    assert case.read(tmp_path, LOSS) == [(n, pytest.approx(1 / n)) for n in range(1, 6)]
    assert case.read(tmp_path, "metrics/train/acc") == [(5, 0.75)]


def test_a_resumed_run_continues(run: Any, name: str, case: Case, tmp_path: Path) -> None:
    """Killed after batch 4 and resumed from batch 2: tables and curves have each batch once, others all attempts."""
    killed = run(case.make(tmp_path)).batches(2)
    saved = killed.state.callbacks[0].state_dict()
    killed.batches(2).engine.close()
    run(resumed := case.make(tmp_path), resume_at=2, loaded=saved).batches(3).finish()
    assert [batch for batch, _ in case.read(tmp_path, LOSS)] == case.after_resume
    if name in ("wandb", "mlflow"):
        assert resumed.run_id == killed.state.callbacks[0].run_id


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_checkpoint_of_another_run_starts_a_new_one(run: Any, case: Case, tmp_path: Path) -> None:
    """The run of the service is continued only by a run of the same name."""
    first = run(case.make(tmp_path)).batches(1).finish().state.callbacks[0]
    run(second := case.make(tmp_path), run_name="wolf", loaded=first.state_dict()).finish()
    assert second.run_id != first.run_id


def test_values_from_before_the_load(run: Any, name: str, case: Case, tmp_path: Path) -> None:
    """Before the load the batch is unknown: services and tables log such values at the batch of the checkpoint."""
    logger = case.make(tmp_path)
    logger.log_metrics({"early": 7}, 0)
    run(logger, resume_at=3).finish()
    assert case.read(tmp_path, "early") == [(0 if name in ("file", "jsonl") else 3, 7)]


class LogsWhileClosing(Callback):
    """Logs a metric in its ``close``."""

    def close(self, state: Any, logger: Any) -> None:
        logger.log_metrics({"last": 1})


def test_values_of_callbacks_that_close(run: Any, case: Case, tmp_path: Path) -> None:
    """Values that other callbacks log while the trainer closes are kept, too."""
    logged = run(case.make(tmp_path))
    logged.state.callbacks.append(LogsWhileClosing())
    logged.engine.close()
    assert case.read(tmp_path, "last") == [(0, 1)]


def test_closing_after_an_error_and_twice(run: Any, case: Case, tmp_path: Path) -> None:
    """Values from before an error are there after ``close``. A second ``close`` is harmless."""
    logged = run(case.make(tmp_path)).batches(1)
    for _ in range(2):
        logged.state.callbacks[0].close(logged.state, logged.logger)
        logged.state.callbacks[0].post_close()
    assert case.read(tmp_path, LOSS) == [(1, 1.0)]


def test_closing_before_anything_happened(run: Any, case: Case, tmp_path: Path) -> None:
    """A trainer that fails while it is built can be closed, and leaves no files."""
    logger = case.make(tmp_path)
    logger.log_metrics({"a": 1}, 0)
    logger.close(run().state, run().logger)
    logger.post_close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["jsonl", "csv", "tensorboard", "wandb"])
def test_only_rank_zero_writes(run: Any, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks write nothing, and raise no error for images and files. test_services_in_training has MLflow."""
    monkeypatch.setenv("RANK", "1")
    logged = run(case.make(tmp_path)).epoch()
    logged.logger.log_images(torch.zeros(2, 3, 4, 4))
    logged.logger.upload_file("file", Path(__file__))
    logged.finish()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_training_draws_the_same_random_numbers(run: Any, case: Case, tmp_path: Path) -> None:
    """No logger draws from the generators of training."""
    states = []
    for loggers in ((), (case.make(tmp_path),)):
        seed_all(5)
        logged = run(*loggers).batches(2)
        logged.logger.log_images(torch.zeros(1, 3, 4, 4))
        logged.logger.upload_file("file", Path(__file__))
        logged.finish()
        states.append((random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()))
    assert states[0] == states[1]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
@pytest.mark.parametrize(
    ("error", "code", "status"),
    [(RuntimeError("x"), 1, "FAILED"), (SystemExit(143), 143, "KILLED"), (None, 1, "FAILED")],
)
def test_how_a_run_ends(
    run: Any, name: str, case: Case, tmp_path: Path, error: BaseException | None, code: int, status: str
) -> None:
    """A run that fails or is preempted is not finished in the service, also if the program handled the exception."""
    logged = run(case.make(tmp_path)).run_events(["fit_start"]).batches(1)
    try:
        if error is not None:
            raise error
    except BaseException:  # noqa: BLE001 - any end of training
        logged.engine.close()
    logged.engine.close()
    if name == "wandb":
        assert [found.exit_code for found in offline_runs(tmp_path)] == [code]
    else:
        (meta,) = tmp_path.glob("*/*/meta.yaml")
        from mlflow import MlflowClient

        assert MlflowClient(tracking_uri=tmp_path.as_uri()).get_run(meta.parent.name).info.status == status


@pytest.mark.parametrize("name", ["jsonl", "csv"])
def test_values_up_to_a_checkpoint_are_written_before_it(run: Any, name: str, tmp_path: Path) -> None:
    """Lines wait for ``flush_seconds``, but not longer than until the next checkpoint."""
    made = {"jsonl": JSONLLogger, "csv": CSVLogger}[name]
    path = tmp_path / {"jsonl": "record.jsonl", "csv": "metrics.csv"}[name]
    logged = run(made(path, flush_seconds=1e9)).batches(4)
    assert CASES[name].read(tmp_path, LOSS) == []
    logged.logger.log_checkpoint(CheckpointNews(what="begun", name="ba4.pt", where="runs", batch=4, at=1e9))
    assert [batch for batch, _ in CASES[name].read(tmp_path, LOSS)] == [1, 2, 3, 4]
    run(made(path, flush_seconds=0)).batches(2)
    assert [batch for batch, _ in CASES[name].read(tmp_path, LOSS)][-2:] == [1, 2]


@pytest.mark.parametrize("log_traces", [False, True])
@pytest.mark.parametrize("logger", [FileLogger, JSONLLogger])
def test_traces_are_written_on_request(run: Any, tmp_path: Path, logger: Any, log_traces: bool) -> None:
    """With ``log_traces`` the file has the algorithms that ran."""
    path = tmp_path / "log"
    logged = run(logger(str(path), log_traces=log_traces))
    logged.logger.log_traces({"EMA/batch_end": 1})
    logged.finish()
    assert ('{"EMA/batch_end": 1}' in path.read_text()) is log_traces


@pytest.mark.parametrize(
    ("logger", "package", "extra"),
    [
        (TensorboardLogger, "tensorboard", "tensorboard"),
        (WandBLogger, "wandb", "wandb"),
        (MLFlowLogger, "mlflow", "mlflow"),
        (PrometheusLogger, "prometheus_client", "prometheus"),
        (SlackLogger, "slack_sdk", "slack"),
    ],
)
def test_a_missing_package_is_an_error_at_construction(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logger: Any, package: str, extra: str
) -> None:
    """The error names the extra to install. A folder of the same name, as W&B leaves, is not the package."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"pip install 'composerlite\[{extra}\]'"):
        logger()
    monkeypatch.delitem(sys.modules, package)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    (tmp_path / package).mkdir()
    with pytest.raises(ConfigError, match=rf"needs the package {package}, which is not installed"):
        logger()


@pytest.mark.parametrize(
    ("logger", "arguments", "message"),
    [
        (ConsoleLogger, {"stream": "stdrr"}, "Did you mean 'stderr'"),
        (ConsoleLogger, {"log_interval": "2bq"}, "invalid time '2bq'"),
        (ConsoleLogger, {"interval": "2ba"}, "Did you mean 'log_interval'"),
        (ProgressBarLogger, {"stream": "stdrr"}, "Did you mean 'stderr'"),
        (ProgressBarLogger, {"log_to_console": True, "console_log_interval": "2bq"}, "invalid time '2bq'"),
        (ProgressBarLogger, {"progressbar": True}, "Did you mean 'progress_bar'"),
        (FileLogger, {"filename": "{run}.txt"}, r"\{run\} is not a variable.*Known: .*run_name"),
        (FileLogger, {"remote_file_name": "{rnk}"}, "Did you mean 'rank'"),
        (FileLogger, {"flush_interval": 0}, "flush_interval=0"),
        (FileLogger, {"buffer": 1}, "FileLogger has no argument 'buffer'"),
        (JSONLLogger, {"flush_seconds": -1}, "flush_seconds=-1"),
        (JSONLLogger, {"filename": "{epoch}.jsonl"}, "epoch"),
        (CSVLogger, {"flush_seconds": -1}, "flush_seconds=-1"),
        (TensorboardLogger, {"flush_interval": 0}, "flush_interval=0"),
        (TensorboardLogger, {"log_dir": "{run_nam}"}, "Did you mean 'run_name'"),
        (WandBLogger, {"timeout": 0}, "timeout=0"),
        (WandBLogger, {"tags": "one"}, "expected a list"),
        (WandBLogger, {"name": "a", "init_kwargs": {"name": "b"}}, "name is given as an argument and in init_kwargs"),
        (MLFlowLogger, {"flush_interval": -1}, "flush_interval=-1"),
        (MLFlowLogger, {"ignore_metrics": "time/*"}, "expected a list"),
        (MLFlowLogger, {"experiment": "x"}, "Did you mean 'experiment_name'"),
        (PrometheusLogger, {"port": 70000}, "expected a port, 0 to 65535"),
        (RemoteUploaderDownloader, {"bucket_uri": "folder"}, "bucket_uri='folder'"),
        (RemoteUploaderDownloader, {"bucket_uri": "s3://b", "num_concurrent_uploads": 0}, "num_concurrent_uploads=0"),
        (RemoteUploaderDownloader, {"bucket_uri": "s3://b", "num_attempts": "3"}, "num_attempts='3': expected a whole"),
        (RemoteUploaderDownloader, {"bucket_uri": "s3://b", "file_path_format_string": "name"}, "string='name'"),
        (RemoteUploaderDownloader, {"bucket_uri": "s9://b"}, "unknown scheme 's9'"),
    ],
)
def test_bad_arguments(logger: Any, arguments: dict[str, Any], message: str) -> None:
    """An invalid argument is an error at construction with the value and the rule."""
    with pytest.raises(ConfigError, match=message):
        logger(**arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: FileLogger(f"{path}/x"), "/x' cannot be written: .*Give another filename"),
        (lambda path: JSONLLogger(path / "x"), "/x' cannot be written"),
        (lambda path: CSVLogger(path / "x"), "/x' cannot be written"),
        (lambda path: TensorboardLogger(path), "/fox' cannot be created: Not a directory. Give another log_dir"),
        (lambda path: FileLogger(f"{path}2", remote_file_name="log.txt"), "no logger of this run uploads files"),
        (lambda path: JSONLLogger(f"{path}2", remote_file_name="log.txt"), "no logger of this run uploads files"),
        (lambda path: WandBLogger(init_kwargs={"nottes": "x"}), "nottes"),
    ],
)
def test_unusable_places_are_errors_before_training(
    run: Any, tmp_path: Path, make: Callable[[Path], LoggerDestination], message: str
) -> None:
    """A path that cannot be written, or an upload without an uploader, is an error when the trainer is built."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=message):
        run(make(tmp_path / "file"))

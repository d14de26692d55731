"""TensorboardLogger, WandBLogger and MLFlowLogger: what their own readers find of real runs, without a network."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb_files import OfflineRun, offline_runs

from composerlite.errors import ConfigError
from composerlite.loggers import MLFlowLogger, TensorboardLogger, WandBLogger

pytestmark = pytest.mark.usefixtures("wandb_offline", "mlflow_files", "tensorboard_files")
LOSS = "loss/train/total"


# ── TensorBoard ──────────────────────────────────────────────────────────────────────────────────────────────────────
def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def steps(folder: Path, name: str = LOSS) -> list[int]:
    return [event.step for event in read(folder).Scalars(name)]


def test_folders_of_tensorboard(run, tmp_path, monkeypatch):
    """By default ``tensorboard_logs/<run name>``; ``{run_name}`` may be anywhere, and each rank can have a folder."""
    monkeypatch.chdir(tmp_path)
    run(TensorboardLogger()).batches(1).finish()
    run(TensorboardLogger("{run_name}/curves", rank_zero_only=False)).batches(1).finish()
    assert steps(tmp_path / "tensorboard_logs" / "fox") == [1]
    assert steps(tmp_path / "fox" / "curves" / "rank0") == [1]


def test_a_run_from_its_beginning_replaces_earlier_curves(run, tmp_path):
    """A run that was killed before its first checkpoint shows no step twice."""
    run(TensorboardLogger(tmp_path)).batches(4).finish()
    run(TensorboardLogger(tmp_path)).batches(2).finish()
    assert steps(tmp_path / "fox") == [1, 2]


def test_when_tensorboard_has_the_points(run, tmp_path):
    """Every ``flush_interval`` batches, and after an evaluation."""
    training = run(TensorboardLogger(tmp_path, flush_interval=2)).batches(3)
    assert set(steps(tmp_path / "fox")) >= {1, 2}
    training.evaluate(acc=0.5)
    assert steps(tmp_path / "fox", "metrics/eval/acc") == [3]
    training.finish()


def test_settings_tables_and_images_in_tensorboard(run, tmp_path):
    """Settings and tables are texts. Values from before the load are at the batch of the checkpoint."""
    logger = TensorboardLogger(tmp_path)
    logger.log_hyperparameters({"lr": 0.1})
    logged = run(logger, resume_at=3)
    logged.logger.log_table(["name"], [["a"]], name="names")
    logged.logger.log_images(torch.zeros(2, 3, 4, 4), name="drawn")
    logged.logger.log_images(torch.zeros(2, 4, 4, 3), name="painted", channels_last=True)
    logged.finish()
    shown = read(tmp_path / "fox")
    (settings,) = shown.Tensors("hyperparameters/lr/text_summary")
    assert (settings.step, settings.tensor_proto.string_val) == (3, [b"0.1"])
    assert b"| a |" in shown.Tensors("names/text_summary")[0].tensor_proto.string_val[0]
    assert {tag.split("/")[0] for tag in shown.Tags()["images"]} == {"drawn", "painted"}


# ── Weights & Biases ─────────────────────────────────────────────────────────────────────────────────────────────────
def build(folder: Path, **arguments) -> WandBLogger:
    return WandBLogger(init_kwargs={"dir": str(folder), **arguments.pop("init_kwargs", {})}, **arguments)


def only_run(folder: Path) -> OfflineRun:
    (found,) = offline_runs(folder)
    return found


def test_rows_of_wandb(run, tmp_path):
    """The metrics of a batch are one row, and the batch is the x-axis of each chart. ``place`` is the folder."""
    training = run(logger := build(tmp_path)).batches(1)
    assert Path(logger.place).is_dir()
    assert Path(logger.place).is_relative_to(tmp_path)
    training.logger.log_metrics({"late": 1})  # after the end of the batch
    logger.state_dict()  # a checkpoint: W&B must have the row now, since a resumed run does not log it again
    assert logger._row == {}
    training.finish()
    found = only_run(tmp_path)
    assert found.values("late") == [(1, 1)]
    assert found.rows[0]["time/batch"] == found.rows[0]["trainer/batch"] == 1
    assert found.axes == {"trainer/batch": "", "*": "trainer/batch"}
    assert found.exit_code == 0


def test_names_of_a_wandb_run(run, tmp_path):
    """The name of the run, or the given name, project, group and tags; an id in ``init_kwargs`` wins."""
    run(build(tmp_path / "a", project="zoo")).finish()
    named = build(tmp_path / "b", name="wolf", group="dogs", tags=["wild"], init_kwargs={"id": "mine"})
    run(named, loaded={"run_name": "fox", "id": "other"}).finish()
    assert (only_run(tmp_path / "a").name, only_run(tmp_path / "a").project) == ("fox", "zoo")
    found = only_run(tmp_path / "b")
    assert (found.name, found.group, found.tags, found.id) == ("wolf", "dogs", ["wild"], "mine")


def test_settings_tables_and_images_in_wandb(run, tmp_path):
    """Settings are the config of the W&B run."""
    logger = build(tmp_path)
    logger.log_hyperparameters({"lr": 0.1, "optimizer": {"betas": (0.9, 0.99), "of": torch.optim.SGD}})
    logged = run(logger)
    logged.logger.log_table(["name", "size"], [["a", 1], ["b", torch.tensor(2)]], name="names")
    logged.logger.log_images(torch.rand(2, 3, 4, 5), name="drawn")
    logged.logger.log_images(torch.zeros(2, 4, 5, 1), name="painted", channels_last=True)
    logged.finish()
    found = only_run(tmp_path)
    assert (found.config["lr"], found.config["optimizer"]["betas"]) == (0.1, [0.9, 0.99])
    (row,) = found.rows
    assert (row["names/nrows"], row["names/ncols"]) == (2, 2)
    for name in ("drawn", "painted"):
        assert (row[f"{name}/count"], row[f"{name}/width"], row[f"{name}/height"]) == (2, 5, 4)


def test_files_in_wandb(run, tmp_path):
    """With ``log_artifacts`` a file is an artifact with the content at the call."""
    logged = run(build(tmp_path, log_artifacts=True))
    (tmp_path / "a").write_text("content")
    logged.logger.upload_file("{run_name}/notes/a.txt", tmp_path / "a")
    (tmp_path / "a").write_text("another content")
    logged.finish()
    assert only_run(tmp_path).artifacts == {"fox.notes.a.txt": ["content"]}
    assert not build(tmp_path).can_upload_files()


def test_an_open_wandb_run_is_used(run, tmp_path):
    """As in a sweep; the code that has started the W&B run finishes it."""
    with wandb.init(dir=tmp_path) as open_run:
        run(build(tmp_path)).batches(1).finish()
        open_run.log({"mine": 1})
    first, second = only_run(tmp_path).rows
    assert (first["trainer/batch"], first[LOSS], second["mine"]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("settings", "seconds"), [(None, 30), (wandb.Settings(finish_timeout=5), 5), ({"finish_timeout": 6}, 6)]
)
def test_the_timeout_of_wandb(run, tmp_path, settings, seconds):
    """``timeout`` limits the wait of W&B at the end, unless the settings of the user have a limit."""
    logged = run(build(tmp_path, timeout=30, init_kwargs={} if settings is None else {"settings": settings}))
    assert wandb.run.settings.finish_timeout == seconds
    logged.finish()


# ── MLflow ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


def client(store: Path):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=store.as_uri())


def run_of(logger: MLFlowLogger, store: Path):
    return client(store).get_run(logger.run_id)


def history(logger: MLFlowLogger, store: Path, name: str = LOSS) -> list[int]:
    return [metric.step for metric in client(store).get_metric_history(logger.run_id, name)]


def artifact(logger: MLFlowLogger, store: Path, path: str) -> str:
    return (Path(urlsplit(run_of(logger, store).info.artifact_uri).path) / path).read_text()


def test_names_in_mlflow(run, store):
    """Experiment, tags, renamed and ignored metrics; characters that MLflow refuses become underscores."""
    logger = MLFlowLogger(
        "zoo",
        tracking_uri=store,
        tags={"who": "me"},
        rename_metrics={LOSS: "loss"},
        ignore_metrics=["time/*"],
        ignore_hyperparameters=["secret"],
    )
    logged = run(logger).batches(1)
    assert logger.place == f"{store.as_uri()}, run {logger.run_id}"
    logged.logger.log_metrics({"acc@5": 1, "words": "are no number"})
    logged.logger.log_hyperparameters({"secret": 1, "lr": 2})
    logged.finish()
    found = run_of(logger, store)
    assert client(store).get_experiment(found.info.experiment_id).name == "zoo"
    assert (found.info.run_name, found.info.status, found.data.tags["who"]) == ("fox", "FINISHED", "me")
    assert found.data.metrics == {"loss": 1.0, "acc_5": 1.0}
    assert found.data.params == {"lr": "2"}


def test_settings_tables_and_images_in_mlflow(run, store):
    """Settings are parameters of the MLflow run; tables and images are artifacts."""
    logger = MLFlowLogger(tracking_uri=store)
    logger.log_hyperparameters({"lr": 0.1, "optimizer": {"betas": (0.9, 0.99), "name": "adam"}})
    logged = run(logger)
    logged.logger.log_table(["name", "size"], [["a", 1], ["b", torch.tensor(2)]], name="names")
    logged.logger.log_images(torch.rand(2, 3, 4, 5), name="drawn")
    logged.finish()
    parameters = {"lr": "0.1", "optimizer/betas": "[0.9, 0.99]", "optimizer/name": "adam"}
    assert run_of(logger, store).data.params == parameters
    table = artifact(logger, store, "tables/names/batch0.json")
    assert json.loads(table) == {"columns": ["name", "size"], "data": [["a", 1], ["b", 2]]}
    assert len(list(store.glob("**/images/drawn*.png"))) == 2


def test_changed_settings_of_a_resumed_mlflow_run(run, store):
    """MLflow parameters are immutable: a changed setting has a new name with the batch."""
    first = run(MLFlowLogger(tracking_uri=store))
    first.logger.log_hyperparameters({"lr": 0.1, "end": "4ba"})
    first.batches(2).finish()
    resumed = run(logger := MLFlowLogger(tracking_uri=store), resume_at=2, loaded=first.state.callbacks[0].state_dict())
    assert run_of(logger, store).info.status == "RUNNING"
    resumed.logger.log_hyperparameters({"lr": 0.1, "end": "5ba"})
    resumed.finish()
    assert run_of(logger, store).data.params == {"lr": "0.1", "end": "4ba", "end.batch2": "5ba"}


@pytest.mark.parametrize("change", ["resume", "deleted", "missing"])
def test_when_a_new_mlflow_run_begins(run, store, change):
    """With ``resume=False``, and if the MLflow run of the checkpoint was deleted."""
    run(old := MLFlowLogger(tracking_uri=store)).batches(1).finish()
    saved = old.state_dict()
    if change == "deleted":
        client(store).delete_run(old.run_id)
    if change == "missing":
        saved["run_ids"] = ["0" * 32]
    run(logger := MLFlowLogger(tracking_uri=store, resume=change != "resume"), loaded=saved).batches(1).finish()
    assert logger.run_id != old.run_id
    assert history(logger, store) == [1]


def test_when_mlflow_has_the_metrics(run, store):
    """After ``flush_interval`` seconds, an evaluation, or a checkpoint, since a resumed run does not log them again."""
    events = {
        0: lambda training: None,
        3600: lambda training: training.evaluate(acc=0.5),
        3601: lambda training: training.state.callbacks[0].state_dict(),
    }
    for seconds, event in events.items():
        training = run(logger := MLFlowLogger(tracking_uri=store, flush_interval=seconds)).batches(2)
        if seconds:
            assert run_of(logger, store).data.metrics == {}
        event(training)
        assert logger._background.wait(30)
        assert history(logger, store) == [1, 2]
        training.finish()


def test_more_values_than_a_request_of_mlflow_takes(run, store):
    """Any number of metrics and settings arrive."""
    logged = run(logger := MLFlowLogger(tracking_uri=store))
    logged.logger.log_metrics({f"m{n}": n for n in range(1100)})
    logged.logger.log_hyperparameters({f"p{n}": n for n in range(210)})
    logged.finish()
    found = run_of(logger, store).data
    assert (len(found.metrics), len(found.params)) == (1100, 210)


def test_files_in_mlflow(run, store, tmp_path):
    """A file is an artifact with the content at the call. A taken name is an error at the next batch."""
    logged = run(logger := MLFlowLogger(tracking_uri=store))
    file = tmp_path / "a"
    for content in ("old", "new"):
        file.write_text(content)
        logged.logger.upload_file("{run_name}/a.txt", file, overwrite=True)
    file.write_text("changed since")
    assert logger._background.wait(30)
    logged.logger.upload_file("{run_name}/a.txt", file)
    assert logger._background.wait(30)
    with pytest.raises(FileExistsError, match=r"'fox/a.txt' exists") as error:
        logged.batches(1)
    assert "uploading 'fox/a.txt' to MLflow" in error.value.__notes__[0]
    logged.finish()
    assert artifact(logger, store, "fox/a.txt") == "new"


def test_values_that_mlflow_refuses(run, store):
    """The error is raised at the next batch, or when the trainer closes; the MLflow run ends in both cases."""
    logged = run(logger := MLFlowLogger(tracking_uri=store, flush_interval=0)).batches(1)
    logged.logger.log_metrics({"x" * 600: 1})  # longer than MLflow allows
    logged.run_events(["eval_end"])
    assert logger._background.wait(30)
    with pytest.raises(Exception, match="exceeds the maximum length") as error:
        logged.batches(1)
    assert "MLFlowLogger failed in the background: sending 1 metrics." in error.value.__notes__
    logged.logger.log_metrics({"x" * 600: 1})
    with pytest.raises(Exception, match="exceeds the maximum length"):
        logged.finish()
    assert run_of(logger, store).info.status == "FINISHED"


def test_a_server_that_does_not_answer_is_an_error_before_training(run, store, monkeypatch):
    """The error names the experiment and the server. MLflow's own error says how to allow folders."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(Exception, match=r"127\.0\.0\.1") as error:
        run(MLFlowLogger(tracking_uri="http://127.0.0.1:9"))
    assert "MLFlowLogger could not open the experiment 'Default' at http://127.0.0.1:9." in error.value.__notes__
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    with pytest.raises(ConfigError, match="MLFLOW_ALLOW_FILE_STORE=true"):
        run(MLFlowLogger(tracking_uri=store))

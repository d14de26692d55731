"""MLFlowLogger: real runs of MLflow in a folder, read back with its own client."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

from composerlite.core import Callback, Engine, seed_all
from composerlite.errors import ConfigError
from composerlite.loggers import MLFlowLogger

pytestmark = pytest.mark.usefixtures("mlflow_files")


class LogsWhileClosing(Callback):
    """A callback whose last words come when it closes."""

    def close(self, state, logger):
        logger.log_metrics({"last": 1})


def client(folder: Path):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=folder.as_uri())


def runs(folder: Path, experiment: str = "Default"):
    """All MLflow runs of an experiment, the oldest first."""
    found = client(folder).get_experiment_by_name(experiment)
    return sorted(client(folder).search_runs([found.experiment_id]), key=lambda one: one.info.start_time)


def history(folder: Path, run_id: str, name: str) -> list[tuple[int, float]]:
    """Steps and values of a metric, in the order in which they were logged."""
    return [(metric.step, metric.value) for metric in client(folder).get_metric_history(run_id, name)]


def artifact(folder: Path, run_id: str, path: str) -> str:
    """What is in a file that the run has kept."""
    return (Path(urlsplit(client(folder).get_run(run_id).info.artifact_uri).path) / path).read_text()


def test_metrics_at_batches(run, tmp_path):
    """Metrics are logged at their batch, in a run that has the name of the run and is finished."""
    logger = MLFlowLogger("zoo", tracking_uri=tmp_path, tags={"who": "me"})
    run(logger).epoch(acc=0.75).finish()

    (found,) = runs(tmp_path, "zoo")
    assert found.info.run_id == logger.run_id
    assert (found.info.run_name, found.info.status, found.data.tags["who"]) == ("fox", "FINISHED", "me")
    losses = history(tmp_path, logger.run_id, "loss/train/total")
    assert losses == [(n, pytest.approx(1 / n)) for n in range(1, 6)]
    assert history(tmp_path, logger.run_id, "metrics/train/acc") == [(5, 0.75)]


def test_where_the_run_is(run, tmp_path):
    """``composerlite train`` tells it: the store, and the run's id."""
    logger = MLFlowLogger(tracking_uri=tmp_path)
    training = run(logger).epoch()
    assert logger.place == f"{tmp_path.as_uri()}, run {logger.run_id}"
    training.finish()


def test_names_that_are_changed_and_left_out(run, tmp_path):
    """Metrics can have other names in MLflow, or none; what MLflow does not allow in a name becomes an underscore."""
    logger = MLFlowLogger(
        tracking_uri=tmp_path,
        rename_metrics={"loss/train/total": "loss"},
        ignore_metrics=["time/*"],
        ignore_hyperparameters=["secret"],
    )
    logged = run(logger).batches(1)
    logged.logger.log_metrics({"acc@5": 1, "words": "are no number"})
    logged.logger.log_hyperparameters({"secret": 1, "lr": 2})
    logged.finish()

    (found,) = runs(tmp_path)
    assert found.data.metrics == {"loss": 1.0, "acc_5": 1.0}
    assert found.data.params == {"lr": "2"}


def test_settings_tables_and_images(run, tmp_path):
    """Settings are parameters of the run; tables and images are artifacts."""
    logged = run(logger := MLFlowLogger(tracking_uri=tmp_path))
    logged.logger.log_hyperparameters({"lr": 0.1, "optimizer": {"betas": (0.9, 0.99), "name": "adam"}})
    logged.logger.log_table(["name", "size"], [["a", 1], ["b", torch.tensor(2)]], name="names")
    logged.logger.log_images(torch.rand(2, 3, 4, 5), name="drawn")
    logged.finish()

    (found,) = runs(tmp_path)
    assert found.data.params == {"lr": "0.1", "optimizer/betas": "[0.9, 0.99]", "optimizer/name": "adam"}
    table = artifact(tmp_path, logger.run_id, "tables/names/batch0.json")
    assert json.loads(table) == {"columns": ["name", "size"], "data": [["a", 1], ["b", 2]]}
    assert len(list(tmp_path.glob("**/images/drawn*.png"))) == 2


@pytest.mark.parametrize("left", [b"", b"17"], ids=["nothing", "a part of a line"])
@pytest.mark.parametrize("lines", [0, 1])
def test_a_run_that_was_killed_while_a_metric_was_written_is_resumed(run, tmp_path, left, lines):
    """MLflow refuses to read a metric whose file is empty, or ends within a line; what is whole stays."""
    killed = run(MLFlowLogger(tracking_uri=tmp_path))
    killed.batches(2)
    saved = killed.state.callbacks[0].state_dict()
    killed.engine.close()
    (file,) = tmp_path.glob("*/*/metrics/loss/train/total")
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:lines]) + left)
    logger = MLFlowLogger(tracking_uri=tmp_path)
    logger.init(killed.state, killed.logger)
    logger.load_state_dict(saved)
    run(logger, resume_at=2).batches(2).finish()

    steps = [step for step, _ in history(tmp_path, logger.run_id, "loss/train/total")]
    assert steps in ([1, 2, 3, 4], [1, 3, 4])  # 2 is sent again, if it came in another millisecond than 1


def test_a_resumed_run_is_the_same_run(run, tmp_path):
    """A run that was killed after batch 4 and goes on from batch 2 goes on with its MLflow run; settings that have
    changed since keep their first value and have the new one beside it."""
    killed = run(MLFlowLogger(tracking_uri=tmp_path))
    killed.logger.log_hyperparameters({"lr": 0.1, "end": "4ba"})
    killed.batches(2)
    saved = killed.state.callbacks[0].state_dict()
    killed.batches(2)
    killed.engine.close()
    logger = MLFlowLogger(tracking_uri=tmp_path)
    logger.init(killed.state, killed.logger)
    logger.load_state_dict(saved)
    resumed = run(logger, resume_at=2)
    assert runs(tmp_path)[0].info.status == "RUNNING"
    resumed.logger.log_hyperparameters({"lr": 0.1, "end": "5ba"})
    resumed.batches(3).finish()

    (found,) = runs(tmp_path)
    assert found.info.run_id == logger.run_id
    assert found.info.status == "FINISHED"
    assert [step for step, _ in history(tmp_path, logger.run_id, "loss/train/total")] == [1, 2, 3, 4, 3, 4, 5]
    assert found.data.params == {"lr": "0.1", "end": "4ba", "end.batch2": "5ba"}


@pytest.mark.parametrize("change", ["run_name", "resume", "deleted", "gone"])
def test_when_a_new_run_begins(run, tmp_path, change):
    """With the checkpoint of another run, with resume=False, and where the MLflow run is not there any more."""
    first = run(old := MLFlowLogger(tracking_uri=tmp_path)).batches(1).finish()
    saved = old.state_dict()
    if change == "deleted":
        client(tmp_path).delete_run(old.run_id)
    if change == "gone":
        saved["run_ids"] = ["0" * 32]
    name = "wolf" if change == "run_name" else "fox"
    logger = MLFlowLogger(tracking_uri=tmp_path, resume=change != "resume")
    logger.init(run(run_name=name).state, first.logger)
    logger.load_state_dict(saved)
    run(logger, run_name=name).batches(1).finish()

    assert logger.run_id != old.run_id
    assert [step for step, _ in history(tmp_path, logger.run_id, "loss/train/total")] == [1]


def test_when_metrics_are_sent(run, tmp_path):
    """Every flush_interval seconds and after evaluations, and not before."""
    often = run(logger := MLFlowLogger(tracking_uri=tmp_path, flush_interval=0)).batches(2)
    assert logger._background.wait(30)
    assert len(history(tmp_path, logger.run_id, "loss/train/total")) == 2
    often.finish()

    seldom = run(logger := MLFlowLogger(tracking_uri=tmp_path, flush_interval=3600)).batches(2)
    assert client(tmp_path).get_run(logger.run_id).data.metrics == {}
    seldom.evaluate(acc=0.5)
    assert logger._background.wait(30)
    assert len(history(tmp_path, logger.run_id, "loss/train/total")) == 2
    assert history(tmp_path, logger.run_id, "metrics/eval/acc") == [(2, 0.5)]
    seldom.finish()


def test_what_a_killed_run_had_not_sent(run, tmp_path):
    """What was logged before a checkpoint and had not been sent when the run was killed is sent by the resumed run."""
    killed = run(MLFlowLogger(tracking_uri=tmp_path, flush_interval=3600)).batches(2)
    saved = killed.state.callbacks[0].state_dict()
    logger = MLFlowLogger(tracking_uri=tmp_path)
    logger.init(killed.state, killed.logger)
    logger.load_state_dict(saved)
    run(logger, resume_at=2).batches(1).finish()

    assert [step for step, _ in history(tmp_path, logger.run_id, "loss/train/total")] == [1, 2, 3]


def test_more_than_mlflow_takes_at_once(run, tmp_path):
    """Any number of metrics and settings."""
    logged = run(MLFlowLogger(tracking_uri=tmp_path))
    logged.logger.log_metrics({f"m{n}": n for n in range(1100)})
    logged.logger.log_hyperparameters({f"p{n}": n for n in range(210)})
    logged.finish()

    (found,) = runs(tmp_path)
    assert len(found.data.metrics) == 1100
    assert len(found.data.params) == 210


def test_what_is_logged_before_the_checkpoint_is_loaded(run, tmp_path):
    """Settings and metrics of before it is known where the run goes on are logged at the batch where it does."""
    logger = MLFlowLogger(tracking_uri=tmp_path)
    logger.log_hyperparameters({"lr": 0.1})
    logger.log_metrics({"early": 7}, 0)
    run(logger, resume_at=3).finish()

    assert runs(tmp_path)[0].data.params == {"lr": "0.1"}
    assert history(tmp_path, logger.run_id, "early") == [(3, 7)]


def test_last_words_of_other_callbacks(run, tmp_path):
    """What other callbacks log while the trainer closes is logged as well."""
    logged = run(MLFlowLogger(tracking_uri=tmp_path))
    logged.state.callbacks.append(LogsWhileClosing())
    Engine(logged.state, logged.logger).close()

    assert runs(tmp_path)[0].data.metrics == {"last": 1}


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("x"), "FAILED"), (SystemExit(143), "KILLED"), (None, "FAILED")]
)
def test_how_a_run_ends(run, tmp_path, error, status):
    """A run that fails, or is asked to end, is not finished in MLflow: also where the error was handled before."""
    logged = run(MLFlowLogger(tracking_uri=tmp_path)).run_events(["fit_start"]).batches(1)
    try:
        if error is not None:
            raise error
    except BaseException:  # noqa: BLE001 - whatever ended training
        logged.engine.close()
    logged.engine.close()

    assert runs(tmp_path)[0].info.status == status


def test_files_are_artifacts(run, tmp_path):
    """A file that is handed over is kept as it was then; of one name the newest stays."""
    logged = run(logger := MLFlowLogger(tracking_uri=tmp_path / "store"))
    file = tmp_path / "a"
    for content in ("old", "new"):
        file.write_text(content)
        logged.logger.upload_file("{run_name}/a.txt", file, overwrite=True)
    file.write_text("changed since")
    logged.logger.upload_file("top.txt", file)
    logged.finish()

    assert artifact(tmp_path / "store", logger.run_id, "fox/a.txt") == "new"
    assert artifact(tmp_path / "store", logger.run_id, "top.txt") == "changed since"


def test_what_exists_is_not_overwritten_and_training_hears_of_it(run, tmp_path):
    """Without overwrite a name that is taken is an error at the next batch; the artifact stays as it was."""
    logged = run(logger := MLFlowLogger(tracking_uri=tmp_path / "store"))
    (tmp_path / "a").write_text("old")
    logged.logger.upload_file("a.txt", tmp_path / "a")
    assert logger._background.wait(30)
    (tmp_path / "a").write_text("new")
    logged.logger.upload_file("a.txt", tmp_path / "a")
    assert logger._background.wait(30)
    with pytest.raises(FileExistsError, match=r"'a.txt' exists") as error:
        logged.batches(1)
    assert "keeping 'a.txt' as an artifact of MLflow" in error.value.__notes__[0]
    logged.finish()

    assert artifact(tmp_path / "store", logger.run_id, "a.txt") == "old"


def test_a_service_that_fails_is_told(run, tmp_path):
    """What MLflow does not take is raised at the next batch, or when the trainer closes; the MLflow run ends, too."""
    logged = run(logger := MLFlowLogger(tracking_uri=tmp_path, flush_interval=0)).batches(1)
    assert logger._background.wait(30)
    logged.logger.log_metrics({"x" * 600: 1})  # longer than MLflow allows
    logged.run_events(["eval_end"])
    assert logger._background.wait(30)
    with pytest.raises(Exception, match="exceeds the maximum length") as error:
        logged.batches(1)
    assert "MLFlowLogger failed in the background: sending 1 metrics." in error.value.__notes__
    logged.logger.log_metrics({"x" * 600: 1})
    with pytest.raises(Exception, match="exceeds the maximum length"):
        logged.finish()

    assert runs(tmp_path)[0].info.status == "FINISHED"


def test_a_server_that_does_not_answer_is_an_error_before_training(run, monkeypatch):
    """And it names the experiment and the server."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(Exception, match=r"127\.0\.0\.1") as error:
        run(MLFlowLogger(tracking_uri="http://127.0.0.1:9"))

    assert "MLFlowLogger could not open the experiment 'Default' at http://127.0.0.1:9." in error.value.__notes__


def test_a_folder_that_mlflow_refuses(run, tmp_path, monkeypatch):
    """MLflow takes folders only where it is told to; its own words say how."""
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    with pytest.raises(ConfigError, match="MLFLOW_ALLOW_FILE_STORE=true"):
        run(MLFlowLogger(tracking_uri=tmp_path))


def test_only_rank_zero_logs(run, tmp_path, monkeypatch):
    """With several processes one of them logs and keeps files; another one's files are no error."""
    monkeypatch.setenv("RANK", "1")
    logged = run(MLFlowLogger(tracking_uri=tmp_path)).epoch()
    logged.logger.log_images(torch.zeros(2, 3, 4, 4))
    logged.logger.upload_file("file", Path(__file__))
    logged.finish()

    assert list(tmp_path.iterdir()) == []


def test_closing_before_anything_happened_and_twice(run, tmp_path):
    """A trainer that fails while it is built can still be closed, and leaves nothing; closing again is harmless."""
    logger = MLFlowLogger(tracking_uri=tmp_path)
    for _ in range(2):
        logger.close(run().state, run().logger)
        logger.post_close()
    assert list(tmp_path.iterdir()) == []

    run(logger := MLFlowLogger(tracking_uri=tmp_path)).batches(1).finish()
    logger.post_close()
    assert runs(tmp_path)[0].data.metrics["time/batch"] == 1


def test_training_draws_the_same_random_numbers(run, tmp_path):
    """MLflow draws none from the generators of training."""
    found = []
    for loggers in ((), (MLFlowLogger(tracking_uri=tmp_path),)):
        seed_all(5)
        logged = run(*loggers).batches(2)
        logged.logger.log_images(torch.zeros(1, 3, 4, 4))
        logged.logger.upload_file("file", Path(__file__))
        logged.finish()
        found.append((random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()))

    assert found[0] == found[1]


def test_mlflow_not_installed(monkeypatch):
    """Without mlflow the error says what to install."""
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"pip install 'composerlite\[mlflow\]'"):
        MLFlowLogger()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"flush_interval": -1}, "flush_interval=-1"),
        ({"ignore_metrics": "time/*"}, "expected a list"),
        ({"experiment": "x"}, "Did you mean 'experiment_name'"),
    ],
)
def test_bad_arguments(arguments, says):
    """A bad argument is an error at construction that says what there is."""
    with pytest.raises(ConfigError, match=says):
        MLFlowLogger(**arguments)

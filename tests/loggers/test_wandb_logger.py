"""WandBLogger: real runs of W&B without a network, read back from what they have written."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import wandb
from wandb_files import OfflineRun, offline_runs

from composerlite.core import Callback, Engine, seed_all
from composerlite.errors import ConfigError
from composerlite.loggers import WandBLogger
from composerlite.loggers.services.service import need_package

pytestmark = pytest.mark.usefixtures("wandb_offline")


class LogsWhileClosing(Callback):
    """A callback whose last words come when it closes."""

    def close(self, state, logger):
        logger.log_metrics({"last": 1})


def build(folder: Path, **arguments) -> WandBLogger:
    """A logger whose W&B run is below ``folder``."""
    return WandBLogger(init_kwargs={"dir": str(folder), **arguments.pop("init_kwargs", {})}, **arguments)


def only_run(folder: Path) -> OfflineRun:
    (found,) = offline_runs(folder)
    return found


def test_metrics_over_batches(run, tmp_path):
    """Metrics are logged with their batch, which is the x-axis of every chart; those of one batch are one row."""
    run(build(tmp_path)).epoch(acc=0.75).finish()

    found = only_run(tmp_path)
    assert found.values("loss/train/total") == [(n, pytest.approx(1 / n)) for n in range(1, 6)]
    assert found.values("metrics/train/acc") == [(5, 0.75)]
    assert found.axes == {"trainer/batch": "", "*": "trainer/batch"}
    assert found.rows[0]["time/batch"] == 1
    assert found.exit_code == 0


def test_the_summary_is_about_training(run, tmp_path):
    """Costs of checkpoints have charts over the batches, but the summary of the W&B run is without them."""
    logged = run(build(tmp_path)).batches(2)
    logged.logger.log_metrics({"checkpoint/bytes": 5, "checkpoint/batch": 1})
    logged.epoch(acc=0.75).finish()

    found = only_run(tmp_path)
    assert found.values("checkpoint/bytes") == [(2, 5)]
    assert found.axes["checkpoint/bytes"] == "trainer/batch"
    assert {"loss/train/total", "metrics/train/acc", "time/batch"} <= found.summary
    assert not [name for name in found.summary if name.startswith("checkpoint/")]


def test_where_the_run_is(run, tmp_path):
    """``composerlite train`` tells it: the folder of a run that is not sent."""
    logger = build(tmp_path)
    training = run(logger).epoch()
    assert Path(logger.place).is_dir()
    assert Path(logger.place).is_relative_to(tmp_path)
    training.finish()


def test_names_of_the_run(run, tmp_path):
    """The W&B run has the name of the run, or the one that was given, and its project, group and tags."""
    run(build(tmp_path / "a", project="zoo")).finish()
    run(build(tmp_path / "b", name="wolf", group="dogs", tags=["wild"], init_kwargs={"notes": "x"})).finish()

    assert (only_run(tmp_path / "a").name, only_run(tmp_path / "a").project) == ("fox", "zoo")
    found = only_run(tmp_path / "b")
    assert (found.name, found.group, found.tags) == ("wolf", "dogs", ["wild"])


def test_settings_tables_and_images(run, tmp_path):
    """Settings are the config of the run; tables and images are kept."""
    logged = run(build(tmp_path))
    logged.logger.log_hyperparameters({"lr": 0.1, "optimizer": {"betas": (0.9, 0.99), "of": torch.optim.SGD}})
    logged.logger.log_table(["name", "size"], [["a", 1], ["b", torch.tensor(2)]], name="names")
    logged.logger.log_images(torch.rand(2, 3, 4, 5), name="drawn")
    logged.logger.log_images(torch.zeros(2, 4, 5, 1), name="painted", channels_last=True)
    logged.finish()

    found = only_run(tmp_path)
    assert found.config["lr"] == 0.1
    assert found.config["optimizer"]["betas"] == [0.9, 0.99]
    (row,) = found.rows
    assert (row["names/nrows"], row["names/ncols"]) == (2, 2)
    assert (row["drawn/count"], row["drawn/width"], row["drawn/height"]) == (2, 5, 4)
    assert (row["painted/count"], row["painted/width"], row["painted/height"]) == (2, 5, 4)


def test_a_resumed_run_is_the_same_run(run, tmp_path):
    """A run that was killed after batch 4 and goes on from batch 2 goes on with its W&B run."""
    killed = run(build(tmp_path))
    killed.batches(2)
    saved = killed.state.callbacks[0].state_dict()
    killed.batches(2)
    killed.engine.close()
    logger = build(tmp_path / "again")
    logger.init(killed.state, killed.logger)
    logger.load_state_dict(saved)
    run(logger, resume_at=2).batches(3).finish()

    first, second = only_run(tmp_path), only_run(tmp_path / "again")
    assert first.id == second.id == logger.run_id == saved["id"]
    assert [batch for batch, _ in first.values("loss/train/total")] == [1, 2, 3, 4]
    assert [batch for batch, _ in second.values("loss/train/total")] == [3, 4, 5]


def test_a_checkpoint_of_another_run_begins_a_new_one(run, tmp_path):
    """Training that begins with the checkpoint of another run does not write into the W&B run of that."""
    first = run(build(tmp_path)).batches(1).finish()
    logger = build(tmp_path)
    logger.init(run(run_name="wolf").state, first.logger)
    logger.load_state_dict(first.state.callbacks[0].state_dict())
    run(logger, run_name="wolf").batches(1).finish()

    one, other = offline_runs(tmp_path)
    assert one.id != other.id


def test_an_id_of_ones_own(run, tmp_path):
    """An id in init_kwargs is that of the run, whatever the checkpoint says."""
    logger = build(tmp_path, init_kwargs={"id": "mine"})
    logger.init(run().state, run().logger)
    logger.load_state_dict({"run_name": "fox", "id": "other"})
    run(logger).batches(1).finish()

    assert only_run(tmp_path).id == "mine"


def test_what_a_checkpoint_has_seen_is_logged(run, tmp_path):
    """What was logged when a checkpoint is made is not lost if the run is killed: it will not be logged again."""
    logged = run(build(tmp_path)).batches(1)
    logged.logger.log_metrics({"late": 1})  # after the end of the batch
    logged.state.callbacks[0].state_dict()
    rows = logged.state.callbacks[0]._row

    assert rows == {}
    logged.finish()
    assert only_run(tmp_path).values("late") == [(1, 1)]


def test_what_is_logged_before_the_checkpoint_is_loaded(run, tmp_path):
    """Settings and metrics of before it is known where the run goes on are logged at the batch where it does."""
    logger = build(tmp_path)
    logger.log_hyperparameters({"lr": 0.1})
    logger.log_metrics({"early": 7}, 0)
    run(logger, resume_at=3).finish()

    assert only_run(tmp_path).config["lr"] == 0.1
    assert only_run(tmp_path).values("early") == [(3, 7)]


def test_last_words_of_other_callbacks(run, tmp_path):
    """What other callbacks log while the trainer closes is logged as well."""
    logged = run(build(tmp_path))
    logged.state.callbacks.append(LogsWhileClosing())
    Engine(logged.state, logged.logger).close()

    assert only_run(tmp_path).values("last") == [(0, 1)]


def test_how_a_run_ends(run, tmp_path):
    """A run that fails, or is asked to end, is not finished in W&B: also where the error was handled before."""
    for folder, error, code in (("a", RuntimeError("x"), 1), ("b", SystemExit(143), 143), ("c", None, 1)):
        logged = run(build(tmp_path / folder)).run_events(["fit_start"]).batches(1)
        try:
            if error is not None:
                raise error
        except BaseException:  # noqa: BLE001 - whatever ended training
            logged.engine.close()
        logged.engine.close()
        assert only_run(tmp_path / folder).exit_code == code, folder


def test_files_are_artifacts(run, tmp_path):
    """A file that is handed over is kept as it was then, under a name that W&B takes; without log_artifacts none is."""
    logged = run(build(tmp_path, log_artifacts=True))
    file = tmp_path / "a"
    file.write_text("content")
    assert logged.logger.has_file_upload_destination()
    logged.logger.upload_file("{run_name}/notes/a.txt", file)
    file.write_text("something else")
    logged.finish()

    assert only_run(tmp_path).artifacts == {"fox.notes.a.txt": ["content"]}
    assert not build(tmp_path).can_upload_files()


def test_a_run_that_somebody_else_has_started(run, tmp_path):
    """Where a run of W&B is open, as in a sweep, it is logged to, and its owner finishes it."""
    with wandb.init(dir=tmp_path) as open_run:
        run(build(tmp_path)).batches(1).finish()
        open_run.log({"mine": 1})

    first, second = only_run(tmp_path).rows
    assert (first["trainer/batch"], first["loss/train/total"]) == (1, 1)
    assert second["mine"] == 1


def test_closing_before_anything_happened_and_twice(run, tmp_path):
    """A trainer that fails while it is built can still be closed, and leaves no run; closing again is harmless."""
    logger = build(tmp_path)
    for _ in range(2):
        logger.close(run().state, run().logger)
        logger.post_close()

    assert offline_runs(tmp_path) == []


def test_the_end_waits_for_so_long(run, tmp_path):
    """How long the end waits is told to W&B, unless the user has told it something else."""
    seconds = []
    for settings in (None, wandb.Settings(finish_timeout=5), {"finish_timeout": 6}):
        logged = run(build(tmp_path, timeout=30, init_kwargs={} if settings is None else {"settings": settings}))
        seconds.append(wandb.run.settings.finish_timeout)
        logged.finish()

    assert seconds == [30, 5, 6]


def test_training_draws_the_same_random_numbers(run, tmp_path):
    """W&B draws none from the generators of training."""
    found = []
    for loggers in ((), (build(tmp_path, log_artifacts=True),)):
        seed_all(5)
        logged = run(*loggers).batches(2)
        logged.logger.log_images(torch.zeros(1, 3, 4, 4))
        logged.logger.upload_file("file", Path(__file__))
        logged.finish()
        found.append((random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()))

    assert found[0] == found[1]


def test_wandb_not_installed(tmp_path, monkeypatch):
    """Without wandb the error says what to install, also where its runs have left a folder 'wandb'."""
    (tmp_path / "package_nobody_has").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="needs the package package_nobody_has, which is not installed"):
        need_package("package_nobody_has", who="WandBLogger", extra="wandb")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'composerlite\[wandb\]'"):
        WandBLogger()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"timeout": 0}, "timeout=0"),
        ({"tags": "one"}, "expected a list"),
        ({"name": "a", "init_kwargs": {"name": "b"}}, "name is given as an argument and in init_kwargs"),
        ({"projct": "x"}, "Did you mean 'project'"),
    ],
)
def test_bad_arguments(arguments, says):
    """A bad argument is an error at construction that says what there is."""
    with pytest.raises(ConfigError, match=says):
        WandBLogger(**arguments)


def test_an_argument_that_wandb_does_not_have(run, tmp_path):
    """It is an error before training, and names it."""
    with pytest.raises(ConfigError, match="nottes"):
        run(build(tmp_path, init_kwargs={"nottes": "x"}))

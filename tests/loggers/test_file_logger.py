"""FileLogger."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from composerlite.core import Callback, Engine, LoggerDestination, State
from composerlite.errors import ConfigError
from composerlite.loggers import FileLogger


class KeepsFiles(LoggerDestination):
    """A destination that copies files into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def can_upload_files(self) -> bool:
        return True

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        target = self.folder / remote_file_name
        assert overwrite or not target.exists()
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file_path, target)


class LogsWhileClosing(Callback):
    """A callback whose last words come when it closes."""

    def close(self, state, logger):
        logger.log_metrics({"last": 1})


def values(path: Path, name: str) -> list[tuple[int, float]]:
    """(batch, value) of each logged value of a metric."""
    found = []
    for line in path.read_text().splitlines():
        if line.startswith("[metric]"):
            prefix, text = line.split("] ", 1)
            metrics = json.loads(text)
            if name in metrics:
                found.append((int(prefix.split("=")[1]), metrics[name]))
    return found


def test_a_line_for_everything_that_is_logged(run, tmp_path):
    """Each line says what it is and at which batch, and the rest is JSON, also of tensors."""
    path = tmp_path / "log.txt"
    logged = run(FileLogger(str(path)))
    logged.logger.log_hyperparameters({"lr": 0.1, "where": Path("a")})
    logged.batches(1)
    logged.logger.log_metrics({"vector": torch.tensor([1.0, 2.0]), "nested": {"a": [torch.tensor(3)]}})
    logged.logger.log_table(["name"], [["a"]], name="names", step=1)
    logged.logger.log_traces({"EMA/batch_end": 1})
    logged.finish()

    assert path.read_text().splitlines() == [
        '[start][batch=0] "fox"',
        '[hyperparameters] {"lr": 0.1, "where": "a"}',
        '[metric][batch=1] {"loss/train/total": 1.0, "time/batch": 1}',
        '[metric][batch=1] {"vector": [1.0, 2.0], "nested": {"a": [3]}}',
        '[table][batch=1] {"name": "names", "columns": ["name"], "rows": [["a"]]}',
    ]


def test_traces_if_asked_for(run, tmp_path):
    """With log_traces the file also says which algorithms ran."""
    logged = run(FileLogger(str(tmp_path / "log.txt"), log_traces=True))
    logged.logger.log_traces({"EMA/batch_end": 1})
    logged.finish()

    assert (tmp_path / "log.txt").read_text().endswith('[trace] {"EMA/batch_end": 1}\n')


def test_name_variables(run, tmp_path, monkeypatch):
    """The default name has run name and rank filled in, and folders are made."""
    monkeypatch.chdir(tmp_path)
    run(FileLogger()).batches(1).finish()

    assert values(tmp_path / "fox" / "logs-rank0.txt", "time/batch") == [(1, 1)]


def test_lines_arrive_at_the_flush_interval(run, tmp_path):
    """Every flush_interval batches, and after an evaluation, the file is complete; a crash loses no more than that."""
    path = tmp_path / "log.txt"
    logged = run(FileLogger(str(path), flush_interval=2)).batches(3)
    assert [batch for batch, _ in values(path, "time/batch")] == [1, 2]

    logged.evaluate(acc=0.5)
    assert values(path, "metrics/eval/acc") == [(3, 0.5)]


def test_a_resumed_run_appends(run, tmp_path):
    """A resumed run goes on in the same file, also with overwrite, and says from which batch."""
    path = tmp_path / "log.txt"
    run(FileLogger(str(path))).batches(3).finish()
    run(FileLogger(str(path), overwrite=True), resume_at=2).batches(1).finish()

    assert [batch for batch, _ in values(path, "time/batch")] == [1, 2, 3, 3]
    assert path.read_text().splitlines()[4] == '[resume][batch=2] "fox"'


def test_a_run_from_its_beginning_appends_or_overwrites(run, tmp_path):
    """Without overwrite a restart keeps the lines of the attempt before; with it they are replaced."""
    path = tmp_path / "log.txt"
    run(FileLogger(str(path))).batches(1).finish()
    run(FileLogger(str(path))).batches(1).finish()
    assert len(values(path, "time/batch")) == 2

    run(FileLogger(str(path), overwrite=True)).batches(1).finish()
    assert len(values(path, "time/batch")) == 1


def test_closing_after_an_error_and_twice(run, tmp_path):
    """What was logged before an error in training is in the file after close; closing again adds nothing."""
    path = tmp_path / "log.txt"
    logged = run(FileLogger(str(path))).batches(1)
    logger = logged.state.callbacks[0]
    for _ in range(2):
        logger.close(logged.state, logged.logger)
        logger.post_close()

    assert values(path, "time/batch") == [(1, 1)]


def test_last_words_of_other_callbacks(run, tmp_path):
    """What other callbacks log while the trainer closes is in the file as well."""
    path = tmp_path / "log.txt"
    logged = run(FileLogger(str(path)))
    logged.state.callbacks.append(LogsWhileClosing())
    Engine(logged.state, logged.logger).close()

    assert values(path, "last") == [(0, 1)]


def test_closing_before_anything_happened(run, tmp_path):
    """A trainer that fails while it is built can still be closed."""
    logger = FileLogger(str(tmp_path / "log.txt"))
    logger.log_metrics({"a": 1}, 0)
    logger.close(run().state, run().logger)

    assert not (tmp_path / "log.txt").exists()


def test_remote_copy(run, tmp_path):
    """Loggers that keep files get the log after each epoch and when the trainer closes."""
    remote = KeepsFiles(tmp_path / "remote")
    logger = FileLogger(str(tmp_path / "log.txt"), remote_file_name="{run_name}/rank{rank}.txt")
    logged = run(remote, logger).epoch()
    copy = tmp_path / "remote" / "fox" / "rank0.txt"
    assert len(values(copy, "time/batch")) == 5

    logged.batches(1)
    logged.engine.close()
    assert len(values(copy, "time/batch")) == 6


def test_remote_name_without_a_logger_that_keeps_files(run, tmp_path):
    """A remote name that nobody takes is an error when the trainer is built."""
    with pytest.raises(ConfigError, match="no logger of this run keeps files"):
        run(FileLogger(str(tmp_path / "log.txt"), remote_file_name="log.txt"))


def test_unwritable_path(run, tmp_path):
    """A path that cannot be written is an error when the trainer is built, and names it."""
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"file/log\.txt' cannot be written"):
        run(FileLogger(str(tmp_path / "file" / "log.txt")))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"filename": "{run}.txt"}, r"\{run\} is not a variable.*Known: .*run_name"),
        ({"remote_file_name": "{rnk}"}, "Did you mean 'rank'"),
        ({"flush_interval": 0}, "flush_interval=0"),
        ({"buffer": 1}, "FileLogger has no argument 'buffer'"),
    ],
)
def test_bad_arguments(arguments, says):
    """A bad argument or variable is an error at construction that lists what there is."""
    with pytest.raises(ConfigError, match=says):
        FileLogger(**arguments)

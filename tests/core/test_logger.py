"""Logger: one place to log to, many destinations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from composerlite.core import Logger, LoggerDestination, State, Timestamp


class Record(LoggerDestination):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.got.append(hyperparameters)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.got.append((metrics, step))

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        self.got.append((columns, rows, name, step))

    def log_traces(self, traces: dict[str, Any]) -> None:
        self.got.append(traces)

    def log_images(
        self, images: Any, name: str = "Images", channels_last: bool = False, step: int | None = None
    ) -> None:
        self.got.append((images, name, channels_last, step))

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        self.got.append((state, remote_file_name, file_path, overwrite))

    def can_upload_files(self) -> bool:
        return True


def test_every_destination_gets_everything(state: State, tmp_path: Path) -> None:
    """What is logged reaches all destinations, in full."""
    file = tmp_path / "ep1.pt"
    file.touch()
    records = [Record(), Record()]
    logger = Logger(state, records)
    logger.log_hyperparameters({"lr": 0.1})
    logger.log_metrics({"loss": 1.0}, step=3)
    logger.log_table(["a"], [[1]], name="t", step=4)
    logger.log_traces({"EMA/batch_end": 1})
    logger.log_images([0], name="i", channels_last=True, step=5)
    logger.upload_file("run/ep1.pt", str(file), overwrite=True)
    for record in records:
        assert record.got == [
            {"lr": 0.1},
            ({"loss": 1.0}, 3),
            (["a"], [[1]], "t", 4),
            {"EMA/batch_end": 1},
            ([0], "i", True, 5),
            (state, "run/ep1.pt", file, True),
        ]


def test_metrics_are_logged_at_the_current_batch(state: State) -> None:
    """Without a step, the batches trained so far are the step."""
    record = Record()
    state.timestamp = Timestamp(batch=7)
    Logger(state, record).log_metrics({"loss": 1.0})
    assert record.got == [({"loss": 1.0}, 7)]


def test_a_destination_cannot_change_what_another_gets(state: State) -> None:
    """Each destination has a dict of its own."""

    class Greedy(LoggerDestination):
        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            metrics.clear()

    record, metrics = Record(), {"loss": 1.0}
    Logger(state, [Greedy(), record]).log_metrics(metrics, step=0)
    assert record.got == [({"loss": 1.0}, 0)]
    assert metrics == {"loss": 1.0}


def test_a_destination_ignores_what_it_does_not_take(state: State) -> None:
    """A destination that overrides nothing takes everything and keeps no files."""
    logger = Logger(state, LoggerDestination())
    logger.log_metrics({"loss": 1.0})
    logger.upload_file("run/ep1.pt", Path("ep1.pt"))
    assert not logger.has_file_upload_destination()
    assert Logger(state, [LoggerDestination(), Record()]).has_file_upload_destination()

"""CSVLogger: the metrics of a run as a table, one row per batch."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any, final

from composerlite.core import Logger, State
from composerlite.errors import ConfigError, checked_arguments
from composerlite.loggers.run_file import RunFileLogger
from composerlite.loggers.values import plain
from composerlite.storage import atomic_write
from composerlite.types import CheckpointNews

_FIRST = ["batch", "epoch"]
_SAME = ("time/batch", "time/epoch")
"""Metrics of the trainer with the values of the first columns."""


@final
class CSVLogger(RunFileLogger):
    """Writes the metrics of a run as a CSV file: a row per batch, a column per metric.

    The first columns are ``batch`` and ``epoch``. A cell is empty if the metric was not logged at the batch. A new
    metric adds a column at the right; the file is then rewritten atomically. Only numbers and texts become cells.

    A resumed run continues the table and removes the rows of lost work, so each batch is there once.
    (:class:`JSONLLogger` keeps both.) A run that starts from its beginning replaces the table. Only global rank 0
    writes.

    Rows are written about ``flush_seconds`` after their batch, and before a checkpoint; a kill loses newer rows.

    Args:
        filename: path of the file; by default ``metrics.csv`` in the folder of the checkpoints, or in a folder named
            after the run. ``{run_name}`` and the variables of ranks are filled in.
        remote_file_name: name of the upload to the loggers that upload files, after each epoch and at the end. A run
            that resumes on another machine downloads the file first.
        flush_seconds: seconds between two writes. 0 writes after every batch.

    Raises:
        ConfigError: a variable is unknown, or the time is negative; at ``INIT`` the file cannot be written, or no
            logger uploads files; at ``AFTER_LOAD`` the file is another table.

    Example:
        .. code-block:: python

            Trainer(model=model, loggers=CSVLogger("metrics.csv"))
    """

    @checked_arguments
    def __init__(
        self,
        filename: str | Path | None = None,
        remote_file_name: str | None = None,
        flush_seconds: float = 1.0,
    ) -> None:
        super().__init__(filename, remote_file_name, name="metrics.csv", flush_seconds=flush_seconds)
        self._columns = list(_FIRST)
        self._rows: list[dict[str, Any]] = []  # rows to write. The last row stays: its batch may have more metrics
        self._done_bytes = 0  # size of the header and the complete rows

    def after_load(self, state: State, logger: Logger) -> None:
        if not self.is_kept:
            return
        batch, early = int(state.timestamp.batch), self._rows
        self._continue_file(state, logger, download=batch > 0)
        header, rows = _read(self.path.read_bytes())
        if header and header[:2] != _FIRST:
            raise ConfigError(
                f"CSVLogger: {str(self.path)!r} is another table: the first columns of this logger are 'batch' and "
                "'epoch'. Give another filename."
            )
        self._rows = []
        if batch > 0 and header:
            self._columns = header
            kept = [row for row in rows if row["batch"].isdecimal() and int(row["batch"]) <= batch]
            if kept and int(kept[-1]["batch"]) == batch:
                self._rows = [{name: cell for name, cell in kept.pop().items() if cell} | {"batch": batch}]
            self._replace(kept)
        else:
            self._replace([])
        for row in early:
            self.log_metrics({name: value for name, value in row.items() if name not in _FIRST}, batch)
        self._is_ready = True
        self._flush()

    def log_checkpoint(self, news: CheckpointNews) -> None:
        self._flush()

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        values = {name: plain(value) for name, value in metrics.items() if name not in _SAME}
        cells = {name: value for name, value in values.items() if isinstance(value, int | float | str)}
        if not self.is_kept or not cells:
            return
        if not self._rows or self._rows[-1]["batch"] != step:
            epoch = 0 if self._state is None else int(self._state.timestamp.epoch)
            self._rows.append({"batch": step, "epoch": epoch})
        self._rows[-1].update(cells)

    def _write_waiting(self) -> bool:
        if not self._rows:
            return False
        new = {name: None for row in self._rows for name in row if name not in self._columns}
        if new:
            with self.path.open("rb") as file:
                _, done = _read(file.read(self._done_bytes))
            self._columns += new
            self._replace(done)
        complete = self._text(self._rows[:-1])
        with self.path.open("r+b", buffering=0) as file:
            file.seek(self._done_bytes)
            file.write(complete + self._text(self._rows[-1:]))
            file.truncate()
        self._done_bytes += len(complete)
        del self._rows[:-1]
        return True

    def _replace(self, rows: list[dict[str, Any]]) -> None:
        """Replace the file by the header and ``rows``, atomically."""
        data = self._text([dict(zip(self._columns, self._columns, strict=True)), *rows])
        with atomic_write(self.path) as file:
            file.write(data)
        self._done_bytes = len(data)

    def _text(self, rows: list[dict[str, Any]]) -> bytes:
        out = io.StringIO(newline="")
        csv.DictWriter(out, self._columns, restval="", lineterminator="\n").writerows(rows)
        return out.getvalue().encode()


def _read(data: bytes) -> tuple[list[str], list[dict[str, str]]]:
    """Return the header and the complete rows of a table."""
    text = data[: data.rfind(b"\n") + 1].decode(errors="replace")  # a kill may cut off the last row
    table = csv.DictReader(io.StringIO(text, newline=""))
    rows = list(table)
    return list(table.fieldnames or ()), [row for row in rows if None not in row and None not in row.values()]

"""CSVLogger: the metrics of a run as a table, a row for each batch."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

from composerlite.core import Logger, State
from composerlite.errors import ConfigError, checked_arguments
from composerlite.loggers.run_file import RunFileLogger
from composerlite.loggers.values import plain
from composerlite.storage import atomic_write
from composerlite.types import CheckpointNews

_FIRST = ("batch", "epoch")
_SAME = ("time/batch", "time/epoch")
"""What the trainer logs and these say."""


@final
class CSVLogger(RunFileLogger):
    """Writes the metrics of a run as a CSV file: a row for each batch with metrics, a column for each metric.

    The first columns are ``batch`` and ``epoch``; what was not logged at a batch is empty there. A metric that appears
    later gets a column of its own at the right, and the file is rewritten for it atomically. A resumed run
    continues the table: rows of batches after its checkpoint are of training that was lost, and are removed, so
    that every batch is there once. (:class:`JSONLLogger` keeps both.) A run that starts from its beginning begins a new
    table in place of the old one. Only numbers and texts become cells. Only global
    rank 0 writes.

    A row is in the file, where SIGKILL does not touch it, about ``flush_seconds`` after its batch, and those up to a
    checkpoint before that is saved. An incomplete last row, left by a kill, is removed by the next launch.

    Args:
        filename: the file; ``metrics.csv`` in the folder of the checkpoints by default, or in a folder named after the
            run. ``{run_name}`` and the variables of ranks are filled in.
        remote_file_name: hand the file to the loggers that keep files under this name, after each epoch and at the end.
            A run that is resumed on another machine fetches it first.
        flush_seconds: how long rows may wait. 0 writes after every batch.

    Raises:
        ConfigError: at construction an unknown variable or a negative time; at ``INIT`` a file that cannot be written,
            or a ``remote_file_name`` that no logger can take; at ``AFTER_LOAD`` the file is not such a table.
    """

    @checked_arguments
    def __init__(
        self,
        filename: str | Path | None = None,
        remote_file_name: str | None = None,
        flush_seconds: float = 1.0,
    ) -> None:
        super().__init__(filename, remote_file_name, name="metrics.csv", flush_seconds=flush_seconds)
        self._columns: list[str] = []
        self._rows: list[dict[str, Any]] = []  # not written, or not as they are now; the last may get more cells
        self._written_bytes = 0  # of the file, up to the first of these rows

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────
    def after_load(self, state: State, logger: Logger) -> None:
        if not self.is_kept:
            return
        batch, early = int(state.timestamp.batch), self._rows
        self._rows = []
        if batch > 0:
            self._fetch(state, logger)
        self._resume_table(batch)
        self._is_ready = True
        for row in early:
            self._add({name: value for name, value in row.items() if name not in _FIRST}, batch)
        self._flush()

    def log_checkpoint(self, news: CheckpointNews) -> None:
        self._flush()

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self.is_kept:
            self._add({name: plain(value) for name, value in metrics.items() if name not in _SAME}, step)

    # ── the table ────────────────────────────────────────────────────────────────────────────────────────────────
    def _add(self, metrics: dict[str, Any], step: int | None) -> None:
        cells = {name: value for name, value in metrics.items() if isinstance(value, int | float | str)}
        if not cells:
            return
        epoch = 0 if self._state is None else int(self._state.timestamp.epoch)
        if not self._rows or self._rows[-1]["batch"] != step:
            self._rows.append({"batch": step, "epoch": epoch})
        self._rows[-1].update(cells)

    def _write_waiting(self) -> bool:
        """Write the rows that wait. The last is written too and stays here: more may be logged at its batch."""
        if not self._rows:
            return False
        if not self._columns:
            self._columns = list(_FIRST)
        names = {name: None for row in self._rows for name in row if name not in self._columns}
        if names or self._written_bytes == 0:
            self._write_anew([*self._columns, *names])
        done, last = (_text(self._columns, rows) for rows in (self._rows[:-1], self._rows[-1:]))
        with self.path.open("r+b", buffering=0) as file:
            file.seek(self._written_bytes)
            file.write(done + last)
            file.truncate()
        self._written_bytes += len(done)
        del self._rows[:-1]
        return True

    def _write_anew(self, columns: list[str]) -> None:
        """Write the header and the rows that are done again, with ``columns``."""
        header, rows = _read(self.path, self._written_bytes)
        done = [dict(zip(header, row, strict=False)) for row in rows]
        self._columns = columns
        data = _text(columns, [dict(zip(columns, columns, strict=True)), *done])
        with atomic_write(self.path) as file:
            file.write(data)
        self._written_bytes = len(data)

    def _resume_table(self, batch: int) -> None:
        """Continue the table of an earlier launch, up to ``batch``. From the beginning of a run it is empty."""
        path = self.path
        header, rows = _read(path, path.stat().st_size)
        if header and tuple(header[:2]) != _FIRST:
            raise ConfigError(
                f"CSVLogger: {str(path)!r} is no table of such a logger, whose first columns are 'batch' and 'epoch'. "
                "Give another filename."
            )
        if batch == 0:
            header, rows = [], []
        kept = [dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header) and _is_upto(row, batch)]
        self._columns = header
        data = _text(header, [dict(zip(header, header, strict=True)), *kept]) if header else b""
        with atomic_write(path) as file:
            file.write(data)
        self._written_bytes = len(data)
        if kept and kept[-1]["batch"] == str(batch):  # what is logged now may be of that batch, too
            last = kept[-1]
            self._written_bytes -= len(_text(header, [last]))
            self._rows = [{**{name: cell for name, cell in last.items() if cell != ""}, "batch": batch}]


def _is_upto(row: list[str], batch: int) -> bool:
    return not row[0].isdecimal() or int(row[0]) <= batch


def _read(path: Path, size: int) -> tuple[list[str], list[list[str]]]:
    """The header and the rows in the first ``size`` bytes of the file; a row without its end is none."""
    with path.open("rb") as file:
        data = file.read(size)
    text = data[: data.rfind(b"\n") + 1].decode(errors="replace")
    rows = list(csv.reader(io.StringIO(text, newline="")))
    return (rows[0], rows[1:]) if rows else ([], [])


def _text(columns: list[str], rows: Iterable[dict[str, Any]]) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    for row in rows:
        writer.writerow([row.get(name, "") for name in columns])
    return out.getvalue().encode()

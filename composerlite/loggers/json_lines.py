"""JSONLLogger: the record of a run, one line of JSON per event."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import torch

from composerlite._version import VERSION
from composerlite.core import Logger, State
from composerlite.errors import checked_arguments
from composerlite.loggers.run_file import RunFileLogger
from composerlite.loggers.values import to_json
from composerlite.types import CheckpointNews

_FORMAT = 1


@final
class JSONLLogger(RunFileLogger):
    """Writes the record of a run: a line of JSON for each logged value and each event, with the time of day.

    ``composerlite report`` makes a page of the record. Each line has ``at`` (UTC), ``kind``, ``batch`` and ``epoch``.

    ===================  ==============================================================================================
    ``start``            a launch begins to train; ``resume``: a launch resumes from a checkpoint, at ``batch``
    ``fit_start``        a call of ``fit`` begins; ``fit_end``: a call of ``fit`` ends
    ``metrics``          metrics logged at ``batch``
    ``evaluation``       the end of an evaluation: ``label``, ``seconds``
    ``checkpoint``       event of a checkpoint: ``what`` (begun, committed, uploaded, deleted, failed, upload failed),
                         ``name``, ``where``, ``size_bytes``, ``seconds``, ``error``
    ``hyperparameters``  settings as logged; so are ``table`` and ``traces``
    ``error``            the exception that ended training
    ``end``              the trainer was closed: ``how`` is ``finished``, ``interrupted``, ``error`` or ``closed``
    ===================  ==============================================================================================

    A resumed run appends. Lines of higher batches above a ``resume`` are lost work. A launch without ``end`` was
    killed. NaN and infinity are the texts ``"nan"``, ``"inf"`` and ``"-inf"``. Only global rank 0 writes.

    Lines are written within ``flush_seconds`` or at the end of the batch, whichever is later; and at once before a
    checkpoint and after an evaluation, an epoch, a resume and the end. A kill loses newer lines. If a kill cuts off the
    last line, the next launch begins a new line.

    A run that resumes on another machine downloads the uploaded file first. Lines that only the local file has are
    kept.

    Args:
        filename: path of the file; by default ``record.jsonl`` in the folder of the checkpoints, or in a folder named
            after the run. If checkpoints go to a bucket, ``record.jsonl`` is uploaded to the same place before each
            checkpoint, after each epoch and at the end. ``{run_name}`` and the variables of ranks are filled in.
        remote_file_name: name of the upload to the loggers that upload files, after each epoch and at the end.
        flush_seconds: seconds between two writes. 0 writes after every batch.
        log_traces: also write the algorithms that ran.
        overwrite: empty the file when a run starts from its beginning. A resumed run always appends.

    Raises:
        ConfigError: a variable is unknown, or the time is negative; at ``INIT`` the file cannot be written, or no
            logger uploads files.

    Example:
        .. code-block:: python

            Trainer(model=model, save_folder="runs/fox", loggers=JSONLLogger())
    """

    @checked_arguments
    def __init__(
        self,
        filename: str | Path | None = None,
        remote_file_name: str | None = None,
        flush_seconds: float = 1.0,
        log_traces: bool = False,
        overwrite: bool = False,
    ) -> None:
        super().__init__(filename, remote_file_name, name="record.jsonl", appends=True, flush_seconds=flush_seconds)
        self._with_traces = log_traces
        self._overwrite = overwrite
        self._launched_at = time.time()
        self._lines: list[str] = []
        self._eval_began = 0.0

    def after_load(self, state: State, logger: Logger) -> None:
        if not self.is_kept:
            return
        batch = int(state.timestamp.batch)
        if self._overwrite and batch == 0:
            self.path.write_bytes(b"")
        self._continue_file(state, logger, download=batch > 0 or (self._is_beside and not self._overwrite))
        early, self._lines = self._lines, []
        if (text := self.path.read_bytes()) and not text.endswith(b"\n"):  # a kill cut off the last line
            self._lines.append("\n")
        self._add(
            "resume" if batch else "start",
            {
                "format": _FORMAT,
                "run_name": state.run_name,
                "launched_at": _iso(self._launched_at),
                "from": state.load_path,
                "max_duration": None if state.max_duration is None else str(state.max_duration),
                "batches_per_epoch": None if state.dataloader_len is None else int(state.dataloader_len),
                "world_size": state.world_size,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "versions": {
                    "composerlite": VERSION,
                    "torch": str(torch.__version__),
                    "python": platform.python_version(),
                },
            },
        )
        self._lines += early
        self._is_ready = True
        self._flush()

    def fit_start(self, state: State, logger: Logger) -> None:
        self._add("fit_start", {"max_duration": None if state.max_duration is None else str(state.max_duration)})
        self._flush()

    def eval_start(self, state: State, logger: Logger) -> None:
        self._eval_began = time.time()

    def eval_end(self, state: State, logger: Logger) -> None:
        seconds = max(0.0, time.time() - self._eval_began)
        self._add("evaluation", {"label": state.dataloader_label, "seconds": round(seconds, 6)})
        self._flush()

    def fit_end(self, state: State, logger: Logger) -> None:
        self._add("fit_end", {})
        super().fit_end(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        if self._is_ready:
            error = sys.exception()  # set if the trainer is closed by ``with`` or ``finally``
            how = "finished" if state.max_duration is not None and state.training_is_over else "closed"
            if isinstance(error, SystemExit | KeyboardInterrupt):
                how = "interrupted"
            elif error is not None:
                how = "error"
                self._add("error", {"error": f"{type(error).__name__}: {error}"})
            self._add("end", {"how": how, "exit_code": error.code if isinstance(error, SystemExit) else None})
        super().close(state, logger)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if metrics:
            self._add("metrics", {"metrics": metrics}, step)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self._add("hyperparameters", {"hyperparameters": hyperparameters})

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        self._add("table", {"name": name, "columns": columns, "rows": rows}, step)

    def log_traces(self, traces: dict[str, Any]) -> None:
        if self._with_traces:
            self._add("traces", {"traces": traces})

    def log_checkpoint(self, news: CheckpointNews) -> None:
        facts = {
            "what": news.what,
            "name": news.name,
            "where": news.where,
            "size_bytes": news.size_bytes,
            "seconds": {name: round(value, 6) for name, value in news.seconds.items()} or None,
            "slowest_rank": news.slowest_rank,
            "ephemeral": news.ephemeral or None,
            "error": news.error,
        }
        known = {name: value for name, value in facts.items() if value is not None}
        self._add("checkpoint", {"batch": news.batch, **known}, at=news.at)
        self._flush()

    def _add(self, kind: str, facts: Mapping[str, Any], batch: int | None = None, at: float | None = None) -> None:
        """Add a line: an event of ``kind`` at ``batch`` (default: now) and the time ``at`` (default: now)."""
        if not self.is_kept:
            return
        now = (0, 0) if self._state is None else (int(self._state.timestamp.batch), int(self._state.timestamp.epoch))
        head = {
            "at": _iso(time.time() if at is None else at),
            "kind": kind,
            "batch": now[0] if batch is None else batch,
            "epoch": now[1],
        }
        self._lines.append(to_json({**head, **facts}, strict=True) + "\n")

    def _write_waiting(self) -> bool:
        if not self._lines:
            return False
        with self.path.open("ab", buffering=0) as file:
            file.write("".join(self._lines).encode())
        self._lines = []
        return True


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")

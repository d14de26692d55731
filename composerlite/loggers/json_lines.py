"""JSONLLogger: the record of a run, a line of JSON for everything that happens."""

from __future__ import annotations

import json
import math
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast, final

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
    """Keeps the record of a run: one line of JSON for all that is logged and all that happens, with the time of day.

    ``composerlite report`` makes a page of it. Each line has ``at`` (UTC), ``kind``, ``batch``, ``epoch``. Kinds are

    ===================  ==============================================================================================
    ``start``            a launch begins to train, or ``resume``: it resumes from a checkpoint, at ``batch``
    ``fit_start``        ``fit`` was called, and ``fit_end``: it is over
    ``metrics``          what was logged at ``batch``
    ``evaluation``       one has ended: ``label``, ``seconds``
    ``checkpoint``       news of one: ``what`` (begun, committed, uploaded, deleted, failed, upload failed),
                         ``name``, ``where``, ``size_bytes``, ``seconds``, ``error``
    ``hyperparameters``  and ``table``, ``traces``: as they were logged
    ``error``            what ended training
    ``end``              the trainer was closed: ``how`` is ``finished``, ``interrupted``, ``error`` or ``closed``
    ===================  ==============================================================================================

    A resumed run appends, so the record has all launches: lines of higher batches above a ``resume`` are of training
    that was lost and done again. A launch without ``end`` was killed. Numbers that JSON does not have are ``"nan"``,
    ``"inf"`` and ``"-inf"``. Only global rank 0 writes.

    A line is in the file, where SIGKILL does not touch it, ``flush_seconds`` after it was logged at most, or at the end
    of the batch if that comes later; and at once after an evaluation, an epoch, a resume, an end, and before a
    checkpoint: whatever was logged up to a checkpoint is there when the run resumes from it. A last line that a
    kill left incomplete stays, and the next launch begins a new one.

    Args:
        filename: the file; ``record.jsonl`` in the folder of the checkpoints by default, or in a folder named after the
            run. Where checkpoints go to a bucket, so does ``record.jsonl``, beside them: before each checkpoint, after
            each epoch and at the end. ``{run_name}`` and the variables of ranks are filled in.
        remote_file_name: hand the file to the loggers that keep files under this name, after each epoch and at the end.
            A run that is resumed on another machine fetches it first.
        flush_seconds: how long lines may wait. 0 writes after every batch.
        log_traces: also write which algorithms ran.
        overwrite: empty the file when a run starts from its beginning. A resumed run always appends.

    A run that is resumed on another machine fetches the file from the bucket first, and appends to it. What only this
    machine had of it is not lost.

    Raises:
        ConfigError: at construction an unknown variable or a negative time; at ``INIT`` a file that cannot be written,
            or a ``remote_file_name`` that no logger can take.
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
        super().__init__(
            filename, remote_file_name, name="record.jsonl", with_checkpoints=True, flush_seconds=flush_seconds
        )
        self._with_traces = log_traces
        self._overwrite = overwrite
        self._launched_at = time.time()
        self._lines: list[str] = []
        self._metrics: dict[str, Any] = {}
        self._metrics_of: tuple[int | None, int, float] = (0, 0, 0.0)  # batch, epoch, time
        self._eval_began = 0.0

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────
    def after_load(self, state: State, logger: Logger) -> None:
        if not self.is_kept:
            return
        self._finish_metrics()
        batch, path = int(state.timestamp.batch), self.path
        if self._overwrite and batch == 0:
            path.write_bytes(b"")
        if batch > 0 or (self._goes_along and not self._overwrite):
            self._fetch(state, logger)
        early, self._lines = self._lines, ["\n"] if _is_torn(path) else []
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
        self._send_with_checkpoints()

    def fit_start(self, state: State, logger: Logger) -> None:
        end = state.max_duration
        self._add("fit_start", {"max_duration": None if end is None else str(end)})
        self._flush()

    def batch_end(self, state: State, logger: Logger) -> None:
        self._finish_metrics()
        super().batch_end(state, logger)

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
            error = sys.exception()  # the trainer is closed while it passes: by `with`, or in a `finally`
            how = "finished" if state.max_duration is not None and state.training_is_over else "closed"
            if isinstance(error, SystemExit | KeyboardInterrupt):
                how = "interrupted"
            elif error is not None:
                how = "error"
                self._add("error", {"error": f"{type(error).__name__}: {error}"})
            self._add("end", {"how": how, "exit_code": error.code if isinstance(error, SystemExit) else None})
        super().close(state, logger)

    # ── what is logged ───────────────────────────────────────────────────────────────────────────────────────────
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Metrics of one batch become one line, unless a name comes twice.

        Args:
            metrics: values by name.
            step: batches trained.
        """
        if not metrics or not self.is_kept:
            return
        if self._metrics and (step != self._metrics_of[0] or not self._metrics.keys().isdisjoint(metrics)):
            self._finish_metrics()
        if not self._metrics:
            self._metrics_of = (step, self._now[1], time.time())
        self._metrics.update(metrics)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self._add("hyperparameters", {"hyperparameters": hyperparameters})

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        self._add("table", {"name": name, "columns": columns, "rows": rows}, batch=step)

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
        self._add("checkpoint", known, batch=news.batch, at=news.at)
        self._flush()

    # ── lines ────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def _now(self) -> tuple[int, int]:
        if self._state is None:
            return 0, 0
        return int(self._state.timestamp.batch), int(self._state.timestamp.epoch)

    def _finish_metrics(self) -> None:
        if self._metrics:
            (batch, epoch, at), metrics = self._metrics_of, self._metrics
            self._metrics = {}
            head = {"at": _iso(at), "kind": "metrics", "batch": batch, "epoch": epoch}
            self._lines.append(_strict_json({**head, "metrics": metrics}))

    def _add(self, kind: str, facts: Mapping[str, Any], *, batch: int | None = None, at: float | None = None) -> None:
        if not self.is_kept:
            return
        self._finish_metrics()
        now, epoch = self._now
        place = {"batch": now if batch is None and kind != "checkpoint" else batch, "epoch": epoch}
        head = {"at": _iso(time.time() if at is None else at), "kind": kind, **place}
        self._lines.append(_strict_json({**head, **facts}))

    def _write_waiting(self) -> bool:
        self._finish_metrics()
        if not self._lines:
            return False
        with self.path.open("ab", buffering=0) as file:
            file.write("".join(self._lines).encode())
        self._lines.clear()
        return True


def _strict_json(fields: Mapping[str, Any]) -> str:
    """``fields`` as a line of JSON, with texts for the numbers that JSON does not have."""
    text = to_json(fields)
    if "NaN" in text or "Infinity" in text:  # or a text that has these words: it stays as it is
        text = json.dumps(_finite(json.loads(text)), allow_nan=False)
    return text + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in cast("list[Any]", value)]
    return value


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _is_torn(path: Path) -> bool:
    """Return true if the file ends within a line."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"

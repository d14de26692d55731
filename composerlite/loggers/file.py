"""FileLogger: logged values as lines of a text file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO, final

from composerlite.core import Logger, State
from composerlite.errors import ConfigError, checked_arguments
from composerlite.loggers.run_file import RunFileLogger
from composerlite.loggers.values import to_json


@final
class FileLogger(RunFileLogger):
    """Writes a line for each logged value: ``[metric][batch=12] {"loss/train/total": 0.5}``.

    The text after the brackets is JSON. Each launch writes a line ``[start]``, or ``[resume]`` with the batch of the
    checkpoint: lines of higher batches above are lost work. Lines are written every ``flush_interval`` batches, after
    each evaluation and epoch, and when the trainer closes, also after an error. The file is open during a write only,
    so worker processes do not inherit an open file.

    Args:
        filename: path of the file, with ``{run_name}``, ``{rank}``, ``{local_rank}``, ``{world_size}``,
            ``{local_world_size}`` and ``{node_rank}``.
        remote_file_name: name of the upload to the loggers that upload files, after each epoch and at the end.
        log_traces: also write the algorithms that ran.
        flush_interval: batches between two writes.
        overwrite: empty the file when a run starts from its beginning. A resumed run always appends.
        capture_stdout: also write the output of the process, as ``[stdout]``, from ``INIT`` until the run is closed.
        capture_stderr: also write the standard error of the process, as ``[stderr]``.
        buffer_size: ignored; for scripts of Composer.

    Raises:
        ConfigError: a variable is unknown, or a number is invalid; at ``INIT`` the file cannot be written, or no logger
            uploads files.

    Example:
        .. code-block:: python

            Trainer(model=model, loggers=FileLogger("{run_name}/log.txt"))
    """

    @checked_arguments
    def __init__(
        self,
        filename: str = "{run_name}/logs-rank{rank}.txt",
        remote_file_name: str | None = None,
        log_traces: bool = False,
        flush_interval: int = 100,
        overwrite: bool = False,
        *,
        capture_stdout: bool = False,
        capture_stderr: bool = False,
        buffer_size: int = 1,
    ) -> None:
        if flush_interval < 1:
            raise ConfigError(f"FileLogger(flush_interval={flush_interval}): expected a number of batches, 1 or more.")
        super().__init__(filename, remote_file_name, on_every_rank=True)
        self._with_traces = log_traces
        self._flush_interval = flush_interval
        self._overwrite = overwrite
        self._unwritten: list[str] = []
        self._captured = [name for name, on in (("stdout", capture_stdout), ("stderr", capture_stderr)) if on]
        self._streams: dict[str, Any] = {}  # the captured ones

    def init(self, state: State, logger: Logger) -> None:
        super().init(state, logger)
        self._is_ready = True
        for name in self._captured:
            self._streams[name] = stream = getattr(sys, name)
            setattr(sys, name, _Captured(stream, lambda text, name=name: self._add(f"[{name}]", text)))

    def post_close(self) -> None:
        """Restore the standard streams and write the last lines."""
        for name, stream in self._streams.items():
            setattr(sys, name, stream)
        self._streams.clear()
        super().post_close()

    def after_load(self, state: State, logger: Logger) -> None:
        batch = int(state.timestamp.batch)
        if self._overwrite and batch == 0:
            self.path.write_text("")
        self._unwritten.insert(0, f"[{'resume' if batch else 'start'}][batch={batch}] {to_json(state.run_name)}\n")
        self._flush()

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if metrics:
            self._add("[metric]", metrics, step)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self._add("[hyperparameters]", hyperparameters)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        self._add("[table]", {"name": name, "columns": columns, "rows": rows}, step)

    def log_traces(self, traces: dict[str, Any]) -> None:
        if self._with_traces:
            self._add("[trace]", traces)

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) % self._flush_interval == 0:
            self._flush()

    def eval_end(self, state: State, logger: Logger) -> None:
        self._flush()

    def _add(self, prefix: str, value: Any, step: int | None = None) -> None:
        batch = "" if step is None else f"[batch={step}]"
        self._unwritten.append(f"{prefix}{batch} {to_json(value)}\n")

    def _write_waiting(self) -> bool:
        if not self._unwritten:
            return False
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(self._unwritten)
        self._unwritten.clear()
        return True


class _Captured:
    """A stream that passes each whole line to ``write_line``, and everything to ``stream``."""

    def __init__(self, stream: TextIO, write_line: Callable[[str], object]) -> None:
        self._stream, self._write_line, self._begun = stream, write_line, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._write_line(line)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

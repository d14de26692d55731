"""Log messages of a run: its start, its places for checkpoints and metrics, and its end.

The messages are records of :mod:`logging` at INFO. Without a logging configuration they go to standard error.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from composerlite import dist
from composerlite.core import LoggerDestination, State
from composerlite.loggers.values import shown

if TYPE_CHECKING:
    from composerlite.callbacks import CheckpointSaver

__all__ = ["RESULT", "log_loaded", "log_result", "log_start", "result", "show_messages"]

log = logging.getLogger(__name__)

RESULT = "composerlite.result"
"""Name of the logger for the summary at the end of a run."""


@final
class _StandardError(logging.Handler):
    """Writes records to the current ``sys.stderr``, above progress bars. Below WARNING only rank 0 writes."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.root.handlers or (record.levelno < logging.WARNING and dist.get_global_rank() != 0):
            return  # logging was configured later, or rank 0 writes the record
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - as in logging.StreamHandler
            self.handleError(record)


def show_messages() -> None:
    """Write composerlite's messages from INFO on to standard error, unless the program has configured logging."""
    logger = logging.getLogger("composerlite")
    if logging.root.handlers or logger.handlers:
        return
    logger.addHandler(_StandardError())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def log_loaded(state: State, *, resumed: bool, weights_only: bool) -> None:
    """Log the loaded checkpoint, and the batch at which the run continues."""
    if resumed:
        log.info("resumed run %r from %s: %s", state.run_name, state.load_path, _place(state))
    elif weights_only:
        log.info("loaded the weights of %s: the run starts at batch 0", state.load_path)
    elif int(state.timestamp.batch) == 0:
        log.info("loaded %s: the run starts at batch 0", state.load_path)
    else:
        log.info("loaded %s: the run continues at %s", state.load_path, _place(state))


def log_start(
    state: State, savers: Sequence[CheckpointSaver], loggers: Sequence[LoggerDestination], *, autoresume: bool
) -> None:
    """Log the first and last batch of a run, its device, and its places for checkpoints and metrics."""
    where = state.device if state.world_size == 1 else f"{state.device}, {state.world_size} ranks"
    batch = int(state.timestamp.batch)
    start = f"from batch {batch} " if batch else ""
    log.info("run %s: %suntil %s, on %s", state.run_name, start, state.max_duration, where)
    folders = [_folder_of(saver, state) for saver in savers]
    unused = "" if autoresume else "; started again, the run resumes from them with autoresume=True only"
    log.info("  checkpoints: %s", ", ".join(folders) + unused if folders else "none; with a save_folder there are some")
    kept = [f"{logger.place} ({type(logger).__name__})" for logger in loggers if logger.place]
    log.info("  metrics: %s", ", ".join(kept) or "not kept; a logger such as FileLogger keeps them")


def _folder_of(saver: CheckpointSaver, state: State) -> str:
    folder = saver.options.names.folder.replace("{run_name}", state.run_name)
    interval = getattr(saver.save_interval, "interval", None)
    return folder if interval is None else f"{folder} (each {interval})"


def log_result(state: State, savers: Sequence[CheckpointSaver], losses: Mapping[str, Any], *, trained: bool) -> None:
    """Log the summary of a run; arguments as for :func:`result`."""
    logging.getLogger(RESULT).info("%s", result(state, savers, losses, trained=trained))


def result(state: State, savers: Sequence[CheckpointSaver], losses: Mapping[str, Any], *, trained: bool) -> str:
    """Return a one-line summary of the run: its progress, last values and last checkpoint.

    Args:
        state: training state.
        savers: savers of the run; the first has the last checkpoint.
        losses: losses of the last batch, means over all ranks.
        trained: this call of ``fit`` has trained; false if the run had ended before.
    """
    if not trained:
        path = "" if state.load_path is None else f": checkpoint {state.load_path}"
        return f"run {state.run_name} had ended before at {_place(state)}{path}"
    measured = {
        "eval loss" if name == "loss" else f"metrics/eval/{name}": value
        for name, value in state.eval_metric_values.items()
    }
    parts = shown({**losses, **measured})
    parts += [f"last checkpoint {path}" for saver in savers[:1] for path in saver.saved_checkpoints[-1:]]
    return f"run {state.run_name} ended at {_place(state)}{': ' if parts else ''}{', '.join(parts)}"


def _place(state: State) -> str:
    return f"epoch {int(state.timestamp.epoch)}, batch {int(state.timestamp.batch)}"

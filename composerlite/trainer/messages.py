"""Messages of a run: what it begins with, where its checkpoints and metrics go, and how it ended.

They are records of :mod:`logging` at INFO. Where the program has not configured logging they are on standard error.
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

__all__ = ["RESULT", "began_with", "result", "show_messages", "tell_result", "tell_start"]

log = logging.getLogger(__name__)

RESULT = "composerlite.result"
"""Name of the logger of the line that says how a run ended."""


@final
class _StandardError(logging.Handler):
    """Writes records to ``sys.stderr`` as it is at the time, above progress bars; those below WARNING on rank 0."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.root.handlers or (record.levelno < logging.WARNING and dist.get_global_rank() != 0):
            return  # configured by now, or told by rank 0
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - as all handlers do
            self.handleError(record)


def show_messages() -> None:
    """Write composerlite's messages of INFO and above to standard error, unless logging is configured already."""
    logger = logging.getLogger("composerlite")
    if logging.root.handlers or logger.handlers:
        return
    logger.addHandler(_StandardError())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def began_with(state: State, *, resumed: bool, weights_only: bool) -> None:
    """Log which checkpoint was loaded, and the batch at which the run continues."""
    if resumed:
        log.info("resumed run %r from %s: %s", state.run_name, state.load_path, _place(state))
    elif weights_only:
        log.info("loaded the weights of %s: the run starts at batch 0", state.load_path)
    elif int(state.timestamp.batch) == 0:
        log.info("loaded %s, which is at batch 0: so is the run", state.load_path)
    else:
        log.info("loaded %s: the run continues at %s", state.load_path, _place(state))


def tell_start(
    state: State, savers: Sequence[CheckpointSaver], loggers: Sequence[LoggerDestination], *, autoresume: bool
) -> None:
    """Log the start of a run: its first and last batch, its device, its places for checkpoints and metrics."""
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


def tell_result(state: State, savers: Sequence[CheckpointSaver], losses: Mapping[str, Any], *, trained: bool) -> None:
    """Tell :func:`result`."""
    logging.getLogger(RESULT).info("%s", result(state, savers, losses, trained=trained))


def result(state: State, savers: Sequence[CheckpointSaver], losses: Mapping[str, Any], *, trained: bool) -> str:
    """Summarize the run on a line: how far it came, its last values and its last checkpoint.

    Args:
        state: of the run.
        savers: of which the first keeps the checkpoint.
        losses: of the last batch, on all ranks.
        trained: it was trained just now, and had not ended before.
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

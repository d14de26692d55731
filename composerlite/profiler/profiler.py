"""Profiler: record traces of the batches in a schedule."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from composerlite.core import Callback, Event, Logger, State
from composerlite.errors import ConfigError, checked_arguments
from composerlite.profiler.schedule import ProfilerAction
from composerlite.profiler.traces import TraceFiles

if TYPE_CHECKING:
    from composerlite.profiler.handlers import TraceHandler

log = logging.getLogger(__name__)


@final
class Profiler(Callback):
    """Records traces with ``torch.profiler``, for ``Trainer(profiler=…)``.

    A trace has the operations of torch, and the parts of the trainer by name: ``trainer/dataloader``,
    ``trainer/forward``, ``trainer/loss``, ``trainer/backward``, ``trainer/eval`` and others. At the end of each cycle
    of the schedule the trace is saved in ``torch_prof_folder`` and passed to the ``trace_handlers``. Skipped batches
    cost no time.

    Args:
        schedule: a function from the state to the action of the next batch, such as :func:`cyclic_schedule`.
        trace_handlers: receive the traces, such as :class:`JSONTraceHandler`.
        sys_prof_cpu: ignored; for scripts of Composer. :class:`SystemMetricsMonitor` logs the load of the machine.
        sys_prof_memory: ignored; for scripts of Composer.
        sys_prof_disk: ignored; for scripts of Composer.
        sys_prof_net: ignored; for scripts of Composer.
        sys_prof_stats_thread_interval_seconds: ignored; for scripts of Composer.
        torch_prof_folder: folder, with ``{run_name}``, ``{rank}`` and the other variables of ranks.
        torch_prof_filename: name of each file; may also contain ``{epoch}``, ``{batch}`` and other counts.
        torch_prof_remote_file_name: name of each upload; ``None``: no upload.
        torch_prof_memory_filename: must be ``None``: use :class:`MemorySnapshot`.
        torch_prof_overwrite: accept files in the folder.
        torch_prof_use_gzip: compress the traces.
        torch_prof_record_shapes: record the shapes of inputs, as in ``torch.profiler.profile``.
        torch_prof_profile_memory: record allocations.
        torch_prof_with_stack: record the lines of code.
        torch_prof_with_flops: record estimates of floating-point operations.
        torch_prof_num_traces_to_keep: number of newest traces to keep; -1: all.

    Attributes:
        trace_handlers: the handlers.
        resumption_batch_idx: batch of the epoch at which the run resumed.

    Raises:
        ConfigError: an argument is invalid; at ``AFTER_LOAD`` a new run finds files in the folder.

    Example:
        .. code-block:: python

            Trainer(model=model, profiler=Profiler(cyclic_schedule(skip_first=10)))
    """

    @checked_arguments
    def __init__(
        self,
        schedule: Callable[[State], ProfilerAction],
        trace_handlers: TraceHandler | Sequence[TraceHandler] = (),
        sys_prof_cpu: bool = False,
        sys_prof_memory: bool = False,
        sys_prof_disk: bool = False,
        sys_prof_net: bool = False,
        sys_prof_stats_thread_interval_seconds: float = 0.5,
        torch_prof_folder: str = "{run_name}/torch_traces",
        torch_prof_filename: str = "rank{rank}.{batch}.pt.trace.json",
        torch_prof_remote_file_name: str | None = "{run_name}/torch_traces/rank{rank}.{batch}.pt.trace.json",
        torch_prof_memory_filename: str | None = None,
        torch_prof_overwrite: bool = False,
        torch_prof_use_gzip: bool = False,
        torch_prof_record_shapes: bool = False,
        torch_prof_profile_memory: bool = False,
        torch_prof_with_stack: bool = False,
        torch_prof_with_flops: bool = False,
        torch_prof_num_traces_to_keep: int = -1,
    ) -> None:
        if torch_prof_memory_filename is not None:
            raise ConfigError(
                f"Profiler(torch_prof_memory_filename={torch_prof_memory_filename!r}): torch removed this "
                "export. Leave it out, and use the callback MemorySnapshot."
            )
        if sys_prof_cpu or sys_prof_memory or sys_prof_disk or sys_prof_net:
            log.warning("Profiler(sys_prof_…=True) records nothing: use the callback SystemMetricsMonitor")
        ending = ".gz" if torch_prof_use_gzip and not torch_prof_filename.endswith(".gz") else ""
        self._files = TraceFiles(
            "Profiler",
            torch_prof_folder,
            torch_prof_filename + ending,
            None if torch_prof_remote_file_name is None else torch_prof_remote_file_name + ending,
            overwrite=torch_prof_overwrite,
            num_traces_to_keep=torch_prof_num_traces_to_keep,
        )
        self.schedule = schedule
        self.trace_handlers = tuple(trace_handlers) if isinstance(trace_handlers, Sequence) else (trace_handlers,)
        self.resumption_batch_idx = 0
        self._settings: dict[str, Any] = {
            "record_shapes": torch_prof_record_shapes,
            "profile_memory": torch_prof_profile_memory,
            "with_stack": torch_prof_with_stack,
            "with_flops": torch_prof_with_flops,
        }
        self._profile: Any = None
        self._is_recording = self._has_batch = False
        self._action = ProfilerAction.SKIP
        self._open: list[tuple[str, contextlib.AbstractContextManager[object]]] = []

    @property
    def saved_traces(self) -> Sequence[Path]:
        """Kept traces of this rank, oldest first."""
        return tuple(self._files.paths)

    def marker(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Return a context manager that adds a span ``name`` to the trace."""
        return torch.profiler.record_function(name)

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.AFTER_LOAD:
            self._files.check(state)
        elif event is Event.FIT_START:
            self.resumption_batch_idx = int(state.timestamp.batch_in_epoch)
        elif event is Event.EPOCH_END:
            self.resumption_batch_idx = 0
        elif event is Event.BEFORE_DATALOADER:
            self._begin_batch(state, logger)
        if self._is_recording:
            self._has_batch = self._has_batch or event is Event.BATCH_START
            self._mark(event)
        if (event is Event.BATCH_END and self._action is ProfilerAction.ACTIVE_AND_SAVE) or event is Event.FIT_END:
            self._save(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        self._stop()

    def _begin_batch(self, state: State, logger: Logger) -> None:
        self._action = action = self.schedule(state)
        if action is ProfilerAction.SKIP:
            self._save(state, logger)  # the last epoch ended in the middle of a cycle
            return
        if self._profile is None:
            self._profile = torch.profiler.profile(**self._settings)
            self._profile.prepare_trace()
        if action is not ProfilerAction.WARMUP and not self._is_recording:
            self._profile.start_trace()
            self._is_recording = True

    def _mark(self, event: Event) -> None:
        """Begin or end the span of a part of the trainer."""
        name = event.canonical_name
        if event.is_before_event:
            context = self.marker(f"trainer/{name}")
            context.__enter__()
            self._open.append((name, context))
        elif event.is_after_event and any(name == opened for opened, _ in self._open):
            while self._open:
                opened, context = self._open.pop()
                context.__exit__(None, None, None)
                if opened == name:
                    break

    def _stop(self) -> bool:
        """Stop recording. Return true if the trace has at least one batch."""
        while self._open:
            self._open.pop()[1].__exit__(None, None, None)
        was_recording, self._is_recording = self._is_recording, False
        if was_recording:
            self._profile.stop_trace()
        has_batch, self._has_batch = self._has_batch, False
        return was_recording and has_batch

    def _save(self, state: State, logger: Logger) -> None:
        if self._profile is None:
            return
        if self._stop():
            path = self._files.path(state)
            self._profile.export_chrome_trace(str(path))
            for handler in self.trace_handlers:
                handler.process_chrome_json_trace_file(path, state, logger)
            self._files.written(path, state, logger)
            log.info("saved the trace of the last batches to %s", path)
        self._profile = None

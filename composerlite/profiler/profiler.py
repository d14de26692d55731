"""Profiler: records what the batches of a schedule do."""

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

    A trace has what torch does and, by name, the trainer's own parts: ``trainer/dataloader``, ``trainer/forward``,
    ``trainer/loss``, ``trainer/backward``, ``trainer/eval`` and so on. It is saved in ``torch_prof_folder`` at the end
    of each cycle of the schedule, and given to the ``trace_handlers``. Nothing is recorded, and nothing costs time,
    in batches that the schedule leaves out.

    Args:
        schedule: a function of the state that says what to do in the next batch, as :func:`cyclic_schedule` makes them.
        trace_handlers: get the traces as well, as :class:`JSONTraceHandler`.
        sys_prof_cpu, sys_prof_memory, sys_prof_disk, sys_prof_net: accepted for Composer's scripts. What the machine
            does is logged by :class:`SystemMetricsMonitor`.
        sys_prof_stats_thread_interval_seconds: the same.
        torch_prof_folder: template with ``{run_name}``, ``{rank}`` and the like.
        torch_prof_filename: template that may also have ``{epoch}``, ``{batch}`` and the like.
        torch_prof_remote_file_name: template of the name under which loggers keep each trace; ``None``: they do not.
        torch_prof_memory_filename: ``None``: torch has given up its picture of memory. :class:`MemorySnapshot` makes
            one.
        torch_prof_overwrite: files may be in the folder already.
        torch_prof_use_gzip: compress the traces.
        torch_prof_record_shapes, torch_prof_profile_memory, torch_prof_with_stack, torch_prof_with_flops: what is
            recorded besides, as ``torch.profiler.profile`` has it. Each costs time while recording.
        torch_prof_num_traces_to_keep: newest traces in the folder; -1 for all.

    Attributes:
        trace_handlers: as given.
        resumption_batch_idx: batch of the epoch that the run was resumed at.

    Raises:
        ConfigError: what is given cannot be used; at ``AFTER_LOAD`` a run that begins finds files in the folder.
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
        """Traces of this rank that are kept in the folder, oldest first."""
        return tuple(self._files.paths)

    def marker(self, name: str) -> contextlib.AbstractContextManager[object]:
        """A context whose time is in the trace under ``name``."""
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
            self._save(state, logger)  # the epoch has ended in the middle of a cycle
            return
        if self._profile is None:
            self._profile = torch.profiler.profile(**self._settings)
            self._profile.prepare_trace()
        if action is not ProfilerAction.WARMUP and not self._is_recording:
            self._profile.start_trace()
            self._is_recording = True

    def _mark(self, event: Event) -> None:
        """Open or close the range of a part of the trainer."""
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
        """Stop recording; whether there is a trace, of a batch at least: data may have ended where one was to begin."""
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

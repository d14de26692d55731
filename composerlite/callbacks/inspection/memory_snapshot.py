"""MemorySnapshot and OOMObserver: what is in the memory of a GPU, and who has put it there."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import final

from composerlite._torch_compat import (
    memory_page,
    memory_snapshot,
    observe_out_of_memory,
    record_memory_history,
)
from composerlite.checkpoint.record.naming import check_variables, format_name_with_dist, format_name_with_dist_and_time
from composerlite.core import Callback, Logger, State, Time, TimeInput, TimeUnit, ensure_time
from composerlite.errors import ConfigError, checked_arguments

log = logging.getLogger(__name__)


class _MemoryFiles:
    """Files of snapshots of the memory of this rank's GPU.

    Args:
        owner: class that they are of, for messages.
        folder, filename: templates. remote_file_name: template of the folder in which loggers keep them; ``None``: they
            do not.
        overwrite: files may be there already.
        max_entries: allocations that are remembered.
    """

    def __init__(
        self, owner: str, folder: str, filename: str, remote_file_name: str | None, *, overwrite: bool, max_entries: int
    ) -> None:
        if max_entries < 1:
            raise ConfigError(f"{owner}(max_entries={max_entries}): expected a number of allocations, 1 or more.")
        self.owner = owner
        self._folder = check_variables(folder, argument=f"{owner}(folder)", allow_time=False)
        self._filename = check_variables(filename, argument=f"{owner}(filename)")
        if remote_file_name is not None:
            check_variables(remote_file_name, argument=f"{owner}(remote_file_name)")
        self._remote = remote_file_name
        self._overwrite = overwrite
        self._max_entries = max_entries

    def can_record(self, state: State) -> bool:
        """Return true if there is a GPU to look into; a warning says so where there is none."""
        if state.device.type == "cuda":
            return True
        log.warning("%s looks into the memory of CUDA GPUs, and the model is on the %s", self.owner, state.device)
        return False

    def record(self) -> None:
        """Begin to remember allocations."""
        record_memory_history(self._max_entries)

    def stop(self) -> None:
        """Forget them."""
        record_memory_history(None)

    def save(self, state: State, logger: Logger, views: dict[str, str]) -> list[Path]:
        """Write the snapshot of now, and pages with a view of it each: the function of torch by the end of the name.

        Raises:
            FileExistsError: one is there already, and ``overwrite`` is not given.
        """
        name = format_name_with_dist_and_time(self._filename, state.run_name, state.timestamp)
        base = Path(format_name_with_dist(self._folder, state.run_name)) / name
        base.parent.mkdir(parents=True, exist_ok=True)
        pickled = Path(f"{base}.pickle")
        if pickled.exists() and not self._overwrite:
            raise FileExistsError(f"{self.owner}: {str(pickled)!r} exists: pass overwrite=True, or another folder.")
        snapshot = memory_snapshot()
        pickled.write_bytes(pickle.dumps(snapshot))
        paths = [pickled]
        for ending, view in views.items():
            paths.append(Path(f"{base}{ending}"))
            paths[-1].write_text(memory_page(snapshot, view), encoding="utf-8")
        if self._remote is not None and logger.has_file_upload_destination():
            remote = format_name_with_dist_and_time(self._remote, state.run_name, state.timestamp).strip("/")
            for path in paths:
                logger.upload_file(f"{remote}/{path.name}", path, overwrite=self._overwrite)
        log.info("%s: saved the memory snapshot of the GPU to %s.*", self.owner, base)
        return paths


@final
class MemorySnapshot(Callback):
    """Records the allocations of some batches on a CUDA GPU, once (`torch's memory snapshots
    <https://docs.pytorch.org/docs/stable/torch_cuda_memory.html>`_).

    ``<filename>.pickle`` is for https://pytorch.org/memory_viz, ``<filename>.html`` is that view as a page.

    Args:
        skip_batches: before it begins.
        interval: how long it records, as ``'3ba'``; a number counts batches.
        max_entries: allocations that are remembered.
        folder: template with ``{run_name}``, ``{rank}`` and the like.
        filename: template that may also have ``{epoch}``, ``{batch}`` and the like.
        remote_file_name: template of the folder in which loggers keep them; ``None``: they do not.
        overwrite: files may be there already.

    Raises:
        ConfigError: what is given cannot be used.
    """

    @checked_arguments
    def __init__(
        self,
        skip_batches: int = 1,
        interval: TimeInput = "3ba",
        max_entries: int = 100000,
        folder: str = "{run_name}/torch_traces",
        filename: str = "rank{rank}.{batch}.memory_snapshot",
        remote_file_name: str | None = "{run_name}/torch_memory_traces",
        overwrite: bool = False,
    ) -> None:
        if skip_batches < 0:
            raise ConfigError(f"MemorySnapshot(skip_batches={skip_batches}): expected a number of batches, 0 or more.")
        self._interval = ensure_time(interval, TimeUnit.BATCH)
        if self._interval.value <= 0:
            raise ConfigError(f"MemorySnapshot(interval={str(interval)!r}): expected a time, such as '3ba'.")
        self._skip = skip_batches
        self._files = _MemoryFiles(
            "MemorySnapshot", folder, filename, remote_file_name, overwrite=overwrite, max_entries=max_entries
        )
        self._is_on = False
        self._began: Time | None = None

    def init(self, state: State, logger: Logger) -> None:
        self._is_on = self._files.can_record(state)

    def batch_start(self, state: State, logger: Logger) -> None:
        if not self._is_on or self._began is not None:
            return
        if self._skip > 0:
            self._skip -= 1
            return
        self._began = state.timestamp.get(self._interval.unit)
        self._files.record()

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._began is not None and state.timestamp.get(self._interval.unit) >= self._began + self._interval:
            self._files.save(state, logger, {".html": "trace_plot"})
            self._stop()

    def close(self, state: State, logger: Logger) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._began is not None:
            self._files.stop()
            self._began, self._is_on = None, False


@final
class OOMObserver(Callback):
    """Writes down what is in the memory of a CUDA GPU when it does not suffice, before anything is freed.

    ``<filename>.pickle`` is for https://pytorch.org/memory_viz, ``<filename>_trace_plot.html`` and
    ``<filename>_segment_plot.html`` are views of it. A failure to write them is logged: what is raised is the
    error of the memory.

    Args:
        max_entries: allocations that are remembered.
        folder: template with ``{run_name}``, ``{rank}`` and the like.
        filename: template that may also have ``{epoch}``, ``{batch}`` and the like.
        remote_file_name: template of the folder in which loggers keep them; ``None``: they do not.
        overwrite: files may be there already.

    Raises:
        ConfigError: what is given cannot be used.
    """

    @checked_arguments
    def __init__(
        self,
        max_entries: int = 100000,
        folder: str = "{run_name}/torch_traces",
        filename: str = "rank{rank}_oom",
        remote_file_name: str | None = "{run_name}/oom_traces",
        overwrite: bool = False,
    ) -> None:
        self._files = _MemoryFiles(
            "OOMObserver", folder, filename, remote_file_name, overwrite=overwrite, max_entries=max_entries
        )
        self._is_on = False

    def init(self, state: State, logger: Logger) -> None:
        self._is_on = self._files.can_record(state)
        if not self._is_on:
            return

        def observe(device: int, allocated: int, device_allocated: int, device_free: int) -> None:
            if not self._is_on:
                return
            try:
                views = {"_trace_plot.html": "trace_plot", "_segment_plot.html": "segment_plot"}
                self._files.save(state, logger, views)
            except Exception:
                log.exception("OOMObserver: could not write the memory snapshot")

        self._files.record()
        observe_out_of_memory(observe)

    def close(self, state: State, logger: Logger) -> None:
        if self._is_on:
            self._is_on = False  # torch cannot take an observer away
            self._files.stop()

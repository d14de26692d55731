"""MemorySnapshot and OOMObserver: files with the allocations on a GPU."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import final

from composerlite._torch_compat import memory_snapshot, observe_out_of_memory, record_memory_history
from composerlite.checkpoint.record.naming import check_variables, format_name_with_dist, format_name_with_dist_and_time
from composerlite.core import Callback, Logger, State, Time, TimeInput, TimeUnit, ensure_time
from composerlite.errors import ConfigError, checked_arguments

log = logging.getLogger(__name__)


class _MemoryRecorder(Callback):
    """Base of callbacks that write snapshots of GPU memory. See the subclasses for the arguments."""

    def __init__(
        self, max_entries: int, folder: str, filename: str, remote_file_name: str | None, *, overwrite: bool
    ) -> None:
        owner = type(self).__name__
        if max_entries < 1:
            raise ConfigError(f"{owner}(max_entries={max_entries}): expected a number of allocations, 1 or more.")
        self._max_entries = max_entries
        self._folder = check_variables(folder, argument=f"{owner}(folder)", allow_time=False)
        self._filename = check_variables(filename, argument=f"{owner}(filename)")
        if remote_file_name is not None:
            check_variables(remote_file_name, argument=f"{owner}(remote_file_name)")
        self._remote = remote_file_name
        self._overwrite = overwrite
        self._is_on = False

    def init(self, state: State, logger: Logger) -> None:
        self._is_on = state.device.type == "cuda"
        if not self._is_on:
            log.warning("%s records CUDA GPUs only, and the model is on the %s", type(self).__name__, state.device)

    def _save(self, state: State, logger: Logger) -> None:
        name = format_name_with_dist_and_time(self._filename, state.run_name, state.timestamp)
        path = Path(format_name_with_dist(self._folder, state.run_name)) / f"{name}.pickle"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not self._overwrite:
            raise FileExistsError(
                f"{type(self).__name__}: {str(path)!r} exists: pass overwrite=True, or another folder."
            )
        path.write_bytes(pickle.dumps(memory_snapshot()))
        if self._remote is not None and logger.has_file_upload_destination():
            remote = format_name_with_dist_and_time(self._remote, state.run_name, state.timestamp).strip("/")
            logger.upload_file(f"{remote}/{path.name}", path, overwrite=self._overwrite)
        log.info("%s: saved the memory snapshot of the GPU to %s", type(self).__name__, path)


@final
class MemorySnapshot(_MemoryRecorder):
    """Records the allocations of some batches on a CUDA GPU, once (`torch's memory snapshots
    <https://docs.pytorch.org/docs/stable/torch_cuda_memory.html>`_).

    The page https://pytorch.org/memory_viz shows the file ``<filename>.pickle``.

    Args:
        skip_batches: batches before the recording.
        interval: duration of the recording, as ``'3ba'``; a number counts batches.
        max_entries: number of allocations to remember.
        folder: folder of the file, with ``{run_name}``, ``{rank}`` and the other variables of ranks.
        filename: name of the file without ``.pickle``; may also contain ``{epoch}``, ``{batch}`` and other counts.
        remote_file_name: folder of the upload; ``None``: no upload.
        overwrite: replace a file of the same name.

    Raises:
        ConfigError: an argument is invalid.

    Example:
        .. code-block:: python

            Trainer(model=model, callbacks=MemorySnapshot(skip_batches=10))
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
        super().__init__(max_entries, folder, filename, remote_file_name, overwrite=overwrite)
        self._skip = skip_batches
        self._began: Time | None = None

    def batch_start(self, state: State, logger: Logger) -> None:
        if not self._is_on or self._began is not None:
            return
        if self._skip > 0:
            self._skip -= 1
            return
        self._began = state.timestamp.get(self._interval.unit)
        record_memory_history(self._max_entries)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._began is not None and state.timestamp.get(self._interval.unit) >= self._began + self._interval:
            self._save(state, logger)
            self.close(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        if self._began is not None:
            record_memory_history(None)
            self._began, self._is_on = None, False


@final
class OOMObserver(_MemoryRecorder):
    """Writes a snapshot of the memory of a CUDA GPU at an out-of-memory error, before anything is freed.

    The page https://pytorch.org/memory_viz shows the file ``<filename>.pickle``. If the file cannot be written, this
    error is logged, and the out-of-memory error is raised.

    Args:
        max_entries: number of allocations to remember.
        folder: folder of the file, with ``{run_name}``, ``{rank}`` and the other variables of ranks.
        filename: name of the file without ``.pickle``; may also contain ``{epoch}``, ``{batch}`` and other counts.
        remote_file_name: folder of the upload; ``None``: no upload.
        overwrite: replace a file of the same name.

    Raises:
        ConfigError: an argument is invalid.

    Example:
        .. code-block:: python

            Trainer(model=model, callbacks=OOMObserver())
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
        super().__init__(max_entries, folder, filename, remote_file_name, overwrite=overwrite)

    def init(self, state: State, logger: Logger) -> None:
        super().init(state, logger)
        if not self._is_on:
            return

        def observe(device: int, allocated: int, device_allocated: int, device_free: int) -> None:
            if self._is_on:
                try:
                    self._save(state, logger)
                except Exception:
                    log.exception("OOMObserver: could not write the memory snapshot")

        record_memory_history(self._max_entries)
        observe_out_of_memory(observe)

    def close(self, state: State, logger: Logger) -> None:
        if self._is_on:
            self._is_on = False  # torch cannot remove an observer
            record_memory_history(None)

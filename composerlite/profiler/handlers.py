"""TraceHandler and JSONTraceHandler: receive the recorded traces."""

from __future__ import annotations

import gzip
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from composerlite import dist
from composerlite.checkpoint.record.naming import check_variables, format_name_with_dist
from composerlite.core import Callback, Logger, State
from composerlite.errors import checked_arguments
from composerlite.profiler.traces import TraceFiles
from composerlite.storage import atomic_write


class TraceHandler(Callback, ABC):
    """Base of callbacks that receive the traces of a :class:`Profiler`."""

    @abstractmethod
    def process_chrome_json_trace_file(self, filepath: Path, state: State, logger: Logger) -> None:
        """Process the trace of a cycle on this rank, in the trace event format of Chrome. All ranks call this method.

        Args:
            filepath: path of the trace. The file may be deleted after the call.
            state: state of the run.
            logger: logger of the run.
        """


@final
class JSONTraceHandler(TraceHandler):
    """Writes traces as files for ``chrome://tracing`` and `Perfetto <https://ui.perfetto.dev>`_.

    Args:
        folder: folder, with ``{run_name}``, ``{rank}`` and the other variables of ranks.
        filename: name of each file; may also contain ``{epoch}``, ``{batch}`` and other counts.
        remote_file_name: name of each upload; ``None``: no upload.
        merged_trace_filename: name of a file with all traces of the ranks of a machine; ``None``: no such file.
            Training waits for the write.
        merged_trace_remote_file_name: name of the upload of the merged file.
        overwrite: accept files in the folder.
        num_traces_to_keep: number of newest files to keep; -1: all.

    Attributes:
        saved_traces: kept files of this rank.

    Raises:
        ConfigError: a variable does not exist; at ``AFTER_LOAD`` a new run finds files in the folder.

    Example:
        .. code-block:: python

            Profiler(cyclic_schedule(), JSONTraceHandler(folder="traces"))
    """

    @checked_arguments
    def __init__(
        self,
        folder: str = "{run_name}/traces",
        filename: str = "ep{epoch}-ba{batch}-rank{rank}.json",
        remote_file_name: str | None = "{run_name}/traces/ep{epoch}-ba{batch}-rank{rank}.json",
        merged_trace_filename: str | None = "merged_trace.json",
        merged_trace_remote_file_name: str | None = "{run_name}/traces/merged_trace.json",
        *,
        overwrite: bool = False,
        num_traces_to_keep: int = -1,
    ) -> None:
        self._files = TraceFiles(
            "JSONTraceHandler",
            folder,
            filename,
            remote_file_name,
            overwrite=overwrite,
            num_traces_to_keep=num_traces_to_keep,
        )
        for name in (merged_trace_filename, merged_trace_remote_file_name):
            if name is not None:
                check_variables(name, argument="JSONTraceHandler(merged_trace_…)", allow_time=False)
        self._merged, self._merged_remote = merged_trace_filename, merged_trace_remote_file_name

    @property
    def saved_traces(self) -> Sequence[Path]:
        """Kept files of this rank, oldest first."""
        return tuple(self._files.paths)

    def after_load(self, state: State, logger: Logger) -> None:
        self._files.check(state)

    def process_chrome_json_trace_file(self, filepath: Path, state: State, logger: Logger) -> None:
        path = self._files.path(state)
        if filepath.suffix == ".gz":
            with gzip.open(filepath) as packed, path.open("wb") as file:
                shutil.copyfileobj(packed, file)
        else:
            shutil.copyfile(filepath, path)
        if self._merged is not None:
            self._merge(path, self._merged, state, logger)
        self._files.written(path, state, logger)

    def _merge(self, path: Path, name: str, state: State, logger: Logger) -> None:
        """Add the traces of this cycle to the merged file of this machine. Collective."""
        with dist.get_group().all_or_none("merging traces"):
            paths = dist.get_group().gather(str(path))
            if dist.get_local_rank() == 0:
                first = dist.get_global_rank()
                own = [Path(one) for one in paths[first : first + dist.get_local_world_size()]]
                merged = self._files.folder(state) / format_name_with_dist(name, state.run_name)
                before = [merged] if merged.exists() else []
                events: list[Any] = []
                for file in (*before, *own):
                    events += json.loads(file.read_bytes())["traceEvents"]
                with atomic_write(merged) as output:
                    output.write(json.dumps({"traceEvents": events}).encode())
                if self._merged_remote is not None and logger.has_file_upload_destination():
                    remote = format_name_with_dist(self._merged_remote, state.run_name)
                    logger.upload_file(remote.lstrip("/"), merged, overwrite=True)

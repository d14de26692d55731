"""Handlers of recorded traces."""

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
    """Takes the traces that a :class:`Profiler` has recorded. A callback, too: it is called at events."""

    @abstractmethod
    def process_chrome_json_trace_file(self, filepath: Path, state: State, logger: Logger) -> None:
        """Take the trace of a cycle on this rank: a file in the trace event format of Chrome. Every rank calls it.

        It may be gone when this returns.

        Args:
            filepath: path of the trace.
            state: of the run.
            logger: of the run.
        """


@final
class JSONTraceHandler(TraceHandler):
    """Keeps traces as files that ``chrome://tracing`` and `Perfetto <https://ui.perfetto.dev>`_ open.

    Args:
        folder: template with ``{run_name}``, ``{rank}`` and the like.
        filename: template that may also have ``{epoch}``, ``{batch}`` and the like.
        remote_file_name: template of the name under which loggers keep each file; ``None``: they do not.
        merged_trace_filename: template of one file with the traces of all cycles of the ranks of a machine; ``None``
            for none. Training waits while it is written.
        merged_trace_remote_file_name: the name under which loggers keep that.
        overwrite: files may be in the folder already. num_traces_to_keep: of the newest cycles; -1 for all.

    Attributes:
        saved_traces: files of this rank that are kept.

    Raises:
        ConfigError: a template has a variable that does not exist; at ``AFTER_LOAD`` a run that begins finds files in
            the folder.
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
        """Files of this rank that are kept, oldest first."""
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
        """Add the traces of this cycle to the one file of this machine. Every rank calls it."""
        with dist.get_group().all_or_none("merging traces"):
            paths = dist.get_group().gather(str(path))
            if dist.get_local_rank() == 0:
                first = dist.get_global_rank()
                own = [Path(one) for one in paths[first : first + dist.get_local_world_size()]]
                merged = self._files.folder(state) / format_name_with_dist(name, state.run_name)
                before = [merged] if merged.exists() else []
                events = [event for one in (*before, *own) for event in _events(one)]
                with atomic_write(merged) as file:
                    file.write(json.dumps({"traceEvents": events}).encode())
                if self._merged_remote is not None and logger.has_file_upload_destination():
                    remote = format_name_with_dist(self._merged_remote, state.run_name)
                    logger.upload_file(remote.lstrip("/"), merged, overwrite=True)


def _events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_bytes())["traceEvents"]

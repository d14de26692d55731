"""What a rank does in the tests of the profiler on several ranks."""

from __future__ import annotations

import os
from pathlib import Path

from profiled_run import names_in, train

from composerlite.profiler import JSONTraceHandler, Profiler, cyclic_schedule

__all__ = ["profile"]


def profile(folder: str) -> tuple[list[str], list[str]]:
    """The files in the folder, and names in the merged trace."""
    os.chdir(folder)
    train(
        Profiler(
            cyclic_schedule(active=2),
            JSONTraceHandler(folder="traces"),
            torch_prof_folder="torch_rank{rank}",
        )
    )
    traces = Path("traces")
    return sorted(path.name for path in traces.iterdir()), names_in(traces / "merged_trace.json")

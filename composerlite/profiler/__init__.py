"""Profiler: traces of ``torch.profiler`` of the batches in a schedule. Modules load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composerlite.on_demand import lazy_names

if TYPE_CHECKING:
    from composerlite.profiler.handlers import JSONTraceHandler, TraceHandler
    from composerlite.profiler.profiler import Profiler
    from composerlite.profiler.schedule import ProfilerAction, cyclic_schedule

__all__ = ["JSONTraceHandler", "Profiler", "ProfilerAction", "TraceHandler", "cyclic_schedule"]

__getattr__, __dir__ = lazy_names(__name__)

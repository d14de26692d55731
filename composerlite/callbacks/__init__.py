"""Callbacks: monitors, and what stops, saves and loads.

Each is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from composerlite.on_demand import lazy_names

if TYPE_CHECKING:
    from composerlite.callbacks.checkpoint_saver import CheckpointSaver
    from composerlite.callbacks.early_stopper import EarlyStopper
    from composerlite.callbacks.goodput_monitor import GoodputMonitor
    from composerlite.callbacks.load_checkpoint import LoadCheckpoint
    from composerlite.callbacks.monitors import LRMonitor, MemoryMonitor, NaNMonitor, OptimizerMonitor
    from composerlite.callbacks.preemption import PreemptionHandler
    from composerlite.callbacks.speed_monitor import RuntimeEstimator, SpeedMonitor

__all__ = [
    "CheckpointSaver",
    "EarlyStopper",
    "GoodputMonitor",
    "LRMonitor",
    "LoadCheckpoint",
    "MemoryMonitor",
    "NaNMonitor",
    "OptimizerMonitor",
    "PreemptionHandler",
    "RuntimeEstimator",
    "SpeedMonitor",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".checkpoint_saver": ["CheckpointSaver"],
        ".early_stopper": ["EarlyStopper"],
        ".goodput_monitor": ["GoodputMonitor"],
        ".load_checkpoint": ["LoadCheckpoint"],
        ".monitors": ["LRMonitor", "MemoryMonitor", "NaNMonitor", "OptimizerMonitor"],
        ".preemption": ["PreemptionHandler"],
        ".speed_monitor": ["RuntimeEstimator", "SpeedMonitor"],
    },
)

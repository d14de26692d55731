"""What takes part in training besides the algorithms: monitors, and what stops, saves and loads.

Each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

_HOMES = {
    "CheckpointSaver": "checkpoint_saver",
    "EarlyStopper": "early_stopper",
    "GoodputMonitor": "goodput_monitor",
    "LRMonitor": "monitors",
    "LoadCheckpoint": "load_checkpoint",
    "MemoryMonitor": "monitors",
    "NaNMonitor": "monitors",
    "OptimizerMonitor": "monitors",
    "PreemptionHandler": "preemption",
    "RuntimeEstimator": "speed_monitor",
    "SpeedMonitor": "speed_monitor",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'composerlite.callbacks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"composerlite.callbacks.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__

"""Callbacks: monitors, and what stops, saves and loads.

Each is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from composerlite.on_demand import lazy_names

if TYPE_CHECKING:
    from composerlite.callbacks.checkpoint_saver import CheckpointSaver
    from composerlite.callbacks.early_stopper import EarlyStopper
    from composerlite.callbacks.export_for_inference import ExportForInferenceCallback
    from composerlite.callbacks.generate import Generate
    from composerlite.callbacks.goodput_monitor import GoodputMonitor
    from composerlite.callbacks.inspection.activation_monitor import ActivationMonitor
    from composerlite.callbacks.inspection.memory_snapshot import MemorySnapshot, OOMObserver
    from composerlite.callbacks.inspection.system_metrics_monitor import SystemMetricsMonitor
    from composerlite.callbacks.load_checkpoint import LoadCheckpoint
    from composerlite.callbacks.monitors import LRMonitor, MemoryMonitor, NaNMonitor, OptimizerMonitor
    from composerlite.callbacks.preemption import PreemptionHandler
    from composerlite.callbacks.speed_monitor import RuntimeEstimator, SpeedMonitor
    from composerlite.callbacks.threshold_stopper import ThresholdStopper

__all__ = [
    "ActivationMonitor",
    "CheckpointSaver",
    "EarlyStopper",
    "ExportForInferenceCallback",
    "Generate",
    "GoodputMonitor",
    "LRMonitor",
    "LoadCheckpoint",
    "MemoryMonitor",
    "MemorySnapshot",
    "NaNMonitor",
    "OOMObserver",
    "OptimizerMonitor",
    "PreemptionHandler",
    "RuntimeEstimator",
    "SpeedMonitor",
    "SystemMetricsMonitor",
    "ThresholdStopper",
]

__getattr__, __dir__ = lazy_names(__name__)

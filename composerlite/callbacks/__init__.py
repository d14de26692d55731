"""What takes part in training besides the algorithms: monitors, and what stops, saves and loads."""

from composerlite.callbacks.checkpoint_saver import CheckpointSaver
from composerlite.callbacks.early_stopper import EarlyStopper
from composerlite.callbacks.goodput_monitor import GoodputMonitor
from composerlite.callbacks.load_checkpoint import LoadCheckpoint
from composerlite.callbacks.lr_monitor import LRMonitor
from composerlite.callbacks.memory_monitor import MemoryMonitor
from composerlite.callbacks.nan_monitor import NaNMonitor
from composerlite.callbacks.optimizer_monitor import OptimizerMonitor
from composerlite.callbacks.runtime_estimator import RuntimeEstimator
from composerlite.callbacks.speed_monitor import SpeedMonitor

__all__ = [
    "CheckpointSaver",
    "EarlyStopper",
    "GoodputMonitor",
    "LRMonitor",
    "LoadCheckpoint",
    "MemoryMonitor",
    "NaNMonitor",
    "OptimizerMonitor",
    "RuntimeEstimator",
    "SpeedMonitor",
]

"""Where metrics and files go: the terminal, files, tables, memory, TensorBoard, W&B, MLflow, object stores.

Each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from composerlite.core import Logger, LoggerDestination

if TYPE_CHECKING:
    from composerlite.loggers.console import ConsoleLogger
    from composerlite.loggers.csv_file import CSVLogger
    from composerlite.loggers.file import FileLogger
    from composerlite.loggers.in_memory import InMemoryLogger
    from composerlite.loggers.json_lines import JSONLLogger
    from composerlite.loggers.progress_bar import ProgressBarLogger
    from composerlite.loggers.remote_uploader_downloader import RemoteUploaderDownloader
    from composerlite.loggers.services.mlflow import MLFlowLogger
    from composerlite.loggers.services.tensorboard import TensorboardLogger
    from composerlite.loggers.services.wandb import WandBLogger

__all__ = [
    "CSVLogger",
    "ConsoleLogger",
    "FileLogger",
    "InMemoryLogger",
    "JSONLLogger",
    "Logger",
    "LoggerDestination",
    "MLFlowLogger",
    "ProgressBarLogger",
    "RemoteUploaderDownloader",
    "TensorboardLogger",
    "WandBLogger",
]

_HOMES = {
    "CSVLogger": "csv_file",
    "ConsoleLogger": "console",
    "FileLogger": "file",
    "InMemoryLogger": "in_memory",
    "JSONLLogger": "json_lines",
    "MLFlowLogger": "services.mlflow",
    "ProgressBarLogger": "progress_bar",
    "RemoteUploaderDownloader": "remote_uploader_downloader",
    "TensorboardLogger": "services.tensorboard",
    "WandBLogger": "services.wandb",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'composerlite.loggers' has no attribute {name!r}")
    return getattr(importlib.import_module(f"composerlite.loggers.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__

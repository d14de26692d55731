"""Where metrics and files go: the terminal, files, memory, TensorBoard, object stores.

Each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from composerlite.core import Logger, LoggerDestination

if TYPE_CHECKING:
    from composerlite.loggers.console import ConsoleLogger
    from composerlite.loggers.file import FileLogger
    from composerlite.loggers.in_memory import InMemoryLogger
    from composerlite.loggers.progress_bar import ProgressBarLogger
    from composerlite.loggers.remote_uploader_downloader import RemoteUploaderDownloader
    from composerlite.loggers.tensorboard import TensorboardLogger

__all__ = [
    "ConsoleLogger",
    "FileLogger",
    "InMemoryLogger",
    "Logger",
    "LoggerDestination",
    "ProgressBarLogger",
    "RemoteUploaderDownloader",
    "TensorboardLogger",
]

_HOMES = {
    "ConsoleLogger": "console",
    "FileLogger": "file",
    "InMemoryLogger": "in_memory",
    "ProgressBarLogger": "progress_bar",
    "RemoteUploaderDownloader": "remote_uploader_downloader",
    "TensorboardLogger": "tensorboard",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'composerlite.loggers' has no attribute {name!r}")
    return getattr(importlib.import_module(f"composerlite.loggers.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__

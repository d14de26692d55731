"""Loggers: the terminal, files, tables, memory, services and object stores. Modules load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composerlite.core import Logger, LoggerDestination
from composerlite.on_demand import lazy_names

if TYPE_CHECKING:
    from composerlite.loggers.console import ConsoleLogger
    from composerlite.loggers.csv_file import CSVLogger
    from composerlite.loggers.file import FileLogger
    from composerlite.loggers.in_memory import InMemoryLogger
    from composerlite.loggers.json_lines import JSONLLogger
    from composerlite.loggers.progress_bar import ProgressBarLogger
    from composerlite.loggers.remote_uploader_downloader import RemoteUploaderDownloader
    from composerlite.loggers.services.mlflow import MLFlowLogger
    from composerlite.loggers.services.prometheus import PrometheusLogger
    from composerlite.loggers.services.slack import SlackLogger
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
    "PrometheusLogger",
    "RemoteUploaderDownloader",
    "SlackLogger",
    "TensorboardLogger",
    "WandBLogger",
]

__getattr__, __dir__ = lazy_names(__name__)

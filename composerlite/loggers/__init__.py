"""Where metrics and files go: the terminal, files, memory, TensorBoard, object stores."""

from composerlite.core import Logger, LoggerDestination
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

"""Threads that help: work is done without them where the system gives none."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar, final

from composerlite.errors import ConfigError

__all__ = ["Helpers", "number_of", "start_threads"]

log = logging.getLogger(__name__)
_warned = threading.Event()
_T = TypeVar("_T")


def start_threads(run: Callable[[], object], count: int, *, name: str, daemon: bool = True) -> list[threading.Thread]:
    """Threads that call ``run``: ``count`` of them, or as many as the system lets this process start.

    Who calls this does the work by itself, or has it done by those that there are. The first time that some are
    missing a warning says so.
    """
    threads: list[threading.Thread] = []
    for _ in range(count):
        thread = threading.Thread(target=run, name=name, daemon=daemon)
        try:
            thread.start()
        except RuntimeError as e:  # "can't start new thread": a limit of the user's or of a container
            if not _warned.is_set():
                _warned.set()
                log.warning(
                    "a thread (%s) could not be started: %s. Checkpoints are saved without it, and training waits "
                    "longer. Raise the limit of processes and threads (ulimit -u, pids.max) to have it.",
                    name,
                    e,
                )
            break
        threads.append(thread)
    return threads


@final
class Helpers:
    """Threads that do what is submitted; where there are none, whoever submits does it. A context manager.

    Args:
        count: how many.
        name: of the threads.
        first: called in each of them before anything else.
    """

    def __init__(self, count: int, *, name: str, first: Callable[[], object] = lambda: None) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._first = first
        self._threads = start_threads(self._run, count, name=name)

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Have ``work`` done; what comes of it."""
        future: Future[_T] = Future()

        def do() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except BaseException as e:  # noqa: BLE001 - it is the future's
                    future.set_exception(e)
                else:
                    future.set_result(result)

        if self._threads:
            self._queue.put(do)
        else:
            do()
        return future

    def close(self) -> None:
        """End the threads when all is done; twice is fine."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def __enter__(self) -> Helpers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        self._first()
        while (do := self._queue.get()) is not None:
            do()


def number_of(count: int | None, default: int, name: str = "thread_count") -> int:
    """``count``, of threads or processes, or the ``default``.

    Raises:
        ConfigError: it is less than 1; names ``name``.
    """
    if count is not None and count < 1:
        raise ConfigError(f"{name}={count}: want 1 or more, or None")
    return default if count is None else count

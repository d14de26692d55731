"""Run a function on several ranks: processes on this machine, connected by gloo."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, final

from composerlite.errors import ConfigError

# Ranks are forked from a process with these modules, to start fast. The modules start no threads and open no process
# group at import. The first optimizer imports torch._dynamo.
_processes = multiprocessing.get_context("forkserver")
_PRELOAD = [
    "composerlite.checkpoint.api.checkpointer",
    "composerlite.checkpoint.api.state_dict",
    "composerlite.testing.cluster",
    "composerlite.trainer",
    "composerlite.utils.dist",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torchmetrics",
]
_STACKS = signal.SIGQUIT  # tests install handlers of preemption for other signals
_STACKS_SECONDS = 2.0
_START_SECONDS = 60.0
_EXIT_SECONDS = 2.0
_GOODBYE_SECONDS = 1.0
_LEAVE_SECONDS = 5.0
_MOST_THREADS = 16
"""Limit for a process to be used again. torch keeps some process groups of a task, with threads that poll forever."""


@final
@dataclass(frozen=True)
class RankOutcome:
    """Outcome of the function on one rank.

    Attributes:
        rank: number of the rank.
        value: result of the function.
        error: exception of the function, with the traceback of the rank as a note; ``ChildProcessError`` if the process
            ended.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None


def quick_processes(*modules: str) -> ForkServerContext:
    """Return a :mod:`multiprocessing` context with fast starts: processes are forked from a process with all imports.

    Args:
        modules: more modules to import before the fork. No effect after the start of the first process.
    """
    _PRELOAD.extend(module for module in modules if module not in _PRELOAD)
    _processes.set_forkserver_preload(_PRELOAD)
    return _processes


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    dist_timeout: float | None = 30.0,
    fresh: bool = False,
) -> list[Any]:
    """Call ``function(*args)`` on several ranks of one node, and return the results in the order of the ranks.

    Each rank is a process with the environment of torchrun, and with the variables and the current directory of this
    process. Later calls use the processes again, so changes of modules stay.

    Args:
        function: a function of an importable module. Function, arguments and results are pickled.
        world_size: number of ranks.
        args: arguments of the function.
        timeout: seconds from the start of the processes until all ranks are killed.
        dist_timeout: timeout in seconds for ``initialize_dist``, called before the function; ``None``: not called.
        fresh: use new processes for this call only, for libraries with permanent changes.

    Returns:
        Results, one for each rank.

    Raises:
        ExceptionGroup: exceptions of the ranks, each with a note that names the rank.
        TimeoutError: the ranks did not finish in ``timeout``. The notes have the stacks of all ranks.

    Example::

        def add(value):
            tensor = torch.tensor(value)
            torch.distributed.all_reduce(tensor)
            return int(tensor)

        assert run_ranks(add, 2, 3) == [6, 6]
    """
    outcomes = run_ranks_to_the_end(
        function, world_size, *args, timeout=timeout, dist_timeout=dist_timeout, fresh=fresh
    )
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} of {world_size} ranks failed", errors)
    return [outcome.value for outcome in outcomes]


def run_ranks_to_the_end(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    dist_timeout: float | None = 30.0,
    fresh: bool = False,
) -> list[RankOutcome]:
    """Call :func:`run_ranks`, but return the outcome of each rank instead of raising its exception.

    Args:
        function: a function of an importable module.
        world_size: number of ranks.
        args: arguments of the function.
        timeout: seconds from the start of the processes until all ranks are killed.
        dist_timeout: timeout in seconds for ``initialize_dist``; ``None``: not called.
        fresh: use new processes for this call only.

    Returns:
        Outcomes, one for each rank.

    Raises:
        TimeoutError: the ranks did not finish in ``timeout``. The notes have the stacks of all ranks.
    """
    if world_size < 1:
        raise ConfigError(f"world_size={world_size}: expected 1 or more.")
    return _pool.run(pickle.dumps((function, args, dist_timeout)), world_size, timeout, fresh=fresh)


@final
class _Worker:
    """A process that runs tasks, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.connection, theirs = Pipe()
        self._is_ready = False
        with tempfile.NamedTemporaryFile(dir=folder, prefix="stacks-", delete=False) as file:
            self.stacks = Path(file.name)
        self.process = _processes.Process(target=_serve, args=(theirs, self.stacks))
        self.process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        if self._is_ready:
            return
        if not self.connection.poll(_START_SECONDS):
            self.stop()
            raise TimeoutError(f"a process did not start in {_START_SECONDS:g} s")
        try:
            self.connection.recv()
        except (EOFError, ConnectionError) as e:
            raise ChildProcessError(f"a process did not start, exit code {self.stop(_EXIT_SECONDS)}") from e
        self._is_ready = True

    def receive_outcome(self, rank: int) -> RankOutcome:
        """Receive the outcome of the task, or the death of the process."""
        try:
            pickled, trace = self.connection.recv()
        except (EOFError, ConnectionError):
            code = self.stop(_EXIT_SECONDS)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            return RankOutcome(rank, error=ChildProcessError(f"rank {rank} {how}"))
        result = pickle.loads(pickled)
        if not trace:
            return RankOutcome(rank, value=result)
        result.add_note(f"Raised on rank {rank}:\n{trace}")
        return RankOutcome(rank, error=result)

    def is_usable_again(self) -> bool:
        """Wait for the cleanup after a task. Stops the process and returns false if the cleanup failed."""
        if self.connection.closed:
            return False
        with suppress(EOFError, ConnectionError):  # the process ended
            if self.connection.poll(_LEAVE_SECONDS) and self.connection.recv():
                return True
        self.stop()
        return False

    def stop(self, seconds: float = 0.0) -> int:
        """Wait for the end of the process, then kill the process. Returns the exit code."""
        self.connection.close()
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.stacks.unlink(missing_ok=True)
        code = self.process.exitcode
        assert code is not None
        return code


@final
class _Pool:
    """Idle processes for the next call."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._runs = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._owner = 0

    def run(self, call: bytes, world_size: int, timeout: float, *, fresh: bool) -> list[RankOutcome]:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented

        if self._folder is None or self._owner != os.getpid():  # not usable after a fork
            quick_processes()
            self._owner, self._idle = os.getpid(), []
            self._folder = tempfile.TemporaryDirectory(prefix="composerlite-ranks-")
            atexit.register(self.close)
        folder = Path(self._folder.name)
        self._idle = [worker for worker in self._idle if worker.process.is_alive()]
        workers = [] if fresh else self._idle[:world_size]
        del self._idle[: len(workers)]
        workers += [_Worker(folder) for _ in range(world_size - len(workers))]
        try:
            for worker in workers:
                worker.wait_until_ready()
            # A new store for each call, as for each attempt of torchrun: torch finds old addresses in an old store.
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._runs += 1
            for rank, worker in enumerate(workers):
                environment = self._environment(rank, world_size, store.port)
                worker.connection.send((call, environment, sys.path, str(Path.cwd())))
            outcomes = self._collect(workers, timeout)
        except BaseException:
            for worker in workers:
                worker.stop()
            raise
        if fresh:
            for worker in workers:
                worker.stop(_EXIT_SECONDS)
            return outcomes
        # In the same order: torch remembers the rank of a process.
        self._idle[:0] = [worker if worker.is_usable_again() else _Worker(folder) for worker in workers]
        return outcomes

    def close(self) -> None:
        for worker in self._idle:
            worker.stop(_EXIT_SECONDS)
        self._idle.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _environment(self, rank: int, world_size: int, port: int) -> dict[str, str]:
        """Return the environment that the agent of torchrun would set."""
        return {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self._runs),
        }

    def _collect(self, workers: list[_Worker], timeout: float) -> list[RankOutcome]:
        deadline = time.monotonic() + timeout
        waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
        outcomes: dict[int, RankOutcome] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise _timeout_error(workers, outcomes, timeout)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                outcomes[rank] = workers[rank].receive_outcome(rank)
        return [outcomes[rank] for rank in range(len(workers))]


_pool = _Pool()


def _timeout_error(workers: list[_Worker], outcomes: dict[int, RankOutcome], timeout: float) -> TimeoutError:
    """Return the error, with the stacks of all ranks that did not finish."""
    hanging = [worker for rank, worker in enumerate(workers) if rank not in outcomes]
    for worker in hanging:
        if worker.process.is_alive() and worker.process.pid is not None:
            os.kill(worker.process.pid, _STACKS)
    deadline = time.monotonic() + _STACKS_SECONDS
    while time.monotonic() < deadline and not all(worker.stacks.read_bytes().endswith(b"\n") for worker in hanging):
        time.sleep(0.05)
    time.sleep(0.1)  # the stacks of the last threads
    error = TimeoutError(f"{len(hanging)} of {len(workers)} ranks did not finish in {timeout:g} s")
    for rank, worker in enumerate(workers):
        if rank not in outcomes:
            error.add_note(f"Rank {rank} was here:\n{worker.stacks.read_text(errors='replace')}")
        else:
            ended = outcomes[rank]
            error.add_note(f"Rank {rank} had ended: " + ("returned" if ended.error is None else f"{ended.error!r}"))
    return error


def _serve(connection: Connection[Any, Any], stacks: Path) -> None:
    """Run tasks in a process of the pool until the connection is closed."""
    import torch

    gc.freeze()  # garbage collection skips imported modules and copies no pages of the parent process
    multiprocessing.set_start_method(None, force=True)  # workers of data loaders start as in any other program
    torch.set_num_threads(1)
    with stacks.open("w") as file:
        faulthandler.register(_STACKS, file=file, all_threads=True)
        connection.send("ready")
        while True:
            try:
                task: tuple[bytes, dict[str, str], list[str], str] = connection.recv()
            except (EOFError, ConnectionError):
                return
            with suppress(BrokenPipeError):  # the caller is gone; the next recv ends this process
                connection.send(_run(*task))
                connection.send(_clean_up())


def _run(pickled_call: bytes, environment: dict[str, str], path: list[str], folder: str) -> tuple[bytes, str]:
    """Run a task. Returns the pickled result and an empty text, or the pickled error and the traceback."""
    from composerlite import dist

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path
    try:
        function, args, dist_timeout = pickle.loads(pickled_call)
        if dist_timeout is not None:
            dist.initialize_dist("cpu", dist_timeout)
        return pickle.dumps(function(*args)), ""
    except BaseException as e:  # noqa: BLE001 - raised in the calling process
        trace = traceback.format_exc()
        with suppress(Exception):  # classes that cannot be pickled or unpickled
            pickled = pickle.dumps(e)
            if isinstance(pickle.loads(pickled), BaseException):
                return pickled, trace
        return pickle.dumps(RuntimeError(trace.splitlines()[-1])), trace


def _clean_up() -> bool:
    """Close the process groups. Returns false if parts of the task may still run in this process."""
    from composerlite import dist

    try:
        dist.finalize_dist(timedelta(seconds=_GOODBYE_SECONDS))
    except Exception:  # noqa: BLE001 - the process is replaced
        return False
    threads = Path("/proc/self/task")
    return not dist.is_initialized() and (not threads.exists() or len(list(threads.iterdir())) <= _MOST_THREADS)

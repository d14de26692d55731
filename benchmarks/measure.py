"""How the benchmarks measure: fresh processes in turn, and repeats that other jobs disturbed are dropped and counted.

A benchmark script calls :func:`interleaved` with the names of its systems. That starts the same script again for each
system and repeat, with the system's name as its argument; there the script measures and calls :func:`report`, once for
each part of what it measures.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

__all__ = [
    "OUT",
    "SHORT",
    "ForeignCpu",
    "MemoryPeak",
    "Sample",
    "installed",
    "interleaved",
    "only_installed",
    "repeated",
    "report",
    "spread",
    "undisturbed",
    "write",
]

SHORT = os.environ.get("BENCH_SHORT") == "1"
"""Whether each measurement runs once, with small sizes and only the installed peers. Shows that the benchmarks work."""

OUT = Path(os.environ.get("BENCH_OUT", Path(__file__).parent / "out"))
"""Folder of the results."""

DISTURBED = float("inf") if SHORT else 0.1
"""A repeat is dropped if other processes used more than this share of one core while it ran. Short runs drop none."""


S = TypeVar("S", bound=Any)

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD of include/linux/sched.h


class ForeignCpu:
    """Measures, over a ``with`` block, how much of one core other programs used: 1.0 is a whole core.

    All busy time of the machine, stolen time included, less that of this process, of its descendants and of threads of
    the kernel, which write to the disk what programs left in the page cache. 0.0 where there is no /proc/stat.

    Args:
        root: the process whose descendants are not foreign; ``None``: this one.
    """

    share = 0.0

    def __init__(self, root: int | None = None) -> None:
        self._root = os.getpid() if root is None else root

    def __enter__(self) -> ForeignCpu:
        self._wall, self._foreign = time.perf_counter(), _foreign_seconds(self._root)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.share = max(0.0, _foreign_seconds(self._root) - self._foreign) / (time.perf_counter() - self._wall)


def installed(distribution: str) -> bool:
    """Return whether a peer can be measured. True for every peer unless `SHORT`: a full benchmark needs them all."""
    try:
        return not SHORT or bool(version(distribution))
    except PackageNotFoundError:
        return False


def only_installed(systems: Mapping[str, S]) -> dict[str, S]:
    """Return the systems whose ``distribution`` is :func:`installed`."""
    return {name: system for name, system in systems.items() if installed(system.distribution)}


def repeated(wanted: int, most: int, *, seconds: float = 0.0) -> Iterator[ForeignCpu]:
    """Repeat the body of a loop until ``wanted`` times were undisturbed by others, at most ``most`` times; what is
    quick is repeated for ``seconds``, for a steadier median.

    Each time it is given what measures the others meanwhile, which knows when the body is done.
    """
    if SHORT:
        wanted, most, seconds = 1, 1, 0.0
    until = time.monotonic() + seconds
    quiet = done = 0
    while (quiet < wanted and done < most) or time.monotonic() < until:
        with ForeignCpu() as foreign:
            yield foreign
        done += 1
        quiet += foreign.share <= DISTURBED


def _foreign_seconds(root: int) -> float:
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except FileNotFoundError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
    busy = user + nice + system + irq + softirq + steal
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for pid, stat in _processes():
        parents[pid] = int(stat[1])
        user, system, of_children, system_of_children = (int(field) for field in stat[11:15])
        used[pid] = user + system + of_children + system_of_children
        if int(stat[6]) & _KERNEL_THREAD:
            busy -= user + system
    busy -= sum(ticks for pid, ticks in used.items() if _descends(pid, root, parents))
    return busy / os.sysconf("SC_CLK_TCK")


def _processes() -> Iterator[tuple[int, list[str]]]:
    """Every process and the fields of its /proc/<pid>/stat from the third on: state, parent, …"""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                yield int(entry.name), Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended: its time is its parent's now


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    """Whether ``pid`` is ``root`` or was started by it."""
    while pid in parents and pid != root:
        pid = parents[pid]
    return pid == root


class MemoryPeak:
    """Measures, over a ``with`` block, how much more memory this process and its descendants took than at its start.

    Anonymous memory of all and shared memory of this process; files in the page cache are not anybody's memory.

    Attributes:
        extra_bytes: the largest difference that was seen.
    """

    def __init__(self) -> None:
        self.extra_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-peak", daemon=True)

    def __enter__(self) -> MemoryPeak:
        self._before = _memory_bytes()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            done = self._done.wait(0.01)
            self.extra_bytes = max(self.extra_bytes, _memory_bytes() - self._before)
            if done:
                return


def _memory_bytes() -> int:
    total = _resident(os.getpid(), ("RssAnon:", "RssShmem:"))
    parents = [os.getpid()]
    for parent in parents:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                children = [int(pid) for pid in task.read_text().split()]
            except (FileNotFoundError, ProcessLookupError):
                continue  # a thread that has ended
            parents.extend(children)
            total += sum(_resident(child, ("RssAnon:",)) for child in children)
    return total


def _resident(pid: int, kinds: tuple[str, ...]) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(kinds))


@dataclass(frozen=True)
class Sample:
    """What one process measured: its numbers by name, and the share of a core that others used meanwhile.

    A process that measures several things has one for each ``part``.
    """

    values: dict[str, float]
    foreign_cpu: float
    part: str = ""

    @property
    def disturbed(self) -> bool:
        """Whether other jobs took too much for the numbers to count."""
        return self.foreign_cpu > DISTURBED


def report(values: dict[str, float], foreign_cpu: float, part: str = "") -> None:
    """In the process of one system: hand the numbers to the process that started it."""
    print(json.dumps({"values": values, "foreign_cpu": foreign_cpu, "part": part}), flush=True)


def interleaved(
    script: str,
    systems: Sequence[str],
    *,
    repeats: int,
    most_rounds: int,
    warm_up_rounds: int = 1,
    arguments: Sequence[str] = (),
) -> tuple[dict[str, list[Sample]], int]:
    """Run every system in turn, in a fresh process each, until each part of each has ``repeats`` undisturbed samples.

    The first ``warm_up_rounds`` only warm caches. After ``most_rounds`` more it ends with what there is.

    Args:
        script: the file to run, with a system's name and ``arguments``.

    Returns:
        The samples of each system, one per round and part or several, and the number of rounds.
    """
    if SHORT:
        most_rounds, warm_up_rounds = 1, 0
    samples: dict[str, list[Sample]] = {system: [] for system in systems}
    rounds = 0
    for number in range(warm_up_rounds + most_rounds):
        for system in systems:
            found = _run([sys.executable, script, system, *arguments])
            if number >= warm_up_rounds:
                samples[system] += found
        rounds = max(0, number + 1 - warm_up_rounds)
        if rounds and min(map(_quiet_repeats, samples.values())) >= repeats:
            break
        print(f"round {rounds} of at most {most_rounds}", file=sys.stderr)
    return samples, rounds


def _run(command: Sequence[str]) -> list[Sample]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=_environment())
    return [Sample(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"values"')]


def _quiet_repeats(samples: Sequence[Sample]) -> int:
    """Undisturbed samples of the part that has the fewest."""
    parts = {sample.part for sample in samples}
    return min(len(undisturbed([sample for sample in samples if sample.part == part])) for part in parts)


def _environment() -> dict[str, str]:
    """One thread for all, and no library looks for the network."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def undisturbed(samples: Sequence[Sample]) -> list[Sample]:
    """The samples that count."""
    return [sample for sample in samples if not sample.disturbed]


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, minimum and maximum; ``None`` where other jobs disturbed every repeat."""
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def write(name: str, results: dict[str, Any]) -> None:
    """Write ``results`` and where they were measured to ``benchmarks/out/<name>.json``."""
    OUT.mkdir(parents=True, exist_ok=True)
    machine = {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()}
    (OUT / f"{name}.json").write_text(json.dumps({"machine": machine, **results}, indent=2) + "\n")

"""P1 to P5: what saving and resuming a training state costs, beside the limits of the machine and five other systems.

Each measurement is a fresh process that trains one step, saves synchronously, saves behind, resumes, and trains with
saves behind it. What is timed is set against a probe of the limit that is taken right before it, in the same process;
the probe of a pair, and not an absolute time, is what a ratio is made with.

Usage: ``python benchmarks/checkpoint_saves.py`` for all, with the name of a system for one measurement of it.
``--no-peers`` measures ours and the limits alone, in a quarter of the time.
``--layers 4`` makes the state smaller than the 1.5 GB of 30 layers.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from checkpoint_limits import Limits, forget_cached, make_cached
from checkpoint_systems import SYSTEMS, Pending, Run, System
from measure import (
    OUT,
    SHORT,
    ForeignCpu,
    MemoryPeak,
    Sample,
    interleaved,
    repeated,
    report,
    spread,
    undisturbed,
    write,
)

LAYERS = 1 if SHORT else 30
PAIRS = 5  # undisturbed ones; a process takes longer to get ready than to measure, so one measures all
MOST_PAIRS = 10
LEAST_SECONDS = 120.0  # of pairs of ours, which targets are set for: a steadier median
FIRSTS = 5
OURS = "composerlite"
STEPS = 2
MOST_STEPS = 50
LIMITS = "limits"
LAYER_BYTES, FILES = 2048 * 2049 * 4 * 3, 4

Repeats = list[tuple[ForeignCpu, dict[str, float]]]
"""Numbers by name, seconds mostly, and what others did meanwhile."""


# ── one process: the parts of a measurement ──────────────────────────────────────────────────────────────────────
class Bench:
    """One system, one run, one folder. Its methods are the parts.

    Each returns its repeats, each set against a probe that was taken right before it.
    """

    def __init__(self, system: System, run: Run, limits: Limits, folder: Path) -> None:
        self.system = system
        self.run = run
        self.limits = limits
        self.folder = folder
        self._saved = 0

    def _repeated(self) -> Iterator[ForeignCpu]:
        return repeated(PAIRS, MOST_PAIRS, seconds=LEAST_SECONDS if self.system.distribution == OURS else 0.0)

    def synchronous(self) -> Repeats:
        """P3, P5: saves that training waits for. The first is for the memory that it takes; it is not timed."""
        with MemoryPeak() as peak:
            self._save()
        pairs: Repeats = []
        for foreign in self._repeated():
            limits = {"memcpy_s": self.limits.memcpy(), "disk_write_s": self.limits.disk_write()}
            blocked, durable = self._save()
            pairs.append(
                (
                    foreign,
                    {
                        **limits,
                        "blocked_s": blocked,
                        "durable_s": durable,
                        "of_disk_write": limits["disk_write_s"] / durable,
                        "memcpys": blocked / limits["memcpy_s"],
                    },
                )
            )
        extra = {"extra_memory": peak.extra_bytes / self.limits.state_bytes}
        return [(foreign, {**pair, **extra}) for foreign, pair in pairs]

    def first(self, way: str) -> Repeats:
        """P1, P5: first saves behind training. Memory counts from before one was prepared until it was durable.

        Prepared memory has waited since. So the limit is one copy into memory that was left alone as long.
        """
        firsts: Repeats = []
        for foreign in repeated(FIRSTS if self.system.begins_anew else 1, FIRSTS):
            self.limits.memcpy()
            with MemoryPeak() as peak:
                self.system.prepare(way)
                memcpy = self.limits.memcpy(times=1)
                warm = self.limits.memcpy()
                blocked, _ = self._start(way)
            self.system.release()
            values = {
                "memcpy_s": memcpy,
                "blocked_s": blocked,
                "memcpys": blocked / memcpy,
                "warm_memcpys": blocked / warm,
                "extra_memory": peak.extra_bytes / self.limits.state_bytes,
            }
            firsts.append((foreign, values))
            if not self.system.begins_anew:
                break
        return firsts

    def asynchronous(self, way: str) -> Repeats:
        """P1: later saves behind training."""
        self.system.prepare(way)
        self._start(way)
        pairs: Repeats = []
        for foreign in self._repeated():
            limits = {"memcpy_s": self.limits.memcpy()}
            blocked, durable = self._start(way)
            pairs.append(
                (
                    foreign,
                    {
                        **limits,
                        "blocked_s": blocked,
                        "durable_s": durable,
                        "memcpys": blocked / limits["memcpy_s"],
                    },
                )
            )
        self.system.release()
        return pairs

    def resume(self) -> Repeats:
        """P4: loads into the live model and optimizer, from the page cache and from the disk."""
        path = self._path()
        self.system.save(path)
        self.system.flush(path)
        pairs: Repeats = []
        for foreign in self._repeated():
            check = self.run.spoil()
            limits = {"page_cache_read_s": self.limits.page_cache_read(path)}
            make_cached(path)
            warm = self._load(path, check)
            check = self.run.spoil()
            limits["disk_read_s"] = self.limits.disk_read(path)
            forget_cached(path)
            cold = self._load(path, check)
            pairs.append(
                (
                    foreign,
                    {
                        **limits,
                        "warm_s": warm,
                        "cold_s": cold,
                        "of_page_cache_read": limits["page_cache_read_s"] / warm,
                        "of_disk_read": limits["disk_read_s"] / cold,
                    },
                )
            )
        self._remove(path)
        return pairs

    def training(self, way: str) -> Repeats:
        """P1b, P2: windows of steps, every second with a save at its start, until that is durable at least.

        What a save costs in all is the time of its window beyond that of as many steps without one: the median of all
        such, because one step differs from the next by more than a save may cost.
        """
        threads = torch.get_num_threads()
        self.system.prepare(way)
        self._first_in_training(way)
        torch.set_num_threads(1)
        plain = [self._window(None)[0] / STEPS]
        saving: list[tuple[ForeignCpu, float, float, int, float]] = []
        for foreign in self._repeated():
            memcpy = self.limits.memcpy()
            saving.append((foreign, memcpy, *self._window(way)))
            plain.append(self._window(None)[0] / STEPS)
        self.system.release()
        self.run.free_gradients()
        torch.set_num_threads(threads)
        step = statistics.median(plain)
        return [
            (
                foreign,
                {
                    "memcpy_s": memcpy,
                    "step_s": step,
                    "lost_s": seconds - steps * step,
                    "lost_memcpys": (seconds - steps * step) / memcpy,
                    "stall_s": stall,
                    "stall_memcpys": stall / memcpy,
                    "steps_per_s": 1 / step,
                    "steps_per_s_saving": steps / seconds,
                },
            )
            for foreign, memcpy, seconds, steps, stall in saving
        ]

    def _window(self, way: str | None) -> tuple[float, int, float]:
        """Seconds, steps, and the seconds that training was stopped in them."""
        path = self._path()
        pending: Pending | None = None
        guard = self.system.step_guard
        start = time.perf_counter()
        if way is not None:
            pending = self.system.start(path, way)
        stall = time.perf_counter() - start
        self.run.watch_step()
        steps = 0
        while steps < STEPS or (pending is not None and not pending.done() and steps < MOST_STEPS):
            self.run.step(guard())
            stall += self.run.waited_seconds
            steps += 1
        seconds = time.perf_counter() - start
        if pending is not None:
            pending.wait()
            self.system.flush(path)
            self._remove(path)
        return seconds, steps, stall

    def _first_in_training(self, way: str) -> None:
        path = self._path()
        pending = self.system.start(path, way)
        self.run.step(self.system.step_guard())
        pending.wait()
        self._remove(path)

    def _save(self) -> tuple[float, float]:
        """Seconds until the system returned, and until the files were durable."""
        path = self._path()
        start = time.perf_counter()
        self.system.save(path)
        blocked = time.perf_counter() - start
        self.system.flush(path)
        durable = time.perf_counter() - start
        self._remove(path)
        return blocked, durable

    def _start(self, way: str) -> tuple[float, float]:
        """Seconds until training could go on, and until the files were durable."""
        path = self._path()
        start = time.perf_counter()
        pending = self.system.start(path, way)
        blocked = time.perf_counter() - start
        pending.wait()
        self.system.flush(path)
        durable = time.perf_counter() - start
        self._remove(path)
        return blocked, durable

    def _load(self, path: Path, check: Callable[[], None]) -> float:
        start = time.perf_counter()
        self.system.load(path)
        seconds = time.perf_counter() - start
        check()
        return seconds

    def _path(self) -> Path:
        self._saved += 1
        return self.folder / f"save{self._saved}"

    def _remove(self, path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def limits_alone(limits: Limits) -> Repeats:
    """Each probe, in turn."""
    probes = ("memcpy", "clone", "disk_write", "bounce", "buffered_write", "page_cache_read", "disk_read")
    repeats = [
        (foreign, {f"{name}_s": getattr(limits, name)() for name in probes}) for foreign in repeated(PAIRS, MOST_PAIRS)
    ]
    limits.close()
    return repeats


def measure(name: str, layers: int) -> None:
    """One measurement of the system ``name``, part by part."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(dir=checkpoints(), prefix="bench-") as folder:
        run = Run(layers)
        run.free_gradients()
        limits = Limits(run.tensors(), Path(folder))
        if name == LIMITS:
            part("limits", lambda: limits_alone(limits))
            return
        bench = Bench(SYSTEMS[name](run), run, limits, Path(folder))
        part("sync", bench.synchronous)
        if bench.system.in_training:
            part("async, first", lambda: bench.first("async"))
            part("async", lambda: bench.asynchronous("async"))
        part("resume", bench.resume)
        for way in bench.system.in_training:
            part(f"training, {way}", lambda way=way: bench.training(way))


def part(name: str, do: Callable[[], Repeats]) -> None:
    """Measure one part and report its repeats."""
    ctypes.CDLL(None).malloc_trim(0)  # what the part before left in the heap is not this one's
    for foreign, values in do():
        report(values, foreign.share, name)


def checkpoints() -> Path:
    """Where the checkpoints go: on the disk of the repository, because /tmp may be memory."""
    folder = OUT / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# ── all of them ──────────────────────────────────────────────────────────────────────────────────────────────────
def main(layers: int, systems: Sequence[str]) -> None:
    """``systems`` in turn; writes ``out/checkpoint_saves.json``."""
    shutil.rmtree(checkpoints())
    wanted = FILES * layers * LAYER_BYTES
    if (free := shutil.disk_usage(checkpoints()).free) < wanted:
        raise SystemExit(f"{OUT} has {free / 1e9:.1f} GB free and this needs {wanted / 1e9:.1f}: clean up, or --layers")
    samples, _ = interleaved(
        __file__,
        [LIMITS, *systems],
        repeats=PAIRS,
        most_rounds=1,
        warm_up_rounds=0,
        arguments=["--layers", str(layers)],
    )
    shutil.rmtree(checkpoints())
    run = Run(layers)
    results: dict[str, Any] = {
        "state_bytes": sum(tensor.nbytes for tensor in run.tensors()),
        "limits": summary(samples.pop(LIMITS))["limits"],
        "systems": {
            name: {
                "version": version(SYSTEMS[name].distribution),
                "flushes": SYSTEMS[name].flushes,
                "parts": summary(found),
            }
            for name, found in samples.items()
        },
    }
    write("checkpoint_saves", results)


def summary(found: list[Sample]) -> dict[str, Any]:
    """Median, minimum and maximum of every number, part by part, over the undisturbed repeats; of memory, over all."""
    parts: dict[str, Any] = {}
    for name in dict.fromkeys(sample.part for sample in found):
        mine = [sample for sample in found if sample.part == name]
        kept = undisturbed(mine)
        parts[name] = {
            "repeats": len(kept),
            "dropped": len(mine) - len(kept),
            **{
                value: spread([sample.values[value] for sample in (mine if value == "extra_memory" else kept)])
                for value in mine[0].values
            },
            "samples": [{**sample.values, "foreign_cpu": sample.foreign_cpu} for sample in mine],
        }
    return parts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", nargs="?", choices=[LIMITS, *SYSTEMS], help="one measurement of it; all by default")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of 2048×2048 weights: 50 MB of state each")
    parser.add_argument("--no-peers", action="store_true", help="ours and the limits: what the targets are set against")
    given = parser.parse_args()
    if given.system is None:
        main(given.layers, [OURS] if given.no_peers else list(SYSTEMS))
    else:
        measure(given.system, given.layers)

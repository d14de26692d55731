"""How the benchmarks measure: fresh processes in turn, and repeats that other jobs disturbed are dropped and counted.

A benchmark script calls :func:`interleaved` with the names of its systems. That starts the same script again for each
system and repeat, with the system's name as its argument; there the script measures and calls :func:`report`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["OUT", "ForeignCpu", "Sample", "interleaved", "report", "spread", "undisturbed", "write"]

OUT = Path(__file__).parent / "out"

DISTURBED = 0.1
"""A repeat is dropped if other processes used more than this share of one core while it ran."""


class ForeignCpu:
    """Measures, over a ``with`` block, how much of one core processes other than this one used: 1.0 is a whole core.

    All busy time of the machine, stolen time included, less that of this process. 0.0 where there is no /proc/stat.
    """

    share = 0.0

    def __enter__(self) -> ForeignCpu:
        self._wall, self._foreign = time.perf_counter(), _foreign_seconds()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.share = max(0.0, _foreign_seconds() - self._foreign) / (time.perf_counter() - self._wall)


def _foreign_seconds() -> float:
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except FileNotFoundError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    own = os.times()
    return busy - own.user - own.system - own.children_user - own.children_system


@dataclass(frozen=True)
class Sample:
    """What one process measured: its numbers by name, and the share of a core that others used meanwhile."""

    values: dict[str, float]
    foreign_cpu: float

    @property
    def disturbed(self) -> bool:
        """Whether other jobs took too much for the numbers to count."""
        return self.foreign_cpu > DISTURBED


def report(values: dict[str, float], foreign_cpu: float) -> None:
    """In the process of one system: hand the numbers to the process that started it."""
    print(json.dumps({"values": values, "foreign_cpu": foreign_cpu}))


def interleaved(
    script: str, systems: Sequence[str], *, repeats: int, most_rounds: int
) -> tuple[dict[str, list[Sample]], int]:
    """Run every system in turn, in a fresh process each, until each has ``repeats`` undisturbed samples.

    A first round only warms caches. After ``most_rounds`` rounds it ends with what there is.

    Returns:
        The samples of each system, one per round, and the number of rounds.
    """
    samples: dict[str, list[Sample]] = {system: [] for system in systems}
    rounds = 0
    for rounds in range(most_rounds + 1):
        for system in systems:
            command = [sys.executable, script, system]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=_environment())
            if rounds:
                samples[system].append(Sample(**json.loads(done.stdout.splitlines()[-1])))
        if all(len(undisturbed(found)) >= repeats for found in samples.values()):
            break
        print(f"round {rounds} of at most {most_rounds}", file=sys.stderr)
    return samples, rounds


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
    OUT.mkdir(exist_ok=True)
    machine = {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()}
    (OUT / f"{name}.json").write_text(json.dumps({"machine": machine, **results}, indent=2) + "\n")

"""P7: what importing a trainer costs over importing torch.

Each measurement is a fresh interpreter that imports torch and then what a training script needs of the system.

Usage: ``python benchmarks/import_time.py`` for all, with the name of a system for one measurement of it.
"""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from importlib.metadata import version
from typing import Any

from measure import SHORT, ForeignCpu, Sample, interleaved, report, spread, undisturbed, write

REPEATS = 5
MOST_ROUNDS = 8

SYSTEMS = {
    "composerlite": ("composerlite", "Trainer"),
    "accelerate": ("accelerate", "Accelerator"),
    "lightning": ("lightning", "Trainer"),
    "transformers": ("transformers", "Trainer"),
}
"""The module that a training script imports and the name that it takes from it."""


def measure(system: str) -> None:
    """One measurement: seconds to import torch, and then the system."""
    warnings.simplefilter("ignore")
    module, name = SYSTEMS[system]
    with ForeignCpu() as foreign:
        start, cpu_start = time.perf_counter(), time.process_time()
        importlib.import_module("torch")
        torch_is_there, cpu_torch_is_there = time.perf_counter(), time.process_time()
        getattr(importlib.import_module(module), name)
        end, cpu_end = time.perf_counter(), time.process_time()
    report(
        {
            "torch_s": torch_is_there - start,
            "torch_cpu_s": cpu_torch_is_there - cpu_start,
            "over_torch_s": end - torch_is_there,
            "over_torch_cpu_s": cpu_end - cpu_torch_is_there,
        },
        foreign.share,
    )


def main() -> None:
    """All systems in turn; writes ``out/import_time.json``."""
    samples, rounds = interleaved(
        __file__, ["composerlite"] if SHORT else list(SYSTEMS), repeats=REPEATS, most_rounds=MOST_ROUNDS
    )
    everything = [sample for found in samples.values() for sample in found]
    results = {"torch": summary("torch", "torch", everything)}
    results.update({system: summary(system, "over_torch", found) for system, found in samples.items()})
    write("import_time", {"rounds": rounds, "systems": results})


def summary(system: str, what: str, found: list[Sample]) -> dict[str, Any]:
    """Wall-clock time of the undisturbed samples, and processor time of all: other jobs hardly touch that."""
    kept = undisturbed(found)
    return {
        "version": version(system),
        f"{what}_s": spread([sample.values[f"{what}_s"] for sample in kept]),
        "cpu_s": spread([sample.values[f"{what}_cpu_s"] for sample in found]),
        "repeats": len(kept),
        "dropped": len(found) - len(kept),
        "samples": [{**sample.values, "foreign_cpu": sample.foreign_cpu} for sample in found],
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        main()

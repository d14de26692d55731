"""P9 and what many ranks cost: saves and loads of one sharded state, bytes that are read, planning, votes.

Saves and loads are timed with 1, 2 and 4 processes that share this machine; all systems take turns in the same
processes, each beside a probe of the limit that all ranks take together right before.

Usage: ``python benchmarks/many_ranks.py`` for all, with the name of a measurement for that one.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

from checkpoint_saves import checkpoints
from measure import SHORT, Sample, interleaved, report, spread, undisturbed, write
from rank_costs import bytes_read, planning, votes
from sharded_systems import SYSTEMS, take_turns

RANKS = {"2 ranks": 2} if SHORT else {"1 rank": 1, "2 ranks": 2, "4 ranks": 4}
LAYERS = 1 if SHORT else 12
REPEATS = 1 if SHORT else 3
LAYER_BYTES = 2048 * 2049 * 4 * 3


def measure(name: str, layers: int, repeats: int) -> None:
    """One measurement."""
    from composerlite.testing import run_ranks

    if name in RANKS:
        with tempfile.TemporaryDirectory(dir=checkpoints(), prefix="bench-") as folder:
            found = run_ranks(
                take_turns, RANKS[name], os.getpid(), Path(folder), layers, repeats, dist_timeout=None, timeout=300
            )[0]
        for part, values, foreign_cpu in found:
            report(values, foreign_cpu, part)
    elif name == "bytes":
        with tempfile.TemporaryDirectory(dir=checkpoints(), prefix="bench-") as folder:
            for part, counts in bytes_read(Path(folder)):
                report(counts, 0.0, part)  # others' work changes no number
    else:
        for part, values, foreign_cpu in {"planning": planning, "votes": votes}[name]():
            report(values, foreign_cpu, part)


def main(layers: int, repeats: int) -> None:
    """All of them; writes ``out/many_ranks.json``."""
    arguments = ["--layers", str(layers), "--repeats", str(repeats)]
    names = [*RANKS, "bytes", "planning", "votes"]
    samples, _ = interleaved(__file__, names, repeats=1, most_rounds=1, warm_up_rounds=0, arguments=arguments)
    results: dict[str, Any] = {
        "state_bytes": layers * LAYER_BYTES,
        "versions": {name: version(system.distribution) for name, system in SYSTEMS.items()},
        "ranks": {RANKS[name]: by_part(samples[name]) for name in RANKS},
        "bytes": {sample.part: sample.values for sample in samples["bytes"]},
        "planning": [{**sample.values, "foreign_cpu": sample.foreign_cpu} for sample in samples["planning"]],
        "votes": by_part(samples["votes"]),
    }
    write("many_ranks", results)


def by_part(samples: list[Sample]) -> dict[str, Any]:
    """Of every part and number median, minimum and maximum over the undisturbed repeats; and over all."""
    parts: dict[str, Any] = {}
    for name in dict.fromkeys(sample.part for sample in samples):
        mine = [sample for sample in samples if sample.part == name]
        kept = undisturbed(mine)
        parts[name] = {
            "repeats": len(kept),
            "dropped": len(mine) - len(kept),
            **{value: spread([sample.values[value] for sample in kept]) for value in mine[0].values},
            "all": {value: spread([sample.values[value] for sample in mine]) for value in mine[0].values},
        }
    return parts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", nargs="?", choices=[*RANKS, "bytes", "planning", "votes"], help="one; or all")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of 2048×2048 weights: 50 MB of state each")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of each system, at each number of ranks")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if given.measurement is None:
        main(given.layers, given.repeats)
    else:
        measure(given.measurement, given.layers, given.repeats)

"""The tables, verdicts and chart of ``checkpoint_saves.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure
from measure import spread
from tables import Spread, draw, print_table, read, text, verdict

__all__ = ["show"]

MIB = 1 << 20
EXTRA_MIB = 64
MEMCPYS, FIRST_MEMCPYS, LOST_MEMCPYS = 1.15, 1.5, 3.0
OF_DISK_WRITE, OF_PAGE_CACHE_READ, OF_DISK_READ = 0.9, 0.6, 0.85

LIMITS = {
    "memcpy": "copy into memory that was touched before",
    "clone": "copy into new memory",
    "disk_write": "write past the page cache, durable",
    "bounce": "the same through one small buffer",
    "buffered_write": "write through the page cache, durable",
    "page_cache_read": "read from the page cache",
    "disk_read": "read from the disk",
}

Part = dict[str, Any]


def show() -> Figure | None:
    """Print all tables and verdicts; the chart, if there is something to compare with."""
    results = read("checkpoint_saves")
    systems = results["systems"]
    print_limits(results)
    print_saves(systems)
    print_training(systems)
    print_resumes(systems)
    print()
    for line in verdicts(systems["composerlite"]["parts"], results["state_bytes"]):
        print(line)
    return chart(systems, results["limits"]) if len(systems) > 1 else None


def print_limits(results: dict[str, Any]) -> None:
    """What the machine can do."""
    limits, state = results["limits"], results["state_bytes"]
    rows = [
        [words, text(limits[f"{name}_s"], 3), text(rate(limits[f"{name}_s"], state), 1)]
        for name, words in LIMITS.items()
    ]
    print_table(
        f"Limits of the machine, {state / 1e9:.2f} GB, {repeats(limits)} repeats",
        ["median (min–max)", "seconds", "GB/s"],
        rows,
    )


def rate(seconds: Spread | None, state_bytes: int) -> Spread | None:
    """GB/s."""
    if seconds is None:
        return None
    low, high = state_bytes / seconds["max"] / 1e9, state_bytes / seconds["min"] / 1e9
    return {"median": state_bytes / seconds["median"] / 1e9, "min": low, "max": high}


def print_saves(systems: dict[str, Any]) -> None:
    """What keeps training waiting, and for how long nothing is safe yet."""
    header = ["median (min–max)", "training waits, s", "the first", "in memcpys", "durable after, s", "of disk_write"]
    rows = [
        [
            f"{name} {system['version']}{', async' if way == 'async' else ''}",
            text(part["blocked_s"], 3),
            text(system["parts"]["async, first"]["blocked_s"], 3) if way == "async" else "",
            text(part["memcpys"], 2),
            text(part["durable_s"], 2) + ("" if system["flushes"] else " *"),
            text(part["of_disk_write"], 2) if way == "sync" else "",
            text(memory(system, way), 2),
            repeats(part),
        ]
        for name, system, way, part in parts(systems, ("sync", "async"))
    ]
    header += ["extra memory, × state", "repeats + dropped"]
    print_table("Saving (* made durable by the benchmark: the system does not flush)", header, rows)


def memory(system: dict[str, Any], way: str) -> Spread | None:
    """What saving takes: the first one takes it."""
    return system["parts"]["async, first" if way == "async" else way]["extra_memory"]


def print_training(systems: dict[str, Any]) -> None:
    """What a save behind training costs in all."""
    header = ["median (min–max)", "time lost, s", "in memcpys", "of it waiting, s", "in memcpys"]
    rows = [
        [
            f"{name} {system['version']}, {way.removeprefix('training, ')}",
            text(part["lost_s"], 3),
            text(part["lost_memcpys"], 1),
            text(part["stall_s"], 3),
            text(part["stall_memcpys"], 2),
            text(part["steps_per_s"], 2),
            text(part["steps_per_s_saving"], 2),
            repeats(part),
        ]
        for name, system, way, part in parts(systems, ("training, async", "training, lazy"))
    ]
    header += ["steps/s", "steps/s while it saves", "repeats + dropped"]
    print_table("Training with a save behind it", header, rows)


def print_resumes(systems: dict[str, Any]) -> None:
    """What loading into the live model and optimizer takes."""
    header = ["median (min–max)", "warm, s", "of page_cache_read", "cold, s", "of disk_read", "repeats + dropped"]
    rows = [
        [
            f"{name} {system['version']}",
            text(part["warm_s"], 3),
            text(part["of_page_cache_read"], 2),
            text(part["cold_s"], 3),
            text(part["of_disk_read"], 2),
            repeats(part),
        ]
        for name, system, _, part in parts(systems, ("resume",))
    ]
    print_table("Resuming", header, rows)


def parts(systems: dict[str, Any], names: tuple[str, ...]) -> Iterator[tuple[str, Any, str, Part]]:
    """System's name, system, part's name and part, of those that have it."""
    for name, system in systems.items():
        for part in names:
            if part in system["parts"]:
                yield name, system, part, system["parts"][part]


def repeats(part: Part) -> str:
    """Those that count, and those that were disturbed."""
    return f"{part['repeats']} + {part['dropped']}"


def verdicts(ours: dict[str, Part], state_bytes: int) -> Iterator[str]:
    """Whether the targets are met."""
    sync, behind, resume = ours["sync"], ours["async"], ours["resume"]
    first, training = ours["async, first"], ours["training, async"]
    copies = "memcpys that training waits"
    yield verdict("P1 later saves", behind["memcpys"], copies, at_most=MEMCPYS)
    yield verdict("P1 first save", first["memcpys"], copies, at_most=FIRST_MEMCPYS)
    yield verdict("P1b", training["lost_memcpys"], "memcpys of training lost", at_most=LOST_MEMCPYS)
    yield verdict("P3", sync["of_disk_write"], "of disk_write", at_least=OF_DISK_WRITE)
    yield verdict("P4 warm", resume["of_page_cache_read"], "of page_cache_read", at_least=OF_PAGE_CACHE_READ)
    yield verdict("P4 cold", resume["of_disk_read"], "of disk_read", at_least=OF_DISK_READ)
    for target, part, states in (("P5 async", first, 1), ("P5 sync", sync, 0)):
        found = part["extra_memory"]
        extra = found and {name: (times - states) * state_bytes / MIB for name, times in found.items()}
        yield verdict(target, extra, "MiB over the copy" if states else "MiB", at_most=EXTRA_MIB)


def chart(systems: dict[str, Any], limits: Part) -> Figure:
    """What training waits for, what it loses, when a checkpoint is durable, how long a resume takes."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    waits, lost, durable, resume = figure.subplots(2, 2).flat
    sync = {name: part for name, _, _, part in parts(systems, ("sync",))}
    behind = {name: part for name, _, _, part in parts(systems, ("async",))}
    draw(
        waits,
        {"memcpy": shown(limits, "memcpy_s")}
        | {n if n in behind else f"{n}, sync": shown(behind.get(n, sync[n]), "blocked_s") for n in systems},
        "Training waits for one save",
        "s",
        2,
    )
    draw(
        lost,
        {
            f"{name}{', lazy' if way.endswith('lazy') else ''}": shown(part, "lost_s")
            for name, _, way, part in parts(systems, ("training, async", "training, lazy"))
        },
        "Training time lost to one save",
        "s",
        2,
    )
    draw(
        durable,
        {"disk_write": shown(limits, "disk_write_s")} | {name: shown(part, "durable_s") for name, part in sync.items()},
        "A synchronous save is durable",
        "s",
        2,
    )
    draw(
        resume,
        {"page_cache_read": shown(limits, "page_cache_read_s")}
        | {name: shown(part, "warm_s") for name, _, _, part in parts(systems, ("resume",))},
        "Resume from the page cache",
        "s",
        2,
    )
    return figure


def shown(part: Part, name: str) -> Spread:
    """The undisturbed repeats, or all if there are none of those."""
    found = part[name] or spread([sample[name] for sample in part["samples"]])
    assert found is not None
    return found

"""The tables, verdicts and chart of ``object_stores.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure
from measure import spread
from tables import Spread, draw, print_table, read, text, verdict

__all__ = ["show"]

OF_BEST, REQUESTS, THREAD_MS = 0.9, 3, 1.0
LEAST_ROUNDS = 3
DIRECTIONS = {"upload": "upload", "read": "download into memory", "download": "download into a file"}

Part = dict[str, Any]


def show() -> Figure:
    """Print all tables and verdicts; the chart."""
    results = read("object_stores")
    print_transfers(results)
    print_saves(results["saving"])
    print_finding(results)
    print()
    for line in verdicts(results):
        print(line)
    return chart(results)


def print_transfers(results: dict[str, Any]) -> None:
    """One object, each way, by each client."""
    clients, megabytes = results["clients"], results["megabytes"]
    rows = [
        [
            f"{name}; {client['version']}{'' if client['flushes'] else ' *'}",
            *(text(rate(shown(client, f"{way}_s"), megabytes), 0) for way in DIRECTIONS),
            *(text(client[f"{way}_cpu_s"], 2) for way in DIRECTIONS),
            repeats(client),
        ]
        for name, client in clients.items()
    ]
    header = ["median (min–max)", "up, MB/s", "into memory", "into a file", "up, CPU s", "into memory", "into a file"]
    print_table(
        f"An object of {megabytes} MB, S3 service on loopback (* files made durable by the benchmark; where fewer "
        f"than {LEAST_ROUNDS} repeats were undisturbed, all count)",
        [*header, "repeats + dropped"],
        rows,
    )


def print_saves(systems: dict[str, Any]) -> None:
    """A training state, to a bucket."""
    rows = [
        [
            f"{name} {system['version']}, {way}",
            text(shown(part, "stall_s"), 3),
            text(shown(part, "published_s"), 2),
            repeats(part),
        ]
        for name, system, way, part in saves(systems)
    ]
    size = next(part["state_bytes"]["median"] for *_, part in saves(systems))
    header = ["median (min–max)", "training waits, s", "published after, s", "repeats + dropped"]
    print_table(f"Saving {size / 1e6:.0f} MB to a bucket", header, rows)


def print_finding(results: dict[str, Any]) -> None:
    """The newest checkpoint of a bucket."""
    found, count = results["finding"], results["checkpoints"]
    rows = [
        ["composerlite, latest is good", text(found["latest_requests"], 0), text(shown(found, "latest_s"), 3)],
        ["and a listing, for files written after latest moved", text(found["list_requests"], 0), ""],
        ["composerlite, latest is lost: all manifests", "", text(shown(found, "all_s"), 1)],
        ["a listing, then two requests for each", str(results["plain_requests"]), ""],
    ]
    print_table(f"Finding the newest of {count} checkpoints", ["median (min–max)", "requests", "seconds"], rows)


def saves(systems: dict[str, Any]) -> Iterator[tuple[str, Any, str, Part]]:
    """System's name, system, way of saving and its numbers."""
    for name, system in systems.items():
        for way, part in system["parts"].items():
            yield name, system, way, part


def verdicts(results: dict[str, Any]) -> Iterator[str]:
    """Whether the targets are met."""
    for way, words in DIRECTIONS.items():
        quiet, every = results["of_best"][way]["undisturbed"], results["of_best"][way]["all"]
        enough = quiet is not None and quiet["rounds"] >= LEAST_ROUNDS
        found, which = (quiet, "undisturbed") if enough else (every, "rounds, disturbed ones included")
        unit = f"of {found['client']}, {found['rounds']} {which}"
        yield verdict(f"P8 {words}", found["share"], unit, at_least=OF_BEST)
    thread = shown(results["training"], "upload_ms_per_save")
    yield verdict("P8 training thread", thread, "ms for the uploads of a save", at_most=THREAD_MS)
    yield verdict("P10", results["finding"]["latest_requests"], "requests to find the newest", at_most=REQUESTS)


def rate(seconds: Spread, megabytes: int) -> Spread:
    """MB/s."""
    low, high = megabytes / seconds["max"], megabytes / seconds["min"]
    return {"median": megabytes / seconds["median"], "min": low, "max": high}


def repeats(part: Part) -> str:
    """Those that count, and those that were disturbed."""
    return f"{part['repeats']} + {part['dropped']}"


def chart(results: dict[str, Any]) -> Figure:
    """How fast each client moves an object, what it costs it, and when a save is in the bucket."""
    clients, megabytes = results["clients"], results["megabytes"]
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    up, memory, file, saved = figure.subplots(2, 2).flat
    for axes, (way, words) in zip((up, memory, file), DIRECTIONS.items(), strict=True):
        speeds = {name: rate(shown(client, f"{way}_s"), megabytes) for name, client in clients.items()}
        draw(axes, speeds, words[0].upper() + words[1:], "MB/s", 0)
    published = {f"{name}, {way}": shown(part, "published_s") for name, _, way, part in saves(results["saving"])}
    draw(saved, published, "A save is in the bucket", "s", 2)
    return figure


def shown(part: Part, name: str) -> Spread:
    """The undisturbed repeats, or all if there are too few of those."""
    found = part[name] if part["repeats"] >= LEAST_ROUNDS else spread([sample[name] for sample in part["samples"]])
    assert found is not None
    return found

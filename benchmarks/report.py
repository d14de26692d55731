"""Prints what the benchmarks wrote to ``benchmarks/out`` and draws it: ``docs/images/*.svg``."""

from __future__ import annotations

from pathlib import Path

import checkpoint_report
import interruptions_report
import many_ranks_report
import matplotlib as mpl
import object_store_report
import safetensors_report
from matplotlib.figure import Figure
from measure import OUT, SHORT
from tables import Spread, draw, print_table, read, text, verdict

IMAGES = OUT if SHORT else Path(__file__).parent.parent / "docs" / "images"
TARGET_US = 10
TARGET_S = 0.15


def comparable(wall: dict[str, Spread | None], cpu: dict[str, Spread]) -> tuple[dict[str, Spread], str]:
    """Wall-clock times if there is one of every system, else processor times; and a word for the axis."""
    measured = {name: spread for name, spread in wall.items() if spread is not None}
    return (measured, "") if len(measured) == len(wall) else (cpu, " of processor time")


def steps_and_imports() -> Figure:
    """Both tables, whether the targets are met, and the chart."""
    step, imports = read("step_overhead"), read("import_time")

    rows = [
        [
            f"raw loop, torch {system['version']}" if name == "raw" else f"{name} {system['version']}",
            text(system["us_per_step"], 0),
            "" if name == "raw" else text(system["us_over_raw"], 1),
            f"{system['repeats']} + {system['dropped']}",
            text(system["cpu_us_per_step"], 0),
            "" if name == "raw" else text(system["cpu_us_over_raw"], 1),
        ]
        for name, system in step["systems"].items()
    ]
    header = ["median (min–max)", "µs per step", "over raw", "repeats + dropped", "CPU µs per step", "over raw"]
    print_table(f"Training step, {step['steps']} steps of a 16→16→4 network in batches of 8", header, rows)

    rows = [
        [
            f"{name} {system['version']}",
            text(system["torch_s"] if name == "torch" else system["over_torch_s"], 3),
            f"{system['repeats']} + {system['dropped']}",
            text(system["cpu_s"], 3),
        ]
        for name, system in imports["systems"].items()
    ]
    header = ["median (min–max)", "seconds (over torch)", "repeats + dropped", "CPU seconds (over torch)"]
    print_table("Import, fresh interpreter, warm caches", header, rows)

    print()
    for target, system, wall, cpu, unit, limit in (
        ("P6", step["systems"]["composerlite"], "us_over_raw", "cpu_us_over_raw", "µs over the raw loop", TARGET_US),
        ("P7", imports["systems"]["composerlite"], "over_torch_s", "cpu_s", "s over import torch", TARGET_S),
    ):
        otherwise = f"; processor time {text(system[cpu], 3)} {unit}"
        print(verdict(target, system[wall], unit, at_most=limit, otherwise=otherwise))

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    systems = step["systems"]
    shown, which = comparable(
        {name: system["us_per_step"] for name, system in systems.items()},
        {name: system["cpu_us_per_step"] for name, system in systems.items()},
    )
    draw(left, shown, "One training step", f"µs{which}", 0)
    systems = imports["systems"]
    shown, which = comparable(
        {name: system["torch_s" if name == "torch" else "over_torch_s"] for name, system in systems.items()},
        {name: system["cpu_s"] for name, system in systems.items()},
    )
    draw(right, shown, "Import: torch, and on top of it", f"s{which}", 2)
    return figure


def main() -> None:
    """Report on every benchmark that was run."""
    mpl.rcParams["svg.hashsalt"] = "composerlite"  # the same numbers give the same file
    IMAGES.mkdir(parents=True, exist_ok=True)
    if (OUT / "safetensors_folders.json").exists():
        safetensors_report.show()
    for needed, show, image in (
        (("step_overhead", "import_time"), steps_and_imports, "benchmarks.svg"),
        (("checkpoint_saves",), checkpoint_report.show, "checkpoints.svg"),
        (("object_stores",), object_store_report.show, "object_stores.svg"),
        (("many_ranks",), many_ranks_report.show, "many_ranks.svg"),
        (("interruptions",), interruptions_report.show, "interruptions.svg"),
    ):
        missing = [name for name in needed if not (OUT / f"{name}.json").exists()]
        if missing:
            print(f"\nNo {image}: run {', '.join(f'benchmarks/{name}.py' for name in missing)} first")
            continue
        chart = show()
        if chart is None:
            print(f"\nNo {image}: it is drawn of all systems")
            continue
        chart.savefig(IMAGES / image, metadata={"Date": None})
        print(f"\nWrote {IMAGES / image}")


if __name__ == "__main__":
    main()

"""What composerlite promises, shown on real data: a run that is killed and resumed ends as if nothing had happened.

Trains a small network on images of handwritten digits twice with the same command: once to the end; once asked to end
with SIGTERM, as a scheduler does, launched again, killed with SIGKILL half-way, and launched once more. Compares the
two results bit for bit. ``make demo`` runs it in about a minute;
``python configs/demo.py 2 FOLDER`` trains 2 epochs instead of 8 and saves to FOLDER.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from composerlite.checkpoint import Catalog, Manifest

HERE = Path(__file__).parent
RUNS = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE.parent / "runs" / "demo"
BATCHES_PER_EPOCH = 23
EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 8
FIRST_QUARTER, HALF_WAY = BATCHES_PER_EPOCH * EPOCHS // 4, BATCHES_PER_EPOCH * EPOCHS // 2


def command(folder: Path) -> list[str]:
    """Return the command line of the run. Both launches of the killed run use the same."""
    program = Path(sys.executable).with_name("composerlite")
    overrides = ["run_name=demo", "autoresume=true", "save_interval=10ba", f"max_duration={EPOCHS}ep"]
    return [str(program), "train", str(HERE / "digits.yaml"), f"save_folder={folder}", *overrides]


def say(text: str) -> None:
    """Print a line now."""
    print(text, flush=True)


def checkpoints(folder: Path) -> list[Manifest]:
    """The records of the checkpoints in ``folder``, oldest first."""
    return Catalog(folder).manifests()


def launch(folder: Path) -> float:
    """Run the command to its end; the accuracy that it reports."""
    done = subprocess.run(command(folder), check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    say(done.stdout.strip())
    found = re.search(r"Accuracy ([\d.]+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


def launch_and_send(number: signal.Signals, folder: Path, batch: int) -> int:
    """Run the command and send it a signal once it has saved at a ``batch`` or later; its exit code."""
    process = subprocess.Popen(command(folder))
    deadline = time.monotonic() + 300
    while not any(record.batch >= batch for record in checkpoints(folder)):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"the run ended, or took five minutes, before batch {batch}")
        time.sleep(0.005)
    process.send_signal(number)
    return process.wait(timeout=60)


def differences(a: Any, b: Any, path: str) -> list[str]:
    """Where two nested states are not bit for bit equal."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [path]
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for k in {*a, *b} for d in differences(a.get(k), b.get(k), f"{path}/{k}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}/{i}")]
    return [] if a == b else [path]


def compare(folder_a: Path, folder_b: Path) -> list[str]:
    """Where the newest checkpoints of two runs differ; wall-clock times and what measures them are left out."""
    newest = [folder / checkpoints(folder)[-1].name for folder in (folder_a, folder_b)]
    a, b = (torch.load(path, weights_only=True) for path in newest)
    parts = ("model", "optimizers", "schedulers", "algorithms", "rank_zero_seed")
    unequal = [d for part in parts for d in differences(a["state"][part], b["state"][part], part)]
    return unequal + differences(a["rng"], b["rng"], "rng")


def main() -> None:
    shutil.rmtree(RUNS, ignore_errors=True)
    whole, killed = RUNS / "whole", RUNS / "killed"

    say("1. A run without interruption.\n")
    accuracy_whole = launch(whole)

    say(f"\n2. The same run, asked to end with SIGTERM after batch {FIRST_QUARTER} of {BATCHES_PER_EPOCH * EPOCHS}.\n")
    code = launch_and_send(signal.SIGTERM, killed, FIRST_QUARTER)
    if code != 128 + signal.SIGTERM:
        raise SystemExit(f"\nThe run was to end with {128 + signal.SIGTERM} and ended with {code}")
    say(f"\n   It has saved and ended with {code}: {checkpoints(killed)[-1].name}.")

    say(f"\n3. The same command again, killed with SIGKILL after batch {HALF_WAY}.\n")
    launch_and_send(signal.SIGKILL, killed, HALF_WAY)
    say(f"\n   Killed. Its newest checkpoint is {checkpoints(killed)[-1].name}.")

    say("\n4. The same command again: it resumes from there.\n")
    accuracy_killed = launch(killed)

    say("\n5. What is there now.\n")
    for record in checkpoints(killed):
        say(f"   {record.name:24} batch {record.batch:3}  {record.size_bytes / 1e3:6.0f} kB  {record.saved_at}")
    say(f"\n   accuracy without interruption {accuracy_whole}, interrupted twice {accuracy_killed}")
    unequal = compare(whole, killed)
    if unequal or accuracy_whole != accuracy_killed:
        raise SystemExit(f"\nThe two runs differ in: {', '.join(unequal)}")
    say("\nThe run that was interrupted equals the uninterrupted one bit for bit:")
    say("weights, optimizer state, learning rate schedule and random numbers.")

    page = killed.with_name("report.html")
    report = [str(Path(sys.executable).with_name("composerlite")), "report", str(killed), "-o", str(page)]
    subprocess.run(report, check=True, timeout=60, stdout=subprocess.DEVNULL)
    say(f"\nWhat happened to it, as a page: {page}")


if __name__ == "__main__":
    main()

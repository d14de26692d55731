"""Has the public tool ckpt-chaos kill runs of twelve batches at every file event of their saves, and resume them.

``chaos.py [--max-points N] [--jobs N] [--runs 'async-*'] [--work FOLDER]``.
Saves that wait and saves that do not, with all checkpoints kept and with two: four runs of one rank, and twelve of two
ranks. Two ranks have whole copies of the model, of which rank 0 dies, or shards, of which either dies; the tool gives
the other rank three seconds then. Three modes: death before the event, death with the file cut in half, and SIGTERM.
Prints a table and fails if there is any verdict but PASS, a run that did not die, or one that died elsewhere than
planned.

The tool compares file names between runs; ours have the random id of a save, which it reports as PLAN DRIFT. What is
compared here is the event and the name without that id. The tool cannot tell which checkpoints are complete where
retention deletes some, and where files of shards have such names: there, the run itself refuses to start from an older
one than the newest (see ``twelve_batches``).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import chaos_run
from ckpt_chaos.runner import rejudge
from forked import Launcher

CRASHES = ("before", "torn", "term")
MODES = ("sync", "async")


@dataclass(frozen=True)
class Run:
    """A run that is killed again and again: how it saves, how many checkpoints it keeps, on how many ranks it is."""

    mode: str
    keep: int = -1
    spread: str = "alone"
    ranks: int = 1
    victim: int = 0

    @property
    def name(self) -> str:
        kept = "all" if self.keep == -1 else self.keep
        return f"{self.mode}-{kept}" if self.ranks == 1 else f"{self.mode}-{kept}-{self.spread}-rank{self.victim}"


RUNS = [Run(mode, keep) for mode in MODES for keep in (-1, 2)] + [
    Run(mode, keep, spread, 2, victim)
    for mode in MODES
    for keep in (-1, 2)
    for spread, victim in (("copies", 0), ("shards", 0), ("shards", 1))
]


@dataclass(frozen=True)
class Point:
    """One death: where it was to be and where it was, how the process ended, and the verdict on its resume.

    ``said``: the last line of the rank that was to die, where the tool keeps it, which is where there are several.
    """

    crash: str
    planned: str
    happened: str
    code: int
    verdict: str
    said: str = ""


def run_tool(launcher: Launcher, work: Path, run: Run, max_points: int, jobs: int) -> None:
    """Let the tool kill ``run``, ``jobs`` deaths at a time. The tool writes its results to ``work``."""
    command = [sys.executable, "-m", "ckpt_chaos", "run", "--work", str(work), "--timeout", "120"]
    command += ["--jobs", str(jobs), "--ranks", str(run.ranks), "--crash-rank", str(run.victim)]
    command += ["--checkpoint-glob", "{out}/checkpoints/ba*", "--ckpt-ignore-size"]  # clocks vary in size
    command += ["--step-regex", r"resumed from step (\d+)", "--result-file", "{out}/final"]
    command += ["--modes", ",".join(CRASHES), "--max-points", str(max_points), "--fail-on", "NONE"]
    command += ["--", *launcher.command, "{out}", run.mode, str(run.keep), "3ba", run.spread]
    environment = {**os.environ, "CKPT_CHAOS_CRASH_RANK": str(run.victim)}  # the tool tells its hooks of rank 0 only
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)


def points(work: Path, victim: int) -> Iterator[Point]:
    """Every death, and the control, which did not die."""
    records = sorted((json.loads(path.read_text()) for path in work.glob("pt_*/result.json")), key=lambda r: r["order"])
    for record, row in zip(records, rejudge(work), strict=True):
        assert record["label"] == row.label
        if "point" not in record:
            yield Point("none", "", "", record["rc"], row.verdict)
            continue
        number, crash = record["point"]
        folder = work / f"pt_{record['order']:03d}"
        log = (folder / f"events.log.rank{victim}").read_text().splitlines()
        seen = {int(line.split("\t")[0]): line.split("\t")[1:3] for line in log}
        planned, happened = (anonymous(" ".join(event)) for event in (record["event"], seen.get(number, ["none"])))
        output = folder / f"rank{victim}.log"
        said = output.read_text(errors="replace").strip().splitlines()[-1:] if output.exists() else []
        yield Point(crash, planned, happened, record["rc"], row.verdict, "".join(said))


def anonymous(event: str) -> str:
    """An event without the id of the save in the names of files."""
    return re.sub(r"[0-9a-f]{16}", "<id>", event)


def complaints(found: list[Point]) -> list[str]:
    """What is not as it should be."""
    wrong = [f"{point}" for point in found if point.verdict != "PASS"]
    # SIGTERM when training is over changes nothing. The mark that ranks look for is removed before it is closed, which
    # is when the tool cuts a file in half.
    may_live = [point for point in found if point.crash == "torn" and ".seen-by-all." in point.planned]
    must_die = [point for point in found if point.crash not in ("none", "term") and point not in may_live]
    wrong += [f"did not die: {point}" for point in must_die if point.code == 0]
    return wrong + [f"died elsewhere: {point}" for point in found if point.planned != point.happened]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--max-points", type=int, default=1_000_000, help="deaths for each of the runs")
    parser.add_argument("--jobs", type=int, default=2, help="deaths at the same time")
    names = ", ".join(run.name for run in RUNS)
    parser.add_argument("--runs", default="*", help=f"only those whose name this pattern matches, of {names}")
    parser.add_argument("--work", type=Path, help="keep what was run in this new folder")
    arguments = parser.parse_args()
    wrong: list[str] = []
    rows: list[str] = []
    with tempfile.TemporaryDirectory() as temporary, Launcher(chaos_run.main) as launcher:
        work: Path = (arguments.work or Path(temporary) / "chaos").resolve()
        for run in [run for run in RUNS if fnmatchcase(run.name, arguments.runs)]:
            folder = work / run.name
            run_tool(launcher, folder, run, arguments.max_points, arguments.jobs)
            found = list(points(folder, run.victim))
            wrong += complaints(found)
            crashes = Counter(point.crash for point in found)
            passed = sum(point.verdict == "PASS" for point in found)
            lost = sum(point.verdict == "LOST_WORK" for point in found)
            counts = " | ".join(str(crashes[crash]) for crash in (*CRASHES, "none"))
            kept = "all" if run.keep == -1 else run.keep
            who = "1" if run.ranks == 1 else f"2, {run.spread}, rank {run.victim} dies"
            rows.append(f"| {run.mode} | {kept} | {who} | {counts} | {passed} of {len(found)} | {lost} |")
            sys.stdout.write(f"{rows[-1]}\n")
            sys.stdout.flush()
    header = f"| saves | kept | ranks | {' | '.join(CRASHES)} | control | PASS | LOST_WORK |"
    sys.stdout.write("\n".join(["", header, "|---" * 9 + "|", *rows, "", *wrong, ""]))
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Every target of the Makefile names programs that exist, and every benchmark and the demo run in a short form."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE)
BENCHMARKS = re.findall(r"^ONLY \?= (.*)$", MAKEFILE, re.MULTILINE)[0].split()
GPU_STAGES = ["limits", "save", "steps", "training", "durable", "load", "torch_save", "dcp"]


def run(*command: str, out: Path | None = None, timeout: float = 240) -> str:
    """Return what a command prints. The benchmarks run in their short form and write their results to ``out``."""
    environment = {**os.environ, "BENCH_SHORT": "1", "OMP_NUM_THREADS": "1", "BENCH_OUT": str(out)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_each_target_of_the_makefile_names_programs_that_exist(target: str) -> None:
    recipe = run("make", "--dry-run", "--always-make", target)
    programs = re.findall(r"(?<!\$)\b[\w./-]+\.py\b", recipe.replace("$name", "measure"))
    missing = [program for program in programs if not (ROOT / program).is_file()]
    assert recipe
    assert not missing


@pytest.mark.timeout(600)
def test_every_benchmark_runs_and_the_report_judges_the_targets(tmp_path: Path) -> None:
    for name in BENCHMARKS:
        run(sys.executable, f"benchmarks/{name}.py", out=tmp_path)
        assert json.loads((tmp_path / f"{name}.json").read_text())
    report = run(sys.executable, "benchmarks/report.py", out=tmp_path)
    judged = set(re.findall(r"^(P\d+)\w* .*(?:met|MISSED)", report, re.MULTILINE))
    assert {"P1", "P3", "P4", "P6", "P7", "P8", "P9", "P10"} <= judged, report


def test_the_scale_benchmark_runs(tmp_path: Path) -> None:
    arguments = ["--models", "7B", "--layouts", "FSDP2", "--ranks", "8", "--no-votes"]
    assert "not run: votes" in run(sys.executable, "benchmarks/scale.py", *arguments, out=tmp_path)


def test_every_stage_of_the_gpu_benchmark_runs_on_a_cpu() -> None:
    output = run(sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--gb", "0.02", "--stage", *GPU_STAGES)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"')]
    assert len(lines) == len(GPU_STAGES)
    assert all(value >= 0 for line in lines for name, value in line.items() if name.endswith("_s")), output


def test_the_combinations_of_the_compatibility_test_are_checked() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/compat.py", "3.1:1.0"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "3.11:2.13" in done.stderr


def test_the_demo_shows_that_an_interrupted_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the demo trains on images that scikit-learn brings")
    assert "bit for bit" in run(sys.executable, "configs/demo.py", "2", str(tmp_path / "runs"))

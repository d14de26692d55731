"""The recipes for schedulers, run as far as a machine without these schedulers allows: asked to end, started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from ports import reserved_port

from composerlite.checkpoint import Catalog

pytest.importorskip("sklearn", reason="the recipes train on images that scikit-learn brings")

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "configs" / "recipes"
SECONDS = 120.0
SHORT = ["max_duration=40ba", "save_interval=100ba", "eval_interval=0", "progress_bar=false"]


def stand_ins(folder: Path) -> str:
    """A PATH on which Slurm's commands only do what matters here, and write down that they were called."""
    commands = folder / "commands"
    commands.mkdir()
    (commands / "srun").write_text('#!/bin/bash\nexec "$@"\n')
    (commands / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {folder}/scontrol.txt\n')
    for command in commands.iterdir():
        command.chmod(0o755)
    return f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"


def launch(
    command: Sequence[str], environment: Mapping[str, str], *, until: Path | None, number: int = signal.SIGTERM
) -> tuple[int, str]:
    """Run ``command``; once a loss is in the file ``until`` its whole group gets the signal. Its exit code and log."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    end = time.monotonic() + SECONDS
    while until is not None and not (until.exists() and "loss" in until.read_text()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "training did not begin"
        time.sleep(0.01)
    if until is not None:
        os.killpg(process.pid, number)
    said, _ = process.communicate(timeout=SECONDS)
    return process.returncode, said


def begun(folder: Path) -> tuple[Path, list[str]]:
    """A file in which losses are noted, and what to add to a command for it."""
    path = folder / "metrics.txt"
    return path, [f"loggers.file.filename={path}", "loggers.file.flush_interval=1", *SHORT]


def the_batch(folder: Path) -> int:
    return Catalog(folder).manifests()[-1].batch


def test_slurm(tmp_path: Path) -> None:
    """SIGUSR1 to all processes of the step: the run saves, has the job requeued, and goes on under the job's name."""
    until, more = begun(tmp_path)
    environment = {
        "PATH": stand_ins(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_END_TIME": str(int(time.time()) + 3600),
        "SAVE_FOLDER": f"{tmp_path}/{{run_name}}",
    }
    command = ["bash", str(RECIPES / "slurm.sbatch"), *more]
    code, said = launch(command, environment, until=until, number=signal.SIGUSR1)
    assert code == 128 + signal.SIGUSR1, said
    assert "the Slurm job 7 is in the queue again" in said
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 7\n"
    batch = the_batch(tmp_path / "slurm-7")
    assert 0 < batch < 40
    assert f"{signal.Signals.SIGUSR1.name}: the run ends after batch {batch}, 3" in said, "the job's end is known"
    until.unlink()
    code, said = launch(command, environment, until=None)
    assert code == 0, said
    assert the_batch(tmp_path / "slurm-7") == 40


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as number:
        yield number


@pytest.mark.soak
def test_slurm_with_ranks(tmp_path: Path, port: int) -> None:
    """The same under torchrun, on as many nodes as there are here: one."""
    until, more = begun(tmp_path)
    environment = {
        "PATH": stand_ins(tmp_path),
        "SLURM_JOB_ID": "8",
        "HEAD_NODE": "127.0.0.1",
        "PORT": str(port),
        "SAVE_FOLDER": f"{tmp_path}/{{run_name}}",
    }
    command = ["bash", str(RECIPES / "slurm-ranks.sbatch"), *more]
    code, said = launch(command, environment, until=until)
    assert code != 0, said
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 8\n"
    assert 0 < the_batch(tmp_path / "slurm-8") < 40
    code, said = launch(command, environment, until=None)
    assert code == 0, said
    assert the_batch(tmp_path / "slurm-8") == 40


def bucket(request: pytest.FixtureRequest) -> tuple[str, dict[str, str]]:
    server = request.getfixturevalue("s3_server")
    return server.new_bucket(), dict(server.environment)


@pytest.mark.soak
def test_kubernetes(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The pod's own command in its environment, with SIGTERM as from the kubelet; another pod goes on from the bucket
    under the name of the job."""
    job: dict[str, Any] = yaml.safe_load((RECIPES / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    name, environment = bucket(request)
    environment |= {variable["name"]: variable["value"] for variable in container["env"]}
    environment |= {"HOSTNAME": f"{job['metadata']['name']}-0", "JOB_COMPLETION_INDEX": "0"}
    until, more = begun(tmp_path)
    program = [str(Path(sys.executable).parent / container["command"][0]), *container["command"][1:]]
    args = [arg.replace("s3://checkpoints", f"s3://{name}") for arg in container["args"]]
    first = [*program, *args, *more, f"save_staging_folder={tmp_path}/a"]
    code, said = launch(first, environment, until=until)
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert code == 143 == rules[1]["onExitCodes"]["values"][0], said
    assert "and in the bucket" in said
    assert 100 < float(said.split("the run ends after batch ")[1].split(", ")[1].split()[0]) <= 110
    until.unlink()
    code, said = launch([*program, *args, *more, f"save_staging_folder={tmp_path}/b"], environment, until=None)
    assert code == 0, said
    assert the_batch(tmp_path / "b" / "digits") == 40


@pytest.mark.soak
def test_skypilot(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The same for a job that is recovered on another machine."""
    task: dict[str, Any] = yaml.safe_load((RECIPES / "skypilot.yaml").read_text())
    name, environment = bucket(request)
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SKYPILOT_TASK_ID": "sky-managed-2026-01-01-00-00-00-000000_digits_3-0",
    }
    until, more = begun(tmp_path)
    script = task["run"].strip().replace("s3://checkpoints", f"s3://{name}").replace("save_interval=auto:1%", "")
    script = f"{script} {' '.join(more)}"
    code, said = launch(["bash", "-c", f"{script} save_staging_folder={tmp_path}/a"], environment, until=until)
    assert code == 143 == task["resources"]["job_recovery"]["recover_on_exit_codes"][0], said
    until.unlink()
    code, said = launch(["bash", "-c", f"{script} save_staging_folder={tmp_path}/b"], environment, until=None)
    assert code == 0, said
    assert the_batch(next((tmp_path / "b").iterdir())) == 40
    assert json.loads(next((tmp_path / "b").rglob("*.json")).read_text())["run_name"].startswith("sky-managed")

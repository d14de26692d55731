"""The recipes for schedulers, run as far as a machine without these schedulers allows: asked to end, started again."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
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


def documents(recipe: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((RECIPES / recipe).read_text()))


def lost(given: Any, known: Any, place: str = "") -> list[str]:
    """What of ``given`` is not in ``known``, to which defaults were added."""
    if isinstance(given, dict):
        return [one for name, value in given.items() for one in lost(value, known.get(name), f"{place}.{name}")]
    if isinstance(given, list) and len(given) == len(known or ()):
        return [one for n, value in enumerate(given) for one in lost(value, known[n], f"{place}[{n}]")]
    return [] if given == known else [f"{place}: {given!r}"]


@pytest.mark.parametrize("recipe", ["kubernetes.yaml", "jobset.yaml", "kubeflow-trainer.yaml"])
def test_manifests_have_the_fields_of_their_schema(recipe: str) -> None:
    """Models of Kubernetes, JobSet and Kubeflow Trainer know all fields, in these types, and miss none. What a cluster
    checks beyond that, such as names that refer to others, is not checked."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    kinds = {
        "Job": models.IoK8sApiBatchV1Job,
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    for document in documents(recipe):
        model = kinds[document["kind"]]
        assert lost(document, model.from_dict(document).to_dict()) == []
        wrong = {**document, "spec": {**document["spec"], "maxRestart": 3}}
        assert lost(wrong, model.from_dict(wrong).to_dict()) == [".spec.maxRestart: 3"]
        with pytest.raises(ValueError, match="validation error"):
            model.from_dict({**document, "spec": {**document["spec"], "suspend": "text", "template": "text"}})


@contextmanager
def pods(*starts: Callable[[], subprocess.Popen[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """These pods. What is left of them is killed at the end."""
    running = [start() for start in starts]
    try:
        yield running
    finally:
        for pod in running:
            kill(pod)


def kill(pod: subprocess.Popen[str]) -> None:
    """SIGKILL to all processes of a pod: to the agent of torchrun and to its rank."""
    with suppress(psutil.NoSuchProcess):
        agent = psutil.Process(pod.pid)
        for process in [*agent.children(recursive=True), agent]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    pod.wait(SECONDS)


def started(command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[str]:
    with log.open("w") as file:
        return subprocess.Popen(
            [str(Path(sys.executable).parent / command[0]), *command[1:]],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
            | environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
        )


def wait_for(until: Path, pod: subprocess.Popen[str], log: Path) -> None:
    end = time.monotonic() + SECONDS
    while not until.exists():
        assert pod.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.01)


@pytest.mark.soak
def test_jobset(tmp_path: Path, port: int) -> None:
    """The command of its pods, three of them: one is killed and replaced by another, and all end well."""
    (jobset,) = documents("jobset.yaml")
    (container,) = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    _, more = begun(tmp_path)
    command = [
        part.replace("digits-node-0-0.digits:29500", f"127.0.0.1:{port}").replace("s3://checkpoints", str(tmp_path))
        for part in [*container["command"], *container["args"], *more, "max_duration=200ba"]
    ]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    logs = [tmp_path / f"pod{number}.log" for number in range(4)]

    def start(number: int) -> subprocess.Popen[str]:
        host = f"--rdzv-conf=is_host={int(number == 0)},"  # as torchrun finds out by the name of the first pod
        return started([part.replace("--rdzv-conf=", host) for part in command], logs[number], **environment)

    with pods(*(functools.partial(start, number) for number in range(3))) as running:
        wait_for(tmp_path / "digits" / "latest-rank0.pt", running[0], logs[0])
        kill(running[2])
        running.append(start(3))
        for pod, log in zip(running, logs, strict=True):
            code = pod.wait(SECONDS)
            assert code == (-signal.SIGKILL if pod is running[2] else 0), log.read_text()
    assert any("resumed run 'digits'" in log.read_text() for log in logs)
    assert the_batch(tmp_path / "digits") == 200


@pytest.mark.soak
def test_kubeflow_trainer(tmp_path: Path, port: int) -> None:
    """The command of a TrainJob with the environment that Kubeflow sets: a pod is killed, the other one gets
    SIGTERM as from JobSet, which starts both again, and the run ends well."""
    runtime, job = documents("kubeflow-trainer.yaml")
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    grace = replicated["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    trainer = job["spec"]["trainer"]
    _, more = begun(tmp_path)
    arguments = [*trainer["command"], *trainer["args"], *more, "save_interval=10ba"]
    command = [part.replace("s3://checkpoints", str(tmp_path)) for part in arguments]
    where = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
    where |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    logs = [tmp_path / f"pod{number}.log" for number in range(2)]
    both = [functools.partial(started, command, logs[rank], PET_NODE_RANK=str(rank), **where) for rank in range(2)]
    with pods(*both) as (first, second):
        wait_for(tmp_path / "digits" / "latest-rank0.pt", first, logs[0])
        kill(second)
        first.terminate()
        assert first.wait(grace) != 0, logs[0].read_text()
    with pods(*both) as running:
        for pod, log in zip(running, logs, strict=True):
            assert pod.wait(SECONDS) == 0, log.read_text()
    assert any("resumed run 'digits'" in log.read_text() for log in logs)
    assert the_batch(tmp_path / "digits") == 40


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

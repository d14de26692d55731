"""``composerlite eval`` and ``predict`` as a user runs them, on a run of ``composerlite train``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import answer, command, composerlite
from forked import Launcher
from torch.distributed.run import main as torchrun

TASK = '''
"""A task that says where it is imported, and whose training can be held up."""

import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from composerlite.models import ComposerClassifier

Path(__file__).with_name("imported").touch()


def model():
    layers = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 2)]
    return ComposerClassifier(torch.nn.Sequential(*layers), num_classes=2)


def data(seed, samples=37, broken=False, wait_for=None):
    if broken:
        raise FileNotFoundError("the training data are on another machine")
    images = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    found = TensorDataset(images, (images.sum(1) > 0).long())
    return found if wait_for is None else Held(*found.tensors, wait_for=wait_for)


class Held(TensorDataset):
    """From its middle on it waits for a file."""

    def __init__(self, *tensors, wait_for):
        super().__init__(*tensors)
        self.file = Path(wait_for)

    def __getitem__(self, index):
        if index == 20:
            self.file.with_suffix(".waiting").touch()
        while index >= 20 and not self.file.exists():
            time.sleep(0.01)
        return super().__getitem__(index)
'''

RUN = """
run_name: fox
seed: 3
max_duration: 2ep
model: {name: task:model}
train_loader: {dataset: {name: task:data, seed: 0}, batch_size: 8}
eval_loader:
  - {label: near, dataset: {name: task:data, seed: 1}, batch_size: 8}
  - {label: far, dataset: {name: task:data, seed: 2}, batch_size: 8}
optimizer: {name: adamw, lr: 0.05}
algorithms: {ema: {half_life: 4ba}}
callbacks: {speed_monitor: {}, lr_monitor: {}}
loggers: {jsonl: {}}
autoresume: true
progress_bar: false
save_folder: runs/{run_name}
save_memory_interval: 1ba
save_best_k: 2
save_best_metric: near/MulticlassAccuracy
"""
BROKEN = "train_loader.dataset.broken=true"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run that has ended, ``runs/fox``. Not to be changed."""
    project = tmp_path_factory.mktemp("project")
    (project / "task.py").write_text(TASK)
    (project / "fox.yaml").write_text(RUN)
    done = composerlite("train", "fox.yaml", f"save_memory_folder={tmp_path_factory.mktemp('memory')}", cwd=project)
    assert done.returncode == 0, done.stderr
    return project


@pytest.fixture
def project(ended: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(ended, tmp_path / "project", symlinks=True))


@pytest.fixture(scope="module")
def on_two_ranks() -> Iterator[list[str]]:
    """``torchrun … composerlite``, neither of which need import torch first."""
    with Launcher(agent) as agents, Launcher(command) as programs:
        yield [*agents.command, "--standalone", "--nproc-per-node", "2", "--no-python", *programs.command]


def agent(*_: str) -> None:
    """``torchrun`` with the arguments of its process."""
    torchrun()


def measured(project: Path) -> dict[str, Any]:
    """What the last evaluations of the run have measured, by evaluator."""
    lines = [json.loads(line) for line in (project / "runs/fox/record.jsonl").read_text().splitlines()]
    last: dict[str, Any] = {}
    for line in lines:
        for name, value in line.get("metrics", {}).items():
            if name.startswith(("metrics/near/", "metrics/far/")):
                last.setdefault(name.split("/")[1], {})[name.split("/")[2]] = value
    return last


def everything(folder: Path) -> dict[str, Any]:
    """Content, time and kind of every file and folder below ``folder``."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if "__pycache__" not in path.parts and path.name != "imported":
            status = path.lstat()
            content = path.read_bytes() if path.is_file() else None
            found[str(path)] = status.st_mtime_ns, status.st_ino, status.st_mode, content
    return found


def refused(*arguments: str, cwd: Path, status: int, stderr: str) -> None:
    """The command ends with this status, and its message is this one."""
    done = composerlite(*arguments, cwd=cwd)
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    expected = f"composerlite: error: {stderr}".splitlines()
    assert done.stderr.splitlines()[: len(expected)] == expected


# ── eval ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_last_checkpoint_is_evaluated_as_training_did(ended: Path) -> None:
    """With the average of EMA, which training evaluates, and bit for bit; training data need not be there.

    A line for each evaluator is all that is on stdout; which checkpoint it is, is on stderr.
    """
    done = composerlite("eval", "fox.yaml", BROKEN, cwd=ended)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "checkpoint runs/fox/ep2-ba10-rank0.pt, run fox, epoch 2, batch 10\n"
    values = measured(ended)
    assert list(values["near"]) == ["loss", "MulticlassAccuracy", "CrossEntropy"]
    lines = [f"{label}: {', '.join(f'{n} {v:.4g}' for n, v in values[label].items())}\n" for label in values]
    assert done.stdout == "".join(lines)
    told = answer("eval", "fox.yaml", cwd=ended)
    assert told == {
        "checkpoint": "runs/fox/ep2-ba10-rank0.pt",
        "run_name": "fox",
        "epoch": 2,
        "batch": 10,
        "metrics": values,
    }


@pytest.mark.parametrize(
    "place", ["runs/fox/ep2-ba10-rank0.pt", "runs/fox/latest-rank0.pt", "runs/fox", "runs", "weights.pt", "directory"]
)
def test_a_checkpoint_knows_the_configuration_of_its_run(project: Path, place: str) -> None:
    """A file, a link, the folder of a run or of runs, a directory, weights alone; looked at from elsewhere."""
    if place == "directory":
        composerlite("checkpoint", "convert", "runs/fox/latest-rank0.pt", place, cwd=project)
    if place == "weights.pt":
        weights = ("save_weights_only=true", "save_filename=weights.pt", "save_interval=2ep", "save_folder=.")
        without = [f"{key}=null" for key in ("save_memory_interval", "save_best_k", "save_best_metric", "algorithms")]
        more = [*without, "save_latest_filename=null", "autoresume=false"]
        done = composerlite("train", "fox.yaml", *weights, *more, cwd=project)
        assert done.returncode == 0, done.stderr
    elsewhere = project / "elsewhere"
    elsewhere.mkdir()
    told = answer("eval", project / place, "--trust-config", BROKEN, cwd=elsewhere)
    assert (told["run_name"], told["batch"]) == ("fox", 10)
    if place != "weights.pt":
        assert told["metrics"] == measured(project)
    other = answer("eval", project / place, "--trust-config", "eval_loader[0].dataset.samples=8", cwd=elsewhere)
    assert other["metrics"]["near"] != told["metrics"]["near"]
    assert other["metrics"]["far"] == told["metrics"]["far"]


def test_nothing_of_the_run_is_changed(project: Path) -> None:
    """Every file and folder is as before, to the byte and the moment, whatever the configuration has running."""
    before = everything(project)
    for source in (
        ["fox.yaml"],
        ["runs/fox", "--trust-config"],
        ["fox.yaml", "--checkpoint", "runs/fox/ep1-ba5-rank0.pt"],
    ):
        assert composerlite("eval", *source, cwd=project).returncode == 0
    output = project.parent / "out/far.pt"
    done = composerlite("predict", "fox.yaml", "--data", "far", "--output", output, cwd=project)
    assert done.returncode == 0, done.stderr
    assert everything(project) == before


def test_a_run_that_lives_is_left_alone(project: Path) -> None:
    """It holds its lease, in the middle of an epoch; its checkpoint is evaluated, and it ends as it would have."""
    held = project / "held"
    with Launcher(command) as programs:
        arguments = ["run_name=owl", f"train_loader.dataset.wait_for={held}", f"save_memory_folder={project}"]
        run = subprocess.Popen(
            [*programs.command, "train", "fox.yaml", *arguments, "save_interval=1ba"],
            cwd=project,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            deadline = time.monotonic() + 120
            while not (held.with_suffix(".waiting").exists() and list(project.glob("runs/owl/ep0-ba2-*"))):
                assert run.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            told = answer("eval", "fox.yaml", "run_name=owl", cwd=project)
            held.touch()
            said, _ = run.communicate(timeout=120)
        finally:
            run.kill()
            run.wait()
    assert told["checkpoint"] == "runs/owl/ep0-ba2-rank0.pt"
    assert run.returncode == 0, said
    assert "run owl ended at epoch 2, batch 10: " in said


def test_ranks_evaluate_together(ended: Path, tmp_path: Path, on_two_ranks: list[str]) -> None:
    """Two ranks under torchrun measure what one does, of a directory too, and tell it once. Each predicts its part."""
    composerlite("checkpoint", "convert", "runs/fox/latest-rank0.pt", tmp_path / "directory", cwd=ended)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*on_two_ranks, "eval", "fox.yaml", "--checkpoint", str(tmp_path / "directory"), "--json"]
    done = subprocess.run(command, cwd=ended, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    values = measured(ended)
    told = json.loads(done.stdout)["metrics"]
    assert {label: told[label] for label in values} == {label: pytest.approx(values[label]) for label in values}

    command = [*on_two_ranks, "predict", "fox.yaml", "--data", "near", "-o", f"{tmp_path}/near-{{rank}}.pt"]
    done = subprocess.run(command, cwd=ended, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"wrote {tmp_path}/near-{rank}.pt" for rank in range(2)]
    parts = [torch.cat(torch.load(tmp_path / f"near-{rank}.pt")) for rank in range(2)]
    composerlite("predict", "fox.yaml", "--data", "near", "-o", tmp_path / "whole.pt", cwd=ended)
    whole = torch.cat(torch.load(tmp_path / "whole.pt"))
    assert sum(map(len, parts)) == len(whole) == 37
    assert {tuple(row.tolist()) for part in parts for row in part.mul(1e3).round()} == {
        tuple(row.tolist()) for row in whole.mul(1e3).round()
    }


def test_a_run_in_a_bucket_is_evaluated_from_there(project: Path, bucket: str) -> None:
    """By its configuration, by the URI of its folder, and by that of a checkpoint."""
    where = f"save_folder={bucket}/fox"
    here = (f"save_staging_folder={project}/staging", f"save_memory_folder={project}")
    done = composerlite("train", "fox.yaml", where, *here, cwd=project)
    assert done.returncode == 0, done.stderr
    values = measured(project)
    for arguments in (["fox.yaml", where], [f"{bucket}/fox", "--trust-config"]):
        told = answer("eval", *arguments, cwd=project)
        assert (told["checkpoint"], told["metrics"]) == (f"{bucket}/fox/ep2-ba10-rank0.pt", values)
    told = answer("eval", f"{bucket}/fox/ep1-ba5-rank0.pt", "--trust-config", cwd=project)
    assert told["batch"] == 5


def test_a_checkpoint_that_came_to_nan_is_passed_over(project: Path) -> None:
    """As a resume does; whoever names it gets it."""
    more = ("max_duration=3ep", "optimizer.lr=.inf", f"save_memory_folder={project}")
    composerlite("train", "fox.yaml", *more, cwd=project)
    assert (project / "runs/fox/ep3-ba15-rank0.pt").exists()
    assert answer("eval", "fox.yaml", cwd=project)["batch"] == 10
    named = answer("eval", "fox.yaml", "--checkpoint", "runs/fox/ep3-ba15-rank0.pt", cwd=project)
    assert (named["batch"], named["metrics"]["near"]["loss"]) == (15, "nan")


# ── predict ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_outputs_are_written_for_torch_load(ended: Path, tmp_path: Path) -> None:
    """Those of each batch, in order, in a new file: one that is there is not replaced, and no code is in it."""
    file = tmp_path / "out/near.pt"
    done = composerlite("predict", "fox.yaml", BROKEN, "--data", "near", "--output", file, cwd=ended)
    assert (done.returncode, done.stdout) == (0, f"wrote {file}\n"), done.stderr
    outputs = torch.load(file, weights_only=True)
    assert [len(batch) for batch in outputs] == [8, 8, 8, 8, 5]
    before = file.read_bytes()
    stderr = f"--output {file}: the file exists already. Pass another name."
    refused("predict", "fox.yaml", "--data", "near", "-o", str(file), cwd=ended, status=2, stderr=stderr)
    assert file.read_bytes() == before


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_code_that_a_checkpoint_names_is_not_run_unasked(project: Path) -> None:
    """A checkpoint may come from anywhere: without --trust-config not even a module is imported."""
    (project / "imported").unlink()
    way = "'composerlite eval CONFIG --checkpoint runs/fox' with the YAML file of the run"
    stderr = (
        "the configuration in 'runs/fox/ep2-ba10-rank0.pt' names code to run, such as 'task:model'. If you trust the "
        f"author of the checkpoint, pass --trust-config; otherwise use {way}."
    )
    refused("eval", "runs/fox", cwd=project, status=2, stderr=stderr)
    assert not (project / "imported").exists()


def test_a_checkpoint_without_a_configuration_says_what_to_do(ended: Path, trained: Path) -> None:
    """One that a script has saved keeps none."""
    way = f"'composerlite eval CONFIG --checkpoint {trained}' with the YAML file of the run"
    stderr = (
        f"'{trained}/ep3-ba12-rank0.pt' has no configuration, since it was not saved by 'composerlite train', or it is "
        f"a DeepSpeed archive. Use {way}."
    )
    refused("eval", str(trained), "--trust-config", cwd=ended, status=2, stderr=stderr)


@pytest.mark.parametrize(
    ("arguments", "status", "stderr"),
    [
        (["eval_loader=null"], 2, "fox.yaml: there is no eval_loader, so there is nothing to evaluate."),
        (["save_folder=null"], 2, "fox.yaml: there is no save_folder. Pass --checkpoint PLACE."),
        (
            ["load_path=a.pt"],
            2,
            "load_path='a.pt' is for training. To evaluate it pass --checkpoint a.pt.",
        ),
        (
            ["run_name=null", "autoresume=false"],
            2,
            "fox.yaml:16: save_folder='runs/{run_name}': the run has no name. Pass run_name=NAME, or "
            "--checkpoint PLACE.",
        ),
        (
            ["run_name=owl"],
            1,
            "there is neither a checkpoint nor a folder of checkpoints at 'runs/owl'.\n"
            "This is the save_folder of the run. To evaluate another checkpoint pass --checkpoint PLACE.",
        ),
        (
            ["run_name=owl", "save_folder=runs/fox"],
            1,
            "no good checkpoint of run 'owl' in runs/fox. 'composerlite checkpoint ls' lists all.\n"
            "This is the save_folder of the run. To evaluate another checkpoint pass --checkpoint PLACE.",
        ),
        (
            ["--checkpoint", "s5://b/x"],
            2,
            "'s5://b/x': unknown scheme 's5'. Known: file, gs, http, https, libcloud, oci, s3, sftp.",
        ),
        (
            ["max_durration=3"],
            2,
            "override 'max_durration=3': unknown key 'max_durration'. Did you mean 'max_duration'?",
        ),
    ],
)
def test_a_mistake_is_one_message(ended: Path, arguments: list[str], status: int, stderr: str) -> None:
    """On stderr, with status 2 if the command is wrong, and 1 if something is not there."""
    done = composerlite("eval", "fox.yaml", *arguments, cwd=ended)
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    expected = f"composerlite: error: {stderr}".splitlines()
    assert done.stderr.splitlines()[: len(expected)] == expected
    assert done.stderr.count("composerlite: error: ") == 1


def test_predict_wants_to_know_which_data(ended: Path, tmp_path: Path) -> None:
    """Where there are several, and where the label is none of them."""
    out = ("-o", f"{tmp_path}/x.pt")
    several = "there are several eval_loaders: near, far. Pass --data LABEL."
    refused("predict", "fox.yaml", *out, cwd=ended, status=2, stderr=several)
    unknown = "--data fra: there is no such eval_loader. Expected one of near, far."
    refused("predict", "fox.yaml", *out, "--data", "fra", cwd=ended, status=2, stderr=unknown)

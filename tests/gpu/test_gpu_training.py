"""Training on a GPU: exact resume, memory, prediction, and checkpoints that go between a GPU and the CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_parts import BATCHES, DEVICE, GPU, NEEDS_CUDA, Net, build, data, differing, tensors_of

from composerlite import ComposerModel, Trainer, dist
from composerlite.callbacks import OOMObserver

pytestmark = GPU
PROGRAM = Path(__file__).with_name("gpu_run.py")
PATHS = os.pathsep.join([str(PROGRAM.parents[2]), str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")])
HOW: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "amp_bf16"},
    "fused": {"optimizer": {"fused": True}},
    "foreach": {"optimizer": {"foreach": True}},
}
ON_CUDA: dict[str, dict[str, Any]] = {
    "fp16 with a scaler": {"precision": "amp_fp16"},
    "capturable": {"optimizer": {"capturable": True}},
    "compiled": {"compile_config": {}},
    "reduce-overhead": {"compile_config": {"mode": "reduce-overhead"}, "device_train_microbatch_size": 8},
}


def resume_exactly(folder: Path, how: dict[str, Any]) -> None:
    """Train six batches; train on from the third of them; compare."""
    with build(folder / "whole", **how) as trainer:
        trainer.fit()
    with build(folder / "resumed", **how, load_path=str(folder / "whole" / "ba3.pt")) as trainer:
        trainer.fit()
    whole, resumed = (tensors_of(torch.load(folder / name / f"ba{BATCHES}.pt")) for name in ("whole", "resumed"))
    assert differing(whole, resumed) == []


@pytest.mark.parametrize("name", HOW)
def test_a_resume_is_exact(name: str, tmp_path: Path) -> None:
    """Bit for bit, dropout on the device included; every copy is compared with what it was."""
    resume_exactly(tmp_path, HOW[name])


@NEEDS_CUDA
@pytest.mark.parametrize("name", ON_CUDA)
def test_a_resume_is_exact_with_what_only_gpus_have(name: str, tmp_path: Path) -> None:
    """The same."""
    resume_exactly(tmp_path, ON_CUDA[name])


@NEEDS_CUDA
@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_checkpoint_goes_between_devices(first: str, then: str, tmp_path: Path) -> None:
    """The weights and the state of the optimizer are the same on the other kind of device."""
    with build(tmp_path, device=first) as trainer:
        trainer.fit()
    with build(device=then, load_path=str(tmp_path / f"ba{BATCHES}.pt")) as loaded:
        state = {"state": loaded.state.state_dict()}
    assert differing(tensors_of(torch.load(tmp_path / f"ba{BATCHES}.pt")), tensors_of(state)) == []


def run(folder: Path) -> subprocess.Popen[str]:
    """Start the program of ``gpu_run``, or resume it."""
    command = [sys.executable, str(PROGRAM), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": PATHS})


def test_a_run_that_is_killed_resumes_exactly(tmp_path: Path) -> None:
    """With SIGKILL after its third batch: it resumes by itself, and ends bit for bit as one that was not killed."""
    for name in ("whole", "killed"):
        with run(tmp_path / name) as process:
            assert process.stdout is not None
            lines = [line for line in process.stdout if name == "whole" or (line == "batch 3\n" and not process.kill())]
            assert process.wait(120) == (0 if name == "whole" else -signal.SIGKILL)
        assert lines
    resumed = run(tmp_path / "killed")
    out, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 0
    assert 0 < out.count("batch") < BATCHES, "it does not begin anew"
    whole, killed = (tensors_of(torch.load(tmp_path / name / f"ba{BATCHES}.pt")) for name in ("whole", "killed"))
    assert differing(whole, killed) == []


def test_predict_gives_what_the_model_gives() -> None:
    """The outputs are on the CPU, and complete."""
    with build() as trainer:
        outputs = trainer.predict(data())
    model = trainer.state.model.eval()
    with torch.no_grad():
        expected = [model([part.to(DEVICE) for part in batch]).cpu() for batch in data()]
    assert all(torch.equal(one, other) for one, other in zip(outputs, expected, strict=True))


class Hungry(Net):
    """Needs 64 MiB for each sample."""

    def forward(self, batch: Any) -> torch.Tensor:
        held = torch.empty(len(batch[0]), 64 << 20, dtype=torch.uint8, device=batch[0].device)
        return super().forward(batch) + held[:, :1].sum() * 0


@NEEDS_CUDA
def test_a_batch_that_does_not_fit_is_halved(tmp_path: Path) -> None:
    """The device really is out of memory: ``set_per_process_memory_fraction`` leaves 320 MiB. What was in it is in a
    file."""
    observer = OOMObserver(folder=str(tmp_path), remote_file_name=None)
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (320 << 20)) / whole)
    try:
        with build(model=Hungry(), device_train_microbatch_size="auto", callbacks=observer) as trainer:
            trainer.fit()
        assert trainer.state.device_train_microbatch_size in (2, 4)
        assert (tmp_path / "rank0_oom.pickle").stat().st_size > 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@NEEDS_CUDA
def test_the_second_gpu_alone_can_be_named(tmp_path: Path) -> None:
    """``device="cuda:1"`` is the current device of the process, and its generator is the one that is saved."""
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    before = torch.cuda.current_device()
    try:
        with build(tmp_path, device="cuda:1"):
            assert torch.cuda.current_device() == 1
    finally:
        torch.cuda.set_device(before)


@NEEDS_CUDA
def test_one_process_shards_over_nccl(tmp_path: Path) -> None:
    """FSDP2 at world size 1: a directory is saved and resumed from."""
    how: dict[str, Any] = {"parallelism_config": {"fsdp": {}}, "save_filename": "ba{batch}"}

    def trained(folder: Path, **arguments: Any) -> tuple[Trainer, dict[str, torch.Tensor]]:
        model: ComposerModel = Net()
        with build(folder, model=model, **how, **arguments) as trainer:
            trainer.fit()
            weights = {
                name: p.full_tensor().cpu() if hasattr(p, "full_tensor") else p.cpu()
                for name, p in model.state_dict().items()
            }
        return trainer, weights

    _, whole = trained(tmp_path / "whole")
    _, resumed = trained(tmp_path / "resumed", load_path=str(tmp_path / "whole" / "ba3"))
    dist.finalize_dist()
    assert differing(whole, resumed) == []

"""Checkpoints of what is on a GPU: first that they are right, then what they cost, against limits of the same run.

``make gpu`` runs the stages one after the other, each in a process of its own with a deadline of its own. Each writes a
line of JSON to ``benchmarks/out/gpu.jsonl``, also where it fails or is ended. Without a GPU one line says so, and
nothing runs.

Usage: ``python benchmarks/gpu.py``; with ``--stage NAME --gb SIZE --device cpu`` one stage, on the CPU, to see that it
works.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "out" / "gpu.jsonl"
PLAN: list[tuple[str, float, int]] = [
    ("correctness", 0.0, 180),
    ("limits", 1.5, 40),
    ("save", 1.5, 40),
    ("torch_save", 1.5, 30),
    ("dcp", 1.5, 40),
    ("limits", 16.0, 60),
    ("save", 16.0, 80),
    ("dcp", 16.0, 80),
    ("save", 40.0, 120),
]
"""Stage, size of the state in GB, deadline in seconds."""


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def state_of(gb: float, device: str) -> dict[str, torch.Tensor]:
    """Tensors of 64 MB and a few small ones, of ``gb`` GB."""
    count = max(1, round(gb * 1e9 / 64e6))
    large = {f"weight{n}": torch.full((16_000_000,), float(n), device=device) for n in range(count)}
    return {**large, **{f"bias{n}": torch.full((1000,), float(n), device=device) for n in range(200)}}


# ── stages: each returns numbers by name ─────────────────────────────────────────────────────────────────────────────
def limits(gb: float, device: str, folder: Path) -> dict[str, float]:
    """A raw copy into pinned memory, and a plain write to the disk."""
    size = min(int(gb * 1e9), 4_000_000_000)
    source = torch.ones(size // 4, device=device)
    target = torch.empty(size // 4, pin_memory=device == "cuda")
    target.copy_(source)
    best = float("inf")
    for _ in range(3):
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    started = time.perf_counter()
    with (folder / "raw").open("wb", buffering=0) as file:
        view = memoryview(target.numpy()).cast("B")
        for at in range(0, size, 64 << 20):
            file.write(view[at : at + (64 << 20)])
        os.fsync(file.fileno())
    return {"copy_gb_per_s": size / best / 1e9, "disk_gb_per_s": size / (time.perf_counter() - started) / 1e9}


def save(gb: float, device: str, folder: Path) -> dict[str, float]:
    """Three asynchronous saves of ours, late, each with the step of an optimizer after it; bytes are compared."""
    from composerlite.checkpoint.format.torch_file import TorchImage
    from composerlite.checkpoint.save.staging import Staging

    state = state_of(gb, device)
    parameters = [torch.nn.Parameter(tensor) for tensor in state.values()]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    for parameter in parameters[:1]:
        parameter.grad = torch.zeros_like(parameter)
    staging = Staging()
    image = TorchImage(dict(zip(state, parameters, strict=True)))
    staging.prepare(image.size_bytes)
    if not staging.prepared(600):
        raise RuntimeError("memory was not prepared")
    found: dict[str, float] = {"size_gb": image.size_bytes / 1e9}
    for number in range(3):
        image = TorchImage(dict(zip(state, parameters, strict=True)))
        copies = image.storages()
        if not staging.reserve(image.size_bytes):
            raise RuntimeError("no memory for the copy")
        synchronize(device)
        started = time.perf_counter()
        snapshot = staging.take(image, [optimizer])
        found[f"host_ms_{number}"] = (time.perf_counter() - started) * 1000
        optimizer.step()
        snapshot.wait()
        found[f"copied_s_{number}"] = time.perf_counter() - started
        for storage, offset in (copies[0], copies[len(copies) // 2], copies[-1]):
            copied = torch.frombuffer(snapshot.memory.view(offset, storage.nbytes()), dtype=torch.uint8)
            live = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
            if not torch.equal(copied, live.cpu()):
                raise RuntimeError("bytes differ")
        del copied, image, copies
        staging.give_back(snapshot.memory)
    staging.close()
    found["device_to_host_gb_per_s"] = found["size_gb"] / min(found["copied_s_1"], found["copied_s_2"])
    return found


def torch_save(gb: float, device: str, folder: Path) -> dict[str, float]:
    """``torch.save``, which keeps training until all is in the page cache."""
    state = state_of(gb, device)
    synchronize(device)
    started = time.perf_counter()
    torch.save(state, folder / "state.pt")
    blocked = time.perf_counter() - started
    loaded = torch.load(folder / "state.pt", map_location="cpu", mmap=True)
    if not all(torch.equal(loaded[name], tensor.cpu()) for name, tensor in list(state.items())[::50]):
        raise RuntimeError("bytes differ")
    return {"blocked_s": blocked}


def dcp(gb: float, device: str, folder: Path) -> dict[str, float]:
    """``torch.distributed.checkpoint.async_save`` with its pinned stager, the second time."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    state, found = state_of(gb, device), dict[str, float]()
    cuda = device == "cuda"
    stager = DefaultStager(StagingOptions(cuda, False, cuda, cuda))
    for number in range(2):
        synchronize(device)
        started = time.perf_counter()
        future: Any = checkpoint.async_save(state, checkpoint_id=folder / "step", async_stager=stager)
        found[f"host_ms_{number}"] = (time.perf_counter() - started) * 1000
        if hasattr(future, "staging_completion"):
            future.staging_completion.result()
        found[f"staged_s_{number}"] = time.perf_counter() - started
        getattr(future, "upload_completion", future).result()
        found[f"durable_s_{number}"] = time.perf_counter() - started
        shutil.rmtree(folder / "step")
    stager.close()
    torch.distributed.destroy_process_group()
    return found


def correctness(gb: float, device: str, folder: Path) -> dict[str, float]:
    """``tests/gpu``."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider", "-W", "default"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "COMPOSERLITE_TEST_DEVICE": device}, check=False)
    if done.returncode:
        raise RuntimeError(f"tests/gpu: pytest ended with {done.returncode}")
    return {"passed": 1.0}


STAGES: dict[str, Callable[[float, str, Path], dict[str, float]]] = {
    "correctness": correctness,
    "limits": limits,
    "save": save,
    "torch_save": torch_save,
    "dcp": dcp,
}


def run_stage(stage: str, gb: float, device: str) -> None:
    """Run one in this process and print its line; the files are gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        found = STAGES[stage](gb, device, Path(folder))
    print(json.dumps({name: round(value, 4) for name, value in found.items()}), flush=True)


def note(line: dict[str, Any]) -> None:
    """Append a line to the file, and print it."""
    OUT.parent.mkdir(parents=True, exist_ok=True)
    with OUT.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


def main() -> int:
    """Run what was asked for; 1 where a stage failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", choices=sorted(STAGES))
    parser.add_argument("--gb", type=float, default=1.5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("make gpu: skipped, torch finds no CUDA device on this machine")
        return 0
    if chosen.stage is not None:
        run_stage(chosen.stage, chosen.gb, chosen.device)
        return 0
    OUT.unlink(missing_ok=True)
    name = torch.cuda.get_device_name() if chosen.device == "cuda" else "cpu"
    failed = False
    for stage, gb, seconds in PLAN:
        line: dict[str, Any] = {"stage": stage, "gb": gb, "device": name, "torch": torch.__version__}
        command = [sys.executable, __file__, "--stage", stage, "--gb", str(gb), "--device", chosen.device]
        started = time.perf_counter()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, cwd=ROOT)
            if done.returncode:
                line["error"] = (done.stderr or done.stdout)[-1500:]
            else:
                line.update(json.loads(done.stdout.splitlines()[-1]))
        except subprocess.TimeoutExpired:
            line["error"] = f"not done after {seconds} s"
        failed |= "error" in line
        note({**line, "seconds": round(time.perf_counter() - started, 1)})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

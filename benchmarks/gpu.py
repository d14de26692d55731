"""Checkpoints of what is on a GPU: first that they are right, then what they cost, against limits of the same run.

``make gpu`` runs the stages one after the other, each in a process of its own with a deadline of its own. Each writes a
line of JSON to ``benchmarks/out/gpu.jsonl``, also where it fails or is ended. Without a GPU one line says so, and
nothing runs.

Usage: ``python benchmarks/gpu.py``; with ``--stage NAME --gb SIZE --device cpu`` one stage, on the CPU, to see that it
works.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "out" / "gpu.jsonl"
PLAN: list[tuple[str, float, int]] = [
    ("correctness", 0.0, 180),
    ("limits", 1.5, 40),
    ("save", 1.5, 40),
    ("steps", 1.5, 40),
    ("training", 1.5, 60),
    ("durable", 1.5, 40),
    ("load", 1.5, 40),
    ("torch_save", 1.5, 30),
    ("lightning", 1.5, 40),
    ("dcp", 1.5, 40),
    ("torch_checkpointing", 1.5, 40),
    ("limits", 16.0, 60),
    ("save", 16.0, 80),
    ("durable", 16.0, 80),
    ("load", 16.0, 80),
    ("dcp", 16.0, 80),
    ("save", 40.0, 100),
]
"""Stage, size of the state in GB, deadline in seconds."""
TOTAL_SECONDS = 470.0
"""All stages together. What does not fit is left out, with a line that says so."""


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def moment(device: str) -> Any:
    """Return when the device has done what is queued up to now."""
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds_between(first: Any, last: Any) -> float:
    """Return the time between two of :func:`moment`, which have passed."""
    return (last - first) * 1000 if isinstance(first, float) else first.elapsed_time(last)


def state_of(gb: float, device: str) -> dict[str, torch.Tensor]:
    """Tensors of 64 MB and a few small ones, of ``gb`` GB."""
    count = max(1, round(gb * 1e9 / 64e6))
    large = {f"weight{n}": torch.full((16_000_000,), float(n), device=device) for n in range(count)}
    return {**large, **{f"bias{n}": torch.full((1000,), float(n), device=device) for n in range(200)}}


def check(loaded: Tensors, state: Tensors) -> None:
    """See that all bytes are those of ``state``.

    Raises:
        RuntimeError: they are not.
    """
    if differing := [n for n, t in state.items() if not torch.equal(loaded[n].to(t.device), t)]:
        raise RuntimeError(f"bytes differ: {', '.join(differing[:5])}")


# ── stages: each returns numbers by name ─────────────────────────────────────────────────────────────────────────────
def limits(gb: float, device: str, folder: Path) -> dict[str, float]:
    """A raw copy into pinned memory, and a plain write to the disk and read from it."""
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
    written = time.perf_counter() - started
    read = os.open(folder / "raw", os.O_RDONLY)
    os.posix_fadvise(read, 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.perf_counter()
    for at in range(0, size, 64 << 20):
        os.preadv(read, [view[at : at + (64 << 20)]], at)
    found = {"copy_gb_per_s": size / best / 1e9, "disk_gb_per_s": size / written / 1e9}
    return {**found, "disk_read_gb_per_s": size / (time.perf_counter() - started) / 1e9}


def save(gb: float, device: str, folder: Path) -> dict[str, float]:
    """Four asynchronous saves of ours, each with the step of an optimizer after it; bytes are compared.

    The last one has work between it and the step that takes longer than the copy.
    """
    from composerlite.checkpoint.format.torch_file import TorchImage
    from composerlite.checkpoint.save.snapshot import StagingMemory

    state = state_of(gb, device)
    parameters = [torch.nn.Parameter(tensor) for tensor in state.values()]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    for parameter in parameters[:1]:
        parameter.grad = torch.zeros_like(parameter)
    staging = StagingMemory()
    image = TorchImage(dict(zip(state, parameters, strict=True)))
    staging.prepare(image.size_bytes)
    if not staging.wait_until_prepared(600):
        raise RuntimeError("memory was not prepared")
    found: dict[str, float] = {"size_gb": image.size_bytes / 1e9}
    for number in range(4):
        image = TorchImage(dict(zip(state, parameters, strict=True)))
        copies = image.storages
        synchronize(device)
        started = time.perf_counter()
        snapshot = staging.take(copies, image.size_bytes, [optimizer])
        found[f"host_ms_{number}"] = (time.perf_counter() - started) * 1000
        if snapshot is None:
            raise RuntimeError("no memory for the copy")
        if number == 3 and device == "cuda":  # forward and backward take longer than the copy
            torch.cuda._sleep(int(2 * found["copied_s_2"] * 2e9))
        optimizer.step()
        stall = snapshot.stall_seconds
        synchronize(device)
        found[f"copied_s_{number}"] = time.perf_counter() - started
        snapshot.wait()
        found[f"known_s_{number}"] = time.perf_counter() - started
        found[f"gpu_waits_ms_{number}"] = (snapshot.stall_seconds - stall) * 1000
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


def steps(gb: float, device: str, folder: Path) -> dict[str, float]:
    """Steps alone, while a state is copied, and while it is hashed and written: how much slower they are.

    Of two kinds: products of large matrices, and many small kernels, which the host is hardly fast enough to launch.
    """
    from composerlite.checkpoint import async_save_state_dict, save_state_dict
    from composerlite.checkpoint.format.torch_file import TorchImage
    from composerlite.checkpoint.save.snapshot import StagingMemory

    state = state_of(gb, device)
    size = 4096 if device == "cuda" else 256
    left, right, small = (torch.randn(n, n, device=device) for n in (size, size, 8))

    def product() -> None:
        torch.mm(left, right)

    def launches() -> None:
        for _ in range(20):
            small.mul_(1.0)

    def seconds_of(step: Callable[[], None], count: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(count):
            step()
        synchronize(device)
        return time.perf_counter() - started

    optimizer, staging = torch.optim.SGD([torch.nn.Parameter(t) for t in state.values()], lr=0.0), StagingMemory()
    staging.prepare(TorchImage(state).size_bytes)
    if not staging.wait_until_prepared(600):
        raise RuntimeError("memory was not prepared")
    found: dict[str, float] = {}
    for step in (product, launches):
        seconds_of(step, 20)
        # Copies take about as long as these.
        count = max(20, int(20 * gb / 50 / seconds_of(step, 20)))
        alone: list[float] = []
        beside: list[float] = []
        for _ in range(6):
            alone.append(seconds_of(step, count))
            image = TorchImage(state)
            synchronize(device)
            snapshot = staging.take(image.storages, image.size_bytes, [optimizer])
            if snapshot is None:
                raise RuntimeError("no memory for the copy")
            beside.append(seconds_of(step, count))
            optimizer.step()
            snapshot.wait()
            del image
            snapshot.give_back()
        written: list[float] = []
        save_state_dict(folder / "step", {"small": small})  # imports what it needs
        shutil.rmtree(folder / "step")
        for _ in range(2):
            pending = async_save_state_dict(folder / "step", state)
            synchronize(device)
            while not pending.done():
                written.append(seconds_of(step, count))
            pending.result(300)
            shutil.rmtree(folder / "step")
        base = statistics.median(alone)
        found[f"{step.__name__}_step_ms"] = base / count * 1000
        found[f"{step.__name__}_copying_percent"] = (statistics.median(beside[1:]) / base - 1) * 100
        found[f"{step.__name__}_writing_percent"] = (statistics.mean(written) / base - 1) * 100
    staging.close()
    return found


def training(gb: float, device: str, folder: Path) -> dict[str, float]:
    """A Trainer in bfloat16 with AdamW, without checkpoints and with them: what one of them costs training in all."""
    from torch.utils.data import DataLoader, TensorDataset

    from composerlite import Callback, ComposerModel, Logger, State, Trainer

    width, rows, every = (2048, 16384, 25) if device == "cuda" else (256, 64, 5)

    class Net(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            count = max(1, round(gb * 1e9 / 12 / width**2))
            layers = [layer for _ in range(count) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
            self.layers = torch.nn.Sequential(torch.nn.Linear(16, width), *layers)

        def forward(self, batch: Any) -> torch.Tensor:
            return self.layers(batch[0])

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return outputs.float().square().mean()

    def data() -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(rows * every, 16)), batch_size=rows)

    class Times(Callback):
        """The moment of the device at which each batch has ended."""

        def __init__(self) -> None:
            self.ends: list[Any] = []

        def batch_end(self, state: State, logger: Logger) -> None:
            self.ends.append(moment(device))

        def milliseconds(self, first: int, last: int) -> float:
            return milliseconds_between(self.ends[first - 1], self.ends[last - 1])

    times: dict[bool, Times] = {}
    for saves in (False, True):
        how: dict[str, Any] = {"save_folder": str(folder), "save_interval": f"{every}ba"} if saves else {}
        model = Net().to(device)
        times[saves] = Times()
        with Trainer(
            model=model,
            optimizers=torch.optim.AdamW(model.parameters(), lr=1e-5),
            train_dataloader=data(),
            max_duration="4ep",
            precision="amp_bf16",
            progress_bar=False,
            save_num_checkpoints_to_keep=1,
            device=device,
            seed=1,
            callbacks=times[saves],
            **how,
        ) as trainer:
            trainer.fit()
        synchronize(device)
    # From before the second save to before the last: the run waits for that one at its end.
    alone, beside = (times[saves].milliseconds(2 * every - 1, 4 * every - 1) for saves in (False, True))
    return {
        "step_ms": alone / 2 / every,
        "lost_ms_per_save": (beside - alone) / 2,
        "slower_percent": (beside / alone - 1) * 100,
    }


def durable(gb: float, device: str, folder: Path) -> dict[str, float]:
    """A directory of ours, until it is durable: in the background, and while the caller waits."""
    from composerlite.checkpoint import async_save_state_dict, save_state_dict

    state, found = state_of(gb, device), dict[str, float]()
    for number in range(2):
        synchronize(device)
        started = time.perf_counter()
        pending = async_save_state_dict(folder / "step", state)
        found[f"host_ms_{number}"] = (time.perf_counter() - started) * 1000
        pending.result(300)
        found[f"durable_s_{number}"] = time.perf_counter() - started
        check(read_directory(folder / "step", state), state)
        shutil.rmtree(folder / "step")
    started = time.perf_counter()
    save_state_dict(folder / "step", state)
    found["waiting_durable_s"] = time.perf_counter() - started
    check(read_directory(folder / "step", state), state)
    return found


def read_directory(path: Path, state: Tensors) -> Tensors:
    """Load a directory into new tensors like those of ``state``."""
    from composerlite.checkpoint import load_state_dict

    live = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load_state_dict(path, live)
    return live


def load(gb: float, device: str, folder: Path) -> dict[str, float]:
    """Load a file and a directory into tensors of the device, beside ``torch.load``; what that takes on the host."""
    from composerlite.checkpoint import save_state_dict
    from composerlite.checkpoint.load.reader import opened
    from composerlite.checkpoint.load.restore import placed

    state = state_of(gb, device)
    size = sum(tensor.numel() * tensor.itemsize for tensor in state.values()) / 1e9
    torch.save(state, folder / "state.pt")
    save_state_dict(folder / "step", state)
    live = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    found = {"size_gb": size}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(2):
        started = time.perf_counter()
        with opened(folder / "state.pt") as file:
            file.contents, addresses, sieves = placed(file.contents, live, file.unread)
            file.read(places=addresses, sieves=sieves)
        synchronize(device)
        found[f"file_s_{number}"] = time.perf_counter() - started
    check(live, state)
    found["host_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
    started = time.perf_counter()
    loaded = read_directory(folder / "step", state)
    synchronize(device)
    found["directory_s"] = time.perf_counter() - started
    check(loaded, state)
    del loaded
    started = time.perf_counter()
    loaded = torch.load(folder / "state.pt", map_location=device, weights_only=True)
    synchronize(device)
    found["torch_load_s"] = time.perf_counter() - started
    check(loaded, state)
    return found


def torch_save(gb: float, device: str, folder: Path) -> dict[str, float]:
    """``torch.save``, which keeps training until all is in the page cache."""
    state = state_of(gb, device)
    synchronize(device)
    started = time.perf_counter()
    torch.save(state, folder / "state.pt")
    blocked = time.perf_counter() - started
    check(torch.load(folder / "state.pt", map_location="cpu", mmap=True), state)
    return {"blocked_s": blocked}


def lightning(gb: float, device: str, folder: Path) -> dict[str, float]:
    """``Fabric.save`` of Lightning, which its Trainer saves with, too."""
    from lightning.fabric import Fabric

    state = state_of(gb, device)
    fabric = Fabric(accelerator=device, devices=1)
    synchronize(device)
    started = time.perf_counter()
    fabric.save(folder / "state.ckpt", {"state": state})
    blocked = time.perf_counter() - started
    check(torch.load(folder / "state.ckpt", map_location="cpu", mmap=True)["state"], state)
    return {"blocked_s": blocked}


def torch_checkpointing(gb: float, device: str, folder: Path) -> dict[str, float]:
    """``CheckpointManager`` with asynchronous staging, pinned on a GPU, the second time. Its direct I/O is off."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    state, found, cuda = state_of(gb, device), dict[str, float](), device == "cuda"
    staging = CheckpointStagerConfig(use_pinned_memory=cuda, use_non_blocking_copy=cuda, use_async_staging=True)
    saver: Any = AsyncCheckpointSaverConfig(staging_config=staging)
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager(CheckpointManager.Config(save=saver, storage_config=storage))
    manager.prewarm_staging({"state": state})
    for number in range(2):
        synchronize(device)
        started = time.perf_counter()
        future = manager.save(str(folder / f"step{number}"), {"state": state})
        found[f"host_ms_{number}"] = (time.perf_counter() - started) * 1000
        with manager.lock():  # what a step of the optimizer waits for
            found[f"staged_s_{number}"] = time.perf_counter() - started
        future.result(300)
        found[f"written_s_{number}"] = time.perf_counter() - started
        live = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        check(manager.load(str(folder / f"step{number}"), into={"state": live})["state"], state)
        del live
        shutil.rmtree(folder / f"step{number}")
    manager.close()
    return found


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
        if number and torch.__version__.startswith("2.11."):  # empties a stager after one save
            stager = DefaultStager(StagingOptions(cuda, False, cuda, cuda))
        synchronize(device)
        started = time.perf_counter()
        future: Any = checkpoint.async_save(state, checkpoint_id=folder / "step", async_stager=stager)
        found[f"host_ms_{number}"] = (time.perf_counter() - started) * 1000
        if hasattr(future, "staging_completion"):
            future.staging_completion.result()
        found[f"staged_s_{number}"] = time.perf_counter() - started
        getattr(future, "upload_completion", future).result()
        found[f"written_s_{number}"] = time.perf_counter() - started
        live = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        started = time.perf_counter()
        checkpoint.load(live, checkpoint_id=folder / "step")
        synchronize(device)
        found[f"load_s_{number}"] = time.perf_counter() - started
        check(live, state)
        del live
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
    "steps": steps,
    "training": training,
    "durable": durable,
    "load": load,
    "torch_save": torch_save,
    "lightning": lightning,
    "dcp": dcp,
    "torch_checkpointing": torch_checkpointing,
}
PEERS = {"lightning": "lightning", "torch_checkpointing": "torch_checkpointing"}
"""What a stage needs beside torch."""


def run_stage(stage: str, gb: float, device: str) -> None:
    """Run one in this process and print its line; the files are gone afterwards."""
    needed = PEERS.get(stage)
    if needed is not None and importlib.util.find_spec(needed) is None:
        print(json.dumps({"skipped": f"{needed} is not installed"}), flush=True)
        return
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
    parser.add_argument("--stage", choices=sorted(STAGES), nargs="+", help="run these in this process; default: all")
    parser.add_argument("--gb", type=float, default=1.5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("make gpu: skipped, torch finds no CUDA device on this machine")
        return 0
    if chosen.stage is not None:
        for stage in chosen.stage:
            run_stage(stage, chosen.gb, chosen.device)
        return 0
    OUT.unlink(missing_ok=True)
    name = torch.cuda.get_device_name() if chosen.device == "cuda" else "cpu"
    failed = False
    end = time.perf_counter() + TOTAL_SECONDS
    for stage, gb, deadline in PLAN:
        seconds = min(deadline, end - time.perf_counter())
        line: dict[str, Any] = {"stage": stage, "gb": gb, "device": name, "torch": torch.__version__}
        command = [sys.executable, __file__, "--stage", stage, "--gb", str(gb), "--device", chosen.device]
        if seconds < 5:
            note({**line, "skipped": f"all stages together have {TOTAL_SECONDS:.0f} s"})
            continue
        started = time.perf_counter()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, cwd=ROOT)
            if done.returncode:
                line["error"] = (done.stderr or done.stdout)[-1500:]
            else:
                line.update(json.loads(done.stdout.splitlines()[-1]))
        except subprocess.TimeoutExpired:
            line["error"] = f"not done after {seconds:.0f} s"
        failed |= "error" in line
        note({**line, "seconds": round(time.perf_counter() - started, 1)})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

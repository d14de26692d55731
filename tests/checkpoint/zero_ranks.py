"""What runs on each of several ranks that DeepSpeed's ZeRO trains: see test_zero.py."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, final

import torch
from checkpoint.tiny_training import Classifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Callback, ComposerModel, Logger, State, Trainer, dist
from composerlite.algorithms import EMA, GradientClipping
from composerlite.errors import ConfigError, IncompatibleCheckpointError

BATCHES = 12
CHANGES = ("open", "os.rename", "os.remove", "os.symlink", "os.link")
WAIT_SECONDS = 30.0
SAVED = 6  # the newest checkpoint when the run is killed


@final
class Mixed(ComposerModel):
    """Trained and frozen layers, a buffer that each batch changes, and sizes that no number of ranks divides."""

    def __init__(self, width: int = 17, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = dropout
        self.up = nn.Linear(6, width)
        self.norm = nn.LayerNorm(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, 3)
        self.register_buffer("seen", torch.zeros(3))
        self.seen: torch.Tensor

    def forward(self, batch: Any) -> torch.Tensor:
        if self.training:
            self.seen += 1
        hidden = nn.functional.dropout(self.norm(self.up(batch[0])), self.dropout, self.training)
        return self.down(torch.relu(self.frozen(hidden)))

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


class KillAt(Callback):
    """Kills this process when so many batches are done and a checkpoint, which is saved behind them, is there."""

    def __init__(self, batch: int, decider: Path) -> None:
        self.batch = batch
        self.decider = decider

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self.batch:
            until = time.monotonic() + WAIT_SECONDS
            while not self.decider.exists():
                assert time.monotonic() < until, f"there is no {self.decider}"
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


class When(Callback):
    """Knows how many batches are done."""

    batch = 0

    def batch_end(self, state: State, logger: Logger) -> None:
        self.batch = int(state.timestamp.batch)


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(44, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def trainer(stage: int | None, precision: str = "fp32", *, dropout: float = 0.1, **arguments: Any) -> Trainer:
    """A trainer of the run ``run``: two epochs of six batches. Ranks begin with different weights."""
    torch.manual_seed(3 + dist.get_global_rank())
    model = Mixed(dropout=dropout)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    how: dict[str, Any] = {
        "train_dataloader": DataLoader(points(), batch_size=8 // dist.get_world_size(), shuffle=True),
        "max_duration": f"{BATCHES}ba",
        "optimizers": optimizer,
        "schedulers": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
        "algorithms": [GradientClipping("norm", 0.1)],
        "device_train_microbatch_size": 3,
        "deepspeed_config": None if stage is None else {"zero_optimization": {"stage": stage}},
        "step_schedulers_every_batch": True,
        "run_name": "run",
        "save_interval": "3ba",
        "save_filename": "ba{batch}-rank{rank}.pt",
        "progress_bar": False,
        "seed": 1,
        "dist_timeout": 30,
    }
    return Trainer(model=model, precision=precision, device="cpu", **{**how, **arguments})


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    """What the optimizer has of each weight, whole, and everything else."""
    parameters = dict(run.state.model.named_parameters())
    found: dict[str, torch.Tensor] = {}
    for name, tensor in run.state.model.state_dict(keep_vars=True).items():
        if run.state.deepspeed is None:
            found[name] = tensor.detach().clone()
            continue
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param

        if name in parameters and tensor.requires_grad:
            found[name] = safe_get_full_fp32_param(tensor).clone()
        else:
            with deepspeed.zero.GatheredParameters([tensor], enabled=hasattr(tensor, "ds_id")):
                found[name] = tensor.detach().clone().float() if name in parameters else tensor.detach().clone()
    return found


def trained(stage: int | None, precision: str, **arguments: Any) -> dict[str, torch.Tensor]:
    """The weights after training."""
    with trainer(stage, precision, **arguments) as run:
        run.fit()
        return weights(run)


def train_then_die(stage: int, precision: str, folder: str) -> None:
    """Train without an interruption and write the weights to a file; train once more, and be killed."""
    whole = trained(stage, precision)
    if dist.get_global_rank() == 0:
        Path(folder, "whole.pickle").write_bytes(pickle.dumps(whole))
    killer = KillAt(SAVED + 2, Path(folder, f"run/ba{SAVED}-rank0.tar"))
    trained(stage, precision, save_folder=f"{folder}/run", callbacks=[killer])


def go_on(stage: int, precision: str, folder: str) -> dict[str, Any]:
    """Go on with the run that was killed; load it in all the other ways."""
    run_folder = f"{folder}/run"
    with trainer(stage, precision, save_folder=run_folder, autoresume=True) as run:
        found = {"resumed at": int(run.state.timestamp.batch)}
        run.fit()
        found["resumed"] = weights(run)
    names = sorted(path.name for path in Path(run_folder).iterdir() if path.suffix != ".lease")
    with trainer(stage, precision, load_path=f"{run_folder}/latest-rank{{rank}}.tar", load_weights_only=True) as run:
        found["weights only"] = weights(run)
        found["weights only at"] = int(run.state.timestamp.batch)
    seeded = trained(stage, precision, load_path=f"{run_folder}/ba{SAVED}-rank{{rank}}.tar")
    path = Path(f"{run_folder}/ba{SAVED}-rank1.tar")
    dist.barrier()
    if dist.get_global_rank() == 0:
        path.rename(path.with_suffix(".gone"))
    dist.barrier()
    found["missing"] = failure(stage, precision, run_folder, SAVED)
    dist.barrier()
    if dist.get_global_rank() == 0:
        damage(Path(f"{run_folder}/ba{BATCHES}-rank1.tar"))
    dist.barrier()
    with trainer(stage, precision, save_folder=run_folder, autoresume=True) as run:
        found["passed over"] = int(run.state.timestamp.batch)
        found["link"] = Path(f"{run_folder}/latest-rank1.tar").readlink().name
        found["predicted"] = len(run.predict(DataLoader(points(), batch_size=4)))
    return {**found, "names": names, "seeded": seeded}


def damage(path: Path) -> None:
    """Change a bit of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def failure(stage: int, precision: str, folder: str, batch: int) -> str:
    """What is said of a checkpoint that cannot be loaded."""
    try:
        trainer(stage, precision, load_path=f"{folder}/ba{batch}-rank{{rank}}.tar").close()
    except Exception as e:  # noqa: BLE001 - it is what is asked for
        return f"{type(e).__name__}: {e}"
    return "nothing"


def converted(stage: int, folder: str) -> dict[str, Any]:
    """Load what another number of ranks has saved, and go on with it."""
    path = f"{folder}/ba{SAVED}-rank{{rank}}.tar"
    with trainer(stage, load_path=path, dropout=0.0) as run:
        found = {"loaded": weights(run), "loaded at": int(run.state.timestamp.batch)}
        run.fit()
        found["ended"] = weights(run)
    return found


def saved(stage: int, folder: str, **arguments: Any) -> dict[str, torch.Tensor]:
    """Train the whole run, and save it. It draws no random numbers."""
    return trained(stage, "fp32", save_folder=folder, dropout=0.0, **arguments)


def in_a_bucket(bucket: str) -> dict[str, Any]:
    """Save to a bucket, lose the folder, and go on from the bucket; load from it by name."""
    how: dict[str, Any] = {"save_folder": f"{bucket}/run", "save_filename": "ba{batch}-rank{rank}.tar.gz"}
    whole = trained(1, "fp32")
    trained(1, "fp32", max_duration=f"{SAVED}ba", save_staging_bytes=0, **how)  # no memory for a copy
    dist.barrier()
    if dist.get_global_rank() == 0:
        shutil.rmtree("run")
    dist.barrier()
    seeded = trained(1, "fp32", load_path=f"{bucket}/run/latest-rank{{rank}}.tar")
    with trainer(1, "fp32", autoresume=True, **how) as run:
        began = int(run.state.timestamp.batch)
        run.fit()
        own = run.save_checkpoint("own/ba{batch}-rank{rank}")
        return {"whole": whole, "resumed": weights(run), "began": began, "seeded": seeded, "own": own}


def of_another_program(stage: int, path: str) -> tuple[dict[str, torch.Tensor], str]:
    """The weights that a folder of another program gives; what is said where all of it is wanted."""

    def run(**more: Any) -> Trainer:
        model = Classifier()
        data = DataLoader(TensorDataset(torch.zeros(4, 4), torch.zeros(4, dtype=torch.long)), batch_size=2)
        optimizer = torch.optim.AdamW(model.parameters())
        how: dict[str, Any] = {"max_duration": "2ba", "optimizers": optimizer, "progress_bar": False, "device": "cpu"}
        config = {"zero_optimization": {"stage": stage}}
        return Trainer(model=model, train_dataloader=data, deepspeed_config=config, load_path=path, **how, **more)

    with run(load_weights_only=True) as loaded:
        found = weights(loaded)
    try:
        run().close()
    except IncompatibleCheckpointError as e:
        return found, str(e)
    return found, "nothing"


def die_while_saving(folder: str, victim: int, number: int) -> int:
    """Train and save three times; the second save is cut off by a kill of ``victim`` right before its file event
    ``number``. How many there were, if there are not so many."""
    count = 0
    clock = When()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if SAVED - 2 <= clock.batch <= SAVED and event in CHANGES and str(arguments[0]).startswith(folder):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_global_rank() == victim:
        sys.addaudithook(hook)
    with trainer(2, save_folder=folder, max_duration="7ba", save_async=False, callbacks=[clock]) as run:
        run.fit()
    return count


def go_on_after(folder: str) -> tuple[int, dict[str, torch.Tensor]]:
    """Go on to the end: where it did, and the weights."""
    with trainer(2, save_folder=folder, autoresume=True) as run:
        began = int(run.state.timestamp.batch)
        run.fit()
        return began, weights(run)


def contradictions(folder: str) -> list[str]:
    """What is said of each configuration that cannot work."""
    Path(folder, "zero.json").write_text('{"zero_optimization": {"stage": 9}}')

    def ds(**more: Any) -> dict[str, Any]:
        return {"deepspeed_config": {"zero_optimization": {"stage": 1}, **more}}

    cases: list[dict[str, Any]] = [
        ds(train_batch_size=99),
        ds(train_micro_batch_size_per_gpu=5),
        ds(gradient_accumulation_steps=7),
        ds(gradient_clipping=0.5),
        {**ds(), "algorithms": [GradientClipping("value", 1.0)]},
        ds(bf16={"enabled": True}),
        {**ds(bf16={"enabled": False}), "precision": "amp_bf16"},
        ds(fp16={"enabled": True}),
        ds(optimizer={"type": "AdamW"}),
        ds(scheduler={"type": "WarmupLR"}),
        {**ds(), "parallelism_config": {"fsdp": {}}},
        {"deepspeed_config": {"zero_optimization": {"stage": 0}}},
        {"deepspeed_config": f"{folder}/zero.json"},
        {"deepspeed_config": f"{folder}/none.json"},
        {**ds(), "device_train_microbatch_size": "auto"},
        {**ds(), "save_folder": folder, "save_weights_only": True},
        {**ds(), "save_folder": folder, "save_filename": "ep{epoch}.pt"},
        {**ds(), "save_folder": folder, "save_filename": "ep{epoch}-rank{rank}.pt.gz"},
        {**ds(), "save_folder": folder, "save_latest_filename": "latest"},
        {**ds(), "load_path": f"{folder}/ep1-rank{{rank}}.tar", "load_ignore_keys": ["state/optimizers"]},
        {"deepspeed_config": {"zero_optimization": {"stage": 3}}, "algorithms": [EMA(half_life="2ba")]},
    ]
    said: list[str] = []
    for case in cases:
        try:
            trainer(None, **{"precision": "fp32", **case}).close()
            said.append("nothing")
        except ConfigError as e:
            said.append(str(e))
    return said

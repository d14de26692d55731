"""Write tests/data: checkpoints as their own programs save them. ``make interop`` runs it.

Each system trains the same small network for 6 batches, saves, and trains on for 20 more, whose losses are kept in
``expected.json`` with the versions. What a system draws at random is switched off: the data come in order.

    python tests/interop/make_fixtures.py [SYSTEM …]
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

DATA = Path(__file__).parents[1] / "data"
SAVED, STEPS = 6, 26


class Net(nn.Module):
    """A body and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Linear(4, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu())


def dataset() -> TensorDataset:
    """Sixteen samples."""
    return TensorDataset(torch.arange(64).reshape(16, 4).float().sin(), torch.arange(16) % 2)


def loader() -> DataLoader[Any]:
    """Four batches of four, in order."""
    return DataLoader(dataset(), batch_size=4)


def batches() -> Any:
    """Epoch after epoch."""
    while True:
        yield from loader()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, with a momentum from the beginning."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A rate that falls at every batch."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)


def expected(folder: Path, packages: list[str], losses: list[float], **more: Any) -> None:
    """Write down what came of it."""
    assert len(losses) == STEPS - SAVED, len(losses)
    about = {"versions": {name: version(name) for name in packages}, "losses": losses, **more}
    (folder / "expected.json").write_text(json.dumps(about, indent=1) + "\n")


def plain_loop(save: Any, model: nn.Module | None = None) -> list[float]:
    """Train as a script does; ``save(model, optimizer, scheduler)`` is called after 6 batches."""
    model = model or Net()
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    losses: list[float] = []
    for step, (x, y) in zip(range(STEPS), batches(), strict=False):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 == SAVED:
            save(model, optimizer, scheduler)
    return losses[SAVED:]


# ── the systems ──────────────────────────────────────────────────────────────────────────────────────────────────────
def make_torch(folder: Path) -> None:
    """Files of torch.save: weights alone, the usual dict, a nested one."""

    def save(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        parts = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save(model.state_dict(), folder / "weights.pt")
        torch.save({"model": model.state_dict(), **parts, "epoch": 1, "step": SAVED}, folder / "checkpoint.pt")
        nested = {"nets": {"ema": None, "net": model.state_dict()}, "opts": [optimizer.state_dict()]}
        nested["rates"] = scheduler.state_dict()
        torch.save({"run": {**nested, "at": {"step": torch.tensor(SAVED), "epoch": 1}}}, folder / "nested.pt")

    expected(folder, ["torch"], plain_loop(save))


def make_lightning(folder: Path) -> None:
    """A .ckpt of Lightning's Trainer."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = Net()
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step == SAVED:
                self.trainer.save_checkpoint(folder / "step6.ckpt")

        def on_train_epoch_end(self) -> None:
            if self.trainer.current_epoch == 0:
                self.trainer.save_checkpoint(folder / "epoch0.ckpt")

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self)
            scheduler = {"scheduler": scheduler_of(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module = Module()
    L.Trainer(max_steps=STEPS, accelerator="cpu", enable_model_summary=False, **quiet).fit(module, loader())
    expected(folder, ["lightning", "torch"], module.losses[SAVED:])


def make_safetensors(folder: Path) -> None:
    """One file, and a folder with an index, as huggingface_hub cuts it."""
    import safetensors.torch
    from huggingface_hub import save_torch_state_dict

    def save(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
        (folder / "sharded").mkdir()
        save_torch_state_dict(model.state_dict(), folder / "sharded", max_shard_size=50)

    expected(folder, ["safetensors", "huggingface_hub", "torch"], plain_loop(save))


def make_transformers(folder: Path) -> None:
    """A folder checkpoint-6 of the Trainer of transformers."""
    import transformers

    losses: list[float] = []

    class Model(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            logits = super().forward(x)
            loss = nn.functional.cross_entropy(logits, labels)
            losses.append(loss.item())
            return {"loss": loss, "logits": logits}

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(dataset())

    with tempfile.TemporaryDirectory() as out:
        arguments = transformers.TrainingArguments(
            out, max_steps=STEPS, save_steps=SAVED, per_device_train_batch_size=4, logging_steps=1, report_to=[],
            learning_rate=0.01, weight_decay=0.01, max_grad_norm=0, use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        rows = [{"x": x, "labels": y} for x, y in dataset()]
        trainer = InOrder(Model(), arguments, train_dataset=rows)
        trainer.train()
        shutil.copytree(Path(out) / f"checkpoint-{SAVED}", folder / f"checkpoint-{SAVED}")
    expected(folder, ["transformers", "accelerate", "safetensors", "torch"], losses[SAVED:])


def make_accelerate(folder: Path) -> None:
    """A folder of Accelerator.save_state."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model = Net()
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    losses: list[float] = []
    while len(losses) < STEPS:
        for x, y in data:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == SAVED:
                accelerator.save_state(str(folder / "state"))
    expected(folder, ["accelerate", "safetensors", "torch"], losses[SAVED:STEPS])


def make_dcp(folder: Path) -> None:
    """Directories of torch.distributed.checkpoint: nested, laid out as torchtitan does, and its safetensors."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    def save(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        weights, own = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": own}, checkpoint_id=folder / "nested")
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        weights, own = get_state_dict(model, optimizer, options=flat)
        extra = {"lr_scheduler": scheduler.state_dict(), "train_state": {"step": torch.tensor(SAVED)}}
        dcp.save({**weights, "optimizer": own, **extra}, checkpoint_id=folder / "torchtitan")
        dcp.save(weights, storage_writer=dcp.HuggingFaceStorageWriter(str(folder / "safetensors")))
        torch.save(weights, folder / "weights.pt")

    expected(folder, ["torch"], plain_loop(save))
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*ranks, __file__, "dcp over ranks", str(folder)], check=True)
    (folder / "weights.pt").unlink()


def save_over_ranks(folder: Path) -> None:
    """Save the weights as safetensors of DCP, sharded over the processes that torchrun has started."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    weights = {
        name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in torch.load(folder / "weights.pt").items()
    }
    writer = dcp.HuggingFaceStorageWriter(str(folder / "safetensors-sharded"), save_distributed=True)
    dcp.save(weights, storage_writer=writer)
    dist.destroy_process_group()


def make_deepspeed(folder: Path) -> None:
    """Folders of DeepSpeed's engine: without ZeRO, two ranks in each of its stages, in bf16, and with a frozen body."""
    found: dict[str, list[float]] = {}
    for name in ("zero0", "zero1", "zero2", "zero3", "bf16-2", "frozen-2", "frozen-3"):
        target = folder / name
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*ranks, __file__, "deepspeed over ranks", str(target)], check=True)
        for script in target.glob("zero_to_*.py"):
            script.unlink()
        found[name] = json.loads((target / "losses.json").read_text())[SAVED:]
        (target / "losses.json").unlink()
    others = {name.replace("-", "_"): losses for name, losses in found.items() if not name.startswith("zero")}
    expected(folder, ["deepspeed", "torch"], found["zero3"], **others)


def train_over_deepspeed(folder: Path) -> None:
    """Train with DeepSpeed's engine, as one of the processes that torchrun has started; the folder says how."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import torch.distributed as dist
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    rank = dist.get_rank()
    stage, half = int(folder.name[-1]), folder.name.startswith("bf16")
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "bf16": {"enabled": half}}
    more = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    net = Net()
    if folder.name.startswith("frozen"):
        net.body.requires_grad_(False)
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer_of(net), lr_scheduler=scheduler_of, config={**settings, **more}
    )
    losses: list[float] = []
    for step, (x, y) in zip(range(STEPS), batches(), strict=False):
        own = slice(2 * rank, 2 * rank + 2)
        loss = nn.functional.cross_entropy(engine(x[own].bfloat16() if half else x[own]).float(), y[own])
        engine.backward(loss)
        engine.step()
        dist.all_reduce(total := loss.detach().clone())
        losses.append(total.item() / 2)
        if step + 1 == SAVED:
            engine.save_checkpoint(str(folder), tag=f"global_step{SAVED}")
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    os._exit(0)  # DeepSpeed holds groups whose threads live on: now and then the interpreter would abort at exit


def train_with_composer(*, dropout: float = 0.5, data: Any = None, **chosen: Any) -> list[float]:
    """Train with Composer's Trainer, with an algorithm, callbacks and metrics; the losses."""
    import composer
    from composer import algorithms, callbacks
    from torchmetrics.classification import MulticlassAccuracy

    class Dropping(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(nn.functional.dropout(self.body(x).relu(), dropout, self.training))

    class Model(composer.ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.module = Dropping()
            self.module.body._fsdp_wrap = True
            self.losses: list[float] = []
            self.accuracy = MulticlassAccuracy(num_classes=2, average="micro")

        def forward(self, batch: Any) -> torch.Tensor:
            return self.module(batch[0])

        def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
            loss = nn.functional.cross_entropy(outputs, batch[1])
            self.losses.append(loss.item())
            return loss

        def get_metrics(self, is_train: bool) -> dict[str, Any]:
            return {"MulticlassAccuracy": self.accuracy}

        def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
            metric.update(outputs, batch[1])

    model = Model()
    optimizer = optimizer_of(model)
    settings = {
        "schedulers": scheduler_of(optimizer), "step_schedulers_every_batch": True, "save_overwrite": True,
        "algorithms": [algorithms.GradientClipping("norm", 0.5)], "seed": 5, "run_name": "saved",
        "callbacks": [callbacks.SpeedMonitor(2), callbacks.LRMonitor()], "save_metrics": True,
        "save_interval": f"{SAVED}ba", "save_latest_filename": None, "max_duration": f"{STEPS}ba",
    }  # fmt: skip
    trainer = composer.Trainer(
        model=model, train_dataloader=data or loader(), optimizers=optimizer, device="cpu", progress_bar=False,
        **settings | chosen,
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    return model.losses


def save_averages(folder: Path, out: str) -> None:
    """Files of runs with EMA and SWA, whose averages are algorithms' state."""
    from composer import algorithms

    averages = {"ema": algorithms.EMA("2ba"), "swa": algorithms.SWA("0.1dur", "0.9dur", "1ba", schedule_swa_lr=False)}
    for name, algorithm in averages.items():
        train_with_composer(algorithms=[algorithm], dropout=0, save_folder=out, save_filename=f"{name}-ba{{batch}}.pt")
        shutil.copy(Path(out) / f"{name}-ba{SAVED}.pt", folder / f"{name}.pt")


def make_composer(folder: Path) -> None:
    """Files of Composer's Trainer: plain, compressed, in an archive; a link to one; a directory of its FSDP."""
    import composer

    with tempfile.TemporaryDirectory() as out:
        losses = train_with_composer(save_folder=out)
        shutil.copy(Path(out) / f"ep1-ba{SAVED}-rank0.pt", folder)
        for suffix in ("pt.gz", "tar.bz2"):
            train_with_composer(save_folder=out, save_filename=f"packed.{suffix}", max_duration=f"{SAVED}ba")
            shutil.copy(Path(out) / f"packed.{suffix}", folder)
        save_averages(folder, out)
        composer.utils.create_symlink_file(f"ep1-ba{SAVED}-rank0.pt", str(folder / "latest-rank0.pt.symlink"))
        ranks = [sys.executable, "-m", "composer.cli.launcher", "-n", "2", __file__, "composer over ranks", out]
        subprocess.run(ranks, check=True)
        shutil.copytree(Path(out) / f"ep2-ba{SAVED}", folder / f"ep2-ba{SAVED}")
        over_ranks = [json.loads((Path(out) / f"{rank}.json").read_text()) for rank in (0, 1)]
    sharded = [sum(both) / 2 for both in zip(*over_ranks, strict=True)]
    expected(folder, ["mosaicml", "torch"], losses[SAVED:], sharded=sharded[SAVED:])


def train_over_ranks(folder: Path) -> None:
    """Train with FSDP, as a process that Composer's launcher has started. It asks for the GPU that there is not."""
    from composer.utils import dist

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.empty_cache = lambda: None
    data = DataLoader(dataset(), batch_size=4, sampler=dist.get_sampler(dataset(), shuffle=False))
    sharded = {"fsdp": {"state_dict_type": "sharded"}}
    losses = train_with_composer(dropout=0, data=data, save_folder=str(folder), parallelism_config=sharded)
    (folder / f"{dist.get_global_rank()}.json").write_text(json.dumps(losses))


def make_olmo_core(folder: Path) -> None:
    """A step of OLMo-core's Trainer; the same with a flat optimizer; and what unshard_checkpoint makes of it."""
    from olmo_core.data.data_loader import DataLoaderBase
    from olmo_core.distributed.checkpoint import (
        UnshardStrategy,
        load_model_and_optim_state,
        save_model_and_optim_state,
        unshard_checkpoint,
    )
    from olmo_core.train import Duration, TrainerConfig
    from olmo_core.train.callbacks import CheckpointerCallback
    from olmo_core.train.train_module import BasicTrainModule

    losses: list[float] = []

    class Module(BasicTrainModule):
        def train_batch(self, batch: Any, dry_run: bool = False) -> None:
            loss = nn.functional.cross_entropy(self.model(batch["x"]), batch["y"])
            loss.backward()
            if not dry_run:
                losses.append(loss.item())

        def on_attach(self) -> None:
            pass

        def global_num_flops_in_batch(self, batch: Any) -> None:
            pass

    class Loader(DataLoaderBase):
        total_batches = 4

        def _iter_batches(self) -> Any:
            for x, y in list(loader())[self.batches_processed :]:
                yield {"x": x, "y": y, "input_ids": torch.zeros(4, 1, dtype=torch.long)}

        def reshuffle(self, epoch: int | None = None, **_: Any) -> None:
            self._epoch = epoch

        def state_dict(self) -> dict[str, Any]:
            return {"batches_processed": self.batches_processed, "epoch": self._epoch}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise NotImplementedError

        def get_mock_batch(self) -> Any:
            return {"x": torch.zeros(4, 4), "y": torch.zeros(4, dtype=torch.long), "input_ids": torch.zeros(4, 1)}

        def reset(self) -> None:
            self.batches_processed = 0

    with tempfile.TemporaryDirectory() as out:
        module = Module(net := Net(), optimizer_of(net), rank_microbatch_size=4)
        saver = CheckpointerCallback(save_interval=SAVED, save_async=False, max_checkpoints=None)
        config = TrainerConfig(save_folder=out, max_duration=Duration.steps(STEPS), device="cpu", work_dir=out)
        config.with_callback("checkpointer", saver).build(module, Loader(work_dir=out, global_batch_size=4)).fit()
        shutil.copytree(step := Path(out) / f"step{SAVED}", folder / f"step{SAVED}")
        net = Net()
        optimizer = optimizer_of(net)
        load_model_and_optim_state(step / "model_and_optim", net, optimizer)
        save_model_and_optim_state(Path(out) / "flat", net, optimizer, flatten_optimizer_state=True)
        shutil.copytree(Path(out) / "flat", folder / "flat")
        for name, strategy in ("file", UnshardStrategy.one_file()), ("chunks", UnshardStrategy.chunks(50)):
            target = folder / "unsharded" / name
            unshard_checkpoint(step / "model_and_optim", target, unshard_strategy=strategy, use_safetensors=True)
        unshard_checkpoint(step / "model_and_optim", folder / "unsharded", optim=True)
    expected(folder, ["ai2-olmo-core", "torch"], losses[SAVED:])


SYSTEMS = {name.removeprefix("make_"): make for name, make in list(globals().items()) if name.startswith("make_")}
OF_THEIR_OWN = ("composer", "olmo_core")
"""Those that need another environment than the rest: they are made when they are named."""


def main(names: list[str]) -> None:
    if names[:1] == ["composer over ranks"]:
        train_over_ranks(Path(names[1]))
        return
    if names[:1] == ["dcp over ranks"]:
        save_over_ranks(Path(names[1]))
        return
    if names[:1] == ["deepspeed over ranks"]:
        train_over_deepspeed(Path(names[1]))
        return
    for name in names or [name for name in SYSTEMS if name not in OF_THEIR_OWN]:
        folder = DATA / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        SYSTEMS[name](folder)
        print(name, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()), "bytes")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])

"""Write tests/data: checkpoints as their own programs save them. ``make interop`` runs it.

Each system trains the same small network for 6 batches, saves, and trains on for 20 more, whose losses are kept in
``expected.json`` with the versions. What a system draws at random is switched off: the data come in order.

    python tests/interop/make_fixtures.py [SYSTEM …]
"""

from __future__ import annotations

import json
import shutil
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

    expected(folder, ["torch"], plain_loop(save))


SYSTEMS = {name.removeprefix("make_"): make for name, make in list(globals().items()) if name.startswith("make_")}


def main(names: list[str]) -> None:
    for name in names or SYSTEMS:
        folder = DATA / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        SYSTEMS[name](folder)
        print(name, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()), "bytes")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])

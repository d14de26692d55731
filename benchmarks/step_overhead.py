"""P6: what a trainer adds to a training step, beside a raw loop and three other trainers.

Every system trains the same 16→16→4 network with SGD on the same data in batches of 8, and does in a step what the raw
loop does: zero_grad, forward, loss, backward, step. The network notes the time whenever it is called, so that what a
system does before and after training does not count, and everything between two steps does.

Usage: ``python benchmarks/step_overhead.py`` for all, with the name of a system for one measurement of it.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from measure import SHORT, ForeignCpu, Sample, interleaved, report, spread, undisturbed, write
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

WARM_UP = 50 if SHORT else 500
STEPS = 100 if SHORT else 4000
BATCH_SIZE = 8
LEARNING_RATE = 0.01
REPEATS = 5
MOST_ROUNDS = 8

wall: list[float] = []
cpu: list[float] = []


def tick() -> None:
    """Note the time. Every network calls this when it is called."""
    wall.append(time.perf_counter())
    cpu.append(time.process_time())


def layers() -> nn.Sequential:
    """16→16→4."""
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def dataset() -> TensorDataset:
    """Enough samples for one epoch; one batch more, so that the last tick is not the last step's."""
    count = (WARM_UP + STEPS + 1) * BATCH_SIZE
    return TensorDataset(torch.randn(count, 16), torch.randint(0, 4, (count,)))


def loader() -> DataLoader[tuple[Tensor, ...]]:
    """The data in shuffled batches."""
    return DataLoader(dataset(), batch_size=BATCH_SIZE, shuffle=True)


# ── the systems ──────────────────────────────────────────────────────────────────────────────────────────────────
class Network(nn.Module):
    """The network of the raw loop and of accelerate. The trainers want one of their own class."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, 4)."""
        tick()
        return self.layers(x)


def raw() -> None:
    """The loop that everyone can write."""
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for x, y in loader():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


def composerlite() -> None:
    """Trainer with a CheckpointSaver that is asked at every batch."""
    from composerlite import ComposerModel, Trainer
    from composerlite.callbacks import CheckpointSaver

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def forward(self, batch: Any) -> Tensor:
            tick()
            return self.layers(batch[0])

        def loss(self, outputs: Any, batch: Any) -> Tensor:
            return F.cross_entropy(outputs, batch[1])

    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            train_dataloader=loader(),
            max_duration="1ep",
            optimizers=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
            callbacks=CheckpointSaver(folder=folder),
            progress_bar=False,
            device="cpu",
        )
        trainer.fit()
        trainer.close()


def accelerate() -> None:
    """The raw loop with everything prepared by an Accelerator."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    network = Network()
    prepared: Any = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=LEARNING_RATE), loader())
    model, optimizer, batches = prepared
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()


def lightning() -> None:
    """Lightning's Trainer with everything switched off that can be: no checkpoints, loggers, bars."""
    from lightning import LightningModule, Trainer

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            tick()
            return F.cross_entropy(self.layers(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)

    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), loader())


def transformers() -> None:
    """transformers' Trainer with everything switched off that can be: no checkpoints, logs, bars, clipping."""
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            tick()
            return {"loss": F.cross_entropy(self.layers(x), labels)}

    def collate(items: list[Any]) -> dict[str, Tensor]:
        x, labels = default_collate(items)
        return {"x": x, "labels": labels}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=BATCH_SIZE,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        Trainer(model=Model(), args=arguments, train_dataset=dataset(), data_collator=collate).train()


SYSTEMS: dict[str, Callable[[], None]] = {
    "raw": raw,
    "composerlite": composerlite,
    "accelerate": accelerate,
    "lightning": lightning,
    "transformers": transformers,
}


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────
def measure(system: str) -> None:
    """One measurement: microseconds from step to step, after the first steps."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    with ForeignCpu() as foreign:
        SYSTEMS[system]()
    assert len(wall) == WARM_UP + STEPS + 1, f"{system} made {len(wall)} steps"
    per_step = {name: (ticks[-1] - ticks[WARM_UP]) / STEPS * 1e6 for name, ticks in (("us", wall), ("cpu_us", cpu))}
    report(per_step, foreign.share)


def main() -> None:
    """All systems in turn; writes ``out/step_overhead.json``."""
    systems = ["raw", "composerlite"] if SHORT else list(SYSTEMS)
    samples, rounds = interleaved(__file__, systems, repeats=REPEATS, most_rounds=MOST_ROUNDS)
    results = {system: summary(system, found, samples["raw"]) for system, found in samples.items()}
    write("step_overhead", {"steps": STEPS, "rounds": rounds, "systems": results})


def summary(system: str, found: list[Sample], raw_loop: list[Sample]) -> dict[str, Any]:
    """Wall-clock time of the undisturbed samples, and processor time of all: other jobs hardly touch that.

    Each sample is set against the raw loop of the same round: what slows a machine down for a minute slows both.
    """
    pairs = list(zip(found, raw_loop, strict=True))
    quiet = [(mine, base) for mine, base in pairs if not mine.disturbed and not base.disturbed]
    return {
        "version": version("torch" if system == "raw" else system),
        "us_per_step": spread([sample.values["us"] for sample in undisturbed(found)]),
        "us_over_raw": spread([mine.values["us"] - base.values["us"] for mine, base in quiet]),
        "cpu_us_per_step": spread([sample.values["cpu_us"] for sample in found]),
        "cpu_us_over_raw": spread([mine.values["cpu_us"] - base.values["cpu_us"] for mine, base in pairs]),
        "repeats": len(undisturbed(found)),
        "dropped": len(found) - len(undisturbed(found)),
        "samples": [{**sample.values, "foreign_cpu": sample.foreign_cpu} for sample in found],
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        main()

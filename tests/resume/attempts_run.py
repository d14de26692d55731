"""A run that may be started over. Each attempt begins with other weights, so its checkpoints tell whose they are.

Run as ``attempts_run.py <work folder> <save_folder> <how> <weight> <batches> <die>``, with ``<how>`` as ``scratch``,
``resume`` or ``load:<path>``, and ``<die>`` as the batch after whose save the process is killed, or empty. It prints
``<batch> <weight>`` for each batch: the model's one weight grows by one in each.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Callback, ComposerModel, Logger, State, Trainer
from composerlite.callbacks import CheckpointSaver

WAIT_SECONDS = 60.0


class Counter(ComposerModel):
    """One weight, whose gradient is -1."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight], dtype=torch.float64))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.weight * torch.ones_like(batch)

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return -outputs.mean()


class SayAndDie(Callback):
    """Prints each batch; kills the process once the checkpoint of batch ``die`` is committed and published."""

    def __init__(self, die: int) -> None:
        self.die = die

    def batch_end(self, state: State, logger: Logger) -> None:
        batch = int(state.timestamp.batch)
        print(batch, state.model.weight.item(), flush=True)
        if batch != self.die + 1:
            return
        (saver,) = [callback for callback in state.callbacks if isinstance(callback, CheckpointSaver)]
        until = time.monotonic() + WAIT_SECONDS
        while not self._is_saved(state, saver):
            assert time.monotonic() < until, f"the checkpoint of batch {self.die} is not there"
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)

    def _is_saved(self, state: State, saver: CheckpointSaver) -> bool:
        name = f"ba{self.die}.pt"
        here = saver.manager.where.catalog.manifest_of(name)
        if here is None or here.run.lineage != state.lineage:
            return False
        for one in saver.manager.publishers:
            latest = None if one.link is None else one.remote.latest(one.link, state.run_name)
            if latest is None or latest.files != here.files or latest.name != name:
                return False
        return True


def main(
    work: str,
    save_folder: str,
    how: str,
    weight: str,
    batches: str,
    die: str = "",
    keep: str = "-1",
    name: str = "ba{batch}.pt",
) -> None:
    """Train as the job says."""
    os.chdir(work)
    torch.set_num_threads(1)
    model = Counter(float(weight))
    started: dict[str, Any] = {"resume": {"autoresume": True}}.get(how, {})
    if how.startswith("load:"):
        started = {"load_path": how.removeprefix("load:")}
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(TensorDataset(torch.ones(4)), batch_size=1, collate_fn=lambda rows: rows[0][0]),
        optimizers=torch.optim.SGD(model.parameters(), lr=1.0),
        max_duration=f"{batches}ba",
        run_name="attempts",
        save_folder=save_folder,
        save_filename=name,
        save_latest_filename="latest.pt",
        save_interval="1ba",
        save_overwrite=True,
        save_num_checkpoints_to_keep=int(keep),
        callbacks=[SayAndDie(int(die or -2))],
        progress_bar=False,
        **started,
    )
    trainer.fit()
    trainer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A run under torchrun on a number of nodes that changes: ``elastic_run <folder> <batches> [<memory>]``.

It ends after so many batches, or when there is a file ``enough`` in the folder. The global batch has the same number of
images on any number of ranks. With ``memory``, a folder of each node, what each batch has reached is kept there and
replicated to another node, and no checkpoint is saved elsewhere unless the run is asked to end.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import xxhash
from digits_run import Net, images
from preempted_ranks import Replicated
from torch.utils.data import DataLoader

from composerlite import Callback, Logger, State, Trainer, dist

__all__ = ["main"]

GLOBAL_BATCH = 24


class Journal(Callback):
    """Writes, on rank 0, where each attempt begins and on how many ranks, what it has trained on, and how all ends."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, **what: Any) -> None:
        if dist.get_global_rank() == 0:
            with self._path.open("a") as file:
                file.write(json.dumps(what) + "\n")

    def fit_start(self, state: State, logger: Logger) -> None:
        self._write(begin=int(state.timestamp.batch), ranks=dist.get_world_size(), node=Path.cwd().name)

    def batch_end(self, state: State, logger: Logger) -> None:
        time.sleep(0.1)  # ranks that train until a node has joined leave it the processors
        seen = dist.all_gather_object([xxhash.xxh3_64_hexdigest(image.numpy().tobytes()) for image in state.batch[0]])
        self._write(batch=int(state.timestamp.batch), images=[image for one in seen for image in one])
        if dist.get_global_rank() == 0 and self._path.with_name("enough").exists():
            state.stop_training()

    def fit_end(self, state: State, logger: Logger) -> None:
        digest = xxhash.xxh3_128()
        for tensor in state.model.state_dict().values():
            digest.update(tensor.numpy().tobytes())
        for kept in state.optimizers[0].state_dict()["state"].values():
            digest.update(kept["exp_avg_sq"].numpy().tobytes())
        self._write(end=int(state.timestamp.sample), digest=digest.hexdigest())


def main(folder: str, batches: str, memory: str = "") -> None:
    """Train to ``batches``, on as many ranks as there are now, from the newest checkpoint."""
    torch.set_num_threads(1)  # sums are rounded otherwise with two
    torch.manual_seed(5)
    model = Net()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    loader = DataLoader(images(f"{folder}/../images.pt"), GLOBAL_BATCH // ranks, shuffle=True, drop_last=True)
    with Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.AdamW(model.parameters(), lr=5e-3),
        max_duration=f"{batches}ba",
        run_name="elastic",
        save_folder=f"{folder}/checkpoints",
        save_interval="1000ep" if memory else "4ba",
        save_num_checkpoints_to_keep=2,
        save_memory_interval="1ba" if memory else None,
        save_memory_folder=memory or "/dev/shm",
        save_memory_replication=1.0 if memory else None,
        autoresume=True,
        callbacks=[Replicated(waits=True), Journal(Path(folder, "journal.txt"))],
        seed=17,
        progress_bar=False,
    ) as trainer:
        trainer.fit()

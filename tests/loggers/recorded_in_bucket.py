"""A run with a record, whose checkpoints go to a bucket, and that is killed right before it sends a given object.

Run as ``recorded_in_bucket.py <folder of the machine> <uri> <object>``; without ``<object>`` it trains to its end. What
it takes to reach the bucket is in the environment.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import Any

import torch
from checkpoint.tiny_training import data, trainer

from composerlite import Callback, Logger, State
from composerlite.callbacks import CheckpointSaver
from composerlite.loggers import JSONLLogger

BATCHES = 8


class OneByOne(Callback):
    """Waits before each batch until everything is published: this run trains faster than anything is uploaded."""

    def batch_start(self, state: State, logger: Logger) -> None:
        (saver,) = [callback for callback in state.callbacks if isinstance(callback, CheckpointSaver)]
        if saver.manager.pending is not None:
            saver.manager.pending.join()
        assert saver.manager.publishers[0].uploader.wait(60.0)


def die_before(name: str) -> None:
    """Kill this process, as the kernel would, before it sends the object ``name``; ``<number>:<name>``: that time."""
    number, _, pattern = name.rpartition(":")
    left = int(number or 1)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event == "http.client.send" and isinstance(request := arguments[1], bytes):
            line = request.split(b"\r\n", 1)[0].decode(errors="replace")
            if re.match(rf"PUT [^ ]*/{pattern}[ ?]", line):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def main(machine: str, uri: str, dies_before: str = "") -> None:
    """Train as a relaunched job does, with a checkpoint of each second batch."""
    torch.set_num_threads(1)
    if dies_before:
        die_before(dies_before)
    record = JSONLLogger(flush_seconds=0.0)
    how: dict[str, Any] = {"save_folder": uri, "save_staging_folder": machine, "save_interval": "2ba"}
    with trainer(
        train_dataloader=data(64),
        max_duration=f"{BATCHES}ba",
        loggers=record,
        callbacks=[OneByOne()],
        autoresume=True,
        **how,
    ) as run:
        run.fit()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The small run with its checkpoints in a bucket. What it takes to reach that is in the environment.

Run as ``bucket_run.py <work folder> <save_folder or bucket_uri> <die>``, with ``<die>`` as ``<event>:<batch>`` or
empty. With ``BACKEND_KWARGS``, a JSON object, in the environment it uploads through a RemoteUploaderDownloader.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from small_run import Cell, DieAt, Say, build, final_state

from composerlite import Callback, Event, Logger, State
from composerlite.callbacks import CheckpointSaver
from composerlite.loggers import RemoteUploaderDownloader

INTERVAL = "7ba"
WAIT_SECONDS = 60.0


class WaitForUpload(Callback):
    """At one batch, waits until something is published: this small run trains faster than anything is uploaded."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) != self.batch:
            return
        (saver,) = [callback for callback in state.callbacks if isinstance(callback, CheckpointSaver)]
        (bucket,) = saver.manager.publishers
        until = time.monotonic() + WAIT_SECONDS
        assert bucket.link is not None
        while bucket.remote.latest(bucket.link, state.run_name) is None:
            assert time.monotonic() < until, "nothing was published"
            time.sleep(0.05)


def main(work: str, uri: str, die: str = "") -> None:
    """Train as a relaunched job does."""
    os.chdir(work)
    torch.set_num_threads(1)
    callbacks: list[Callback] = [Say()]
    if die:
        event, batch = die.split(":")
        callbacks += [WaitForUpload(int(batch)), DieAt(int(batch), Event(event))]
    arguments: dict[str, Any] = {"save_folder": uri}
    if "BACKEND_KWARGS" in os.environ:
        kwargs = json.loads(os.environ["BACKEND_KWARGS"])
        arguments = {"save_folder": "run", "loggers": [RemoteUploaderDownloader(uri, backend_kwargs=kwargs)]}
    trainer = build(
        Cell(0, 1, "dropout"),
        callbacks,
        run_name="killed",
        save_interval=INTERVAL,
        save_num_checkpoints_to_keep=2,
        autoresume=True,
        **arguments,
    )
    trainer.fit()
    trainer.close()
    torch.save(final_state(trainer), Path("final.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The small run, asked to end at a given moment, or after a given time; it evaluates, too.

Run as ``preempted_run.py <folder> <order>``, with the order in JSON: see :class:`Order`. Each batch and each evaluation
that was done is a line of output.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from small_run import Cell, Noisy, Say, build, final_state
from torch.utils.data import DataLoader

from composerlite import Callback, Event, Logger, State
from composerlite.callbacks import PreemptionHandler


@dataclass
class Order:
    """What happens in one launch.

    Attributes:
        at: ``[event, batch, count]``: at that event, when so many batches are done, the so many-th time.
        after: seconds after which it happens. Give one of the two or none.
        signals: what is sent to the process then, or to its whole group.
        workers, accumulation, extra: the cell of the small run. interval: between saves.
        save_folder: where; the folder itself by default.
        grace: the grace period.
        evaluate: every so often.
        memory: a folder to keep the newest state of each batch in.
        slow_memory: to make a file there takes so many seconds.
    """

    at: list[Any] = field(default_factory=list[Any])
    after: float = 0.0
    signals: list[str] = field(default_factory=lambda: ["SIGTERM"])
    to_group: bool = False
    workers: int = 0
    accumulation: int = 1
    extra: str = "dropout"
    interval: str = "7ba"
    save_folder: str = ""
    grace: str | float = "30s"
    evaluate: str = "10ba"
    memory: str = ""
    slow_memory: float = 0.0
    exit_code: int | None = None


class Asked(Callback):
    """Sends the process its signals."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.times = 0
        self.timer = threading.Timer(order.after, send, [order])

    def before_dataloader(self, state: State, logger: Logger) -> None:
        if self.order.after and self.timer.ident is None:  # every callback has begun: the handler listens
            self.timer.start()

    def fit_end(self, state: State, logger: Logger) -> None:
        self.timer.cancel()

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        super().run_event(event, state, logger)
        if not self.order.at:
            return
        name, batch, count = self.order.at
        if event.value == name and int(state.timestamp.batch) == batch:
            self.times += 1
            if self.times == count:
                send(self.order)


def send(order: Order) -> None:
    """The signals of ``order``, one after the other."""
    for number, name in enumerate(order.signals):
        if number:
            time.sleep(1.2)  # a second key press is another one
        if order.to_group:
            os.killpg(os.getpgid(0), signal.Signals[name])
        else:
            os.kill(os.getpid(), signal.Signals[name])


class SayMore(Say):
    """Evaluations as well, and when one begins."""

    def eval_end(self, state: State, logger: Logger) -> None:
        print("evaluated", int(state.timestamp.batch), int(state.eval_timestamp.sample), flush=True)


def slow_down(memory: str, seconds: float) -> None:
    """The threads that save in ``memory`` take their time."""

    def wait(event: str, arguments: tuple[object, ...]) -> None:
        behind_training = threading.current_thread() is not threading.main_thread()
        if event == "open" and behind_training and str(arguments[0]).startswith(f"{memory}/"):
            time.sleep(seconds)

    sys.addaudithook(wait)


def main(folder: str, given: str) -> None:
    """Train as a relaunched job does."""
    order = Order(**json.loads(given))
    if order.to_group:
        os.setpgid(0, 0)
    torch.set_num_threads(1)
    if order.slow_memory:
        slow_down(order.memory, order.slow_memory)
    cell = Cell(order.workers, order.accumulation, order.extra)
    callbacks: list[Callback] = [SayMore(), Asked(order), PreemptionHandler(order.grace, exit_code=order.exit_code)]
    trainer = build(
        cell,
        callbacks,
        run_name="preempted",
        eval_dataloader=DataLoader(Noisy(), batch_size=16),
        eval_interval=order.evaluate,
        save_folder=order.save_folder or folder,
        save_staging_folder=f"{folder}/staged" if "://" in order.save_folder else None,
        save_interval=order.interval,
        save_num_checkpoints_to_keep=3,
        autoresume=True,
        save_memory_interval="1ba" if order.memory else None,
        save_memory_folder=order.memory or "/dev/shm",
    )
    with trainer:
        trainer.fit()
    torch.save(final_state(trainer), Path(folder) / "final.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])

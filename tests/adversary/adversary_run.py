"""One life of the run that tests/adversary tries to break: its weights say which launch has trained which batch.

``weights[0]`` is the launch that started from scratch, ``weights[n]`` the launch that trained batch n, and 0 where none
has: a checkpoint of batch n has n + 1 numbers before the zeros, and no two launches write the same ones. A batch has
two samples, one for each of two ranks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from clocks import set_clock
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Callback, ComposerModel, Event, Logger, State, Trainer
from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import Checkpointer, load_state_dict, save_state_dict
from composerlite.utils import dist

__all__ = [
    "FILTERS",
    "LONGEST",
    "RUN",
    "Order",
    "as_json",
    "elsewhere",
    "live",
    "live_alone",
    "live_as_rank",
    "load_saved",
    "save_alone",
]

RUN = "run"
LONGEST = 24
"""Batches that a run has at most."""

_CHANGES = ("os.rename", "os.remove", "os.link", "os.symlink", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")
_SENDS = "http.client.send"
_MOST_SECONDS = 60.0

FILTERS: dict[str, dict[str, Any]] = {
    "whole": {},
    "nothing": {"load_ignore_keys": ["*"]},
    "weights": {"load_weights_only": True},
    "all but weights": {"load_ignore_keys": ["state/model/*"]},
}
"""What a script may load of the checkpoint that it begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A launch.

    Attributes:
        launch: its number, 1 for the first.
        folder: of the checkpoints; may be a URI.
        staging: folder on this machine for checkpoints of a bucket.
        until: batches of the whole run.
        notes: file for what it tells.
        filename: of the checkpoints.
        interval: batches between two.
        keep: how many stay, -1 for all.
        resume: autoresume. load: a checkpoint to begin with instead, or where there is none to resume from. Neither:
            from scratch, over what is there.
        filtered: which of FILTERS goes with ``load``.
        memory: folder of a memory generation of each batch; empty for none.
        weights: save the weights alone, too, after each batch.
        saving: arguments of the saver: in the background or not.
        die_at: the process is killed at its event of this number: of training, of its files or of what it sends.
        dies_sending: the same, where only what it sends counts.
        dying_rank: whose events these are.
        waits_at: at such an event the thread waits until there is the file :attr:`go`.
        relative: the folders are named relative to where the process starts; it moves elsewhere when it trains.
        clock: hours that the clock is ahead.
        sharded: with FSDP, in a process group of one rank: checkpoints are directories.
    """

    launch: int
    folder: str
    until: int
    notes: str
    filename: str = "ba{batch}.pt"
    interval: int = 1
    keep: int = -1
    resume: bool = True
    load: str = ""
    filtered: str = "whole"
    memory: str = ""
    weights: bool = False
    saving: str = "default"
    die_at: int = 0
    dies_sending: bool = False
    dying_rank: int = 0
    waits_at: int = 0
    relative: bool = False
    clock: float = 0.0
    sharded: bool = False
    staging: str = ""

    @property
    def go(self) -> Path:
        """The file that a launch which waits at an event waits for."""
        return Path(f"{self.notes}.go")


SAVING: dict[str, dict[str, Any]] = {
    "default": {},
    "copied": {"save_lazy": False},
    "waits": {"save_async": False},
    "ring": {"save_staging_bytes": 0},
}


class Net(ComposerModel):
    """Batch n adds the number of this launch to ``weights[n]``."""

    def __init__(self, launch: int) -> None:
        super().__init__()
        self.launch = launch
        start = torch.zeros(LONGEST + 1, dtype=torch.float64)
        start[0] = launch
        self.weights = nn.Parameter(start)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.weights[batch[0]]

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return -(self.launch * outputs).mean()

    @torch.no_grad()
    def make_new(self, batches: int) -> None:
        """Be a run of this launch alone that has come so far, whatever was loaded."""
        self.weights.zero_()
        self.weights[: batches + 1] = self.launch

    @property
    def trained_by(self) -> list[int]:
        """The launches."""
        weights = self.weights.full_tensor() if isinstance(self.weights, DTensor) else self.weights
        return [int(value) for value in weights.tolist()]


class Notes:
    """What the launch tells; a line is one write, which no kill tears."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(self, **what: Any) -> None:
        """Write a line."""
        os.write(self._file, f"{json.dumps(what)}\n".encode())

    def close(self) -> None:
        """No more."""
        os.close(self._file)


class TellsWhenItTrains(Callback):
    """Tells when the first batch begins.

    A launch from scratch gets its lease after its Trainer was made; one that resumes has it by then.
    """

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def fit_start(self, state: State, logger: Logger) -> None:
        self.has_told = False

    def batch_start(self, state: State, logger: Logger) -> None:
        if not self.has_told:
            self.has_told = True
            self.notes.tell(at=time.monotonic())


class Fuse(Callback):
    """Kills the process at an event of training, or of its files, whichever thread comes to it; or does ``then``."""

    def __init__(
        self, number: int, roots: list[str], *, sending: bool = False, then: Callable[[], object] | None = None
    ) -> None:
        self.left, self.roots, self.lock, self.sending = number, tuple(roots), threading.Lock(), sending
        self.then = then
        sys.addaudithook(self.look)

    def look(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Of the interpreter."""
        if event == _SENDS:
            self.burn()
        if self.sending:
            return
        changes = event in _CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & 3)
        if changes and isinstance(arguments[0], str | os.PathLike) and os.fspath(arguments[0]).startswith(self.roots):
            self.burn()

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if not self.sending:
            self.burn()

    def burn(self) -> None:
        """One event less."""
        with self.lock:
            self.left -= 1
            if self.left == 0 and self.then is None:
                os.kill(os.getpid(), signal.SIGKILL)
            burned = self.left == 0
        if burned and self.then is not None:
            self.then()  # the other threads go on


class Mover(Callback):
    """Changes the current folder of the process, as a script may, when training begins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fit_start(self, state: State, logger: Logger) -> None:
        self.folder.mkdir(exist_ok=True)
        os.chdir(self.folder)


def elsewhere(folder: str) -> Path:
    """Where a launch with relative folders moves to; nothing is ever saved there."""
    return Path(folder).parents[1] / "elsewhere"


@contextmanager
def started_in(folder: Path) -> Iterator[None]:
    """As a script that is started there."""
    folder.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def live(order: Order) -> None:
    """Train, and tell where it started and ended."""
    if not order.relative:
        live_here(order)
        return
    top = Path(order.folder).parent
    with started_in(top):
        memory = order.memory and os.path.relpath(order.memory, top)
        live_here(
            dataclasses.replace(order, folder=Path(order.folder).name, memory=memory), [Mover(elsewhere(order.folder))]
        )


def live_here(order: Order, callbacks: list[Callback] | None = None) -> None:
    """The same in the current folder."""
    first = dist.get_global_rank() == 0
    notes = Notes(order.notes if first else os.devnull)
    net = Net(order.launch)
    callbacks = [*(callbacks or ()), *([] if order.resume else [TellsWhenItTrains(notes)]), *fuses(order, notes)]
    if order.weights:
        name = f"weights-{order.filename}"
        saver = CheckpointSaver(
            order.folder,
            name,
            latest_filename=None,
            save_interval="1ba",
            weights_only=True,
            overwrite=True,
            staging_folder=f"{order.staging}-weights" if order.staging else None,
        )
        callbacks.append(saver)
    arguments: dict[str, Any] = dict(SAVING[order.saving])
    if order.memory and order.resume:
        arguments |= {"save_memory_interval": "1ba", "save_memory_folder": order.memory}
    if order.staging:
        arguments |= {"save_staging_folder": order.staging, "save_num_remote_checkpoints_to_keep": order.keep}
    if order.sharded:
        arguments["parallelism_config"] = {"fsdp": {}}
    if order.load:
        arguments |= {"load_path": order.load, **FILTERS[order.filtered]}
    samples = torch.arange(1, LONGEST + 1).repeat_interleave(2)
    trainer = Trainer(
        model=net,
        train_dataloader=DataLoader(TensorDataset(samples), batch_size=2 // dist.get_world_size()),
        optimizers=torch.optim.SGD(net.parameters(), lr=1.0),
        max_duration=f"{order.until}ba",
        run_name=RUN,
        callbacks=callbacks,
        autoresume=order.resume,
        autoresume_timeout=0.2,
        save_folder=order.folder,
        save_filename=order.filename,
        save_latest_filename="latest.pt",
        save_interval=f"{order.interval}ba",
        save_num_checkpoints_to_keep=-1 if order.staging else order.keep,
        save_overwrite=True,
        progress_bar=False,
        seed=1,
        **arguments,
    )
    with trainer:
        batch, weights = int(trainer.state.timestamp.batch), net.trained_by
        notes.tell(started=batch, weights=weights, at=time.monotonic())
        if order.load and order.filtered in ("weights", "all but weights") and sum(map(bool, weights)) != batch + 1:
            net.make_new(batch)
        trainer.fit()
        notes.tell(ended=int(trainer.state.timestamp.batch), weights=net.trained_by)
    notes.tell(closed=True)
    notes.close()


def fuses(order: Order, notes: Notes) -> Iterator[Fuse]:
    """What kills the process, or lets it wait."""
    roots = [os.path.abspath(root) for root in (order.folder, order.memory, order.staging) if root]  # noqa: PTH100
    if order.die_at and dist.get_global_rank() == order.dying_rank:
        yield Fuse(order.die_at, roots, sending=order.dies_sending)
    if order.waits_at:

        def wait() -> None:
            notes.tell(waits=True)
            until = time.monotonic() + _MOST_SECONDS
            while not order.go.exists():
                if time.monotonic() > until:
                    raise TimeoutError(f"nobody has made {order.go}")
                time.sleep(0.005)

        yield Fuse(order.waits_at, roots, then=wait)


def live_as_rank(order: Order) -> None:
    """The same as one of several ranks."""
    live(order)


def live_alone(given: str) -> None:
    """The same in a process of its own."""
    torch.set_num_threads(1)
    order = Order(**json.loads(given))
    if order.clock:
        set_clock(order.clock)
    live(order)


def save_alone(kind: str, folder: str, first: str, last: str, die_at: str, notes: str) -> None:
    """Save the values ``first`` to ``last``, each in place of the one before, and tell of each that was saved."""
    torch.set_num_threads(1)
    told = Notes(notes)
    save = {"function": save_function, "step": save_step}[kind]
    if int(die_at):
        Fuse(int(die_at), [folder])
    for value in range(int(first), int(last) + 1):
        save(folder, value)
        told.tell(saved=value)
    told.close()


def save_function(folder: str, value: int) -> None:
    """A loop of somebody's own."""
    save_state_dict(f"{folder}/mine", {"x": torch.full((7,), value), "value": value}, save_overwrite=True)


def save_step(folder: str, value: int) -> None:
    """As OLMo-core's trainer does, if it gave one name to all."""
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, value)
    Checkpointer(save_overwrite=True).save(f"{folder}/step1", model, {"value": value})


def load_saved(kind: str, folder: str) -> int:
    """What a program finds that goes on from there."""
    if kind == "function":
        state = {"x": torch.zeros(7, dtype=torch.int64), "value": 0}
        load_state_dict(f"{folder}/mine", state)
        weights, value = state["x"], state["value"]
    else:
        model = nn.Linear(1, 1)
        found = Checkpointer().load(f"{folder}/step1", model)
        assert found is not None
        weights, value = model.weight.detach(), found["value"]
    assert isinstance(weights, torch.Tensor)
    assert isinstance(value, int)
    if set(weights.flatten().tolist()) != {value}:
        raise AssertionError(f"weights {weights.tolist()} with the value {value}")
    return value


def as_json(order: Order) -> str:
    """For :func:`live_alone`."""
    return json.dumps(dataclasses.asdict(order))

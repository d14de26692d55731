"""Runs that are asked to end lose nothing: the same command goes on with the next step, to the same end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import preempted_run
import pytest
import torch
from checkpoint.tiny_training import trainer
from forked import run_forked
from small_run import BATCHES, Cell, build, differences

from composerlite import Callback, Logger, State
from composerlite.callbacks import PreemptionHandler
from composerlite.checkpoint import Catalog
from composerlite.errors import Preempted


class Launch(NamedTuple):
    """What became of a launch: its exit code, a line for each batch and evaluation, in order, and its log."""

    code: int
    said: list[str]
    log: str

    @property
    def batches(self) -> list[int]:
        return [int(line.split()[0]) for line in self.said if not line.startswith("evaluated")]


def launch(folder: Path, environment: dict[str, str] | None = None, **order: Any) -> Launch:
    """Run the program once."""
    done: subprocess.CompletedProcess[str] = run_forked(
        preempted_run.main, str(folder), json.dumps(order), cwd=Path.cwd(), environment=environment
    )
    return Launch(done.returncode, done.stdout.splitlines(), done.stderr)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the run says if nobody asks it to end, and its end, by what is varied."""
    known: dict[str, tuple[list[str], Any]] = {}

    def get(**cell: Any) -> tuple[list[str], Any]:
        key = json.dumps(cell, sort_keys=True)
        if key not in known:
            folder = tmp_path_factory.mktemp("whole")
            ended = launch(folder, **cell)
            assert (ended.code, ended.batches) == (0, list(range(1, BATCHES + 1))), ended.log
            known[key] = ended.said, torch.load(folder / "final.pt", weights_only=True)
        return known[key]

    return get


def newest(folder: Path) -> int:
    """The batch count of the newest checkpoint, whose bytes are verified."""
    manifest = Catalog(folder).manifests()[-1]
    Catalog(folder).verify(manifest)
    return manifest.batch


def check(folder: Path, whole: Any, orders: list[dict[str, Any]], **cell: Any) -> list[Launch]:
    """Launch once for each of ``orders`` and once more; nothing is done twice or lost, to the end of ``whole``."""
    said, end = whole(**cell)
    launches, done = list[Launch](), list[str]()
    for order in orders:
        one = launch(folder, **cell, **order)
        launches.append(one)
        assert one.code == 128 + signal.SIGTERM, one.log
        done += one.said
        if done:
            assert newest(folder) == max(int(line.split()[0 if line[0] != "e" else 1]) for line in done)
            assert f"kept {folder}" in one.log
        assert "SIGTERM" in one.log
    last = launch(folder, **cell)
    assert last.code == 0, last.log
    assert done + last.said == said
    assert differences(torch.load(folder / "final.pt", weights_only=True), end) == []
    return launches


MOMENTS = {
    "before the first batch": ["epoch_start", 0, 1],
    "while the loader works": ["before_dataloader", 3, 1],
    "in a forward pass": ["after_forward", 11, 1],
    "between the gradients and the step": ["after_train_batch", 12, 1],
    "as a save is in flight": ["before_dataloader", 14, 1],
    "before a save": ["batch_end", 21, 1],
    "at the beginning of an evaluation": ["eval_start", 10, 1],
    "in an evaluation": ["eval_batch_end", 20, 3],
    "at the end of an evaluation": ["eval_after_all", 30, 1],
    "at the end of an epoch": ["epoch_end", 20, 1],
    "after an epoch": ["epoch_checkpoint", 40, 1],
    "at the start of an epoch": ["epoch_start", 40, 1],
    "in the last batch but one": ["after_loss", 58, 1],
}


SOME = ["while the loader works", "in an evaluation", "at the end of an epoch", "at the start of an epoch"]


@pytest.mark.parametrize("names", [SOME, pytest.param(list(MOMENTS), marks=pytest.mark.soak)], ids=["some", "all"])
def test_a_signal_at_any_moment_loses_no_step(tmp_path: Path, whole: Any, names: list[str]) -> None:
    """The process ends with 143, the newest checkpoint is of the last step that was done, evaluations are made up for,
    and the end is bit for bit that of a run that was left alone."""
    for name in names:
        moment = MOMENTS[name]
        (one,) = check(tmp_path / name.replace(" ", "-"), whole, [{"at": moment}])
        event, batch, _ = moment
        assert one.batches[-1:] in ([batch] if batch else [], [batch + 1], [batch]), (name, one.said[-1:])
        assert event.startswith("e") or one.batches[-1] <= batch + 1


def test_a_run_that_is_asked_again_and_again_goes_on(tmp_path: Path, whole: Any) -> None:
    """Five signals at moments of all kinds, in one run with workers, where each resume begins in the middle."""
    orders = [{"at": MOMENTS[name]} for name in ("while the loader works", "in an evaluation", "after an epoch")]
    orders += [{"at": ["after_backward", 45, 1]}, {"at": ["eval_batch_end", 50, 1]}]
    check(tmp_path, whole, orders, workers=2, extra="ema")


@pytest.mark.parametrize("grace", ["5s", "30s"])
def test_signals_at_random_instants_lose_no_step(tmp_path: Path, whole: Any, grace: str) -> None:
    """The short form: three instants."""
    at_random_instants(tmp_path, whole, grace, launches=3)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("grace", ["5s", "30s"])
@pytest.mark.parametrize("workers", [0, 2])
def test_signals_at_many_random_instants_lose_no_step(tmp_path: Path, whole: Any, grace: str, workers: int) -> None:
    """The long form: fifty for each."""
    for chain in range(10):
        at_random_instants(tmp_path / str(chain), whole, grace, launches=5, seed=chain, workers=workers)


def at_random_instants(folder: Path, whole: Any, grace: str, launches: int, seed: int = 0, **cell: Any) -> None:
    """Ask for the end so many times, each after a random time; a launch may come to the end before that."""
    said, end = whole(**cell)
    chooser, done = random.Random(f"{grace} {seed}"), list[str]()
    for _ in range(launches):
        one = launch(folder, grace=grace, after=chooser.uniform(0.001, 0.35), **cell)
        done += one.said
        if one.code == 0:
            break
        if one.code == -signal.SIGTERM:
            assert not one.said, "only before training begins a signal may end the process as it likes"
            continue
        assert one.code == 128 + signal.SIGTERM, one.log
        if one.said:
            assert newest(folder) == int(done[-1].split()[1 if done[-1].startswith("e") else 0])
    else:
        last = launch(folder, **cell)
        assert last.code == 0, last.log
        done += last.said
    assert done == said
    assert differences(torch.load(folder / "final.pt", weights_only=True), end) == []


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_signals_at_random_instants_of_saves_and_uploads(
    tmp_path: Path, whole: Any, request: pytest.FixtureRequest
) -> None:
    """Each batch is saved and uploaded: the signals come while that goes on. Each time another machine goes on."""
    said, end = whole()
    server = request.getfixturevalue("s3_server")
    chooser = random.Random(1)
    for chain in range(3):
        order = {"interval": "1ba", "save_folder": f"s3://{server.new_bucket()}/run"}
        done: list[str] = []
        for machine in range(40):
            after = 0.0 if machine == 39 else chooser.uniform(0.001, 0.5)
            one = launch(tmp_path / f"{chain}-{machine}", dict(server.environment), after=after, **order)
            done += one.said
            if one.code == 0:
                break
            assert one.code == 128 + signal.SIGTERM, one.log
            assert "and in the bucket" in one.log or not done, one.log
        assert done == said
        last = torch.load(tmp_path / f"{chain}-{machine}" / "final.pt", weights_only=True)
        assert differences(last, end) == []


def test_workers_of_the_loader_survive_a_signal_to_the_whole_group(tmp_path: Path, whole: Any) -> None:
    """A terminal and Slurm signal every process of a job: the loader's workers go on until the run has saved."""
    order = {"at": ["after_forward", 11, 1], "to_group": True}
    (one,) = check(tmp_path, whole, [order], workers=2)
    assert "DataLoader worker" not in one.log


def test_a_save_that_could_not_end_in_time_is_not_begun(tmp_path: Path) -> None:
    """The log says what is kept instead."""
    one = launch(tmp_path, at=["after_forward", 11, 1], grace=0.001)
    assert one.code == 143
    assert newest(tmp_path) == 7
    assert "no checkpoint of batch 12 was saved" in one.log
    assert f"the newest is {tmp_path}/ep0-ba7-rank0.pt" in one.log


@pytest.mark.parametrize("first", ["SIGTERM", "SIGUSR1"])
def test_the_first_interrupt_after_another_signal_loses_no_step(tmp_path: Path, first: str) -> None:
    """A scheduler that sends several kinds of signals, or Ctrl-C after one of them: the run saves, with the exit code
    of the first; the second Ctrl-C stops at once."""
    order: dict[str, Any] = {"at": ["after_forward", 11, 1], "grace": "30s"}
    one = launch(tmp_path / "one", signals=[first, "SIGINT"], **order)
    assert (one.code, one.batches[-1:], newest(tmp_path / "one")) == (128 + signal.Signals[first], [12], 12), one.log
    two = launch(tmp_path / "two", signals=[first, "SIGINT", "SIGINT"], **order)
    assert (two.batches[-1:], newest(tmp_path / "two")) == ([11], 7)
    assert "KeyboardInterrupt" in two.log


def test_the_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    """The first Ctrl-C is like a signal of a scheduler, with its own exit code."""
    once = launch(tmp_path / "once", at=["after_forward", 11, 1], signals=["SIGINT"])
    assert (once.code, once.batches[-1], newest(tmp_path / "once")) == (130, 12, 12)
    twice = launch(tmp_path / "twice", at=["after_forward", 11, 1], signals=["SIGINT", "SIGINT"])
    assert twice.code != 0
    assert (twice.batches[-1], newest(tmp_path / "twice")) == (11, 7)
    assert "KeyboardInterrupt" in twice.log
    chosen = launch(tmp_path / "code", at=["after_forward", 3, 1], signals=["SIGUSR1", "SIGTERM"], exit_code=75)
    assert (chosen.code, newest(tmp_path / "code")) == (75, 4)


class AskedInTheLastSave(Callback):
    """Makes saves slow at the end of training, and asks the process to end while it waits for the last."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def epoch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == BATCHES:
            preempted_run.slow_down(self.folder, 0.4)
            threading.Timer(0.8, os.kill, [os.getpid(), signal.SIGTERM]).start()


def asked_in_the_last_save(folder: str) -> None:
    callbacks = [PreemptionHandler("30s"), AskedInTheLastSave(folder)]
    with build(Cell(), callbacks, run_name="r", save_folder=folder, save_interval="1ep", autoresume=True) as trainer:
        trainer.fit()
    signal.raise_signal(signal.SIGTERM)  # as before training


def test_a_signal_while_the_last_save_is_waited_for_does_not_end_it(tmp_path: Path) -> None:
    """The handler that the user has given in front of the other callbacks listens until all of them have ended."""
    done = run_forked(asked_in_the_last_save, str(tmp_path), cwd=tmp_path)
    assert newest(tmp_path) == BATCHES, done.stderr
    assert f"run r ended at epoch 3, batch {BATCHES}" in done.stderr
    assert done.returncode == -signal.SIGTERM


class AskAt(Callback):
    """Presses Ctrl-C in some batches, so often each."""

    def __init__(self, presses: dict[int, int]) -> None:
        self.presses = presses

    def batch_end(self, state: State, logger: Logger) -> None:
        for number in range(self.presses.get(int(state.timestamp.batch), 0)):
            time.sleep(1.1 * number)  # sooner it is one key press, which several processes hear
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("presses", [1, 2])
def test_a_call_of_fit_after_one_that_was_interrupted_trains_to_its_end(tmp_path: Path, presses: int) -> None:
    """In a notebook, where the process lives on after Ctrl-C: the next call trains on. What is asked for between two
    calls, and a Ctrl-C in the second, count as in the first."""
    handler = PreemptionHandler()
    with trainer(callbacks=[handler, AskAt({3: presses, 8: 1})], save_folder=tmp_path) as run:
        with pytest.raises(Preempted if presses == 1 else KeyboardInterrupt):
            run.fit()
        with pytest.raises(Preempted):
            run.fit()
        assert int(run.state.timestamp.batch) == 8
        handler.preempt()
        with pytest.raises(Preempted):
            run.fit()
        assert int(run.state.timestamp.batch) == 8
        run.fit()
        assert int(run.state.timestamp.batch) == 12


def test_the_last_save_is_in_the_bucket(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The run goes on on another machine, and the log of the first says that it can."""
    server = request.getfixturevalue("s3_server")
    place: dict[str, Any] = {"save_folder": f"s3://{server.new_bucket()}/run"}
    one = launch(tmp_path / "a", dict(server.environment), at=["after_forward", 9, 1], **place)
    assert one.code == 143, one.log
    assert "and in the bucket" in one.log
    two = launch(tmp_path / "b", dict(server.environment), **place)
    assert two.code == 0, two.log
    assert one.batches + two.batches == list(range(1, BATCHES + 1))

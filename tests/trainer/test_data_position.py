"""A resumed run sees exactly the batches that the interrupted one would have seen, whatever loads them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from data_kinds import COUNT, KINDS, FromSharedGenerator, Noisy, Stream, noisy_collate, ordered_by, seeded, shuffled
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from trainer_parts import At, Points, Seen, Step, build, loader, same, weights

from composerlite import DataSpec, Event, State
from composerlite.checkpoint import load_checkpoint
from composerlite.core import seed_all
from composerlite.errors import IncompatibleCheckpointError, TrainingError

# torchdata asks torch for it; torch 2.13 says that nobody should.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def run(data: Any, **arguments: Any) -> tuple[list[Step], dict[str, torch.Tensor]]:
    """Train three epochs with dropout; what was seen, and the weights at the end."""
    seen = Seen()
    defaults: dict[str, Any] = {"max_duration": "3ep", "run_name": "run", "dropout": 0.5}
    with build(train_dataloader=data, callbacks=seen, **{**defaults, **arguments}) as trainer:
        trainer.fit()
        end = weights(trainer)
    if hasattr(data, "_iterator"):
        data._iterator = None  # its workers end now; as garbage, torch waits for each of them for five seconds
    return seen.steps, end


def middle_and_edge(state: State, event: Event) -> bool:
    """When to save: in the middle of the first epoch, between the two, and in the middle of the second."""
    now = state.timestamp
    if event is Event.BATCH_CHECKPOINT:
        return (int(now.epoch), int(now.batch_in_epoch)) in ((0, 2), (1, 3))
    return event is Event.EPOCH_CHECKPOINT and now.epoch == "1ep"


def at_batch(batch: int) -> Callable[[State, Event], bool]:
    """When to save: after so many batches, before the epoch is told to be over."""
    return lambda state, event: event is Event.BATCH_CHECKPOINT and int(state.timestamp.batch) == batch


class Around:
    """An iterable over the first batches of some points."""

    def __init__(self, length: int) -> None:
        self.items = list(DataLoader(Points(COUNT), batch_size=4))[:length]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def shared(**arguments: Any) -> DataLoader[Any]:
    """An order drawn index by index from the generator of training."""
    return DataLoader(Points(40), batch_size=4, sampler=FromSharedGenerator(40), **arguments)


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """The files of a run, in order of their batch counts."""
    return sorted((int(path.name.split("ba")[1].split("-")[0]), path) for path in folder.glob("ep*.pt"))


# ── every kind of loader ─────────────────────────────────────────────────────────────────────────────────────────────
WITH_WORKERS = {kind for kind in KINDS if "2 workers" in kind}
A_SAMPLE_OF_THESE = {
    "noise in collate_fn, 2 workers",
    "iterable, 2 workers",
    "iterable, 2 workers that persist",
    "StatefulDataLoader, 2 workers",
}
"""The others take as long and are in ``make soak``: processes are started 24 times for each."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.soak] if kind in WITH_WORKERS - A_SAMPLE_OF_THESE else [])
        for kind in KINDS
    ],
)
def test_a_resume_sees_the_rest_of_the_batches(kind: str, tmp_path: Path) -> None:
    """Three interruptions, each in the run that the last one was resumed to: in an epoch, at its edge, in the second.

    The batches are the same, noise included, and so are the weights at the end: training's own random numbers, too.
    """
    saving: dict[str, Any] = {"save_interval": middle_and_edge, "save_overwrite": True}
    steps, end = run(KINDS[kind](), save_folder=tmp_path / "0", **saving)
    for resume in range(3):
        batch, checkpoint = checkpoints(tmp_path / str(resume))[0]
        torch.load(checkpoint, weights_only=True)  # plain torch opens it
        rest, end_of_rest = run(KINDS[kind](), load_path=checkpoint, save_folder=tmp_path / str(resume + 1), **saving)
        assert rest == steps[batch:], f"the batches differ after a resume at batch {batch}"
        assert same(end_of_rest, end), f"the weights differ after a resume at batch {batch}"


IN_EACH_WAY = [
    "shuffled",
    "persistent workers",
    "with replacement, generator, 2 workers",
    "iterable",
    "a list of batches",
    "StatefulDataLoader",
    "StatefulDataLoader, generator",
    "streaming",
    "streaming loader",
]


@pytest.mark.parametrize(
    ("before", "now", "make", "is_exact"),
    [
        (2, 0, shuffled, False),
        (0, 1, shuffled, False),
        (1, 2, shuffled, True),
        (2, 1, partial(shuffled, collate_fn=noisy_collate), True),
        (1, 2, partial(DataLoader, Stream(), 2), False),
    ],
)
def test_another_number_of_workers(
    before: int, now: int, make: Any, is_exact: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Random transforms of map-style data do not depend on the number of workers above zero. Else a warning says so."""
    steps, end = run(make(num_workers=before), save_folder=tmp_path, save_interval=at_batch(3), max_duration="1ep")
    rest, end_of_rest = run(make(num_workers=now), load_path=checkpoints(tmp_path)[0][1], max_duration="1ep")
    text = f"num_workers={before} and this one has num_workers={now}"
    assert sum(text in message for message in caplog.messages) == int(not is_exact)
    assert caplog.text.count(f"give the loader num_workers={before}") == int(not is_exact)
    if is_exact:
        assert rest == steps[3:]
        assert same(end_of_rest, end)
    elif make is shuffled:
        assert [batch[2] for _, batch in rest] == [batch[2] for _, batch in steps[3:]]


@pytest.mark.parametrize("kind", IN_EACH_WAY)
def test_a_resume_after_the_last_batch_of_an_epoch(kind: str, tmp_path: Path) -> None:
    """Saved when the last batch was trained and the epoch not yet ended: it ends, and the next has its own order."""
    steps, end = run(KINDS[kind](), save_folder=tmp_path, save_interval=at_batch(5))
    rest, end_of_rest = run(KINDS[kind](), load_path=checkpoints(tmp_path)[0][1])
    assert rest == steps[5:]
    assert same(end_of_rest, end)


@pytest.mark.parametrize("kind", IN_EACH_WAY)
def test_training_goes_on_within_an_epoch_and_after_a_failure(kind: str) -> None:
    """Two calls of fit see what one call sees; a batch on which training failed is trained on by the next call."""
    seed_all(1)
    steps, _ = run(KINDS[kind](), dropout=0.0)
    seed_all(1)
    seen, failed = Seen(), list[int]()

    def fail_once(state: State) -> None:
        if state.timestamp.batch == "7ba" and not failed:
            failed.append(7)
            raise KeyError("a failure in the eighth batch")

    callbacks = [seen, At(Event.BATCH_START, fail_once)]
    with build(train_dataloader=KINDS[kind](), callbacks=callbacks, max_duration="3ep") as trainer:
        trainer.fit(duration="3ba")
        with pytest.raises(KeyError, match="eighth batch"):
            trainer.fit(duration=f"{len(steps) - 3}ba")
        trainer.fit()
    assert seen.numbers[:10] == [batch[2] for _, batch in steps[:10]]
    assert len(seen.steps) == len(steps)


def test_a_checkpoint_loaded_into_a_trainer_that_has_trained(tmp_path: Path) -> None:
    """Its position counts, not that which training had reached."""
    seen = Seen()
    with build(train_dataloader=shuffled(), callbacks=seen, save_folder=tmp_path, save_interval=at_batch(3)) as trainer:
        trainer.fit(duration="8ba")
        load_checkpoint(checkpoints(tmp_path)[0][1], trainer.state)
        trainer.fit(duration="2ba")
    assert [count for count, _ in seen.steps[8:]] == [4, 5]
    assert seen.numbers[8:] == seen.numbers[3:5]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_subset_of_each_epoch_is_resumed(workers: int, tmp_path: Path) -> None:
    """``train_subset_num_batches``: in the middle of an epoch and at its edge, though the loader had more to give."""
    kinds = [lambda: shuffled(num_workers=workers), lambda: ordered_by(KINDS["user's generator"]().sampler)]
    for number, kind in enumerate(kinds):
        folder = tmp_path / str(number)
        arguments: dict[str, Any] = {"train_subset_num_batches": 3, "max_duration": "4ep"}
        steps, end = run(kind(), save_folder=folder, save_interval="1ba", **arguments)
        assert len(steps) == 12
        for batch, checkpoint in checkpoints(folder)[1 : 3 if workers else 6]:
            rest, end_of_rest = run(kind(), load_path=checkpoint, **arguments)
            assert rest == steps[batch:]
            assert same(end_of_rest, end)


class FailsOnce(Noisy):
    """Points of which one cannot be loaded at first."""

    failed = False

    def __getitem__(self, index: int) -> Any:
        if index == 9 and not self.failed:
            self.failed = True
            raise OSError("the disk is away")
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("make", "is_exact"), [(DataLoader, True), (lambda *a: [DataLoader(*a)], True), (StatefulDataLoader, False)]
)
def test_a_loader_that_has_failed(make: Callable[..., Any], is_exact: bool) -> None:
    """The next call of fit trains on the batch that could not be loaded; a loader that restores itself cannot say."""
    dataset, seen = FailsOnce(COUNT), Seen()
    made = make(dataset, 4)
    data = DataSpec(made[0], replay_on_resume=True) if isinstance(made, list) else made
    with build(train_dataloader=data, callbacks=seen, max_duration="2ep") as trainer:
        with pytest.raises(OSError, match="disk"):
            trainer.fit()
        if is_exact:
            trainer.fit()
            in_order = [list(range(first, min(first + 4, COUNT))) for first in range(0, COUNT, 4)]
            assert seen.numbers == in_order * 2
        else:
            with pytest.raises(TrainingError, match="resume from the last checkpoint"):
                trainer.fit()


class Endless(IterableDataset[Any]):
    """Points without an end: a pass begins where the one before was left, and ends after ``length`` of them."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        points = Points(100)
        for _ in itertools.count() if self.length is None else range(self.length):
            self.place += 1
            yield points[self.place - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = state_dict["place"]


class EndlessLoader(Endless):
    """A loader of the user's over the same."""

    def __iter__(self) -> Iterator[Any]:
        for point in super().__iter__():
            yield [part.unsqueeze(0) for part in point]


@pytest.mark.parametrize(("kind", "size"), [(EndlessLoader, 1), (lambda *n: StatefulDataLoader(Endless(*n), 4), 4)])
def test_a_stream_that_keeps_its_place_over_epochs(
    kind: Callable[..., Any], size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where ``train_subset_num_batches`` makes the epochs of an endless stream, a resume between two of them cannot
    know that it would have continued, and the log says so; where the stream makes them, it is exact."""
    run(kind(), save_folder=tmp_path / "cut", train_subset_num_batches=3)
    run(kind(), load_path=tmp_path / "cut" / "ep1-ba3-rank0.pt", train_subset_num_batches=3)
    assert "the last epoch of the interrupted run ended before its data" in caplog.text
    assert "without train_subset_num_batches" in caplog.text

    caplog.clear()
    steps, end = run(kind(3 * size), save_folder=tmp_path / "whole")
    rest, end_of_rest = run(kind(3 * size), load_path=tmp_path / "whole" / "ep1-ba3-rank0.pt")
    assert len(steps) == 9
    assert rest == steps[3:]
    assert same(end_of_rest, end)
    assert "ended before its data" not in caplog.text


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Scaled(Points):
    """Points that each worker may be told to scale."""

    scale = 1.0

    def __getitem__(self, index: int) -> Any:
        inputs, target, number = super().__getitem__(index)
        return inputs * self.scale, target, number


def scale_by_worker(worker: int) -> None:
    """What a ``worker_init_fn`` does: finds the data set of its worker and sets it up."""
    info = get_worker_info()
    assert info is not None
    assert len(info.dataset.inputs) == COUNT  # type: ignore[attr-defined]
    info.dataset.scale = 10.0 + worker  # type: ignore[attr-defined]


def test_a_worker_init_fn_reaches_the_data_set() -> None:
    """``get_worker_info().dataset`` gives its attributes and takes them."""
    dataset = Scaled(COUNT)
    data = DataLoader(dataset, batch_size=4, num_workers=2, worker_init_fn=scale_by_worker)
    steps, _ = run(data, max_duration="1ep")
    for number, (_, (inputs, _, _)) in enumerate(steps):
        expected = dataset.inputs[4 * number : 4 * number + 4] * (10.0 + number % 2)
        assert torch.equal(torch.tensor(inputs), expected)
    assert dataset.scale == 1.0


def test_the_users_loader_is_left_as_it_is() -> None:
    """It keeps its own sampler and data set, and can be iterated over while training uses it and afterwards."""
    data = shuffled(num_workers=2, generator=seeded())
    before = dict(vars(data))
    with build(train_dataloader=data, max_duration="7ba") as trainer:
        trainer.fit()
    assert vars(data) == before
    assert type(data.dataset) is Noisy
    assert sorted(number for batch in data for number in batch[2].tolist()) == list(range(COUNT))


# ── what is loaded ───────────────────────────────────────────────────────────────────────────────────────────────────
class Counting(Points):
    """Counts how many points were loaded."""

    loaded = 0

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        return super().__getitem__(index)


def test_batches_already_seen_are_not_loaded_again(tmp_path: Path) -> None:
    """A resume after four of five batches loads the points of the fifth only."""
    kind = lambda: DataLoader(Counting(COUNT), batch_size=4, shuffle=True)
    run(kind(), save_folder=tmp_path, save_interval=at_batch(4), max_duration="1ep")
    resumed = kind()
    run(resumed, load_path=checkpoints(tmp_path)[0][1], max_duration="1ep")
    assert resumed.dataset.loaded == COUNT - 16  # type: ignore[attr-defined]


class Running(Noisy):
    """Points that depend on how many were loaded before."""

    loaded = 0

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        inputs, target, number = super().__getitem__(index)
        return inputs + self.loaded, target, number


def test_a_data_set_that_remembers_is_replayed_if_the_user_says_so(tmp_path: Path) -> None:
    """``replay_on_resume=True``: what a data set in a worker keeps from item to item is there again."""
    kind = lambda: DataSpec(
        DataLoader(Running(COUNT), batch_size=4, shuffle=True, num_workers=2), replay_on_resume=True
    )
    steps, end = run(kind(), save_folder=tmp_path, save_interval=at_batch(8))
    rest, end_of_rest = run(kind(), load_path=checkpoints(tmp_path)[0][1])
    assert rest == steps[8:]
    assert same(end_of_rest, end)


def test_spin_dataloaders_false_starts_the_data_of_the_epoch_afresh(tmp_path: Path) -> None:
    """As documented: nothing is skipped, even where the position could not be restored at all."""
    in_order = lambda: DataLoader(Points(COUNT), batch_size=4)
    run(in_order(), save_folder=tmp_path, save_interval=at_batch(3))
    rest, _ = run(list(in_order()), load_path=checkpoints(tmp_path)[0][1], spin_dataloaders=False)
    of_the_epoch = [list(range(first, min(first + 4, COUNT))) for first in range(0, COUNT, 4)]
    assert [batch[2] for _, batch in rest] == of_the_epoch * 3


def test_the_bare_state_of_a_streaming_data_set_is_understood(tmp_path: Path) -> None:
    """What Composer saves under ``dataset_state`` is the data set's own state, with nothing around it."""

    def as_composer_saves_it(contents: dict[str, Any]) -> None:
        dataset_state = contents["state"]["dataset_state"]
        dataset_state["train"] = dataset_state["train"]["loader"]

    steps, _ = run(KINDS["streaming"](), save_folder=tmp_path, save_interval=at_batch(8))
    checkpoint = checkpoints(tmp_path)[0][1]
    rest, _ = run(KINDS["streaming"](), load_path=checkpoint, load_ignore_keys=as_composer_saves_it)
    assert rest == steps[8:]


# ── what cannot be restored is said ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("before", "changed", "batch", "message"),
    [
        (shuffled, partial(DataLoader, Noisy(COUNT + 4), 4, shuffle=True), 8, "another order.*epoch 1, first 12 samp"),
        (shuffled, partial(DataLoader, Noisy(COUNT - 8), 4, shuffle=True), 8, "another order"),
        (shuffled, partial(DataLoader, Noisy(4), 4, shuffle=True), 8, "another order"),
        (shuffled, partial(shuffled, shuffle=False), 8, "another order"),
        (shuffled, lambda: DataLoader(Noisy(COUNT), batch_sampler=[[1], [2]]), 8, "this one counts batches"),
        (shared, shared, 13, "give it a generator of its own"),
        (partial(shared, num_workers=2), partial(shared, num_workers=2), 13, "give it a generator of its own"),
        (lambda: shuffled(generator=seeded()), shuffled, 3, "had 1 generators of its own and this one has 0"),
        (partial(Around, 5), partial(Around, 3), 4, "ended after 3 batches, before the 4"),
    ],
)
def test_other_data_is_not_trained_on_in_silence(
    before: Any, changed: Any, batch: int, message: str, tmp_path: Path
) -> None:
    """A resume within an epoch whose batches are not the same is an error that says what may be wrong."""
    run(before(), save_folder=tmp_path, save_interval=at_batch(batch), max_duration="2ep")
    with pytest.raises(IncompatibleCheckpointError, match=message):
        run(changed(), load_path=checkpoints(tmp_path)[0][1])


def test_the_batch_size_may_change(tmp_path: Path) -> None:
    """The position counts samples: the rest of the epoch is trained in batches of the new size."""
    steps, _ = run(loader(COUNT), save_folder=tmp_path, save_interval=at_batch(2), max_duration="1ep")
    rest, _ = run(loader(COUNT, batch_size=5), load_path=checkpoints(tmp_path)[0][1], max_duration="1ep")
    numbers = [number for _, batch in steps[2:] for number in batch[2]]
    assert [batch[2] for _, batch in rest] == [numbers[:5], numbers[5:]]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("shuffled", "a list of batches"),
        ("a list of batches", "shuffled"),
        ("shuffled", "StatefulDataLoader"),
        ("streaming", "iterable"),
        ("shuffled", "replayed because the user says so"),
    ],
)
def test_another_kind_of_loader_is_an_error(before: str, after: str, tmp_path: Path) -> None:
    """Its position says nothing about this one."""
    run(KINDS[before](), save_folder=tmp_path, save_interval=at_batch(3), max_duration="1ep")
    with pytest.raises(IncompatibleCheckpointError, match="is not that of a"):
        run(KINDS[after](), load_path=checkpoints(tmp_path)[0][1])


# ── in process ───────────────────────────────────────────────────────────────────────────────────────────────────────
class InBatches(Points):
    """Points that are fetched a batch at a time, and say so in their features."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(torch.full((4,), float(len(indices))), self.targets[i], torch.tensor(i)) for i in indices]


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 4, "shuffle": True, "drop_last": True},
        {"batch_size": 3, "collate_fn": lambda items: tuple(map(torch.stack, zip(*items, strict=True)))},
        {"batch_size": None, "collate_fn": lambda item: tuple(part.unsqueeze(0) for part in item)},
        {"batch_sampler": BatchSampler(SequentialSampler(range(20)), 6, drop_last=False)},
    ],
)
@pytest.mark.parametrize("dataset", [Points, InBatches])
def test_training_gets_the_batches_that_the_loader_gives(dataset: type[Points], arguments: dict[str, Any]) -> None:
    """Without workers we fetch ourselves: the batches, and the random numbers drawn for them, are the loader's."""
    loader = DataLoader(dataset(), **arguments)
    seed_all(5)
    expected = [[part.tolist() for part in batch] for _ in range(2) for batch in loader]
    drawn_after = torch.rand(1)

    seen = Seen()
    with build(train_dataloader=loader, callbacks=seen, max_duration="2ep", dropout=0.0) as trainer:
        seed_all(5)
        trainer.fit()
        assert torch.equal(torch.rand(1), drawn_after)
    assert [batch for _, batch in seen.steps] == expected

"""The data of several ranks: together they see what one process sees, and another number of ranks can go on with it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_kinds import Noisy, OwnGenerator, distort, seeded
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from trainer_parts import At, Points, build, loader

from composerlite import DataSpec, Event, State, Timestamp, dist
from composerlite.core import seed_all
from composerlite.errors import ConfigError, IncompatibleCheckpointError
from composerlite.testing import run_ranks
from composerlite.trainer.data.dataloading import DataPosition, EvaluationBatches, Share, batches_per_epoch, position_in

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

Build = Callable[..., Any]
Epoch = list[list[list[int]]]

COUNT = 18


class Numbers(Dataset[Any]):
    """Each sample is its number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Ranks:
    """Ranks that take turns in one process, each with a loader and generators of its own.

    Args:
        build: ``build(share)``: the loader of a rank.
        saved: the state to go on from, and the epoch and batch that it was saved at.
    """

    def __init__(self, build: Build, world_size: int, saved: tuple[Any, int, int] | None = None) -> None:
        state, self.number, self.batch = (None, 0, 0) if saved is None else saved
        self.positions: list[DataPosition] = []
        self.generators: list[Any] = []
        for rank in range(world_size):
            seed_all(3)
            share = Share(rank, world_size)
            self.positions.append(
                position_in(DataSpec(build(share)), seed=3, timestamp=self.now, share=share, saved=state)
            )
            self.generators.append(_generators())
        self.epochs: list[Any] = []

    def now(self) -> Timestamp:
        """Where all ranks stand."""
        return Timestamp(epoch=self.number, batch_in_epoch=self.batch)

    def begin(self) -> None:
        """Begin the epoch, or go on with it."""
        self.epochs = []
        for rank, position in enumerate(self.positions):
            _set_generators(self.generators[rank])
            self.epochs.append(position.epoch(self.number, self.batch))
            self.generators[rank] = _generators()

    def step(self) -> list[list[int]] | None:
        """The samples that each rank has of the next batch; ``None`` where the epoch is over, on all of them."""
        given: list[list[int]] = []
        over = 0
        for rank, (position, batches) in enumerate(zip(self.positions, self.epochs, strict=True)):
            _set_generators(self.generators[rank])
            batch = next(batches, None)
            distort()  # training draws as well
            self.generators[rank] = _generators()
            over += batch is None
            if batch is not None:
                given.append([] if position.is_padding else batch.tolist())
        assert over in (0, len(self.positions)), "some ranks have batches left and others have none"
        if over:
            return None
        self.batch += 1
        return given

    def rest(self) -> Epoch:
        """What is left of the epoch, which ends with it."""
        given: Epoch = []
        while (batch := self.step()) is not None:
            given.append(batch)
        for position in self.positions:
            position.finish_epoch(exhausted=True)
        self.number, self.batch = self.number + 1, 0
        return given

    def epoch(self) -> Epoch:
        """The next whole epoch."""
        self.begin()
        return self.rest()

    def saved(self) -> tuple[Any, int, int]:
        """What a checkpoint holds now. It is the same on every rank, or has a part of each."""
        states = [position.state_dict() for position in self.positions]
        if "per_rank" in states[0]:
            return {**states[0], "per_rank": [state["per_rank"][0] for state in states]}, self.number, self.batch
        assert all(repr(state) == repr(states[0]) for state in states)
        return states[0], self.number, self.batch


def _generators() -> Any:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_generators(states: Any) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def flat(epoch: Epoch) -> list[int]:
    """The samples in the order of their batches; within a batch in that of ranks."""
    return [number for batch in epoch for part in batch for number in part]


def in_order(count: int, batch_size: int, **arguments: Any) -> Build:
    """Builds the loader of a user who does nothing for several ranks."""
    return lambda share: DataLoader(Numbers(count), batch_size=batch_size, **arguments)


# ── together as one ──────────────────────────────────────────────────────────────────────────────────────────────────
ORDERS: dict[str, Callable[[int, int], Any]] = {
    "in order": lambda count, size: DataLoader(Numbers(count), batch_size=size),
    "shuffled": lambda count, size: DataLoader(Numbers(count), batch_size=size, shuffle=True),
    "drop_last": lambda count, size: DataLoader(Numbers(count), batch_size=size, shuffle=True, drop_last=True),
    "user's generator": lambda count, size: DataLoader(
        Numbers(count), batch_size=size, shuffle=True, generator=seeded()
    ),
    "weighted": lambda count, size: DataLoader(
        Numbers(count), batch_size=size, sampler=WeightedRandomSampler([1.0 + i for i in range(count)], count)
    ),
    "with replacement": lambda count, size: DataLoader(
        Numbers(count), batch_size=size, sampler=RandomSampler(range(count), replacement=True)
    ),
    "drawn lazily": lambda count, size: DataLoader(
        Numbers(count), batch_size=size, sampler=OwnGenerator(np.random.default_rng(5))
    ),
    "BatchSampler": lambda count, size: DataLoader(
        Numbers(count), batch_sampler=BatchSampler(RandomSampler(range(count)), size, drop_last=False)
    ),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_all_ranks_together_see_what_one_process_sees(kind: str) -> None:
    """Batch for batch, in the same order, each sample once: one process has the batches of all ranks as one."""
    for world_size, size in ((2, 4), (3, 2), (4, 1), (5, 4)):
        seed_all(3)
        whole = ORDERS[kind](COUNT, size * world_size)
        expected = [[batch.tolist() for batch in whole] for _ in range(3)]
        together = Ranks(lambda share, size=size: ORDERS[kind](COUNT, size), world_size)
        for batches in expected:
            epoch = together.epoch()
            assert [flat([batch]) for batch in epoch] == batches
            for batch in epoch:
                sizes = {len(part) for part in batch}
                assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_distributed_sampler_is_respected(drop_last: bool) -> None:
    """Each rank gets what its DistributedSampler gives it, except that nothing is repeated to fill up the end."""

    def build(share: Share) -> DataLoader[Any]:
        sampler = DistributedSampler(
            Numbers(22), share.world_size, share.rank, shuffle=True, seed=4, drop_last=drop_last
        )
        return DataLoader(Numbers(22), batch_size=2, sampler=sampler)

    together = Ranks(build, 4)
    for number in range(2):
        epoch = together.epoch()
        for rank in range(4):
            loader = build(Share(rank, 4))
            loader.sampler.set_epoch(number)  # type: ignore[attr-defined]
            expected = [batch.tolist() for batch in loader]
            assert [batch[rank] for batch in epoch][:2] == expected[:2]
        assert len(flat(epoch)) == len(set(flat(epoch))) == (20 if drop_last else 22)


def test_a_distributed_sampler_of_other_ranks_is_an_error() -> None:
    """One that was built for another rank would give a rank the samples of that one."""
    build = lambda share: DataLoader(Numbers(8), sampler=DistributedSampler(Numbers(8), 2, 0))
    with pytest.raises(ConfigError, match=r"num_replicas=2, rank=0\) on rank 1 of the 2"):
        Ranks(build, 2).begin()


def test_batches_of_the_users_own_are_dealt_whole() -> None:
    """A batch_sampler of the user's: its batches go round the ranks; what is left at the end is shared out evenly."""
    batches = [[0, 1], [2, 3, 4], [5], [6, 7], [8], [9, 10, 11, 12]]
    epoch = Ranks(lambda share: DataLoader(Numbers(13), batch_sampler=batches), 4).epoch()
    assert epoch == [[[0, 1], [2, 3, 4], [5], [6, 7]], [[8], [9], [10], [11, 12]]]
    single = Ranks(lambda share: DataLoader(Numbers(5), batch_size=None, shuffle=False), 2)
    single.begin()
    assert [len(list(batches)) for batches in single.epochs] == [3, 3]


def test_state_knows_how_many_batches_there_are() -> None:
    """``dataloader_len`` counts the batches that ranks have together, also where the loader would count its own."""
    for count, size, world_size, drop_last in ((19, 4, 2, False), (19, 4, 2, True), (3, 4, 4, False), (16, 4, 2, True)):
        build = in_order(count, size, drop_last=drop_last)
        together = Ranks(build, world_size)
        batches = len(together.epoch())
        assert batches_per_epoch(DataSpec(build(None)), Share(0, world_size), subset=-1) == batches
        assert batches_per_epoch(DataSpec(build(None)), Share(0, world_size), subset=1) == min(1, batches)
        assert together.positions[0].batches_in_epoch() == batches


# ── another number of ranks ──────────────────────────────────────────────────────────────────────────────────────────
def test_any_number_of_ranks_goes_on_where_another_stopped() -> None:
    """For data sets, batch sizes, numbers of ranks and interruptions drawn at random, two in a row.

    The epoch is that of one process: nothing is seen twice, nothing is left out. So are those that follow.
    """
    draw = random.Random(11)
    for _ in range(40):
        count = draw.randint(1, 40)
        name = draw.choice([name for name in ORDERS if name not in ("weighted", "drawn lazily", "drop_last")])
        kind = lambda size, name=name, count=count: lambda share: ORDERS[name](count, size)
        first = Ranks(kind(draw.randint(1, 5)), draw.randint(1, 5))
        dealt = len(first.positions) > 1
        expected = [flat(epoch) for epoch in whole_epochs(kind(1), 3)]
        run, seen = first, list[int]()
        run.begin()
        for _ in range(2):
            for _ in range(draw.randint(0, 3)):
                seen += flat([run.step() or []])
            # Where one process began, it is one process that sees to the order until there are more.
            ranks = draw.randint(1, 5) if dealt else draw.randint(2, 5)
            dealt = True
            run = Ranks(kind(draw.randint(1, 5)), ranks, run.saved())
            run.begin()
        seen += flat(run.rest())
        assert seen == expected[0]
        if len(first.positions) > 1:
            assert [flat(run.epoch()), flat(run.epoch())] == expected[1:]


def whole_epochs(build: Build, count: int) -> list[Epoch]:
    """What ranks see that are not interrupted."""
    ranks = Ranks(build, 2)
    return [ranks.epoch() for _ in range(count)]


def test_the_named_changes_of_topology() -> None:
    """4 ranks × 2, after three batches: 2 × 4 and 1 × 8, which go on batch for batch; 2 × 2 and 3 × 2 as well."""
    run = Ranks(in_order(50, 2, shuffle=True), 4)
    run.begin()
    seen = [flat([run.step() or []]) for _ in range(3)]
    state = run.saved()
    rest = [flat([batch]) for batch in run.rest()]
    for world_size, size in ((4, 2), (2, 4), (1, 8)):
        other = Ranks(in_order(50, size, shuffle=True), world_size, state)
        other.begin()
        assert [flat([batch]) for batch in other.rest()] == rest
    for world_size, size in ((2, 2), (3, 2), (8, 3)):
        other = Ranks(in_order(50, size, shuffle=True), world_size, state)
        other.begin()
        assert other.positions[0].batches_in_epoch() == 3 + -(-26 // (world_size * size))
        assert flat(other.rest()) == [number for batch in rest for number in batch]
    assert sorted(number for batch in seen + rest for number in batch) == list(range(50))


def test_drop_last_drops_what_does_not_fill_the_batches_of_those_who_go_on() -> None:
    """No sample is seen twice, and fewer are left out than one global batch."""
    run = Ranks(in_order(23, 2, shuffle=True, drop_last=True), 4)
    run.begin()
    seen = flat([run.step() or []])
    other = Ranks(in_order(23, 2, shuffle=True, drop_last=True), 3, run.saved())
    other.begin()
    rest = other.rest()
    assert [len(flat([batch])) for batch in rest] == [6, 6]
    assert len({*seen, *flat(rest)}) == 20


def test_a_distributed_sampler_goes_on_with_another_number_of_ranks() -> None:
    """Its order depends on seed and epoch alone; the padding that each number of ranks would add is in none of them."""

    def build(share: Share) -> DataLoader[Any]:
        sampler = DistributedSampler(Numbers(21), share.world_size, share.rank, seed=4)
        return DataLoader(Numbers(21), batch_size=2, sampler=sampler)

    run = Ranks(build, 4)
    run.begin()
    seen = flat([run.step() or []])
    other = Ranks(build, 3, run.saved())
    other.begin()
    assert sorted(seen + flat(other.rest())) == list(range(21))


def test_an_epoch_that_was_left_early_is_followed_by_the_same_order() -> None:
    """After a subset of an epoch, as after a whole one, the next order is that of any other number of ranks."""
    orders: list[list[int]] = []
    for world_size, size in ((2, 4), (4, 2)):
        run = Ranks(lambda share, size=size: ORDERS["user's generator"](40, size), world_size)
        run.begin()
        run.step()
        for position in run.positions:
            position.finish_epoch(exhausted=False)
        run.number, run.batch = 1, 0
        orders.append(flat(run.epoch()))
    assert orders[0] == orders[1]


def test_training_goes_on_with_the_batch_on_which_it_failed() -> None:
    """A batch that was given and not counted is given again, and no other is left out."""
    run = Ranks(in_order(24, 2, shuffle=True), 2)
    expected = flat(Ranks(in_order(24, 2, shuffle=True), 2).epoch())
    run.begin()
    seen = flat([run.step() or []])
    run.step()
    run.batch -= 1  # it failed
    assert run.saved()[0]["done"] == 4
    run.begin()
    assert seen + flat(run.rest()) == expected


def test_other_data_is_not_trained_on_in_silence() -> None:
    """More or fewer samples, another sampler, batches of another's making: an error that says what may be wrong."""
    run = Ranks(in_order(24, 2, shuffle=True), 2)
    run.begin()
    run.step()
    state = run.saved()
    for changed in (in_order(25, 2, shuffle=True), in_order(3, 2, shuffle=True), in_order(24, 2)):
        with pytest.raises(IncompatibleCheckpointError, match=r"another order of samples.*first 4 samples"):
            Ranks(changed, 3, state).begin()
    batches = lambda share: DataLoader(Numbers(24), batch_sampler=[[i] for i in range(24)])
    with pytest.raises(IncompatibleCheckpointError, match="counted its data in samples, this one counts batches"):
        Ranks(batches, 3, state).begin()
    alone = Ranks(in_order(24, 2, shuffle=True), 1)
    alone.begin()
    alone.step()
    with pytest.raises(IncompatibleCheckpointError, match="another order of samples"):
        Ranks(in_order(24, 2), 2, alone.saved()).begin()


# ── transforms ───────────────────────────────────────────────────────────────────────────────────────────────────────
class NoisyInputs(Noisy):
    """The number of a point and its noise, which is drawn in a worker."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), distort()], dtype=torch.float64)


def test_random_transforms_in_workers_do_not_depend_on_the_ranks() -> None:
    """The noise of a sample is a function of the run's seed, the epoch and its place in the order."""
    runs: list[list[Any]] = []
    for world_size, size, workers in ((2, 3, 1), (3, 2, 2)):
        build = lambda share, size=size, workers=workers: DataLoader(
            NoisyInputs(18), batch_size=size, shuffle=True, num_workers=workers, persistent_workers=True
        )
        run = Ranks(build, world_size)
        runs.append([flat(run.epoch()), flat(run.epoch())])
        for position in run.positions:
            position.close()
    assert runs[0] == runs[1]
    assert len({noise for epoch in runs[0] for _, noise in epoch}) == 36


# ── loaders of the ranks' own ────────────────────────────────────────────────────────────────────────────────────────
class OwnShare(DistributedSampler[Any]):
    """Gives each rank an order of its own, which nobody else knows."""

    def __iter__(self) -> Any:
        return iter([*range(self.rank, 16, self.num_replicas)][::-1])


OWN: dict[str, Build] = {
    "StatefulDataLoader": lambda share: StatefulDataLoader(
        Numbers(16), batch_size=2, sampler=DistributedSampler(Numbers(16), share.world_size, share.rank)
    ),
    "a list": lambda share: list(DataLoader(Numbers(16), batch_size=2))[share.rank :: share.world_size],
    "a sampler that deals": lambda share: DataLoader(
        Numbers(16), batch_size=2, sampler=OwnShare(Numbers(16), share.world_size, share.rank)
    ),
}


@pytest.mark.parametrize("kind", OWN)
def test_each_rank_restores_a_loader_of_its_own(kind: str) -> None:
    """A checkpoint holds the position of every rank's loader; another number of ranks is an error that says so."""
    run = Ranks(OWN[kind], 2)
    run.begin()
    run.step()
    state = run.saved()
    rest = run.rest()
    other = Ranks(OWN[kind], 2, state)
    other.begin()
    assert other.rest() == rest
    for world_size in (1, 4):
        with pytest.raises(IncompatibleCheckpointError, match=f"among 2 ranks .* this run has {world_size}"):
            Ranks(OWN[kind], world_size, state)
    alone = Ranks(OWN[kind], 1).saved()
    with pytest.raises(IncompatibleCheckpointError, match=r"among 1 ranks|not that of"):
        Ranks(OWN[kind], 2, alone)
    not_gathered = run.positions[0].state_dict(), 0, 1
    with pytest.raises(IncompatibleCheckpointError, match="no position in the data of rank 1"):
        Ranks(OWN[kind], 2, not_gathered)


def test_a_loader_that_would_give_every_rank_everything_is_an_error() -> None:
    """Nobody deals its samples: each rank would train on all of them."""
    build = lambda share: StatefulDataLoader(Numbers(16), batch_size=2, shuffle=True)
    with pytest.raises(ConfigError, match="each of 2 ranks would train on all samples of this StatefulDataLoader"):
        Ranks(build, 2)


# ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_each_sample_is_evaluated_once_over_all_ranks() -> None:
    """Whatever the loader and the number of ranks; every rank has as many batches, stand-ins included."""
    for count, size, world_size in ((17, 4, 2), (2, 4, 4), (16, 2, 3), (1, 1, 2)):
        for name in ("in order", "shuffled", "user's generator"):
            given, batches = list[int](), set[int]()
            for rank in range(world_size):
                seed_all(3)
                evaluated = EvaluationBatches(DataSpec(ORDERS[name](count, size)), Share(rank, world_size))
                here = [[] if evaluated.is_padding else batch.tolist() for batch in evaluated]
                given += flat([here])
                batches.add(len(here))
            assert sorted(given) == list(range(count))
            assert len(batches) == 1


# ── with the trainer, on real ranks ──────────────────────────────────────────────────────────────────────────────────
def trained(
    batch_size: int, load_path: Path | None = None, build_loader: Callable[[], Any] | None = None, **arguments: Any
) -> tuple[list[list[int]], list[int], Timestamp]:
    """Train two epochs of 17 points with dropout; the points of each batch, those evaluated on, and the end."""
    seen, evaluated = list[list[int]](), list[int]()

    def see(state: State) -> None:
        is_padding = state.data_position.is_padding  # type: ignore[union-attr]
        seen.append([] if is_padding else state.batch[2].tolist())

    data = loader(17, batch_size=batch_size) if build_loader is None else build_loader()
    defaults: dict[str, Any] = {
        "train_dataloader": data,
        "callbacks": [
            At(Event.BATCH_END, see),
            At(Event.EVAL_BATCH_END, lambda state: evaluated.extend(state.batch[2].tolist())),
        ],
        "dropout": 0.5,
        "run_name": "run",
        "load_path": load_path,
    }
    with build(**{**defaults, **arguments}) as trainer:
        trainer.fit()
        trainer.eval(loader(7, batch_size=2))
        return seen, evaluated, trainer.state.timestamp


def train_on_two(folder: Path) -> Any:
    """What one of two ranks sees: of the data dealt out, and of loaders that restore themselves."""
    dealt = trained(2, save_folder=folder / "dealt", save_interval=at_batch(3))
    saving: dict[str, Any] = {"save_folder": folder / "own", "save_interval": at_batch(3), "build_loader": stateful}
    own, _, _ = trained(2, **saving)
    rest, _, _ = trained(2, build_loader=stateful, load_path=next((folder / "own").glob("ep*.pt")))
    errors: list[str] = []
    for wrong in (lambda: loader(17 + dist.get_global_rank()), lambda: StatefulDataLoader(Points(17), batch_size=2)):
        with pytest.raises(ConfigError) as raised:
            trained(2, build_loader=wrong)
        errors.append(str(raised.value))
    return *dealt, own, rest, errors


def go_on(batch_size: int, checkpoint: Path) -> Any:
    """What a rank sees that goes on with a checkpoint."""
    return trained(batch_size, checkpoint)


def stateful() -> StatefulDataLoader[Any]:
    """A loader that restores its own position, of this rank's points."""
    return StatefulDataLoader(Points(17), batch_size=2, sampler=dist.get_sampler(Points(17), shuffle=True))


def at_batch(batch: int) -> Callable[[State, Event], bool]:
    """When to save: after so many batches."""
    return lambda state, event: event is Event.BATCH_CHECKPOINT and int(state.timestamp.batch) == batch


def by_batches(ranks: list[list[list[int]]]) -> Epoch:
    """What each rank saw, batch by batch."""
    return [list(batch) for batch in zip(*ranks, strict=True)]


def test_ranks_train_on_the_data_together_and_others_go_on(tmp_path: Path) -> None:
    """Two ranks see each sample of an epoch once, in the order of one process; three, and one, go on with the rest.

    The last sample is given to one rank; the other keeps step with a stand-in that counts for nothing. The order of the
    second epoch is the same however many ranks have come to it. (One process that was always alone has another there:
    its dropout draws from the generator that its loader draws from.)
    """
    one, _, end = trained(4)
    numbers, evaluated, ends, own, rest, errors = zip(
        *run_ranks(train_on_two, 2, tmp_path, dist_timeout=None), strict=True
    )
    two = by_batches(list(numbers))
    seen = [flat([batch]) for batch in two]
    assert seen[:5] == one[:5]
    assert [len(part) for part in two[4]] == [0, 1]
    assert [(end.epoch, end.batch, end.sample) for end in ends] == [(end.epoch, end.batch, end.sample)] * 2
    assert end.sample == "34sp"
    assert sorted(evaluated[0] + evaluated[1]) == list(range(7))
    assert list(rest) == [its[3:] for its in own]
    for first, second in errors:
        assert "rank 0 has DataLoader over 17 samples" in first
        assert "rank 1 has DataLoader over 18 samples" in first
        assert "would train on all samples of this StatefulDataLoader" in second

    checkpoint = next((tmp_path / "dealt").glob("ep*.pt"))
    alone, _, _ = go_on(4, checkpoint)
    assert alone == seen[3:]
    three = by_batches([its for its, _, _ in run_ranks(go_on, 3, 2, checkpoint, dist_timeout=None)])
    assert flat(three) == [number for batch in seen[3:] for number in batch]
    assert [len(flat([batch])) for batch in three] == [5, 6, 6, 5]

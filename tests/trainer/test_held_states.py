"""What samplers and data sets keep themselves is saved where it can be, and its loss is found out where it cannot."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import data_kinds
import numpy as np
import pytest
import torch
from data_kinds import COUNT, KINDS, FromSharedGenerator, OwnGenerator, seeded
from test_data_over_ranks import Numbers, Ranks, flat
from test_data_position import checkpoints, run
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from trainer_parts import Points, Seen, build, same, weights

from composerlite import Callback, DataSpec, Evaluator, Event, Logger, State
from composerlite.core import seed_all
from composerlite.errors import ConfigError, IncompatibleCheckpointError
from composerlite.trainer.data.held import Held

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def shuffled_by(number: int) -> list[int]:
    """An order that is a function of ``number``."""
    return torch.randperm(COUNT, generator=seeded(number)).tolist()


class Counting(Sampler[int]):
    """Shuffles by how often it was iterated over, and tells nobody."""

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(shuffled_by(self.passes))


class Stateful(Counting):
    """Tells, and is told."""

    def state_dict(self) -> dict[str, Any]:
        return {"passes": np.array([self.passes]), "name": "n"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert isinstance(state_dict["passes"], np.ndarray)
        self.passes = int(state_dict["passes"][0])


class Around(Sampler[Any]):
    """A sampler around another, which it keeps as it is told."""

    def __init__(self, inner: Any, keep: Callable[[Any], Any] = lambda inner: inner) -> None:
        self.inner, self.kept = inner, keep(inner)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)


class Wrapper:
    """An iterable around a loader, as those are that prefetch to a device."""

    __slots__ = ("loader",)

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class StatefulStream(IterableDataset[Any]):
    """Points in an order that depends on how often it was iterated over, which it tells."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return (Points(COUNT)[index] for index in shuffled_by(self.passes))

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.passes = state_dict["passes"]


class PositionedStream(IterableDataset[Any]):
    """Says where in a pass it is, and nothing before the first one; as Hugging Face's does, it ends a restored pass."""

    def __init__(self) -> None:
        self.position: int | None = None
        self.begin = 0

    def __iter__(self) -> Iterator[Any]:
        for position in range(self.begin, COUNT):
            self.position = position
            yield Points(COUNT)[position]

    def state_dict(self) -> dict[str, Any] | None:
        return None if self.position is None else {"position": self.position + 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.begin = state_dict["position"]


class PositionedFromZero(PositionedStream):
    """Says so before the first pass, too."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() or {"position": 0}


class Distorted(Points):
    """Points distorted by a generator of the data set's own."""

    def __init__(self, generator: Any) -> None:
        super().__init__(COUNT)
        self.transforms = [{"noise": generator}]

    def __getitem__(self, index: int) -> Any:
        inputs, target, number = super().__getitem__(index)
        return inputs + self.transforms[0]["noise"].random(), target, number


class Fading(Points):
    """Points that fade with each that was loaded, as their state says."""

    loaded = 0

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        inputs, target, number = super().__getitem__(index)
        return inputs / self.loaded, target, number

    def state_dict(self) -> dict[str, Any]:
        return {"loaded": self.loaded}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict["loaded"]


def by(sampler: Any, dataset: Any = None) -> DataLoader[Any]:
    """Batches of four points in the order of ``sampler``."""
    return DataLoader(Points(COUNT) if dataset is None else dataset, batch_size=4, sampler=sampler)


def batches_of(sampler: Any) -> BatchSampler:
    """Batches of four indices."""
    return BatchSampler(sampler, 4, drop_last=False)


def drawn() -> RandomSampler:
    """An order drawn from a generator of the sampler's own."""
    return RandomSampler(range(COUNT), generator=seeded())


EXACT: dict[str, Callable[[], Any]] = {
    "sampler with a state": lambda: by(Stateful()),
    "sampler with a state, 2 workers": lambda: DataLoader(
        Points(COUNT), batch_size=4, sampler=Stateful(), num_workers=2, persistent_workers=True
    ),
    "sampler with a state, in a batch sampler": lambda: DataLoader(
        Points(COUNT), batch_sampler=Around(batches_of(Stateful()))
    ),
    "batch sampler around a batch sampler": lambda: DataLoader(
        Points(COUNT), batch_sampler=Around(batches_of(drawn()))
    ),
    "generator in a dict in a list": lambda: by(
        Around(OwnGenerator(seeded()), lambda inner: [{"rng": inner.rng, "others": (1, 2)}])
    ),
    "sampler that says where in a pass it is": lambda: by(
        StatefulDistributedSampler(Points(COUNT), num_replicas=1, rank=0)
    ),
    "wrapper of a loader": lambda: Wrapper(DataLoader(Points(COUNT), batch_size=4, shuffle=True, generator=seeded())),
    "wrapper of a sampler with a state": lambda: Wrapper(by(Stateful())),
    "replayed sampler with a state": lambda: DataSpec(by(Stateful()), replay_on_resume=True),
    "stream with a state": lambda: DataLoader(StatefulStream(), batch_size=4),
    "stream that says where in a pass it is": lambda: DataLoader(PositionedStream(), batch_size=4),
    "the same from zero": lambda: DataLoader(PositionedFromZero(), batch_size=4),
    "data set with a generator": lambda: DataLoader(Distorted(random.Random(3)), batch_size=4, shuffle=True),
    "data set with numpy's generator, wrapped": lambda: DataLoader(
        Subset(Distorted(np.random.default_rng(3)), range(COUNT)), batch_size=4
    ),
    "data set with a state": lambda: DataLoader(Fading(COUNT), batch_size=4, shuffle=True),
}


def between_and_in(state: State, event: Event) -> bool:
    """When to save: between epochs, and in the middle of the second and the third."""
    now = state.timestamp
    return event is Event.EPOCH_CHECKPOINT or (
        event is Event.BATCH_CHECKPOINT and (int(now.epoch), int(now.batch_in_epoch)) in ((1, 2), (2, 3))
    )


@pytest.mark.parametrize("kind", EXACT)
def test_what_is_kept_is_restored(kind: str, tmp_path: Path) -> None:
    """Between epochs, in the middle of later ones, and again in a run that was resumed."""
    steps, end = run(EXACT[kind](), save_folder=tmp_path / "0", save_interval=between_and_in)
    folder = tmp_path / "0"
    for number, (batch, checkpoint) in enumerate(checkpoints(folder)[:-1]):
        torch.load(checkpoint, weights_only=True)  # plain torch opens it
        again: dict[str, Any] = {"save_folder": tmp_path / "1", "save_interval": between_and_in} if not number else {}
        rest, end_of_rest = run(EXACT[kind](), load_path=checkpoint, **again)
        assert rest == steps[batch:], f"the batches differ after a resume at batch {batch}"
        assert same(end_of_rest, end)
    for batch, checkpoint in checkpoints(tmp_path / "1")[:-1]:
        rest, end_of_rest = run(EXACT[kind](), load_path=checkpoint)
        assert rest == steps[batch:], f"the batches differ after a second resume at batch {batch}"
        assert same(end_of_rest, end)


@pytest.mark.parametrize("kind", ["sampler with a state", "replayed sampler with a state", "stream with a state"])
def test_a_second_call_of_fit_within_an_epoch(kind: str) -> None:
    """It begins the epoch again where the loader allows no other way: with the state that it began with."""
    steps, end = run(EXACT[kind]())
    seen = Seen()
    with build(train_dataloader=EXACT[kind](), callbacks=seen, max_duration="3ep", dropout=0.5) as trainer:
        trainer.fit(duration="7ba")
        trainer.fit(duration="8ba")
        assert seen.steps == steps
        assert same(weights(trainer), end)


# ── what is not kept ─────────────────────────────────────────────────────────────────────────────────────────────────


class NotPlain(Counting):
    """Its state is of a type of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("it is not saved")


@pytest.mark.parametrize("kind", [Counting, NotPlain])
def test_a_sampler_that_starts_over_is_found_out_within_an_epoch(
    kind: type[Counting], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no state that a checkpoint can hold, so the order is another. A state of another type is said once."""
    run(by(kind()), save_folder=tmp_path, save_interval=between_and_in)
    assert sum("contains a NotPlain" in text for text in caplog.messages) == (kind is NotPlain)
    with pytest.raises(IncompatibleCheckpointError, match=r"another order.*state_dict\(\) and load_state_dict\(\)"):
        run(by(kind()), load_path=checkpoints(tmp_path)[1][1])


def test_an_epoch_that_was_cut_short_leaves_a_stream_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its state may say where in the pass it was, and the next epoch is another pass: it is not restored, and said."""
    kind = lambda: DataLoader(PositionedFromZero(), batch_size=4)
    steps, _ = run(kind(), save_folder=tmp_path, save_interval="1ep", train_subset_num_batches=3)
    batch, checkpoint = checkpoints(tmp_path)[0]
    rest, _ = run(kind(), load_path=checkpoint, train_subset_num_batches=3)
    assert rest == steps[batch:]
    assert "the last epoch of the interrupted run ended before its data" in caplog.text


# ── several ranks ────────────────────────────────────────────────────────────────────────────────────────────────────
def over_ranks(sampler: Callable[[], Any]) -> Callable[[Any], Any]:
    """What builds the loader of a rank."""
    return lambda share: DataLoader(Numbers(COUNT), batch_size=2, sampler=sampler())


@pytest.mark.parametrize("kind", [Stateful, lambda: Around(OwnGenerator(seeded())), drawn])
@pytest.mark.parametrize("before", [1, 2])
def test_another_number_of_ranks_gets_what_is_kept(kind: Callable[[], Any], before: int) -> None:
    """Between epochs and within one, twice: the order is that of ranks that were not interrupted."""
    whole = Ranks(over_ranks(kind), 2)
    expected = [flat(whole.epoch()) for _ in range(4)]
    ranks = Ranks(over_ranks(kind), before)
    assert [flat(ranks.epoch()), flat(ranks.epoch())] == expected[:2]
    ranks = Ranks(over_ranks(kind), 3, ranks.saved())
    ranks.begin()
    seen = [*flat([ranks.step() or []]), *flat([ranks.step() or []])]
    ranks = Ranks(over_ranks(kind), 2, ranks.saved())
    ranks.begin()
    assert [*seen, *flat(ranks.rest())] == expected[2]
    ranks = Ranks(over_ranks(kind), 4, ranks.saved())
    assert flat(ranks.epoch()) == expected[3]


# ── what somebody else sets ──────────────────────────────────────────────────────────────────────────────────────────
class ByEpoch(Counting):
    """Shuffles by a number that it is told."""

    def __iter__(self) -> Iterator[int]:
        return iter(shuffled_by(self.passes))


class Telling(Callback):
    """Tells a sampler the number of the epoch when it begins."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def epoch_start(self, state: State, logger: Logger) -> None:
        self.sampler.passes = int(state.timestamp.epoch)


def test_what_a_callback_sets_is_left_to_it(tmp_path: Path) -> None:
    """An order that depends on a number set by a callback at the start of each epoch is the same after a resume."""

    def orders(**arguments: Any) -> list[Any]:
        sampler, seen = ByEpoch(), Seen()
        with build(train_dataloader=by(sampler), callbacks=[Telling(sampler), seen], **arguments) as trainer:
            trainer.fit()
        return seen.numbers

    whole = orders(max_duration="3ep", save_folder=tmp_path, save_interval="1ep")
    for batch, checkpoint in checkpoints(tmp_path)[:-1]:
        assert orders(max_duration="3ep", load_path=checkpoint) == whole[batch:]


def test_draws_from_the_shared_generator_between_epochs(tmp_path: Path) -> None:
    """The draws of the last epoch need not be repeated: the resume is exact."""
    kind = lambda: by(FromSharedGenerator(COUNT))
    steps, end = run(kind(), save_folder=tmp_path, save_interval="1ep")
    for batch, checkpoint in checkpoints(tmp_path)[:-1]:
        rest, end_of_rest = run(kind(), load_path=checkpoint)
        assert rest == steps[batch:]
        assert same(end_of_rest, end)


# ── looking ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class Strict(Points):
    """Points that no one may ask for what they do not have; with everything around that may be held."""

    def __init__(self) -> None:
        super().__init__(4)
        self.many = [[random.Random(1)] for _ in range(10_000)]
        self.model = torch.nn.Dropout()
        self.itself = self
        self.shared = [np.random.random.__self__, torch.default_generator, random.SystemRandom()]  # type: ignore[attr-defined]
        self.own = {"a": [(seeded(),)]}

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")

    @property
    def late(self) -> Any:
        raise AssertionError("a property was read")


def test_looking_runs_no_code_of_the_users_and_ends() -> None:
    """What is found are the generators of the data set, not those of everybody, and none of thousands of items."""
    dataset = Strict()
    assert Held(Wrapper(dataset)).generators == [dataset.own["a"][0][0]]


def test_evaluating_puts_back_generators_wherever_they_are() -> None:
    """A wrapper in two roles: evaluation draws from its generator, and training gets the order it would have had."""
    seed_all(1)
    steps, end = run(EXACT["wrapper of a loader"]())
    seed_all(1)
    data = EXACT["wrapper of a loader"]()
    evaluated, end_evaluated = run(data, eval_dataloader=data, eval_interval="2ba")
    assert evaluated == steps
    assert same(end_evaluated, end)


# ── one loader in two roles ──────────────────────────────────────────────────────────────────────────────────────────
ONE_FOR_BOTH: dict[str, Callable[[], Any]] = {
    "StatefulDataLoader": lambda: StatefulDataLoader(Points(COUNT), batch_size=4, shuffle=True),
    "StatefulDataLoader, generator": lambda: StatefulDataLoader(
        Points(COUNT), batch_size=4, shuffle=True, generator=seeded()
    ),
    "StatefulDataLoader, 2 workers that persist": lambda: StatefulDataLoader(
        Points(COUNT), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "StatefulDataLoader, a stream in a worker": lambda: StatefulDataLoader(
        data_kinds.StatefulStream(Points(COUNT)), batch_size=4, num_workers=1
    ),
    "DataLoader": lambda: DataLoader(Points(COUNT), batch_size=4, shuffle=True, generator=seeded()),
    "data set with a state": lambda: DataLoader(Fading(COUNT), batch_size=4, shuffle=True),
}


@pytest.mark.parametrize("kind", ONE_FOR_BOTH)
def test_evaluating_on_the_training_loader_leaves_its_position(kind: str, tmp_path: Path) -> None:
    """A resume is exact, from saves after an evaluation and between two, and between epochs."""

    def trained(**arguments: Any) -> tuple[Any, Any]:
        seed_all(1)  # torchdata draws when a loader is built
        data = ONE_FOR_BOTH[kind]()
        evaluator = Evaluator(label="train_set", dataloader=data, subset_num_batches=2)
        return run(data, eval_dataloader=evaluator, eval_interval="2ba", max_duration="2ep", **arguments)

    steps, end = trained(save_folder=tmp_path, save_interval="1ba")
    for batch, checkpoint in checkpoints(tmp_path)[1:8:3]:  # after 2, 5, which is all of an epoch, and 8
        rest, end_of_rest = trained(load_path=checkpoint)
        assert rest == steps[batch:], f"the batches differ after a resume at batch {batch}"
        assert same(end_of_rest, end)


class OfWorkers(data_kinds.StatefulStream):
    """Of which each of two workers has a part, the second one more; starts anew after its end, or ``remains`` there."""

    def __init__(self, *, remains: bool) -> None:
        super().__init__(Points(COUNT))
        self.remains = remains

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        first, end = ((0, 5), (5, COUNT))[worker.id]
        while first + self.done < end:
            self.done += 1
            yield self.points[first + self.done - 1]
        if not self.remains:
            self.done = 0


@pytest.mark.parametrize("remains", [False, True])
def test_a_worker_that_has_given_its_part_does_not_begin_again(remains: bool, tmp_path: Path) -> None:
    """A resume of a StatefulDataLoader gives what is left, also where one of two workers has given all of its part, and
    that not in full batches."""

    def data() -> Any:
        return StatefulDataLoader(OfWorkers(remains=remains), batch_size=4, num_workers=2)

    steps, end = run(data(), save_folder=tmp_path, save_interval="1ba", max_duration="1ep")
    assert len(steps) == 6  # two and four
    for batch, checkpoint in checkpoints(tmp_path)[:-1]:
        rest, end_of_rest = run(data(), load_path=checkpoint, max_duration="1ep")
        assert rest == steps[batch:], f"the batches differ after a resume at batch {batch}"
        assert same(end_of_rest, end)


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluating_or_predicting_between_two_calls_of_fit(workers: int) -> None:
    """On the loader whose epoch has begun: training goes on with the batch that comes next."""
    kind = lambda: StatefulDataLoader(Points(COUNT), batch_size=4, shuffle=True, num_workers=workers)
    seed_all(1)
    steps, _ = run(kind(), max_duration="10ba", save_folder=None)
    seed_all(1)
    data, seen = kind(), Seen()
    with build(train_dataloader=data, callbacks=seen, dropout=0.0) as trainer:
        trainer.fit(duration="7ba")
        before = trainer.state.state_dict()["dataset_state"]
        trainer.eval(data)
        trainer.predict(data, subset_num_batches=1)
        assert repr(trainer.state.state_dict()["dataset_state"]) == repr(before)
        trainer.fit(duration="3ba")
    assert [batch for _, batch in seen.steps] == [batch for _, batch in steps]


class Itself(Wrapper):
    """A loader that says how far it is."""

    __slots__ = ("done",)

    def __iter__(self) -> Iterator[Any]:
        for done, batch in enumerate(self.loader):
            self.done = done
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done = state_dict["done"]


def both(kind: Callable[[], Any]) -> tuple[Any, Any]:
    """One loader, twice."""
    data = kind()
    return data, data


def two_over(stream: Any) -> tuple[Any, Any]:
    """Two loaders over one data set."""
    return DataLoader(stream, batch_size=4), DataLoader(stream, batch_size=4)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: both(lambda: Itself(DataLoader(Points(COUNT), batch_size=4))), "Itself"),
        (lambda: both(KINDS["streaming"]), "Streaming"),
        (lambda: both(KINDS["streaming loader"]), "StreamingLoader"),
        (lambda: two_over(StatefulStream()), "StatefulStream"),
        (lambda: both(lambda: by(Stateful())), "Stateful"),
        (
            lambda: both(lambda: StatefulDataLoader(Points(COUNT), batch_size=4, sampler=Stateful())),
            "Stateful",
        ),
    ],
)
def test_a_loader_that_keeps_one_position_has_one_role(make: Callable[[], Any], name: str) -> None:
    """Refused before training, in the constructor and in fit; between calls of fit where an epoch has begun."""
    train, other = make()
    words = f"its {name} is also the {name} of the train_dataloader"
    with pytest.raises(ConfigError, match=f"eval_dataloader 'eval': {words}"):
        build(train_dataloader=train, eval_dataloader=other)
    train, other = make()
    with build(train_dataloader=train) as trainer, pytest.raises(ConfigError, match=words):
        trainer.fit(eval_dataloader=other)
    train, other = make()
    with build(train_dataloader=train, max_duration="2ep") as trainer:
        trainer.fit(duration="2ba")
        with pytest.raises(ConfigError, match=words):
            trainer.eval(other)
        with pytest.raises(ConfigError, match=f"dataloader: {words}"):
            trainer.predict(other)


def test_a_data_set_of_two_loaders_is_no_position() -> None:
    """One that says what it is like, as a stage of a curriculum, may be trained and evaluated on; so may workers'."""
    dataset, stream = Fading(COUNT), StatefulStream()
    with build(
        train_dataloader=DataLoader(dataset, batch_size=4), eval_dataloader=DataLoader(dataset, batch_size=4)
    ) as trainer:
        trainer.fit(duration="1ep")
    in_worker = DataLoader(stream, batch_size=4, num_workers=1)
    with build(train_dataloader=DataLoader(stream, batch_size=4), eval_dataloader=in_worker) as trainer:
        trainer.fit(duration="1ep")

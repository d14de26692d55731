"""Every kind of loader that training may get, built from scratch as a new process would build it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from trainer_parts import Points

from composerlite import DataSpec

COUNT = 18  # five batches of four, the last one short


def distort() -> float:
    """A number from each of the generators that transforms draw from."""
    return random.random() + float(np.random.rand()) + torch.rand(()).item()


class Noisy(Points):
    """Points that are distorted where they are loaded."""

    def __getitem__(self, index: int) -> Any:
        inputs, target, number = super().__getitem__(index)
        return inputs + distort(), target, number


class AtOnce(Noisy):
    """Points that are loaded a batch at a time."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("batches are to be loaded at once")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        noise = distort()
        return [(self.inputs[i] + noise, self.targets[i], torch.tensor(i)) for i in indices]


class WholeBatches(Noisy):
    """Indexed by a list of numbers, gives a batch of them."""

    def __getitem__(self, index: Any) -> Any:
        return default_collate([super(WholeBatches, self).__getitem__(i) for i in index])


class OnePoint(Noisy):
    """A batch of one point, for loaders that do not batch."""

    def __getitem__(self, index: int) -> Any:
        return default_collate([super().__getitem__(index)])


class Stream(IterableDataset[Any]):
    """Points in order, distorted; several workers share them."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        points = Noisy(COUNT)
        return (points[index] for index in range(first, COUNT, step))


class StatefulStream(IterableDataset[Any]):
    """Points in order, that knows how far it has come and goes on from there."""

    def __init__(self, points: Points) -> None:
        self.points = points
        self.done = 0

    def __iter__(self) -> Iterator[Any]:
        while self.done < COUNT:
            self.done += 1
            yield self.points[self.done - 1]
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done = state_dict["done"]


class Streaming(IterableDataset[Any]):
    """Shuffles by epoch, and is told by sample count where to go on, as MosaicML's StreamingDataset does it."""

    def __init__(self) -> None:
        self.next_epoch = 0
        self.resumed: dict[str, Any] = {"epoch": -1, "sample_in_epoch": 0}

    def _where(self, epoch: int) -> tuple[int, int]:
        stale = self.resumed["epoch"] < epoch
        return (epoch, 0) if stale else (self.resumed["epoch"], self.resumed["sample_in_epoch"])

    def __iter__(self) -> Iterator[Any]:
        epoch, done = self._where(self.next_epoch)
        self.next_epoch = epoch + 1
        points, order = Points(COUNT), np.random.default_rng(epoch).permutation(COUNT)
        return (points[int(index)] for index in order[done:])

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        epoch, offset = self._where(self.next_epoch - 1)
        return {"epoch": epoch, "sample_in_epoch": num_samples if from_beginning else offset + num_samples}

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        self.resumed = obj


class StreamingLoader(DataLoader[Any]):
    """Counts what it has given, and has its data set go on from there, as MosaicML's StreamingDataLoader does it."""

    given = 0

    def __iter__(self) -> Any:
        self.given = 0
        for batch in super().__iter__():
            self.given += len(batch[0])
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self.dataset.state_dict(self.given, from_beginning=False)  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state_dict)  # type: ignore[attr-defined]


class OwnGenerator(Sampler[int]):
    """Draws one index after the other from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.rng = generator

    def __iter__(self) -> Iterator[int]:
        for _ in range(COUNT):
            if isinstance(self.rng, random.Random):
                yield self.rng.randrange(COUNT)
            elif isinstance(self.rng, torch.Generator):
                yield int(torch.randint(COUNT, (), generator=self.rng))
            else:
                yield int(self.rng.permutation(COUNT)[0])

    def __len__(self) -> int:
        return COUNT


class FromSharedGenerator(OwnGenerator):
    """Draws one index after the other from the generator that training draws from as well."""

    def __init__(self, count: int) -> None:
        super().__init__(None)
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(self.count, ())) for _ in range(self.count))

    def __len__(self) -> int:
        return self.count


def noisy_collate(points: list[Any]) -> Any:
    """A batch of points that is distorted as a whole."""
    inputs, targets, numbers = default_collate(points)
    return inputs + distort(), targets, numbers


def seeded(seed: int = 5) -> torch.Generator:
    """A generator of the user's."""
    return torch.Generator().manual_seed(seed)


def shuffled(*, shuffle: bool = True, **arguments: Any) -> DataLoader[Any]:
    """Shuffled batches of four distorted points."""
    return DataLoader(Noisy(COUNT), batch_size=4, shuffle=shuffle, **arguments)


def ordered_by(sampler: Any, **arguments: Any) -> DataLoader[Any]:
    """Batches of four distorted points in the order that ``sampler`` gives."""
    return DataLoader(Noisy(COUNT), batch_size=4, sampler=sampler, **arguments)


def drawn(**arguments: Any) -> RandomSampler:
    """Draws with replacement: each index when it is asked for."""
    return RandomSampler(range(COUNT), replacement=True, num_samples=COUNT, **arguments)


def alone() -> DistributedSampler[Any]:
    """The sampler of many ranks, for one."""
    return DistributedSampler(Points(COUNT), num_replicas=1, rank=0, seed=2)


KINDS: dict[str, Callable[[], Any]] = {
    "shuffled": shuffled,
    "shuffled, 2 workers": lambda: shuffled(num_workers=2),
    "shuffled, 2 workers that prefetch 3": lambda: shuffled(num_workers=2, prefetch_factor=3),
    "in order": lambda: shuffled(shuffle=False),
    "persistent workers": lambda: shuffled(num_workers=2, persistent_workers=True),
    "drop_last": lambda: shuffled(drop_last=True),
    "drop_last, 2 workers": lambda: shuffled(drop_last=True, num_workers=2),
    "user's generator": lambda: shuffled(generator=seeded()),
    "user's generator, 2 workers": lambda: shuffled(generator=seeded(), num_workers=2),
    "sampler with generator": lambda: ordered_by(RandomSampler(range(COUNT), generator=seeded())),
    "sampler that draws lazily": lambda: ordered_by(OwnGenerator(seeded())),
    "sampler that draws lazily, 2 workers": lambda: ordered_by(OwnGenerator(seeded()), num_workers=2),
    "sampler with python's generator": lambda: ordered_by(OwnGenerator(random.Random(5))),
    "sampler with numpy's generator": lambda: ordered_by(OwnGenerator(np.random.default_rng(5))),
    "sampler with numpy's old generator": lambda: ordered_by(OwnGenerator(np.random.RandomState(5))),
    "weighted": lambda: ordered_by(WeightedRandomSampler([1.0 + i for i in range(COUNT)], COUNT)),
    "with replacement": lambda: ordered_by(drawn()),
    "with replacement, generator": lambda: ordered_by(drawn(generator=seeded())),
    "with replacement, generator, 2 workers": lambda: ordered_by(drawn(generator=seeded()), num_workers=2),
    "batch sampler": lambda: DataLoader(
        Noisy(COUNT), batch_sampler=BatchSampler(RandomSampler(range(COUNT)), 4, drop_last=False)
    ),
    "batch sampler with generator inside": lambda: DataLoader(
        Noisy(COUNT), batch_sampler=BatchSampler(RandomSampler(range(COUNT), generator=seeded()), 4, drop_last=False)
    ),
    "batch_size=None": lambda: DataLoader(OnePoint(5), batch_size=None, shuffle=True),
    "batch_size=None, 2 workers": lambda: DataLoader(OnePoint(5), batch_size=None, shuffle=True, num_workers=2),
    "batches as a sampler": lambda: DataLoader(
        WholeBatches(COUNT), batch_size=None, sampler=BatchSampler(RandomSampler(range(COUNT)), 4, drop_last=False)
    ),
    "batches as a sampler, 2 workers": lambda: DataLoader(
        WholeBatches(COUNT),
        batch_size=None,
        sampler=BatchSampler(RandomSampler(range(COUNT)), 4, drop_last=False),
        num_workers=2,
    ),
    "__getitems__": lambda: DataLoader(AtOnce(COUNT), batch_size=4, shuffle=True),
    "__getitems__, 2 workers": lambda: DataLoader(AtOnce(COUNT), batch_size=4, shuffle=True, num_workers=2),
    "DistributedSampler": lambda: ordered_by(alone()),
    "DistributedSampler in a batch sampler": lambda: DataLoader(
        Noisy(COUNT), batch_sampler=BatchSampler(alone(), 4, drop_last=False)
    ),
    "noise in collate_fn": lambda: shuffled(collate_fn=noisy_collate),
    "noise in collate_fn, 2 workers": lambda: shuffled(collate_fn=noisy_collate, num_workers=2),
    "replayed because the user says so": lambda: DataSpec(shuffled(), replay_on_resume=True),
    "replayed, 2 workers": lambda: DataSpec(shuffled(num_workers=2), replay_on_resume=True),
    "iterable": lambda: DataLoader(Stream(), batch_size=4),
    "iterable, 2 workers": lambda: DataLoader(Stream(), batch_size=2, num_workers=2),
    "iterable, 2 workers that persist": lambda: DataLoader(
        Stream(), batch_size=2, num_workers=2, persistent_workers=True
    ),
    "iterable, generator, 2 workers that persist": lambda: DataLoader(
        Stream(), batch_size=2, num_workers=2, persistent_workers=True, generator=seeded()
    ),
    "replayed, 2 workers that persist": lambda: DataSpec(
        shuffled(num_workers=2, persistent_workers=True), replay_on_resume=True
    ),
    "StatefulDataLoader, 2 workers that persist": lambda: StatefulDataLoader(
        Points(COUNT), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "a list of batches": lambda: list(DataLoader(Points(COUNT), batch_size=4)),
    "StatefulDataLoader": lambda: StatefulDataLoader(Noisy(COUNT), batch_size=4, shuffle=True),
    "StatefulDataLoader, generator": lambda: StatefulDataLoader(
        Noisy(COUNT), batch_size=4, shuffle=True, generator=seeded()
    ),
    "StatefulDataLoader, 2 workers": lambda: StatefulDataLoader(
        Points(COUNT), batch_size=4, shuffle=True, num_workers=2
    ),
    "StatefulDataLoader, iterable": lambda: StatefulDataLoader(StatefulStream(Noisy(COUNT)), batch_size=4),
    "StatefulDataLoader, iterable, 2 workers": lambda: StatefulDataLoader(
        StatefulStream(Points(COUNT)), batch_size=4, num_workers=2
    ),
    "streaming": lambda: DataLoader(Streaming(), batch_size=4),
    "streaming loader": lambda: StreamingLoader(Streaming(), batch_size=4),
}

"""Several calls of fit on different data: a relaunch goes on where each of them was, and mixes up none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from composerlite import Callback, ComposerModel, Logger, State, Trainer

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

COUNT = 12  # three batches of four an epoch


class Points(Dataset[Any]):
    """Points with a class and their own number, which tells the data set as well."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        number = self.first + index
        generator = torch.Generator().manual_seed(number)
        return torch.randn(4, generator=generator), torch.tensor(number % 3), torch.tensor(number)


class Stream(IterableDataset[Any]):
    """The same, in order."""

    def __init__(self, first: int) -> None:
        self.points = Points(first)

    def __iter__(self) -> Iterator[Any]:
        return (self.points[index] for index in range(COUNT))


def loader(kind: str, first: int) -> Any:
    """Batches of four points, numbered from ``first``."""
    match kind:
        case "shuffled":
            return DataLoader(Points(first), batch_size=4, shuffle=True)
        case "own generator":
            return DataLoader(Points(first), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(first))
        case "stream":
            return DataLoader(Stream(first), batch_size=4)
        case "saves itself":
            return StatefulDataLoader(Points(first), batch_size=4, shuffle=True)
        case _:
            return list(DataLoader(Points(first), batch_size=4))


class Net(ComposerModel):
    """Draws random numbers as it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layers(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, batch[1])


class Seen(Callback):
    """The numbers of the points that were trained on; ends the process' training in the batch after ``last``."""

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self.batches: list[list[int]] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        if len(self.batches) == self.last:
            raise KeyboardInterrupt

    def batch_end(self, state: State, logger: Logger) -> None:
        self.batches.append(state.batch[2].tolist())


Phase = tuple[str, int, str]


def script(folder: Path, seen: Seen, phases: list[Phase], **last: Any) -> dict[str, torch.Tensor]:
    """A user's script, as it is launched and launched again; the weights at its end.

    A phase is the kind of data, the number of their first point, and how long. Phases of equal data share a loader.
    """
    torch.manual_seed(7)
    model = Net()
    loaders = {(kind, first): loader(kind, first) for kind, first, _ in phases}
    with Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        seed=3,
        device="cpu",
        run_name="run",
        progress_bar=False,
        save_folder=folder,
        save_interval="1ba",
        save_overwrite=True,
        autoresume=True,
        callbacks=seen,
    ) as trainer:
        for number, (kind, first, duration) in enumerate(phases):
            more = last if number == len(phases) - 1 else {}
            trainer.fit(train_dataloader=loaders[kind, first], duration=duration, **more)
        return {name: value.clone() for name, value in trainer.state.model.state_dict().items()}


def check(tmp_path: Path, phases: list[Phase], **last: Any) -> list[list[int]]:
    """Interrupt the script around the boundary, and launch it again; the batches of all phases."""
    seen = Seen()
    end = script(tmp_path / "whole", seen, phases, **last)
    boundary = next((n for n, batch in enumerate(seen.batches) if batch[0] >= 100), 2)
    for count in (boundary - 1, boundary, boundary + 1, len(seen.batches) - 1):
        first, rest = Seen(count), Seen()
        with pytest.raises(KeyboardInterrupt):
            script(tmp_path / str(count), first, phases, **last)
        weights = script(tmp_path / str(count), rest, phases, **last)
        assert first.batches + rest.batches == seen.batches, f"interrupted after batch {count}"
        for name, value in weights.items():
            assert torch.equal(value, end[name]), f"{name}, interrupted after batch {count}"
    return seen.batches


@pytest.mark.parametrize("ends", ["1ep", "4ba"])
@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("shuffled", "shuffled"),
        ("own generator", "stream"),
        ("saves itself", "shuffled"),
        ("a list", "shuffled"),
    ],
)
def test_each_phase_begins_its_data_at_the_beginning(one: str, two: str, ends: str, tmp_path: Path) -> None:
    """Two phases, interrupted anywhere, at the boundary too: the second sees all of its data, from the first batch."""
    batches = check(tmp_path, [(one, 0, ends), (two, 100, "2ep")])
    of_second = [number for batch in batches[-6:] for number in batch]
    assert sorted(of_second[:COUNT]) == sorted(of_second[COUNT:]) == list(range(100, 100 + COUNT))
    assert all(number < COUNT for batch in batches[:-6] for number in batch)


def test_the_same_data_in_two_phases_go_on(tmp_path: Path) -> None:
    """The same loader given twice, the first time left in an epoch: the second goes on with the rest of that epoch."""
    batches = check(tmp_path, [("shuffled", 0, "1ba"), ("shuffled", 0, "1ba"), ("shuffled", 0, "2ep")])
    assert sorted(number for batch in batches[:3] for number in batch) == list(range(COUNT))
    assert sorted(number for batch in batches[3:6] for number in batch) == list(range(COUNT))


def test_a_third_phase_and_other_data_when_time_is_reset(tmp_path: Path) -> None:
    """Each of three phases, the last of which counts from zero, is resumed as what it is."""
    phases = [("shuffled", 0, "2ba"), ("stream", 100, "1ep"), ("shuffled", 200, "5ba")]
    batches = check(tmp_path, phases, reset_time=True)
    assert [batch[0] // 100 for batch in batches] == [0] * 2 + [1] * 3 + [2] * 5


def test_the_first_data_again_in_a_third_phase(tmp_path: Path) -> None:
    """It begins at its beginning, not where the first phase left it."""
    batches = check(tmp_path, [("shuffled", 0, "2ba"), ("shuffled", 100, "4ba"), ("shuffled", 0, "1ep")])
    assert sorted(number for batch in batches[6:] for number in batch) == list(range(COUNT))

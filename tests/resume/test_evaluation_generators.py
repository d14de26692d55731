"""Evaluation draws from generators of its loaders, and neither training nor a resume notices."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from combinations import covering
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from composerlite import Callback, ComposerModel, Evaluator, Logger, State, Trainer

COUNT = 12  # three batches of four an epoch


class Points(torch.utils.data.Dataset[Any]):
    """Points of four features with a class and their own number."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator), torch.tensor(index % 3), torch.tensor(index)


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
    """The numbers of the points in each batch of training and of evaluation, by batch count."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str, list[int]]] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        self.seen.append((int(state.timestamp.batch), "train", state.batch[2].tolist()))

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        self.seen.append((int(state.timestamp.batch), f"eval {state.dataloader_label}", state.batch[2].tolist()))


class FromNumpy(Sampler[int]):
    """Draws from a generator of numpy or of python that it holds."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __iter__(self) -> Any:
        order = list(range(COUNT))
        self.rng.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return COUNT


def seeded() -> torch.Generator:
    """A generator of the user's."""
    return torch.Generator().manual_seed(11)


def pair(shared: Any, *, kind: str) -> tuple[Any, Any]:
    """Loaders to train and to evaluate on, the second of which draws from what ``kind`` says."""

    def points(**arguments: Any) -> DataLoader[Any]:
        return DataLoader(Points(), batch_size=4, **arguments)

    train = points(shuffle=True, generator=shared)
    match kind:
        case "no generator":
            return points(shuffle=True), points()
        case "shuffled without a generator":
            return points(shuffle=True), points(shuffle=True)
        case "its own":
            return points(shuffle=True), points(shuffle=True, generator=seeded())
        case "shared with training":
            return train, points(shuffle=True, generator=shared)
        case "shared, in order":
            return train, points(generator=shared)
        case "shared by samplers":
            sampler = RandomSampler(Points(), generator=shared)
            batches = BatchSampler(RandomSampler(Points(), generator=shared), 4, drop_last=False)
            return points(sampler=sampler), DataLoader(Points(), batch_sampler=batches)
        case "shared, numpy's":
            rng = np.random.default_rng(3)
            return points(sampler=FromNumpy(rng)), points(sampler=FromNumpy(rng))
        case "shared, python's":
            own = random.Random(3)
            return points(sampler=FromNumpy(own)), points(sampler=FromNumpy(own))
        case "shared by loaders that save themselves":
            return StatefulDataLoader(Points(), batch_size=4, shuffle=True, generator=shared), StatefulDataLoader(
                Points(), batch_size=4, shuffle=True, generator=shared
            )
        case _:
            raise AssertionError(kind)


def trainer(kind: str, folder: Path, *, interval: str, subset: int, **arguments: Any) -> Trainer:
    """A trainer as a new process would build it, that saves after each batch."""
    torch.manual_seed(7)
    model = Net()
    train, held_out = pair(seeded(), kind=kind)
    evaluators = [
        Evaluator(label=label, dataloader=held_out, subset_num_batches=subset, eval_interval=interval)
        for label in ("one", "two")
    ]
    return Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        train_dataloader=train,
        eval_dataloader=evaluators,
        max_duration="3ep",
        seed=3,
        device="cpu",
        run_name="run",
        progress_bar=False,
        save_folder=folder,
        save_interval="1ba",
        **arguments,
    )


def steps(seen: Seen, batch: int) -> list[tuple[int, str, list[int]]]:
    """What came after the checkpoint of ``batch``, which is saved after the evaluation that is due there."""
    return [step for step in seen.seen if step[0] > batch]


KINDS = [
    "no generator",
    "shuffled without a generator",
    "its own",
    "shared with training",
    "shared, in order",
    "shared by samplers",
    "shared, numpy's",
    "shared, python's",
    "shared by loaders that save themselves",
]


def files(folder: Path) -> dict[int, Path]:
    """The checkpoints by batch count."""
    return {int(path.name.split("-")[1][2:]): path for path in folder.glob("ep*-ba*-rank0.pt")}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("kind", "interval", "subset"), covering(2, KINDS, ["2ba", "1ep"], [-1, 1]))
def test_training_goes_on_in_the_same_order_whatever_evaluation_draws_from(
    kind: str, interval: str, subset: int, tmp_path: Path
) -> None:
    """Killed in training or right after an evaluation, in an epoch or at its edge: the order and weights are the same.

    So is what is evaluated on.
    """
    seen = Seen()
    with trainer(kind, tmp_path / "whole", interval=interval, subset=subset, callbacks=seen) as whole:
        whole.fit()
        end = {name: value.clone() for name, value in whole.state.model.state_dict().items()}
    for batch in (1, 2, 3, 4, 5, 6):
        rest, folder = Seen(), tmp_path / str(batch)
        path = str(files(tmp_path / "whole")[batch])
        arguments: dict[str, Any] = {"interval": interval, "subset": subset, "callbacks": rest, "load_path": path}
        with trainer(kind, folder, **arguments) as resumed:
            resumed.fit()
            assert steps(rest, batch) == steps(seen, batch), f"after a resume at batch {batch}"
            for name, value in resumed.state.model.state_dict().items():
                assert torch.equal(value, end[name]), f"{name} after a resume at batch {batch}"

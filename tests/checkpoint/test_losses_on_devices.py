"""Training reads its losses from a device while the device has other work, and logs what it always logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_device import SimulatedDevice
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Callback, ComposerModel, Logger, State, Trainer
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.devices import DeviceCopier
from composerlite.loggers import InMemoryLogger

BATCHES = 4


class Everywhere(SimulatedDevice):
    """All storages are on it. It counts what is read."""

    def __init__(self) -> None:
        super().__init__(lambda count: 0)
        copier: Any = self._copier
        self.reads, self.fetches = 0, 0
        read, fetch = copier.read, copier.fetch

        def counted_read(numbers: torch.Tensor) -> Any:
            self.reads += 1
            return read(numbers)

        def counted_fetch(found: Any) -> Any:
            self.fetches += 1
            return fetch(found)

        copier.read, copier.fetch = counted_read, counted_fetch

    def of(self, storage: torch.UntypedStorage) -> DeviceCopier | None:
        """The copier of everything."""
        return self._copier


class Model(ComposerModel):
    """Two losses; ``broken`` makes one of them infinite."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.layer, self.broken = nn.Linear(4, 2), broken

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layer(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> dict[str, torch.Tensor]:
        extra = outputs.abs().mean() * (float("inf") if self.broken else 1.0)
        return {"total": outputs.square().mean(), "size": extra.detach()}


class BeforeBackward(Callback):
    """Notes how many losses are on their way when a backward pass begins, and how many were waited for."""

    def __init__(self, device: Everywhere) -> None:
        self.device = device
        self.seen: list[tuple[int, int]] = []

    def before_backward(self, state: State, logger: Logger) -> None:
        self.seen.append((self.device.reads, self.device.fetches))


def build(*, broken: bool = False, **arguments: Any) -> Trainer:
    torch.manual_seed(3)
    model = Model(broken=broken)
    data = DataLoader(TensorDataset(torch.randn(4 * BATCHES, 4)), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how: dict[str, Any] = {"max_duration": "1ep", "progress_bar": False, "device": "cpu", **arguments}
    return Trainer(model=model, train_dataloader=data, optimizers=optimizer, **how)


def losses_of(device: Everywhere | None, **arguments: Any) -> dict[str, list[Any]]:
    """Train, on a device if there is one; the losses that were logged."""
    logged = InMemoryLogger()
    with build(loggers=logged, **arguments) as trainer:
        trainer.state.devices = device
        trainer.fit()
    return {name: [value for _, value in logged.data[name]] for name in ("loss/train/total", "loss/train/size")}


@pytest.mark.parametrize("size", [None, 2, 3])
def test_losses_that_are_read_from_a_device_are_logged_as_ever(size: int | None) -> None:
    """Every batch, under its own number, in microbatches, too."""
    device = Everywhere()
    how: dict[str, Any] = {"device_train_microbatch_size": size}
    assert losses_of(device, **how) == losses_of(None, **how)
    assert device.reads == device.fetches == 2 * BATCHES


def test_losses_are_on_their_way_before_the_backward_pass() -> None:
    """The last one of a batch: so who waits for them waits for the forward pass alone."""
    device = Everywhere()
    noted = BeforeBackward(device)
    losses_of(device, callbacks=noted, device_train_microbatch_size=2)
    halves = [2 * (number // 2) for number in range(2 * BATCHES)]
    # Callbacks of the event run after it: of the first half of a batch nothing is on its way, of the second half all.
    assert noted.seen == [(reads + 2 * (number % 2), reads) for number, reads in enumerate(halves)]


def test_a_save_without_loggers_knows_of_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    """It is marked as ever, and each save reads the losses of its own batch only."""
    device = Everywhere()
    with build(broken=True, save_folder=str(tmp_path), save_interval="2ba", save_filename="ba{batch}.pt") as trainer:
        trainer.state.devices = device
        trainer.fit()
    manifests = [Catalog(tmp_path).manifest_of(f"ba{batch}.pt") for batch in (2, 4)]
    assert [manifest and manifest.run.not_finite for manifest in manifests] == [("loss/train/size",)] * 2
    assert device.fetches == 2 * (len(manifests) + 1)  # and once for who asks how the run ended

"""A snapshot is one moment: what changes while it is taken is found, even where torch counts the change later."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from composerlite.checkpoint.formats.torch_file import TorchImage
from composerlite.checkpoint.snapshot import Snapshot, Staging
from composerlite.errors import SaveError


@pytest.fixture
def staging() -> Iterator[Staging]:
    """Closed at the end."""
    staging = Staging()
    yield staging
    staging.close()


def lazily(staging: Staging, optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> Snapshot:
    """A snapshot of ``weight`` that is copied, as it seems, and was found good so far."""
    _, snapshot = staging.take(TorchImage({"weight": weight}), [optimizer])
    snapshot.wait()
    return snapshot


@pytest.fixture
def weight() -> nn.Parameter:
    """With a gradient."""
    weight = nn.Parameter(torch.zeros(1000))
    weight.grad = torch.ones_like(weight)
    return weight


def test_a_change_that_ran_during_the_copy_is_seen_at_the_step(staging: Staging, weight: nn.Parameter) -> None:
    """torch counts a change when it is done; the copy may be over by then."""
    optimizer = torch.optim.SGD([weight], lr=1.0)
    snapshot = lazily(staging, optimizer, weight)
    torch.autograd.graph.increment_version(weight)
    optimizer.step()
    with pytest.raises(SaveError, match="changed in place between the save and the optimizer's next step"):
        snapshot.settle()


def test_a_change_that_ran_during_the_copy_is_seen_without_a_step(staging: Staging, weight: nn.Parameter) -> None:
    """An evaluation of half an hour may come before the next step: the save does not wait for its end."""
    snapshot = lazily(staging, torch.optim.SGD([weight], lr=1.0), weight)
    torch.autograd.graph.increment_version(weight)
    started = time.monotonic()
    with pytest.raises(SaveError, match="changed in place"):
        snapshot.settle()
    assert time.monotonic() - started < 30


def test_the_optimizers_own_change_is_none(staging: Staging, weight: nn.Parameter) -> None:
    """It waits for the copy, so it is after that, however late anybody looks."""
    optimizer = torch.optim.SGD([weight], lr=1.0)
    snapshot = lazily(staging, optimizer, weight)
    optimizer.step()
    optimizer.step()
    snapshot.settle()
    assert float(weight.detach().sum()) == -2000.0

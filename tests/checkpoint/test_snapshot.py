"""A snapshot is one moment: what changes while it is taken is found, whoever changes it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.checkpoint.save.staging import Snapshot, Staging
from composerlite.errors import SaveError
from composerlite.storage import available_memory

SIZE = 4 << 20


@pytest.fixture
def staging() -> Iterator[Staging]:
    """Closed at the end."""
    staging = Staging()
    yield staging
    staging.close()


@pytest.fixture
def weight() -> nn.Parameter:
    """With a gradient."""
    weight = nn.Parameter(torch.zeros(SIZE))
    weight.grad = torch.ones_like(weight)
    return weight


def lazily(staging: Staging, optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> Snapshot:
    """A snapshot of ``weight``."""
    image = TorchImage({"weight": weight})
    memory = staging.reserve(image.size_bytes)
    assert memory is not None
    return staging.take(memory, image.storages(), image.size_bytes, [optimizer])


def tried(staging: Staging, optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> None:
    """The first snapshot of a run, that sees whether others write; nobody did."""
    lazily(staging, optimizer, weight).wait()
    optimizer.step()
    if lazily(staging, optimizer, weight).copying is None:
        pytest.skip("the kernel cannot watch pages (Linux 6.7), or may not here")
    optimizer.step()


def test_a_change_that_torch_does_not_count_is_seen(staging: Staging, weight: nn.Parameter) -> None:
    """Once only: everything is copied at once from then on."""
    optimizer = torch.optim.SGD([weight], lr=1.0)
    tried(staging, optimizer, weight)
    torn = 0
    for _ in range(20):
        snapshot = lazily(staging, optimizer, weight)
        weight.data[1000:-1000:1024] = 3.0
        optimizer.step()
        try:
            snapshot.wait()
        except SaveError as e:
            assert "was changed between the save and the optimizer's next step" in str(e)  # noqa: PT017
            torn += 1
    assert torn == 1
    assert lazily(staging, optimizer, weight).copying is None


def test_who_writes_at_the_first_save_is_left_to_write(
    staging: Staging, weight: nn.Parameter, caplog: pytest.LogCaptureFixture
) -> None:
    """No save of such a run fails: one warning, and copies before training goes on."""
    optimizer = torch.optim.SGD([weight], lr=1.0)
    tried(Staging(), optimizer, weight)  # skips where nothing can be watched
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            snapshot = lazily(staging, optimizer, weight)
            weight.data.clamp_(-0.5, 0.5)
            optimizer.step()
            snapshot.wait()
            assert snapshot.copying is None
    assert caplog.text.count("change between a save and the optimizer's next step") == 1


def test_the_optimizers_own_change_is_none(staging: Staging, weight: nn.Parameter) -> None:
    """It waits for the copy, so it is after that, however late anybody looks."""
    optimizer = torch.optim.SGD([weight], lr=1.0)
    tried(staging, optimizer, weight)
    snapshot = lazily(staging, optimizer, weight)
    optimizer.step()
    optimizer.step()
    snapshot.wait()
    assert float(weight.detach()[0]) == -4.0


def test_weights_that_are_shared_are_copied_at_once(staging: Staging, weight: nn.Parameter) -> None:
    """Another process writes to them when it likes, unseen."""
    weight.share_memory_()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(3):
        snapshot = lazily(staging, optimizer, weight)
        assert snapshot.copying is None
        optimizer.step()
        snapshot.wait()


def test_processes_of_a_machine_share_what_is_free(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes half of its share at most: eight of them do not ask for four times the memory that there is."""
    third = available_memory() // 3
    assert staging.fits(third)
    for name, value in {"WORLD_SIZE": "8", "RANK": "0", "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert not staging.fits(third)
    assert staging.fits(available_memory() // 20)


@pytest.mark.parametrize(("verify", "compared"), [("always", True), (1, True), ("first", False), ("never", False)])
def test_memory_that_loses_a_bit_is_found_where_content_is_compared(
    verify: int | str, compared: bool, weight: nn.Parameter
) -> None:
    """``save_verify_copy='always'`` or a number: the copy is what the tensors held, or it is not committed."""
    staging = Staging(verify=verify)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    tried(staging, optimizer, weight)
    lazily(staging, optimizer, weight).wait()
    optimizer.step()
    snapshot = lazily(staging, optimizer, weight)
    snapshot.finish()
    snapshot.memory.view(SIZE, 1)[0] ^= 1
    if compared:
        with pytest.raises(SaveError, match="save_verify_copy"):
            snapshot.wait()
    else:
        snapshot.wait()
    staging.close()

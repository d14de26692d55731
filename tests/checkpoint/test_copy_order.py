"""A checkpoint of what is on a GPU holds the bytes of its step, in whatever order the GPU does its work.

The device is simulated: see ``simulated_device``. Each wait is needed: without any one of them there is an order in
which a checkpoint is wrong.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import WAITS, Choose, SimulatedDevice
from torch import nn

from composerlite.checkpoint.format.torch_file import FileInMemory, TorchImage
from composerlite.checkpoint.save.snapshot import StagingMemory, finish_device_work
from composerlite.core.state.loss_reading import LossReading
from composerlite.devices import DeviceRing
from composerlite.errors import SaveError

SIZE = 1 << 14  # numbers in a tensor that is copied by itself
SMALL = 1 << 8  # in one that is copied together with others
STEPS = 5


class OnDevice(torch.optim.SGD):
    """Queues its steps on a device, as optimizers on a GPU do."""

    def __init__(self, device: SimulatedDevice, parameters: list[nn.Parameter]) -> None:
        self.device = device
        super().__init__(parameters, lr=1.0, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        def change() -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.detach().numpy()[:] += 1.0  # not counted, as by a fused optimizer
                if "momentum_buffer" in self.state[parameter]:
                    self.state[parameter]["momentum_buffer"].numpy()[:] += 2.0

        self.device.train(change)


class Run:
    """A model on a device: a step changes its weight and the optimizer's state, a forward pass its running mean."""

    def __init__(self, choose: Choose, without: str = "") -> None:
        self.device = SimulatedDevice(choose, without)
        self.weight, self.mean = nn.Parameter(torch.zeros(SIZE)), torch.zeros(SIZE)
        bias, count = nn.Parameter(torch.zeros(SMALL)), torch.zeros(SMALL - 7)
        self.optimizer = OnDevice(self.device, [self.weight, bias])
        momentum = torch.zeros(SIZE)
        self.optimizer.state[self.weight]["momentum_buffer"] = momentum
        self.early = [self.mean, count]
        self.tensors = {"weight": self.weight, "bias": bias, "momentum": momentum, "mean": self.mean, "count": count}
        self.device.owns(*self.tensors.values())
        self.staging = StagingMemory(devices=self.device)
        self.steps = 0

    def image(self) -> TorchImage:
        """What is saved: that it is on a device is nowhere to be seen in it."""
        return TorchImage(self.tensors)

    def forward(self, change: Callable[[], object] = lambda: None) -> None:
        """A forward pass; with a ``change`` that nobody expects."""

        def run() -> None:
            for tensor in self.early:
                tensor.numpy()[:] += 4.0
            change()

        self.device.train(run)

    def step(self) -> None:
        """The rest of the batch."""
        self.optimizer.step()
        self.steps += 1

    def values(self) -> list[float]:
        """What the tensors have to hold when all that was queued is done."""
        return [float(self.steps), float(self.steps), 2.0 * self.steps, 4.0 * self.steps, 4.0 * self.steps]

    def save(self) -> tuple[Any, Callable[[], list[torch.Tensor]]]:
        """Begin a save; the snapshot, and how to read it when it has been waited for."""
        image = self.image()
        places = [(offset, storage.nbytes()) for storage, offset in image.storages]
        snapshot = self.staging.take(image.storages, image.size_bytes, [self.optimizer])
        assert snapshot is not None
        memory = snapshot.memory
        assert memory is not None

        def read() -> list[torch.Tensor]:
            copies = [torch.frombuffer(memory.view(*place), dtype=torch.float32).clone() for place in places]
            self.staging.give_back(memory)
            return copies

        return snapshot, read

    def close(self) -> None:
        """End it."""
        self.device.run_all()
        self.staging.close()


def wrong_saves(choose: Choose, without: str = "") -> int:
    """Train, save after every step, and look at each save before or after the next step; how many are wrong."""
    run = Run(choose, without)
    wrong = 0
    try:
        for _ in range(STEPS):
            run.forward()
            run.step()
            expected = run.values()
            snapshot, read = run.save()
            looks_early = bool(choose(2))
            if looks_early:
                snapshot.wait()
                copies = read()
            run.forward()
            run.step()
            if not looks_early:
                snapshot.wait()
                copies = read()
            wrong += any(bool((copy != value).any()) for copy, value in zip(copies, expected, strict=True))
        run.device.run_all()
        assert [float(tensor.detach()[0]) for tensor in run.tensors.values()] == run.values()
    finally:
        run.close()
    return wrong


def wrong_reads(choose: Choose, without: str = "") -> int:
    """Train, and write what is on the device without a copy of it, as a blocking save does; whether it is wrong."""
    run = Run(choose, without)
    run.forward()
    run.step()
    finish_device_work(run.image().storages, run.device)
    found = [
        bool((tensor.detach() != value).any()) for tensor, value in zip(run.tensors.values(), run.values(), strict=True)
    ]
    run.close()
    return int(any(found))


def wrong_pieces(choose: Choose, without: str = "") -> int:
    """Write what is on the device as it is, through a ring that is smaller; how many tensors are wrong in the file."""
    run = Run(choose, without)
    run.forward()
    run.step()
    image = run.image()
    finish_device_work(image.storages, run.device)
    image.ring = DeviceRing(run.device, slot_bytes=SIZE)
    file = FileInMemory()
    image.write(file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    run.close()
    return sum(bool((saved[name] != value).any()) for name, value in zip(run.tensors, run.values(), strict=True))


def wrong_loads(choose: Choose, without: str = "") -> int:
    """Load into tensors of a device that has work queued, through two slots; how many are wrong in the end."""
    device, tensors = SimulatedDevice(choose, without), [torch.zeros(SMALL) for _ in range(6)]
    device.owns(*tensors)
    for tensor in tensors:
        device.train(lambda tensor=tensor: tensor.fill_(-1.0))
    ring = DeviceRing(device)
    with ring.slots(4 * SMALL, torch.device("cpu"), 2) as slots:
        for number, tensor in enumerate(tensors):
            slot, storage = slots.next(), tensor.untyped_storage()
            slot.view(torch.float32).fill_(number)
            copier = device.of(storage)
            assert copier is not None
            slots.is_copied(copier, copier.load(slot, storage, 0))
    if not without:
        assert [float(tensor[-1]) for tensor in tensors] == list(range(6)), "it is done when the slots are given back"
    device.run_all()  # into memory that the ring still has
    return sum(bool((tensor != number).any()) for number, tensor in enumerate(tensors))


def wrong_losses(choose: Choose, without: str = "") -> int:
    """Read the loss of each batch while its backward pass and step are queued; how many are wrong."""
    device = SimulatedDevice(choose, without)
    wrong = 0
    for step in range(STEPS):
        loss = torch.zeros(())
        device.owns(loss)
        device.train(lambda loss=loss, step=step: loss.fill_(step + 1.0))
        reading = LossReading({"loss": loss}, device)
        device.train(lambda: None)
        wrong += reading.value(loss) != step + 1.0
    return wrong


ALL = (wrong_saves, wrong_reads, wrong_pieces, wrong_loads, wrong_losses)


def drawn(choices: bytes) -> Choose:
    """One choice after the other; in the end the first of each."""
    left = iter(choices)
    return lambda count: next(left, 0) % count


def at_random(seed: int) -> Choose:
    """Choices that are even, or mostly the first, or mostly the last, by the seed."""
    numbers = random.Random(seed)
    evenly, side = numbers.choice([0.05, 0.3, 1.0]), numbers.choice([0, -1])
    return lambda count: numbers.randrange(count) if numbers.random() < evenly else side % count if count < 4 else 0


@given(st.binary(max_size=600))
@settings(max_examples=100, deadline=None)
def test_a_save_has_the_bytes_of_its_step_in_any_order(choices: bytes) -> None:
    """Whatever the device does first, and however far the host is ahead of it."""
    assert wrong_saves(drawn(choices)) == 0


@given(st.binary(max_size=40))
@settings(max_examples=30, deadline=None)
def test_what_is_written_without_a_copy_is_that_of_its_step(choices: bytes) -> None:
    """The threads that write have queues of their own on a GPU: it is done with training's work before they read."""
    assert wrong_reads(drawn(choices)) == 0


@given(st.binary(max_size=200))
@settings(max_examples=50, deadline=None)
def test_a_loss_that_is_read_is_that_of_its_batch(choices: bytes) -> None:
    """Whatever the device does first."""
    assert wrong_losses(drawn(choices)) == 0


def test_reading_a_loss_leaves_the_device_its_work() -> None:
    """The host waits for the forward pass, and for nothing that was queued after it: the device stays busy."""
    late = SimulatedDevice(lambda count: count - 1 if count < 4 else 0)  # nothing before it is waited for
    device, done, loss = late, list[str](), torch.zeros(())
    device.owns(loss)
    device.train(lambda: loss.fill_(3.0))
    reading = LossReading({"loss": loss}, device)
    device.train(lambda: done.append("backward"))
    assert reading.value(loss) == 3.0
    assert not done
    device.run_all()
    assert done == ["backward"]
    assert reading.value(torch.tensor(4.0)) == 4.0  # another loss is read now


@given(st.binary(max_size=200))
@settings(max_examples=30, deadline=None)
def test_what_passes_through_the_ring_is_right_in_any_order(choices: bytes) -> None:
    """Saves that are written as they are, and loads."""
    assert wrong_pieces(drawn(choices)) == 0
    assert wrong_loads(drawn(choices)) == 0


@pytest.mark.parametrize("wrong", [wrong_pieces, wrong_loads])
def test_a_slot_of_the_ring_is_waited_for(wrong: Callable[[Choose, str], int]) -> None:
    """Before it is written to disk, or filled again: without that there is an order in which bytes are wrong."""
    assert any(wrong(at_random(seed), "the host waits for the copies") for seed in range(50))


def test_small_storages_are_one_copy() -> None:
    """However many there are, if there is room for them; each is in its place when the copy is waited for."""
    device, copies = SimulatedDevice(lambda count: 0), list[int]()
    tensors = {f"bias{number}": torch.full((100 + number,), float(number)) for number in range(300)}
    tensors["weight"] = torch.full((SIZE,), 7.0)
    device.owns(*tensors.values())
    copier: Any = device.of(tensors["weight"].untyped_storage())
    copy = copier.copy

    def counted(storage: torch.UntypedStorage, *where: Any) -> None:
        copies.append(storage.nbytes())
        copy(storage, *where)

    copier.copy = counted
    image, staging = TorchImage(tensors), StagingMemory(devices=device)
    places = [(offset, storage.nbytes()) for storage, offset in image.storages]
    snapshot = staging.take(image.storages, image.size_bytes)
    assert snapshot is not None
    memory = snapshot.memory
    assert memory is not None
    snapshot.wait()
    saved = [torch.frombuffer(memory.view(*place), dtype=torch.float32) for place in places]
    assert all(torch.equal(copied, tensor) for copied, tensor in zip(saved, tensors.values(), strict=True))
    assert sorted(copies) == sorted([4 * SIZE, sum(4 * (100 + number) for number in range(300))])
    del saved
    snapshot.give_back()
    staging.close()


@pytest.mark.parametrize("without", WAITS)
def test_without_any_one_of_the_waits_a_save_is_wrong(without: str) -> None:
    """There is an order that shows it, and it is found: none of them is there for nothing."""
    for seed in range(200):
        assert [wrong(at_random(seed), "") for wrong in ALL] == [0] * len(ALL)
        if any(wrong(at_random(seed), without) for wrong in ALL):
            return
    pytest.fail(f"200 orders show nothing wrong where it is not so that {without}")


def test_a_write_that_torch_counts_is_found_at_every_save() -> None:
    """By the forward pass or a callback, before the optimizer's step or where no step follows."""
    for is_followed_by_a_step in (True, False):
        run = Run(lambda count: 0)
        snapshot, read = run.save()
        run.step()
        snapshot.wait()
        read()
        snapshot, read = run.save()
        with torch.no_grad():
            run.weight.add_(1)
        if is_followed_by_a_step:
            run.step()
        with pytest.raises(SaveError, match="between the save and the optimizer's next step"):
            snapshot.wait()
        read()
        run.close()


def test_a_small_tensor_may_change_once_it_is_copied() -> None:
    """Small storages are gathered at the save: a change before the optimizer's step is no error."""
    device = SimulatedDevice(lambda count: 0)
    weights = [nn.Parameter(torch.zeros(size)) for size in (10, 20, SIZE)]
    device.owns(*weights)
    optimizer, staging = torch.optim.SGD(weights, lr=0.1), StagingMemory(devices=device)
    image = TorchImage({str(number): weight for number, weight in enumerate(weights)})
    places = [(offset, storage.nbytes()) for storage, offset in image.storages]
    snapshot = staging.take(image.storages, image.size_bytes, [optimizer])
    assert snapshot is not None
    memory = snapshot.memory
    assert memory is not None
    device.run_all()
    with torch.no_grad():
        weights[0].add_(1)
    snapshot.wait()
    assert not any(torch.frombuffer(memory.view(*place), dtype=torch.float32).any() for place in places)
    snapshot.give_back()
    staging.close()


def test_a_copy_that_fails_gives_its_memory_back() -> None:
    """Copies that have begun are waited for, and the next save has the memory."""
    device, tensors = SimulatedDevice(lambda count: 0), {"a": torch.ones(SIZE), "b": torch.ones(SIZE)}
    device.owns(*tensors.values())
    copier: Any = device.of(tensors["a"].untyped_storage())
    copy, begun = copier.copy, list[int]()

    def failing(storage: torch.UntypedStorage, *where: Any) -> None:
        if begun:
            raise RuntimeError("the device is lost")
        begun.append(storage.nbytes())
        copy(storage, *where)

    copier.copy = failing
    image, staging = TorchImage(tensors), StagingMemory(devices=device)
    memory = staging.reserve(image.size_bytes)
    assert memory is not None
    staging.give_back(memory)
    with pytest.raises(RuntimeError, match="the device is lost"):
        staging.take(image.storages, image.size_bytes)
    assert begun
    assert staging.reserve(image.size_bytes) is memory
    staging.give_back(memory)
    staging.close()


KINDS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "fused": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True),
    "foreach": lambda weights: torch.optim.AdamW(weights, lr=0.1, foreach=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_any_kind_waits_for_the_copy_and_is_no_change(kind: str) -> None:
    """The wait is queued before the step. What the step changes is not compared."""
    device, weight = SimulatedDevice(lambda count: 0), nn.Parameter(torch.zeros(SIZE))
    device.owns(weight)
    weight.grad = torch.ones_like(weight)
    optimizer, staging, image = KINDS[kind]([weight]), StagingMemory(devices=device), TorchImage({"weight": weight})
    copier: Any = device.of(weight.untyped_storage())
    waits: list[float] = []
    copier.before_training = lambda mark: waits.append(float(weight.detach()[0]))
    snapshot = staging.take(image.storages, image.size_bytes, [optimizer])
    assert snapshot is not None
    memory = snapshot.memory
    assert memory is not None
    assert waits == []
    optimizer.step()
    optimizer.step()
    snapshot.wait()
    assert waits == [0.0]
    staging.give_back(memory)
    staging.close()


def test_a_tensor_with_new_memory_is_saved_as_it_was() -> None:
    """``p.data = new`` after the save: what is being copied is kept until it is."""
    run = Run(lambda count: 0)
    run.step()
    expected = float(run.steps)
    run.device.run_all()
    snapshot, read = run.save()
    run.weight.data = torch.full((SIZE,), 5.0)
    junk = [torch.full((SIZE,), 8.0) for _ in range(50)]  # takes memory that was let go of
    snapshot.wait()
    assert bool((read()[0] == expected).all())
    assert len(junk) == 50
    run.close()

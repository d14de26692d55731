"""Saves and loads of tensors on a device, which is simulated."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import Choose, SimulatedDevice
from torch import nn

from composerlite.checkpoint import save_state_dict
from composerlite.checkpoint.format.torch_file import FileInMemory, TorchImage
from composerlite.checkpoint.format.torch_reader import TorchFile
from composerlite.checkpoint.load.restore import placed
from composerlite.checkpoint.load.sharded_reader import RemoteFileSystemReader
from composerlite.checkpoint.save.snapshot import StagingMemory, finish_device_work
from composerlite.core.state.loss_reading import LossReading
from composerlite.devices import DeviceRing
from composerlite.errors import CorruptCheckpointError, SaveError
from composerlite.storage import ParallelReader

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


def drawn(choices: bytes) -> Choose:
    """One choice after the other; in the end the first of each."""
    left = iter(choices)
    return lambda count: next(left, 0) % count


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


@given(st.binary(max_size=200))
@settings(max_examples=30, deadline=None)
def test_what_passes_through_the_ring_is_right_in_any_order(choices: bytes) -> None:
    """Saves that are written as they are, and loads."""
    assert wrong_pieces(drawn(choices)) == 0
    assert wrong_loads(drawn(choices)) == 0


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


PASSED = 96 << 20
"""Bytes that a load may have in memory beside its tensors: the slots of the ring."""


@pytest.fixture
def device() -> SimulatedDevice:
    """It does nothing before it has to."""
    return SimulatedDevice(lambda count: 0)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def saved_in(path: Path) -> dict[str, torch.Tensor]:
    """A file of tensors of many sizes, types and orders, and of ties."""
    large = torch.arange(9_000_000, dtype=torch.int64)  # 72 MB: more than a part that is read at a time
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    saved = {
        "large": large,
        "images": images,
        "half": torch.randn(1000).to(torch.bfloat16),
        "eighth": torch.randn(1000).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }
    torch.save({**saved, "tied": large}, path)
    return {**saved, "tied": large}


def load_into(path: Path, live: dict[str, torch.Tensor], device: SimulatedDevice) -> tuple[Any, DeviceRing]:
    """Read ``path`` into ``live``, as a resume does; what holds it afterwards."""
    ring = DeviceRing(device)
    with ParallelReader(path) as source:
        read = TorchFile(source, source.size_bytes, check_sums=True)
        read.ring = ring
        read.contents, addresses, sieves = placed(read.contents, live, read.unread, ring)
        read.read(places=addresses, sieves=sieves)
        return read.contents, ring


def test_a_load_fills_tensors_of_a_device_in_place(tmp_path: Path, device: SimulatedDevice) -> None:
    """Where they are: the memory stays, ties stay, and this machine's memory has a part at a time."""
    saved = saved_in(tmp_path / "file.pt")
    live = {name: torch.zeros_like(tensor) for name, tensor in saved.items() if name != "tied"}
    live["tied"] = live["large"]
    device.owns(*live.values())
    before = {name: tensor.data_ptr() for name, tensor in live.items()}
    device.train(lambda: live["large"].fill_(-1))  # queued before the load: it does not come after it
    contents, ring = load_into(tmp_path / "file.pt", live, device)
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == before
    for name, tensor in saved.items():
        if tensor.numel():
            assert contents[name] is live[name], name
            assert torch.equal(bits(live[name]), bits(tensor)), name
    idle: Any = ring._idle  # pyright: ignore[reportPrivateUsage]
    assert 0 < idle.pop().size_bytes <= PASSED


def test_damage_is_found_in_what_goes_to_a_device(tmp_path: Path, device: SimulatedDevice) -> None:
    """By the sums in the file, as everywhere."""
    saved = saved_in(tmp_path / "file.pt")
    data = bytearray((tmp_path / "file.pt").read_bytes())
    at = data.index(saved["large"][4_000_000:4_000_002].numpy().tobytes())
    data[at] ^= 1
    (tmp_path / "file.pt").write_bytes(data)
    live = {"large": torch.zeros_like(saved["large"])}
    device.owns(*live.values())
    with pytest.raises(CorruptCheckpointError, match="CRC-32"):
        load_into(tmp_path / "file.pt", live, device)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_directory_is_loaded_into_tensors_of_a_device_in_place(tmp_path: Path, device: SimulatedDevice) -> None:
    """Of one rank or of several: whole tensors, and parts of what was saved."""
    large, wide = torch.arange(9_000_000, dtype=torch.int64), torch.randn(700, 900)
    saved = {"large": large, "wide": wide, "small": torch.arange(10.0), "scalar": torch.tensor(2.5)}
    save_state_dict(tmp_path / "step", saved)
    live = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    device.owns(*live.values())
    before = {name: tensor.data_ptr() for name, tensor in live.items()}
    with RemoteFileSystemReader(tmp_path / "step") as reader:
        reader.ring = DeviceRing(device)
        dcp.load(live, storage_reader=reader, no_dist=True)
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == before
    assert all(torch.equal(live[name], tensor) for name, tensor in saved.items())
    idle: Any = reader.ring._idle  # pyright: ignore[reportPrivateUsage]
    assert 0 < idle.pop().size_bytes <= PASSED


def test_a_value_that_is_not_finite_is_found_on_its_way_from_a_device(device: SimulatedDevice) -> None:
    """In any piece of a tensor, and of the tensor that has it."""
    tensors = {"fine": torch.ones(5000), "broken": torch.ones(5000, dtype=torch.bfloat16)}
    tensors["broken"][4321] = float("nan")
    device.owns(*tensors.values())
    image = TorchImage(tensors, watched=tensors.items())
    image.ring = DeviceRing(device, slot_bytes=1024)
    image.write(FileInMemory())
    assert image.not_finite == "broken"

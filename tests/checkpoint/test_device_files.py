"""Files of what is on a device: read from it through a ring, and loaded into it in place.

The device is simulated: see ``simulated_device``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from simulated_device import SimulatedDevice
from torch import nn

from composerlite.checkpoint import save_state_dict
from composerlite.checkpoint.format.torch_file import FileInMemory, TorchImage
from composerlite.checkpoint.format.torch_reader import TorchFile
from composerlite.checkpoint.load.restore import placed
from composerlite.checkpoint.load.sharded_reader import RemoteFileSystemReader
from composerlite.checkpoint.save.sharded_writer import in_one_piece
from composerlite.core.state.optimizer_state import optimizer_places
from composerlite.devices import DeviceRing
from composerlite.errors import CorruptCheckpointError
from composerlite.storage import ParallelReader

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


def test_what_does_not_fit_the_device_is_given_as_it_was_saved(tmp_path: Path, device: SimulatedDevice) -> None:
    """Another type or order of elements: in this machine's memory, to be converted by who loads it."""
    saved = saved_in(tmp_path / "file.pt")
    live = {"half": torch.zeros(1000), "images": torch.zeros(2, 3, 8, 8)}
    device.owns(*live.values())
    contents, _ = load_into(tmp_path / "file.pt", live, device)
    assert all(torch.equal(contents[name], saved[name]) for name in live)
    assert not any(bool(tensor.any()) for tensor in live.values())


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


def test_state_of_an_optimizer_that_has_not_stepped_is_made_on_the_device() -> None:
    """A resumed run reads it to where it belongs: it is nowhere whole in this machine's memory."""
    model = nn.Linear(3, 2, device="meta", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    moments = {"exp_avg": torch.zeros(2, 3), "exp_avg_sq": torch.zeros(2, 3), "step": torch.tensor(1.0)}
    places = optimizer_places(optimizer, model, {"weight": moments})
    made = places["weight"]
    assert {name: (t.device.type, t.dtype) for name, t in made.items() if t is not None} == {
        "exp_avg": ("meta", torch.float32),
        "exp_avg_sq": ("meta", torch.float32),
    }
    assert not any(tensor.requires_grad for tensor in made.values() if tensor is not None)
    assert not optimizer.state
    on_cpu = nn.Linear(3, 2)
    assert optimizer_places(torch.optim.AdamW(on_cpu.parameters()), on_cpu, {"weight": moments}) == {}


def test_a_part_of_a_tensor_is_read_from_where_it_is() -> None:
    """A shard on a device is not copied there to be written, also where it is a part of a larger tensor."""
    whole = torch.arange(32.0).view(8, 4)
    part = in_one_piece(whole[2:5])
    assert part.data_ptr() == whole[2:5].data_ptr()
    assert part.untyped_storage().nbytes() == 3 * 4 * 4
    assert torch.equal(part, whole[2:5])
    copied = in_one_piece(whole.T)
    assert torch.equal(copied, whole.T)
    assert copied.untyped_storage().nbytes() == whole.nbytes
    assert in_one_piece(torch.empty(0, 3)).shape == (0, 3)


def test_a_value_that_is_not_finite_is_found_on_its_way_from_a_device(device: SimulatedDevice) -> None:
    """In any piece of a tensor, and of the tensor that has it."""
    tensors = {"fine": torch.ones(5000), "broken": torch.ones(5000, dtype=torch.bfloat16)}
    tensors["broken"][4321] = float("nan")
    device.owns(*tensors.values())
    image = TorchImage(tensors, watched=tensors.items())
    image.ring = DeviceRing(device, slot_bytes=1024)
    image.write(FileInMemory())
    assert image.not_finite == "broken"

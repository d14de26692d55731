"""Devices that torch knows from a package of their own, three in one process: chosen, used, and their generators kept.

torch takes a backend that is written in Python: what is tested goes through ``torch.accelerator`` as for any other.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import registered_device
import torch
from forked import run_forked


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``registered_device`` prints, and where it has saved a tensor."""
    folder = tmp_path_factory.mktemp("registered")
    done = run_forked(registered_device.main, str(folder / "saved.pt"), cwd=folder)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "file": folder / "saved.pt"}


def test_a_device_that_is_named_is_the_current_one(found: dict[str, Any]) -> None:
    """``device="cuda:1"`` in one process: what names none uses it, too. Without a number: that of the local rank."""
    assert found["current"] == 1
    assert found["device"] == ["sim:1", "sim", "sim", 1, "gloo"]
    assert found["of the local rank"] == "sim:2"


def test_a_device_that_is_not_there_is_refused(found: dict[str, Any]) -> None:
    """With how many there are, or the names that are known."""
    number, word, unknown = found["refused"]
    assert "device='sim:3': this process sees 3 GPUs (its local rank is 0)" in number
    assert "device='sim:x' is not known" in word
    assert "device='npu' is not known. Known: cpu, cuda, gpu, mps, sim, xpu." in unknown


def test_generators_of_all_devices_come_back(found: dict[str, Any]) -> None:
    """Of each device in one process; of its own where a rank of several saved it. Others' draws move none."""
    drawn = found["generators"]
    expected, later = drawn["expected"], drawn["later"]
    assert len({*expected, *later}) == 6, "each is another number"
    assert drawn["restored"] == expected
    assert drawn["of its own"] == [expected[0], later[1], expected[2]]
    assert len(set(drawn["seeded"])) == 1
    assert drawn["after seeds"] == expected


def test_a_checkpoint_of_a_device_opens_without_it(found: dict[str, Any]) -> None:
    """Plain ``torch.load`` knows nothing of where its tensors were."""
    assert found["saved from"] == "sim:0"
    loaded = torch.load(found["file"], weights_only=True)
    assert (loaded["weight"].device.type, loaded["weight"].shape) == ("cpu", (0, 4))

"""A checkpoint of ours that another program writes anew in its place, as OLMo-core's scripts that reshard one do."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint.sharded_parts import same, small_model, states, trained
from torch import nn
from torch.optim import Optimizer

from composerlite.checkpoint import (
    Checkpointer,
    load_keys,
    load_model_and_optim_state,
    save_model_and_optim_state,
)
from composerlite.errors import CorruptCheckpointError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


@pytest.fixture
def step(tmp_path: Path) -> tuple[Path, nn.Module, Optimizer]:
    """A step, whose model another program has doubled and saved in its place."""
    model = small_model()
    optim = trained(model)
    Checkpointer().save(tmp_path / "step2", (model, optim), {"step": 2})
    return tmp_path / "step2", model, optim


def rewrite(place: Path, factor: int = 2) -> None:
    """Read all of it, and save it with torch's own writer."""
    model, optim = load_keys(place, ["model", "optim"])
    state: dict[str, Any] = {"model": {key: value * factor for key, value in model.items()}, "optim": optim}
    dcp.save(state, checkpoint_id=place, no_dist=True)


@pytest.mark.parametrize("clears", [False, True])
def test_it_is_loaded_and_said_to_be_unverified(
    step: tuple[Path, nn.Module, Optimizer], clears: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The new values, with what the step remembered beside them; whether old files stay or go, and after a new save."""
    place, model, optim = step
    inner = place / "model_and_optim"
    if clears:
        aside = place.with_name("aside")
        shutil.copytree(place, aside)
        rewrite(aside / "model_and_optim")
        shutil.rmtree(inner)
        shutil.move(aside / "model_and_optim", inner)
    else:
        rewrite(inner)
    other = small_model(seed=1)
    other_optim = trained(other, steps=1)
    with caplog.at_level(logging.WARNING):
        assert Checkpointer().load(place, (other, other_optim)) == {"step": 2}
    told = [record.getMessage() for record in caplog.records if record.name.startswith("composerlite")]
    assert told == [f"checkpoint {inner} has no record: loading it unverified"]
    assert same(other.state_dict()["0.weight"], model.state_dict()["0.weight"] * 2)
    assert same(other_optim.state_dict(), optim.state_dict())
    Checkpointer(save_overwrite=True).save(place, (model, optim), {"step": 2})
    caplog.clear()
    Checkpointer().load(place, (other, other_optim))
    assert same(states(other, other_optim), states(model, optim))
    assert "unverified" not in caplog.text


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def _older_index(place: Path) -> None:
    """The index of another save of ours, as a stale copy has it."""
    model = small_model()
    save_model_and_optim_state(place.with_name("older"), model, trained(model))
    shutil.copy(place.with_name("older") / ".metadata", place / ".metadata")


def _foreign_index(place: Path) -> None:
    """The index of a rewrite whose data files are not there yet, or went lost."""
    shutil.copytree(place, place.with_name("theirs"))
    rewrite(place.with_name("theirs"))
    shutil.copy(place.with_name("theirs") / ".metadata", place / ".metadata")


def _cut_rewrite(place: Path) -> None:
    """A rewrite whose data file has lost its end."""
    rewrite(place)
    data = next(place.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])


def _cut_and_flipped(place: Path) -> None:
    """Both files of ours are damaged."""
    data = next(place.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    _flip(place / ".metadata", (place / ".metadata").read_bytes().index(b"-") - 1)  # in the id of the save


@pytest.mark.parametrize("damage", [_older_index, _foreign_index, _cut_rewrite, _cut_and_flipped])
def test_damage_does_not_pass_for_a_rewrite(tmp_path: Path, damage: Any) -> None:
    """An index without its data, data without their end, and both damaged: an error as ever."""
    model = small_model()
    save_model_and_optim_state(tmp_path / "c", model, trained(model))
    damage(tmp_path / "c")
    other = small_model(seed=1)
    with pytest.raises(CorruptCheckpointError, match=r"'.*c(/\.metadata)?'"):
        load_model_and_optim_state(tmp_path / "c", other, trained(other, steps=0))
    assert same(states(other), states(small_model(seed=1)))


def test_a_rewrite_that_was_killed_before_its_index_leaves_the_checkpoint(tmp_path: Path) -> None:
    """The data files of the other program have other names: what was saved is loaded, verified."""
    model = small_model()
    save_model_and_optim_state(tmp_path / "c", model, trained(model))
    index = (tmp_path / "c" / ".metadata").read_bytes()
    rewrite(tmp_path / "c")
    (tmp_path / "c" / ".metadata").write_bytes(index)
    other = small_model(seed=1)
    load_model_and_optim_state(tmp_path / "c", other)
    assert same(states(other), states(model))


def test_no_flipped_bit_of_the_index_makes_a_rewrite(tmp_path: Path) -> None:
    """Every byte of it: found, whatever the index says then."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    save_model_and_optim_state(tmp_path / "c", model)
    index = tmp_path / "c" / ".metadata"
    whole = index.read_bytes()
    for position in range(0, len(whole), 7):
        _flip(index, position)
        with pytest.raises(CorruptCheckpointError):
            load_model_and_optim_state(tmp_path / "c", model)
        index.write_bytes(whole)
    load_model_and_optim_state(tmp_path / "c", model)

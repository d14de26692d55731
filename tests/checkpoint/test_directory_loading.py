"""A directory of a sharded checkpoint, of whatever program, is loaded as a file is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import Remember, new_state, save_directory
from storage.local_store import LocalObjectStore

from composerlite.checkpoint import load_checkpoint, save_model_and_optim_state
from composerlite.checkpoint.api.state_dict import save_state_dict
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.resume import choose
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.checkpoint.save.form import SaveRequest
from composerlite.checkpoint.save.save import save
from composerlite.core import ParallelismConfig, State
from composerlite.core.parallelism import FSDPConfig
from composerlite.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from composerlite.testing.faulty_store import FaultyStore


def _stepped(state: State, *, value: float) -> State:
    for parameter in state.model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    state.optimizers[0].step()
    return state


def _same(one: State, other: State) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    pairs = [(mine["model"][key], theirs["model"][key]) for key in mine["model"]]
    states = [contents["optimizers"]["SGD"]["state"] for contents in (mine, theirs)]
    pairs += [(states[0][name]["momentum_buffer"], states[1][name]["momentum_buffer"]) for name in states[0]]
    return all(torch.equal(a, b) for a, b in pairs) and mine["timestamp"] == theirs["timestamp"]


def _plain_dcp_save(folder: Path, contents: dict[str, Any]) -> None:
    from torch.distributed import checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is one process
        dcp.save(contents, checkpoint_id=folder, no_dist=True)


def test_what_torch_saved_is_loaded_and_said_to_be_unverified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also by the name of a link; into a run that has stepped and into one that has not."""
    saved = _stepped(new_state(3, value=3.0, callbacks=[Remember([1, {"a": 2}])]), value=1.0)
    _plain_dcp_save(tmp_path / "plain", {"state": saved.state_dict(), "rng": [{"python": (3, (1, 2), None)}]})
    (tmp_path / "latest").symlink_to("plain")
    for loaded in (new_state(), _stepped(new_state(), value=2.0)):
        loaded.callbacks.append(Remember())
        states = load_checkpoint(tmp_path / "latest", loaded)
        assert _same(saved, loaded)
        assert loaded.callbacks[0].what == [1, {"a": 2}]  # type: ignore[attr-defined]
        assert states == [{"python": (3, (1, 2), None)}]
    assert "has no record: loading it unverified" in caplog.text


def test_what_callbacks_remember_comes_back_as_it_was(tmp_path: Path) -> None:
    """Empty dicts, keys that are numbers, and tensors in between: a directory gives back what a file would."""
    what = {"no": {}, "by number": {0: "a", 1: [], "1": {}}, "pair": (1, {2: 3}), "a.b": [{}, {"c": torch.ones(2)}]}
    saved = new_state(3, callbacks=[Remember(what)])
    saved.parallelism = ParallelismConfig(fsdp=FSDPConfig())
    path = save(SaveRequest(state=saved, catalog=Catalog(tmp_path), template="ba{batch}"))
    loaded = new_state(callbacks=[Remember()])
    load_checkpoint(path, loaded)
    found = loaded.callbacks[0].what  # type: ignore[attr-defined]
    assert torch.equal(found["a.b"][1].pop("c"), what["a.b"][1].pop("c"))  # type: ignore[index, call-overload]
    assert found == what


def test_a_model_and_its_optimizer_are_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As save_model_and_optim_state and OLMo-core save them; the log says that the rest starts afresh."""
    saved = _stepped(new_state(value=3.0), value=1.0)
    save_model_and_optim_state(tmp_path / "olmo", saved.model, saved.optimizers[0])
    loaded = new_state()
    assert load_checkpoint(tmp_path / "olmo", loaded) is None
    assert _same(saved, loaded)
    assert "time, data and callbacks start from zero" in caplog.text


def test_what_does_not_fit_is_said_whole(tmp_path: Path) -> None:
    """Names and shapes of the model and of the optimizer's state, before a number is changed."""
    save_state_dict(tmp_path / "ba3", {"state": _stepped(new_state(3, value=3.0), value=1.0).state_dict()})
    other = _stepped(new_state(width=3), value=1.0)
    other.model.register_parameter("more", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(IncompatibleCheckpointError) as error:
        load_checkpoint(tmp_path / "ba3", other)
    for text in ("missing in the checkpoint (1): more", "weight: (2, 2) in the checkpoint, (2, 3)", "momentum_buffer"):
        assert text in str(error.value)
    assert other.model.more.item() == 1.0
    save_state_dict(tmp_path / "bare", {"w": 1.0})
    with pytest.raises(IncompatibleCheckpointError, match="holds 'w' and no 'state'"):
        load_checkpoint(tmp_path / "bare", new_state())


def test_parts_are_left_out(tmp_path: Path) -> None:
    """With load_weights_only and ignore_keys: the state keeps its own, and their bytes are not read."""
    path = save_directory(tmp_path, 3)
    weights = new_state(1)
    assert load_checkpoint(path, weights, load_weights_only=True) is None
    assert (weights.model.weight[0, 0].item(), int(weights.timestamp.batch)) == (3.0, 1)
    partly = new_state(1)
    load_checkpoint(path, partly, ignore_keys=["state/model/bias"], strict_model_weights=False)
    assert (partly.model.weight[0, 0].item(), partly.model.bias[0].item(), partly.timestamp.batch) == (3.0, 0.0, 3)


def test_damage_names_the_file(tmp_path: Path) -> None:
    """A file that is gone, one that was changed, an index that was: nothing of it is taken for good."""
    path = save_directory(tmp_path, 3)
    data = next(path.glob("*.distcp"))
    bytes_saved = data.read_bytes()
    middle = len(bytes_saved) // 2
    data.write_bytes(bytes_saved[:middle] + bytes([bytes_saved[middle] ^ 1]) + bytes_saved[middle + 1 :])
    with pytest.raises(CorruptCheckpointError, match=data.name):
        load_checkpoint(path, new_state())
    data.unlink()
    with pytest.raises(CorruptCheckpointError, match=rf"{data.name}' is missing"):
        load_checkpoint(path, new_state())
    with pytest.raises(CheckpointError, match="none can be loaded"):
        choose([RunPlace(Catalog(tmp_path))], "run")


def test_a_directory_in_a_bucket_is_loaded_from_there(tmp_path: Path) -> None:
    """It is found by its name or by a link, and read in parts: no file is fetched."""
    store = FaultyStore(LocalObjectStore(tmp_path))
    saved = _stepped(new_state(3, value=3.0, width=20_000), value=1.0)
    with ShardedDirectory.in_store(store, "runs/ba3") as folder:
        save_state_dict(folder, {"state": saved.state_dict()})
    store.put_bytes("runs/latest.pt.symlink", b"runs/ba3")
    for name in ("runs/ba3", "runs/latest.pt"):
        loaded = new_state(width=20_000)
        load_checkpoint(name, loaded, object_store=store)
        assert _same(saved, loaded)
    assert not [name for verb, name in store.calls if verb == "download_object" and name.endswith(".distcp")]
    with pytest.raises(CheckpointNotFoundError, match="runs/none"):
        load_checkpoint("runs/none", new_state(), object_store=store)

"""Directories of sharded checkpoints."""

from __future__ import annotations

import json
import logging
import resource
import shutil
import warnings
import zlib
from pathlib import Path
from typing import Any

import layout_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint.sharded_parts import same, small_model, states, trained
from parts import Remember, new_state
from storage.local_store import LocalObjectStore
from torch import nn
from torch.optim import Optimizer

from composerlite.checkpoint import (
    Checkpointer,
    UnshardStrategy,
    UnshardStrategyType,
    load_checkpoint,
    load_keys,
    load_model_and_optim_state,
    save_model_and_optim_state,
    unshard_checkpoint,
)
from composerlite.checkpoint.api.state_dict import save_state_dict
from composerlite.checkpoint.format.sharded_layout import LAYOUT_MARK, read_layout
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.cli.app import app
from composerlite.core import State
from composerlite.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from composerlite.testing import run_ranks
from composerlite.testing.faulty_store import FaultyStore


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of four ranks, one for each way to split tensors."""
    folder = tmp_path_factory.mktemp("layouts")
    run_ranks(layout_ranks.save, 4, folder, timeout=120)
    return folder


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_what_a_rule_places_is_loaded_by_any_number_of_ranks_in_any_layout(saved: Path, ranks: int) -> None:
    """Rows, columns, grids, replicas, shards that are uneven or empty: every number comes back."""
    run_ranks(layout_ranks.load, ranks, saved, timeout=120)


def _packed(parsed: Any) -> bytes:
    return LAYOUT_MARK + zlib.compress(json.dumps(parsed).encode())


def _claims(ranks: int, tensors: int, dims: int) -> Any:
    """An index that claims many ranks, of tensors that are all of another size."""
    mesh = [2] * (ranks.bit_length() - 1)
    splits = [list(range(at, len(mesh), dims)) for at in range(dims)]
    shapes = [[10**9 + number] * dims for number in range(tensors)]
    layout: dict[str, Any] = {"ranks": ranks, "items": []}
    layout["tensors"] = [[[f"w{number}"], shape, "float32", mesh, splits] for number, shape in enumerate(shapes)]
    return [layout, "", ""]


@pytest.mark.parametrize(
    "index",
    [
        _packed(_claims(1 << 17, 3000, 1)),
        _packed(_claims(1 << 16, 500, 8)),
        _packed(_claims(1 << 30, 1, 1)),
        LAYOUT_MARK + zlib.compress(b"[" * (300 << 20)),
    ],
    ids=["many ranks", "many dimensions", "too many ranks", "large when unpacked"],
)
def test_an_index_that_claims_much_is_refused_at_once(index: bytes) -> None:
    """Before anything is made of what it claims: it takes no more memory than a few times its size."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptCheckpointError):
        read_layout(index, "index")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_convert_makes_a_list_of_a_rule(saved: Path, tmp_path: Path) -> None:
    """Which torch.distributed.checkpoint loads by itself."""
    app.main(["checkpoint", "convert", str(saved / "grid"), str(tmp_path / "listed")], standalone_mode=False)
    assert not (tmp_path / "listed" / ".metadata").read_bytes().startswith(LAYOUT_MARK)
    reader = dcp.FileSystemReader(tmp_path / "listed")
    keys = reader.read_metadata().state_dict_metadata
    for number, shape in enumerate(layout_ranks.SHAPES):
        (key,) = (key for key in keys if key.split(".")[-1] == f"w{number}")
        wanted = {key: torch.zeros(shape, dtype=layout_ranks.full(number, shape).dtype)}
        dcp.load(wanted, storage_reader=reader)
        assert torch.equal(wanted[key], layout_ranks.full(number, shape))


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


pytest.importorskip("safetensors", reason="safetensors is not installed")


@pytest.fixture
def sharded(tmp_path: Path) -> tuple[Path, nn.Module, Optimizer]:
    model = small_model()
    optim = trained(model, groups=2)
    save_model_and_optim_state(tmp_path / "c", model, optim)
    return tmp_path / "c", model, optim


def _loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_one_file_is_what_a_model_and_an_optimizer_take(
    sharded: tuple[Path, nn.Module, Optimizer], tmp_path: Path
) -> None:
    """model.pt is the model's state dict; optim.pt has the optimizer's state by the names of parameters."""
    place, model, optim = sharded
    model_path, optim_path = unshard_checkpoint(place, tmp_path / "out")
    assert (model_path, optim_path) == (tmp_path / "out" / "model.pt", tmp_path / "out" / "optim.pt")
    assert same(_loaded(model_path), dict(model.state_dict()))
    small_model(seed=1).load_state_dict(_loaded(model_path))
    assert optim_path is not None
    state = _loaded(optim_path)
    first = next(iter(model.parameters()))
    assert same(state["state"]["0.weight"], optim.state[first])
    assert [group["lr"] for group in state["param_groups"]] == [0.01, 0.02]


@pytest.mark.parametrize(
    "strategy", [UnshardStrategy.one_file_per_tensor(), UnshardStrategy.chunks(300), UnshardStrategy.chunks(1 << 30)]
)
@pytest.mark.parametrize("safetensors", [False, True])
def test_several_files_have_an_index(
    sharded: tuple[Path, nn.Module, Optimizer], tmp_path: Path, strategy: UnshardStrategy, safetensors: bool
) -> None:
    """It says which key is in which file; together they are the model. Chunks are as large as was asked for."""
    place, model, _ = sharded
    suffix = ".safetensors" if safetensors else ".pt"
    folder, optim_folder = unshard_checkpoint(
        place, tmp_path / "out", use_safetensors=safetensors, unshard_strategy=strategy
    )
    assert folder == tmp_path / "out" / "model"
    assert (optim_folder is None) == safetensors
    index = json.loads((folder / f"model{suffix}.index.json").read_bytes())["weight_map"]
    read = _loaded
    if safetensors:
        from safetensors.torch import load_file as read
    found = {key: read(folder / name)[key] for key, name in index.items()}
    assert same(found, dict(model.state_dict()))
    files = sorted(path.name for path in folder.iterdir() if path.suffix == suffix)
    assert set(index.values()) == set(files)
    if strategy.name is UnshardStrategyType.one_file_per_tensor:
        assert f"0-weight{suffix}" in files
        assert len(files) == len(index)
    elif strategy.chunk_size_bytes == 300:
        assert files[:2] == [f"chunk-00000{suffix}", f"chunk-00001{suffix}"]
        sizes = [sum(t.nbytes for key, t in found.items() if index[key] == name) for name in files]
        assert all(size <= 300 for size in sizes)


def test_one_safetensors_file(sharded: tuple[Path, nn.Module, Optimizer], tmp_path: Path) -> None:
    """The optimizer stays out, as it has more than tensors; asking for it is an error."""
    from safetensors.torch import load_file

    place, model, _ = sharded
    path, none = unshard_checkpoint(place, tmp_path / "out", use_safetensors=True)
    assert none is None
    assert same(load_file(path), dict(model.state_dict()))
    with pytest.raises(ConfigError, match="optim=True"):
        unshard_checkpoint(place, tmp_path / "other", use_safetensors=True, optim=True)


@pytest.mark.parametrize("strategy", [UnshardStrategy.one_file(), UnshardStrategy.chunks(300)])
def test_other_files_in_the_target_stay_as_they_are(
    sharded: tuple[Path, nn.Module, Optimizer], tmp_path: Path, strategy: UnshardStrategy
) -> None:
    """Whatever lies beside what is written, and in its folder, when it is written and when it is replaced."""
    place, model, _ = sharded
    target = tmp_path / "out"
    (target / "model").mkdir(parents=True)
    (target / "notes").write_text("mine")
    one_file = strategy.name is UnshardStrategyType.one_file
    for overwrite in (False, True):
        path, _ = unshard_checkpoint(place, target, unshard_strategy=strategy, save_overwrite=overwrite)
        (target / "model" / "notes").write_text("mine too")
        found = _loaded(path) if one_file else {}
        for file in [] if one_file else path.glob("*.pt"):
            found |= _loaded(file)
        assert same(found, dict(model.state_dict()))
    assert (target / "notes").read_text() == "mine"
    assert (target / "model" / "notes").read_text() == "mine too"
    own = {"model.pt", "optim.pt"} if one_file else {"optim"}
    assert {path.name for path in target.iterdir()} == {"model", "notes", *own}


@pytest.mark.parametrize("strategy", [UnshardStrategy.one_file(), UnshardStrategy.chunks(300)])
def test_what_it_would_write_is_not_replaced_unasked(
    sharded: tuple[Path, nn.Module, Optimizer], tmp_path: Path, strategy: UnshardStrategy
) -> None:
    """FileExistsError that names it, before anything is written; also where the optimizer alone is in the way."""
    place, _, _ = sharded
    target = tmp_path / "out"
    name = "optim.pt" if strategy.name is UnshardStrategyType.one_file else "optim"
    (target / name).mkdir(parents=True)
    (target / name / "mine").touch()
    with pytest.raises(CheckpointExistsError, match=rf"{name}' exists already: .* save_overwrite=True"):
        unshard_checkpoint(place, target, unshard_strategy=strategy)
    assert [path.name for path in target.iterdir()] == [name]


def test_mistakes_are_said_before_anything_is_written(tmp_path: Path) -> None:
    """A URI as target, a strategy that contradicts itself, a part that is not there."""
    save_model_and_optim_state(tmp_path / "c", small_model())
    with pytest.raises(ConfigError, match="local folder"):
        unshard_checkpoint(tmp_path / "c", "s3://bucket/out")
    with pytest.raises(IncompatibleCheckpointError, match="has no optim"):
        unshard_checkpoint(tmp_path / "c", tmp_path / "out", optim=True)
    assert not (tmp_path / "out").exists()
    assert unshard_checkpoint(tmp_path / "c", tmp_path / "out")[1] is None
    with pytest.raises(ValueError, match="chunk_size_bytes=None"):
        UnshardStrategy(UnshardStrategyType.chunks)
    with pytest.raises(ValueError, match="has no chunks"):
        UnshardStrategy(chunk_size_bytes=5)
    with pytest.raises(ConfigError, match="expected one of one_file"):
        UnshardStrategy("whole")  # type: ignore[arg-type]

"""OLMo-core's page on distributed checkpoints, line by line: with the name of the package changed it holds here."""

from __future__ import annotations

import inspect
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint import documented_ranks
from checkpoint.sharded_parts import same, small_model, states, trained
from storage.local_store import LocalObjectStore
from torch import nn
from torch.optim import Optimizer

import composerlite.checkpoint as package
from composerlite.checkpoint import (
    RemoteFileSystemWriter,
    UnshardStrategy,
    UnshardStrategyType,
    async_save_model_and_optim_state,
    get_checkpoint_metadata,
    load_keys,
    load_model_and_optim_state,
    save_model_and_optim_state,
    save_state_dict,
    unshard_checkpoint,
)
from composerlite.testing import run_ranks
from composerlite.utils.checkpoint import DistCPObjectStoreReader, FileSystemReaderWithValidation

SAVING = "process_group=None, save_overwrite=False"
WRITING = "thread_count=None, process_count=None, throttle_uploads=False, enable_plan_caching=False"
DOCUMENTED = {
    "save_state_dict": f"dir, state_dict, *, {SAVING}, {WRITING}",
    "async_save_state_dict": f"dir, state_dict, *, {SAVING}, {WRITING}",
    "load_state_dict": ("dir, state_dict, *, process_group=None, pre_download=False, work_dir=None, thread_count=None"),
    "save_model_and_optim_state": f"dir, model, optim=None, *, {SAVING}, flatten_optimizer_state=False, {WRITING}",
    "async_save_model_and_optim_state": (
        f"dir, model, optim=None, *, {SAVING}, flatten_optimizer_state=False, {WRITING}"
    ),
    "load_model_and_optim_state": (
        "dir, model, optim=None, *, process_group=None, key_mapping=None, pre_download=False, work_dir=None, "
        "strict=True, flatten_optimizer_state=False, thread_count=None"
    ),
    "unshard_checkpoint": (
        "dir, target_dir, *, optim=None, save_overwrite=False, use_safetensors=False, unshard_strategy=None, "
        "pre_download=False, work_dir=None, quiet=False"
    ),
    "load_keys": "dir, keys, *, pre_download=False, work_dir=None",
    "get_checkpoint_metadata": "dir",
}


@pytest.mark.parametrize("name", list(DOCUMENTED))
def test_signatures_are_the_documented_ones(name: str) -> None:
    """Names, order, defaults, and which arguments are by name only."""
    signature = inspect.signature(getattr(package, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == f"({DOCUMENTED[name]})"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, Optimizer]:
    model = small_model()
    optim = trained(model)
    place = tmp_path_factory.mktemp("documented") / "step1"
    assert save_model_and_optim_state(place, model, optim, process_count=2, thread_count=2) is None
    return place, model, optim


def test_a_checkpoint_is_saved_loaded_in_place_and_unsharded(
    saved: tuple[Path, nn.Module, Optimizer], tmp_path: Path
) -> None:
    """The overview of the page, in its order."""
    place, model, optim = saved
    other = small_model(seed=1)
    other_optim = trained(other, steps=1)
    weight = next(other.parameters())
    load_model_and_optim_state(str(place), other, other_optim)
    assert same(states(other, other_optim), states(model, optim))
    assert next(other.parameters()) is weight
    model_path, optim_path = unshard_checkpoint(place, tmp_path / "plain")
    assert same(torch.load(model_path, weights_only=True), dict(model.state_dict()))
    assert optim_path is not None
    assert same(torch.load(optim_path, weights_only=True)["state"]["0.weight"], optim.state[next(model.parameters())])
    with pytest.raises(FileExistsError):
        unshard_checkpoint(place, tmp_path / "plain")
    unshard_checkpoint(place, tmp_path / "plain", save_overwrite=True, quiet=True)
    with pytest.raises(FileExistsError):
        save_model_and_optim_state(place, model, optim)


def test_asynchronous_saves_give_futures(tmp_path: Path) -> None:
    """Future[None], done when the checkpoint is there."""
    model = small_model()
    future = async_save_model_and_optim_state(tmp_path / "c", model, trained(model))
    assert isinstance(future, Future)
    assert future.result(60) is None
    assert set(next(load_keys(tmp_path / "c", ["model"]))) == set(model.state_dict())


def test_strategies_have_the_documented_names_and_files(
    saved: tuple[Path, nn.Module, Optimizer], tmp_path: Path
) -> None:
    """One file by default; each tensor in its own; or several up to a size. Directories where there are several."""
    assert UnshardStrategy() == UnshardStrategy.one_file() == UnshardStrategy("one_file", None)  # type: ignore[arg-type]
    assert [kind.value for kind in UnshardStrategyType] == ["one_file", "one_file_per_tensor", "chunks"]
    assert UnshardStrategy.chunks(300).chunk_size_bytes == 300
    place, model, _ = saved
    path, none = unshard_checkpoint(
        place, tmp_path / "each", optim=False, unshard_strategy=UnshardStrategy.one_file_per_tensor()
    )
    assert none is None
    assert len(list(path.glob("*.pt"))) == len(model.state_dict())
    path, _ = unshard_checkpoint(
        place, tmp_path / "chunks", use_safetensors=True, unshard_strategy=UnshardStrategy.chunks(300)
    )
    assert path.is_dir()
    with pytest.raises(ValueError, match="safetensors holds tensors only"):
        unshard_checkpoint(place, tmp_path / "no", optim=True, use_safetensors=True)
    with pytest.raises(ValueError, match="local folder"):
        unshard_checkpoint(place, "s3://bucket/no")


def test_keys_and_metadata(saved: tuple[Path, nn.Module, Optimizer]) -> None:
    """Objects in the order of the keys, whole; the metadata is DCP's."""
    place, model, _ = saved
    weight, step = load_keys(place, ["model.0.weight", "optim.state.0.weight.step"])
    assert same(weight, model.state_dict()["0.weight"])
    assert step.item() == 2
    assert "model.0.weight" in get_checkpoint_metadata(place).state_dict_metadata


def test_ranks_do_what_is_documented(tmp_path: Path) -> None:
    """In a group of one's own; ``throttle_uploads`` is taken; what is for one process says so."""
    save_model_and_optim_state(tmp_path / "one", small_model())
    run_ranks(documented_ranks.all_of_it, 2, tmp_path)
    model = small_model(seed=3)
    load_model_and_optim_state(tmp_path / "group", model)
    assert same(states(model), states(small_model()))


# ── Composer's names ─────────────────────────────────────────────────────────────────────────────────────────────────
def refuse_data(path: Path, specs: Any) -> bool:
    """A check of one's own: no data file is good enough."""
    return not path.name.endswith(".distcp")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["folder", "store"])
def test_readers_with_composers_names_work_with_dcp(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They verify what they read, ask the function of the environment first, and keep files for this checkpoint."""
    state = {"w": torch.arange(6.0), "n": 3}
    dcp.save(state, storage_writer=RemoteFileSystemWriter(tmp_path / "bucket" / "c"), no_dist=True)

    def reader() -> Any:
        if kind == "folder":
            return FileSystemReaderWithValidation(str(tmp_path / "bucket" / "c"))
        return DistCPObjectStoreReader("c", str(tmp_path / "here"), LocalObjectStore(tmp_path / "bucket"), None)

    for _ in range(2):
        wanted = {"w": torch.zeros(6), "n": 0}
        dcp.load(wanted, storage_reader=reader(), no_dist=True)
        assert same(wanted, state)
    monkeypatch.setenv("CHECKPOINT_VALIDATION_FUNCTION", f"{__name__}.refuse_data")
    with pytest.raises(dcp.api.CheckpointException, match="refused by"):
        dcp.load({"w": torch.zeros(6), "n": 0}, storage_reader=reader(), no_dist=True)
    monkeypatch.delenv("CHECKPOINT_VALIDATION_FUNCTION")
    save_state_dict(tmp_path / "bucket" / "c", {"w": torch.ones(6), "n": 4}, save_overwrite=True)
    wanted = {"w": torch.zeros(6), "n": 0}
    dcp.load(wanted, storage_reader=reader(), no_dist=True)
    assert same(wanted, {"w": torch.ones(6), "n": 4})

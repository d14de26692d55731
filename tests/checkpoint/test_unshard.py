"""unshard_checkpoint: sharded checkpoints as plain files of torch or safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.kill_points import kill_at_every_step
from checkpoint.sharded_parts import same, small_model, trained
from forked import run_forked
from torch import nn
from torch.optim import AdamW, Optimizer

from composerlite.checkpoint import (
    UnshardStrategy,
    UnshardStrategyType,
    get_checkpoint_metadata,
    save_model_and_optim_state,
    save_state_dict,
    unshard_checkpoint,
)
from composerlite.errors import CheckpointExistsError, ConfigError, CorruptCheckpointError, IncompatibleCheckpointError

pytest.importorskip("safetensors", reason="safetensors is not installed")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, nn.Module, Optimizer]:
    model = small_model()
    optim = trained(model, groups=2)
    save_model_and_optim_state(tmp_path / "c", model, optim)
    return tmp_path / "c", model, optim


def _loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_one_file_is_what_a_model_and_an_optimizer_take(
    saved: tuple[Path, nn.Module, Optimizer], tmp_path: Path
) -> None:
    """model.pt is the model's state dict; optim.pt has the optimizer's state by the names of parameters."""
    place, model, optim = saved
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
    saved: tuple[Path, nn.Module, Optimizer], tmp_path: Path, strategy: UnshardStrategy, safetensors: bool
) -> None:
    """It says which key is in which file; together they are the model. Chunks are as large as was asked for."""
    place, model, _ = saved
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


def test_one_safetensors_file(saved: tuple[Path, nn.Module, Optimizer], tmp_path: Path) -> None:
    """The optimizer stays out, as it has more than tensors; asking for it is an error."""
    from safetensors.torch import load_file

    place, model, _ = saved
    path, none = unshard_checkpoint(place, tmp_path / "out", use_safetensors=True)
    assert none is None
    assert same(load_file(path), dict(model.state_dict()))
    with pytest.raises(ConfigError, match="optim=True"):
        unshard_checkpoint(place, tmp_path / "other", use_safetensors=True, optim=True)


@pytest.mark.parametrize("strategy", [UnshardStrategy.one_file(), UnshardStrategy.chunks(300)])
def test_other_files_in_the_target_stay_as_they_are(
    saved: tuple[Path, nn.Module, Optimizer], tmp_path: Path, strategy: UnshardStrategy
) -> None:
    """Whatever lies beside what is written, and in its folder, when it is written and when it is replaced."""
    place, model, _ = saved
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
    saved: tuple[Path, nn.Module, Optimizer], tmp_path: Path, strategy: UnshardStrategy
) -> None:
    """FileExistsError that names it, before anything is written; also where the optimizer alone is in the way."""
    place, _, _ = saved
    target = tmp_path / "out"
    name = "optim.pt" if strategy.name is UnshardStrategyType.one_file else "optim"
    (target / name).mkdir(parents=True)
    (target / name / "mine").touch()
    with pytest.raises(CheckpointExistsError, match=rf"{name}' exists already: .* save_overwrite=True"):
        unshard_checkpoint(place, target, unshard_strategy=strategy)
    assert [path.name for path in target.iterdir()] == [name]


STRATEGIES = {"one_file": UnshardStrategy.one_file(), "chunks": UnshardStrategy.chunks(300)}
OF_OTHERS = {"notes": "mine", "model/notes": "mine too"}


def unshard(checkpoint: Path, target: Path, strategy: str) -> None:
    """As somebody does who wants the newest weights in the same place."""
    unshard_checkpoint(checkpoint, target, save_overwrite=True, unshard_strategy=STRATEGIES[strategy])


def kill_unshards(root: str) -> None:
    """Replace the older model by the newer one in a folder with files of others, killed at every step."""
    torch.set_num_threads(1)  # processes are forked
    for seed, name in enumerate(("old", "new")):
        save_model_and_optim_state(Path(root, name), small_model(seed=seed))
    for strategy in STRATEGIES:
        template = Path(root, strategy, "template")
        unshard(Path(root, "old"), template, strategy)
        for name, text in OF_OTHERS.items():
            (template / name).parent.mkdir(exist_ok=True)
            (template / name).write_text(text)
        kill_at_every_step(
            Path(root, strategy),
            lambda target, how=strategy: unshard(Path(root, "new"), target, how),  # type: ignore[misc]
            template=template,
        )


def test_a_kill_at_any_step_leaves_the_old_model_the_new_one_or_none(tmp_path: Path) -> None:
    """SIGKILL before each step of replacing it in a folder with files of others: an index never names a file of the
    other model, those of others stay, and the same command then ends well.
    """
    done = run_forked(kill_unshards, str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    models = [dict(small_model(seed=seed).state_dict()) for seed in (0, 1)]
    for strategy, where in (("one_file", "model.pt"), ("chunks", "model/model.pt.index.json")):
        seen: list[int | None] = []
        attempts = sorted((tmp_path / strategy).glob("step*"), key=lambda path: int(path.name.removeprefix("step")))
        for target in attempts:
            there = target / where
            found: dict[str, Any] | None = None
            if there.exists():
                names = json.loads(there.read_bytes())["weight_map"].values() if strategy == "chunks" else []
                found = {k: v for name in set(names) for k, v in _loaded(target / "model" / name).items()}
                found = found or _loaded(there)
            seen.append(None if found is None else next(n for n, model in enumerate(models) if same(found, model)))
            unshard(tmp_path / "new", target, strategy)
            assert {name: (target / name).read_text() for name in OF_OTHERS} == OF_OTHERS
        assert len(seen) > 3
        assert seen[0] == 0
        assert seen[-1] == 1
        assert [one for one in seen if one != 0] == sorted((one for one in seen if one != 0), key=lambda one: one == 1)
        assert (None in seen) == (strategy == "chunks"), "a file is replaced at once; of a folder the index is away"


def test_an_error_on_the_way_leaves_no_index(saved: tuple[Path, nn.Module, Optimizer], tmp_path: Path) -> None:
    """A data file is damaged behind the model: without an index the files count for nothing."""
    place, _, _ = saved
    index = get_checkpoint_metadata(place)
    last = next(where for key, where in index.storage_data.items() if key.fqn.startswith("optim.state."))
    data = place / last.relative_path
    damaged = bytearray(data.read_bytes())
    damaged[last.offset + last.length // 2] ^= 1
    data.write_bytes(damaged)
    with pytest.raises(CorruptCheckpointError):
        unshard_checkpoint(place, tmp_path / "out", unshard_strategy=UnshardStrategy.one_file_per_tensor())
    assert not list((tmp_path / "out").rglob("*.index.json"))


def test_names_that_become_one_get_files_of_their_own(tmp_path: Path) -> None:
    """Also where a file system does not tell upper from lower case."""
    tensors = {"a.b": torch.ones(1), "a-b": torch.zeros(1), "A/B": torch.full((1,), 2.0)}
    save_state_dict(tmp_path / "c", {"model": tensors})
    folder, _ = unshard_checkpoint(
        tmp_path / "c", tmp_path / "out", unshard_strategy=UnshardStrategy.one_file_per_tensor()
    )
    index = json.loads((folder / "model.pt.index.json").read_bytes())["weight_map"]
    assert same({key: _loaded(folder / name)[key] for key, name in index.items()}, tensors)
    assert len({name.lower() for name in index.values()}) == 3


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


def test_a_checkpoint_of_either_layout_is_unsharded(tmp_path: Path) -> None:
    """The optimizer's file has the layout that was saved."""
    model = small_model()
    optim = AdamW(model.parameters())
    save_model_and_optim_state(tmp_path / "c", model, optim, flatten_optimizer_state=True)
    _, path = unshard_checkpoint(tmp_path / "c", tmp_path / "out")
    assert path is not None
    assert _loaded(path)["param_groups.0.weight.lr"] == 0.001

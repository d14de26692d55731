"""Checkpoints of other systems that two ranks continue, each with its part of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import foreign_ranks
import pytest
import torch
from foreign_ranks import FSDP, Tied
from safetensors.torch import save_model
from test_other_systems import DATA, WHOLE

from composerlite.checkpoint import read_checkpoint
from composerlite.testing import run_ranks


@pytest.mark.parametrize("system", ["Lightning", "transformers", "accelerate", "torchtitan", "DeepSpeed, stage 2"])
def test_two_ranks_of_fsdp_continue_as_the_system_itself(system: str) -> None:
    """Weights, moments, scheduler and step are in their places: the losses are those that the system had."""
    name = WHOLE[system][0]
    expected = json.loads((DATA / name.partition("/")[0] / "expected.json").read_text())["losses"]
    for losses in run_ranks(foreign_ranks.losses_of, 2, system, str(DATA / name), FSDP):
        assert losses == pytest.approx(expected, rel=1e-4)


def _state() -> tuple[Tied, dict[str, Any]]:
    torch.manual_seed(11)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model((torch.ones(2, 4),)).sum().backward()
    optimizer.step()
    return model, optimizer.state_dict()


def _transformers(folder: Path) -> Path:
    model, optimizer = _state()
    folder.mkdir()
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    torch.save(optimizer, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 0, "epoch": 0.0}))
    return folder


def _lightning(folder: Path) -> Path:
    model, optimizer = _state()
    contents = torch.load(DATA / "lightning/step6.ckpt", weights_only=False) | {"global_step": 0, "epoch": 0}
    contents["state_dict"] = {f"net.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({**contents, "optimizer_states": [optimizer], "lr_schedulers": []}, folder.with_suffix(".ckpt"))
    return folder.with_suffix(".ckpt")


def _composer(folder: Path) -> Path:
    model, optimizer = _state()
    contents = read_checkpoint(DATA / "composer/ep1-ba6-rank0.pt")
    names = [name for name, _ in model.named_parameters()]
    named = {
        "state": {names[number]: state for number, state in optimizer["state"].items()},
        "param_groups": [{**group, "params": names} for group in optimizer["param_groups"]],
    }
    state = {key: contents["state"][key] for key in ("metadata", "integrations", "rank_zero_seed", "run_name")}
    state |= {"model": model.state_dict(), "optimizers": {"AdamW": named}}
    torch.save({"state": state, "rng": contents["rng"]}, folder.with_suffix(".pt"))
    return folder.with_suffix(".pt")


@pytest.mark.parametrize("make", [_transformers, _lightning, _composer])
def test_one_weight_under_two_names_stays_one_over_ranks(make: Any, tmp_path: Path) -> None:
    """Saved once or twice, it is loaded into the one that both are, with its moments, and trained as one process
    does."""
    path = make(tmp_path / "saved")
    model, optimizer = _state()
    alone = foreign_ranks.trained_with_a_tie(str(path))
    for told in (alone, *run_ranks(foreign_ranks.trained_with_a_tie, 2, str(path), FSDP)):
        assert told["loaded"].keys() == model.state_dict().keys()
        assert all(torch.equal(told["loaded"][name], tensor) for name, tensor in model.state_dict().items())
        assert told["tied"]
        moments = [state["exp_avg"] for state in optimizer["state"].values()]
        assert len(told["moments"]) == len(moments)
        assert all(map(torch.equal, told["moments"], moments))
        assert all(torch.allclose(told["trained"][name], alone["trained"][name], atol=1e-6) for name in told["trained"])
    assert not torch.equal(alone["trained"]["head.weight"], alone["loaded"]["head.weight"])


def test_two_weights_are_not_loaded_into_one_over_ranks(tmp_path: Path) -> None:
    """All ranks refuse a checkpoint with two that differ, where the difference is in the part of one rank."""
    model = Tied()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    saved["head.weight"][-1] += 1
    torch.save(saved, tmp_path / "saved.pt")
    for error in run_ranks(foreign_ranks.refusal_of_a_tie, 2, str(tmp_path / "saved.pt")):
        assert "body.weight, head.weight" in error

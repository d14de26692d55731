"""Weights written for other programs: from any checkpoint that is read here, with the values that were saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.sharded_parts import same
from click.testing import CliRunner
from combinations import covering
from safetensors.torch import load_file
from test_other_systems import DATA, of_deepspeed, trainer
from tiny_training import Classifier

from composerlite.cli.conversion import convert
from composerlite.errors import ConfigError

OURS = DATA / "composerlite/ep2.pt"
SOURCES = [
    "composerlite/ep2.pt",
    "lightning/step6.ckpt",
    "torch/weights.pt",
    "torch/checkpoint.pt",
    "transformers/checkpoint-6",
    "accelerate/state",
    "deepspeed/zero3",
    "dcp/torchtitan",
    "dcp/nested",
    "safetensors/model.safetensors",
    "safetensors/sharded",
]
FORMS = {
    "file": ["out.pt"],
    "directory": ["out"],
    "safetensors": ["out.safetensors"],
    "safetensors folder": ["out", "--to", "safetensors"],
    "state_dict": ["out.bin", "--to", "state_dict"],
}
"""The target, and how it is asked for."""


def converted(source: Path, target: Path, *options: str) -> Path:
    """What the command makes of ``source``."""
    done = CliRunner().invoke(convert, [str(source), str(target), *options])
    assert done.exit_code == 0, f"{done.output} {done.exception!r}"
    return target


def named(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights by their names in the network."""
    return {name.removeprefix("net."): tensor for name, tensor in weights.items()}


@pytest.mark.parametrize(("source", "form"), covering(1, SOURCES, [*FORMS]))
def test_weights_go_from_any_form_to_any_other(tmp_path: Path, source: str, form: str) -> None:
    """Bit for bit: what is written is read by a plain run here, and by the program that it is for."""
    name, *options = FORMS[form]
    target = converted(DATA / source, tmp_path / name, *options)
    original = torch.load(DATA / "torch/weights.pt")
    if "composerlite" in source:
        original = dict(torch.load(OURS)["state"]["model"])
    elif "deepspeed" in source:
        original = of_deepspeed()
    elif "transformers" in source:
        original = load_file(DATA / source / "model.safetensors")
    if form != "directory" or source != "safetensors/model.safetensors":
        with trainer(target, load_weights_only=True) as run:
            assert same(run.state.model.state_dict(), original)
    if form == "safetensors":
        assert same(named(load_file(target)), original)
    elif form == "safetensors folder":
        (weights,) = target.glob("model*.safetensors")
        assert same(named(load_file(weights)), original)
    elif form == "state_dict":
        assert same(named(dict(torch.load(target, weights_only=True))), original)


def test_no_file_of_lightning_is_written(tmp_path: Path) -> None:
    """The error says what to write instead."""
    done = CliRunner().invoke(convert, [str(OURS), str(tmp_path / "out.ckpt")])
    assert isinstance(done.exception, ConfigError)
    assert "--to state_dict" in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_extra_state_goes_where_it_can(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``load_state_dict`` takes what is written for torch; what safetensors cannot hold is named."""

    class Scaled(Classifier):
        extra: Any = None

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    model = Scaled()
    model.extra = {"scale": 7.0, "history": [torch.ones(2)]}
    torch.save({"model": model.state_dict()}, source := tmp_path / "saved.pt")
    name, *options = FORMS["state_dict"]
    fresh = Scaled()
    fresh.load_state_dict(torch.load(converted(source, tmp_path / name, *options)))
    assert same(fresh.extra, model.extra)
    for form in ("safetensors", "safetensors folder"):
        name, *options = FORMS[form]
        caplog.clear()
        converted(source, tmp_path / form.replace(" ", "_") / name, *options)
        assert "not tensors, left out: _extra_state" in caplog.text


def test_what_is_there_is_not_replaced_unasked(tmp_path: Path) -> None:
    """A file and a folder; with --overwrite they are, and other files stay."""
    for form in ("state_dict", "safetensors folder"):
        name, *options = FORMS[form]
        target = converted(OURS, tmp_path / name, *options)
        done = CliRunner().invoke(convert, [str(OURS), str(target), *options])
        assert done.exit_code != 0
        assert "exists already" in str(done.exception) or "not empty" in str(done.exception)
        converted(OURS, target, *options, "--overwrite")


def test_a_rename_that_is_none_is_refused(tmp_path: Path) -> None:
    """It is FROM=TO, and for forms that have weights under names alone."""
    for target, rename in (("out.safetensors", "net."), ("out.pt", "=net."), ("out", "a=b")):
        done = CliRunner().invoke(convert, [str(OURS), str(tmp_path / target), "--rename", rename])
        assert "expected FROM=TO" in str(done.exception)


RENAMING = ["safetensors", "safetensors folder", "state_dict"]


@pytest.mark.parametrize("form", RENAMING)
@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ("net.=", r"'net\.w' and 'w' would both be 'w'"),
        ("nett.=x.", r"no weight begins with 'nett\.'.*Did you mean 'net\.'"),
    ],
)
def test_a_rename_that_loses_a_weight_or_does_nothing_is_refused(
    tmp_path: Path, form: str, rename: str, message: str
) -> None:
    """Before what is there is replaced."""
    torch.save({"net.w": torch.zeros(2), "w": torch.ones(2)}, source := tmp_path / "saved.pt")
    name, *options = FORMS[form]
    target = converted(source, tmp_path / "out" / name, *options)
    before = {path: path.read_bytes() for path in [target, *target.rglob("*")] if path.is_file()}
    done = CliRunner().invoke(convert, [str(source), str(target), *options, "--rename", rename, "--overwrite"])
    assert isinstance(done.exception, ConfigError)
    assert re.search(message, str(done.exception))
    assert {path: path.read_bytes() for path in [target, *target.rglob("*")] if path.is_file()} == before

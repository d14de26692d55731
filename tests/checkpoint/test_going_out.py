"""Checkpoints written for other programs: from any that is read here, with the values that were saved.

tests/data/composerlite has a checkpoint of ours, and the file of Lightning that ``checkpoint convert`` makes of it. The
losses that Lightning had from there on are in tests/data/lightning_from_ours.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.sharded_parts import same
from click.testing import CliRunner
from combinations import covering
from safetensors.torch import load_file
from test_other_systems import DATA, SAVED, STEPS, Losses, constant, data, grouped, linear, of_deepspeed, trainer
from tiny_training import Classifier
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import SequentialSampler

from composerlite import Trainer
from composerlite.cli.conversion import convert
from composerlite.errors import ConfigError

accelerate: Any = pytest.importorskip("accelerate", reason="the extra huggingface is not installed")
transformers: Any = pytest.importorskip("transformers", reason="the extra huggingface is not installed")
OURS = DATA / "composerlite/ep2.pt"
SOURCES = [
    "composerlite/ep2.pt",
    "composerlite/lightning.ckpt",
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
    "lightning": ["out.ckpt"],
    "transformers": ["checkpoint-6", "--to", "transformers"],
    "accelerate": ["state", "--to", "accelerate"],
}
"""The target, and how it is asked for."""


def converted(source: Path, target: Path, *options: str) -> Path:
    """What the command makes of ``source``."""
    done = CliRunner().invoke(convert, [str(source), str(target), *options])
    assert done.exit_code == 0, f"{done.output} {done.exception!r}"
    return target


def trained(path: Path, steps: int, model: nn.Module | None = None, **more: Any) -> list[float]:
    """Losses of a run of ours that begins with ``path``."""
    losses = Losses()
    with trainer(path, losses, model, max_duration=f"{steps}ba", **more) as run:
        run.fit()
    return losses.found


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
    elif form in ("safetensors folder", "transformers", "accelerate"):
        (weights,) = target.glob("model*.safetensors")
        assert same(named(load_file(weights)), original)
    elif form in ("state_dict", "lightning"):
        found = torch.load(target, weights_only=True)
        assert same(named(dict(found if form == "state_dict" else found["state_dict"])), original)


def test_lightning_continues_from_ours(tmp_path: Path) -> None:
    """What is written is what Lightning was given, and has trained on from: the run here has the same 20 losses."""
    target = converted(OURS, tmp_path / "out.ckpt", "--rename", "=net.")
    assert same(torch.load(target), torch.load(DATA / "composerlite/lightning.ckpt"))
    expected = json.loads((DATA / "lightning_from_ours/expected.json").read_text())["losses"]
    assert len(expected) == STEPS - SAVED
    assert trained(OURS, 8 + len(expected)) == pytest.approx(expected, rel=1e-5)
    assert trained(target, 8 + len(expected)) == pytest.approx(expected, rel=1e-5)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """What accelerate sets is gone after a test."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


class _InOrder(transformers.Trainer):
    """The Trainer of transformers, with the data in order."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(data().dataset)  # pyright: ignore[reportArgumentType]


class Network(nn.Module):
    """The network alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu())


class _Net(nn.Module):
    """The network, as transformers calls a model."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)
        self.losses = losses

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(x).relu())
        loss = nn.functional.cross_entropy(logits, labels)
        self.losses.append(loss.item())
        return {"loss": loss, "logits": logits}


def continued(checkpoint: Path, out: Path, steps: int, **more: Any) -> tuple[list[float], Any]:
    """Losses of the Trainer of transformers that goes on from ``checkpoint``, and that trainer."""
    arguments = transformers.TrainingArguments(
        str(out), max_steps=steps, save_strategy="no", per_device_train_batch_size=4, report_to=[],
        learning_rate=0.01, weight_decay=0.01, max_grad_norm=0, use_cpu=True, disable_tqdm=True, **more,
    )  # fmt: skip
    losses: list[float] = []
    rows: Any = [{"x": x, "labels": y} for x, y in data().dataset]
    run = _InOrder(_Net(losses), arguments, train_dataset=rows)
    run.train(resume_from_checkpoint=str(checkpoint))
    return losses, run


@pytest.mark.parametrize("by", ["the folder itself", "a run of ours", "a directory of ours"])
def test_transformers_continues_from_ours(tmp_path: Path, by: str) -> None:
    """A run of transformers that went on here, or was converted twice, goes on there with the losses that it had."""
    source = DATA / "transformers/checkpoint-6"
    expected = json.loads((DATA / "transformers/expected.json").read_text())["losses"]
    if by != "the folder itself":
        with trainer(source, optimizer=grouped, scheduler=linear) as run:
            source = Path(run.save_checkpoint(str(tmp_path / "now.pt")))
    if by == "a directory of ours":
        source = converted(source, tmp_path / "directory")
    target = converted(source, tmp_path / "checkpoint-6", "--to", "transformers")
    found, run = continued(target, tmp_path / "out", STEPS)
    assert found == pytest.approx(expected, rel=1e-5)
    assert run.state.epoch == pytest.approx(STEPS / 4)


@pytest.mark.parametrize(
    "source", ["composerlite/ep2.pt", "accelerate/state", "deepspeed/zero2", "dcp/torchtitan", "olmo_core/flat"]
)
def test_accelerate_continues_from_ours(tmp_path: Path, source: str, caplog: pytest.LogCaptureFixture) -> None:
    """Accelerator.load_state takes weights, optimizer, scheduler and generators: its next losses are those here."""
    with caplog.at_level("INFO", logger="composerlite"):
        target = converted(DATA / source, tmp_path / "state", "--to", "accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    module = Network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    make = constant if source == "olmo_core/flat" else functools.partial(StepLR, step_size=5, gamma=0.9)
    schedulers = [] if source == "olmo_core/flat" else [make(optimizer)]
    model, optimizer, *schedulers = accelerator.prepare(module, optimizer, *schedulers)
    accelerator.load_state(str(target))
    at = 8 if "composerlite" in source else SAVED
    found: list[float] = []
    for x, y in itertools.islice(itertools.cycle(data()), at, at + STEPS - SAVED):
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        optimizer.zero_grad()
        found.append(loss.item())
    if "composerlite" in source:
        assert found == pytest.approx(list(map(float, trained(OURS, at + STEPS - SAVED))), rel=1e-5)
        assert "not written for accelerate: state/callbacks" in caplog.text
        assert torch.equal(
            torch.load(target / "random_states_0.pkl", weights_only=False)["torch_manual_seed"],
            torch.load(OURS)["rng"][0]["torch"],
        )
    else:
        saved = json.loads((DATA / source.partition("/")[0] / "expected.json").read_text())["losses"]
        assert found == pytest.approx(saved, rel=1e-5)


def test_an_optimizer_of_one_group_becomes_the_two_of_transformers(tmp_path: Path) -> None:
    """Moments and settings stay with their weights: at a constant rate both have the same 20 losses from there on."""
    losses, model = Losses(), Classifier()
    with Trainer(
        model=model,
        train_dataloader=data(),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        max_duration="28ba",
        callbacks=[losses],
        progress_bar=False,
        save_folder=str(tmp_path / "run"),
        save_filename="ba{batch}.pt",
        save_interval="4ba",
    ) as run:
        run.fit()
    source = tmp_path / "run/ba8.pt"
    target = converted(source, tmp_path / "checkpoint-8", "--to", "transformers")
    saved = torch.load(target / "optimizer.pt")
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1], [2, 3]]
    ours = torch.load(source)["state"]["optimizers"]["AdamW"]["state"]
    names = ["body.weight", "head.weight", "body.bias", "head.bias"]
    assert same([saved["state"][number] for number in range(4)], [ours[name] for name in names])
    found, _ = continued(target, tmp_path / "out", 28, lr_scheduler_type="constant")
    assert found == pytest.approx(list(map(float, losses.found[8:])), rel=1e-5)


def test_names_that_an_optimizer_has_go_along_with_its_parameters(tmp_path: Path) -> None:
    """``param_names`` are beside the state that they name, also where groups are divided or names are changed."""
    model = Classifier()
    made = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([(name, made[name]) for name in reversed(made)], lr=0.5)
    with trainer(OURS, model=model, optimizer=lambda _: optimizer) as run:
        ours = run.state.get_optim_state_dict()["AdamW"]["state"]
        source = Path(run.save_checkpoint(str(tmp_path / "now.pt")))
    halves = converted(source, tmp_path / "checkpoint-8", "--to", "transformers")
    whole = converted(source, tmp_path / "out.ckpt", "--rename", "=net.")
    for saved in (torch.load(halves / "optimizer.pt"), torch.load(whole)["optimizer_states"][0]):
        for group in saved["param_groups"]:
            for number, name in zip(group["params"], group["param_names"], strict=True):
                assert same(saved["state"][number], ours[name.removeprefix("net.")])
    assert saved["param_groups"][0]["param_names"][0].startswith("net.")


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
    for form in ("state_dict", "lightning"):
        name, *options = FORMS[form]
        found = torch.load(converted(source, tmp_path / name, *options))
        fresh = Scaled()
        fresh.load_state_dict(found if form == "state_dict" else found["state_dict"])
        assert same(fresh.extra, model.extra)
    for form in ("safetensors", "safetensors folder", "transformers", "accelerate"):
        name, *options = FORMS[form]
        caplog.clear()
        converted(source, tmp_path / form.replace(" ", "_") / name, *options)
        assert "left out what is no tensor: _extra_state" in caplog.text


def test_a_scheduler_of_another_kind_is_left_to_transformers(tmp_path: Path) -> None:
    """Its own rate goes on at the step of the checkpoint; the generators of a rank are those that were saved."""
    target = converted(OURS, tmp_path / "checkpoint-8", "--to", "transformers")
    assert torch.load(target / "scheduler.pt")["last_epoch"] == 8
    saved = torch.load(target / "rng_state.pth", weights_only=False)
    ours = torch.load(OURS)["rng"][0]
    assert same(saved["cpu"], ours["torch"])
    assert list(saved["numpy"][1]) == ours["numpy"][1].tolist()
    assert saved["python"] == (ours["python"][0], tuple(ours["python"][1]), ours["python"][2])


def test_what_is_there_is_not_replaced_unasked(tmp_path: Path) -> None:
    """A file and a folder; with --overwrite they are, and other files stay."""
    for form in ("lightning", "transformers", "accelerate", "state_dict", "safetensors folder"):
        name, *options = FORMS[form]
        target = converted(OURS, tmp_path / name, *options)
        done = CliRunner().invoke(convert, [str(OURS), str(target), *options])
        assert done.exit_code != 0
        assert "exists already" in str(done.exception) or "not empty" in str(done.exception)
        converted(OURS, target, *options, "--overwrite")


def test_a_rename_that_is_none_is_refused(tmp_path: Path) -> None:
    """It is FROM=TO, and for forms that have weights under names alone."""
    for target, rename in (("out.ckpt", "net."), ("out.pt", "=net."), ("out", "a=b")):
        done = CliRunner().invoke(convert, [str(OURS), str(tmp_path / target), "--rename", rename])
        assert "expected FROM=TO" in str(done.exception)


RENAMING = ["safetensors", "safetensors folder", "state_dict", "lightning", "transformers", "accelerate"]


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


def test_a_rename_of_a_hugging_face_model_is_refused(tmp_path: Path) -> None:
    """Its config goes along, and needs the names that transformers gives."""
    kept = {"model": {"config": {"file_extension": ".json", "content": {"model_type": "bert"}}}}
    state = {"model": {"model.w": torch.ones(2)}, "integrations": {"huggingface": kept}}
    torch.save({"state": state, "rng": []}, source := tmp_path / "saved.pt")
    options = ["--to", "transformers", "--rename", "model.=x."]
    done = CliRunner().invoke(convert, [str(source), str(tmp_path / "checkpoint-6"), *options])
    assert "keep the names that transformers gives them" in str(done.exception)
    assert not (tmp_path / "checkpoint-6").exists()

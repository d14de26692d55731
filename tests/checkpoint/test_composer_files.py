"""Checkpoints of Composer: files, archives, links and directories that its Trainer has written (tests/interop)."""

from __future__ import annotations

import enum
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_other_systems import DATA, SAVED, Losses, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from composerlite.algorithms import EMA, SWA, GradientClipping
from composerlite.callbacks import EarlyStopper, SpeedMonitor
from composerlite.checkpoint import read_checkpoint
from composerlite.core import TimeUnit
from composerlite.errors import ConfigError, IncompatibleCheckpointError
from composerlite.models import ComposerModel
from composerlite.types import StateDict

FILES = DATA / "composer"
FILE = FILES / "ep1-ba6-rank0.pt"
EXPECTED = json.loads((FILES / "expected.json").read_text())


class Model(ComposerModel):
    """As make_fixtures.py has it."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.module = nn.ModuleDict({"body": nn.Linear(4, 3), "head": nn.Linear(3, 2)})
        self.dropout = nn.Dropout(dropout)
        self.accuracy = MulticlassAccuracy(num_classes=2, average="micro")

    def forward(self, batch: Any) -> torch.Tensor:
        return self.module["head"](self.dropout(self.module["body"](batch[0]).relu()))

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {"MulticlassAccuracy": self.accuracy}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(outputs, batch[1])


def resumed(path: Path, losses: Losses | None = None, dropout: float = 0.5, **more: Any) -> Any:
    """The run of make_fixtures.py, resumed here."""
    chosen = {"algorithms": [GradientClipping("norm", 0.5)], "save_metrics": True}
    return trainer(path, losses, Model(dropout), **chosen | more)


NAMES = ["ep1-ba6-rank0.pt", "packed.pt.gz", "packed.tar.bz2", "latest-rank0.pt.symlink", "latest-rank0.pt"]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_composer_continues_exactly(name: str) -> None:
    """Weights, optimizer, scheduler, dropout and place in the data: the next losses are Composer's, bit for bit."""
    losses = Losses()
    with resumed(FILES / name, losses) as run:
        time = run.state.timestamp
        assert (int(time.epoch), int(time.batch), int(time.batch_in_epoch), int(time.sample)) == (1, 6, 2, 24)
        run.fit()
    assert losses.found == EXPECTED["losses"]


def test_a_directory_of_composers_fsdp_continues() -> None:
    """What two ranks of Composer have saved one rank here resumes, with their batches as one."""
    x, y = torch.arange(64).reshape(16, 4).float().sin(), torch.arange(16) % 2
    losses = Losses()
    data = DataLoader(TensorDataset(x, y), batch_size=8)
    with resumed(FILES / "ep2-ba6", losses, 0.0, train_dataloader=data) as run:
        time = run.state.timestamp
        assert (int(time.epoch), int(time.batch), int(time.sample)) == (2, SAVED, 48)
        run.fit()
    assert losses.found == pytest.approx(EXPECTED["sharded"], rel=1e-5)


@pytest.mark.parametrize("name", ["ep2-ba6", "packed.tar.bz2"])
def test_weights_are_taken_alone(name: str) -> None:
    """With load_weights_only nothing else is."""
    with resumed(FILES / name, load_weights_only=True) as run:
        assert int(run.state.timestamp.batch) == 0
        assert not run.state.optimizers[0].state


PLAIN = json.loads((DATA / "torch/expected.json").read_text())["losses"]
"""What a run without dropout and clipping has; an average beside it changes nothing."""


def not_active(contents: StateDict) -> None:
    """The weights that are trained in the model, and the average beside them."""
    ((_, ema),) = contents["state"]["algorithms"]
    model, beside = contents["state"]["model"], ema["ema_model"]
    contents["state"]["model"], ema["ema_weights_active"] = beside["named_parameters_dict"], False
    beside["named_parameters_dict"] = dict(model)


def of_ddp(contents: StateDict) -> None:
    """``module.`` before the names of the average alone."""
    ((_, ema),) = contents["state"]["algorithms"]
    beside = ema["ema_model"]
    beside["named_parameters_dict"] = {f"module.{key}": value for key, value in beside["named_parameters_dict"].items()}


@pytest.mark.parametrize("change", [None, not_active, of_ddp])
def test_the_average_of_ema_is_restored(tmp_path: Path, change: Callable[[StateDict], None] | None) -> None:
    """Composer saves the average as the model, and trained weights beside it: each goes back to where it belongs."""
    contents = read_checkpoint(FILES / "ema.pt")
    average = {name: tensor.clone() for name, tensor in contents["state"]["model"].items()}
    if change is not None:
        change(contents)
    torch.save(contents, tmp_path / "ema.pt")
    losses, ema = Losses(), EMA(half_life="2ba")
    with resumed(tmp_path / "ema.pt", losses, 0.0, algorithms=[ema]) as run:
        assert ema.ema_model is not None
        found = dict(ema.ema_model.named_parameters())
        assert found.keys() == average.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in average.items())
        run.fit()
    assert losses.found == pytest.approx(PLAIN, rel=1e-5)


def test_the_average_of_swa_is_restored() -> None:
    """As many samples as Composer had, and the same average; training goes on with the same losses."""
    ((_, saved),) = read_checkpoint(FILES / "swa.pt")["state"]["algorithms"]
    losses, swa = Losses(), SWA("0.1dur", "0.9dur", "1ba", schedule_swa_lr=False)
    with resumed(FILES / "swa.pt", losses, 0.0, algorithms=[swa]) as run:
        state = swa.state_dict()
        assert (state["count"], state["completed"]) == (4, False)
        for name, tensor in state["tensors"].items():
            assert torch.equal(tensor, saved["swa_model"][f"module.{name}"])
        run.fit()
    assert losses.found[:17] == pytest.approx(PLAIN[:17], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("ema", "ema_model", 3),
        ("ema", "ema_model", {"named_parameters_dict": {"x": 1}}),
        ("swa", "swa_model", None),
        ("swa", "swa_scheduler", {"last_epoch": 1}),
    ],
)
def test_an_average_in_an_unknown_form_is_refused_with_the_way_out(
    tmp_path: Path, name: str, key: str, value: Any
) -> None:
    """Nothing is trained from a wrong average."""
    contents = read_checkpoint(FILES / f"{name}.pt")
    contents["state"]["algorithms"][0][1][key] = value
    torch.save(contents, tmp_path / "other.pt")
    algorithm = EMA(half_life="2ba") if name == "ema" else SWA("0.1dur", "0.9dur", "1ba", schedule_swa_lr=False)
    with pytest.raises(IncompatibleCheckpointError, match="load_exclude_algorithms"):
        resumed(tmp_path / "other.pt", algorithms=[algorithm])


def saved_for_composer(folder: Path, losses: Losses, **more: Any) -> None:
    """Train as make_fixtures.py does, and save with save_compat='composer'."""
    how = {"save_folder": str(folder), "save_interval": f"{SAVED}ba", "save_compat": "composer", "seed": 5}
    with resumed(FILE, losses, load_weights_only=True, callbacks=[SpeedMonitor(2)], **how | more) as run:
        run.fit()


def test_what_is_saved_for_composer_has_the_form_that_it_loads(tmp_path: Path) -> None:
    """Times are timedelta, metrics have '_computed', SpeedMonitor its own key: tests/interop loads it in Composer."""
    saved_for_composer(tmp_path, Losses())
    ours, theirs = (read_checkpoint(path)["state"] for path in (tmp_path / FILE.name, FILE))
    kinds = [{key: type(value) for key, value in one["timestamp"]["Timestamp"].items()} for one in (ours, theirs)]
    assert kinds[0] == kinds[1]
    assert ours["train_metrics"]["MulticlassAccuracy"].keys() >= {"state_dict", "_computed"}
    assert ours["callbacks"]["SpeedMonitor"].keys() == theirs["callbacks"]["SpeedMonitor"].keys()
    assert ours["optimizers"]["AdamW"].keys() == theirs["optimizers"]["AdamW"].keys()


def test_another_system_to_save_for_is_refused(tmp_path: Path) -> None:
    """Before training."""
    with pytest.raises(ConfigError, match=r"save_compat='olmo': expected 'composer' or None"):
        saved_for_composer(tmp_path, Losses(), save_compat="olmo")


def algorithms_as_dict(contents: StateDict) -> None:
    contents["state"]["algorithms"] = dict(contents["state"]["algorithms"])


def names_with_underscores(contents: StateDict) -> None:
    contents["state"] = {f"_{key}": value for key, value in contents["state"].items()}


def few_keys(contents: StateDict) -> None:
    for key in ("integrations", "metadata", "dataset_state", "train_metrics", "eval_metrics", "scaler", "callbacks"):
        del contents["state"][key]


def with_huggingface(contents: StateDict) -> None:
    config = {"file_extension": ".json", "content": {}, "class": "transformers.models.bert.BertConfig"}
    contents["state"]["integrations"] = {"huggingface": {"model": {"config": config}, "tokenizer": {}}}


@pytest.mark.parametrize("change", [algorithms_as_dict, names_with_underscores])
def test_a_form_of_composer_before_0_14_is_refused(tmp_path: Path, change: Callable[[StateDict], None]) -> None:
    """The error names the version, and says how to bring the checkpoint into a newer form."""
    contents = read_checkpoint(FILE)
    change(contents)
    torch.save(contents, tmp_path / "old.pt")
    with pytest.raises(IncompatibleCheckpointError, match=r"Composer before 0\.14"):
        resumed(tmp_path / "old.pt")


@pytest.mark.parametrize("change", [few_keys, with_huggingface])
def test_forms_of_other_versions_continue_too(tmp_path: Path, change: Callable[[StateDict], None]) -> None:
    """Fewer keys, and those of a HuggingFaceModel."""
    contents = read_checkpoint(FILE)
    change(contents)
    torch.save(contents, tmp_path / "old.pt")
    losses = Losses()
    with resumed(tmp_path / "old.pt", losses) as run:
        run.fit()
    assert losses.found == EXPECTED["losses"]


def test_callbacks_are_matched_by_the_name_of_their_class(tmp_path: Path) -> None:
    """Of a callback that both have the state is restored: the time that evaluation took."""
    contents = read_checkpoint(FILE)
    assert contents["state"]["callbacks"]["SpeedMonitor"] == {"total_eval_wct": 0.0}
    contents["state"]["callbacks"]["SpeedMonitor"] = {"total_eval_wct": 7.5}
    torch.save(contents, tmp_path / "evaluated.pt")
    with resumed(tmp_path / "evaluated.pt", callbacks=[SpeedMonitor(2)]) as run:
        (monitor,) = [one for one in run.state.callbacks if isinstance(one, SpeedMonitor)]
        assert monitor.state_dict() == {"eval_seconds": 7.5}


def test_what_cannot_be_matched_is_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What only the file has, and what only the run has: training continues without. Schedulers may be those of fit,
    so of them it is said then."""
    contents = read_checkpoint(FILE)
    contents["state"]["callbacks"]["TheirOwn"] = {"count": 3}
    torch.save(contents, tmp_path / "more.pt")
    falling = torch.optim.lr_scheduler.ExponentialLR
    more = {
        "callbacks": [EarlyStopper("MulticlassAccuracy", "train")],
        "scheduler": lambda optimizer: falling(optimizer, 0.9),
    }
    with caplog.at_level("WARNING", logger="composerlite"), resumed(tmp_path / "more.pt", **more) as run:
        run.fit()
    message, later = [text for text in caplog.messages if "does not match the run" in text]
    assert "no state of 'ExponentialLR' in schedulers" in later
    assert "no state of 'EarlyStopper' in callbacks" in message
    assert "state of 'StepLR' in schedulers" in later
    assert "state of 'TheirOwn' in callbacks" in message


def test_another_optimizer_is_refused() -> None:
    """No training goes on without its momentum, unless that is asked for."""
    plain = {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1)}
    with pytest.raises(IncompatibleCheckpointError, match=r"saved with the optimizer AdamW and the run has SGD"):
        resumed(FILE, **plain)
    with resumed(FILE, **plain, load_ignore_keys=["state/optimizers"]) as run:
        assert int(run.state.timestamp.batch) == SAVED


UNIT = enum.Enum("TimeUnit", {"BATCH": "ba"}, module="composer.core.time")


class Time:
    """Pickled under the name of Composer's own."""

    __module__, __qualname__ = "composer.core.time", "Time"

    def __init__(self, value: int, unit: object) -> None:
        self.value, self.unit = value, unit


class Action:
    """Pickled as a call of a function of Composer's."""

    def __reduce__(self) -> tuple[Any, ...]:
        return action, ("touched",)


def action(name: str) -> None:
    """Would leave a trace."""
    Path(name).touch()


action.__module__, action.__qualname__ = "composer.utils.misc", "action"


def test_classes_of_composer_are_taken_by_name_and_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An enumeration is ours of that name; any other object is what it was made of, and does nothing."""
    names = {"time": {"Time": Time, "TimeUnit": UNIT}, "misc": {"action": action}}
    modules = {"composer.core.time": names["time"], "composer.utils.misc": names["misc"]}
    for module in ("composer", "composer.core", "composer.utils"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    for module, inside in modules.items():
        made = types.ModuleType(module)
        vars(made).update(inside)
        monkeypatch.setitem(sys.modules, module, made)
    contents = read_checkpoint(FILE)
    contents["state"]["callbacks"] = {"TheirOwn": {"time": Time(3, UNIT.BATCH), "done": Action()}}
    torch.save(contents, tmp_path / "objects.pt")
    for module in ("composer", "composer.core", "composer.utils", *modules):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.chdir(tmp_path)
    found = read_checkpoint(tmp_path / "objects.pt")["state"]["callbacks"]["TheirOwn"]
    assert found["time"] == {
        "class": "composer.core.time.Time",
        "arguments": (),
        "state": {"value": 3, "unit": TimeUnit.BATCH},
    }
    assert found["done"] == {"class": "composer.utils.misc.action", "arguments": ("touched",)}
    assert not Path("touched").exists()
    assert not any(name.partition(".")[0] == "composer" for name in sys.modules)
    losses = Losses()
    with resumed(tmp_path / "objects.pt", losses) as run:
        run.fit()
    assert losses.found == EXPECTED["losses"]

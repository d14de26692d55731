"""What a script changes between two launches of a run: it holds from there on, and the log says so."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.tiny_training import Classifier, trainer
from sealed_files import record_in
from torch.optim import lr_scheduler as L
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Callback, Logger, State
from composerlite.checkpoint.tools.converting import write_file
from composerlite.errors import IncompatibleCheckpointError
from composerlite.optim import LinearScheduler


def launch(folder: Path, batches: int, rate: float, *, scheduler: str = "") -> Any:
    """Train up to so many batches; the trainer, which is closed."""
    torch.manual_seed(1)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedulers: Any = None
    if scheduler == "composer":
        schedulers = LinearScheduler(alpha_f=0.0, t_max="10ba")
    elif scheduler == "torch":
        schedulers = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    with trainer(
        model=model,
        optimizers=optimizer,
        schedulers=schedulers,
        step_schedulers_every_batch=True,
        max_duration=f"{batches}ba",
        save_folder=folder,
        save_interval="1ba",
        autoresume=True,
    ) as run:
        run.fit()
        return run


@pytest.mark.parametrize("scheduler", ["", "composer", "torch"])
def test_another_learning_rate_holds_from_there_on(
    tmp_path: Path, scheduler: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Scaled by where the schedule stands, once and not again at the next resume."""
    launch(tmp_path, 4, 0.1, scheduler=scheduler)
    with caplog.at_level(logging.WARNING):
        changed = launch(tmp_path, 5, 0.02, scheduler=scheduler)
    assert "the learning rate was (0.1,) in the interrupted run and is (0.02,) now" in caplog.text
    expected = 0.02 * (0.5 if scheduler else 1)
    assert changed.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(expected)
    caplog.clear()
    again = launch(tmp_path, 6, 0.02, scheduler=scheduler)
    assert again.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.02 * (0.4 if scheduler else 1))
    assert "learning rate was" not in caplog.text


class Peak(L.LRScheduler):
    """A user's, that keeps a rate of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer, peak_lr: float) -> None:
        self.peak_lr = peak_lr
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [self.peak_lr / (1 + self.last_epoch)]


def parts(optimizer: Any) -> list[Any]:
    """Two schedulers, one of which goes to a lowest rate."""
    return [L.LinearLR(optimizer, total_iters=3), L.CosineAnnealingLR(optimizer, 20, eta_min=0.01)]


@pytest.mark.parametrize(
    ("make", "holds"),
    [
        (lambda o: L.SequentialLR(o, parts(o), [3]), True),
        (lambda o: L.SequentialLR(o, [L.ConstantLR(o, 0.5, 3), L.CosineAnnealingWarmRestarts(o, 8)], [3]), True),
        (lambda o: L.SequentialLR(o, [L.SequentialLR(o, parts(o), [2]), L.ExponentialLR(o, 0.9)], [6]), True),
        (lambda o: L.ChainedScheduler([L.ConstantLR(o, 0.5, 6), L.CosineAnnealingWarmRestarts(o, 8)]), True),
        (lambda o: L.CosineAnnealingLR(o, 10, eta_min=0.01), True),
        (lambda o: L.PolynomialLR(o, 10), True),
        (lambda o: L.OneCycleLR(o, o.param_groups[0]["lr"], 20), True),
        (lambda o: L.CyclicLR(o, o.param_groups[0]["lr"], o.param_groups[0]["lr"] * 2, 4, cycle_momentum=False), False),
        (lambda o: Peak(o, o.param_groups[0]["lr"]), False),
        (lambda o: L.SequentialLR(o, [L.ConstantLR(o, 0.5, 3), Peak(o, o.param_groups[0]["lr"])], [3]), False),
    ],
)
@pytest.mark.parametrize("batch", [2, 5])
@pytest.mark.filterwarnings("ignore:Detected call of")  # torch's own, about a SequentialLR in another
def test_the_rate_that_the_log_says_holds_does(
    make: Any, holds: bool, batch: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With every kind of schedule, and those made of others: for all batches that follow, as if it had been so."""

    def rates(folder: str, rate: float, until: int) -> list[float]:
        found: list[float] = []

        class Rates(Callback):
            def batch_start(self, state: State, logger: Logger) -> None:
                found.append(float(state.optimizers[0].param_groups[0]["lr"]))

        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with trainer(
            model=model,
            optimizers=optimizer,
            schedulers=make(optimizer),
            step_schedulers_every_batch=True,
            max_duration=f"{until}ba",
            save_folder=tmp_path / folder,
            save_interval="1ba",
            autoresume=True,
            callbacks=[Rates()],
        ) as run:
            run.fit()
        return found

    expected = rates("whole", 0.2 if holds else 0.1, 12)
    rates("cut", 0.1, batch)
    with caplog.at_level(logging.WARNING):
        found = rates("cut", 0.2, 12)
    assert found == pytest.approx(expected[batch:])
    assert ("it holds from here on, scaled by the schedule" in caplog.text) is holds
    assert ("the checkpoint's holds, since" in caplog.text) is not holds


def test_the_same_learning_rate_changes_nothing(tmp_path: Path) -> None:
    """Bit for bit, with a schedule."""
    whole = launch(tmp_path / "whole", 6, 0.1, scheduler="composer")
    launch(tmp_path / "cut", 3, 0.1, scheduler="composer")
    cut = launch(tmp_path / "cut", 6, 0.1, scheduler="composer")
    for one, other in zip(whole.state.model.parameters(), cut.state.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_optimizer_of_another_kind_is_told_the_way_out(tmp_path: Path) -> None:
    """Filters do not apply to a run that resumes: what the error says to do instead works."""
    launch(tmp_path / "run", 2, 0.1)

    def other(**arguments: Any) -> Any:
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        keys = ["state/optimizers", "state/schedulers"]
        given = {"model": model, "optimizers": optimizer, "load_ignore_keys": keys, "autoresume": True}
        return trainer(save_interval="1ba", max_duration="3ba", **given, **arguments)

    with pytest.raises(IncompatibleCheckpointError) as error:
        other(save_folder=tmp_path / "run")
    assert "the load_… arguments apply to load_path alone" in str(error.value)
    found = re.search(r"another run_name with load_path='(.*)'\.$", str(error.value))
    assert found is not None
    with other(save_folder=tmp_path / "other", run_name="other", load_path=found[1]) as run:
        assert int(run.state.timestamp.batch) == 2


# ── all that is another ──────────────────────────────────────────────────────────────────────────────────────────────
def relaunch(folder: Path, until: str, *, samples: int = 16, batch_size: int = 4, **arguments: Any) -> Any:
    """Train until then on so many samples, with SGD of these ``optimizer`` arguments; the trainer, which is closed."""
    model = Classifier()
    how: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, **arguments.pop("optimizer", {})}
    inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(arguments.pop("data_seed", 0)))
    loader = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=batch_size, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), **how)
    saved: dict[str, Any] = {"save_folder": folder, "autoresume": True, **arguments}
    with trainer(model=model, optimizers=optimizer, train_dataloader=loader, max_duration=until, **saved) as run:
        run.fit()
        return run


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of the warning about changed settings; none if there was none."""
    found = [record.getMessage() for record in caplog.records if " changed:" in record.getMessage()]
    assert len(found) <= 1
    return found[0].splitlines() if found else []


def test_one_warning_lists_all_settings_that_are_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each with its values, which of them holds, and how to choose the other."""
    relaunch(tmp_path, "1ep")
    optimizer = {"lr": 0.2, "weight_decay": 0.5, "dampening": 0.25, "nesterov": False, "maximize": True}
    other = relaunch(tmp_path, "2ep", optimizer=optimizer, samples=8, batch_size=2, seed=4, precision="amp_bf16")
    lines = said(caplog)
    path = str(tmp_path / "ep1-ba4-rank0.pt")
    assert lines == [
        "run 'run' resumes at batch 4 with 8 settings changed:",
        "  the learning rate was (0.1,) in the interrupted run and is (0.2,) now: it holds from here on, scaled by the "
        "schedule; to continue as before give lr=0.1",
        "  the dampening was 0 in the interrupted run and is 0.25 now: it holds from here on; to continue as before "
        "give dampening=0",
        "  the weight_decay was 0.01 in the interrupted run and is 0.5 now: it holds from here on; to continue as "
        "before give weight_decay=0.01",
        "  the maximize was False in the interrupted run and is True now: the checkpoint's holds, with which the "
        f"optimizer's state was made; to begin with the other, start another run_name with load_path={path!r} and "
        "load_ignore_keys=['state/optimizers', 'state/schedulers']",
        "  the precision was fp32 in the interrupted run and is amp_bf16 now: it holds from here on; to continue as "
        "before give precision='fp32'",
        "  the batch size of the train_dataloader was 4 in the interrupted run and is 2 now: it holds from here on; to "
        "continue as before give batch_size=4",
        "  the number of training samples was 16 in the interrupted run and is 8 now: it holds from here on; to "
        "continue as before give a data set of 16 samples",
        "  the seed was 3 in the interrupted run and is 4 now: the checkpoint's holds, with its random generators; to "
        f"continue with the other, start another run_name with load_path={path!r} and "
        "load_ignore_keys=['state/rank_zero_seed', 'state/dataset_state', 'rng']",
    ]
    (group,) = other.state.optimizers[0].param_groups
    assert (group["weight_decay"], group["dampening"], group["maximize"]) == (0.5, 0.25, False)
    assert group["lr"] == pytest.approx(0.2)
    assert other.state.rank_zero_seed == 3


def test_within_an_epoch_no_more_is_said_than_is_true(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Six samples into a shuffled epoch a loader of batches of another size does not lead there: the run is refused,
    and the warning before has not said that the size holds."""
    relaunch(tmp_path, "3ba", save_interval="1ba", batch_size=2)
    with caplog.at_level(logging.WARNING), pytest.raises(IncompatibleCheckpointError, match="another order of samples"):
        relaunch(tmp_path, "4ba", save_interval="1ba", batch_size=3)
    assert said(caplog)[1:] == [
        "  the batch size of the train_dataloader was 2 in the interrupted run and is 3 now: it holds from here on if "
        "the rest of this epoch can be found with it, and otherwise the run stops with an error; to continue as "
        "before give batch_size=2"
    ]


def test_what_was_said_is_not_said_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next resume compares with what held, and not with what the script said."""
    relaunch(tmp_path, "1ep")
    relaunch(tmp_path, "2ep", optimizer={"weight_decay": 0.5, "maximize": True})
    caplog.clear()
    third = relaunch(tmp_path, "3ep", optimizer={"weight_decay": 0.5})
    assert said(caplog) == []
    assert third.state.optimizers[0].param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"optimizer": {"momentum": 0.0}}, "  the momentum was 0.9 in the interrupted run and is 0.0 now: the checkp"),
        ({"optimizer": {"momentum": 0.8}}, "  the momentum was 0.9 in the interrupted run and is 0.8 now: it holds"),
        ({"data_seed": 1}, "  the digest of the training data was "),
    ],
)
def test_one_other_setting(tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], line: str) -> None:
    """A value that the optimizer's state does not serve is not taken; other data of the same length are seen."""
    relaunch(tmp_path, "1ep")
    relaunch(tmp_path, "2ep", **change)
    head, only = said(caplog)
    assert head == "run 'run' resumes at batch 4 with 1 setting changed:"
    assert only.startswith(line)


def test_with_load_path_the_checkpoint_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning says so, and its way to the script's values works."""
    relaunch(tmp_path, "1ep")
    path, changed = tmp_path / "ep1-ba4-rank0.pt", {"lr": 0.2, "weight_decay": 0.5}
    loaded = relaunch(tmp_path, "2ep", optimizer=changed, load_path=path, autoresume=False)
    assert said(caplog) == [
        "run 'run' resumes at batch 4 with 2 settings changed:",
        "  the learning rate was (0.1,) in the interrupted run and is (0.2,) now: the checkpoint's holds; "
        "autoresume=True takes that of the script",
        "  the weight_decay was 0.01 in the interrupted run and is 0.5 now: the checkpoint's holds; autoresume=True "
        "takes that of the script",
    ]
    assert loaded.state.optimizers[0].param_groups[0]["weight_decay"] == 0.01
    resumed = relaunch(tmp_path, "3ep", optimizer=changed)
    (group,) = resumed.state.optimizers[0].param_groups
    assert (group["lr"], group["weight_decay"]) == (pytest.approx(0.2), 0.5)


@pytest.mark.parametrize("kind", ["one_cycle", "seedless"])
def test_what_a_scheduler_or_nobody_changed_is_no_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """A schedule of the learning rate and of momentum, and a seed that the script leaves to the trainer."""

    def launch_one(until: str) -> None:
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        how: dict[str, Any] = {"seed": None}
        if kind == "one_cycle":
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=12)
            how = {"schedulers": scheduler, "step_schedulers_every_batch": True}
        with trainer(
            model=model, optimizers=optimizer, max_duration=until, save_folder=tmp_path, autoresume=True, **how
        ) as run:
            run.fit()

    launch_one("1ep")
    launch_one("2ep")
    assert said(caplog) == []


def test_a_checkpoint_of_before_resumes_as_it_did(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has no record of settings: the optimizer's are its own, and only what it tells is compared."""
    relaunch(tmp_path / "new", "1ep")
    name = "ep1-ba4-rank0.pt"
    contents = torch.load(tmp_path / "new" / name)
    del contents["state"]["metadata"]["settings"]
    (tmp_path / "old").mkdir()
    write_file(contents, tmp_path / "old" / name, record_in(tmp_path / "new" / name), overwrite=False)
    old = relaunch(tmp_path / "old", "2ep", optimizer={"weight_decay": 0.5})
    assert old.state.optimizers[0].param_groups[0]["weight_decay"] == 0.01
    assert said(caplog) == []
    new = relaunch(tmp_path / "new", "2ep")
    for one, other in zip(new.state.model.parameters(), old.state.model.parameters(), strict=True):
        assert torch.equal(one, other)
    caplog.clear()
    relaunch(tmp_path / "old", "3ep", optimizer={"weight_decay": 0.5})
    assert said(caplog)[1].startswith("  the weight_decay was 0.01 in the interrupted run and is 0.5 now: it holds")


def test_another_number_of_ranks_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the launch decides is not left out."""
    relaunch(tmp_path / "new", "1ep")
    name = "ep1-ba4-rank0.pt"
    contents = torch.load(tmp_path / "new" / name)
    contents["state"]["metadata"]["world_size"] = 2
    (tmp_path / "old").mkdir()
    write_file(contents, tmp_path / "old" / name, record_in(tmp_path / "new" / name), overwrite=False)
    relaunch(tmp_path / "old", "2ep")
    assert said(caplog)[1:] == [
        "  the number of ranks was 2 in the interrupted run and is 1 now: it holds from here on; to continue as before "
        "launch 2 ranks"
    ]


def test_the_way_to_another_seed_works(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the warning says to do begins another run at the same batch, with that seed."""
    relaunch(tmp_path / "run", "1ep")
    relaunch(tmp_path / "run", "2ep", seed=4)
    found = re.search(r"load_path='(.*)' and load_ignore_keys=(\[.*\])$", said(caplog)[1])
    assert found is not None
    keys = json.loads(found[2].replace("'", '"'))
    caplog.clear()
    other = relaunch(tmp_path / "other", "2ep", run_name="other", seed=4, load_path=found[1], load_ignore_keys=keys)
    assert (other.state.rank_zero_seed, int(other.state.timestamp.batch)) == (4, 8)
    assert said(caplog) == []


def test_the_record_of_settings_is_plain(tmp_path: Path) -> None:
    """Numbers, texts, lists and dicts: any reader opens it."""
    relaunch(tmp_path, "1ep")
    contents = torch.load(tmp_path / "ep1-ba4-rank0.pt", weights_only=True)
    settings = contents["state"]["metadata"]["settings"]
    assert settings["optimizer"]["weight_decay"] == [0.01]
    assert settings["train_data"]["samples"] == 16
    assert json.loads(json.dumps(settings)) == settings

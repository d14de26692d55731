"""Settings that a callback changes on the state hold again when the run is resumed, unless the script has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sealed_files import add_record, record_in
from trainer.trainer_parts import At, Net, Seen, build, same, weights

from composerlite import Event, State, Trainer
from composerlite.core import Precision
from composerlite.errors import ConfigError

Script = Callable[[Trainer], object]


class KilledError(Exception):
    """What ends a process in these tests."""


def at(batch: int, action: Callable[[State], object], event: Event = Event.BATCH_END) -> At:
    """Does that when so many batches are done."""
    return At(event, lambda state: action(state) if int(state.timestamp.batch) == batch else None)


def setting(name: str, value: object, batch: int) -> At:
    return at(batch, lambda state: setattr(state, name, value))


def launch(folder: Path, *callbacks: At, cut: int | None = None, script: Script = Trainer.fit, **arguments: Any) -> Any:
    """One launch, which is killed when ``cut`` batches are done; the batches, and the trainer, which is closed."""

    def kill(state: State) -> None:
        raise KilledError

    seen = Seen()
    killed = [] if cut is None else [at(cut, kill, Event.BATCH_START)]
    own: dict[str, Any] = {"save_folder": folder, "save_interval": "1ba", "autoresume": True, "run_name": "run"}
    with build(callbacks=[*callbacks, *killed, seen], dropout=0.5, **{**own, **arguments}) as trainer:
        try:
            script(trainer)
        except KilledError:
            assert cut is not None
    return seen.steps, trainer


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of the warning about changed settings."""
    return [line for record in caplog.records for line in record.getMessage().splitlines() if " now: " in line]


def two_calls(trainer: Trainer) -> None:
    trainer.fit(duration="4ba")
    trainer.fit(duration="8ba", device_train_microbatch_size=4)


def set_between_calls(trainer: Trainer) -> None:
    trainer.fit()
    trainer.state.max_duration = "2ep"
    trainer.fit()


@pytest.mark.parametrize("cut", [8, 11])
@pytest.mark.parametrize(
    ("name", "value", "batch", "script", "end"),
    [
        ("max_duration", "3ep", 3, Trainer.fit, "2ep"),
        ("max_duration", "12ba", 5, Trainer.fit, "3ep"),
        ("max_duration", "13ba", 7, two_calls, None),
        ("max_duration", "12ba", 7, set_between_calls, "5ba"),
        ("device_train_microbatch_size", 2, 3, Trainer.fit, "3ep"),
        ("device_train_microbatch_size", 2, 7, two_calls, "3ep"),
        ("precision", Precision.AMP_BF16, 5, Trainer.fit, "3ep"),
        ("iteration_length", "2ep", 3, Trainer.fit, "3ep"),
    ],
)
def test_what_a_callback_has_set_holds_after_a_resume(
    tmp_path: Path, name: str, value: object, batch: int, script: Script, end: str | None, cut: int
) -> None:
    """In the relaunch nothing sets it that was set before: all is as without the interruption."""
    change = setting(name, value, batch)
    whole, first = launch(tmp_path / "whole", change, script=script, max_duration=end)
    before, _ = launch(tmp_path / "cut", change, cut=cut, script=script, max_duration=end)
    after, second = launch(tmp_path / "cut", *([change] if cut <= batch else []), script=script, max_duration=end)
    assert before + after == whole
    assert same(weights(second), weights(first))
    assert getattr(second.state, name) == getattr(first.state, name)
    assert launch(tmp_path / "cut", script=script, max_duration=end)[0] == []


@pytest.mark.parametrize("cut", [3, 4, 8])
@pytest.mark.parametrize(("frozen", "trained"), [(False, True), (True, False)], ids=["unfreezes", "freezes"])
def test_layers_that_a_callback_freezes_or_unfreezes_are_so_after_a_resume(
    tmp_path: Path, cut: int, frozen: bool, trained: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A script freezes a layer, and a callback unfreezes it after three batches, or the other way round. The log says
    that it is not as in the script."""

    def model() -> Net:
        net = Net(0.5)
        net.layers[0].requires_grad_(frozen)
        return net

    def train(folder: Path, *callbacks: At, cut: int | None = None) -> tuple[Any, Any]:
        torch.manual_seed(7)
        return launch(folder, *callbacks, cut=cut, model=model(), max_duration="2ep")

    change = at(3, lambda state: state.model.get_submodule("layers.0").requires_grad_(trained))
    whole, first = train(tmp_path / "whole", change)
    before, _ = train(tmp_path / "cut", change, cut=cut)
    with caplog.at_level("INFO", logger="composerlite"):
        after, second = train(tmp_path / "cut", change)
    told = [text for text in caplog.messages if "are frozen, as when the checkpoint was saved" in text]
    assert [text.split()[0] for text in told] == ["0" if trained else "2"]
    assert before + after == whole
    assert same(weights(second), weights(first))
    assert [one.requires_grad for one in second.state.model.parameters()] == [trained, trained, True, True]


def test_layers_that_the_script_freezes_are_frozen_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The script that resumes the run freezes what was trained."""
    launch(tmp_path, cut=6)
    model = Net(0.5)
    model.layers[0].requires_grad_(False)
    _, trainer = launch(tmp_path, model=model)
    assert [one.requires_grad for one in trainer.state.model.parameters()] == [False, False, True, True]
    assert said(caplog) == [
        "  the list of frozen parameters was [] in the interrupted run and is ['layers.0.weight', 'layers.0.bias'] "
        "now: it holds from here on; to continue as before, freeze the same ones before the Trainer is built"
    ]


def test_what_was_set_in_a_finished_call_holds_in_the_next(tmp_path: Path) -> None:
    """Killed before the second call has saved anything."""

    def script(trainer: Trainer) -> None:
        trainer.fit(duration="4ba")
        trainer.fit(duration="6ba")

    change = setting("device_train_microbatch_size", 3, 2)
    whole, first = launch(tmp_path / "whole", change, script=script, max_duration=None)
    for cut in (4, 5):
        before, _ = launch(tmp_path / str(cut), change, cut=cut, script=script, max_duration=None)
        after, second = launch(tmp_path / str(cut), script=script, max_duration=None)
        assert before + after == whole
        assert same(weights(second), weights(first))


def test_another_value_of_the_script_holds_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It was given after the callback's. Once only: the next resume compares with it."""
    change = setting("max_duration", "12ba", 3), setting("device_train_microbatch_size", 2, 3)
    launch(tmp_path, *change, cut=6, max_duration="3ep", device_train_microbatch_size=4)
    steps, _ = launch(tmp_path, cut=13, max_duration="4ep", device_train_microbatch_size=1)
    assert [count for count, _ in steps] == list(range(7, 14))
    assert said(caplog) == [
        "  the max_duration, which was given as '3ep' and changed during training, was 12ba in the interrupted run and "
        "is 4ep now: it holds from here on; to continue as before give max_duration='3ep'",
        "  the device_train_microbatch_size was 2 in the interrupted run and is 1 now: it holds from here on; to "
        "continue as before give device_train_microbatch_size=4",
    ]
    caplog.clear()
    steps, last = launch(tmp_path, max_duration="4ep", device_train_microbatch_size=1)
    assert [count for count, _ in steps] == list(range(14, 21))
    assert (last.state.device_train_microbatch_size, said(caplog)) == (1, [])


def test_a_later_end_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where nobody but the script has set it."""
    launch(tmp_path, max_duration="1ep")
    assert len(launch(tmp_path, max_duration="2ep")[0]) == 5
    assert said(caplog) == []


def test_a_run_that_was_stopped_before_a_changed_end_stays_stopped(tmp_path: Path) -> None:
    """A callback has brought the end nearer, and another stopped the run before it."""
    changes = setting("max_duration", "2ep", 2), at(7, lambda state: state.stop_training())
    assert len(launch(tmp_path, *changes, max_duration="3ep")[0]) == 7
    assert launch(tmp_path, max_duration="3ep")[0] == []


def as_before(folder: Path, name: str) -> Path:
    """A folder with that checkpoint of ``folder`` as one that does not say what the script gave."""
    contents = torch.load(folder / name)
    del contents["state"]["metadata"]["settings"]["run"]
    older = folder.with_name("older")
    older.mkdir()
    torch.save(contents, older / name)
    add_record(older / name, record_in(folder / name))
    return older


def out_of_memory_above(size: int) -> At:
    def check(state: State) -> None:
        if len(state.batch[0]) > size:
            raise torch.OutOfMemoryError("out of memory")

    return At(Event.BEFORE_FORWARD, check)


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("giving", ["constructor", "fit"])
def test_the_size_that_was_found_is_not_looked_for_again(tmp_path: Path, giving: str, older: bool) -> None:
    """Two samples fitted: whatever fits after the resume, whoever was told to find the size."""

    def fit(trainer: Trainer) -> None:
        if giving == "fit":
            trainer.fit(device_train_microbatch_size="auto")
        else:
            trainer.fit()

    given: dict[str, Any] = {"script": fit}
    if giving == "constructor":
        given["device_train_microbatch_size"] = "auto"
    whole, first = launch(tmp_path / "whole", out_of_memory_above(2), **given)
    before, _ = launch(tmp_path / "cut", out_of_memory_above(2), cut=6, **given)
    folder = as_before(tmp_path / "cut", "ep1-ba6-rank0.pt") if older else tmp_path / "cut"
    after, second = launch(folder, **given)
    assert before + after == whole
    assert second.state.device_train_microbatch_size == 2
    assert same(weights(second), weights(first))


def test_a_checkpoint_of_before_resumes_as_it_did(tmp_path: Path) -> None:
    """It does not say what the script gave: the script's values hold."""
    launch(tmp_path / "new", setting("max_duration", "3ep", 3), cut=11)
    folder = as_before(tmp_path / "new", "ep2-ba11-rank0.pt")
    assert launch(folder, max_duration="2ep")[0] == []
    assert len(launch(folder, max_duration="3ep")[0]) == 4


def test_the_end_of_a_finished_call_is_that_of_the_run(tmp_path: Path) -> None:
    """In a relaunch as in one process: the next call without a duration is refused, or has ended."""

    def script(trainer: Trainer) -> None:
        trainer.fit(duration="4ba")
        trainer.fit(duration="2ba")
        with pytest.raises(ConfigError, match="max_duration=6ba has been reached"):
            trainer.fit()

    assert len(launch(tmp_path, script=script, max_duration="4ep")[0]) == 6

    def relaunched(trainer: Trainer) -> None:
        trainer.fit(duration="4ba")
        trainer.fit(duration="2ba")
        trainer.fit()

    steps, trainer = launch(tmp_path, script=relaunched, max_duration="4ep")
    assert (steps, trainer.state.max_duration) == ([], "6ba")

"""A call of ``fit`` that raised is not finished: the next one continues it, and so does a relaunch of the script."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from trainer.trainer_parts import At, Points, Seen, Step, build, loader, same, weights

from composerlite import Event, State, Trainer
from composerlite.checkpoint import Catalog
from composerlite.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

Script = Callable[[Trainer], object]


class HiccupError(RuntimeError):
    """What goes wrong once."""


def raising(error: type[BaseException], batch: int, event: Event = Event.BEFORE_FORWARD) -> At:
    """Raises ``error`` the first time that so many batches are done."""
    left = [error]

    def action(state: State) -> None:
        if int(state.timestamp.batch) == batch and left:
            raise left.pop()

    return At(event, action)


def launch(script: Script, folder: Path, *callbacks: At, cut: int | None = None, **arguments: Any) -> Any:
    """One launch, which is killed after ``cut`` batches; the steps that it trained and the trainer, which is closed."""
    seen = Seen()
    killed = [] if cut is None else [raising(KeyboardInterrupt, cut, Event.BATCH_START)]
    own: dict[str, Any] = {"save_folder": folder, "save_interval": "1ba", "autoresume": True, "run_name": "run"}
    own["save_overwrite"] = True  # by calls that reset the clock
    with build(callbacks=[*callbacks, *killed, seen], dropout=0.5, **{**own, **arguments}) as trainer:
        if cut is None:
            script(trainer)
        else:
            with pytest.raises(KeyboardInterrupt):
                script(trainer)
    return seen.steps, trainer


def retrying(**arguments: Any) -> Script:
    """Calls ``fit`` until it returns, as is usual where a machine may have hiccups."""

    def script(trainer: Trainer) -> None:
        for _ in range(3):
            try:
                return trainer.fit(**arguments)
            except HiccupError:
                pass
        raise AssertionError

    return script


def plain() -> Any:
    return loader()


def saving_itself() -> Any:
    torch.manual_seed(1)  # it draws when it is built
    return StatefulDataLoader(Points(), batch_size=4, shuffle=True)


def check(tmp_path: Path, script: Script, hiccup: int, **arguments: Any) -> list[Step]:
    """Kill the script after its hiccup, and launch it again: batches and weights as without the kill."""
    data = arguments.pop("data", plain)
    whole, first = launch(
        script, tmp_path / "whole", raising(HiccupError, hiccup), train_dataloader=data(), **arguments
    )
    for cut in range(hiccup + 1, len(whole), 2):
        folder = tmp_path / str(cut)
        before, _ = launch(script, folder, raising(HiccupError, hiccup), cut=cut, train_dataloader=data(), **arguments)
        after, second = launch(script, folder, train_dataloader=data(), **arguments)
        assert before + after == whole, f"killed after batch {cut}"
        assert same(weights(second), weights(first)), f"killed after batch {cut}"
    return whole


@pytest.mark.parametrize("data", [plain, saving_itself])
@pytest.mark.parametrize("hiccup", [0, 3, 5])
def test_a_run_that_retried_a_call_is_resumed_in_it(tmp_path: Path, hiccup: int, data: Callable[[], Any]) -> None:
    """At the beginning, within an epoch and between two."""
    steps = check(tmp_path, retrying(), hiccup, data=data)
    assert [count for count, _ in steps] == list(range(1, 11))


def test_the_length_of_a_call_counts_from_where_it_began(tmp_path: Path) -> None:
    """Before it raised, and before the run was killed; calls before it are finished."""

    def script(trainer: Trainer) -> None:
        trainer.fit(duration="2ba")
        retrying(duration="6ba")(trainer)

    assert len(check(tmp_path, script, 4, max_duration=None)) == 8


def test_the_clock_is_reset_once(tmp_path: Path) -> None:
    """By the call that was asked to, and not when it is called again."""

    def script(trainer: Trainer) -> None:
        trainer.fit(duration="2ba")
        retrying(duration="6ba", reset_time=True)(trainer)

    steps, _ = launch(script, tmp_path, raising(HiccupError, 3), max_duration=None)
    assert [count for count, _ in steps] == [1, 2, 1, 2, 3, 4, 5, 6]
    assert launch(script, tmp_path, max_duration=None)[0] == []


def test_a_call_that_was_refused_has_not_begun(tmp_path: Path) -> None:
    """The corrected one is the same call; a relaunch of either script continues it."""

    def mistaken(trainer: Trainer) -> None:
        with pytest.raises(ConfigError, match="no duration to train for"):
            trainer.fit()
        trainer.fit(duration="2ep")

    def corrected(trainer: Trainer) -> None:
        trainer.fit(duration="2ep")

    whole, _ = launch(mistaken, tmp_path / "whole", max_duration=None)
    for number, script in enumerate((mistaken, corrected)):
        before, _ = launch(mistaken, tmp_path / str(number), cut=7, max_duration=None)
        after, _ = launch(script, tmp_path / str(number), max_duration=None)
        assert before + after == whole


def test_what_the_refusal_says_to_do_is_done(tmp_path: Path) -> None:
    """A run that has reached its end is refused another call without more time; with ``reset_time`` it trains."""

    def script(trainer: Trainer) -> None:
        trainer.fit()
        with pytest.raises(ConfigError, match=r"has been reached.*reset_time=True"):
            trainer.fit()
        trainer.fit(reset_time=True)

    steps, _ = launch(script, tmp_path, max_duration="3ba")
    assert [count for count, _ in steps] == [1, 2, 3] * 2


def test_a_call_that_failed_in_its_first_batch_has_not_begun(tmp_path: Path) -> None:
    """Nothing was trained: the next call may begin it in its own way."""

    def script(trainer: Trainer) -> None:
        trainer.fit(duration="2ba")
        with pytest.raises(HiccupError):
            trainer.fit(duration="2ba")
        trainer.fit(duration="3ba", reset_time=True)

    steps, _ = launch(script, tmp_path, raising(HiccupError, 2), max_duration=None)
    assert [count for count, _ in steps] == [1, 2, 1, 2, 3]


def test_a_call_that_goes_on_cannot_start_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is refused: checkpoints of the call that raised would be newer. Continued, the log says so."""

    def script(trainer: Trainer) -> None:
        with pytest.raises(HiccupError):
            trainer.fit()
        with pytest.raises(ConfigError, match=r"reset_time=True: this call continues call 1 of fit.*at batch 3"):
            trainer.fit(reset_time=True)
        with pytest.raises(ConfigError, match=r"max_duration=2ba has been reached"):
            trainer.fit(duration="2ba")
        trainer.fit(duration="4ba")

    with caplog.at_level(logging.INFO):
        steps, _ = launch(script, tmp_path, raising(HiccupError, 3))
    assert [count for count, _ in steps] == [1, 2, 3, 4]
    assert "call 1 of fit raised at batch 3: it is continued" in caplog.text


@pytest.mark.parametrize("event", [Event.BATCH_CHECKPOINT, Event.FIT_END])
def test_a_call_that_raised_at_its_very_end_is_ended_by_the_next(tmp_path: Path, event: Event) -> None:
    """It trains on nothing more, and the events of the end come."""
    ends: list[int] = []
    end = At(Event.FIT_END, lambda state: ends.append(int(state.timestamp.batch)))

    def script(trainer: Trainer) -> None:
        retrying(duration="7ba")(trainer)
        trainer.fit(duration="1ba")

    steps, _ = launch(script, tmp_path, raising(HiccupError, 7, event), end)
    assert [count for count, _ in steps] == list(range(1, 9))
    assert ends == [7, 8]
    assert launch(script, tmp_path)[0] == []


def test_other_data_in_the_call_that_continues_begin_at_their_beginning(tmp_path: Path) -> None:
    """As they do in a call of their own. A relaunch that is given them goes on within them."""

    def script(trainer: Trainer) -> None:
        with pytest.raises(HiccupError):
            trainer.fit()
        trainer.fit(train_dataloader=loader(12))

    def corrected(trainer: Trainer) -> None:
        trainer.fit(train_dataloader=loader(12))

    whole, first = launch(script, tmp_path / "whole", raising(HiccupError, 3))
    numbers = [batch[2] for _, batch in whole]
    assert sorted(number for batch in numbers[3:6] for number in batch) == list(range(12))
    before, _ = launch(script, tmp_path / "cut", raising(HiccupError, 3), cut=5)
    after, second = launch(corrected, tmp_path / "cut")
    assert before + after == whole
    assert same(weights(second), weights(first))


def no_room(trainer: Trainer) -> Callable[[], object]:
    """No file may grow from now on; returns what ends that."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def interrupted(trainer: Trainer) -> Callable[[], object]:
    """Ctrl-C comes while a save asks the model for its weights; returns what ends that."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    return trainer.state.model.register_state_dict_pre_hook(interrupt).remove


def nothing_saved(trainer: Trainer) -> Callable[[], object]:
    """Training fails after its last step, before the save; returns what ends that."""
    raise HiccupError


@pytest.mark.parametrize("wrong", [no_room, interrupted, nothing_saved])
@pytest.mark.parametrize("event", [Event.BATCH_END, Event.EPOCH_END])
@pytest.mark.parametrize("is_async", [False, True])
def test_the_end_is_saved_by_the_call_that_ends_what_another_began(
    tmp_path: Path, wrong: Callable[[Trainer], Callable[[], object]], event: Event, is_async: bool
) -> None:
    """The last save failed, or was interrupted, and ``fit`` is called again: the checkpoint of the last batch is there,
    with the weights of the end, and is the last one of the run."""
    ends: list[Callable[[], object]] = []

    def action(state: State) -> None:
        if int(state.timestamp.batch) == 10 and not ends:
            ends.append(lambda: None)
            ends.append(wrong(trainer))

    length = "10ba" if event is Event.BATCH_END else "2ep"
    own: dict[str, Any] = {"save_folder": tmp_path, "save_interval": "3ba", "save_async": is_async}
    with build(callbacks=[At(event, action)], max_duration=length, **own) as trainer:
        with pytest.raises((OSError, KeyboardInterrupt, HiccupError)):
            trainer.fit()
        ends[-1]()
        trainer.fit()
        expected = weights(trainer)
    newest = Catalog(tmp_path).manifests()[-1]
    assert newest.batch == 10
    assert trainer.saved_checkpoints[-1] == str(tmp_path / newest.name)
    with build(max_duration=length, load_path=tmp_path / newest.name) as loaded:
        assert same(weights(loaded), expected)

"""Settings of the constructor that ``fit`` may be given as well: they do there what they do in the constructor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.optim.lr_scheduler import ReduceLROnPlateau
from trainer_parts import At, Seen, build, loader

from composerlite import Evaluator, Event, State, Trainer
from composerlite.errors import ConfigError
from composerlite.optim import LinearScheduler


class HiccupError(Exception):
    """What goes wrong once."""


class KilledError(Exception):
    """What ends a process in these tests."""


class Evaluated:
    """After how many batches which evaluator has begun, and how many batches it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[str | None, int, int]] = []
        self._count = 0

    @property
    def callbacks(self) -> list[At]:
        return [
            At(Event.EVAL_START, lambda _: self._set(0)),
            At(Event.EVAL_BATCH_END, lambda _: self._set(self._count + 1)),
            At(Event.EVAL_END, self._end),
        ]

    def _set(self, count: int) -> None:
        self._count = count

    def _end(self, state: State) -> None:
        self.seen.append((state.dataloader_label, int(state.timestamp.batch), self._count))


def test_fit_says_when_and_how_much_the_constructors_data_are_evaluated_on() -> None:
    """An evaluator that has been told itself is left alone; what is not said again stays."""
    evaluated = Evaluated()
    data: list[Any] = [
        Evaluator(label="plain", dataloader=loader(12)),
        Evaluator(label="own", dataloader=loader(12), eval_interval="4ba", subset_num_batches=1),
    ]
    with build(eval_dataloader=data, callbacks=evaluated.callbacks, max_duration="5ba") as trainer:
        trainer.fit(eval_interval="2ba")
        assert evaluated.seen == [("plain", 2, 3), ("plain", 4, 3), ("own", 4, 1), ("plain", 5, 3), ("own", 5, 1)]
        evaluated.seen.clear()
        trainer.fit(duration="2ba", eval_subset_num_batches=2)
    assert evaluated.seen == [("plain", 6, 2), ("plain", 7, 2), ("own", 7, 1)]


def test_an_interval_that_a_finished_call_was_given_holds_after_a_resume(tmp_path: Path) -> None:
    """As it does in one process."""

    def kill(state: State) -> None:
        if int(state.timestamp.batch) == 7:
            raise KilledError

    def launch(folder: Path, *callbacks: At) -> list[Any]:
        evaluated = Evaluated()
        with build(
            eval_dataloader=loader(12),
            callbacks=[*callbacks, *evaluated.callbacks],
            run_name="run",
            save_folder=folder,
            save_interval="1ba",
            autoresume=True,
            max_duration=None,
        ) as trainer:
            trainer.fit(duration="4ba", eval_interval="2ba", eval_subset_num_batches=1)
            trainer.fit(duration="6ba")
        return evaluated.seen

    whole = launch(tmp_path / "whole")
    with pytest.raises(KilledError):
        launch(tmp_path / "cut", At(Event.BATCH_START, kill))
    assert [batch for _, batch, _ in whole] == [2, 4, 6, 8, 10]
    assert launch(tmp_path / "cut") == whole[3:]


def retried(trainer: Trainer, **arguments: Any) -> None:
    try:
        trainer.fit(**arguments)
    except HiccupError:
        trainer.fit(**arguments)


def scaled(trainer: Trainer) -> None:
    retried(trainer, scale_schedule_ratio=0.5)


def scaled_duration(trainer: Trainer) -> None:
    trainer.fit(duration="2ba")
    retried(trainer, duration="6ba", scale_schedule_ratio=0.5)


def refused_at_first(trainer: Trainer) -> None:
    plateau = ReduceLROnPlateau(trainer.state.optimizers[0])
    with pytest.raises(ConfigError, match="ReduceLROnPlateau follows"):
        trainer.fit(schedulers=plateau, scale_schedule_ratio=0.5)
    retried(trainer, schedulers=LinearScheduler(), scale_schedule_ratio=0.5)


@pytest.mark.parametrize(("script", "last"), [(scaled, 10), (scaled_duration, 5), (refused_at_first, 10)])
def test_a_ratio_scales_the_length_of_the_call_once(tmp_path: Path, script: Any, last: int) -> None:
    """``duration`` or, without it, ``max_duration``; also if the call is refused, retried and resumed."""

    def launch(folder: Path, *errors: tuple[int, type[Exception]]) -> list[int]:
        left = list(errors)

        def fail(state: State) -> None:
            if left and int(state.timestamp.batch) == left[0][0]:
                raise left.pop(0)[1]

        seen = Seen()
        with build(
            callbacks=[At(Event.BATCH_START, fail), seen],
            run_name="run",
            save_folder=folder,
            save_interval="1ba",
            autoresume=True,
            max_duration="4ep",
        ) as trainer:
            if KilledError in [kind for _, kind in errors]:
                with pytest.raises(KilledError):
                    script(trainer)
            else:
                script(trainer)
        return [batch for batch, _ in seen.steps]

    assert launch(tmp_path / "whole") == list(range(1, last + 1))
    assert launch(tmp_path / "cut", (3, HiccupError), (4, KilledError)) == [1, 2, 3, 4]
    assert launch(tmp_path / "cut") == list(range(5, last + 1))
    assert launch(tmp_path / "cut") == []


def test_a_ratio_that_leaves_nothing_is_refused() -> None:
    """Of whatever it scales."""
    with build(max_duration="1ep") as trainer:
        with pytest.raises(ConfigError, match=r"scale_schedule_ratio=0\.1 makes max_duration=1ep zero"):
            trainer.fit(scale_schedule_ratio=0.1)
        with pytest.raises(ConfigError, match=r"scale_schedule_ratio=0\.1 makes duration=2ba zero"):
            trainer.fit(duration="2ba", scale_schedule_ratio=0.1)

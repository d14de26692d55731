"""A run that ends in one of several evaluators: each is run once, with the values of a run that is left alone."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import evaluated_run
import pytest
import torch
from combinations import covering
from forked import run_forked
from small_run import differences

from composerlite.checkpoint import Catalog


def launch(folder: Path, **order: Any) -> tuple[int, list[str]]:
    """Run the program once: its exit code, and a line for each batch and evaluation."""
    done: subprocess.CompletedProcess[str] = run_forked(
        evaluated_run.main, str(folder), json.dumps(order), cwd=Path.cwd()
    )
    assert done.returncode in (0, 143, -signal.SIGKILL), done.stderr
    return done.returncode, done.stdout.splitlines()


def measured(folder: Path) -> dict[str, Any]:
    """What the newest manifest of each batch says was measured."""
    return {str(m.batch): m.run.metrics for m in Catalog(folder).manifests() if int(m.batch) == 8}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the run says that nobody interrupts, by what is varied."""
    known: dict[str, tuple[Path, list[str]]] = {}

    def get(**order: Any) -> tuple[Path, list[str]]:
        key = json.dumps(order, sort_keys=True)
        if key not in known:
            folder = tmp_path_factory.mktemp("whole")
            known[key] = folder, launch(folder, **order)[1]
        return known[key]

    return get


KINDS: dict[str, dict[str, Any]] = {
    "after batches": {},
    "after epochs": {"interval": "1ep", "other": "1ep"},
    "after epochs, each batch saved": {"interval": "1ep", "other": "1ep", "saves": "1ba"},
    "one has its own interval": {"interval": "4ba", "other": "2ba", "saves": "4ba"},
}


INTERRUPTIONS: list[tuple[str, int, dict[str, Any]]] = [
    ("eval_start", 1, {}),
    ("eval_batch_end", 2, {}),
    ("eval_end", 1, {}),
    ("eval_batch_start", 2, {"signal": "SIGKILL", "save": True}),
    ("eval_end", 1, {"signal": "SIGKILL", "save": True}),
    ("eval_batch_end", 1, {"save": True}),
]


@pytest.mark.parametrize(("interruption", "label", "kind"), covering(2, INTERRUPTIONS, ["a", "b", "c"], [*KINDS]))
def test_each_evaluator_is_run_once_wherever_the_run_was_interrupted(
    tmp_path: Path, whole: Any, interruption: tuple[str, int, dict[str, Any]], label: str, kind: str
) -> None:
    """Asked to end in an evaluator, or killed behind a save in it: the resumed run begins with that evaluator, those
    before are not run again, and training and all values are those of the run that was left alone, bit for bit."""
    (event, count, how), varied = interruption, KINDS[kind]
    folder, expected = whole(**varied)
    code, before = launch(tmp_path, at=[event, 8, label, count], **how, **varied)
    assert code in (143, -signal.SIGKILL)
    again, after = launch(tmp_path, **varied)
    assert again == 0
    assert before + after == expected
    parts = [torch.load(where / "final.pt", weights_only=True) for where in (tmp_path, folder)]
    assert differences(*parts) == []
    if varied.get("saves") == "4ba":  # what the first one measured before the end is what the checkpoint is judged by
        assert measured(tmp_path) == measured(folder)


PLACES: dict[str, list[Any]] = {
    "in training": ["batch_end", 6, "train", 1],
    "in an evaluation": ["eval_batch_end", 8, "b", 2],
    "in the last evaluation": ["eval_batch_end", 12, "b", 2],
}


@pytest.mark.parametrize(
    ("place", "duration", "name", "load"),
    covering(2, [*PLACES], ["max_duration", "duration"], ["run", None], ["load_path", "callback"]),
)
def test_a_run_that_goes_on_from_load_path_is_that_which_was_interrupted(
    tmp_path: Path, whole: Any, place: str, duration: str, name: str | None, load: str
) -> None:
    """Whether somebody has named it or not, and whichever way its last checkpoint is loaded: the evaluation that it was
    interrupted in is made up for, and ``fit(duration=…)`` ends where it would have ended."""
    by_duration = duration == "duration"
    kind: dict[str, Any] = {"interval": "1ep", "other": "1ep", "load": load, "by_duration": by_duration}
    folder, expected = whole(**kind)
    code, before = launch(tmp_path, at=PLACES[place], name=name, **kind)
    assert code == 143
    again, after = launch(tmp_path, name=name, **kind)
    assert again == 0
    assert before + after == expected
    weights = [torch.load(where / "final.pt", weights_only=True)["model"] for where in (tmp_path, folder)]
    assert differences(*weights) == []


def test_a_run_that_had_ended_is_trained_further_where_nobody_says_that_it_is_the_same(tmp_path: Path) -> None:
    """A checkpoint of a finished ``fit`` is where another one begins: three epochs more, as in one process."""
    kind: dict[str, Any] = {"interval": "1ep", "other": "1ep", "load": "load_path", "by_duration": True, "name": None}
    _, first = launch(tmp_path, **kind)
    _, more = launch(tmp_path, **kind)
    assert len(first) == len(more) == 12 + 9  # batches, evaluations

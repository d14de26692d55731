"""What a run says to somebody who has configured no logging: where from, where to, how it ended. Each line exactly."""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from message_ranks import lines_of_a_rank, train, unconfigured

from composerlite.testing import run_ranks

NOT_KEPT = "  metrics: not kept; a logger such as FileLogger keeps them"


def test_a_run_says_where_it_begins_and_how_it_ends(tmp_path: Path) -> None:
    """In a plain script: nothing to resume from, where checkpoints and metrics go, a line per save, the result."""
    with unconfigured() as said:
        train(save_folder=tmp_path / "{run_name}", autoresume=True)
    lines = said.getvalue().splitlines()

    folder = tmp_path / "fox"
    assert lines[:4] == [
        f"autoresume: run 'fox' has no checkpoint in {folder} yet",
        "run fox: until 1ep, on cpu",
        f"  checkpoints: {folder} (each 1ep)",
        NOT_KEPT,
    ]
    assert re.fullmatch(rf"saved checkpoint {folder}/ep1-ba5-rank0.pt \(\d+\.\d kB in \d+\.\d\d s\)", lines[4])
    result = rf"run fox ended at epoch 1, batch 5: loss \d\.\d+, last checkpoint {folder}/ep1-ba5-rank0.pt"
    assert re.fullmatch(result, lines[5])
    assert len(lines) == 6


def test_a_resumed_run_says_from_where(tmp_path: Path) -> None:
    """What it resumes from, and where in training that is; and that a run is finished, where it is."""
    train(save_folder=tmp_path, autoresume=True)
    with unconfigured() as resumed:
        train(save_folder=tmp_path, autoresume=True, max_duration="2ep")
    with unconfigured() as finished:
        train(save_folder=tmp_path, autoresume=True, max_duration="2ep")

    assert resumed.getvalue().splitlines()[:2] == [
        f"resumed run 'fox' from {tmp_path}/ep1-ba5-rank0.pt: epoch 1, batch 5",
        "run fox: from batch 5 until 2ep, on cpu",
    ]
    assert finished.getvalue().splitlines() == [
        f"resumed run 'fox' from {tmp_path}/ep2-ba10-rank0.pt: epoch 2, batch 10",
        f"run fox had ended before at epoch 2, batch 10: checkpoint {tmp_path}/ep2-ba10-rank0.pt",
    ]


def test_what_was_loaded_and_where_the_run_starts_with_it(tmp_path: Path) -> None:
    """Weights alone are loaded into a run that starts at 0, and a checkpoint continues at its batch: both say so."""
    train(save_folder=tmp_path)
    path = tmp_path / "ep1-ba5-rank0.pt"
    with unconfigured() as weights:
        train(load_path=path, load_weights_only=True)
    with unconfigured() as whole:
        train(load_path=path, max_duration="2ep", load_ignore_keys=["state/callbacks"])

    assert weights.getvalue().splitlines()[:3] == [
        f"loaded the weights of {path}: the run starts at batch 0",
        "run fox: until 1ep, on cpu",
        "  checkpoints: none; with a save_folder there are some",
    ]
    assert f"loaded {path}: the run continues at epoch 1, batch 5" in whole.getvalue().splitlines()


def test_who_does_not_resume_is_told(tmp_path: Path) -> None:
    """Without autoresume a run that saves says that it would not be resumed."""
    with unconfigured() as said:
        train(save_folder=tmp_path)

    assert said.getvalue().splitlines()[1] == (
        f"  checkpoints: {tmp_path} (each 1ep); started again, the run resumes from them with autoresume=True only"
    )


def test_a_save_to_a_bucket_is_one_line(tmp_path: Path, s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is there: that it is on this machine before is no news."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    uri = f"s3://{s3_server.new_bucket()}/run"
    with unconfigured() as said:
        train(save_folder=uri, save_staging_folder=tmp_path)

    (line,) = [line for line in said.getvalue().splitlines() if "ep1-ba5-rank0.pt (" in line]
    assert re.fullmatch(rf"uploaded checkpoint {uri}/ep1-ba5-rank0.pt \(\d+\.\d kB in \d+\.\d\d s\)", line)


def test_a_program_that_configures_logging_decides(tmp_path: Path) -> None:
    """With a handler of the program nothing is written to standard error, before and after the trainer is built."""
    handler = logging.NullHandler()
    with unconfigured() as said:
        logging.root.addHandler(handler)
        train(save_folder=tmp_path)
        assert logging.getLogger("composerlite").level == logging.NOTSET
    with unconfigured() as before:
        train(max_duration="1ba")
        logging.root.addHandler(handler)
        train(max_duration="1ba")

    assert said.getvalue() == ""
    assert before.getvalue().count("run fox ended") == 1


def test_a_level_silences_a_run() -> None:
    """``python_log_level`` is the level of what is written, also without configured logging."""
    with unconfigured() as said:
        train(python_log_level="warning")
    assert said.getvalue() == ""


def test_ranks_speak_with_one_voice(tmp_path: Path) -> None:
    """On two ranks each line comes once, and the loss of the result is that of all ranks."""
    (first, one), (second, other) = run_ranks(functools.partial(lines_of_a_rank, tmp_path), 2)

    assert second == []
    assert first[0] == "run fox: until 1ep, on cpu, 2 ranks"
    assert one == other  # the state, too, has what all ranks have: tests/trainer/test_parallel.py says which
    assert first[-1].startswith(f"run fox ended at epoch 1, batch 5: loss {(one + other) / 2:.4g}, ")
    assert sum("checkpoint" in line for line in first) == 3  # where they go, one save, the last one


def test_a_sharded_save_is_one_line(tmp_path: Path) -> None:
    """Also where all ranks write to one checkpoint."""
    arguments = {"parallelism_config": {"fsdp": {}}}
    (first, _), (second, _) = run_ranks(functools.partial(lines_of_a_rank, tmp_path, **arguments), 2)

    assert second == []
    (line,) = [line for line in first if line.startswith("saved checkpoint")]
    assert re.fullmatch(rf"saved checkpoint {tmp_path}/ep1-ba5 \(\d+\.\d kB in \d+\.\d\d s\)", line)

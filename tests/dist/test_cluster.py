"""Functions run on real ranks, and what becomes of each comes back."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from composerlite import dist
from composerlite.errors import ConfigError
from composerlite.testing import cluster


def _rank_and_size(factor: int) -> tuple[int, int, int]:
    return dist.get_global_rank() * factor, dist.get_world_size(), os.getpid()


def _fail_on_rank_1() -> str:
    if dist.get_global_rank() == 1:
        raise FileNotFoundError(2, "no such file", "weights.pt")
    return "fine"


def _fail_in_a_way_that_does_not_travel() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("only here")


def _die_on_rank_1() -> str:
    if dist.get_global_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "fine"


def _sleep_here_on_rank_1() -> None:
    if dist.get_global_rank() == 1:
        for number in (signal.SIGTERM, signal.SIGUSR1):  # as PreemptionHandler does
            signal.signal(number, lambda *_: None)
        time.sleep(60)


def _return_a_lambda() -> object:
    return lambda: None


def _make_a_group() -> int:
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = torch.tensor(torch.distributed.get_rank())
    torch.distributed.all_reduce(rank)
    torch.distributed.destroy_process_group()
    return int(rank)


def _what_is_around() -> tuple[str, str]:
    return os.environ["OF_THIS_TEST"], str(Path.cwd())


def test_each_rank_returns_its_value() -> None:
    """In the order of ranks; the processes are used again."""
    first = cluster.run_ranks(_rank_and_size, 2, 10)
    again = cluster.run_ranks(_rank_and_size, 3, 10)
    assert [(rank, size) for rank, size, _ in first] == [(0, 2), (10, 2)]
    assert [(rank, size) for rank, size, _ in again] == [(0, 3), (10, 3), (20, 3)]
    assert {pid for *_, pid in first} < {pid for *_, pid in again}


def test_functions_may_make_the_process_group_themselves() -> None:
    """As in a script, one call after the other: no rank finds the addresses of an earlier one."""
    assert [cluster.run_ranks(_make_a_group, 2, dist_timeout=None) for _ in range(6)] == [[1, 1]] * 6


def test_a_rank_is_where_the_test_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With its variables and its current directory."""
    monkeypatch.setenv("OF_THIS_TEST", "seventeen")
    monkeypatch.chdir(tmp_path)
    assert cluster.run_ranks(_what_is_around, 2) == [("seventeen", str(tmp_path))] * 2


def test_what_a_rank_raises_is_raised() -> None:
    """The exception itself, with a note that names the rank."""
    with pytest.raises(ExceptionGroup, match="1 of 2 ranks failed") as caught:
        cluster.run_ranks(_fail_on_rank_1, 2)
    (error,) = caught.value.exceptions
    assert isinstance(error, FileNotFoundError)
    assert error.filename == "weights.pt"
    assert "Raised on rank 1:" in error.__notes__[0]
    assert "_fail_on_rank_1" in error.__notes__[0]


def test_what_becomes_of_each_rank_is_told() -> None:
    """For tests of failures."""
    outcomes = cluster.run_ranks_to_the_end(_fail_on_rank_1, 2)
    assert outcomes[0] == cluster.RankOutcome(0, value="fine")
    assert isinstance(outcomes[1].error, FileNotFoundError)


def test_an_exception_that_does_not_travel_is_told_as_text() -> None:
    """Its last line, and its traceback as a note."""
    error = cluster.run_ranks_to_the_end(_fail_in_a_way_that_does_not_travel, 1)[0].error
    assert "only here" in str(error)


def test_a_value_that_does_not_travel_is_an_error() -> None:
    """And not a hang."""
    error = cluster.run_ranks_to_the_end(_return_a_lambda, 1)[0].error
    assert "lambda" in str(error)


def test_a_killed_rank_is_named_with_its_signal() -> None:
    """The others come to their end."""
    outcomes = cluster.run_ranks_to_the_end(_die_on_rank_1, 2)
    assert outcomes[0].value == "fine"
    assert isinstance(outcomes[1].error, ChildProcessError)
    assert str(outcomes[1].error) == "rank 1 was killed by SIGKILL"


def test_a_hang_is_killed_and_says_where_it_was() -> None:
    """The stacks of the ranks that hang are in the error."""
    with pytest.raises(TimeoutError, match=r"1 of 2 ranks did not finish in 5 s") as caught:
        cluster.run_ranks(_sleep_here_on_rank_1, 2, timeout=5)
    ended, hanging = caught.value.__notes__
    assert ended == "Rank 0 had ended: returned"
    assert "_sleep_here_on_rank_1" in hanging


def test_no_ranks_is_an_error() -> None:
    """The message says what is wanted."""
    with pytest.raises(ConfigError, match="world_size=0: expected 1 or more"):
        cluster.run_ranks(_fail_on_rank_1, 0)

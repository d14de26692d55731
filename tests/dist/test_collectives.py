"""What ranks tell each other arrives; one that fails, is late or dies is named by all the others."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import reserved_port

from composerlite import dist
from composerlite.devices.copier import poll
from composerlite.errors import ConfigError, LateRankError, RankError
from composerlite.testing.cluster import RankOutcome, run_ranks, run_ranks_to_the_end

SHORT = timedelta(seconds=1)


def _errors(outcomes: list[RankOutcome]) -> list[str]:
    """The messages; every rank must have raised a RankError."""
    for outcome in outcomes:
        assert isinstance(outcome.error, RankError), outcome
    return [str(outcome.error) for outcome in outcomes]


def _raise(error: Exception) -> None:
    raise error


def _tell_each_other() -> dict[str, Any]:
    rank = dist.get_global_rank()
    total, largest, told = torch.tensor([rank + 1.0]), torch.tensor([rank]), torch.tensor([rank])
    dist.all_reduce(total)
    dist.all_reduce(largest, "max")
    dist.broadcast(told, src=1)
    box = [rank, "list"]
    dist.broadcast_object_list(box, src=1)
    dist.barrier()
    return {
        "objects": dist.all_gather_object({"rank": rank}),
        "list": box,
        "sum": total.item(),
        "max": largest.item(),
        "tensor": told.item(),
        "tensors": [t.item() for t in dist.all_gather(torch.tensor([rank]))],
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_told_arrives(world_size: int) -> None:
    """The same on every rank, in the order of ranks."""
    ranks = range(world_size)
    expected = {
        "objects": [{"rank": rank} for rank in ranks],
        "list": [1, "list"],
        "sum": sum(rank + 1 for rank in ranks),
        "max": world_size - 1,
        "tensor": 1,
        "tensors": list(ranks),
    }
    assert run_ranks(_tell_each_other, world_size) == [expected] * world_size


def test_one_process_tells_itself() -> None:
    """Without any group, in the same shapes."""
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    dist.broadcast(tensor)
    dist.barrier()
    box = ["list"]
    dist.broadcast_object_list(box)
    assert not dist.is_initialized()
    assert dist.all_gather_object("object") == ["object"]
    assert box == ["list"]
    assert dist.all_gather(tensor)[0] is tensor
    with dist.run_local_rank_zero_first():
        pass


def test_one_process_raises_its_own_exceptions() -> None:
    """There is nobody else to tell, so nothing is wrapped."""
    with pytest.raises(ValueError, match="mine"), dist.get_group().all_or_none("test"):
        _raise(ValueError("mine"))


def test_bad_arguments_name_what_is_allowed() -> None:
    """On every rank, before anything is sent."""
    with pytest.raises(ConfigError, match=r"'MEAN' is not known\. Known: SUM, "):
        dist.all_reduce(torch.ones(1), "MEAN")
    with pytest.raises(ConfigError, match="src=1: expected a rank from 0 to 0"):
        dist.broadcast_object_list([None], src=1)


def _fail_on_rank_1() -> tuple[str, str, list[str]]:
    try:
        with dist.get_group().all_or_none("reading ep1-ba2"):
            if dist.get_global_rank() == 1:
                raise PermissionError(13, "denied", "ep1-ba2")
    except PermissionError as e:
        return str(e), e.__notes__[-1], dist.all_gather_object("still here")
    raise AssertionError("no error")


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_exception_on_one_rank_reaches_all(world_size: int) -> None:
    """All raise the same, with the rank that failed; and then go on together."""
    told = ("[Errno 13] denied: 'ep1-ba2'", "Seen by rank 1.", ["still here"] * world_size)
    assert run_ranks(_fail_on_rank_1, world_size) == [told] * world_size


def _fail_on_two() -> None:
    def write() -> None:
        if dist.get_global_rank() != 1:
            raise ValueError("bad bytes")

    dist.get_group().vote("reading").run(write, list)


def test_ranks_that_fail_alike_are_named_together() -> None:
    """One sentence for each cause, not for each rank."""
    assert _errors(run_ranks_to_the_end(_fail_on_two, 3)) == ["reading: ranks 0, 2 failed: ValueError: bad bytes"] * 3


def _fail_before_the_gather() -> list[int]:
    group = dist.get_group()
    try:
        with group.all_or_none("outer"), group.all_or_none("inner"):
            if group.rank == 1:
                raise ValueError("bad bytes")
            dist.all_gather_object("never")
    except ValueError:
        return dist.all_gather_object(group.rank)
    raise AssertionError("no error")


def test_an_exception_reaches_ranks_that_wait_elsewhere() -> None:
    """In a gather that the failed rank does not come to; blocks around it do not wait a second time."""
    assert run_ranks(_fail_before_the_gather, 3) == [[0, 1, 2]] * 3


def _fail_around_a_block() -> list[int]:
    group = dist.get_group()
    try:
        with group.all_or_none("outermost"), group.all_or_none("outer"):
            if group.rank == 1:
                raise ValueError("bad bytes")
            with group.all_or_none("inner"):
                pass
    except ValueError:
        return dist.all_gather_object(group.rank)
    raise AssertionError("no error")


def test_an_exception_reaches_ranks_that_wait_in_a_block_within() -> None:
    """No rank waits a second time for the rank that failed."""
    assert run_ranks(_fail_around_a_block, 3) == [[0, 1, 2]] * 3


def _gather_a_lock() -> None:
    dist.all_gather_object(threading.Lock() if dist.get_global_rank() == 1 else "fine")


def test_an_object_that_cannot_be_pickled_is_an_error_on_all_ranks() -> None:
    """The others do not wait for data that cannot come."""
    for outcome in run_ranks_to_the_end(_gather_a_lock, 2):
        assert isinstance(outcome.error, TypeError)
        assert str(outcome.error).startswith("cannot pickle")


def _call_different_things() -> None:
    if dist.get_global_rank() == 1:
        dist.barrier("saving")
    else:
        dist.barrier("loading")


def test_ranks_that_do_different_things_are_told_so() -> None:
    """And do not wait for each other."""
    for text in _errors(run_ranks_to_the_end(_call_different_things, 2)):
        assert "'saving'" in text
        assert "'loading'" in text


class _OwnError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def _raise_own_error() -> tuple[type, str]:
    try:
        with dist.get_group().all_or_none("verifying"):
            if dist.get_global_rank() == 1:
                raise _OwnError(1, 2)
    except (RankError, _OwnError) as e:
        return type(e), str(e)
    raise AssertionError("no error")


def test_an_exception_that_cannot_be_rebuilt_comes_as_text() -> None:
    """On the other ranks."""
    text = (RankError, "test_collectives._OwnError: 1 and 2")
    assert run_ranks(_raise_own_error, 3) == [text, (_OwnError, "1 and 2"), text]


def _be_late_on_rank_1(act: Callable[[], object]) -> tuple[list[int], str, list[str]]:
    dist.barrier("the place before")
    control = dist.get_group()
    control.timeout, before = SHORT, control.timeout
    if dist.get_global_rank() == 1:
        time.sleep(2)
    try:
        act()
    except LateRankError as e:
        control.timeout = before
        return list(e.ranks), str(e), dist.all_gather_object("still here")
    raise AssertionError("no error")


def _gather_soon() -> None:
    dist.all_gather_object(1)


def test_a_late_rank_is_named_by_all() -> None:
    """When it comes it raises the same, and they can go on."""
    for ranks, text, gathered in run_ranks(_be_late_on_rank_1, 3, _gather_soon):
        assert ranks == [1]
        assert text == "all_gather_object: rank 1 has not arrived within 1 s."
        assert gathered == ["still here"] * 3


def _be_late_for_all_reduce() -> None:
    dist.barrier("the place before")
    dist.get_group().timeout = SHORT
    if dist.get_global_rank() == 1:
        time.sleep(2.2)
    else:
        dist.all_reduce(torch.ones(2))


def test_a_late_rank_is_named_where_only_tensors_are_sent() -> None:
    """By those who wait for it."""
    zero, one, two = run_ranks_to_the_end(_be_late_for_all_reduce, 3)
    assert one.error is None
    for text in _errors([zero, two]):
        assert text == "all_reduce: rank 1 has not arrived within 2 s."


def _die_on_rank_1(act: Callable[[], object]) -> None:
    dist.barrier("the place before")
    if dist.get_global_rank() == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    act()


def _reduce() -> None:
    dist.all_reduce(torch.ones(2))


def _meet() -> None:
    dist.barrier("the next place", timedelta(seconds=600))


def _wait_for_a_device() -> None:
    poll(lambda: False, 600.0, "the GPU is not done")  # as where NCCL waits for a rank that is gone


@pytest.mark.parametrize("act", [_gather_soon, _reduce, _meet, _wait_for_a_device])
def test_a_killed_rank_is_named(act: Callable[[], object]) -> None:
    """As soon as its connections break: nobody waits until the timeout."""
    start = time.monotonic()
    zero, one, two = run_ranks_to_the_end(_die_on_rank_1, 3, act)
    assert time.monotonic() - start < 40
    assert isinstance(one.error, ChildProcessError)
    for outcome in (zero, two):
        assert isinstance(outcome.error, RankError)
        assert outcome.error.ranks == (1,)


def _leave_on_rank_1() -> None:
    if dist.get_global_rank() == 1:
        error = ValueError("not a number")
        dist.get_group().leave(error)
        raise error
    dist.barrier("the next place", timedelta(seconds=50))


def _exit_on_rank_1() -> None:
    with dist.get_group().all_or_none("the next place"):
        if dist.get_global_rank() == 1:
            raise SystemExit(3)


@pytest.mark.parametrize(("act", "cause"), [(_leave_on_rank_1, "ValueError: not a number"), (_exit_on_rank_1, "3")])
def test_a_rank_that_leaves_says_why(act: Callable[[], None], cause: str) -> None:
    """Those who wait for it do not wait to the end."""
    start = time.monotonic()
    zero, one, two = run_ranks_to_the_end(act, 3)
    assert time.monotonic() - start < 40
    assert isinstance(one.error, ValueError | SystemExit)
    for text in _errors([zero, two]):
        assert text.startswith("the next place: rank 1 failed: ")
        assert text.endswith(cause)


def _go_on_after_a_failure() -> str:
    error = ValueError("not a number")
    if dist.get_global_rank() == 1:
        dist.get_group().leave(error)
    else:
        with pytest.raises(RankError, match="rank 1 failed: ValueError: not a number"):
            dist.barrier("the next place", timedelta(seconds=50))
    dist.get_group().begin_run()
    dist.connect.check_nobody_left("the second run")
    dist.barrier("the second run", timedelta(seconds=50))
    return "went on"


def test_ranks_whose_errors_are_caught_go_on_together() -> None:
    """A second run over the same connection is not ended by what ended the first, nor out of step by it."""
    assert run_ranks(_go_on_after_a_failure, 3) == ["went on"] * 3


def _lose_rank_0(port: int) -> None:
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ["MASTER_PORT"] = str(port)
    dist.initialize_dist("cpu", 30)
    if dist.get_global_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_without_rank_0_there_is_no_store() -> None:
    """Where rank 0 holds it, its death is told at once."""
    with reserved_port() as port:
        _, one = run_ranks_to_the_end(_lose_rank_0, 2, port, dist_timeout=None)
    assert "The process that hosts it, rank 0 or its torchrun agent, has ended" in _errors([one])[0]


def _run_local_rank_zero_first(folder: Path, fail: bool) -> list[str]:
    with dist.run_local_rank_zero_first():
        if dist.get_local_rank() == 0:
            time.sleep(0.3)
            if fail:
                raise OSError("no network")
            (folder / "data").touch()
        return [path.name for path in folder.iterdir()]


def test_local_rank_zero_runs_first(tmp_path: Path) -> None:
    """The others see what it did."""
    assert run_ranks(_run_local_rank_zero_first, 3, tmp_path, False) == [["data"]] * 3


def test_what_local_rank_zero_failed_with_reaches_the_others(tmp_path: Path) -> None:
    """They do not run the block."""
    for outcome in run_ranks_to_the_end(_run_local_rank_zero_first, 3, tmp_path, True):
        assert isinstance(outcome.error, OSError)
        assert str(outcome.error) == "no network"


def _count_keys() -> int:
    def everything() -> int:
        dist.barrier()
        dist.all_gather_object(1)
        dist.all_reduce(torch.ones(1))
        control = dist.get_group()
        dist.get_group().vote("a save").run(int, sum)
        dist.barrier()
        return control.store.num_keys()

    first = everything()
    for _ in range(20):
        last = everything()
    return last - first


def test_keys_of_the_store_are_removed() -> None:
    """A long run leaves no more of them than a short one."""
    assert all(abs(more) < 8 for more in run_ranks(_count_keys, 2))


def test_errors_of_ranks_travel() -> None:
    """From process to process, with the ranks they name."""
    error = pickle.loads(pickle.dumps(LateRankError("late", [1, 2], everywhere=True)))
    assert (str(error), error.ranks, error.everywhere) == ("late", (1, 2), True)

"""Training on many ranks is training on one, only faster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import parallel_ranks
import pytest
import torch
from torch import nn
from trainer_parts import At

from composerlite import Event, Trainer
from composerlite.errors import ConfigError, RankError
from composerlite.testing import run_ranks, run_ranks_to_the_end
from composerlite.trainer.ranks.parallel import _bundles  # pyright: ignore[reportPrivateUsage]
from composerlite.utils import FSDPConfig, ParallelismConfig, TPConfig


@pytest.mark.parametrize("world_size", [2, 4])
def test_many_ranks_train_as_one_process_with_the_whole_batch(world_size: int) -> None:
    """DDP, FSDP2, HSDP and TP, also with accumulated gradients and an uneven last batch, give the weights, counts,
    losses, norms and metrics of one process that shuffles and evaluates in between, whatever weights the other ranks
    began with."""
    expected: dict[Any, dict[str, Any]] = {}
    results = run_ranks(parallel_ranks.train_all, world_size, world_size, dist_timeout=None)
    for name, case in parallel_ranks.CASES[world_size].items():
        algorithm = case.get("algorithm")
        if algorithm not in expected:
            expected[algorithm] = parallel_ranks.train(8, algorithm=algorithm)
        alone = expected[algorithm]
        for result in (ranks[name] for ranks in results):
            assert result["time"] == alone["time"], name
            assert result["measured"] == pytest.approx(alone["measured"]), name
            for tensor, value in alone["weights"].items():
                assert (result["weights"][tensor] - value).abs().max() < 1e-6, (name, tensor)
            assert result["logged"].keys() == alone["logged"].keys()
            for key, values in alone["logged"].items():
                assert result["logged"][key] == pytest.approx(values, abs=1e-5), (name, key)


def test_parameters_are_frozen_and_unfrozen_in_the_middle_of_a_run() -> None:
    """By a callback, with every way to average gradients: the replicas stay the same, and are what one process gets."""
    alone = parallel_ranks.freeze_and_unfreeze()
    for rank in run_ranks(parallel_ranks.freeze_and_unfreeze, 2, dist_timeout=None):
        for strategy, end in rank.items():
            torch.testing.assert_close(end, alone[strategy], msg=lambda text, which=strategy: f"{which}: {text}")


def test_the_losses_that_training_ends_with_are_those_of_all_ranks() -> None:
    """Whoever asks for them, on whichever rank: what one process has with the whole batch."""
    (alone, _) = parallel_ranks.last_losses()
    for rank in run_ranks(parallel_ranks.last_losses, 2):
        for losses in rank:
            assert losses == pytest.approx(alone)


def test_a_closed_trainer_holds_no_connection() -> None:
    """If it did, the process could hang when the trainer is released, after the connection was closed."""
    assert run_ranks(parallel_ranks.close_and_hold, 2, dist_timeout=None, fresh=True) == [[], []]


def test_what_happens_on_one_rank_holds_for_all(tmp_path: Path) -> None:
    """A stop on one rank ends all after the same batch; a loader that ends early ends the epoch for all; ranks that
    run out of memory find one microbatch size, and train as if they had not. They reduce once in a batch."""
    outcomes = run_ranks(parallel_ranks.agree, 2, 1, tmp_path)
    assert outcomes[0] == outcomes[1]
    found = outcomes[0]
    assert found["stopped at batch_end"] == 2  # the flag is sent with the counts of the next batch
    assert found["stopped at batch_checkpoint"] == 2
    assert found["stopped at epoch_end"] == 2
    assert found["short loader"] == (2, 6)
    assert found["stopped at eval_end"] == 1
    assert found["words"] == {"dealt": 1, "own loader": 1, "tokens": 1, "shards": 2}  # shards count microbatches too
    behind, waiting = found["words while saving"]
    assert behind == waiting  # a save that goes on costs none
    assert found["microbatch"] == 2
    assert found["difference"] < 1e-6


def test_what_cannot_be_done_is_refused_on_every_rank() -> None:
    """Another model on a rank, a mesh that does not fit the ranks, options that contradict each other: every rank says
    the same, and the process can build a trainer afterwards."""
    first, second = run_ranks(parallel_ranks.refuse, 2)
    assert first == second
    assert "amp_bf17" in first["one rank"]
    assert "rank 1 has another model than rank 0: 'up.weight' is torch.float32 (16, 4)" in first["model"]
    assert "data_parallel_replicate_degree=3 does not divide the 2 ranks" in first["mesh"]
    assert "Start 4 ranks" in first["product"]
    assert "tensor_parallel_degree=3 does not divide the 2 ranks" in first["tp"]
    assert "layer_plan['upp']: the model has no such module. Did you mean 'up'?" in first["plan"]
    assert "'auto' contradicts parallelism_config" in first["auto"]
    assert "has no 'cpu_ofload'. Did you mean 'cpu_offload'?" in first["key"]


def test_activation_checkpointing_counts_each_batch_once() -> None:
    """Running means and other buffers are as without it, though the backward pass computes blocks again."""
    kept, again = (run_ranks(parallel_ranks.train_counting, 2, how, dist_timeout=None)[0] for how in (False, True))
    assert any(name.endswith("running_mean") for name in kept)
    assert kept.keys() == again.keys()
    assert int(kept["blocks.0.1.num_batches_tracked"]) == 6
    for name, value in kept.items():
        torch.testing.assert_close(again[name], value, msg=name)


@pytest.mark.parametrize("where", ["data", "after_forward", "batch_end"])
def test_an_exception_on_one_rank_is_raised_on_all(where: str) -> None:
    """Whether it loads data, or the others are in their backward pass or at the end of a batch: they raise what the
    rank failed with."""
    began = time.monotonic()
    outcomes = run_ranks_to_the_end(parallel_ranks.fail, 2, where, dist_timeout=20.0)
    assert time.monotonic() - began < 15
    assert isinstance(outcomes[1].error, OSError)
    assert isinstance(outcomes[0].error, RankError)
    assert "rank 1 failed: OSError: the disk of this rank is gone" in str(outcomes[0].error)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"fdsp": {}}, "parallelism_config has no 'fdsp'. Did you mean 'fsdp'?"),
        ({"fsdp": {"state_dict_type": "local"}}, "state_dict_type='local' does not exist"),
        ({"fsdp": {"cpu_offload": "yes"}}, "cpu_offload='yes': expected True or False"),
        ({"fsdp": {"auto_wrap": False, "wrap_classes": ["Linear"]}}, "auto_wrap=False contradicts wrap_classes"),
        ({"fsdp": {"data_parallel_shard_degree": 0}}, "data_parallel_shard_degree=0: expected a number of ranks"),
        ({"tp": {"tensor_parallel_degree": 2}}, "tp: layer_plan={}: expected a dict"),
        ({"fsdp": 3}, "expected a dict"),
    ],
)
def test_a_parallelism_config_that_says_nothing_sensible_is_refused(config: dict[str, Any], problem: str) -> None:
    """In one process too, before anything is connected or built."""
    with pytest.raises(ConfigError) as error:
        parallel_ranks.small(parallelism_config=config)
    assert problem in str(error.value)


def test_degrees_fill_the_ranks() -> None:
    """What is left out of the mesh becomes what is left of the ranks."""
    tp = TPConfig(layer_plan={"up": "colwise"}, tensor_parallel_degree=2)
    assert ParallelismConfig(fsdp=FSDPConfig()).degrees(8) == (1, 8, 1)
    assert ParallelismConfig(fsdp=FSDPConfig(data_parallel_replicate_degree=2)).degrees(8) == (2, 4, 1)
    assert ParallelismConfig(fsdp=FSDPConfig(data_parallel_shard_degree=2)).degrees(8) == (4, 2, 1)
    assert ParallelismConfig(fsdp=FSDPConfig(), tp=tp).degrees(8) == (1, 4, 2)
    with pytest.raises(ConfigError, match="leaves 4 groups of ranks out of 8"):
        ParallelismConfig(tp=tp).degrees(8)


def test_an_unknown_sync_strategy_is_refused() -> None:
    """With the nearest that exists."""
    with pytest.raises(ConfigError, match="Did you mean 'forced_sync'"):
        parallel_ranks.small(ddp_sync_strategy="force_sync")


def test_one_process_does_without_a_process_group() -> None:
    """A run of one process stops at once where it is told to."""
    with parallel_ranks.small(callbacks=[At(Event.BATCH_START, lambda state: state.stop_training())]) as trainer:
        assert isinstance(trainer, Trainer)
        trainer.fit()
        assert int(trainer.state.timestamp.batch) == 1


def test_small_buffers_travel_together() -> None:
    """Forty batch norms are two messages and not 120: the statistics, and the counts. What is large goes by itself."""
    model = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(40))
    buffers = list(model.buffers())
    large, spread = torch.ones(3 << 20), torch.ones(4, 4).T
    bundles = _bundles([*buffers, large, spread])
    assert len(buffers) == 120
    assert [len(bundle) for bundle in bundles] == [80, 40, 1, 1]
    assert {id(tensor) for bundle in bundles for tensor in bundle} == {id(one) for one in [*buffers, large, spread]}

"""What each rank does in the tests of documented promises. Found by name by the processes of ``run_ranks``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed
from checkpoint.sharded_parts import same, small_model, states, trained
from storage.local_store import LocalObjectStore

from composerlite import dist
from composerlite.checkpoint import (
    async_save_model_and_optim_state,
    load_keys,
    load_model_and_optim_state,
    load_state_dict,
    save_model_and_optim_state,
    unshard_checkpoint,
)
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.errors import IncompatibleCheckpointError


def all_of_it(root: Path) -> None:
    """Do on each rank what is documented for several."""
    rank = dist.get_global_rank()
    group = torch.distributed.new_group(backend="gloo")
    model = small_model()
    save_model_and_optim_state(root / "group", model, process_group=group)
    other = small_model(seed=1)
    load_model_and_optim_state(root / "group", other, process_group=group)
    assert same(states(other), states(model))
    with pytest.raises(FileExistsError):
        save_model_and_optim_state(root / "group", model, process_group=group)
    optim = trained(model)
    async_save_model_and_optim_state(
        root / "flat", model, optim, process_group=group, flatten_optimizer_state=True
    ).result(60)
    with pytest.raises(RuntimeError, match="one process"):
        load_keys(root / "one", ["model"])
    with pytest.raises(RuntimeError, match="one process"):
        unshard_checkpoint(root / "one", root / "out")

    wanted = {"model": {"0.weight" if rank == 0 else "nothing": None}}  # what one rank misses stops all
    with pytest.raises(IncompatibleCheckpointError, match="nothing"):
        load_state_dict(root / "one", wanted)

    (root / "bucket").mkdir(exist_ok=True)
    place = ShardedDirectory.in_store(LocalObjectStore(root / "bucket"), "run/c")
    save_model_and_optim_state(place, model, optim, throttle_uploads=True)
    load_model_and_optim_state(root / "bucket" / "run" / "c", other, process_group=group)
    assert same(states(other), states(model))

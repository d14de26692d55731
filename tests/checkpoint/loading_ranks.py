"""What runs on each of several ranks that load a checkpoint together."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.parts import new_state
from checkpoint.tiny_training import CrashError, Record, StopAt, trainer

from composerlite import Trainer, dist
from composerlite.checkpoint import Catalog, load_checkpoint
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.resume import choose
from composerlite.core import State
from composerlite.dist import transfers
from composerlite.errors import RankError


def weights(state: State) -> float:
    """The number that all weights are."""
    (value,) = {float(number) for parameter in state.model.parameters() for number in parameter.flatten()}
    return value


def outcome(act: Callable[[], Any]) -> Any:
    """What ``act`` gives, or what it raises, as text."""
    try:
        return act()
    except Exception as e:  # noqa: BLE001 - it is the outcome
        return f"{type(e).__name__}: {e} {' '.join(getattr(e, '__notes__', []))}"


def load_all_kinds(folder: Path) -> dict[str, Any]:
    """Loads of one file, good and bad, one after the other; then of directories."""
    rank = dist.get_global_rank()
    found: dict[str, Any] = {}
    state = new_state()
    found["generators"] = len(load_checkpoint(folder / "good" / "ba5.pt", state) or ())
    found["value"] = weights(state)
    found["batch"] = int(state.timestamp.batch)
    found["missing"] = outcome(lambda: load_checkpoint(folder / "good" / "none.pt", new_state()))
    found["damaged"] = outcome(lambda: load_checkpoint(folder / "damaged" / "ba5.pt", new_state()))
    found["untrusted"] = outcome(lambda: load_checkpoint(folder / "untrusted.pt", new_state()))
    other = new_state(width=3 if rank == 1 else 2)
    found["other model"] = outcome(lambda: load_checkpoint(folder / "good" / "ba5.pt", other))
    found["file gone"] = outcome(lambda: load_checkpoint(folder / "gone", new_state()))
    return found


def resume(folder: Path) -> dict[str, Any]:
    """The newest checkpoint, in folders where some are bad."""
    found: dict[str, Any] = {
        name: outcome(lambda name=name: choose([RunPlace(Catalog(folder / name))], "run").path)
        for name in ("files", "directories", "none")
    }
    with pytest.MonkeyPatch.context() as patch:  # the process runs other tests after this one
        if dist.get_global_rank() == 1:  # of another machine, which does not see the folder
            patch.setattr(Catalog, "manifest_of", _nothing)
        found["unseen"] = outcome(lambda: choose([RunPlace(Catalog(folder / "unseen"))], "run").path)
    return found


def _nothing(self: Catalog, name: str) -> None:
    return None


def on_nodes_of_their_own(folder: Path) -> dict[str, Any]:
    """Each rank is a node. Paths are relative: ``shared`` is the same on both, ``copies`` differ."""
    rank = dist.get_global_rank()
    os.environ.update({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)})
    dist.initialize_dist("cpu", 30)
    os.chdir(folder / f"node{rank}")
    opened: set[str] = set()
    sys.addaudithook(lambda event, args: opened.add(str(args[0])) if event == "open" else None)
    found: dict[str, Any] = {}
    for name in ("same", "other", "absent"):
        opened.clear()
        state = new_state()
        load_checkpoint(Path(name) / "ba5.pt", state)
        reads = sum(path.endswith("/ba5.pt") for path in opened)
        found[name] = (weights(state), reads > 0)
    return found


def _die(*arguments: Any, **others: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def load_and_die(path: Path, stage: str) -> None:
    """Rank 1 is killed when it comes to ``stage`` of a load, for which all have imported what it takes."""
    state = new_state()
    load_checkpoint(path, state, progress_bar=False)
    dist.barrier()
    object.__setattr__(dist.get_group(), "timeout", timedelta(seconds=3))
    if dist.get_global_rank() == 1 and stage == "compare":
        state.places_for = _die  # type: ignore[method-assign,assignment]
    if dist.get_global_rank() == 1 and stage == "read":
        transfers.batches = _die
    if dist.get_global_rank() == 1 and stage == "exchange":
        transfers._message = _die  # pyright: ignore[reportPrivateUsage]
    if dist.get_global_rank() == 1 and stage == "restore":
        state.load_state_dict = _die  # type: ignore[method-assign,assignment]
    load_checkpoint(path, state, progress_bar=False)


def _run(**arguments: Any) -> Trainer:
    torch.manual_seed(1)
    return trainer(**arguments)


def train_with_an_interruption(folder: Path, config: dict[str, Any] | None) -> dict[str, Any]:
    """A run that is interrupted and goes on by itself, beside one that is not; then one from an explicit path."""
    how: dict[str, Any] = {"parallelism_config": config}
    saving = {**how, "save_interval": "2ba"}
    with _run(save_folder=folder / "whole", **saving) as run:
        run.fit()
    cut = _run(save_folder=folder / "cut", callbacks=[StopAt(5)], **saving)
    with pytest.raises((CrashError, RankError)), cut:
        cut.fit()
    record = Record()
    with _run(save_folder=folder / "cut", autoresume=True, callbacks=[record], **saving) as resumed:
        resumed.fit()
    name = Path(run.saved_checkpoints[1]).name
    with _run(load_path=folder / "whole" / name, **how) as loaded:
        batch = int(loaded.state.timestamp.batch)
    pairs = zip(run.state.model.parameters(), resumed.state.model.parameters(), strict=True)
    return {
        "same": all(
            torch.equal(dist.local_shard(mine).local, dist.local_shard(theirs).local) for mine, theirs in pairs
        ),
        "first": record.batches[0],
        "loaded": batch,
        "from": Path(str(resumed.state.load_path)).name == name,
    }

"""Small states to save, and what to look at afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from composerlite.checkpoint import Catalog, Manifest, rng, save_state_dict
from composerlite.checkpoint.record.manifest import FileRecord
from composerlite.checkpoint.save.job import save
from composerlite.core import Callback, State
from composerlite.storage import StagedFile


class Remember(Callback):
    """A callback whose progress is whatever it was given."""

    def __init__(self, what: Any = None) -> None:
        self.what = what

    def state_dict(self) -> dict[str, Any]:
        return {"what": self.what}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.what = state_dict["what"]


def new_state(
    batch: int = 0, *, run_name: str = "run", width: int = 2, callbacks: Sequence[Callback] = (), value: float = 0.0
) -> State:
    """The state of a run that has done ``batch`` batches; all its weights are ``value``."""
    model = nn.Linear(width, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    state = State(
        model,
        rank_zero_seed=17,
        run_name=run_name,
        device=torch.device("cpu"),
        max_duration="100ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        callbacks=callbacks,
    )
    for _ in range(batch):
        state.timestamp = state.timestamp.to_next_batch(4, 8, 0.5)
    return state


def save_batch(folder: Path, batch: int, **arguments: Any) -> Path:
    """Save a checkpoint ``ba<batch>.pt`` whose weights are all the number of its batch."""
    state = new_state(batch, value=float(batch), run_name=arguments.pop("run_name", "run"))
    how: dict[str, Any] = {"template": "ba{batch}.pt", "latest": "latest.pt", **arguments}
    return save(state, catalog=Catalog(folder), **how)


def save_directory(folder: Path, batch: int, **arguments: Any) -> Path:
    """A directory ``ba<batch>`` of the run ``run``, as a run with many ranks leaves it."""
    path = folder / f"ba{batch}"
    state = new_state(batch, value=float(batch), **arguments)
    save_state_dict(path, {"state": state.state_dict(), "rng": [rng.capture()]})
    manifest_path = folder / ".manifest" / f"{path.name}.json"
    manifest = Manifest.from_json(manifest_path.read_bytes(), "")
    manifest = dataclasses.replace(manifest, run_name="run", timestamp={"batch": batch})
    manifest_path.write_bytes(manifest.to_json())
    return path


def save_archives(folder: Path, value: int) -> None:
    """Two files, as two ranks of DeepSpeed write them."""
    names = ["c-rank0.tar", "c-rank1.tar"]
    catalog = Catalog(folder)
    folder.mkdir(parents=True, exist_ok=True)
    staged = [StagedFile(folder / name) for name in names]
    records: list[FileRecord] = []
    for name, one in zip(names, staged, strict=True):
        one.file.write(content := bytes([value]) * 1000)
        one.flush()
        records.append(FileRecord(name, len(content), xxhash.xxh3_128_hexdigest(content)))
    manifest = Manifest(
        name=names[0],
        kind="deepspeed",
        template="c-rank{rank}.tar",
        run_name="r",
        timestamp={"batch": value},
        files=tuple(records),
    )
    catalog.commit(manifest, {name: one.temporary for name, one in zip(names, staged, strict=True)})
    for one in staged:
        one.leave_behind()
        one.__exit__(None, None, None)


def value_in(contents: dict[str, Any]) -> float:
    """The number that all weights of a checkpoint are; fails if they are not one number."""
    weights = torch.cat([tensor.flatten() for tensor in contents["state"]["model"].values()])
    assert len(set(weights.tolist())) == 1
    return float(weights[0])


def tree(folder: Path) -> dict[str, bytes | str]:
    """Everything below ``folder``: the bytes of files, the targets of links."""
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def temporaries(folder: Path) -> list[str]:
    """What is left of unfinished writing."""
    return [name for name in tree(folder) if ".tmp-" in name]

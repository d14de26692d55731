"""Small states to save, and what to look at afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composerlite.checkpoint import Catalog, Manifest, rng
from composerlite.checkpoint.format.archive import DEEPSPEED, STATES
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.checkpoint.record.record import SavedRun
from composerlite.checkpoint.save.form import FileWriter, Form, SaveRequest
from composerlite.checkpoint.save.save import SaveTask, begin_save, save
from composerlite.checkpoint.save.sharded_writer import ShardWriter, record_of_directory
from composerlite.checkpoint.save.snapshot import StagingMemory
from composerlite.core import Callback, State
from composerlite.dist import Group


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
    run_name, width = arguments.pop("run_name", "run"), arguments.pop("width", 2)
    state = new_state(batch, value=float(batch), run_name=run_name, width=width)
    how: dict[str, Any] = {"template": "ba{batch}.pt", "latest": "latest.pt", **arguments}
    return save(SaveRequest(state=state, catalog=Catalog(folder), **how))


class Saves:
    """Saves of a state, one after the other, as a manager begins them."""

    def __init__(self, staging_bytes: int | None = None) -> None:
        self.staging = StagingMemory(staging_bytes)
        self.last: SaveTask | None = None

    def save(self, request: SaveRequest, how: str = "async") -> SaveTask:
        """Wait for the save before, and begin the next."""
        if self.last is not None:
            self.last.join()
        self.last = begin_save(request, self.staging, how=how)
        return self.last

    def prepare(self, request: SaveRequest) -> None:
        """Get memory ready for such saves."""
        size_bytes = Form(request.state).expected_bytes(request.gathered(request.state.state_dict()))
        assert size_bytes is not None
        self.staging.prepare(size_bytes)

    def prepared(self) -> bool:
        """Wait until memory is ready."""
        return self.staging.wait_until_prepared(60.0)

    def close(self) -> None:
        """Wait for the last save, and give the memory back."""
        if self.last is not None:
            self.last.join()
        self.staging.close()


def save_directory(folder: Path, batch: int, **arguments: Any) -> Path:
    """A directory ``ba<batch>`` of the run ``run``, as a run with many ranks leaves it."""
    path = folder / f"ba{batch}"
    save_run_directory(path, new_state(batch, value=float(batch), **arguments), batch)
    return path


def save_run_directory(path: Path, state: State, batch: int) -> None:
    """Save ``state`` to the directory ``path`` as a checkpoint of the run ``run``."""
    contents = {"state": state.state_dict(), "rng": [rng.capture()]}
    record = replace(record_of_directory(path.name, 1), run=SavedRun(name="run", timestamp={"batch": batch}))
    writer = ShardWriter(lambda: contents, ShardedDirectory.of(path), overwrite=False)
    votes = [Group().vote(f"saving {path.name}")]
    SaveTask(manifest=record, path=path, writer=writer, votes=votes).run()


def save_archives(
    folder: Path, value: int, *, overwrite: bool = True, template: str = "c-rank{rank}.tar", batch: int = 1
) -> Manifest:
    """Two files, as two ranks of DeepSpeed write them."""
    record = Manifest(
        name=template.format(rank=0),
        kind="deepspeed",
        form="archives",
        template=template,
        run=SavedRun(name="run", timestamp={"batch": batch}, world_size=2),
        files=(),
    )
    writers = [
        FileWriter(
            {STATES: TorchImage({"x": torch.full((10,), value)}), f"{DEEPSPEED}/zero.pt": TorchImage({"rank": rank})},
            Catalog(folder),
            name=template.format(rank=rank),
            overwrite=overwrite,
            record=record,
        )
        for rank in (0, 1)
    ]
    manifest = writers[0].commit(record, [writer.write(record) for writer in writers])
    for writer in writers:
        writer.close(may_be_committed=False)
    return manifest


def flip(path: Path, offset: int) -> None:
    """Flip a bit of the byte at ``offset`` in a file; a negative offset counts from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


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

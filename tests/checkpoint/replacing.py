"""Replaces a checkpoint of the same name, and is killed or overtaken at each event: for test_replacing_matrix.py.

An event is whatever python reports to audit hooks about a file of the place, or a request to an object store. Every
attempt has a place of its own and runs in a process of its own; what was found after it is printed as a line of JSON.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from clocks import set_clock
from kill_points import at_event, changes_something, refuse_exchange
from parts import save_archives, save_batch, value_in
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from composerlite import ComposerModel, Trainer
from composerlite.checkpoint import Catalog, Checkpointer, load_state_dict, save_state_dict
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.checkpoint.tools.copying import copy
from composerlite.checkpoint.tools.pointing import place_at, target_at
from composerlite.checkpoint.tools.surveying import survey
from composerlite.storage import FileDigest, open_store, parse_uri

__all__ = ["KINDS", "killed", "overtaken"]

_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "http.client.send")
"""At which a saver or a reader is overtaken."""
_MOST = 400
TEMPORARY = re.compile(r"\.(tmp|saving)-[0-9a-f]{16}")
_IMPORTED = (fully_shard,)  # before processes are forked, so that each need not
ZERO = {"deepspeed_config": {"zero_optimization": {"stage": 1}}, "save_filename": "newest-rank{rank}"}


class Kind(NamedTuple):
    """A way to save.

    Attributes:
        save: the value at the place, in place of what is there if that is so wished.
        value: what a start finds there, that is asked for nothing else.
        own: the directory, below the place, in which files of the user lie beside the parts.
        read: what somebody else finds there meanwhile, if that is looked up otherwise.
    """

    save: Callable[[str, int, bool], None]
    value: Callable[[str], int]
    own: str = ""
    read: Callable[[str], int] | None = None


# ── functions ────────────────────────────────────────────────────────────────────────────────────────────────────────
def save_function(place: str, value: int, overwrite: bool) -> None:
    save_state_dict(f"{place}/c", {"x": torch.full((10,), value)}, save_overwrite=overwrite)


def value_of_function(place: str) -> int:
    assert got(place, ".manifest/c.json"), "it could not be verified"
    state = {"x": torch.zeros(10, dtype=torch.int64)}
    load_state_dict(f"{place}/c", state)
    return _one(state["x"])


def save_step(place: str, value: int, overwrite: bool) -> None:
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, value)
    Checkpointer(save_overwrite=overwrite).save(f"{place}/step1", model, {"value": value})


def value_of_step(place: str) -> int:
    model = nn.Linear(1, 1)
    found = Checkpointer().load(Checkpointer.latest_checkpoint(place), model)
    assert found is not None
    assert found["value"] == _one(model.weight.detach())
    return int(found["value"])


def _one(tensor: torch.Tensor) -> int:
    (value,) = set(tensor.flatten().tolist())
    return int(value)


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Counting(ComposerModel):
    """Its weight is the number of batches that it was trained with."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(4))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.count.sum()

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return -outputs


def _trainer(place: str, until: int, overwrite: bool, save_filename: str = "newest", **arguments: Any) -> Trainer:
    model = Counting()
    return Trainer(
        model=model,
        train_dataloader=DataLoader(TensorDataset(torch.ones(100)), batch_size=1),
        optimizers=torch.optim.SGD(model.parameters(), lr=1.0),
        max_duration=f"{until}ba",
        run_name="run",
        autoresume=True,
        autoresume_timeout=0.2,
        save_folder=place,
        save_filename=save_filename,
        save_latest_filename="latest-rank{rank}",
        save_interval="1ba",
        save_overwrite=overwrite,
        save_async=False,
        progress_bar=False,
        seed=1,
        **arguments,
    )


def _train(place: str, until: int, overwrite: bool, **arguments: Any) -> None:
    _in_a_folder_beside(place)
    with _trainer(place, until, True, **arguments) as trainer:
        trainer.fit()


def _resumed(place: str, **arguments: Any) -> int:
    _in_a_folder_beside(place)
    with _trainer(place, 9, True, **arguments) as trainer:
        batch = int(trainer.state.timestamp.batch)
        count = trainer.state.model.state_dict()["count"]
        assert _one(count.full_tensor() if isinstance(count, DTensor) else count) == batch
        return batch


def _loaded(place: str) -> int:
    """By another run."""
    model = Counting()
    with Trainer(model=model, load_path=f"{place}/newest", load_weights_only=True, progress_bar=False):
        return _one(model.count.detach())


def _in_a_folder_beside(place: str) -> None:
    """Staging of a bucket is below the current folder; each attempt has one of its own."""
    if "://" in place:
        folder = Path(tempfile.gettempdir(), "staging", place.partition("://")[2])
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)


# ── archives ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def save_two_archives(place: str, value: int, _: bool) -> None:
    save_archives(Path(place), value)


def value_of_archives(place: str) -> int:
    """What the next start finds."""
    catalog = Catalog(place)
    catalog.recover()
    (manifest,) = catalog.manifests()
    catalog.verify(manifest)
    return catalog.folder.joinpath("c-rank1.tar").read_bytes()[0]


# ── disks of nodes ───────────────────────────────────────────────────────────────────────────────────────────────────
def save_on_disks(place: str, value: int, overwrite: bool) -> None:
    """What the ranks of two nodes do, in that order."""
    nodes = [ShardedDirectory.on_disk(Path(place, f"node{number}", "c")) for number in (0, 1)]
    claim = nodes[0].claim(overwrite=overwrite)
    nodes[1].join(claim, overwrite=overwrite)
    files: dict[str, FileDigest] = {}
    for number, node in enumerate(nodes):
        name = f"__{number}_0.distcp"
        files[name] = node.write(claim, name, 100, lambda sink: sink.write(bytes([value]) * 100))
    sealed = nodes[0].sealed(b"index", files, {}, {name: number for number, name in enumerate(files)})
    for number, node in enumerate(nodes):
        node.prepare(sealed, number)
    for node in nodes:
        node.commit_part()


def value_on_disks(place: str) -> int:
    """What the next start of both nodes finds."""
    first, second = (Catalog(Path(place, f"node{number}")) for number in (0, 1))
    first.recover()
    second.recover({manifest.name: manifest.identity for manifest in first.manifests()})
    found: set[int] = set()
    for number, catalog in enumerate((first, second)):
        (manifest,) = catalog.manifests()
        catalog.verify(manifest)
        found |= set((catalog.folder / "c" / f"__{number}_0.distcp").read_bytes())
    (value,) = found
    return value


KINDS: dict[str, Kind] = {
    "file": Kind(_train, _resumed, read=_loaded),
    "sharded run": Kind(
        lambda place, value, overwrite: _train(place, value, overwrite, parallelism_config={"fsdp": {}}),
        lambda place: _resumed(place, parallelism_config={"fsdp": {}}),
        "newest",
    ),
    "archive": Kind(
        lambda place, value, overwrite: _train(place, value, overwrite, **ZERO),
        lambda place: _resumed(place, **ZERO),
    ),
    "function": Kind(save_function, value_of_function, "c"),
    "step": Kind(save_step, value_of_step, "step1"),
    "archives": Kind(save_two_archives, value_of_archives),
    "disks": Kind(save_on_disks, value_on_disks, "node0/c"),
}


# ── copies ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def save_one_file(place: str, value: int, overwrite: bool) -> None:
    save_batch(Path(place), value, template="fixed.pt", latest=None, overwrite=overwrite)


def value_of_one_file(place: str) -> int:
    """What the next start finds."""
    catalog = Catalog(place)
    catalog.recover()
    (manifest,) = catalog.manifests()
    catalog.verify(manifest)
    return int(value_in(torch.load(Path(place, manifest.name), weights_only=False)))


def copied(one: Kind) -> Kind:
    """What another kind has saved elsewhere comes by ``cp --overwrite``."""

    def save(place: str, value: int, overwrite: bool) -> None:
        source = Path.cwd() / "sources" / str(value)
        if not source.exists():
            one.save(str(source), value, False)
        with place_at(str(source)) as here, target_at(place) as there:
            for found in survey(here):
                copy(here, found, there, overwrite=overwrite)

    return one._replace(save=save)


KINDS.update(
    {
        "copied file": copied(Kind(save_one_file, value_of_one_file)),
        "copied function": copied(KINDS["function"]),
        "copied step": copied(KINDS["step"]),
    }
)


# ── kills ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def said_by(work: Callable[[], Any]) -> tuple[int, Callable[[], Any]]:
    """Start it in a process of its own: its number, and what waits for its answer: ``None`` if it was killed."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            answer = work()
        except BaseException as e:  # noqa: BLE001 - it is told
            answer = f"{type(e).__name__}: {e}"
        with os.fdopen(writing, "w") as pipe:
            json.dump(answer, pipe)
            pipe.flush()
            os._exit(0)
    os.close(writing)

    def wait() -> Any:
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        return json.loads(text) if text else None

    return child, wait


def alone(work: Callable[[], Any]) -> Any:
    """What it says, in a process of its own."""
    return said_by(work)[1]()


OF_THE_USER = ("config.json", "notes/about.txt")


def put(place: str, directory: str) -> None:
    """Write the user's files."""
    for name in (f"{directory}/{name}" for name in OF_THE_USER):
        if "://" in place:
            with open_store(place) as store:
                store.put_bytes(f"{parse_uri(place)[2]}/{name}", b"{}")
        else:
            Path(place, name).parent.mkdir(exist_ok=True)
            Path(place, name).write_text("{}")


def got(place: str, name: str) -> str | None:
    """What is in a file of the user."""
    try:
        if "://" in place:
            with open_store(place) as store:
                return store.read_range(f"{parse_uri(place)[2]}/{name}", 0, 2).decode()
        return Path(place, name).read_text()
    except FileNotFoundError:
        return None


def begin_at(root: str, begin: Callable[[str], None]) -> Callable[[str], None]:
    """Return what makes the first checkpoint at a place; in a folder, a copy of the one that ``begin`` makes now."""

    def alone_at(place: str) -> None:
        if (error := alone(lambda: begin(place))) is not None:
            raise SystemExit(f"it cannot begin: {error}")

    if "://" in root:
        return alone_at
    alone_at(f"{root}/begun")

    def copied_to(place: str) -> None:
        shutil.copytree(f"{root}/begun", place, symlinks=True)

    return copied_to


def killed(root: str, kind: str, exchange: str, stride: str) -> None:
    """Be killed at each event of a replacing save, look what there is, and save again."""
    torch.set_num_threads(1)
    one = KINDS[kind]
    if exchange == "no exchange":
        refuse_exchange()

    def begin(place: str) -> None:
        """On a machine whose clock is ahead: what replaces it says that it was saved earlier."""
        set_clock(48)
        one.save(place, 1, False)
        if one.own:
            put(place, one.own)

    begun = begin_at(root, begin)
    for number in range(0, _MOST, int(stride)):
        begun(place := f"{root}/{number}")

        def replace(place: str = place, number: int = number) -> str:
            at_event(parse_uri(place)[2], number, lambda _: os.kill(os.getpid(), signal.SIGKILL), changes_something)
            one.save(place, 2, True)
            return "saved"

        survived = alone(replace)
        found = alone(lambda place=place: _found(one, place))  # type: ignore[misc]
        sys.stdout.write(json.dumps({"at": number, **found}) + "\n")
        if survived is not None:
            break
        if "://" not in place:
            shutil.rmtree(place)


def _found(one: Kind, place: str) -> dict[str, Any]:
    """What is there after a kill, what comes of the next save, and what is left then: of the user's files, and over."""
    told: dict[str, Any] = {"left": []}
    for name, look in (("found", lambda: one.value(place)), ("then", lambda: _again(one, place))):
        try:
            told[name] = look()
        except BaseException as e:  # noqa: BLE001 - it is told
            told[name] = f"{type(e).__name__}: {e}"
    told["own"] = [got(place, f"{one.own}/{name}") for name in OF_THE_USER] if one.own else []
    told["left"] = (
        [] if "://" in place else [str(path) for path in Path(place).rglob(".*") if TEMPORARY.search(path.name)]
    )
    return told


def _again(one: Kind, place: str) -> int:
    one.save(place, 3, True)
    return one.value(place)


# ── two at a time ────────────────────────────────────────────────────────────────────────────────────────────────────
def overtaken(root: str, kind: str, what: str, exchange: str = "", stride: str = "1") -> None:
    """Stop at every ``stride``-th event, let another process do the whole of its work, and go on.

    ``what``: "read while it is replaced", "replace while it is read", or "save twice": two that may not replace.
    """
    torch.set_num_threads(1)
    one = KINDS[kind]
    if exchange == "no exchange":
        refuse_exchange()
    begun = begin_at(root, lambda place: one.save(place, 1, False))
    for number in range(0, _MOST, int(stride)):
        place = f"{root}/{number}"

        def read(place: str = place) -> int:
            return (one.read or one.value)(place)

        def replace(place: str = place) -> str:
            one.save(place, 2, True)
            return "saved"

        def create(value: int, place: str = place) -> str:
            one.save(place, value, False)
            return "saved"

        first: Callable[[], Any]
        second: Callable[[], Any]
        if what == "save twice":
            first, second = lambda: create(1), lambda: create(2)
        else:
            begun(place)
            first, second = (replace, read) if what == "read while it is replaced" else (read, replace)
        here, go = os.pipe(), os.pipe()

        def stopped(here: tuple[int, int] = here, go: tuple[int, int] = go, first: Any = first, n: int = number) -> Any:
            def stop(_: str) -> None:
                os.write(here[1], b"s")
                os.read(go[0], 1)

            at_event(parse_uri(place)[2], n, stop, lambda event, _: event in _EVENTS)  # noqa: B023
            answer = first()
            os.write(here[1], b"e")
            return answer

        _, wait = said_by(stopped)
        os.close(here[1])
        came_to_it = os.read(here[0], 1) == b"s"
        answer = alone(second) if came_to_it else None
        os.write(go[1], b"g")
        told = {"at": number, "first": wait(), "second": answer, "found": alone(read)}
        for descriptor in (here[0], *go):
            os.close(descriptor)
        sys.stdout.write(json.dumps(told) + "\n")
        if not came_to_it:
            break
        if "://" not in place:
            shutil.rmtree(place)

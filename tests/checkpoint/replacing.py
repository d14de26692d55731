"""Saves, replaces and deletes checkpoints of every form, killed or overtaken at each step.

A step in a folder is what python reports to audit hooks about a file that is opened to be written, renamed, removed or
linked. A step in a bucket is a request that changes an object. Each attempt has a place of its own and runs in a
process of its own; its outcome is printed as a line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from click.testing import CliRunner
from clocks import set_clock
from kill_points import at_event, changes_something, refuse_new_names
from parts import new_state, save_archives, value_in
from sent_files import publish_files
from storage.local_store import LocalObjectStore
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import Catalog, Checkpointer, load_keys, save_state_dict
from composerlite.checkpoint.format.archive import STATES
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.restore import load_checkpoint, read_checkpoint
from composerlite.checkpoint.load.resume import choose
from composerlite.checkpoint.place import directory
from composerlite.checkpoint.place.commit import delete_checkpoint, garbage
from composerlite.checkpoint.place.directory import SaveHandle, ShardedDirectory
from composerlite.checkpoint.place.place import NewFile, Place, local_copy
from composerlite.checkpoint.record.naming import data_file_id
from composerlite.checkpoint.record.record import Manifest
from composerlite.checkpoint.save.form import SaveRequest
from composerlite.checkpoint.save.save import save as save_of_run
from composerlite.checkpoint.save.sharded_writer import record_of_directory
from composerlite.checkpoint.tools.copying import copy
from composerlite.checkpoint.tools.surveying import place_at, remove, survey
from composerlite.cli.app import app
from composerlite.core import Logger, ParallelismConfig, State
from composerlite.core.parallelism import FSDPConfig
from composerlite.errors import CheckpointNotFoundError
from composerlite.storage import FileDigest
from composerlite.testing import Fault, FaultyStore

__all__ = ["KINDS", "Kind", "killed", "overtaken"]

_URI = "s3://bucket/run"
_READS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink")
"""Events at which a saver or a reader in a folder is overtaken."""
_CHANGES = ("put*", "upload*", "swap*", "delete*", "start_parts", "send", "complete", "abort")
"""Requests that change a bucket."""
_MOST = 200
_ID = re.compile(r"[0-9a-f]{16}")
_NOT_COUNTED = re.compile(r"\.lease|\.symlink$|latest|(?:^|/)\.bucket-|\.deletable")
"""Files that are no part of a checkpoint and are made anew by each run."""


class Kind(NamedTuple):
    """A form of checkpoints.

    Attributes:
        save: saves the value at the place, in place of what is there if so wished.
        value: the value that a start finds there, verified; ``None``: there is no checkpoint.
        delete: deletes the checkpoint.
        start: removes what killed processes have left.
        own: the directory, below the place, in which files of the user lie beside the parts; empty: none is allowed.
        may_be_lost: a replacement that is killed may leave neither the old nor the new one.
        in_buckets: it is saved to buckets, too.
        read: the value that another program finds there meanwhile, if not by ``value``.
    """

    save: Callable[[str, int, bool], None]
    value: Callable[[str], int | None]
    delete: Callable[[str], None]
    start: Callable[[str], None]
    own: str = ""
    may_be_lost: bool = False
    in_buckets: bool = True
    read: Callable[[str], int | None] | None = None


def use_bucket(folder: Path, faults: Sequence[Fault] = ()) -> None:
    """Let every URI mean the bucket whose objects lie in ``folder``, in this process from now on."""
    store = FaultyStore(LocalObjectStore(folder), *faults)
    for module in list(sys.modules.values()):
        if module.__name__.startswith("composerlite") and hasattr(module, "open_store"):
            module.open_store = lambda *_, **__: store  # type: ignore[attr-defined]


def _collect_garbage(place: str) -> None:
    """``composerlite checkpoint gc``."""
    done = CliRunner().invoke(app, ["checkpoint", "gc", place, "--older-than", "0s"])
    assert done.exit_code == 0, (done.output, done.exception)


def _delete(place: str) -> None:
    """Delete the only checkpoint, as retention does."""
    with place_at(place) as here:
        for manifest in Catalog(here).manifests():
            delete_checkpoint(here, manifest)


def _catalogued(place: str, read: Callable[[Place, Manifest], int]) -> int | None:
    """The value in the only checkpoint, which is verified."""
    with place_at(place) as here:
        found = Catalog(here).manifests()
        if not found:
            return None
        (manifest,) = found
        Catalog(here).verify(manifest)
        return read(here, manifest)


def _one(tensor: torch.Tensor) -> int:
    (value,) = set(tensor.flatten().tolist())
    return int(value)


def _save_file(place: str, value: int, overwrite: bool, template: str = "c.pt") -> None:
    """As a run does: a save to the folder, the link to the latest, and the upload."""
    with tempfile.TemporaryDirectory() as staging:
        folder = Path(staging if "://" in place else place)
        state = new_state(1, value=float(value))
        state.lineage = type(state.lineage)(value, str(value))  # else a save of the same moment replaces it unasked
        save_of_run(
            SaveRequest(
                state=state, catalog=Catalog(folder), template=template, latest="latest.pt", overwrite=overwrite
            )
        )
        if "://" in place:
            (manifest,) = Catalog(folder).manifests()
            with place_at(place) as there:
                files = {manifest.name: folder / manifest.name}
                publish_files(Catalog(there), manifest, files, link="run/latest", overwrite=overwrite)


def _value_of_file(place: str, name: str = "c.pt") -> int | None:
    """What a run resumes from."""
    with tempfile.TemporaryDirectory() as staging:
        if "://" not in place:
            found = choose([RunPlace(Catalog(place), name, "latest.pt")], "run").path
            latest = Path(place, "latest.pt")
            if latest.exists():
                value_in(read_checkpoint(latest))
            return None if found is None else int(value_in(read_checkpoint(found)))
        with place_at(place) as there:
            buckets = [RunPlace(Catalog(there), link="run/latest")]
            found = choose([RunPlace(Catalog(staging), name, "latest.pt", buckets)], "run").path
        return None if found is None else int(value_in(read_checkpoint(found)))


def _read_file(place: str) -> int | None:
    """What another run loads."""
    state = new_state(0)
    load_checkpoint(f"{place}/c.pt", state, load_weights_only=True)
    return _one(torch.cat([parameter.detach().flatten() for parameter in state.model.parameters()]))


def _save_archives(place: str, value: int, overwrite: bool) -> None:
    if "://" not in place:
        save_archives(Path(place), value, overwrite=overwrite)
        return
    with tempfile.TemporaryDirectory() as staging, place_at(place) as there:
        manifest = save_archives(Path(staging), value)
        files = {file.path: Path(staging, file.path) for file in manifest.files}
        publish_files(Catalog(there), manifest, files, link="run/latest", overwrite=overwrite)


def _value_of_archives(place: str) -> int | None:
    def read(here: Place, manifest: Manifest) -> int:
        values: set[int] = set()
        for file in manifest.files:
            with local_copy(here, file.path, file.digest) as path, tarfile.open(path) as archive:
                member = archive.extractfile(STATES)
                assert member is not None
                values.add(_one(torch.load(member, weights_only=True)["x"]))
        (value,) = values
        return value

    return _catalogued(place, read)


def _save_function(place: str, value: int, overwrite: bool) -> None:
    save_state_dict(f"{place}/c", {"x": torch.full((10,), value)}, save_overwrite=overwrite)


def _value_of_function(place: str) -> int | None:
    with ShardedDirectory.of(f"{place}/c") as folder:
        try:
            (x,) = load_keys(folder, ["x"])
        except CheckpointNotFoundError:
            return None
        assert folder.record() is not None, "it could not be verified"
        return _one(x)


def _start_function(place: str) -> None:
    """What the next save to the directory does, as if all were older than a day."""
    directory._OLD = timedelta()
    with ShardedDirectory.of(f"{place}/c") as folder:
        folder.sweep()


def _save_step(place: str, value: int, overwrite: bool) -> None:
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, value)
    Checkpointer(save_overwrite=overwrite).save(f"{place}/step1", model, {"value": value})


def _value_of_step(place: str) -> int | None:
    model = nn.Linear(1, 1)
    try:
        found = Checkpointer().load(Checkpointer.latest_checkpoint(place), model)
    except CheckpointNotFoundError:
        return None
    assert found is not None
    assert found["value"] == _one(model.weight.detach())
    return int(found["value"])


def _delete_step(place: str) -> None:
    """As ``prune`` does."""
    with place_at(place) as here:
        for found in survey(here):
            remove(found)


def _sharded_state(value: int) -> State:
    """The state of a run with one rank whose model is sharded; its weights are ``value``."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)))
    return State(
        model,
        rank_zero_seed=17,
        run_name="run",
        device=torch.device("cpu"),
        max_duration="100ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        parallelism=ParallelismConfig(fsdp=FSDPConfig()),
    )


def _started(place: str, state: State) -> tuple[CheckpointSaver, Logger]:
    logger = Logger(state)
    staging: dict[str, Any] = {"staging_folder": f"{Path.cwd()}-staging"} if "://" in place else {}
    saver = CheckpointSaver(place, "c", latest_filename="latest", overwrite=True, save_interval="1ba", **staging)
    saver.init(state, logger)
    saver.after_load(state, logger)
    saver.fit_start(state, logger)
    return saver, logger


def _save_run(place: str, value: int, _: bool) -> None:
    state = _sharded_state(value)
    saver, logger = _started(place, state)
    state.previous_timestamp = state.timestamp
    state.timestamp = state.timestamp.to_next_batch(4, 8, 0.5)
    saver.batch_checkpoint(state, logger)
    saver.fit_end(state, logger)
    saver.close(state, logger)


def _start_run(place: str) -> None:
    """The run is started on a machine that has the folder, or none of its files in a bucket; gc does the rest."""
    state = _sharded_state(0)
    saver, logger = _started(place, state)
    saver.close(state, logger)
    if "://" in place:
        _collect_garbage(place)


def _value_of_run(place: str) -> int | None:
    def read(here: Place, manifest: Manifest) -> int:
        with ShardedDirectory(here, manifest.name) as folder:
            (weight,) = load_keys(folder, ["state.model.weight"])
        return _one(weight)

    return _catalogued(place, read)


def _save_on_disks(place: str, value: int, overwrite: bool) -> None:
    """What the ranks of two nodes do, in that order."""
    nodes = [ShardedDirectory.of(Path(place, f"node{number}", "c")) for number in (0, 1)]
    handle = SaveHandle(overwrite=overwrite)
    for node in nodes:
        node.begin(handle)
    files: dict[str, tuple[FileDigest, int | None]] = {}
    for number, node in enumerate(nodes):
        name = f"__{number}_0{handle.suffix}.distcp"
        digest = node.write(handle, NewFile(name, 100, lambda sink: sink.write(bytes([value]) * 100), 64 << 10))
        files[name] = digest, number
    for node in nodes:
        node.commit(b"index", files, record_of_directory("c", 2))


def _value_on_disks(place: str) -> int | None:
    """What a run finds that resumes on both nodes: a checkpoint that both have."""
    values: set[int | None] = set()
    for number in (0, 1):
        catalog = Catalog(Path(place, f"node{number}"))
        found = catalog.manifests()
        for manifest in found:
            assert manifest.node == number
            catalog.verify(manifest)
            (own,) = [file for file in manifest.here if file.path.endswith(".distcp")]
            values.add((catalog.folder / own.path).read_bytes()[0])
        values |= set() if found else {None}
    return None if None in values else values.pop() if len(values) == 1 else None


def _delete_on_disks(place: str) -> None:
    for number in (0, 1):
        _delete(f"{place}/node{number}")


def _start_on_disks(place: str) -> None:
    """What the start of a run does on both nodes: see ``RunFolder.find_disks``."""
    catalogs = [Catalog(Path(place, f"node{number}")) for number in (0, 1) if Path(place, f"node{number}").is_dir()]
    unnamed: list[list[str]] = []
    for catalog in catalogs:
        here = catalog.place
        here.sweep(timedelta())
        unnamed.append(garbage(here, here.files(), re.compile("c")))
    partial = {data_file_id(path) for paths in unnamed for path in paths}
    for catalog, paths in zip(catalogs, unnamed, strict=True):
        for manifest in catalog.manifests():
            if manifest.id in partial:
                delete_checkpoint(catalog.place, manifest)
        catalog.place.delete(paths, folders=True)


KINDS: dict[str, Kind] = {
    "file": Kind(_save_file, _value_of_file, _delete, _collect_garbage, read=_read_file),
    "compressed file": Kind(
        lambda place, value, overwrite: _save_file(place, value, overwrite, "c.pt.gz"),
        lambda place: _value_of_file(place, "c.pt.gz"),
        _delete,
        _collect_garbage,
    ),
    "function": Kind(_save_function, _value_of_function, _delete, _start_function, "c"),
    "sharded run": Kind(_save_run, _value_of_run, _delete, _start_run, "c"),
    "step": Kind(_save_step, _value_of_step, _delete_step, _collect_garbage, "step1", may_be_lost=True),
    "archives": Kind(_save_archives, _value_of_archives, _delete, _collect_garbage, may_be_lost=True),
    "disks": Kind(
        _save_on_disks,
        _value_on_disks,
        _delete_on_disks,
        _start_on_disks,
        "node0/c",
        may_be_lost=True,
        in_buckets=False,
    ),
}


def _copied(one: Kind) -> Kind:
    """What another kind has saved elsewhere comes by ``cp``."""

    def save(place: str, value: int, overwrite: bool) -> None:
        source = Path.cwd() / "sources" / str(value)
        if not source.exists():
            one.save(str(source), value, False)
        with place_at(str(source)) as here, place_at(place, may_be_new=True) as there:
            for found in survey(here):
                copy(found, there, overwrite=overwrite)

    return one._replace(save=save, start=_collect_garbage)


KINDS.update({f"copied {name}": _copied(KINDS[name]) for name in ("file", "function", "step", "archives")})


def _said_by(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start it in a process of its own: returns what waits for its answer, ``None`` if it was killed."""
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

    return wait


def _alone(work: Callable[[], Any]) -> Any:
    """What it says, in a process of its own."""
    return _said_by(work)()


class Cell:
    """The attempts of one kind in a folder or a bucket.

    Args:
        root: a folder for all attempts.
        kind: name of the kind.
        where: ``'folder'``, ``'bucket'``, or ``'NFS'``: a folder whose kernel gives no file a name that must be free,
            except by a link.
    """

    def __init__(self, root: Path, kind: str, where: str) -> None:
        self.root = root
        self.kind = KINDS[kind]
        self.where = where
        self.is_copied = kind.startswith("copied")

    def place(self, folder: Path) -> str:
        """The place that an attempt in ``folder`` saves to."""
        return _URI if self.where == "bucket" else str(folder)

    def run(self, folder: Path, work: Callable[[str], Any], kill_at: int | None = None) -> Any:
        """What ``work`` says of the place in ``folder``, or ``None``: it was killed before its step ``kill_at``."""

        def act() -> Any:
            faults: list[Fault] = []
            if self.where == "NFS":
                refuse_new_names()
            if kill_at is not None and self.where != "bucket":
                at_event(str(folder), kill_at, lambda _: os.kill(os.getpid(), signal.SIGKILL), changes_something)
            elif kill_at is not None:
                faults = _at_request(kill_at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            if self.where == "bucket":
                use_bucket(folder, faults)
            staging = self.root / f"cwd-{folder.name}"
            staging.mkdir(exist_ok=True)
            os.chdir(staging if self.where == "bucket" else self.root)
            return [work(self.place(folder))]

        return _alone(act)

    def saved(self, folder: Path, value: int, overwrite: bool, kill_at: int | None = None) -> bool:
        """Save; return whether it survived. Errors are raised."""
        return self.done(self.run(folder, lambda place: self.kind.save(place, value, overwrite), kill_at))

    def done(self, told: Any) -> bool:
        """Return whether the process survived that said ``told``; its error is raised."""
        if told is not None and told != [None]:
            raise RuntimeError(told)
        return told is not None

    def started(self, folder: Path, kill_at: int | None = None) -> bool:
        """Start anew; return whether that survived."""
        return self.done(self.run(folder, self.kind.start, kill_at))

    def deleted(self, folder: Path, kill_at: int | None = None) -> bool:
        """Delete; return whether it survived."""
        return self.done(self.run(folder, self.kind.delete, kill_at))

    def value(self, folder: Path) -> Any:
        """The value that is found, ``None``, or an error as text."""
        told = self.run(folder, self.kind.value)
        return told[0] if isinstance(told, list) else told


def _at_request(number: int, act: Callable[[], None]) -> list[Fault]:
    """Do ``act`` once, right before the request ``number`` of this process that changes the bucket."""
    left = [number]

    def count() -> None:
        left[0] -= 1
        if left[0] == -1:
            act()

    return [Fault(verb, times=10**6, error=None, first=count) for verb in _CHANGES]


OF_THE_USER = ("config.json", "notes/about.txt")


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _listing(folder: Path, users: Sequence[str]) -> list[str]:
    """The files of checkpoints, without the ids in their names: those of two saves are there twice."""
    names = (name for name in _files(folder) if name not in users and not _NOT_COUNTED.search(name))
    return sorted(_ID.sub("ID", name) for name in names)


def killed(root: str, kind: str, where: str, operation: str, every: str) -> None:
    """Kill ``operation`` before each step, or ``every`` so many; look at what there is, start again, save again.

    ``operation``: ``'new'``, ``'replace'`` or ``'delete'``. A line of JSON for each kill. Unless ``every`` is 1, only
    the start and the save after the second kill are killed.
    """
    torch.set_num_threads(1)
    cell = Cell(Path(root), kind, where)
    begun, users = _begun(cell, operation)
    before = _listing(begun, users)
    reference = Path(root, "reference")
    shutil.copytree(begun, reference, symlinks=True)
    _operate(cell, reference, operation)
    after = _listing(reference, users)
    for number in range(0, _MOST, int(every)):
        folder = Path(root, f"attempt{number}")
        shutil.copytree(begun, folder, symlinks=True)
        survived = _operate(cell, folder, operation, number)
        copies = {what: Path(root, f"{what}{number}") for what in ("start", "save")}
        for copy_ in copies.values():
            shutil.copytree(folder, copy_, symlinks=True)
        told = {"at": number, "survived": survived, **_after_kill(cell, folder, users, operation)}
        chance = random.Random(f"{kind} {where} {number}")
        told["second"] = []
        for what, copy_ in copies.items() if not survived and int(every) in (1, number) else ():
            kill_at = chance.randrange(2 if what == "start" else 6)
            found = cell.value(copy_)
            again = cell.started(copy_, kill_at) if what == "start" else cell.saved(copy_, 3, True, kill_at)
            told["second"].append(
                {"in": what, "found": found, "killed": not again, **_after_kill(cell, copy_, users, operation)}
            )
        told |= {"before": before, "after": after}
        sys.stdout.write(json.dumps(told) + "\n")
        for used in (folder, *copies.values()):
            shutil.rmtree(used)
        if survived:
            return
    raise SystemExit(f"{kind} is not over after {_MOST} steps")


def _begun(cell: Cell, operation: str) -> tuple[Path, list[str]]:
    """A folder with what is there before the operation, and the names of the files of the user in it."""
    begun = cell.root / "begun"
    begun.mkdir()
    users = ["mine.txt"]
    if operation != "new":

        def save(place: str) -> None:
            set_clock(48)  # a machine whose clock is ahead: what replaces it says that it was saved earlier
            cell.kind.save(place, 1, False)

        cell.done(cell.run(begun, save))
        own = f"{'run/' if cell.where == 'bucket' else ''}{cell.kind.own}"
        users += [f"{own}/{name}" for name in OF_THE_USER if cell.kind.own]
    for name in users:
        (begun / name).parent.mkdir(exist_ok=True)
        (begun / name).write_bytes(name.encode())
    return begun, users


def _operate(cell: Cell, folder: Path, operation: str, kill_at: int | None = None) -> bool:
    if operation == "delete":
        return cell.deleted(folder, kill_at)
    return cell.saved(folder, 2, operation == "replace", kill_at)


def _after_kill(cell: Cell, folder: Path, users: Sequence[str], operation: str) -> dict[str, Any]:
    """What is found, what a start leaves, what comes of the next save, and what that leaves."""
    told: dict[str, Any] = {"found": cell.value(folder)}
    cell.started(folder)
    told |= {"started": cell.value(folder), "left": _listing(folder, users)}
    is_taken = told["started"] is not None or operation != "new"
    try:  # cp does not take files that it left for its own, and is told to replace them
        cell.saved(folder, 3, is_taken or (cell.is_copied and told["left"] != []))
    except RuntimeError as e:
        told["error"] = str(e)
    cell.started(folder)
    told |= {"then": cell.value(folder), "last": _listing(folder, users)}
    files = _files(folder)
    told["users"] = [name for name in users if files.get(name) == name.encode()] == list(users)
    return told


def extra(left: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """Names in ``left`` beyond those that are ``allowed``."""
    return sorted((Counter(left) - Counter(allowed)).elements())


def overtaken(root: str, kind: str, where: str, what: str) -> None:
    """Stop at every step, let another process do the whole of its work, and go on.

    ``what``: "read while it is replaced", "replaced while it is read", "save twice" (two that may not replace), or
    "replace twice".
    """
    torch.set_num_threads(1)
    cell = Cell(Path(root), kind, where)
    begun = Path(root, "begun")
    begun.mkdir()
    if what != "save twice":
        cell.saved(begun, 1, False)
    works: dict[str, Callable[[str], Any]] = {
        "read": cell.kind.read or cell.kind.value,
        **{f"create {value}": lambda place, value=value: cell.kind.save(place, value, False) for value in (2, 3)},
        **{f"replace {value}": lambda place, value=value: cell.kind.save(place, value, True) for value in (2, 3)},
    }
    first, second = {
        "read while it is replaced": ("replace 2", "read"),
        "replaced while it is read": ("read", "replace 2"),
        "save twice": ("create 2", "create 3"),
        "replace twice": ("replace 2", "replace 3"),
    }[what]
    for number in range(_MOST):
        folder = Path(root, f"attempt{number}")
        shutil.copytree(begun, folder, symlinks=True)
        here, go = os.pipe(), os.pipe()

        def stopped(folder: Path = folder, here: Any = here, go: Any = go, number: int = number) -> Any:
            def stop(_: str = "") -> None:
                os.write(here[1], b"s")
                os.read(go[0], 1)

            if cell.where == "bucket":
                use_bucket(folder, [Fault(after=number, error=None, first=stop)])
            else:
                at_event(str(folder), number, stop, lambda event, _: event in _READS)
            os.chdir(cell.root)
            answer = works[first](cell.place(folder))
            os.write(here[1], b"e")
            return [answer]

        wait = _said_by(stopped)
        os.close(here[1])
        came_to_it = os.read(here[0], 1) == b"s"
        answer = cell.run(folder, works[second]) if came_to_it else None
        os.write(go[1], b"g")
        told = {"at": number, "first": wait(), "second": answer, "found": cell.value(folder)}
        for descriptor in (here[0], *go):
            os.close(descriptor)
        sys.stdout.write(json.dumps(told) + "\n")
        shutil.rmtree(folder)
        if not came_to_it:
            return
    raise SystemExit(f"{kind} is not over after {_MOST} steps")

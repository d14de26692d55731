"""A checkpoint is deleted, by retention or by hand, and the process is killed at any step of that."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from kill_points import at_event, attempt, die_at_step, kill_at_every_step
from parts import save_archives, save_batch, save_directory, tree
from replacing import save_on_disks

from composerlite.checkpoint import Catalog, Checkpointer, save_state_dict
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.place.place import Place
from composerlite.checkpoint.tools.surveying import remove, survey
from composerlite.errors import CorruptCheckpointError
from composerlite.storage.stores.local import LocalObjectStore
from composerlite.testing import Fault, FaultyStore


# ── what is deleted, and what the next start does ────────────────────────────────────────────────────────────────────
def save_kinds(folder: Path) -> None:
    """Two of each kind in folders of their own; the older one goes."""
    for batch in (1, 2):
        save_batch(folder / "file", batch, latest=None)
        save_directory(folder / "sharded", batch)
        Checkpointer().save(folder / "step" / f"step{batch}", torch.nn.Linear(1, 1), {"value": batch})
    save_archives(folder / "archives", 1)
    save_state_dict(folder / "archives" / "kept", {"x": torch.ones(3)})
    save_on_disks(str(folder / "disks"), 1, False)
    for number in (0, 1):
        save_state_dict(folder / "disks" / f"node{number}" / "kept", {"x": torch.ones(3)})
    others = (
        "sharded/ba1/config.json",
        "step/step1/notes.txt",
        "step/step1/train/rank7.pt",
        "disks/node0/c/config.json",
    )
    for name in others:
        (folder / name).write_text("mine")


def delete_oldest(place: Place) -> None:
    """As retention does."""
    catalog = Catalog(place)
    catalog.delete(min(catalog.manifests(), key=lambda manifest: manifest.name == "kept" or manifest.batch))


def prune_step(place: Place) -> None:
    """As ``prune`` does."""
    remove(place, next(one for one in survey(place) if one.name == "step1"))


def delete_on_disks(place: Place) -> None:
    """As the first ranks of two nodes do, one after the other."""
    for number in (0, 1):
        catalog = Catalog(place.inside(f"node{number}"))
        for manifest in catalog.manifests():
            if manifest.name == "c":
                catalog.delete(manifest)


def start_on_disks(place: Place) -> None:
    """As the next start does on both: what is not on the first disk any more goes from the other."""
    first, second = (Catalog(place.inside(f"node{number}")) for number in (0, 1))
    first.recover()
    there = {manifest.name: manifest.identity for manifest in first.manifests()}
    second.recover(there)
    for manifest in second.manifests():
        if manifest.name not in there:
            second.delete(manifest)


def save_next_step(place: Place) -> None:
    """The next save in the folder. In a bucket ``gc`` sees to it, which says what it finds."""
    if (folder := place.path_of("")) is not None:
        Checkpointer().save(folder / "step3", torch.nn.Linear(1, 1), {"value": 3})
        return
    left = place.leftovers(timedelta())
    assert {one.what for one in left} <= {"a deletion that did not end"}
    place.sweep(timedelta())


def recover(place: Place) -> None:
    Catalog(place).recover()


KINDS: dict[str, tuple[Callable[[Place], None], Callable[[Place], None]]] = {
    "file": (delete_oldest, recover),
    "sharded": (delete_oldest, recover),
    "archives": (delete_oldest, recover),
    "step": (prune_step, save_next_step),
    "disks": (delete_on_disks, start_on_disks),
}


# ── kills ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def opened(root: Path, where: str, *faults: Fault) -> Place:
    """The folder ``root``, or a bucket whose objects lie in it."""
    if where == "folder":
        return Folder(root)
    return Bucket.of(FaultyStore(LocalObjectStore(root.parent), *faults), root.name)


def seen(root: Path) -> dict[str, bytes | str]:
    """All files but those of the step that was saved since, and the names of folders with something else in them."""
    return {name: data for name, data in tree(root).items() if not name.startswith(("step3/", ".manifest/.kept"))}


def die_at(number: int, root: Path, kind: str, where: str, said: int) -> None:
    """Delete in this process, which is killed before its step or request ``number``."""

    def kill() -> None:
        os.write(said, b"a request")
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "folder":
        die_at_step(number, root, said)
    with opened(root, where, Fault(after=number, error=None, first=kill)) as place:
        KINDS[kind][0](place)


def killed(root: str) -> None:
    """Kill a deletion at every step, start again, and say what is there: before it, and then."""
    torch.set_num_threads(1)
    begun = Path(root, "begun")
    save_kinds(begun)
    for kind, where in CELLS:
        number, ended = 0, False
        while not ended:
            folder = Path(root, f"{kind}-{where}-{number}")
            shutil.copytree(begun / kind, folder)
            before = seen(folder)
            code, how = attempt(
                lambda _: None,
                folder,
                functools.partial(die_at, number, folder, kind, where),
            )
            assert code in (0, -signal.SIGKILL), (number, code, how)
            left, ended = seen(folder), code == 0
            with opened(folder, where) as place:
                KINDS[kind][1](place)
            told = {"at": number, "how": how, "before": [*before], "left": [*left], "then": [*seen(folder)]}
            told["changed"] = [name for name, data in seen(folder).items() if before.get(name) != data]
            sys.stdout.write(json.dumps({"cell": [kind, where], **told}) + "\n")
            number += 1


CELLS = [(kind, where) for kind in KINDS for where in ("folder", "bucket") if (kind, where) != ("disks", "bucket")]


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What was found before and after each next start."""
    root = tmp_path_factory.mktemp("kills")
    done = run_forked(killed, str(root), cwd=root)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("kind", "where"), CELLS)
def test_a_kill_while_one_is_deleted_leaves_no_part_of_it(kind: str, where: str, kills: list[dict[str, Any]]) -> None:
    """After the next start it is there, whole, or nothing of it is; what is kept, and the user's files, always are."""
    found = [told for told in kills if told["cell"] == [kind, where]]
    before, after = set(found[0]["before"]), set(found[-1]["then"])
    assert found[-1]["how"] == ""
    assert after < before
    assert len(before - after) == {"file": 2, "archives": 3, "sharded": 3, "step": 5, "disks": 6}[kind]
    for told in found:
        assert set(told["then"]) in (before, after), told
        assert told["changed"] == [], told
    assert any(set(told["left"]) not in (before, after) for told in found), "no kill was in the middle"


def killed_beside_files_of_others(root: str) -> None:
    """Kill the deletion of a model that was saved alone at every step."""
    torch.set_num_threads(1)
    begun = Path(root, "begun")
    save_state_dict(begun / "model_and_optim", {"x": torch.ones(3)})
    for name in OF_OTHERS:
        (begun / name).parent.mkdir(exist_ok=True)
        (begun / name).write_text("mine")
    kill_at_every_step(Path(root), lambda folder: delete_oldest(Folder(folder)), template=begun)


OF_OTHERS = (".metadata.json", "train/rank0.pt")


def test_a_deletion_of_a_model_alone_leaves_what_is_beside_it(tmp_path: Path) -> None:
    """It is called as that of a step, whose other files have the names of these: they stay, wherever a kill comes."""
    done = run_forked(killed_beside_files_of_others, str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found: list[set[str]] = []
    for line in done.stdout.splitlines():
        recover(Folder(folder := tmp_path / line.partition("\t")[0]))
        found.append(set(tree(folder)))
    assert found[-1] == set(OF_OTHERS)
    assert all(names in (found[0], found[-1]) for names in found)
    assert found[0] > set(OF_OTHERS)
    assert len(found) > 5


# ── two delete the same ──────────────────────────────────────────────────────────────────────────────────────────────
def deletions(folder: Path) -> dict[str, Callable[[], None]]:
    """Those of the older checkpoint: as retention does it, and as the command line does."""
    place = Folder(folder)
    manifest = min(Catalog(place).manifests(), key=lambda manifest: manifest.batch)
    found = next(one for one in survey(place) if one.name == manifest.name)
    return {"retention": lambda: Catalog(place).delete(manifest), "prune": lambda: remove(place, found)}


def deleted_by_two(root: str) -> None:
    """At every event of a deletion another one of the same is done, from its beginning to its end."""
    torch.set_num_threads(1)
    begun = Path(root, "begun")
    save_kinds(begun)
    for kind, first, second in itertools.product(("file", "sharded"), *[("retention", "prune")] * 2):
        number, found = 0, [""]
        while found:
            folder, found, runs = Path(root, "now"), [], [True]
            shutil.copytree(begun / kind, folder)
            ways = deletions(folder)

            def beside(where: str, second: Callable[[], None] = ways[second], found: list[str] = found) -> None:
                found.append(where)
                second()

            at_event(str(folder), number, beside, lambda event, _, runs=runs: bool(runs) and event in EVENTS)
            ways[first]()
            runs.clear()
            sys.stdout.write(json.dumps({"kind": kind, "at": found, "left": sorted(tree(folder))}) + "\n")
            shutil.rmtree(folder)
            number += 1


EVENTS = {"open", "os.listdir", "os.remove", "os.rename", "os.rmdir", "os.scandir", "shutil.rmtree"}


def test_two_that_delete_the_same_checkpoint_at_once_both_succeed(tmp_path: Path) -> None:
    """Retention and ``prune`` do at any time: what the other has deleted already is no error, and nothing else goes."""
    done = run_forked(deleted_by_two, str(tmp_path), cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    for kind in ("file", "sharded"):
        cases = [one["left"] for one in told if one["kind"] == kind]
        assert len(cases) > 10
        assert all(names == cases[-1] for names in cases), cases
        assert {f".manifest/{name}.json" for name in ("ba1.pt", "ba1")}.isdisjoint(cases[-1])


# ── a damaged checkpoint is quarantined ──────────────────────────────────────────────────────────────────────────────
def damage(folder: Path) -> None:
    """A byte of the checkpoint that goes first is another one."""
    catalog = Catalog(folder)
    victim = min(catalog.manifests(), key=lambda manifest: manifest.name == "kept" or manifest.batch)
    path = folder / max(victim.files, key=lambda record: record.size_bytes).path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def quarantine_damaged(folder: Path) -> None:
    """As a resume does with what it has found to be damaged."""
    catalog = Catalog(folder)
    catalog.recover()
    for manifest in catalog.manifests():
        try:
            catalog.verify(manifest)
        except CorruptCheckpointError:
            catalog.quarantine(manifest)


def killed_quarantines(root: str) -> None:
    """Kill a quarantine at every step, start again, and say what is there: before it, in between, and then."""
    torch.set_num_threads(1)
    begun = Path(root, "begun")
    save_kinds(begun)
    for kind in QUARANTINED:
        damage(begun / kind)
        number, ended = 0, False
        while not ended:
            folder = Path(root, f"{kind}-{number}")
            shutil.copytree(begun / kind, folder)
            states = [digests(folder)]
            code, how = attempt(quarantine_damaged, folder, functools.partial(die_at_step, number, folder))
            assert code in (0, -signal.SIGKILL), (number, code, how)
            ended = code == 0
            states.append(digests(folder))
            quarantine_damaged(folder)
            sys.stdout.write(json.dumps({"kind": kind, "how": how, "states": [*states, digests(folder)]}) + "\n")
            number += 1


def digests(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256(str(data).encode()).hexdigest() for name, data in tree(folder).items()}


QUARANTINED = ("file", "sharded", "archives")


def test_a_kill_while_one_is_quarantined_loses_no_file_of_it(tmp_path: Path) -> None:
    """The next start ends it: each file has its new name and the bytes that it had, and the others stay as they are."""
    done = run_forked(killed_quarantines, str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    for kind in QUARANTINED:
        found = [one for one in told if one["kind"] == kind]
        before, _, after = found[-1]["states"]
        assert found[-1]["how"] == ""
        stays = {name: digest for name, digest in before.items() if after.get(name) == digest}
        (record,) = {name for name in before if name.startswith(".manifest/")} - stays.keys()
        moved = sorted(digest for name, digest in before.items() if name not in stays and name != record)
        assert moved
        assert sorted(digest for name, digest in after.items() if name not in stays) == moved
        assert all(".damaged" in name for name in after.keys() - stays.keys())
        for one in found:
            assert one["states"][2] == after, one["how"]
        assert any(one["states"][1] not in (before, after) for one in found), "no kill was in the middle"

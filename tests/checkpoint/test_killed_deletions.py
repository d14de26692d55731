"""A checkpoint is deleted by two at once, or beside files of others, or is quarantined; kills at any step of that."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from click.testing import CliRunner
from forked import run_forked
from kill_points import at_event, attempt, die_at_step, kill_at_every_step
from parts import save_archives, save_batch, save_directory, tree

from composerlite.checkpoint import Catalog, save_state_dict
from composerlite.checkpoint.place.commit import delete_checkpoint, quarantine_checkpoint
from composerlite.checkpoint.place.place import Folder, Place
from composerlite.checkpoint.tools.surveying import remove, survey
from composerlite.cli.app import app
from composerlite.errors import CorruptCheckpointError


# ── what is deleted ──────────────────────────────────────────────────────────────────────────────────────────────────
def save_kinds(folder: Path) -> None:
    """Two of each kind in folders of their own; the older one goes."""
    for batch in (1, 2):
        save_batch(folder / "file", batch, latest=None)
        save_directory(folder / "sharded", batch)
    (folder / "archives").mkdir()
    save_archives(folder / "archives", 1)
    save_state_dict(folder / "archives" / "kept", {"x": torch.ones(3)})
    (folder / "sharded/ba1/config.json").write_text("mine")


def delete_oldest(place: Place) -> None:
    """As retention does."""
    catalog = Catalog(place)
    oldest = min(catalog.manifests(), key=lambda manifest: (manifest.name == "kept", manifest.batch))
    delete_checkpoint(catalog.place, oldest)


# ── kills ────────────────────────────────────────────────────────────────────────────────────────────────────────────
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
    """It is called as that of a step, whose other files have the names of these: they stay, wherever a kill comes, and
    no part of it stays after ``gc``."""
    done = run_forked(killed_beside_files_of_others, str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found: list[set[str]] = []
    for line in done.stdout.splitlines():
        folder = tmp_path / line.partition("\t")[0]
        told = CliRunner().invoke(app, ["checkpoint", "gc", str(folder), "--older-than", "0s"])
        assert told.exit_code == 0, told.output
        found.append(set(tree(folder)))
    assert found[-1] == set(OF_OTHERS)
    assert all(names in (found[0], found[-1]) for names in found)
    assert found[0] > set(OF_OTHERS)
    assert len(found) > 2


# ── two delete the same ──────────────────────────────────────────────────────────────────────────────────────────────
def deletions(folder: Path) -> dict[str, Callable[[], object]]:
    """Those of the older checkpoint: as retention does it, and as the command line does."""
    place = Folder(folder)
    manifest = min(Catalog(place).manifests(), key=lambda manifest: manifest.batch)
    found = next(one for one in survey(place) if one.name == manifest.name)
    return {"retention": lambda: delete_checkpoint(place, manifest), "prune": lambda: remove(found)}


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

            def beside(where: str, second: Callable[[], object] = ways[second], found: list[str] = found) -> None:
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
        assert len(cases) > (4 if kind == "file" else 8)
        assert all(names == cases[-1] for names in cases), cases
        assert not [name for name in cases[-1] if name.startswith("ba1") and name != "ba1/config.json"]


# ── a damaged checkpoint is quarantined ──────────────────────────────────────────────────────────────────────────────
def damage(folder: Path) -> None:
    """A byte of the checkpoint that goes first is another one."""
    catalog = Catalog(folder)
    victim = min(catalog.manifests(), key=lambda manifest: (manifest.name == "kept", manifest.batch))
    path = folder / max(victim.files, key=lambda record: record.size_bytes).path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def quarantine_damaged(folder: Path) -> None:
    """As a resume does with what it has found to be damaged."""
    catalog = Catalog(folder)
    for manifest in catalog.manifests():
        try:
            catalog.verify(manifest)
        except CorruptCheckpointError:
            quarantine_checkpoint(catalog.place, manifest)


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
        moved = sorted(digest for name, digest in before.items() if name not in stays)
        assert moved
        assert sorted(digest for name, digest in after.items() if name not in stays) == moved
        assert all(".damaged" in name for name in after.keys() - stays.keys())
        for one in found:
            assert one["states"][2] == after, one["how"]
        middle = any(one["states"][1] not in (before, after) for one in found)
        assert middle == (kind == "archives"), "a file or a directory gets its other name at one instant"

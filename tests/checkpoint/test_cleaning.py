"""Garbage collection, deletions and archives of ranks."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from click.testing import CliRunner
from forked import run_forked
from kill_points import at_event, attempt, die_at_step
from parts import flip, save_archives, save_batch, save_directory, tree, value_in
from sealed_files import remove_record
from storage.local_store import LocalObjectStore

from composerlite.checkpoint import Catalog, Checkpointer, FileRecord, Manifest, read_checkpoint, save_state_dict
from composerlite.checkpoint.deepspeed.archives import find_archives
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import home_of
from composerlite.checkpoint.place.commit import delete_checkpoint, quarantine_checkpoint
from composerlite.checkpoint.place.place import Folder
from composerlite.checkpoint.record.record import SavedRun, seal
from composerlite.checkpoint.tools.copying import copy
from composerlite.checkpoint.tools.surveying import Pointed, remove, survey
from composerlite.cli.app import app
from composerlite.errors import CorruptCheckpointError
from composerlite.storage import FileDigest, Transfer, open_store

TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}")


def collect(folder: str) -> None:
    """``composerlite checkpoint gc``."""
    app(["checkpoint", "gc", folder], standalone_mode=False)


WRITER = """
import sys
from collections.abc import Callable
from pathlib import Path
from composerlite.checkpoint.place.directory import SaveHandle, ShardedDirectory
from composerlite.storage import StagedFile
from composerlite.storage.disk.files import pinned_file
folder = Path(sys.argv[1])
directory = ShardedDirectory.of(folder / "living")
handle = SaveHandle(overwrite=False)
directory.begin(handle)
names = folder / "notes.txt", folder / "sub" / "living.json"
with pinned_file(folder / "data", folder), StagedFile(names[0]) as staged, StagedFile(names[1]) as other:
    for file in (staged.file, other.file):
        file.write(b"{}")
        file.flush()
    print("ready", flush=True)
    sys.stdin.read()
"""

COLLECT = """
import sys
from composerlite.cli.app import app
app(["checkpoint", "gc", sys.argv[1]], standalone_mode=False)
"""


def left_by_a_writer(folder: Path, *, end: bool, environment: dict[str, str] | None = None) -> list[Path]:
    """The four temporaries of a process that writes, after ``gc``; the process is killed before that, or at the end."""
    (folder / "sub").mkdir(parents=True)
    (folder / "data").write_bytes(b"data")
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        found = [path for path in folder.rglob(".*") if TEMPORARY.search(path.name)]
        if end:
            writer.kill()
            writer.wait(60)
        collect_apart(folder, environment)
        found = [path for path in found if path.exists()]
        writer.kill()
    return found


def collect_apart(folder: Path, environment: dict[str, str] | None) -> None:
    """Run ``gc`` in a process of its own; a new interpreter if it is to load another library."""
    if environment is None:
        done = run_forked(collect, str(folder), cwd=folder)
        assert done.returncode == 0, done.stderr
        return
    command = [sys.executable, "-c", COLLECT, str(folder)]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, **environment})


def test_only_what_is_dead_is_removed(tmp_path: Path) -> None:
    """A process that writes keeps all that it writes to; when it is killed ``gc`` removes all."""
    assert len(left_by_a_writer(tmp_path / "living", end=False)) == 4
    assert left_by_a_writer(tmp_path / "dead", end=True) == []


def test_what_only_looks_like_a_temporary_harms_no_save(tmp_path: Path) -> None:
    """A pipe that nobody opens, a folder, a short name, a file of another user: saves and ``gc`` end, and they stay."""
    folder = tmp_path / "folder"
    (folder / "step1").mkdir(parents=True)
    for place in (folder, folder / "step1"):
        os.mkfifo(place / f".pipe.tmp-{'0' * 16}")
        (place / f".folder.tmp-{'1' * 16}").mkdir()
        (place / f".short.tmp-{'4' * 15}").touch()
    if os.geteuid() == 0:
        other = folder / f".theirs.tmp-{'5' * 16}"
        other.touch()
        os.chown(other, 12345, 12345)
    before = set(folder.rglob("*"))
    save_state_dict(folder / "a", {"x": torch.ones(3)})
    Checkpointer().save(folder / "step1", torch.nn.Linear(1, 1), {})
    assert before <= set(folder.rglob("*"))
    collect(str(folder))
    left = before - set(folder.rglob("*"))
    assert {path.name for path in left} <= {f".theirs.tmp-{'5' * 16}"}, "root may remove that of another user"


NO_LOCKS = """
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int flock(int file, int how) { errno = EOPNOTSUPP; return -1; }
int clock_gettime(clockid_t clock, struct timespec *now) {
    int done = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += atol(getenv("LATER"));
    return done;
}
"""


def test_without_locks_age_tells_what_is_dead(tmp_path: Path) -> None:
    """Where a file system has none: what somebody wrote to lately stays, and what is more than a week old goes."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "without.c").write_text(NO_LOCKS)
    library = tmp_path / "without.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "without.c")], check=True)
    folder = tmp_path / "saves"

    def later(days: float) -> dict[str, str]:
        return {"LD_PRELOAD": str(library), "LATER": str(int(days * 24 * 3600))}

    left = left_by_a_writer(folder, end=True, environment=later(0))
    assert len(left) == 4, "nobody knows that it is dead"
    collect_apart(folder, later(6.9))
    assert [path for path in left if path.exists()] == left
    collect_apart(folder, later(7.1))
    assert [path for path in left if path.exists()] == []


def save_kinds(folder: Path) -> None:
    """Two of each kind in folders of their own; the older one goes."""
    for batch in (1, 2):
        save_batch(folder / "file", batch, latest=None)
        save_directory(folder / "sharded", batch)
    (folder / "archives").mkdir()
    save_archives(folder / "archives", 1)
    save_state_dict(folder / "archives" / "kept", {"x": torch.ones(3)})
    (folder / "sharded/ba1/config.json").write_text("mine")


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


DEAD = "tmp-0123456789abcdef"
PART = "__9_0_0123456789abcdef.distcp"


def said(*arguments: object) -> Any:
    """What a command answers."""
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def sizes(folder: Path) -> dict[str, int]:
    """The files below a folder."""
    return {
        str(path): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()
    }


def a_temporary(folder: Path) -> None:
    (folder / f".ba9.pt.{DEAD}").write_bytes(b"half")


def a_whole_file_without_its_name(folder: Path) -> None:
    (folder / "ba1.pt").rename(folder / f".ba1.pt.{DEAD}")


def a_directory_before_its_commit(folder: Path) -> None:
    save_state_dict(folder / "c", {"x": torch.ones(3)})
    (folder / "c/.metadata").rename(folder / f"c/..metadata.{DEAD}")


def a_directory_in_a_folder_of_names(folder: Path) -> None:
    save_state_dict(folder / "sub/c", {"x": torch.ones(3)})
    (folder / "sub/c/.metadata").unlink()


def a_directory_whose_index_is_damaged(folder: Path) -> None:
    save_state_dict(folder / "c", {"x": torch.ones(3)})
    (folder / "c/.metadata").write_bytes(b"other")


def a_deletion_of_archives(folder: Path) -> None:
    save_archives(folder, 1)
    (manifest,) = (one for one in Catalog(folder).manifests() if one.form == "archives")
    (folder / manifest.name).unlink()


def a_deletion_of_a_step(folder: Path) -> None:
    Checkpointer().save(folder / "step1", torch.nn.Linear(1, 1), {"value": 1})
    (folder / "step1/.metadata.json").unlink()


def a_file_without_a_record(folder: Path) -> None:
    remove_record(folder / "ba1.pt")


def a_part_in_a_checkpoint(folder: Path) -> None:
    save_state_dict(folder / "c", {"x": torch.ones(3)})
    (folder / "c" / PART).write_bytes(b"left")


KINDS: dict[str, Callable[[Path], None]] = {
    plant.__name__.replace("_", " "): plant
    for plant in (
        a_temporary,
        a_whole_file_without_its_name,
        a_directory_before_its_commit,
        a_directory_in_a_folder_of_names,
        a_directory_whose_index_is_damaged,
        a_deletion_of_archives,
        a_deletion_of_a_step,
        a_file_without_a_record,
        a_part_in_a_checkpoint,
    )
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints. Not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    for batch in (1, 2):
        save_batch(folder, batch)
    return folder


@pytest.mark.parametrize("age", ["24h", "0s"])
@pytest.mark.parametrize("kind", KINDS)
def test_gc_does_what_its_dry_run_announces(kind: str, age: str, saved: Path, tmp_path: Path) -> None:
    """What is said to go is gone and nothing else is; the checkpoints are there."""
    folder = tmp_path / "run"
    shutil.copytree(saved, folder, symlinks=True)
    KINDS[kind](folder)
    before = sizes(folder)
    announced = said("gc", folder, "--older-than", age, "--dry-run")
    assert sizes(folder) == before
    done = said("gc", folder, "--older-than", age)
    assert announced | {"dry_run": False} == done
    after = sizes(folder)
    assert [one["uri"] for one in done["removed"] if Path(one["uri"]).exists()] == []
    assert done["freed_bytes"] == sum(before.values()) - sum(after.values())
    assert said("gc", folder, "--older-than", age, "--dry-run")["removed"] == []
    assert value_in(read_checkpoint(folder / "ba2.pt")) == 2


def objects(bucket: str) -> dict[str, int]:
    """The names and sizes of all."""
    with open_store(bucket) as store:
        return {info.name: info.size_bytes for info in store.list_objects("")}


@pytest.mark.parametrize("age", ["24h", "0s"])
def test_gc_of_a_bucket_does_what_its_dry_run_announces(
    age: str, saved: Path, s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, too: a deletion and a save that did not end, a file without a record, a part in a checkpoint."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"s3://{s3_server.new_bucket()}"
    place = f"{bucket}/run"
    said("push", saved, place, "--all")
    for name in ("c", "d"):
        save_state_dict(f"{place}/{name}", {"x": torch.ones(3)})
    with open_store(bucket) as store, Transfer(store) as transfer, Bucket(transfer, "run") as here:
        here.delete(["d/.metadata"])
        here.put("other.pt", b"data")
        here.put(f"c/{PART}", b"left")
    before = objects(bucket)
    announced = said("gc", place, "--older-than", age, "--dry-run")
    assert objects(bucket) == before
    done = said("gc", place, "--older-than", age)
    assert announced | {"dry_run": False} == done
    left = objects(bucket)
    assert done["freed_bytes"] == sum(before.values()) - sum(left.values())
    gone = {f"run/c/{PART}", *(name for name in before if name.startswith("run/d/"))} if age == "0s" else set[str]()
    assert {*before} - {*left} == gone


def test_prune_does_what_its_dry_run_announces(saved: Path, tmp_path: Path) -> None:
    """Beside all that may be left."""
    folder = tmp_path / "run"
    for batch in (1, 2, 3, 4):
        save_batch(folder, batch)
    save_state_dict(folder / "c", {"x": torch.ones(3)})
    for plant in (a_temporary, a_directory_in_a_folder_of_names, a_deletion_of_archives):
        plant(folder)
    before = sizes(folder)
    announced = said("prune", folder, "--keep-last", 1, "--dry-run")
    assert sizes(folder) == before
    done = said("prune", folder, "--keep-last", 1)
    assert announced | {"dry_run": False} == done
    gone = {path for path in before if path not in sizes(folder)}
    assert {one["uri"] for one in done["removed"]} == gone


BODY = b"1234"


def digest(data: bytes) -> FileDigest:
    return FileDigest(len(data), xxhash.xxh3_128_hexdigest(data))


def _checkpoint(folder: Path) -> Path:
    save_batch(folder, 7, template="ba{batch}.tar", latest=None)
    return folder / "ba7.tar"


def _no_record(folder: Path) -> Path:
    (folder / "ba7.tar").write_bytes(b"mine")
    return folder / "ba7.tar"


def _part(folder: Path) -> Path:
    save_archives(folder, 7, template="ba7-rank{rank}.tar")
    return folder / "ba7-rank1.tar"


VICTIMS: dict[str, Callable[[Path], Path]] = {"checkpoint": _checkpoint, "no record": _no_record, "part": _part}


def plant(folder: Path, victim: Path) -> Manifest:
    """Plant ``ba1.tar``, or ``ba1-rank1.tar``, which names ``victim`` as the archive of another rank, with its id."""
    manifests = Catalog(folder).manifests()
    name = victim.name.replace("7", "1")
    template = name.replace("1", "{rank}", 1)
    record = Manifest(
        name=name,
        kind="deepspeed",
        form="archives",
        template=template,
        run=SavedRun(name="run", timestamp={"batch": 1}, world_size=2),
        files=(FileRecord(victim.name, **dataclasses.asdict(digest(victim.read_bytes()))),),
    )
    if manifests:
        record = dataclasses.replace(record, id=manifests[0].id)
    (folder / name).write_bytes(BODY + seal(record, digest(BODY)))
    (planted,) = [one for one in Catalog(folder).manifests() if one.name == name]
    assert [file.path for file in planted.files] == [name, victim.name]
    return planted


@pytest.fixture(params=VICTIMS)
def victim(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file in the folder ``run`` that a planted record is going to name."""
    (tmp_path / "run").mkdir()
    return VICTIMS[request.param](tmp_path / "run")


def test_a_planted_checkpoint_goes_alone(victim: Path) -> None:
    """Retention and ``prune`` delete it, and nothing that is not its own."""
    before = tree(victim.parent)
    planted = plant(victim.parent, victim)
    delete_checkpoint(Catalog(victim.parent).place, planted)
    assert tree(victim.parent) == before


@pytest.mark.parametrize("where", ["folder", "bucket"])
@pytest.mark.parametrize("template", ["ba1-rank{rank}.tar", "rank{rank}/ba1.tar"])
def test_the_archive_of_the_first_rank_stands_for_all(
    template: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads, ``verify`` and ``cp`` that name it find the others, also where each rank has a folder."""
    save_archives(tmp_path / "run", 3, template=template)
    store = LocalObjectStore(tmp_path)
    names = [f"run/{template.format(rank=rank)}" for rank in (0, 1)]
    given = None if where == "folder" else store
    monkeypatch.chdir(tmp_path)
    for name in (names[0], f"run/{template}"):
        archives = find_archives(name, "run", given, argument="load_path")
        assert [str(Path(path).relative_to(tmp_path) if given is None else path) for path in archives.names] == names
    folder, _, last = names[0].rpartition("/")
    place = Folder(Path(folder)) if where == "folder" else Bucket.of(store, folder)
    with place:
        pointed = Pointed(*home_of(place, last), names[0])
        found = pointed.the_one(whole=True)
        assert (found.name, found.state, len(found.files)) == (template.format(rank=0), "committed", 2)
        with Folder(tmp_path / "there") as target:
            assert copy(found, target)
    assert tree(tmp_path / "there") == tree(tmp_path / "run")


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_archives_of_ranks_go_as_a_whole(where: str, tmp_path: Path) -> None:
    """Each says of which save it is. They are one checkpoint in a listing."""
    save_archives(tmp_path / "run", 3)
    catalog = Catalog(tmp_path / "run" if where == "folder" else Bucket.of(LocalObjectStore(tmp_path), "run"))
    with catalog.place as place:
        (found,) = survey(place)
        assert (found.name, found.state, len(found.files)) == ("c-rank0.tar", "committed", 2)
        (manifest,) = catalog.manifests()
        catalog.verify(manifest)
        delete_checkpoint(catalog.place, manifest)
        assert list(place.files()) == []


def test_archives_of_ranks_are_set_aside_as_a_whole(tmp_path: Path) -> None:
    """Also one whose own record is damaged: the run saves the names again."""
    manifest = save_archives(tmp_path, 3)
    flip(tmp_path / "c-rank1.tar", -100)
    quarantine_checkpoint(Folder(tmp_path), manifest)
    assert sorted(tree(tmp_path)) == ["c-rank0.tar.damaged", "c-rank1.tar.damaged"]
    save_archives(tmp_path, 4, overwrite=False)

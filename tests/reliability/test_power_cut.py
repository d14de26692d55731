"""What was not flushed is lost in a power cut; a checkpoint whose save had returned is not.

A run is recorded call by call (``storage_recorder``) and replayed on a model of a disk (``crash_disk``). After every
call the power is cut, in several ways: the folder is made what could be left, and a new run has to get along with it.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from crash_disk import (
    Disk,
    Keep,
    Tree,
    actual,
    any_part,
    bytes_only,
    everything,
    first_part,
    materialise,
    names_only,
    nothing,
)
from recorded_runs import DIRECTORIES, SCENARIOS
from storage_recorder import Call, Kind, compile_recorder, read_log, run_recorded
from twelve_batches import RUN, SAVING, digest

from composerlite.checkpoint import Catalog, Checkpointer, load_keys, read_checkpoint
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.resume import choose
from composerlite.checkpoint.place.catalog import record_in
from composerlite.checkpoint.place.commit import garbage
from composerlite.checkpoint.place.place import Folder
from composerlite.errors import CheckpointNotFoundError

PROGRAM = Path(__file__).with_name("recorded_runs.py")
LARGE = "large"


@dataclass(frozen=True)
class Recording:
    """What a run did to its disk.

    Attributes:
        disk: where it happened, as it was left.
        reference: digests of an uninterrupted run after each batch.
        keeps: how many checkpoints stay; -1 for all.
    """

    home: Path
    disk: Path
    calls: list[Call]
    reference: dict[int, str]
    keeps: int

    def new_disk(self) -> Disk:
        """The disk before the run."""
        return Disk(self.disk, self.home / "before", json.loads((self.home / "inodes").read_text()))


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_recorder(tmp_path_factory.mktemp("recorder"))


def record(recorder: Path, root: Path, mode: str, *scenarios: str) -> Iterator[tuple[str, Recording]]:
    """Run the scenarios and record them. Fails if a call went past the recorder."""
    run_recorded(recorder, PROGRAM, str(root), mode, *scenarios)
    for scenario in scenarios:
        home = root / scenario
        reference = {int(batch): value for batch, value in json.loads((home / "reference").read_text()).items()}
        keeps = 1 if scenario == "one name" else SCENARIOS.get(scenario, {}).get("num_checkpoints_to_keep", -1)
        recording = Recording(home, home / "disk", read_log(home / "log"), reference, keeps)
        disk = recording.new_disk()
        for call in recording.calls:
            disk.do(call)
        assert disk.after(everything) == actual(recording.disk), "the replay does not end in what the run left"
        assert recording.calls[-1].path == "closed"
        yield scenario, recording


def ways(chooser: random.Random, random_ones: int) -> Iterator[tuple[str, Keep]]:
    """What may survive of what was not flushed."""
    yield "nothing", nothing
    yield "everything", everything
    yield "names only", names_only
    yield "bytes only", bytes_only
    for _ in range(random_ones):
        yield "the first part", first_part(chooser)
        yield "any part", any_part(chooser)


@dataclass(frozen=True)
class Cut:
    """A disk after a power cut, and what had been promised before."""

    tree: Tree
    where: str
    promised: tuple[int, ...]


def cuts(recording: Recording, random_ones: int, seed: str) -> Iterator[Cut]:
    """Every disk that is left by a power cut after any call, once."""
    chooser = random.Random(seed)
    disk, promised = recording.new_disk(), tuple[int, ...]()
    seen: set[int] = set()
    for number, call in enumerate(recording.calls):
        disk.do(call)
        if call.kind is Kind.MARK:
            promised = (*promised, int(call.path.split()[-1])) if call.path.startswith("saved") else promised
        for how, keep in ways(chooser, random_ones if disk.unsure else 0):
            tree = disk.after(keep)
            key = hash((promised, frozenset(tree.items())))
            if key not in seen:
                seen.add(key)
                yield Cut(tree, f"cut after call {number}, {call.kind.name} {call.path}: {how} survives", promised)


def check(folder: Path, recording: Recording, cut: Cut) -> int:
    """Fails if a promised checkpoint is lost or a listed one is not whole; the batch that a new run goes on from."""
    kept = cut.promised if recording.keeps == -1 else cut.promised[-recording.keeps :]
    link = folder / "latest.pt"
    if cut.promised:
        assert link.is_symlink(), cut.where
    if link.is_symlink() and (cut.promised or link.exists()):
        contents = read_checkpoint(link)["state"]
        batch = contents["timestamp"]["Timestamp"]["batch"]
        assert batch >= max(cut.promised, default=0), cut.where
        assert digest(contents) == recording.reference[batch], cut.where

    catalog = Catalog(folder)
    catalog.place.sweep(timedelta())
    there = {manifest.batch: manifest for manifest in catalog.manifests()}
    for batch, manifest in there.items():
        catalog.verify(manifest)
        assert digest(read_checkpoint(folder / manifest.name)["state"]) == recording.reference[batch], cut.where
    if recording.keeps == -1:
        assert set(kept) <= set(there), cut.where
    else:  # a newer one, whose save had not returned yet, may have taken the place of an older
        assert len([batch for batch in there if batch >= min(kept, default=0)]) >= len(kept), cut.where
    found = choose([RunPlace(catalog)], RUN).path
    newest = max(there, default=0)
    assert (0 if found is None else Catalog(folder).manifests()[-1].batch) == newest, cut.where
    assert newest >= max(cut.promised, default=0), cut.where
    assert [path.name for path in folder.rglob("*") if ".tmp-" in path.name] == [], cut.where
    return newest


def check_directories(folder: Path, recording: Recording, cut: Cut) -> int:
    """Fails if a promised directory or step is lost, or one is not whole; the newest value of the directory."""
    try:
        (x,) = load_keys(folder / "c", ["x"])
        (value,) = x.unique().tolist()
    except CheckpointNotFoundError:
        value = 0
    promised = len(cut.promised)  # by turns one of the directory and one of a step
    assert value >= (promised + 1) // 2, cut.where
    steps = [step for step, _ in Checkpointer.find_checkpoints(folder)]
    assert set(range(1, promised // 2 + 1)) <= set(steps), cut.where
    for step in steps:
        model = torch.nn.Linear(1, 1)
        assert Checkpointer().load(folder / f"step{step}", model) == {"value": step}, cut.where
        assert model.weight.item() == step, cut.where
    place = Folder(folder)
    place.sweep(timedelta())
    place.delete(garbage(place, place.files(), re.compile(".*")), folders=True)
    record = record_in(place, "c/.metadata")
    assert set(place.files("c")) == {file.path for file in (() if record is None else record.files)}, cut.where
    return value


def check_cuts(
    recording: Recording,
    folder: Path,
    *,
    random_ones: int,
    share: float,
    seed: str,
    check: Callable[[Path, Recording, Cut], int] = check,
) -> Counter[int]:
    """Check every cut, or a random ``share`` of them; how often a run would go on from each batch."""
    chooser = random.Random(seed)
    found: Counter[int] = Counter()
    for number, cut in enumerate(cuts(recording, random_ones, seed)):
        if chooser.random() >= share:
            continue
        after = folder / str(number)
        materialise(cut.tree, after)
        (after / "run").mkdir(exist_ok=True)
        try:
            found[check(after / "run", recording, cut)] += 1
        except Exception as e:
            e.add_note(f"{cut.where}; the folder is {after}; seed {seed!r}")
            raise
        shutil.rmtree(after)
    return found


SMALL = [scenario for scenario in SCENARIOS if scenario != LARGE]


def test_what_was_saved_survives_a_power_cut(recorder: Path, tmp_path: Path) -> None:
    """A sample of the moments and ways; the rest is whole or not seen, and ``latest`` is there."""
    for scenario, recording in record(recorder, tmp_path / "recorded", "async", *SMALL):
        found = check_cuts(recording, tmp_path, random_ones=1, share=0.1, seed=scenario)
        assert len(found) >= 2, scenario  # the power was cut at different stages


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("scenarios", [SMALL, [LARGE]], ids=["small", "large"])
@pytest.mark.parametrize("mode", SAVING)
def test_what_was_saved_survives_every_power_cut(
    recorder: Path, mode: str, scenarios: list[str], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """After every call, in every way, and in many random ones."""
    counts: dict[str, int] = {}
    for scenario, recording in record(recorder, tmp_path / "recorded", mode, *scenarios):
        random_ones = 5 if scenario == LARGE else 50
        found = check_cuts(recording, tmp_path, random_ones=random_ones, share=1, seed=f"soak {scenario}")
        counts[scenario] = found.total()
    each = ", ".join(f"{count} {scenario}" for scenario, count in counts.items())
    record_property("count", f"power cuts, {mode}: {sum(counts.values())} different disks ({each}), nothing was lost")


def test_directories_and_steps_survive_a_power_cut(recorder: Path, tmp_path: Path) -> None:
    """A sample of the moments and ways: what was promised is there, whole, and garbage collection leaves the rest of
    nothing."""
    for _, recording in record(recorder, tmp_path / "recorded", "sync", DIRECTORIES):
        found = check_cuts(recording, tmp_path, random_ones=1, share=0.15, seed=DIRECTORIES, check=check_directories)
        assert set(found) == {0, 1, 2, 3}


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_directories_and_steps_survive_every_power_cut(
    recorder: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """After every call, in every way, and in many random ones."""
    for _, recording in record(recorder, tmp_path / "recorded", "sync", DIRECTORIES):
        found = check_cuts(recording, tmp_path, random_ones=20, share=1, seed="soak", check=check_directories)
        record_property("count", f"power cuts of directories: {found.total()} different disks, nothing was lost")

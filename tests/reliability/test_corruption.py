"""Bytes that differ from what was saved are never loaded, and a run goes on from the checkpoint before them."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import damage
import pytest
from twelve_batches import RUN, Digests, batch_in, build, digest

from composerlite.checkpoint import Catalog, read_checkpoint
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.resume import choose
from composerlite.errors import CheckpointError, CheckpointExistsError

KINDS = [*damage.DATA, *damage.RECORD]
COPIES = (damage.stale_data, damage.swap_data)
"""They leave sound files under the names of others, as a user does."""
OF_OTHERS = (*COPIES, damage.remove_record, damage.folder_for_data)
"""What a run can not tell from a file or a folder of the user: it is left alone."""


@dataclass(frozen=True)
class Original:
    """A folder with four sound checkpoints, and what the run was after each batch."""

    folder: Path
    reference: dict[int, str]
    names: tuple[str, ...]  # the oldest first


def train(folder: Path, **arguments: int) -> Original:
    """Save four checkpoints, synchronously."""
    digests = Digests()
    with build(folder, callbacks=[digests], save_interval="3ba", **arguments) as run:
        run.fit()
    manifests = Catalog(folder).manifests()
    assert len(manifests) == 4
    return Original(folder, digests.at, tuple(manifest.name for manifest in manifests))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """Checkpoints of 30 kB, with tensors of 12 to 200 bytes."""
    return train(tmp_path_factory.mktemp("small") / "run")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """Checkpoints of 10 MB: more than one piece for those who read or write in pieces."""
    return train(tmp_path_factory.mktemp("large") / "run", width=80_000)


def load(folder: Path, name: str) -> str | None:
    """The digest of the checkpoint if it is loaded, by name; ``None`` if it is refused."""
    try:
        return digest(read_checkpoint(folder / name)["state"])
    except CheckpointError:
        return None


def check_sound(original: Original) -> int:
    """Fails if something that is not damaged is refused; how many loads there were."""
    catalog = Catalog(original.folder)
    for manifest in catalog.manifests():
        catalog.verify(manifest)
        assert load(original.folder, manifest.name) == original.reference[manifest.batch]
    found = choose([RunPlace(catalog)], RUN).path
    assert found == original.folder / original.names[-1]
    return 2 * len(original.names) + 1


def check_damaged(original: Original, folder: Path, kind: damage.Kind, chooser: random.Random) -> None:
    """Damage one checkpoint in a copy; fails if it is loaded as if it were sound, or if no other is found."""
    shutil.copytree(original.folder, folder, symlinks=True)
    name = chooser.choice(original.names)
    others = tuple(other for other in original.names if other != name)
    before = {other: (folder / other).stat().st_ino for other in others}
    kind(damage.Target(folder, name, others), chooser)
    hit = {name, *(other for other in others if (folder / other).stat().st_ino != before[other])}  # a swap hits two

    for each in hit:
        loaded = load(folder, each)
        if kind is damage.remove_record:
            assert loaded == original.reference[batch_in(each)]  # unverified, which is logged; never found by itself
        elif kind in COPIES:
            assert loaded in [original.reference[batch_in(other)] for other in original.names]
        else:
            assert loaded is None or loaded == original.reference[batch_in(each)], f"{each} is damaged and was loaded"
    sound = [other for other in original.names if other not in hit]
    found = choose([RunPlace(Catalog(folder))], RUN).path
    assert found == folder / sound[-1], f"{kind.__name__} of {sorted(hit)}"
    assert load(folder, sound[-1]) == original.reference[batch_in(sound[-1])]
    for other in sound:
        Catalog(folder).verify(next(m for m in Catalog(folder).manifests() if m.name == other))
    shutil.rmtree(folder)


def inject(original: Original, root: Path, count: int, seed: int) -> Counter[str]:
    """Do so many kinds of damage, each to a copy; how many of each kind."""
    chooser = random.Random(seed)
    done: Counter[str] = Counter()
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        try:
            check_damaged(original, root / str(number), kind, chooser)
        except Exception as e:
            e.add_note(f"{kind.__name__}, in {root / str(number)}, seed {seed}")
            raise
        done[kind.__name__] += 1
    return done


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_damage_is_detected_and_passed_over(small: Original, kind: damage.Kind, tmp_path: Path) -> None:
    """Each kind of damage, at four random places."""
    for seed in range(4):
        check_damaged(small, tmp_path / str(seed), kind, random.Random(seed))


@pytest.mark.parametrize("kind", damage.DATA, ids=lambda kind: kind.__name__)
def test_damage_of_a_large_checkpoint_is_detected(large: Original, kind: damage.Kind, tmp_path: Path) -> None:
    """Where files are read in pieces."""
    check_damaged(large, tmp_path / "copy", kind, random.Random(0))


def test_there_are_no_false_alarms(small: Original, large: Original) -> None:
    """What was not damaged is verified and loaded, again and again."""
    for original in (small, large):
        for _ in range(2):
            check_sound(original)


@pytest.mark.parametrize(
    ("kind", "damaged"),
    [
        *((kind, 1) for kind in KINDS if kind not in OF_OTHERS),
        (damage.flip_bit, 2),
        (damage.cut_record, 2),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_run_goes_on_from_the_newest_that_is_sound(
    small: Original, kind: damage.Kind, damaged: int, tmp_path: Path
) -> None:
    """To the same end, bit for bit, whatever was damaged, and with ``latest`` at a checkpoint all the time."""
    folder = tmp_path / "run"
    shutil.copytree(small.folder, folder, symlinks=True)
    sound, hit = small.names[:-damaged], small.names[-damaged:]
    for name in hit:
        kind(damage.Target(folder, name, sound), random.Random(1))
    with build(folder, save_interval="3ba") as run:
        assert int(run.state.timestamp.batch) == batch_in(sound[-1])
        assert (folder / "latest.pt").exists(), "latest points to a checkpoint that was set aside"
        run.fit()
        assert digest(run.state.state_dict()) == small.reference[12]
    check_sound(Original(folder, small.reference, small.names))


@pytest.mark.parametrize("kind", OF_OTHERS, ids=lambda kind: kind.__name__)
def test_what_may_be_of_the_user_is_neither_resumed_nor_overwritten(
    small: Original, kind: damage.Kind, tmp_path: Path
) -> None:
    """A copy made by hand, a file without a record, a folder: the run says that it is in the way and stops."""
    folder = tmp_path / "run"
    shutil.copytree(small.folder, folder, symlinks=True)
    name, others = small.names[-1], small.names[-2:-1]
    kind(damage.Target(folder, name, others), random.Random(0))
    before = (folder / name).stat()
    with build(folder, save_interval="3ba") as run:
        assert int(run.state.timestamp.batch) == batch_in(small.names[-3 if kind is damage.swap_data else -2])
        with pytest.raises(CheckpointExistsError):
            run.fit()
    after = (folder / name).stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_ten_thousand_damages_are_detected(
    small: Original, large: Original, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Every kind, at random places; and what is sound is never refused."""
    done = inject(small, tmp_path, 9_800, seed=1) + inject(large, tmp_path, 200, seed=2)
    alarms = sum(check_sound(original) for original in (small, large) for _ in range(500))
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(done.items()))
    record_property("count", f"corruptions: {done.total()} injected, all detected ({kinds})")
    record_property("count", f"corruptions: {alarms} verifications and loads of sound checkpoints, no false alarm")

"""The line of checkpoints that a run follows: the newest attempt, and what it came from."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import xxhash
from hypothesis import given
from hypothesis import strategies as st
from parts import save_batch

from composerlite.checkpoint import Catalog, Manifest
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.resume import choose
from composerlite.checkpoint.record.history import continued, highest_attempt, is_in_line, living_line, new_attempt
from composerlite.checkpoint.record.record import SavedRun, seal, unseal
from composerlite.storage import FileDigest
from composerlite.types import Lineage


def manifest(batch: int, lineage: Lineage, saved_at: str = "2026-01-01T00:00:00.000+00:00") -> Manifest:
    """The record of a checkpoint."""
    name = f"{lineage.id}-ba{batch}.pt"
    return Manifest(
        name=name,
        kind="monolithic",
        template="x",
        run=SavedRun(name="run", timestamp={"batch": batch}, lineage=lineage),
        files=(),
        saved_at=saved_at,
    )


STEPS = st.lists(
    st.tuples(st.sampled_from(["scratch", "older", "resume", "passed over"]), st.integers(0, 5), st.integers(0, 4)),
    max_size=12,
)


@given(STEPS, st.integers(0, 1 << 30))
def test_the_line_is_what_led_to_the_newest_checkpoint(steps: list[tuple[str, int, int]], seed: int) -> None:
    """However often a run is started over, goes back or is resumed, and whatever the clocks say."""
    clock = random.Random(seed)
    everything: list[Manifest] = []
    line: list[Manifest] = []  # what the run did, as a person would keep account of it
    committed: list[Manifest] = []  # the line as of the last checkpoint
    for how, back, saves in steps:
        if how == "scratch" or not committed:
            lineage, line = new_attempt(highest_attempt(everything)), []
        elif how == "resume":
            lineage, line = continued(committed[-1], everything, everything), list(committed)
        else:
            line = committed[: max(1, len(committed) - back)]
            if how == "older":
                lineage = new_attempt(highest_attempt(everything), line[-1])
            else:
                lineage = continued(line[-1], everything, everything)
        batch = line[-1].batch if line else 0
        for _ in range(saves):
            batch += 1
            line.append(manifest(batch, lineage, f"{clock.randint(2000, 2099)}-01-01T00:00:00.000+00:00"))
            everything.append(line[-1])
            committed = list(line)
        assert sorted(m.name for m in living_line(everything, lambda m: m)) == sorted(m.name for m in committed)
        if committed:
            assert max(committed, key=lambda m: m.order) == committed[-1]


def test_checkpoints_without_a_lineage_are_one_attempt(tmp_path: Path) -> None:
    """Saves outside of a run have no lineage. A resume continues them."""
    save_batch(tmp_path, 1)
    save_batch(tmp_path, 2)
    manifests = Catalog(tmp_path).manifests()
    assert {m.run.lineage for m in manifests} == {Lineage()}
    choice = choose([RunPlace(Catalog(tmp_path))], "run")
    assert (choice.path, choice.lineage) == (tmp_path / "ba2.pt", Lineage())


def test_a_lineage_survives_its_record() -> None:
    """What a record says of attempts and ancestors is read as it was written."""
    first = manifest(4, new_attempt(0))
    second = manifest(6, new_attempt(1, first, passed_over=True))
    third = manifest(7, new_attempt(2, second))
    for one in (first, second, third):
        data = b"x" + seal(one, FileDigest(1, xxhash.xxh3_128_hexdigest(b"x")))
        read = unseal(one.name, len(data), data, str)
        assert read is not None
        assert read.run.lineage == one.run.lineage
    assert [is_in_line(one, third.run.lineage) for one in (first, second, third)] == [True, True, True]
    later = dataclasses.replace(first, run=dataclasses.replace(first.run, timestamp={"batch": 5}))
    assert not is_in_line(later, third.run.lineage)
    assert not is_in_line(second, first.run.lineage)

"""A disk that is full or broken at any write of a save: nothing is harmed, space is given back, the user is told."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from failing_runs import FAILURES, SCENARIOS
from storage_recorder import compile_recorder, run_recorded
from twelve_batches import SAVING, WIDE, Digests, build, digest

from composerlite import Callback, Logger, State
from composerlite.checkpoint import Catalog, read_checkpoint

PROGRAM = Path(__file__).with_name("failing_runs.py")
PAGE = 4096
SLACK = 16  # pages beyond the size of a save: names take some


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_recorder(tmp_path_factory.mktemp("recorder"))


def fail_everywhere(recorder: Path, root: Path, mode: str, *cases: str) -> dict[str, int]:
    """Let each call of a save fail in turn; how many did, by case."""
    said = run_recorded(recorder, PROGRAM, str(root), mode, *cases)
    counts = {case: int(count) for case, count in (line.rsplit(": ", 1) for line in said.splitlines())}
    assert all(count > 0 for count in counts.values()), counts
    return counts


def test_whichever_call_of_a_save_fails_nothing_is_harmed(recorder: Path, tmp_path: Path) -> None:
    """Each call in turn. Older checkpoints stay, the error names the file, and the run can be started again."""
    cases = ["full disk: next", "full for a moment: next", "broken disk: one name"]
    counts = fail_everywhere(recorder, tmp_path, "async", *cases)
    assert set(counts) == set(cases)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", SAVING)
def test_whichever_call_of_any_save_fails_nothing_is_harmed(
    recorder: Path, mode: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Of every kind of save, and of the start of a run that finds the remains of a killed one."""
    cases = [f"{what}: {scenario}" for what in FAILURES for scenario in SCENARIOS]
    counts = fail_everywhere(recorder, tmp_path, mode, *cases)
    assert set(counts) == set(cases)
    each = ", ".join(f"{sum(n for case, n in counts.items() if case.startswith(what))} {what}" for what in FAILURES)
    record_property("count", f"failing calls, {mode}: {sum(counts.values())} ({each}), nothing was harmed")


class Filler:
    """A file that leaves so much room on a disk, and no more."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._path = disk / "filler"

    def leave(self, pages: int) -> None:
        """Make room for so many pages."""
        self._path.unlink(missing_ok=True)
        free = shutil.disk_usage(self._disk).free
        with self._path.open("wb") as file:
            for _ in range((free - pages * PAGE) // PAGE):
                file.write(bytes(PAGE))

    def leave_all(self) -> None:
        """Make all the room there is."""
        self._path.unlink(missing_ok=True)


def fill_up(disk: Path, mode: str, rooms: Iterator[int], **arguments: Any) -> tuple[int, int]:
    """Save with less room than a save takes, page by page: how many saves found no room, and how many found some."""
    digests = Digests()
    with build(None, width=arguments.get("width", 8), callbacks=[digests]) as run:
        run.fit()
    filler, folder = Filler(disk), disk / "run"
    failed = succeeded = 0
    for room in rooms:
        shutil.rmtree(folder, ignore_errors=True)
        filler.leave_all()
        with build(folder, mode, max_duration="2ba", **arguments) as run:
            run.fit()
        run = build(folder, mode, max_duration="3ba", **arguments)
        filler.leave(room)
        used = shutil.disk_usage(disk).used
        try:
            with run:
                run.fit()
            succeeded += 1
        except OSError as e:
            told = (e.errno, str(folder) in str(e))
            assert told == (errno.ENOSPC, True), room
            failed += 1
            assert shutil.disk_usage(disk).used <= used + PAGE, "the space was not given back"
        there = {manifest.batch: manifest for manifest in Catalog(folder).manifests()}
        assert {1, 2} <= set(there), room
        assert (folder / "latest.pt").resolve() == (folder / there[max(there)].name).resolve(), room
        for batch, manifest in there.items():
            Catalog(folder).verify(manifest)
            assert digest(read_checkpoint(folder / manifest.name)["state"]) == digests.at[batch]
        assert [path.name for path in folder.rglob("*") if ".tmp-" in path.name] == [], room
    return failed, succeeded


@pytest.mark.parametrize("mode", SAVING)
def test_a_disk_may_be_full_at_any_page_of_a_save(mount: Callable[[str], Path], mode: str) -> None:
    """From no room at all to enough, in steps that differ from mode to mode: whole or nothing, no space lost."""
    failed, succeeded = fill_up(mount("size=1m"), mode, iter(range(list(SAVING).index(mode), 12 + SLACK, 4)))
    assert failed > 0
    assert succeeded > 0


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", SAVING)
def test_a_disk_may_be_full_at_every_page_of_a_save(
    mount: Callable[[str], Path], mode: str, record_property: Callable[[str, object], None]
) -> None:
    """Page by page; and for a large checkpoint, around each piece that is written."""
    failed, succeeded = fill_up(mount("size=1m"), mode, iter(range(40)))
    assert failed > 0
    assert succeeded > 0
    size = 18 << 20
    rooms = sorted({0, *range(1, size // PAGE + 64, 97), *range(size // PAGE - 8, size // PAGE + 8)})
    large, room = fill_up(mount("size=80m"), mode, iter(rooms), width=WIDE)
    assert large > 0
    assert room > 0
    record_property("count", f"full disks, {mode}: {failed + large} saves found no room, {succeeded + room} found some")


class EmptyAt(Callback):
    """Makes room on a disk when a batch is done."""

    def __init__(self, batch: int, filler: Filler) -> None:
        self._batch = batch
        self._filler = filler

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self._batch:
            self._filler.leave_all()


@pytest.mark.parametrize("mode", SAVING)
def test_training_goes_on_over_failed_saves_if_told_to(
    mount: Callable[[str], Path], mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With ``failure_limit=3`` three saves in a row may fail, each with a warning; then there is room again."""
    disk = mount("size=1m")
    filler = Filler(disk)
    digests = Digests()
    filler.leave(2)
    with build(disk / "run", mode, failure_limit=3, callbacks=[EmptyAt(4, filler), digests]) as run:
        run.fit()
    with build(None, callbacks=[plain := Digests()]) as run:
        run.fit()
    assert digests.at == plain.at
    saved = [manifest.batch for manifest in Catalog(disk / "run").manifests()]
    assert saved[-9:] == list(range(4, 13))
    failed = caplog.text.count("could not be saved")
    assert failed + len(saved) == 12  # behind training, the third save may have come late enough to find room
    assert failed >= 2


@pytest.mark.parametrize("mode", SAVING)
def test_training_stops_when_too_many_saves_fail(mount: Callable[[str], Path], mode: str) -> None:
    """With ``failure_limit=2`` the third failure in a row is raised, at most one batch later."""
    disk = mount("size=1m")
    Filler(disk).leave(2)
    digests = Digests()
    run = build(disk / "run", mode, failure_limit=2, callbacks=[digests])
    with run, pytest.raises(OSError, match="No space left on device"):
        run.fit()
    assert 3 <= max(digests.at) <= 4 + 1

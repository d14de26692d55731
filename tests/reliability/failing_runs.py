"""Lets every call of a save that changes a disk fail in turn: ``failing_runs.py <root> <mode> <case>…``.

A case is ``<what fails>: <scenario>``. Run under ``storage_recorder``. A run that has two checkpoints is resumed and
trains one batch more; the first call below its folder fails, in another attempt the second, and so on, until an attempt
has so few calls that none fails. After each, what was saved before must be there, nothing may be left over, and the run
must be able to go on.
"""

from __future__ import annotations

import errno
import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from recorded_runs import leave_remains
from storage_recorder import OTHER, SHORT_WRITE, TAKES_SPACE, Recorder
from twelve_batches import RUN, WIDE, Digests, build, digest

from composerlite.checkpoint import Catalog, read_checkpoint
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.resume import choose
from composerlite.errors import ComposerliteError

FAILURES: dict[str, tuple[int, bool, int]] = {
    "full disk": (errno.ENOSPC, True, TAKES_SPACE),
    "full for a moment": (errno.ENOSPC, False, TAKES_SPACE),
    "broken disk": (errno.EIO, False, TAKES_SPACE | OTHER),
    "short write": (0, False, SHORT_WRITE),
}
"""What fails: the error, whether all that follows fails too, and which calls may."""

SCENARIOS: dict[str, dict[str, Any]] = {
    "next": {"num_checkpoints_to_keep": 2},
    "one name": {"filename": "newest.pt", "overwrite": True},
    "folders": {"filename": "{epoch}/of/ba{batch}.pt"},
    "recover": {"save_interval": "3ba"},
    "large": {"num_checkpoints_to_keep": 1, "width": WIDE},
}


def prepare(folder: Path, scenario: str, mode: str) -> int:
    """What was there before; the batch of the newest checkpoint."""
    if scenario == "recover":
        leave_remains(folder, mode)
        return 6
    with build(folder, mode, max_duration="2ba", **SCENARIOS[scenario]) as run:
        run.fit()
    return 2


def attempt(folder: Path, scenario: str, mode: str, batch: int, arm: Callable[[], None]) -> BaseException | None:
    """Resume and train on to the next save, with failures; what came of it."""
    until = batch + 3 if scenario == "recover" else batch + 1
    run = None
    try:
        if scenario == "recover":
            arm()
        run = build(folder, mode, max_duration=f"{until}ba", **SCENARIOS[scenario])
        if scenario != "recover":
            arm()
        run.fit()
        run.close()
    except (OSError, ComposerliteError) as e:
        if run is not None:
            try:
                run.close()
            except (OSError, ComposerliteError) as again:
                if again is not e:
                    raise
        return e
    return None


def check(
    folder: Path, scenario: str, what: str, batch: int, failed: BaseException | None, reference: dict[int, str]
) -> None:
    """Fails if something was harmed, or is left over, or if the link to the newest is behind on a full disk."""
    if scenario != "recover":
        left = [path for path in folder.rglob("*") if ".tmp-" in path.name]
        assert left == [], "left over"
    catalog = Catalog(folder)
    link = folder / "latest.pt"
    assert digest(read_checkpoint(link)["state"]) in reference.values()
    catalog.place.sweep(timedelta())
    assert not list(folder.rglob("*.tmp-*")), "left over after the next start"
    manifests = catalog.manifests()
    for manifest in manifests:
        catalog.verify(manifest)
        assert digest(read_checkpoint(folder / manifest.name)["state"]) == reference[manifest.batch]
    newest = manifests[-1].batch
    has_not_begun = scenario == "recover" and newest == batch  # and has left the link as the kill before it has
    if FAILURES[what][2] == TAKES_SPACE and not has_not_begun:
        assert link.resolve().name == Path(manifests[-1].name).name, "the link is behind"
    assert newest >= batch, f"batch {batch} is lost"
    assert choose([RunPlace(catalog)], RUN).path == folder / manifests[-1].name
    if failed is None:
        assert newest > batch, "a save failed, and nobody was told"
    elif isinstance(failed, OSError):
        assert str(folder) in str(failed), f"the error does not say where: {failed!r}"


def go_on(folder: Path, scenario: str, mode: str, until: int, reference: dict[int, str]) -> None:
    """With a disk that is well again the run trains and saves as if nothing had happened."""
    with build(folder, mode, max_duration=f"{until}ba", **SCENARIOS[scenario]) as run:
        run.fit()
        assert digest(run.state.state_dict()) == reference[until]
    assert Catalog(folder).manifests()[-1].batch == until


def fail_everywhere(root: Path, scenario: str, mode: str, what: str) -> int:
    """Let each call fail in turn; how many did."""
    error, for_good, kinds = FAILURES[what]
    recorder = Recorder()
    digests = Digests()
    with build(None, width=SCENARIOS[scenario].get("width", 8), callbacks=[digests]) as run:
        run.fit()
    template = root / "template"
    batch = prepare(template, scenario, mode)
    number = 0
    while True:
        folder = root / str(number)
        shutil.copytree(template, folder, symlinks=True)
        recorder.start(folder, None)

        def arm(number: int = number) -> None:
            recorder.fail_at(number, error, for_good=for_good, kinds=kinds)

        failed = attempt(folder, scenario, mode, batch, arm)
        calls = recorder.calls
        recorder.stop()
        try:
            if calls > number:
                check(folder, scenario, what, batch, failed, digests.at)
                if error == 0:
                    assert failed is None, f"a short write is no error: {failed!r}"
            go_on(folder, scenario, mode, batch + 3, digests.at)
        except BaseException as e:
            e.add_note(f"{what}, {scenario}, {mode}: call {number} of {calls} in {folder}, after {failed!r}")
            raise
        shutil.rmtree(folder)
        if calls <= number:
            assert failed is None
            return number
        number += 1


def main(root: str, mode: str, *cases: str) -> None:
    torch.set_num_threads(1)
    for case in cases:
        what, scenario = case.split(": ")
        home = Path(root, case)
        home.mkdir(parents=True)
        failed = fail_everywhere(home, scenario, mode, what)
        sys.stdout.write(f"{case}: {failed}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A run that was started over and is killed resumes the new attempt, never the one that was abandoned."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import attempts_run
import pytest
import torch
from relaunch import Ended, run
from sealed_files import remove_record

from composerlite.checkpoint import Catalog

PLACES = ["folder", "bucket"]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, str]]:
    """Where checkpoints are saved, and the environment that it takes to reach it."""
    if request.param == "folder":
        return str(tmp_path / "run"), {}
    server = request.getfixturevalue("s3_server")
    return f"s3://{server.new_bucket()}/run", dict(server.environment)


class Launches:
    """Launches of one run; with a bucket each on a new machine, whose disk is empty."""

    def __init__(self, folder: Path, place: tuple[str, dict[str, str]]) -> None:
        self.folder, (self.uri, self.environment), self.count = folder, place, 0

    def __call__(self, how: str, weight: int, batches: int, die: int | str = "", **more: Any) -> Ended:
        self.count += 1
        work = self.folder / f"machine{self.count}"
        work.mkdir()
        arguments = [str(work), self.uri, how, str(weight), str(batches), str(die), str(more.get("keep", -1))]
        arguments.append(more.get("name", "ba{batch}.pt"))
        ended = run(attempts_run.main, arguments, self.environment, fork=True)
        assert ended.code == (-signal.SIGKILL if die else 0), ended.log
        return ended


def test_a_run_that_was_started_over_and_killed_resumes_the_new_attempt(
    place: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    """The attempt that was abandoned had come further; the new one goes on from its own batch with its own weights."""
    launch = Launches(tmp_path, place)
    launch("scratch", 0, 20, die=10)
    launch("scratch", 1000, 20, die=3)
    resumed = launch("resume", 5000, 6)
    assert resumed.said == {batch: str(1000.0 + batch) for batch in (4, 5, 6)}
    assert launch("resume", 5000, 6).said == {}


def test_a_finished_attempt_does_not_finish_the_one_after_it(place: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    """The old attempt had trained all batches; the new one, which was killed, trains the rest of its own."""
    launch = Launches(tmp_path, place)
    launch("scratch", 0, 6)
    launch("scratch", 1000, 6, die=2)
    assert launch("resume", 5000, 6).said == {batch: str(1000.0 + batch) for batch in (3, 4, 5, 6)}


def test_files_without_a_record_do_not_come_before_the_next_attempt(tmp_path: Path) -> None:
    """As Composer saves them: they had come to the end, and the run that was started over trains its own."""
    launch = Launches(tmp_path, (str(tmp_path / "run"), {}))
    launch("scratch", 0, 6)
    for path in (tmp_path / "run").glob("ba*.pt"):
        remove_record(path)
    launch("scratch", 1000, 6, die=2)
    assert launch("resume", 5000, 6).said == {batch: str(1000.0 + batch) for batch in (3, 4, 5, 6)}


def test_a_run_that_went_back_to_an_older_checkpoint_resumes_what_it_did_since(tmp_path: Path) -> None:
    """Loaded from batch 2 of 8 and killed at 4: batch 5 is next, and what was saved up to batch 2 counts as its own."""
    launch = Launches(tmp_path, (str(tmp_path / "run"), {}))
    launch("scratch", 0, 8)
    catalog = Catalog(tmp_path / "run")
    original = {m.name: m.files for m in catalog.manifests()}
    launch(f"load:{tmp_path / 'run' / 'ba2.pt'}", 5000, 8, die=4, keep=4)
    resumed = launch("resume", 5000, 6, keep=4)
    assert list(resumed.said) == [5, 6]
    left = {m.name: m for m in catalog.manifests()}
    assert (tmp_path / "run" / "latest.pt").readlink() == Path("ba6.pt")
    assert {"ba7.pt", "ba8.pt"} <= set(left), "retention does not count what was abandoned, nor delete it"
    assert sorted(left) == ["ba3.pt", "ba4.pt", "ba5.pt", "ba6.pt", "ba7.pt", "ba8.pt"]
    assert left["ba8.pt"].files == original["ba8.pt"]
    assert left["ba6.pt"].run.lineage.origin == "ba2.pt"


def test_retention_counts_the_new_attempt_alone(tmp_path: Path) -> None:
    """Two are to be kept: the newest two of the new attempt stay, and every file of the old one that it left alone."""
    launch = Launches(tmp_path, (str(tmp_path / "run"), {}))
    launch("scratch", 0, 8)
    launch("scratch", 1000, 5, keep=2)
    catalog = Catalog(tmp_path / "run")
    weights = {
        m.name: torch.load(catalog.folder / m.name, weights_only=True)["state"]["model"]["weight"].item()
        for m in catalog.manifests()
    }
    assert weights == {"ba4.pt": 1004.0, "ba5.pt": 1005.0, "ba6.pt": 6.0, "ba7.pt": 7.0, "ba8.pt": 8.0}
    assert (catalog.folder / "latest.pt").readlink() == Path("ba5.pt")


def test_a_run_that_is_preempted_often_stays_one_attempt(tmp_path: Path) -> None:
    """Each launch goes on from the newest: the record of where a checkpoint came from does not grow."""
    launch = Launches(tmp_path, (str(tmp_path / "run"), {}))
    for die in (2, 4, 6):
        launch("resume", 0, 9, die=die)
    launch("resume", 0, 9)
    lineages = {manifest.run.lineage for manifest in Catalog(tmp_path / "run").manifests()}
    assert len(lineages) == 1
    assert lineages.pop().ancestors == ()


def test_a_run_that_was_killed_before_its_first_link_has_one_afterwards(tmp_path: Path) -> None:
    """The kill came between the first commit and ``latest``; the next launch points it, with nothing to train."""
    launch = Launches(tmp_path, (str(tmp_path / "run"), {}))
    launch("resume", 0, 3)
    latest = tmp_path / "run" / "latest.pt"
    latest.unlink()
    assert launch("resume", 0, 3).said == {}
    assert latest.readlink() == Path("ba3.pt")


def test_a_kill_before_the_link_is_made_up_for_where_the_files_were_named_otherwise_before(tmp_path: Path) -> None:
    """``latest`` leads to a checkpoint of before the script changed ``save_filename``, and is pointed all the same."""
    launch = Launches(tmp_path, (str(tmp_path / "run"), {}))
    launch("resume", 0, 2, name="ba{batch}.pt.gz")
    launch("resume", 0, 3)
    latest = tmp_path / "run" / "latest.pt"
    latest.unlink()
    latest.symlink_to("ba2.pt.gz")  # as the kill leaves it
    assert launch("resume", 0, 3).said == {}
    assert latest.readlink() == Path("ba3.pt")


def test_a_damaged_newest_begins_a_new_attempt_that_is_resumed(tmp_path: Path) -> None:
    """Batch 6 is damaged and passed over; what is saved after that comes before it in the next resume."""
    launch = Launches(tmp_path, (str(tmp_path / "run"), {}))
    launch("resume", 0, 9, die=6)
    for path in (tmp_path / "run").glob("ba*.pt"):  # the kill may have come before the link to the newest
        if int(path.stem.removeprefix("ba")) >= 6:
            path.write_bytes(b"\0" * path.stat().st_size)
    assert min(launch("resume", 0, 9, die=6).said) == 6
    assert list(launch("resume", 0, 8).said) == [7, 8]


@pytest.mark.parametrize("damaged", ["everything", "weights", "record"])
def test_a_machine_that_reads_wrong_bytes_discards_nothing(
    tmp_path: Path, request: pytest.FixtureRequest, damaged: str
) -> None:
    """All files of a bucket seem damaged: the run ends with an error, and resumes elsewhere."""
    server = request.getfixturevalue("s3_server")
    bucket, client = server.new_bucket(), server.client()
    launch = Launches(tmp_path, (f"s3://{bucket}/run", dict(server.environment)))
    launch("resume", 0, 9, die=4)

    def listed() -> list[str]:
        keys = (item["Key"] for item in client.list_objects_v2(Bucket=bucket)["Contents"])
        return [key for key in keys if not key.endswith(".lease")]

    def wrong(data: bytes) -> bytes:
        at = len(data) - 10 if damaged == "record" else len(data) // 4
        return bytes(len(data)) if damaged == "everything" else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    names = listed()
    stored = {name: client.get_object(Bucket=bucket, Key=name)["Body"].read() for name in names}
    for name in (name for name in names if name.endswith(".pt")):
        client.put_object(Bucket=bucket, Key=name, Body=wrong(stored[name]))
    with pytest.raises(AssertionError, match=r"none can be loaded.*ba[14]\.pt.*ba[14]\.pt"):
        launch("resume", 0, 9)
    assert listed() == names
    for name in names:  # as another machine reads it
        client.put_object(Bucket=bucket, Key=name, Body=stored[name])
    assert list(launch("resume", 0, 9).said) == [5, 6, 7, 8, 9]


def test_latest_leads_to_what_is_resumed_also_under_other_names(tmp_path: Path) -> None:
    """The newest is damaged, and the script names its files otherwise by now: ``latest`` leads to what is resumed."""
    folder = tmp_path / "run"
    launch = Launches(tmp_path, (str(folder), {}))
    launch("scratch", 0, 3)
    path = folder / "ba3.pt"
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    launch("resume", 0, 2, name="ba{batch}.pt.gz")
    assert (folder / "latest.pt").readlink() == Path("ba2.pt")

"""A run that is started over in a bucket, is killed there, and resumes on a machine that has none of its files."""

from __future__ import annotations

from pathlib import Path

import pytest
from parts import new_state, value_in
from sent_files import publish_files
from storage.local_store import LocalObjectStore

from composerlite.checkpoint import Catalog
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.restore import read_checkpoint
from composerlite.checkpoint.load.resume import Choice, choose
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.record.history import new_attempt
from composerlite.checkpoint.record.record import Lineage
from composerlite.checkpoint.save.form import SaveRequest
from composerlite.checkpoint.save.run_folder import begin_attempt
from composerlite.checkpoint.save.save import save
from composerlite.storage import ObjectStore, Transfer
from composerlite.testing import Fault, FaultyStore

LINK = "run/latest"


class KilledError(BaseException):
    """The process ends here."""


def publish(
    store: ObjectStore, folder: Path, batch: int, value: float, lineage: Lineage, *, run_name: str = "run"
) -> None:
    """Save a checkpoint of the attempt ``lineage``, all of whose weights are ``value``, as a saver does."""
    state = new_state(batch, value=value, run_name=run_name)
    state.lineage = lineage
    template = "ba{batch}.pt" if run_name == "run" else "{run_name}-ba{batch}.pt"
    save(SaveRequest(state=state, catalog=Catalog(folder), template=template, latest=None, overwrite=True))
    manifest = Catalog(folder).manifest_of(template.format(run_name=run_name, batch=batch))
    assert manifest is not None
    with Transfer(store) as transfer:
        remote = Catalog(Bucket(transfer, "run"))
        publish_files(remote, manifest, {manifest.name: folder / manifest.name}, link=LINK, overwrite=True)


def resume(store: ObjectStore, folder: Path, *, link: str | None = LINK) -> tuple[Choice, float]:
    """Choose on another machine, whose folder is empty; and the weights there."""
    with Transfer(store) as transfer:
        buckets = [RunPlace(Catalog(Bucket(transfer, "run")), link=link)]
        choice = choose([RunPlace(Catalog(folder), "ba{batch}.pt", "latest.pt", buckets)], "run")
    assert isinstance(choice.path, Path)
    return choice, value_in(read_checkpoint(choice.path))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_run_that_was_started_over_resumes_the_new_attempt(tmp_path: Path, batch: int) -> None:
    """Killed at any request of a save that replaces one of the attempt before: what is resumed, and what is saved then.

    Weights are ten times the attempt, and the batch. Once the new data is in the bucket it is resumed from; what is
    saved after it is what the next machine resumes from, whether it follows the link or lists the bucket.
    """
    first, second = Lineage(1, "first"), new_attempt(1)
    resumed: list[float] = []
    for number in range(100):
        (bucket := tmp_path / f"bucket{number}").mkdir()
        store = LocalObjectStore(bucket)
        for one in (1, 2, 3):
            publish(store, tmp_path / f"first{number}", one, 10 + one, first)
        for one in range(1, batch):
            publish(store, tmp_path / f"second{number}", one, 20 + one, second)

        def die() -> None:
            raise KilledError

        faulty = FaultyStore(store, Fault(after=number, error=None, first=die))
        died = False
        try:
            publish(faulty, tmp_path / f"second{number}", batch, 20 + batch, second)
        except KilledError:
            died = True
        choice, value = resume(store, tmp_path / f"third{number}")
        resumed.append(value)
        assert value in (13.0 if batch == 1 else 21.0, 20.0 + batch), number
        assert choice.lineage.attempt == 2 or value == 13, number
        after = int(value) % 10 + 1
        publish(store, tmp_path / f"third{number}", after, value + 1, choice.lineage)
        for link in (LINK, None):
            assert resume(store, tmp_path / f"fourth{number}{link is None}", link=link)[1] == value + 1, (number, link)
        if not died:
            break
    assert len(resumed) > 3
    assert resumed[-1] == 20 + batch
    assert resumed == sorted(resumed)


@pytest.mark.parametrize("link", [LINK, None])
def test_attempts_are_numbered_on_where_another_run_had_the_link_last(tmp_path: Path, link: str | None) -> None:
    """Runs that share a prefix, one after the other, each on a new machine: each begins after its own last attempt."""
    (tmp_path / "bucket").mkdir()
    store = LocalObjectStore(tmp_path / "bucket")
    attempts: list[int] = []
    for number, run_name in enumerate(["a", "a", "b", "a", "b"]):
        with Transfer(store) as transfer:
            lineage = begin_attempt([(Catalog(Bucket(transfer, "run")), link)], run_name)
        attempts.append(lineage.attempt)
        for batch in (1, 2):
            publish(store, tmp_path / f"machine{number}", batch, number, lineage, run_name=run_name)
    assert attempts == [1, 2, 1, 3, 2]

"""A manifest says what a checkpoint consists of, and is believed only as it was written."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from composerlite.checkpoint import FileRecord, Manifest
from composerlite.checkpoint.record.manifest import SCHEMA, plain_timestamp
from composerlite.core import Timestamp
from composerlite.errors import CorruptCheckpointError, IncompatibleCheckpointError

NAMES = st.text(min_size=1, max_size=20)
PATHS = st.from_regex(r"[a-zA-Z0-9_{}=. -]{1,20}[a-z]", fullmatch=True)
NUMBERS = st.integers(0, 2**63) | st.floats(allow_nan=False)
TIMES = st.integers(0, 2**63) | st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    """The name of a checkpoint, and the files of it."""
    name = draw(PATHS)
    below = draw(st.lists(PATHS, max_size=3, unique=True))
    paths = [f"{name}/{path}" for path in below] or [name]
    records = [FileRecord(path, draw(st.integers(0, 2**50)), draw(NAMES)) for path in paths]
    return {"name": name, "files": tuple(records)}


def manifests() -> st.SearchStrategy[Manifest]:
    """Any manifest."""
    others = st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["monolithic", "weights"]),
            "template": NAMES,
            "run_name": NAMES,
            "timestamp": st.fixed_dictionaries({"batch": st.integers(0, 2**40), "total_wct": TIMES}),
            "fit_calls": st.integers(0, 100),
            "world_size": st.integers(1, 4096),
            "left_out": st.lists(NAMES, max_size=3).map(tuple),
            "metrics": st.dictionaries(NAMES, NUMBERS, max_size=3),
            "versions": st.dictionaries(NAMES, NAMES, max_size=3),
            "saved_at": NAMES,
        }
    )
    return st.builds(lambda named, fields: Manifest(**named, **fields), files(), others)


EXAMPLE = Manifest(
    name="ep1-ba42-rank0.pt",
    kind="monolithic",
    template="ep{epoch}-ba{batch}-rank{rank}.pt",
    run_name="my-run",
    timestamp={"epoch": 1, "batch": 42, "total_wct": 1.5},
    files=(FileRecord("ep1-ba42-rank0.pt", 1000, "0" * 32), FileRecord("ep1-ba42-rank0.pt/more", 24, "1" * 32)),
    left_out=("state/optimizers",),
    metrics={"accuracy": 0.5},
    versions={"torch": "2.13"},
)


@given(manifests())
def test_a_manifest_is_read_as_it_was_written(manifest: Manifest) -> None:
    """Every field, whatever it holds."""
    assert Manifest.from_json(manifest.to_json(), "source") == manifest


def test_a_manifest_is_json_for_everybody() -> None:
    """Other programs read it without composerlite: plain names and numbers, its digest among them."""
    fields = json.loads(EXAMPLE.to_json())
    file = {"path": "ep1-ba42-rank0.pt", "size_bytes": 1000, "xxh3_128": "0" * 32, "chunk_bytes": 0, "chunks": ""}
    assert fields["files"][0] == file
    assert (fields["schema"], fields["timestamp"]["batch"], len(fields["digest"])) == (1, 42, 32)
    assert datetime.fromisoformat(fields["saved_at"]) <= datetime.now(UTC)
    assert (EXAMPLE.batch, EXAMPLE.size_bytes) == (42, 1024)


def test_a_manifest_of_several_disks_says_which_is_its_own() -> None:
    """Older versions, which do not know of disks, refuse it; what one node has of the files is told apart."""
    files = [dataclasses.replace(file, node=number) for number, file in enumerate(EXAMPLE.files)]
    index = FileRecord("ep1-ba42-rank0.pt/index", 1, "2" * 32)
    first, second = (dataclasses.replace(EXAMPLE, files=(*files, index), node=node) for node in (0, 1))
    assert json.loads(first.to_json())["schema"] == 2
    assert Manifest.from_json(first.to_json(), "source") == first != second
    assert first.identity == second.identity != dataclasses.replace(second, saved_at="2000-01-01").identity
    assert Manifest.from_json(first.to_json(), "source").identity == first.identity
    assert (first.here, second.here) == ((files[0], index), (files[1], index))
    assert EXAMPLE.here == EXAMPLE.files


CHANGES: dict[str, Any] = {
    "name": "other.pt",
    "kind": "weights",
    "template": "x",
    "run_name": "other",
    "timestamp": {"epoch": 1, "batch": 43, "total_wct": 1.5},
    "files": [{"path": "ep1-ba42-rank0.pt", "size_bytes": 1001, "xxh3_128": "0" * 32}],
    "fit_calls": 3,
    "world_size": 2,
    "left_out": [],
    "metrics": {"accuracy": 0.9},
    "ephemeral": True,
    "unpacked_bytes": 2000,
    "timings": {"stall": 0.1},
    "versions": {"torch": "2.14"},
    "saved_at": "2000-01-01",
    "schema": 0,
    "digest": "0" * 32,
}


def test_there_is_a_change_for_every_field() -> None:
    """The test below leaves none out."""
    assert set(CHANGES) == set(json.loads(EXAMPLE.to_json()))


@pytest.mark.parametrize(("field", "value"), CHANGES.items())
def test_an_edited_manifest_is_not_believed(field: str, value: Any) -> None:
    """Whatever was changed by hand: an error that names the file."""
    fields = json.loads(EXAMPLE.to_json())
    assert fields[field] != value
    with pytest.raises(CorruptCheckpointError, match=r"manifest 'my\.json'"):
        Manifest.from_json(json.dumps({**fields, field: value}).encode(), "my.json")


@pytest.mark.parametrize("field", CHANGES)
def test_a_manifest_that_lacks_something_is_not_believed(field: str) -> None:
    """No field is optional when reading."""
    fields = json.loads(EXAMPLE.to_json())
    del fields[field]
    with pytest.raises(CorruptCheckpointError):
        Manifest.from_json(json.dumps(fields).encode(), "source")


def test_a_truncated_manifest_is_not_believed() -> None:
    """Cut off at any byte."""
    data = EXAMPLE.to_json()
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            Manifest.from_json(data[:length], "source")


@given(st.binary(max_size=50) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_what_is_no_manifest_is_not_believed(data: bytes | str) -> None:
    """Any bytes, any JSON: one error."""
    with pytest.raises(CorruptCheckpointError):
        Manifest.from_json(data.encode() if isinstance(data, str) else data, "source")


def test_a_manifest_of_a_newer_version_says_so() -> None:
    """It is not called damaged: the way out is to update. One that is damaged is not called newer."""
    fields = {**json.loads(EXAMPLE.to_json()), "schema": SCHEMA + 1, "a_field_of_the_future": 1}
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        Manifest.from_json(json.dumps(fields).encode(), "source")
    del fields["digest"]
    plain = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    fields["digest"] = xxhash.xxh3_128_hexdigest(plain)
    with pytest.raises(IncompatibleCheckpointError, match=rf"schema {SCHEMA + 1}.*update"):
        Manifest.from_json(json.dumps(fields).encode(), "source")


def test_the_timestamp_in_a_manifest_is_fourteen_numbers() -> None:
    """Counts, and clocks in seconds."""
    fields = plain_timestamp(Timestamp(batch=3, total_wct=timedelta(minutes=1.5)).state_dict())
    assert len(fields) == 14
    assert (fields["batch"], fields["total_wct"], fields["epoch"]) == (3, 90.0, 0)
    assert json.loads(json.dumps(fields)) == fields

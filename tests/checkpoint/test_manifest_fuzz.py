"""A manifest that is odd, damaged or planted is passed over with a reason, whatever it holds."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import xxhash

from composerlite.checkpoint import Catalog, FileRecord, Manifest
from composerlite.checkpoint.record.manifest import CheckpointMetadata, relative_path
from composerlite.errors import CorruptCheckpointError, IncompatibleCheckpointError

T = TypeVar("T")
_FILE = {"size_bytes": 4, "xxh3_128": "0" * 32}
LEADING_OUT = ["../x", "/etc/passwd", "a/../../x", "a//b", "./a", "a/.", "", ".", "..", "a\0b", "..\\x", "\\\\host\\x"]
ODD_PATHS = [
    *LEADING_OUT,
    "a\x1b[31mb",
    "a\nb",
    "x" * 300,
    "a/" * 3000 + "b",
    ".manifest/other.json",
    "\ud800",
    "notes.txt",
]
ODD_NUMBERS = [-1, 1.5, True, 2**63, -(2**70), 10**400, float("nan"), float("inf"), -float("inf"), 0, -0.0]
ODD: list[Any] = [None, "", "x", [], {}, [[]], {"a": {}}, [None], *ODD_PATHS, *ODD_NUMBERS]


def _base(**changes: Any) -> dict[str, Any]:
    manifest = Manifest(
        name="run/ep1-ba3",
        kind="sharded",
        template="ep{epoch}-ba{batch}",
        run_name="run",
        timestamp={"epoch": 1, "batch": 3, "total_wct": 1.5},
        files=(FileRecord("run/ep1-ba3/.metadata", 4, "0" * 32), FileRecord("run/ep1-ba3/a", 4, "0" * 32, 4, "00")),
        metrics={"loss": 0.5},
    )
    return {**json.loads(manifest.to_json()), **changes}


def _signed(fields: dict[str, Any]) -> bytes:
    """As whoever plants it would: with the digest that belongs to it."""
    fields.pop("digest", None)
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return json.dumps({**fields, "digest": xxhash.xxh3_128_hexdigest(text.encode())}).encode()


def _deep(draw: random.Random) -> Any:
    value: Any = 1
    for _ in range(draw.choice([3, 50, 400])):
        value = [value] if draw.random() < 0.5 else {"a": value}
    return value


def changed(draw: random.Random, value: Any) -> Any:
    """``value`` with one thing in it that is odd, gone, or more."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        name = draw.choice(sorted(value))
        kind = draw.random()
        if kind < 0.1:
            return {key: item for key, item in value.items() if key != name}
        if kind < 0.2:
            return {**value, draw.choice(["new", "__class__", "digest", "path"]): draw.choice(ODD)}
        return {**value, name: changed(draw, value[name])}
    if isinstance(value, list) and value and draw.random() < 0.85:
        place = draw.randrange(len(value))
        return [*value[:place], changed(draw, value[place]), *value[place + 1 :], *value[: draw.randrange(2)]]
    return _deep(draw) if draw.random() < 0.1 else draw.choice(ODD)


def _read(read: Callable[[], T], source: str) -> T | None:
    """What was read; ``None`` if it was refused with a reason that names ``source``."""
    try:
        return read()
    except (CorruptCheckpointError, IncompatibleCheckpointError) as e:
        reason = str(e)
    assert source in reason
    return None


def test_ten_thousand_odd_manifests_are_passed_over_or_stay_in_their_folder() -> None:
    """Each is refused with a reason that names it, or is one whose paths and numbers are what they must be."""
    draw = random.Random(36)
    read = 0
    for _ in range(10_000):
        fields = changed(draw, _base())
        data = _signed(fields) if isinstance(fields, dict) else json.dumps(fields).encode()
        if draw.random() < 0.05:
            data = data[: draw.randrange(len(data))] + draw.randbytes(draw.randrange(4))
        manifest = _read(functools.partial(Manifest.from_json, data, "my.json"), "'my.json'")
        if manifest is None:
            continue
        read += 1
        for path in (manifest.name, *(file.path for file in manifest.files)):
            assert relative_path(path) == path
        assert all(file.path.startswith(f"{manifest.name}/") for file in manifest.files) or len(manifest.files) == 1
        assert manifest.batch >= 0
        assert manifest.size_bytes >= 0
        assert (manifest.order < manifest.order) is False
        assert Manifest.from_json(manifest.to_json(), "again").files == manifest.files
    assert 200 < read < 5000


def test_ten_thousand_odd_markers_of_steps_are_refused_or_stay_in_their_folder() -> None:
    """The same for ``.metadata.json`` in the directory of a step."""
    draw = random.Random(37)
    record = {"path": "train/rank0.pt", "size_bytes": 4, "xxh3_128": "0" * 32}
    for _ in range(10_000):
        fields = changed(draw, {"version": "1", "world_size": 2, "ephemeral": False, "train": [record, record]})
        data = json.dumps(fields).encode()
        marker = _read(functools.partial(CheckpointMetadata.from_json, data, "step1/.metadata.json"), "step1/.meta")
        if marker is None:
            continue
        assert all(relative_path(file.path) == file.path for file in marker.train)
        assert marker.world_size >= 0


@pytest.mark.parametrize("path", [*LEADING_OUT, *ODD_PATHS])
def test_a_manifest_cannot_name_a_file_that_is_not_of_its_checkpoint(path: str) -> None:
    """Neither outside its folder nor a neighbour: it would be deleted and renamed with the checkpoint."""
    files = [{"path": path, "size_bytes": 4, "xxh3_128": "0" * 32}]
    with pytest.raises(CorruptCheckpointError, match=r"my\.json"):
        Manifest.from_json(_signed(_base(files=files)), "my.json")


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_manifest_that_is_nested_too_deeply_is_passed_over(opening: str, tmp_path: Path) -> None:
    """A reason, and not a RecursionError that stops the run; the others are listed."""
    good = Manifest(
        name="a",
        kind="monolithic",
        template="{batch}",
        run_name="run",
        timestamp={"batch": 1},
        files=(FileRecord("a", 1, ""),),
    )
    (tmp_path / ".manifest").mkdir()
    (tmp_path / ".manifest" / "a.json").write_bytes(good.to_json())
    (tmp_path / ".manifest" / "b.json").write_text(opening * 200_000)
    assert Catalog(tmp_path).manifests() == [good]


@pytest.mark.parametrize("name", ["./a.pt", "b//a.pt", "run\u3000\u200d☃/a.pt", "-a b'.pt"])
def test_names_that_stay_in_the_folder_are_read_as_before(name: str) -> None:
    """What older versions have saved under odd names is not lost."""
    manifest = Manifest.from_json(_signed(_base(name=name, files=[_FILE | {"path": name}])), "my.json")
    assert (manifest.name, manifest.files[0].path) == (name, name)

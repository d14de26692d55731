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
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.record.manifest import CheckpointMetadata, relative_path
from composerlite.checkpoint.tools.surveying import survey
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


KINDS = {
    "monolithic": ("ba{batch}.pt", "ba3.pt"),
    "sharded": ("ba{batch}", "ba3"),
    "weights": ("ba{batch}.pt", "ba3.pt"),
    "deepspeed": ("ba{batch}-rank{rank}.tar", "ba3-rank0.tar"),
    "crash": ("crash-ba{batch}.pt", "crash-ba3.pt"),
}
NEIGHBOURS = [
    "ba7.pt",
    "ba7",
    "ba7/a",
    "ba7-rank0.tar",
    "ba7-rank1.tar",
    "crash-ba7.pt",
    "ba3-rank0.tar.gz",
    "other.pt",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", [*LEADING_OUT, *ODD_PATHS, *NEIGHBOURS])
def test_a_manifest_cannot_name_a_file_that_is_not_of_its_checkpoint(path: str, kind: str) -> None:
    """Neither outside its folder nor a neighbour: it would be deleted and renamed with the checkpoint."""
    template, name = KINDS[kind]
    own = _FILE | {"path": f"{name}/.metadata" if kind == "sharded" else name}
    for files in ([_FILE | {"path": path}], [own, _FILE | {"path": path}]):
        with pytest.raises(CorruptCheckpointError, match=r"my\.json"):
            Manifest.from_json(_signed(_base(kind=kind, name=name, template=template, files=files)), "my.json")


@pytest.mark.parametrize(
    ("template", "name", "other"),
    [
        ("ba{batch}.pt", "ba1.pt", "ba7.pt"),
        ("ba{batch}-rank{rank}.tar", "ba0-rank0.tar", "ba1-rank1.tar"),
        ("rank{rank}/ba{batch}.tar", "rank0/ba0.tar", "rank1/ba1.tar"),
        ("{run_name}-rank{rank}.tar", "run7-rank0.tar", "run8-rank1.tar"),
        ("{total_wct}-rank{rank}.tar", "1.5-rank0.tar", "1.6-rank1.tar"),
    ],
)
def test_files_of_ranks_differ_in_the_rank_alone(template: str, name: str, other: str) -> None:
    """A file of another moment, or of another run, is a neighbour's, also where its name has as many numbers."""
    files = [_FILE | {"path": path} for path in (name, other)]
    data = _signed(_base(kind="deepspeed", run_name="run7", name=name, template=template, files=files))
    with pytest.raises(CorruptCheckpointError, match="is no file of checkpoint"):
        Manifest.from_json(data, "my.json")


@pytest.mark.parametrize("kind", ["deepspeed", "crash"])
@pytest.mark.parametrize(
    ("template", "paths"),
    [
        ("ep{epoch}-ba{batch}-rank{rank}.tar", [f"ep1-ba3-rank{rank}.tar" for rank in range(12)]),
        ("rank{rank:02d}/ba{batch}-{rank}.tar.gz", [f"rank{rank:02d}/ba3-{rank}.tar.gz" for rank in range(12)]),
        (
            "{run_name}/n{node_rank}-{local_rank}-r{rank}-of{world_size}.tar",
            ["run7/n0-0-r0-of2.tar", "run7/n1-0-r1-of2.tar"],
        ),
        ("{epoch}{batch:04d}-rank{rank}.tar", ["10003-rank0.tar", "10003-rank1.tar"]),
        ("ba{batch}{rank}.tar", ["ba30.tar", "ba31.tar", "ba310.tar"]),
        ("{total_wct}-{epoch_wct:.0f}.{rank}.tar", ["1.5-1.0.tar", "1.5-1.1.tar"]),
        ("{batch_wct}-rank{rank}.tar", ["1.2e-05-rank0.tar", "1.2e-05-rank1.tar"]),
    ],
)
def test_the_files_of_all_ranks_are_those_of_a_checkpoint(template: str, paths: list[str], kind: str) -> None:
    """Whatever the names have besides the rank."""
    files = [_FILE | {"path": path} for path in paths]
    data = _signed(_base(kind=kind, run_name="run7", name=paths[0], template=template, files=files))
    assert [file.path for file in Manifest.from_json(data, "my.json").files] == paths


@pytest.mark.parametrize("kind", ["monolithic", "deepspeed"])
def test_files_of_ranks_are_no_files_of_another_checkpoint(kind: str, tmp_path: Path) -> None:
    """A template that takes all numbers for ranks lets nobody delete or rename what another manifest names."""
    (tmp_path / ".manifest").mkdir()
    planted = _base(kind="deepspeed", name="ba1.pt", template="ba{rank}.pt")
    planted["files"] = [_FILE | {"path": path} for path in ("ba1.pt", "ba7.pt")]
    owner = _base(kind=kind, name="ba7.pt", template="ba{batch}.pt", files=[_FILE | {"path": "ba7.pt"}])
    for fields in (planted, owner):
        (tmp_path / ".manifest" / f"{fields['name']}.json").write_bytes(_signed(fields))
        (tmp_path / fields["name"]).write_bytes(b"1234")
    manifests, damaged = Catalog(tmp_path).manifests_and_faults()
    assert [manifest.name for manifest in manifests] == ["ba7.pt"]
    assert list(damaged) == ["ba1.pt"]
    surveyed = {
        found.name: (found.manifest is None, [file.path for file in found.files]) for found in survey(Folder(tmp_path))
    }
    assert surveyed == {"ba1.pt": (True, ["ba1.pt"]), "ba7.pt": (False, ["ba7.pt"])}


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

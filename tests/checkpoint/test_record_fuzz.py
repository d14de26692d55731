"""A record that is odd, damaged or planted is passed over with a reason, whatever it holds."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import xxhash
from parts import save_batch

from composerlite.checkpoint import Catalog, FileRecord, Manifest
from composerlite.checkpoint.api.step_files import CheckpointMetadata
from composerlite.checkpoint.record.naming import relative_path
from composerlite.checkpoint.record.record import SavedRun, seal, unseal
from composerlite.errors import CorruptCheckpointError, IncompatibleCheckpointError
from composerlite.storage import FileDigest

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
    """Return the fields of a record as they are in ``run/ep1-ba3/.metadata``, without the file itself."""
    manifest = Manifest(
        name="run/ep1-ba3",
        kind="sharded",
        form="sharded",
        template="ep{epoch}-ba{batch}",
        run=SavedRun(name="run", timestamp={"epoch": 1, "batch": 3, "total_wct": 1.5}, metrics={"loss": 0.5}),
        files=(),
    )
    fields = {**dataclasses.asdict(manifest), "files": [_FILE | {"path": "a"}, _FILE | {"path": "sub/b"}]}
    del fields["node"]
    return {**fields, **changes}


def _signed(record: object, body: bytes = b"1234") -> bytes:
    """Return a file with this record, as whoever plants it would write it: with the digests that belong to it."""
    stored = {"size_bytes": len(body), "xxh3_128": xxhash.xxh3_128_hexdigest(body)}
    fields = {"composerlite": 1, "record": record, "stored": stored}
    text = b"\n" + json.dumps(fields).encode()
    return body + text + f"\nCLREC1 {len(text):08x} {xxhash.xxh3_128_hexdigest(text)}\n".encode()


def _record(path: str, data: bytes) -> Manifest:
    """Return the record in the file ``path``, whose content is ``data``."""
    found = unseal(path, len(data), data, "my.file/{}".format)
    assert found is not None
    return found


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


def test_ten_thousand_odd_records_are_passed_over_or_stay_in_their_folder() -> None:
    """Each is refused with a reason that names it, or is one whose paths and numbers are what they must be."""
    draw = random.Random(36)
    path = "run/ep1-ba3/.metadata"
    read = 0
    for _ in range(10_000):
        data = _signed(changed(draw, _base()))
        if draw.random() < 0.05:
            at = draw.randrange(len(data) - 40)
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        manifest = _read(functools.partial(unseal, path, len(data), data, "my.file/{}".format), "my.file/")
        names = () if manifest is None else (manifest.saved_as, *manifest.also)
        if manifest is None or manifest.name not in names:  # refused, or a copy made by hand
            continue
        read += 1
        for one in (manifest.name, *(file.path for file in manifest.files)):
            assert relative_path(one) == one
        assert all(file.path.startswith("run/ep1-ba3/") for file in manifest.files)
        assert manifest.batch >= 0
        assert manifest.size_bytes >= 0
        assert (manifest.order < manifest.order) is False
    assert 200 < read < 5000


def test_ten_thousand_odd_markers_of_steps_are_refused_or_hold_numbers() -> None:
    """The same for ``.metadata.json`` in the directory of a step."""
    draw = random.Random(37)
    for _ in range(10_000):
        fields = changed(draw, {"version": "1", "world_size": 2, "ephemeral": False})
        data = json.dumps(fields).encode()
        marker = _read(functools.partial(CheckpointMetadata.from_json, data, "step1/.metadata.json"), "step1/.meta")
        if marker is None:
            continue
        assert marker.world_size >= 0


FORMS = {
    "file": ("ba{batch}.pt", "ba3.pt", "ba3.pt"),
    "archives": ("ba{batch}-rank{rank}.tar", "ba3-rank0.tar", "ba3-rank0.tar"),
    "sharded": ("ba{batch}", "ba3", "ba3/.metadata"),
    "weights": ("ba{batch}", "ba3", "ba3/model.safetensors.index.json"),
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


@pytest.mark.parametrize(
    ("form", "path"),
    [
        *itertools.product(["file"], [*ODD_PATHS, *NEIGHBOURS]),
        *itertools.product(["archives"], [*ODD_PATHS, *(path for path in NEIGHBOURS if "-rank" not in path)]),
        *itertools.product(["sharded", "weights"], [*sorted({*LEADING_OUT} - {"a//b", "./a", "a/."}), "\ud800"]),
    ],
)
def test_a_record_cannot_name_a_file_that_is_not_of_its_checkpoint(form: str, path: str) -> None:
    """Neither outside its folder nor a neighbour: it would be deleted with the checkpoint."""
    template, name, decider = FORMS[form]
    data = _signed(_base(form=form, name=name, template=template, files=[_FILE | {"path": path}]))
    with pytest.raises(CorruptCheckpointError, match=r"my\.file"):
        _record(decider, data)


@pytest.mark.parametrize(
    ("template", "paths"),
    [
        ("ep{epoch}-ba{batch}-rank{rank}.tar", [f"ep1-ba3-rank{rank}.tar" for rank in range(12)]),
        ("rank{rank:02d}/ba{batch}-{rank}.tar", [f"rank{rank:02d}/ba3-{rank}.tar" for rank in range(12)]),
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
def test_the_files_of_all_ranks_are_those_of_a_checkpoint(template: str, paths: list[str]) -> None:
    """Whatever the names have besides the rank: where they were saved, and in a folder that they were copied to."""
    record = Manifest(
        name=paths[0],
        kind="deepspeed",
        form="archives",
        template=template,
        run=SavedRun(name="run7", timestamp={"batch": 3}),
        files=tuple(FileRecord(path, 4, "0" * 32) for path in paths[1:]),
    )
    data = b"1234" + seal(record, FileDigest(4, xxhash.xxh3_128_hexdigest(b"1234")))
    for folder in ("", "copied/"):
        assert [file.path for file in _record(folder + paths[0], data).files] == [folder + path for path in paths]


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_record_that_is_nested_too_deeply_is_passed_over(opening: str, tmp_path: Path) -> None:
    """A reason, and not a RecursionError that stops the run; the others are listed."""
    save_batch(tmp_path, 1)
    text = f"\n{opening * 200_000}".encode()
    footer = f"\nCLREC1 {len(text):08x} {xxhash.xxh3_128_hexdigest(text)}\n".encode()
    (tmp_path / "ba2.pt").write_bytes(b"1234" + text + footer)
    manifests, faults = Catalog(tmp_path).manifests_and_faults()
    assert [manifest.name for manifest in manifests] == ["ba1.pt"]
    assert list(faults) == ["ba2.pt"]


@pytest.mark.parametrize("name", ["./a.pt", "b//a.pt", "run\u3000\u200d☃/a.pt", "-a b'.pt"])
def test_odd_names_that_stay_in_the_folder_are_read(name: str) -> None:
    """What was saved under odd names is not lost."""
    manifest = _record(name, _signed(_base(form="file", name=name, files=[])))
    assert (manifest.name, manifest.files[0].path) == (name, name)

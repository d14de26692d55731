"""Records of checkpoints: read as written, and refused if damaged or planted."""

from __future__ import annotations

import dataclasses
import errno
import functools
import io
import itertools
import json
import random
import shutil
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import flip, save_batch, value_in

from composerlite.checkpoint import Catalog, FileRecord, Manifest, read_checkpoint
from composerlite.checkpoint.api.step_files import CheckpointMetadata
from composerlite.checkpoint.format import MOST_TAIL_BYTES
from composerlite.checkpoint.format.archive import STATES
from composerlite.checkpoint.format.torch_file import FileInMemory, TorchImage
from composerlite.checkpoint.format.zip_file import ZipRecord, entries, laid_out, trailer
from composerlite.checkpoint.load.reader import opened
from composerlite.checkpoint.record.naming import relative_path
from composerlite.checkpoint.record.record import SavedRun, seal, tail_room, unseal
from composerlite.errors import CorruptCheckpointError, IncompatibleCheckpointError
from composerlite.storage import FileDigest, chunk_bytes_for
from composerlite.storage.disk.writer import Digester
from composerlite.types import Ancestor, Lineage

CONTENTS: dict[str, Any] = {"x": torch.arange(50.0), "n": 3}
OTHER: dict[str, Any] = {"x": -torch.arange(50.0), "n": 4}
"""Contents whose file has the same layout."""
RECORD = Manifest(
    name="a.pt",
    kind="monolithic",
    template="a.pt",
    run=SavedRun(
        name="run ☃",
        timestamp={"batch": 7, "total_wct": 1.5},
        fit_calls=2,
        world_size=4,
        lineage=Lineage(2, "b", (Ancestor(1, "a", (2, 3)),), "ba3.pt"),
        metrics={"loss": 0.5},
        not_finite=("loss",),
    ),
    files=(),
    left_out=("state/optimizers",),
    ephemeral=True,
    timings={"stall": 0.25},
    also={"b.pt": "{batch}.pt"},
)


def with_run(**changes: Any) -> Manifest:
    """The record with other fields of its run."""
    return dataclasses.replace(RECORD, run=dataclasses.replace(RECORD.run, **changes))


def digest_of(body: bytes) -> FileDigest:
    digester = Digester(chunk_bytes_for(len(body)))
    digester.update(body)
    return digester.finish()


def pt_file(record: Manifest = RECORD, contents: Any = CONTENTS) -> bytes:
    """A file that ``torch.load`` opens, with its record as the comment of the zip archive."""
    image, sink = TorchImage(contents), FileInMemory()
    image.comment_bytes = tail_room(record, image.size_bytes)
    image.write(sink)
    body = sink.getvalue()
    return body + seal(record, digest_of(body), room=image.comment_bytes)


def tar_file(record: Manifest = RECORD, contents: Any = CONTENTS) -> bytes:
    """An archive with a ``.pt`` file in it, and its record behind it."""
    inner = io.BytesIO()
    torch.save(contents, inner)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo(STATES)
        member.size = len(inner.getvalue())
        archive.addfile(member, io.BytesIO(inner.getvalue()))
    return file.getvalue() + seal(record, digest_of(file.getvalue()))


FORMS: dict[str, Callable[..., bytes]] = {"a.pt": pt_file, "a.tar": tar_file}


def read(data: bytes, name: str = "a.pt") -> Manifest | None:
    return unseal(name, len(data), data[-MOST_TAIL_BYTES:], "there/{}".format)


def loaded(path: Path) -> Any:
    """What a reader of the package gets from a file."""
    with opened(path) as file:
        file.read()
        return file.contents


def is_found_out(path: Path) -> bool:
    """Check that a file is not listed, or does not verify."""
    listed, _ = Catalog(path.parent).manifests_and_faults([path.name])
    try:
        for manifest in listed:
            Catalog(path.parent).verify(manifest)
    except CorruptCheckpointError:
        return True
    return not listed


@pytest.mark.parametrize("name", FORMS)
def test_a_record_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    """With the size and the digests of the file, which verifies and loads."""
    record = dataclasses.replace(RECORD, name=name)
    data = FORMS[name](record)
    found = read(data, name)
    assert found is not None
    assert dataclasses.replace(found, files=()) == record
    assert found.also == {name: record.template, **record.also}
    assert found.form == "file"
    (file,) = found.files
    body = data[: len(data) - file.tail_bytes]
    assert file == FileRecord(name, **dataclasses.asdict(digest_of(body).with_tail(data[len(body) :])))
    (tmp_path / name).write_bytes(data)
    assert Catalog(tmp_path).manifests() == [found]
    Catalog(tmp_path).verify(found)
    assert torch.equal(loaded(tmp_path / name)["x"], CONTENTS["x"])


def test_zip_and_tar_programs_ignore_the_record(tmp_path: Path) -> None:
    """``zipfile``, ``unzip -t``, ``tarfile`` and ``tar``."""
    for name, make in FORMS.items():
        (tmp_path / name).write_bytes(make())
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None
        assert b"CLREC1" in archive.comment
    with tarfile.open(tmp_path / "a.tar") as archive:
        assert archive.getnames() == [STATES]
    for command in (["unzip", "-t", "a.pt"], ["tar", "-tf", "a.tar"]):
        if shutil.which(command[0]) is not None:
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, ""), done


def test_a_copy_under_another_name_is_not_listed_but_loads_and_verifies(tmp_path: Path) -> None:
    """A copy is never resumed from or deleted by accident, and keeps its digests. In another folder it is listed."""
    path = save_batch(tmp_path / "run", 1)
    copy = Path(shutil.copy(path, path.with_name("best.pt")))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(path, elsewhere)
    for folder in (path.parent, elsewhere):
        assert [manifest.name for manifest in Catalog(folder).manifests()] == ["ba1.pt"]
    assert Catalog(path.parent).manifests_and_faults([copy.name]) == ([], {})
    manifest = Catalog(path.parent).manifest_of(copy.name)
    assert manifest is not None
    assert (manifest.name, manifest.batch) == ("best.pt", 1)
    Catalog(path.parent).verify(manifest)
    assert value_in(read_checkpoint(copy)) == 1
    flip(copy, 200)
    with pytest.raises(CorruptCheckpointError):
        read_checkpoint(copy)
    with pytest.raises(CorruptCheckpointError):
        Catalog(path.parent).verify(manifest)


MANY = {f"metric number {number}": number / 7 for number in range(3000)}


def test_a_record_that_is_too_large_has_no_metrics(caplog: pytest.LogCaptureFixture) -> None:
    """A zip comment holds 65,535 bytes. The log says what is left out."""
    found = read(pt_file(with_run(metrics=MANY)))
    assert found is not None
    assert dataclasses.replace(found, files=()) == dataclasses.replace(with_run(metrics={}), timings={})
    assert "metrics and timings are too large" in caplog.text
    some = with_run(metrics=dict([*MANY.items()][:1000]))
    found = read(pt_file(some))
    assert found is not None
    assert found.run.metrics == some.run.metrics


def test_one_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    """Anywhere in the file. None is loaded with a record that does not vouch for it."""
    path = tmp_path / "a.pt"
    data = pt_file()
    for offset in range(0, len(data), 5):
        damaged = bytearray(data)
        damaged[offset] ^= 1 << (offset % 8)
        path.write_bytes(damaged)
        assert is_found_out(path), offset
        if offset % 35 == 0:
            with pytest.raises(CorruptCheckpointError):
                loaded(path)


def test_the_record_of_another_file_does_not_vouch_for_this_one(tmp_path: Path) -> None:
    """Even if that has the same size: its digests are others."""
    found = read(data := pt_file())
    assert found is not None
    end = -found.files[0].tail_bytes
    path = tmp_path / "a.pt"
    path.write_bytes(data[:end] + pt_file(contents=OTHER)[end:])
    assert len(Catalog(tmp_path).manifests()) == 1
    assert is_found_out(path)
    with pytest.raises(CorruptCheckpointError):
        loaded(path)


BODY = b"PK" + bytes(1000)


def planted(text: bytes, *, length: int | None = None, digest: str | None = None) -> bytes:
    """A file with this text for its record, signed as anybody could."""
    text = b"\n" + text
    length = len(text) if length is None else length
    return BODY + text + f"\nCLREC1 {length:08x} {digest or xxhash.xxh3_128_hexdigest(text)}\n".encode()


def fields(**changes: Any) -> dict[str, Any]:
    """The fields of a good record, with changes. ``...`` leaves a field out."""
    tail = seal(RECORD, digest_of(BODY))
    found = json.loads(tail[: tail.rindex(b"\nCLREC1")])
    return {name: value for name, value in (found | changes).items() if value is not ...}


def with_record(**changes: Any) -> bytes:
    return json.dumps(fields(record=fields()["record"] | changes)).encode()


def with_run_field(**changes: Any) -> bytes:
    return with_record(run=fields()["record"]["run"] | changes)


def with_digest(**changes: Any) -> bytes:
    return json.dumps(fields(stored=fields()["stored"] | changes)).encode()


GOOD = json.dumps(fields()).encode()
PLANTED: dict[str, bytes] = {
    "length beyond the file": planted(GOOD, length=0xFFFFFFFF),
    "length of the whole file": planted(GOOD, length=len(BODY) + len(GOOD) + 1),
    "length of one byte more": planted(GOOD, length=len(GOOD) + 2),
    "no length": planted(GOOD, length=0),
    "no text": planted(b""),
    "wrong digest": planted(GOOD, digest="0" * 32),
    "no JSON": planted(b"{"),
    "no object": planted(b"[1]"),
    "not UTF-8": planted(b"\xff\xfe{}"),
    "nested lists": planted(b"[" * 30_000),
    "nested objects": planted(b'{"composerlite":' * 3_000 + b"1" + b"}" * 3_000),
    "nested in a field": planted(with_run_field(metrics={"a": json.loads("[" * 500 + "]" * 500)})),
    "empty": planted(b"{}"),
    "version of no type": planted(json.dumps(fields(composerlite="1")).encode()),
    "version true": planted(json.dumps(fields(composerlite=True)).encode()),
    "newer version": planted(json.dumps(fields(composerlite=2)).encode()),
    "newer version with a list": planted(json.dumps(fields(composerlite=2, record=[1])).encode()),
    "no record": planted(json.dumps(fields(record=...)).encode()),
    "no digests": planted(json.dumps(fields(stored=...)).encode()),
    **{f"record {value!r}": planted(json.dumps(fields(record=value)).encode()) for value in (None, 1, "x", [], {})},
    **{f"digests {value!r}": planted(json.dumps(fields(stored=value)).encode()) for value in (None, 1, "x", [], {})},
    **{
        f"size {value!r}"[:40]: planted(with_digest(size_bytes=value))
        for value in (0, 1, -1, 2**63, 10**400, 1.5, True, "1", None, [], float("nan"), len(BODY) + 1)
    },
    "size of many digits": planted(
        GOOD.replace(f'"size_bytes": {len(BODY)}'.encode(), b'"size_bytes": ' + b"9" * 9999)
    ),
    "digest of a number": planted(with_digest(xxh3_128=1)),
    "chunks of another file": planted(with_digest(chunks="AAAA")),
    "chunks that are no base 64": planted(with_digest(chunks="=!")),
    "chunks of no size": planted(with_digest(chunk_bytes=-1)),
    "chunks of one byte": planted(with_digest(chunk_bytes=1)),
    "a tail of its own": planted(with_digest(tail_bytes=5, tail_xxh3_128="0" * 32)),
    "a tail that is all": planted(with_digest(tail_bytes=2**62)),
    **{
        f"name {name!r}"[:40]: planted(with_record(name=name))
        for name in ("../x", "/x", "", "a/../b", "x" * 300, 1, None)
    },
    "batch of no type": planted(with_run_field(timestamp={"batch": "7"})),
    "negative batch": planted(with_run_field(timestamp={"batch": -1})),
    "no batch": planted(with_run_field(timestamp={})),
    "infinite time": planted(with_run_field(timestamp={"batch": 1, "total_wct": float("inf")})),
    "metrics of no type": planted(with_run_field(metrics=[1])),
    "lineage of no type": planted(with_run_field(lineage=7)),
}


def test_a_planted_record_that_is_good_is_believed() -> None:
    """So the ones below are refused for what is wrong with them."""
    found = read(planted(GOOD))
    assert found is not None
    assert dataclasses.replace(found, files=()) == RECORD


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_record_is_refused(what: str, tmp_path: Path) -> None:
    """With an error that names the file; listing goes on without it."""
    with pytest.raises((CorruptCheckpointError, IncompatibleCheckpointError), match=r"'there/a\.pt'"):
        read(PLANTED[what])
    (tmp_path / "a.pt").write_bytes(PLANTED[what])
    (tmp_path / "b.pt").write_bytes(pt_file(dataclasses.replace(RECORD, name="b.pt", also={})))
    manifests, faults = Catalog(tmp_path).manifests_and_faults()
    assert ([manifest.name for manifest in manifests], [*faults]) == (["b.pt"], ["a.pt"])


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


RECORD_FORMS = {
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
    template, name, decider = RECORD_FORMS[form]
    data = _signed(_base(form=form, name=name, template=template, files=[_FILE | {"path": path}]))
    with pytest.raises(CorruptCheckpointError, match=r"my\.file"):
        _record(decider, data)


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


GiB = 1 << 30


def build(path: Path, contents: list[tuple[str, bytes]]) -> list[ZipRecord]:
    """Write an archive of small records."""
    records: list[ZipRecord] = []
    with path.open("wb") as file:
        sizes = [(name, len(data)) for name, data in contents]
        for record, (_, data) in zip(laid_out(sizes), contents, strict=True):
            assert file.tell() == record.start
            records.append(record._replace(crc=zlib.crc32(data)))
            file.write(record.header + data + records[-1].descriptor)
        file.write(trailer(records))
    return records


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 200_000), min_size=1, max_size=8))
def test_any_records_are_read_back_and_aligned(sizes: list[int], tmp_path_factory: object) -> None:
    """zipfile reads all, with matching CRCs; data begin at multiples of 64, those of 64 KiB and more of 4096."""
    path = tmp_path_factory.mktemp("zip") / "a.pt"  # type: ignore[attr-defined]
    contents = [(f"data/{i}", bytes([i]) * size) for i, size in enumerate(sizes)]
    for record in build(path, contents):
        assert record.offset % (4096 if record.size >= 65536 else 64) == 0
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(f"archive/{name}") for name, _ in contents} == dict(contents)


def test_records_beyond_four_gigabytes_are_found(tmp_path: Path) -> None:
    """A record of 5 GiB, and small ones behind it: sizes and places need 64 bits. The file is sparse."""
    small = b"behind the large one"
    datas = {"data/0": b"", "data/1": small, "version": b"3\n"}
    sizes = [("data/0", 5 * GiB), ("data/1", len(small)), ("version", 2)]
    records = [
        record._replace(crc=zlib.crc32(data)) for record, data in zip(laid_out(sizes), datas.values(), strict=True)
    ]
    path = tmp_path / "large.pt"
    with path.open("wb") as file:
        for record, data in zip(records, datas.values(), strict=True):
            file.seek(record.start)
            file.write(record.header + data)
            file.seek(record.offset + record.size)
            file.write(record.descriptor)
        file.write(trailer(records))
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/0").file_size == 5 * GiB
        assert archive.getinfo("archive/data/1").header_offset > 5 * GiB
        assert archive.read("archive/data/1") == small
        assert archive.read("archive/version") == b"3\n"


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_a_disk_that_cannot_read_is_not_a_damaged_file(failing: int, tmp_path: Path) -> None:
    """The error of the disk is raised, wherever in the search for the directory the read fails."""
    path = tmp_path / "a.pt"
    build(path, [("data/0", bytes(70_000))])
    data, calls = path.read_bytes(), itertools.count(1)

    def read(offset: int, size: int) -> bytes:
        if next(calls) >= failing:
            raise OSError(errno.EIO, "Input/output error")
        return data[offset : offset + size]

    with pytest.raises(OSError, match="Input/output error"):
        entries(len(data), read, is_whole=True)

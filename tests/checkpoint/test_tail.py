"""The record at the end of a file: read as written, ignored by other programs, refused if damaged or planted."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from parts import flip, save_batch, value_in
from test_record_fuzz import changed

from composerlite.checkpoint import Catalog, FileRecord, Manifest, read_checkpoint
from composerlite.checkpoint.format import MOST_TAIL_BYTES
from composerlite.checkpoint.format.archive import STATES
from composerlite.checkpoint.format.torch_file import FileInMemory, TorchImage
from composerlite.checkpoint.load.reader import opened
from composerlite.checkpoint.record.record import SavedRun, seal, tail_room, unseal
from composerlite.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError, SaveError
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


# ── files with a record ──────────────────────────────────────────────────────────────────────────────────────────────
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


# ── there and back ───────────────────────────────────────────────────────────────────────────────────────────────────
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


@pytest.mark.parametrize("name", FORMS)
def test_a_file_without_a_tail_has_no_record(name: str) -> None:
    """Nor has an empty one, or what is shorter than a tail."""
    data = FORMS[name]()
    found = read(data, name)
    assert found is not None
    for other in (data[: -found.files[0].tail_bytes], b"", b"\n", b"CLREC1"):
        assert read(other, name) is None


@pytest.mark.parametrize("mmap", [True, False])
def test_torch_alone_opens_a_file_with_a_record(mmap: bool, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(pt_file())
    found = torch.load(tmp_path / "a.pt", weights_only=True, mmap=mmap)
    assert torch.equal(found["x"], CONTENTS["x"])


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


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────
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


def test_a_record_names_its_other_places(tmp_path: Path) -> None:
    """Under a name that the record knows, the file is a checkpoint with the template of that name."""
    (tmp_path / "b.pt").write_bytes(pt_file())
    (manifest,) = Catalog(tmp_path).manifests()
    assert (manifest.name, manifest.template) == ("b.pt", "{batch}.pt")
    Catalog(tmp_path).verify(manifest)


# ── a record has room for much, and not for everything ───────────────────────────────────────────────────────────────
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


def test_a_record_that_is_too_large_without_metrics_is_an_error() -> None:
    """It says what makes the record large, before the file gets its name."""
    with pytest.raises(SaveError, match=r"'a\.pt'.*at most 65279.*save_ignore_keys"):
        pt_file(dataclasses.replace(RECORD, left_out=tuple(MANY)))


@pytest.mark.parametrize("size_bytes", [0, 1, 2**20, 2**31, 2**40])
def test_there_is_room_for_what_is_known_last(size_bytes: int) -> None:
    """The digests of files of any size, timings, and the name of a weight, however long and odd."""
    room = tail_room(RECORD, size_bytes)
    chunk_bytes = chunk_bytes_for(size_bytes)
    chunks = "A" * (-(-8 * -(-size_bytes // chunk_bytes) // 3) * 4)
    stored = FileDigest(size_bytes, "f" * 32, chunk_bytes, chunks)
    for name in ("weight", "☃" * 1000):
        last = dataclasses.replace(with_run(not_finite=(name,)), timings={f"timing {i}": 1 / 7 for i in range(12)})
        assert len(seal(dataclasses.replace(last, unpacked_bytes=size_bytes), stored, room=room)) == room


# ── damage ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_one_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    """In every byte of the file. None is loaded with a record that does not vouch for it."""
    path = tmp_path / "a.pt"
    data = pt_file()
    for offset in range(len(data)):
        damaged = bytearray(data)
        damaged[offset] ^= 1 << (offset % 8)
        path.write_bytes(damaged)
        assert is_found_out(path), offset
        if offset % 7 == 0:
            with pytest.raises(CorruptCheckpointError):
                loaded(path)


@pytest.mark.parametrize("name", FORMS)
def test_every_bit_of_the_tail_counts(name: str) -> None:
    """A record with another bit is damaged. It is not called absent."""
    data = FORMS[name]()
    found = read(data, name)
    assert found is not None
    for offset in range(len(data) - found.files[0].tail_bytes, len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[offset] ^= 1 << bit
            with pytest.raises(CorruptCheckpointError, match=f"there/{name}' cannot be read"):
                read(bytes(damaged), name)


def test_a_file_that_was_cut_off_or_extended_has_no_good_record(tmp_path: Path) -> None:
    """At any length; with anything behind its end, its own record included."""
    path = tmp_path / "a.pt"
    data = pt_file()
    found = read(data)
    assert found is not None
    tail = data[-found.files[0].tail_bytes :]
    more = (b"\n", b"x", bytes(100), bytes(70_000), tail, data, tail[:-1], b"\n" + tail)
    for other in (*(data[:length] for length in range(len(data))), *(data + end for end in more), data[1:]):
        with pytest.raises(CorruptCheckpointError):  # noqa: PT012 - either finds it
            assert read(other) is None
            path.write_bytes(other)
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


# ── planted records ──────────────────────────────────────────────────────────────────────────────────────────────────
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


def test_two_thousand_odd_records_are_refused_or_stay_in_their_folder() -> None:
    """Records that anybody may have signed, with one thing in them that is odd, gone, or more."""
    draw = random.Random(41)
    believed = 0
    for _ in range(2000):
        data = planted(json.dumps(changed(draw, fields())).encode())
        try:
            found = read(data)
        except (CorruptCheckpointError, IncompatibleCheckpointError) as e:
            assert "'there/a.pt'" in str(e)  # noqa: PT017 - each has its own reason
            continue
        assert found is not None
        believed += 1
        assert [file.path for file in found.files] == ["a.pt"]
        assert (found.size_bytes, found.files[0].digest.body_bytes) == (len(data), len(BODY))
        assert not {"..", ""} & {*found.name.split("/")[:1]}
        assert found.batch >= 0
    assert 50 < believed < 1500


# ── chance ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def mutated(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """The file with one to three changes: bits, bytes, holes, parts that are doubled, moved, cut or another file's."""
    for _ in range(draw.randint(1, 3)):
        at = draw.choice([draw.randrange(len(data) + 1), max(0, len(data) - draw.randrange(1, 200))])
        size = draw.choice([1, 2, 8, 50, 500, 3000])
        piece = data[at : at + size]
        flipped = bytes(byte ^ (1 << draw.randrange(8)) for byte in piece[:1])
        changes = [
            data[:at] + flipped + data[at + 1 :],
            data[:at] + draw.randbytes(len(piece)) + data[at + size :],
            data[:at] + bytes(len(piece)) + data[at + size :],
            data[:at] + data[at + size :],
            data[:at] + piece + data[at:],
            data[:at],
            data[:at] + other[at : at + size] + data[at + size :],
            data[:at] + other[at:],
        ]
        data = draw.choice(changes)
    return data


@pytest.mark.parametrize(("name", "count"), [("a.pt", 2000), ("a.tar", 300)])
def test_damaged_files_are_never_loaded_with_other_contents(name: str, count: int, tmp_path: Path) -> None:
    """An error, or what was saved; and what its record vouches for is the file as it was saved."""
    draw = random.Random(42)
    path = tmp_path / name
    record = dataclasses.replace(RECORD, name=name)
    data, other = FORMS[name](record), FORMS[name](record, OTHER)
    loads = 0
    for _ in range(count):
        damaged = mutated(draw, data, other)
        path.write_bytes(damaged)
        if damaged == other:
            continue
        assert is_found_out(path) or damaged == data
        try:
            contents = loaded(path)
        except CheckpointError:
            continue
        loads += 1
        if torch.equal(contents["x"], OTHER["x"]):  # all of the other file was put in, but for its record
            assert read(damaged, name) is None
            continue
        assert set(contents) == set(CONTENTS)
        assert torch.equal(contents["x"], CONTENTS["x"])
        assert contents["n"] == 3
    assert loads < count / 5

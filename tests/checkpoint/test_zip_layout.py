"""The archive that a checkpoint is: whatever its size, every zip reader finds its records where they are."""

from __future__ import annotations

import errno
import itertools
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composerlite.checkpoint.format.zip_file import ZipRecord, entries, laid_out, trailer
from composerlite.errors import CorruptCheckpointError

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


def test_more_records_than_sixteen_bits_can_count(tmp_path: Path) -> None:
    """70,000 records: their number needs the large form of the directory."""
    contents = [(f"data/{i}", b"x") for i in range(70_000)]
    build(tmp_path / "many.pt", contents)
    with zipfile.ZipFile(tmp_path / "many.pt") as archive:
        assert len(archive.namelist()) == 70_000
        assert archive.read("archive/data/69999") == b"x"


def looked_up(path: Path) -> tuple[dict[str, ZipRecord], list[int]]:
    """The records of an archive, and where headers were read."""
    data = path.read_bytes()
    asked: list[int] = []

    def read(offset: int, size: int) -> bytes:
        if data[offset : offset + 4] == b"PK\3\4":
            asked.append(offset)
        return data[offset : offset + size]

    return entries(len(data), read, is_whole=True), asked


def headers_in(path: Path) -> list[int]:
    with zipfile.ZipFile(path) as archive:
        return sorted(info.header_offset for info in archive.infolist())


def test_headers_of_other_programs_are_read_once(tmp_path: Path) -> None:
    """They say where the data begin."""
    path = tmp_path / "a.pt"
    torch.save([torch.zeros(20_000 if i % 2 else 10) for i in range(9)], path)
    found, asked = looked_up(path)
    assert [entry.start for entry in found.values()] == asked == headers_in(path)


def test_headers_of_our_own_files_are_not_looked_for(tmp_path: Path) -> None:
    """The directory says that they are ours, and our layout what they hold and where data begin. A directory with
    another byte does not."""
    path = tmp_path / "a.pt"
    records = build(path, [(f"data/{i}", bytes(70_000 if i % 2 else 10)) for i in range(9)])
    found, asked = looked_up(path)
    assert asked == []
    assert list(found.values()) == records
    data, end = path.read_bytes(), records[-1].end
    for entry in records:
        assert data[entry.start : entry.offset] == entry.header
    path.write_bytes(data[: end + 38] + b"\1" + data[end + 39 :])  # an attribute that says nothing
    again, asked = looked_up(path)
    assert again == found
    assert set(asked) == set(headers_in(path))


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


def test_two_records_of_one_name_are_refused(tmp_path: Path) -> None:
    """Readers would differ about the record that counts."""
    path = tmp_path / "a.pt"
    build(path, [("data/0", bytes(10)), ("data/0", bytes(10))])
    with pytest.raises(CorruptCheckpointError, match="twice"):
        looked_up(path)

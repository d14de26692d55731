"""The last frame of a compressed checkpoint contains its record: written, read, ignored by other programs, damaged."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
import tarfile
import time
import zipfile
from array import array
from functools import partial
from pathlib import Path

import lz4.frame
import pytest
import torch
import xxhash
from packing import ARCHIVES, MEMBER, SUFFIXES, TOOLS, pack, suffix_of, tool_output
from packing import torch_bytes as make_torch_bytes

from composerlite.checkpoint import Manifest
from composerlite.checkpoint.format import MOST_TAIL_BYTES
from composerlite.checkpoint.format.compression import KNOWN_COMPRESSORS, Compressor, get_compressor, last_frame
from composerlite.checkpoint.format.packing import format_of, unpacked
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.checkpoint.record.record import SavedRun, seal, tail_room, unseal
from composerlite.storage import FileDigest, StagedFile

PACKED_ARCHIVES = ARCHIVES[1:]
COMPRESSED = (*PACKED_ARCHIVES, *TOOLS)


def record_of(name: str) -> Manifest:
    """A record with values of a usual checkpoint."""
    return Manifest(
        name=name,
        kind="monolithic",
        template=name,
        run=SavedRun(name="r", timestamp={"batch": 3}, fit_calls=1, world_size=1, metrics={"loss": 0.5}),
        files=(),
    )


def tail_of(size_bytes: int = 300) -> bytes:
    """A tail of ``size_bytes``, in the layout of record/record.py."""
    text = b"\n" + json.dumps({"composerlite": 1, "pad": ""}).encode()
    text = text[:-2] + b"x" * (size_bytes - 50 - len(text)) + text[-2:]
    return text + f"\nCLREC1 {len(text):08x} {xxhash.xxh3_128_hexdigest(text)}\n".encode()


TAIL = tail_of()


def constant_seal(stored: FileDigest, plain: FileDigest | None, tail: bytes = TAIL) -> bytes:
    """Return the same tail for every file."""
    return tail


def encoded(compressor: Compressor, data: bytes) -> bytes:
    """``data`` as a frame of the library."""
    encoder = compressor.library().encoder()
    begin = encoder.begin() if hasattr(encoder, "begin") else b""
    return begin + encoder.compress(data) + encoder.flush()


def end_of(path: Path) -> bytes:
    """The bytes that a reader of records reads."""
    return path.read_bytes()[-MOST_TAIL_BYTES:]


def decompressed(path: Path) -> bytes:
    """The file inside, by the program of the codec."""
    suffix = suffix_of(path.name)
    tool = {"gz": "gzip", "tgz": "gzip", "bz2": "bzip2", "lzma": "xz"}.get(suffix.rpartition(".")[2])
    return tool_output(tool or TOOLS[suffix], "-d", "-c", stdin=path.read_bytes())


# ── written and read ─────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("suffix", TOOLS)
@pytest.mark.parametrize("megabytes", [0.02, 4.6])
def test_the_record_of_a_compressed_file_is_read_before_and_after_decompression(
    tmp_path: Path, suffix: str, megabytes: float
) -> None:
    """The program of the codec returns the file that torch opens, and its zip comment is the record."""
    record = record_of(f"a{suffix}")
    image = TorchImage({"x": torch.randn(int(megabytes * 250_000))})
    image.comment_bytes = tail_room(record, image.size_bytes)
    path = tmp_path / record.name
    with StagedFile(path) as staged:
        with format_of(path).open_sink(staged.temporary, image.size_bytes) as sink:
            image.write(sink)
            digest = sink.finish(partial(seal, record, room=image.comment_bytes))
        staged.publish()
    read = unseal(path.name, path.stat().st_size, end_of(path), str)
    assert read is not None
    assert (read.run.metrics, read.files[0].digest) == (record.run.metrics, digest)

    inside = decompressed(path)
    plain = tmp_path / "a.pt"
    plain.write_bytes(inside)
    assert torch.equal(torch.load(plain, weights_only=True)["x"], torch.load(plain, mmap=True)["x"])
    with zipfile.ZipFile(plain) as archive:
        assert archive.testzip() is None
        assert len(archive.comment) == image.comment_bytes
    copied = unseal("a.pt", len(inside), inside[-MOST_TAIL_BYTES:], str)
    assert copied is not None
    assert copied.files[0].digest.xxh3_128 == xxhash.xxh3_128_hexdigest(inside[: -image.comment_bytes])
    with unpacked(path) as file:
        assert file.read(0, file.size_bytes) == inside


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_seal_gets_the_digests_of_the_stored_and_of_the_plain_bytes(tmp_path: Path, suffix: str) -> None:
    """Of all frames before the last one, and of the file inside without its tail. ``finish`` returns the first."""
    path = tmp_path / f"a{suffix}"
    digests: list[tuple[FileDigest, FileDigest | None]] = []

    def keep(stored: FileDigest, plain: FileDigest | None) -> bytes:
        digests.append((stored, plain))
        return TAIL

    digest = pack(path, make_torch_bytes(megabytes=0.1), keep)
    written, ((stored, plain),) = path.read_bytes(), digests
    body = written[: stored.size_bytes]
    assert stored.xxh3_128 == digest.xxh3_128 == xxhash.xxh3_128_hexdigest(body)
    assert (digest.size_bytes, digest.tail_bytes) == (len(written), len(written) - len(body))
    assert len(digest.chunk_digests("a file")) == -(-len(body) // digest.chunk_bytes)
    inside = decompressed(path)
    assert inside.endswith(TAIL)
    without = inside[: -len(TAIL)]
    assert plain == FileDigest(len(without), xxhash.xxh3_128_hexdigest(without))
    assert last_frame(end_of(path)) == (len(end_of(path)) - digest.tail_bytes, TAIL)


@pytest.mark.parametrize("suffix", TOOLS)
@pytest.mark.parametrize("size", [0, 1, "block", "block + 1"])
@pytest.mark.parametrize("is_sealed", [False, True])
def test_files_of_every_size_around_a_block(tmp_path: Path, suffix: str, size: int | str, *, is_sealed: bool) -> None:
    """No byte is lost or written twice, with and without a record."""
    if isinstance(size, str):
        size = (4 << 20) + int(size.partition(" + ")[2] or 0)
    data = array("I", range(size // 4 + 1)).tobytes()[:size]
    path = tmp_path / f"a{suffix}"
    path.touch()
    with format_of(path).open_sink(path, size) as sink:
        for start in range(0, size, 1_000_003):
            sink.write(data[start : start + 1_000_003])
        sink.finish(constant_seal if is_sealed else None)
    expected = data + (TAIL if is_sealed else b"")
    assert decompressed(path) == expected
    with get_compressor(path).decompress(path) as file:
        assert file.read() == expected


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_nothing_is_appended_without_a_seal(tmp_path: Path, suffix: str) -> None:
    """Other users of the sink get a file that ends with their bytes."""
    data = make_torch_bytes(megabytes=0.02)
    digest = pack(path := tmp_path / f"a{suffix}", data)
    assert (digest.size_bytes, digest.tail_bytes) == (path.stat().st_size, 0)
    assert last_frame(end_of(path)) is None


@pytest.mark.parametrize("suffix", TOOLS)
@pytest.mark.parametrize("size_bytes", [100, 3000, 0xFFFF - 256])
def test_modules_of_python_read_both_frames(tmp_path: Path, suffix: str, size_bytes: int) -> None:
    """So do the programs' tests, also with the largest record."""
    data, tail = make_torch_bytes(megabytes=0.05), tail_of(size_bytes)
    digest = pack(path := tmp_path / f"a{suffix}", data, partial(constant_seal, tail=tail))
    tool_output(TOOLS[suffix], "-t", path)
    assert decompressed(path) == data + tail
    with unpacked(path, size_bytes=len(data) + len(tail)) as file:
        assert file.read(0, file.size_bytes) == data + tail
    with unpacked(path, keep_archive=True) as file:
        assert file.read(0, file.size_bytes) == data + tail
    assert last_frame(end_of(path)) == (len(end_of(path)) - digest.tail_bytes, tail)
    written = path.read_bytes()
    if suffix == ".pt.zst":
        zstd = pytest.importorskip("backports.zstd")
        assert zstd.decompress(written) == data + tail
    elif suffix == ".pt.lz4":  # lz4.frame.decompress reads the first frame only
        assert lz4.frame.open(io.BytesIO(written)).read() == data + tail
    else:
        module = {".pt.gz": gzip, ".pt.bz2": bz2, ".pt.xz": lzma}[suffix]
        assert module.decompress(written) == data + tail


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_programs_ignore_the_tail_of_an_archive(tmp_path: Path, suffix: str) -> None:
    """GNU tar lists and extracts, as does Python's tarfile, and so does a load."""
    data = make_torch_bytes(megabytes=0.05)
    pack(path := tmp_path / f"a{suffix}", data, constant_seal)
    assert tool_output("tar", "tf", path) == f"{MEMBER}\n".encode()
    tool_output("tar", "xf", path, "-C", tmp_path)
    assert (tmp_path / MEMBER).read_bytes() == data
    with tarfile.open(path) as archive:
        assert archive.getnames() == [MEMBER]
        member = archive.extractfile(MEMBER)
        assert member is not None
        assert member.read() == data
    with unpacked(path, size_bytes=len(data)) as file:
        assert file.read(0, file.size_bytes) == data
    inside = path.read_bytes() if suffix == ".tar" else decompressed(path)
    assert inside.endswith(bytes(1024) + TAIL)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk_at_the_last_frame_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """An error of ``seal`` or of the write behind it leaves the block, and no thread runs on."""

    def fail(stored: FileDigest, plain: FileDigest | None) -> bytes:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        pack(tmp_path / f"a{suffix}", make_torch_bytes(megabytes=0.02), fail)
    assert list(tmp_path.iterdir()) == []


# ── damage ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("compressor", KNOWN_COMPRESSORS, ids=lambda one: one.extension)
@pytest.mark.parametrize("size_bytes", [100, 301, 302, 303, 304])
def test_every_flipped_bit_of_a_last_frame_is_noticed(compressor: object, size_bytes: int) -> None:
    """Also the bits that no checksum of the format covers, as the time and the flags in the header of gzip."""
    (known,) = [one for one in KNOWN_COMPRESSORS if one is compressor]
    data = tail_of(size_bytes)
    before = encoded(known, os.urandom(500))
    frame = known.frame(data)
    assert last_frame(before + frame) == (len(before), data)
    for bit in range(8 * len(frame)):
        damaged = bytearray(before + frame)
        damaged[len(before) + bit // 8] ^= 1 << bit % 8
        assert last_frame(bytes(damaged)) is None, f"bit {bit} of {8 * len(frame)}"


@pytest.mark.parametrize("compressor", KNOWN_COMPRESSORS, ids=lambda one: one.extension)
def test_a_frame_that_is_cut_off_extended_or_of_another_encoder_is_none(compressor: object) -> None:
    """A last frame is exactly what this package writes."""
    (known,) = [one for one in KNOWN_COMPRESSORS if one is compressor]
    frame = known.frame(TAIL)
    for size in range(len(frame)):
        assert last_frame(frame[:size]) is None
        assert last_frame(frame[size:]) == ((0, TAIL) if size == 0 else None)
    assert last_frame(frame + b"\0") is None
    if known.extension not in ("bz2", "xz"):
        assert last_frame(encoded(known, TAIL)) is None
    assert last_frame(known.frame(b"no record in these bytes\n")) is None
    with pytest.raises(ValueError, match="70000 bytes for a last frame"):
        known.frame(bytes(70_000))


@pytest.mark.parametrize("compressor", KNOWN_COMPRESSORS, ids=lambda one: one.extension)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 127, 128, 129, 16_384, 65_535])
def test_programs_read_a_last_frame_of_every_size(compressor: object, size: int) -> None:
    """The layouts are written by hand, so programs and libraries check them."""
    (known,) = [one for one in KNOWN_COMPRESSORS if one is compressor]
    data = random.Random(size).randbytes(size)
    frame = known.frame(data)
    assert tool_output(TOOLS[f".pt.{known.extension}"], "-d", "-c", stdin=frame * 2) == data * 2
    assert b"".join(known.decoded(io.BytesIO(frame * 2))) == data * 2


def test_two_last_frames_give_the_second(tmp_path: Path) -> None:
    """A record in the bytes before is not taken for that of the file."""
    for known in KNOWN_COMPRESSORS:
        first, second = known.frame(tail_of(400)), known.frame(tail_of(500))
        assert last_frame(first + second) == (len(first), tail_of(500))


# ── attacks ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_thousands_of_magics_take_no_time() -> None:
    """Each try is one pass over 64 KiB, and there are eight at most."""
    bomb = bz2.compress(bytes(random.Random(1).choices(b"ab", k=400_000)))
    ends = [known.frame(b" ")[:7] * (MOST_TAIL_BYTES // 7) for known in KNOWN_COMPRESSORS]
    ends += [b"".join(known.magic for known in KNOWN_COMPRESSORS) * 1000]
    ends += [(known.magic + TAIL) * 170 for known in KNOWN_COMPRESSORS]
    ends += [bomb[:4000] * 16, bz2.compress(bytes(45_000_000)) * 800, bomb[-MOST_TAIL_BYTES:] + ends[0][:1000]]
    for end in ends:
        started = time.perf_counter()
        assert last_frame(end[-MOST_TAIL_BYTES:]) is None
        assert time.perf_counter() - started < 2.0


def test_a_frame_with_more_data_than_a_last_frame_has_is_none() -> None:
    """Decoding stops at 64 KiB, and larger ends of files are no programming error."""
    assert last_frame(bz2.compress(bytes(40_000_000) + TAIL)) is None
    for known in KNOWN_COMPRESSORS:
        assert last_frame(known.magic + bytes(200_000) + TAIL) is None


def test_any_bytes_are_no_frame() -> None:
    """Noise behind the magic of a frame is never an exception."""
    noise = random.Random(7)
    for known in KNOWN_COMPRESSORS:
        frame = known.frame(TAIL)
        for _ in range(300):
            assert last_frame(known.magic + noise.randbytes(noise.randrange(600))) is None
            changed = bytearray(frame)
            for _ in range(noise.randrange(1, 6)):
                changed[noise.randrange(len(frame))] = noise.randrange(256)
            assert last_frame(bytes(changed)) is None or changed == frame
            at = noise.randrange(1, len(frame))
            assert last_frame(frame[:at] + noise.randbytes(noise.randrange(1, 9)) + frame[at:]) is None

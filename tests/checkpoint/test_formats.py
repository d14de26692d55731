"""Compressed checkpoints and archives."""

from __future__ import annotations

import errno
import functools
import io
import json
import lzma
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import xxhash
from packing import ARCHIVES, MEMBER, SUFFIXES, TOOLS, children, independent_read, pack, suffix_of, tool_output
from packing import torch_bytes as make_torch_bytes
from storage.local_store import LocalObjectStore

from composerlite.checkpoint import Manifest
from composerlite.checkpoint.format import MOST_TAIL_BYTES
from composerlite.checkpoint.format.packing import format_of, is_packed, unpacked
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.checkpoint.record.naming import check_template
from composerlite.checkpoint.record.record import SavedRun, seal, tail_room, unseal
from composerlite.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
)
from composerlite.storage import FileDigest, StagedFile
from composerlite.utils import (
    download_checkpoint,
    get_compressor,
    get_file,
    safe_torch_load,
)

Mount = Callable[[str], Path]


@pytest.fixture(scope="module")
def data() -> bytes:
    """A checkpoint of more than one block of any codec."""
    return make_torch_bytes(megabytes=4.6)


@pytest.fixture(scope="module")
def small() -> bytes:
    """A checkpoint of one block."""
    return make_torch_bytes(megabytes=0.3)


def read(path: Path, *, size_bytes: int | None = None) -> bytes:
    """The ``.pt`` bytes, as they are read on load."""
    with unpacked(path, size_bytes=size_bytes) as file:
        return file.read(0, file.size_bytes)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No test leaves a thread or a program behind. Servers that serve all tests may run on."""
    before, threads = children(), set(threading.enumerate())
    yield
    new = set(threading.enumerate()) - threads
    assert [thread.name for thread in new if thread.name.startswith("checkpoint")] == []
    assert set(children()) <= set(before)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_a_save_writes_is_read_by_the_tools_of_the_format(tmp_path: Path, data: bytes, suffix: str) -> None:
    """The same bytes come out, torch opens them, and the digest is that of the file."""
    path = tmp_path / f"ep1{suffix}"
    digest = pack(path, data)
    written = path.read_bytes()
    assert (len(written), xxhash.xxh3_128_hexdigest(written)) == (digest.size_bytes, digest.xxh3_128)
    assert len(digest.chunk_digests("a file")) == -(-digest.size_bytes // digest.chunk_bytes)
    assert independent_read(path) == data
    loaded = torch.load(io.BytesIO(read(path)), weights_only=True)
    assert len(loaded["zeros"]) == 7 * len(loaded["state"]["model"]["weight"])
    assert is_packed(path) == (suffix != ".pt")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


OPTIONS = {
    ".pt.bz2": ["-1", "-9"],
    ".pt.gz": ["-1", "-9"],
    ".pt.lz4": ["-1", "-9", "-BD", "--content-size"],
    ".pt.xz": ["-0", "-9", "-T2", "--check=none"],
    ".pt.zst": ["-1", "-19", "--long=27", "--no-check"],
}


@pytest.mark.parametrize(("suffix", "option"), [(suffix, option) for suffix in OPTIONS for option in OPTIONS[suffix]])
def test_files_of_the_programs_are_read(tmp_path: Path, small: bytes, suffix: str, option: str) -> None:
    """Composer sends its checkpoints through these programs. Any of their options may have been used."""
    path = tmp_path / f"ep1{suffix}"
    path.write_bytes(tool_output(TOOLS[suffix], option, "-c", stdin=small))
    assert read(path) == small


@pytest.mark.parametrize(
    ("suffix", "mode"),
    [(".tar", "w"), (".tar.gz", "w:gz"), (".tgz", "w:gz"), (".tar.bz2", "w:bz2"), (".tar.lzma", "w:xz")],
)
@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_archives_of_composer_are_read(tmp_path: Path, small: bytes, suffix: str, mode: str, form: int) -> None:
    """A folder packed by Python's tarfile, in these modes."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / MEMBER).write_bytes(small)
    path = tmp_path / f"ep1{suffix}"
    with tarfile.open(path, mode, format=form) as archive:  # type: ignore[call-overload]
        archive.add(folder, arcname="")
    assert read(path) == small


@pytest.mark.parametrize("option", ["--gzip", "--bzip2", "--xz", "--zstd", "--format=v7", "--format=pax"])
@pytest.mark.parametrize("what", [".", MEMBER, f"./{MEMBER}"])
def test_archives_of_tar_are_read(tmp_path: Path, small: bytes, option: str, what: str) -> None:
    """Whatever compression tar was told, the name of the file does not matter."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / MEMBER).write_bytes(small)
    path = tmp_path / "ep1.tar"
    tool_output("tar", "-c", option, "-f", path, "-C", tmp_path / "folder", what)
    assert read(path) == small


def test_the_content_decides_and_not_the_name(tmp_path: Path, small: bytes) -> None:
    """A copy of what ``latest-rank0.pt`` points to has a name that says nothing of compression."""
    pack(tmp_path / "ep1.tar.gz", small)
    path = (tmp_path / "ep1.tar.gz").rename(tmp_path / "latest-rank0.pt")
    assert is_packed(path)
    assert read(path) == small


@pytest.mark.parametrize(
    "ending",
    [
        *(".zip", ".pt.foo", ".pt.lzo", ".pt.lzma", ".pt.zip", ".pt.{rank}", ".tar.zst", ".tar.xz", ".gz", ".zst"),
        *(".7z", ".safetensors", ".PT.BR"),
    ],
)
def test_an_ending_that_promises_another_format_is_refused(ending: str) -> None:
    """At construction, with the endings that there are."""
    with pytest.raises(ConfigError, match="save_filename='ep") as e:
        check_template(f"ep{{epoch}}{ending}", argument="save_filename")
    assert [suffix for suffix in SUFFIXES if suffix not in str(e.value)] == []


WITHOUT_LIBRARIES = """
import sys
from pathlib import Path
from packing import SUFFIXES
from composerlite.checkpoint.format.compression import last_frame
from composerlite.checkpoint.format.packing import unpacked
from composerlite.checkpoint.record.naming import check_template
from composerlite.errors import ConfigError

for suffix in SUFFIXES:
    try:
        check_template("ep1" + suffix, argument="save_filename")
    except ConfigError as e:
        print(suffix, "|", e)
for path in map(Path, sys.argv[1:]):
    try:
        with unpacked(path):
            pass
    except ConfigError as e:
        print(path.name, "|", e)
    print(last_frame(path.read_bytes()[-65536:])[1])
"""


def test_the_error_names_a_library_that_is_not_installed(tmp_path: Path, small: bytes) -> None:
    """In a Python without lz4 and backports.zstd. Records can be read there: listing needs no library."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(torch.__file__).parents[1].iterdir():
        if not entry.name.startswith(("lz4", "backports")):
            (packages / entry.name).symlink_to(entry)
    roots = [packages, Path(__file__).parents[2], Path(__file__).parent]
    written = [tmp_path / "ep1.pt.lz4", tmp_path / "ep1.pt.zst"]
    tail = b"\n{}\nCLREC1 00000003 " + b"a" * 32 + b"\n"
    for path in written:
        pack(path, small, lambda stored, plain: tail)
    done = subprocess.run(
        [sys.executable, "-S", "-c", WITHOUT_LIBRARIES, *map(str, written)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots))},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().splitlines()
    assert [line.split(" | ")[0] for line in lines] == [
        ".pt.lz4", ".pt.zst", "ep1.pt.lz4", repr(tail), "ep1.pt.zst", repr(tail)
    ]  # fmt: skip
    assert "save_filename='ep1.pt.lz4': checkpoints that end in '.pt.lz4' need the Python package 'lz4'" in lines[0]
    assert "pip install 'composerlite[compression]'" in lines[0]
    assert "'backports.zstd'" in lines[1]
    assert "cannot be unpacked" in lines[2]
    assert "'lz4'" in lines[2]
    assert ".pt.gz" in lines[1]


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────
PEAK = """
import ctypes, resource, sys
from pathlib import Path
from composerlite.checkpoint.format.archive import tar_bytes, tar_header
from composerlite.checkpoint.format.packing import format_of, unpacked
folder, megabytes = Path(sys.argv[1]), int(sys.argv[2])
memory = ctypes.create_string_buffer(bytes(range(256)) * 4096, 1 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for suffix in sys.argv[3:]:
    path = folder / f"ep1{suffix}"
    path.touch()
    size, is_archive = megabytes << 20, format_of(path).archive
    whole = tar_bytes(size) if is_archive else size
    with format_of(path).open_sink(path, whole) as sink:
        sink.write(tar_header("composer_states.pt", size, at=0) if is_archive else b"")
        for number in range(megabytes):
            memory[number] = bytes([number % 256])
            sink.copy(ctypes.addressof(memory), 1 << 20)
        sink.write(bytes(whole - sink.size_bytes))
        sink.finish()
    with unpacked(path, size_bytes=megabytes << 20) as file:
        path.unlink()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def peak_megabytes(folder: Path, megabytes: int, *suffixes: str) -> int:
    """What writing and reading files of so many megabytes takes at most, besides what was there."""
    command = [sys.executable, "-c", PEAK, str(folder), str(megabytes), *suffixes]
    return int(subprocess.run(command, check=True, capture_output=True).stdout)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Less than a third of a file is in memory while it is written and while it is read."""
    assert peak_megabytes(tmp_path, 200, ".tar", ".pt.gz", ".pt.zst", ".pt.lz4") < 66


@pytest.mark.soak
@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.bz2", ".tar.lzma", ".pt.bz2", ".pt.xz"])
def test_memory_does_not_grow_with_the_file_of_slow_codecs(tmp_path: Path, suffix: str) -> None:
    """The same of the codecs that take their time."""
    assert peak_megabytes(tmp_path, 200, suffix) < 66


def member(name: str = MEMBER, kind: bytes = tarfile.REGTYPE, **fields: str | int) -> tarfile.TarInfo:
    """A member of an archive."""
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def archive_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """An archive of these members, whatever they say."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, content in members:
            info.size = len(content) if info.isreg() else 0
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def with_pax(records: bytes, content: bytes) -> bytes:
    """An archive of one file whose extended header is ``records``."""
    header = member("header", tarfile.XHDTYPE, size=len(records)).tobuf()
    body = member(size=len(content)).tobuf() + content + bytes(-len(content) % 512)
    return header + records + bytes(-len(records) % 512) + body + bytes(1024)


GOOD = b"PK\x03\x04 the checkpoint"
HOSTILE = {
    "a symbolic link": archive_of((member(kind=tarfile.SYMTYPE, linkname="/etc/passwd"), b"")),
    "a hard link": archive_of((member(kind=tarfile.LNKTYPE, linkname="/etc/passwd"), b"")),
    "a device": archive_of((member(kind=tarfile.CHRTYPE, devmajor=1, devminor=5), b"")),
    "a block device": archive_of((member(kind=tarfile.BLKTYPE), b"")),
    "a pipe": archive_of((member(kind=tarfile.FIFOTYPE), b"")),
    "a folder of that name": archive_of((member(kind=tarfile.DIRTYPE), b"")),
    "a sparse file": archive_of((member(kind=tarfile.GNUTYPE_SPARSE), b"")),
    "an absolute name": archive_of((member(f"/{MEMBER}"), GOOD)),
    "a name that leaves the folder": archive_of((member(f"../{MEMBER}"), GOOD)),
    "a name in a folder": archive_of((member(f"a/{MEMBER}"), GOOD)),
    "another name": archive_of((member("states.pt"), GOOD)),
    "another file first": archive_of((member("x"), b"1"), (member(), GOOD)),
    "another file last": archive_of((member(), GOOD), (member("x"), b"1")),
    "a link last": archive_of((member(), GOOD), (member("x", tarfile.SYMTYPE, linkname="/"), b"")),
    "the same twice": archive_of((member(), GOOD), (member(), GOOD)),
    "the same twice, written otherwise": archive_of((member(), GOOD), (member(f"./{MEMBER}"), GOOD)),
    "a folder only": archive_of((member(".", tarfile.DIRTYPE), b"")),
    "another name in the extended header": with_pax(b"22 path=/etc/passwd12\n", GOOD),
    "more bytes than there are": member(size=1 << 40).tobuf(tarfile.GNU_FORMAT) + GOOD,
    "more bytes in the extended header": with_pax(b"22 size=9999999999999\n", GOOD),
    "an extended header without end": member("h", tarfile.XHDTYPE, size=1 << 40).tobuf(tarfile.GNU_FORMAT) + GOOD,
    "an extended header of length 0": with_pax(b"0 a=b\n", GOOD),
    "a size that is no number": with_pax(b"13 size=-100\n", GOOD),
    "a size that is huge": with_pax(b"30 size=99999999999999999999\n", GOOD),
    "a long name without end": member("h", tarfile.GNUTYPE_LONGNAME, size=1 << 40).tobuf(tarfile.GNU_FORMAT) + GOOD,
    "a size below 0": member(size=-5).tobuf(tarfile.GNU_FORMAT) + GOOD,
    "a long name that leaves the folder": archive_of((member("a/" * 200 + MEMBER), GOOD)),
    "no end": archive_of((member(), GOOD))[:1024],
    "an archive of DeepSpeed": archive_of((member(), GOOD), (member("deepspeed/mp_rank_00.pt"), b"1")),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_archives_are_refused(tmp_path: Path, what: str) -> None:
    """None writes a file anywhere, takes memory that it asks for, or is loaded in part."""
    path = tmp_path / "ep1.tar"
    path.write_bytes(HOSTILE[what])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"checkpoint '.*ep1\.tar' cannot be unpacked"):
        read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert [entry.name for entry in tmp_path.iterdir()] == ["ep1.tar"]


def test_the_archives_above_are_refused_for_what_is_wrong_with_them(tmp_path: Path) -> None:
    """One that is made in the same way, with nothing wrong, is read."""
    path = tmp_path / "ep1.tar"
    for good in (archive_of((member(), GOOD)), with_pax(b"16 comment=abcd\n", GOOD)):
        path.write_bytes(good)
        assert read(path) == GOOD


def test_memory_that_a_file_asks_for_is_not_given(tmp_path: Path, small: bytes) -> None:
    """A header may name a dictionary of 3 GiB. No program writes one by its presets."""
    path = tmp_path / "ep1.pt.xz"
    large = bytes([2, 0, 0x21, 1, 39, 0, 0, 0])  # LZMA2 with a dictionary of 3 GiB
    whole = lzma.compress(small)
    path.write_bytes(whole[:12] + large + zlib.crc32(large).to_bytes(4, "little") + whole[24:])
    with pytest.raises(CorruptCheckpointError, match=r"[Mm]emory"):
        read(path)


@pytest.mark.parametrize("suffix", [".pt.gz", ".pt.zst", ".tar.bz2"])
def test_a_bomb_does_not_fill_the_disk(
    tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """It stops before, says that there is no space and how to name another disk, and gives back what it took."""
    monkeypatch.delenv("TMPDIR", raising=False)
    disk = mount("size=8m")
    path = tmp_path / f"ep1{suffix}"
    pack(path, bytes(30 << 20))
    path = Path(shutil.copy(path, disk))
    with pytest.raises(OSError, match="TMPDIR") as e:
        read(path)
    assert e.value.errno == errno.ENOSPC
    assert [entry.name for entry in disk.iterdir()] == [path.name]
    assert shutil.disk_usage(disk).used < 1 << 20


@pytest.mark.soak
@pytest.mark.parametrize("suffix", [".pt.gz", ".pt.xz", ".pt.zst", ".pt.bz2"])
def test_a_bomb_stops_at_a_gigabyte(tmp_path: Path, suffix: str) -> None:
    """Where nothing says how large the checkpoint is, a hundred times the file and a gigabyte are the limit."""
    path = tmp_path / f"ep1{suffix}"
    path.touch()
    block = bytes(16 << 20)
    with format_of(path).open_sink(path, 1200 << 20) as sink:
        for _ in range(75):
            sink.write(block)
        sink.finish()
    with pytest.raises(CorruptCheckpointError, match="unpacks to more than 1073741824 bytes"):
        read(path)


def test_it_is_unpacked_beside_the_checkpoint_or_where_the_user_says(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, small: bytes
) -> None:
    """TMPDIR, if it is set; else the checkpoint's disk; else, if that is read-only, where the system has its files."""
    disk, other = mount("size=4m"), mount("size=4m")
    pack(disk / "ep1.pt.gz", small)

    def device() -> int:
        with unpacked(disk / "ep1.pt.gz"):
            opened = [link.stat() for link in Path("/proc/self/fd").iterdir() if link.exists()]
        (found,) = {one.st_dev for one in opened if one.st_nlink == 0 and one.st_size == len(small)}  # it has no name
        return found

    monkeypatch.setenv("TMPDIR", str(other))
    assert device() == other.stat().st_dev
    monkeypatch.delenv("TMPDIR")
    assert device() == disk.stat().st_dev
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert device() == Path(tempfile.gettempdir()).stat().st_dev


@pytest.mark.parametrize("suffix", TOOLS)
def test_a_compressor_writes_and_reads_files(tmp_path: Path, small: bytes, suffix: str) -> None:
    """Composer's way to use one by hand."""
    path = tmp_path / f"notes{suffix}"
    compressor = get_compressor(str(path))
    assert compressor.exists
    with compressor.compress(path) as file:
        torch.save({"a": torch.ones(3)}, file)
    with compressor.decompress(path) as file:
        content = file.read()
    assert torch.equal(torch.load(io.BytesIO(content), weights_only=True)["a"], torch.ones(3))
    assert read(path) == content


@pytest.mark.parametrize("suffix", [".pt", ".pt.xz", ".tar.gz"])
def test_a_checkpoint_is_brought_to_a_folder(tmp_path: Path, small: bytes, suffix: str) -> None:
    """As a file that ``safe_torch_load`` takes; the second time, too."""
    path, folder = tmp_path / f"ep1{suffix}", tmp_path / "node"
    pack(path, small)
    folder.mkdir()
    for _ in range(2):
        states, extracted, other_rank = download_checkpoint(str(path), str(folder), None, progress_bar=False)
        assert Path(states).read_bytes() == small
        assert extracted == (str(folder / "checkpoint") if suffix == ".tar.gz" else None)
        assert other_rank is False
        assert "state" in safe_torch_load(states)


def test_a_file_is_linked(tmp_path: Path) -> None:
    """There is nothing to copy on one machine; what is there is replaced only when asked for."""
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    get_file(tmp_path / "a", tmp_path / "link")
    assert (tmp_path / "link").read_text() == "a"
    with pytest.raises(FileExistsError):
        get_file(tmp_path / "b", tmp_path / "link")
    get_file(tmp_path / "b", tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").read_text() == "b"
    with pytest.raises(FileNotFoundError, match="there is no file"):
        get_file(tmp_path / "c", tmp_path / "link2")
    with pytest.raises(ConfigError, match="unknown scheme 's4'"):
        get_file("s4://bucket/c", tmp_path / "link2")


def test_a_link_in_a_file_is_followed(tmp_path: Path) -> None:
    """What ends with ``.symlink`` holds the name of another; it need not be said."""
    (tmp_path / "ep1.pt").write_text("content")
    (tmp_path / "latest.pt.symlink").write_text("run/ep1.pt")
    (tmp_path / "round.symlink").write_text("round.symlink")
    for number, name in enumerate(["latest.pt.symlink", "latest.pt"]):
        get_file(tmp_path / name, tmp_path / f"link{number}")
        assert (tmp_path / f"link{number}").read_text() == "content"
    with pytest.raises(CorruptCheckpointError, match="a loop of links"):
        get_file(tmp_path / "round.symlink", tmp_path / "link3")


def test_files_come_from_stores_and_addresses(tmp_path: Path) -> None:
    """A name in a store, with and without a link, and what a web server has; a missing one is named."""
    (tmp_path / "bucket").mkdir()
    with LocalObjectStore(tmp_path / "bucket") as store:
        store.put_bytes("run/ep1.pt", b"content")
        store.put_bytes("run/latest.pt.symlink", b"run/ep1.pt")
        for number, name in enumerate(["run/ep1.pt", "run/latest.pt.symlink", "run/latest.pt"]):
            get_file(name, tmp_path / f"copy{number}", store)
            assert (tmp_path / f"copy{number}").read_bytes() == b"content"
        with pytest.raises(FileExistsError, match="copy0"):
            get_file("run/ep1.pt", tmp_path / "copy0", store)
        with pytest.raises(CheckpointNotFoundError, match=r"run/ep2\.pt"):
            get_file("run/ep2.pt", tmp_path / "copy9", store)
        with pytest.raises(FileNotFoundError, match=r"there is no folder '.*missing'") as caught:
            get_file("run/ep1.pt", tmp_path / "missing/copy", store)
        assert not isinstance(caught.value, CheckpointNotFoundError)  # the object is there
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path / "bucket")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        store.put_bytes("run/my 50% ü.pt", b"content")
        for name in ("ep1.pt", "ep1.pt?token=1#top", "my 50% ü.pt", "my%2050%25%20%C3%BC.pt"):
            get_file(f"{address}/run/{name}", tmp_path / "copy4", overwrite=True)
        assert (tmp_path / "copy4").read_bytes() == b"content"
        with pytest.raises(CheckpointNotFoundError, match="404"):
            get_file(f"{address}/run/ep2.pt", tmp_path / "copy9")
        server.shutdown()
    assert not (tmp_path / "copy9").exists()


@pytest.mark.parametrize(
    "address",
    [
        "http://user:secret@127.0.0.1:1/x.pt",
        "https://secret@127.0.0.1:1/x.pt",
        "http:/user:secret@127.0.0.1:1/x.pt",
        "htp://user:secret@127.0.0.1:1/x.pt",
        "s3://key:secret@bucket/x.pt",
        "http://127.0.0.1:99999/x.pt",
        "http://127.0.0.1:port/x.pt",
        "http://a host/x.pt",
    ],
)
def test_an_address_that_can_never_work_is_refused_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    """It is not tried again and again; a password in it is in no message."""
    with pytest.raises(ConfigError) as caught:
        get_file(address, tmp_path / "copy")
    assert caplog.text == ""
    assert "secret" not in str(caught.value)


def test_a_token_in_an_address_is_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The query of an address, which may hold a token, is neither in the log of a retry nor in the error."""
    answers = iter([503, 404])

    class Failing(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(next(answers))

    with ThreadingHTTPServer(("127.0.0.1", 0), Failing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(CheckpointNotFoundError, match=r"/x\.pt: the server answered 404") as caught:
            get_file(f"http://127.0.0.1:{server.server_port}/x.pt?token=secret", tmp_path / "copy")
        server.shutdown()
    assert "503" in caplog.text
    assert "secret" not in caplog.text + str(caught.value)


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


def end_of(path: Path) -> bytes:
    """The bytes that a reader of records reads."""
    return path.read_bytes()[-MOST_TAIL_BYTES:]


def decompressed(path: Path) -> bytes:
    """The file inside, by the program of the codec."""
    suffix = suffix_of(path.name)
    tool = {"gz": "gzip", "tgz": "gzip", "bz2": "bzip2", "lzma": "xz"}.get(suffix.rpartition(".")[2])
    return tool_output(tool or TOOLS[suffix], "-d", "-c", stdin=path.read_bytes())


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

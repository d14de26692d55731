"""Files that were made to do harm: no code of theirs runs, nothing is written, memory and time are bounded.

Whatever a file holds, what comes of it is a checkpoint or one of our errors.
"""

from __future__ import annotations

import collections
import datetime
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parts import Remember, new_state

from composerlite.checkpoint import load_checkpoint, read_checkpoint, safe_torch_load
from composerlite.core import Precision, State
from composerlite.errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError

HERE = Path(__file__).parent
P = pickle


def archive(folder: Path, data: bytes, storages: Mapping[str, bytes] | None = None) -> Path:
    """A torch file with the pickle ``data`` and what its storages hold."""
    path = folder / "hostile.pt"
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("archive/data.pkl", data)
        out.writestr("archive/version", b"3\n")
        for name, content in (storages or {}).items():
            out.writestr(f"archive/data/{name}", content)
    return path


def text(value: str) -> bytes:
    return P.BINUNICODE + struct.pack("<I", len(value.encode())) + value.encode()


def integer(value: int) -> bytes:
    data = pickle.encode_long(value)
    return P.LONG1 + bytes([len(data)]) + data


def call(name: str, *arguments: bytes) -> bytes:
    """The pickle of a call of ``module.name``."""
    module, _, function = name.rpartition(".")
    return b"c" + f"{module}\n{function}\n".encode() + P.MARK + b"".join(arguments) + P.TUPLE + P.REDUCE


def storage(key: str = "0", count: int = 4, kind: str = "FloatStorage") -> bytes:
    """The pickle of a reference to a storage."""
    parts = text("storage") + b"ctorch\n" + kind.encode() + b"\n" + text(key) + text("cpu") + integer(count)
    return P.MARK + parts + P.TUPLE + P.BINPERSID


def numbers(*values: int) -> bytes:
    return P.MARK + b"".join(map(integer, values)) + P.TUPLE


def tensor(offset: int = 0, shape: tuple[int, ...] = (4,), stride: tuple[int, ...] = (1,), **of: Any) -> bytes:
    """The pickle of a tensor."""
    hooks = call("collections.OrderedDict")
    parts = (storage(**of), integer(offset), numbers(*shape), numbers(*stride), P.NEWFALSE, hooks)
    return call("torch._utils._rebuild_tensor_v2", *parts)


def holding(value: bytes) -> bytes:
    """The pickle of a checkpoint that holds ``value``."""
    return (
        P.PROTO
        + b"\x02"
        + P.EMPTY_DICT
        + text("state")
        + P.EMPTY_DICT
        + text("x")
        + value
        + P.SETITEM
        + P.SETITEM
        + b"."
    )


FOUR = {"0": np.arange(4, dtype=np.float32).tobytes()}


def test_the_parts_of_these_files_are_sound(tmp_path: Path) -> None:
    """What is hostile below is what differs from this."""
    loaded = read_checkpoint(archive(tmp_path, holding(tensor()), FOUR))
    assert loaded["state"]["x"].tolist() == [0, 1, 2, 3]


CODE = {
    "os.system": lambda made: call("os.system", text(f"touch {made}")),
    "posix.system": lambda made: call("posix.system", text(f"touch {made}")),
    "eval": lambda made: call("builtins.eval", text(f"open({made!r}, 'w')")),
    "exec": lambda made: call("__builtin__.exec", text(f"open({made!r}, 'w')")),
    "open": lambda made: call("io.open", text(made), text("w")),
    "Path.touch": lambda made: call("pathlib.Path.touch", call("pathlib.PosixPath", text(made))),
    "Popen": lambda made: call("subprocess.Popen", text(f"touch {made}"), integer(-1)),
    "getattr": lambda made: call("builtins.getattr", b"cpathlib\nPosixPath\n", text("touch")),
    "getattr of a value": lambda made: call("builtins.getattr", call("pathlib.PosixPath", text(made)), text("touch")),
    "partial": lambda made: call("functools.partial", b"cposix\nsystem\n", text(f"touch {made}")),
    "map": lambda made: call("builtins.map", b"cposix\nsystem\n", P.EMPTY_LIST + text("true") + P.APPEND),
    "import": lambda made: call("importlib.import_module", text("antigravity")),
    "numpy load": lambda made: call("numpy.load", text(made)),
    "torch load": lambda made: call("torch.load", text(made)),
    "load_from_bytes": lambda made: call("torch.storage._load_from_bytes", call("_codecs.encode", text("."))),
    "attributes of a class": lambda made: (
        b"ctorch\nTensor\n" + P.EMPTY_DICT + text("__add__") + P.NONE + P.SETITEM + P.BUILD
    ),
    "attributes of a function": lambda made: b"ctorch._utils\n_rebuild_tensor_v2\n" + P.EMPTY_DICT + P.BUILD,
    "attributes of a parameter": lambda made: call(
        "torch._utils._rebuild_parameter_with_state",
        *(tensor(), P.NEWFALSE, call("collections.OrderedDict")),
        P.EMPTY_DICT + text("copy_") + b"cposix\nsystem\n" + P.SETITEM,
    ),
    "memory that numpy would read": lambda made: call(
        "torch._utils._rebuild_parameter_with_state",
        *(tensor(), P.NEWFALSE, call("collections.OrderedDict")),
        P.EMPTY_DICT + text("__array_interface__") + P.EMPTY_DICT + P.SETITEM,
    ),
    "methods of a dict": lambda made: (
        call("collections.OrderedDict") + P.EMPTY_DICT + text("items") + b"cbuiltins\nlist\n" + P.SETITEM + P.BUILD
    ),
    "factory": lambda made: call("collections.defaultdict", b"ctorch._utils\n_rebuild_tensor_v2\n"),
    "object array": lambda made: call("numpy.dtype", text("O8"), P.NEWFALSE, P.NEWTRUE),
    "codec": lambda made: call("_codecs.encode", text("aa"), text("hex")),
    "extension": lambda made: b"\x82\x01",
    "instance": lambda made: P.MARK + text("x") + b"iposix\nsystem\n",
    "next buffer": lambda made: b"\x97",
}


@pytest.mark.parametrize("what", CODE.values(), ids=CODE)
def test_no_code_is_run(tmp_path: Path, what: Callable[[str], bytes]) -> None:
    """Called, reached through an attribute, or put where it would be called later."""
    made = tmp_path / "made"
    path = archive(tmp_path, holding(what(str(made))), FOUR)
    for load in (read_checkpoint, safe_torch_load):
        with pytest.raises((UntrustedCheckpointError, CorruptCheckpointError)):
            load(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["hostile.pt"]
    assert collections.OrderedDict.items(collections.OrderedDict(a=1))


def test_a_dtype_cannot_lie_about_what_it_holds(tmp_path: Path) -> None:
    """numpy's own ``__setstate__`` believes it: bytes of the file would be taken for addresses of objects."""
    objects = call("numpy.dtype", text("V8"), P.NEWFALSE, P.NEWTRUE)
    fields = P.EMPTY_DICT + text("a") + P.MARK + call("numpy.dtype", text("O8")) + integer(0) + P.TUPLE + P.SETITEM
    state = P.MARK + integer(3) + text("|") + P.NONE + P.MARK + text("a") + P.TUPLE + fields
    lying = objects + state + integer(8) + integer(1) + integer(0) + P.TUPLE + P.BUILD
    with pytest.raises((UntrustedCheckpointError, CorruptCheckpointError)):
        read_checkpoint(archive(tmp_path, holding(lying)))
    # A dtype that grows after an array was made with it would let that read beyond its memory.
    word = call("numpy.dtype", text("U1"), P.NEWFALSE, P.NEWTRUE) + P.BINPUT + b"\1"
    longer = P.MARK + integer(3) + text("<") + P.NONE * 3 + integer(4096) + integer(4) + integer(8) + P.TUPLE + P.BUILD
    with pytest.raises((UntrustedCheckpointError, CorruptCheckpointError)):
        read_checkpoint(archive(tmp_path, holding(P.MARK + word + longer + P.BINGET + b"\1" + longer + P.TUPLE)))


def bomb(start: bytes, step: bytes, times: int) -> bytes:
    """A value that is made from the one before, again and again."""
    keep = P.BINPUT + b"\1" + P.POP
    return start + keep + (step + keep) * times + P.BINGET + b"\1"


GET = P.BINGET + b"\1"
BOMBS = {
    "lists in lists": bomb(P.EMPTY_LIST, P.EMPTY_LIST + P.MARK + GET * 10 + P.APPENDS, 40),
    "tuples as a key": P.EMPTY_DICT + bomb(P.EMPTY_TUPLE, GET + GET + P.TUPLE2, 60) + P.NONE + P.SETITEM,
    "tuples in a set": call("builtins.set", P.EMPTY_LIST + bomb(P.EMPTY_TUPLE, GET + GET + P.TUPLE2, 60) + P.APPEND),
    "a deep key": P.EMPTY_DICT + P.EMPTY_TUPLE + P.TUPLE1 * 300_000 + P.NONE + P.SETITEM,
    "a deep list": P.EMPTY_LIST * 300_000 + P.APPEND * 299_999,
    "a list that contains itself": P.EMPTY_LIST + P.BINPUT + b"\1" + GET + P.APPEND,
    "a dict that contains itself": P.EMPTY_DICT + P.BINPUT + b"\1" + text("a") + GET + P.SETITEM,
    "copies of a list": bomb(P.EMPTY_LIST + P.MARK + P.NONE * 100_000 + P.APPENDS, b"", 0)
    + P.POP
    + (P.EMPTY_LIST + P.MARK + call("collections.deque", GET) * 1000 + P.APPENDS),
    "doubled bytes": bomb(text("a" * 1000), call("_codecs.encode", GET, text("hex")), 50),
    "doubled text": bomb(text("a" * 1000), call("builtins.str", P.EMPTY_LIST + GET + P.APPEND + GET + P.APPEND), 50),
    "doubled paths": bomb(call("pathlib.PosixPath", text("a" * 1000)), call("pathlib.PosixPath", GET, GET), 50),
    "many zeros": call("builtins.bytes", integer(1 << 40)),
    "many zeros, mutable": call("builtins.bytearray", integer(1 << 40)),
    "a large array": call("numpy.ndarray", numbers(1 << 40)),
    "an array of nothing": (
        call("numpy.core.multiarray._reconstruct", b"cnumpy\nndarray\n", numbers(0), text("b"))
        + (P.MARK + integer(1) + numbers(1 << 40) + call("numpy.dtype", text("V0"), P.NEWFALSE, P.NEWTRUE))
        + (P.NEWFALSE + call("builtins.bytes") + P.TUPLE + P.BUILD)
    ),
    "a large tensor": call("torch.Tensor", integer(1 << 40)),
    "a large storage": tensor(count=1 << 40, shape=(1 << 40,)),
    "a long text": P.BINUNICODE + b"\xff\xff\xff\x7f" + b"a",
    "a long text of protocol 4": P.BINUNICODE8 + struct.pack("<Q", 1 << 62),
    "a long number": P.LONG4 + b"\xff\xff\xff\x7f",
    "a long shape": tensor(shape=(1,) * 100_000, stride=(1,) * 100_000),
    "marks": P.MARK * 300_000,
    "nested calls": (b"ctorch._tensor\n_rebuild_from_type_v2\n" + P.MARK) * 20_000,
}


@pytest.fixture
def little_memory() -> Iterator[None]:
    """256 MiB more than the process has now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("what", BOMBS.values(), ids=BOMBS)
def test_what_unfolds_without_bound_is_refused(tmp_path: Path, what: bytes) -> None:
    """In a moment, and in little memory."""
    path = archive(tmp_path, holding(what), FOUR)
    with pytest.raises((UntrustedCheckpointError, CorruptCheckpointError)):
        read_checkpoint(path)


TENSORS: dict[str, bytes] = {
    "longer than its storage": tensor(shape=(5,)),
    "beyond it by its offset": tensor(offset=1),
    "beyond it by its stride": tensor(shape=(2,), stride=(4,)),
    "a negative offset": tensor(offset=-1),
    "a negative stride": tensor(stride=(-1,)),
    "a negative size": tensor(shape=(-4,)),
    "sizes whose product is small again": tensor(shape=(1 << 32, 1 << 32), stride=(0, 0)),
    "strides whose product is small again": tensor(shape=(2, 2), stride=(1 << 61, 1 << 61)),
    "fewer strides than sizes": tensor(shape=(2, 2), stride=(1,)),
    "no storage": call(
        "torch._utils._rebuild_tensor_v2", P.NONE, integer(0), numbers(4), numbers(1), P.NEWFALSE, P.NONE
    ),
    "a storage that is not there": tensor(key="1"),
    "a storage out of the archive": tensor(key="../../../etc/passwd"),
    "a storage of fewer bytes": tensor(count=3, shape=(3,)),
    "a storage of more bytes": tensor(count=5, shape=(5,)),
    "a storage of another type": tensor(kind="DoubleStorage"),
    "a storage of less than nothing": tensor(count=-4),
    "sparse, beyond its size": call(
        "torch._utils._rebuild_sparse_tensor",
        call("torch.serialization._get_layout", text("torch.sparse_coo")),
        P.MARK + tensor(key="1", kind="LongStorage", shape=(1, 4)) + tensor() + numbers(2) + P.TUPLE,
    ),
    "sparse, of lists that may hold others many times": call(
        "torch._utils._rebuild_sparse_tensor",
        call("torch.serialization._get_layout", text("torch.sparse_coo")),
        P.MARK
        + (P.EMPTY_LIST + (P.EMPTY_LIST + integer(0) + P.APPEND) + P.APPEND)
        + (P.EMPTY_LIST + integer(1) + P.APPEND)
        + numbers(2)
        + P.TUPLE,
    ),
    "nested, beyond its memory": call("torch._utils._rebuild_nested_tensor", tensor(), tensor(), tensor(), tensor()),
}


@pytest.mark.parametrize("what", TENSORS.values(), ids=TENSORS)
def test_no_tensor_reaches_beyond_its_bytes(tmp_path: Path, what: bytes) -> None:
    """Whatever the pickle says of it."""
    storages = {**FOUR} if what is TENSORS["a storage that is not there"] else {**FOUR, "1": bytes(24) + b"\xff" * 8}
    with pytest.raises((UntrustedCheckpointError, CorruptCheckpointError)):
        read_checkpoint(archive(tmp_path, holding(what), storages))


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    """torch stores its records as they are: one that is compressed is refused unread."""
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("archive/data.pkl", holding(tensor(count=1 << 24, shape=(1 << 24,))))
        with out.open("archive/data/0", "w", force_zip64=True) as record:
            for _ in range(4):
                record.write(bytes(1 << 24))
    with pytest.raises(CorruptCheckpointError, match="compressed"):
        read_checkpoint(path)


def patched(folder: Path, change: Callable[[bytearray, int, int], None]) -> Path:
    """A sound file with something changed; told where the first entry and the end of its directory are."""
    path = archive(folder, holding(tensor()), FOUR)
    data = bytearray(path.read_bytes())
    change(data, data.index(b"PK\1\2"), data.index(b"PK\5\6"))
    path.write_bytes(data)
    return path


def put(layout: str, place: str, at: int, value: int) -> Callable[[bytearray, int, int], None]:
    def change(data: bytearray, entry: int, end: int) -> None:
        struct.pack_into(layout, data, {"entry": entry, "end": end, "local": 0}[place] + at, value)

    return change


def overlapping(data: bytearray, entry: int, end: int) -> None:
    """The last record begins where the first does."""
    last = data.rindex(b"PK\1\2")
    data[last + 42 : last + 46] = data[entry + 42 : entry + 46]


def reaching_over(data: bytearray, entry: int, end: int) -> None:
    """The first record goes on over the next one, and there are no checksums that could tell."""
    (size,) = struct.unpack_from("<I", data, entry + 20)
    struct.pack_into("<2I", data, entry + 20, size + 40, size + 40)
    place = entry
    while place >= 0:
        struct.pack_into("<I", data, place + 16, 0)
        place = data.find(b"PK\1\2", place + 1)


def twice(data: bytearray, entry: int, end: int) -> None:
    """Every record has the name of the first."""
    for name in (b"archive/version", b"archive/data/0\0"):
        place = data.find(name.rstrip(b"\0"), entry)
        data[place : place + 14] = b"archive/data.p"


ARCHIVES = {
    "entries over each other": overlapping,
    "a record over the next": reaching_over,
    "names twice": twice,
    "a directory elsewhere": put("<I", "end", 16, 7),
    "a directory beyond the end": put("<I", "end", 16, 0x7FFFFFFF),
    "a directory larger than the file": put("<I", "end", 12, 0x7FFFFFFF),
    "a record elsewhere": put("<I", "entry", 42, 99),
    "a record beyond the end": put("<I", "entry", 42, 0x7FFFFFFF),
    "a record larger than the file": put("<Q", "entry", 20, 0x7FFFFFFF_7FFFFFFF),
    "a record with a wide size that is not there": put("<Q", "entry", 20, 0xFFFFFFFF_FFFFFFFF),
    "a long name": put("<H", "entry", 28, 0xFFFF),
    "a long extra field": put("<H", "entry", 30, 0xFFFF),
    "data that begin later": put("<H", "local", 28, 1),
    "data that begin far away": put("<H", "local", 28, 0xFFFF),
    "another name at the record": put("<H", "local", 30, 0x4141),
    "encrypted": put("<H", "entry", 8, 1),
    "another checksum": put("<I", "entry", 16, 1),
}


@pytest.mark.parametrize("change", ARCHIVES.values(), ids=ARCHIVES)
def test_an_archive_that_lies_about_itself_is_refused(
    tmp_path: Path, change: Callable[[bytearray, int, int], None]
) -> None:
    """What it says of places, sizes and numbers must be so."""
    with pytest.raises(CorruptCheckpointError):
        read_checkpoint(patched(tmp_path, change))


def test_a_wide_directory_that_is_not_there(tmp_path: Path) -> None:
    """A size in a wide directory costs nothing until the bytes are there."""
    path = archive(tmp_path, holding(tensor()), FOUR)
    data = path.read_bytes()
    end = data.index(b"PK\5\6")
    _, _, _, _, count, size, start, _ = struct.unpack("<4s4H2IH", data[end:])
    for wide_size, wide_start in ((1 << 62, start), (size, 1 << 62)):
        wide = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, wide_size, wide_start)
        path.write_bytes(data[:end] + wide + struct.pack("<4sIQI", b"PK\6\7", 0, end, 1) + data[end:])
        with pytest.raises(CorruptCheckpointError):
            read_checkpoint(path)


def test_an_archive_without_a_pickle_is_refused(tmp_path: Path) -> None:
    """Nor is one with two a checkpoint."""
    for names in ([], ["a/b/data.pkl"], ["a/data.pkl", "b/data.pkl"], ["data.pkl"]):
        path = tmp_path / "other.pt"
        with zipfile.ZipFile(path, "w") as out:
            for name in [*names, "archive/other"]:
                out.writestr(name, b"N.")
        with pytest.raises(CorruptCheckpointError, match=r"data\.pkl"):
            read_checkpoint(path)


FORMS: list[Any] = [
    None, 5, "text", [], [1], {"a": 1}, {1: 2}, {"SGD": 3}, {"SGD": {}}, {"SGD": {"state": 1, "param_groups": [1]}},
    {"SGD": {"state": {"weight": 1}, "param_groups": [{"params": ["weight", "bias"]}]}}, {"weight": 1, "bias": 2},
    {"SGD": {"state": {}, "param_groups": [{"params": [["weight"]]}]}}, {"Timestamp": 1}, {"Timestamp": {"batch": "x"}},
    [("A", 1)], [(1, {})], [["A", {"required": True, "config": 5}]], {"Remember": 3}, torch.ones(1), float("nan"),
]  # fmt: skip


@pytest.mark.parametrize("part", list(new_state().state_dict()))
def test_a_part_of_another_form_is_an_error_of_ours(tmp_path: Path, part: str) -> None:
    """Any value in the place of any part: it is loaded, or an error says which part it is; the model stays."""
    for form in FORMS:
        state = new_state(callbacks=[Remember()], value=0.5)
        torch.save({"state": {**new_state(3, value=2.0).state_dict(), part: form}, "rng": []}, tmp_path / "form.pt")
        error = refusal(tmp_path / "form.pt", state)
        if error is not None and part in ("model", "optimizers", "algorithms"):
            assert "form.pt" in error or "algorithm" in error
            assert state.model.get_parameter("weight").unique().tolist() == [0.5]


def refusal(path: Path, state: State) -> str | None:
    """What is said when ``path`` cannot be loaded; ``None`` if it is."""
    try:
        load_checkpoint(path, state)
    except CheckpointError as e:
        return str(e)
    return None


def test_members_of_our_enumerations_are_loaded(tmp_path: Path) -> None:
    """Those of users as soon as they are allowed by name: see ``test_loading``."""
    torch.save({"state": {"precision": Precision.AMP_BF16}}, tmp_path / "enum.pt")
    assert read_checkpoint(tmp_path / "enum.pt")["state"]["precision"] is Precision.AMP_BF16


def rich_checkpoint(folder: Path) -> None:
    """A small file with everything that a checkpoint may hold."""
    what: list[Any] = [
        *(collections.deque([1], maxlen=3), collections.defaultdict(list, {"a": [1]}), collections.Counter("aab")),
        *(np.arange(5.0), np.float32(2)),
        *(datetime.timedelta(1), {1, 2}, Path("a/b"), 2**80, b"abc", Precision.FP32),
        *(torch.eye(3).to_sparse(), torch.eye(4).t()[1:]),
    ]
    state = new_state(5, callbacks=[Remember(what)], value=1.0)
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizers[0].step()
    torch.save({"state": state.state_dict(), "rng": []}, folder / "archive.pt")
    (folder / "archive.pt").rename(folder / "whole.pt")


def mutations(folder: Path, seed: int, count: int) -> dict[str, Any]:
    """Load so many mutations of a checkpoint in a process with little memory."""
    rich_checkpoint(folder)
    command = [sys.executable, str(HERE / "hostile_child.py"), str(folder), str(seed), str(count)]
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["seen"] == [], "a checkpoint ran, imported or wrote something"
    assert [entry.name for entry in folder.iterdir()] == ["whole.pt"]
    return report


def test_damage_by_chance_does_no_harm(tmp_path: Path) -> None:
    """100 mutations of a file, most of its pickle: an error of ours or a checkpoint, in little memory and time."""
    report = mutations(tmp_path, 0, 100)
    assert sum(report["outcomes"].values()) == 100


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_much_damage_by_chance_does_no_harm(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """10,000 of them; what came of them is said at the end of the test run."""
    report = mutations(tmp_path, 100_000, 10_000)
    assert sum(report["outcomes"].values()) == 10_000
    results = collections.Counter[str]()
    for name, count in report["outcomes"].items():
        results[name.partition(": ")[2]] += count
    told = ", ".join(f"{count} {name}" for name, count in results.most_common())
    cost = f"slowest {report['slowest']:.2f} s, peak {report['peak_bytes'] >> 20} MiB"
    record_property("count", f"mutated checkpoints: 10000 ({told}), {cost}, no code run, nothing written")

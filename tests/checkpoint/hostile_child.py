"""Loads mutated checkpoints in a process of its own, with little memory and a watch over what it does.

Started by ``test_hostile_files`` as ``python hostile_child.py <folder> <seed> <count>``; prints JSON.
"""

from __future__ import annotations

import collections
import importlib
import io
import json
import logging
import os
import pickletools
import pkgutil
import random
import resource
import signal
import struct
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from parts import Remember, new_state

import composerlite.checkpoint
from composerlite.checkpoint import load_checkpoint, read_checkpoint
from composerlite.errors import CheckpointError, ConfigError

SECONDS_PER_FILE = 20
SPARE_BYTES = 512 << 20

FORBIDDEN = (
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.spawn", "subprocess.Popen", "pty.spawn"),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown"),
    *("shutil.rmtree", "shutil.move", "shutil.copyfile", "socket.connect", "socket.bind", "socket.getaddrinfo"),
    *("exec", "compile", "import", "ctypes.dlopen", "code.__new__", "function.__new__", "webbrowser.open"),
)


class Watch:
    """Notes what a checkpoint must never cause."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.on = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        if event in FORBIDDEN or (writes and not Path(str(arguments[0])).is_dir()):  # a folder: a file without a name
            self.seen.append(f"{event} {str(arguments)[:200]}")


def with_pickle(whole: bytes, data: bytes) -> bytes:
    """The archive ``whole`` with another ``data.pkl``, and checksums that are right."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, data if info.filename.endswith("/data.pkl") else old.read(info))
    return out.getvalue()


def pickle_of(whole: bytes) -> bytes:
    """``data.pkl`` of the archive ``whole``."""
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        return archive.read("archive/data.pkl")


INTERESTING = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, (1 << 64) - 1]
OPCODES = (
    b"(.012BCGIJKLMNPQRSTUVX]abcdeghijlopqrstu}\x80\x81\x82\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8e\x8f\x90\x91\x93\x94"
)
NAMES = [
    *(b"cposix\nsystem\n", b"cbuiltins\neval\n", b"cbuiltins\ngetattr\n", b"cos\nremove\n", b"ctorch\nload\n"),
    *(
        b"cnumpy\ndtype\n",
        b"cnumpy\nndarray\n",
        b"cbuiltins\nbytearray\n",
        b"ctorch\nTensor\n",
        b"csubprocess\nPopen\n",
    ),
]


def mutated_bytes(data: bytes, chance: random.Random, most: int = 8) -> bytes:
    """``data`` with a few changes."""
    new = bytearray(data)
    for _ in range(chance.randint(1, most)):
        if not new:
            break
        at = chance.randrange(len(new))
        kind = chance.randrange(7)
        if kind == 0:
            new[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            new[at] = chance.randrange(256)
        elif kind == 2:
            width = chance.choice([1, 2, 4, 8])
            new[at : at + width] = struct.pack("<Q", chance.choice(INTERESTING))[:width]
        elif kind == 3:
            del new[at : at + chance.randint(1, 64)]
        elif kind == 4:
            new[at:at] = new[at : at + chance.randint(1, 200)] * chance.randint(1, 4)
        elif kind == 5:
            new[at] = chance.choice(OPCODES)
        else:
            new[at:at] = chance.choice(NAMES)
    return bytes(new)


TEXTS = [
    "",
    "state",
    "model",
    "weight",
    "exp_avg",
    "params",
    "param_groups",
    "cuda:0",
    "meta",
    "0",
    "99",
    "a" * 300,
    "__class__",
]


def other_value(data: bytes, chance: random.Random) -> bytes:
    """The pickle ``data`` with another number, text or constant in the place of one: it stays a good pickle."""
    ends = list(pickletools.genops(data))
    wanted = ("BININT", "BININT1", "BININT2", "BINUNICODE", "NONE", "NEWTRUE", "NEWFALSE", "EMPTY_DICT", "EMPTY_LIST")
    places = [number for number, (opcode, _, _) in enumerate(ends) if opcode.name in wanted]
    number = chance.choice(places)
    start, end = ends[number][2], ends[number + 1][2]
    assert start is not None
    text = chance.choice(TEXTS).encode()
    values = [
        b"K" + bytes([chance.randrange(256)]),
        b"J" + struct.pack("<i", chance.choice([-1, -(1 << 31), (1 << 31) - 1, chance.randrange(1 << 20)])),
        b"\x8a\x08" + struct.pack("<q", chance.choice([1 << 40, (1 << 62), -(1 << 63), (1 << 63) - 1])),
        b"X" + struct.pack("<I", len(text)) + text,
        *(b"N", b"\x88", b"]", b"}", b")"),
        b"G" + struct.pack(">d", chance.choice([0.5, float("nan"), float("inf"), 1e300])),
    ]
    return data[:start] + chance.choice(values) + data[end:]


def mutated(whole: bytes, chance: random.Random) -> tuple[str, bytes]:
    """One way to damage ``whole``, and what comes of it."""
    kind = chance.choice(["value", "value", "pickle", "pickle", "anywhere", "directory", "cut", "splice", "zeros"])
    if kind == "value":
        data = pickle_of(whole)
        for _ in range(chance.randint(1, 2)):
            data = other_value(data, chance)
        return kind, with_pickle(whole, data)
    if kind == "pickle":
        return kind, with_pickle(whole, mutated_bytes(pickle_of(whole), chance))
    if kind == "anywhere":
        return kind, mutated_bytes(whole, chance, 3)
    if kind == "directory":
        start = whole.index(b"PK\x01\x02")
        return kind, whole[:start] + mutated_bytes(whole[start:], chance, 3)
    if kind == "cut":
        return kind, whole[: chance.randrange(len(whole))]
    one, two = sorted(chance.randrange(len(whole)) for _ in range(2))
    if kind == "zeros":
        return kind, whole[:one] + bytes(two - one) + whole[two:]
    return kind, whole[:one] + whole[two:] + whole[one:two]


def started(whole: Path) -> Watch:
    """Everything that loading imports is imported, and memory is limited to little more than is used."""
    logging.disable(logging.CRITICAL)
    for found in pkgutil.walk_packages(composerlite.checkpoint.__path__, "composerlite.checkpoint."):
        importlib.import_module(found.name)  # those for other systems, too
    "".encode("cp437")  # zipfile decodes names so
    read_checkpoint(whole)
    load_checkpoint(whole, new_state(callbacks=[Remember()]), progress_bar=False)
    for bad in (b"", b"PK"):
        whole.with_name("warm.pt").write_bytes(bad)
        try:
            read_checkpoint(whole.with_name("warm.pt"))
        except CheckpointError:
            continue
    whole.with_name("warm.pt").unlink()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return Watch()


def outcome(path: Path, watch: Watch) -> str:
    """What comes of loading ``path``: the name of one of our errors, or ``loaded``."""
    state = new_state(callbacks=[Remember()])
    watch.on = True
    signal.alarm(SECONDS_PER_FILE)
    try:
        load_checkpoint(path, state, progress_bar=False)
        return "loaded"
    except (CheckpointError, ConfigError) as e:
        return type(e).__name__
    finally:
        signal.alarm(0)
        watch.on = False


def main(folder: Path, seed: int, count: int) -> None:
    """Load ``count`` mutations of the checkpoint ``folder/whole.pt``."""
    torch.set_num_threads(1)
    whole = (folder / "whole.pt").read_bytes()
    watch = started(folder / "whole.pt")
    outcomes: collections.Counter[str] = collections.Counter()
    slowest = 0.0
    for number in range(seed, seed + count):
        kind, data = mutated(whole, random.Random(number))
        path = folder / "mutated.pt"
        path.write_bytes(data)
        began = time.monotonic()
        try:
            outcomes[f"{kind}: {outcome(path, watch)}"] += 1
        except BaseException:
            sys.stderr.write(f"mutation {number} ({kind})\n")
            raise
        slowest = max(slowest, time.monotonic() - began)
    (folder / "mutated.pt").unlink(missing_ok=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    sys.stdout.write(json.dumps({"outcomes": outcomes, "slowest": slowest, "seen": watch.seen, "peak_bytes": peak}))


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

"""Replaces a checkpoint again and again, and dies each time one step later: ``main(FOLDER, KIND, "exchange" or not)``.

A step is whatever python reports to audit hooks about a file of the attempt. Each attempt has a folder of its own,
``<n>``, with the checkpoint ``c`` of weights that are 1, replaced by weights that are 2; in a directory there are files
of the user, too. The last attempt survives. The names of all are printed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from checkpointer_kills import small_model
from parts import save_batch

from composerlite.checkpoint import Catalog, Checkpointer, load_keys, save_state_dict
from composerlite.checkpoint.load.restore import read_checkpoint
from composerlite.checkpoint.record.manifest import FileRecord, Manifest
from composerlite.storage import StagedFile

STEPS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "fcntl.flock", "os.scandir")
OF_THE_USER = ("config.json", "notes/about.txt")


def without_exchange() -> None:
    """From now on the kernel refuses this process to exchange two names, as NFS does (seccomp)."""
    libc = ctypes.CDLL(None, use_errno=True)
    load_number, equals, refuse, allow = 0x20, 0x15, 0x06, 0x06
    number = {"x86_64": 316, "aarch64": 276}[os.uname().machine]  # renameat2
    program = b"".join(
        struct.pack("=HBBI", *one)
        for one in (
            (load_number, 0, 0, 0),
            (equals, 0, 1, number),
            (refuse, 0, 0, 0x00050000 | 22),  # EINVAL
            (allow, 0, 0, 0x7FFF0000),
        )
    )
    filters = ctypes.create_string_buffer(program)
    head = struct.pack("@HP", 4, ctypes.addressof(filters))
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, head, 0, 0) == 0, os.strerror(ctypes.get_errno())


# ── kinds of checkpoints ─────────────────────────────────────────────────────────────────────────────────────────────
def save_file(folder: Path, value: int) -> None:
    save_batch(folder, value, template="c", latest=None, overwrite=True)


def save_sharded(folder: Path, value: int) -> None:
    save_state_dict(folder / "c", {"a": torch.full((1000,), float(value))}, save_overwrite=True)


def save_step(folder: Path, value: int) -> None:
    model = small_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(value))
    Checkpointer(save_overwrite=True).save(folder / "c", model, {"step": value})


def save_archives(folder: Path, value: int) -> None:
    """Two files, as two ranks of DeepSpeed write them."""
    names = ["c-rank0.tar", "c-rank1.tar"]
    catalog = Catalog(folder)
    folder.mkdir(parents=True, exist_ok=True)
    staged = [StagedFile(folder / name) for name in names]
    records: list[FileRecord] = []
    for name, one in zip(names, staged, strict=True):
        one.file.write(content := bytes([value]) * 1000)
        one.flush()
        records.append(FileRecord(name, len(content), xxhash.xxh3_128_hexdigest(content)))
    manifest = Manifest(
        name=names[0],
        kind="deepspeed",
        template="c-rank{rank}.tar",
        run_name="r",
        timestamp={"batch": value},
        files=tuple(records),
    )
    catalog.commit(manifest, {name: one.temporary for name, one in zip(names, staged, strict=True)})
    for one in staged:
        one.leave_behind()
        one.__exit__(None, None, None)


SAVES: dict[str, Callable[[Path, int], None]] = {
    "file": save_file,
    "sharded": save_sharded,
    "step": save_step,
    "archives": save_archives,
}


def value_of(folder: Path, kind: str) -> float:
    """What the weights of ``c`` are, verified."""
    if kind == "file":
        found: Any = read_checkpoint(folder / "c")
        weights = [value for value in found["state"]["model"].values() if value.is_floating_point()]
        return torch.cat([one.flatten() for one in weights]).unique().item()
    if kind == "sharded":
        return next(load_keys(folder / "c", ["a"])).unique().item()
    if kind == "step":
        model = small_model()
        Checkpointer().load(folder / "c", model)
        return torch.cat([one.flatten() for one in model.parameters()]).unique().item()
    (manifest,) = Catalog(folder).manifests()
    Catalog(folder).verify(manifest)
    return float((folder / "c-rank1.tar").read_bytes()[0])


def attempt(folder: Path, kind: str, die_at: int, *, exchange: bool) -> bool:
    """Replace the checkpoint in a process that dies before its step ``die_at``; whether it did."""
    child = os.fork()
    if child == 0:
        if not exchange:
            without_exchange()
        left = die_at

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            if event in STEPS and arguments and str(folder) in str(arguments[0]):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        SAVES[kind](folder, 2)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def main(root: str, kind: str, exchange: str) -> None:
    torch.set_num_threads(1)
    (Path(root) / "warm").mkdir()
    SAVES[kind](Path(root) / "warm", 1)
    for number in range(300):
        folder = Path(root) / str(number)
        folder.mkdir()
        SAVES[kind](folder, 1)
        if kind in ("sharded", "step"):
            for name in OF_THE_USER:
                path = folder / "c" / name
                path.parent.mkdir(exist_ok=True)
                path.write_text("mine")
        died = attempt(folder, kind, number, exchange=exchange == "exchange")
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        if not died:
            break

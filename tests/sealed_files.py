"""Files that contain their record, changed in ways that a test needs."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import torch
import xxhash

from composerlite.checkpoint import Catalog, Manifest
from composerlite.checkpoint.record.record import seal
from composerlite.storage import FileDigest

__all__ = ["DAMAGES", "add_record", "damage", "record_in", "remove_record", "rewrite_record"]

_START = b'\n{"composerlite": '
_FOOTER_BYTES = 50
DAMAGES = ("cut", "extended", "tail", "body", "zeros", "no record")


def record_in(path: Path) -> Manifest:
    """Return the record of the file ``path``."""
    manifest = Catalog(path.parent).manifest_of(path.name)
    assert manifest is not None, f"{path} has no record"
    return manifest


def rewrite_record(path: Path, version: int = 1, **changes: Any) -> None:
    """Change fields of the record in a file, and its version. The digest of the tail agrees with it."""
    data = path.read_bytes()
    start = data.rindex(_START)
    fields = json.loads(data[start:-_FOOTER_BYTES])
    fields = {**fields, "composerlite": version, "record": {**fields["record"], **changes}}
    text = (b"\n" + json.dumps(fields).encode()).ljust(len(data) - start - _FOOTER_BYTES)
    footer = f"\nCLREC1 {len(text):08x} {xxhash.xxh3_128_hexdigest(text)}\n".encode()
    assert len(data) == start + len(text) + len(footer), "there is no room for the changes"
    path.write_bytes(data[:start] + text + footer)


def add_record(path: Path, manifest: Manifest) -> None:
    """Give the zip file ``path``, which has no record, the record of the checkpoint ``manifest`` as its comment."""
    body = bytearray(path.read_bytes())
    manifest = dataclasses.replace(manifest, name=path.name, files=())
    room = len(seal(manifest, _digest_of(body)))
    body[-2:] = room.to_bytes(2, "little")  # the length of the comment
    path.write_bytes(body + seal(manifest, _digest_of(body), room=room))


def _digest_of(data: bytes | bytearray) -> FileDigest:
    return FileDigest(len(data), xxhash.xxh3_128_hexdigest(data))


def remove_record(path: Path) -> Path:
    """Replace the file ``path`` by one with the same contents as another program saves it: without a record."""
    torch.save(torch.load(path, weights_only=True), path)
    return path


def damage(path: Path, how: str) -> None:
    """Damage a checkpoint file; with ``"body"`` one that ``parts.save_batch`` saved, whose weights have one value."""
    if how == "no record":
        remove_record(path)
        return
    data = bytearray(path.read_bytes())
    if how == "tail":
        data[-100] ^= 1
    elif how == "body":
        data[data.index(struct.pack("<f", float(path.stem[2:])))] ^= 1  # a weight
    path.write_bytes({"cut": data[:-1], "extended": data + b"\0", "zeros": bytes(len(data))}.get(how, data))

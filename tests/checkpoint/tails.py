"""Changes to the tail of a file, and to the bytes before it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
import xxhash

_START = b'\n{"composerlite": '
_FOOTER_BYTES = 50
DAMAGES = ("cut", "extended", "tail", "body", "zeros", "no record")


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


def damage(path: Path, how: str) -> None:
    """Damage the file that ``parts.save_batch`` saved. ``"no record"``: another program writes the same contents."""
    data = bytearray(path.read_bytes())
    if how == "no record":
        torch.save(torch.load(path, weights_only=False), path)
        return
    if how == "tail":
        data[-100] ^= 1
    elif how == "body":
        data[data.index(struct.pack("<f", float(path.stem[2:])))] ^= 1  # a weight
    path.write_bytes({"cut": data[:-1], "extended": data + b"\0", "zeros": bytes(len(data))}.get(how, data))

"""Files that contain their record, changed in ways that a test needs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import xxhash

from composerlite.checkpoint import Catalog, Manifest
from composerlite.checkpoint.record.tail import seal
from composerlite.storage import FileDigest

__all__ = ["add_record", "record_in", "remove_record", "reseal"]


def record_in(path: Path) -> Manifest:
    """Return the record of the file ``path``."""
    manifest = Catalog(path.parent).manifest_of(path.name)
    assert manifest is not None, f"{path} has no record"
    return manifest


def reseal(path: Path, **changes: Any) -> None:
    """Change fields of the record in the file ``path``. Its digest and that of the body are right afterwards."""
    manifest = record_in(path)
    digest = manifest.files[0].digest
    data = path.read_bytes()
    changed = dataclasses.replace(manifest, **{"files": manifest.files[1:], **changes})
    tail = seal(changed, digest.with_tail(b""), room=digest.tail_bytes)
    path.write_bytes(data[: digest.body_bytes] + tail)


def add_record(path: Path, manifest: Manifest) -> None:
    """Give the zip file ``path``, which has no record, the record of the checkpoint ``manifest`` as its comment."""
    body = bytearray(path.read_bytes())
    manifest = dataclasses.replace(manifest, name=path.name, files=())
    room = len(seal(manifest, _digest_of(body)))
    body[-2:] = room.to_bytes(2, "little")  # the length of the comment
    path.write_bytes(body + seal(manifest, _digest_of(body), room=room))


def _digest_of(data: bytes | bytearray) -> FileDigest:
    return FileDigest(len(data), xxhash.xxh3_128_hexdigest(data))


def remove_record(path: Path) -> None:
    """Replace the file ``path`` by one with the same contents as another program saves it: without a record."""
    torch.save(torch.load(path, weights_only=True), path)

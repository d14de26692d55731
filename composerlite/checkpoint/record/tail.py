r"""The tail of a checkpoint's deciding file: the record of the checkpoint, behind the bytes that it describes.

A tail is a line of ASCII JSON and a footer with the length and the digest of that line::

    \n{"composerlite": 1, "record": {...}, ...}\nCLREC1 <length: 8 hex digits> <xxh3_128: 32 hex digits>\n

============================== ========================================================================================
deciding file                  where the tail lies
============================== ========================================================================================
``.pt``                        it is the comment of the zip archive, which ends with it
``.tar``                       behind the end-of-archive blocks
``.pt.gz``, ``.tar.gz``, …     in the last frame, which decompresses to the tail of the file inside
``.metadata`` of a directory   behind the index, and behind the digests of the chunks of the data files
``model.safetensors.index…``   in the JSON, under ``metadata``
============================== ========================================================================================

Every program that reads these formats ignores the tail. A file and its record are one object: they are renamed,
copied and deleted together.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import re
from collections.abc import Mapping
from typing import Any, cast

import xxhash

from composerlite.checkpoint.format import MOST_TAIL_BYTES, TAIL_START
from composerlite.checkpoint.format.compression import last_frame
from composerlite.checkpoint.record.manifest import (
    FileRecord,
    Manifest,
    NewerManifestError,
    json_object,
    recorded,
    relative_path,
)
from composerlite.errors import CorruptCheckpointError, SaveError
from composerlite.storage import FileDigest, chunk_bytes_for

__all__ = [
    "MOST_TAIL_BYTES",
    "index_of",
    "seal",
    "seal_index",
    "seal_weights_index",
    "tail_bytes",
    "tail_room",
    "unseal",
    "unseal_index",
    "unseal_weights_index",
]

log = logging.getLogger(__name__)
VERSION = 1
"""Version of the record's layout. A reader refuses a newer one."""
_MOST_COMMENT_BYTES = 0xFFFF - 256
_FOOTER = re.compile(rb"\nCLREC1 ([0-9a-f]{8}) ([0-9a-f]{32})\n\Z")
_FOOTER_BYTES = 50
_VARIABLE_BYTES = 1024
"""Room for values that are unknown until the tail is written: timings, the name of a weight that is not finite."""
_MARK_CHARACTERS = 80
"""Characters kept of the name of a weight, if the record is too long. JSON has up to 12 bytes for each."""
_CHUNK_DIGEST_BYTES = 8
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(FileRecord)}
_EMPTY = FileDigest(2**63 - 1, "0" * 32, 2**40)


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def tail_room(manifest: Manifest, body_bytes: int) -> int:
    """Return the size of the tail to reserve, in bytes, before the body of a file is written.

    A zip archive states the size of its comment before the comment, so the size must not depend on the digests.

    Args:
        manifest: the record.
        body_bytes: size of the body before compression, in bytes.

    Raises:
        SaveError: the record does not fit into a zip comment even without metrics.
    """
    most_chunks = body_bytes // chunk_bytes_for(body_bytes) + 16  # compression may make the body a little larger
    chunks = "x" * (-(-_CHUNK_DIGEST_BYTES * most_chunks // 3) * 4)
    longest = dataclasses.replace(_EMPTY, chunks=chunks)
    room = 0
    for kept in (manifest, dataclasses.replace(manifest, metrics={})):
        room = len(_tail(_fields(kept, longest, longest))) + _VARIABLE_BYTES
        if room <= _MOST_COMMENT_BYTES:
            return room
    raise SaveError(
        f"checkpoint {manifest.name!r}: its record has {room} bytes, of at most {_MOST_COMMENT_BYTES}. "
        "Shorten save_ignore_keys."
    )


def seal(manifest: Manifest, stored: FileDigest, plain: FileDigest | None = None, *, room: int | None = None) -> bytes:
    """Return the tail of a file.

    Args:
        manifest: the record. Its files exclude the deciding file.
        stored: digest of the bytes before the tail, as they are in the file.
        plain: digest of the bytes inside, if the file is compressed.
        room: exact size of the tail in bytes; spaces fill it. If the record does not fit, metrics and timings are left
            out. ``None``: the tail has the size that it needs.
    """
    tail = _tail(_fields(manifest, stored, plain), room)
    if room is not None and len(tail) > room:
        log.warning("checkpoint %s: its metrics and timings do not fit into its record and are left out", manifest.name)
        marks = tuple(name[:_MARK_CHARACTERS] for name in manifest.not_finite[:1])
        manifest = dataclasses.replace(manifest, metrics={}, timings={}, not_finite=marks)
        tail = _tail(_fields(manifest, stored, plain), room)
    assert room is None or len(tail) == room, f"a tail of {len(tail)} bytes for {room}"
    return tail


def seal_index(manifest: Manifest, index: bytes) -> bytes:
    """Return the content of ``.metadata``: the index, the digests of the chunks of all files, and the tail."""
    body = index + b"".join(base64.b64decode(file.chunks) for file in manifest.files)
    stored = FileDigest(len(body), xxhash.xxh3_128_hexdigest(body))
    return body + _tail({**_fields(manifest, stored, None), "index_bytes": len(index)})


def seal_weights_index(manifest: Manifest, index: Mapping[str, Any]) -> bytes:
    """Return the content of ``model.safetensors.index.json``, with the record under ``metadata``."""
    text = _index_text(index)
    stored = FileDigest(len(text), xxhash.xxh3_128_hexdigest(text))
    tail = _tail({**_fields(manifest, stored, None), "chunks": [file.chunks for file in manifest.files]})
    return _index_text({**index, "metadata": {**index["metadata"], "composerlite": tail.decode()}})


def _index_text(index: Mapping[str, Any]) -> bytes:
    return json.dumps(index, indent=1, sort_keys=True).encode()


def _fields(manifest: Manifest, stored: FileDigest, plain: FileDigest | None) -> dict[str, Any]:
    record = dataclasses.asdict(dataclasses.replace(manifest, files=()))
    del record["node"]  # the same bytes lie on the disks of all nodes
    home = "" if manifest.form == "archives" else manifest.home  # each rank may have a folder of its own
    files = [{**dataclasses.asdict(file), "path": file.path.removeprefix(home)} for file in manifest.files]
    for file in files:
        del file["chunks"]
    record["files"] = [{key: value for key, value in file.items() if value != _DEFAULTS[key]} for file in files]
    fields = {"composerlite": VERSION, "record": record, "stored": _digest_fields(stored)}
    return fields if plain is None else {**fields, "plain": _digest_fields(dataclasses.replace(plain, chunk_bytes=0))}


def _digest_fields(digest: FileDigest) -> dict[str, Any]:
    fields: dict[str, Any] = {"size_bytes": digest.size_bytes, "xxh3_128": digest.xxh3_128}
    return {**fields, "chunk_bytes": digest.chunk_bytes, "chunks": digest.chunks} if digest.chunk_bytes else fields


def _tail(fields: Mapping[str, Any], size: int | None = None) -> bytes:
    text = b"\n" + json.dumps(fields).encode("ascii")
    if size is not None:
        text = text.ljust(size - _FOOTER_BYTES)
    return text + f"\nCLREC1 {len(text):08x} {xxhash.xxh3_128_hexdigest(text)}\n".encode()


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def tail_bytes(end: bytes) -> int:
    """Return the size of the tail that ``end`` ends with, as its footer states it; 0 if there is no footer."""
    footer = _FOOTER.search(end)
    return 0 if footer is None else int(footer[1], 16) + _FOOTER_BYTES


def unseal(path: str, size_bytes: int, end: bytes, source: str) -> Manifest | None:
    """Return the record of the file ``path``, which ``end`` is the end of. ``None``: the file has no tail.

    The record's files lie where they are relative to ``path``. ``Manifest.name`` is the name under which the
    checkpoint was saved: it differs from where it lies in a copy. The digests of data files have no chunks.

    Args:
        path: of the file, below the place.
        size_bytes: of the file.
        end: the end of the file, with the whole tail: see :func:`tail_bytes`.
        source: path or URI of the file, for messages.

    Raises:
        CorruptCheckpointError: the tail is damaged, or is that of a file of another size.
        NewerManifestError: a newer version wrote the record.
    """
    try:
        text, before = _find(end)
        if text is None:
            return None
        fields = _checked(text, source)
        # ``plain`` is the digest of the file after another program has decompressed it.
        digests = [recorded(FileDigest, fields[key]) for key in ("stored", "plain") if key in fields]
        body_bytes = size_bytes - len(end) + before
        digest = next((one for one in digests if one.size_bytes == body_bytes and not one.tail_bytes), None)
        if digest is None:
            saved = " or ".join(str(one.size_bytes) for one in digests)
            raise ValueError(
                f"{body_bytes} bytes are before it, but {saved or 'an unknown number of'} bytes were saved"
            )
        digest = digest.with_tail(end[before:])
        digest.chunk_digests()
        return _manifest(fields, FileRecord.of(path, digest))
    except (KeyError, TypeError) as e:
        raise CorruptCheckpointError(f"the record of {source!r} cannot be read: field {e} is missing") from e
    except (ValueError, RecursionError) as e:
        raise CorruptCheckpointError(f"the record of {source!r} cannot be read: {e}") from e


def index_of(data: bytes, source: str) -> bytes:
    """Return the index in ``.metadata``, whose content is ``data``: all of it if it has no tail.

    Raises:
        CorruptCheckpointError: the tail is damaged.
    """
    try:
        text = _text_of(data)
        return data if text is None else data[: cast("int", json_object(text)["index_bytes"])]
    except (KeyError, TypeError, ValueError, RecursionError) as e:
        raise CorruptCheckpointError(f"the record of {source!r} cannot be read: {e}") from e


def unseal_index(path: str, data: bytes, source: str) -> Manifest | None:
    """Return the record of ``.metadata``, whose content is ``data``, with the digests of chunks.

    Args and errors are those of :func:`unseal`; the index is compared with its digest, too.
    """
    manifest = unseal(path, len(data), data, source)
    if manifest is None:
        return None
    decider = manifest.files[0].digest
    if xxhash.xxh3_128_hexdigest(data[: decider.body_bytes]) != decider.xxh3_128:
        raise CorruptCheckpointError(f"the bytes of {source!r} are not those that were saved.")
    return _with_chunks(manifest, data[len(index_of(data, source)) : decider.body_bytes], source)


def unseal_weights_index(path: str, data: bytes, source: str) -> Manifest | None:
    """Return the record in ``model.safetensors.index.json``, whose content is ``data``. Raises as :func:`unseal`."""
    try:
        index = json_object(data)
    except (ValueError, RecursionError) as e:
        raise CorruptCheckpointError(f"{source!r} is no index of weights: {e}") from e
    try:
        tail = index["metadata"].pop("composerlite")
        text = _text_of(tail.encode())
        if text is None:
            raise ValueError("its footer is damaged")
        fields = _checked(text, source)
        saved = recorded(FileDigest, fields["stored"])
        plain = _index_text(index)
        index["metadata"]["composerlite"] = tail
        if xxhash.xxh3_128_hexdigest(plain) != saved.xxh3_128 or _index_text(index) != data:
            raise ValueError("its bytes are not those that were saved")
        manifest = _manifest(fields, FileRecord(path, len(data), xxhash.xxh3_128_hexdigest(data)))
        block = b"".join(base64.b64decode(chunks) for chunks in fields["chunks"])
        return _with_chunks(manifest, block, source)
    except (KeyError, TypeError, AttributeError) as e:
        if b"CLREC1 " in data:
            raise CorruptCheckpointError(f"the record of {source!r} is damaged") from e
        return None  # an index of another program
    except (ValueError, RecursionError) as e:
        raise CorruptCheckpointError(f"the record of {source!r} cannot be read: {e}") from e


def _checked(text: bytes, source: str) -> dict[str, Any]:
    fields = json_object(text)
    if type(version := fields.get("composerlite")) is not int:
        raise ValueError("its version is no whole number")
    if version != VERSION:
        record = fields.get("record")
        raise NewerManifestError(
            f"the record of {source!r} has version {version}, this version reads {VERSION}: update composerlite.",
            cast("Mapping[str, Any]", record if isinstance(record, dict) else {}),
        )
    return fields


def _manifest(fields: Mapping[str, Any], decider: FileRecord) -> Manifest:
    """Return the record with the paths of its files moved to where ``decider`` lies. A copy keeps its saved name."""
    saved = recorded(Manifest, fields["record"])
    for path in (saved.name, *saved.also, *(file.path for file in saved.files)):
        relative_path(path)
    moved = dataclasses.replace(saved, name=saved.path_of(decider.path))
    if saved.form == "archives":
        dataclasses.replace(saved, files=(decider, *saved.files)).check()
        is_named = f"/{decider.path}".endswith(f"/{saved.name}")
        home = decider.path.removesuffix(saved.name) if is_named else moved.home
    else:
        home = moved.home
    others = tuple(dataclasses.replace(file, path=home + file.path) for file in saved.files)
    manifest = dataclasses.replace(moved, files=(decider, *others))
    if saved.form != "archives":
        manifest.check()
    return dataclasses.replace(manifest, name=saved.name)


def _with_chunks(manifest: Manifest, block: bytes, source: str) -> Manifest:
    """Return the record with the digests of chunks that ``block`` contains, file by file."""
    files: list[FileRecord] = [manifest.files[0]]
    at = 0
    for file in manifest.files[1:]:
        count = -(-file.digest.body_bytes // file.chunk_bytes) if file.chunk_bytes else 0
        chunks = block[at : at + _CHUNK_DIGEST_BYTES * count]
        at += _CHUNK_DIGEST_BYTES * count
        files.append(dataclasses.replace(file, chunks=base64.b64encode(chunks).decode()))
    if at != len(block):
        raise CorruptCheckpointError(f"{source!r} has {len(block)} bytes of digests of chunks, and not {at}.")
    return dataclasses.replace(manifest, files=tuple(files))


def _find(end: bytes) -> tuple[bytes | None, int]:
    """Find the JSON of the tail in the end of a file, and the offset in ``end`` where the tail begins.

    Raises:
        ValueError: there is a damaged tail.
    """
    if (text := _text_of(end)) is not None:
        return text, len(end) - len(text) - _FOOTER_BYTES
    if (frame := last_frame(end)) is not None:
        offset, plain = frame
        if (text := _text_of(plain)) is not None:
            return text, offset
    if TAIL_START in end:
        raise ValueError("its footer is damaged")
    return None, 0


def _text_of(end: bytes) -> bytes | None:
    footer = _FOOTER.search(end)
    if footer is None:
        return None
    start = footer.start() - int(footer[1], 16)
    text = end[max(0, start) : footer.start()]
    if start < 0 or xxhash.xxh3_128_hexdigest(text).encode() != footer[2]:
        raise ValueError("its digest does not match")
    return text

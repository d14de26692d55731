r"""The tail of a checkpoint's deciding file: the record of the checkpoint, after the data.

A tail is a line of ASCII JSON and a footer with the length and the digest of the line::

    \n{"composerlite": 1, "record": {...}, ...}\nCLREC1 <length: 8 hex digits> <xxh3_128: 32 hex digits>\n

============================== ========================================================================================
deciding file                  place of the tail
============================== ========================================================================================
``.pt``                        the comment of the zip archive, at its end
``.tar``                       after the end-of-archive blocks
``.pt.gz``, ``.tar.gz``, …     the last frame, which decompresses to the tail of the file inside
``.metadata`` of a directory   after the index and the digests of the chunks of the data files
``model.safetensors.index…``   in the JSON, under ``metadata``
============================== ========================================================================================

Every program that reads these formats ignores the tail. A file and its record are one object: renamed, copied and
deleted together.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import logging
import re
from collections.abc import Generator, Mapping
from typing import Any, cast

import xxhash

from composerlite.checkpoint.format import TAIL_START
from composerlite.checkpoint.format.compression import last_frame
from composerlite.checkpoint.record.manifest import (
    FileRecord,
    Manifest,
    NewerManifestError,
    json_object,
    manifest_from,
    recorded,
)
from composerlite.errors import CorruptCheckpointError, SaveError
from composerlite.storage import FileDigest, chunk_bytes_for
from composerlite.types import StateDict

log = logging.getLogger(__name__)
VERSION = 1
"""Version of the record's layout. A reader refuses any other version."""
_MOST_COMMENT_BYTES = 0xFFFF - 256
_FOOTER = re.compile(rb"\nCLREC1 ([0-9a-f]{8}) ([0-9a-f]{32})\n\Z")
_FOOTER_BYTES = 50
_VARIABLE_BYTES = 1024
"""Room for values that are unknown before the tail is written: timings, and a name in ``not_finite``."""
_MARK_CHARACTERS = 80
"""Characters of a name in ``not_finite`` if the record is too long. JSON has up to 12 bytes for a character."""
_CHUNK_DIGEST_BYTES = 8
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(FileRecord)}
_EMPTY = FileDigest(2**63 - 1, "0" * 32, 2**40)
"""A digest whose fields have the largest number of characters, except ``chunks``."""


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def tail_room(manifest: Manifest, body_bytes: int) -> int:
    """Return the size of the tail to reserve, in bytes, before the body (the bytes before the tail) is written.

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
    for kept in (manifest, _shortened(manifest)):
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
        manifest: the record. ``manifest.files`` excludes the deciding file.
        stored: digest of the bytes before the tail, as in the file.
        plain: digest of the decompressed bytes, for a compressed file.
        room: exact size of the tail in bytes; spaces fill the rest. Metrics and timings are dropped if the record does
            not fit. ``None``: no fixed size.
    """
    tail = _tail(_fields(manifest, stored, plain), room)
    if room is not None and len(tail) > room:
        log.warning("checkpoint %s: its metrics and timings do not fit into its record and are left out", manifest.name)
        tail = _tail(_fields(dataclasses.replace(_shortened(manifest), timings={}), stored, plain), room)
    assert room is None or len(tail) == room, f"a tail of {len(tail)} bytes for {room}"
    return tail


def _shortened(manifest: Manifest) -> Manifest:
    """Return the record without metrics, and with one short name in ``not_finite``."""
    marks = tuple(name[:_MARK_CHARACTERS] for name in manifest.not_finite[:1])
    return dataclasses.replace(manifest, run=dataclasses.replace(manifest.run, metrics={}, not_finite=marks))


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
    """Return the JSON of a tail. Paths are relative to the folder of the checkpoint, and defaults are left out."""
    record = dataclasses.asdict(dataclasses.replace(manifest, files=()))
    del record["node"]  # the disks of all nodes have the same bytes
    home = "" if manifest.form == "archives" else manifest.home  # each rank may have its own folder
    files = [dataclasses.replace(file, path=file.path.removeprefix(home), chunks="") for file in manifest.files]
    record["files"] = [_without_defaults(file) for file in files]
    fields = {"composerlite": VERSION, "record": record, "stored": _without_defaults(stored)}
    if plain is not None:
        fields["plain"] = _without_defaults(dataclasses.replace(plain, chunk_bytes=0, chunks=""))
    return fields


def _without_defaults(value: FileRecord | FileDigest) -> dict[str, Any]:
    return {key: field for key, field in dataclasses.asdict(value).items() if field != _DEFAULTS[key]}


def _tail(fields: Mapping[str, Any], size: int | None = None) -> bytes:
    text = b"\n" + json.dumps(fields).encode("ascii")
    if size is not None:
        text = text.ljust(size - _FOOTER_BYTES)
    return text + f"\nCLREC1 {len(text):08x} {xxhash.xxh3_128_hexdigest(text)}\n".encode()


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def tail_bytes(end: bytes) -> int:
    """Return the size of the tail at the end of ``end``, as the footer states; 0 if there is no footer."""
    footer = _FOOTER.search(end)
    return 0 if footer is None else int(footer[1], 16) + _FOOTER_BYTES


def unseal(path: str, size_bytes: int, end: bytes, source: str) -> Manifest | None:
    """Return the record in the file ``path``. ``None``: the file has no tail.

    The paths of the record's files are relative to the place of ``path``. ``Manifest.name`` is the name at the save, so
    the name of a copy differs from its path. The digests of data files have no chunks.

    Args:
        path: path of the file, below the place.
        size_bytes: size of the file.
        end: the end of the file, with the whole tail: see :func:`tail_bytes`.
        source: path or URI of the file, for messages.

    Raises:
        CorruptCheckpointError: the tail is damaged, or belongs to a file of another size.
        NewerManifestError: a newer version of composerlite wrote the record.
    """
    with _reading(source):
        text = _text_of(end)
        before = len(end) - len(text or b"") - _FOOTER_BYTES
        if text is None and (frame := last_frame(end)) is not None:
            before, text = frame[0], _text_of(frame[1])
        if text is None:
            if TAIL_START in end:
                raise ValueError("its footer is damaged")
            return None
        fields = _checked(text, source)
        # ``plain`` is the digest of the file after another program has decompressed the file.
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
        return manifest_from(fields["record"], FileRecord.of(path, digest))


def index_of(data: bytes, source: str) -> bytes:
    """Return the index in ``.metadata`` with the content ``data``: the whole content if there is no tail.

    Raises:
        CorruptCheckpointError: the tail is damaged.
    """
    with _reading(source):
        text = _text_of(data)
        return data if text is None else data[: cast("int", json_object(text)["index_bytes"])]


def unseal_index(path: str, data: bytes, source: str) -> Manifest | None:
    """Return the record of ``.metadata`` with the whole content ``data``, and with the digests of chunks.

    The index is compared with its digest, too. Arguments and errors are those of :func:`unseal`.
    """
    manifest = unseal(path, len(data), data, source)
    if manifest is None:
        return None
    decider = manifest.files[0].digest
    if xxhash.xxh3_128_hexdigest(data[: decider.body_bytes]) != decider.xxh3_128:
        raise CorruptCheckpointError(f"the bytes of {source!r} are not those that were saved.")
    return _with_chunks(manifest, data[len(index_of(data, source)) : decider.body_bytes], source)


def unseal_weights_index(path: str, data: bytes, source: str) -> Manifest | None:
    """Return the record in ``model.safetensors.index.json`` with the content ``data``.

    ``None``: another program wrote the index. Errors are those of :func:`unseal`.
    """
    try:
        index = json_object(data)
    except ValueError as e:
        raise CorruptCheckpointError(f"{source!r} is no index of weights: {e}") from e
    with _reading(source):
        about = index.get("metadata")
        tail = cast("StateDict", about).pop("composerlite", None) if isinstance(about, dict) else None
        if not isinstance(tail, str):
            if b"CLREC1 " in data:
                raise ValueError("its place in the JSON is damaged")
            return None
        text = _text_of(tail.encode())
        if text is None:
            raise ValueError("its footer is damaged")
        fields = _checked(text, source)
        plain = _index_text(index)
        index["metadata"]["composerlite"] = tail
        saved = recorded(FileDigest, fields["stored"])
        if xxhash.xxh3_128_hexdigest(plain) != saved.xxh3_128 or _index_text(index) != data:
            raise ValueError("its bytes are not those that were saved")
        manifest = manifest_from(fields["record"], FileRecord(path, len(data), xxhash.xxh3_128_hexdigest(data)))
        return _with_chunks(manifest, b"".join(base64.b64decode(chunks) for chunks in fields["chunks"]), source)


@contextlib.contextmanager
def _reading(source: str) -> Generator[None]:
    """Raise errors about wrong fields within the block as CorruptCheckpointError with the name ``source``."""
    try:
        yield
    except (KeyError, TypeError) as e:
        raise CorruptCheckpointError(f"the record of {source!r} cannot be read: field {e} is missing") from e
    except (ValueError, RecursionError) as e:
        raise CorruptCheckpointError(f"the record of {source!r} cannot be read: {e}") from e


def _checked(text: bytes, source: str) -> dict[str, Any]:
    fields = json_object(text)
    if type(version := fields.get("composerlite")) is not int:
        raise ValueError("its version is no whole number")
    if version != VERSION:
        raise NewerManifestError(
            f"the record of {source!r} has version {version}, this version reads {VERSION}: update composerlite."
        )
    return fields


def _with_chunks(manifest: Manifest, block: bytes, source: str) -> Manifest:
    """Return the record with the digests of chunks in ``block``, file by file."""
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


def _text_of(end: bytes) -> bytes | None:
    """Return the JSON line of the tail at the end of ``end``; ``None`` if there is no footer.

    Raises:
        ValueError: the digest in the footer does not match.
    """
    footer = _FOOTER.search(end)
    if footer is None:
        return None
    start = footer.start() - int(footer[1], 16)
    text = end[max(0, start) : footer.start()]
    if start < 0 or xxhash.xxh3_128_hexdigest(text).encode() != footer[2]:
        raise ValueError("its digest does not match")
    return text

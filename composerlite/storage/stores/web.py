"""Helpers of the stores for HTTP: request bodies, ranges, and the translation of answers."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
from collections.abc import Generator, Iterable, Mapping
from typing import Any, final

from composerlite.errors import ConfigError, ObjectStoreError
from composerlite.storage.object_store import meaning_of_status, span_of
from composerlite.storage.stores.base import PIECE_BYTES, Meaning


@final
class RequestBody(io.BytesIO):
    """Body of a request: the bytes as a file. A ``bytes`` object is not copied, a ``memoryview`` is."""

    def read(self, size: int | None = -1, /) -> bytes:
        # At least 1 MiB, for fewer calls: urllib3 requests 16 KiB and sends all bytes returned.
        return super().read(-1 if size is None or size < 0 else max(size, PIECE_BYTES))


def range_header(offset: int, size: int) -> str:
    """Return the value of the header ``Range`` for the arguments of ``BackendStore._read``."""
    return f"bytes={offset}" if offset < 0 else f"bytes={offset}-{offset + size - 1}"


def ranged_answer(
    version: str, headers: Mapping[str, str], pieces: Iterable[bytes], offset: int, size: int
) -> Generator[Any]:
    """Yield the items of ``BackendStore._read`` from an answer to a request with ``Range``.

    Args:
        version: version of the object.
        headers: headers of the answer. Without ``content-range`` the answer has the whole object.
        pieces: body of the answer.
        offset: as in ``_read``.
        size: as in ``_read``.

    Raises:
        ConnectionError: ``pieces`` ends before the last byte of the range.
    """
    content_range = headers.get("content-range")
    total = int(headers["content-length"] if content_range is None else content_range.rpartition("/")[2])
    start, end = span_of(offset, size, total)
    yield version, total
    skip, left = (start if content_range is None else 0), end - start
    for piece in pieces:
        wanted = piece[skip : skip + left]
        skip = max(0, skip - len(piece))
        left -= len(wanted)
        if wanted:
            yield wanted
    if left:
        raise ConnectionError(f"the answer is incomplete: {left} bytes are missing")


def meaning_of_answer(status: int, cause: str, body: str) -> Meaning:
    """Return the error type and the message for an HTTP answer.

    A page of HTML comes from a proxy and is no evidence for or against an object.

    Args:
        status: status of the answer.
        cause: text for the message.
        body: body of the answer as text.
    """
    kind = meaning_of_status(status)
    if kind in (FileNotFoundError, FileExistsError) and body.lstrip().startswith("<"):
        return ObjectStoreError, f"the answer is a page of HTML: check endpoint_url and proxies. {cause}"
    return kind, cause


def base64_md5(data: bytes | memoryview) -> str:
    """Return the MD5 of ``data`` in base 64."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def body_of(data: bytes | memoryview) -> bytes | RequestBody:
    """Return the body of a request with ``data``: bytes up to 1 MiB, otherwise a :class:`RequestBody`.

    boto3 waits for ``100 Continue`` from the service before it sends a file-like body, which is slow for small data.
    """
    return bytes(data) if len(data) <= PIECE_BYTES else RequestBody(data)


def endpoint_of(service: str, endpoint_url: str | None) -> str | None:
    """Return ``endpoint_url``, or else the environment variable ``<service>_ENDPOINT_URL``, or ``None``.

    Raises:
        ConfigError: the value is not an HTTP address.
    """
    endpoint_url = endpoint_url or os.environ.get(f"{service}_ENDPOINT_URL") or None
    if endpoint_url is not None and not re.fullmatch(r"https?://[^\s/?#]+/?", endpoint_url):
        raise ConfigError(
            f"{service}: endpoint_url={endpoint_url!r}: expected scheme and host, such as 'https://host'."
        )
    return endpoint_url


def root_cause(error: BaseException) -> str:
    """Return the text of the innermost cause: the outer errors repeat the address."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return f"{type(error).__name__}: {error}"

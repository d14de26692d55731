"""Downloading a file from an http(s) address."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from pathlib import Path

from composerlite.errors import ObjectStoreError, ObjectStoreTransientError
from composerlite.storage.disk.files import atomic_write
from composerlite.storage.object_store import Progress

__all__ = ["download_url"]

_PIECE_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60.0
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}


def download_url(url: str, path: Path, progress: Progress | None = None) -> None:
    """Make what is at ``url`` the file ``path``, replacing what is there; it appears whole or not at all.

    Raises:
        FileNotFoundError: there is nothing at ``url``. PermissionError: it is not for us.
        ObjectStoreTransientError: it may succeed when it is tried again. ObjectStoreError: it will not.
    """
    request = urllib.request.Request(url, headers={"Accept-Encoding": "identity"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer, atomic_write(path) as file:
            announced = answer.headers.get("Content-Length")
            done = 0
            while piece := answer.read(_PIECE_BYTES):
                file.write(piece)
                done += len(piece)
                if progress is not None:
                    progress(done, int(announced or 0))
            if announced is not None and done != int(announced):
                raise ObjectStoreTransientError(f"downloading {url}: {done} bytes came of {announced}.")
    except urllib.error.HTTPError as e:
        e.close()
        raise _named(e.code, f"downloading {url}: the server answers {e.code} {e.reason}.") from e
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as e:
        raise ObjectStoreTransientError(f"downloading {url}: {e}") from e


def _named(status: int, message: str) -> Exception:
    if status in (404, 410):
        return FileNotFoundError(message)
    if status in (401, 403, 407):
        return PermissionError(message)
    return ObjectStoreTransientError(message) if status in _TRANSIENT else ObjectStoreError(message)

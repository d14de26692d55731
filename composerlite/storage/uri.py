"""URIs: the store and the name that ``s3://bucket/run/ep1.pt`` means, opening that store, and downloads by HTTP."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from composerlite.errors import ConfigError, ObjectStoreTransientError, did_you_mean
from composerlite.storage.disk.files import atomic_write
from composerlite.storage.object_store import ObjectStore, Progress, meaning_of_status

_URI = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<bucket>[^/]*)/?(?P<path>.*)", re.DOTALL)
_STORES = {
    "s3": ("composerlite.storage.stores.s3", "S3ObjectStore"),
    "gs": ("composerlite.storage.stores.gcs", "GCSObjectStore"),
    "oci": ("composerlite.storage.stores.oci", "OCIObjectStore"),
    "libcloud": ("composerlite.storage.stores.libcloud", "LibcloudObjectStore"),
    "sftp": ("composerlite.storage.stores.sftp", "SFTPObjectStore"),
}
"""Module and class of the store of each scheme. The module imports the SDK; it is imported when a store is opened."""
_DOWNLOADS = ("http", "https")
_SCHEMES = (*_STORES, *_DOWNLOADS, "file")
_NEARLY = re.compile(rf"\s*(?P<scheme>{'|'.join(_SCHEMES)}):/+(?P<rest>.*)", re.DOTALL | re.IGNORECASE)
"""A URI that begins with a space, or has lost a slash, as in a ``pathlib.Path``. No path is meant by it."""
_PIECE_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60.0


def parse_uri(uri: str) -> tuple[str, str, str]:
    """Scheme, bucket and name of ``uri``; for a path, or a ``file://`` URI, two empty strings and the path.

    >>> parse_uri("s3://bucket/run/ep1.pt")
    ('s3', 'bucket', 'run/ep1.pt')
    >>> parse_uri("sftp://user@host:2222/data/run")
    ('sftp', 'user@host:2222', 'data/run')
    >>> parse_uri("runs/ep1.pt")
    ('', '', 'runs/ep1.pt')

    Raises:
        ConfigError: it is empty, the scheme is not known, or there is no bucket; or it is no URI, but nearly one.
    """
    if not uri.strip():
        raise ConfigError(
            f"{uri!r}: expected a path or a URI, and got an empty text, as a variable that is not set gives one. The "
            "current directory is '.'."
        )
    found = _URI.fullmatch(uri)
    if found is None and (nearly := _NEARLY.fullmatch(uri)) is not None:
        meant = f"{nearly['scheme']}://{'/' if nearly['scheme'].lower() == 'file' else ''}{nearly['rest']}"
        raise ConfigError(
            f"{uri!r} is no URI: did you mean {meant!r}? Give it as text: a pathlib.Path takes one of the slashes away."
        )
    if found is None:
        return "", "", uri
    scheme, bucket, path = found["scheme"].lower(), found["bucket"], found["path"]
    if scheme == "file":
        if bucket not in ("", "localhost"):
            raise ConfigError(f"{uri!r}: a file:// URI names a file of this machine, as in 'file:///data/run'.")
        return "", "", unquote(f"/{path}")
    if scheme not in _STORES and scheme not in _DOWNLOADS:
        raise ConfigError(f"{uri!r}: unknown scheme {scheme!r}.{did_you_mean(scheme, _SCHEMES)}")
    if not bucket:
        raise ConfigError(f"{uri!r}: expected a bucket after the scheme, such as '{scheme}://bucket/run'.")
    return scheme, bucket, path


def is_uri(path: str) -> bool:
    """Return true if ``path`` is something else than a path of this machine."""
    return parse_uri(path)[0] != ""


def open_store(uri: str, **backend_kwargs: Any) -> ObjectStore:
    """The store that holds what ``uri`` names: of its bucket, whatever the name in it.

    Args:
        uri: as :func:`parse_uri` takes it, but no path and no download address.
        backend_kwargs: further arguments of the store's class, as for ``S3ObjectStore``.

    Returns:
        The store, to be closed by the caller.

    Raises:
        ConfigError: the URI names no store, the store's library is not installed, or an argument is wrong.
    """
    scheme, bucket, _ = parse_uri(uri)
    if scheme not in _STORES:
        raise ConfigError(f"{uri!r} is no address in an object store.{did_you_mean(scheme, _STORES)}")
    module, name = _STORES[scheme]
    store: ObjectStore = getattr(importlib.import_module(module), name).at(bucket, **backend_kwargs)
    return store


def maybe_create_object_store_from_uri(uri: str) -> ObjectStore | None:
    """The store of ``uri``, ``None`` for a path of this machine."""
    return open_store(uri) if is_uri(uri) else None


def download_url(url: str, path: Path, progress: Progress | None = None) -> None:
    """Download ``url`` to the file ``path``, replacing what is there; it appears atomically.

    Args:
        url: an ``http`` or ``https`` address.
        path: of the local file.
        progress: called with (bytes received, total).

    Raises:
        FileNotFoundError: there is nothing at ``url``. PermissionError: it is not for us.
        ObjectStoreTransientError: it may succeed when it is tried again. ObjectStoreError: it will not.
    """
    import http.client  # most processes download nothing
    import urllib.error
    import urllib.request

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
        raise meaning_of_status(e.code)(f"downloading {url}: the server answers {e.code} {e.reason}.") from e
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as e:
        raise ObjectStoreTransientError(f"downloading {url}: {e}") from e

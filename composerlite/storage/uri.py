"""URIs such as ``s3://bucket/run/ep1.pt``: parse them, open their stores, and download by HTTP."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

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
"""Module and class of the store of each scheme. The module imports the SDK, so import the module late."""
_DOWNLOADS = ("http", "https")
_SCHEMES = (*_STORES, *_DOWNLOADS, "file")
_NEARLY = re.compile(rf"\s*(?P<scheme>{'|'.join(_SCHEMES)}):/+(?P<rest>.*)", re.DOTALL | re.IGNORECASE)
"""A mistyped URI, an error: with a space at the beginning, or with one slash, as made by ``pathlib.Path``."""
_HOST = re.compile(r"(\[[^\]@]+\]|[^\s:@\[\]?#]+)(:(?P<port>\d{1,5}))?")
"""Host and port of an HTTP address."""
_IN_ADDRESSES = "%/:=&?~#+!$,;'@()*[]"
"""Characters that stay unquoted in an address."""
_PIECE_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60.0


def parse_uri(uri: str) -> tuple[str, str, str]:
    """Return scheme, bucket and name of ``uri``; for a path or a ``file://`` URI two empty strings and the path.

    >>> parse_uri("s3://bucket/run/ep1.pt")
    ('s3', 'bucket', 'run/ep1.pt')
    >>> parse_uri("sftp://user@host:2222/data/run")
    ('sftp', 'user@host:2222', 'data/run')
    >>> parse_uri("runs/ep1.pt")
    ('', '', 'runs/ep1.pt')

    Raises:
        ConfigError: ``uri`` is empty, has an unknown scheme, no bucket or a password, or begins with a
            space or has one slash instead of two.
    """
    if not uri.strip():
        raise ConfigError(
            f"{uri!r}: expected a path or a URI, and got an empty string, perhaps from an unset variable. The "
            "current directory is '.'."
        )
    shown = without_secrets(uri)
    found = _URI.fullmatch(uri)
    if found is None:
        if (nearly := _NEARLY.fullmatch(uri)) is None:
            return "", "", uri
        rest = shown.partition(":")[2].lstrip("/")
        meant = f"{nearly['scheme']}://{'/' if nearly['scheme'].lower() == 'file' else ''}{rest}"
        raise ConfigError(
            f"{shown!r} is no URI: did you mean {meant!r}? Give a string: pathlib.Path removes one of the slashes."
        )
    scheme, bucket, path = found["scheme"].lower(), found["bucket"], found["path"]
    if scheme == "file":
        if bucket not in ("", "localhost"):
            raise ConfigError(f"{shown!r}: a file:// URI names a local file, such as 'file:///data/run'.")
        return "", "", unquote(f"/{path}")
    if scheme not in _STORES and scheme not in _DOWNLOADS:
        raise ConfigError(f"{shown!r}: unknown scheme {scheme!r}.{did_you_mean(scheme, _SCHEMES)}")
    host = _HOST.fullmatch(bucket)
    if scheme in _DOWNLOADS and (host is None or int(host["port"] or 0) > 65535):
        raise ConfigError(
            f"{shown!r}: expected '{scheme}://host/path' or '{scheme}://host:port/path', without user and "
            "password, since addresses are logged. Otherwise download the file with another program."
        )
    if not bucket or ":" in bucket.rpartition("@")[0]:
        raise ConfigError(
            f"{shown!r}: expected a bucket after the scheme, such as '{scheme}://bucket/run', without a password, "
            "since URIs are logged. Give a password as an argument of the store, or in the environment or the "
            "configuration files of the service."
        )
    return scheme, bucket, path


def without_secrets(uri: str) -> str:
    """Return ``uri`` for messages: without a password, and an HTTP address without user and query.

    >>> without_secrets("https://user:password@host/ep1.pt?token=1")
    'https://host/ep1.pt'
    >>> without_secrets("sftp://user@host/ep1.pt")
    'sftp://user@host/ep1.pt'
    """
    if re.match(r"\s*https?:/", uri, re.IGNORECASE):
        return re.sub(r"(:/+)[^/]*@", r"\1", uri.partition("?")[0], count=1)
    return re.sub(r"^(\s*[A-Za-z][A-Za-z0-9+.-]*:/+)[^/]*:[^/]*@", r"\1", uri)


def is_uri(path: str) -> bool:
    """Return true if ``path`` is a URI with a scheme other than ``file``. ConfigError: as :func:`parse_uri`."""
    return parse_uri(path)[0] != ""


def open_store(uri: str, **backend_kwargs: Any) -> ObjectStore:
    """Open the store of the bucket of ``uri``.

    Args:
        uri: a URI such as ``s3://bucket``. The name after the bucket is ignored.
        backend_kwargs: further arguments of the constructor of the store.

    Returns:
        The store. The caller closes the store.

    Raises:
        ConfigError: the scheme has no store, the library is not installed, or an argument is wrong.
    """
    scheme, bucket, _ = parse_uri(uri)
    if scheme not in _STORES:
        raise ConfigError(f"{without_secrets(uri)!r}: not an object store.{did_you_mean(scheme, _STORES)}")
    module, name = _STORES[scheme]
    return getattr(importlib.import_module(module), name).at(bucket, **backend_kwargs)


def maybe_create_object_store_from_uri(uri: str) -> ObjectStore | None:
    """Open the store of ``uri``; ``None`` for a path of this machine."""
    return open_store(uri) if is_uri(uri) else None


def download_url(url: str, path: Path, progress: Progress | None = None) -> None:
    """Download ``url`` to the file ``path``. The file appears atomically, and replaces an existing file.

    Args:
        url: an ``http`` or ``https`` address. Spaces need not be quoted. The query is not logged.
        path: path of the local file.
        progress: called with (bytes received, total). The total is 0 if the server does not report the size.

    Raises:
        FileNotFoundError: the server has nothing at ``url``.
        PermissionError: the server refuses the download.
        ObjectStoreTransientError: the download failed, and a retry may succeed.
        ObjectStoreError: the server answers with another error.
        ConfigError: ``url`` has a user or a password.
    """
    import http.client  # most processes download nothing
    import urllib.error
    import urllib.request

    what = f"downloading {without_secrets(url)}"
    scheme, host, rest = parse_uri(url)
    rest = quote(re.sub(r"%(?![0-9A-Fa-f]{2})", "%25", rest), safe=_IN_ADDRESSES)
    request = urllib.request.Request(f"{scheme}://{host}/{rest}", headers={"Accept-Encoding": "identity"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer, atomic_write(path) as file:
            announced, done = int(answer.headers.get("Content-Length", 0)), 0
            while piece := answer.read(_PIECE_BYTES):
                file.write(piece)
                done += len(piece)
                if progress is not None:
                    progress(done, announced)
            if done < announced:
                raise ObjectStoreTransientError(f"{what}: received {done} of {announced} bytes.")
    except urllib.error.HTTPError as e:
        e.close()
        raise meaning_of_status(e.code)(f"{what}: the server answered {e.code} {e.reason}.") from e
    except (http.client.HTTPException, urllib.error.URLError, ConnectionError, TimeoutError) as e:
        raise ObjectStoreTransientError(f"{what}: {e}") from e

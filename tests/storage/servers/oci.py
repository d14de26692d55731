"""Oracle's Object Storage on this machine: a stand-in for the endpoints that composerlite uses. There is no emulator.

It keeps objects in memory, verifies the signature of every request, answers in pages, and refuses what the service
refuses: a wrong MD5, a part that is too small, a commit of parts that it does not have.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, final
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

NAMESPACE = "testns"
_LEAST_PART_BYTES = 10 << 20
_PAGE = 100
_ROUTE = re.compile(r"/n/[^/]+/b/(?P<bucket>[^/]+)/(?P<kind>[ou])(?:/(?P<name>.*))?")


@final
@dataclass
class _Upload:
    bucket: str
    name: str
    parts: dict[int, tuple[str, bytes]] = field(default_factory=dict)  # etag and bytes
    started_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat().replace("+00:00", "Z"))


@final
class OCIServer:
    """A running stand-in and two configuration files: one that it knows, one of a stranger.

    Attributes:
        endpoint_url: as ``service_endpoint`` of the SDK.
        config_file: of a user whose key the server knows.
        stranger_config_file: the same, but of a key that it does not know.
        requests: method and path of each that came.
    """

    def __init__(self, endpoint_url: str, folder: Path) -> None:
        self.endpoint_url = endpoint_url
        self.config_file, self.public_key = _write_config(folder / "known")
        self.stranger_config_file, _ = _write_config(folder / "stranger")
        self.lock = threading.Lock()
        self.buckets: dict[str, dict[str, bytes]] = {}
        self.composed: set[tuple[str, str]] = set()  # of parts: of these the service tells no MD5
        self.etags: dict[tuple[str, str], str] = {}
        self.uploads: dict[str, _Upload] = {}
        self.faults: dict[str, str] = {}
        self.requests: list[str] = []

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which ``oci://`` is this server, for everyone who passes no arguments."""
        return {"OCI_CONFIG_FILE": str(self.config_file), "OCI_ENDPOINT_URL": self.endpoint_url}

    def new_bucket(self) -> str:
        """The name of a new, empty bucket."""
        name = f"bucket-{secrets.token_hex(6)}"
        self.buckets[name] = {}
        return name

    def fail(self, bucket: str, fault: str) -> None:
        """From now on fail every request for ``bucket``.

        Args:
            fault: ``'503 ServiceUnavailable'``, a status and a code; or ``'reset'``: hang up; ``'truncate'``: hang up
                in the middle of a body; ``'stall'``: do not answer for 2 s; ``'corrupt'``: change a byte of what is
                read; ``'hide'``: answer who reads as one who may not see the bucket. An empty string: no more.
        """
        self.faults[bucket] = fault


@contextlib.contextmanager
def running_oci() -> Generator[OCIServer]:
    """The stand-in on a free port of this machine; gone afterwards."""
    pytest.importorskip("oci", reason="the package oci is not installed: pip install oci")
    with tempfile.TemporaryDirectory(prefix="oci-") as folder:
        http = _Server(("127.0.0.1", 0), BaseHTTPRequestHandler)
        server = OCIServer(f"http://127.0.0.1:{http.server_address[1]}", Path(folder))
        http.RequestHandlerClass = partial(_Handler, server)  # type: ignore[assignment]
        thread = threading.Thread(target=http.serve_forever, args=[0.02], daemon=True, name="oci")
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            http.server_close()
            thread.join(timeout=10)


@pytest.fixture(scope="session")
def oci_server() -> Generator[OCIServer]:
    """One stand-in for all tests of a process. Take a bucket of your own by ``new_bucket()``."""
    with running_oci() as server:
        yield server


def _write_config(folder: Path) -> tuple[Path, Any]:
    """A configuration file with a new key, and the public half of the key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    folder.mkdir()
    key = rsa.generate_private_key(public_exponent=65537, key_size=1024)  # as every store opened reads it
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(pem)
    (folder / "key.pem").chmod(0o600)
    lines = [
        "[DEFAULT]",
        "user=ocid1.user.oc1..test",
        "tenancy=ocid1.tenancy.oc1..test",
        "fingerprint=" + ":".join(["0a"] * 16),
        "region=us-ashburn-1",
        f"key_file={folder / 'key.pem'}",
    ]
    (folder / "config").write_text("\n".join(lines) + "\n")
    (folder / "config").chmod(0o600)
    return folder / "config", key.public_key()


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


_Answer = tuple[int, Any, dict[str, str]]
"""Status, body and headers."""


class _RefusedError(Exception):
    """The answer is an error: status, code, text."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """A client went away: its own test says what that means."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 20  # head and body in one packet
    disable_nagle_algorithm = True

    def __init__(self, server_state: OCIServer, *args: Any) -> None:
        self.state = server_state
        self.fault = ""
        super().__init__(*args)

    def log_message(self, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        url = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        size = int(self.headers.get("content-length") or 0)
        self.body = self.rfile.read(size)
        if len(self.body) < size:  # a killed client: what it began to send is nothing
            return self._hang_up()
        self.state.requests.append(f"{self.command} {self.path}")
        try:
            self._verify()
            self._reply(*self._route(url.path))
        except _RefusedError as e:
            status, code, text = e.args
            self._reply(status, {"code": code, "message": text})
        return None

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle  # noqa: N815

    def _verify(self) -> None:
        """The signature is that of the known key, over what must be signed."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import padding

        said = dict(re.findall(r'(\w+)="([^"]*)"', self.headers.get("authorization", "")))
        signed = said.get("headers", "").split()
        lines = [
            f"{name}: {self.command.lower()} {self.path}"
            if name == "(request-target)"
            else f"{name}: {self.headers.get(name, '')}"
            for name in signed
        ]
        refused = _RefusedError(401, "NotAuthenticated", "The required information to authenticate was wrong.")
        if not {"date", "(request-target)", "host"} <= set(signed):
            raise refused
        try:
            self.state.public_key.verify(
                base64.b64decode(said["signature"]), "\n".join(lines).encode(), padding.PKCS1v15(), hashes.SHA256()
            )
        except (InvalidSignature, KeyError):
            raise refused from None

    def _route(self, path: str) -> _Answer:
        if path.rstrip("/") == "/n":
            return 200, NAMESPACE, {}
        found = _ROUTE.fullmatch(path)
        bucket = unquote(found["bucket"]) if found else ""
        if found is None or bucket not in self.state.buckets:
            raise _RefusedError(
                404, "BucketNotFound", f"The bucket '{bucket}' does not exist in namespace '{NAMESPACE}'"
            )
        self._inject(self.state.faults.get(bucket, ""))
        if (said := self.headers.get("content-md5")) is not None and said != _md5(self.body):
            raise _RefusedError(400, "UnmatchedContentMD5", "The computed MD5 of the request body does not match")
        name = unquote(found["name"] or "")
        what = "object" if found["kind"] == "o" else "upload"
        if not name:
            what += "s"
        with self.state.lock:
            answer: _Answer = getattr(self, f"_{self.command.lower()}_{what}")(bucket, name)
        return answer

    def _inject(self, fault: str) -> None:
        self.fault = fault
        if fault[:1].isdigit():
            status, _, code = fault.partition(" ")
            raise _RefusedError(int(status), code, "as the test asked for")
        if fault == "stall":
            time.sleep(2)
        if fault == "hide" and self.command in ("GET", "HEAD"):
            raise _RefusedError(404, "BucketNotFound", "Either there is no such bucket or you are not authorized")

    # ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _get_objects(self, bucket: str, _: str) -> _Answer:
        prefix, limit = self.query.get("prefix", ""), min(1000, int(self.query.get("limit", 1000)))
        start = self.query.get("start", "")
        objects = self.state.buckets[bucket]
        names = sorted(name for name in objects if name.startswith(prefix) and name >= start)
        chosen = names[:limit]
        more: dict[str, Any] = {"nextStartWith": names[limit]} if len(names) > limit else {}
        if self.query.get("delimiter") == "/":
            rests = [name[len(prefix) :].partition("/") for name in chosen]
            more["prefixes"] = sorted({f"{prefix}{head}/" for head, slash, _ in rests if slash})
            chosen = [name for name in chosen if "/" not in name[len(prefix) :]]
        return 200, {"objects": [{"name": name, "size": len(objects[name])} for name in chosen], **more}, {}

    def _put_object(self, bucket: str, name: str) -> _Answer:
        objects = self.state.buckets[bucket]
        self._check_new(bucket, name)
        if (version := self.headers.get("if-match")) is not None:
            self._object(bucket, name)
            if version != self.state.etags[bucket, name]:
                raise _RefusedError(412, "IfMatchFailed", "The If-Match header is not the ETag of the object")
        objects[name] = self.body
        self.state.composed.discard((bucket, name))
        etag = self.state.etags[bucket, name] = secrets.token_hex(8)
        return 200, b"", {"opc-content-md5": _md5(self.body), "etag": etag}

    def _check_new(self, bucket: str, name: str) -> None:
        if self.headers.get("if-none-match") == "*" and name in self.state.buckets[bucket]:
            raise _RefusedError(412, "IfNoneMatchFailed", "The If-None-Match header is '*' and the object exists")

    def _get_object(self, bucket: str, name: str) -> _Answer:
        data = self._object(bucket, name)
        etag = {"etag": self.state.etags[bucket, name]}
        asked = re.fullmatch(r"bytes=(\d*)-(\d+)", self.headers.get("range", ""))
        if asked is None:
            return 200, data, etag | ({} if (bucket, name) in self.state.composed else {"content-md5": _md5(data)})
        start, end = int(asked[1] or max(0, len(data) - int(asked[2]))), len(data) - 1
        end = min(int(asked[2]), end) if asked[1] else end
        if start >= len(data):
            raise _RefusedError(416, "InvalidRange", f"{asked[0]} of {len(data)} bytes")
        return 206, data[start : end + 1], etag | {"content-range": f"bytes {start}-{end}/{len(data)}"}

    def _head_object(self, bucket: str, name: str) -> _Answer:
        return 200, self._object(bucket, name), {"etag": self.state.etags[bucket, name]}

    def _delete_object(self, bucket: str, name: str) -> _Answer:
        self._object(bucket, name)
        del self.state.buckets[bucket][name]
        return 204, b"", {}

    def _object(self, bucket: str, name: str) -> bytes:
        try:
            return self.state.buckets[bucket][name]
        except KeyError:
            raise _RefusedError(404, "ObjectNotFound", f"The object '{name}' was not found in the bucket") from None

    # ── uploads in parts ─────────────────────────────────────────────────────────────────────────────────────────
    def _post_uploads(self, bucket: str, _: str) -> _Answer:
        upload_id = secrets.token_hex(16)
        self.state.uploads[upload_id] = _Upload(bucket, json.loads(self.body)["object"])
        return 200, self._described(upload_id), {}

    def _get_uploads(self, bucket: str, _: str) -> _Answer:
        return self._page(
            [self._described(key) for key, upload in self.state.uploads.items() if upload.bucket == bucket]
        )

    def _described(self, upload_id: str) -> dict[str, str]:
        upload = self.state.uploads[upload_id]
        place = {"namespace": NAMESPACE, "bucket": upload.bucket, "object": upload.name}
        return {**place, "uploadId": upload_id, "timeCreated": upload.started_at}

    def _put_upload(self, bucket: str, name: str) -> _Answer:
        upload = self._upload(bucket, name)
        etag = secrets.token_hex(8)
        upload.parts[int(self.query["uploadPartNum"])] = (etag, self.body)
        return 200, b"", {"opc-content-md5": _md5(self.body), "etag": etag}

    def _get_upload(self, bucket: str, name: str) -> _Answer:
        parts = sorted(self._upload(bucket, name).parts.items())
        return self._page(
            [{"partNumber": n, "etag": etag, "md5": _md5(data), "size": len(data)} for n, (etag, data) in parts]
        )

    def _post_upload(self, bucket: str, name: str) -> _Answer:
        upload, chosen = self._upload(bucket, name), json.loads(self.body)["partsToCommit"]
        self._check_new(bucket, name)
        chosen.sort(key=lambda part: part["partNum"])
        parts = [upload.parts.get(part["partNum"], ("", b"")) for part in chosen]
        if not chosen or any(etag != part["etag"] for (etag, _), part in zip(parts, chosen, strict=True)):
            raise _RefusedError(400, "InvalidUploadPart", "One or more of the specified parts could not be found")
        if any(len(data) < _LEAST_PART_BYTES for _, data in parts[:-1]):
            raise _RefusedError(400, "InvalidUploadPart", "A part but the last is smaller than 10 MiB")
        self.state.buckets[bucket][name] = b"".join(data for _, data in parts)
        self.state.composed.add((bucket, name))
        del self.state.uploads[self.query["uploadId"]]
        etag = self.state.etags[bucket, name] = secrets.token_hex(8)
        return 200, b"", {"etag": etag}

    def _delete_upload(self, bucket: str, name: str) -> _Answer:
        self._upload(bucket, name)
        del self.state.uploads[self.query["uploadId"]]
        return 204, b"", {}

    def _upload(self, bucket: str, name: str) -> _Upload:
        upload = self.state.uploads.get(self.query.get("uploadId", ""))
        if upload is None or (upload.bucket, upload.name) != (bucket, name):
            raise _RefusedError(404, "NoSuchUpload", "The specified upload does not exist")
        return upload

    # ── requests and answers ─────────────────────────────────────────────────────────────────────────────────────
    def _page(self, items: list[dict[str, Any]]) -> _Answer:
        start = int(self.query.get("page", 0))
        more = {"opc-next-page": str(start + _PAGE)} if len(items) > start + _PAGE else {}
        return 200, items[start : start + _PAGE], more

    def _reply(self, status: int, content: Any = b"", headers: dict[str, str] | None = None) -> None:
        if self.fault == "reset":
            return self._hang_up()
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        if self.fault == "corrupt" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        said = {"content-type": kind, "content-length": str(len(body)), "opc-request-id": secrets.token_hex(8)}
        for name, value in {**said, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return None
        self.wfile.write(body[: len(body) // 2] if self.fault == "truncate" else body)
        return self._hang_up() if self.fault == "truncate" else None

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

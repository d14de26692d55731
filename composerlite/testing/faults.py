"""An HTTP proxy that injects the faults of bad networks and busy services."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, fields
from typing import NamedTuple, Self, final

from composerlite.errors import ConfigError


@final
@dataclass(frozen=True)
class NetworkFaults:
    """Fraction of requests with each fault, from 0 to 1. The sum is at most 1.

    Attributes:
        unavailable: the proxy answers 503 without asking the service.
        resets: the connection is reset in the middle of the request body, or of the answer to a request without body.
        truncations: the connection is closed in the middle of a body.
        lost_answers: the service handles the request, and the connection is reset before the answer.
        stalls: a body is interrupted for ``stall_seconds``, then continued.
        delays: the answer is delayed by up to ``delay_seconds``, so answers change their order.
        stall_seconds: duration of a stall.
        delay_seconds: maximum delay.
    """

    unavailable: float = 0.0
    resets: float = 0.0
    truncations: float = 0.0
    lost_answers: float = 0.0
    stalls: float = 0.0
    delays: float = 0.0
    stall_seconds: float = 2.0
    delay_seconds: float = 0.5

    def __post_init__(self) -> None:
        shares = [getattr(self, name) for name in _KINDS]
        if min(shares) < 0 or sum(shares) > 1 + 1e-9:
            raise ConfigError(f"{self}: expected fractions from 0 to 1, with a sum of at most 1.")


_KINDS = [field.name for field in fields(NetworkFaults) if not field.name.endswith("seconds")]
_PIECE_BYTES = 64 << 10
_HEAD_BYTES = 64 << 10
_SOCKET_BYTES = 128 << 10  # limits the data in buffers of the system, not yet counted
_CONNECT_SECONDS = 10.0
_CLOSE_SECONDS = 10.0
_LINGER_SECONDS = 0.2
_RANDOM_VALUES = re.compile(r"(uploadId|X-Amz-[A-Za-z-]+)=[^& ]*")


class _Plan(NamedTuple):
    """Fault of a request.

    Attributes:
        kind: name of the fault in :class:`NetworkFaults`; empty: no fault.
        share: place of the fault as a fraction of the body, or fraction of the maximum delay.
    """

    kind: str
    share: float


class _Head(NamedTuple):
    """Head of a request or an answer.

    Attributes:
        raw: the bytes.
        first: parts of the first line.
        headers: headers by lower-case name.
    """

    raw: bytes
    first: list[str]
    headers: dict[str, str]

    @property
    def chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    @property
    def body_bytes(self) -> int | None:
        return int(self.headers["content-length"]) if "content-length" in self.headers else None

    @property
    def closes(self) -> bool:
        return "close" in self.headers.get("connection", "").lower()


@final
class FaultProxy:
    """Forwards HTTP/1.1 from a local port to a service, with faults. A context manager.

    The fault of a request depends on ``seed``, on the request, and on the number of equal requests before, but not on
    the order of threads. So a test has the same faults in every run. Random names of buckets or objects change the
    faults; random upload ids do not.

    Args:
        host: host of the service.
        port: port of the service.
        faults: fractions of faults.
        seed: any number.

    Attributes:
        faults: fractions of faults; may be changed at any time.
        blackhole: if true, all traffic is held back.
        url: address of the proxy, such as ``http://127.0.0.1:12345``.
        bytes_up: size of all requests, including heads.
        bytes_down: size of all answers.
        requests: number of requests.
        happened: number of faults by name in :class:`NetworkFaults`.

    Example::

        with FaultProxy("localhost", 9000, NetworkFaults(unavailable=0.2), seed=1) as proxy:
            store = S3ObjectStore("my-bucket", endpoint_url=proxy.url)
    """

    def __init__(self, host: str, port: int, faults: NetworkFaults = NetworkFaults(), seed: int = 0) -> None:
        self.faults = faults
        self.blackhole = False
        self.bytes_up = self.bytes_down = self.requests = 0
        self.happened: Counter[str] = Counter()
        self._target = host, port
        self._seed = seed
        self._asked: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._clients: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. A second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(_CLOSE_SECONDS)
        self._socket.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._socket, limit=_HEAD_BYTES)
        async with server:
            await self._ended.wait()
            server.close()
            for client in self._clients:
                client.cancel()
            await asyncio.gather(*self._clients, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        link = _Link(self, reader, writer)
        try:
            await link.run(*self._target)
        except (OSError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError):
            _reset(writer)  # one side closed the connection: close the other
        finally:
            link.close()
            self._clients.discard(task)

    def plan(self, head: _Head) -> _Plan:
        """Choose the fault for a request."""
        self.requests += 1
        what = _RANDOM_VALUES.sub("", " ".join(head.first[:2])) + head.headers.get("range", "")
        self._asked[what] += 1
        chance = random.Random(f"{self._seed} {what} {self._asked[what]}")
        kind, share, at = "", chance.random(), chance.random()
        for name in _KINDS:
            share -= getattr(self.faults, name)
            if share < 0:
                kind = name
                break
        self.happened.update([kind] if kind else [])
        return _Plan(kind, at)


@final
class _Link:
    """A connection of a client, with a connection to the service."""

    def __init__(self, proxy: FaultProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._reader, self._writer = reader, writer
        self._service: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self, host: str, port: int) -> None:
        """Forward requests until one side closes the connection."""
        while (head := await _read_head(self._reader)) is not None:
            await self._passage()
            self._proxy.bytes_up += len(head.raw)
            plan = self._proxy.plan(head)
            if plan.kind == "unavailable":
                await self._refuse()
                return
            if self._service is None:
                connecting = asyncio.open_connection(host, port, limit=_HEAD_BYTES)
                self._service = await asyncio.wait_for(connecting, _CONNECT_SECONDS)
            if not await self._exchange(head, plan, *self._service):
                return

    def close(self) -> None:
        self._writer.close()
        if self._service is not None:
            self._service[1].close()

    async def _exchange(
        self, head: _Head, plan: _Plan, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Forward a request and the answer. Returns true if the connection stays open."""
        has_body = head.chunked or bool(head.body_bytes)
        writer.write(head.raw)
        sending = asyncio.create_task(
            self._send(head, plan if has_body else _Plan("", 0), writer), name="body of a request"
        )
        receiving = asyncio.create_task(self._receive(head, plan, reader, has_body=has_body), name="answer")
        try:
            done, _ = await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
            if sending in done and sending.exception() is not None:
                raise sending.exception() or AssertionError
            stays = await receiving
            if not sending.done():  # answered before the end of the request, usually an error
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                await self._linger()
                return False
            return stays and not head.closes
        finally:
            for task in (sending, receiving):
                task.cancel()
            await asyncio.gather(sending, receiving, return_exceptions=True)

    async def _send(self, head: _Head, plan: _Plan, writer: asyncio.StreamWriter) -> None:
        """Forward the body of a request."""
        cut = plan.share * (head.body_bytes or _PIECE_BYTES)
        sent = 0
        async for piece in _body(self._reader, head):
            await self._passage()
            self._proxy.bytes_up += len(piece)
            before = max(0, min(len(piece), int(cut) - sent))
            if sent <= cut < sent + len(piece):
                writer.write(piece[:before])
                await self._happen(plan)
                writer.write(piece[before:])
            else:
                writer.write(piece)
            sent += len(piece)
            await writer.drain()

    async def _receive(self, head: _Head, plan: _Plan, reader: asyncio.StreamReader, *, has_body: bool) -> bool:
        """Forward an answer. Returns true if the service keeps the connection open."""
        while True:
            answer = await _read_head(reader)
            if answer is None:
                raise EOFError("the service has closed the connection")
            if answer.first[1] != "100":
                break
            await self._pass_down(answer.raw)
        if plan.kind == "lost_answers":
            raise EOFError("injected fault")
        if plan.kind == "delays":
            await asyncio.sleep(plan.share * self._proxy.faults.delay_seconds)
        await self._pass_down(answer.raw)
        if head.first[0] == "HEAD" or answer.first[1] in ("204", "304"):
            return not answer.closes
        cut, sent = (-1.0 if has_body else plan.share * (answer.body_bytes or 1)), 0
        async for piece in _body(reader, answer, until_end=answer.body_bytes is None):
            before = max(0, min(len(piece), int(cut) - sent))
            if sent <= cut < sent + len(piece):
                await self._pass_down(piece[:before])
                await self._happen(plan)
                piece = piece[before:]
                sent += before
            await self._pass_down(piece)
            sent += len(piece)
        return not answer.closes and (answer.body_bytes is not None or answer.chunked)

    async def _happen(self, plan: _Plan) -> None:
        """Inject the planned fault in the middle of a body."""
        if plan.kind == "stalls":
            await asyncio.sleep(self._proxy.faults.stall_seconds)
        elif plan.kind == "resets":
            raise ConnectionResetError("injected fault")
        elif plan.kind == "truncations":
            await self._writer.drain()
            self._writer.close()
            await self._writer.wait_closed()
            raise EOFError("injected fault")

    async def _refuse(self) -> None:
        """Answer 503."""
        body = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate (injected).</Message></Error>"
        await self._pass_down(
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/xml\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        await self._linger()

    async def _linger(self) -> None:
        """Read until the client stops sending. Closing earlier could drop the answer."""
        with contextlib.suppress(TimeoutError):
            while piece := await asyncio.wait_for(self._reader.read(_PIECE_BYTES), _LINGER_SECONDS):
                self._proxy.bytes_up += len(piece)

    async def _pass_down(self, data: bytes) -> None:
        await self._passage()
        self._proxy.bytes_down += len(data)
        self._writer.write(data)
        await self._writer.drain()

    async def _passage(self) -> None:
        while self._proxy.blackhole:
            await asyncio.sleep(0.02)


async def _read_head(reader: asyncio.StreamReader) -> _Head | None:
    """Read the head of a request or answer; ``None`` at the end of the connection."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as e:
        if e.partial:
            raise
        return None
    first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
    headers = (line.partition(":") for line in lines)
    return _Head(raw, first.split(" ", 2), {name.strip().lower(): value.strip() for name, _, value in headers})


async def _body(reader: asyncio.StreamReader, head: _Head, *, until_end: bool = False) -> AsyncGenerator[bytes]:
    """Yield the pieces of a body, including the lengths of chunks."""
    if head.chunked:
        size = 1
        while size:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            yield line
            left = size
            while left:
                piece = await reader.read(min(left, _PIECE_BYTES))
                if not piece:
                    raise EOFError("a body ended early")
                left -= len(piece)
                yield piece
            if size:
                yield await reader.readexactly(2)
        while (line := await reader.readuntil(b"\r\n")) != b"\r\n":  # trailers
            yield line
        yield line
        return
    left = head.body_bytes or 0
    while left or until_end:
        piece = await reader.read(min(left, _PIECE_BYTES) or _PIECE_BYTES)
        if not piece:
            if until_end:
                return
            raise EOFError("a body ended early")
        left = max(0, left - len(piece))
        yield piece


def _reset(writer: asyncio.StreamWriter) -> None:
    """Reset a connection: the other side gets an error, and unread data is lost."""
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()

"""Connections to an SFTP server: logging in, channels for several threads, requests that do not wait for each other."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import stat
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, final

from composerlite.storage.sdk import importing_sdk

with importing_sdk("paramiko, which speaks SFTP,", extra="sftp", packages=()):
    import paramiko
    from paramiko import sftp as protocol
    from paramiko.message import Message

log = logging.getLogger(__name__)

_SMALL_REQUEST_BYTES, _LARGE_REQUEST_BYTES = 32 << 10, 128 << 10
"""Of one read or write: what every server takes, and what is asked of those that tell their limits."""
_UNDER_WAY_BYTES = 4 << 20
"""Of reads or writes under way on one channel, so that a distant server is not waited for after each."""

LOST = (paramiko.SSHException, EOFError, TimeoutError, ConnectionError)
"""Errors after which a connection is of no use."""

_Client: Any = paramiko.SFTPClient  # the requests of SFTP are not part of its public types


@final
class SFTPChannel(_Client):
    """A channel to a server, for one thread at a time.

    paramiko's own pipelined writes lose errors of the last requests, and its prefetch has no bound: hence the loops
    here. Errors that the server reports are OSError, without an errno where SFTP has no more to say than "failure".
    """

    extensions: frozenset[str] = frozenset()
    """Extensions that the server offers beyond version 3 of the protocol."""
    request_bytes: int = _SMALL_REQUEST_BYTES
    """Of one read or write."""

    def learn_limits(self) -> None:
        """Take larger requests if the server tells that it does."""
        if "limits@openssh.com" in self.extensions:
            _, answer = self._request(protocol.CMD_EXTENDED, "limits@openssh.com")
            answer.get_int64()  # bytes of a packet
            limits = answer.get_int64(), answer.get_int64()  # of a read and of a write, 0 if there is none
            self.request_bytes = min(limit for limit in (_LARGE_REQUEST_BYTES, *limits) if limit)

    def _read_packet(self) -> Any:  # paramiko forgets the extensions that are in the server's first packet
        kind, data = super()._read_packet()
        if kind == protocol.CMD_VERSION:
            words = Message(data[4:])
            found: list[str] = []
            while words.get_remainder():
                found.append(words.get_text())
                words.get_string()
            self.extensions = frozenset(found)
        return kind, data

    @contextlib.contextmanager
    def opened(self, path: str, mode: str) -> Generator[paramiko.SFTPFile]:
        """The file ``path``, open. It is not closed on a lost connection: that would wait for one more answer."""
        file = self.open(path, mode)
        try:
            yield file
        except LOST:
            raise
        except BaseException:
            file.close()
            raise
        file.close()

    def write_file(self, file: paramiko.SFTPFile, pieces: Iterable[bytes]) -> None:
        """Make ``pieces`` the content of ``file``, have the server make it durable, and close it."""
        answers = _Answers(self)
        offset = 0
        for piece in pieces:
            while answers.pending * self.request_bytes >= _UNDER_WAY_BYTES:
                self._read_response()
            answers.raise_first()
            self._ask(answers, protocol.CMD_WRITE, file.handle, protocol.int64(offset), piece)
            offset += len(piece)
        while answers.pending:
            self._read_response()
        answers.raise_first()
        if "fsync@openssh.com" in self.extensions:
            self._request(protocol.CMD_EXTENDED, "fsync@openssh.com", file.handle)
        file.close()

    def read_file(self, file: paramiko.SFTPFile, offset: int, size: int) -> Iterator[bytes]:
        """The ``size`` bytes from ``offset`` on, in order. EOFError: the file has fewer."""
        answers = _Answers(self)
        ask, give, end = offset, offset, offset + size
        lengths: dict[int, int] = {}
        while give < end:
            while ask < end and len(lengths) * self.request_bytes < _UNDER_WAY_BYTES:
                lengths[ask] = min(self.request_bytes, end - ask)
                self._ask_for(answers, file, ask, lengths[ask])
                ask += lengths[ask]
            if (piece := answers.take(give)) is None:
                self._read_response()
                answers.raise_first()
                continue
            missing = lengths.pop(give) - len(piece)
            give += len(piece)
            if missing:  # a server may give less than it was asked for
                lengths[give] = missing
                self._ask_for(answers, file, give, missing)
            yield piece

    def replace(self, temporary: str, path: str) -> None:
        """Rename ``temporary`` to ``path``, in place of what is there."""
        if self.replaces:
            self.posix_rename(temporary, path)
            return
        try:
            self.rename(temporary, path)
        except OSError as e:
            if self.exists(path):
                raise OSError(
                    "the server cannot replace a file atomically: it does not offer posix-rename@openssh.com, as "
                    "OpenSSH's does"
                ) from e
            raise

    @property
    def replaces(self) -> bool:
        """True if the server says that it replaces files; another one may do so too."""
        return "posix-rename@openssh.com" in self.extensions

    def create(self, temporary: str, path: str) -> None:
        """Give ``temporary`` the name ``path``, which nothing has. FileExistsError: something has."""
        is_link = "hardlink@openssh.com" in self.extensions
        try:
            if is_link:
                self._request(protocol.CMD_EXTENDED, "hardlink@openssh.com", temporary, path)
            else:
                self.rename(temporary, path)
        except OSError as e:
            if self.exists(path):
                raise FileExistsError from e
            raise
        if is_link:
            try:
                self.remove(temporary)
            except LOST:
                raise
            except OSError as e:  # it is there all the same
                log.warning("%s was created; its temporary %s stays: %s", path, temporary, e)

    def exists(self, path: str) -> bool:
        """Return true if there is a file or a folder."""
        try:
            self.stat(path)
        except FileNotFoundError:
            return False
        return True

    def is_folder(self, path: str) -> bool:
        """Return true if there is a folder."""
        try:
            return stat.S_ISDIR(self.stat(path).st_mode or 0)
        except FileNotFoundError:
            return False

    def _ask_for(self, answers: _Answers, file: paramiko.SFTPFile, offset: int, size: int) -> None:
        number = self._ask(answers, protocol.CMD_READ, file.handle, protocol.int64(offset), size)
        answers.offsets[number] = offset

    def _ask(self, answers: _Answers, *request: Any) -> int:
        answers.pending += 1
        return self._async_request(answers, *request)

    def status(self, message: Any) -> None:
        """Raise the error that the server reports, if it is one."""
        self._convert_status(message)


@final
class _Answers:
    """Takes the answers to requests of one channel, whatever their order.

    Attributes:
        pending: how many are to come.
        offsets: of reads, by the number of the request.
    """

    def __init__(self, channel: SFTPChannel) -> None:
        self.pending = 0
        self.offsets: dict[int, int] = {}
        self._channel = channel
        self._pieces: dict[int, bytes] = {}
        self._errors: deque[Exception] = deque(maxlen=1)

    def _async_response(self, kind: int, message: Any, number: int) -> None:
        """Called by paramiko with each answer."""
        self.pending -= 1
        offset = self.offsets.pop(number, None)
        if kind == protocol.CMD_DATA and offset is not None:
            self._pieces[offset] = message.get_string()
            return
        try:
            self._channel.status(message)
        except (OSError, EOFError) as e:
            if not self._errors:
                self._errors.append(e)

    def take(self, offset: int) -> bytes | None:
        """Return the bytes from ``offset`` on, if they have arrived."""
        return self._pieces.pop(offset, None)

    def raise_first(self) -> None:
        """Raise the first error that arrived, if one has."""
        if self._errors:
            raise self._errors[0]


@final
class Connection:
    """An SSH connection and its channels that nobody uses."""

    def __init__(self, client: paramiko.SSHClient, transport: paramiko.Transport, answer_timeout: float) -> None:
        self._client = client
        self._transport = transport
        self._answer_timeout = answer_timeout
        self._idle: list[SFTPChannel] = []
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """True until the server hangs up."""
        return self._transport.is_active()

    def take(self) -> SFTPChannel:
        """A channel for the caller alone."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        channel: Any = SFTPChannel.from_transport(self._transport, window_size=2 * _UNDER_WAY_BYTES)
        if channel is None:
            raise paramiko.SSHException("the server opens no further channel")
        channel.get_channel().settimeout(self._answer_timeout)
        channel.learn_limits()
        return channel

    def give_back(self, channel: SFTPChannel) -> None:
        """Release ``channel`` for other threads."""
        with self._lock:
            self._idle.append(channel)

    def close(self) -> None:
        """Hang up: requests that are under way fail."""
        self._client.close()


def connect(*, known_hosts: str | None, policy: str, answer_timeout: float, arguments: Mapping[str, Any]) -> Connection:
    """Make a connection, and log in.

    Args:
        known_hosts: file of the trusted hosts, ``None`` for the user's own.
        policy: of other hosts, a name of paramiko's.
        answer_timeout: seconds to wait for each answer.
        arguments: of ``paramiko.SSHClient.connect``.

    Raises:
        PermissionError: the host is not known, or there is nothing to log in with.
        paramiko.SSHException, OSError, EOFError: anything else.
    """
    client = paramiko.SSHClient()
    try:
        client.load_system_host_keys(known_hosts)
        client.set_missing_host_key_policy(
            _Reject(known_hosts) if policy == "RejectPolicy" else getattr(paramiko, policy)()
        )
        client.connect(**arguments)
        transport = client.get_transport()
        assert transport is not None
        transport.set_keepalive(30)
    except BaseException as e:
        client.close()
        if isinstance(e, paramiko.SSHException) and "No authentication methods available" in str(e):
            # paramiko has no type of its own for it
            raise PermissionError("there is neither a key nor a password to log in with: give key_filename") from e
        raise
    return Connection(client, transport, answer_timeout)


@final
class _Reject(paramiko.MissingHostKeyPolicy):
    """Refuses a host that is not known, and says how it becomes known."""

    def __init__(self, known_hosts: str | None) -> None:
        self._known_hosts = known_hosts or "~/.ssh/known_hosts"

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
        digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
        host, _, port = hostname.strip("[").partition("]:")
        raise PermissionError(
            f"the host is not known, and may be another one: its {key.get_name()} key is SHA256:{digest}. If that is "
            f"right, add it with: ssh-keyscan -p {port or 22} {host} >> {self._known_hosts}"
        )

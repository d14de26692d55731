"""SFTPObjectStore: objects that are the files below a folder of a machine that is reached by SSH."""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
import socket
import stat
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, final

from composerlite.errors import (
    ConfigError,
    ObjectStoreError,
    ObjectStoreTransientError,
    checked_arguments,
    did_you_mean,
)
from composerlite.storage.disk.files import TEMPORARY, temporary_name
from composerlite.storage.part_uploads import FileSource
from composerlite.storage.sdk import importing_sdk
from composerlite.storage.stores.base import ABSENT, BackendStore, Entry, Meaning, files_below, log
from composerlite.storage.stores.sftp_connection import LOST, Connection, SFTPChannel, connect

with importing_sdk("paramiko, which speaks SFTP,", extra="sftp", packages=()):
    import paramiko
    from paramiko import ssh_exception

_CHANNELS = 8
"""Concurrent operations on one connection; OpenSSH allows 10 by default."""
_OLD_SECONDS = 24 * 3600
"""A temporary that nobody has written to for so long was left behind."""
_LOST = (ssh_exception.NoValidConnectionsError, TimeoutError, ConnectionError)
_POLICIES = ("RejectPolicy", "WarningPolicy", "AutoAddPolicy")


@final
class SFTPObjectStore(BackendStore):
    """Keeps objects as the files below the folder ``cwd`` of the machine ``host``.

    Objects appear atomically, by a rename, and are durable if the server offers ``fsync@openssh.com``. ``create_only``
    takes ``hardlink@openssh.com``, or else the protocol's rename, which must not replace a file. :meth:`swap_bytes` is
    not atomic. As files and folders
    share their names, ``a`` and ``a/b`` cannot both be objects (ObjectStoreError). A lost connection is
    ObjectStoreTransientError, and the next verb connects anew. What such an upload left behind is removed by the next
    one; what killed processes left, by :meth:`check_writable` after a day.

    The protocol tells the times of files in seconds: one that is replaced by another of its size within the second in
    which it was written is not known from it by who reads it in parts.

    Args:
        host: name or address.
        port: of its SSH server.
        username: the local user's name if ``None``.
        password: or the passphrase of the key.
        known_hosts_filename: with the keys of the hosts that are trusted. If ``None``, what the environment variable
            ``known_hosts_filename_environ`` names, and if that is not set ``~/.ssh/known_hosts``.
        known_hosts_filename_environ: see there.
        key_filename: the private key to log in with. If ``None``, what the environment variable
            ``key_filename_environ`` names, and if that is not set, and there is no password, the keys of the SSH agent
            and of ``~/.ssh``.
        key_filename_environ: see there.
        missing_host_key_policy: of a host that is not known: ``RejectPolicy``, ``WarningPolicy`` or ``AutoAddPolicy``.
            The latter two trust any server.
        cwd: folder of the objects, seen from the folder where a login ends up. It exists, and is not made.
        connect_timeout: seconds to connect in.
        answer_timeout: seconds to wait for each answer.
        connect_kwargs: further arguments of ``paramiko.SSHClient.connect``.
    """

    _reserved = TEMPORARY

    @checked_arguments
    def __init__(
        self,
        host: str,
        port: int = 22,
        username: str | None = None,
        password: str | None = None,
        known_hosts_filename: str | Path | None = None,
        known_hosts_filename_environ: str = "COMPOSERLITE_SFTP_KNOWN_HOSTS_FILE",
        key_filename: str | Path | None = None,
        key_filename_environ: str = "COMPOSERLITE_SFTP_KEY_FILE",
        missing_host_key_policy: str = "RejectPolicy",
        cwd: str = "",
        connect_timeout: float = 30.0,
        answer_timeout: float = 60.0,
        connect_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if missing_host_key_policy not in _POLICIES:
            hint = did_you_mean(missing_host_key_policy, _POLICIES)
            raise ConfigError(f"missing_host_key_policy={missing_host_key_policy!r} is no policy.{hint}")
        known_hosts = _file("known_hosts_filename", known_hosts_filename, known_hosts_filename_environ)
        key = _file("key_filename", key_filename, key_filename_environ)
        self._root = cwd.rstrip("/") or ("/" if cwd else ".")
        address = f"{f'{username}@' if username else ''}{f'[{host}]' if ':' in host else host}:{port}"
        folder = posixpath.normpath(self._root).lstrip("/")
        super().__init__(f"sftp://{address}/{'' if folder in ('', '.') else f'{folder}/'}")
        self._connect = partial(
            connect,
            known_hosts=known_hosts,
            policy=missing_host_key_policy,
            answer_timeout=answer_timeout,
            arguments={
                "hostname": host,
                "port": port,
                "username": username,
                "password": password,
                "key_filename": key,
                "allow_agent": key is None and password is None,
                "look_for_keys": key is None and password is None,
                **{f"{what}timeout": connect_timeout for what in ("", "banner_", "auth_", "channel_")},
                **(connect_kwargs or {}),
            },
        )
        self._slots = threading.BoundedSemaphore(_CHANNELS)
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._left: list[str] = []  # by uploads that lost their connection

    @classmethod
    def at(cls, bucket: str, **backend_kwargs: Any) -> SFTPObjectStore:
        user, _, address = bucket.rpartition("@")
        if ":" in user:
            raise ConfigError(
                "sftp:// takes no password in the URI, where it is logged: give key_filename or password."
            )
        found = re.fullmatch(r"(?P<host>\[[^\]]+\]|[^:]+)(:(?P<port>\d{1,5}))?", address)
        if found is None:
            raise ConfigError(f"sftp://{bucket}: expected user@host:port, such as 'sftp://user@host:22/run'.")
        named: dict[str, Any] = {"username": user} if user else {}
        if found["port"] is not None:
            named["port"] = int(found["port"])
        return cls(found["host"].strip("[]"), **{**named, **backend_kwargs})

    @property
    def creates_atomically(self) -> bool:
        return True

    def close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _upload(self, key: str, source: FileSource, version: str | None) -> None:
        self._write(key, source.read, version)

    def _put(self, key: str, data: memoryview, version: str | None = None) -> None:
        self._write(key, io.BytesIO(data).read, version)

    def _write(self, key: str, read: Callable[[int], bytes], version: str | None) -> None:
        path = self._path(key)
        publish = SFTPChannel.create if version == ABSENT else SFTPChannel.replace
        with self._channel() as channel, self._staged(channel, path) as (temporary, file):
            channel.write_file(file, iter(lambda: read(channel.request_bytes), b""))
            publish(channel, temporary, path)

    def _read(self, key: str, offset: int, size: int | None, version: Callable[[str], object]) -> Generator[bytes]:
        with self._channel() as channel, channel.opened(self._path(key), "r") as file:
            status = file.stat()
            version(f"{status.st_mtime} {status.st_size}")
            left = _size_of(status) - offset
            yield from channel.read_file(file, offset, max(0, left if size is None else min(size, left)))

    def _tail(self, key: str, most_bytes: int) -> tuple[int, bytes]:
        with self._channel() as channel, channel.opened(self._path(key), "r") as file:
            size = _size_of(file.stat())
            length = min(size, most_bytes)
            return size, b"".join(channel.read_file(file, size - length, length))

    def _size(self, key: str) -> int:
        with self._channel() as channel:
            return _size_of(channel.stat(self._path(key)))

    def _list(self, prefix: str, *, level: bool = False) -> Iterable[Entry]:
        with self._channel() as channel:
            self._check_root(channel)
            found = list(files_below(partial(self._entries, channel), prefix, level=level))
        return (entry for entry in found if not self._is_temporary(entry))

    def _delete(self, key: str) -> None:
        path = self._path(key)
        with self._channel() as channel:
            try:
                channel.remove(path)
            except FileNotFoundError:
                self._check_root(channel)
            except OSError:
                if not channel.is_folder(path):  # some servers say no more than "failure" of a folder: it is no object
                    raise
            else:
                self._remove_empty(channel, posixpath.dirname(path))

    def _is_folder(self, key: str) -> bool:
        with self._channel() as channel:
            return channel.is_folder(self._path(key))

    def _check_writable(self, key: str) -> None:
        path, folder = self._path(key), posixpath.dirname(key)
        with self._channel() as channel:
            with self._staged(channel, path) as (temporary, file):
                channel.write_file(file, [b"check"])
                if not channel.replaces:
                    with self._staged(channel, path) as (other, file):
                        channel.write_file(file, [b"check"])
                        channel.replace(other, temporary)
                now = channel.stat(temporary).st_mtime or 0  # by the server's clock, as the times of the others
                channel.remove(temporary)
            before = datetime.fromtimestamp(now - _OLD_SECONDS, UTC)
            for entry in list(files_below(partial(self._entries, channel), f"{folder}/" if folder else "")):
                if self._is_temporary(entry) and (entry.modified_at is None or entry.modified_at < before):
                    with contextlib.suppress(FileNotFoundError):
                        channel.remove(self._path(entry.key))
            self._remove_empty(channel, posixpath.dirname(path))

    # ── names and files ──────────────────────────────────────────────────────────────────────────────────────────
    def _path(self, key: str) -> str:
        """Path of an object's file on the server."""
        return posixpath.join(self._root, key)

    def _is_temporary(self, entry: Entry) -> bool:
        """Return true if a file is one that is being written, or was when its writer died."""
        return self._reserved.fullmatch(posixpath.basename(entry.key)) is not None

    def _check_root(self, channel: SFTPChannel) -> None:
        if not channel.is_folder(self._root):
            raise FileNotFoundError("the folder of the store does not exist on the server")

    @contextlib.contextmanager
    def _staged(self, channel: SFTPChannel, path: str) -> Generator[tuple[str, paramiko.SFTPFile]]:
        """The path of a new file beside ``path``, and it, open; it is removed if the block fails.

        The folder is made where it is missing.
        """
        self._remove_left(channel)
        folder, last = posixpath.split(path)
        temporary = posixpath.join(folder, temporary_name(last))
        file = None
        for tries_left in reversed(range(10)):  # who deletes a folder's last object removes it: make it once more
            try:
                file = channel.open(temporary, "wx")
                break
            except FileNotFoundError:
                if not tries_left:
                    raise
                self._check_root(channel)
                self._make_folder(channel, folder)
        assert file is not None
        try:
            yield temporary, file
        except LOST:
            self._left.append(temporary)
            raise
        except BaseException:
            with contextlib.suppress(OSError, *LOST):  # the first error is the one to tell
                file.close()
                channel.remove(temporary)
            raise

    def _remove_left(self, channel: SFTPChannel) -> None:
        """Remove the temporaries of uploads that lost their connection: each may be as large as a checkpoint."""
        for temporary in list(self._left):
            try:
                with contextlib.suppress(FileNotFoundError):  # it has got its name, and only the answer was lost
                    channel.remove(temporary)
            except LOST:
                raise
            except OSError as e:
                log.warning("the temporary file %s on the server was not removed: %s", temporary, e)
            with contextlib.suppress(ValueError):  # another thread did the same
                self._left.remove(temporary)

    def _make_folder(self, channel: SFTPChannel, folder: str) -> None:
        """Make ``folder`` and those above it, up to that of the store."""
        if folder == self._root or channel.is_folder(folder):
            return
        self._make_folder(channel, posixpath.dirname(folder))
        try:
            channel.mkdir(folder)
        except FileNotFoundError:
            return  # removed since by who deleted an object: _staged comes back
        except OSError:
            if not channel.is_folder(folder):  # made since by somebody else, and else something is in its way
                raise

    def _remove_empty(self, channel: SFTPChannel, folder: str) -> None:
        """Remove ``folder`` and those above it that hold nothing, down from that of the store."""
        with contextlib.suppress(OSError):  # it holds something, or may not be removed: it does no harm
            while folder != self._root:
                channel.rmdir(folder)
                folder = posixpath.dirname(folder)

    def _entries(self, channel: SFTPChannel, folder: str) -> Iterator[Entry]:
        """Yield the files and folders in ``folder``."""
        try:
            found = channel.listdir_attr(self._path(folder))
        except FileNotFoundError:  # there is none, or no more
            return
        for entry in found:
            key, mode = posixpath.join(folder, entry.filename), entry.st_mode or 0
            if stat.S_ISDIR(mode):
                yield Entry(key, -1, None)
            elif stat.S_ISREG(mode):
                changed = datetime.fromtimestamp(entry.st_mtime, UTC) if entry.st_mtime else None
                yield Entry(key, entry.st_size or 0, changed)

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────────────
    @contextlib.contextmanager
    def _channel(self) -> Generator[SFTPChannel]:
        """Lend a channel to the server that no other thread uses meanwhile."""
        with self._slots:
            connection = self._connected()
            channel = connection.take()
            try:
                yield channel
            except LOST:
                connection.close()
                raise
            except OSError as e:
                if connection.alive:
                    connection.give_back(channel)
                    raise
                raise ConnectionError(str(e)) from e
            except BaseException:
                channel.close()  # answers may be under way
                raise
            connection.give_back(channel)

    def _connected(self) -> Connection:
        with self._lock:
            if self._connection is None or not self._connection.alive:
                if self._connection is not None:
                    self._connection.close()
                self._connection = self._connect()
            return self._connection

    # ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _meaning(self, error: Exception) -> Meaning | None:
        if isinstance(error, OSError) and error.filename is None:  # else it is of a file of this machine
            return _of_server(error)
        if isinstance(error, paramiko.SSHException | EOFError):
            return _of_connection(error)
        if isinstance(error, UnicodeDecodeError):
            return ObjectStoreError, f"a file name on the server is not UTF-8: {error}."
        return None


def _of_server(error: OSError) -> Meaning:
    """Meaning of an error of the server's files, or of a socket."""
    cause = error.strerror or str(error) or type(error).__name__
    for kind in (FileNotFoundError, FileExistsError, PermissionError):
        if isinstance(error, kind):
            return kind, cause
    if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
        return ObjectStoreError, f"there is no such host: {cause}."
    if error.errno is not None or isinstance(error, _LOST):
        return ObjectStoreTransientError, f"the connection failed: {cause}."
    return ObjectStoreError, f"the server says: {cause}."


def _of_connection(error: Exception) -> Meaning:
    """Meaning of an error of SSH."""
    cause = str(error) or type(error).__name__
    if isinstance(error, paramiko.BadHostKeyException):
        return PermissionError, (
            "the server shows another key than the known one. Either somebody is in between, or the server "
            "was set up anew: then remove its old key with 'ssh-keygen -R' and add the new one."
        )
    if isinstance(error, paramiko.PasswordRequiredException):
        return PermissionError, "the key needs a passphrase: give it as password."
    # paramiko reports a connection that is lost during the login as a refused one
    if isinstance(error, paramiko.AuthenticationException) and "EOF" not in cause and "timeout" not in cause:
        return PermissionError, f"the server refuses the login: {cause} Check username, key and password."
    kind = ObjectStoreError if isinstance(error, ssh_exception.IncompatiblePeer) else ObjectStoreTransientError
    return kind, f"the connection failed: {cause}."


def _file(argument: str, filename: str | Path | None, environ: str) -> str | None:
    """The file that an argument names, or an environment variable in its place."""
    if filename is None:
        argument, filename = f"the environment variable {environ}", os.environ.get(environ)
    if not filename:
        return None
    path = Path(filename).expanduser()
    if not path.is_file():
        raise ConfigError(f"{argument} is {str(filename)!r}: there is no such file.")
    return str(path)


def _size_of(attributes: paramiko.SFTPAttributes) -> int:
    """Bytes of the file, FileNotFoundError if it is a folder."""
    if not stat.S_ISREG(attributes.st_mode or stat.S_IFREG):
        raise FileNotFoundError("this is no file, and so no object")
    return attributes.st_size or 0

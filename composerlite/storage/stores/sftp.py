"""SFTPObjectStore: objects that are the files below a folder of a machine that is reached by SSH."""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
import secrets
import socket
import stat
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, final

from composerlite.errors import (
    ConfigError,
    ObjectStoreError,
    ObjectStoreTransientError,
    checked_arguments,
    did_you_mean,
)
from composerlite.storage.disk.files import atomic_write
from composerlite.storage.object_store import ObjectInfo, ObjectStore, Progress, check_name
from composerlite.storage.stores.sftp_connection import LOST, Connection, Connector, SFTPChannel

try:
    import paramiko
    from paramiko import ssh_exception
except ImportError as e:
    raise ConfigError("paramiko, which speaks SFTP, is not installed: pip install 'composerlite[sftp]'") from e

__all__ = ["SFTPObjectStore"]

_CHANNELS = 8
"""Verbs at once on one connection; OpenSSH allows 10 unless it is told otherwise."""
_OLD_SECONDS = 24 * 3600
"""A temporary that nobody has written to for so long was left behind."""
_TEMPORARY = re.compile(r"\..+\.tmp-[0-9a-f]{16}")
_LOST = (ssh_exception.NoValidConnectionsError, TimeoutError, ConnectionError)
_POLICIES = ("RejectPolicy", "WarningPolicy", "AutoAddPolicy")


@final
class SFTPObjectStore(ObjectStore):
    """Keeps objects as the files below the folder ``cwd`` of the machine ``host``.

    Objects appear atomically, by a rename, and are durable if the server offers ``fsync@openssh.com``. ``create_only``
    takes ``hardlink@openssh.com``, or else the protocol's rename, which must not replace a file. As files and folders
    share their names, ``a`` and ``a/b`` cannot both be objects (ObjectStoreError). A lost connection is
    ObjectStoreTransientError, and the next verb connects anew. What uploads that were killed left behind is swept by
    :meth:`check_writable` after a day.

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
            The latter two trust whoever answers.
        cwd: folder of the objects, seen from the folder where a login ends up. It exists, and is not made.
        connect_timeout: seconds to connect in.
        answer_timeout: seconds to wait for each answer.
        connect_kwargs: further arguments of ``paramiko.SSHClient.connect``.
    """

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
        self._address = f"{f'{username}@' if username else ''}{f'[{host}]' if ':' in host else host}:{port}"
        self._root = cwd.rstrip("/") or ("/" if cwd else ".")
        self._connect = Connector(
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

    @classmethod
    def at(cls, bucket: str, **backend_kwargs: Any) -> SFTPObjectStore:
        user, _, address = bucket.rpartition("@")
        if ":" in user:
            raise ConfigError(
                "sftp:// takes no password in the URI, where it is logged: give key_filename or password."
            )
        found = re.fullmatch(r"(?P<host>\[[^\]]+\]|[^:]+)(:(?P<port>\d{1,5}))?", address)
        if found is None:
            raise ConfigError(f"sftp://{bucket}: want user@host:port, as in 'sftp://user@host:22/run'.")
        named: dict[str, Any] = {"username": user} if user else {}
        if found["port"] is not None:
            named["port"] = int(found["port"])
        return cls(found["host"].strip("[]"), **{**named, **backend_kwargs})

    @property
    def creates_atomically(self) -> bool:
        return True

    def get_uri(self, name: str) -> str:
        return f"sftp://{self._address}/{posixpath.normpath(posixpath.join(self._root, check_name(name))).lstrip('/')}"

    def upload_object(self, name: str, filename: str | Path, callback: Progress | None = None) -> None:
        path = self._path(name)
        with Path(filename).open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            with self._channel("upload", name) as channel, self._staged(channel, path) as (temporary, file):
                channel.write_file(file, _told(_pieces(source, channel.request_bytes), size, callback))
                channel.replace(temporary, path)

    def put_bytes(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        path = self._path(name)
        with self._channel("put", name) as channel, self._staged(channel, path) as (temporary, file):
            channel.write_file(file, _pieces(io.BytesIO(data), channel.request_bytes))
            if create_only:
                channel.create(temporary, path)
            else:
                channel.replace(temporary, path)

    def download_object(
        self, name: str, filename: str | Path, overwrite: bool = False, callback: Progress | None = None
    ) -> None:
        target = Path(filename)
        if target.exists() and not overwrite:
            raise FileExistsError(f"{target} is there already: pass overwrite=True to replace it.")
        with self._reading("download", name) as (channel, file, size), atomic_write(target) as copy:
            for piece in _told(channel.read_file(file, 0, size), size, callback):
                copy.write(piece)

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        with self._reading("read", name) as (channel, file, total):
            return b"".join(channel.read_file(file, offset, max(0, min(size, total - offset))))

    def get_object_size(self, name: str) -> int:
        path = self._path(name)
        with self._channel("look at", name) as channel:
            return _size_of(channel.stat(path))

    def list_objects(self, prefix: str = "", *, start_after: str = "") -> Sequence[ObjectInfo]:
        with self._channel("list", prefix) as channel:
            self._check_root(channel)
            found = self._below(channel, prefix.rpartition("/")[0], prefix)
            objects = [
                ObjectInfo(name, size, datetime.fromtimestamp(changed, UTC) if changed else None)
                for name, size, changed in found
                if not _is_temporary(name)
            ]
        return sorted((info for info in objects if info.name > start_after), key=lambda info: info.name)

    def delete_object(self, name: str) -> None:
        path = self._path(name)
        with self._channel("delete", name) as channel:
            try:
                channel.remove(path)
            except FileNotFoundError:
                self._check_root(channel)
            except OSError:
                if not channel.is_folder(path):  # some servers say no more than "failure" of a folder: it is no object
                    raise
            else:
                self._remove_empty(channel, posixpath.dirname(path))

    def check_writable(self, prefix: str) -> None:
        with self._channel("check that one can write below", prefix) as channel:
            # Beside what will be written: in the folder of that name if there is one.
            inside = not prefix or prefix.endswith("/") or channel.is_folder(posixpath.join(self._root, prefix))
            path = self._path(f"{prefix.rstrip('/')}/check".lstrip("/") if inside else f"{prefix}.check")
            with self._staged(channel, path) as (temporary, file):
                channel.write_file(file, [b"check"])
                now = channel.stat(temporary).st_mtime or 0  # by the server's clock, as the times of the others
                channel.remove(temporary)
            self._sweep(channel, prefix.rstrip("/") if inside else prefix.rpartition("/")[0], now - _OLD_SECONDS)
            self._remove_empty(channel, posixpath.dirname(path))

    def _sweep(self, channel: SFTPChannel, folder: str, before: float) -> None:
        """Remove the temporaries in ``folder`` and below that nobody has written to since the time ``before``."""
        for name, _, changed in list(self._below(channel, folder, f"{folder}/" if folder else "")):
            if _is_temporary(name) and changed < before:
                with contextlib.suppress(FileNotFoundError):
                    channel.remove(posixpath.join(self._root, name))

    def close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # ── names and files ──────────────────────────────────────────────────────────────────────────────────────────
    def _path(self, name: str) -> str:
        """The file of the object ``name``, as the server is told."""
        if _is_temporary(check_name(name)):
            raise ConfigError(f"object name {name!r} is one for files that are not written to their end yet.")
        return posixpath.join(self._root, name)

    def _check_root(self, channel: SFTPChannel) -> None:
        if not channel.is_folder(self._root):
            raise FileNotFoundError("the folder of the store does not exist on the server")

    @contextlib.contextmanager
    def _staged(self, channel: SFTPChannel, path: str) -> Generator[tuple[str, paramiko.SFTPFile]]:
        """The path of a new file beside ``path``, and it, open; it is removed if the block fails.

        The folder is made where it is missing.
        """
        folder, last = posixpath.split(path)
        temporary = posixpath.join(folder, f".{last}.tmp-{secrets.token_hex(8)}")
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
            raise  # a server that cannot be reached keeps it until it is swept
        except BaseException:
            with contextlib.suppress(OSError, *LOST):  # the first error is the one to tell
                file.close()
                channel.remove(temporary)
            raise

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

    @contextlib.contextmanager
    def _reading(self, operation: str, name: str) -> Generator[tuple[SFTPChannel, paramiko.SFTPFile, int]]:
        """The channel, the open file of the object ``name``, and its size."""
        path = self._path(name)
        with self._channel(operation, name) as channel, channel.opened(path, "r") as file:
            yield channel, file, _size_of(file.stat())

    def _below(self, channel: SFTPChannel, folder: str, prefix: str) -> Iterator[tuple[str, int, float]]:
        """Name, bytes and last change of the files in ``folder`` and below whose names begin with ``prefix``."""
        if folder and any(part in ("", ".", "..") for part in folder.split("/")):
            return  # no name begins like that
        try:
            entries = channel.listdir_attr(posixpath.join(self._root, folder))
        except FileNotFoundError:  # there is none, or no more
            return
        for entry in entries:
            name = f"{folder}/{entry.filename}" if folder else entry.filename
            mode = entry.st_mode or 0
            if stat.S_ISDIR(mode):
                if f"{name}/".startswith(prefix) or prefix.startswith(f"{name}/"):
                    yield from self._below(channel, name, prefix)
            elif name.startswith(prefix) and stat.S_ISREG(mode):
                yield name, entry.st_size or 0, entry.st_mtime or 0

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────────────
    @contextlib.contextmanager
    def _channel(self, operation: str, name: str) -> Generator[SFTPChannel]:
        """A channel to the server that no other thread uses meanwhile."""
        with self._slots, self._translated(operation, name):
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
    @contextlib.contextmanager
    def _translated(self, operation: str, name: str) -> Generator[None]:
        """Raise the errors of paramiko, of SFTP and of sockets as what the verbs promise."""
        where = f"{operation} {name!r} in {self._root!r} at sftp://{self._address}"
        try:
            yield
        except OSError as e:
            if e.filename is not None:
                raise  # of a file of this machine: it says so itself
            raise _of_system(e, where) from e
        except (paramiko.SSHException, EOFError) as e:
            raise _of_connection(e, where) from e
        except UnicodeDecodeError as e:
            raise ObjectStoreError(f"{where}: a file name on the server is not UTF-8: {e}.") from e


def _of_system(error: OSError, where: str) -> Exception:
    """What the verbs promise for an error of the server's files, or of a socket."""
    cause = error.strerror or str(error) or type(error).__name__
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{where}: {cause}.")
    if isinstance(error, FileExistsError):
        return FileExistsError(f"{where}: the object exists already.")
    if isinstance(error, PermissionError):
        return PermissionError(f"{where}: {cause}.")
    if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
        return ObjectStoreError(f"{where}: there is no such host: {cause}.")
    if error.errno is not None or isinstance(error, _LOST):
        return ObjectStoreTransientError(f"{where}: the connection failed: {cause}.")
    return ObjectStoreError(f"{where}: the server says: {cause}.")


def _of_connection(error: Exception, where: str) -> Exception:
    """What the verbs promise for an error of SSH."""
    cause = str(error) or type(error).__name__
    if isinstance(error, paramiko.BadHostKeyException):
        return PermissionError(
            f"{where}: the server shows another key than the known one. Either somebody is in between, or the server "
            f"was set up anew: then remove its old key with 'ssh-keygen -R' and add the new one."
        )
    if isinstance(error, paramiko.PasswordRequiredException):
        return PermissionError(f"{where}: the key needs a passphrase: give it as password.")
    # paramiko reports a connection that is lost during the login as a refused one
    if isinstance(error, paramiko.AuthenticationException) and "EOF" not in cause and "timeout" not in cause:
        return PermissionError(f"{where}: the server refuses the login: {cause} Check username, key and password.")
    if isinstance(error, ssh_exception.IncompatiblePeer):
        return ObjectStoreError(f"{where}: {cause}.")
    return ObjectStoreTransientError(f"{where}: the connection failed: {cause}.")


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


def _is_temporary(name: str) -> bool:
    """Whether the file of this name is one that is being written, or was when its writer died."""
    return _TEMPORARY.fullmatch(name.rpartition("/")[2]) is not None


def _size_of(attributes: paramiko.SFTPAttributes) -> int:
    """Bytes of the file, FileNotFoundError if it is a folder."""
    if not stat.S_ISREG(attributes.st_mode or stat.S_IFREG):
        raise FileNotFoundError("this is no file, and so no object")
    return attributes.st_size or 0


def _pieces(file: IO[bytes], size: int) -> Iterator[bytes]:
    while piece := file.read(size):
        yield piece


def _told(pieces: Iterator[bytes], size: int, callback: Progress | None) -> Iterator[bytes]:
    """``pieces``, with ``callback`` told of each that was taken care of, and of the end."""
    done = 0
    for piece in pieces:
        if callback is not None and done:
            callback(done, size)
        yield piece
        done += len(piece)
    if callback is not None:
        callback(done, done)

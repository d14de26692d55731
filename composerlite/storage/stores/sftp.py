"""SFTPObjectStore: files below a folder of a machine with an SSH server, as objects."""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import stat
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, final

from composerlite.errors import ConfigError, ObjectStoreError, ObjectStoreTransientError, checked_arguments
from composerlite.storage.disk.files import final_name, is_temporary, temporary_name
from composerlite.storage.object_store import ObjectInfo, is_name, span_of
from composerlite.storage.sdk import importing_sdk
from composerlite.storage.stores.base import ABSENT, PIECE_BYTES, BackendStore, Meaning

with importing_sdk("paramiko, which SFTP needs,", extra="sftp", packages=()):
    import paramiko
    from paramiko import ssh_exception

_CHANNELS = 8
"""Concurrent operations on one connection; OpenSSH allows 10 by default."""
_REQUEST_BYTES = 32 << 10
"""Size of one write. Every server accepts this size."""
_REQUESTS = 128
"""Read requests in flight at the same time, to avoid a round trip for each."""
_LOST = (paramiko.SSHException, EOFError, TimeoutError, ConnectionError)
"""Errors of a lost connection, which cannot be used again."""
_POLICIES = ("RejectPolicy", "WarningPolicy", "AutoAddPolicy")


@final
class SFTPObjectStore(BackendStore):
    """Objects as files below the folder ``cwd`` of the machine ``host``. Needs ``composerlite[sftp]``.

    Objects appear atomically, by a rename; the server must offer ``posix-rename@openssh.com``, as OpenSSH does.
    ``create_only`` is atomic, too, by the rename of the protocol without replacement. :meth:`swap_bytes` is not atomic.
    A path cannot be both a file and a folder, so ``a`` and ``a/b`` cannot both be objects (ObjectStoreError). A lost
    connection is an ObjectStoreTransientError, and the next operation connects again. :meth:`unfinished_parts` lists
    the temporary files of uploads, running uploads included. These uploads can be aborted, and not resumed. The
    reported start of an upload is the time of the last write to the temporary file.

    Times of files are in whole seconds, so a reader does not notice that a file was replaced by a file of the same size
    within a second.

    Args:
        host: name or address.
        port: port of the SSH server.
        username: ``None``: the name of the local user.
        password: password, or passphrase of the key.
        known_hosts_filename: file with the keys of trusted hosts. ``None``: the file in the environment variable
            ``known_hosts_filename_environ``, otherwise ``~/.ssh/known_hosts``.
        known_hosts_filename_environ: name of this variable.
        key_filename: file with the private key. ``None``: the file in the environment variable
            ``key_filename_environ``; otherwise, and without a password, the keys of the SSH agent and of ``~/.ssh``.
        key_filename_environ: name of this variable.
        missing_host_key_policy: for an unknown host: ``RejectPolicy``, ``WarningPolicy`` or ``AutoAddPolicy``. The
            latter two trust any server.
        cwd: folder of the objects, absolute or relative to the home folder on the server. Must exist.
        connect_timeout: longest wait for a connection, in seconds.
        answer_timeout: seconds to wait for each answer.
        connect_kwargs: further arguments of ``paramiko.SSHClient.connect``.

    Raises:
        ConfigError: an argument is wrong, or a file does not exist. The first operation connects, not the constructor.
    """

    creates_atomically = True

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
            raise ConfigError(f"missing_host_key_policy={missing_host_key_policy!r}: expected one of {_POLICIES}.")
        self._known_hosts = _file("known_hosts_filename", known_hosts_filename, known_hosts_filename_environ)
        key = _file("key_filename", key_filename, key_filename_environ)
        self._root = cwd.rstrip("/") or ("/" if cwd else ".")
        address = f"{f'{username}@' if username else ''}{f'[{host}]' if ':' in host else host}:{port}"
        folder = posixpath.normpath(self._root).lstrip("/")
        super().__init__(f"sftp://{address}/{'' if folder in ('', '.') else f'{folder}/'}")
        self._answer_timeout = answer_timeout
        self._login: dict[str, Any] = {
            "hostname": host,
            "port": port,
            "username": username,
            "password": password,
            "key_filename": key,
            "allow_agent": key is None and password is None,
            "look_for_keys": key is None and password is None,
            **{f"{what}timeout": connect_timeout for what in ("", "banner_", "auth_", "channel_")},
            **(connect_kwargs or {}),
        }
        self._slots = threading.BoundedSemaphore(_CHANNELS)
        self._lock = threading.Lock()
        self._ssh = paramiko.SSHClient()
        self._ssh.load_system_host_keys(self._known_hosts)
        self._ssh.set_missing_host_key_policy(getattr(paramiko, missing_host_key_policy)())
        self._idle: list[Any] = []

    @classmethod
    def at(cls, bucket: str, **backend_kwargs: Any) -> SFTPObjectStore:
        found = re.fullmatch(r"((?P<user>[^:]+)@)?(?P<host>\[[^\]]+\]|[^:@]+)(:(?P<port>\d{1,5}))?", bucket)
        if found is None:  # the message must not repeat a password
            raise ConfigError(
                "the URI of an SFTP server: expected user@host:port, such as 'sftp://user@host:22/run', without a "
                "password. Give key_filename or password as an argument."
            )
        named: dict[str, Any] = {"username": found["user"], "port": int(found["port"] or 22)}
        return cls(found["host"].strip("[]"), **{**named, **backend_kwargs})

    def close(self) -> None:
        with self._lock:
            self._idle = []
            self._ssh.close()

    # ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _put(self, key: str, file: IO[bytes], size: int, version: str | None) -> None:
        path = self._path(key)
        folder, last = posixpath.split(path)
        temporary = posixpath.join(folder, temporary_name(last))
        with self._channel() as channel:
            self._make_folder(channel, folder)
            rename = channel.rename if version == ABSENT else channel.posix_rename
            try:
                _write(channel, temporary, file)
                try:
                    rename(temporary, path)
                except OSError as e:
                    if version == ABSENT and _is_there(channel, path):
                        raise FileExistsError from e
                    raise
            except BaseException as e:
                if not isinstance(e, _LOST):  # otherwise the temporary file stays: see unfinished_parts
                    with contextlib.suppress(OSError, *_LOST):  # the first error is more important
                        channel.remove(temporary)
                raise

    def _read(self, key: str, offset: int, size: int) -> Generator[Any]:
        with self._channel() as channel, _opened(channel, self._path(key), "r") as file:
            version, total = _version(file.stat())
            yield version, total
            start, end = span_of(offset, size, total)
            ranges = [(at, min(PIECE_BYTES, end - at)) for at in range(start, end, PIECE_BYTES)]
            yield from file.readv(ranges, max_concurrent_prefetch_requests=_REQUESTS)

    def _stat(self, key: str) -> tuple[str, int]:
        with self._channel() as channel:
            return _version(channel.stat(self._path(key)))

    def _list(self, prefix: str, *, level: bool) -> Iterable[ObjectInfo]:
        found = self._files(prefix, level=level)
        return (entry for entry in found if not is_temporary(posixpath.basename(entry.name)))

    def _delete(self, key: str) -> None:
        folder, _ = posixpath.split(path := self._path(key))
        with self._channel() as channel:
            try:
                channel.remove(path)
            except OSError:
                if _is_there(channel, path, of_type=stat.S_ISREG):
                    raise
            # Also remove the folders that are empty now. The server refuses to remove a folder with files.
            with contextlib.suppress(OSError):
                while folder != self._root:
                    channel.rmdir(folder)
                    folder = posixpath.dirname(folder)

    def _unfinished(self, prefix: str) -> Iterable[tuple[str, str, datetime]]:
        for entry in self._files("", level=False):
            folder, last = posixpath.split(entry.name)
            key = posixpath.join(folder, final_name(last))
            if is_temporary(last) and key.startswith(prefix) and entry.modified_at is not None:
                yield key, entry.name, entry.modified_at

    def _abort(self, key: str, upload_id: str) -> None:
        with self._channel() as channel:
            channel.remove(self._path(upload_id))

    # ── files and folders ────────────────────────────────────────────────────────────────────────────────────────
    def _path(self, key: str) -> str:
        """Return the path of an object on the server."""
        return posixpath.join(self._root, key)

    def _check_root(self, channel: paramiko.SFTPClient) -> None:
        """Raise FileNotFoundError if the folder of the store does not exist."""
        if not _is_there(channel, self._root, of_type=stat.S_ISDIR):
            raise FileNotFoundError("the folder of the store does not exist on the server")

    def _make_folder(self, channel: paramiko.SFTPClient, folder: str) -> None:
        """Create ``folder`` and missing parents below the folder of the store.

        Raises:
            FileNotFoundError: the folder of the store does not exist.
        """
        if folder == self._root:
            self._check_root(channel)
        elif not _is_there(channel, folder, of_type=stat.S_ISDIR):
            self._make_folder(channel, posixpath.dirname(folder))
            try:
                channel.mkdir(folder)
            except OSError:
                if not _is_there(channel, folder, of_type=stat.S_ISDIR):  # made by another process since
                    raise

    def _files(self, prefix: str, *, level: bool) -> Iterator[ObjectInfo]:
        """List files with keys beginning with ``prefix``, temporary files included.

        With ``level`` list only files and folders directly in the folder of ``prefix``.
        """
        folders = [prefix.rpartition("/")[0]]
        if folders[0] and not is_name(folders[0]):
            return  # no object can be there
        while folders:
            for entry in self._entries(folders.pop()):
                if level or not entry.name.endswith("/"):
                    if entry.name.startswith(prefix):
                        yield entry
                elif entry.name.startswith(prefix) or prefix.startswith(entry.name):
                    folders.append(entry.name.removesuffix("/"))

    def _entries(self, folder: str) -> Iterator[ObjectInfo]:
        """Yield the files and folders in ``folder``. The names of folders end with a slash."""
        with self._channel() as channel:
            try:
                found = channel.listdir_attr(self._path(folder))
            except FileNotFoundError:
                self._check_root(channel)
                return
        for entry in found:
            key, mode = posixpath.join(folder, entry.filename), entry.st_mode or 0
            if stat.S_ISDIR(mode):
                yield ObjectInfo(f"{key}/", 0)
            elif stat.S_ISREG(mode):
                changed = datetime.fromtimestamp(entry.st_mtime, UTC) if entry.st_mtime else None
                yield ObjectInfo(key, entry.st_size or 0, changed)

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────────────
    @contextlib.contextmanager
    def _channel(self) -> Generator[Any]:
        """Lend the calling thread a channel to the server. Waits while all 8 channels are lent.

        Connects first if there is no connection.
        """
        with self._slots:
            with self._lock:
                transport = self._ssh.get_transport()
                if transport is None or not transport.is_authenticated():
                    self._idle = []
                    self._ssh.close()
                    self._ssh.connect(**self._login)
                channel: Any = self._idle.pop() if self._idle else self._ssh.open_sftp()
                channel.get_channel().settimeout(self._answer_timeout)
            try:
                yield channel
            except BaseException as e:
                if isinstance(e, _LOST):
                    channel.sock.get_transport().close()  # and so all channels of the connection
                elif not isinstance(e, OSError):
                    channel.close()  # unread answers may be left
                elif channel.sock.closed:
                    raise ConnectionError(str(e)) from e
                else:
                    self._idle.append(channel)  # the server refused an operation
                raise
            self._idle.append(channel)

    # ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _meaning(self, error: Exception) -> Meaning | None:
        cause = str(error) or type(error).__name__
        if isinstance(error, paramiko.BadHostKeyException):
            return PermissionError, (
                "the server has another key than the known key. Either the connection is intercepted, or the "
                "server was installed again: then remove the old key with 'ssh-keygen -R' and add the new key."
            )
        if isinstance(error, paramiko.SSHException) and "not found in known_hosts" in cause:
            return PermissionError, (
                f"the host is not known: {cause}. If you trust the host, add its key with: ssh-keyscan "
                f"-p {self._login['port']} {self._login['hostname']} >> {self._known_hosts or '~/.ssh/known_hosts'}"
            )
        # paramiko reports a connection lost during the login as a refused login
        is_refused = isinstance(error, paramiko.AuthenticationException) and not re.search("EOF|timeout", cause)
        if is_refused or "No authentication methods available" in cause:
            return PermissionError, f"the login failed: {cause} Check username, key and password."
        if isinstance(error, (*_LOST, ssh_exception.NoValidConnectionsError)):
            return ObjectStoreTransientError, f"the connection failed: {cause}."
        if isinstance(error, OSError) and error.filename is None:  # otherwise the file is on this machine
            for kind in (FileNotFoundError, FileExistsError, PermissionError):
                if isinstance(error, kind):
                    return kind, error.strerror or cause
            if error.errno is not None:
                return ObjectStoreTransientError, f"the connection failed: {cause}."
            return ObjectStoreError, f"the server reports: {cause}."
        return None


@contextlib.contextmanager
def _opened(channel: paramiko.SFTPClient, path: str, mode: str) -> Generator[paramiko.SFTPFile]:
    """Open a file on the server. On a lost connection the file stays open: to close would wait for another answer."""
    file = channel.open(path, mode)
    try:
        yield file
    except BaseException as e:
        if not isinstance(e, _LOST):
            file.close()
        raise
    file.close()


def _write(channel: paramiko.SFTPClient, path: str, file: IO[bytes]) -> None:
    """Write ``file`` to a new file. Requests do not wait for each other, and every answer is checked."""
    with _opened(channel, path, "wx") as target:
        piece = file.read(_REQUEST_BYTES)
        while piece:
            following = file.read(_REQUEST_BYTES)
            target.set_pipelined(bool(following))  # the last write waits for the answers to all writes
            target.write(piece)
            piece = following


def _is_there(channel: paramiko.SFTPClient, path: str, of_type: Any = bool) -> bool:
    """Return true if a file or folder exists and ``of_type``, such as ``stat.S_ISDIR``, is true for its mode."""
    try:
        return of_type(channel.stat(path).st_mode or stat.S_IFREG)
    except FileNotFoundError:
        return False


def _version(attributes: paramiko.SFTPAttributes) -> tuple[str, int]:
    """Return version and size of a file. FileNotFoundError: not a regular file."""
    if not stat.S_ISREG(attributes.st_mode or stat.S_IFREG):
        raise FileNotFoundError("this is not a file and therefore not an object")
    size = attributes.st_size or 0
    return f"{attributes.st_mtime} {size}", size


def _file(argument: str, filename: str | Path | None, environ: str) -> str | None:
    """Return the path in ``filename``, or else in the environment variable ``environ``; ``None`` if both are empty.

    Raises:
        ConfigError: the file does not exist.
    """
    if filename is None:
        argument, filename = f"the environment variable {environ}", os.environ.get(environ)
    if not filename:
        return None
    path = Path(filename).expanduser()
    if not path.is_file():
        raise ConfigError(f"{argument} is {str(filename)!r}: there is no such file.")
    return str(path)

"""SFTP servers: asyncssh's, and OpenSSH's where it is installed. On loopback, gone afterwards.

Run as a program, this file is the server of asyncssh.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

READY_SECONDS = 30.0


@dataclass(frozen=True)
class SFTPServer:
    """A running server with one user, who logs in with a key.

    Attributes:
        key_file: the user's private key.
        other_key_file: one that the server does not accept.
        known_hosts_file: has the server's key.
        root: the folder of this machine where a login ends up.
        pid: of the server.
    """

    host: str
    port: int
    username: str
    key_file: Path
    other_key_file: Path
    known_hosts_file: Path
    root: Path
    pid: int

    @property
    def bucket(self) -> str:
        """What stands in a URI between ``sftp://`` and the next slash."""
        return f"{self.username}@{self.host}:{self.port}"

    @property
    def store_kwargs(self) -> dict[str, Any]:
        """Arguments of ``SFTPObjectStore`` beside the host."""
        return {
            "port": self.port,
            "username": self.username,
            "key_filename": self.key_file,
            "known_hosts_filename": self.known_hosts_file,
        }

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which a program that is told the URI can log in."""
        return {
            "COMPOSERLITE_SFTP_KNOWN_HOSTS_FILE": str(self.known_hosts_file),
            "COMPOSERLITE_SFTP_KEY_FILE": str(self.key_file),
        }

    def new_folder(self) -> str:
        """The name of a new, empty folder."""
        return Path(tempfile.mkdtemp(prefix="folder-", dir=self.root)).name


@contextlib.contextmanager
def running_sftp(*, port: int = 0, folder: Path | None = None, options: tuple[str, ...] = ()) -> Generator[SFTPServer]:
    """asyncssh's server on a port of loopback, a free one if it is 0.

    Args:
        port: to listen on.
        folder: for keys and objects, to be used again by the next server; a temporary one if ``None``.
        options: ``--read-only`` refuses all that changes files, ``--die-after-bytes=N`` kills the server at the write
            that exceeds N bytes, ``--stall-after-bytes=N`` never answers it, ``--fail-after-bytes=N`` fails it and not
            those after it, ``--plain`` offers nothing beyond version 3 of the protocol, ``--keep`` refuses to
            remove files.
    """
    pytest.importorskip("asyncssh", reason="the package asyncssh is not installed: pip install asyncssh")
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sftp-")))
        _make_keys(folder)
        command = [sys.executable, __file__, str(folder), str(port), *options]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        stack.callback(_kill, process)
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            pytest.fail(f"the SFTP server did not start: {(folder / 'log').read_text()[-2000:]}")
        yield _handle(folder, int(line), "runner", process.pid)


@contextlib.contextmanager
def running_openssh() -> Generator[SFTPServer]:
    """OpenSSH's server on a free port of loopback, for the user who runs the tests."""
    from ports import reserved_port  # the program that this file is as well does not find it

    program = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    if program is None:
        pytest.skip("OpenSSH's server is not installed: apt install openssh-server")
    pytest.importorskip("asyncssh", reason="the package asyncssh is not installed: pip install asyncssh")
    with tempfile.TemporaryDirectory(prefix="sshd-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        _make_keys(folder)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        port = stack.enter_context(reserved_port())
        (folder / "sshd_config").write_text(
            f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
            f"StrictModes no\nUsePAM no\nPasswordAuthentication no\nPidFile none\nPermitRootLogin yes\n"
            f"Subsystem sftp internal-sftp -d {folder}/root\n"
        )
        process = subprocess.Popen([program, "-D", "-f", f"{folder}/sshd_config", "-E", f"{folder}/log"])
        try:
            _wait_for(port, process, folder)
            yield _handle(folder, port, getpass.getuser(), process.pid)
        finally:
            _kill(process)


@pytest.fixture(scope="session")
def sftp_server() -> Generator[SFTPServer]:
    """One SFTP server for all tests of this process. Take a folder of your own by ``new_folder()``."""
    with running_sftp() as server:
        yield server


@pytest.fixture(scope="session")
def openssh_server() -> Generator[SFTPServer]:
    """OpenSSH's server, for all tests of this process."""
    with running_openssh() as server:
        yield server


def _make_keys(folder: Path) -> None:
    """Keys of the host, of the user, and of somebody else, where there are none yet."""
    import asyncssh

    (folder / "root").mkdir(exist_ok=True)
    for name in ("host", "user", "other"):
        if not (folder / name).exists():
            key = asyncssh.generate_private_key("ssh-ed25519")
            key.write_private_key(folder / name)
            (folder / name).chmod(0o600)
            key.write_public_key(folder / f"{name}.pub")


def _handle(folder: Path, port: int, username: str, pid: int) -> SFTPServer:
    known_hosts = folder / f"known_hosts-{port}"
    known_hosts.write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
    return SFTPServer(
        host="127.0.0.1",
        port=port,
        username=username,
        key_file=folder / "user",
        other_key_file=folder / "other",
        known_hosts_file=known_hosts,
        root=folder / "root",
        pid=pid,
    )


def _wait_for(port: int, process: subprocess.Popen[bytes], folder: Path) -> None:
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return
        time.sleep(0.02)
    pytest.fail(f"sshd did not start: {(folder / 'log').read_text()[-2000:]}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(10)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


# ── the program ──────────────────────────────────────────────────────────────────────────────────────────────────────
def _serve(folder: Path, port: int, options: dict[str, str]) -> None:
    import asyncio

    import asyncssh
    from asyncssh import sftp

    if "plain" in options:
        sftp.SFTPServerHandler._extensions = []
    denied = asyncssh.SFTPPermissionDenied("read only")
    written = 0

    class Server(asyncssh.SFTPServer):
        def __init__(self, channel: Any) -> None:
            super().__init__(channel, chroot=str(folder / "root").encode())

        def open(self, path: bytes, pflags: int, attrs: Any) -> Any:
            if "read-only" in options and pflags & (asyncssh.FXF_WRITE | asyncssh.FXF_CREAT):
                raise denied
            return super().open(path, pflags, attrs)

        def mkdir(self, path: bytes, attrs: Any) -> Any:
            if "read-only" in options:
                raise denied
            return super().mkdir(path, attrs)

        def remove(self, path: bytes) -> Any:
            if "keep" in options:
                raise asyncssh.SFTPPermissionDenied("nothing is removed here")
            return super().remove(path)

        async def write(self, file_obj: Any, offset: int, data: bytes) -> Any:
            nonlocal written
            before, written = written, written + len(data)
            for fault in ("die", "stall", "fail"):
                limit = options.get(f"{fault}-after-bytes")
                if limit is not None and before <= int(limit) < written:
                    if fault == "die":
                        os._exit(1)
                    if fault == "fail":
                        raise asyncssh.SFTPFailure("no space")
                    await asyncio.sleep(3600)
            return super().write(file_obj, offset, data)

    user = asyncssh.read_public_key(folder / "user.pub")

    class OneUser(asyncssh.SSHServer):
        def public_key_auth_supported(self) -> bool:
            return True

        def validate_public_key(self, username: str, key: Any) -> bool:
            return username == "runner" and key == user

    async def serve() -> None:
        server = await asyncssh.listen(
            "127.0.0.1",
            port,
            server_host_keys=[str(folder / "host")],
            server_factory=OneUser,
            sftp_factory=Server,
            reuse_address=True,
        )
        print(server.get_port(), flush=True)  # noqa: T201
        # Whoever started this holds the other end of stdin: when it is gone, so is this.
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        os._exit(0)

    asyncio.run(serve())


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]), dict((o.lstrip("-") + "=").split("=")[:2] for o in sys.argv[3:]))  # type: ignore[misc]

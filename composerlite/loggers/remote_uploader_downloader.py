"""RemoteUploaderDownloader: keeps the files of a run in an object store."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from composerlite.checkpoint.record.naming import FIRST_RANK, format_name_with_dist
from composerlite.core import Logger, LoggerDestination, State
from composerlite.errors import ConfigError, checked_arguments
from composerlite.storage import (
    ObjectStore,
    RetryPolicy,
    Transfer,
    Uploader,
    check_name,
    leave_by,
    open_store,
    parse_uri,
)
from composerlite.storage.progress import download_bar
from composerlite.storage.workers import StagedFiles

log = logging.getLogger(__name__)
_NAME = "{remote_file_name}"
_FIRST_DELAY_SECONDS = 2.0  # few attempts have to outlast more


@final
class RemoteUploaderDownloader(LoggerDestination):
    """Uploads files in the background: what ``Logger.upload_file`` is given, and the checkpoints of every saver.

    A file may change or go as soon as ``upload_file`` returns. Of one name the newest content wins, and an older one
    never replaces it. What fails is raised in training at the next batch; the end of ``fit`` and of the run wait for
    the rest and raise what did not arrive. Uploads run in threads of this process, which leave the interpreter to
    training while they wait.

    Args:
        bucket_uri: the bucket, and a folder in it if you like: ``'s3://bucket'``, ``'gs://bucket/runs'``,
            ``'libcloud://container'``.
        backend_kwargs: arguments of the store's class, such as ``{'provider': 's3', 'key_environ': 'KEY', …}``.
        file_path_format_string: the name of each object, with ``{remote_file_name}``, ``{run_name}`` and the variables
            of ranks. With checkpoints it has to end with ``{remote_file_name}``.
        num_concurrent_uploads: files at the same time; each large one is sent in parts at the same time besides.
        upload_staging_folder: where files wait that are to be uploaded; a temporary folder by default.
        use_procs: accepted for scripts of Composer; no processes are started.
        num_attempts: how often a request is made that fails in a way that may pass.

    Attributes:
        object_store: the store, from ``INIT`` on.
        uploader: uploads to it, from ``INIT`` on.

    Raises:
        ConfigError: an argument is wrong, or the store's library is not installed; at ``INIT``: files cannot wait in
            the folder, or this was closed with another Trainer.
        PermissionError: at ``INIT``, if the bucket cannot be written to. FileNotFoundError: there is no such bucket.
    """

    @checked_arguments
    def __init__(
        self,
        bucket_uri: str,
        backend_kwargs: Mapping[str, Any] | None = None,
        file_path_format_string: str = _NAME,
        num_concurrent_uploads: int = 1,
        upload_staging_folder: str | Path | None = None,
        use_procs: bool = True,
        num_attempts: int = 3,
    ) -> None:
        scheme, bucket, folder = parse_uri(bucket_uri)
        if not scheme:
            raise ConfigError(f"bucket_uri={bucket_uri!r}: expected a bucket, such as 's3://bucket'.")
        for name, value in (("num_concurrent_uploads", num_concurrent_uploads), ("num_attempts", num_attempts)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(f"{name}={value!r}: expected a whole number, 1 or more.")
        if _NAME not in file_path_format_string:
            raise ConfigError(
                f"file_path_format_string={file_path_format_string!r}: expected {_NAME} in it: else all files "
                "have one name."
            )
        self.bucket_uri = bucket_uri
        self.file_path_format_string = f"{folder.strip('/')}/{file_path_format_string}".lstrip("/")
        self.object_store: ObjectStore = open_store(f"{scheme}://{bucket}", **dict(backend_kwargs or {}))
        self._files = StagedFiles(upload_staging_folder)
        self._staging = None if upload_staging_folder is None else str(upload_staging_folder)
        retry = RetryPolicy(attempts=num_attempts, first_delay_seconds=_FIRST_DELAY_SECONDS)
        self._uploader = Uploader(Transfer(self.object_store, retry=retry), num_concurrent=num_concurrent_uploads)
        self._prefix = ""
        self._run_name = ""
        self._sent: set[str] = set()

    @property
    def uploader(self) -> Uploader:
        """The uploader, for those who have an order to keep."""
        return self._uploader

    @property
    def checkpoint_prefix(self) -> str:
        """Prefix of the remote names of checkpoints.

        Raises:
            ConfigError: ``file_path_format_string`` puts something behind them.
        """
        if not self.file_path_format_string.endswith(_NAME):
            raise ConfigError(
                f"file_path_format_string={self.file_path_format_string!r}: with checkpoints it must end with {_NAME}: "
                "what belongs to one is found by its name."
            )
        template = self.file_path_format_string.removesuffix(_NAME)
        return format_name_with_dist(template, self._run_name, **FIRST_RANK)  # all ranks upload to one place

    def can_upload_files(self) -> bool:
        """Return true if :meth:`upload_file` does anything: always."""
        return True

    def object_name(self, remote_file_name: str, run_name: str | None = None) -> str:
        """The name that the object for ``remote_file_name`` gets, in the run of ``INIT`` if no other is given.

        Args:
            remote_file_name: name of the file.
            run_name: of another run; ``None``: the run of ``INIT``.

        Returns:
            Name of the object in the bucket.
        """
        run_name = self._run_name if run_name is None else run_name
        return check_name(
            format_name_with_dist(self.file_path_format_string, run_name, remote_file_name=remote_file_name)
        )

    @property
    def place(self) -> str | None:
        return self.bucket_uri

    def init(self, state: State, logger: Logger) -> None:
        """See that the bucket, and the folder where files wait, can be written to."""
        if self._uploader.closed:
            raise ConfigError(
                f"RemoteUploaderDownloader({self.bucket_uri!r}) was closed with the Trainer that it was given to, and "
                "takes no more files. Give each Trainer one of its own."
            )
        try:
            self._files.prepare()
        except OSError as e:
            raise ConfigError(f"upload_staging_folder={self._staging!r} cannot be used: {e}. Choose another.") from e
        self._run_name = state.run_name
        self._uploader.transfer.check_writable(self.object_name("file"))

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Upload the file ``file_path`` as ``remote_file_name``, in the background.

        Args:
            state: of the run.
            remote_file_name: name of the file.
            file_path: local file; it may be changed when this returns.
            overwrite: replace an object of that name.

        Raises:
            FileNotFoundError: there is no such file.
            Exception: what went wrong with an earlier upload.
        """
        self._uploader.raise_failures()
        name = self.object_name(format_name_with_dist(remote_file_name, state.run_name))
        staged = self._files.copy(file_path, file_path.name)

        transfer = self._uploader.transfer

        def upload() -> None:
            try:
                if not overwrite and transfer.exists(name):
                    raise FileExistsError(
                        f"{self.object_store.get_uri(name)} exists: give another name, or overwrite=True."
                    )
                transfer.upload(name, staged)
            finally:
                self._files.give_back(staged)

        self._sent.add(name)
        self._uploader.submit(
            self.object_store.get_uri(name),
            upload,
            lane=name,
            replaces=True,
            dropped=lambda: self._files.give_back(staged),
        )

    def download_file(
        self, remote_file_name: str, destination: str | Path, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Make the object for ``remote_file_name`` the file ``destination``.

        Args:
            remote_file_name: name of the file.
            destination: path of the local file.
            overwrite: replace a local file.
            progress_bar: show one on a terminal.

        Raises:
            FileNotFoundError: there is no such object. FileExistsError: there is a file and ``overwrite`` is false.
        """
        name = self.object_name(remote_file_name)
        with download_bar(progress_bar) as tell:
            self._uploader.transfer.download(name, Path(destination), overwrite=overwrite, callback=tell)

    def fit_start(self, state: State, logger: Logger) -> None:
        """End the grace period of a run before this one, which this process has outlived."""
        leave_by()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Raise the error of an upload that failed."""
        self._uploader.raise_failures()

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Raise the error of an upload that failed."""
        self._uploader.raise_failures()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Wait for all files and raise what went wrong with one. Checkpoints are waited for by who saves them."""
        until = time.monotonic() + self._uploader.timeout
        while self._sent:
            self._uploader.wait(until - time.monotonic(), lane=self._sent.pop())
        self._uploader.raise_failures()

    def post_close(self) -> None:
        """Wait for all uploads: those too that others begin when they are closed.

        Raises:
            Exception: what did not arrive.
        """
        try:
            self._uploader.close()
        finally:
            self.object_store.close()
            self._files.remove()

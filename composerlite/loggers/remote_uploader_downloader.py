"""RemoteUploaderDownloader: uploads the files of a run to an object store."""

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
_FIRST_DELAY_SECONDS = 2.0  # longer than usual, since there are few attempts


@final
class RemoteUploaderDownloader(LoggerDestination):
    """Uploads files in the background: files of ``Logger.upload_file``, and the checkpoints of all savers.

    The file may change as soon as ``upload_file`` returns. If a name is uploaded several times, the newest content
    wins. A failed upload is raised at the next batch. The end of ``fit`` and of the run wait for the other uploads and
    raise their errors. Uploads run in threads of this process.

    Args:
        bucket_uri: the bucket, with or without a folder: ``'s3://bucket'``, ``'gs://bucket/runs'``,
            ``'libcloud://container'``.
        backend_kwargs: arguments of the store's class, such as ``{'provider': 's3', 'key_environ': 'KEY', …}``.
        file_path_format_string: name of each object, with ``{remote_file_name}``, ``{run_name}`` and the variables
            of ranks. To upload checkpoints, the name must end with ``{remote_file_name}``.
        num_concurrent_uploads: number of files uploaded at the same time. Each large file is sent in parallel parts.
        upload_staging_folder: folder for copies of waiting files; by default a temporary folder.
        use_procs: ignored; for scripts of Composer. Uploads run in threads.
        num_attempts: number of attempts of a request that fails for a transient reason.

    Attributes:
        object_store: the store.

    Raises:
        ConfigError: an argument is invalid, or the store's library is not installed; at ``INIT`` the staging folder
            cannot be used, or an earlier Trainer has closed this logger.
        PermissionError: at ``INIT`` the bucket cannot be written to.
        FileNotFoundError: at ``INIT`` the bucket does not exist.

    Example:
        .. code-block:: python

            Trainer(model=model, save_folder="runs/fox", loggers=RemoteUploaderDownloader("s3://bucket"))
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
                f"file_path_format_string={file_path_format_string!r}: expected a name with {_NAME}: otherwise all "
                "files have the same name."
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
        """Uploads to the store. Savers submit their checkpoints to this uploader, in their own order."""
        return self._uploader

    @property
    def checkpoint_prefix(self) -> str:
        """Prefix of the names of checkpoints in the bucket.

        Raises:
            ConfigError: ``file_path_format_string`` has text after ``{remote_file_name}``.
        """
        if not self.file_path_format_string.endswith(_NAME):
            raise ConfigError(
                f"file_path_format_string={self.file_path_format_string!r}: with checkpoints the name must end "
                f"with {_NAME}, so that the files of a checkpoint can be found by name."
            )
        template = self.file_path_format_string.removesuffix(_NAME)
        return format_name_with_dist(template, self._run_name, **FIRST_RANK)  # one prefix for all ranks

    def can_upload_files(self) -> bool:
        """Return true."""
        return True

    def object_name(self, remote_file_name: str, run_name: str | None = None) -> str:
        """Return the name in the bucket of the file ``remote_file_name``.

        Args:
            remote_file_name: name of the file.
            run_name: name of the run; ``None``: the run of ``INIT``.

        Returns:
            Name of the object.
        """
        name = self._run_name if run_name is None else run_name
        return check_name(format_name_with_dist(self.file_path_format_string, name, remote_file_name=remote_file_name))

    @property
    def place(self) -> str | None:
        return self.bucket_uri

    def init(self, state: State, logger: Logger) -> None:
        """Check that the bucket and the staging folder can be written to."""
        if self._uploader.closed:
            raise ConfigError(
                f"RemoteUploaderDownloader({self.bucket_uri!r}) was closed by an earlier Trainer. Create a new one for "
                "each Trainer."
            )
        try:
            self._files.prepare()
        except OSError as e:
            raise ConfigError(
                f"upload_staging_folder={self._staging!r} cannot be used: {e}. Give another folder."
            ) from e
        self._run_name = state.run_name
        self._uploader.transfer.check_writable(self.object_name("file"))

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Copy the file, and upload the copy in the background.

        Args:
            state: state of the run.
            remote_file_name: name of the file in the bucket.
            file_path: local file; may change when this method returns.
            overwrite: replace an object of the same name.

        Raises:
            FileNotFoundError: the file does not exist.
            Exception: error of an earlier upload.
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
        """Download a file.

        Args:
            remote_file_name: name of the file in the bucket.
            destination: path of the local file.
            overwrite: replace a local file.
            progress_bar: show a progress bar on a terminal.

        Raises:
            FileNotFoundError: the object does not exist.
            FileExistsError: the local file exists, and ``overwrite`` is false.
        """
        name = self.object_name(remote_file_name)
        with download_bar(progress_bar) as tell:
            self._uploader.transfer.download(name, Path(destination), overwrite=overwrite, callback=tell)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Remove the deadline of an earlier, preempted run of this process."""
        leave_by()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Raise the errors of failed uploads."""
        self._uploader.raise_failures()

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Raise the errors of failed uploads."""
        self._uploader.raise_failures()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Wait for the files of :meth:`upload_file`, and raise errors. Savers wait for their own checkpoints."""
        until = time.monotonic() + self._uploader.timeout
        while self._sent:
            self._uploader.wait(until - time.monotonic(), lane=self._sent.pop())
        self._uploader.raise_failures()

    def post_close(self) -> None:
        """Wait for all uploads, also uploads that other callbacks began in their ``close``.

        Raises:
            Exception: error of an upload.
        """
        try:
            self._uploader.close()
        finally:
            self.object_store.close()
            self._files.remove()

"""MLFlowLogger: a run as a run of MLflow."""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, final

from composerlite import dist
from composerlite.checkpoint.record.naming import format_name_with_dist
from composerlite.errors import ConfigError, checked_arguments
from composerlite.loggers.services.service import ServiceLogger, need_package, pictures, scalars
from composerlite.loggers.values import jsonable, to_json
from composerlite.storage import check_name
from composerlite.storage.sdk import isolate_sdk_rng

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from composerlite.core import Logger, State

log = logging.getLogger(__name__)
_MOST_METRICS = 1000
"""Largest number of metrics in one request of MLflow."""
_MOST_PARAMETERS = 100


@final
class MLFlowLogger(ServiceLogger[str]):
    """Logs to a run of MLflow, and continues the MLflow run when the run resumes.

    The id of the MLflow run is in each checkpoint. A resumed run of the same ``run_name`` continues the MLflow run, and
    logs batches that are trained again at their step. Metrics that are numbers, hyperparameters, tables, images and the
    files of ``Logger.upload_file`` are sent in the background. MLflow retries failed requests; an error that remains is
    raised at the next batch, or when the trainer closes. Checkpoints are not uploaded: use a bucket as ``save_folder``.

    Args:
        experiment_name: name of the experiment, created if missing; by default ``MLFLOW_EXPERIMENT_NAME`` or
            ``'Default'``.
        run_name: name of the MLflow run; by default the ``run_name`` of the run.
        tags: tags of the MLflow run.
        tracking_uri: address of the server, or a folder; by default ``MLFLOW_TRACKING_URI``.
        rank_zero_only: only global rank 0 logs. Otherwise each rank has an MLflow run with ``-rank<N>`` after its name.
        flush_interval: seconds between two requests with metrics. Evaluations, epochs, checkpoints and the end of
            training also send metrics.
        rename_metrics: ``{'name here': 'name in MLflow'}``.
        ignore_metrics: globs of metrics to leave out.
        ignore_hyperparameters: globs of hyperparameters to leave out.
        resume: continue the MLflow run of the checkpoint; otherwise each launch has a new MLflow run.
        timeout: seconds to wait for the background when the trainer closes.
        run_group: value of the tag ``run_group``.
        log_system_metrics: has no effect but a warning: use the callback ``SystemMetricsMonitor``.
        model_registry_prefix: ignored; for scripts of Composer.
        model_registry_uri: ignored; for scripts of Composer.
        synchronous: ignored; for scripts of Composer. Metrics are sent in the background.
        logging_buffer_seconds: ignored; for scripts of Composer.
        log_duplicated_metric_every_n_steps: ignored; for scripts of Composer.

    Attributes:
        run_id: id of the MLflow run, from ``AFTER_LOAD`` on; ``None`` on ranks that do not log.
        experiment_id: id of the experiment, from ``INIT`` on.

    Raises:
        ConfigError: mlflow is not installed, or an argument is invalid; at ``INIT`` MLflow refuses the tracking URI.
        MlflowException: at ``INIT`` the server does not answer, or refuses.

    Example:
        .. code-block:: python

            Trainer(model=model, loggers=MLFlowLogger("demo", tracking_uri="http://mlflow:5000"))
    """

    @checked_arguments
    def __init__(
        self,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, Any] | None = None,
        tracking_uri: str | Path | None = None,
        rank_zero_only: bool = True,
        flush_interval: float = 10,
        rename_metrics: Mapping[str, str] | None = None,
        ignore_metrics: Sequence[str] | None = None,
        ignore_hyperparameters: Sequence[str] | None = None,
        resume: bool = True,
        timeout: float = 600.0,
        run_group: str | None = None,
        log_system_metrics: bool = False,
        model_registry_prefix: str = "",
        model_registry_uri: str | None = None,
        synchronous: bool = False,
        logging_buffer_seconds: int | None = 10,
        log_duplicated_metric_every_n_steps: int = 100,
    ) -> None:
        need_package("mlflow", who="MLFlowLogger", extra="mlflow")
        for argument, value in (("flush_interval", flush_interval), ("timeout", timeout)):
            if value < 0:
                raise ConfigError(f"MLFlowLogger({argument}={value}): expected seconds, 0 or more.")
        for argument, globs in (("ignore_metrics", ignore_metrics), ("ignore_hyperparameters", ignore_hyperparameters)):
            if isinstance(globs, str):
                raise ConfigError(f"MLFlowLogger({argument}={globs!r}): expected a list of globs.")
        if log_system_metrics:
            log.warning("MLFlowLogger(log_system_metrics=True) has no effect: add callbacks=[SystemMetricsMonitor()]")
        super().__init__("MLflow", rank_zero_only=rank_zero_only, timeout=timeout)
        self._experiment = experiment_name
        self._name = run_name
        group = {} if run_group is None else {"run_group": run_group}
        self._tags = {name: str(value) for name, value in {**group, **(tags or {})}.items()}
        self._uri = tracking_uri.absolute().as_uri() if isinstance(tracking_uri, Path) else tracking_uri
        self._flush_interval = float(flush_interval)
        self._renamed = dict(rename_metrics or {})
        self._ignored_metrics = tuple(ignore_metrics or ())
        self._ignored_parameters = tuple(ignore_hyperparameters or ())
        self._resume = resume
        self._ids: list[str | None] = []  # of the checkpoint, by rank
        self._client: MlflowClient | None = None
        self._parameters: dict[str, str] = {}  # in MLflow
        self._points: list[tuple[str, float, int, int]] = []  # name, value, milliseconds since 1970, batch
        self._flushed_at = time.monotonic()
        self.experiment_id: str | None = None

    @property
    def place(self) -> str | None:
        """Address and id of the MLflow run; ``None`` if this rank does not log."""
        return None if self._client is None else f"{self._client.tracking_uri}, run {self.run_id}"

    def init(self, state: State, logger: Logger) -> None:
        """Connect to the server, and find or create the experiment."""
        if self._run_name != state.run_name:
            self._run_name, self._ids = state.run_name, []
        self.experiment_id = dist.get_group().from_first("opening MLflow", self._open_experiment)
        if not self._is_silent and self._client is None:
            self._client = self._connect()

    def _connect(self) -> MlflowClient:
        from mlflow import MlflowClient  # a slow import
        from mlflow.exceptions import MlflowException

        isolate_sdk_rng("mlflow", "requests", "urllib3")
        try:
            return MlflowClient(tracking_uri=self._uri)
        except MlflowException as e:
            raise ConfigError(f"MLFlowLogger(tracking_uri={self._uri!r}): {e}") from e

    def _open_experiment(self) -> str:
        """Return the id of the experiment. Runs on rank 0, so ranks do not create the same experiment twice."""
        self._client = client = self._connect()
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        try:
            found = client.get_experiment_by_name(name)
            return client.create_experiment(name) if found is None else found.experiment_id
        except Exception as e:
            e.add_note(f"MLFlowLogger could not open the experiment {name!r} at {client.tracking_uri}.")
            raise

    def after_load(self, state: State, logger: Logger) -> None:
        """Continue the MLflow run of the checkpoint, or create one."""
        self._batch = int(state.timestamp.batch)
        with dist.get_group().all_or_none("starting the run of MLflow"):
            if self._client is not None and self._run is None:
                self._run = self.run_id = self._start(self._client)
        self._ids = dist.get_group().gather(self.run_id)
        self._write_early()

    def _start(self, client: MlflowClient) -> str:
        from mlflow.exceptions import MlflowException

        rank = dist.get_global_rank()
        if (saved := self._ids[rank] if rank < len(self._ids) else None) is not None:
            try:
                run = client.get_run(saved)
            except MlflowException as e:
                if e.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                run = None
            if run is not None and run.info.lifecycle_stage == "active":
                client.update_run(saved, status="RUNNING")
                for name, value in self._tags.items():
                    client.set_tag(saved, name, value)
                self._parameters = dict(run.data.params)
                return saved
            log.warning("MLFlowLogger: the MLflow run %s of the checkpoint was deleted: creating a new one", saved)
        name = self._name or self._run_name
        name = name if self._rank_zero_only else f"{name}-rank{rank}"
        tags = {"run_name": self._run_name, **self._tags}
        return client.create_run(str(self.experiment_id), run_name=name, tags=tags).info.run_id

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        values = {
            _allowed(name): text
            for name, text in _flat(hyperparameters)
            if not any(fnmatch.fnmatchcase(name, glob) for glob in self._ignored_parameters)
        }
        self._send_later("sending hyperparameters", lambda *call: self._send_parameters(values, *call), None)

    def _send_parameters(self, values: Mapping[str, str], client: MlflowClient, run: str, batch: int) -> None:
        """Log parameters. MLflow never changes a parameter, so a changed setting gets a name with the batch."""
        from mlflow.entities import Param

        new: list[Param] = []
        for name, value in values.items():
            if self._parameters.get(name, value) != value:
                name = f"{name}.batch{batch}"
            if self._parameters.get(name) != value:
                new.append(Param(name, value))
                self._parameters[name] = value
        for start in range(0, len(new), _MOST_PARAMETERS):
            client.log_batch(run, params=new[start : start + _MOST_PARAMETERS], synchronous=True)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        now = int(time.time() * 1000)
        values = {
            _allowed(self._renamed.get(name, name)): float(value)
            for name, value in scalars(metrics).items()
            if not any(fnmatch.fnmatchcase(name, glob) for glob in self._ignored_metrics)
        }
        self._write(
            lambda _, batch: self._points.extend((name, value, now, batch) for name, value in values.items()), step
        )

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        text = json.dumps({"columns": list(columns), "data": jsonable(rows)})
        folder = f"tables/{_allowed(name)}"
        self._send_later(
            f"sending the table {name!r}",
            lambda client, run, batch: client.log_text(run, text, f"{folder}/batch{batch}.json"),
            step,
        )

    def log_images(
        self, images: Any, name: str = "Images", channels_last: bool = False, step: int | None = None
    ) -> None:
        arrays = pictures(images, channels_last=channels_last)

        def send(client: MlflowClient, run: str, batch: int) -> None:
            for number, array in enumerate(arrays):
                key = _allowed(name if len(arrays) == 1 else f"{name}/{number}")
                client.log_image(run, array, key=key, step=batch)

        self._send_later(f"sending the images {name!r}", send, step)

    def _send_later(self, what: str, send: Callable[[MlflowClient, str, int], object], step: int | None) -> None:
        """Call ``send`` with client, run and batch in the background."""

        def submit(run: str, batch: int) -> None:
            if (client := self._client) is not None:
                self._background.submit(what, lambda: send(client, run, batch))

        self._write(submit, step)

    def _send(self) -> None:
        """Send the waiting metrics in the background."""
        self._flushed_at = time.monotonic()
        points, self._points = self._points, []

        def send(client: MlflowClient, run: str, batch: int) -> None:
            from mlflow.entities import Metric

            metrics = [Metric(*point) for point in points]
            for start in range(0, len(metrics), _MOST_METRICS):
                client.log_batch(run, metrics=metrics[start : start + _MOST_METRICS], synchronous=True)

        if points:
            self._send_later(f"sending {len(points)} metrics", send, None)

    def can_upload_files(self) -> bool:
        """Return true, on all ranks."""
        return True

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        check_name(format_name_with_dist(remote_file_name, state.run_name))
        super().upload_file(state, remote_file_name, file_path, overwrite=overwrite)

    def _send_file(self, run: str, name: str, staged: Path, batch: int, *, overwrite: bool) -> None:
        client = self._client
        assert client is not None
        parent = PurePosixPath(name).parent
        folder = None if parent == PurePosixPath() else str(parent)
        if not overwrite and any(kept.path == name for kept in client.list_artifacts(run, folder)):
            raise FileExistsError(f"{name!r} exists in the MLflow run {run}: give another name, or overwrite=True.")
        client.log_artifact(run, str(staged), folder)

    def batch_end(self, state: State, logger: Logger) -> None:
        self._batch = int(state.timestamp.batch)
        if time.monotonic() - self._flushed_at >= self._flush_interval or len(self._points) >= _MOST_METRICS:
            self._send()
        self._background.raise_failures()

    def post_close(self) -> None:
        """Send the remaining metrics and end the MLflow run, after the ``close`` of all callbacks.

        Raises:
            TimeoutError: some values were not sent in time.
            Exception: error of background work.
        """
        code = self._exit_code()
        try:
            if self._run is not None:
                self._send()
                status = "FINISHED" if code == 0 else "FAILED" if code == 1 else "KILLED"
                self._send_later("ending the run", lambda client, run, _: client.set_terminated(run, status), None)
            self._background.close()
        finally:
            self._client = self._run = None  # ends the threads of the client
            self._files.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the ids of the MLflow runs, and send the waiting metrics: a resumed run does not log them again."""
        self._send()
        return {"run_name": self._run_name, "run_ids": list(self._ids)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the MLflow runs of the checkpoint, if the run has the same name."""
        if self._resume and state_dict.get("run_name") == self._run_name and "run_ids" in state_dict:
            self._ids = list(state_dict["run_ids"])


def _allowed(name: str) -> str:
    """Return ``name`` with underscores for characters that MLflow refuses."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _flat(parameters: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names and texts of parameters. Names of nested dicts are joined with slashes."""
    for name, value in parameters.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else to_json(value)

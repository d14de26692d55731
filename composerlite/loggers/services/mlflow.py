"""MLFlowLogger: a run as a run of MLflow."""

from __future__ import annotations

import fnmatch
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from composerlite import dist
from composerlite.checkpoint.record.naming import format_name_with_dist
from composerlite.errors import ConfigError, checked_arguments
from composerlite.loggers.services.mlflow_run import MOST_METRICS, MetricValue, MlflowRun, allowed, open_experiment
from composerlite.loggers.services.service import ServiceLogger, exit_code, json_of, need_package, pictures, scalars
from composerlite.loggers.values import to_json
from composerlite.storage import check_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from composerlite.core import Logger, State

log = logging.getLogger(__name__)
_EXPERIMENT = "Default"


@final
class MLFlowLogger(ServiceLogger[MlflowRun]):
    """Logs to a run of MLflow, and continues it when the run is resumed.

    The id of the MLflow run is in each checkpoint. A resumed run of the same ``run_name`` continues that MLflow run;
    batches that are trained again are logged again, at their step. Metrics that are numbers, hyperparameters, tables
    and images are sent in the background, and so are files that are handed to ``Logger.upload_file``. What fails, after
    MLflow has tried again as often as it does, is raised at the next batch or when the trainer closes. Checkpoints are
    no artifacts: they go to ``save_folder``, which may be a bucket.

    Args:
        experiment_name: made if there is none; ``MLFLOW_EXPERIMENT_NAME`` or ``'Default'`` if nothing is given.
        run_name: of the MLflow run; the ``run_name`` by default.
        tags: of the run.
        tracking_uri: of the server, or a folder; what MLflow takes (``MLFLOW_TRACKING_URI``) if nothing is given.
        rank_zero_only: only global rank 0 logs and keeps files. Otherwise each rank has an MLflow run of its own, with
            ``-rank<N>`` after its name.
        flush_interval: seconds between two requests with metrics; evaluations, epochs and the end of training send
            them as well.
        rename_metrics: ``{'name here': 'name in MLflow'}``.
        ignore_metrics: globs of metrics that are not logged. ignore_hyperparameters: the same for hyperparameters.
        resume: continue the MLflow run of the checkpoint; otherwise every start is a new one.
        timeout: seconds to wait, when the trainer closes, until everything is sent.
        run_group: tag ``run_group`` of the run.
        log_system_metrics: of Composer's logger; here the callback ``SystemMetricsMonitor`` logs them, and a warning
            says so.
        model_registry_prefix, model_registry_uri, synchronous, logging_buffer_seconds,
            log_duplicated_metric_every_n_steps: accepted for scripts of Composer. No model is registered; metrics are
            sent in the background, each once.

    Attributes:
        run_id: of the MLflow run, from ``AFTER_LOAD`` on; ``None`` on ranks that do not log. experiment_id: the same.

    Raises:
        ConfigError: at construction mlflow is not installed, or an argument is wrong; at ``INIT`` MLflow refuses the
            tracking URI.
        MlflowException: at ``INIT``, before training: the server cannot be reached or refuses.
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
        self._experiment = experiment_name
        self._name = run_name
        group = {} if run_group is None else {"run_group": run_group}
        self._tags = {name: str(value) for name, value in {**group, **(tags or {})}.items()}
        if log_system_metrics:
            log.warning(
                "MLFlowLogger(log_system_metrics=True): it logs none itself. Add callbacks=[SystemMetricsMonitor()]."
            )
        self._uri = tracking_uri.absolute().as_uri() if isinstance(tracking_uri, Path) else tracking_uri
        super().__init__("MLflow", rank_zero_only=rank_zero_only, timeout=timeout)
        self._flush_interval = float(flush_interval)
        self._renamed = dict(rename_metrics or {})
        self._ignored_metrics = tuple(ignore_metrics or ())
        self._ignored_parameters = tuple(ignore_hyperparameters or ())
        self._resume = resume
        self._ids: list[str | None] = []
        self._unsent: list[MetricValue] = []
        self._client: MlflowClient | None = None
        self._points: list[MetricValue] = []
        self._sending: deque[list[MetricValue]] = deque()
        self._flushed_at = time.monotonic()
        self.experiment_id: str | None = None

    @property
    def place(self) -> str | None:
        """Address of the MLflow run, and its id; ``None`` where this rank does not log."""
        return None if self._client is None else f"{self._client.tracking_uri}, run {self.run_id}"

    # ── beginning ────────────────────────────────────────────────────────────────────────────────────────────────
    def init(self, state: State, logger: Logger) -> None:
        """Find or make the experiment."""
        if self._run_name != state.run_name:
            self._run_name, self._ids, self._unsent = state.run_name, [], []
        with dist.get_group().all_or_none("opening MLflow"):
            if not self._is_silent:
                name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
                self._client, self.experiment_id = open_experiment(self._uri, name)

    def after_load(self, state: State, logger: Logger) -> None:
        """Start the MLflow run, or continue that of the checkpoint."""
        self._batch = int(state.timestamp.batch)
        with dist.get_group().all_or_none("starting the run of MLflow"):
            if self._client is not None and self._run is None:
                self._run = self._start(self._client, state.run_name)
                self.run_id = self._run.id
        self._ids = dist.get_group().gather(self.run_id)
        self._write_early()

    def _start(self, client: MlflowClient, run_name: str) -> MlflowRun:
        rank = dist.get_global_rank()
        if (saved := self._ids[rank] if rank < len(self._ids) else None) is not None:
            run = MlflowRun.resume(client, saved, self._tags)
            if run is not None:
                self._points += run.missing(self._unsent) if rank == 0 else []  # rank 0's are in the checkpoint
                return run
            log.warning(
                "MLFlowLogger: the checkpoint is of the MLflow run %s, which is not there any more: a new one begins",
                saved,
            )
        name = self._name or run_name
        name = name if self._rank_zero_only else f"{name}-rank{rank}"
        assert self.experiment_id is not None
        return MlflowRun.create(client, self.experiment_id, name, {"run_name": run_name, **self._tags})

    # ── logging ──────────────────────────────────────────────────────────────────────────────────────────────────
    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        flat = _flat(hyperparameters)
        values = {allowed(name): text for name, text in flat if not _is_in(name, self._ignored_parameters)}
        self._send_later("sending hyperparameters", lambda run, batch: run.send_parameters(values, batch), None)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        now = int(time.time() * 1000)
        values = {
            allowed(self._renamed.get(name, name)): float(value)
            for name, value in scalars(metrics).items()
            if not _is_in(name, self._ignored_metrics)
        }
        self._write(
            lambda _, batch: self._points.extend(
                MetricValue(name, value, now, batch) for name, value in values.items()
            ),
            step,
        )

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        names, data = list(columns), [[json_of(cell) for cell in row] for row in rows]
        folder = f"tables/{allowed(name)}"
        self._send_later(
            f"sending the table {name!r}",
            lambda run, batch: run.send_table(names, data, f"{folder}/batch{batch}.json"),
            step,
        )

    def log_images(
        self, images: Any, name: str = "Images", channels_last: bool = False, step: int | None = None
    ) -> None:
        arrays = pictures(images, channels_last=channels_last)
        one = len(arrays) == 1
        named = {allowed(name if one else f"{name}/{number}"): array for number, array in enumerate(arrays)}
        self._send_later(f"sending the images {name!r}", lambda run, batch: run.send_images(named, batch), step)

    def _send_later(self, what: str, send: Callable[[MlflowRun, int], object], step: int | None) -> None:
        """Call ``send`` with the run and the batch, in the background."""
        self._write(lambda run, batch: self._background.submit(what, lambda: send(run, batch)), step)

    def _send(self) -> None:
        """Queue the metrics to be sent."""
        self._flushed_at = time.monotonic()
        if (run := self._run) is None or not self._points:
            return
        points, self._points = self._points, []
        self._sending.append(points)

        def send() -> None:
            try:
                run.send_metrics(points)
            finally:
                self._sending.popleft()  # they are sent in order

        self._background.submit(f"sending {len(points)} metrics", send)

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────
    def can_upload_files(self) -> bool:
        """Return true if files become artifacts: always, also on ranks where rank 0 alone keeps them."""
        return True

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        check_name(format_name_with_dist(remote_file_name, state.run_name))
        super().upload_file(state, remote_file_name, file_path, overwrite=overwrite)

    def _send_file(self, run: MlflowRun, name: str, staged: Path, batch: int, *, overwrite: bool) -> None:
        run.send_file(name, staged, overwrite=overwrite)

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────
    def batch_end(self, state: State, logger: Logger) -> None:
        self._batch = int(state.timestamp.batch)
        if time.monotonic() - self._flushed_at >= self._flush_interval or len(self._points) >= MOST_METRICS:
            self._send()
        self._background.raise_failures()

    def post_close(self) -> None:
        """Send the remaining metrics and end the MLflow run; not in ``close``, where other callbacks may still log.

        Raises:
            TimeoutError: not everything was sent in time. In an ExceptionGroup if there are other errors, too.
            Exception: what went wrong.
        """
        code = exit_code(training=self._is_training)
        try:
            if (run := self._run) is not None:
                self._send()
                status = "FINISHED" if code == 0 else "FAILED" if code == 1 else "KILLED"
                self._background.submit("ending the run", lambda: run.finish(status))
            self._background.close()
        finally:
            self._client = self._run = None  # the threads of the client end with it
            self._files.remove()

    # ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────
    def state_dict(self) -> dict[str, Any]:
        """The ids of the MLflow runs, by rank; and the metrics of rank 0 that may not have been sent yet.

        A run that is killed now would not log them again: the resumed one sends what has not arrived.
        """
        unsent = [list(point) for points in (*self._sending.copy(), self._points) for point in points]
        return {"run_name": self._run_name, "run_ids": list(self._ids), "unsent": unsent}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue that MLflow run, if it is of this run."""
        if self._resume and state_dict.get("run_name") == self._run_name and "run_ids" in state_dict:
            self._ids = list(state_dict["run_ids"])
            self._unsent = [MetricValue(*point) for point in state_dict["unsent"]]


def _is_in(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def _flat(parameters: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Parameters as names and texts, with slashes between the names of dicts in dicts."""
    for name, value in parameters.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else to_json(value)

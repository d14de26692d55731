"""A run of MLflow, as far as MLFlowLogger needs one: the only module that talks to MLflow."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, final
from urllib.parse import unquote, urlsplit

from composerlite.errors import ConfigError
from composerlite.storage.sdk import isolate_sdk_rng

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

log = logging.getLogger(__name__)

MOST_METRICS = 1000
"""Largest number of metrics in one request of MLflow."""
_MOST_PARAMETERS = 100

T = TypeVar("T")


class MetricValue(NamedTuple):
    """A value of a metric to send to MLflow."""

    name: str
    value: float
    milliseconds: int
    """Since 1970."""
    batch: int


def allowed(name: str) -> str:
    """``name`` as MLflow takes it."""
    return re.sub(r"[^\w\-. /]", "_", name)


def open_experiment(tracking_uri: str | None, name: str) -> tuple[MlflowClient, str]:
    """A client, and the id of the experiment ``name``, which is made if there is none.

    Raises:
        ConfigError: MLflow refuses the URI.
        MlflowException: the server cannot be reached or refuses.
    """
    from mlflow import MlflowClient  # imports slowly, and is not always there
    from mlflow.exceptions import MlflowException

    isolate_sdk_rng("mlflow", "requests", "urllib3")
    try:
        client = MlflowClient(tracking_uri=tracking_uri)
    except MlflowException as e:
        raise ConfigError(f"MLFlowLogger(tracking_uri={tracking_uri!r}): {e}") from e
    try:
        if (found := client.get_experiment_by_name(name)) is not None:
            return client, found.experiment_id
        try:
            return client, client.create_experiment(name)
        except MlflowException:
            if (found := client.get_experiment_by_name(name)) is None:
                raise
            return client, found.experiment_id  # another rank or run was faster
    except Exception as e:
        e.add_note(f"MLFlowLogger could not open the experiment {name!r} at {client.tracking_uri}.")
        raise


def _remove_unfinished_lines(tracking_uri: str, run_id: str) -> None:
    """Remove unfinished lines, which a kill leaves, from the files of a run's metrics where MLflow has a folder.

    MLflow refuses to read a run with such a file.
    """
    uri = urlsplit(tracking_uri)
    if uri.scheme not in ("", "file"):
        return
    for path in Path(unquote(uri.path)).glob(f"*/{run_id}/metrics/**/*"):
        if path.is_file() and not (data := path.read_bytes()).endswith(b"\n"):
            log.warning("%s ended within a line: the process that wrote it was killed", path)
            if whole := data[: data.rfind(b"\n") + 1]:
                with path.open("r+b") as file:
                    file.truncate(len(whole))
            else:
                path.unlink()


@final
class MlflowRun:
    """Sends to a run of MLflow. Each method returns when MLflow has it, or raises: not for the training thread."""

    def __init__(self, client: MlflowClient, run: Run) -> None:
        self._client = client
        self._parameters: dict[str, str] = dict(run.data.params)
        newest = run.data._metric_objs  # pyright: ignore[reportPrivateUsage] - metrics has values only
        self._arrived = {metric.key: metric.timestamp for metric in newest}
        self.id: str = run.info.run_id

    @classmethod
    def create(cls, client: MlflowClient, experiment_id: str, name: str, tags: Mapping[str, str]) -> MlflowRun:
        """A new run."""
        return cls(client, client.create_run(experiment_id, run_name=name, tags=dict(tags)))

    @classmethod
    def resume(cls, client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> MlflowRun | None:
        """The run of that id, which continues; ``None`` if there is none, or it was deleted."""
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

        _remove_unfinished_lines(client.tracking_uri, run_id)
        try:
            run = client.get_run(run_id)
        except MlflowException as e:
            if e.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                raise
            return None
        if run.info.lifecycle_stage != "active":
            return None
        client.update_run(run_id, status="RUNNING")
        for name, value in tags.items():
            client.set_tag(run_id, name, value)
        return cls(client, run)

    def missing(self, points: Sequence[MetricValue]) -> list[MetricValue]:
        """Filter ``points`` for the ones that had not arrived when the run was resumed. They are sent in order."""
        return [point for point in points if point.milliseconds > self._arrived.get(point.name, 0)]

    def send_metrics(self, points: Sequence[MetricValue]) -> None:
        """Log values of metrics."""
        from mlflow.entities import Metric

        for some in _portions([Metric(*point) for point in points], MOST_METRICS):
            self._client.log_batch(self.id, metrics=some, synchronous=True)

    def send_parameters(self, values: Mapping[str, str], batch: int) -> None:
        """Log parameters. MLflow never changes one: what a resumed run has changed gets a name with its batch."""
        from mlflow.entities import Param

        new: list[Param] = []
        for name, value in values.items():
            if self._parameters.get(name, value) != value:
                name = f"{name}.batch{batch}"
            if self._parameters.get(name) != value:
                new.append(Param(name, value))
                self._parameters[name] = value
        for some in _portions(new, _MOST_PARAMETERS):
            self._client.log_batch(self.id, params=some, synchronous=True)

    def send_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], file: str) -> None:
        """Keep a table as JSON."""
        self._client.log_text(self.id, json.dumps({"columns": columns, "data": rows}), file)

    def send_images(self, images: Mapping[str, Any], batch: int) -> None:
        """Log images by their names."""
        for name, array in images.items():
            self._client.log_image(self.id, array, key=name, step=batch)

    def send_file(self, name: str, file: Path, *, overwrite: bool) -> None:
        """Keep ``file``, which is called like the last part of ``name``.

        Raises:
            FileExistsError: there is one of that name, and ``overwrite`` is false.
        """
        parent = PurePosixPath(name).parent
        folder = None if parent == PurePosixPath() else str(parent)
        if not overwrite and any(kept.path == name for kept in self._client.list_artifacts(self.id, folder)):
            raise FileExistsError(f"{name!r} exists in the MLflow run {self.id}: give another name, or overwrite=True.")
        self._client.log_artifact(self.id, str(file), folder)

    def finish(self, status: str) -> None:
        """The run has ended."""
        self._client.set_terminated(self.id, status)


def _portions(things: list[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(things), size):
        yield things[start : start + size]

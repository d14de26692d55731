"""What an offline run of W&B has written: a log as LevelDB writes them, of records that W&B's own classes read."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK, _HEADER = 32768, struct.Struct("<IHB")
_WHOLE, _FIRST, _LAST = 1, 2, 4
_SECONDS = 60


class OfflineRun:
    """An attempt at a run, in its folder ``offline-run-<time>-<id>``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.id = ""
        self.rows: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.artifacts: dict[str, list[str]] = {}
        self.exit_code: int | None = None
        self.name = self.group = self.project = ""
        self.tags: list[str] = []
        self.axes: dict[str, str] = {}
        self.summary: set[str] = set()
        for record in (r for file in folder.glob("*.wandb") for r in _records(file)):
            self._take(record)

    def values(self, name: str) -> list[tuple[int, Any]]:
        """Batches and values of a metric, in the order in which they were logged."""
        return [(row["trainer/batch"], row[name]) for row in self.rows if name in row]

    def _take(self, record: Any) -> None:
        kind = record.WhichOneof("record_type")
        if kind == "history":
            self.rows.append({_key(item): json.loads(item.value_json) for item in record.history.item})
        elif kind == "run":
            self.id = record.run.run_id
            self.name, self.group, self.project = record.run.display_name, record.run.run_group, record.run.project
            self.tags = list(record.run.tags)
        elif kind == "config":
            self.config.update({_key(item): json.loads(item.value_json) for item in record.config.update})
        elif kind == "metric":
            self.axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "summary":
            self.summary |= {_key(item) for item in record.summary.update}
        elif kind == "exit":
            self.exit_code = record.exit.exit_code
        elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            artifact = record.request.log_artifact.artifact
            self.artifacts.setdefault(artifact.name, []).extend(e.path for e in artifact.manifest.contents)
        elif kind == "artifact":
            self.artifacts.setdefault(record.artifact.name, []).extend(
                Path(entry.local_path).read_text() for entry in record.artifact.manifest.contents
            )


def offline_runs(folder: Path) -> list[OfflineRun]:
    """The attempts below ``folder``, the oldest first; waits for the last words, which W&B's service may be writing."""
    return [_ended(found) for found in sorted((folder / "wandb").glob("offline-run-*"))]


def _ended(folder: Path) -> OfflineRun:
    until = time.monotonic() + _SECONDS
    while (found := OfflineRun(folder)).exit_code is None:
        assert time.monotonic() < until, f"{folder} has no end"
        time.sleep(0.01)
    return found


def _key(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


def _records(file: Path) -> Iterator[Any]:
    data, at, parts = file.read_bytes(), 7, b""  # after a magic word and the version
    while at + _HEADER.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER.size:
            at += left
            continue
        _, size, kind = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        piece, at = data[at : at + size], at + size
        parts = piece if kind in (_WHOLE, _FIRST) else parts + piece
        if len(piece) < size:  # the end is not written yet
            return
        if kind in (_WHOLE, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record

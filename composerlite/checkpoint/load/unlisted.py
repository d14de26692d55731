"""Checkpoints that no manifest vouches for: those of other programs, and those whose manifest was lost."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from composerlite.checkpoint.load.loading import read_checkpoint
from composerlite.checkpoint.load.reading import opened
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.record.manifest import FileRecord, Manifest, plain_timestamp
from composerlite.checkpoint.record.naming import name_pattern
from composerlite.errors import CorruptCheckpointError, IncompatibleCheckpointError, UntrustedCheckpointError

__all__ = ["check_unlisted", "unlisted"]

log = logging.getLogger(__name__)
_NEEDED = {"model", "optimizers", "timestamp"}


def unlisted(catalog: Catalog, template: str, run_name: str) -> list[Manifest]:
    """The checkpoints of ``run_name`` named by ``template`` that have no manifest, each with one made of its contents.

    Tensors are not read for it. What cannot be read at all is set aside: the run will come to write that name again.
    What is no checkpoint of this run is left alone.
    """
    pattern = name_pattern(template, run_name)
    listed = {record.path for manifest in catalog.manifests() for record in manifest.files}
    found: list[Manifest] = []
    for name in list(catalog.files()):
        if name in listed or pattern.fullmatch(name) is None or os.path.lexists(catalog.record_path(name)):
            continue  # what has the record of another checkpoint is a copy made by hand
        try:
            manifest = _described(catalog, name, template)
        except CorruptCheckpointError as e:
            log.warning("passed over: %s", e)
            catalog.set_aside_file(name)
            continue
        except (UntrustedCheckpointError, IncompatibleCheckpointError) as e:
            log.warning("left alone: %s", e)
            continue
        if manifest is not None and manifest.run_name == run_name:
            found.append(manifest)
    return found


def check_unlisted(catalog: Catalog, manifest: Manifest) -> None:
    """Read all of a checkpoint that has no manifest and compare it with its own checksums.

    Raises:
        CorruptCheckpointError: it cannot be read, or they do not agree.
    """
    read_checkpoint(catalog.folder / manifest.name)
    log.warning("%s has no manifest: its bytes agree with its own checksums only", catalog.folder / manifest.name)


def _described(catalog: Catalog, name: str, template: str) -> Manifest | None:
    """What a manifest of the file ``name`` would say; ``None`` if one cannot resume from it."""
    path = catalog.folder / name
    with opened(path) as (file, _):
        contents: Any = file.contents
    state: Any = contents.get("state") if isinstance(contents, Mapping) else None
    if not isinstance(state, Mapping) or not set(state) >= _NEEDED:
        return None
    fields: Any = state["timestamp"]
    fields = fields.get("Timestamp", fields) if isinstance(fields, Mapping) else {}
    metadata: Any = state.get("metadata")
    status = path.stat()
    try:
        timestamp = plain_timestamp({key: _number(value) for key, value in fields.items()})
        return Manifest(
            name=name,
            kind="monolithic",
            template=template,
            run_name=str(state.get("run_name")),
            timestamp={**timestamp, "batch": int(timestamp["batch"])},
            files=(FileRecord(path=name, size_bytes=status.st_size, xxh3_128=""),),
            fit_calls=len(metadata.get("fit_starts", ())) if isinstance(metadata, Mapping) else 0,
            saved_at=datetime.fromtimestamp(status.st_mtime, UTC).isoformat(timespec="milliseconds"),
        )
    except (KeyError, TypeError, ValueError) as e:
        log.warning("left alone: %s is no checkpoint that says when it was saved: %r", path, e)
        return None


def _number(value: Any) -> Any:
    """A field of a timestamp; Composer's are written as '3ba' and the like where they are no numbers."""
    if isinstance(value, str):
        return int("".join(character for character in value if character.isdigit()))
    return value

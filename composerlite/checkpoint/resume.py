"""Which checkpoint a run goes on from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from composerlite.checkpoint.catalog import Catalog
from composerlite.errors import CorruptCheckpointError

__all__ = ["newest_good"]

log = logging.getLogger(__name__)


def newest_good(catalogs: Sequence[Catalog], run_name: str) -> Path | None:
    """The newest checkpoint of ``run_name`` whose bytes are those that were saved; ``None`` if there is none.

    A damaged one is passed over and set aside, which is logged with the reason. Weights-only checkpoints cannot be
    resumed from.

    Raises:
        OSError: a folder cannot be read for any other reason than that it does not exist.
    """
    candidates = [
        (manifest.order, catalog, manifest)
        for catalog in catalogs
        for manifest in catalog.manifests()
        if manifest.run_name == run_name and manifest.kind == "monolithic"
    ]
    for _, catalog, manifest in sorted(candidates, key=lambda candidate: candidate[0], reverse=True):
        try:
            catalog.verify(manifest)
        except CorruptCheckpointError as e:
            log.warning("passed over: %s", e)
            catalog.set_aside(manifest)  # the run will come to write a checkpoint of that name again
            continue
        return catalog.folder / manifest.name
    return None

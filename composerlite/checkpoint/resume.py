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
    resumed from. One that was saved without some of its keys is taken only if there is no whole one: what it lacks
    would start afresh in the middle of the run.

    Raises:
        IncompatibleCheckpointError: there is a checkpoint of a newer version, which may be the newest.
        OSError: a folder cannot be read for any other reason than that it does not exist.
    """
    for catalog in catalogs:
        catalog.set_aside_unreadable()
    candidates = [
        (not manifest.left_out, manifest.order, catalog, manifest)
        for catalog in catalogs
        for manifest in catalog.manifests()
        if manifest.run_name == run_name and manifest.kind == "monolithic"
    ]
    for whole, order, catalog, manifest in sorted(candidates, key=lambda candidate: candidate[:2], reverse=True):
        try:
            catalog.verify(manifest)
        except CorruptCheckpointError as e:
            log.warning("passed over: %s", e)
            catalog.set_aside(manifest)  # the run will come to write a checkpoint of that name again
            continue
        if not whole:
            log.warning("%s is all there is to resume from; it was saved without %s", manifest.name, manifest.left_out)
        elif any(not w and o > order for w, o, _, _ in candidates):
            log.info("%s is not the newest: newer ones were saved without some of their keys", manifest.name)
        catalog.mend_links(manifest.name)
        return catalog.folder / manifest.name
    for catalog in catalogs:
        catalog.mend_links(None)
    return None

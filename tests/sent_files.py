"""Checkpoints that one process sends to a bucket, as a saver does in the background."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from composerlite.checkpoint import Catalog, Manifest
from composerlite.checkpoint.place.commit import commit_sent, send_files

__all__ = ["publish_files"]


def publish_files(
    remote: Catalog, manifest: Manifest, files: Mapping[str, Path], link: str | None, *, overwrite: bool = False
) -> None:
    """Make ``files`` of this machine the checkpoint of ``manifest`` in a bucket, and point ``link`` to it."""
    there = send_files(remote.place, manifest, files, overwrite=overwrite)
    links = {} if link is None else {link: manifest.name}
    commit_sent(remote.place, manifest, files[manifest.files[0].path], there, links, overwrite=overwrite)

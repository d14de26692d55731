"""What ckpt-chaos kills: twelve batches, in a process that is forked, and in which the tool's hooks are then set."""

from __future__ import annotations

import os

import twelve_batches
from ckpt_chaos.targets.common import arm_from_env

__all__ = ["main"]


def main(*arguments: str) -> None:
    """Train; die where the environment says."""
    arm_from_env(int(os.environ.get("RANK", "0")), lazy=True)
    twelve_batches.main(*arguments)

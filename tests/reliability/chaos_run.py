"""What ckpt-chaos kills: twelve batches, in a process that is forked, and in which the tool's hooks are then set."""

from __future__ import annotations

import os
from pathlib import Path

import twelve_batches
from ckpt_chaos.targets.common import arm_from_env

__all__ = ["main", "port_of_its_own"]

_PORTS = [*range(4_000, 12_000), *range(14_000, 22_000), *range(24_000, 32_000)]
"""Below those that the system gives to clients, and not those of the S3 servers of tests."""


def main(*arguments: str) -> None:
    """Train; die where the environment says."""
    if "MASTER_PORT" in os.environ:
        os.environ["MASTER_PORT"] = str(port_of_its_own(int(os.environ["MASTER_PORT"])))
    arm_from_env(int(os.environ.get("RANK", "0")), lazy=True)
    twelve_batches.main(*arguments)


def port_of_its_own(port: int) -> int:
    """A port for the ranks' store that the system gives to nobody.

    The tool looks for a free port and lets go of it. Until rank 0 listens there, a second later, the system may give it
    to one of the other runs, whose ranks are connected by such ports: then the run ends before it has begun.
    """
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return _PORTS[port % len(_PORTS)] if first > _PORTS[-1] else port

"""A Ray cluster of nodes on this machine, one of which is drained while a recipe trains there, as one that is about to
be taken away: ``ray_nodes.py <recipe> <file that the first batches write>``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from ray.cluster_utils import Cluster

SECONDS = 400.0


def main(recipe: str, written: Path) -> int:
    """Exit code of the recipe, whose two workers have a node of their own, and another one once that is drained."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    node = cluster.add_node(num_cpus=2)
    process = subprocess.Popen([sys.executable, recipe], env={**os.environ, "RAY_ADDRESS": cluster.address})
    try:
        end = time.monotonic() + SECONDS
        while not (written.exists() and written.read_text().count("\n") > 2):
            assert process.poll() is None, "the recipe has ended"
            assert time.monotonic() < end, "no batch was trained"
            time.sleep(0.1)
        cluster.add_node(num_cpus=2)
        drain = [Path(sys.executable).with_name("ray"), "drain-node", "--address", cluster.address]
        reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
        deadline = ["--deadline-remaining-seconds", "120"]
        subprocess.run([*drain, "--node-id", node.node_id, *reason, *deadline], check=True, timeout=SECONDS)
        return process.wait(SECONDS)
    finally:
        process.kill()
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))

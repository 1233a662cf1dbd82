"""Runs a script on a Ray cluster of this machine: python ray_cluster.py DRAIN SCRIPT ARGUMENT...

The workers' node is announced to go as soon as the file DRAIN exists, which holds the seconds until then. Another node
joins before, and the first one is gone at its time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from ray._private.node import Node
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2


def announce(cluster: Cluster, node: Node, left_s: float) -> float:
    """Announces that the node goes as an autoscaler does it; returns the Unix time when it goes."""
    ends_s = time.time() + left_s
    accepted, why = GcsClient(address=cluster.address).drain_node(
        node.node_id, autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION, "a test", int(ends_s * 1000)
    )
    assert accepted, why
    return ends_s


def main() -> int:
    drain, script = Path(sys.argv[1]), sys.argv[2:]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    node = cluster.add_node(num_cpus=2)
    process = subprocess.Popen([sys.executable, *script], env=os.environ | {"RAY_ADDRESS": cluster.address})
    ends_s = 0.0
    while process.poll() is None:
        if drain.exists():
            cluster.add_node(num_cpus=2)
            ends_s = announce(cluster, node, float(drain.read_text()))
            drain.unlink()
        if 0.0 < ends_s < time.time():
            cluster.remove_node(node)
            ends_s = 0.0
        time.sleep(0.1)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())

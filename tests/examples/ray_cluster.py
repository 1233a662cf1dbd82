"""Runs a script on a Ray cluster of this machine: python ray_cluster.py DRAIN SCRIPT ARGUMENT...

The workers' node is announced to go as soon as the file DRAIN exists, which holds the seconds until then. Another node
joins before, and the first one is gone at its time.
"""

from __future__ import annotations

import runpy
import sys
import threading
import time
from pathlib import Path

import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2


def drain(cluster: Cluster, node, file: Path) -> None:
    while not file.exists():
        time.sleep(0.1)
    cluster.add_node(num_cpus=2)
    deadline_s = time.time() + float(file.read_text())
    accepted, why = GcsClient(address=cluster.address).drain_node(
        node.node_id, autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION, "the test", int(deadline_s * 1000)
    )
    print("DRAIN accepted" if accepted else f"DRAIN refused: {why}", flush=True)
    time.sleep(max(0.0, deadline_s - time.time()))
    cluster.remove_node(node)
    print("DRAIN gone", flush=True)


def main() -> None:
    _, file, *sys.argv = sys.argv
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    node = cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address)
    threading.Thread(target=drain, args=(cluster, node, Path(file)), daemon=True).start()
    runpy.run_path(sys.argv[0], run_name="__main__")
    ray.shutdown()  # before its node, which ends with this process


if __name__ == "__main__":
    main()

"""The memory table of a job: what it takes on each node, in bytes. Pure; computed before the first save.

There is one row per node, with these columns:
- `slots`: the local ranks' own arenas.
- `kept`: checkpoints of earlier starts, until a newer one is complete.
- `copies`: replicas or parity kept for other nodes, of two generations.
- `buffers`: scratch memory for parity, and the larger of the commit buffers and the restore window.
- `sends`, `receives`: network traffic for each checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt.agent.runtime.memory_plan import WINDOW_BYTES, MemoryPlan

NODES_SHOWN = 64  # the fullest; the other nodes are only counted


def make_table(plans: Mapping[str, MemoryPlan], slots: int, peers: Mapping[str, Any] | None) -> dict[str, Any]:
    """The table. `plans`: each node's plan by its name, the coordinator's first. `slots`: the number that all nodes
    use. `peers`: what ReplicationManager.table returns; None: no replication."""
    loads = {row["node"]: row for row in peers["nodes"]} if peers is not None else {}
    scratch_bytes = peers.get("scratch_bytes", 0) if peers is not None else 0
    rows = [_row(name, plan, slots, loads.get(name, {}), scratch_bytes) for name, plan in plans.items()]
    first = rows[:1]  # the coordinator
    fullest = sorted(rows[1:], key=lambda row: row["allowed_bytes"] - row["total_bytes"])[: NODES_SHOWN - 1]
    return {"nodes": first + fullest, "nodes_left_out": len(rows) - len(first) - len(fullest)}


def _row(name: str, plan: MemoryPlan, slots: int, load: Mapping[str, int], scratch_bytes: int) -> dict[str, Any]:
    copies_bytes = load.get("keeps_bytes", 0)
    work_bytes = max(plan.commit_bytes, min(WINDOW_BYTES, plan.slot_bytes))
    buffers_bytes = work_bytes + (scratch_bytes if copies_bytes else 0)
    slots_bytes = slots * plan.slot_bytes
    return {
        "node": name,
        "slots_bytes": slots_bytes,
        "kept_bytes": plan.kept_bytes,
        "copies_bytes": copies_bytes,
        "buffers_bytes": buffers_bytes,
        "total_bytes": slots_bytes + plan.kept_bytes + copies_bytes + buffers_bytes,
        "allowed_bytes": plan.allowed_bytes,
        "bound": plan.bound,
        "sends_bytes": load.get("sends_bytes", 0),
        "receives_bytes": load.get("receives_bytes", 0),
    }

"""What a job takes of each node's memory, all of it in one table: computed before the first save. Pure.

A row a node, in bytes. `slots`: the ranks' own arenas. `kept`: checkpoints of earlier starts, until a newer one is
complete. `copies`: what is kept for other nodes, copies or parity, of two generations. `buffers`: packs that are
encoded and put, or, as long as a start restores, the window through which frames come; and what parity is made in.
`sends` and `receives`: on the network, for each checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt.agent.runtime.memory_plan import WINDOW_BYTES, MemoryPlan

NODES_SHOWN = 64  # the fullest; of the rest there is the number


def table(plans: Mapping[str, MemoryPlan], slots: int, peers: Mapping[str, Any] | None) -> dict[str, Any]:
    """`plans`: what each node has room for, by its name, the coordinator's first; `slots`: that all of them use;
    `peers`: as Protection.table has it."""
    loads = {row["node"]: row for row in peers["nodes"]} if peers is not None else {}
    scratch_bytes = peers.get("scratch_bytes", 0) if peers is not None else 0
    rows = [_row(name, plan, slots, loads.get(name, {}), scratch_bytes) for name, plan in plans.items()]
    first = rows[:1]  # of whom the agent is asked
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

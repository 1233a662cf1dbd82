"""The eviction rule under memory pressure: which memory is freed when the machine, or our control group, runs short.

Pure. ckpt plans its memory before the first save (`memory_plan.plan`); other processes may grow afterwards. Then memory
is freed in this order, and no more than is missing: pages kept warm for the next copies; replicas of earlier starts'
checkpoints, the oldest first; what earlier starts left on this node, the oldest first.
The checkpoint that the present start continued from stays. Of the other starts only what retention_rule.py lets go is
freed, or what a newer start supersedes. A job's own slots stay, and so does the only complete checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.agent.state.retention_rule import NewestStart
from ckpt.types import Epoch

PERIOD_S = 5.0  # between looks
# One part in so many of the memory is left to other processes. With less the kernel begins to kill processes.
RESERVE_PARTS = 50


@dataclass(frozen=True, slots=True)
class StartMemory:
    """The memory that one start holds. `is_idle`: nothing is at work on it. `is_durable`: a checkpoint of the start is
    complete and survives a node: it is committed or, in a job of several nodes, replicated as asked for."""

    epoch: Epoch
    held_bytes: int
    is_durable: bool
    is_idle: bool


def reserve_bytes(total_bytes: int) -> int:
    """The memory to leave to other processes, of `total_bytes`."""
    return total_bytes // RESERVE_PARTS


def missing_bytes(free_bytes: int, total_bytes: int) -> int:
    """The memory to free until the reserve is there again."""
    return max(0, reserve_bytes(total_bytes) - free_bytes)


def choose_evictions(held: Sequence[StartMemory], missing: int, begun: NewestStart | None = None) -> list[Epoch]:
    """The starts to evict so that `missing` bytes are freed, or as many as may be. `held`: the newest start last.
    `begun`: the present start; None: unknown."""
    gone: list[Epoch] = []
    parent = begun.parent if begun is not None else None
    for at, each in enumerate(held):
        if missing <= 0:
            break
        outdone = any(newer.is_durable for newer in held[at + 1 :]) and (parent is None or each.epoch != parent.epoch)
        if each.is_idle and (outdone or (begun is not None and begun.supersedes_epoch(each.epoch))):
            gone.append(each.epoch)
            missing -= each.held_bytes
    return gone

"""Memory that is given back while the machine, or our control group, runs out of it. Pure.

What ckpt takes is planned before the first save (`memory.plan`), and other processes may grow after that. Then goes, in
this order and no more than is missing: pages that are only kept warm for the next copies; copies and parity of
checkpoints of earlier starts, the oldest first; and what earlier starts themselves have left here, the oldest first.
Of earlier starts nothing goes that the present one went on from, and of the others only what may go for that (see
`outdoing`), or what a newer start outdoes. A job's own slots stay, and so does the only complete checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.agent.state.retention_rule import Begun
from ckpt.types import Epoch

PERIOD_S = 5.0  # between looks
RESERVE_PARTS = 50  # so much of the memory is left to others: less, and the kernel begins to look for whom to end


@dataclass(frozen=True, slots=True)
class StartMemory:
    """What one start holds: so many bytes, `idle`: that nobody is at work on. `complete`: a checkpoint of it is whole,
    and on several nodes is as safe as was asked for, or in the store: what only lies here is gone with one of them."""

    epoch: Epoch
    bytes: int
    complete: bool
    idle: bool


def reserve_bytes(total_bytes: int) -> int:
    """That are left to others, of so many in all."""
    return total_bytes // RESERVE_PARTS


def missing_bytes(free_bytes: int, total_bytes: int) -> int:
    """Until the reserve is there again."""
    return max(0, reserve_bytes(total_bytes) - free_bytes)


def which_go(held: Sequence[StartMemory], missing: int, begun: Begun | None = None) -> list[Epoch]:
    """Of several starts, the newest last, which are given up to free so many bytes, or as many as there are. `begun`:
    the one that goes on now, where it is known."""
    gone: list[Epoch] = []
    parent = begun.parent if begun is not None else None
    for at, each in enumerate(held):
        if missing <= 0:
            break
        outdone = any(newer.complete for newer in held[at + 1 :]) and (parent is None or each.epoch != parent.epoch)
        if each.idle and (outdone or (begun is not None and begun.outdates_all_of(each.epoch))):
            gone.append(each.epoch)
            missing -= each.bytes
    return gone

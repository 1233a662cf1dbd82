"""Memory that is given back while the machine, or our control group, runs out of it. Pure.

What ckpt takes is planned before the first save (`memory.plan`), and other processes may grow after that. Then goes, in
this order and no more than is missing: pages that are only kept warm for the next copies; and checkpoints of earlier
starts, the oldest first, as long as a newer one is complete in this node's memory. A job's own slots stay, and so does
the only complete checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.types import Epoch

PERIOD_S = 5.0  # between looks
RESERVE_PARTS = 50  # so much of the memory is left to others: less, and the kernel begins to look for whom to end


@dataclass(frozen=True, slots=True)
class Held:
    """What one start holds: so many bytes; `complete`: of a whole checkpoint, `idle`: that nobody is at work on."""

    epoch: Epoch
    bytes: int
    complete: bool
    idle: bool


def missing_bytes(free_bytes: int, total_bytes: int) -> int:
    """Until the reserve is there again."""
    return max(0, total_bytes // RESERVE_PARTS - free_bytes)


def which_go(held: Sequence[Held], missing: int) -> list[Epoch]:
    """Of several starts, the newest last, which are given up to free so many bytes, or as many as there are."""
    gone: list[Epoch] = []
    for at, each in enumerate(held):
        if missing <= 0:
            break
        if each.idle and any(newer.complete for newer in held[at + 1 :]):
            gone.append(each.epoch)
            missing -= each.bytes
    return gone

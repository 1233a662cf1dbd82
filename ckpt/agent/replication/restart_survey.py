"""Who has what of the checkpoint that a job goes on from, where its coordinator's agent was started again: it has seen
no start, and what it had itself is gone with the one before it.

Every node of the job and the memory-only ones are asked what they have of it, and it is put together as a start does,
with what is made again from parity; then what is lost of it is copied again (`reprotecting`). Who does not answer
counts as having nothing, if the others have all of it; else all are asked again after a while. Nothing goes for it, and
nothing waits for it. Main thread only, but for `next_of`, which is pure.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ckpt.agent.replication.rereplicate import again_after_s
from ckpt.agent.replication.survey import KeptReplica
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.snapshots.manifest_gather import FramePlaces

log = logging.getLogger("ckpt")


class Next(enum.Enum):
    COLLECT = "collect"  # they have all of it
    AGAIN = "again"  # who has not answered may have the rest
    OVER = "over"  # a part of it is on no node that is there, or it was let go for a newer one


def next_of(inventory: Inventory, identity: Identity, all_said: bool) -> Next:
    """`inventory`: what nodes have together. `all_said`: whether there is none that was asked and did not answer."""
    if identity in inventory.complete():
        return Next.COLLECT
    return Next.OVER if all_said else Next.AGAIN


def together(kept: Mapping[str, KeptReplica], me: str) -> Inventory:
    """By name, what they have; "" is this node, `me`."""
    every = Inventory()
    for name, each in kept.items():
        every.add(each.held, "" if name == me else name)
    return every


Asked = Callable[[Inventory, bool], None]
Collected = Callable[["FramePlaces | None", str], None]


class RestartSurvey:
    """Of one identity. `ask(then)`: asks all, `then` hears what `next_of` takes. `collect(inventory, then)`: puts it
    together; `then` hears where it is, or None and why that failed. `found(places, inventory)` is called once.
    `later`: a timer."""

    def __init__(
        self,
        identity: Identity,
        ask: Callable[[Asked], None],
        collect: Callable[[Inventory, Collected], None],
        found: Callable[[FramePlaces, Inventory], None],
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self.identity = identity
        self._ask, self._collect, self._found, self._later = ask, collect, found, later
        self._asking = self._stale = self._news = self._ended = False
        self._again_s = -math.inf
        self._failures = 0

    @property
    def is_due(self) -> bool:
        """Whether all are to be asked now."""
        return not self._asking and not self._ended and time.monotonic() >= self._again_s

    def tend(self) -> None:
        """Asks all, where it is due."""
        self._asking, self._stale, self._news = True, False, False
        self._ask(self._asked)

    def lost(self) -> None:
        """An agent is not connected any more: what it has said may be true no longer, or it may never be back."""
        self._stale = self._asking

    def came(self) -> None:
        """A memory-only node may have come, and have what the others have not."""
        self._news, self._again_s = self._asking, -math.inf

    def end(self) -> None:
        """It is not needed any more."""
        self._ended = True

    # -- inside

    def _asked(self, inventory: Inventory, all_said: bool) -> None:
        if self._ended:
            return
        match next_of(inventory, self.identity, all_said):
            case Next.COLLECT:
                self._collect(inventory, lambda places, error: self._collected(places, inventory, error))
            case Next.AGAIN:
                self._fail("a node that may have a part of it has not said what it has")
            case Next.OVER:
                log.info("%s is not whole in memory any more", self.identity)
                self._wait(math.inf)

    def _collected(self, places: FramePlaces | None, inventory: Inventory, error: str) -> None:
        if self._ended:
            return
        if places is None:
            self._fail(error)
        elif self._stale:
            self._wait(0.0)
        else:
            self._ended = True
            self._found(places, inventory)

    def _fail(self, why: str) -> None:
        log.warning("who has what of %s is not known: %s", self.identity, why)
        self._failures += 1
        self._wait(again_after_s(self._failures))

    def _wait(self, wait_s: float) -> None:
        self._asking = False
        if not self._news:
            self._again_s = time.monotonic() + wait_s
        if not self._news and wait_s < math.inf:
            self._later(wait_s, lambda: None)  # the loop comes round, and `tend` is called

"""The survey of the checkpoint that a job was restored from, after its coordinator's agent was restarted.

The new agent has not seen the job's start, and holds nothing itself. It asks every node of the job and the memory-only
nodes which replicas they have. The checkpoint is collected as at a start, with rebuilds from parity; then it is
re-replicated (rereplicate.py). A node that does not answer counts as empty if the others have everything. Otherwise
all are asked again later. Nothing is evicted for the survey, and nothing waits for it. Main thread only.
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
    """What follows on a survey."""

    COLLECT = "collect"  # the nodes have all of it
    AGAIN = "again"  # a node that has not answered may have the rest
    OVER = "over"  # a part is lost, or was evicted for a newer checkpoint


def next_of(inventory: Inventory, identity: Identity, all_said: bool) -> Next:
    """Decides by the nodes' common `inventory`. `all_said`: whether every node has answered. Pure."""
    if identity in inventory.complete():
        return Next.COLLECT
    return Next.OVER if all_said else Next.AGAIN


def together(kept: Mapping[str, KeptReplica], me: str) -> Inventory:
    """One inventory of all answers. In it this node, `me`, is called ""."""
    every = Inventory()
    for name, each in kept.items():
        every.add(each.held, "" if name == me else name)
    return every


Asked = Callable[[Inventory, bool], None]
Collected = Callable[["FramePlaces | None", str], None]


class RestartSurvey:
    """The survey of one checkpoint. `ask(then)`: asks all nodes; `then` hears the inventory and whether all answered.
    `collect(inventory, then)`: collects the checkpoint; `then` hears its places, or None and the error. `found(places,
    inventory)`: called once, at success. `later(delay_s, what)`: a timer."""

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
        """Whether `tend` is to be called now."""
        return not self._asking and not self._ended and time.monotonic() >= self._again_s

    def tend(self) -> None:
        """Asks all nodes; call it when `is_due`."""
        self._asking, self._stale, self._news = True, False, False
        self._ask(self._asked)

    def lost(self) -> None:
        """An agent has disconnected: its answer may not hold any more, so a survey under way is repeated."""
        self._stale = self._asking

    def came(self) -> None:
        """A memory-only node may have connected, with replicas that the others lack: asks again."""
        self._news, self._again_s = self._asking, -math.inf

    def end(self) -> None:
        """Ends the survey; later answers are ignored."""
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
            self._later(wait_s, lambda: None)  # wakes the event loop, which calls `tend`

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

from ckpt.agent.replication.rereplicate import retry_delay_s
from ckpt.agent.replication.survey import KeptReplica
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.snapshots.manifest_gather import FramePlaces

log = logging.getLogger("ckpt")


class Next(enum.Enum):
    """What follows on a survey."""

    COLLECT = "collect"  # the nodes have all of it
    RETRY = "again"  # a node that has not answered may have the rest
    STOP = "over"  # a part is lost, or was evicted for a newer checkpoint


def next_action(inventory: Inventory, identity: Identity, all_said: bool) -> Next:
    """Decides by the nodes' common `inventory`. `all_said`: whether every node has answered. Pure."""
    if identity in inventory.complete_checkpoints():
        return Next.COLLECT
    return Next.STOP if all_said else Next.RETRY


def merge_answers(kept: Mapping[str, KeptReplica], me: str) -> Inventory:
    """One inventory of all answers. In it this node, `me`, is called ""."""
    every = Inventory()
    for name, each in kept.items():
        every.merge(each.inventory, "" if name == me else name)
    return every


OnAnswers = Callable[[Inventory, bool], None]
OnCollected = Callable[["FramePlaces | None", str], None]


class RestartSurvey:
    """The survey of one checkpoint. `ask(then)`: asks all nodes; `then` hears the inventory and whether all answered.
    `collect(inventory, then)`: collects the checkpoint; `then` hears its places, or None and the error. `found(places,
    inventory)`: called once, at success. `later(delay_s, what)`: a timer."""

    def __init__(
        self,
        identity: Identity,
        ask: Callable[[OnAnswers], None],
        collect: Callable[[Inventory, OnCollected], None],
        found: Callable[[FramePlaces, Inventory], None],
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self.identity = identity
        self._ask_nodes, self._collect, self._on_found, self._call_later = ask, collect, found, later
        self._is_running = self._is_stale = self._has_new_node = self._is_ended = False
        self._next_survey_s = -math.inf
        self._failed_surveys = 0

    @property
    def is_due(self) -> bool:
        """Whether `begin_survey` is to be called now."""
        return not self._is_running and not self._is_ended and time.monotonic() >= self._next_survey_s

    def begin_survey(self) -> None:
        """Asks all nodes; call it when `is_due`."""
        self._is_running, self._is_stale, self._has_new_node = True, False, False
        self._ask_nodes(self._handle_answers)

    def mark_stale(self) -> None:
        """An agent has disconnected: its answer may not hold any more, so a survey under way is repeated."""
        self._is_stale = self._is_running

    def survey_again(self) -> None:
        """A memory-only node may have connected, with replicas that the others lack: asks again."""
        self._has_new_node, self._next_survey_s = self._is_running, -math.inf

    def end(self) -> None:
        """Ends the survey; later answers are ignored."""
        self._is_ended = True

    # -- inside

    def _handle_answers(self, inventory: Inventory, all_said: bool) -> None:
        if self._is_ended:
            return
        match next_action(inventory, self.identity, all_said):
            case Next.COLLECT:
                self._collect(inventory, lambda places, error: self._handle_collected(places, inventory, error))
            case Next.RETRY:
                self._fail("a node that may have a part of it has not said what it has")
            case Next.STOP:
                log.info("%s is not whole in memory any more", self.identity)
                self._schedule_next(math.inf)

    def _handle_collected(self, places: FramePlaces | None, inventory: Inventory, error: str) -> None:
        if self._is_ended:
            return
        if places is None:
            self._fail(error)
        elif self._is_stale:
            self._schedule_next(0.0)
        else:
            self._is_ended = True
            self._on_found(places, inventory)

    def _fail(self, why: str) -> None:
        log.warning("who has what of %s is not known: %s", self.identity, why)
        self._failed_surveys += 1
        self._schedule_next(retry_delay_s(self._failed_surveys))

    def _schedule_next(self, wait_s: float) -> None:
        self._is_running = False
        if not self._has_new_node:
            self._next_survey_s = time.monotonic() + wait_s
        if not self._has_new_node and wait_s < math.inf:
            self._call_later(wait_s, lambda: None)  # wakes the event loop, which calls `begin_survey`

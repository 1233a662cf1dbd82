"""What a job has of what was learnt before it, of failures and of predictions.

A start goes on with what the newest one before it knew, here or in the record that it comes from, and counts that that
one failed; also where it had saved nothing, and what is gone on from is of an older one. Where the agent that knew is
gone (one takes over a running job, or coordinates for the first time a job that comes back from the memory of several
nodes), it is read from the run's records; else it would hand on only what it has seen itself, and the next start would
know no more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

from ckpt.agent.commit.store_client import StoreClient
from ckpt.agent.runtime.workers import Lane, Workers, failure
from ckpt.agent.state.cost_model import ABOUT, CostModel, class_of
from ckpt.events import Events
from ckpt.policy.history import recall
from ckpt.types import Epoch

if TYPE_CHECKING:
    from ckpt.agent.adaptive.alarms import Alarms
    from ckpt.agent.job.job import Job
    from ckpt.format.manifest import Record
    from ckpt.ipc.node_list import NodeAt
    from ckpt.store.run import RunView

log = logging.getLogger("ckpt")

RECORDS = 3  # the newest may be this agent's own by then; what is the same in two of them counts once


class LearntHistory:
    """Of one agent. On its main thread, but for reading. `newest`: the newest job that trained here."""

    def __init__(self, bulk: Workers, store: StoreClient, foreseeing: Alarms, events: Events) -> None:
        self._bulk = bulk
        self._store = store
        self._foreseeing = foreseeing
        self._events = events
        self.newest: Job | None = None
        self._asked: Epoch | None = None

    def goes_on(
        self,
        learning: CostModel,
        parent: Epoch,
        record: Record | None,
        view: RunView | None,
        nodes: Sequence[NodeAt],
    ) -> None:
        """A start goes on from epoch `parent`. `record`: what was restored, if the store gave it. `view`: of the store,
        if it answered. `nodes`: of the start."""
        former = self.newest if self.newest is not None and self.newest.epoch >= parent else None
        closed = view.closed if view is not None else {parent}  # else nobody is left who could have closed it
        if former is not None and former.learning is not None:
            self._from_former(learning, former, former.learning, record is not None, nodes)
        elif former is None and record is not None and ABOUT in record.about:
            self._tell(self._recall(learning, record.about[ABOUT]))
            if parent not in closed:
                claims = view.claims if view is not None else ()
                agents = next((len(each.agents) for each in claims if each.epoch == parent), 0)
                learning.failed(class_of(max(1, agents), agents > 1, True, False))
        elif former is None and record is None and parent not in closed:
            learning.owed = class_of(1, True, False, False)  # its coordinator's node: what that had learnt is read next

    def _from_former(
        self, learning: CostModel, former: Job, learnt: CostModel, from_store: bool, nodes: Sequence[NodeAt]
    ) -> None:
        now_s = time.monotonic()
        gone_s = now_s if former.gone_s is None else former.gone_s
        learnt.ran(gone_s)
        learning.inherit(learnt.known)
        if former.ended_in_order:
            return
        lost = {node.name for node in former.nodes} - {node.name for node in nodes}
        learning.failed(class_of(len(lost), learnt.peers, from_store, former.group.is_warned(gone_s)))
        near: Literal["local", "peer"] = "peer" if lost else "local"
        learning.recovered("store" if from_store else near, now_s - gone_s)

    def tend(self, job: Job | None) -> None:
        """After anything happened. `job`: the current one. Once for each that may lack something: what is known already
        counts once all the same. Where the store does not answer it goes on with what it learns itself."""
        if job is not None and job.claim is not None:
            self.newest = job
        if job is None or job.learning is None or job.epoch == self._asked:
            return
        goes_on = job.nodes and job.claim is not None and job.claim.parent is not None
        if not job.taken_over and not goes_on and job.learning.owed is None:
            return
        self._asked = job.epoch
        self._bulk.run(Lane.STORE, lambda: read_learnt(self._store), lambda done: self._read(job, done))

    def _read(self, job: Job, done: Future[list[Any]]) -> None:
        refused, learning = failure(done), job.learning
        if learning is None:
            return
        for value in [] if refused else done.result():
            refused = self._recall(learning, value) or refused
        learning.pay()
        job.follow_learning()
        self._tell(refused)

    def _recall(self, learning: CostModel, value: object) -> str:
        """From a record; why not, "" where all is well."""
        recalled = recall(value)
        learning.inherit(recalled.known)
        self._foreseeing.inherit(recalled.sources)
        return recalled.refused

    def _tell(self, refused: str) -> None:
        if refused:
            self._events.emit("policy.refused", f"ckpt: what the job had learnt before is not all known now: {refused}")


def read_learnt(store: StoreClient) -> list[Any]:
    """On a thread: what the newest records of the line say, unread. Errors: StorageError; DamagedData."""
    from ckpt.store.reader import open_record

    run = store.run(impatient=True)
    records = [open_record(run.backend, ref, run.patience) for ref in run.view().line[-RECORDS:]]
    return [record.about[ABOUT] for record in records if ABOUT in record.about]

"""What a job had learnt of failures and of predictions, where the agent that knew it is gone: one that takes over a
running job, or that coordinates for the first time a job that comes back from the memory of several nodes, reads it
from the run's records. Else it would hand on only what it has seen itself, and the next start would know no more.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ckpt.agent.bulk import Bulk, Lane, failure
from ckpt.agent.learning import ABOUT
from ckpt.agent.storeside import StoreSide
from ckpt.events import Events
from ckpt.policy.remembered import recall
from ckpt.types import Epoch

if TYPE_CHECKING:
    from ckpt.agent.foreseeing import Foreseeing
    from ckpt.agent.jobs import Job

log = logging.getLogger("ckpt")

RECORDS = 3  # the newest may be this agent's own by then; what is the same in two of them counts once


class Relearning:
    """Of one agent. On its main thread, but for reading."""

    def __init__(self, bulk: Bulk, store: StoreSide, foreseeing: Foreseeing, events: Events) -> None:
        self._bulk = bulk
        self._store = store
        self._foreseeing = foreseeing
        self._events = events
        self._asked: Epoch | None = None

    def tend(self, job: Job | None) -> None:
        """After anything happened. `job`: the current one. Once for each that may lack something: what is known already
        counts once all the same. Where the store does not answer it goes on with what it learns itself."""
        if job is None or job.learning is None or job.epoch == self._asked:
            return
        goes_on = job.nodes and job.claim is not None and job.claim.parent is not None
        if not job.taken_over and not goes_on and job.learning.owed is None:
            return
        self._asked = job.epoch
        self._bulk.run(Lane.STORE, lambda: read_learnt(self._store), lambda done: self._read(job, done))

    def _read(self, job: Job, done: Future[list[Any]]) -> None:
        refused = failure(done)
        if not refused and job.learning is not None:
            for value in done.result():
                recalled = recall(value)
                refused = recalled.refused or refused
                job.learning.inherit(recalled.known)
                self._foreseeing.inherit(recalled.sources)
        if job.learning is not None:
            job.learning.pay()
            job.follow_learning()
        if refused:
            self._events.emit("policy.refused", f"ckpt: what the job had learnt before is not all known now: {refused}")


def read_learnt(store: StoreSide) -> list[Any]:
    """On a thread: what the newest records of the line say, unread. Errors: StorageError; DamagedData."""
    from ckpt.store.reader import open_record

    run = store.run(impatient=True)
    records = [open_record(run.backend, ref) for ref in run.view().line[-RECORDS:]]
    return [record.about[ABOUT] for record in records if ABOUT in record.about]

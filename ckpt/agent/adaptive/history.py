"""The learnt history: hands what earlier starts learnt of failures and predictions on to each new start.

A start inherits from the newest start before it: in this agent, or in the record that was restored. It counts that
start's failure, even if that start saved nothing and an older checkpoint was restored. If the agent that knew is gone,
the history is read from the run's newest records. That happens when an agent takes over a running job, or coordinates
for the first time a job restored from the memory of several nodes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

from ckpt.agent.commit.store_client import StoreClient
from ckpt.agent.runtime.workers import Lane, Workers, failure
from ckpt.agent.state.cost_model import ABOUT, CostModel, classify_failure
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

# Records that are read: the newest may be this agent's own. Facts that stand in several records count once.
RECORDS = 3


class LearntHistory:
    """The history of one agent. Main thread only, but for reading. `newest_job`: the newest job that trained here."""

    def __init__(self, workers: Workers, store: StoreClient, alarms: Alarms, events: Events) -> None:
        self._workers = workers
        self._store = store
        self._alarms = alarms
        self._events = events
        self.newest_job: Job | None = None
        self._loaded_epoch: Epoch | None = None

    def fill_cost_model(
        self,
        learning: CostModel,
        parent: Epoch,
        record: Record | None,
        view: RunView | None,
        nodes: Sequence[NodeAt],
    ) -> None:
        """A start restored a checkpoint of epoch `parent`: fills its `learning`. `record`: the restored record, if it
        came from the store. `view`: the store's listing, if it answered. `nodes`: of the start."""
        former = self.newest_job if self.newest_job is not None and self.newest_job.epoch >= parent else None
        # Without a listing it is unknown whether the parent was closed in order: then no failure is counted.
        closed = view.closed_epochs if view is not None else {parent}
        if former is not None:
            self._inherit_from_job(learning, former, former.cost_model, record is not None, nodes)
        elif record is not None and ABOUT in record.about:
            self._report_refused(self._inherit_entry(learning, record.about[ABOUT]))
            if parent not in closed:
                claims = view.claims if view is not None else ()
                agents = next((len(each.agents) for each in claims if each.epoch == parent), 0)
                learning.record_failure(classify_failure(max(1, agents), agents > 1, True, False))
        elif former is None and record is None and parent not in closed:
            # The coordinator's node failed; what it had learnt is read next, and the failure counted then.
            learning.pending_failure = classify_failure(1, True, False, False)

    def _inherit_from_job(
        self, learning: CostModel, former: Job, learnt: CostModel, from_store: bool, nodes: Sequence[NodeAt]
    ) -> None:
        now_s = time.monotonic()
        gone_s = now_s if former.trainers_gone_s is None else former.trainers_gone_s
        learnt.record_run_time(gone_s)
        learning.merge_measurements(learnt.measurements)
        if former.context.ended_cleanly:
            return
        lost = {node.name for node in former.nodes} - {node.name for node in nodes}
        learning.record_failure(
            classify_failure(len(lost), learnt.has_replicas, from_store, former.scheduler.preemption.is_warned(gone_s))
        )
        near: Literal["local", "peer"] = "peer" if lost else "local"
        learning.record_recovery("store" if from_store else near, now_s - gone_s)

    def load_history(self, job: Job | None) -> None:
        """Reads the records once for each job that may lack history. `job`: the current one. Facts known already count
        once all the same. If the store does not answer, the job uses only what it learns itself."""
        if job is not None and job.claim is not None:
            self.newest_job = job
        if job is None or job.epoch == self._loaded_epoch:
            return
        goes_on = job.nodes and job.claim is not None and job.claim.parent is not None
        if not job.context.is_taken_over and not goes_on and job.cost_model.pending_failure is None:
            return
        self._loaded_epoch = job.epoch
        self._workers.run(Lane.STORE, lambda: read_learnt(self._store), lambda done: self._on_records_read(job, done))

    def _on_records_read(self, job: Job, done: Future[list[Any]]) -> None:
        refused, learning = failure(done), job.cost_model
        for value in [] if refused else done.result():
            refused = self._inherit_entry(learning, value) or refused
        learning.count_pending_failure()
        job.policy.apply()
        self._report_refused(refused)

    def _inherit_entry(self, learning: CostModel, value: object) -> str:
        """Inherits from a record's entry. Returns why a part of it was refused; "": nothing was."""
        recalled = recall(value)
        learning.merge_measurements(recalled.measurements)
        self._alarms.inherit_scores(recalled.sources)
        return recalled.refusal

    def _report_refused(self, refused: str) -> None:
        if refused:
            self._events.emit("policy.refused", f"ckpt: a part of what the job had learnt is not known now: {refused}")


def read_learnt(store: StoreClient) -> list[Any]:
    """The learnt history in the newest records of the branch history, not parsed. On a thread. Errors: StorageError;
    DamagedData."""
    from ckpt.store.reader import open_record

    run = store.open_run(impatient=True)
    records = [open_record(run.backend, ref, run.patience) for ref in run.view().history[-RECORDS:]]
    return [record.about[ABOUT] for record in records if ABOUT in record.about]

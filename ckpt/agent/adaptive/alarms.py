"""The alarms of one agent: a job's coordinator scores them by their outcomes, and acts on those of proven sources.

A standing alarm of a proven source is an uncertain notice to the job: it costs one extra checkpoint, and no rank
leaves. The share of failures that is predicted goes into the save intervals. An unproven source changes nothing.

A failure is the first rank of an epoch that dies or raises before the job's end and without a notice: later deaths are
its consequences. If a whole node is cut off, the failure is that node's. Main thread only.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt.agent.preemption.notice_relay import StandingNotice, node_key
from ckpt.agent.preemption.preemption import NOTICES_MAX
from ckpt.agent.runtime.event_loop import EventLoop
from ckpt.agent.state.rank_presence import REJOIN_S, Presence
from ckpt.errors import AgentError
from ckpt.events import Events
from ckpt.predict.outcomes import Outcomes
from ckpt.predict.scoring import WINDOW_S, Score
from ckpt.predict.signal_reader import SignalReader
from ckpt.predict.watching import PERIOD_S, SOURCES, Alarm
from ckpt.settings import Settings
from ckpt.storage.names import redact_url
from ckpt.types import OWN_NODE, Epoch

if TYPE_CHECKING:
    from ckpt.agent.job.follower_job import FollowerJob
    from ckpt.agent.job.job import Job

log = logging.getLogger("ckpt")

ERROR_PAUSE_S = 600.0  # how long predictions rest after an internal error
SETTLE_S = 5.0  # from the first sign of a failure until the failed node is decided
NOTICE_SOURCE = "prediction"  # of the notices that alarms become
Raised = Sequence[tuple[str, float | None]]  # (source, the probability that it states)


class Alarms:
    """The alarms of one agent, over all its jobs. `outcomes`: of the alarms in jobs that it coordinates.
    `signal_reader`: the reader of this node's signals."""

    def __init__(self, settings: Settings, url: str, server: EventLoop, events: Events) -> None:
        self.outcomes = Outcomes()
        self.signal_reader = SignalReader(settings, redact_url(url), server.post, self._on_local_signals, events)
        self._events = events
        self._internal_error_s = -math.inf  # time of the last internal error
        self._job: Job | None = None  # the job that trains and is coordinated here
        self._followed_job: FollowerJob | None = None  # the job that trains and is coordinated elsewhere
        self._failed_epoch: Epoch | None = None  # the epoch whose failure was counted
        self._pending_failure: tuple[float, str] | None = (
            None  # a failure not counted yet: its time, and its likely node
        )
        self._due_s = 0.0

    def close(self) -> None:
        self.signal_reader.close()

    def scores_by_source(self) -> dict[str, dict[str, float]]:
        """The scores that outlive the job, by source."""
        return self.outcomes.numbers()

    def inherit_scores(self, sources: Any) -> None:
        """Adds the scores of an earlier run, as its record has them; malformed ones are skipped."""
        scores = {str(name): Score.from_numbers(numbers) for name, numbers in sources.items()}
        self.outcomes.inherit({name: score for name, score in scores.items() if score is not None})
        self._due_s = -math.inf

    def table(self) -> dict[str, Any]:
        """For `ckpt watch`."""
        return {"reading": self.signal_reader.is_reading, **self.outcomes.table(time.monotonic())}

    # -- what the agent calls

    def update(self, job: Job | None, followed_jobs: Sequence[FollowerJob]) -> float | None:
        """Does what follows from the newest events. `job`: the current one. Returns when to call again. An internal
        error is reported, ends no job, and rests predictions for ERROR_PAUSE_S."""
        now_s = time.monotonic()
        if now_s < self._internal_error_s + ERROR_PAUSE_S:
            return self._internal_error_s + ERROR_PAUSE_S
        try:
            return self._update(job, followed_jobs, now_s)
        except Exception as exc:
            self._internal_error_s = now_s
            log.exception("predictions")
            text = f"failures are not foreseen for {ERROR_PAUSE_S:g} s: the agent made a mistake: {exc!r:.500}"
            self._events.emit("predictions.failed", text, loud=True)
            return now_s + ERROR_PAUSE_S

    def _update(self, job: Job | None, followed_jobs: Sequence[FollowerJob], now_s: float) -> float | None:
        trains = job is not None and job.claim is not None and not job.context.internal_error and not _is_over(job)
        self._track_jobs(job if trains else None, followed_jobs, now_s)
        if self._job is not None:
            self._detect_failure(self._job, now_s, over=False)
        if self._job is None or now_s < self._due_s:
            return None if self._job is None or self._due_s == math.inf else self._due_s
        self.outcomes.advance_time(now_s)
        proven = self.outcomes.proven_scores()
        self._update_notices(self._job, proven, now_s)
        self._update_intervals(self._job, proven)
        again_s = now_s + PERIOD_S if self._pending_failure else math.inf
        self._due_s = min(again_s, self.outcomes.next_expiry_s())
        return None if self._due_s == math.inf else self._due_s

    def on_peer_signals(self, job: Job, node: str, fields: dict[str, Any]) -> None:
        """The agent of `node` tells which sources watch there, and its new alarms. Errors: AgentError."""
        sources, alarms = _parse_sources(fields.get("sources")), _parse_alarms(fields.get("alarms"))
        if job is self._job:
            self._record_alarms(job, node, sources, alarms)

    # -- small steps

    def _on_local_signals(self, sources: tuple[str, ...], alarms: Sequence[Alarm]) -> None:
        """This node's signal reader tells which sources watch, and its new alarms."""
        raised = [(alarm.source, alarm.probability) for alarm in alarms]
        if self._job is not None:
            self._record_alarms(self._job, OWN_NODE, sources, raised)
        elif self._followed_job is not None:
            body = {"t": "node-report", "sources": list(sources), "alarms": [list(each) for each in raised]}
            self._followed_job.tell_coordinator(body)

    def _track_jobs(self, job: Job | None, followed_jobs: Sequence[FollowerJob], now_s: float) -> None:
        """Notes which job trains here now."""
        if job is not self._job:
            if self._job is not None:
                self._detect_failure(self._job, now_s, over=True)
                self.outcomes.stop_watching(now_s)
            self.signal_reader.request_report()
            self._pending_failure = None
            self._job, self._due_s = job, now_s
        training = [each for each in followed_jobs if each.is_needed and each.is_training]
        self._followed_job = training[-1] if training and job is None else None
        self.signal_reader.set_reading(job is not None or self._followed_job is not None)

    def _record_alarms(self, job: Job, node: str, sources: Sequence[str], alarms: Raised) -> None:
        now_s = time.monotonic()
        self.outcomes.set_sources(node, sources, now_s)
        self._due_s = min(self._due_s, now_s)
        for source, probability in alarms:
            if not self.outcomes.record_alarm(node, source, now_s):
                continue
            score = self.outcomes.scores.get(source, Score())
            if probability is None and score.alarms:
                probability = (score.true + score.late) / score.alarms
            where = f"node {node}" if node else "this node"
            what = "the job acts on it" if score.is_proven else "this source is not proven, and nothing follows"
            said = "" if probability is None else f" with a probability of {probability:.0%}"
            facts = {
                "node": node,
                "source": source,
                "probability": probability,
                "lead_s": score.lead_s,
                "proven": score.is_proven,
                "precision": score.precision,
                "recall": score.recall,
            }
            job.context.emit(
                "prediction", f"{source}: {where} may fail within 10 minutes{said}: {what}", score.is_proven, facts
            )

    def _detect_failure(self, job: Job, now_s: float, over: bool) -> None:
        """Counts the job's first failure, SETTLE_S after its first sign: ranks may fail from the loss of another node
        and report first. `over`: the job is over, so the failure is counted at once."""
        if self._failed_epoch == job.epoch:
            return
        self._pending_failure = self._pending_failure or self._find_first_failure(job, now_s)
        if self._pending_failure is None:
            return
        at_s, node = self._pending_failure
        self._due_s = min(self._due_s, at_s + SETTLE_S)
        if over or now_s - at_s >= SETTLE_S:
            self._failed_epoch, self._pending_failure = job.epoch, None
            self._count_failure(job, next(iter(_disconnected_nodes(job)), node), at_s)

    def _find_first_failure(self, job: Job, now_s: float) -> tuple[float, str] | None:
        """(time, node) of the first sign of a failure; None: there is none."""
        members = job.scheduler.rank_states
        bad = members.summary.first_failed
        if bad is None:
            return next(
                ((since_s, node) for node, since_s in _disconnected_nodes(job).items() if now_s - since_s >= REJOIN_S),
                None,
            )
        ends = any(m.presence is Presence.LEFT and not m.has_failed and m.disconnected_s is None for m in members)
        if ends or job.scheduler.preemption.is_warned(now_s):
            self._failed_epoch = job.epoch  # the job was leaving or at its end: that is no failure
            return None
        return now_s, job.ranks.node_of(bad.rank)

    def _count_failure(self, job: Job, node: str, at_s: float) -> None:
        # Seconds from an alarm until the state is replicated, or stored.
        group, known = job.scheduler, job.cost_model.measurements
        needed_s = group.facts.save_estimate.expected_save_s(
            known.replication.mean if group.replicas.is_placement_complete else None
        )
        self.outcomes.record_failure(node, at_s, needed_s)
        if node == OWN_NODE:
            self.signal_reader.record_failure(at_s)
        else:
            job.share_of(node).notify({"t": "node-lost", "name": node})

    def _update_notices(self, job: Job, proven: Mapping[str, Score], now_s: float) -> None:
        """Gives the job a notice for each standing alarm of a proven source, and takes back the notices of others."""
        notices = job.scheduler.preemption.notices
        stands = {
            (NOTICE_SOURCE, node_key(source, node)): (node, since_s)
            for (node, source), since_s in self.outcomes.standing_alarms().items()
            if source in proven
        }
        for name in [name for name in notices if name[0] == NOTICE_SOURCE and name not in stands]:
            job.scheduler.preemption.withdraw_notice(*name)
        for name, (node, since_s) in stands.items():
            if name not in notices and len(notices) < NOTICES_MAX:
                told = StandingNotice(*name, since_s + WINDOW_S, now_s, certain=False, nodes=frozenset({node}))
                job.scheduler.preemption.add_notice(told)

    def _update_intervals(self, job: Job, proven: Mapping[str, Score]) -> None:
        """Chooses the save intervals by the proven source that predicts most failures."""
        learning = job.cost_model
        best = max(proven.values(), key=lambda score: score.recall, default=None)
        used = (best.recall, best.precision) if best is not None else (0.0, 1.0)
        if used != (learning.measurements.recall, learning.measurements.precision):
            learning.measurements = learning.measurements.with_predictor(*used)
            job.policy.apply()


def _is_over(job: Job) -> bool:
    return job.scheduler.facts.all_gone or bool(job.scheduler.facts.superseded_by)


def _disconnected_nodes(job: Job) -> dict[str, float]:
    """The other nodes without a connected rank though no rank has left: since when, by node."""
    members, found = job.scheduler.rank_states, dict[str, float]()
    if not members.summary.disconnected:
        return found
    for node, ranks in job.ranks.remote_ranks.items():
        since = [members[rank].disconnected_s for rank in ranks if not members[rank].has_failed]
        if since and len(since) == len(ranks) and all(each is not None for each in since):
            found[node] = max(each for each in since if each is not None)
    return found


def _parse_sources(value: Any) -> list[str]:
    if not isinstance(value, list) or len(value) > len(SOURCES) or not all(each in SOURCES for each in value):
        raise AgentError("a node tells of sources of predictions that there are not")
    return [str(each) for each in value]


def _parse_alarms(value: Any) -> Raised:
    if not isinstance(value, list) or len(value) > len(SOURCES):
        raise AgentError("a node tells alarms that are none")
    found: list[tuple[str, float | None]] = []
    for each in value:
        if not isinstance(each, list) or len(each) != 2 or each[0] not in SOURCES:
            raise AgentError("a node tells an alarm that is none")
        if each[1] is not None and not (isinstance(each[1], float) and 0 <= each[1] <= 1):
            raise AgentError("a node tells an alarm with a probability that is none")
        found.append((str(each[0]), each[1]))
    return found

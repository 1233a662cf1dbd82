"""The alarms of one agent: a job's coordinator scores them by their outcomes, and acts on those of proven sources.

While an alarm of a proven source stands, an extra checkpoint is appointed and committed whenever enough work is at risk
to pay for it (`policy.with_predictions`); no rank leaves. The node's risk goes into the next placement: the node keeps
no replicas for others if that leaves no state less safe. The share of failures that is predicted goes into the save
intervals. An unproven source changes nothing.

A failure is the first rank of an epoch that dies or raises before the job's end and without a notice: later deaths are
its consequences. If a whole node is cut off, the failure is that node's. Main thread only.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckpt.agent.adaptive.signal_reader import SignalReader
from ckpt.agent.runtime.event_loop import EventLoop
from ckpt.agent.snapshots.all_shares import AllShares
from ckpt.agent.state.job_facts import REJOIN_S
from ckpt.agent.state.rank_presence import Presence
from ckpt.errors import AgentError
from ckpt.events import Events
from ckpt.policy.known import NOTHING
from ckpt.policy.predicted import Predicted, with_predictions
from ckpt.predict.outcomes import Outcomes
from ckpt.predict.scoring import Score
from ckpt.predict.step_ratio import StepRatios
from ckpt.predict.watching import PERIOD_S, SOURCES, Alarm
from ckpt.settings import Settings
from ckpt.types import HERE, Epoch

if TYPE_CHECKING:
    from ckpt.agent.job.follower_job import FollowerJob
    from ckpt.agent.job.job import Job

log = logging.getLogger("ckpt")

MISTAKE_S = 600.0  # how long predictions rest after an internal error
SETTLE_S = 5.0  # from the first sign of a failure until the failed node is decided
Raised = Sequence[tuple[str, float | None]]  # (source, the probability that it states)


class Alarms:
    """The alarms of one agent, over all its jobs. `outcomes`: of the alarms in jobs that it coordinates. `reading`: the
    reader of this node's signals."""

    def __init__(self, settings: Settings, url: str, server: EventLoop, events: Events) -> None:
        self.outcomes = Outcomes()
        self.reading = SignalReader(settings, url, server.post, self._heard, events)
        self._events = events
        self._failed_s = -math.inf  # time of the last internal error
        self._job: Job | None = None  # the job that trains and is coordinated here
        self._following: FollowerJob | None = None  # the job that trains and is coordinated elsewhere
        self._began_s = 0.0
        self._failed: Epoch | None = None  # the epoch whose failure was counted
        self._sighted: tuple[float, str] | None = None  # a failure not counted yet: its time, and its likely node
        self._due_s = 0.0
        self._paces = StepRatios()
        self._used: tuple[float, float] = (0.0, 1.0)  # the recall and precision that the intervals were chosen by

    def close(self) -> None:
        self.reading.close()

    def numbers(self) -> dict[str, dict[str, float]]:
        """The scores that outlive the job, by source."""
        return self.outcomes.numbers()

    def inherit(self, sources: Any) -> None:
        """Adds the scores of an earlier run, as its record has them; malformed ones are skipped."""
        scores = {str(name): Score.of(numbers) for name, numbers in sources.items()}
        self.outcomes.inherit({name: score for name, score in scores.items() if score is not None})

    def table(self) -> dict[str, Any]:
        """For `ckpt watch`."""
        return {"reading": self.reading.on, **self.outcomes.table(time.monotonic())}

    # -- what the agent calls

    def tend(self, job: Job | None, followings: Sequence[FollowerJob]) -> float | None:
        """Does what follows from the newest events. `job`: the current one. Returns when to call again. An internal
        error is reported, ends no job, and rests predictions for MISTAKE_S."""
        now_s = time.monotonic()
        if now_s < self._failed_s + MISTAKE_S:
            return self._failed_s + MISTAKE_S
        try:
            return self._tend(job, followings, now_s)
        except Exception as exc:
            self._failed_s = now_s
            log.exception("predictions")
            text = f"failures are not foreseen for {MISTAKE_S:g} s: the agent made a mistake: {exc!r:.500}"
            self._events.emit("predictions.failed", text, loud=True)
            return now_s + MISTAKE_S

    def _tend(self, job: Job | None, followings: Sequence[FollowerJob], now_s: float) -> float | None:
        trains = job is not None and job.claim is not None and not job.failed and not _is_over(job)
        self._follow(job if trains else None, followings, now_s)
        if self._job is not None:
            self._see_failure(self._job, now_s, over=False)
        if self._job is None or now_s < self._due_s:
            return None if self._job is None or self._due_s == math.inf else self._due_s
        self.outcomes.passed(now_s)
        self._tell_paces(self._job, now_s)
        self._act(self._job, now_s)
        proven = self.outcomes.proven()
        more = any(source in proven for _, source in self.outcomes.standing())
        again_s = now_s + PERIOD_S if more or self._sighted or len(self._job.nodes) > 1 else math.inf
        self._due_s = min(again_s, self.outcomes.next_s())
        return None if self._due_s == math.inf else self._due_s

    def said(self, job: Job, node: str, fields: dict[str, Any]) -> None:
        """The agent of `node` tells which sources watch there, and its new alarms. Errors: AgentError."""
        sources, alarms = _sources(fields.get("sources")), _alarms(fields.get("alarms"))
        if job is self._job:
            self._raise(job, node, sources, alarms)

    def told(self, kind: str, fields: dict[str, Any]) -> None:
        """The coordinator of a followed job tells that this node failed, or its step-time ratio. Errors: AgentError."""
        if kind == "failed":
            self.reading.failed(time.monotonic())
            return
        ratio = fields.get("ratio")
        if not isinstance(ratio, float) or not 0 < ratio < 1e6:
            raise AgentError("the coordinator tells a pace that is none")
        self.reading.ratio = ratio

    # -- small steps

    def _heard(self, sources: tuple[str, ...], alarms: Sequence[Alarm]) -> None:
        """This node's signal reader tells which sources watch, and its new alarms."""
        raised = [(alarm.source, alarm.probability) for alarm in alarms]
        if self._job is not None:
            self._raise(self._job, HERE, sources, raised)
        elif self._following is not None:
            body = {"t": "signals", "sources": list(sources), "alarms": [list(each) for each in raised]}
            self._following.tell(body)

    def _follow(self, job: Job | None, followings: Sequence[FollowerJob], now_s: float) -> None:
        """Notes which job trains here now."""
        if job is not self._job:
            if self._job is not None:
                self._see_failure(self._job, now_s, over=True)
                self.outcomes.stopped(now_s)
            self.reading.say()
            self._sighted = None
            self._job, self._began_s, self._due_s, self._used = job, now_s, now_s, (0.0, 1.0)
            self._paces = StepRatios()
        training = [each for each in followings if each.needed and each.is_training]
        self._following = training[-1] if training and job is None else None
        self.reading.follow(job is not None or self._following is not None)
        if not training:
            self.reading.ratio = self.reading.ratio if job is not None else None

    def _raise(self, job: Job, node: str, sources: Sequence[str], alarms: Raised) -> None:
        now_s = time.monotonic()
        self.outcomes.watches(node, sources, now_s)
        self._due_s = min(self._due_s, now_s)
        for source, probability in alarms:
            if not self.outcomes.alarmed(node, source, now_s):
                continue
            score = self.outcomes.scores.get(source, Score())
            if probability is None and score.alarms:
                probability = (score.true + score.late) / score.alarms
            where = f"node {node}" if node else "this node"
            what = "the job acts on it" if score.proven else "this source is not proven, and nothing follows"
            said = "" if probability is None else f" with a probability of {probability:.0%}"
            facts = {
                "node": node,
                "source": source,
                "probability": probability,
                "lead_s": score.lead_s,
                "proven": score.proven,
                "precision": score.precision,
                "recall": score.recall,
            }
            job.emit("prediction", f"{source}: {where} may fail within 10 minutes{said}: {what}", score.proven, facts)

    def _see_failure(self, job: Job, now_s: float, over: bool) -> None:
        """Counts the job's first failure, SETTLE_S after its first sign: ranks may fail from the loss of another node
        and report first. `over`: the job is over, so the failure is counted at once."""
        if self._failed == job.epoch:
            return
        self._sighted = self._sighted or self._sight(job, now_s)
        if self._sighted is None:
            return
        at_s, node = self._sighted
        self._due_s = min(self._due_s, at_s + SETTLE_S)
        if over or now_s - at_s >= SETTLE_S:
            self._failed, self._sighted = job.epoch, None
            self._count(job, next(iter(_lost(job)), node), at_s)

    def _sight(self, job: Job, now_s: float) -> tuple[float, str] | None:
        """(time, node) of the first sign of a failure; None: there is none."""
        members = job.group.members
        bad = next((m for m in members if m.broke or m.presence is Presence.DEAD), None)
        if bad is None:
            return next(((since_s, node) for node, since_s in _lost(job).items() if now_s - since_s >= REJOIN_S), None)
        ends = any(m.presence is Presence.LEFT and not m.broke and m.lost_s is None for m in members)
        if ends or job.group.is_warned(now_s):
            self._failed = job.epoch  # the job was leaving or at its end: that is no failure
            return None
        return now_s, job.ranks.node_of(bad.rank) if isinstance(job.ranks, AllShares) else HERE

    def _count(self, job: Job, node: str, at_s: float) -> None:
        self.outcomes.failed(node, at_s, self._needed_s(job))
        if node == HERE:
            self.reading.failed(at_s)
        else:
            job.share_of(node).tell({"t": "failed"})

    def _needed_s(self, job: Job) -> float:
        """Seconds from an alarm until the state is replicated or stored."""
        group, known = job.group, job.learning.known if job.learning is not None else NOTHING
        copied_s = known.replication.mean if group.is_kept_whole else None
        return group.safe_within_s(copied_s)

    def _tell_paces(self, job: Job, now_s: float) -> None:
        """Tells each node the ratio of its step time to the median of the others'."""
        ranks = job.ranks
        if not isinstance(ranks, AllShares):
            return
        slowest: dict[str, int] = {}
        for rank, step in enumerate(ranks.steps()):
            node = ranks.node_of(rank)
            slowest[node] = min(step, slowest.get(node, step))
        for node, ratio in self._paces.observed(now_s, slowest).items():
            if node == HERE:
                self.reading.ratio = ratio
            else:
                job.share_of(node).tell({"t": "pace", "ratio": ratio})

    def _act(self, job: Job, now_s: float) -> None:
        proven = self.outcomes.proven()
        self._choose_intervals(job, proven)
        if job.protection is not None:
            names = {node: node or job.nodes[0].name for node in (HERE, *_others(job))}
            risks = {names[node]: risk for node, risk in self.outcomes.risks(names).items()}
            if job.protection.foresees(risks):
                job.place_again()
        standing = {source for _, source in self.outcomes.standing() if source in proven}
        above_s = min((self._worth(job, proven[each]).act_above_s for each in standing), default=math.inf)
        unsafe_s = now_s - max(job.group.safe_since_s, self._began_s)
        if unsafe_s >= above_s and not job.group.wants_extra:
            text = f"one checkpoint more: {unsafe_s:.0f} s of work are on this node alone, and a failure is predicted"
            job.emit("prediction.acted", text, data={"unsafe_s": unsafe_s, "act_above_s": above_s})
            job.group.ask_extra()

    def _choose_intervals(self, job: Job, proven: dict[str, Score]) -> None:
        """Chooses the save intervals by the one proven source that wastes the least time."""
        learning = job.learning
        if learning is None:
            return
        best = min(proven.values(), key=lambda score: self._worth(job, score).waste, default=None)
        used = (best.recall, best.precision) if best is not None else (0.0, 1.0)
        if used != self._used:
            self._used = used
            learning.known = learning.known.foreseen(*used)
            job.follow_learning()

    def _worth(self, job: Job, score: Score) -> Predicted:
        """The cost and the benefit of acting on alarms with that score, from measured times."""
        known = job.learning.known if job.learning is not None else NOTHING
        replicates = job.group.is_kept_whole
        m = known.measured(max(1, len(job.nodes)), replicates)
        cost_s = m.snapshot_stall_s + (0.0 if replicates else m.commit_cost_s)
        mtbf_s = 1 / (m.memory_rate + m.store_rate)
        return with_predictions(m.snapshot_stall_s, mtbf_s, m.local_recovery_s, cost_s, score.recall, score.precision)


def _is_over(job: Job) -> bool:
    return job.group.all_gone or bool(job.group.superseded_by)


def _others(job: Job) -> list[str]:
    return list(job.ranks.others) if isinstance(job.ranks, AllShares) else []


def _lost(job: Job) -> dict[str, float]:
    """The other nodes without a connected rank though no rank has left: since when, by node."""
    if not isinstance(job.ranks, AllShares):
        return {}
    members, found = job.group.members, dict[str, float]()
    for node, ranks in job.ranks.ranks_elsewhere.items():
        since = [members[rank].lost_s for rank in ranks if not members[rank].broke]
        if since and len(since) == len(ranks) and all(each is not None for each in since):
            found[node] = max(each for each in since if each is not None)
    return found


def _sources(value: Any) -> list[str]:
    if not isinstance(value, list) or len(value) > len(SOURCES) or not all(each in SOURCES for each in value):
        raise AgentError("a node tells of sources of predictions that there are not")
    return [str(each) for each in value]


def _alarms(value: Any) -> Raised:
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

"""The appointments of one job: when the next snapshot is announced, and for which version. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpt.agent.preemption.preemption import ExitOrder, Preemption
from ckpt.agent.scheduler.rank_requests import SaveRequests
from ckpt.agent.scheduler.save_attempts import SaveAttempts
from ckpt.agent.scheduler.slot_allocator import SlotAllocator
from ckpt.agent.state.job_facts import JobFacts, SnapshotClock
from ckpt.agent.state.slots import SaveReason
from ckpt.agent.state.step_timing import LATENCY_S, MEASURE_S_MIN, REPORT_DELAY_S
from ckpt.ipc.control_page import SUB_MAX
from ckpt.policy.save_options import STEPS_APART
from ckpt.types import Version

# In steps or polls: two announcements may be late before a rank misses one.
LEAD_MIN = STEPS_APART - 1
NEAR_MARGIN = 0.1  # of a step: steps vary in time


@dataclass(eq=False)
class AppointmentPlanner:
    """The appointments of one job."""

    _facts: JobFacts
    _clock: SnapshotClock
    _order: ExitOrder
    _preemption: Preemption
    _allocator: SlotAllocator
    _attempts: SaveAttempts
    _requests: SaveRequests
    # The agent restarted beside running ranks: nothing is appointed before each rank has published its step.
    _is_resumed: bool = False
    _step_rate_origin: tuple[float, int] = (0.0, 0)  # (time, step) from which the rate is counted
    _steps_per_s: float = 0.0

    # -- facts

    def record_start(self, step: int, now_s: float) -> None:
        """The restore has ended, and training goes on after `step`. From now on snapshots are appointed."""
        if self._facts.start_step is None:
            self._facts.start_step = step
            self._step_rate_origin = (now_s, step)
            self._clock.start(now_s)

    def record_agent_restart(self, now_s: float) -> None:
        """This agent was restarted beside trainers at work."""
        self._is_resumed = True
        self.record_start(0, now_s)

    def wake_times(self, now_s: float) -> Iterator[float]:
        """When a decision may be due without a new fact."""
        open_attempts = self._facts.slots.open_attempts
        if self._is_resumed:
            yield now_s + 1.0
        if not open_attempts and self._clock.due_s > now_s and self._is_possible:
            yield self._clock.due_s
        if any(attempt.is_announced and not attempt.version.sub for attempt in open_attempts):
            # The ranks may poll for long before they come to the appointed step.
            yield now_s + MEASURE_S_MIN

    # -- decisions

    @property
    def _is_possible(self) -> bool:
        """Whether the job's state allows an appointment. Due times, free slots and open attempts are checked apart."""
        facts = self._facts
        if facts.start_step is None or self._is_resumed or self._order.is_given:
            return False
        # A rank without a connection could not answer.
        if facts.any_gone or facts.superseded_by or facts.rank_states.summary.disconnected or facts.slots.is_at_end:
            return False
        return facts.arenas.has_division and not any(each.is_verdict_pending for each in facts.slots.attempts())

    def appoint(self, now_s: float, steps: Sequence[int]) -> None:
        """Appoints the next snapshot, if one is due. `steps`: see `Scheduler.decide`."""
        timing, extra = self._facts.step_timing, self._preemption.extra
        is_hold, is_extra = self._preemption.is_time_to_leave, extra.must_be_appointed(self._facts.slots)
        self._is_resumed = self._is_resumed and not all(steps)
        if self._facts.slots.is_at_end:
            self._attempts.withdraw(now_s, lambda _: True)
        if is_hold:
            # All other appointments give way to the last one.
            self._attempts.withdraw(now_s, lambda each: not each.is_verdict_pending)
        elif is_extra:
            far = max(steps, default=0) + LEAD_MIN
            self._attempts.withdraw(now_s, lambda each: each.version.step > far)
        at_polls = timing.all_poll and timing.is_long
        if at_polls and self._attempts.withdraw(now_s, lambda each: not each.version.sub):
            # This step's end is unknown, and no appointment was missed.
            extra.record_withdrawal()
        if not self._is_possible or self._requests.is_any_waiting or self._facts.slots.open_attempts:
            return
        is_urgent = is_hold or is_extra
        if not (is_urgent or now_s >= self._clock.due_s):
            return
        slot = self._allocator.find_free()
        if slot is None or not (is_urgent or self._allocator.can_spare(slot)):
            self._clock.skip_due(now_s)
            return
        if at_polls or (is_hold and timing.is_poll_next):
            version = self._next_poll_version()
        else:
            version = timing.next_update_version(self._next_step_version(now_s, steps, is_hold))
        attempt = self._attempts.open(slot, SaveReason.HOLD if is_hold else SaveReason.STEP, version, now_s)
        if is_extra:
            extra.record_try()
        self._attempts.announce(attempt)
        self._clock.record_appointment(now_s)

    def _next_step_version(self, now_s: float, steps: Sequence[int], is_hold: bool) -> Version:
        """The end of a step far enough ahead of the foremost rank's that two announcements may be late. It uses the
        pace seen since the last call. A hold takes the near version if there is one."""
        near = self._near_step_version(now_s) if is_hold else None
        if near is not None:
            return near
        at = max(self._facts.start_step or 0, *steps)
        since_s, since = self._step_rate_origin
        if now_s - since_s >= LATENCY_S:
            self._steps_per_s = (at - since) / (now_s - since_s)
            self._step_rate_origin = (now_s, at)
        return Version(at + self._lead(self._steps_per_s))

    def _near_step_version(self, now_s: float) -> Version | None:
        """An earlier version than two late announcements allow: the end of the foremost rank's step, or of the next
        one; else None. A step may take a minute, and a deadline may be as close. It is None if the pace is unknown,
        this step takes unusually long, or announcements were late recently."""
        timing = self._facts.step_timing
        at, step_s = timing.step, timing.measured_step_s
        if not at or not timing.is_entry_published or step_s is None or self._facts.save_estimate.latency_s > LATENCY_S:
            return None
        left_s = timing.entered_s + step_s - now_s
        margin_s = max(LATENCY_S, NEAR_MARGIN * step_s)
        if not margin_s - step_s <= left_s <= step_s + margin_s:  # this step is unlike the usual ones
            return None
        return Version(at if left_s >= margin_s else at + 1)

    def _next_poll_version(self) -> Version:
        """The next poll that an announcement can reach, for ranks that all poll within one step, as in a long
        evaluation. If the step ends sooner, the ranks answer "late". Polls of different ranks need not keep pace. So
        the lead includes the polls that ranks of other nodes may have made since their last report."""
        timing = self._facts.step_timing
        unseen = 0 if self._facts.is_single_node else math.ceil(REPORT_DELAY_S * timing.polls_per_s)
        return Version(timing.step - 1, min(SUB_MAX, timing.poll + unseen + self._lead(timing.polls_per_s)))

    def _lead(self, per_s: float) -> int:
        return max(LEAD_MIN, math.ceil(2 * self._facts.save_estimate.latency_s * per_s))

"""The preemption of one job: decides from the standing notices when the ranks leave, and what is saved before. Pure.

- A certain notice makes the job leave, as late as possible. One appointment of kind HOLD is made so early that its
  steps, replication and commit fit before the deadline, by measured times and a reserve. A signal or an
  operator's request means leave now: the appointment is made at once. The earliest of several deadlines counts.
- The last snapshot is replicated and committed like any other. Nodes that stay commit what they keep. A commit that
  would keep the last snapshot out of the store does not begin, or is cancelled. Once the time left is too short for the
  last snapshot, the newest complete checkpoint is committed.
- A job restarted on a machine that it had left does not leave by the same notice again. It trains on until the machine
  goes, with one extra checkpoint just before.
- An uncertain notice costs one extra checkpoint. A notice withdrawn before the verdict costs at most the appointed
  checkpoint and one commit out of turn. The ranks leave by neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from ckpt.agent.preemption.notice_relay import OUTLIVES_S, PAST_S, ExitTiming, Name, StandingNotice
from ckpt.agent.state.actions import RecordExit
from ckpt.agent.state.job_facts import JobFacts
from ckpt.agent.state.slots import JobSlots, SlotState
from ckpt.ipc.notice_sources import SIGNAL_SOURCE
from ckpt.types import Version

EXTRA_TRIES = 3
# So long before it is time to leave, a failure counts as warned: the lead of an EC2 spot notice.
WARNED_S = 120.0
NOTICES_MAX = 100

# Of a report: the newest checkpoint's level and version; the newest committed and replicated versions; an error.
Saved = tuple[str, Version | None, Version | None, Version | None, str]


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a notice, reported once what was saved is settled.

    `outcome`: "left"; "ended" (the ranks were told to end where they are); "stayed" (the deadline passed, and no rank
    left). `reason`: the reason of "ended"."""

    outcome: str
    reason: str
    deadline_s: float
    sources: tuple[str, ...]
    last_reported: Saved | None = None  # what was already reported


@dataclass(slots=True)
class ExitOrder:
    """What the ranks were told: to leave, by the verdict on a save attempt, or to end where they are. And the report
    that is still to be made of it."""

    attempt_number: int = 0  # the save attempt whose verdict was: leave
    # All ranks held when the verdict was given. Else the others may be stuck, and have to be ended.
    is_unanimous: bool = False
    end_reason: str = ""  # why the ranks were told to end where they are
    waits_for_saves: bool = False  # ranks that end wait for the saves under way
    deadline_s: float | None = None  # the earliest deadline at the order, or since
    report: Report | None = None

    @property
    def is_end(self) -> bool:
        """Whether the ranks were told to end where they are."""
        return bool(self.end_reason)

    @property
    def is_given(self) -> bool:
        return bool(self.attempt_number) or self.is_end


@dataclass(slots=True)
class ExtraSave:
    """The extra checkpoint that a notice asks for by which no rank leaves."""

    is_requested: bool = False  # one of the ranks' present steps, or a later one
    _version: Version | None = None  # it is wanted of this version or a later one
    _tries_left: int = 0
    _commit_version: Version | None = None  # the first complete one from here on is committed out of turn

    def update(self, slots: JobSlots, step: int, is_wanted: bool) -> None:
        """Begins what was requested. Ends it once it is complete, tried in vain, or not wanted any more. `step`: the
        foremost rank's."""
        if self.is_requested:
            self.is_requested, self._tries_left = False, EXTRA_TRIES
            self._version = self._commit_version = Version(step)
        if self._version is None:
            return
        reached = slots.newest is not None and slots.newest.version >= self._version
        in_vain = self._tries_left <= 0 and not slots.open_attempts
        self._commit_version = self._commit_version if is_wanted else None
        if reached or in_vain or not is_wanted:
            self._version = None

    def must_be_appointed(self, slots: JobSlots) -> bool:
        """Whether it has to be appointed: none is staged."""
        extra = self._version
        if extra is None or self._tries_left <= 0:
            return False
        return not any(attempt.version >= extra for attempt in slots.attempts(SlotState.STAGED))

    def record_try(self) -> None:
        self._tries_left -= 1

    def record_withdrawal(self) -> None:
        """The appointment was withdrawn, and not missed."""
        self._tries_left += self._version is not None

    def is_commit_due(self, version: Version, committed: Version | None) -> bool:
        """Whether a checkpoint of that version is to be committed out of turn. `committed`: the newest that is."""
        first = self._commit_version
        return first is not None and version >= first and (committed is None or committed < first)


@dataclass(eq=False)
class Preemption:
    """The notices of one job, by name, and what follows from them."""

    _facts: JobFacts
    _order: ExitOrder
    notices: dict[Name, StandingNotice] = field(default_factory=dict)
    extra: ExtraSave = field(default_factory=ExtraSave)
    is_time_to_leave: bool = False  # a last snapshot is due or taken, and a deadline is ahead
    _due: set[Name] = field(default_factory=set)  # notices by which it is time to leave; see `_update_due`

    # -- facts

    def add_notice(self, told: StandingNotice) -> StandingNotice:
        """Records a new or moved notice; returns the notice as it stands now. A signal that several ranks got keeps its
        earliest deadline. Once the ranks leave by a notice they leave even if its deadline moves."""
        name = (told.source, told.key)
        before = self.notices.get(name)
        if told.deadline_s <= told.received_s:
            told = replace(told, deadline_s=told.received_s + PAST_S)
        if before is not None:
            first_s = min(before.deadline_s, told.deadline_s) if told.source == SIGNAL_SOURCE else told.deadline_s
            is_left_by = self._order.attempt_number and before.causes_exit and told.certain
            when = before.exit_timing if is_left_by else told.exit_timing
            nodes = told.nodes | before.nodes
            told = replace(told, exit_timing=when, received_s=before.received_s, deadline_s=first_s, nodes=nodes)
            if told.deadline_s > before.deadline_s or not told.certain:
                self._due.discard(name)
        elif not told.certain:
            self.extra.is_requested = True
        self.notices[name] = told
        if len(self.notices) > NOTICES_MAX:
            self._limit_notices(name)
        return told

    def _limit_notices(self, newest: Name) -> None:
        """Merges the newest notice with the same event heard by other nodes: none of them then counts as a node that
        stays. If there is none, the notice with the latest deadline is dropped."""
        told = self.notices[newest]
        alike = [name for name, each in self.notices.items() if name != newest and each.is_same_event(told)]
        if not alike:
            self.withdraw_notice(*max(self.notices, key=lambda each: self.notices[each].deadline_s))
            return
        kept = self.notices[alike[0]]
        until_s = min(kept.deadline_s, told.deadline_s)
        self.notices[alike[0]] = replace(kept, deadline_s=until_s, nodes=kept.nodes | told.nodes)
        self.withdraw_notice(*newest)

    def withdraw_notice(self, source: str, key: str) -> None:
        """That notice stands no longer. Ranks that were told to leave still leave."""
        self.notices.pop((source, key), None)
        self._due.discard((source, key))

    # -- queries

    def is_warned(self, now_s: float) -> bool:
        """Whether a machine is certain to go soon, or should just have gone. A notice that is days ahead (the end of an
        allocation, a maintenance) does not count yet."""
        warned_s = self._facts.save_estimate.lead_time_s + WARNED_S
        return any(
            each.exit_timing is ExitTiming.AT_ONCE or now_s >= each.deadline_s - warned_s or name in self._due
            for name, each in self.notices.items()
            if each.certain and now_s < each.deadline_s + OUTLIVES_S
        )

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to leave, or to take an extra checkpoint, by a notice whose deadline is ahead."""
        return any(self.notices[name].deadline_s > now_s for name in self._due)

    @property
    def doomed_nodes(self) -> frozenset[str]:
        """The nodes that go away by certain notices: those that are due, and those that go before they could commit the
        replicas that they hold; "" is this node."""
        first_s = min((self.notices[name].deadline_s for name in self._due), default=-math.inf)
        until_s = first_s + self._facts.save_estimate.lead_time_s
        going = [
            each for n, each in self.notices.items() if each.certain and (n in self._due or each.deadline_s <= until_s)
        ]
        return frozenset(node for each in going for node in each.nodes)

    def exit_notices(self, now_s: float) -> list[StandingNotice]:
        """The notices by which the job leaves, and whose deadline is ahead."""
        return [each for each in self.notices.values() if each.causes_exit and each.deadline_s > now_s]

    @property
    def signals(self) -> list[StandingNotice]:
        return [each for each in self.notices.values() if each.certain and each.source == SIGNAL_SOURCE]

    def deadline_s(self, now_s: float) -> float | None:
        """The earliest deadline ahead by which the job leaves; None: there is none."""
        return min((each.deadline_s for each in self.exit_notices(now_s)), default=None)

    def exit_texts(self) -> tuple[str, ...]:
        """The notices by which the job leaves, for the report."""
        return notice_texts(name for name, each in self.notices.items() if each.causes_exit)

    def exit_records(self) -> list[RecordExit]:
        """The machine notices because of which the ranks leave."""
        due = [self.notices[name] for name in sorted(self._due)]
        return [
            RecordExit(each.source, each.source_key, node)
            for each in due
            if each.exit_timing is ExitTiming.IN_TIME
            for node in sorted(each.nodes)
        ]

    def would_delay_last_snapshot(self, now_s: float) -> bool:
        """Whether committing the complete checkpoint would delay the last snapshot, which still fits, past the
        deadline."""
        deadline_s, estimate = self.deadline_s(now_s), self._facts.save_estimate
        if deadline_s is None or estimate.saving_s is None:
            return False
        return 0 <= deadline_s - now_s - estimate.expected_save_s() < estimate.saving_s

    def wake_times(self, now_s: float) -> Iterator[float]:
        """When a decision may be due without a new fact."""
        for name, each in self.notices.items():
            if each.certain and each.deadline_s > now_s:
                yield each.deadline_s
                yield each.deadline_s - self._facts.save_estimate.expected_save_s()
                due_s = self._due_from_s(each)
                if name not in self._due and due_s is not None:
                    yield due_s

    # -- decisions

    def update(self, now_s: float) -> None:
        """Finds what the notices ask for in this call of `decide`."""
        self._update_due(now_s)
        is_wanted = not all(each.causes_exit for each in self.notices.values())
        self.extra.update(self._facts.slots, self._facts.step_timing.step, is_wanted)
        self.is_time_to_leave = any((each.source, each.key) in self._due for each in self.exit_notices(now_s))

    def _update_due(self, now_s: float) -> None:
        """Finds the due notices: time to leave, or to take an extra checkpoint if the job left by that notice before.
        A notice whose deadline passed long ago is not due. While no rank leaves, nor is one that became due too early:
        saving turned out quick, or a long step ended."""
        leaves = self._order.is_given or self._order.report is not None
        early_s = 2 * self._facts.save_estimate.lead_time_s
        for name, each in self.notices.items():
            early = each.exit_timing is not ExitTiming.AT_ONCE and now_s < each.deadline_s - early_s
            if now_s >= each.deadline_s + OUTLIVES_S or (early and not leaves):
                self._due.discard(name)
            due_s = self._due_from_s(each)
            if due_s is not None and due_s <= now_s < each.deadline_s and name not in self._due:
                self._due.add(name)
                if not each.causes_exit:
                    self.extra.is_requested = True

    def _due_from_s(self, each: StandingNotice) -> float | None:
        """When it is time to leave by that notice; None: never, or not known before training starts, since the former
        start's save times may not be known until then."""
        if each.exit_timing is ExitTiming.AT_ONCE and each.certain:
            return -math.inf
        is_known = each.certain and self._facts.start_step is not None
        return each.deadline_s - self._facts.save_estimate.lead_time_s if is_known else None

    def check(self) -> None:
        """Asserts the invariants of notices."""
        assert self._due <= self.notices.keys(), "a withdrawn notice is due"
        assert len(self.notices) <= NOTICES_MAX


def notice_texts(names: Iterable[Name]) -> tuple[str, ...]:
    """The notices of those names, for the report."""
    return tuple(f"{source} {key}"[:200] for source, key in sorted(names))

"""The rules of the job's state machine, one by one. What they come to together is in test_scheduler_sim.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from ckpt.agent.preemption.notice_relay import ExitTiming, StandingNotice
from ckpt.agent.runtime.memory_plan import SLOTS_CLOSE
from ckpt.agent.scheduler.appointments import AppointmentPlanner
from ckpt.agent.scheduler.scheduler import Scheduler
from ckpt.agent.state import actions as do
from ckpt.agent.state.arenas import Arenas
from ckpt.agent.state.job_facts import MISSING_ANSWER_S, SnapshotClock
from ckpt.agent.state.rank_presence import REJOIN_S, RankState, RankStates
from ckpt.agent.state.replica_state import FOUND_INCOMPLETE, HOLDER_LOST, NO_PEER_MEMORY, SUPERSEDED, ReplicaState
from ckpt.agent.state.slots import AttemptTimes, JobSlots, SaveAttempt, SaveReason, SlotState, WorkState
from ckpt.ipc.control_page import GRADIENTS_WAIT, ControlWord, WordKind
from ckpt.placement.placement import Kept
from ckpt.policy.save_options import Every
from ckpt.types import Version

LEAVE = {"leave": True, "leave_deadline_s": 30.0}
GO_ON = {"leave": False, "leave_deadline_s": None}


def found_safe(
    group: Scheduler, version: Version | None, whole: bool = True, nodes: Iterable[str] = ("",), left: Any = ()
) -> bool:
    """The others have said what is safe. Of the nodes `left` they keep the part, if they do not of all."""
    return group.replicas.record_survey(version, [Kept(node, int(whole or node in left)) for node in nodes], whole)


def hold_snapshot(group: Scheduler, slot: int, version: Version, committed: bool) -> None:
    """That slot holds the complete checkpoint of that version."""
    found = SaveAttempt(900 + slot, slot, SaveReason.STEP, version, group.arenas.division, AttemptTimes(0.0))
    found.state, found.staged_ranks = SlotState.COMPLETE, dict.fromkeys(range(group.facts.world), 0.0)
    found.commit_state = WorkState.DONE if committed else WorkState.NEW
    group.slots[slot].attempt = found
    group.facts.levels.report(version, "local", True, "")
    if committed:
        group.facts.committed_version = max(version, group.facts.committed_version or version)
        group.facts.levels.report(version, "store", True, "")


ROUND = Every(seconds=1.0)  # the policy of RoundClock and RoundAppointments


class RoundClock(SnapshotClock):
    """A snapshot is due as soon as there is a slot. Once the job follows another policy this is a clock like others."""

    @property
    def interval_s(self) -> float:
        return 0.0 if self.policy is ROUND else super().interval_s

    def skip_due(self, now_s: float) -> None:
        if self.policy is not ROUND:
            super().skip_due(now_s)


class RoundAppointments(AppointmentPlanner):
    """Appoints a snapshot for a multiple of `every` steps: a test can say beforehand which that is."""

    every = 10

    def _next_step_version(self, now_s: float, steps: Sequence[int], is_hold: bool) -> Version:
        near = super()._next_step_version(now_s, steps, is_hold)
        slots = self._facts.slots
        if is_hold or self._preemption.extra.must_be_appointed(slots) or self._clock.policy is not ROUND:
            return near
        newest = max((attempt.version.step for attempt in slots.attempts()), default=-1)
        return Version(-(-max(near.step, newest + 1) // self.every) * self.every)


def round_steps(world: int, every: int = 10) -> Scheduler:
    """A group that has a snapshot due as soon as there is a slot, and appoints it for a multiple of `every` steps."""
    group = Scheduler(world, ROUND)
    group.clock.__class__, group.appointments.__class__ = RoundClock, RoundAppointments
    group.appointments.every = every  # type: ignore[attr-defined]
    return group


class Driver:
    """A group whose ranks are ready, and what it has said so far. Without a policy it appoints every `every` steps."""

    def __init__(
        self,
        world: int = 2,
        policy: Every | None = None,
        slots: int = 3,
        start_step: int | None = 0,
        every: int = 10,
    ) -> None:
        self.group = round_steps(world, every) if policy is None else Scheduler(world, policy)
        self.world = world
        self.now_s = 0.0
        self.steps = [0] * world
        self.said: list[do.Action] = []
        self.staged: set[int] = set()  # rounds of due saves
        for rank in range(world):
            self.group.record_join(rank)
            self.group.arenas.record_layout()
        if start_step is not None:
            self.group.appointments.record_start(start_step, 0.0)
        self.decide()
        assert self.group.arenas.record_division(world, "d", (100,) * world, slots)
        self.make_ready()

    @property
    def slots(self) -> JobSlots:
        return self.group.slots

    @property
    def arenas(self) -> Arenas:
        return self.group.arenas

    @property
    def replicas(self) -> ReplicaState:
        return self.group.replicas

    def divide(self, division: str, arena_bytes: tuple[int, ...], slots: int) -> None:
        """The layouts have changed, and are divided anew."""
        self.arenas.record_layout()
        self.decide()
        assert self.arenas.record_division(self.arenas.layouts_version, division, arena_bytes, slots)

    def place(self, *kept: Kept) -> None:
        """Others keep replicas, from now on so."""
        self.replicas.is_replication_on = True
        self.replicas.placement = kept or self.replicas.placement

    def leave(self, **how: bool) -> None:
        """All ranks ask to leave."""
        for rank in range(self.world):
            self.group.rank_states.record_leave_request(rank, ("leave", rank), **how)

    def sent(self) -> list[Version]:
        """What was to be copied so far."""
        return [action.version for action in self.said if isinstance(action, do.Replicate)]

    def decide(self) -> list[do.Action]:
        """As the agent does: until nothing is left to do now."""
        said: list[do.Action] = []
        while new := self.look():
            said += new
            assert len(said) < 1000, f"it finds something to do for ever: {new}"
        self.group.check()
        self.said += said
        return said

    def look(self) -> list[do.Action]:
        return self.group.decide(self.now_s, self.steps)

    def make_ready(self) -> None:
        """Arenas are made, and every rank is warm for what is offered."""
        while found := [a for a in self.decide() if isinstance(a, do.MakeArenas | do.OfferSlot)]:
            for action in found:
                if isinstance(action, do.MakeArenas):
                    self.group.arenas.record_arenas(action.slot, action.arena_bytes)
                else:
                    for rank in range(self.world):
                        self.group.arenas.record_warm_arena(rank, action.slot, self.group.arenas.division)

    def word(self) -> Any:
        """The newest that stands."""
        words = self.words()
        return words[-1] if words else None

    def words(self) -> list[ControlWord]:
        stand: dict[int, ControlWord] = {}
        for action in self.said:
            if isinstance(action, do.SetWord):
                stand.pop(action.slot, None)
                if action.control_word is not None:
                    stand[action.slot] = action.control_word
        return list(stand.values())

    def stage(self, number: int, version: Version, slot: int, ranks: range | None = None) -> None:
        for rank in ranks or range(self.world):
            self.group.save_attempts.record_staging(rank, number, version, slot, self.group.arenas.division, 0.0)
        self.decide()

    def complete(self, error: str = "") -> Version:
        """Takes the appointed snapshot on all ranks."""
        word = self.word()
        self.steps = [word.step] * self.world
        self.stage(word.attempt_number, Version(word.step), word.slot)
        self.group.save_attempts.record_assembly(word.slot, word.attempt_number, error)
        self.decide()
        return Version(word.step)

    def commit(self, error: str = "") -> None:
        assert self.group.slots.committing_slot is not None
        self.group.commits.record_commit(self.group.slots.committing_slot, error, self.now_s)
        self.decide()

    def copy(self, error: str = "") -> str:
        """Other nodes have what is on its way to them, or could not get it. As `Scheduler.replicated` returns."""
        return self.group.replicas.record_replication(self.group.replicas.replicating_slot or 0, error, self.now_s)

    def save(self, version: Version, why: SaveReason = SaveReason.SAVE, ranks: range | None = None) -> None:
        for rank in ranks or range(self.world):
            self.group.save_requests.record_save_request(rank, version, why, ("save", rank))
        self.decide()

    def answers(self, what: str) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for action in self.said:
            if isinstance(action, do.AnswerRequest) and action.request[0] == what:
                found[action.request[1]] = action.body
            elif isinstance(action, do.Refuse) and action.request[0] == what:
                found[action.request[1]] = action.kind
        return found

    def levels(self, level: str) -> dict[str, bool]:
        bodies = [a.body for a in self.said if isinstance(a, do.NotifyRanks) and a.body["t"] == "checkpoint-level"]
        return {body["version"]: body["ok"] for body in bodies if body["level"] == level}

    def why(self, version: Version) -> str:
        """What was said of it and other nodes' memory last, if not that it is there."""
        bodies = [a.body for a in self.said if isinstance(a, do.NotifyRanks) and a.body["t"] == "checkpoint-level"]
        return [body["message"] for body in bodies if (body["version"], body["level"]) == (str(version), "peer")][-1]


def test_steps_are_appointed_at_their_multiples_as_soon_as_a_slot_is_free() -> None:
    driver = Driver()
    assert driver.word().step == 10
    assert driver.complete() == Version(10)
    assert driver.word().step == 20


def take(driver: Driver, version: Version) -> None:
    """All ranks stage what they were told to stage at that version."""
    told = driver.answers("save")[0]
    driver.stage(told["attempt"], version, told["slot"])
    driver.group.save_attempts.record_assembly(told["slot"], told["attempt"], "")
    driver.decide()


def due(driver: Driver, version: Version) -> None:
    """All ranks ask for a step that the policy names, and stage it where they are told to."""
    driver.steps = [version.step + 1] * driver.world
    driver.save(version, SaveReason.DUE)
    while not driver.answers("save") or driver.answers("save")[0]["attempt"] in driver.staged:
        driver.commit()  # until there is a slot
    driver.staged.add(driver.answers("save")[0]["attempt"])
    take(driver, version)


def test_every_step_that_the_policy_names_is_committed_in_order() -> None:
    driver = Driver(policy=Every(steps=1))
    for step in range(1, 8):
        due(driver, Version(step))
    while driver.slots.committing_slot is not None:
        driver.commit()
    assert driver.levels("store") == {str(Version(step)): True for step in range(1, 8)}
    assert driver.words() == [], "nothing is announced"


def test_a_due_save_waits_for_a_slot_while_the_store_takes_those_before() -> None:
    driver = Driver(policy=Every(steps=1))
    for step in (1, 2):
        due(driver, Version(step))
    driver.said.clear()
    driver.save(Version(3), SaveReason.DUE)
    assert driver.answers("save") == {}
    driver.commit()
    assert driver.answers("save")[0]["saved"] is False


@pytest.mark.parametrize("what", ["store", "notice"])
def test_no_due_save_waits_for_a_store_that_fails_nor_after_a_notice(what: str) -> None:
    driver = Driver(policy=Every(steps=1))
    for step in (1, 2):
        due(driver, Version(step))
    driver.said.clear()
    driver.save(Version(3), SaveReason.DUE)
    assert driver.answers("save") == {}
    if what == "store":
        driver.commit("the store is away")
    else:
        driver.group.preemption.add_notice(StandingNotice("cloud", "1", 30.0, 0.0))
        driver.decide()
    assert driver.answers("save")[0]["saved"] is False


def test_no_due_save_waits_for_a_rank_that_is_away_for_long() -> None:
    driver = Driver(policy=Every(steps=1))
    driver.steps = [2, 2]
    driver.group.save_requests.record_save_request(0, Version(1), SaveReason.DUE, ("save", 0))
    driver.group.record_disconnect(1, driver.now_s)
    driver.decide()
    told = [action for action in driver.said if isinstance(action, do.ReportProgress)]
    assert [action.request for action in told] == [("save", 0)], "it may be back in a moment"
    driver.now_s += MISSING_ANSWER_S
    driver.decide()
    refused = [action for action in driver.said if isinstance(action, do.Refuse)]
    assert [action.request for action in refused] == [("save", 0)]
    assert "rank 1" in refused[0].message


def test_a_save_that_a_rank_has_gone_on_from_is_answered_once_it_asks_for_another() -> None:
    driver = Driver(policy=Every(steps=1))
    driver.group.save_requests.record_save_request(0, Version(1), SaveReason.DUE, ("save", 10))
    driver.group.save_requests.record_save_request(0, Version(2), SaveReason.DUE, ("save", 11))
    driver.decide()
    assert [action.request for action in driver.said if isinstance(action, do.Refuse)] == [("save", 10)]


def test_a_due_save_hears_each_second_that_it_waits() -> None:
    driver = Driver(policy=Every(steps=1))
    for step in (1, 2):
        due(driver, Version(step))
    driver.save(Version(3), SaveReason.DUE)
    driver.said.clear()
    for _ in range(10):
        driver.now_s += 0.5
        driver.decide()
    heard = [action for action in driver.said if isinstance(action, do.ReportProgress)]
    assert len(heard) == 5 * driver.world


def test_a_due_checkpoint_that_the_failing_store_passes_over_is_counted() -> None:
    driver = Driver(policy=Every(steps=1))
    due(driver, Version(1))
    driver.commit("the store is away")
    for step in (2, 3, 4):
        due(driver, Version(step))
    passed = [a.data["count"] for a in driver.said if isinstance(a, do.Emit) and a.name == "snapshot.passed"]
    assert sum(passed) == 1, "step 3, while step 2 is tried"
    assert driver.slots.newest is not None
    assert driver.slots.newest.version == Version(4)


def test_what_the_clock_passes_over_for_want_of_a_slot_is_counted() -> None:
    driver = Driver(policy=Every(seconds=10), slots=1)
    driver.now_s, driver.steps = 10.0, [100, 100]
    driver.decide()
    driver.complete()
    driver.now_s = 45.0  # due at 20, 30 and 40, and the only slot is being committed
    driver.decide()
    passed = [a.data["count"] for a in driver.said if isinstance(a, do.Emit) and a.name == "snapshot.passed"]
    assert sum(passed) == 2, "the last one may come yet"
    driver.commit()
    assert driver.word() is not None


def test_the_exit_takes_what_all_ranks_say_is_still_their_state() -> None:
    driver = Driver(policy=Every(seconds=600))
    driver.save(Version(5, 1))
    take(driver, Version(5, 1))
    driver.said.clear()
    for rank in range(2):
        driver.group.save_requests.record_save_request(
            rank, Version(5, 2), SaveReason.EXIT, ("save", rank), Version(5, 1)
        )
    driver.decide()
    assert driver.answers("save")[0] == driver.answers("save")[1]
    assert driver.answers("save")[0]["version"] == str(Version(5, 1))
    driver.commit()
    assert driver.slots.newest is not None


@pytest.mark.parametrize("other", [None, Version(5)])
def test_the_exit_takes_a_new_one_where_one_rank_has_changed(other: Version | None) -> None:
    driver = Driver(policy=Every(seconds=600))
    driver.save(Version(5, 1))
    take(driver, Version(5, 1))
    driver.said.clear()
    for rank in range(2):
        driver.group.save_requests.record_save_request(
            rank, Version(5, 2), SaveReason.EXIT, ("save", rank), Version(5, 1) if rank else other
        )
    driver.decide()
    driver.commit()
    assert driver.answers("save")[0]["saved"] is False


def test_the_first_one_is_due_at_once_where_the_policy_finds_its_interval() -> None:
    group = Scheduler(1, Every(seconds=60))
    group.clock.set_intervals(60.0, 600.0, 0.0)
    group.appointments.record_start(0, 0.0)
    assert group.clock.due_s == 0.0


@pytest.mark.parametrize("what_for", ["save", "leave", "layout"])
def test_all_that_are_appointed_are_taken_back_for_what_comes_first(what_for: str) -> None:
    driver = Driver(slots=SLOTS_CLOSE)
    driver.steps = [1, 1]
    driver.decide()
    before = {word.attempt_number for word in driver.words()}
    assert len(before) == 1
    if what_for == "save":
        driver.save(Version(0, 1))
        free = [slot for slot in driver.slots if slot.state is SlotState.FREE]
        assert driver.answers("save")[0]["saved"] is False
        assert free or not driver.words()
        return
    if what_for == "leave":
        assert hold(driver).attempt_number not in before
    else:
        driver.divide("e", (100, 100), SLOTS_CLOSE)
        driver.make_ready()
    assert not before & {word.attempt_number for word in driver.words()}


@pytest.mark.parametrize("how", ["leave", "made", "committed"])
def test_while_slots_are_made_and_the_newest_is_committed_one_is_kept_to_leave_with(how: str) -> None:
    driver = Driver(slots=2)
    driver.arenas.slot_limit = 3
    making = [action.slot for action in driver.decide() if isinstance(action, do.MakeArenas)]
    assert making == [2], "which takes its time"
    driver.complete()
    assert driver.slots.committing_slot is not None
    assert driver.word() is None, "step 20 would take the last one"
    if how == "leave":
        hold(driver)  # asserts that it is appointed
        return
    if how == "made":
        driver.arenas.record_arenas(2, (100, 100))
        driver.make_ready()
    else:
        driver.commit()
    assert driver.word().step == 20


def test_a_step_too_near_to_be_heard_of_in_time_is_not_appointed() -> None:
    driver = Driver()
    driver.complete()
    driver.steps = [19, 19]
    driver.group.save_attempts.record_miss(0, driver.word().attempt_number, "late")
    driver.decide()
    assert driver.word().step == 30


def test_seconds_are_appointed_when_due_beyond_the_fastest_rank() -> None:
    driver = Driver(policy=Every(seconds=60))
    assert driver.word() is None
    assert driver.group.next_wake_s(0.0) == 60
    driver.now_s, driver.steps = 60.0, [600, 603]
    driver.decide()
    assert driver.word().step >= 605
    assert driver.word().kind is WordKind.TAKE


def test_an_interval_whose_tick_was_missed_is_tried_again_soon_and_then_less_often() -> None:
    driver = Driver(policy=Every(seconds=600))
    driver.now_s, driver.steps = 600.0, [6, 6]
    tries = []
    while driver.now_s < 800:
        driver.decide()
        word = driver.word()
        if word is not None:
            tries.append(driver.now_s)
            driver.group.save_attempts.record_miss(1, word.attempt_number, "layout")
            driver.decide()
        driver.now_s += 1
    assert len(tries) > 4
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps == sorted(gaps)
    assert gaps[0] <= 2
    assert 16 <= gaps[-1] <= 61


def test_late_ranks_are_told_earlier_the_next_time() -> None:
    driver = Driver(world=1, policy=Every(seconds=1))
    leads = []
    for _ in range(6):
        driver.now_s += 5
        driver.steps = [int(driver.now_s * 100)]
        driver.decide()
        leads.append(driver.word().step - driver.steps[0])
        driver.group.save_attempts.record_miss(0, driver.word().attempt_number, "late")
        driver.decide()
    assert leads == sorted(leads)
    assert leads[-1] > 8 * leads[0]


def test_where_gradients_wait_only_steps_with_an_update_are_appointed() -> None:
    driver = Driver(world=2, policy=Every(seconds=1))
    appointed = []
    for _ in range(6):
        driver.now_s += 20.1
        driver.steps = [int(driver.now_s * 7)] * 2
        driver.decide()
        word = driver.word()
        appointed.append(word.step)
        driver.group.save_attempts.record_miss(0, word.attempt_number, GRADIENTS_WAIT, (3, 8))
        driver.decide()
    assert {step % 8 for step in appointed[1:]} == {3}


def test_one_missed_rank_abandons_the_tick_for_all_at_once() -> None:
    driver = Driver()
    word = driver.word()
    driver.stage(word.attempt_number, Version(10), word.slot, range(1))
    driver.group.save_attempts.record_miss(1, word.attempt_number, "not granted")
    driver.decide()
    assert driver.levels("local") == {str(Version(10)): False}
    driver.group.save_attempts.record_staging(1, word.attempt_number, Version(10), word.slot, "d", 0.0)
    driver.decide()
    assert not any(isinstance(action, do.Assemble) for action in driver.said)


def test_who_staged_what_had_just_been_withdrawn_is_told_so() -> None:
    driver = Driver()
    word = driver.word()
    driver.group.record_disconnect(1, 0.0)
    driver.decide()
    assert driver.levels("local") == {}
    driver.group.save_attempts.record_staging(0, word.attempt_number, Version(10), word.slot, "d", 0.0)
    driver.decide()
    assert driver.levels("local") == {str(Version(10)): False}


def test_a_snapshot_under_another_division_is_not_mixed_in() -> None:
    driver = Driver()
    word = driver.word()
    driver.group.save_attempts.record_staging(0, word.attempt_number, Version(10), word.slot, "d", 0.0)
    driver.group.save_attempts.record_staging(1, word.attempt_number, Version(10), word.slot, "another", 0.0)
    driver.decide()
    assert driver.levels("local") == {str(Version(10)): False}


def test_a_rank_that_is_past_a_tick_and_silent_does_not_block_the_next() -> None:
    driver = Driver()
    first = driver.word()
    driver.stage(first.attempt_number, Version(10), first.slot, range(1))
    driver.steps = [14, 14]
    driver.decide()
    assert driver.word() == first
    driver.now_s = 6.0
    assert driver.group.next_wake_s(0.0) is not None
    driver.decide()
    assert driver.word().step == 20


def test_a_rank_that_hangs_before_a_tick_is_waited_for_however_long() -> None:
    driver = Driver()
    first = driver.word()
    driver.stage(first.attempt_number, Version(10), first.slot, range(1))
    driver.now_s, driver.steps = 1e6, [10, 10]
    driver.decide()
    assert driver.word() == first


def test_while_a_commit_runs_only_the_newest_waits_and_the_others_say_that_they_do_not() -> None:
    driver = Driver()
    first = driver.complete()
    second = driver.complete()
    third = driver.complete()
    assert driver.levels("store") == {str(second): False}
    driver.commit()
    assert driver.levels("store") == {str(first): True, str(second): False}
    assert driver.slots.committing_slot is not None, "whoever waits for the newest must not wait for ever"
    driver.commit()
    assert driver.levels("store")[str(third)]
    assert driver.slots.committing_slot is None


def test_after_a_restart_the_agent_says_that_it_has_nothing_and_appoints_a_snapshot_at_once() -> None:
    driver = Driver(policy=Every(seconds=600))
    driver.now_s = 10.0
    driver.group.end_takeover(driver.now_s)
    driver.decide()
    told = [action.body for action in driver.said if isinstance(action, do.NotifyRanks)]
    assert told == [{"t": "known-versions", "versions": []}]
    assert driver.word() is not None


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_snapshots_of_a_former_agent_stay_until_a_newer_one_is_safe_where_there_are_slots(
    slots: int, copies: bool
) -> None:
    driver = Driver()
    driver.said.clear()
    group = driver.group = round_steps(2)
    for rank in range(2):
        group.record_join(rank)
        group.arenas.record_layout()
    group.replicas.is_replication_on = group.replicas.is_survey_pending = copies
    group.appointments.record_agent_restart(0.0)
    group.end_takeover(0.0, {0: Version(3), 1: Version(1), 2: Version(2)})
    driver.steps = [4, 4]
    driver.decide()
    assert group.arenas.record_division(2, "d", (100, 100), slots)
    driver.make_ready()
    left = [[], [0], [0, 2]][slots - 1]
    assert [slot.number for slot in group.slots if slot.leases] == left
    newest = driver.complete()
    driver.decide()
    assert [
        slot.number for slot in group.slots if slot.leases and slot.attempt is not group.slots.newest
    ] == left * copies
    if copies:
        found_safe(group, Version(2))
        driver.decide()
        assert sorted(group.slots.inherited_versions.values()) == [Version(2)] * (slots == 3)
        driver.copy()
        driver.decide()
        assert group.replicas.replicated_version == newest
    assert not group.slots.inherited_versions
    assert slots == 1 or any(slot.is_making_arenas for slot in group.slots)


@pytest.mark.parametrize("how", ["dead", "superseded"])
def test_they_keep_nothing_back_once_no_newer_one_can_come(how: str) -> None:
    driver = Driver()
    driver.place()
    driver.group.end_takeover(driver.now_s, {1: Version(1), 2: Version(2)})
    driver.decide()
    assert [slot.leases for slot in driver.slots[:3]] == [0, 1, 1]
    if how == "dead":
        driver.group.record_death(1)
    else:
        driver.group.supersede("a newer one")
    driver.decide()
    assert not any(slot.leases for slot in driver.slots)


def test_a_failed_commit_is_told_and_the_next_one_tried() -> None:
    driver = Driver()
    first = driver.complete()
    driver.commit("no space")
    assert driver.levels("store") == {str(first): False}
    second = driver.complete()
    driver.commit()
    assert driver.levels("store")[str(second)]
    assert driver.group.facts.last_error == ""


def test_a_save_takes_the_place_of_an_appointment_that_nobody_has_reached() -> None:
    driver = Driver(slots=1)
    appointed = driver.word()
    driver.steps = [4, 4]
    driver.save(Version(3, 1))
    assert driver.word() is None
    assert {rank: body["saved"] for rank, body in driver.answers("save").items()} == {0: False, 1: False}
    assert driver.answers("save")[0]["attempt"] != appointed.attempt_number
    assert not any(isinstance(action, do.Commit) for action in driver.said)


def test_a_save_waits_until_the_one_before_it_is_on_its_way_to_the_store() -> None:
    driver = Driver()
    driver.complete()  # its commit runs
    driver.save(Version(11, 1))
    answer = driver.answers("save")[0]
    driver.stage(answer["attempt"], Version(11, 1), answer["slot"])
    driver.group.save_attempts.record_assembly(answer["slot"], answer["attempt"], "")
    driver.said.clear()
    driver.steps = [13, 13]
    driver.save(Version(12, 1))
    assert driver.answers("save") == {}
    driver.commit()
    assert set(driver.answers("save")) == {0, 1}


def test_nothing_is_appointed_while_a_rank_waits_in_a_save() -> None:
    driver = Driver(policy=Every(seconds=5))
    driver.save(Version(0, 1), ranks=range(1))
    driver.now_s, driver.steps = 5.0, [1, 1]
    driver.decide()
    assert driver.word() is None


def test_a_rank_that_cannot_save_ends_the_save_for_all_and_for_who_comes_later() -> None:
    driver = Driver(world=3)
    driver.save(Version(4, 1), ranks=range(1))
    driver.group.save_requests.record_unsavable(1, Version(4, 1), "x is no tensor")
    driver.decide()
    assert driver.answers("save") == {0: "save-failed"}
    driver.save(Version(4, 1), ranks=range(2, 3))
    refused = [action for action in driver.said if isinstance(action, do.Refuse)]
    assert [action.kind for action in refused] == ["save-failed"] * 2
    assert all("rank 1 cannot save" in action.message and "x is no tensor" in action.message for action in refused)
    driver.save(Version(5, 1))
    driver.stage(driver.answers("save")[0]["attempt"], Version(5, 1), driver.answers("save")[0]["slot"])
    assert all(type(answer) is dict for answer in driver.answers("save").values())


def test_a_save_that_a_rank_gives_up_after_it_was_granted_is_waited_for_by_nobody() -> None:
    driver = Driver()
    driver.save(Version(4, 1))
    driver.group.save_requests.record_unsavable(1, Version(4, 1), "interrupted")
    driver.decide()
    assert "rank 1 missed it (interrupted)" in str(driver.said)
    driver.save(Version(5, 1))
    assert all(type(answer) is dict and not answer["saved"] for answer in driver.answers("save").values())


@pytest.mark.parametrize("why", [SaveReason.SAVE, SaveReason.EXIT])
def test_who_waits_in_a_save_for_a_rank_that_has_gone_on_from_a_former_one_is_told_so(why: SaveReason) -> None:
    driver = Driver()
    driver.group.save_requests.record_unsavable(1, Version(4, 1), "its agent died")
    driver.save(Version(4, 2), why, ranks=range(1))
    for driver.now_s in (0.0, 9.0):
        driver.decide()
    assert driver.answers("save") == {}, "the other may ask for it, too"
    for driver.now_s in (11.0, 12.0):
        driver.decide()
    assert driver.answers("save") == ({0: "usage"} if why is SaveReason.SAVE else {}), "at the end the others come"


def test_ranks_that_are_waited_for_in_a_save_are_named_once() -> None:
    driver = Driver(world=3)
    driver.save(Version(4, 1), ranks=range(1))
    for driver.now_s in (9.0, 11.0, 12.0, 30.0):
        driver.decide()
    named = [action for action in driver.said if isinstance(action, do.Emit) and action.name == "save.awaited"]
    assert [(action.loud, action.data) for action in named] == [
        (True, {"version": str(Version(4, 1)), "ranks": [1, 2]})
    ]
    assert "ranks [1, 2] have not come" in named[0].message


def test_a_rank_that_ends_the_block_before_the_others_is_named() -> None:
    driver = Driver()
    driver.save(Version(4), SaveReason.EXIT, range(1))
    driver.steps = [5, 6]
    driver.decide()
    (refused,) = [action for action in driver.said if isinstance(action, do.Refuse)]
    assert refused.kind == "usage"
    assert refused.message == "rank 0 ended the block after step 4, and rank 1 went past that"


def test_a_rank_that_goes_past_a_save_is_named_to_the_others() -> None:
    driver = Driver()
    driver.save(Version(3, 1), ranks=range(1))
    driver.steps = [4, 5]
    assert driver.group.next_wake_s(0.0) is not None
    driver.decide()
    assert driver.answers("save") == {0: "usage"}
    driver.group.save_requests.record_save_request(1, Version(3, 1), SaveReason.SAVE, ("save", 1))
    driver.decide()
    assert driver.answers("save") == {0: "usage", 1: "usage"}


def test_a_save_that_is_asked_for_again_gets_the_same_answer() -> None:
    driver = Driver()
    driver.save(Version(3, 1))
    first = driver.answers("save")[1]
    driver.group.save_requests.record_save_request(1, Version(3, 1), SaveReason.SAVE, ("again", 1))
    driver.decide()
    assert driver.answers("again") == {1: first}
    driver.stage(first["attempt"], Version(3, 1), first["slot"])
    driver.group.save_requests.record_save_request(1, Version(3, 1), SaveReason.SAVE, ("late", 1))
    driver.decide()
    assert driver.answers("late")[1]["saved"]


def test_an_exit_at_an_appointed_step_takes_no_second_snapshot_and_is_committed() -> None:
    driver = Driver()
    driver.complete()
    second = driver.complete()  # skips the store
    driver.save(second, SaveReason.EXIT)
    assert all(body["saved"] for body in driver.answers("save").values())
    driver.commit()
    driver.commit()
    assert driver.levels("store")[str(second)]


def test_an_exit_at_a_step_whose_snapshot_is_on_its_way_waits_for_it() -> None:
    driver = Driver()
    word = driver.word()
    driver.steps = [10, 10]
    driver.stage(word.attempt_number, Version(10), word.slot, range(1))
    driver.save(Version(10), SaveReason.EXIT)
    assert driver.answers("save") == {}
    driver.stage(word.attempt_number, Version(10), word.slot)
    assert all(body["saved"] for body in driver.answers("save").values())


def test_an_exit_does_not_wait_for_a_report_that_was_lost() -> None:
    driver = Driver()
    word = driver.word()
    driver.steps = [10, 10]
    driver.stage(word.attempt_number, Version(10), word.slot, range(1))
    driver.save(Version(10), SaveReason.EXIT)
    for _ in range(4):
        driver.now_s += 3.0
        driver.decide()
    assert {body["saved"] for body in driver.answers("save").values()} == {False}
    assert driver.answers("save")[0]["attempt"] != word.attempt_number


def test_ranks_that_come_to_their_end_at_different_ticks_of_a_step_agree_on_the_last_one() -> None:
    """One of them has seen an attempt fail, since its node's agent was started again."""
    driver = Driver()
    driver.group.save_requests.record_save_request(0, Version(7), SaveReason.EXIT, ("exit", 0))
    driver.group.save_requests.record_save_request(1, Version(7, 1), SaveReason.EXIT, ("exit", 1))
    (refusal,) = [each for each in driver.decide() if isinstance(each, do.Refuse)]
    assert (refusal.request, refusal.kind) == (("exit", 0), "not-staged")
    driver.group.save_requests.record_save_request(0, Version(7, 1), SaveReason.EXIT, ("exit", 0))
    granted = [each for each in driver.decide() if isinstance(each, do.AnswerRequest)]
    assert [each.body["saved"] for each in granted] == [False, False]


def test_with_two_slots_copies_that_keep_failing_hold_nothing_up_once_the_newest_is_in_the_store() -> None:
    """The older one is safe with others, and is kept for that, as long as there is no better."""
    driver = Driver(slots=2)
    driver.place()
    first = driver.complete()
    driver.copy()
    driver.commit()
    second = driver.complete()
    driver.copy("there is no room")
    driver.decide()
    held = [slot.attempt.version for slot in driver.slots if slot.attempt is not None]
    assert sorted(held) == [first, second]
    lost = lambda: [each.version for each in driver.said if isinstance(each, do.ReplicaDegraded)]  # noqa: E731
    assert lost() == []
    driver.commit()
    assert driver.replicas.replicated is None
    assert lost() == [first], "nobody is told any more that it is safe there"
    assert driver.replicas.replicated_version == first, "those who keep it do not drop it for attempts that fail"
    third = driver.complete()
    assert third > second


@pytest.mark.parametrize("stored", [True, False])
def test_what_is_safe_gives_way_to_copies_that_fail_again_and_again_only_once_it_is_in_the_store(stored: bool) -> None:
    """Attempts under several placements may have left more of it than memory is for: then none would ever succeed."""
    driver = Driver()
    driver.replicas.is_replication_on, kept = True, (Kept("", 1, ("b",)), Kept("b", 1, ("",)))
    driver.replicas.placement = kept
    first = driver.complete()
    driver.copy()
    driver.commit("" if stored else "the store is down")
    driver.complete()
    needed = []
    for _ in range(3):
        assert driver.replicas.replicating_slot is not None
        needed.append(driver.replicas.retained_placement)
        driver.copy("there is no room")
        driver.now_s += 100.0
        driver.decide()
    assert needed == [kept, kept, () if stored else kept]
    lost = [each.version for each in driver.said if isinstance(each, do.ReplicaDegraded)]
    assert set(lost) == ({first} if stored else set())
    driver.copy()
    assert driver.replicas.retained_placement == kept, "of what is safe now"


def test_of_what_is_found_to_be_safe_or_is_so_by_parity_it_is_not_known_what_has_to_stay() -> None:
    group, known = Driver().group, (Kept("", 1, ("b",)), Kept("b", 0))
    found, parity = (Kept("", 1), Kept("b", 0)), (Kept("", 1), Kept("b", 1))
    for kept, needed in ((known, known), (found, None), (parity, None)):
        group.replicas.replicated_version, group.replicas.replicated_placement = Version(5), kept
        assert group.replicas.retained_placement == needed


def restarted(held: Iterable[int], *kept: Kept) -> Driver:
    """The coordinator's agent was started again: its slots hold these steps, and it is not known what is safe."""
    driver = Driver(policy=Every(seconds=600))
    driver.place(*kept)
    driver.replicas.is_survey_pending = True
    for slot, step in enumerate(held):
        hold_snapshot(driver.group, slot, Version(step), False)
    return driver


def test_while_it_is_not_known_what_is_safe_elsewhere_nothing_is_dropped_and_that_is_asked_again() -> None:
    """The agent was started again. The older one may be the one that is safe, and its own memory is part of that."""
    driver = restarted([40, 50], Kept("", 1, ("other",)))
    asked = lambda: driver.sent()  # noqa: E731

    def held() -> list[int]:
        return sorted(attempt.version.step for attempt in driver.slots.attempts(SlotState.COMPLETE))

    for tries in range(1, 4):
        driver.decide()
        assert (asked(), held()) == ([Version(50)] * tries, [40, 50])
        driver.replicas.record_replication(1, "a node does not answer", driver.now_s)
        driver.decide()
        again_s = driver.group.next_wake_s(driver.now_s)
        assert again_s is not None
        driver.now_s = again_s
    found_safe(driver.group, Version(40))
    driver.decide()
    assert held() == [40, 50]
    driver.replicas.record_replication(1, "", driver.now_s)
    driver.decide()
    assert held() == [50]


def test_what_is_found_to_be_safe_keeps_its_memory_here_though_copies_of_it_fail_until_something_newer_is_safe() -> (
    None
):
    """The agent was started again, and what it was to copy first was safe already: what lies here is part of that."""
    driver = restarted([50], Kept("", 1, ("other",)))
    driver.decide()
    found_safe(driver.group, Version(50))
    driver.replicas.record_replication(0, "a link was cut", driver.now_s)
    hold_snapshot(driver.group, 1, Version(60), False)
    driver.decide()
    held = driver.replicas.replicated
    assert held is not None
    assert held.slot == 0
    assert driver.sent() == [Version(50), Version(60)]
    driver.replicas.record_replication(1, "", driver.now_s)
    driver.decide()
    assert driver.replicas.replicated is driver.slots[1].attempt


def test_what_is_found_to_be_safe_as_a_whole_is_not_undone_by_a_part_of_what_is_newer() -> None:
    """Since the agent was started again there is less memory for others than there was."""
    for whole in (True, False):
        driver = restarted([40, 50], Kept("", 1, ("other",)), Kept("other", 1, ("",)))
        driver.decide()
        driver.replicas.placement = Kept("", 0), Kept("other", 1, ("",))
        found_safe(driver.group, Version(40), whole)
        assert driver.replicas.would_reduce_protection == whole
        assert driver.replicas.survives_node_loss == whole
        if not whole:
            assert driver.replicas.record_replication(1, "", driver.now_s) == NO_PEER_MEMORY, (
                "as it was placed in the end"
            )


def test_what_is_safe_stays_though_nobody_has_memory_for_copies_any_more_until_the_store_has_something_newer() -> None:
    for slots in (2, 3):
        driver = Driver(slots=slots)
        driver.place()
        safe = driver.complete()
        driver.copy()
        driver.commit("the disk is full")
        driver.replicas.is_replication_on = False
        newer = driver.complete()
        assert sorted(each.version for each in driver.slots.attempts(SlotState.COMPLETE)) == [safe, newer]
        driver.now_s += 100.0
        driver.decide()
        driver.commit()
        driver.decide()
        assert driver.group.facts.committed_version == newer
        assert driver.replicas.replicated is None


def test_what_was_safe_leaves_its_slot_once_the_store_has_something_newer_though_ever_newer_ones_are_complete() -> None:
    """Nobody has memory for copies any more, and a commit takes longer than from one snapshot to the next."""
    driver = Driver()
    driver.place()
    safe = driver.complete()
    driver.copy()
    driver.commit()
    driver.replicas.is_replication_on = False
    driver.complete()
    driver.complete()
    assert driver.replicas.replicated is not None
    driver.commit()
    assert driver.group.facts.committed_version is not None
    assert driver.group.facts.committed_version > safe
    assert driver.slots.newest_commit_state is WorkState.RUNNING
    assert driver.replicas.replicated is None
    assert driver.word() is not None, "there is a slot for the next one"


def test_what_others_have_goes_once_nobody_has_room_any_more_and_the_store_has_something_newer() -> None:
    driver = Driver()
    gone = lambda: [each for each in driver.said if isinstance(each, do.DropReplicas)]  # noqa: E731
    driver.place()
    safe = driver.complete()
    driver.copy()
    driver.commit()
    driver.replicas.is_replication_on = False
    newer = driver.complete()
    assert (driver.replicas.replicated_version, gone()) == (safe, [])
    driver.commit("the disk is full")
    assert not gone()
    driver.now_s += 100.0
    driver.decide()
    driver.commit()
    assert driver.group.facts.committed_version == newer
    assert (driver.replicas.replicated_version, len(gone())) == (None, 1)
    newest = driver.complete()
    driver.commit()
    assert len(gone()) == 1
    driver.place()
    driver.decide()
    assert driver.sent() == [safe, newest]


def test_what_others_have_of_copies_that_failed_goes_once_nobody_has_room_any_more_and_the_store_has_it() -> None:
    """Until then it may be all that outlives this node: one of them had its part, or said too late that it has."""
    driver = Driver()
    gone = lambda: [each for each in driver.said if isinstance(each, do.DropReplicas)]  # noqa: E731
    driver.place()
    driver.complete()
    driver.replicas.is_replication_on = False
    driver.decide()
    assert not gone(), "they are on their way"
    driver.copy("a node hangs")
    driver.decide()
    assert not gone(), "the store has nothing yet"
    driver.commit()
    assert len(gone()) == 1


def test_who_was_away_when_all_copies_were_to_go_hears_that_older_ones_are_not_wanted_with_the_next() -> None:
    """Else it would keep two generations beside what is copied next, for which it may have no room."""
    driver = Driver()
    driver.place()
    driver.complete()
    driver.copy()
    safe = driver.replicas.replicated_version
    assert driver.replicas.retained_version == safe
    newest = driver.complete()
    driver.replicas.is_replication_on = False
    driver.copy("a node is away")
    while not any(isinstance(each, do.DropReplicas) for each in driver.said):
        driver.commit()
    assert (driver.replicas.replicated_version, driver.replicas.retained_version) == (None, newest)
    driver.place()
    version = driver.complete()
    assert driver.replicas.retained_version == newest
    driver.copy()
    assert driver.replicas.retained_version == version


@pytest.mark.parametrize("kept", [(Kept("", 1, ("b",)), Kept("b", 1, ("",))), (Kept("", 1), Kept("b", 1))])
def test_of_what_who_was_away_when_all_copies_were_to_go_has_still_nobody_needs_any(kept: tuple[Kept, ...]) -> None:
    """It may leave no room for the next, and then nothing comes that is safe and lets it go. Copies, and parity."""
    driver = Driver()
    driver.replicas.is_replication_on, driver.replicas.placement = True, kept
    driver.complete()
    driver.copy()
    driver.replicas.is_replication_on = False
    driver.complete()
    while driver.replicas.dropped_version is None:
        driver.commit()
    driver.place()
    driver.complete()
    assert driver.replicas.replicating_slot is not None
    assert driver.replicas.retained_placement == ()


def test_where_nothing_is_safe_and_copies_fail_again_and_again_what_is_older_than_in_the_store_goes() -> None:
    """Attempts under several placements may have left more of what failed than memory is for."""
    driver = Driver()
    driver.place()
    first = driver.complete()
    driver.commit()
    stays = []
    for _ in range(3):
        stays.append(driver.replicas.retained_version)
        driver.copy("a node is away")
        driver.now_s += 100.0
        driver.decide()
    assert (stays, driver.replicas.retained_version) == ([None, None, first], first)
    assert driver.replicas.retained_placement == ()
    assert driver.replicas.replicated_version is None, "nor is it said to be safe there"


def test_who_waits_for_copies_that_failed_as_nobody_has_room_any_more_hears_so_though_the_store_had_failed_before() -> (
    None
):
    driver = Driver()
    driver.place()
    version = driver.complete()
    driver.commit("the disk is full")
    driver.replicas.is_replication_on = False
    driver.copy("a node hangs")
    driver.decide()
    assert driver.levels("peer").get(str(version)) is None, "it is tried once more"
    driver.complete()
    assert driver.levels("peer").get(str(version)) is False


def test_who_waits_for_copies_that_nobody_had_room_for_hears_so_though_there_is_room_again() -> None:
    driver = Driver()
    driver.place()
    driver.complete()
    driver.copy()
    version = driver.complete()  # while that one is still being committed
    driver.replicas.is_replication_on = False
    driver.copy("nobody has room")
    driver.place()
    driver.complete()
    assert driver.levels("store") == {str(version): False}
    assert driver.levels("peer").get(str(version)) is False


def test_what_is_found_to_be_kept_in_part_is_not_called_safe_where_nobody_keeps_any_more() -> None:
    driver = Driver(policy=Every(seconds=600))
    driver.replicas.is_survey_pending = True
    hold_snapshot(driver.group, 0, Version(50), False)
    driver.decide()
    found_safe(driver.group, Version(50), whole=False)
    assert driver.copy() == NO_PEER_MEMORY
    driver.decide()
    assert driver.levels("peer").get(str(Version(50))) is not True
    assert not driver.replicas.survives_node_loss


def test_a_rank_that_comes_back_does_not_hear_that_what_is_saved_once_more_has_failed() -> None:
    driver = Driver()
    version = driver.complete()
    driver.commit("the disk is full")
    driver.save(version, SaveReason.EXIT)
    driver.group.record_disconnect(1, 0.0)
    driver.decide()
    driver.group.record_join(1)
    heard = [
        each
        for each in driver.group.reconnect_messages()
        if each["t"] == "checkpoint-level" and each["version"] == str(version)
    ]
    assert [each["level"] for each in heard] == ["local"]


def test_an_agent_that_is_started_again_finds_out_what_is_safe_though_nobody_has_room_any_more() -> None:
    driver = Driver(policy=Every(seconds=600))
    driver.replicas.is_survey_pending = True
    for slot, step in enumerate((40, 50)):
        hold_snapshot(driver.group, slot, Version(step), False)
    for tries in range(1, 3):
        driver.decide()
        assert driver.sent() == [Version(50)] * tries
        driver.copy("a node does not answer")
        driver.now_s += 100.0
    driver.decide()
    found_safe(driver.group, Version(40))
    driver.copy("nobody has room")
    driver.now_s += 100.0
    driver.decide()
    held = sorted(each.version for each in driver.slots.attempts(SlotState.COMPLETE))
    assert held == [Version(40), Version(50)]
    assert driver.replicas.replicated_version == Version(40)
    assert driver.levels("peer") == {str(Version(40)): True}, "of the newest the store has not said yet what it has"
    driver.commit()
    assert driver.replicas.replicated is None
    assert any(isinstance(each, do.DropReplicas) for each in driver.said)


def test_what_is_safe_stays_where_one_slot_is_all_that_can_be_had_until_the_store_has_something_newer() -> None:
    """Slots that there is no memory for any more may hold something still."""
    driver = Driver()
    driver.place()
    safe = driver.complete()
    driver.copy()
    driver.commit("the disk is full")
    newer = driver.complete()
    driver.arenas.limit_slots(1, "there is no memory")
    driver.decide()
    assert driver.replicas.replicated is not None
    driver.copy("there is no room")
    driver.decide()
    assert driver.replicas.replicated_version == safe
    assert driver.replicas.replicated is not None
    driver.commit()
    assert driver.group.facts.committed_version == newer
    assert driver.replicas.replicated is None


def test_before_it_is_known_who_keeps_what_nothing_outdoes_what_former_epochs_have_left() -> None:
    """The agent was started again: that no node is known to keep copies does not say that none is to."""
    driver = Driver(policy=Every(seconds=600))
    driver.replicas.is_survey_pending = True
    hold_snapshot(driver.group, 0, Version(50), False)
    assert not driver.replicas.supersedes_former
    driver.place()
    assert not driver.replicas.supersedes_former
    found_safe(driver.group, None)
    assert not driver.replicas.supersedes_former
    driver.decide()
    driver.replicas.record_replication(0, "", driver.now_s)
    assert driver.replicas.supersedes_former


def test_where_nobody_has_room_for_the_copies_asked_for_only_what_is_in_the_store_outdoes_what_former_epochs_left() -> (
    None
):
    """That lies on several nodes, and the newest on one each."""
    driver = Driver()
    driver.replicas.is_replication_wanted = True
    driver.complete()
    assert not driver.replicas.supersedes_former
    driver.commit()
    assert driver.replicas.supersedes_former


def closed(said: Iterable[do.Action]) -> list[int]:
    return [action.slot for action in said if isinstance(action, do.CloseArenas)]


def grown(driver: Driver, slots: int) -> None:
    """The state takes more memory, and there is some for so many slots."""
    driver.said.clear()
    driver.divide("e", (300, 300), slots)
    driver.make_ready()


def test_the_memory_of_slots_that_a_larger_state_leaves_no_room_for_goes_before_any_is_made_and_once() -> None:
    driver = Driver()
    grown(driver, 2)
    kinds = [(type(a), a.slot) for a in driver.said if isinstance(a, do.CloseArenas | do.MakeArenas)]
    assert kinds == [(do.CloseArenas, 2), (do.MakeArenas, 0), (do.MakeArenas, 1)]
    grown(driver, 2)
    assert closed(driver.said) == [], "it has gone"
    grown(driver, 3)
    assert driver.slots[2].arena_bytes == (300, 300), "it is there again"
    grown(driver, 2)
    assert closed(driver.said) == [2]


@pytest.mark.parametrize("first", ["read", "committed"])
def test_a_slot_goes_once_nothing_that_is_needed_lies_in_it(first: str) -> None:
    driver = Driver()
    driver.complete()
    driver.complete()
    assert driver.slots.newest is not None
    assert (driver.slots.newest.slot, driver.slots.committing_slot) == (1, 0)
    driver.slots.take_lease(2)
    grown(driver, 2)
    assert closed(driver.said) == [], "one holds the newest, one is on its way to the store, and one is read"
    if first == "read":
        driver.slots.release_lease(2)
        driver.decide()
    else:
        driver.commit()
    assert closed(driver.said) == [2 if first == "read" else 0]
    driver.slots.release_lease(2) if first == "committed" else driver.commit()
    driver.decide()
    assert len(closed(driver.said)) == 1, "one is enough"


def test_a_slot_that_is_being_made_goes_once_it_is_made() -> None:
    driver = Driver(slots=2)
    driver.arenas.raise_slot_limit(3)
    assert [action.slot for action in driver.decide() if isinstance(action, do.MakeArenas)] == [2]
    grown(driver, 2)
    assert closed(driver.said) == []
    driver.arenas.record_arenas(2, (100, 100))
    assert closed(driver.decide()) == [2]


def test_when_a_rank_comes_back_slots_that_it_or_its_agent_may_have_kept_are_closed_again() -> None:
    """The word was lost with the connection; or what its agent was asked to make then is there, and nobody knows."""
    driver = Driver()
    grown(driver, 2)
    driver.group.record_disconnect(1, driver.now_s)
    assert closed(driver.decide()) == []
    driver.group.record_join(1)
    driver.divide("e", (300, 300), 2)
    assert closed(driver.decide()) == [2, 3, 4]
    assert closed(driver.decide()) == []


def test_where_one_slot_cannot_be_had_those_behind_it_go() -> None:
    """They are of the smaller state, or would be all that is had of the others' memory."""
    driver = Driver()
    driver.divide("e", (300, 300), 3)
    assert [action.slot for action in driver.decide() if isinstance(action, do.MakeArenas)] == [0]
    driver.arenas.record_arenas(0, (300, 300))
    driver.decide()
    driver.arenas.limit_slots(1, "it is full")
    driver.arenas.record_arenas(1, ())
    assert sorted(closed(driver.decide())) == [1, 2]


def test_where_a_grown_state_has_one_slot_that_of_the_newest_checkpoint_is_made_anew_once_the_store_has_it() -> None:
    """There may be memory for one of the two only: nothing was saved any more."""
    driver = Driver()
    driver.complete()
    driver.commit()
    driver.complete()
    assert (driver.slots.newest.slot, driver.slots.committing_slot) == (1, 1)
    driver.divide("e", (300, 300), 1)
    driver.said.clear()
    assert closed(driver.decide()) == [0, 2]
    assert driver.slots.newest.slot == 1, "it is not in the store"
    driver.commit()
    driver.decide()
    assert [action.slot for action in driver.said if isinstance(action, do.MakeArenas)] == [1]


@pytest.mark.parametrize(("before", "slots"), [(0, (0, 1)), (2, (2, 0))])
def test_the_newest_stays_while_another_slot_than_the_only_one_that_is_in_use_has_an_older_one(
    before: int, slots: tuple[int, int]
) -> None:
    """Which would then be the newest, of which nobody tries again to put it into the store: nothing was saved any
    more."""
    driver = Driver()
    for _ in range(before):
        driver.complete()
        driver.commit()
    older = driver.complete()
    driver.place()
    driver.commit("the store is down")
    newer = driver.complete()
    driver.divide("e", (300, 300), 1)
    driver.decide()
    driver.commit()
    assert (driver.replicas.replicating_slot, driver.slots.newest.slot) == slots
    assert driver.group.facts.committed_version == newer
    driver.copy()
    driver.make_ready()
    assert not any(slot.attempt is not None and slot.attempt.version == older for slot in driver.slots)
    driver.copy()
    driver.make_ready()
    driver.complete()
    driver.commit()
    assert driver.group.facts.committed_version > newer


def test_arenas_that_are_too_large_since_the_state_has_shrunk_are_made_anew_once_nothing_needed_lies_in_them() -> None:
    """What they have more than was planned for would count as free memory for ever."""
    driver = Driver()
    driver.complete()
    assert driver.slots.newest.slot == 0
    for need, again in ((95, set()), (90, {1, 2})):
        driver.divide(f"of {need}", (need, 100), 3)
        driver.said.clear()
        driver.make_ready()
        assert {action.slot for action in driver.said if isinstance(action, do.MakeArenas)} == again
    driver.commit()
    driver.complete()
    assert {action.slot for action in driver.said if isinstance(action, do.MakeArenas)} == {0, 1, 2}


def test_slots_that_memory_was_not_there_for_come_once_it_is() -> None:
    driver = Driver(slots=0)
    assert driver.arenas.refusal_reason
    driver.arenas.raise_slot_limit(0)
    assert driver.arenas.refusal_reason
    driver.arenas.raise_slot_limit(2)
    assert (driver.arenas.slot_limit, driver.arenas.refusal_reason) == (2, "")
    driver.arenas.raise_slot_limit(1)
    assert driver.arenas.slot_limit == 2


@pytest.mark.parametrize("at", range(3))
def test_where_there_are_fewer_slots_one_goes_that_holds_nothing_and_the_others_stay(at: int) -> None:
    """What is safe may lie in any of them, and is needed until others keep something newer: they have no room for that
    before a slot has gone."""
    driver = Driver()
    driver.place()
    while driver.replicas.replicated is None or driver.replicas.replicated.slot != at:
        driver.complete()
        driver.copy()
        driver.commit()
        assert len(driver.said) < 1000
    safe = driver.replicas.replicated_version
    driver.complete()
    driver.copy("there is no room")
    driver.commit("the disk is full")
    made = [action for action in driver.said if isinstance(action, do.MakeArenas)]
    driver.arenas.limit_slots(2, "one could not be had")
    assert closed(driver.decide()) == [], "one is safe, one the newest, and one appointed"
    newest = driver.slots.newest
    assert newest is not None
    gone = newest.slot
    driver.complete()
    assert closed(driver.said) == [gone], "there is a newer one"
    assert driver.replicas.replicated_version == safe
    assert driver.replicas.replicated is not None
    driver.copy()
    for _ in range(5):
        driver.commit()
        driver.complete()
        driver.copy()
        assert {slot.number for slot in driver.slots if slot.arena_bytes} == {0, 1, 2} - {gone}
    assert closed(driver.said) == [gone], "once"
    assert [action for action in driver.said if isinstance(action, do.MakeArenas)] == made, "and none in its place"
    driver.arenas.raise_slot_limit(3)
    assert [action.slot for action in driver.decide() if isinstance(action, do.MakeArenas)] == [gone]


def test_a_slot_that_cannot_be_had_leaves_those_that_are_there_whatever_their_numbers() -> None:
    driver = Driver(policy=Every(seconds=600))
    driver.arenas.record_lost_arenas(0)
    assert [action.slot for action in driver.decide() if isinstance(action, do.MakeArenas)] == [0]
    assert driver.arenas.usable_slot_count == 2
    driver.arenas.limit_slots(2, "it is full")
    driver.arenas.record_arenas(0, ())
    assert driver.decide() == [do.CloseArenas(0)], "on other nodes it may be there"
    assert (
        driver.arenas.slot_limit,
        driver.arenas.usable_slot_count,
        driver.arenas.refusal_reason,
    ) == (2, 2, "")


def test_what_cannot_be_divided_is_refused_however_much_memory_there_comes_to_be() -> None:
    """Else whoever saves waits for ever."""
    driver = Driver(slots=1)
    driver.arenas.record_layout()
    driver.decide()
    driver.arenas.record_division_failure(driver.arenas.layouts_version, "two ranks differ")
    driver.arenas.raise_slot_limit(3)
    for rank in range(2):
        driver.group.save_requests.record_save_request(rank, Version(0, 1), SaveReason.SAVE, ("peer", rank))
    refused = [each for each in driver.decide() if isinstance(each, do.Refuse)]
    assert [each.message for each in refused] == ["two ranks differ"] * 2


def test_copies_that_failed_are_tried_again_though_no_newer_snapshot_comes() -> None:
    driver = Driver()
    driver.place()
    version = driver.complete()
    driver.copy("a link was cut")
    driver.decide()
    assert driver.replicas.replicating_slot is None
    again_s = driver.group.next_wake_s(driver.now_s)
    assert again_s is not None
    driver.now_s = 10.0
    driver.decide()
    assert driver.sent() == [version, version]


def test_what_a_node_that_comes_back_may_have_lost_is_copied_again_and_stays_what_is_safe_meanwhile() -> None:
    driver = Driver()
    driver.place()
    version = driver.complete()
    driver.copy()
    driver.commit()
    driver.group.record_disconnect(1, driver.now_s)
    driver.replicas.record_lost_holder("b", driver.replicas.peer_versions)
    driver.decide()
    made = lambda: driver.sent()  # noqa: E731
    assert made() == [version], "not while it is away"
    driver.group.record_join(1)
    driver.decide()
    assert made() == [version, version]
    held = driver.replicas.replicated
    assert held is not None
    driver.copy("a link was cut")
    driver.decide()
    assert made() == [version, version], "later"
    assert driver.replicas.replicated is held
    driver.now_s += 10.0
    driver.decide()
    assert made() == [version, version, version]
    driver.copy()
    driver.now_s += 100.0
    driver.decide()
    assert made() == [version, version, version]
    tells = [each for each in driver.said if isinstance(each, do.NotifyRanks) and each.body.get("level") == "peer"]
    assert len(tells) == 1


def test_who_waits_for_other_nodes_where_nobody_keeps_copies_hears_that_the_store_has_failed() -> None:
    """What is in the store is at that level, too; else nobody would ever say anything of it."""
    driver = Driver()
    version = driver.complete()
    driver.commit("the disk is full")
    assert driver.levels("peer") == {str(version): False}
    driver = Driver()
    first, second, third = driver.complete(), driver.complete(), driver.complete()
    driver.commit()
    driver.commit()
    assert driver.levels("store") == {str(first): True, str(second): False, str(third): True}
    assert driver.levels("peer") == {str(second): False}


def test_who_waits_for_other_nodes_that_have_no_memory_any_more_hears_so_though_the_store_had_failed_before() -> None:
    driver = Driver()
    driver.place()
    driver.complete()  # which is being copied
    version = driver.complete()
    driver.commit()
    driver.commit("the disk is full")
    driver.copy()
    driver.replicas.is_replication_on = False
    assert driver.levels("peer").get(str(version)) is None
    driver.complete()
    assert driver.levels("peer").get(str(version)) is False


@pytest.mark.parametrize("whole", [True, False])
def test_who_waits_for_what_is_found_to_be_safe_after_a_restart_hears_that_it_is(whole: bool) -> None:
    """What the former agent may have said of it is lost with that."""
    driver = restarted([40, 50])
    driver.decide()
    found_safe(driver.group, Version(40), whole)
    driver.decide()
    assert driver.levels("peer") == {str(Version(40)): whole}
    driver.copy()
    driver.decide()
    assert driver.levels("peer") == {str(Version(40)): whole, str(Version(50)): True}


def test_what_others_keep_a_part_of_only_is_not_called_safe_and_outdoes_nothing() -> None:
    """For want of memory nobody keeps what this node staged."""
    driver = Driver()
    driver.place(Kept("", 0), Kept("other", 1, ("",)))
    assert not driver.replicas.is_placement_complete
    version = driver.complete()
    driver.copy()
    driver.decide()
    assert driver.levels("peer") == {str(version): False}
    assert not driver.replicas.supersedes_former
    assert not driver.replicas.survives_node_loss
    driver.now_s += 100.0
    driver.decide()
    assert driver.sent() == [version], "there is no more to be done"
    driver.commit()
    assert driver.replicas.supersedes_former


def test_what_others_keep_as_a_whole_does_not_go_for_a_part_of_a_newer_one_until_the_store_has_that() -> None:
    """Their memory has become less meanwhile."""
    driver = Driver(slots=3)
    driver.place(Kept("", 1, ("other",)), Kept("other", 1, ("",)))
    whole = driver.complete()
    driver.copy()
    driver.replicas.placement = Kept("", 0), Kept("other", 1, ("",))
    newer = driver.complete()
    assert driver.levels("peer") == {str(whole): True, str(newer): False}
    assert driver.replicas.replicated_version == whole
    assert driver.replicas.survives_node_loss
    assert driver.sent() == [whole]
    driver.commit()
    assert driver.group.facts.committed_version == whole
    assert driver.sent() == [whole, newer]


def test_nor_does_what_they_keep_in_part_go_for_another_part_of_a_newer_one() -> None:
    driver = Driver(slots=3)
    driver.place(Kept("", 1, ("other",)), Kept("other", 0))
    part = driver.complete()
    driver.copy()
    driver.replicas.placement = Kept("", 0), Kept("other", 1, ("",))
    newer = driver.complete()
    assert (driver.replicas.replicated_version, driver.replicas.replicating_slot) == (part, None)
    driver.commit()
    assert driver.group.facts.committed_version == part
    assert driver.sent() == [part, newer]


def test_where_others_keep_copies_a_commit_that_fails_says_nothing_of_them() -> None:
    driver = Driver()
    driver.place()
    driver.complete()
    driver.commit("the disk is full")
    assert driver.levels("peer") == {}


def test_what_an_agent_that_was_lost_meanwhile_may_have_had_of_it_is_not_called_safe() -> None:
    driver = Driver()
    driver.place()
    assert not driver.replicas.peer_versions
    version = driver.complete()
    assert driver.replicas.peer_versions == [version]
    driver.replicas.record_lost_holder("b", driver.replicas.peer_versions)  # it was the first to have all that it keeps
    driver.copy()
    driver.decide()
    assert driver.replicas.replicated is None
    assert driver.levels("peer") == {str(version): False}
    driver.now_s += 10.0
    driver.decide()
    driver.copy()
    driver.decide()
    assert driver.replicas.peer_versions == [version]
    assert driver.levels("peer") == {str(version): True}


def test_what_went_with_an_agent_is_not_safe_again_since_copies_of_a_newer_one_were_begun() -> None:
    driver = Driver()
    driver.replicas.is_replication_on, driver.replicas.placement = (
        True,
        (Kept("", 1, ("b",)), Kept("b", 1, ("",))),
    )
    safe = driver.complete()
    driver.copy()
    assert driver.replicas.survives_node_loss
    driver.replicas.record_lost_holder("b", driver.replicas.peer_versions)
    newer = driver.complete()
    for version in (safe, newer):
        assert driver.replicas.peer_versions == [safe, version]
        driver.copy("a link was cut")
        assert not driver.replicas.survives_node_loss
        driver.decide()
    driver.now_s += 10.0
    driver.decide()
    driver.copy()
    assert driver.replicas.replicated_version == newer
    assert driver.replicas.survives_node_loss


def test_a_dead_rank_fails_the_waiting_saves_and_keeps_what_all_had_staged() -> None:
    driver = Driver()
    word = driver.word()
    driver.stage(word.attempt_number, Version(10), word.slot)
    driver.save(Version(11, 1), ranks=range(1))
    driver.group.record_death(1)
    driver.decide()
    assert driver.answers("save") == {0: "save-failed"}
    driver.group.save_attempts.record_assembly(word.slot, word.attempt_number, "")
    driver.decide()
    driver.commit()
    assert driver.levels("store") == {str(Version(10)): True}


def test_the_epoch_is_closed_after_the_last_commit_when_all_are_dead() -> None:
    driver = Driver()
    driver.complete()
    driver.complete()
    for rank in range(2):
        driver.group.record_death(rank)
    driver.decide()
    driver.commit()
    assert not any(isinstance(action, do.Close) for action in driver.said)
    driver.commit()
    assert [a for a in driver.said if isinstance(a, do.Close)]
    assert driver.group.facts.committed_version == Version(20)


def test_leaving_is_answered_when_what_was_under_way_has_ended() -> None:
    driver = Driver()
    driver.complete()
    driver.leave()
    driver.decide()
    assert driver.answers("leave") == {}
    driver.commit()
    assert driver.answers("leave") == {}
    driver.group.leave_requests.record_close()
    driver.decide()
    assert driver.answers("leave") == {rank: {"committed": str(Version(10)), "error": None} for rank in range(2)}


def test_what_an_agent_that_was_started_again_finds_in_the_store_counts_as_committed() -> None:
    driver = Driver(policy=Every(seconds=600))
    driver.place()
    hold_snapshot(driver.group, 0, Version(50), True)
    assert driver.replicas.supersedes_former
    assert driver.replicas.survives_node_loss
    driver.leave()
    driver.decide()
    driver.group.leave_requests.record_close()
    driver.decide()
    assert driver.answers("leave") == {rank: {"committed": str(Version(50)), "error": None} for rank in range(2)}


@pytest.mark.parametrize("stored", [True, False])
def test_who_leaves_waits_for_no_copies_once_the_store_has_the_last_step(stored: bool) -> None:
    driver = Driver()
    driver.place()
    driver.complete()
    driver.complete()
    driver.commit()
    driver.leave()
    driver.decide()
    driver.commit("" if stored else "the store is gone")
    assert driver.replicas.replicating_slot is not None, "the first one's are slow"
    assert bool([each for each in driver.said if isinstance(each, do.Close)]) == stored
    if stored:
        driver.group.leave_requests.record_close()
        driver.decide()
        assert all(body["committed"] == str(Version(20)) for body in driver.answers("leave").values())
        assert driver.group.is_at_work, "what is under way ends by itself"
    assert len(driver.answers("leave")) == (2 if stored else 0)


@pytest.mark.parametrize("in_order", [True, False])
def test_who_asked_to_leave_and_hung_up_is_not_waited_for_unless_it_insists(in_order: bool) -> None:
    driver = Driver()
    driver.complete()
    for rank in range(2):
        driver.group.rank_states.record_leave_request(rank, ("leave", rank), in_order)
    driver.decide()
    driver.commit()
    for rank in range(2):
        driver.group.record_disconnect(rank, driver.now_s)
    driver.group.leave_requests.record_close()
    driver.decide()
    assert not driver.group.rank_states.summary.waiting_to_leave
    assert not driver.answers("leave")


@pytest.mark.parametrize("how", ["asks again", "dies", "stays away"])
def test_who_lost_its_connection_after_asking_to_leave_is_answered_on_the_next_one(how: str) -> None:
    driver = Driver()
    driver.complete()
    for rank in range(2):
        driver.group.rank_states.record_leave_request(rank, ("leave", rank), insists=True)
    driver.group.record_disconnect(1, driver.now_s)
    driver.commit()
    driver.group.leave_requests.record_close()
    driver.decide()
    assert driver.answers("leave") == {0: {"committed": str(Version(10)), "error": None}}
    assert [member.rank for member in driver.group.rank_states.summary.waiting_to_leave] == [1]
    if how == "dies":
        driver.group.record_death(1)
    elif how == "stays away":
        wake_s = driver.group.next_wake_s(driver.now_s)
        assert wake_s is not None
        assert wake_s <= REJOIN_S
        driver.now_s = REJOIN_S
        driver.decide()
    else:
        assert driver.group.leave_requests.may_join(1)
        driver.group.record_join(1)
        driver.decide()
        assert [member.rank for member in driver.group.rank_states.summary.waiting_to_leave] == [1]
        driver.group.rank_states.record_leave_request(1, ("leave", "again"), insists=True)
        driver.decide()
    assert not driver.group.rank_states.summary.waiting_to_leave
    assert ("again" in driver.answers("leave")) == (how == "asks again")
    assert 1 not in driver.answers("leave"), "what it asked on the connection that is gone"


def hold(driver: Driver) -> Any:
    driver.group.preemption.add_notice(
        StandingNotice("test", "1", driver.now_s + 30, driver.now_s, exit_timing=ExitTiming.AT_ONCE)
    )
    driver.decide()
    assert driver.word().kind is WordKind.HOLD
    return driver.word()


def test_all_held_is_leave_for_all_and_for_who_asks_again() -> None:
    driver = Driver()
    word = hold(driver)
    driver.steps = [word.step] * 2
    driver.stage(word.attempt_number, Version(word.step), word.slot)
    for rank in range(2):
        assert driver.answers("rank-holds") == {}
        driver.group.exit_vote.record_hold(rank, word.attempt_number, ("rank-holds", rank))
        driver.decide()
    assert driver.answers("rank-holds") == {0: LEAVE, 1: LEAVE}
    driver.group.exit_vote.record_hold(0, word.attempt_number, ("again", 0))
    driver.decide()
    assert driver.answers("again") == {0: LEAVE}


def test_a_dead_rank_lets_the_held_ones_leave() -> None:
    driver = Driver()
    word = hold(driver)
    driver.steps = [word.step] * 2
    driver.stage(word.attempt_number, Version(word.step), word.slot, range(1))
    driver.group.exit_vote.record_hold(0, word.attempt_number, ("rank-holds", 0))
    driver.group.record_death(1)
    driver.decide()
    assert driver.answers("rank-holds") == {0: {"leave": True, "leave_deadline_s": None}}
    driver.group.exit_vote.record_hold(0, word.attempt_number, ("again", 0))
    driver.decide()
    assert driver.answers("again") == {0: {"leave": True, "leave_deadline_s": None}}


def test_a_hold_stays_in_its_only_slot_until_it_is_judged() -> None:
    driver = Driver(slots=1)
    word = hold(driver)
    driver.steps = [word.step] * 2
    driver.stage(word.attempt_number, Version(word.step), word.slot)
    driver.group.exit_vote.record_hold(0, word.attempt_number, ("rank-holds", 0))
    driver.group.save_attempts.record_assembly(word.slot, word.attempt_number, "")
    driver.decide()
    driver.commit()
    driver.divide("d", (100, 100), 1)
    driver.decide()
    driver.group.exit_vote.record_hold(1, word.attempt_number, ("rank-holds", 1))
    driver.decide()
    assert driver.answers("rank-holds") == {0: LEAVE, 1: LEAVE}


def test_a_superseded_job_decides_nothing_more() -> None:
    driver = Driver()
    driver.save(Version(3, 1), ranks=range(1))
    driver.group.supersede("00000002-x")
    driver.decide()
    assert driver.answers("save") == {0: "superseded"}
    assert driver.word() is None
    driver.now_s, driver.steps = 1e6, [99, 99]
    driver.decide()
    assert driver.word() is None


def test_what_a_superseded_job_has_is_committed_once_when_the_start_that_did_it_came_to_nothing() -> None:
    driver = Driver()
    driver.complete()
    driver.complete()  # while the first is being committed
    driver.group.supersede("00000002-x")
    driver.commit()
    driver.decide()
    assert driver.slots.committing_slot is None
    assert driver.group.commits.has_uncommitted_newest
    driver.group.commits.retry()
    driver.decide()
    driver.commit("the store does not answer")
    driver.decide()
    assert driver.slots.committing_slot is None
    assert driver.group.commits.has_uncommitted_newest
    driver.group.commits.retry()
    driver.decide()
    driver.commit()
    assert driver.group.facts.committed_version == Version(20)
    assert not driver.group.commits.has_uncommitted_newest


def test_an_outdated_plan_is_not_used() -> None:
    driver = Driver()
    driver.arenas.record_layout()
    driver.arenas.record_layout()
    driver.decide()
    assert not driver.arenas.record_division(3, "old", (100, 100), 3)
    assert driver.arenas.division == "d"
    assert isinstance(driver.decide()[-1], do.Divide)


def test_a_new_division_appoints_anew_what_was_appointed_under_the_old_one() -> None:
    driver = Driver()
    before = driver.word()
    driver.divide("e", (100, 200), 3)
    driver.make_ready()
    assert driver.word().step == before.step
    assert driver.word().attempt_number != before.attempt_number
    assert driver.slots[driver.word().slot].arena_bytes == (100, 200)


def test_a_restarted_agent_appoints_only_when_it_knows_where_the_ranks_are() -> None:
    driver = Driver()
    group = driver.group = round_steps(2)
    driver.said.clear()
    for rank in range(2):
        group.record_join(rank)
        group.arenas.record_layout()
    group.appointments.record_agent_restart(0.0)
    driver.decide()
    assert group.arenas.record_division(2, "d", (100, 100), 3)
    driver.make_ready()
    assert driver.word() is None
    driver.steps = [44, 0]
    driver.decide()
    assert driver.word() is None
    driver.steps = [44, 44]
    driver.decide()
    assert driver.word().step == 50


def test_no_memory_at_all_fails_saves_and_nothing_else() -> None:
    driver = Driver()
    driver.divide("d", (1 << 50, 1 << 50), 0)
    driver.decide()
    driver.save(Version(1, 1))
    assert set(driver.answers("save").values()) == {"save-failed"}


def test_a_rank_that_comes_back_hears_what_became_of_its_snapshots_and_of_which_nobody_knows() -> None:
    driver = Driver()
    driver.place()
    version = driver.complete()
    driver.copy()
    driver.commit()
    lost = driver.word()  # it takes that one too, and its word for it goes with the connection
    driver.group.record_disconnect(1, 0.0)
    driver.decide()
    driver.group.record_join(1)
    known, *levels = driver.group.reconnect_messages()
    assert known == {"t": "known-versions", "versions": [str(version)]}
    assert lost.step > version.step
    assert [(each["version"], each["level"], each["ok"]) for each in levels] == [
        (str(version), level, True) for level in ("local", "peer", "store")
    ]
    driver.divide("d", (100, 100), 3)
    driver.make_ready()
    newer = driver.word()
    driver.stage(newer.attempt_number, Version(newer.step), newer.slot)
    assert {str(version), str(Version(newer.step))} <= set(driver.group.reconnect_messages()[0]["versions"])
    driver.slots.is_taking_over = True  # it is another agent's that was started again
    assert driver.group.reconnect_messages() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_comes_back_is_offered_every_slot_again(rank: int) -> None:
    driver = Driver()
    driver.group.record_disconnect(rank, 0.0)
    driver.decide()
    driver.group.record_join(rank)
    driver.arenas.record_layout()
    assert driver.word() is None, "nothing is appointed while it is away"
    driver.decide()
    assert driver.arenas.record_division(3, "d", (100, 100), 3)
    offered = [action.slot for action in driver.decide() if isinstance(action, do.OfferSlot)]
    assert offered == [0, 1, 2]


def test_a_rank_that_was_away_for_long_comes_back_and_snapshots_are_taken_again() -> None:
    driver = Driver()
    driver.group.record_disconnect(1, 0.0)
    driver.now_s = REJOIN_S
    driver.decide()
    driver.save(Version(1, 1))
    assert set(driver.answers("save").values()) == {"save-failed"}
    assert driver.group.leave_requests.may_join(1)
    driver.group.record_join(1)
    driver.divide("d", (100, 100), 3)
    driver.make_ready()
    assert driver.word() is not None
    driver.complete()
    assert driver.slots.newest is not None


@pytest.mark.parametrize("how", ["closed", "died", "left"])
def test_a_rank_that_was_away_does_not_come_back_once_the_epoch_is_closed_or_it_is_gone(how: str) -> None:
    driver = Driver(world=1 if how == "closed" else 2)
    driver.group.record_disconnect(0, 0.0)
    if how == "left":
        driver.group.rank_states.record_leave_request(0, "request")
    driver.now_s = REJOIN_S
    said = driver.decide()
    if how == "closed":
        assert [action for action in said if isinstance(action, do.Close)]
    elif how == "died":
        driver.group.record_death(0)
    else:
        driver.group.rank_states[0].leave_request = None  # it has had its answer
    assert not driver.group.leave_requests.may_join(0)


# --- the pace of a learnt policy -------------------------------------------------------------------------------------


def paced(local_s: float = 10.0, store_s: float = 30.0, **given: Any) -> Driver:
    driver = Driver(policy=Every(seconds=local_s), **given)
    driver.group.clock.set_intervals(local_s, store_s, 0.0)
    return driver


def attempts(driver: Driver, count: int, every_s: float = 10.0) -> list[bool]:
    """Takes so many appointed snapshots; which of them were committed."""
    committed = []
    for _ in range(count):
        driver.now_s += every_s
        driver.make_ready()
        driver.decide()
        driver.complete()
        committed.append(driver.slots.committing_slot is not None)
        if committed[-1]:
            driver.commit()
    return committed


def test_every_so_many_appointed_snapshots_one_is_committed() -> None:
    assert attempts(paced(), 7) == [True, False, False, True, False, False, True]


def test_an_interval_that_becomes_shorter_is_kept_at_once() -> None:
    driver = paced(600.0, 600.0)
    assert driver.group.next_wake_s(0.0) == 600.0
    driver.group.clock.set_intervals(5.0, 5.0, 1.0)
    assert driver.group.next_wake_s(1.0) == 6.0


def test_what_waits_for_its_turn_is_committed_late_where_no_later_one_comes() -> None:
    driver = paced()
    assert attempts(driver, 2) == [True, False]
    driver.now_s = 40.0
    driver.group.record_disconnect(0, driver.now_s)  # no appointment any more
    driver.decide()
    assert driver.slots.committing_slot is None
    wake_s = driver.group.next_wake_s(driver.now_s)
    assert wake_s is not None
    assert wake_s == 65.0  # one that was due at 40 could be there by 45, and steps seem to take 5 s
    driver.now_s = 65.0
    driver.decide()
    assert driver.slots.committing_slot is not None


def test_a_commit_that_failed_is_tried_again_ever_later() -> None:
    driver, waits_s = paced(600.0, 600.0), []
    driver.now_s = 600.0
    driver.decide()
    driver.complete()
    for _ in range(7):
        driver.commit("down")
        driver.make_ready()
        assert driver.slots.committing_slot is None
        wake_s = driver.group.next_wake_s(driver.now_s)
        assert wake_s is not None
        waits_s.append(wake_s - driver.now_s)
        driver.now_s = wake_s
        driver.decide()
        assert driver.slots.committing_slot is not None
    assert waits_s == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    driver.commit()
    assert attempts(driver, 2, 600.0) == [True, True]


def test_where_a_commit_failed_what_was_complete_meanwhile_is_committed_soon() -> None:
    driver = paced()
    for driver.now_s in (10.0, 20.0):
        driver.make_ready()
        driver.decide()
        driver.complete()
    driver.commit("down")
    assert driver.slots.committing_slot is None
    wake_s = driver.group.next_wake_s(20.0)
    assert wake_s == 22.0
    driver.now_s = 22.0
    driver.decide()
    assert driver.slots.committing_slot is not None


def test_a_notice_whose_time_is_far_away_changes_no_interval() -> None:
    driver = paced()
    driver.group.preemption.add_notice(StandingNotice("slurm", "7", 2 * 86400.0, 0.0))
    assert attempts(driver, 7) == [True, False, False, True, False, False, True]


def test_one_that_is_uncertain_costs_one_commit_more_and_no_other_is_out_of_turn() -> None:
    driver = paced()
    assert attempts(driver, 2) == [True, False]
    driver.steps = [step + 1 for step in driver.steps]  # under way
    driver.group.preemption.add_notice(StandingNotice("x", "y", 1000.0, driver.now_s, certain=False))
    assert attempts(driver, 7) == [True, False, False, True, False, False, True]


def test_one_that_is_taken_back_before_it_cost_anything_costs_nothing() -> None:
    driver = paced()
    assert attempts(driver, 1) == [True]
    driver.steps = [step + 1 for step in driver.steps]
    driver.group.preemption.add_notice(StandingNotice("x", "y", 1000.0, driver.now_s, certain=False))
    driver.decide()
    driver.group.preemption.withdraw_notice("x", "y")
    assert attempts(driver, 2) == [False, False]


@pytest.mark.parametrize("why", ["wanted", "notice", "one slot", "dead"])
def test_nothing_waits_for_its_turn_that_somebody_needs(why: str) -> None:
    driver = paced(slots=1 if why == "one slot" else 3)
    found = attempts(driver, 2)
    if why == "one slot":
        assert found == [True, True]
        return
    assert found == [True, False]
    newest = driver.slots.newest
    assert newest is not None
    if why == "wanted":
        driver.slots.require_commit(newest.version)
    elif why == "notice":
        driver.group.preemption.add_notice(
            StandingNotice("x", "y", 1000.0, driver.now_s, exit_timing=ExitTiming.AT_ONCE)
        )
    else:
        driver.group.record_death(0)
    driver.decide()
    assert driver.slots.committing_slot == newest.slot


def test_where_an_older_one_that_somebody_waits_for_is_in_the_store_the_newest_is_tried_again() -> None:
    """With two slots nothing else could be taken for ever: the other one holds what is safe."""
    driver = paced(slots=2, store_s=1000.0)
    driver.place()
    for error in ("", "", "a node has no room"):
        attempts(driver, 1)
        driver.copy(error)
    driver.decide()
    driver.commit("the store is down")
    older, newest = driver.replicas.replicated, driver.slots.newest
    assert older is not None
    assert newest is not None
    driver.slots.require_commit(older.version)
    driver.decide()
    assert driver.slots.committing_slot == older.slot
    driver.commit()
    assert driver.slots.committing_slot == newest.slot
    driver.commit()
    assert driver.replicas.replicated is None, "its slot is there for the next one"


def test_what_could_not_be_planned_since_a_node_went_away_is_planned_once_it_is_back() -> None:
    """A save that is asked for meanwhile waits."""
    job = Driver(2)
    job.arenas.record_layout()
    job.decide()
    job.arenas.record_division_failure(
        3, "the connection to agent x has ended"
    )  # which is known before its ranks are lost
    job.group.record_disconnect(1, job.now_s)
    job.save(Version(4, 1), ranks=range(1))
    job.group.record_join(1)
    job.save(Version(4, 1), ranks=range(1, 2))
    assert job.answers("save") == {}, "it was refused"
    divide = [action for action in job.said if isinstance(action, do.Divide)][-1]
    assert job.arenas.record_division(divide.layouts_version, "e", (100,) * 2, 3)
    job.make_ready()
    assert set(job.answers("save")) == {0, 1}
    assert all(isinstance(answer, dict) for answer in job.answers("save").values())


def test_what_could_not_be_planned_of_a_former_state_refuses_no_save_of_the_present_one() -> None:
    job = Driver(2)
    job.arenas.record_layout()
    job.decide()
    job.arenas.record_division_failure(3, "no rank holds some part of it")
    job.arenas.record_layout()
    job.save(Version(4, 1))
    assert job.answers("save") == {}
    assert job.arenas.record_division(4, "e", (100,) * 2, 3)
    job.make_ready()
    assert all(isinstance(answer, dict) for answer in job.answers("save").values())
    assert len(job.answers("save")) == 2
    job.arenas.record_layout()
    job.decide()
    job.arenas.record_division_failure(5, "no rank holds some part of it")
    job.save(Version(5, 1))
    assert set(job.answers("save").values()) == {"save-failed"}


def test_what_is_found_to_be_kept_in_part_is_no_more_than_that_while_it_is_copied_anew_and_after_that_failed() -> None:
    """There is room for all of it again: it lies there once it is."""
    driver = Driver(policy=Every(seconds=600))
    group = driver.group
    group.replicas.is_survey_pending = group.replicas.is_replication_wanted = True
    driver.place(Kept("", 1, ("other",)), Kept("other", 1, ("",)))
    hold_snapshot(group, 0, Version(50), False)
    driver.decide()
    found_safe(group, Version(50), whole=False)
    assert (group.replicas.survives_node_loss, group.replicas.supersedes_former) == (False, False)
    driver.copy("a link was cut")
    driver.decide()
    assert (group.replicas.survives_node_loss, group.replicas.supersedes_former) == (False, False)
    driver.now_s += 100.0
    driver.decide()
    driver.copy()
    assert (group.replicas.survives_node_loss, group.replicas.supersedes_former) == (True, True)


def test_what_an_agent_had_of_copies_under_way_says_nothing_of_what_is_safe_without_it() -> None:
    """Else a part of something newer would take the place of the whole."""
    driver = Driver()
    group = driver.group
    driver.place(Kept("", 1, ("b",)), Kept("b", 1, ("",)))
    safe = driver.complete()
    driver.copy()
    group.replicas.placement = Kept("", 1, ("lender",)), Kept("b", 1, ("",))
    newer = driver.complete()
    group.replicas.record_lost_holder("lender", [newer])
    group.replicas.placement = Kept("", 0), Kept("b", 1, ("",))
    driver.copy()
    driver.now_s += 10.0
    driver.decide()
    assert group.replicas.replicating_slot is None
    assert (group.replicas.replicated_version, group.replicas.survives_node_loss) == (safe, True)


def test_who_waits_for_copies_that_came_to_be_in_part_hears_so_though_nobody_has_room_any_more_just_then() -> None:
    driver = Driver()
    driver.place(Kept("", 0), Kept("b", 1, ("",)))
    version = driver.complete()
    driver.replicas.is_replication_on = False
    assert driver.copy() == NO_PEER_MEMORY
    driver.place()
    driver.commit("the disk is full")
    driver.complete()
    driver.copy()
    driver.decide()
    assert version not in [slot.attempt.version for slot in driver.slots if slot.attempt is not None]
    assert driver.levels("peer").get(str(version)) is False


@pytest.mark.parametrize("part", [False, True])
def test_who_saves_what_had_failed_to_be_copied_hears_what_comes_of_its_copies_then(part: bool) -> None:
    """It waits anew, and what failed before says nothing any more. Of what others keep a part of no more comes."""
    driver = Driver()
    driver.place(Kept("", int(not part), ("b",)), Kept("b", 1, ("",)))
    version = driver.complete()
    driver.copy("" if part else "a link was cut")
    driver.decide()
    assert driver.levels("peer") == {str(version): False}
    told = len(driver.said)
    driver.save(version, SaveReason.EXIT)
    if not part:
        driver.copy()
    driver.decide()
    driver.said = driver.said[told:]
    assert driver.levels("peer") == {str(version): not part}


def test_what_others_keep_in_part_is_copied_again_once_one_is_there_that_has_memory_for_the_rest() -> None:
    """A memory-only node was away: its next snapshot may be far off. Who waits hears that it is whole then."""
    driver = Driver()
    group = driver.group
    driver.place(Kept("", 0), Kept("b", 1, ("",)))
    version = driver.complete()
    assert driver.copy() == NO_PEER_MEMORY
    driver.decide()
    assert (group.replicas.replicating_slot, driver.levels("peer")) == (None, {str(version): False}), (
        "there is no more to be had"
    )
    group.replicas.placement = Kept("", 1, ("l",)), Kept("b", 0)
    driver.decide()
    assert group.replicas.replicating_slot is None, (
        "a newer one in part could not take the place of what it would be then"
    )
    group.replicas.placement = Kept("", 1, ("l",)), Kept("b", 1, ("",))
    group.record_disconnect(1, driver.now_s)
    driver.decide()
    assert group.replicas.replicating_slot is None, "a node is away"
    group.record_join(1)
    driver.decide()
    driver.copy("a link was cut")
    driver.decide()
    assert (group.replicas.replicating_slot, group.replicas.survives_node_loss) == (None, False), "not at once"
    driver.now_s += 10.0
    driver.decide()
    assert driver.copy() == ""
    driver.decide()
    assert (group.replicas.replicating_slot, group.replicas.survives_node_loss, driver.levels("peer")) == (
        None,
        True,
        {str(version): True},
    )
    group.replicas.placement = Kept("", 1, ("l",)), Kept("b", 2, ("", "l"))
    driver.decide()
    assert group.replicas.replicating_slot is not None, "nor has it as many copies as were asked for"
    driver.copy()
    driver.decide()
    assert group.replicas.replicating_slot is None


def test_what_is_older_than_what_is_safe_is_not_copied_again_and_again_since_others_would_keep_more_of_that() -> None:
    """What is safe lies in no slot, since another agent led, and the store has it."""
    driver = Driver()
    group = driver.group
    driver.place(Kept("", 1, ("b",)), Kept("b", 1, ("",)))
    group.replicas.is_survey_pending, group.facts.committed_version = True, Version(40)
    driver.complete()
    found_safe(group, Version(40), False, ["", "b"], ["b"])
    driver.copy()
    driver.decide()
    assert (group.replicas.replicated_version, group.replicas.replicating_slot) == (Version(40), None)


def test_what_is_found_to_be_safe_is_asked_for_once_it_is_known_who_is_to_keep_how_much() -> None:
    """How many nodes are to be lost without harm follows from that."""
    group = Scheduler(1, Every(seconds=600))
    group.appointments.record_agent_restart(0.0)
    group.record_join(0)
    group.arenas.record_layout()
    group.replicas.is_survey_pending = True
    hold_snapshot(group, 0, Version(50), False)
    asked = lambda: any(isinstance(each, do.Replicate) for each in group.decide(1.0, [50]))  # noqa: E731
    assert not asked()
    group.arenas.record_division(1, "d", (100,), 3)
    assert asked()


def test_what_is_found_to_be_safe_as_a_whole_is_not_undone_by_a_part_though_none_of_it_is_in_a_slot() -> None:
    """A link was cut while it was looked for what lies there."""
    driver = restarted([50], Kept("", 0), Kept("other", 1, ("",)))
    group = driver.group
    driver.decide()
    found_safe(group, Version(40))
    assert group.replicas.would_reduce_protection
    group.facts.committed_version = Version(50)
    assert not group.replicas.would_reduce_protection, "the store has something newer"


def safe_by(*kept: Kept, lost: str = "b") -> tuple[Driver, Version]:
    """One that is safe so; then the agents of these nodes are lost."""
    driver = Driver()
    group = driver.group
    group.replicas.is_replication_on, group.replicas.placement = True, kept
    safe = driver.complete()
    driver.copy()
    for name in lost:
        group.replicas.record_lost_holder(name, group.replicas.peer_versions)
    return driver, safe


@pytest.mark.parametrize("whole", [True, False])
def test_a_part_of_a_newer_one_does_not_take_the_place_of_what_may_be_there_as_a_whole_before_that_is_asked(
    whole: bool,
) -> None:
    """The connection was lost to an agent that keeps some of it, and maybe no more than that."""
    driver, safe = safe_by(Kept("", 1, ("b",)), Kept("b", 1, ("",)))
    group = driver.group
    group.replicas.placement = Kept("", 0), Kept("b", 1, ("",))
    newer = driver.complete()
    assert (group.replicas.replicating_slot is not None, group.replicas.is_survey_pending) == (True, True)
    driver.copy("a node has not said what it has")
    assert (group.replicas.is_survey_pending, group.replicas.survives_node_loss) == (True, False)
    driver.now_s += 10.0
    driver.decide()
    found_safe(group, safe, whole)
    assert (group.replicas.would_reduce_protection, group.replicas.survives_node_loss) == (whole, whole)
    driver.copy(NO_PEER_MEMORY if whole else "")
    driver.decide()
    assert group.replicas.replicated_version == (safe if whole else newer)
    assert not group.replicas.is_survey_pending


@pytest.mark.parametrize(("left", "goes"), [({"b"}, False), ({"c"}, True), (set(), True)])
def test_what_is_left_of_what_was_safe_as_a_whole_does_not_go_for_something_newer_that_is_lost_sooner(
    left: set[str], goes: bool
) -> None:
    """Of the nodes `left` others keep the part still; of b's nobody has memory for anything newer."""
    driver, safe = safe_by(Kept("", 1, ("b",)), Kept("b", 1, ("c",)), Kept("c", 1, ("",)), lost="bc")
    group = driver.group
    group.replicas.placement = Kept("", 1, ("b",)), Kept("b", 0), Kept("c", 1, ("",))
    newer = driver.complete()
    driver.copy("a node has not said what it has")
    driver.now_s += 10.0
    driver.decide()
    assert (group.replicas.replicating_slot is not None, group.replicas.is_survey_pending) == (True, True)
    found_safe(group, safe, False, ["", "b", "c"], left)
    assert (group.replicas.would_reduce_protection, group.replicas.survives_node_loss) == (not goes, False)
    driver.copy("" if goes else NO_PEER_MEMORY)
    driver.decide()
    assert (group.replicas.replicated_version, group.replicas.is_survey_pending) == (newer if goes else safe, False)
    if not goes:
        assert group.replicas.replicating_slot is None
        group.replicas.record_lost_holder("", group.replicas.peer_versions)
        driver.now_s += 10.0
        driver.decide()
        assert (group.replicas.replicating_slot is not None, group.replicas.is_survey_pending) == (True, True), (
            "it is asked again what is left"
        )
        found_safe(group, safe, False, ["", "b", "c"])
        assert not group.replicas.would_reduce_protection


def test_what_is_left_of_what_was_safe_as_a_whole_is_copied_again_itself_and_does_not_go_then_either() -> None:
    driver, safe = safe_by(Kept("", 1, ("b",)), Kept("b", 1, ("",)))
    group = driver.group
    group.replicas.placement = Kept("", 1, ("b",)), Kept("b", 0)
    driver.decide()
    assert (group.replicas.replicating_slot is not None, group.replicas.is_survey_pending) == (True, False), (
        "b's part is here"
    )
    assert driver.copy() == ""
    assert group.replicas.survives_node_loss
    driver.complete()
    assert (
        group.replicas.would_reduce_protection,
        group.replicas.replicating_slot,
        group.replicas.replicated_version,
    ) == (True, None, safe)


def test_what_is_found_to_be_kept_in_part_keeps_that_part_where_the_rest_of_it_is_copied() -> None:
    driver = restarted([50], Kept("", 1, ("b",)), Kept("b", 0))
    group = driver.group
    driver.decide()
    found_safe(group, Version(50), False, ["", "b"], ["b"])
    assert (group.replicas.would_reduce_protection, group.replicas.survives_node_loss) == (False, False)
    assert driver.copy() == ""
    assert (group.replicas.replicated_version, group.replicas.survives_node_loss) == (Version(50), True)


def test_before_what_is_safe_is_copied_again_in_part_it_is_asked_what_is_left_of_it() -> None:
    """A node that is not connected may have the rest still."""
    driver, safe = safe_by(Kept("", 1, ("b",)), Kept("b", 1, ("",)))
    group = driver.group
    group.replicas.placement = Kept("", 0), Kept("b", 1, ("",))
    driver.decide()
    assert (group.replicas.replicating_slot is not None, group.replicas.is_survey_pending) == (True, True)
    found_safe(group, safe, True, ["", "b"])
    driver.copy()
    assert group.replicas.survives_node_loss


def test_it_is_asked_again_what_is_left_though_something_newer_would_undo_what_is_known_to_be() -> None:
    """Until that is known no slot is free: with the store down the job would stand still."""
    driver, safe = safe_by(Kept("", 1, ("b",)), Kept("b", 1, ("c",)), Kept("c", 1, ("",)))
    group = driver.group
    group.replicas.placement = Kept("", 0), Kept("b", 1, ("c",)), Kept("c", 0)
    driver.decide()
    assert (group.replicas.replicating_slot is not None, group.replicas.is_survey_pending) == (True, True)
    driver.copy("a node has not said what it has")
    newer = driver.complete()
    assert (group.replicas.replicating_slot is not None, group.replicas.would_reduce_protection) == (True, True)
    found_safe(group, safe, False, ["", "b", "c"], ["b", "c"])
    driver.copy(NO_PEER_MEMORY)
    driver.decide()
    for _ in range(3):
        newest = driver.complete()
    assert {each.version for each in group.slots.attempts(SlotState.COMPLETE)} == {safe, newest}
    assert driver.levels("peer")[str(newer)] is False


@pytest.mark.parametrize("whole", [True, False])
def test_parity_of_what_is_safe_is_not_made_anew_where_that_outlives_less_since_the_former_goes_then(
    whole: bool,
) -> None:
    """Of nodes in pairs one is lost for a while, and then there is memory for the parity of two others only."""
    driver, safe = safe_by(*(Kept(node, 1) for node in ("", "b", "c", "d")))
    group = driver.group
    group.replicas.placement = Kept("", 1), Kept("b", 0), Kept("c", 1), Kept("d", 0)
    driver.decide()
    assert (group.replicas.replicating_slot, group.replicas.is_survey_pending) == (None, False), (
        "b may be lost, for certain"
    )
    assert driver.levels("peer") == {str(safe): True}
    group.replicas.placement = Kept("", 0), Kept("b", 1), Kept("c", 1), Kept("d", 0)
    driver.decide()
    assert (group.replicas.replicating_slot is not None, group.replicas.is_survey_pending) == (True, True)
    found_safe(group, safe, whole, ["", "b", "c", "d"], ["b", "c", "d"])
    assert group.replicas.would_reduce_protection
    assert driver.copy() == ("" if whole else NO_PEER_MEMORY), "it stays as it was found"
    driver.decide()
    assert (group.replicas.replicated_version, group.replicas.survives_node_loss, group.replicas.replicating_slot) == (
        safe,
        whole,
        None,
    )
    newer = driver.complete()
    assert (group.replicas.replicated_version, group.replicas.replicating_slot) == (safe, None)
    group.replicas.placement = tuple(Kept(node, 1) for node in ("", "b", "c", "d"))
    driver.decide()
    assert driver.copy() == ""
    assert (group.replicas.replicated_version, group.replicas.survives_node_loss) == (newer, True)


@pytest.mark.parametrize("whole", [True, False])
def test_who_waits_for_what_is_found_to_be_safe_by_parity_hears_so_though_less_of_it_could_be_made_now(
    whole: bool,
) -> None:
    driver = restarted([50], Kept("", 1), Kept("b", 0))
    group = driver.group
    driver.decide()
    found_safe(group, Version(50), whole, ["", "b"], ["b"])
    assert group.replicas.would_reduce_protection
    driver.copy()
    driver.decide()
    assert driver.levels("peer") == {str(Version(50)): whole}
    assert group.replicas.survives_node_loss is whole


def test_nor_does_what_has_taken_its_place_since_and_outlives_the_same_nodes() -> None:
    driver = Driver()
    group = driver.group
    group.replicas.is_replication_on = group.replicas.is_survey_pending = True
    group.replicas.placement = Kept("", 1, ("b",)), Kept("b", 0)
    driver.complete()
    found_safe(group, Version(5), False, ["", "b"], [""])
    driver.copy()
    group.replicas.placement = Kept("", 0), Kept("b", 1, ("",))
    driver.complete()
    assert (
        group.replicas.would_reduce_protection,
        group.replicas.replicating_slot,
        group.replicas.replicated_version,
    ) == (
        True,
        None,
        Version(10),
    )


def test_what_an_agent_has_said_that_was_lost_before_all_others_had_does_not_make_it_whole() -> None:
    driver, safe = safe_by(Kept("", 1, ("b",)), Kept("b", 1, ("",)))
    group = driver.group
    group.replicas.placement = Kept("", 0), Kept("b", 1, ("",))
    driver.complete()
    group.replicas.record_lost_holder("b", [])
    found_safe(group, safe)
    assert not group.replicas.survives_node_loss


def asked_while_a_newer_one_waits() -> tuple[Driver, Scheduler, Version]:
    """It is asked what is safe: the version lies in a slot, and a newer one is on its way."""
    driver = Driver()
    group = driver.group
    safe, _ = driver.complete(), driver.complete()
    group.replicas.is_replication_on = group.replicas.is_survey_pending = True
    group.replicas.placement = Kept("", 1, ("b",)), Kept("b", 1, ("",))
    driver.decide()
    return driver, group, safe


@pytest.mark.parametrize("lost", [False, True])
def test_nor_is_it_told_to_be_safe(lost: bool) -> None:
    driver, group, safe = asked_while_a_newer_one_waits()
    if lost:
        group.replicas.record_lost_holder("b", [])
    assert found_safe(group, safe) is not lost
    driver.decide()
    assert driver.levels("peer") == {str(safe): not lost}
    assert driver.why(safe) == (HOLDER_LOST if lost else "")


def test_of_what_is_found_in_part_it_is_not_said_that_there_is_no_memory_for_it() -> None:
    driver, group, safe = asked_while_a_newer_one_waits()
    found_safe(group, safe, False, ["", "b"], ["b"])
    driver.decide()
    assert driver.why(safe) == FOUND_INCOMPLETE


def test_what_is_older_than_what_is_found_to_be_safe_is_not_copied_any_more() -> None:
    """It would be told to be safe, and its slot be used again. The newer one was complete while that was asked."""
    driver = Driver()
    group = driver.group
    group.replicas.is_replication_on = group.replicas.is_survey_pending = True
    group.replicas.placement = Kept("", 1, ("b",)), Kept("b", 1, ("",))
    driver.complete()
    safe = driver.complete()
    found_safe(group, safe, False, ["", "b"], ["b"])
    assert group.replicas.would_reduce_protection
    assert group.replicas.why_not_replicated(Version(10)) == SUPERSEDED
    assert driver.copy(SUPERSEDED) == SUPERSEDED
    driver.decide()
    assert not group.replicas.would_reduce_protection
    assert (group.replicas.replicating_slot, group.replicas.replicated_version) == (None, safe)
    assert driver.levels("peer")[str(Version(10))] is False


class CountedRanks(RankStates):
    """How often all of them were gone through."""

    passes = 0

    def __iter__(self) -> Iterator[RankState]:
        self.passes += 1
        return super().__iter__()


def test_a_decision_that_follows_one_ranks_word_goes_through_no_others() -> None:
    """There may be thousands of ranks, and a decision follows each word of each of them."""
    world = 50
    driver = Driver(world)
    driver.group.rank_states.__class__ = CountedRanks
    word = driver.word()
    driver.steps = [word.step] * world
    for rank in range(world):
        driver.stage(word.attempt_number, Version(word.step), word.slot, range(rank, rank + 1))
    assert driver.slots[word.slot].state is SlotState.STAGED
    ranks = driver.group.rank_states
    assert isinstance(ranks, CountedRanks)
    assert ranks.passes == 0

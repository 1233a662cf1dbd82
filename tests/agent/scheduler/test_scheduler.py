"""The rules of the job's state machine, one by one. What they come to together is in test_scheduler_sim.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from ckpt.agent.preemption.notice_relay import ExitTiming, StandingNotice
from ckpt.agent.scheduler.appointments import AppointmentPlanner
from ckpt.agent.scheduler.scheduler import Scheduler
from ckpt.agent.state import actions as do
from ckpt.agent.state.arenas import Arenas
from ckpt.agent.state.job_facts import MISSING_ANSWER_S, SnapshotClock
from ckpt.agent.state.rank_presence import REJOIN_S, RankState, RankStates
from ckpt.agent.state.replica_state import FOUND_INCOMPLETE, HOLDER_LOST, NO_PEER_MEMORY, SUPERSEDED, ReplicaState
from ckpt.agent.state.slots import AttemptTimes, JobSlots, SaveAttempt, SaveReason, SlotState
from ckpt.ipc.control_page import GRADIENTS_WAIT, ControlWord, WordKind
from ckpt.placement.placement import Kept
from ckpt.policy.save_options import Every
from ckpt.types import Version


def found_safe(
    group: Scheduler, version: Version | None, whole: bool = True, nodes: Iterable[str] = ("",), left: Any = ()
) -> bool:
    """The others have said what is safe. Of the nodes `left` they keep the part, if they do not of all."""
    return group.replicas.record_survey(version, [Kept(node, int(whole or node in left)) for node in nodes], whole)


def hold_snapshot(group: Scheduler, slot: int, version: Version) -> None:
    """That slot holds the complete checkpoint of that version."""
    found = SaveAttempt(900 + slot, slot, SaveReason.STEP, version, group.arenas.division, AttemptTimes(0.0))
    found.state, found.staged_ranks = SlotState.COMPLETE, dict.fromkeys(range(group.facts.world), 0.0)
    group.slots[slot].attempt = found
    group.facts.levels.report(version, "local", True, "")


A = TypeVar("A", bound=do.Action)
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
        self._join()
        if start_step is not None:
            self.group.appointments.record_start(start_step, 0.0)
        self.decide()
        assert self.group.arenas.record_division(world, "d", (100,) * world, slots)
        self.make_ready()

    def _join(self) -> None:
        for rank in range(self.world):
            self.group.record_join(rank)
            self.group.arenas.record_layout()

    def restart_agent(self) -> Scheduler:
        """The next agent's group, to which the ranks have come. It has divided nothing yet."""
        self.said.clear()
        self.group = round_steps(self.world)
        self._join()
        self.group.appointments.record_agent_restart(0.0)
        return self.group

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

    def close(self) -> None:
        """The epoch has been closed."""
        self.group.leave_requests.record_close()
        self.decide()

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.decide()

    @property
    def wake_s(self) -> float:
        """When it has to decide again at the latest."""
        at_s = self.group.next_wake_s(self.now_s)
        assert at_s is not None
        return at_s

    def all_of(self, kind: type[A]) -> list[A]:
        """The actions of that kind so far."""
        return [action for action in self.said if isinstance(action, kind)]

    def sent(self) -> list[Version]:
        """What was to be copied so far."""
        return [action.version for action in self.all_of(do.Replicate)]

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

    def assemble(self, slot: int, number: int, error: str = "") -> None:
        self.group.save_attempts.record_assembly(slot, number, error)
        self.decide()

    def complete(self, error: str = "") -> Version:
        """Takes the appointed snapshot on all ranks."""
        word = self.word()
        self.steps = [word.step] * self.world
        self.stage(word.attempt_number, Version(word.step), word.slot)
        self.assemble(word.slot, word.attempt_number, error)
        return Version(word.step)

    def take_saved(self, version: Version) -> dict[str, Any]:
        """All ranks stage what they were told to stage at that version. Returns what they were told."""
        told: dict[str, Any] = self.answers("save")[0]
        self.stage(told["attempt"], version, told["slot"])
        self.assemble(told["slot"], told["attempt"])
        return told

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

    def messages(self, level: str) -> list[dict[str, Any]]:
        """What the ranks were told of that level."""
        bodies = [a.body for a in self.all_of(do.NotifyRanks)]
        return [body for body in bodies if body["t"] == "checkpoint-level" and body["level"] == level]

    def levels(self, level: str) -> dict[str, bool]:
        return {body["version"]: body["ok"] for body in self.messages(level)}


def due(driver: Driver, version: Version) -> None:
    """All ranks ask for a step that the policy names, and stage it where they are told to."""
    driver.steps = [version.step + 1] * driver.world
    driver.save(version, SaveReason.DUE)
    while not driver.answers("save") or driver.answers("save")[0]["attempt"] in driver.staged:
        driver.commit()  # until there is a slot
    driver.staged.add(driver.answers("save")[0]["attempt"])
    driver.take_saved(version)


def test_every_step_that_the_policy_names_is_committed_in_order() -> None:
    driver = Driver(policy=Every(steps=1))
    for step in range(1, 8):
        due(driver, Version(step))
    while driver.slots.committing_slot is not None:
        driver.commit()
    assert driver.levels("store") == {str(Version(step)): True for step in range(1, 8)}
    assert driver.words() == [], "nothing is announced"


@pytest.mark.parametrize("what", ["stored", "store fails", "notice"])
def test_a_due_save_waits_for_a_slot_while_the_store_takes_those_before_and_nobody_is_about_to_leave(what: str) -> None:
    driver = Driver(policy=Every(steps=1))
    for step in (1, 2):
        due(driver, Version(step))
    driver.said.clear()
    driver.save(Version(3), SaveReason.DUE)
    assert driver.answers("save") == {}
    if what == "notice":
        driver.group.preemption.add_notice(StandingNotice("cloud", "1", 30.0, 0.0))
        driver.decide()
    else:
        driver.commit("" if what == "stored" else "the store is away")
    assert driver.answers("save")[0]["saved"] is False


def test_no_due_save_waits_for_a_rank_that_is_away_for_long() -> None:
    driver = Driver(policy=Every(steps=1))
    driver.steps = [2, 2]
    driver.group.save_requests.record_save_request(0, Version(1), SaveReason.DUE, ("save", 0))
    driver.group.record_disconnect(1, driver.now_s)
    driver.decide()
    assert [action.request for action in driver.all_of(do.ReportProgress)] == [("save", 0)], (
        "it may be back in a moment"
    )
    driver.wait(MISSING_ANSWER_S)
    refused = driver.all_of(do.Refuse)
    assert [action.request for action in refused] == [("save", 0)]
    assert "rank 1" in refused[0].message


def test_a_save_that_a_rank_has_gone_on_from_is_answered_once_it_asks_for_another() -> None:
    driver = Driver(policy=Every(steps=1))
    driver.group.save_requests.record_save_request(0, Version(1), SaveReason.DUE, ("save", 10))
    driver.group.save_requests.record_save_request(0, Version(2), SaveReason.DUE, ("save", 11))
    driver.decide()
    assert [action.request for action in driver.all_of(do.Refuse)] == [("save", 10)]


def test_a_due_save_hears_each_second_that_it_waits() -> None:
    driver = Driver(policy=Every(steps=1))
    for step in (1, 2):
        due(driver, Version(step))
    driver.save(Version(3), SaveReason.DUE)
    driver.said.clear()
    for _ in range(10):
        driver.wait(0.5)
    assert len(driver.all_of(do.ReportProgress)) == 5 * driver.world


def test_a_due_checkpoint_that_the_failing_store_passes_over_is_counted() -> None:
    driver = Driver(policy=Every(steps=1))
    due(driver, Version(1))
    driver.commit("the store is away")
    for step in (2, 3, 4):
        due(driver, Version(step))
    passed = [a.data["count"] for a in driver.all_of(do.Emit) if a.name == "snapshot.passed"]
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
    passed = [a.data["count"] for a in driver.all_of(do.Emit) if a.name == "snapshot.passed"]
    assert sum(passed) == 2, "the last one may come yet"
    driver.commit()
    assert driver.word() is not None


@pytest.mark.parametrize("of_rank_0", [Version(5, 1), Version(5), None])
def test_the_exit_takes_what_all_ranks_say_is_still_their_state_and_else_a_new_one(of_rank_0: Version | None) -> None:
    driver = Driver(policy=Every(seconds=600))
    driver.save(Version(5, 1))
    driver.take_saved(Version(5, 1))
    driver.said.clear()
    for rank, same in enumerate((of_rank_0, Version(5, 1))):
        driver.group.save_requests.record_save_request(rank, Version(5, 2), SaveReason.EXIT, ("save", rank), same)
    driver.decide()
    driver.commit()
    first, second = driver.answers("save").values()
    assert first == second
    assert first["saved"] is (of_rank_0 == Version(5, 1))
    assert first.get("version") == (str(Version(5, 1)) if first["saved"] else None)


def test_the_first_one_is_due_at_once_where_the_policy_finds_its_interval() -> None:
    group = Scheduler(1, Every(seconds=60))
    group.clock.set_intervals(60.0, 600.0, 0.0)
    group.appointments.record_start(0, 0.0)
    assert group.clock.due_s == 0.0


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


def test_a_silent_rank_is_waited_for_at_a_tick_however_long_and_not_once_it_is_past_that() -> None:
    driver = Driver()
    first = driver.word()
    driver.stage(first.attempt_number, Version(10), first.slot, range(1))
    for driver.now_s, step in ((1e6, 10), (1e6, 12)):
        driver.steps = [step, step]
        driver.decide()
        assert driver.word() == first
    assert driver.group.next_wake_s(driver.now_s) is not None
    driver.steps = [13, 13]
    driver.decide()
    assert driver.word().step == 20


def test_after_a_restart_the_agent_says_that_it_has_nothing_and_appoints_a_snapshot_at_once() -> None:
    driver = Driver(policy=Every(seconds=600))
    driver.now_s = 10.0
    driver.group.end_takeover(driver.now_s)
    driver.decide()
    told = [action.body for action in driver.all_of(do.NotifyRanks)]
    assert told == [{"t": "known-versions", "versions": []}]
    assert driver.word() is not None


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_snapshots_of_a_former_agent_stay_until_a_newer_one_is_safe_where_there_are_slots(
    slots: int, copies: bool
) -> None:
    driver = Driver()
    group = driver.restart_agent()
    group.replicas.is_replication_on = group.replicas.is_survey_pending = copies
    group.end_takeover(0.0, {0: Version(3), 2: Version(2), 1: Version(1)})
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


def test_a_save_takes_the_place_of_an_appointment_that_nobody_has_reached() -> None:
    driver = Driver(slots=1)
    appointed = driver.word()
    driver.steps = [4, 4]
    driver.save(Version(3, 1))
    assert driver.word() is None
    assert {rank: body["saved"] for rank, body in driver.answers("save").items()} == {0: False, 1: False}
    assert driver.answers("save")[0]["attempt"] != appointed.attempt_number
    assert not any(isinstance(action, do.Commit) for action in driver.said)


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
    refused = driver.all_of(do.Refuse)
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
    named = [action for action in driver.all_of(do.Emit) if action.name == "save.awaited"]
    assert [(action.loud, action.data) for action in named] == [
        (True, {"version": str(Version(4, 1)), "ranks": [1, 2]})
    ]
    assert "ranks [1, 2] have not come" in named[0].message


@pytest.mark.parametrize(
    ("why", "version", "said"),
    [
        (SaveReason.EXIT, Version(4), "rank 0 ended the block after step 4, and rank 1 went past that"),
        (SaveReason.SAVE, Version(4, 1), f"rank 1 went past {Version(4, 1)} without calling ck.save()"),
    ],
)
def test_a_rank_that_goes_past_a_save_or_the_end_of_another_is_named(
    why: SaveReason, version: Version, said: str
) -> None:
    driver = Driver()
    driver.save(version, why, range(1))
    driver.steps = [5, 6]
    assert driver.group.next_wake_s(0.0) is not None
    driver.decide()
    driver.save(version, why, range(1, 2))
    refused = [(each.kind, each.message) for each in driver.all_of(do.Refuse)]
    assert refused == [("usage", said)] * 2


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


@pytest.mark.parametrize("lost", [True, False])
def test_an_exit_at_a_step_whose_snapshot_is_on_its_way_waits_for_it_unless_its_report_was_lost(lost: bool) -> None:
    driver = Driver()
    word = driver.word()
    driver.steps = [10, 10]
    driver.stage(word.attempt_number, Version(10), word.slot, range(1))
    driver.save(Version(10), SaveReason.EXIT)
    assert driver.answers("save") == {}
    for driver.now_s in (MISSING_ANSWER_S, MISSING_ANSWER_S + 1.0) if lost else ():
        driver.decide()
    if not lost:
        driver.stage(word.attempt_number, Version(10), word.slot)
    assert [body["saved"] for body in driver.answers("save").values()] == [not lost] * 2
    assert (driver.answers("save")[0]["attempt"] != word.attempt_number) is lost


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
    assert driver.all_of(do.ReplicaDegraded) == []
    driver.commit()
    assert driver.replicas.replicated is None
    assert driver.all_of(do.ReplicaDegraded) == [do.ReplicaDegraded(first)], (
        "nobody is told any more that it is safe there"
    )
    assert driver.replicas.replicated_version == first, "those who keep it do not drop it for attempts that fail"
    third = driver.complete()
    assert third > second


def failing_copies(driver: Driver) -> Iterator[ReplicaState]:
    """The replicas before each of three replications, which fail."""
    for _ in range(3):
        assert driver.replicas.replicating_slot is not None
        yield driver.replicas
        driver.copy("there is no room")
        driver.wait(100.0)


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
    needed = [replicas.retained_placement for replicas in failing_copies(driver)]
    assert needed == [kept, kept, () if stored else kept]
    lost = [each.version for each in driver.all_of(do.ReplicaDegraded)]
    assert set(lost) == ({first} if stored else set())
    driver.copy()
    assert driver.replicas.retained_placement == kept, "of what is safe now"


@pytest.mark.parametrize("dropped", [True, False])
def test_where_nothing_is_safe_what_is_older_than_in_the_store_is_not_needed_once_dropped_or_copies_fail_twice(
    dropped: bool,
) -> None:
    """A node that was away may still have it, or failed attempts have left more than memory is for."""
    driver = Driver()
    driver.place()
    first = driver.complete()
    driver.replicas.is_replication_on = not dropped
    if dropped:
        driver.copy("a node is away")
        driver.decide()
    driver.commit()
    if dropped:
        driver.place()
        driver.complete()
    stays = [replicas.retained_version for replicas in failing_copies(driver)]
    assert stays == ([first] * 3 if dropped else [None, None, first])
    assert driver.replicas.retained_placement == ()
    assert driver.replicas.replicated_version is None, "nor is it said to be safe there"


@pytest.mark.parametrize("before", [(1, 1), (1, 0)])
def test_what_others_keep_does_not_go_for_less_or_another_part_of_a_newer_one_until_the_store_has_it(
    before: tuple[int, int],
) -> None:
    """Their memory has become less meanwhile."""
    driver = Driver()
    driver.place(Kept("", before[0], ("b",)), Kept("b", before[1], ("",)))
    older = driver.complete()
    driver.copy()
    driver.replicas.placement = Kept("", 0), Kept("b", 1, ("",))
    newer = driver.complete()
    assert driver.levels("peer") == {str(older): all(before), str(newer): False}
    assert (driver.replicas.replicated_version, driver.replicas.survives_node_loss) == (older, all(before))
    assert driver.sent() == [older]
    driver.commit()
    assert driver.group.facts.committed_version == older
    assert driver.sent() == [older, newer]


def restarted(held: Iterable[int], *kept: Kept) -> Driver:
    """The coordinator's agent was started again: its slots hold these steps, and it is not known what is safe."""
    driver = Driver(policy=Every(seconds=600))
    driver.place(*kept)
    driver.replicas.is_survey_pending = True
    for slot, step in enumerate(held):
        hold_snapshot(driver.group, slot, Version(step))
    return driver


def test_while_it_is_not_known_what_is_safe_elsewhere_nothing_is_dropped_and_that_is_asked_again() -> None:
    """The agent was started again. The older one may be the one that is safe, and its own memory is part of that."""
    driver = restarted([40, 50], Kept("", 1, ("other",)))

    def held() -> list[int]:
        return sorted(attempt.version.step for attempt in driver.slots.attempts(SlotState.COMPLETE))

    for tries in range(1, 4):
        driver.decide()
        assert (driver.sent(), held()) == ([Version(50)] * tries, [40, 50])
        driver.replicas.record_replication(1, "a node does not answer", driver.now_s)
        driver.decide()
        driver.now_s = driver.wake_s
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
    hold_snapshot(driver.group, 1, Version(60))
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
        driver.wait(100.0)
        driver.commit()
        driver.decide()
        assert driver.group.facts.committed_version == newer
        assert driver.replicas.replicated is None


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


def test_before_it_is_known_who_keeps_what_nothing_outdoes_what_former_epochs_have_left() -> None:
    """The agent was started again: that no node is known to keep copies does not say that none is to."""
    driver = Driver(policy=Every(seconds=600))
    driver.replicas.is_survey_pending = True
    hold_snapshot(driver.group, 0, Version(50))
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
    assert [action.slot for action in driver.all_of(do.MakeArenas)] == [1]


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
        assert {action.slot for action in driver.all_of(do.MakeArenas)} == again
    driver.commit()
    driver.complete()
    assert {action.slot for action in driver.all_of(do.MakeArenas)} == {0, 1, 2}


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


@pytest.mark.parametrize("copies", [False, True])
def test_who_waits_for_other_nodes_hears_that_the_store_has_failed_only_where_nobody_keeps_copies(copies: bool) -> None:
    """What is in the store is at that level, too; else nobody would ever say anything of it."""
    driver = Driver()
    driver.replicas.is_replication_on = copies
    version = driver.complete()
    driver.commit("the disk is full")
    assert driver.levels("peer") == ({} if copies else {str(version): False})


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


def test_a_dead_rank_fails_the_waiting_saves_and_keeps_what_all_had_staged() -> None:
    driver = Driver()
    word = driver.word()
    driver.stage(word.attempt_number, Version(10), word.slot)
    driver.save(Version(11, 1), ranks=range(1))
    driver.group.record_death(1)
    driver.decide()
    assert driver.answers("save") == {0: "save-failed"}
    driver.assemble(word.slot, word.attempt_number)
    driver.commit()
    assert driver.levels("store") == {str(Version(10)): True}


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
    assert bool(driver.all_of(do.Close)) == stored
    if stored:
        driver.close()
        assert all(body["committed"] == str(Version(20)) for body in driver.answers("leave").values())
        assert driver.group.is_at_work, "what is under way ends by itself"
    assert len(driver.answers("leave")) == (2 if stored else 0)


@pytest.mark.parametrize("in_order", [True, False])
def test_who_asked_to_leave_and_hung_up_is_not_waited_for_unless_it_insists(in_order: bool) -> None:
    driver = Driver()
    driver.complete()
    driver.leave(in_order=in_order)
    driver.decide()
    driver.commit()
    for rank in range(2):
        driver.group.record_disconnect(rank, driver.now_s)
    driver.close()
    assert not driver.group.rank_states.summary.waiting_to_leave
    assert not driver.answers("leave")


@pytest.mark.parametrize("how", ["asks again", "dies", "stays away"])
def test_who_lost_its_connection_after_asking_to_leave_is_answered_on_the_next_one(how: str) -> None:
    driver = Driver()
    driver.complete()
    driver.leave(insists=True)
    driver.group.record_disconnect(1, driver.now_s)
    driver.commit()
    driver.close()
    assert driver.answers("leave") == {0: {"committed": str(Version(10)), "error": None}}
    assert [member.rank for member in driver.group.rank_states.summary.waiting_to_leave] == [1]
    if how == "dies":
        driver.group.record_death(1)
    elif how == "stays away":
        assert driver.wake_s <= REJOIN_S
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


def test_a_hold_stays_in_its_only_slot_until_it_is_judged() -> None:
    driver = Driver(slots=1)
    word = hold(driver)
    driver.steps = [word.step] * 2
    driver.stage(word.attempt_number, Version(word.step), word.slot)
    driver.group.exit_vote.record_hold(0, word.attempt_number, ("rank-holds", 0))
    driver.assemble(word.slot, word.attempt_number)
    driver.commit()
    driver.divide("d", (100, 100), 1)
    driver.decide()
    driver.group.exit_vote.record_hold(1, word.attempt_number, ("rank-holds", 1))
    driver.decide()
    assert list(driver.answers("rank-holds").values()) == [{"leave": True, "leave_deadline_s": 30.0}] * 2


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


def test_a_restarted_agent_appoints_only_when_it_knows_where_the_ranks_are() -> None:
    driver = Driver()
    group = driver.restart_agent()
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
    assert driver.wake_s == 65.0  # one that was due at 40 could be there by 45, and steps seem to take 5 s
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
        waits_s.append(driver.wake_s - driver.now_s)
        driver.now_s = driver.wake_s
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
    driver.now_s = driver.wake_s
    assert driver.now_s == 22.0
    driver.decide()
    assert driver.slots.committing_slot is not None


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
    driver.wait(10.0)
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
    driver.wait(10.0)
    assert (group.replicas.replicating_slot is not None, group.replicas.is_survey_pending) == (True, True)
    found_safe(group, safe, False, ["", "b", "c"], left)
    assert (group.replicas.would_reduce_protection, group.replicas.survives_node_loss) == (not goes, False)
    driver.copy("" if goes else NO_PEER_MEMORY)
    driver.decide()
    assert (group.replicas.replicated_version, group.replicas.is_survey_pending) == (newer if goes else safe, False)
    if not goes:
        assert group.replicas.replicating_slot is None
        group.replicas.record_lost_holder("", group.replicas.peer_versions)
        driver.wait(10.0)
        assert (group.replicas.replicating_slot is not None, group.replicas.is_survey_pending) == (True, True), (
            "it is asked again what is left"
        )
        found_safe(group, safe, False, ["", "b", "c"])
        assert not group.replicas.would_reduce_protection


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


@pytest.mark.parametrize(
    ("whole", "lost", "why"), [(True, False, ""), (True, True, HOLDER_LOST), (False, False, FOUND_INCOMPLETE)]
)
def test_what_is_found_to_be_safe_in_part_or_of_which_a_holder_was_lost_meanwhile_is_not_said_to_be_safe(
    whole: bool, lost: bool, why: str
) -> None:
    driver = Driver()
    group = driver.group
    safe, _ = driver.complete(), driver.complete()
    driver.place(Kept("", 1, ("b",)), Kept("b", 1, ("",)))
    group.replicas.is_survey_pending = True
    driver.decide()
    if lost:
        group.replicas.record_lost_holder("b", [])
    assert found_safe(group, safe, whole, ["", "b"], ["b"]) is not lost
    driver.decide()
    assert driver.levels("peer") == {str(safe): not why}
    assert driver.messages("peer")[-1]["message"] == why


def test_what_is_older_than_what_is_found_to_be_safe_is_not_copied_any_more() -> None:
    """It would be told to be safe, and its slot be used again. The newer one was complete while that was asked."""
    driver = Driver()
    group = driver.group
    driver.place(Kept("", 1, ("b",)), Kept("b", 1, ("",)))
    group.replicas.is_survey_pending = True
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


def test_what_a_node_that_comes_back_may_have_lost_is_copied_again_and_stays_what_is_safe_meanwhile() -> None:
    driver = Driver()
    driver.place()
    version = driver.complete()
    driver.copy()
    driver.commit()
    driver.group.record_disconnect(1, driver.now_s)
    driver.replicas.record_lost_holder("b", driver.replicas.peer_versions)
    driver.decide()
    assert driver.sent() == [version], "not while it is away"
    driver.group.record_join(1)
    driver.decide()
    assert driver.sent() == [version] * 2
    held = driver.replicas.replicated
    assert held is not None
    driver.copy("a link was cut")
    driver.decide()
    assert driver.sent() == [version] * 2, "later"
    assert driver.replicas.replicated is held
    driver.wait(10.0)
    assert driver.sent() == [version] * 3
    driver.copy()
    driver.wait(100.0)
    assert driver.sent() == [version] * 3
    assert len(driver.messages("peer")) == 1


@pytest.mark.parametrize("planned", [True, False])
def test_a_plan_of_former_layouts_is_not_used_nor_does_its_failure_refuse_a_save(planned: bool) -> None:
    driver = Driver()
    driver.arenas.record_layout()
    driver.decide()
    driver.arenas.record_layout()
    if planned:
        assert not driver.arenas.record_division(3, "old", (100, 100), 3)
    else:
        driver.arenas.record_division_failure(3, "no rank holds some part of it")
    driver.save(Version(4, 1))
    assert (driver.answers("save"), driver.arenas.division) == ({}, "d")
    assert driver.arenas.record_division(4, "e", (100, 100), 3)
    driver.make_ready()
    assert [answer["saved"] for answer in driver.answers("save").values()] == [False, False]


def test_slots_that_memory_was_not_there_for_come_once_it_is() -> None:
    driver = Driver(slots=0)
    for slots, limit in ((0, 0), (2, 2), (1, 2)):
        driver.arenas.raise_slot_limit(slots)
        assert (driver.arenas.slot_limit, bool(driver.arenas.refusal_reason)) == (limit, not limit)


def test_a_slot_that_cannot_be_had_leaves_those_that_are_there_whatever_their_numbers() -> None:
    driver = Driver(policy=Every(seconds=600))
    driver.arenas.record_lost_arenas(0)
    assert [action.slot for action in driver.decide() if isinstance(action, do.MakeArenas)] == [0]
    assert driver.arenas.usable_slot_count == 2
    driver.arenas.limit_slots(2, "it is full")
    driver.arenas.record_arenas(0, ())
    assert driver.decide() == [do.CloseArenas(0)], "on other nodes it may be there"
    arenas = driver.arenas
    assert (arenas.slot_limit, arenas.usable_slot_count, arenas.refusal_reason) == (2, 2, "")


@pytest.mark.parametrize("part", [False, True])
def test_who_saves_what_had_failed_to_be_copied_hears_what_comes_of_its_copies_then(part: bool) -> None:
    """It waits anew, and what failed before says nothing any more. Of what others keep a part of no more comes."""
    driver = Driver()
    driver.place(Kept("", int(not part), ("b",)), Kept("b", 1, ("",)))
    version = driver.complete()
    driver.copy("" if part else "a link was cut")
    driver.decide()
    assert driver.levels("peer") == {str(version): False}
    driver.said.clear()
    driver.save(version, SaveReason.EXIT)
    if not part:
        driver.copy()
    driver.decide()
    assert driver.levels("peer") == {str(version): not part}


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
    word, seen = driver.word(), driver.group.rank_states.summary
    driver.steps = [word.step] * world
    for rank in range(world):
        driver.stage(word.attempt_number, Version(word.step), word.slot, range(rank, rank + 1))
    assert driver.slots[word.slot].state is SlotState.STAGED
    ranks = driver.group.rank_states
    assert isinstance(ranks, CountedRanks)
    assert (ranks.passes, ranks.summary is seen) == (0, True)

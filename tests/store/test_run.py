"""A run's own objects: claims, heartbeats, ends; and who has to wait for whom."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckpt.clock import ManualClock
from ckpt.errors import RunInUse, Superseded, TransientError, UsageError
from ckpt.events import Event, Events
from ckpt.storage.retry import Retrying
from ckpt.store import keys
from ckpt.store.lineage import Ancestor, Claim
from ckpt.store.run import Run
from tests.store.build import epoch, identity
from tests.store.sim import Fault, Sim


class Beating(ManualClock):
    """While somebody sleeps, the other job's heart beats (or whatever else `meanwhile` does)."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.meanwhile = meanwhile
        self.slept_s = 0.0

    def sleep_s(self, seconds: float) -> None:
        super().sleep_s(seconds)
        self.slept_s += seconds
        self.meanwhile()


def test_a_view_shows_what_was_claimed_committed_retired_closed_and_is_alive() -> None:
    store = Sim()
    run = Run(store)
    run.put_claim(Claim(epoch(1), None, launch="a"))
    run.put_claim(Claim(epoch(2), identity(1, 10), launch="b"))
    run.put_heartbeat(epoch(2), 0, 10.0)
    run.close_epoch(epoch(1), "it ended")
    store.put(keys.record_key(identity(1, 10), "w"), [b"record"])
    store.put(keys.retired_key(identity(1, 5)), [b""])
    view = Run(store.client()).view()
    assert [claim.launch for claim in view.claims] == ["a", "b"]
    assert [ref.size for ref in view.history] == [6]
    assert set(view.retired_at_s) == {identity(1, 5)}
    assert view.retired_at_s[identity(1, 5)] == store.now_s()
    assert view.closed_epochs == {epoch(1)}
    assert set(view.heartbeats) == {epoch(2)}


def test_a_new_epoch_is_above_all_that_the_store_or_an_agent_knows() -> None:
    store = Sim()
    run = Run(store)
    run.put_claim(Claim(epoch(3), None))
    assert run.view().new_epoch().number == 4
    assert run.view().new_epoch([epoch(7)]).number == 8
    run.put_claim(Claim(epoch(12), identity(11, 5), (Ancestor(epoch(11), None),)))
    assert run.view().new_epoch().number == 13
    store.put(keys.record_key(identity(20, 5), "w"), [b""])
    assert run.view().new_epoch().number == 21


def test_a_damaged_claim_is_told_and_does_not_stop_the_listing() -> None:
    store, told = Sim(), list[Event]()
    Run(store).put_claim(Claim(epoch(1), None))
    store.put(keys.epoch_key(epoch(2)), [b"not json"])
    view = Run(store, events=Events(told.append)).view()
    assert view.newest_epoch == epoch(2)
    assert [key for key, _ in view.damaged_claims] == [keys.epoch_key(epoch(2))]
    assert [(event.name, event.loud) for event in told] == [("claim.damaged", True)]


@pytest.mark.parametrize("honest", [True, False])
@pytest.mark.parametrize("fault", [Fault.LOST, Fault.LATE, Fault.FAIL])
def test_a_claim_whose_reply_was_lost_is_settled_by_reading_back(fault: Fault, honest: bool) -> None:
    store = Sim(honest=honest)
    faults = [fault]
    store.fault = lambda operation, key: faults.pop() if faults else None
    run = Run(Retrying(store, 10.0, pause=lambda seconds: None))
    run.put_claim(Claim(epoch(1), None))
    store.land() if honest is False else store.late.clear()
    assert [claim.epoch for claim in Run(store).view().claims] == [epoch(1)]


def test_a_claim_that_is_not_accepted_raises_and_nothing_is_claimed() -> None:
    store = Sim()
    store.fault = lambda operation, key: Fault.FAIL
    with pytest.raises(TransientError):
        Run(store).put_claim(Claim(epoch(1), None))
    assert Run(store).view().epochs == frozenset()


def test_claiming_again_is_harmless_but_never_changes_a_claim() -> None:
    store = Sim()
    run = Run(store)
    run.put_claim(Claim(epoch(1), None, launch="a"))
    run.put_claim(Claim(epoch(1), None, launch="a"))
    with pytest.raises(UsageError, match="another start"):
        run.put_claim(Claim(epoch(1), None, launch="b"))
    assert Run(store).view().claims[0].launch == "a"


def test_check_raises_superseded_and_names_who_has_taken_over() -> None:
    store = Sim()
    run = Run(store)
    run.put_claim(Claim(epoch(1), None, launch="old"))
    run.check_not_superseded(epoch(1))
    Run(store.client()).put_claim(Claim(epoch(2), identity(1, 10), launch="new", host="there"))
    with pytest.raises(Superseded, match=r"'new' on host 'there'"):
        run.check_not_superseded(epoch(1))
    run.check_not_superseded(epoch(2))


def test_an_older_epoch_that_claims_late_supersedes_nobody() -> None:
    store = Sim()
    run = Run(store)
    run.put_claim(Claim(epoch(2), identity(1, 10)))
    run.put_claim(Claim(epoch(1), None))
    run.check_not_superseded(epoch(2))


def test_closing_twice_is_harmless_and_removes_the_heartbeat() -> None:
    store = Sim()
    run = Run(store)
    run.put_heartbeat(epoch(1), 0, 10.0)
    run.close_epoch(epoch(1), "first")
    run.close_epoch(epoch(1), "second")
    assert run.view().closed_epochs == {epoch(1)}
    assert run.view().heartbeats == {}


# --- another job at the same URL -------------------------------------------------------------------------------------


def other_job(store: Sim, *, launch: str = "theirs", heartbeat_s: float = 10.0) -> tuple[Run, Callable[[], None]]:
    """A claimed, unclosed epoch, and what makes its heart beat."""
    run, count = Run(store.client()), [0]
    run.put_claim(Claim(epoch(1), None, launch=launch, host="their-host"))

    def beat() -> None:
        count[0] += 1
        run.put_heartbeat(epoch(1), count[0], heartbeat_s)

    beat()
    return run, beat


def watch(store: Sim, clock: Beating, launch: str = "ours", *, take_over: bool = False) -> None:
    run = Run(store, clock)
    run.check_not_in_use(run.view(), launch, 10.0, take_over=take_over)


def test_a_living_job_of_another_launch_is_refused_by_name() -> None:
    store = Sim()
    _, beat = other_job(store)
    with pytest.raises(RunInUse) as error:
        watch(store, Beating(beat))
    for part in ("theirs", "their-host", str(epoch(1)), "take_over", "--take-over"):
        assert part in str(error.value)


def test_a_silent_job_is_watched_for_two_heartbeats_and_then_taken_for_dead() -> None:
    store = Sim()
    other_job(store)
    clock = Beating(lambda: store.advance(1e6))  # whatever the store's clock says
    watch(store, clock)
    assert clock.slept_s == 20.0


def test_a_job_that_beats_slower_than_we_do_is_watched_for_its_own_period() -> None:
    store = Sim()
    other_job(store, heartbeat_s=60.0)
    clock = Beating(lambda: None)
    watch(store, clock)
    assert clock.slept_s == 120.0


def test_a_job_that_has_claimed_and_not_yet_beaten_is_seen_when_it_does() -> None:
    store = Sim()
    run = Run(store.client())
    run.put_claim(Claim(epoch(1), None, launch="theirs"))
    with pytest.raises(RunInUse):
        watch(store, Beating(lambda: run.put_heartbeat(epoch(1), 1, 10.0)))


def test_a_job_that_closes_while_it_is_watched_is_waited_for_no_longer() -> None:
    store = Sim()
    run, _ = other_job(store)
    clock = Beating(lambda: run.close_epoch(epoch(1), "done"))
    watch(store, clock)
    assert clock.slept_s < 20.0


@pytest.mark.parametrize("why", ["same launch", "take over", "closed", "nobody"])
def test_nobody_is_waited_for(why: str) -> None:
    store = Sim()
    clock = Beating(lambda: None)
    if why != "nobody":
        run, beat = other_job(store)
        clock = Beating(beat)
        if why == "closed":
            run.close_epoch(epoch(1), "done")
    watch(store, clock, "theirs" if why == "same launch" else "ours", take_over=why == "take over")
    assert clock.slept_s == 0.0


def test_a_superseded_job_that_still_beats_is_not_waited_for() -> None:
    store = Sim()
    _, beat = other_job(store)
    newer = Run(store.client())
    newer.put_claim(Claim(epoch(2), None, launch="newer"))
    newer.close_epoch(epoch(2), "done")
    clock = Beating(beat)
    watch(store, clock)
    assert clock.slept_s == 0.0


def test_a_hostile_heartbeat_cannot_make_anyone_wait_for_long() -> None:
    for body in (b'{"heartbeat_s": 1e12}', b'{"heartbeat_s": -5}', b'{"heartbeat_s": "x"}', b"junk", b"x" * 100_000):
        store = Sim()
        other_job(store)
        store.put(keys.heartbeat_key(epoch(1)), [body])
        clock = Beating(lambda: None)
        watch(store, clock)
        assert clock.slept_s == 20.0

"""Single failures, worked out by hand, and traces that are meant to break the engine.

The scenario of made.py: a snapshot at steps 100, 200, ... stalls 2 s, so the n-th is whole at 20 + 102 n s.
"""

from __future__ import annotations

import math

import pytest

from ckpt.errors import UsageError
from ckpt.placement.placement import Parity, Replicas
from ckpt.policy import Adaptive, Every
from ckpt.simulate.engine import SimulatedJob, simulate
from ckpt.simulate.outcome import RunOutcome
from ckpt.simulate.scenario import LocalLevel, NoticeModel, PeerLevel, Rejoin, Scenario, StoreLevel, StorePrices
from tests.simulate.made import ADD, CRASH, REMOVE, STATE, Happening, poisson_crashes, run, scenario, trace
from tests.simulate.test_laws import check

SHARE = STATE / 4


def went(*happenings: Happening, pools: int = 1, span_s: float = 2000.0, nodes: int = 4, **changes) -> RunOutcome:
    """The outcome, of which every law holds."""
    made, on = scenario(**changes), trace(nodes, *happenings, pools=pools, span_s=span_s)
    outcome = run(made, on)
    check(outcome, made, on)
    assert run(made, on, jumps=False).recoveries == outcome.recoveries
    return outcome


def restarts(outcome: RunOutcome) -> list[tuple[str, int, float]]:
    return [(each.level, each.lost_steps, pytest.approx(each.seconds)) for each in outcome.recoveries]


# --- one failure ----------------------------------------------------------------------------------------------------


def test_a_crash_goes_back_to_the_newest_snapshot_of_this_host():
    outcome = went((350.0, CRASH, "n1"))  # 24 s after the third snapshot
    assert restarts(outcome) == [("local", 24, 10 + 20 + 3)]
    assert outcome.lost_s == pytest.approx(24.0)
    assert outcome.recovering_s == pytest.approx(20 + 33)


ALL = NoticeModel(recall=1.0, lead_s=120.0, certain=False)
LEAVE = NoticeModel(recall=1.0, lead_s=120.0)
LOST_AND_REPLACED = [(350.0, REMOVE, "n1"), (350.0, ADD, "n9")]
ALL_REPLACED = [*((350.0, REMOVE, f"n{i}") for i in range(4)), *((350.0, ADD, f"m{i}") for i in range(4))]
ANNOUNCED = [(390.0, REMOVE, "n1"), (390.0, ADD, "n9")]
IN_TRAINER = {"local": LocalLevel(stall_s=2.0, restore_bytes_s=SHARE / 3, survives_crash=False), "peers": None}
DEFERRED = {"local": LocalLevel(stall_s=2.0, restore_bytes_s=SHARE / 3, deferred=True)}


@pytest.mark.parametrize(
    ("happenings", "changes", "expected"),
    [
        (LOST_AND_REPLACED, {}, ("peer", 24, 10 + 20 + 5)),
        # The third snapshot, whole at 326 s, was still being replicated.
        ([(330.0, REMOVE, "n1"), (330.0, ADD, "n9")], {}, ("peer", 104, 10 + 20 + 5)),
        # The commit of the third snapshot, begun at 326 s, would have ended at 366 s; of the second at 264 s.
        (ALL_REPLACED, {}, ("store", 124, 10 + 20 + 8)),
        (ALL_REPLACED, {"store": None}, ("nothing", 324, 10 + 20)),
        ([(366.0, REMOVE, f"n{i}") for i in range(4)], {}, ("store", 40, 2000 - 366)),  # a commit ends at that instant
        ([(326.0, CRASH, "n0")], {}, ("local", 0, 33)),  # so does a snapshot
        ([(350.0, REMOVE, "n0"), (355.0, ADD, "n9")], {"nodes_min": 4}, ("peer", 24, 35)),  # back before detection
        ([(380.0, CRASH, "n0")], IN_TRAINER, ("store", 54, 38)),
        ([(350.0, CRASH, "n0")], IN_TRAINER, ("store", 124, 38)),  # its commit dies too
        ([(326.5, CRASH, "n0")], DEFERRED, ("local", 100, 33)),
        ([(327.5, CRASH, "n0")], DEFERRED, ("local", 1, 33)),
        # Appointed a step, a stall and a replication before the deadline. An announced loss needs no detection.
        (ANNOUNCED, {"notices": ALL}, ("peer", 6, 20 + 5)),
        (ANNOUNCED, {}, ("peer", 64, 10 + 20 + 5)),
        # Too late to replicate: of 64 s, 2 s were the stall.
        (ANNOUNCED, {"notices": NoticeModel(recall=1.0, lead_s=4.0, certain=False)}, ("peer", 62, 20 + 5)),
        (
            [(900.0, REMOVE, "n1"), (900.0, ADD, "n9")],
            {"peers": None, "notices": ALL, "policy": Every(seconds=5000.0)},
            ("store", 41, 20 + 8),
        ),
    ],
)
def test_one_failure_goes_back_to_the_newest_that_is_left(happenings, changes, expected):
    """Where the state comes from, how many steps are lost, and the seconds until training goes on."""
    assert restarts(went(*happenings, **changes)) == [expected]


def test_a_commit_in_flight_survives_what_its_frames_survive():
    early = [(340.0, CRASH, "n0"), (341.0, REMOVE, "n1"), (341.0, ADD, "n9")]
    then = [(370.0, REMOVE, name) for name in ("n0", "n2", "n3", "n9")]
    back = [(370.0, ADD, f"m{i}") for i in range(4)]
    outcome = went(*early, *then, *back)
    # Between crash and loss of all, the third snapshot was committed at 366 s by the agents.
    assert [each.level for each in outcome.recoveries] == ["store"]
    assert outcome.recoveries[0].lost_steps == 14
    # Without replicas the commit's frames go with the node.
    assert went(*early, *then, *back, peers=None).recoveries[0].lost_steps == 114


def test_a_pool_that_goes_at_once_costs_no_state_if_replicas_lie_in_another():
    half = [(350.0, REMOVE, "n0"), (350.0, REMOVE, "n2")]
    apart = went(*half, pools=2)
    # Each of two nodes needs half of the state: twice a share.
    assert restarts(apart) == [("peer", 24, 10 + 20 + 2 * 5)]
    assert apart.store_gets == 0
    # Of three nodes the one in another pool keeps what both others have; by their names alone a ring would not.
    assert went(*half, pools=2, nodes=3).recoveries[0].level == "peer"
    assert went(*half, pools=1, nodes=3).recoveries[0].level == "store"
    # Were their pool unknown, one of three pairings would put both into one group. Two of two lost is too much for it.
    single = [went((350.0, REMOVE, "n0"), (350.0, REMOVE, f"n{i}")).recoveries[0].level for i in (1, 2, 3)]
    assert sorted(single) == ["peer", "peer", "store"]


@pytest.mark.parametrize(
    ("option", "losses", "level"),
    [
        (Replicas(1), 1, "peer"),
        (Replicas(2), 2, "peer"),
        (Replicas(3), 3, "peer"),
        (Parity(3, 1), 1, "peer"),
        (Parity(3, 1), 2, "store"),
        (Parity(2, 2), 2, "peer"),
    ],
)
def test_memory_survives_as_many_losses_as_the_option_promises(option, losses, level):
    gone = [(400.0, REMOVE, f"n{i}") for i in range(losses)]
    assert went(*gone, peers=PeerLevel(option, SHARE)).recoveries[0].level == level


def test_lost_replicas_are_made_again_and_until_then_a_loss_costs_more():
    """The placement of three nodes is a ring of two copies each. Re-replication takes 1/3 GB at 1/20 GB/s."""
    changes = {"nodes": 4, "peers": PeerLevel(link_bytes_s=STATE / 20), "policy": Every(steps=1000)}
    first = [(1030.0, REMOVE, "n0"), (1030.0, ADD, "m0")]
    # Training goes on at 1030 + 10 + 20 + 5 s, and the first snapshot's replicas are whole 5 s after that.
    levels = {}
    for second_s in (1066.0, 1075.0):
        found = [went(*first, (second_s, REMOVE, name), **changes).recoveries[-1].level for name in ("n1", "n2", "n3")]
        levels[second_s] = sorted(found)
    assert levels[1075.0] == ["peer", "peer", "peer"]
    assert levels[1066.0] == ["peer", "peer", "store"]


def test_a_synchronous_save_stalls_for_the_whole_write():
    store = StoreLevel(write_bytes_s=SHARE / 40, read_bytes_s=SHARE / 8, synchronous=True)
    outcome = went((350.0, CRASH, "n1"), local=None, peers=None, store=store)
    assert restarts(outcome) == [("store", 50, 10 + 20 + 8)]  # the second save ended at 20 + 2 * 140 s
    assert outcome.stalled_s == pytest.approx(40 * outcome.commits, abs=40)


def test_memory_alone_serves_a_crash_and_nothing_else():
    changes = {"peers": None, "store": None}
    outcome = went((350.0, CRASH, "n0"), (800.0, REMOVE, "n0"), (800.0, ADD, "n9"), **changes)
    assert [each.level for each in outcome.recoveries] == ["local", "nothing"]


def test_a_save_of_every_steps_waits_for_the_commit_before():
    """Saves come faster than commits. Each is committed, so each waits; by the clock they are passed over."""
    store = StoreLevel(write_bytes_s=SHARE / 300, slowdown=0.0)
    each = went(store=store, span_s=30_000.0)
    assert each.snapshots - each.commits <= 2
    assert each.stalled_s > 0.6 * each.wall_s
    some = went(store=store, span_s=30_000.0, policy=Every(seconds=102.0))
    assert some.snapshots == pytest.approx(3 * some.commits, rel=0.05)
    assert some.stalled_s == pytest.approx(2 * some.snapshots, abs=2)


# --- nodes that come and go -----------------------------------------------------------------------------------------


def test_a_job_goes_on_with_fewer_nodes_and_takes_more_at_its_next_restart():
    outcome = went((350.0, REMOVE, "n0"), (900.0, ADD, "n9"), (1200.0, CRASH, "n1"))
    assert [each.cause for each in outcome.recoveries] == ["loss", "crash"]
    # Its memory holds the shares of three nodes. Until then a step took 4/3 s.
    assert [each.level for each in outcome.recoveries] == ["peer", "peer"]
    slow_s = 1200 - (350 + 10 + 20 + 4 / 3 * 5) - outcome.recoveries[1].lost_steps * 4 / 3
    assert outcome.useful_steps == pytest.approx(outcome.useful_s - slow_s / 4, abs=6)
    assert outcome.node_hours == pytest.approx((4 * 350 + 3 * 550 + 4 * 1100) / 3600)


def test_with_rejoin_at_wanted_the_job_saves_and_restarts_at_once():
    events = (350.0, REMOVE, "n0"), (900.0, ADD, "n9")
    outcome = went(*events, rejoin=Rejoin.AT_WANTED)
    rejoin = outcome.recoveries[1]
    assert (rejoin.cause, rejoin.level, rejoin.lost_steps, rejoin.finished) == ("rejoin", "peer", 0, True)
    assert 900 < rejoin.time_s < 900 + 4 / 3 + 2 + 1e-6  # a step's end and a snapshot
    assert outcome.useful_steps > went(*events).useful_steps


def test_fewer_nodes_than_the_minimum_wait_forever():
    outcome = went(nodes=3, nodes_min=None)
    assert (outcome.waiting_s, outcome.useful_s, outcome.overhead) == (2000.0, 0.0, math.inf)
    again = went((350.0, REMOVE, "n0"), nodes_min=4)
    assert again.waiting_s == pytest.approx(2000 - 350 - 10)
    assert [(each.finished, each.lost_steps) for each in again.recoveries] == [(False, 24)]


# --- traces that are meant to break it ------------------------------------------------------------------------------


def test_all_nodes_lost_at_once_and_none_comes_back():
    outcome = went(*((350.0, REMOVE, f"n{i}") for i in range(4)))
    assert outcome.waiting_s == pytest.approx(2000 - 360)
    assert [(each.level, each.finished) for each in outcome.recoveries] == [("store", False)]
    assert outcome.useful_steps == 200  # what the store has


def test_a_loss_during_recovery_begins_it_anew():
    # During gang start, at 365 s, the second of two losses comes; the first was detected at 360 s.
    outcome = went((350.0, REMOVE, "n0"), (365.0, REMOVE, "n1"))
    assert len(outcome.recoveries) == 1
    assert outcome.recoveries[0].seconds == pytest.approx(15 + 10 + 20 + 2 * (8 if outcome.store_gets else 5))
    # During detection only memory is lost, not time.
    outcome = went((350.0, REMOVE, "n0"), (355.0, CRASH, "n1"))
    assert restarts(outcome) == [("peer", 24, 10 + 20 + 5 * 4 / 3)]
    # During the restore.
    outcome = went((350.0, CRASH, "n0"), (381.0, CRASH, "n0"))
    assert restarts(outcome) == [("local", 24, 31 + 33)]


# --- notices --------------------------------------------------------------------------------------------------------


def test_by_a_certain_notice_the_job_leaves_with_its_last_step_saved_and_starts_on_the_other_nodes():
    lost = [(390.0, REMOVE, "n1"), (390.0, ADD, "n9")]
    outcome = went(*lost, notices=LEAVE)
    # Appointed at 312.5 s, 1.5 (3 + 2 + 40) + 10 s before the deadline; left at 315 s. Saved 40 s later, and replicated
    # meanwhile.
    (left,) = outcome.recoveries
    assert (outcome.notices_acted, left.cause, left.level, left.lost_steps) == (1, "loss", "peer", 0)
    # Three nodes fetch what four had.
    assert (left.time_s, left.seconds) == (pytest.approx(315.0), pytest.approx(40 + 20 + 5 * 4 / 3))
    assert outcome.lost_s == 0.0
    # With all four nodes needed it waits for the new one.
    (left,) = went(*lost, notices=LEAVE, nodes_min=4).recoveries
    assert (left.waited_s, left.seconds) == (pytest.approx(390 - 355), pytest.approx(390 - 315 + 25))


def test_a_certain_notice_that_comes_late_saves_nothing_that_is_not_replicated():
    late = NoticeModel(recall=1.0, lead_s=4.0)
    (left,) = went((390.0, REMOVE, "n1"), notices=late).recoveries
    assert (left.cause, left.level, left.lost_steps) == ("loss", "peer", 60)  # since 326 s; it left at 388 s


def test_a_node_that_stays_in_spite_of_a_certain_notice_is_used_again_after_the_deadline():
    made = scenario(notices=NoticeModel(false_node_hour=1.0, lead_s=200.0), rejoin=Rejoin.AT_WANTED)
    outcome = run(made, trace(4, span_s=4000.0), seed=3)
    causes = [each.cause for each in outcome.recoveries]
    assert outcome.notices_acted > 0
    assert causes.count("loss") == outcome.notices_acted
    assert causes.count("rejoin") > 0
    assert outcome.lost_s == 0.0


def test_a_notice_without_a_loss_costs_one_snapshot():
    quiet = went(span_s=1000.0)
    made = scenario(notices=NoticeModel(false_node_hour=3.0, lead_s=20.0, certain=False))
    outcome = run(made, trace(4, span_s=1000.0), seed=3)
    assert outcome.notices_acted > 0
    assert (outcome.recoveries, outcome.lost_s) == ((), 0.0)
    assert 0 < outcome.snapshots - quiet.snapshots <= outcome.notices_acted


def test_a_notice_is_ignored_while_little_is_unsaved():
    picky = NoticeModel(recall=1.0, act_above_s=70.0, certain=False)
    outcome = went((390.0, REMOVE, "n1"), notices=picky)
    assert (outcome.notices_acted, outcome.recoveries[0].lost_steps) == (0, 64)


# --- the adaptive policy --------------------------------------------------------------------------------------------


def test_the_adaptive_policy_learns_the_failures_and_costs_of_the_run():
    made = scenario(nodes=2, policy=Adaptive(), peers=None)
    on = poisson_crashes(0, 2e6, 5000.0)
    fast, slow = (SimulatedJob(made, on, 0, jumps) for jumps in (True, False))
    assert fast.run().overhead == pytest.approx(slow.run().overhead)
    known = fast.saves.known
    assert known.stall.mean == pytest.approx(2.0)
    assert known.commit.mean == pytest.approx(40.0)
    assert known.local_recovery.mean == pytest.approx(33.0)
    assert known.process.failure_count == sum(each.finished for each in fast.times.recoveries)
    assert 1 / known.process.current_rate.mean == pytest.approx(5000.0, rel=0.5)
    # The interval is near Young's for what was learnt; skipped turns were measured as well.
    assert fast.saves.decision.local_s == pytest.approx(math.sqrt(2 * 2.0 * 5000.0), rel=0.35)
    assert known.stall.count == slow.saves.known.stall.count
    assert fast.times.recoveries[-1].lost_steps == slow.times.recoveries[-1].lost_steps


def test_the_adaptive_policy_knows_each_class_of_failure():
    lost = [(3000.0, REMOVE, "n0"), (3000.0, ADD, "m0"), (6000.0, CRASH, "n1"), (9000.0, REMOVE, "n1")]
    all_lost = [(12_000.0, REMOVE, name) for name in ("n2", "n3", "m0")]
    made = scenario(policy=Adaptive())
    job = SimulatedJob(made, trace(4, *lost, *all_lost, (12_500.0, ADD, "x"), span_s=20_000.0), 0)
    outcome = job.run()
    assert [each.level for each in outcome.recoveries] == ["peer", "local", "peer", "store"]
    known = job.saves.known
    counts = [rate.failure_count for rate in (known.process, known.node, known.preemption, known.job)]
    assert counts == [1, 2, 0, 1]
    warned = SimulatedJob(scenario(policy=Adaptive(), notices=ALL), trace(4, *lost, span_s=20_000.0), 0)
    warned.run()
    assert warned.saves.known.preemption.failure_count > 0


# --- dollars, seeds, errors -----------------------------------------------------------------------------------------


def test_dollars_are_node_hours_requests_months_and_egress():
    prices = StorePrices(gb_month=0.1, put_1000=1.0, get_1000=0.5, egress_gb=0.2)
    store = StoreLevel(SHARE / 40, SHARE / 8, request_bytes=1e8, slowdown=0.0, kept=2, prices=prices)
    gone = [(350.0, REMOVE, f"n{i}") for i in range(4)]
    back = [(350.0, ADD, f"m{i}") for i in range(4)]
    outcome = went(*gone, *back, store=store, node_usd_hour=3.0)
    # A share of 250 MB is three requests; the record is one.
    assert outcome.store_puts == 13 * outcome.commits
    assert (outcome.store_gets, outcome.store_bytes_out) == (13, STATE)
    assert outcome.store_bytes_in == STATE * outcome.commits
    # Committed at 162 and 264 s; after that one comes for one that goes.
    months = ((2000 - 162) + (2000 - 264)) / (730 * 3600)
    expected = months * 0.1 + 13 * outcome.commits / 1000 + 13 / 1000 * 0.5 + 0.2
    assert outcome.store_usd == pytest.approx(expected)
    assert outcome.node_usd == pytest.approx(3.0 * 4 * 2000 / 3600)


def test_the_same_seed_gives_the_same_outcome_and_another_one_other_notices():
    made = scenario(notices=NoticeModel(recall=0.5, exponential=True, false_node_hour=0.5))
    on = trace(4, *((float(at), REMOVE, f"n{at // 900}") for at in (900, 1800, 2700)), span_s=10_000.0)
    found = [simulate(made, on, seed) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    assert simulate(made, on) == found[0]


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (Scenario, {"nodes_min": 5}),
        (Scenario, {"nodes": 0, "nodes_min": None}),
        (Scenario, {"step_s": 0.0}),
        (Scenario, {"scaling": 1.5}),
        (Scenario, {"local": None}),
        (Scenario, {"local": None, "peers": None}),
        (Scenario, {"policy": Adaptive(), "commit_every": 2}),
        (Scenario, {"policy": Adaptive(), "store": StoreLevel(synchronous=True)}),
        (Scenario, {"work_steps": 0}),
        (Scenario, {"node_usd_hour": -1.0}),
        (Scenario, {"detect_s": math.nan}),
        (LocalLevel, {"stall_s": -1.0}),
        (LocalLevel, {"restore_bytes_s": 0.0}),
        (PeerLevel, {"link_bytes_s": 0.0}),
        (StoreLevel, {"slowdown": 1.0}),
        (StoreLevel, {"kept": 0}),
        (StorePrices, {"egress_gb": -1.0}),
        (NoticeModel, {"recall": 1.1}),
        (NoticeModel, {"lead_s": math.inf}),
    ],
)
def test_what_makes_no_sense_is_refused(make, changes):
    job = {"nodes": 4, "step_s": 1.0, "state_bytes": STATE} if make is Scenario else {}
    with pytest.raises(UsageError):
        make(**(job | changes))

"""Several levels: the tables, brute force over whole numbers, simulated failures, and what holds for any values."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.policy import (
    Level,
    LevelCosts,
    best,
    nested,
    nested_overhead,
    overhead,
    overhead_first_order,
    overhead_of,
    snapshots_per_commit,
    staleness,
    store_rate,
    young,
)
from tests.placement.survival import group_ways, survival
from tests.policy import simulated

HOUR = 3600.0

# --- nested levels ------------------------------------------------------------------------------------------------

WORKED = [Level(1, 1 / (6 * HOUR)), Level(6, 1 / (3 * HOUR)), Level(60, 1 / (24 * HOUR))]
LEVELS = st.lists(st.builds(Level, st.floats(0.01, 1e3), st.just(0.0) | st.floats(1e-8, 1e-2)), max_size=5)


def test_each_level_has_youngs_interval_for_its_own_cost_and_failures():
    each = [young(level.stall_s, 1 / level.rate) for level in WORKED]
    assert each == pytest.approx([207.846, 360.0, 3219.94], rel=2e-6)
    assert nested_overhead(WORKED, each) == pytest.approx(0.080224, abs=6e-7)


def test_a_level_is_left_out_where_the_next_does_its_work_for_less():
    found = nested(WORKED)  # sqrt(2 * 6 / 7200) is below sqrt(2 / 21600) + sqrt(12 / 10800)
    assert found.intervals_s == (None, pytest.approx(young(6, 2 * HOUR)), pytest.approx(young(60, 24 * HOUR)))
    assert found.overhead == pytest.approx(0.078093, abs=6e-7)
    cheap = [Level(0.1, WORKED[0].rate), *WORKED[1:]]
    assert nested(cheap).intervals_s == pytest.approx([young(level.stall_s, 1 / level.rate) for level in cheap])


@given(st.floats(0.01, 1e3), st.floats(0.01, 1e3), st.floats(1e-8, 1e-2), st.floats(1e-8, 1e-2))
def test_of_two_levels_the_lower_is_kept_where_the_sum_of_both_is_the_less(c1, c2, l1, l2):
    both, upper = math.sqrt(2 * l1 * c1) + math.sqrt(2 * l2 * c2), math.sqrt(2 * (l1 + l2) * c2)
    found = nested([Level(c1, l1), Level(c2, l2)])
    assert found.overhead == pytest.approx(min(both, upper))
    if both < upper * (1 - 1e-9):
        assert found.intervals_s == pytest.approx((young(c1, 1 / l1), young(c2, 1 / l2)))
    elif upper < both * (1 - 1e-9):
        assert found.intervals_s == (None, pytest.approx(math.sqrt(2 * c2 / (l1 + l2))))


@given(LEVELS)
def test_no_other_choice_of_levels_costs_less(levels):
    found = nested(levels)
    assert nested_overhead(levels, found.intervals_s) == pytest.approx(found.overhead, rel=1e-9, abs=1e-15)
    least = math.inf
    for kept in itertools.product((False, True), repeat=len(levels)):
        unserved, total = 0.0, 0.0
        for level, keep in zip(levels, kept, strict=True):
            unserved += level.rate
            if keep:
                total, unserved = total + math.sqrt(2 * level.stall_s * unserved), 0.0
        least = min(least, total if not unserved else math.inf)
    assert found.overhead == pytest.approx(least, rel=1e-9, abs=1e-15)
    kept_s = [t for t in found.intervals_s if t is not None]
    assert kept_s == pytest.approx(sorted(kept_s), rel=1e-9)


@given(LEVELS, st.floats(1e-2, 1e2))
def test_nested_levels_know_no_unit_of_time(levels, unit):
    scaled = nested([Level(level.stall_s * unit, level.rate / unit) for level in levels])
    assert scaled.overhead == pytest.approx(nested(levels).overhead, rel=1e-9, abs=1e-15)


def test_where_nothing_fails_nothing_is_written():
    assert nested([]).intervals_s == ()
    assert nested([]).overhead == 0
    assert nested([Level(1, 0), Level(2, 0)]).intervals_s == (None, None)
    assert nested([Level(1, 1e-3), Level(2, 0)]).intervals_s == (pytest.approx(young(1, 1e3)), None)
    assert nested([Level(2, 1e-3), Level(1, 0)]).intervals_s == (None, pytest.approx(young(1, 1e3)))
    assert nested_overhead([Level(1, 1e-3), Level(2, 1e-4)], [10, None]) == math.inf  # nothing serves the upper class


def test_nested_overhead_is_near_what_simulated_failures_cost():
    chosen = (200.0, 400.0, 3200.0)
    stalls, rates = [level.stall_s for level in WORKED], [level.rate for level in WORKED]
    found = simulated.nested_levels(np.random.default_rng(2), chosen, stalls, rates)
    first_order = nested_overhead(WORKED, chosen)
    assert first_order < found < 1.08 * first_order


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_level_is_refused_outside_its_domain(bad):
    for arguments in ((bad, 1e-3), (1.0, bad), (0.0, 1e-3)):
        with pytest.raises(UsageError):
            Level(*arguments)
    with pytest.raises(UsageError, match="interval_s"):
        nested_overhead([Level(1, 1e-3)], [bad])


# --- memory and store ---------------------------------------------------------------------------------------------


def measured(c1: float, c2: float, phi: float, d2: float, la: float, l3: float, ra: float, r3: float) -> LevelCosts:
    return LevelCosts(
        snapshot_stall_s=c1,
        commit_stall_s=c2,
        slowdown=phi,
        commit_s=d2,
        local_rate=la / HOUR,
        store_rate=l3 / HOUR,
        local_recovery_s=ra,
        store_recovery_s=r3,
    )


NODES16 = measured(2, 0, 0.02, 120, 0.625, 1 / 24, 54, 300)
BIG = measured(8, 2, 0.05, 600, 5 / 12, 1 / 12, 90, 900)
HARSH = measured(5, 0, 0.03, 90, 1, 1 / 4, 60, 300)
SYNCHRONOUS = measured(10, 60, 0, 0, 0.5, 1 / 20, 30, 300)

# the two intervals without bounds, k, the overhead to first order, in closed form, and as it was once simulated
TABLE = [
    (NODES16, 151.79, 644.0, 4, 0.04840, 0.04939, 0.0497),
    (BIG, 371.81, 1662.8, 4, 0.12783, 0.13654, 0.1346),
    (HARSH, 189.74, 278.9, 1, 0.11866, 0.12467, 0.1229),
    (SYNCHRONOUS, 379.47, 2939.4, 8, 0.10327, 0.10936, 0.1096),
]
SECONDS = st.floats(1e-3, 1e3)
RATES = st.floats(1e-8, 1e-3)
ANY = st.builds(
    LevelCosts,
    snapshot_stall_s=SECONDS,
    commit_stall_s=st.just(0.0) | SECONDS,
    commit_s=st.just(0.0) | SECONDS,
    slowdown=st.floats(0, 1),
    replication_s=SECONDS,
    local_rate=st.just(0.0) | RATES,
    peer_rate=st.just(0.0) | RATES,
    store_rate=RATES,
    local_recovery_s=SECONDS,
    peer_recovery_s=SECONDS,
    store_recovery_s=SECONDS,
)


@pytest.mark.parametrize(("m", "tau", "k_tau", "k", "first", "closed", "once"), TABLE)
def test_the_tabulated_overheads_come_out(m, tau, k_tau, k, first, closed, once):
    assert young(m.snapshot_stall_s, 1 / m.memory_rate) == pytest.approx(tau, abs=6e-3)
    assert young(m.commit_cost_s, 1 / m.store_rate) == pytest.approx(k_tau, abs=6e-2)
    interval = young(m.snapshot_stall_s, 1 / m.memory_rate)
    assert overhead_first_order(m, interval, k) == pytest.approx(first, abs=6e-6)
    assert overhead_of(m, interval, k) == pytest.approx(closed, abs=6e-6)
    assert overhead_of(m, interval, k) == pytest.approx(once, rel=0.02)


def test_the_optimum_is_flat_in_the_number_of_snapshots_to_a_commit():
    swept = [overhead_of(NODES16, 152, k) for k in (1, 2, 4, 8, 16, 32)]
    assert swept == pytest.approx([0.058895, 0.051610, 0.049386, 0.051120, 0.057727, 0.072706], abs=6e-7)


@pytest.mark.parametrize(("m", "k"), [(NODES16, 2), (NODES16, 8), (BIG, 4), (HARSH, 1), (SYNCHRONOUS, 8)])
def test_the_closed_form_is_what_simulated_failures_cost(m, k):
    interval = young(m.snapshot_stall_s, 1 / m.memory_rate)
    found = simulated.memory_and_store(np.random.default_rng(3), m, interval, k)
    assert overhead_of(m, interval, k) == pytest.approx(found, rel=0.015)
    assert overhead_first_order(m, interval, k) < found


def test_losses_of_nodes_cost_their_own_recovery_and_the_replication_lag():
    m = replace(NODES16, local_rate=0.4 / HOUR, peer_rate=0.225 / HOUR, peer_recovery_s=70, replication_s=20)
    found = simulated.memory_and_store(np.random.default_rng(4), m, 150, 4)
    assert overhead_of(m, 150, 4) == pytest.approx(found, rel=0.015)
    lag = 0.225 / HOUR * 20
    assert overhead_first_order(m, 150, 4) - overhead_first_order(replace(m, replication_s=0), 150, 4) == (
        pytest.approx(lag)
    )


def test_what_only_the_store_survives_follows_from_what_fails_and_where_copies_lie():
    pairs = [group_ways(2, 1)] * 8
    assert store_rate(1 / 24, [(1 / 6, survival(pairs, 1))]) == 1 / 24, "one node is lost without harm"
    both = store_rate(1 / 24, [(0.5, survival(pairs, 1)), (0.25, survival(pairs, 2)), (0.125, survival(pairs, 16))])
    assert both == pytest.approx(1 / 24 + 0.25 * (1 - 14 / 15) + 0.125)
    assert store_rate(0) == 0
    for bad in ((-1.0, []), (math.nan, []), (0.0, [(-1.0, 1.0)]), (0.0, [(1.0, 1.1)]), (0.0, [(1.0, math.nan)])):
        with pytest.raises(UsageError):
            store_rate(*bad)


@pytest.mark.parametrize("m", [NODES16, BIG, HARSH, SYNCHRONOUS])
@pytest.mark.parametrize(("step_s", "traffic_s"), [(1.0, 0.0), (45.0, 0.0), (400.0, 0.0), (7.0, 4000.0)])
def test_no_whole_numbers_of_steps_and_snapshots_beat_the_best(m, step_s, traffic_s):
    found = best(m, step_s, traffic_s)
    floor_s = max(m.commit_s, traffic_s)
    steps, ks = np.arange(1, 2500)[:, None] * step_s, np.arange(1, 60)[None, :]
    h = m.snapshot_stall_s / steps + m.commit_cost_s / (ks * steps) + m.memory_rate * steps / 2
    h = h + m.store_rate * ks * steps / 2
    constant = overhead_first_order(m, found.interval_s, found.snapshots) - (
        m.snapshot_stall_s / found.interval_s
        + m.commit_cost_s / (found.snapshots * found.interval_s)
        + (m.memory_rate + found.snapshots * m.store_rate) * found.interval_s / 2
    )
    least = h[ks * steps >= floor_s * (1 - 1e-9)].min() + constant
    assert least * (1 - 1e-9) <= found.overhead <= least * 1.002
    assert found.overhead == overhead_first_order(m, found.interval_s, found.snapshots)


def test_each_bound_is_kept_and_named():
    assert best(NODES16, 1.0).steps == 154
    assert best(NODES16, 1.0).snapshots == 4
    assert (best(NODES16, 1.0).snapshot_by, best(NODES16, 1.0).commit_by) == ("rates", "rates")
    slow = best(NODES16, 400.0)
    assert (slow.steps, slow.interval_s, slow.snapshot_by) == (1, 400.0, "step")
    traffic = best(NODES16, 1.0, traffic_s=2000)
    assert traffic.commit_by == "traffic"
    assert traffic.snapshots * traffic.interval_s >= 2000
    long = best(replace(NODES16, commit_s=1900, slowdown=0), 1.0, traffic_s=1800)
    assert long.commit_by == "commit"
    assert long.snapshots * long.interval_s >= 1900
    dear = best(replace(NODES16, snapshot_stall_s=100), 1.0)
    assert (dear.snapshots, dear.commit_by) == (1, "snapshot")


def test_a_commit_that_costs_training_nothing_is_always_under_way():
    free = replace(NODES16, slowdown=0)
    found = best(free, 1.0)
    assert 120 <= found.snapshots * found.interval_s < 240
    assert found.commit_by == "snapshot"
    found = best(replace(free, commit_s=1000), 1.0)
    assert 1000 <= found.snapshots * found.interval_s < 1100
    assert found.commit_by == "commit"


def test_where_memory_loses_nothing_each_snapshot_is_committed():
    m = replace(NODES16, local_rate=0)
    found = best(m, 1.0)
    assert found.snapshots == 1
    assert found.interval_s == pytest.approx(young(m.snapshot_stall_s + m.commit_cost_s, 1 / m.store_rate), abs=1)


def test_at_most_one_commit_is_in_flight():
    m = replace(BIG, commit_s=5000)
    assert snapshots_per_commit(m, 100, 1) == math.ceil((5000 - m.commit_cost_s) / 108)
    assert snapshots_per_commit(m, 100, 500) == 500
    assert overhead_first_order(m, 100, 1) == overhead_first_order(m, 100, snapshots_per_commit(m, 100, 1))
    assert overhead_of(m, 100, 1) == overhead_of(m, 100, snapshots_per_commit(m, 100, 1))
    assert staleness(NODES16, 152, 4) == 120 + (4 * 154 + 2.4) / 2


@given(m=ANY, interval=st.floats(1, 1e4), asked=st.integers(1, 50))
def test_a_commit_has_ended_when_the_next_begins(m, interval, asked):
    k = snapshots_per_commit(m, interval, asked)
    turn = interval + m.snapshot_stall_s
    assert k * turn + m.commit_cost_s >= m.commit_s * (1 - 1e-8)
    assert k == asked or (k - 1) * turn + m.commit_cost_s < m.commit_s
    assert staleness(m, interval, asked) >= m.commit_s


@given(m=ANY, interval=st.floats(1, 1e4), k=st.integers(1, 50), more=st.floats(1.01, 10))
def test_no_overhead_falls_when_a_cost_or_a_rate_grows(m, interval, k, more):
    for field in fields(LevelCosts):
        value = getattr(m, field.name) * more
        if field.name in ("commit_s", "slowdown"):  # what is bounded, and what moves k by more than it costs
            continue
        worse = replace(m, **{field.name: value})
        k = snapshots_per_commit(m, interval, k)
        assert overhead_first_order(worse, interval, k) >= overhead_first_order(m, interval, k)
        assert overhead_of(worse, interval, k) >= overhead_of(m, interval, k) * (1 - 1e-6) - 1e-9


@given(m=ANY, step=st.floats(0.1, 100), unit=st.floats(0.01, 100))
def test_the_model_knows_no_unit_of_time(m, step, unit):
    scaled = LevelCosts(
        **{
            f.name: getattr(m, f.name) * (unit if f.name.endswith("_s") else 1 / unit if "rate" in f.name else 1)
            for f in fields(LevelCosts)
        }
    )
    assert best(scaled, step * unit).overhead == pytest.approx(best(m, step).overhead, rel=1e-6)
    assert overhead_of(scaled, 50 * unit, 3) == pytest.approx(overhead_of(m, 50, 3), rel=1e-6, abs=1e-9)


@given(m=ANY, step=st.floats(0.1, 100), traffic=st.just(0.0) | st.floats(1, 1e5))
def test_the_best_keeps_to_its_bounds_and_is_no_worse_than_its_neighbours(m, step, traffic):
    found = best(m, step, traffic)
    floor_s = max(m.commit_s, traffic)
    assert found.interval_s == found.steps * step
    assert found.steps >= 1
    assert found.snapshots >= 1
    assert found.snapshots * found.interval_s >= floor_s * (1 - 1e-8)
    for steps in (found.steps - 1, found.steps + 1):
        if steps >= 1 and found.snapshots * steps * step >= floor_s:
            assert overhead_first_order(m, steps * step, found.snapshots) >= found.overhead * (1 - 1e-9)


def test_the_limits_are_the_models_of_one_level():
    alone = LevelCosts(snapshot_stall_s=5, local_rate=1 / 1440)
    for interval in (50, 117, 400):
        assert overhead_of(alone, interval, 1) == pytest.approx(overhead(interval, 5, 1440))
    assert overhead_of(replace(alone, local_rate=0), 100, 7) == pytest.approx(0.05)
    store = LevelCosts(snapshot_stall_s=5, store_rate=1 / 1440, store_recovery_s=0)
    assert overhead_of(store, 117, 1) == pytest.approx(overhead(117, 5, 1440))
    rare = replace(HARSH, local_rate=HARSH.local_rate / 1e4, store_rate=HARSH.store_rate / 1e4)
    assert overhead_of(rare, 20_000, 2) == pytest.approx(overhead_first_order(rare, 20_000, 2), rel=0.005)
    assert overhead_of(HARSH, 1e9, 1) == math.inf
    assert overhead_of(LevelCosts(snapshot_stall_s=1, store_rate=1e-8), 7.09e10, 1) == math.inf  # inf / inf on the way


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_each_measure_is_refused_outside_its_domain(bad):
    for field in fields(LevelCosts):
        with pytest.raises(UsageError, match=field.name):
            replace(NODES16, **{field.name: bad})
    for call in (
        lambda: best(NODES16, bad),
        lambda: best(NODES16, 1.0, bad),
        lambda: overhead_of(NODES16, bad, 1),
        lambda: overhead_first_order(NODES16, bad, 1),
        lambda: staleness(NODES16, bad, 1),
    ):
        with pytest.raises(UsageError):
            call()


def test_what_has_no_answer_is_refused():
    for call in (
        lambda: replace(NODES16, slowdown=1.1),
        lambda: best(replace(NODES16, store_rate=0), 1.0),
        lambda: best(replace(NODES16, store_rate=5e-324), 1.0),
        lambda: best(LevelCosts(snapshot_stall_s=1, store_rate=5e-324), 1.0),
        lambda: best(replace(NODES16, snapshot_stall_s=0), 1e-300, traffic_s=1e300),
        lambda: best(NODES16, 0.0),
        lambda: overhead_of(NODES16, 100, 0),
        lambda: overhead_of(NODES16, 0, 1),
    ):
        with pytest.raises(UsageError):
            call()

"""Memory and store: the tables, simulated failures, and what holds for any values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.policy import LevelCosts, overhead, overhead_of, snapshots_per_commit, young

HOUR = 3600.0


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

# the two intervals without bounds, k, the overhead in closed form, and as it was once simulated
TABLE = [
    (NODES16, 151.79, 644.0, 4, 0.04939, 0.0497),
    (BIG, 371.81, 1662.8, 4, 0.13654, 0.1346),
    (HARSH, 189.74, 278.9, 1, 0.12467, 0.1229),
    (SYNCHRONOUS, 379.47, 2939.4, 8, 0.10936, 0.1096),
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


@pytest.mark.parametrize(("m", "tau", "k_tau", "k", "closed", "once"), TABLE)
def test_the_tabulated_overheads_come_out(m, tau, k_tau, k, closed, once):
    assert young(m.snapshot_stall_s, 1 / m.memory_rate) == pytest.approx(tau, abs=6e-3)
    assert young(m.commit_cost_s, 1 / m.store_rate) == pytest.approx(k_tau, abs=6e-2)
    interval = young(m.snapshot_stall_s, 1 / m.memory_rate)
    assert overhead_of(m, interval, k) == pytest.approx(closed, abs=6e-6)
    assert overhead_of(m, interval, k) == pytest.approx(once, rel=0.02)


def test_losses_of_nodes_cost_their_own_recovery_and_the_replication_lag():
    m = replace(NODES16, local_rate=0.4 / HOUR, peer_rate=0.2 / HOUR, peer_recovery_s=70, replication_s=20)
    alike = replace(NODES16, local_rate=0.6 / HOUR, local_recovery_s=(0.4 * 54 + 0.2 * (70 + 20)) / 0.6)
    assert overhead_of(m, 150, 4) == pytest.approx(overhead_of(alike, 150, 4))


@given(m=ANY, interval=st.floats(1, 1e4), asked=st.integers(1, 50))
def test_a_commit_has_ended_when_the_next_begins(m, interval, asked):
    k = snapshots_per_commit(m, interval, asked)
    turn = interval + m.snapshot_stall_s
    assert k * turn + m.commit_cost_s >= m.commit_s * (1 - 1e-8)
    assert k == asked or (k - 1) * turn + m.commit_cost_s < m.commit_s


def test_the_limits_are_the_models_of_one_level():
    alone = LevelCosts(snapshot_stall_s=5, local_rate=1 / 1440)
    for interval in (50, 117, 400):
        assert overhead_of(alone, interval, 1) == pytest.approx(overhead(interval, 5, 1440))
    assert overhead_of(replace(alone, local_rate=0), 100, 7) == pytest.approx(0.05)
    store = LevelCosts(snapshot_stall_s=5, store_rate=1 / 1440, store_recovery_s=0)
    assert overhead_of(store, 117, 1) == pytest.approx(overhead(117, 5, 1440))
    assert overhead_of(HARSH, 1e9, 1) == math.inf
    assert overhead_of(LevelCosts(snapshot_stall_s=1, store_rate=1e-8), 7.09e10, 1) == math.inf  # inf / inf on the way

"""Monte-Carlo simulations of the events that the models are about, many lives at a time.

They share no formula with the models: only the rules of what a failure throws back to. Each returns the overhead
(wall time / useful time - 1) of all lives together.
"""

from __future__ import annotations

import numpy as np

from ckpt.policy import LevelCosts

LIVES = 4000


def one_level(rng: np.random.Generator, interval_s: float, stall_s: float, mtbf_s: float, recovery_s: float) -> float:
    """Exponential failures that strike in recovery, too."""
    clock, done = 0.0, 0
    recovering = np.zeros(LIVES)
    for _ in range(100):
        up = rng.exponential(mtbf_s, LIVES)
        running = np.maximum(up - recovering, 0)
        done += int(np.floor(running / (interval_s + stall_s)).sum())
        clock += float(up.sum())
        recovering[:] = recovery_s
    return clock / (done * interval_s) - 1


def memory_and_store(rng: np.random.Generator, measured: LevelCosts, interval_s: float, k: int) -> float:
    """Snapshots in memory, each k-th committed in the background; a commit ends d2 after it began by the clock and
    outlives a failure that memory survives. k turns take at least d2. Failures in recovery are left out."""
    m = measured
    turn_s = interval_s + m.snapshot_stall_s + m.commit_cost_s / k
    assert k * turn_s >= m.commit_s
    rate = m.memory_rate + m.store_rate
    clock = np.zeros(LIVES)
    turns = np.zeros(LIVES)  # snapshots of this line taken, and a part of the next
    begun = np.zeros(LIVES)  # the snapshot whose commit began last ...
    ends = np.zeros(LIVES)  # ... and when that commit ends
    committed = np.zeros(LIVES)
    for _ in range(500):
        up = rng.exponential(1 / rate, LIVES)
        clock += up
        turns += up / turn_s
        newest = np.floor(np.floor(turns) / k) * k
        more = newest > begun
        committed = np.where(more, newest - k, committed)  # one commit at a time: all before have ended
        ends = np.where(more, clock - (turns - newest) * turn_s + m.commit_s, ends)
        begun = np.where(more, newest, begun)
        committed = np.where(clock >= ends, begun, committed)
        kind = rng.random(LIVES) * rate
        lost = kind < m.store_rate
        peer = ~lost & (kind < m.store_rate + m.peer_rate)
        turns = np.where(lost, committed, np.floor(turns))
        begun = np.where(lost, committed, begun)
        ends = np.where(lost, clock, ends)
        peer_s = m.peer_recovery_s + m.replication_s
        clock += np.where(lost, m.store_recovery_s, np.where(peer, peer_s, m.local_recovery_s))
    return float(clock.sum()) / (float(turns.sum()) * interval_s) - 1


def predictions(
    rng: np.random.Generator,
    interval_s: float,
    act_above_s: float,
    costs: tuple[float, float, float, float],
    recall: float,
    precision: float,
) -> float:
    """Wasted time per second. costs: stall, MTBF, recovery, proactive stall. A lead is long enough to save."""
    stall_s, mtbf_s, recovery_s, proactive_s = costs
    unseen, announced = (1 - recall) / mtbf_s, recall / precision / mtbf_s
    clock, useful = 0.0, 0.0
    at = np.zeros(LIVES)  # seconds since the newest checkpoint, the next stall counted in
    for _ in range(300):
        gap = rng.exponential(1 / (unseen + announced), LIVES)
        clock += float(gap.sum())
        at += gap
        useful += float(np.floor(at / (interval_s + stall_s)).sum()) * interval_s
        at %= interval_s + stall_s
        is_announced = rng.random(LIVES) < announced / (unseen + announced)
        strikes = ~is_announced | (rng.random(LIVES) < precision)
        acts = is_announced & (np.minimum(at, interval_s) > act_above_s)
        useful += float(np.minimum(at, interval_s)[acts].sum())
        clock += proactive_s * int(acts.sum()) + recovery_s * int(strikes.sum())
        at = np.where(strikes | acts, 0, at)
    return 1 - useful / clock

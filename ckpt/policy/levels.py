"""The cost models of several levels of checkpoints: the best intervals, and the expected overhead.

There are two models. `nested` is the classical one: training stands still while a level is written. `best` is this
project's: snapshots go to memory, and every k-th is committed to the store in the background, one at a time.

Symbols of the second model's formulas:
- tau: the work between two snapshots. k: snapshots per commit. c1: the stall of a snapshot.
- C2 = c2 + phi d2: what a commit costs training. c2 is its own stall; it takes the part phi of training's speed for d2
  seconds.
- la: the rate of the failures that memory survives. Ra: their mean recovery. l3, R3: the same for failures that only
  the store survives.
- s = tau + c1 + C2/k: the wall time of one snapshot's turn.
d2 moves no optimum: it adds l3 d2 of lost work, and bounds k tau from below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ckpt.errors import UsageError
from ckpt.policy.interval import not_negative, positive, whole_above, within


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the nested model. `stall_s`: what writing it adds to the stall of the levels below it, in seconds,
    more than 0. `rate`: failures per second that need exactly this level, 0 or more. Errors: UsageError."""

    stall_s: float
    rate: float

    def __post_init__(self) -> None:
        positive("stall_s", self.stall_s)
        if self.rate != 0:
            positive("rate", self.rate)


@dataclass(frozen=True, slots=True)
class Nested:
    """The intervals in seconds per level, None for a level that is better left out; and the first-order overhead
    without the recoveries, which no interval changes."""

    intervals_s: tuple[float | None, ...]
    overhead: float


def nested(levels: Sequence[Level]) -> Nested:
    """The best intervals of levels that are written one after the other while training waits, lowest first.

    Benoit, Cavelan, Le Fevre, Robert, Sun 2017 ("Towards optimal multi-level checkpointing", IEEE TC) and, for two
    levels, Di, Robert, Vivien, Cappello 2017 ("Toward an optimal online checkpoint solution under a two-level HPC
    checkpoint model", IEEE TPDS), first order: T_l = sqrt(2 C_l / l_l), H = sum of sqrt(2 l_l C_l).

    A level that does not pay is left out; the next kept level takes over its failures at an unchanged cost. Of all such
    choices the one with the least H is taken. With two levels the lower is left out if sqrt(2 (l1 + l2) C2) is below
    the sum of the two terms. Kept intervals grow from level to level.
    """
    # least[j]: the least H of levels[:j] with levels[j - 1] kept. It serves the classes i .. j - 1, of which it took
    # over all but its own.
    least, served = [0.0], [(0, 0.0)]
    for j, level in enumerate(levels, 1):
        choices = []
        for i in range(j):
            rate = math.fsum(each.rate for each in levels[i:j])
            choices.append((least[i] + math.sqrt(2 * rate * level.stall_s), i, rate))
        h, i, rate = min(choices)
        least.append(h)
        served.append((i, rate))
    needed = max((j for j, level in enumerate(levels, 1) if level.rate), default=0)
    top = min(range(needed, len(levels) + 1), key=least.__getitem__)
    intervals: list[float | None] = [None] * len(levels)
    j = top
    while j:
        i, rate = served[j]
        if rate:
            intervals[j - 1] = math.sqrt(2 * levels[j - 1].stall_s / rate)
        j = i
    return Nested(tuple(intervals), least[top])


def nested_overhead(levels: Sequence[Level], intervals_s: Sequence[float | None]) -> float:
    """The first-order overhead of given intervals in seconds, None for a level that is left out: the sum of C_l/T_l +
    l_l T_l/2 (Benoit et al. 2017, what `nested` minimises). The lowest kept level at or above a failure's own serves
    its recovery; math.inf if there is none."""
    total, unserved = 0.0, 0.0
    for level, interval_s in zip(levels, intervals_s, strict=True):
        unserved += level.rate
        if interval_s is not None:
            total += level.stall_s / positive("interval_s", interval_s) + unserved * interval_s / 2
            unserved = 0.0
    return math.inf if unserved else total


@dataclass(frozen=True, slots=True)
class LevelCosts:
    """The input of the model of memory and store: seconds, and failures per second, each 0 or more. Errors: UsageError.

    A failure belongs to the level that serves its recovery: `local` (the trainer died, its host's memory is intact),
    `peer` (one node is lost), `store` (more is lost than peers' memory survives). After the loss of a node, work that
    was not yet replicated is lost, too: hence `replication_s`.
    """

    snapshot_stall_s: float
    commit_stall_s: float = 0.0  # beyond the snapshot's
    commit_s: float = 0.0  # how long a commit runs
    slowdown: float = 0.0  # the part of training's speed that a running commit takes, 0 to 1
    replication_s: float = 0.0
    local_rate: float = 0.0
    peer_rate: float = 0.0
    store_rate: float = 0.0
    local_recovery_s: float = 0.0
    peer_recovery_s: float = 0.0
    store_recovery_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = not_negative(name, getattr(self, name))
            if name.endswith("_rate") and value:
                positive(name, value)
        within("slowdown", self.slowdown, 0, 1)

    @property
    def commit_cost_s(self) -> float:
        """C2 = c2 + phi d2: seconds of training that one commit takes."""
        return self.commit_stall_s + self.slowdown * self.commit_s

    @property
    def memory_rate(self) -> float:
        """la: failures per second that memory survives."""
        return self.local_rate + self.peer_rate

    @property
    def memory_loss(self) -> float:
        """la Ra: seconds of recovery, replication lag included, per second."""
        return self.local_rate * self.local_recovery_s + self.peer_rate * (self.peer_recovery_s + self.replication_s)


def store_rate(everything: float, losses: Iterable[tuple[float, float]] = ()) -> float:
    """Failures per second that only the store survives: l3 = l_all + the sum over k of l(k) (1 - P_ok(k)).

    `everything`: the rate at which all nodes are lost. `losses`: for each number k of nodes lost at once, the rate, and
    the probability P_ok that memory survives, which follows from the placement (Wang et al. 2023, "GEMINI", for
    replicas in groups). Losses of k nodes in quick succession count as one such loss. `decide` does not use this
    function: it counts the failures that needed the store. Rates per second. Errors: UsageError.
    """
    found = [not_negative("everything", everything)]
    for rate, survives in losses:
        found.append(not_negative("losses", rate) * (1 - within("survives", survives, 0, 1)))
    return math.fsum(found)


def snapshots_per_commit(measured: LevelCosts, interval_s: float, asked: int) -> int:
    """The number of snapshots that a commit really spans if every `asked`-th is to be committed. This project's: at
    most one commit is in flight, so it is the least k >= asked with k s = k (tau + c1) + C2 >= d2. Errors:
    UsageError."""
    positive("interval_s", interval_s)
    if asked < 1:
        raise UsageError(f"asked={asked}: give at least 1 snapshot per commit")
    rest = measured.commit_s - measured.commit_cost_s
    return max(asked, whole_above(rest / (interval_s + measured.snapshot_stall_s)))


def staleness(measured: LevelCosts, interval_s: float, asked: int) -> float:
    """The mean age in seconds of the newest committed checkpoint at a random moment: d2 + k s / 2. This project's: the
    checkpoint is d2 old at its commit, and on average half of a commit's span older than that."""
    k = snapshots_per_commit(measured, interval_s, asked)
    turns_s = k * (interval_s + measured.snapshot_stall_s) + measured.commit_cost_s
    return measured.commit_s + turns_s / 2


def overhead_first_order(measured: LevelCosts, interval_s: float, asked: int) -> float:
    """The expected overhead of a snapshot every `interval_s` and a commit every `asked` snapshots, to first order in
    the rates: c1/tau + C2/(k tau) + la (tau/2 + c1 + Ra) + l3 (k tau/2 + d2 + R3).

    This project's; with la c1 as in the expansion of Daly's complete model, and without a commit Young 1974. In the
    tests it is 2 to 7 % below `overhead_of`, because it ignores failures during repeated work.
    """
    k = snapshots_per_commit(measured, interval_s, asked)
    m = measured
    stalls = m.snapshot_stall_s / interval_s + m.commit_cost_s / (k * interval_s)
    in_memory = m.memory_rate * (interval_s / 2 + m.snapshot_stall_s) + m.memory_loss
    beyond = m.store_rate * (k * interval_s / 2 + m.commit_s + m.store_recovery_s)
    return stalls + in_memory + beyond


def overhead_of(measured: LevelCosts, interval_s: float, asked: int) -> float:
    """The expected overhead in closed form, for exponential failures of which none strikes in recovery. A commit
    survives the failures that memory survives. math.inf where the result exceeds a float.

    With L = la + l3 and E = (e^(L s) - 1) / L, a turn takes t = E (1 + la Ra) / (1 + l3 E) seconds until it is done or
    the store is needed, and is done with probability q = 1 / (1 + l3 E); n turns take Z(n) = t (1 - q^n) / (1 - q).
    From the end of one commit to the end of the next are k turns. After a recovery from the store m = d2/s turns more
    are needed: Y = (Z(k + m) + (1 - q^(k+m)) R3) / q^(k+m), X = Z(k) + (1 - q^k) (R3 + Y), H = X / (k tau) - 1.

    This project's; in the tests it is within 1 % of a simulation of the events.
    """
    k = snapshots_per_commit(measured, interval_s, asked)
    m = measured
    s = interval_s + m.snapshot_stall_s + m.commit_cost_s / k
    rate = m.memory_rate + m.store_rate
    try:
        e = math.expm1(rate * s) / rate if rate else s
        t = e * (1 + m.memory_loss) / (1 + m.store_rate * e)
        log_q = -math.log1p(m.store_rate * e)

        def turns(n: float) -> float:
            return t * math.expm1(n * log_q) / math.expm1(log_q) if log_q else t * n

        n = k + m.commit_s / s
        back = math.exp(-n * log_q) * turns(n) + math.expm1(-n * log_q) * m.store_recovery_s
        wall = turns(k) - math.expm1(k * log_q) * (m.store_recovery_s + back)
    except OverflowError:
        return math.inf
    return max(0.0, wall / (k * interval_s) - 1) if math.isfinite(wall) else math.inf


@dataclass(frozen=True, slots=True)
class Intervals:
    """A snapshot every `steps` steps, and every `snapshots`-th committed. `interval_s` is the work of `steps` steps.

    `snapshot_by`, `commit_by`: the term that decided. "rates": the optimum. "step": an interval is at least one step.
    "snapshot": each commit needs a snapshot. "commit": a commit takes that long. "traffic": the budget of bytes.
    """

    steps: int
    snapshots: int
    interval_s: float
    overhead: float  # by overhead_first_order
    snapshot_by: Literal["rates", "step"]
    commit_by: Literal["rates", "snapshot", "commit", "traffic"]


def best(measured: LevelCosts, step_s: float, traffic_s: float = 0.0) -> Intervals:
    """The whole numbers of steps and snapshots with the least first-order overhead.

    Without bounds tau = sqrt(2 c1 / la) and k tau = sqrt(2 C2 / l3): each level has Young's interval for its own cost
    and its own failures. Bounds: tau is a whole number of steps of `step_s` seconds, k >= 1, and k tau is at least d2
    and `traffic_s`, the seconds between commits that the budget allows (bytes of a commit / bytes per second). If a
    commit costs training nothing, commits follow each other as closely as the bounds allow. The overhead is convex in
    the logarithms of tau and k, so the search looks next to the real-valued optimum.

    The store's rate must be more than 0: give a prior where it is unknown. Errors: UsageError.
    """
    m = measured
    positive("step_s", step_s)
    positive("store_rate", m.store_rate)
    floor_s = max(m.commit_s, not_negative("traffic_s", traffic_s))
    alone_s = math.sqrt(2 * m.snapshot_stall_s / m.memory_rate) if m.memory_rate else math.inf
    commit_s = math.sqrt(2 * m.commit_cost_s / m.store_rate)
    k_real = max(commit_s, floor_s) / max(alone_s, step_s)
    # Raises for a rate so small that no such number exists.
    whole_above(k_real)

    found: tuple[float, int, int] | None = None
    for k in sorted({max(1, math.floor(k_real)), max(1, math.ceil(k_real))}):
        cost = m.snapshot_stall_s + m.commit_cost_s / k
        n_real = math.sqrt(2 * cost / (m.memory_rate + k * m.store_rate)) / step_s
        whole_above(n_real)
        n_least = max(1, whole_above(floor_s / k / step_s))
        for n in sorted({max(n_least, math.floor(n_real)), max(n_least, math.ceil(n_real))}):
            h = overhead_first_order(m, n * step_s, k)
            # Of equal overheads the one with fewer snapshots per commit is taken.
            if found is None or h < found[0] * (1 - 1e-12):
                found = h, k, n
    assert found is not None
    h, k, n = found
    commit_by: Literal["rates", "snapshot", "commit", "traffic"] = "rates"
    if k_real < 1:
        commit_by = "snapshot"
    elif floor_s > commit_s:
        commit_by = "commit" if m.commit_s >= traffic_s else "traffic"
    return Intervals(n, k, n * step_s, h, "step" if alone_s < step_s else "rates", commit_by)

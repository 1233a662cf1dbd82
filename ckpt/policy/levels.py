"""The cost model of memory and store: the expected overhead of given intervals.

Snapshots go to memory, and every k-th is committed to the store in the background, one at a time. Symbols of the
formulas:
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
from dataclasses import dataclass

from ckpt.errors import UsageError
from ckpt.policy.interval import not_negative, positive, whole_above, within


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


def snapshots_per_commit(measured: LevelCosts, interval_s: float, asked: int) -> int:
    """The number of snapshots that a commit really spans if every `asked`-th is to be committed. This project's: at
    most one commit is in flight, so it is the least k >= asked with k s = k (tau + c1) + C2 >= d2. Errors:
    UsageError."""
    positive("interval_s", interval_s)
    if asked < 1:
        raise UsageError(f"asked={asked}: give at least 1 snapshot per commit")
    rest = measured.commit_s - measured.commit_cost_s
    return max(asked, whole_above(rest / (interval_s + measured.snapshot_stall_s)))


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

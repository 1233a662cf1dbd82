"""How far a source of alarms is to be believed: what came of its alarms, as numbers that outlive the job.

An alarm says: a failure of this node within WINDOW_S. It is **true** where one came, **late** where it came before
anything could have been made safe, **false** where none came; a failure without an alarm that stood is **missed**.
Precision is the part of the alarms that came true, late ones too; recall the part of the failures for which there was
an alarm in time (reference: Aupy, Robert, Vivien, Zaidouni 2014, where only what can be acted on counts).

Both are given by their cautious ends: the value that is exceeded with a probability of 95 % (Clopper and Pearson 1934),
which is the 5 % quantile of the Beta posterior to the prior Beta(0, 1): it is 0 where nothing came true, however often.
Old outcomes fade as new ones come.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

WINDOW_S = 600.0
OUTCOMES_MIN = 20  # before so many nothing is believed: the recall is 0
PRECISION_MIN = 0.05  # an alarm of which 19 of 20 come to nothing is noise, however rare failures are
CAUTION = 0.05
PROOF = 0.01  # stricter, since it is looked at after each outcome: chance gets beyond 5 % at last
DOUBT = 0.5  # a proven source is one until the odds are even: else chance would make it one and none in turns
MEMORY = 128  # outcomes of one kind or another: the weight of all of an endless row of them
LEADS = 16
LARGEST = 1e12


@dataclass(frozen=True, slots=True)
class Score:
    """Of one source. `watched_s`: node-seconds in which it would have raised an alarm. `seen`: outcomes ever, which
    only grow; the other counts fade. `leads_s`: of the newest true alarms, from the alarm to the failure, oldest first.
    `was_proven`: at the newest outcome, or since, as time without one went by. Methods return the next value."""

    true: float = 0.0
    late: float = 0.0
    false: float = 0.0
    missed: float = 0.0
    watched_s: float = 0.0
    seen: int = 0
    leads_s: tuple[float, ...] = ()
    was_proven: bool = False

    # -- outcomes

    def came(self, lead_s: float, in_time: bool) -> Score:
        """A failure, so long after the alarm."""
        faded = self._faded()
        faded = replace(faded, true=faded.true + 1) if in_time else replace(faded, late=faded.late + 1)
        return replace(faded, leads_s=(*self.leads_s, max(0.0, lead_s))[-LEADS:])._judged()

    def came_to_nothing(self) -> Score:
        faded = self._faded()
        return replace(faded, false=faded.false + 1)._judged()

    def was_silent(self) -> Score:
        """A failure, and no alarm that stood."""
        faded = self._faded()
        return replace(faded, missed=faded.missed + 1)._judged()

    def watched(self, seconds: float) -> Score:
        """It can be proven by that alone: the rarer failures are, the less comes true by chance."""
        return replace(self, watched_s=min(LARGEST, self.watched_s + max(0.0, seconds)))._judged()

    def _faded(self) -> Score:
        keep = 1 - 1 / MEMORY
        counts = {name: keep * getattr(self, name) for name in ("true", "late", "false", "missed", "watched_s")}
        return replace(self, seen=self.seen + 1, **counts)

    def _judged(self) -> Score:
        proven = self.proven
        return self if proven == self.was_proven else replace(self, was_proven=proven)

    # -- what follows

    @property
    def alarms(self) -> float:
        return self.true + self.late + self.false

    @property
    def failures(self) -> float:
        return self.true + self.late + self.missed

    @property
    def precision(self) -> float:
        """Its cautious end."""
        return self._precision(CAUTION)

    def _precision(self, p: float) -> float:
        return beta_quantile(self.true + self.late, self.false + 1, p)

    @property
    def recall(self) -> float:
        """Its cautious end; 0 as long as the source is not proven."""
        return self.bound_of_recall if self.proven else 0.0

    @property
    def bound_of_recall(self) -> float:
        """The cautious end of the recall, proven or not."""
        return beta_quantile(self.true, self.late + self.missed + 1, CAUTION)

    @property
    def chance(self) -> float:
        """The precision of an alarm that knows nothing: a failure comes within the window by chance."""
        if self.watched_s <= 0:
            return 1.0
        return -math.expm1(-WINDOW_S * self.failures / self.watched_s)

    @property
    def proven(self) -> bool:
        """Whether it may change anything: enough is seen of it, and it is better than chance with a probability of
        99 %; and from then on for as long as it is more likely better than not. A source that always cries finds every
        failure, and proves nothing."""
        if self.seen < OUTCOMES_MIN or self.true <= 0:
            return False
        return self._precision(DOUBT if self.was_proven else PROOF) > max(self.chance, PRECISION_MIN)

    @property
    def lead_s(self) -> float | None:
        """Usually so long from an alarm to the failure; None where none came true."""
        return statistics.median(self.leads_s) if self.leads_s else None

    # -- as numbers

    def numbers(self) -> dict[str, float]:
        """To be kept. Times in seconds; each from 0 to 10^12."""
        names = ("true", "late", "false", "missed", "watched_s", "seen", "was_proven")
        found = {name: float(getattr(self, name)) for name in names}
        return found | {f"lead.{i}": min(each, LARGEST) for i, each in enumerate(self.leads_s)}

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> Score | None:
        """What `numbers` gave; None: it is something else."""
        rest = dict(numbers)
        leads = [rest.pop(f"lead.{i}") for i in range(LEADS) if f"lead.{i}" in rest]
        counts = {name: rest.pop(name, math.nan) for name in ("true", "late", "false", "missed")}
        watched_s, seen = rest.pop("watched_s", math.nan), rest.pop("seen", math.nan)
        was_proven = rest.pop("was_proven", 0.0)
        values = (*counts.values(), watched_s, seen, was_proven, *leads)
        if rest or not all(0 <= each <= LARGEST for each in values) or seen != int(seen):
            return None
        if sum(counts.values()) > min(seen, MEMORY) * (1 + 1e-9):
            return None
        return cls(**counts, watched_s=watched_s, seen=int(seen), leads_s=tuple(leads), was_proven=was_proven > 0)


def merged(one: Mapping[str, Score], other: Mapping[str, Score]) -> dict[str, Score]:
    """Of each source that of which more was seen, so that nothing is counted twice."""
    found = dict(one)
    for name, score in other.items():
        mine = found.get(name)
        if mine is None or (score.seen, score.watched_s) > (mine.seen, mine.watched_s):
            found[name] = score
    return found


@functools.lru_cache(256)  # it takes half a millisecond, and is asked of the same outcomes again and again
def beta_quantile(a: float, b: float, p: float) -> float:
    """x with I_x(a, b) = p, 0 < p < 1, b > 0; 0 where a is 0. To about 1e-12, by bisection."""
    if a <= 0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if beta_cdf(a, b, middle) < p else (low, middle)
    return (low + high) / 2


def beta_cdf(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22), summed up as Lentz
    1976 does."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - beta_cdf(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x) - math.log(a)
    )
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    fraction = d
    for m in range(1, 10_000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * fraction

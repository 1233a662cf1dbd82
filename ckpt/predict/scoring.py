"""The score of a source of alarms: how far it can be trusted, as numbers that outlive the job.

An alarm predicts a failure of its node within WINDOW_S. It is **true** if one came in time, **late** if the failure
came before the state could be replicated, and **false** if none came. A failure without a standing alarm is **missed**.
Precision is the part of the alarms that came true, late ones included. Recall is the part of the failures with an alarm
in time (Aupy, Robert, Vivien, Zaidouni 2014: only alarms that can be acted on count).

Both are given as cautious bounds: the value that is exceeded with a probability of 95 % (Clopper and Pearson 1934).
That is the 5 % quantile of the Beta posterior to the prior Beta(0, 1); it is 0 if no alarm came true. Old outcomes fade
as new ones come.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

WINDOW_S = 600.0
OUTCOMES_MIN = 20  # with fewer outcomes nothing is proven: the recall is 0
# If 19 of 20 alarms are false, they are noise, however rare failures are.
PRECISION_MIN = 0.05
BOUND_QUANTILE = 0.05  # the quantile of the cautious bounds
# Stricter than CAUTION: it is checked after each outcome, and chance exceeds 5 % in the end.
PROOF_QUANTILE = 0.01
# A proven source stays proven until the odds are even. Otherwise chance would make it flip to and fro.
STAY_QUANTILE = 0.5
MEMORY = 128  # the weight of an endless series of outcomes after fading
LEADS = 16
LARGEST = 1e12


@dataclass(frozen=True, slots=True)
class Score:
    """The outcomes of one source, as a value. Methods return the next value.

    `watched_s`: node-seconds during which it could have raised an alarm. `seen`: all outcomes so far; it only grows,
    while the other counts fade. `leads_s`: of the newest alarms that came true or late, from the alarm to the failure,
    oldest first. `was_proven`: whether it was proven at the newest outcome, or later by more time without one.
    """

    true: float = 0.0
    late: float = 0.0
    false: float = 0.0
    missed: float = 0.0
    watched_s: float = 0.0
    seen: int = 0
    leads_s: tuple[float, ...] = ()
    was_proven: bool = False

    # -- outcomes

    def with_true_alarm(self, lead_s: float, in_time: bool) -> Score:
        """A failure came `lead_s` after the alarm."""
        faded = self._with_fading()
        faded = replace(faded, true=faded.true + 1) if in_time else replace(faded, late=faded.late + 1)
        return replace(faded, leads_s=(*self.leads_s, max(0.0, lead_s))[-LEADS:])._with_judgement()

    def with_false_alarm(self) -> Score:
        """An alarm was false."""
        faded = self._with_fading()
        return replace(faded, false=faded.false + 1)._with_judgement()

    def with_missed_failure(self) -> Score:
        """A failure came without a standing alarm."""
        faded = self._with_fading()
        return replace(faded, missed=faded.missed + 1)._with_judgement()

    def with_watch_time(self, seconds: float) -> Score:
        """The source watched for `seconds`. That alone can prove it: the rarer failures are, the less comes true by
        chance."""
        return replace(self, watched_s=min(LARGEST, self.watched_s + max(0.0, seconds)))._with_judgement()

    def _with_fading(self) -> Score:
        keep = 1 - 1 / MEMORY
        counts = {name: keep * getattr(self, name) for name in ("true", "late", "false", "missed", "watched_s")}
        return replace(self, seen=self.seen + 1, **counts)

    def _with_judgement(self) -> Score:
        proven = self.is_proven
        return self if proven == self.was_proven else replace(self, was_proven=proven)

    # -- what follows from the outcomes

    @property
    def alarms(self) -> float:
        return self.true + self.late + self.false

    @property
    def failures(self) -> float:
        return self.true + self.late + self.missed

    @property
    def precision(self) -> float:
        """The cautious bound of the precision."""
        return self._precision(BOUND_QUANTILE)

    def _precision(self, p: float) -> float:
        return beta_quantile(self.true + self.late, self.false + 1, p)

    @property
    def recall(self) -> float:
        """The cautious bound of the recall; 0 while the source is not proven."""
        return self.recall_bound if self.is_proven else 0.0

    @property
    def recall_bound(self) -> float:
        """The cautious bound of the recall, whether or not the source is proven."""
        return beta_quantile(self.true, self.late + self.missed + 1, BOUND_QUANTILE)

    @property
    def chance_precision(self) -> float:
        """The precision of an alarm at random: the probability that a failure comes within the window by chance."""
        if self.watched_s <= 0:
            return 1.0
        return -math.expm1(-WINDOW_S * self.failures / self.watched_s)

    @property
    def is_proven(self) -> bool:
        """Whether the source may change decisions. It needs OUTCOMES_MIN outcomes, and must be better than chance with
        a probability of 99 %. From then on it stays proven while it is more likely better than not. A source that
        always raises an alarm finds every failure and proves nothing."""
        if self.seen < OUTCOMES_MIN or self.true <= 0:
            return False
        return self._precision(STAY_QUANTILE if self.was_proven else PROOF_QUANTILE) > max(
            self.chance_precision, PRECISION_MIN
        )

    @property
    def lead_s(self) -> float | None:
        """The median seconds from an alarm to its failure; None if no alarm was followed by one."""
        return statistics.median(self.leads_s) if self.leads_s else None

    # -- as numbers

    def numbers(self) -> dict[str, float]:
        """The numbers to keep. Times in seconds; each number from 0 to 10^12."""
        names = ("true", "late", "false", "missed", "watched_s", "seen", "was_proven")
        found = {name: float(getattr(self, name)) for name in names}
        return found | {f"lead.{i}": min(each, LARGEST) for i, each in enumerate(self.leads_s)}

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, float]) -> Score | None:
        """The score from `numbers`; None for invalid numbers."""
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


def merge_scores(one: Mapping[str, Score], other: Mapping[str, Score]) -> dict[str, Score]:
    """For each source the score with more outcomes, so that nothing is counted twice."""
    found = dict(one)
    for name, score in other.items():
        mine = found.get(name)
        if mine is None or (score.seen, score.watched_s) > (mine.seen, mine.watched_s):
            found[name] = score
    return found


@functools.lru_cache(256)  # half a millisecond, asked for the same outcomes repeatedly
def beta_quantile(a: float, b: float, p: float) -> float:
    """x with I_x(a, b) = p, 0 < p < 1, b > 0; 0 if a is 0. To about 1e-12, by bisection."""
    if a <= 0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if beta_cdf(a, b, middle) < p else (low, middle)
    return (low + high) / 2


def beta_cdf(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22), evaluated by Lentz
    1976."""
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

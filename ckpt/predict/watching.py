"""The watch over one node's signals: which source raises an alarm, and when.

There are three kinds of sources: a family of signals of which one deviates (`cusum`); `hazard`, a regression on all
families, refitted after each failure of this node; and `model`, a predictor trained on recorded signals. `outcomes`
decides whether a source is trusted. Pure: the caller gives each reading and time.
"""

from __future__ import annotations

import collections
import math
import random
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ckpt.predict.cusum import Cusum
from ckpt.predict.hazard import Array, Hazard, fit
from ckpt.predict.scoring import WINDOW_S

PERIOD_S = 5.0  # between two readings
FAMILIES = ("memory", "io", "cpu", "ecc", "disk", "net", "gpu")
HAZARD, MODEL = "hazard", "model"
SOURCES = (*FAMILIES, HAZARD, MODEL)

# At two deviations above the mean an alarm comes within 16 readings; false alarms are rare.
K, H = 1.0, 16.0
H_CRITICAL = 5.0  # for signals where a single event is an alarm
CRITICAL_SIGNALS = ("gpu.xid", "gpu.ecc_uncorrected", "gpu.retired", "ecc.uncorrected")
# The least deviation, by the full name or the first part of it: smaller movements count as rest.
DEVIATION_MIN = {
    "memory.used": 0.005,
    "memory": 0.01,
    "io": 0.01,
    "cpu": 0.05,
    "ecc": 0.02,
    "disk.wait_s": 0.005,
    "disk": 0.02,
    "net.drops": 1.0,
    "net": 0.1,
    "gpu.temperature": 1.0,
    "gpu.throttled": 0.1,
    "gpu": 0.02,
}

HAZARD_ALARM = 0.3  # the probability that is an alarm
FAILURES_MIN = 3  # with fewer failures the hazard is the base rate
BASE_S = 86_400.0  # one failure in that time, before any was seen
POSITIVES_EVERY = 6  # keep every sixth reading before a failure
NEGATIVES_EVERY = 60  # keep every sixtieth reading without a failure after it,
NEGATIVES_MAX = 512  # ... and a random sample of that many of them
FAILURES_MAX = 32
SIGNALS_MAX = 64


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm. `probability`: of a failure within the window, if the source gives one."""

    source: str
    at_s: float
    probability: float | None = None


class Model(Protocol):
    """A trained predictor. `alarm_above`: the probability that is an alarm."""

    alarm_above: float

    def add_reading(self, values: dict[str, float]) -> float | None:
        """The probability after one more reading; None while there are too few readings."""
        ...


class SignalWatch:
    """The watch over one node. Times are on a clock that never goes back. One thread at a time."""

    def __init__(self, model: Model | None = None, seed: int = 0) -> None:
        self.probabilities: dict[str, float] = {}  # of the newest reading
        self._model = model
        self._detectors: dict[str, Cusum] = {}
        self._raised_at_s: dict[str, float] = {}
        self._learner = _Learner(seed)

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources that may raise an alarm here, in the order of SOURCES."""
        families = {_family(name) for name in self._detectors}
        more = {HAZARD} if self._detectors else set()
        return tuple(each for each in SOURCES if each in families | more or (each == MODEL and self._model is not None))

    def add_reading(self, now_s: float, values: dict[str, float]) -> list[Alarm]:
        """The alarms that this reading raises. A standing alarm is raised again once its window has passed."""
        for name, value in list(values.items())[:SIGNALS_MAX]:
            known = self._detectors.get(name)
            if known is None:
                if _family(name) not in FAMILIES or len(self._detectors) >= SIGNALS_MAX:
                    continue
                known = Cusum(K, H_CRITICAL if name in CRITICAL_SIGNALS else H, _min_deviation(name))
            self._detectors[name] = known.with_reading(value)
        standing: dict[str, float | None] = {
            _family(name): None for name, each in self._detectors.items() if each.is_alarm
        }
        hazard = self._learner.add_reading(now_s, self._features(values))
        self.probabilities = {HAZARD: hazard}
        if hazard >= HAZARD_ALARM:
            standing[HAZARD] = hazard
        if self._model is not None:
            probability = self._model.add_reading(values)
            if probability is not None:
                self.probabilities[MODEL] = probability
                if probability >= self._model.alarm_above:
                    standing[MODEL] = probability
        found = []
        for source, probability in standing.items():
            if now_s - self._raised_at_s.get(source, -math.inf) >= WINDOW_S:
                self._raised_at_s[source] = now_s
                found.append(Alarm(source, now_s, probability))
        return found

    def record_failure(self, now_s: float) -> None:
        """Records that this node failed: the readings before it are learnt from, and all detectors start anew."""
        self._learner.record_failure(now_s)
        self._raised_at_s.clear()
        self._detectors = {
            name: replace(each, cumulative_sum=0.0, is_alarm=False, alarm_readings=0)
            for name, each in self._detectors.items()
        }

    def _features(self, values: dict[str, float]) -> Array:
        """How far each family deviates, 0 to 2 with 1 as the alarm; and how full memory is."""
        found = dict.fromkeys(FAMILIES, 0.0)
        for name, each in self._detectors.items():
            found[_family(name)] = max(found[_family(name)], each.cumulative_sum / each.h)
        used = values.get("memory.used", 0.0)
        # A high power: only memory that is nearly full is a risk.
        return np.array([*found.values(), min(1.0, max(0.0, used)) ** 8])


class _Learner:
    """The hazard model of one node: its training data, and its current fit."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._hazard = Hazard.from_base_rate(WINDOW_S / BASE_S, len(FAMILIES) + 1)
        # The readings of the current window.
        self._recent: collections.deque[tuple[float, int, Array]] = collections.deque()
        self._positives: collections.deque[list[Array]] = collections.deque(maxlen=FAILURES_MAX)
        self._negatives: list[Array] = []
        self._count = 0  # of readings
        # Sampled readings so far that no failure followed, kept or not.
        self._negatives_seen = 0

    def add_reading(self, now_s: float, features: Array) -> float:
        self._count += 1
        self._recent.append((now_s, self._count, features))
        while self._recent and self._recent[0][0] <= now_s - WINDOW_S:
            _, number, old = self._recent.popleft()
            if number % NEGATIVES_EVERY == 0:
                self._sample_negative(old)
        return self._hazard.probability(features)

    def record_failure(self, now_s: float) -> None:
        before = [each for at_s, _, each in self._recent if at_s >= now_s - WINDOW_S]
        self._recent.clear()
        if before:
            self._positives.append(before[::-1][::POSITIVES_EVERY])
            self._refit_hazard()

    def _sample_negative(self, features: Array) -> None:
        """Keeps a uniform random sample of all readings given (Vitter 1985, algorithm R)."""
        self._negatives_seen += 1
        if len(self._negatives) < NEGATIVES_MAX:
            self._negatives.append(features)
        elif (at := self._random.randrange(self._negatives_seen)) < NEGATIVES_MAX:
            self._negatives[at] = features

    def _refit_hazard(self) -> None:
        """Refits the model. The readings of one window say nearly the same: together they count as one."""
        each = PERIOD_S / WINDOW_S
        if len(self._positives) < FAILURES_MIN or not self._negatives:
            return
        x, w, groups = list(self._negatives), [], []
        w += [each * NEGATIVES_EVERY * self._negatives_seen / len(self._negatives)] * len(self._negatives)
        groups += list(range(-len(self._negatives), 0))
        for number, rows in enumerate(self._positives):
            x += rows
            w += [each * POSITIVES_EVERY] * len(rows)
            groups += [number] * len(rows)
        y = np.array([0.0] * len(self._negatives) + [1.0] * (len(x) - len(self._negatives)))
        self._hazard = fit(np.array(x), y, np.array(w), np.array(groups))


def _family(name: str) -> str:
    return name.partition(".")[0]


def _min_deviation(name: str) -> float:
    return DEVIATION_MIN[name] if name in DEVIATION_MIN else DEVIATION_MIN[_family(name)]

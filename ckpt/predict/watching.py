"""The watch over one node's signals: which source raises an alarm, and when.

There are two kinds of sources: a family of signals of which one deviates (`cusum`), and `model`, a predictor trained on
recorded signals. `outcomes` decides whether a source is trusted. Pure: the caller gives each reading and time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt.predict.cusum import Cusum
from ckpt.predict.scoring import WINDOW_S

if TYPE_CHECKING:
    from ckpt.predict.model import PredictorReader

PERIOD_S = 5.0  # between two readings
FAMILIES = ("memory", "io", "cpu", "ecc", "disk", "net", "gpu")
MODEL = "model"
SOURCES = (*FAMILIES, MODEL)

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

SIGNALS_MAX = 64


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm. `probability`: of a failure within the window, if the source gives one."""

    source: str
    at_s: float
    probability: float | None = None


class SignalWatch:
    """The watch over one node. Times are on a clock that never goes back. One thread at a time."""

    def __init__(self, model: PredictorReader | None = None) -> None:
        self._model = model
        self._detectors: dict[str, Cusum] = {}
        self._raised_at_s: dict[str, float] = {}

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources that may raise an alarm here, in the order of SOURCES."""
        families = {_family(name) for name in self._detectors}
        return tuple(each for each in SOURCES if each in families or (each == MODEL and self._model is not None))

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
        if self._model is not None:
            probability = self._model.add_reading(values)
            if probability is not None and probability >= self._model.alarm_above:
                standing[MODEL] = probability
        found = []
        for source, probability in standing.items():
            if now_s - self._raised_at_s.get(source, -math.inf) >= WINDOW_S:
                self._raised_at_s[source] = now_s
                found.append(Alarm(source, now_s, probability))
        return found

    def record_failure(self) -> None:
        """Records that this node failed: all detectors start anew."""
        self._raised_at_s.clear()
        self._detectors = {
            name: replace(each, cumulative_sum=0.0, is_alarm=False, alarm_readings=0)
            for name, each in self._detectors.items()
        }


def _family(name: str) -> str:
    return name.partition(".")[0]


def _min_deviation(name: str) -> float:
    return DEVIATION_MIN[name] if name in DEVIATION_MIN else DEVIATION_MIN[_family(name)]

"""The best interval, and when to act on a prediction, if some failures are predicted.

A predictor has a recall r (the part of the failures that it announces) and a precision p (the part of its announcements
that come true). Only announcements in time count for the recall: their lead covers the time to receive and agree on
them, take a snapshot and replicate it. Both are estimates: give cautious bounds, and a recall of 0 for a predictor that
has proven nothing yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckpt.errors import UsageError
from ckpt.policy.interval import not_negative, positive


@dataclass(frozen=True, slots=True)
class Predicted:
    """The best interval and rule of action. `interval_s`: the work between two periodic checkpoints. `act_above_s`: act
    on an announcement if at least this much work is unsaved; math.inf if this predictor is better ignored. `waste`: the
    expected waste, see `predicted_waste`."""

    interval_s: float
    act_above_s: float
    waste: float


def with_predictions(
    stall_s: float, mtbf_s: float, recovery_s: float, proactive_s: float, recall: float, precision: float
) -> Predicted:
    """The best interval and rule of action, to first order (Aupy, Robert, Vivien, Zaidouni 2014, "Checkpointing
    algorithms and fault prediction", JPDC). `proactive_s`: the stall Cp of a checkpoint that an announcement causes.
    `recall` in [0, 1): if all failures were announced, no interval would be too long. `precision` in (0, 1]. Errors:
    UsageError.

    Act if more than beta = Cp/p is unsaved. Intervals up to beta never act, and the best of them is Young's. Among the
    longer ones it is sqrt((2 M C - r beta^2) / (1 - r)). The two cost curves meet at beta with one slope. The sign of
    that slope, of 2 M C - beta^2, says on which side the optimum lies. So a bad predictor (a large beta) leaves Young's
    interval unchanged.
    """
    beta = _act_above(stall_s, mtbf_s, recovery_s, proactive_s, recall, precision)
    spread = 2 * mtbf_s * stall_s
    if recall == 0 or spread <= beta * beta:
        interval_s, beta = math.sqrt(spread), math.inf
    else:
        interval_s = math.sqrt((spread - recall * beta * beta) / (1 - recall))
    return Predicted(
        interval_s, beta, predicted_waste(interval_s, stall_s, mtbf_s, recovery_s, proactive_s, recall, precision)
    )


def predicted_waste(
    interval_s: float,
    stall_s: float,
    mtbf_s: float,
    recovery_s: float,
    proactive_s: float,
    recall: float,
    precision: float,
) -> float:
    """The expected seconds of stall, lost work and recovery per second, to first order, with the rule of action of
    `with_predictions` (Aupy et al. 2014): for T > beta C/T + (1/M) [(1 - r) T/2 + (r/p) Cp (1 - Cp / (2 p T)) + R],
    else C/T + (1/M) [T/2 + R]. Domains as there. Errors: UsageError."""
    positive("interval_s", interval_s)
    beta = _act_above(stall_s, mtbf_s, recovery_s, proactive_s, recall, precision)
    t = interval_s
    if t > beta:
        lost = (1 - recall) * t / 2 + recall * beta * (1 - beta / (2 * t))
    else:
        lost = t / 2
    return stall_s / t + (lost + recovery_s) / mtbf_s


def _act_above(
    stall_s: float, mtbf_s: float, recovery_s: float, proactive_s: float, recall: float, precision: float
) -> float:
    """beta = Cp/p. Errors: UsageError for an argument outside its domain."""
    positive("stall_s", stall_s)
    positive("mtbf_s", mtbf_s)
    not_negative("recovery_s", recovery_s)
    not_negative("proactive_s", proactive_s)
    if not 0 <= recall < 1:
        raise UsageError(f"recall={recall}: give a number in [0, 1)")
    if not 0 < precision <= 1:
        raise UsageError(f"precision={precision}: give a number in (0, 1]")
    return proactive_s / precision

"""Schedules of checkpoints for Weibull up-times, where the hazard changes with the time a machine has been up.

Up-times of spot machines fit shapes of .5 to .9: most machines fail young, so saves should be frequent first and become
rare. A schedule is a series of up-times at which checkpoints begin, counted from the start on a fresh machine. It
starts anew after a failure. Times are in seconds. `shape` 1 is the exponential case and gives Young's interval.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from ckpt.errors import UsageError
from ckpt.policy.interval import not_negative, positive, within

SHAPE_MIN, SHAPE_MAX = 0.1, 10.0  # beyond, the scale means nothing for machines
NEGLIGIBLE = 1e-12  # the part of the machines still up at which the sum over a schedule ends


def weibull_scale(mtbf_s: float, shape: float) -> float:
    """The scale in seconds of the Weibull distribution (Weibull 1951) with that mean: M / Gamma(1 + 1/shape). Shape: .1
    to 10. Errors: UsageError."""
    within("shape", shape, SHAPE_MIN, SHAPE_MAX)
    return positive("mtbf_s", mtbf_s) / math.gamma(1 + 1 / shape)


def weibull_survival(uptime_s: float, mtbf_s: float, shape: float) -> float:
    """The probability that a machine is up for longer than `uptime_s`: exp(-(t / scale)^shape) (Weibull 1951)."""
    return _survival(not_negative("uptime_s", uptime_s) / weibull_scale(mtbf_s, shape), shape)


def weibull_next(uptime_s: float, stall_s: float, mtbf_s: float, shape: float) -> float:
    """The up-time, more than `uptime_s`, at which the next checkpoint is due after one at `uptime_s` (0: the start).

    One is due whenever the integral of the checkpoint density sqrt(h(t) / 2C), h the hazard, has grown by 1 (Ling, Mi,
    Lin 2001, "A variational calculus approach to optimal checkpoint placement", IEEE TC; for Weibull in closed form):
    t^((k+1)/2) grows by (k+1)/2 sqrt(2 C scale^k / k) each time. The hazard of the moment alone, sqrt(2C / h(t)), would
    be wrong where the hazard grows: at the start, where it is 0, no checkpoint would ever be due. Errors: UsageError.
    """
    not_negative("uptime_s", uptime_s)
    positive("stall_s", stall_s)
    scale = weibull_scale(mtbf_s, shape)
    power = (shape + 1) / 2
    # In units of the scale: no power of seconds then leaves the range of floats.
    try:
        grown = math.pow(uptime_s / scale, power) + power * math.sqrt(2 * stall_s / (shape * scale))
    except OverflowError:
        grown = math.inf
    due_s = scale * math.pow(grown, 1 / power)
    if not uptime_s < due_s < math.inf:
        raise UsageError(
            f"stall_s={stall_s} with mtbf_s={mtbf_s}, shape={shape} gives no checkpoint after {uptime_s} s"
        )
    return due_s


def weibull_times(stall_s: float, mtbf_s: float, shape: float) -> Iterator[float]:
    """The up-times at which checkpoints are due, without an end: the schedule of weibull_next from the start, t_j = [j
    (k+1)/2 sqrt(2 C scale^k / k)]^(2/(k+1))."""
    positive("stall_s", stall_s)
    scale = weibull_scale(mtbf_s, shape)
    power = (shape + 1) / 2
    each = power * math.sqrt(2 * stall_s / (shape * scale))
    return (scale * math.pow(j * each, 1 / power) for j in itertools.count(1))


def weibull_overhead(times_s: Iterable[float], stall_s: float, mtbf_s: float, recovery_s: float, shape: float) -> float:
    """The expected overhead of a schedule, by renewal reward (Ross 1996, section 3.6): (M + R) / U - 1.

    U is the useful work that a machine's life leaves behind. It is the sum, over the checkpoints, of the work since the
    one before, times the probability that the machine is up until the checkpoint is taken. Up-times are independent,
    and none ends in recovery. `times_s` grows, and is read until almost no machine is that old; work after its end
    counts as lost. A checkpoint that is due during a stall is skipped. Errors: UsageError.
    """
    not_negative("stall_s", stall_s)
    not_negative("recovery_s", recovery_s)
    scale = weibull_scale(mtbf_s, shape)
    useful_s, begun_s, before_s = 0.0, 0.0, 0.0
    for time_s in times_s:
        if not time_s > before_s:
            raise UsageError(f"times_s must grow: {time_s} s is not after {before_s} s")
        before_s = positive("times_s", time_s)
        work_s = time_s - begun_s
        if work_s <= 0:
            continue
        begun_s = time_s + stall_s
        up = _survival(begun_s / scale, shape)
        useful_s += work_s * up
        if up < NEGLIGIBLE:
            break
    return (mtbf_s + recovery_s) / useful_s - 1 if useful_s else math.inf


def _survival(scales: float, shape: float) -> float:
    """exp(-x^shape), for x up-times in units of the scale."""
    try:
        return math.exp(-math.pow(scales, shape))
    except OverflowError:
        return 0.0

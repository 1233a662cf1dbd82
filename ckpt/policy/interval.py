"""How often to save when there is one level: the classical answers, and what each of them costs.

Words and units, here and in the modules beside this one: `stall_s`, the seconds that one checkpoint keeps training
from going on; `mtbf_s`, the mean time between failures; `recovery_s`, the seconds from a failure until training goes
on from the newest checkpoint; rates are failures per second; an interval is the *useful* work between two
checkpoints, the stall not counted in; an overhead is wall time / useful time - 1.

What belongs in none of the formulas is the latency of a commit in the background: the best interval depends on what a
checkpoint keeps from training, never on how long it takes to arrive (Vaidya 1997, "Impact of checkpoint latency on
overhead ratio of a checkpointing scheme"). It adds to the work that is lost, and bounds the interval from below.

Every function is pure. A value outside its domain (negative, infinite, not a number, above 1e100 or, where 0 is none,
below 1e-100) is a UsageError that names it; within it no result is not a number.
"""

from __future__ import annotations

import math

from ckpt.errors import UsageError

LARGEST = 1e100  # of times and rates, and 1 / that the least: no product in a formula leaves the range of floats then
ROUNDING = 1e-9  # relative: a quotient that misses a whole number by less is that number


def young(stall_s: float, mtbf_s: float) -> float:
    """The interval in seconds by Young 1974 ("A first order approximation to the optimum checkpoint interval"):
    sqrt(2 C M). Within 1 % of the least overhead while the stall is below a hundredth of the MTBF.
    """
    return math.sqrt(2 * not_negative("stall_s", stall_s) * positive("mtbf_s", mtbf_s))


def daly(stall_s: float, mtbf_s: float, recovery_s: float) -> float:
    """The interval in seconds by Daly 2006 ("A higher order estimate of the optimum checkpoint interval for restart
    dumps"), first order: sqrt(2 C (M + R)).

    The exact optimum does not depend on R, so that this is the weakest of the four when recovery takes long.
    """
    not_negative("recovery_s", recovery_s)
    return math.sqrt(2 * not_negative("stall_s", stall_s) * (positive("mtbf_s", mtbf_s) + recovery_s))


def daly_higher(stall_s: float, mtbf_s: float) -> float:
    """The interval in seconds by Daly 2006, higher order: with x = C / 2M,
    sqrt(2 C M) (1 + sqrt(x) / 3 + x / 9) - C for C < 2M, else M.
    """
    interval = young(stall_s, mtbf_s)
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    x = stall_s / (2 * mtbf_s)
    return max(0.0, interval * (1 + math.sqrt(x) / 3 + x / 9) - stall_s)  # rounding, where the stall is next to nothing


def exact(stall_s: float, mtbf_s: float) -> float:
    """The interval in seconds that makes `overhead` least: M (1 + W0(-exp(-C/M - 1))), W0 the principal branch of
    Lambert's W. It is where the derivative of Daly 2006's complete cost function vanishes: with x = tau / M,
    e^(x + C/M) (1 - x) = 1. To 1e-12 of its value, also where C is tiny and W0 is at its branch point.
    """
    return positive("mtbf_s", mtbf_s) * _root(not_negative("stall_s", stall_s) / mtbf_s)


def overhead(interval_s: float, stall_s: float, mtbf_s: float, recovery_s: float = 0.0) -> float:
    """The expected overhead when every `interval_s` seconds of work are followed by a stall, for exponential
    failures that may strike in recovery, too (Daly 2006, the complete model):
    M e^(R/M) (e^((tau + C)/M) - 1) / tau - 1. math.inf where that is beyond a float.
    """
    positive("interval_s", interval_s)
    not_negative("stall_s", stall_s)
    positive("mtbf_s", mtbf_s)
    not_negative("recovery_s", recovery_s)
    try:
        wall = mtbf_s * math.exp(recovery_s / mtbf_s) * math.expm1((interval_s + stall_s) / mtbf_s)
    except OverflowError:
        return math.inf
    return max(0.0, wall / interval_s - 1)  # rounding, where next to nothing is lost


def checkfreq_steps(stall_s: float, step_s: float, budget: float) -> int:
    """The least number of steps between snapshots that keeps stall / work within `budget` (.035: 3.5 %), at least 1.

    CheckFreq (Mohan, Phanishayee, Chidambaram 2021), the rule behind its choice of frequency: k >= o / (p t), with o
    the stall and t the seconds of a step. It knows nothing of failures: it is for who states what saving may cost.
    Both are measured while running; ask again with what was measured, and the interval widens where the budget was
    exceeded.
    """
    not_negative("stall_s", stall_s)
    allowed = positive("step_s", step_s) * positive("budget", budget)
    if not allowed:
        raise UsageError(f"budget={budget} with step_s={step_s}: the product is too small for a number")
    return max(1, whole_above(stall_s / allowed))


def _root(c: float) -> float:
    """x in [0, 1) with x + c + log(1 - x) = 0, c >= 0; that is 1 + W0(-exp(-1 - c))."""
    if c > 1:  # y = 1 - x = exp(-1 - c + y) is below .16 and contracts by y at each turn
        y = 0.0
        for _ in range(30):
            y = math.exp(y - 1 - c)
        return 1 - y
    # -log(1 - x) - x is convex and grows: Newton from above comes down to the root, and stops when it does no more.
    x = min(math.sqrt(2 * c), 0.9)
    for _ in range(60):
        closer = x - (_excess(x) - c) * (1 - x) / x if x else 0.0
        if not 0 < closer < x:
            break
        x = closer
    return x


def _excess(x: float) -> float:
    """-log(1 - x) - x = x^2/2 + x^3/3 + ..., without the cancellation at small x."""
    if x > 0.25:
        return -math.log1p(-x) - x
    total, power, n = 0.0, x * x, 2
    while (term := power / n) > total * 1e-17:
        total, power, n = total + term, power * x, n + 1
    return total


# --- domains, for the modules beside this one, too ----------------------------------------------------------------


def positive(name: str, value: float) -> float:
    """`value`, which must be finite and more than 0, within LARGEST. Errors: UsageError."""
    if not 0 < value < math.inf:
        raise UsageError(f"{name}={value}: a finite number more than 0")
    if not 1 / LARGEST <= value <= LARGEST:
        raise UsageError(f"{name}: a number from {1 / LARGEST:g} to {LARGEST:g}")
    return value


def not_negative(name: str, value: float) -> float:
    """`value`, which must be finite and at least 0, at most LARGEST. Errors: UsageError."""
    if not 0 <= value < math.inf:
        raise UsageError(f"{name}={value}: a finite number, at least 0")
    if value > LARGEST:
        raise UsageError(f"{name}: a number of at most {LARGEST:g}")
    return value


def within(name: str, value: float, low: float, high: float) -> float:
    """`value`, which must be in [low, high]. Errors: UsageError."""
    if not low <= value <= high:
        raise UsageError(f"{name}={value}: between {low} and {high}")
    return value


def whole_above(quotient: float) -> int:
    """The least whole number that is not below `quotient`, which may miss it by rounding. Errors: UsageError."""
    if not math.isfinite(quotient):
        raise UsageError("these values ask for more steps than there are numbers")
    return math.ceil(quotient * (1 - ROUNDING))

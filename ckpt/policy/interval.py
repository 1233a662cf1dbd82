"""The best interval for one level of checkpoints, and the expected overhead of an interval.

Symbols and units of this module and its neighbours:
- `stall_s`: the seconds that one checkpoint stops training. `mtbf_s`: the mean time between failures.
- `recovery_s`: the seconds from a failure until training continues from the newest checkpoint.
- A rate is in failures per second. An interval is the *useful* work between two checkpoints, without the stall.
- An overhead is wall time / useful time - 1.

The latency of a commit in the background is in none of the formulas. The best interval depends on what a checkpoint
costs training, not on how long it takes to arrive (Vaidya 1997, "Impact of checkpoint latency on overhead ratio of a
checkpointing scheme"). The latency adds to the lost work, and bounds the interval from below.

Every function is pure. UsageError names a value outside its domain: negative, infinite, not a number, above 1e100, or
below 1e-100 where 0 is excluded. Inside the domain every result is a number.
"""

from __future__ import annotations

import math

from ckpt.errors import UsageError

# The largest time or rate; 1 / LARGEST is the least. No product in a formula then leaves the range of floats.
LARGEST = 1e100
ROUNDING = 1e-9  # relative: a quotient this close to a whole number is that number


def young(stall_s: float, mtbf_s: float) -> float:
    """The interval in seconds by Young 1974 ("A first order approximation to the optimum checkpoint interval"): sqrt(2
    C M). Its overhead is within 1 % of the least one while the stall is below a hundredth of the MTBF."""
    return math.sqrt(2 * not_negative("stall_s", stall_s) * positive("mtbf_s", mtbf_s))


def exact(stall_s: float, mtbf_s: float) -> float:
    """The interval in seconds with the least `overhead`: M (1 + W0(-exp(-C/M - 1))), W0 the principal branch of
    Lambert's W.

    There the derivative of Daly 2006's complete cost function vanishes: with x = tau / M, e^(x + C/M) (1 - x) = 1. The
    relative error is 1e-12, also where C is tiny and W0 is at its branch point.
    """
    return positive("mtbf_s", mtbf_s) * _root(not_negative("stall_s", stall_s) / mtbf_s)


def overhead(interval_s: float, stall_s: float, mtbf_s: float, recovery_s: float = 0.0) -> float:
    """The expected overhead if a stall follows every `interval_s` seconds of work, for exponential failures that may
    also strike in recovery (Daly 2006, the complete model): M e^(R/M) (e^((tau + C)/M) - 1) / tau - 1. math.inf where
    that exceeds a float."""
    positive("interval_s", interval_s)
    not_negative("stall_s", stall_s)
    positive("mtbf_s", mtbf_s)
    not_negative("recovery_s", recovery_s)
    try:
        wall = mtbf_s * math.exp(recovery_s / mtbf_s) * math.expm1((interval_s + stall_s) / mtbf_s)
    except OverflowError:
        return math.inf
    # Rounding may go below 0 if next to nothing is lost.
    return max(0.0, wall / interval_s - 1)


def _root(c: float) -> float:
    """x in [0, 1) with x + c + log(1 - x) = 0, c >= 0; that is 1 + W0(-exp(-1 - c))."""
    # y = 1 - x = exp(-1 - c + y) is below .16, and each iteration contracts by y.
    if c > 1:
        y = 0.0
        for _ in range(30):
            y = math.exp(y - 1 - c)
        return 1 - y
    # -log(1 - x) - x is convex and grows: Newton from above descends to the root, and stops when it no longer descends.
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


# --- domains, also for the neighbouring modules ----------------------------------------------------------------


def positive(name: str, value: float) -> float:
    """`value`, if it is finite, more than 0 and within LARGEST. Errors: UsageError."""
    if not 0 < value < math.inf:
        raise UsageError(f"{name}={value}: give a finite number above 0")
    if not 1 / LARGEST <= value <= LARGEST:
        raise UsageError(f"{name}: give a number from {1 / LARGEST:g} to {LARGEST:g}")
    return value


def not_negative(name: str, value: float) -> float:
    """`value`, if it is finite, at least 0 and at most LARGEST. Errors: UsageError."""
    if not 0 <= value < math.inf:
        raise UsageError(f"{name}={value}: give a finite number, at least 0")
    if value > LARGEST:
        raise UsageError(f"{name}: give a number of at most {LARGEST:g}")
    return value


def within(name: str, value: float, low: float, high: float) -> float:
    """`value`, if it is in [low, high]. Errors: UsageError."""
    if not low <= value <= high:
        raise UsageError(f"{name}={value}: give a number from {low} to {high}")
    return value


def whole_above(quotient: float) -> int:
    """The least whole number at or above `quotient`, which may miss it by rounding. Errors: UsageError."""
    if not math.isfinite(quotient):
        raise UsageError(
            "these values give an interval of infinitely many steps; give a shorter stall or a longer step"
        )
    return math.ceil(quotient * (1 - ROUNDING))

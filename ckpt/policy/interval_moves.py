"""Moves from the intervals in force to others: which there are, what one gains, and how much of that may be noise."""

from __future__ import annotations

import math
from typing import Literal

from ckpt.policy.adaptive import Chosen, LocalBy, StoreBy
from ckpt.policy.interval import ROUNDING
from ckpt.policy.rates import reconsider

CHANGE_MIN = 1 / 7  # the least relative change of an interval
# What counts as noise. 1 would keep any interval, however wrong, while only one failure is known.
DEVIATIONS = 0.75
# The factor on the noise for the way back: near a rate's best interval that makes three deviations of the rate.
RETURN_FACTOR = 2.0

Limit = Literal["store_mb_s", "unsaved_s", "at_risk_s", "overhead"]
LIMITS: tuple[Limit, ...] = ("store_mb_s", "unsaved_s", "at_risk_s", "overhead")  # the first is kept first


def start_levels(choice: Chosen) -> tuple[bool, bool]:
    return choice.local_by == "start", choice.store_by == "start"


def alternatives(stay: Chosen, wanted: Chosen, least: float = 0.0) -> list[Chosen]:
    """The wanted intervals, and each level's wanted interval beside the other's current one. Only for levels that move
    by more than the part `least`."""
    local_moves = _is_moved(stay.local_s, wanted.local_s, least)
    store_moves = _is_moved(stay.store_s, wanted.store_s, least)
    found = [wanted] if local_moves or store_moves else []
    if wanted.store_by == "start":
        return found  # there is only one level yet
    if local_moves:
        found += _divide_store_interval(stay.store_s, wanted.local_s, wanted.local_by, stay.store_by)
    if store_moves:
        times = wanted.store_s / stay.local_s
        found += [Chosen(stay.local_s, k, stay.local_by, wanted.store_by) for k in nearest_counts(times)]
    return found


def _is_moved(was_s: float, is_s: float, least: float) -> bool:
    return abs(is_s / was_s - 1) > least


def level_gain(
    was_s: float,
    is_s: float,
    from_s: float,
    by: LocalBy | StoreBy,
    cost: float,
    rate: float,
    cost_error: float,
    rate_error: float,
) -> tuple[float, float]:
    """For one level: the overhead that a change saves, and the noise in that number.

    The gain of a move of at most CHANGE_MIN does not count: it is made only because the other level moves. A change
    that a limit stops halfway has up to twice the gain for its noise, so it takes twice the noise.

    A change back to where the interval came from takes BACK times the noise, twice that if a limit decides: either
    change may have been noise. For a badly known rate that would exceed any gain. There it takes sqrt(n) times the
    noise, n as in `reconsider`.
    """
    times = 2 if by in LIMITS else 1
    deviations = DEVIATIONS * times
    if from_s and (is_s - was_s) * (from_s - was_s) > 0:
        deviations *= max(1.0, min(RETURN_FACTOR * times, rate / rate_error))
    change = reconsider(was_s, is_s, cost, rate, cost_error, rate_error, deviations)
    return change.gain if _is_moved(was_s, is_s, CHANGE_MIN) else min(0.0, change.gain), change.noise


def _divide_store_interval(store_s: float, local_s: float, local_by: LocalBy, store_by: StoreBy) -> list[Chosen]:
    """The two even divisions of a commit's interval into snapshot intervals next to the wanted one."""
    return [Chosen(store_s / k, k, local_by, store_by) for k in nearest_counts(store_s / local_s)]


def nearest_counts(times: float) -> list[int]:
    """The whole numbers next to `times`, at least 1."""
    return sorted({max(1, math.floor(times * (1 + ROUNDING))), max(1, math.ceil(times * (1 - ROUNDING)))})

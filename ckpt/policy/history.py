"""The history that outlives a job: failure rates and scores of predictions, as a small dict of numbers for the next
run.

Format, version 2: a flat dict from exactly the names below to finite numbers, each from 0 to 10^12; at most 461.

- `version`: 2.
- per class of failures (`process`, `node`, `preemption`, `job`): `.prior_failures`, `.prior_s`, `.failures`,
  `.exposure_s`, `.open_s`, `.ever_s`, `.seen`, the fields of FailureRate; and `.gap.0` (the oldest) to `.gap.15`, as
  far as there are.
- per source of predictions, at most 16: `source.NAME.FIELD`, NAME of lower-case letters. The fields
  are those of `predict.scoring.Score.numbers` and are not checked here.

Costs are not kept: the next run may have other machines, and measures its own costs within minutes.

The dict comes from a store that others can write to. A dict that breaks the format is ignored as a whole, and the
reason is reported. A well-formed dict with false numbers makes intervals bad for a while, within the user's limits and
`known.RARE`. New failures outvote it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ckpt.policy.failures import MEMORY, PRIOR_MIN, SHORTEST_S, Failure, FailureRate
from ckpt.policy.known import PRIORS_ONLY, Measurements
from ckpt.policy.rates import GammaRate

VERSION = 2
LARGEST = 1e12  # seconds: 30,000 years of one node; larger numbers are cut off when written
SOURCES_MAX = 16
SOURCE_NUMBERS_MAX = 23
NUMBERS_MAX = 1 + len(Failure) * (7 + MEMORY) + SOURCES_MAX * SOURCE_NUMBERS_MAX
SOURCE = re.compile(r"source\.([a-z]{1,20})\.([a-z0-9_.]{1,20})")

Sources = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Recalled:
    """What an earlier run handed on. `sources`: the numbers of the sources of predictions, unchecked.
    `refused`: why the dict was ignored, so that `known` holds only the priors; "" if it was used."""

    measurements: Measurements
    refusal: str = ""
    sources: Sources = field(default_factory=dict)


def remember(known: Measurements, sources: Sources | None = None) -> dict[str, float]:
    """The dict to keep. `sources`: the numbers of each source of predictions, by name."""
    found: dict[str, float] = {"version": VERSION}
    for source, numbers in (sources or {}).items():
        found |= {f"source.{source}.{name}": number for name, number in numbers.items()}
    for failure in Failure:
        rate, name = known.rate_of(failure), failure.value
        found |= {
            f"{name}.prior_failures": rate.rate_at_failure.prior_failures,
            f"{name}.prior_s": rate.rate_at_failure.prior_exposure_s,
            f"{name}.failures": rate.rate_at_failure.failures,
            f"{name}.exposure_s": rate.rate_at_failure.exposure_s,
            f"{name}.open_s": rate.since_failure_s,
            f"{name}.ever_s": rate.total_exposure_s,
            f"{name}.seen": rate.failure_count,
        }
        found |= {f"{name}.gap.{i}": gap_s for i, gap_s in enumerate(rate.gaps_s)}
    return {name: min(number, LARGEST) for name, number in found.items()}


def recall(value: object) -> Recalled:
    """Reads any object that may be a dict of `remember`. Never raises: an object that breaks the format is ignored as a
    whole, and `refused` says why."""
    try:
        numbers = _numbers(value)
        sources = _sources(numbers)
        rates = {failure.value: _rate(numbers, failure.value) for failure in Failure}
        if numbers:
            raise _Refused(f"it has the unknown name {min(numbers)[:80]!r}")
    except _Refused as refused:
        return Recalled(PRIORS_ONLY, f"the failure history of earlier runs is not used: {refused}")
    return Recalled(_with_rates(PRIORS_ONLY, rates), sources=sources)


def merged(one: Measurements, other: Measurements) -> Measurements:
    """Merges what two runs know, which may have a common past: for each class the rate of the run that has seen more.
    The costs are those of `one`.

    Nothing is counted twice. The merged rates do not depend on the order or the number of merges (a join in a lattice).
    If two runs continued in parallel from one point, the failures that only the lesser one saw are lost. That is
    cheaper than to record which run saw what, since the rates are estimates.
    """
    return _with_rates(one, {each.value: max(one.rate_of(each), other.rate_of(each), key=_rank) for each in Failure})


def _rank(rate: FailureRate) -> tuple[Any, ...]:
    settled = tuple(getattr(rate.rate_at_failure, each.name) for each in fields(GammaRate))
    return rate.total_exposure_s, rate.failure_count, rate.since_failure_s, settled, rate.gaps_s


def _with_rates(known: Measurements, rates: Mapping[str, Any]) -> Measurements:
    return replace(known, **rates)


# -- reading untrusted input


class _Refused(Exception):
    """The object breaks the format; the message says where."""


def _numbers(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        raise _Refused("it is not a dict")
    if len(value) > NUMBERS_MAX:
        raise _Refused(f"it has more than {NUMBERS_MAX} numbers")
    numbers: dict[str, float] = {}
    for name, number in value.items():
        if not isinstance(name, str):
            raise _Refused("a name in it is not a string")
        if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number <= LARGEST:
            raise _Refused(f"{name[:80]!r} is not a number from 0 to {LARGEST:g}")
        numbers[name] = float(number)
    version = _pop_number(numbers, "version")
    if version != VERSION:
        raise _Refused(f"its version is {version:g}; this ckpt reads version {VERSION}")
    return numbers


def _sources(numbers: dict[str, float]) -> Sources:
    """Removes the numbers of the sources from `numbers` and returns them. Errors: _Refused."""
    found: dict[str, dict[str, float]] = {}
    for name in [name for name in numbers if SOURCE.fullmatch(name)]:
        _, source, each = name.split(".", 2)
        found.setdefault(source, {})[each] = numbers.pop(name)
    if len(found) > SOURCES_MAX or any(len(each) > SOURCE_NUMBERS_MAX for each in found.values()):
        raise _Refused(f"it has more than {SOURCES_MAX} sources, or one with more than {SOURCE_NUMBERS_MAX} numbers")
    return found


def _pop_number(numbers: dict[str, float], name: str, least: float = 0.0, most: float = LARGEST) -> float:
    if name not in numbers:
        raise _Refused(f"{name!r} is missing")
    number = numbers.pop(name)
    if not least <= number <= most:
        raise _Refused(f"{name!r} is not from {least:g} to {most:g}")
    return number


def _rate(numbers: dict[str, float], name: str) -> FailureRate:
    prior_failures = _pop_number(numbers, f"{name}.prior_failures", PRIOR_MIN, 1)
    prior_s = _pop_number(numbers, f"{name}.prior_s", prior_failures * SHORTEST_S)
    failures = _pop_number(numbers, f"{name}.failures", 0, MEMORY)
    exposure_s = _pop_number(numbers, f"{name}.exposure_s")
    settled = GammaRate(prior_failures, prior_s, failures, exposure_s)
    seen = _pop_number(numbers, f"{name}.seen")
    if seen != int(seen):
        raise _Refused(f"'{name}.seen' is not a whole number")
    open_s, ever_s = _pop_number(numbers, f"{name}.open_s"), _pop_number(numbers, f"{name}.ever_s")
    gaps_s: list[float] = []
    while len(gaps_s) < MEMORY and f"{name}.gap.{len(gaps_s)}" in numbers:
        gaps_s.append(_pop_number(numbers, f"{name}.gap.{len(gaps_s)}"))
    return FailureRate(settled, open_s, tuple(gaps_s), ever_s, int(seen))

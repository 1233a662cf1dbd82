"""What outlives the job: it comes back as it was, and what is not of its form does no harm."""

from __future__ import annotations

import copy
import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt.policy import Adaptive, Failure, Measurements, decide, merged, recall, remember

EVENTS = st.lists(
    st.tuples(st.floats(0, 1e7), st.integers(1, 100), st.sampled_from([None, *Failure])), min_size=0, max_size=60
)


def known_of(events: list[tuple[float, int, Failure | None]], known: Measurements | None = None) -> Measurements:
    known = known or Measurements()
    for seconds, nodes, failure in events:
        known = known.with_uptime(seconds, nodes)
        known = known if failure is None else known.with_failure(failure)
    return known


SOME = known_of([(3600.0, 4, each) for each in Failure] * 20)


@given(EVENTS)
def test_rates_come_back_as_they_were(events):
    known = known_of(events)
    value = json.loads(json.dumps(remember(known)))
    found = recall(value)
    assert found.refusal == ""
    assert found.measurements == known
    assert remember(found.measurements) == remember(known)


def test_it_is_small_and_flat_and_only_numbers():
    value = remember(SOME)
    assert len(value) <= 93
    assert len(json.dumps(value)) < 4096
    assert all(isinstance(each, int | float) and math.isfinite(each) for each in value.values())


def test_what_goes_beyond_the_largest_number_is_cut_off_and_still_read():
    value = remember(Measurements().with_uptime(1e11, 100).with_failure(Failure.NODE).with_uptime(1e13))
    assert recall(value).refusal == ""


@pytest.mark.parametrize("value", [None, 3, "x", b"x", [], [("version", 1)], {}, {1: 2}, {"version": 1}, object()])
def test_what_is_something_else_is_not_used(value):
    found = recall(value)
    assert found.measurements == Measurements()
    assert found.refusal.startswith("the failure history of earlier runs is not used: ")


BAD = [True, None, "1", [], {}, math.nan, math.inf, -1, -1e-300, 1.1e12, 10**400, b"1"]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: repr(bad)[:20])
def test_a_number_that_is_none_is_refused_by_name(bad):
    for name in remember(SOME):
        found = recall({**remember(SOME), name: bad})
        assert found.measurements == Measurements()
        assert name in found.refusal


def test_what_is_missing_or_unknown_is_refused_by_name():
    whole = remember(SOME)
    for name in whole:
        if name.startswith("process.gap"):
            continue
        less = {each: number for each, number in whole.items() if each != name}
        if name.endswith("gap.15"):  # fewer are allowed
            assert recall(less).refusal == ""
        else:
            assert recall(less).refusal
    few = remember(Measurements())
    assert "the unknown name 'else'" in recall({**few, "else": 0}).refusal
    assert "the unknown name 'else'" in recall({**whole, "else": 0}).refusal
    assert "gap.3" in recall({**few, "job.gap.3": 1.0}).refusal
    assert len(recall({**few, "x" * 10**6: 1.0}).refusal) < 300


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("version", 1),
        ("version", 1.5),
        ("job.prior_s", 0),
        ("job.prior_failures", 0),
        ("job.prior_failures", 2),
        ("job.failures", 17),
        ("node.seen", 0.5),
    ],
)
def test_a_number_that_cannot_be_is_refused(name, number):
    assert name in recall({**remember(SOME), name: number}).refusal


NUMBERS = st.one_of(st.floats(0, 1e12), st.sampled_from([0.0, 1.0, 1e-300, 16.0, 1e12]))


@given(st.dictionaries(st.sampled_from(sorted(remember(SOME))), NUMBERS))
def test_whatever_is_accepted_gives_intervals_within_the_limits(changes):
    value = {**remember(SOME), **changes, "version": 2}
    before = copy.deepcopy(value)
    known = recall(value).measurements.with_stall(0.2).with_commit(30.0, 1e9).with_uptime(3600.0)
    found = decide(known, Adaptive(at_risk_s=1e4))
    assert found.saving_share <= 0.05
    assert 1 <= found.local_s <= 3600
    assert found.at_risk_s <= 1e4
    assert decide(known.with_failure(Failure.JOB), Adaptive(), current=found).explain()
    assert value == before


SCORE = {"true": 3.5, "seen": 21.0, "lead.0": 120.0}


def test_sources_of_predictions_come_back_as_they_were_given():
    sources = {"memory": SCORE, "gpu": {"missed": 1.0}}
    value = json.loads(json.dumps(remember(SOME, sources)))
    found = recall(value)
    assert (found.refusal, found.measurements, found.sources) == ("", SOME, sources)


def test_sources_are_few_and_their_names_plain():
    value = remember(SOME, {"memory": SCORE})
    for name in ("source.memory", "source.Memory.true", "source..true", f"source.{'a' * 21}.true", "source.a.b c"):
        assert recall({**value, name: 1.0}).refusal
    many = {f"source.{chr(97 + i)}.true": 1.0 for i in range(16)}
    assert "more than 16 sources" in recall({**value, **many}).refusal
    assert "more than 23 numbers" in recall({**value, **{f"source.memory.x{i}": 1.0 for i in range(21)}}).refusal


@given(EVENTS, EVENTS, EVENTS)
@example([(10.0, 1, Failure.JOB), (20.0, 1, Failure.JOB)], [(20.0, 1, Failure.JOB), (10.0, 1, Failure.JOB)], [])
def test_merging_needs_no_order_and_counts_nothing_twice(a, b, c):
    one, two, three = known_of(a), known_of(b), known_of(c)
    assert merged(one, two) == merged(two, one)
    assert merged(one, merged(two, three)) == merged(merged(one, two), three)
    assert merged(one, one) == one
    assert merged(merged(one, two), two) == merged(one, two)


@given(EVENTS, EVENTS)
def test_who_went_on_from_what_another_wrote_is_not_set_back_by_it(before, after):
    base = known_of(before)
    later = known_of(after, base)
    assert merged(base, later) == merged(later, base)
    for each in Failure:
        found = merged(later, base).rate_of(each)
        assert (found.total_exposure_s, found.failure_count) == (
            later.rate_of(each).total_exposure_s,
            later.rate_of(each).failure_count,
        )


def test_merging_keeps_the_costs_of_the_first():
    mine = Measurements().with_stall(1.0)
    found = merged(mine, SOME.with_stall(9.0))
    assert found.stall == mine.stall
    assert found.job == SOME.job

"""What becomes of alarms: true within the window of their own node, else false; and failures without one."""

from __future__ import annotations

import math
import random

import pytest

from ckpt.predict.outcomes import Outcomes
from ckpt.predict.scoring import WINDOW_S
from ckpt.predict.watching import SOURCES


def watched(*nodes: str, sources: tuple[str, ...] = ("memory", "io")) -> Outcomes:
    found = Outcomes()
    for node in nodes:
        found.set_sources(node, sources, 0.0)
    return found


def counts(outcomes: Outcomes, source: str) -> tuple[float, float, float, float]:
    score = outcomes.scores[source]
    return tuple(round(each) for each in (score.true, score.late, score.false, score.missed))


@pytest.mark.parametrize(
    ("node", "at_s", "memory", "io", "stands"),
    [
        ("a", 160.0, (1, 0, 0, 0), (0, 0, 0, 1), False),
        ("a", 103.0, (0, 1, 0, 0), (0, 0, 0, 1), False),
        ("a", 101.0 + WINDOW_S, (0, 0, 1, 1), (0, 0, 0, 1), False),
        ("b", 110.0, (0, 0, 0, 1), (0, 0, 0, 1), True),
    ],
    ids=["in time", "too late to act", "after the window", "another node"],
)
def test_a_failure_judges_the_alarms_of_its_node(
    node: str, at_s: float, memory: tuple[int, ...], io: tuple[int, ...], stands: bool
) -> None:
    """`memory` raises an alarm of node a at 100 s, to act on which takes 10 s; `io` is silent."""
    outcomes = watched("a", "b")
    assert outcomes.record_alarm("a", "memory", 100.0)
    outcomes.record_failure(node, at_s, needed_s=10)
    assert (counts(outcomes, "memory"), counts(outcomes, "io")) == (memory, io)
    assert outcomes.scores["memory"].leads_s == ((at_s - 100.0,) if memory[0] or memory[1] else ())
    assert outcomes.standing_alarms() == ({("a", "memory"): 100.0} if stands else {})


def test_an_alarm_that_stands_is_one_alarm() -> None:
    outcomes = watched("a")
    assert outcomes.record_alarm("a", "memory", 100.0)
    assert not outcomes.record_alarm("a", "memory", 105.0)
    assert outcomes.record_alarm("a", "memory", 101.0 + WINDOW_S)


def test_alarms_of_who_was_not_said_to_watch_are_none() -> None:
    outcomes = watched("a")
    assert not outcomes.record_alarm("b", "memory", 1.0)
    assert not outcomes.record_alarm("a", "gpu", 1.0)
    outcomes.set_sources("a", ["no such source"], 2.0)
    assert not outcomes.record_alarm("a", "no such source", 3.0)


def test_what_the_end_of_a_job_cuts_short_is_neither_true_nor_false() -> None:
    outcomes = watched("a")
    outcomes.record_alarm("a", "memory", 100.0)
    outcomes.stop_watching(200.0)
    assert counts(outcomes, "memory") == (0, 0, 0, 0)
    assert outcomes.standing_alarms() == {}
    outcomes.record_failure("a", 210.0, needed_s=1)
    assert counts(outcomes, "memory") == (0, 0, 0, 0), "nobody watched"


def test_only_the_time_in_which_a_source_watched_is_counted() -> None:
    outcomes = watched("a", "b")
    outcomes.advance_time(50.0)
    outcomes.stop_watching(100.0)
    outcomes.advance_time(1000.0)
    assert outcomes.scores["memory"].watched_s == pytest.approx(200.0)


def run(seed: int, precise: float, found: float, failures: int = 40) -> Outcomes:
    """Failures of node a twice a day; a source that announces the part `found` of them, and is right so often."""
    rng = random.Random(seed)
    outcomes, now_s = watched("a", "b", sources=("io",)), 0.0
    for _ in range(failures):
        while rng.random() > precise:
            now_s += rng.uniform(1200, 7200)
            outcomes.record_alarm("a", "io", now_s)
        now_s += rng.uniform(20_000, 60_000)
        if rng.random() < found:
            outcomes.record_alarm("a", "io", now_s - 200)
        outcomes.record_failure("a", now_s, needed_s=20)
    return outcomes


def test_a_source_that_is_good_is_proven(seed: int) -> None:
    outcomes = run(seed, precise=0.8, found=0.9, failures=160)  # of forty, chance makes a worse one now and then
    (score,) = outcomes.proven_scores().values()
    assert 0.5 < score.precision < 0.9
    assert 0.5 < score.recall < 0.98


def test_a_source_that_knows_nothing_is_not_proven_by_being_looked_at_a_thousand_times() -> None:
    """A failure every two hours, an alarm every hour, neither of which has to do with the other."""
    proven = 0
    for each in range(8):
        rng = random.Random(each)
        outcomes, now_s = watched("a", sources=("io",)), 0.0
        fails_s, alarms_s = rng.expovariate(1 / 7200), rng.expovariate(1 / 3600)
        ever = False
        while now_s < 800 * 3600:
            now_s = min(fails_s, alarms_s)
            if now_s == alarms_s:
                outcomes.record_alarm("a", "io", now_s)
                alarms_s += rng.expovariate(1 / 3600)
            else:
                outcomes.record_failure("a", now_s, needed_s=30)
                fails_s += rng.expovariate(1 / 7200)
            ever = ever or bool(outcomes.proven_scores())
        proven += ever
    assert proven <= 1


def test_what_was_seen_comes_back_and_unknown_sources_do_not(seed: int) -> None:
    outcomes = run(seed, precise=0.8, found=0.9)
    other = Outcomes()
    other.inherit({**outcomes.scores, "evil": outcomes.scores["io"]})
    assert other.scores == outcomes.scores
    assert set(other.table(0.0)["sources"]) == {"io"} <= set(SOURCES)
    assert other.numbers().keys() == {"io"}


def test_an_alarm_passes_exactly_when_it_was_said_to() -> None:
    """Whatever rounding does: who looks at that moment would be told to look again at once, for ever."""
    rng = random.Random(1)
    for _ in range(1000):
        outcomes = Outcomes()
        outcomes.set_sources("", ["memory"], 0.0)
        outcomes.record_alarm("", "memory", rng.uniform(0.0, 1e6))
        outcomes.advance_time(math.nextafter(outcomes.next_expiry_s(), 0.0))
        assert outcomes.standing_alarms()
        outcomes.advance_time(outcomes.next_expiry_s())
        assert not outcomes.standing_alarms()

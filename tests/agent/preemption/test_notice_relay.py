"""Notices of other nodes, as the coordinator takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from ckpt.agent.preemption import notice_relay
from ckpt.agent.preemption.notice_relay import (
    NOTICES_MAX,
    PAST_S,
    ExitTiming,
    RelayedNotice,
    parse_relayed_notices,
    parse_returned_notices,
)
from ckpt.errors import CkptError
from ckpt.preemption import notice
from ckpt.preemption.notice import Notice, NoticeChange, Withdrawn
from tests.agent.nodes.staged import spoiled

SPOT = Notice(1030.0, "aws-spot", True, "terminate", "it goes")


@dataclass
class Clocks:
    """Those of the node that hears of it."""

    unix_s: float = 1000.0
    monotonic_s: float = 50.0

    def time(self) -> float:
        return self.unix_s

    def monotonic(self) -> float:
        return self.monotonic_s

    def goes_on(self, seconds: float) -> None:
        self.unix_s, self.monotonic_s = self.unix_s + seconds, self.monotonic_s + seconds


@pytest.fixture(autouse=True)
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    found = Clocks()
    for module in (notice_relay, notice):
        monkeypatch.setattr(module, "time", found)
    return found


def told(
    there: RelayedNotice, known: Mapping[tuple[str, str], float] | None = None
) -> list[tuple[NoticeChange, ExitTiming]]:
    """What is new of node b's notices to who knows these, with the seconds that are left."""
    return parse_relayed_notices("b", there.notice_fields(), known or {}, 5000.0)


def first_told(there: RelayedNotice) -> tuple[Notice, ExitTiming]:
    ((first, when),) = told(there)
    assert isinstance(first, Notice)
    return first, when


def test_what_stands_there_is_told_once_and_again_only_when_its_time_has_moved(clocks: Clocks) -> None:
    there = RelayedNotice()
    there.record_notice(SPOT, ExitTiming.AT_ONCE)
    first, when = first_told(there)
    assert (first.deadline_s, first.source, first.certain, when) == (5030.0, "aws-spot", True, ExitTiming.AT_ONCE)
    assert (first.key, first.message) == ("terminate on node b", SPOT.message)
    known = {(first.source, first.key): 30.0}
    assert told(there, known) == []
    clocks.goes_on(10.0)
    assert len(told(there, known)) == 1


@pytest.mark.parametrize("by_s", [60.0, -3600.0])
def test_a_clock_that_is_set_after_a_notice_was_heard_does_not_move_its_deadline(clocks: Clocks, by_s: float) -> None:
    there = RelayedNotice()
    there.record_notice(SPOT)
    clocks.goes_on(10.0)
    clocks.unix_s += by_s
    first, when = first_told(there)
    assert (first.deadline_s, when) == (5020.0, ExitTiming.IN_TIME)
    assert told(there, {(first.source, first.key): 20.0}) == [], "nor is it told again"


def test_what_is_past_is_told_once_and_again_when_its_time_is_ahead_after_all(clocks: Clocks) -> None:
    """Once told it is taken to be a little ahead; then it passes."""
    there = RelayedNotice()
    there.record_notice(Notice(950.0, "azure", True, "E1", "reboot"))
    first, _ = first_told(there)
    name, later_s = (first.source, first.key), 0.0
    for each_s in (0.0, PAST_S, 100.0 - PAST_S):
        clocks.goes_on(each_s)
        later_s += each_s
        assert told(there, {name: PAST_S - later_s}) == []
    there.record_notice(Notice(1108.0, "azure", True, "E1", "reboot"))
    assert len(told(there, {name: PAST_S - 100.0})) == 1
    there.record_notice(Notice(1050.0, "azure", True, "E1", "reboot"))
    assert len(told(there, {name: 60.0})) == 1, "it has moved to now"


def test_what_has_passed_there_is_no_news_to_another_agent(clocks: Clocks) -> None:
    there = RelayedNotice()
    there.record_notice(SPOT, ExitTiming.AT_ONCE)
    for later_s, expected in ((29.0, ExitTiming.AT_ONCE), (2.0, ExitTiming.NOT_AGAIN)):
        clocks.goes_on(later_s)
        assert [when for _, when in told(there)] == [expected]
        assert [when for _, when in parse_returned_notices(there.notice_fields(), 5000.0)] == [expected]


@pytest.mark.parametrize("far_s", [0.0, 253_402_300_799.0, 1e300, math.inf])
def test_one_whose_time_is_far_away_hides_no_other(far_s: float) -> None:
    there = RelayedNotice()
    there.record_notice(Notice(far_s, "file", True, "/word", "it has appeared"))
    there.record_notice(SPOT)
    for (far, _), (spot, _) in (told(there), parse_returned_notices(there.notice_fields(), 5000.0)):
        assert isinstance(far, Notice)
        assert isinstance(spot, Notice)
        assert math.isfinite(far.deadline_s)
        assert spot.deadline_s == 5030.0


def test_what_does_not_stand_there_any_more_is_withdrawn_and_what_other_nodes_say_is_not() -> None:
    there = RelayedNotice()
    there.record_notice(SPOT)
    first, _ = first_told(there)
    there.record_notice(Withdrawn("aws-spot", "terminate"))
    known = {(first.source, first.key): 30.0, ("aws-spot", "terminate"): 10.0, ("x", "y on node bb"): 10.0}
    assert told(there, known) == [(Withdrawn(first.source, first.key), ExitTiming.IN_TIME)]
    assert parse_relayed_notices("c", there.notice_fields(), known) == []


def test_what_is_no_word_is_an_error_and_nothing_else() -> None:
    there = RelayedNotice()
    there.record_notice(SPOT)
    right = there.notice_fields()
    for wrong in [*spoiled(right), [{**right[0], "left_s": math.nan}], right * (NOTICES_MAX + 1)]:
        try:
            found = parse_relayed_notices("b", wrong, {}, 5000.0)
        except (CkptError, ValueError, TypeError, LookupError):
            continue
        assert all(isinstance(word, Notice) and math.isfinite(word.deadline_s) for word, _ in found)
    with pytest.raises(CkptError):
        parse_relayed_notices("b", right * (NOTICES_MAX + 1), {})

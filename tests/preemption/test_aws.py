"""EC2's metadata service: tokens, spot notices, recommendations, maintenance, auto scaling."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from ckpt.preemption.aws import LIFECYCLE_LEAD_S, SPOT_LEAD_S, AwsListener
from ckpt.preemption.notice import Notice, Withdrawn
from tests.preemption.fakes import (
    NOT_THERE,
    NOW_S,
    PATIENT_S,
    Asked,
    Clock,
    FakeService,
    Says,
    Turns,
    heard,
    same,
    serving,
)

SPOT = "spot/instance-action"
REBALANCE = "events/recommendations/rebalance"
MAINTENANCE = "events/maintenance/scheduled"
LIFECYCLE = "autoscaling/target-lifecycle-state"
MAINTENANCE_AT_S = 1_902_000_000.0  # 9 Apr 2030 21:20:00 GMT


class Ec2(FakeService):
    """Gives tokens, and answers only who has the one that is valid. `says`: by path below /latest/meta-data/."""

    says: dict[str, str]
    tokens: int

    def reply(self, asked: Asked) -> Says:
        if asked.method == "PUT":
            assert asked.path == "/latest/api/token"
            assert 1 <= int(asked.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
            assert "X-Forwarded-For" not in asked.headers
            self.tokens += 1
            return Says(body=f"token-{self.tokens}")
        if asked.headers.get("X-aws-ec2-metadata-token") != f"token-{self.tokens}":
            return Says(401)
        path = asked.path.removeprefix("/latest/meta-data/")
        return Says(body=self.says[path]) if path in self.says else NOT_THERE


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ec2(clock: Clock) -> Iterator[Ec2]:
    with serving(Ec2()) as service:
        service.says, service.tokens = {}, 0
        service.answer, service.now_s = service.reply, clock.now_s
        yield service


def listener(ec2: Ec2, clock: Clock) -> AwsListener:
    return AwsListener(ec2.endpoint, timeout_s=PATIENT_S, now_s=clock.now_s)


def test_all_four_are_asked_every_five_seconds_with_one_token(ec2: Ec2, clock: Clock) -> None:
    stop = Turns(clock, same)
    listener(ec2, clock).listen(stop, lambda word: None)
    four = [f"GET /latest/meta-data/{path}" for path in (SPOT, REBALANCE, MAINTENANCE, LIFECYCLE)]
    assert ec2.paths() == ["PUT /latest/api/token", *four, *four]
    assert stop.pauses == [5.0]


def test_a_token_that_expired_is_replaced_at_once(ec2: Ec2, clock: Clock) -> None:
    ec2.says[SPOT] = '{"action": "stop", "time": "2030-03-17T17:48:20Z"}'

    def expire() -> None:
        ec2.tokens += 1

    stop = Turns(clock, expire)
    told: list[object] = []
    listener(ec2, clock).listen(stop, told.append)
    assert len(told) == 1
    assert stop.pauses == [5.0], "a refused token counted as a fault"
    assert ec2.paths().count("PUT /latest/api/token") == 2


def test_the_spot_notice_has_its_action_and_time(ec2: Ec2, clock: Clock) -> None:
    ec2.says[SPOT] = '{"action": "terminate", "time": "2030-03-17T17:48:40Z"}'
    (notice,) = heard(listener(ec2, clock), clock, same)
    message = "EC2 will terminate this spot instance at 2030-03-17T17:48:40Z"
    key = "terminate 2030-03-17T17:48:40Z"
    assert notice == Notice(NOW_S + 119, "aws-spot", True, key, message)


def test_a_recommendation_is_not_certain_and_stands_beside_the_notice(ec2: Ec2, clock: Clock) -> None:
    ec2.says[REBALANCE] = '{"noticeTime": "2030-03-17T17:46:40Z"}'

    def notice_too() -> None:
        ec2.says[SPOT] = '{"action": "stop", "time": "2030-03-17T17:48:45Z"}'

    advice, notice = heard(listener(ec2, clock), clock, same, notice_too, same)
    assert (advice.source, advice.certain, advice.deadline_s) == ("aws-rebalance", False, NOW_S + SPOT_LEAD_S)
    assert (notice.source, notice.certain) == ("aws-spot", True)


def event(code: str = "instance-stop", state: str = "active", key: str = "instance-event-1", at: str = "") -> dict:
    return {
        "NotBefore": at or "9 Apr 2030 21:20:00 GMT",
        "NotAfter": "17 Apr 2030 09:17:23 GMT",
        "Code": code,
        "Description": "scheduled",
        "EventId": key,
        "State": state,
    }


@pytest.mark.parametrize("code", ["instance-stop", "system-reboot", "instance-reboot", "instance-retirement"])
def test_maintenance_that_takes_the_machine_is_a_notice_and_no_other_is(ec2: Ec2, clock: Clock, code: str) -> None:
    others = [event("system-maintenance"), event(state="canceled"), event(state="completed")]
    ec2.says[MAINTENANCE] = json.dumps([*others, event(code, key="this one")])
    (notice,) = heard(listener(ec2, clock), clock, same)
    assert (notice.source, notice.certain, notice.key) == ("aws-maintenance", True, "this one")
    assert notice.deadline_s == MAINTENANCE_AT_S - 1


def test_maintenance_that_is_cancelled_is_withdrawn_and_one_that_is_moved_told_again(ec2: Ec2, clock: Clock) -> None:
    ec2.says[MAINTENANCE] = json.dumps([event(key="a"), event(key="b")])

    def change() -> None:
        moved = event(key="b", at="10 Apr 2030 21:20:00 GMT")
        ec2.says[MAINTENANCE] = json.dumps([event(key="a", state="canceled"), moved])

    *_, withdrawn, moved = heard(listener(ec2, clock), clock, same, change, same)
    assert withdrawn == Withdrawn("aws-maintenance", "a")
    assert (moved.key, moved.deadline_s) == ("b", MAINTENANCE_AT_S - 1 + 86400)


def test_an_entry_that_cannot_be_read_hides_no_other_and_withdraws_none(ec2: Ec2, clock: Clock) -> None:
    ec2.says[MAINTENANCE] = json.dumps([event(key="a")])

    def spoil() -> None:
        ec2.says[MAINTENANCE] = json.dumps([event(key="a", at="soon"), 7, event(key="b")])

    told = heard(listener(ec2, clock), clock, same, spoil, same)
    assert [(type(word), word.key) for word in told] == [(Notice, "a"), (Notice, "b")]


def test_the_lifecycle_state_terminated_is_a_notice_and_others_are_none(ec2: Ec2, clock: Clock) -> None:
    states = iter(["Standby", "Terminated", "Terminated", "InService"])

    def next_state() -> None:
        ec2.says[LIFECYCLE] = next(states)

    ec2.says[LIFECYCLE] = "InService"
    notice, withdrawn = heard(listener(ec2, clock), clock, *[next_state] * 4)
    assert (notice.source, notice.certain) == ("aws-lifecycle", True)
    assert notice.deadline_s == NOW_S + 10 + LIFECYCLE_LEAD_S  # seen in the third turn
    assert withdrawn == Withdrawn("aws-lifecycle", "Terminated")


@pytest.mark.parametrize(
    "body",
    ["[]", "null", "{}", '{"action": 7, "time": "x"}', '{"action": "stop"}', '{"action": "stop", "time": "now"}'],
)
def test_a_spot_notice_that_is_none_is_neither_told_nor_the_end_of_one(ec2: Ec2, clock: Clock, body: str) -> None:
    ec2.says[SPOT] = '{"action": "stop", "time": "2030-03-17T17:48:40Z"}'

    def spoil() -> None:
        ec2.says[SPOT] = body

    told = heard(listener(ec2, clock), clock, same, spoil, same)
    assert [type(word) for word in told] == [Notice]


def test_what_a_service_says_is_bounded_and_printable_in_keys_and_messages(ec2: Ec2, clock: Clock) -> None:
    ec2.says[MAINTENANCE] = json.dumps([event(key="a\n\x1b[31m" + "k" * 10_000)])
    (notice,) = heard(listener(ec2, clock), clock)
    assert len(notice.key) == 200
    assert notice.key.startswith("a??[31mkkk")
    assert notice.message.isprintable()

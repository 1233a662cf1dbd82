"""Every listener that asks over HTTP survives every fault of the fake service, and hears the notice after it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from ckpt.errors import UsageError
from ckpt.events import Event, Events
from ckpt.preemption.aws import AwsListener
from ckpt.preemption.azure import AzureListener
from ckpt.preemption.gcp import MAINTENANCE, PREEMPTED, GcpListener
from ckpt.preemption.metadata import Fault, Service
from ckpt.preemption.notice import Listener, Notice, Withdrawn
from ckpt.preemption.poll import MUTE_FAULTS, PAUSE_MAX_S, poll_until_stopped
from tests.preemption.fakes import (
    NOT_THERE,
    NOW_S,
    PATIENT_S,
    Asked,
    Bad,
    Clock,
    FakeService,
    Says,
    Turns,
    ask,
    connections,
    heard,
    is_within,
    same,
    serving,
    stopped_s,
    timeout_s,
)


@dataclass(frozen=True)
class Kind:
    """A listener, and what its service says while a certain notice stands and while none does."""

    make: Callable[..., Listener]
    stands: Callable[[Asked], Says]
    nothing: Callable[[Asked], Says]
    question: str  # a part of the path that is spoiled


def aws(action: Says) -> Callable[[Asked], Says]:
    def answer(asked: Asked) -> Says:
        if asked.method == "PUT":
            return Says(body="token")
        return action if "instance-action" in asked.path else NOT_THERE

    return answer


def azure(events: str) -> Callable[[Asked], Says]:
    return lambda asked: Says(body="vm-1" if "compute/name" in asked.path else f'{{"Events": [{events}]}}')


def gcp(value: str) -> Callable[[Asked], Says]:
    return lambda asked: Says(body=value, headers={"ETag": value})


def a_gcp(question: Any) -> Callable[..., Listener]:
    return lambda endpoint, **more: GcpListener(question, endpoint, wait_s=0, **more)


AZURE_EVENT = (
    '{"EventId": "A1", "EventType": "Preempt", "Resources": ["vm-1"], "EventStatus": "Scheduled", "NotBefore": ""}'
)
KINDS = {
    "aws": Kind(
        AwsListener,
        aws(Says(body='{"action": "terminate", "time": "2030-03-17T17:48:20Z"}')),
        aws(NOT_THERE),
        "instance-action",
    ),
    "gcp-preempted": Kind(a_gcp(PREEMPTED), gcp("TRUE"), gcp("FALSE"), "preempted"),
    "gcp-maintenance": Kind(a_gcp(MAINTENANCE), gcp("TERMINATE_ON_HOST_MAINTENANCE"), gcp("NONE"), "maintenance"),
    "azure": Kind(
        lambda endpoint, **more: AzureListener(endpoint, first_answer_s=more["timeout_s"], **more),
        azure(AZURE_EVENT),
        azure(""),
        "scheduledevents",
    ),
}


def make(kind: Kind, service: FakeService, clock: Clock, bad: Bad | None = None, **more: Any) -> Listener:
    service.now_s = clock.now_s
    return kind.make(service.endpoint, timeout_s=timeout_s(bad), now_s=clock.now_s, **more)


@pytest.mark.parametrize("bad", Bad, ids=lambda bad: bad.name)
@pytest.mark.parametrize("name", KINDS)
def test_the_notice_is_heard_after_any_fault_and_neither_told_nor_withdrawn_by_it(name: str, bad: Bad) -> None:
    kind, clock = KINDS[name], Clock()
    is_silence = name == "aws" and bad is Bad.NO_SUCH_PATH  # there it means that nothing stands
    with serving() as service, connections() as seen:
        service.answer = kind.stands
        service.bad(bad, path=kind.question)

        def again() -> None:
            service.bad(bad, path=kind.question)

        told = heard(make(kind, service, clock, bad), clock, same, again, same)
    assert told[0].certain
    assert [type(word) for word in told] == ([Notice, Withdrawn, Notice] if is_silence else [Notice])
    assert seen == {("127.0.0.1", service.port)}, "something else was connected to"


@pytest.mark.parametrize("name", KINDS)
def test_a_repeated_report_is_no_second_notice_and_one_that_is_gone_is_withdrawn_once(name: str) -> None:
    kind, clock = KINDS[name], Clock()
    with serving() as service:
        service.answer = kind.stands

        def over() -> None:
            service.answer = kind.nothing

        told = heard(make(kind, service, clock), clock, same, same, over, same)
    notice, withdrawn = told
    assert withdrawn == Withdrawn(notice.source, notice.key)


@pytest.mark.parametrize("name", KINDS)
def test_a_service_that_is_not_there_is_asked_ever_more_rarely_and_reported_once(name: str) -> None:
    kind, clock, said = KINDS[name], Clock(), list[Event]()
    with serving() as service:
        listener = make(kind, service, clock, events=Events(said.append))
    stop = Turns(clock, *[same] * 12)  # the server is gone, so that every connection is refused
    listener.listen(stop, lambda word: pytest.fail(f"told {word}"))
    assert len(stop.pauses) == 12
    for pause_s, whole_s in zip(stop.pauses, [1, 2, 4, 8, *[PAUSE_MAX_S] * 8], strict=True):
        assert whole_s / 2 <= pause_s <= whole_s
    assert len({round(pause_s, 6) for pause_s in stop.pauses}) == 12, "pauses have no jitter"
    assert [(event.name, event.loud) for event in said] == [("notices.silent", True)]
    assert said[0].data == {"source": listener.name}


@pytest.mark.parametrize("bad", [Bad.SLOW, Bad.DRIP], ids=lambda bad: bad.name)
@pytest.mark.parametrize("name", KINDS)
def test_stop_ends_a_request_that_hangs_within_a_second(name: str, bad: Bad) -> None:
    kind = KINDS[name]

    def took_s() -> float:
        with serving() as service:
            service.bad(bad)
            listener = kind.make(service.endpoint, timeout_s=PATIENT_S)
            return stopped_s(listener, lambda _: service.came.acquire(timeout=60))

    assert is_within(1.0, took_s)


class Overdue(threading.Event):
    """A `stop` that is set when it is looked at for the second time after `timeout_s`, counted from its first look,
    which is the first thing that a request does once its own time runs: a wait too many ends by it."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._until_s: float | None = None
        self._is_late = False

    def is_set(self) -> bool:
        now_s = time.monotonic()
        self._until_s = now_s + self._timeout_s if self._until_s is None else self._until_s
        if self._is_late:
            self.set()
        self._is_late = now_s >= self._until_s
        return super().is_set()


def test_a_request_that_drips_ends_when_its_time_is_up() -> None:
    """Though another byte is there each time that it waits for one."""
    with serving() as service:
        service.bad(Bad.DRIP)
        with pytest.raises(Fault, match="no answer in time"):
            ask(service.endpoint, stop=Overdue(0.15), timeout_s=0.15)


def test_an_end_to_the_faults_is_reported_too() -> None:
    said, clock, turns = list[Event](), Clock(), iter(range(MUTE_FAULTS + 3))

    def answer() -> float:
        if next(turns) < MUTE_FAULTS + 1:
            raise Fault("no")
        return 1.0

    poll_until_stopped("x", Turns(clock, *[same] * (MUTE_FAULTS + 2)), answer, Events(said.append))
    assert [event.name for event in said] == ["notices.silent", "notices.answered"]


def test_pauses_begin_anew_after_an_answer() -> None:
    clock, answers = Clock(), iter([None, None, 7.0, None, None])
    stop = Turns(clock, *[same] * 4)

    def answer() -> float:
        if (pause_s := next(answers)) is None:
            raise Fault("no")
        return pause_s

    poll_until_stopped("x", stop, answer)
    assert stop.pauses[1] >= 1.0  # the second fault in a row
    assert stop.pauses[2] == 7.0
    assert stop.pauses[3] <= 1.0  # the first one again


SKEWS_S = [-7200.0, -90.0, -0.7, 0.0, 0.3, 90.0, 86400.0, None]


def named_at(form: str, body: str, answers: Callable[[str], Callable[[Asked], Says]]) -> Any:
    """What the service says of a time (Unix seconds by its own clock), which stands in `body` as <AT>."""
    return lambda when_s: answers(body.replace("<AT>", time.strftime(form, time.gmtime(when_s))))


def aws_says(part: str) -> Callable[[str], Callable[[Asked], Says]]:
    def answers(body: str) -> Callable[[Asked], Says]:
        said = {"PUT": Says(body="token"), "GET": Says(body=body)}
        return lambda asked: said[asked.method] if asked.method == "PUT" or part in asked.path else NOT_THERE

    return answers


ISO, HTTP, OF_EC2 = "%Y-%m-%dT%H:%M:%SZ", "%a, %d %b %Y %H:%M:%S GMT", "%d %b %Y %H:%M:%S GMT"
AZURE_AT = AZURE_EVENT.replace('"NotBefore": ""', '"NotBefore": "<AT>"')
NAMES_A_TIME: dict[str, tuple[Callable[..., Listener], Any]] = {
    "aws-spot": (AwsListener, named_at(ISO, '{"action": "stop", "time": "<AT>"}', aws_says("instance-action"))),
    "aws-maintenance": (
        AwsListener,
        named_at(OF_EC2, '[{"NotBefore": "<AT>", "Code": "instance-stop", "EventId": "1"}]', aws_says("maintenance")),
    ),
    "azure": (AzureListener, named_at(HTTP, AZURE_AT, azure)),
}
LEFT_S: dict[str, tuple[Callable[..., Listener], Any, float]] = {
    "aws-spot": (AwsListener, named_at(ISO, '{"action": "hibernate", "time": "<AT>"}', aws_says("instance-action")), 0),
    "aws-rebalance": (AwsListener, named_at(ISO, '{"noticeTime": "<AT>"}', aws_says("recommendations")), 120),
    "aws-lifecycle": (AwsListener, named_at(ISO, "Terminated", aws_says("lifecycle")), 30),
    "gcp-preempted": (a_gcp(PREEMPTED), named_at("", "TRUE", gcp), 30),
    "gcp-maintenance": (a_gcp(MAINTENANCE), named_at("", "TERMINATE_ON_HOST_MAINTENANCE", gcp), 60),
    "azure": (AzureListener, named_at(HTTP, AZURE_AT.replace("Scheduled", "Started"), azure), 0),
}


@pytest.mark.parametrize("skew_s", SKEWS_S)
@pytest.mark.parametrize("source", NAMES_A_TIME)
def test_the_deadline_is_by_our_clock_and_never_later_than_it_is(source: str, skew_s: float | None) -> None:
    """The service names a time that is about 120 s ahead by its own clock, in whole seconds."""
    make, says = NAMES_A_TIME[source]
    theirs_s = math.ceil(NOW_S + (skew_s or 0.0) + 120)
    is_s = theirs_s - (skew_s or 0.0)
    with serving() as service:
        service.skew_s, service.answer = skew_s, says(theirs_s)
        (notice,) = heard(make(service.endpoint, timeout_s=PATIENT_S, now_s=Clock().now_s), Clock())
    assert notice.source == source
    if skew_s is None:
        assert notice.deadline_s == is_s
    else:
        assert is_s - 1.0 <= notice.deadline_s <= is_s  # its Date has whole seconds


@pytest.mark.parametrize("skew_s", SKEWS_S)
@pytest.mark.parametrize("source", LEFT_S)
def test_what_names_no_time_of_the_end_counts_by_our_clock_alone(source: str, skew_s: float | None) -> None:
    make, says, left_s = LEFT_S[source]
    with serving() as service:
        service.skew_s, service.answer = skew_s, says(NOW_S + (skew_s or 0.0) + 300)
        (notice,) = heard(make(service.endpoint, timeout_s=PATIENT_S, now_s=Clock().now_s), Clock())
    assert (notice.source, notice.deadline_s) == (source, NOW_S + left_s)


@pytest.mark.parametrize("date", ["", "yesterday", "Mon, 99 Foo 2030 00:00:00 GMT", "Thu, 01 Jan 99999 00:00:00 GMT"])
def test_a_date_that_is_none_corrects_nothing(date: str) -> None:
    with serving() as service:
        service.skew_s, service.answer = None, lambda asked: Says(headers={"Date": date})
        reply = ask(service.endpoint)
    assert reply.date_s is None
    assert reply.to_local_s(5.0) == 5.0


@pytest.mark.parametrize(
    ("endpoint", "path"),
    [("http://127.0.0.1:{}", "/x"), ("http://127.0.0.1:{}/base/", "/base/x"), ("127.0.0.1:{}", "/x")],
)
def test_endpoints_are_urls_or_host_and_port(endpoint: str, path: str) -> None:
    with serving() as service:
        ask(endpoint.format(service.port), path="/x")
        assert service.paths() == [f"GET {path}"]


@pytest.mark.parametrize(
    "endpoint", ["", "https://host", "http://", "http://u:p@host", "http://h:port", "http://h?a=b"]
)
def test_an_endpoint_that_is_none_is_refused_by_name(endpoint: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a metadata service"):
        Service(endpoint)

"""Azure's scheduled events: those of this VM, their cancellation, and the acknowledgement."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any

import pytest

from ckpt.errors import UsageError
from ckpt.preemption.azure import FIRST_ANSWER_S, AzureListener
from ckpt.preemption.notice import Notice, Withdrawn
from tests.preemption.fakes import (
    BOUND_S,
    NOW_S,
    PATIENT_S,
    Asked,
    Bad,
    Clock,
    FakeService,
    Says,
    Turns,
    heard,
    same,
    serving,
)

EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
AT, AT_S = "Sun, 17 Mar 2030 17:56:40 GMT", NOW_S + 600


class Azure(FakeService):
    """`events` is what the document lists; `started` what was acknowledged. `acknowledges`: the status it gives."""

    events: list[Any]
    started: list[Any]
    acknowledges: int

    def reply(self, asked: Asked) -> Says:
        if asked.headers.get("Metadata") != "true":
            return Says(400)
        if asked.path.startswith("/metadata/instance/compute/name?"):
            return Says(body="gpu_7")
        assert asked.path == EVENTS
        if asked.method == "POST":
            self.started += json.loads(asked.body)["StartRequests"]
            return Says(self.acknowledges)
        return Says(body=json.dumps({"DocumentIncarnation": 1, "Events": self.events}))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def azure(clock: Clock) -> Iterator[Azure]:
    with serving(Azure()) as service:
        service.events, service.started, service.acknowledges = [], [], 200
        service.answer, service.now_s = service.reply, clock.now_s
        yield service


def listener(azure: Azure, clock: Clock) -> AzureListener:
    return AzureListener(azure.endpoint, timeout_s=PATIENT_S, now_s=clock.now_s)


def event(
    key: str = "E1", what: str = "Preempt", status: str = "Scheduled", at: str = AT, **more: Any
) -> dict[str, Any]:
    said = {"EventId": key, "EventType": what, "ResourceType": "VirtualMachine", "Resources": ["gpu_7"]}
    return {**said, "EventStatus": status, "NotBefore": at, "DurationInSeconds": -1, **more}


def test_the_name_is_asked_once_and_the_events_every_second(azure: Azure, clock: Clock) -> None:
    stop = Turns(clock, same, same)
    listener(azure, clock).listen(stop, lambda word: None)
    name = "GET /metadata/instance/compute/name?api-version=2021-02-01&format=text"
    assert azure.paths() == [name, *[f"GET {EVENTS}"] * 3]
    assert stop.pauses == [1.0, 1.0]


@pytest.mark.parametrize(
    ("what", "certain"),
    [("Preempt", True), ("Terminate", True), ("Reboot", True), ("Redeploy", True), ("Freeze", False), ("New", False)],
)
def test_an_event_of_this_vm_is_a_notice(azure: Azure, clock: Clock, what: str, certain: bool) -> None:
    azure.events = [event(what=what)]
    (notice,) = heard(listener(azure, clock), clock, same)
    message = f"Azure: {what} of this VM, not before {AT} (E1)"
    assert notice == Notice(AT_S - 1, "azure", certain, "E1", message)


def test_events_of_other_vms_are_none_and_names_do_not_mind_case(azure: Azure, clock: Clock) -> None:
    others = event("E1", Resources=["gpu_70", "gpu_8"])
    azure.events = [others, event("E2", Resources=["gpu_8", "GPU_7"]), event("E3", Resources=[])]
    assert [word.key for word in heard(listener(azure, clock), clock, same)] == ["E2"]


def test_an_event_that_vanishes_is_withdrawn(azure: Azure, clock: Clock) -> None:
    azure.events = [event("E1"), event("E2")]

    def cancel() -> None:
        azure.events = [event("E2")]

    told = heard(listener(azure, clock), clock, same, cancel, same)
    assert [type(word) for word in told] == [Notice, Notice, Withdrawn]
    assert told[2] == Withdrawn("azure", "E1")


def test_an_event_that_starts_early_is_told_again_with_the_time_it_started(azure: Azure, clock: Clock) -> None:
    azure.events = [event()]

    def start() -> None:
        azure.events = [event(status="Started", at="")]

    scheduled, started = heard(listener(azure, clock), clock, same, start, same, same, same, same, same, same)
    assert (scheduled.key, scheduled.deadline_s) == ("E1", AT_S - 1)
    assert (started.key, started.deadline_s) == ("E1", NOW_S + 2)


def test_an_event_that_cannot_be_read_hides_no_other_and_withdraws_none(azure: Azure, clock: Clock) -> None:
    azure.events = [event("E1")]

    def spoil() -> None:
        azure.events = [{}, 7, None, event("E1", at="soon"), event("E9", Resources="gpu_7"), event("E2")]

    told = heard(listener(azure, clock), clock, same, spoil, same)
    assert [(type(word), word.key) for word in told] == [(Notice, "E1"), (Notice, "E2")]


def test_what_was_told_of_a_document_that_could_not_be_read_to_its_end_is_withdrawn(azure: Azure, clock: Clock) -> None:
    """The document before it and the one after it are the same."""

    def half() -> None:
        azure.events = [event("E1"), 7]

    def over() -> None:
        azure.events = []

    told = heard(listener(azure, clock), clock, half, over, same)
    assert [type(word) for word in told] == [Notice, Withdrawn]


def test_the_first_answer_may_take_two_minutes() -> None:
    assert FIRST_ANSWER_S > 120
    clock = Clock()
    with serving(Azure()) as azure:
        azure.events = [event()]
        clocked = AzureListener(azure.endpoint, timeout_s=2.0, first_answer_s=PATIENT_S, now_s=clock.now_s)
        spent, told = list[float](), list[object]()

        def slowly(asked: Asked) -> Says:
            if "scheduledevents" in asked.path:
                azure.answer = azure.reply
                azure.closing.wait(3.0)
            return azure.reply(asked)

        def hang() -> None:
            assert [type(word) for word in told] == [Notice], "the first answer was not waited for"
            azure.bad(Bad.SLOW, path="scheduledevents")

        azure.answer = slowly
        clocked.listen(_Timed(clock, spent, hang, same), told.append)
    assert spent[1] < BOUND_S - 5.0, "a later one was waited for as long as the service kept it"


@pytest.mark.parametrize("skew_s", [-90.0, 0.0, 90.0])
@pytest.mark.parametrize("then", [None, Bad.BROKEN, Bad.CUT])
def test_a_first_answer_that_took_long_makes_no_deadline_early_by_as_much(
    azure: Azure, clock: Clock, then: Bad | None, skew_s: float
) -> None:
    """Unless nothing better is to be had: then it is told early, and put right by the next answer."""
    azure.skew_s = skew_s
    azure.events = [event(at=formatdate(AT_S + skew_s, usegmt=True))]

    def slowly(asked: Asked) -> Says:
        if "scheduledevents" in asked.path:
            azure.answer = azure.reply
            clock.now += 100
            if then is not None:
                azure.bad(then)
        return azure.reply(asked)

    azure.answer = slowly
    told = heard(listener(azure, clock), clock, same, same)
    early = [] if then is None else [AT_S - 1 - 100]
    assert [word.deadline_s for word in told if isinstance(word, Notice)] == [*early, AT_S - 1]
    assert len(azure.asked) == 1 + 2 + 2, "more was asked once more than the first"


class _Timed(Turns):
    """Notes how long each turn took, in seconds."""

    def __init__(self, clock: Clock, spent: list[float], *script: Any) -> None:
        super().__init__(clock, *script)
        self._spent, self._since_s = spent, time.monotonic()

    def wait(self, timeout: float | None = None) -> bool:
        self._spent.append(time.monotonic() - self._since_s)
        self._since_s = time.monotonic()
        return super().wait(timeout)


def test_what_stands_can_be_acknowledged_and_nothing_else(azure: Azure, clock: Clock) -> None:
    ours, never = listener(azure, clock), threading.Event()
    azure.events = [event("E1"), event("E2", Resources=["another"])]
    with pytest.raises(UsageError, match="no scheduled event 'E1'"):
        ours.acknowledge("E1", never)
    answers: list[bool] = []

    def acknowledge() -> None:
        answers.append(ours.acknowledge("E1", never))
        with pytest.raises(UsageError):
            ours.acknowledge("E2", never)  # another VM's
        azure.acknowledges = 400
        answers.append(ours.acknowledge("E1", never))
        azure.bad(Bad.NOTHING)
        answers.append(ours.acknowledge("E1", never))
        azure.events = []

    def gone() -> None:
        with pytest.raises(UsageError):
            ours.acknowledge("E1", never)

    heard(ours, clock, acknowledge, gone)
    assert answers == [True, False, False]
    assert azure.started == [{"EventId": "E1"}, {"EventId": "E1"}]

"""Compute Engine's metadata service: two values, each by a long poll."""

from __future__ import annotations

import threading
import time
import urllib.parse
from typing import Any

import pytest

from ckpt.preemption.gcp import MAINTENANCE, PREEMPTED, GcpListener, Question
from ckpt.preemption.notice import Notice, Withdrawn
from tests.preemption.fakes import (
    BOUND_S,
    NOW_S,
    PATIENT_S,
    Asked,
    Clock,
    FakeService,
    Says,
    Turns,
    heard,
    is_within,
    listening,
    serving,
    stopped_s,
)


class Engine(FakeService):
    """Follows wait_for_change: holds the answer until the value is another than the one that was seen."""

    def __init__(self, value: str) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._value = value
        self._version = 1
        self.answer = self.reply

    def set(self, value: str) -> None:
        with self._changed:
            self._value, self._version = value, self._version + 1
            self._changed.notify_all()

    def reply(self, asked: Asked) -> Says:
        assert asked.headers["Metadata-Flavor"] == "Google"
        wanted = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(asked.path).query))
        until_s = time.monotonic() + min(float(wanted.get("timeout_sec", 0)), BOUND_S)
        with self._changed:
            while wanted.get("wait_for_change") == "true" and wanted["last_etag"] == f"v{self._version}":
                if time.monotonic() > until_s or self.closing.is_set():
                    break
                self._changed.wait(0.05)
            return Says(body=self._value, headers={"ETag": f"v{self._version}"})


def listener(service: FakeService, question: Question = PREEMPTED, **more: Any) -> GcpListener:
    return GcpListener(question, service.endpoint, timeout_s=PATIENT_S, **more)


def test_the_value_is_read_at_once_and_then_waited_for() -> None:
    with serving(Engine("FALSE")) as engine:
        with listening(listener(engine)) as (_, told, has_told):
            for _ in range(2):
                assert engine.came.acquire(timeout=60)
            assert not told
            before_s = time.time()
            engine.set("TRUE")
            assert has_told.wait(60)
            after_s = time.time()
        (notice,) = told
        assert (notice.source, notice.certain) == ("gcp-preempted", True)
        assert before_s + 30 <= notice.deadline_s <= after_s + 30
        path = "GET /computeMetadata/v1/instance/preempted"
        assert engine.paths()[:2] == [path, f"{path}?wait_for_change=true&last_etag=v1&timeout_sec=60"]


def test_stop_ends_a_long_poll_within_a_second() -> None:
    def took_s() -> float:
        with serving(Engine("FALSE")) as engine:
            return stopped_s(listener(engine), lambda _: all(engine.came.acquire(timeout=60) for _ in range(2)))

    assert is_within(1.0, took_s)


def test_a_poll_that_ends_unchanged_is_followed_by_the_next_without_a_pause() -> None:
    clock = Clock()
    with serving(Engine("FALSE")) as engine:
        stop = Turns(clock, lambda: None, lambda: stop.set())
        listener(engine, wait_s=1, now_s=clock.now_s).listen(stop, lambda word: None)
    assert stop.pauses == [0.0, 0.0]


def test_a_service_that_does_not_wait_is_not_asked_in_a_circle() -> None:
    clock = Clock()
    with serving() as service:
        service.answer = lambda asked: Says(body="FALSE", headers={"ETag": "always"})
        stop = Turns(clock, *[lambda: None] * 3)
        listener(service, now_s=clock.now_s).listen(stop, lambda word: None)
        assert stop.pauses == [0.0, 1.0, 1.0]
        service.answer = lambda asked: Says(body="FALSE")  # one that knows no ETag
        stop = Turns(clock, *[lambda: None] * 3)
        listener(service, now_s=clock.now_s).listen(stop, lambda word: None)
        assert stop.pauses == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("value", "certain"), [("MIGRATE_ON_HOST_MAINTENANCE", False), ("TERMINATE_ON_HOST_MAINTENANCE", True)]
)
def test_maintenance_is_certain_only_where_the_machine_stops(value: str, certain: bool) -> None:
    clock = Clock()
    with serving(Engine(value)) as engine:
        (notice,) = heard(listener(engine, MAINTENANCE, now_s=clock.now_s), clock)
        assert engine.paths() == ["GET /computeMetadata/v1/instance/maintenance-event"]
    assert (notice.source, notice.certain, notice.deadline_s) == ("gcp-maintenance", certain, NOW_S + 60)


def test_the_lead_counts_on_where_another_listener_takes_over_and_anew_where_it_was_taken_back() -> None:
    clock, first = Clock(), dict[str, dict[str, float]]()

    def hears(value: str) -> list[Notice | Withdrawn]:
        with serving(Engine(value)) as engine:
            return heard(listener(engine, now_s=clock.now_s, first=first), clock)

    for later_s, left_s in ((0.0, 30.0), (20.0, 10.0), (600.0, 30.0)):  # the last: perhaps it was, unheard
        clock.now += later_s
        (notice,) = hears("TRUE")
        assert notice.deadline_s == clock.now + left_s
    assert hears("FALSE") == [Withdrawn("gcp-preempted", "TRUE")], "whoever was told that by the one before"
    clock.now += 5.0
    (notice,) = hears("TRUE")
    assert notice.deadline_s == clock.now + 30.0

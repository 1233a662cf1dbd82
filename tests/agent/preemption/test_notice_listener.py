"""To what the agent listens: what a job says, and the threads that it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt.agent.preemption.notice_listener import NoticeListeners
from ckpt.agent.preemption.notice_relay import OUTLIVES_S, PAST_S, ExitTiming
from ckpt.errors import UsageError
from ckpt.events import Event, Events
from ckpt.ipc.notice_sources import Sources
from ckpt.preemption.detect import VARIABLES
from ckpt.preemption.notice import Notice, NoticeChange, Withdrawn
from ckpt.settings import read_settings

ALL = {
    "CKPT_NOTICES": "given",
    "CKPT_NOTICE_FILE": "/tmp/word",
    "CKPT_OUTCOME_FILE": "/tmp/outcome",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_END_TIME": "1900000000",
}


def test_what_the_environment_says_arrives_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    made = Sources.from_settings(read_settings(ALL))
    assert made == Sources(
        "given", (("GCE_METADATA_HOST", "127.0.0.1:1"),), "7", 1_900_000_000, "/tmp/word", "/tmp/outcome"
    )
    assert Sources.parse(made.fields()) == made
    off = Sources.from_settings(read_settings(ALL | {"CKPT_NOTICES": "off"}))
    assert off == Sources(outcome="/tmp/outcome")
    assert Sources.parse(None) == Sources()


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "loud"},
        {"mode": "\0"},
        {"named": []},
        {"named": {"A": "b" * 5000}},
        {"named": {str(n): "" for n in range(101)}},
        {"file": "a\0b"},
        {"outcome": "o" * 5000},
        {"slurm_end_s": "soon"},
        {"slurm_end_s": float("nan")},
    ],
)
def test_sources_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="notices"):
        Sources.parse(Sources("given").fields() | change)


class Loop:
    """A main thread of the agent, as far as that is: what is posted runs when the test says so."""

    def __init__(self) -> None:
        self.posted: list[Any] = []
        self.told: list[NoticeChange] = []
        self.whens: list[ExitTiming] = []
        self.events: list[Event] = []
        self._came = threading.Condition()
        self.listening = NoticeListeners(self.post, self.tell, Events(self.post_event))

    def post(self, what: Any) -> None:
        with self._came:
            self.posted.append(what)
            self._came.notify_all()

    def tell(self, word: NoticeChange, when: ExitTiming) -> None:
        self.told.append(word)
        self.whens.append(when)

    def post_event(self, event: Event) -> None:
        self.post(lambda: self.events.append(event))

    def listen_to(self, word: Path) -> None:
        self.listening.listen_to(Sources("given", file=str(word)))

    def run(self, count: int = 1) -> None:
        with self._came:
            assert self._came.wait_for(lambda: len(self.posted) >= count, 20)
            todo, self.posted = self.posted, []
        for what in todo:
            what()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.listening.close()


@pytest.fixture
def word(tmp_path: Path) -> Path:
    """The file that is a notice."""
    return tmp_path / "word"


def test_a_source_is_listened_to_until_the_job_is_gone_and_then_forgotten(loop: Loop, word: Path) -> None:
    word.touch()
    loop.listen_to(word)
    loop.listen_to(word)  # no second thread
    loop.run()
    (told,) = loop.told
    assert isinstance(told, Notice)
    assert list(loop.listening.standing_notices) == [("file", str(word))]
    word.unlink()
    loop.run()
    assert isinstance(loop.told[1], Withdrawn)
    assert not loop.listening.standing_notices


def test_what_counts_from_when_it_was_seen_counts_on_for_the_job_that_comes_next(loop: Loop, word: Path) -> None:
    word.touch()
    for _ in range(2):
        loop.listen_to(word)
        loop.run()
        loop.listening.stop()
    first, again = loop.told
    assert isinstance(first, Notice)
    assert isinstance(again, Notice)
    assert again.deadline_s == first.deadline_s


def test_what_a_job_has_left_by_is_not_left_by_again_until_it_is_taken_back_or_put_off(loop: Loop, word: Path) -> None:
    word.write_text("+100")
    name = ("file", str(word))

    def heard() -> ExitTiming:
        loop.listen_to(word)
        loop.run()
        assert [when for _, when in loop.listening.list_notices()] == loop.whens[-1:]
        return loop.whens[-1]

    loop.listening.record_exit(*name)
    assert heard() is ExitTiming.IN_TIME, "it did not stand yet"
    loop.listening.record_exit(*name)
    loop.listening.stop()
    assert heard() is ExitTiming.NOT_AGAIN
    word.write_text("+200")
    loop.run()
    assert loop.whens[-1] is ExitTiming.IN_TIME, "there is more time now"
    loop.listening.record_exit(*name)
    word.unlink()
    loop.run()
    word.write_text("+200")
    loop.run()
    assert loop.whens[-1] is ExitTiming.IN_TIME, "it is another one"
    (found,) = loop.listening.standing_notices.values()
    loop.listening.stop()
    loop.listening.restore_notice(found, ExitTiming.NOT_AGAIN)
    assert heard() is ExitTiming.NOT_AGAIN, "a former agent knew of it"


def test_what_has_passed_when_it_is_told_first_is_ahead_for_a_moment_and_then_no_news(loop: Loop, word: Path) -> None:
    came_s = time.time()
    word.write_text(f"{came_s - 1000:.0f}")

    def heard() -> tuple[float, ExitTiming]:
        loop.listen_to(word)
        loop.run()
        ((found, when),) = loop.listening.list_notices()
        assert (found, when) == (loop.told[-1], loop.whens[-1])
        loop.listening.stop()
        return found.deadline_s - came_s, when

    first_s, when = heard()
    assert PAST_S <= first_s < PAST_S + 5
    assert when is ExitTiming.IN_TIME
    assert heard() == (first_s, ExitTiming.IN_TIME), "it was put off by the start of another job"
    (found,) = (each for each in loop.told[-1:] if isinstance(each, Notice))
    loop.listening.restore_notice(replace(found, deadline_s=came_s - 1), ExitTiming.IN_TIME)  # as if that long ago
    assert heard() == (-1, ExitTiming.NOT_AGAIN)
    word.write_text(f"{came_s + 1000:.0f}")
    assert heard()[1] is ExitTiming.IN_TIME, "there is time again"


def test_what_a_job_has_left_by_is_remembered_for_a_while_after_the_machine_was_to_go(loop: Loop, word: Path) -> None:
    word.write_text("+100")
    loop.listen_to(word)
    loop.run()
    (found,) = loop.listening.standing_notices.values()
    assert loop.listening.repeat_notice_s(found.deadline_s - 5) == 0
    loop.listening.record_exit("file", str(word))
    at_s = (found.deadline_s - 5, found.deadline_s, found.deadline_s + OUTLIVES_S + 1)
    assert [loop.listening.repeat_notice_s(now_s) for now_s in at_s] == [OUTLIVES_S + 5, OUTLIVES_S, 0]


def test_what_a_stopped_listener_still_tells_is_not_heard(loop: Loop, word: Path) -> None:
    word.touch()
    loop.listen_to(word)
    with loop._came:
        assert loop._came.wait_for(lambda: loop.posted, 20)
    loop.listening.listen_to(Sources())
    loop.run()
    assert not loop.told


def test_an_address_that_is_none_is_told_and_nothing_else_fails(loop: Loop, word: Path) -> None:
    word.touch()
    named = (("AWS_EC2_METADATA_SERVICE_ENDPOINT", "ftp://nowhere"),)
    loop.listening.listen_to(Sources("given", named, slurm_job="none", file=str(word)))
    while not loop.told:
        loop.run()
    assert [event.name for event in loop.events] == ["notices.failed"] * 2
    assert [event.data for event in loop.events] == [{"source": "aws"}, {"source": "slurm"}]
    assert all(event.loud for event in loop.events)
    assert list(loop.listening.standing_notices) == [("file", str(word))]


def test_without_a_word_from_the_job_nothing_is_listened_to(loop: Loop) -> None:
    before = threading.active_count()
    loop.listening.listen_to(Sources())
    assert threading.active_count() == before

"""The one place that tries again, and counts what is asked."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from ckpt.backends.local import open_local
from ckpt.backends.memory import open_memory
from ckpt.clock import ManualClock
from ckpt.errors import (
    AccessDenied,
    AlreadyExists,
    DamagedData,
    NotFound,
    StorageError,
    TransientError,
    Unsettled,
    UsageError,
)
from ckpt.events import Event, Events
from ckpt.storage import PutMode
from ckpt.storage.retry import PAUSE_MAX_S, Retrying
from ckpt.storage.usage import LIST_PAGE, StoreUsage
from tests.storage.faulty import Fault, FaultyBackend, Rule

_NAMES = itertools.count()


class Setting:
    """A fresh memory store behind planned faults, behind Retrying with a manual clock."""

    def __init__(self, *plan: Rule, retry_s: float = 60.0, contact_s: float | None = None) -> None:
        self.memory = open_memory(f"memory://retry-{next(_NAMES)}")
        self.faulty = FaultyBackend(self.memory, plan)
        self.clock = ManualClock()
        self.pauses_s: list[float] = []
        self.events: list[Event] = []
        self.store = Retrying(
            self.faulty,
            retry_s,
            Events(self.events.append),
            contact_s=contact_s,
            now_s=self.clock.now_s,
            pause=self._pause,
            seed=1,
        )

    def _pause(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.clock.sleep_s(seconds)


@pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.LOST_REPLY])
def test_each_operation_is_tried_again_after_a_passing_fault(fault: Fault) -> None:
    setting = Setting(*(Rule(name, fault, count=3) for name in _operations()))
    setting.memory.put("a/k", [b"data"])
    for name, call in _operations().items():
        before = len(setting.faulty.log)
        call(setting.store)
        assert len(setting.faulty.log) - before == 4, name
    assert list(setting.memory.list("")) == []
    assert {event.name for event in setting.events} == {"store.retry"}


def _operations():
    return {
        "put": lambda store: store.put("a/new", [b"x"]),
        "get": lambda store: store.get("a/k", 10),
        "get_range": lambda store: store.get_range("a/k", 1, 2),
        "head": lambda store: store.head("a/k"),
        "list": lambda store: list(store.list("a/")),
        "now_s": lambda store: store.now_s(),
        "abort_uploads": lambda store: store.abort_uploads(0),
        "delete": lambda store: store.delete(iter(["a/k", "a/new"])),
    }


@pytest.mark.parametrize("error", [NotFound, AccessDenied, AlreadyExists, DamagedData])
def test_an_error_that_stays_is_raised_at_once(error) -> None:
    setting = Setting(Rule("*", Fault.BEFORE, count=99, error=error))
    for call in _operations().values():
        with pytest.raises(error, match="planned"):
            call(setting.store)
    assert setting.pauses_s == []


def test_a_store_that_refuses_is_opened_anew_and_asked_once_more() -> None:
    setting = Setting(Rule("*", Fault.BEFORE, count=99, error=AccessDenied))
    setting.memory.put("a/k", [b"data"])
    for name, call in _operations().items():
        store = Retrying(setting.faulty, 60.0, setting.store._events, reopen=lambda: setting.memory)
        call(store)
        assert store.inner is setting.memory, name
    assert setting.pauses_s == []
    assert {event.name for event in setting.events} == {"store.reopened"}


def test_a_store_that_goes_on_refusing_is_asked_twice_for_each_operation() -> None:
    setting = Setting()
    opened: list[FaultyBackend] = []

    def reopen() -> FaultyBackend:
        opened.append(FaultyBackend(setting.memory, [Rule("*", Fault.BEFORE, count=99, error=AccessDenied)]))
        return opened[-1]

    store = Retrying(reopen(), 60.0, reopen=reopen)
    for _ in range(3):
        with pytest.raises(AccessDenied, match="planned"):
            store.get("k", 10)
    assert sum(len(each.log) for each in opened) == 2 * 3


def test_credentials_that_cannot_be_read_leave_the_refusal_as_the_error() -> None:
    def reopen() -> FaultyBackend:
        raise UsageError("the file is half written")

    setting = Setting(Rule("get", Fault.BEFORE, error=AccessDenied))
    with pytest.raises(AccessDenied, match="planned"):
        Retrying(setting.faulty, 60.0, reopen=reopen).get("k", 10)


def test_pauses_grow_are_jittered_and_end_by_the_deadline() -> None:
    setting = Setting(Rule("get", Fault.BEFORE, count=99), retry_s=60.0)
    with pytest.raises(TransientError, match=r"gave up trying to get k after 1\d attempts: .*planned"):
        setting.store.get("k", 1)
    assert 30 < sum(setting.pauses_s) <= 60
    whole_s = [min(0.1 * 2**n, PAUSE_MAX_S) for n in range(len(setting.pauses_s))]
    assert all(whole / 2 <= pause_s <= whole for whole, pause_s in zip(whole_s, setting.pauses_s, strict=True))
    assert len({round(pause_s / whole, 6) for whole, pause_s in zip(whole_s, setting.pauses_s, strict=True)}) > 3
    with pytest.raises(TransientError, match=r"gave up trying to get k after 1 attempt: .*planned"):
        Setting(Rule("get", Fault.BEFORE), retry_s=0.0).store.get("k", 10)


def test_whoever_waits_is_told_why_once() -> None:
    setting = Setting(Rule("get", Fault.BEFORE, count=99))
    with pytest.raises(TransientError):
        setting.store.get("k", 1)
    told = [event for event in setting.events if event.loud]
    assert len(told) == 1
    assert "planned: get k failed" in told[0].message
    assert sum(setting.pauses_s[: setting.events.index(told[0])]) < 5


def test_one_outage_is_said_at_growing_distances_whichever_operations_meet_it() -> None:
    setting = Setting(Rule("get", Fault.BEFORE, count=9999))
    for _ in range(30):  # as the heartbeats of some minutes
        with pytest.raises(TransientError):
            setting.store.get("k", 1)
    told = [sum(e.data["pause_s"] for e in setting.events[:i]) for i, e in enumerate(setting.events) if e.loud]
    apart = [later - before for before, later in itertools.pairwise(told)]
    assert 2 <= len(told) <= 8
    assert all(later > 1.5 * before for before, later in itertools.pairwise(apart))


def test_a_lost_reply_to_put_if_absent_is_settled_by_reading_back() -> None:
    setting = Setting(Rule("put", Fault.LOST_REPLY))
    setting.store.put("k", [b"ours"], PutMode.IF_ABSENT)
    assert setting.memory.get("k", 10) == b"ours"
    assert setting.faulty.log == ["put k", "put k", "get k"]


@pytest.mark.parametrize(
    ("faults", "theirs"), [*((1, theirs) for theirs in (b"them", b"more than ours", b"")), (0, b"equal to ours")]
)
def test_a_key_that_another_has_taken_is_taken(faults: int, theirs: bytes) -> None:
    """Without a fault it is not ours even if the bytes are equal."""
    setting = Setting(Rule("put", Fault.BEFORE, count=faults))
    setting.memory.put("k", [theirs])
    with pytest.raises(AlreadyExists):
        setting.store.put("k", [theirs if faults == 0 else b"ours"], PutMode.IF_ABSENT)
    assert setting.memory.get("k", 100) == theirs


@pytest.mark.parametrize("mode", PutMode)
def test_a_put_without_a_reply_at_the_end_is_unsettled(mode: PutMode) -> None:
    setting = Setting(Rule("put", Fault.BEFORE, count=99), retry_s=5.0)
    with pytest.raises(Unsettled, match=r"read k back"):
        setting.store.put("k", [b"x"], mode)


def test_a_listing_goes_on_behind_what_it_has_given() -> None:
    setting = Setting()
    names = [f"k{n}" for n in range(7)]
    for name in names:
        setting.memory.put(name, [b"x"])
    attempts = itertools.count(1)

    class Breaking:
        """Each attempt gets two objects further than the last, then fails."""

        url = "breaking"

        def list(self, prefix: str):
            left = 2 * next(attempts)
            for info in setting.memory.list(prefix):
                if left == 0:
                    raise TransientError("broke off")
                left -= 1
                yield info

    store = Retrying(Breaking(), 60.0, now_s=setting.clock.now_s, pause=setting.clock.sleep_s)  # type: ignore[arg-type]
    assert [info.key for info in store.list("")] == names
    assert next(attempts) == 5


@pytest.mark.parametrize("in_pause", [1, 8])
def test_a_put_that_is_broken_off_waits_for_no_next_try_and_begins_none(in_pause: int) -> None:
    cancel = threading.Event()

    class Cancelled(Setting):
        def _pause(self, seconds: float) -> None:
            super()._pause(seconds)
            if len(self.events) == in_pause:
                assert not cancel.is_set(), "it goes on waiting"
                cancel.set()

    setting = Cancelled(Rule("put", Fault.BEFORE, count=99))
    for _ in range(2):
        with pytest.raises(StorageError, match="put was cancelled"):
            setting.store.put("k", [b"x"], cancel=cancel)
        assert len(setting.faulty.log) == in_pause
    assert max(setting.pauses_s) < 0.5, "it looks now and then"


def test_closing_ends_the_pause_of_those_that_wait() -> None:
    faulty = FaultyBackend(open_memory("memory://closing"), [Rule("get", Fault.BEFORE, count=10**6)])
    paused = threading.Event()
    store = Retrying(faulty, 3600.0, Events(lambda event: event.data["pause_s"] > 1 and paused.set()))  # type: ignore[func-returns-value]
    failed: list[Exception] = []

    def read() -> None:
        try:
            store.get("k", 1)
        except TransientError as exc:
            failed.append(exc)

    thread = threading.Thread(target=read)
    thread.start()
    assert paused.wait(60)
    store.close()
    thread.join(60)
    assert not thread.is_alive()
    assert "gave up" in str(failed[0])


def test_the_address_is_doubted_of_a_store_that_never_answered_also_where_it_is_waited_for_as_long_as_ever() -> None:
    setting = Setting(Rule("head", Fault.BEFORE, count=99))
    with pytest.raises(TransientError, match=r"check the address of the store \(AWS_ENDPOINT_URL or its like\)$"):
        setting.store.head("a/k")
    assert setting.clock.now_s() > 40.0


def test_a_folder_has_no_address_to_be_doubted(tmp_path: Path) -> None:
    faulty = FaultyBackend(open_local(str(tmp_path)), [Rule("head", Fault.BEFORE, count=99)])
    with pytest.raises(TransientError) as caught:
        Retrying(faulty, 0.0).head("a/k")
    assert "AWS_ENDPOINT_URL" not in str(caught.value)


@pytest.mark.parametrize("answer", [None, NotFound], ids=["a result", "a refusal"])
def test_a_store_that_never_answered_is_given_up_sooner_and_the_address_is_doubted(answer: type | None) -> None:
    setting = Setting(Rule("head", Fault.BEFORE, count=99), contact_s=10.0)
    with pytest.raises(TransientError, match=r"check the address .* CKPT_RETRY_S=60 retries"):
        setting.store.head("a/k")
    assert setting.clock.now_s() <= 10.0
    if answer is None:
        list(setting.store.list(""))
    else:
        with pytest.raises(answer):
            setting.store.get("a/k", 10)
    began_s = setting.clock.now_s()
    with pytest.raises(TransientError) as caught:
        setting.store.head("a/k")
    assert setting.clock.now_s() - began_s > 40.0
    assert "check the address" not in str(caught.value)


def test_each_attempt_and_its_bytes_count() -> None:
    usage = StoreUsage()
    store = Retrying(
        FaultyBackend(open_memory("memory://usage"), [Rule("put", Fault.LOST_REPLY)]),
        60.0,
        usage=usage,
        pause=lambda seconds: None,
    )
    store.put("a/one", [b"123", memoryview(b"45")])
    assert store.get("a/one", 100) == b"12345"
    assert bytes(store.get_range("a/one", 1, 2)) == b"23"
    store.head("a/one")
    assert len(list(store.list(""))) == 1
    store.folders("")
    store.delete(["a/one"])
    assert usage.requests() == {"put": 2, "get": 2, "head": 1, "list": 2, "delete": 1}
    assert usage.bytes_moved() == {"put": 10, "get": 7}


def test_a_long_listing_takes_one_request_a_page() -> None:
    usage = StoreUsage()
    store = Retrying(open_memory("memory://pages"), 60.0, usage=usage)
    for number in range(2 * LIST_PAGE + 1):
        store.put(f"a/{number:05}", [b"x"])
    assert len(list(store.list(""))) == 2 * LIST_PAGE + 1
    assert usage.requests()["list"] == 3

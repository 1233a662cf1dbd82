"""The planned faults do what they say: other tests build on them."""

from __future__ import annotations

import itertools
import threading

import pytest

from ckpt.backends.memory import open_memory
from ckpt.errors import AccessDenied, NotFound, TransientError
from tests.storage.faulty import Crash, Fault, FaultyBackend, Rule

_NAMES = itertools.count()


def faulty(*plan: Rule) -> FaultyBackend:
    store = FaultyBackend(open_memory(f"memory://faulty-{next(_NAMES)}"), plan)
    store.inner.put("k", [b"12345678"])
    return store


def test_before_does_nothing_and_lost_reply_does_it() -> None:
    store = faulty(Rule("put", Fault.BEFORE, error=AccessDenied), Rule("put", Fault.LOST_REPLY, nth=2))
    with pytest.raises(AccessDenied):
        store.put("a", [b"x"])
    with pytest.raises(NotFound):
        store.get("a", 1)
    with pytest.raises(TransientError):
        store.put("a", [b"x"])
    assert store.get("a", 1) == b"x"
    assert [(each.name, each.key, each.fault, each.done) for each in store.log] == [
        ("put", "a", Fault.BEFORE, False),
        ("get", "a", None, False),
        ("put", "a", Fault.LOST_REPLY, True),
        ("get", "a", None, True),
    ]


def test_a_late_put_lands_when_it_is_told_to() -> None:
    store = faulty(Rule("put", Fault.LATE, key="a*"))
    with pytest.raises(TransientError):
        store.put("a", [b"late", b"r"])
    store.put("b", [b"x"])
    assert [info.key for info in store.list("")] == ["b", "k"]
    assert store.land() == 1
    assert store.get("a", 10) == b"later"
    assert store.land() == 0


def test_truncated_and_flipped_spoil_what_is_read() -> None:
    store = faulty(Rule("get*", Fault.TRUNCATED), Rule("get", Fault.FLIPPED), Rule("get_range", Fault.TRUNCATED))
    assert sum(a != b for a, b in zip(store.get("k", 8), b"12345678", strict=True)) == 1
    assert bytes(store.get_range("k", 2, 4)) == b"34"
    assert store.get("k", 8) == b"12345678"


def test_what_hangs_goes_on_when_it_is_released() -> None:
    store = faulty(Rule("get", Fault.HANG))
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(store.get("k", 8)))
    thread.start()
    store.wait_hung()
    assert store.head("k").size == 8
    assert got == []
    store.release()
    thread.join(60)
    assert got == [b"12345678"]


@pytest.mark.parametrize(("fault", "there"), [(Fault.CRASH, False), (Fault.CRASH_AFTER, True)])
def test_after_a_crash_nothing_is_done_any_more(fault: Fault, there: bool) -> None:
    store = faulty(Rule("*", fault, nth=2))
    store.put("a", [b"x"])
    with pytest.raises(Crash):
        store.put("b", [b"x"])
    for attempt in (lambda: store.put("c", [b"x"]), lambda: store.delete(["a"]), lambda: store.head("k")):
        with pytest.raises(Crash):
            attempt()
    assert [info.key for info in store.inner.list("")] == ["a", *["b"] * there, "k"]

"""Requests to a store are counted, and each attempt counts."""

from __future__ import annotations

from ckpt.backends.memory import open_memory
from ckpt.storage.retry import Retrying
from ckpt.storage.usage import LIST_PAGE, StoreUsage
from tests.storage.faulty import Fault, FaultyBackend, Rule


def test_each_attempt_and_its_bytes_count():
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


def test_a_long_listing_takes_one_request_a_page():
    usage = StoreUsage()
    store = Retrying(open_memory("memory://pages"), 60.0, usage=usage)
    for number in range(2 * LIST_PAGE + 1):
        store.put(f"a/{number:05}", [b"x"])
    assert len(list(store.list(""))) == 2 * LIST_PAGE + 1
    assert usage.requests()["list"] == 3

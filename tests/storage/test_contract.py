"""The contract of ckpt/storage/contract.py, over every backend and over real servers."""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace

import pytest

from ckpt import settings, storage
from ckpt.errors import AlreadyExists, DamagedData, NotFound, StorageError, UsageError
from ckpt.storage import Backend, PutMode
from ckpt.storage.names import TEMPORARY_PREFIX
from ckpt.storage.probe import probe
from tests.servers import start_upload
from tests.storage.conftest import Kind

NO_KEYS = [
    "",
    "/",
    "a/",
    "/a",
    "a//b",
    "..",
    "../a",
    "a/../b",
    ".hidden",
    "a/.b",
    "a b",
    "a\x00b",
    "ä",
    "x" * 65,
    "a\n",
]
NO_KEYS += ["/".join("abcdefghi")]


def keys(store: Backend, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


def test_the_folders_of_one_level_are_named_and_nothing_below_them(store: Backend) -> None:
    for key in ("top", "b/commits/1", "b/x", "a/deep/er/1", "a-b/1", "other/a/1"):
        store.put(key, [b"1"])
    assert store.folders("") == ["a", "a-b", "b", "other"]
    assert store.folders("a/") == ["deep"]
    assert store.folders("b/") == ["commits"]
    assert store.folders("a/deep/er/") == store.folders("nowhere/") == []


@pytest.mark.parametrize("size", [0, 1, 4095, 300_000])
def test_what_was_put_is_got_back(store: Backend, size: int, seed: int) -> None:
    data = random.Random(seed).randbytes(size)
    store.put("a/b", [data])
    assert store.get("a/b", size) == data
    assert bytes(store.get_range("a/b", 0, size)) == data


def test_chunks_of_any_buffer_become_one_object(store: Backend) -> None:
    with mmap.mmap(-1, 4096) as pages:
        pages[:4] = b"page"
        chunks = [b"bytes", b"", bytearray(b"array"), memoryview(b"__view__")[2:-2], memoryview(pages)[:4]]
        chunks += [memoryview(b"12345678").cast("H"), memoryview(b"x").toreadonly()]
        store.put("k", chunks)
        assert store.get("k", 100) == b"bytesarrayviewpage12345678x"
        chunks.clear()
    many = [bytes([n % 256]) * 3 for n in range(3000)]  # each is small
    store.put("many", many)
    assert store.get("many", 9000) == b"".join(many)


def test_a_large_object_goes_up_in_parts_and_comes_back_by_ranges(store: Backend, seed: int) -> None:
    data = random.Random(seed).randbytes(17 << 20)
    inner = getattr(store, "inner")  # noqa: B009 (the contract has no such thing)
    if hasattr(inner, "single_bytes_max"):
        inner.single_bytes_max, inner.part_bytes = 6 << 20, 6 << 20
    store.put("data/large.pack", [data[: 5 << 20], memoryview(data)[5 << 20 :]])
    assert store.head("data/large.pack").size == len(data)
    starts = range(0, len(data), 3 << 20)
    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(lambda at: store.get_range("data/large.pack", at, min(3 << 20, len(data) - at)), starts)
        assert b"".join(bytes(part) for part in parts) == data


def test_a_put_replaces_the_object_and_changes_its_version(store: Backend) -> None:
    store.put("k", [b"old one"])
    before = store.head("k")
    store.put("k", [b"new"])
    after = store.head("k")
    assert store.get("k", 10) == b"new"
    assert (before.size, after.size) == (7, 3)
    assert before.version != after.version
    assert list(store.list("")) == [replace(after, modified_s=next(iter(store.list(""))).modified_s)]


def test_put_if_absent_refuses_a_taken_key_where_the_store_honours_it(store: Backend, kind: Kind) -> None:
    store.put("k", [b"first"], PutMode.IF_ABSENT)
    assert store.get("k", 10) == b"first"
    if kind.honours_if_absent:
        with pytest.raises(AlreadyExists, match="k"):
            store.put("k", [b"second"], PutMode.IF_ABSENT)
        assert store.get("k", 10) == b"first"
    else:
        store.put("k", [b"second"], PutMode.IF_ABSENT)
        assert store.get("k", 10) == b"second"
    assert keys(store) == ["k"]


def test_one_of_many_that_put_if_absent_at_once_wins(store: Backend, kind: Kind) -> None:
    def attempt(n: int) -> int | None:
        try:
            store.put("k", [b"%d" % n], PutMode.IF_ABSENT)
        except AlreadyExists:
            return None
        return n

    with ThreadPoolExecutor(6) as pool:
        won = [n for n in pool.map(attempt, range(6)) if n is not None]
    content = int(store.get("k", 10))
    if kind.honours_if_absent and kind.name != "fsspec-file":  # that one can only look before it puts
        assert won == [content]
    else:
        assert content in won


def test_an_object_larger_than_expected_is_damage(store: Backend) -> None:
    store.put("k", [b"12345"])
    assert store.get("k", 5) == b"12345"
    with pytest.raises(DamagedData, match=r"5 bytes; at most 4"):
        store.get("k", 4)


def test_a_range_is_exact_or_damage(store: Backend) -> None:
    store.put("k", [bytes(range(200))])
    assert bytes(store.get_range("k", 50, 20)) == bytes(range(50, 70))
    assert bytes(store.get_range("k", 199, 1)) == b"\xc7"
    assert bytes(store.get_range("k", 200, 0)) == b""
    for start, length in [(190, 11), (0, 201), (200, 1), (5000, 10), (201, 0)]:
        with pytest.raises(DamagedData, match="k"):
            store.get_range("k", start, length)
    for start, length in [(-1, 5), (5, -1)]:
        with pytest.raises(UsageError):
            store.get_range("k", start, length)


def test_what_is_missing_is_not_found(store: Backend) -> None:
    store.put("other", [b"x"])
    for attempt in (
        lambda: store.get("a/b", 10),
        lambda: store.get_range("a/b", 0, 1),
        lambda: store.get_range("a/b", 0, 0),
        lambda: store.head("a/b"),
        lambda: store.head("a"),
    ):
        with pytest.raises(NotFound, match="a"):
            attempt()


def test_a_listing_is_complete_in_key_order_and_of_whole_folders(store: Backend) -> None:
    assert keys(store) == []
    assert keys(store, "data/") == []
    names = ["a", "data-x/1", "data.x/1", "data/0", "data/a-b", "data/a.b", "data/a/1", "data/a/2", "data/aa", "dataz"]
    for name in reversed(names):
        store.put(name, [name.encode()])
    assert keys(store) == sorted(names)
    assert keys(store, "data/") == ["data/0", "data/a-b", "data/a.b", "data/a/1", "data/a/2", "data/aa"]
    assert keys(store, "data/a/") == ["data/a/1", "data/a/2"]
    assert keys(store, "dat/") == []
    for info in store.list("data/"):
        assert info.size == len(info.key)
        assert (info.version, info.modified_s // 2) == (
            store.head(info.key).version,
            store.head(info.key).modified_s // 2,
        )
    for wrong in ("data", "../", "/", "a//"):
        with pytest.raises(UsageError):
            keys(store, wrong)


def test_deleting_takes_what_is_there_and_minds_nothing_else(store: Backend) -> None:
    names = [f"data/{n}/x" for n in range(12)]
    for name in names:
        store.put(name, [b"x"])
    store.delete([])
    store.delete(iter([*names[:5], "data/nothing", "nowhere/at/all", names[0]]))
    assert keys(store) == sorted(names[5:])
    store.delete(names)
    assert keys(store) == []
    store.put(names[0], [b"again"])  # also where its folder has gone meanwhile
    assert keys(store) == [names[0]]


@pytest.mark.parametrize("key", NO_KEYS)
def test_a_key_that_is_none_never_reaches_the_store(store: Backend, key: str) -> None:
    attempts: list[Callable[[], object]] = [
        lambda: store.put(key, [b"x"]),
        lambda: store.get(key, 1),
        lambda: store.get_range(key, 0, 1),
        lambda: store.head(key),
        lambda: store.delete([key]),
    ]
    for attempt in attempts:
        with pytest.raises(UsageError, match="not a key"):
            attempt()


def test_ages_are_told_by_one_clock(store: Backend) -> None:
    before_s = store.now_s()
    store.put("k", [b"x"])
    after_s = store.now_s()
    modified_s = store.head("k").modified_s
    assert before_s - 2 <= modified_s <= after_s + 2
    assert abs(after_s - time.time()) < 300
    assert keys(store) == ["k"]  # asking the time leaves nothing


def test_unfinished_uploads_are_ended_by_age_and_are_never_objects(store: Backend, kind: Kind, place: str) -> None:
    store.put("data/done", [b"x"])
    if kind.server is not None and kind.keeps_uploads:
        start_upload(kind.server, f"{place.removeprefix('s3://').partition('/')[2]}/data/unfinished")
        start_upload(kind.server, "elsewhere/unfinished")
    elif kind.keeps_uploads:
        with open(f"{place.removeprefix('fsspec+file://')}/data/{TEMPORARY_PREFIX}0123", "w") as file:
            file.write("half")
    assert keys(store) == ["data/done"]
    if kind.dates_uploads:
        assert store.abort_uploads(older_than_s=3600) == 0
    assert store.abort_uploads(older_than_s=-60) == int(kind.keeps_uploads)
    assert store.abort_uploads(older_than_s=-60) == 0
    assert keys(store) == ["data/done"]


def test_a_put_that_fails_leaves_nothing(store: Backend) -> None:
    with pytest.raises(TypeError):
        store.put("data/x", [b"half", "not bytes"])  # type: ignore[list-item]
    assert keys(store) == []
    assert store.abort_uploads(older_than_s=-60) == 0


def test_a_put_that_is_broken_off_leaves_nothing_or_all_of_it(store: Backend, seed: int) -> None:
    data, cancel = random.Random(seed).randbytes(9 << 20), threading.Event()
    store.put("data/a", [data], cancel=cancel)
    assert store.get("data/a", len(data)) == data, "as long as it is not"
    cancel.set()
    with suppress(StorageError):
        store.put("data/b", [data], cancel=cancel)
    assert set(keys(store)) <= {"data/a", "data/b"}
    assert all(store.get(key, len(data)) == data for key in keys(store))
    assert store.abort_uploads(older_than_s=-60) == 0


def test_many_threads_may_call_at_once(store: Backend, seed: int) -> None:
    def work(n: int) -> bool:
        data = random.Random(seed + n).randbytes(1000 * n)
        store.put(f"data/{n % 3}/{n}", [data[:10], data[10:]])
        read = store.get(f"data/{n % 3}/{n}", len(data)) == data
        if n % 2:
            store.delete([f"data/{n % 3}/{n}"])
        return read

    for folder in range(3):  # none is ever empty: rclone removes one that a delete empties, whatever is just put there
        store.put(f"data/{folder}/kept", [b"x"])
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(24)))
    assert len(keys(store)) == 15


def test_opening_creates_nothing_and_an_empty_store_is_empty(store: Backend) -> None:
    assert keys(store) == []
    with pytest.raises(NotFound):
        store.head("k")
    store.delete(["k"])
    assert store.abort_uploads(older_than_s=0) == 0


def test_the_probe_says_what_the_store_does(store: Backend, kind: Kind) -> None:
    found = asdict(probe(store))
    assert abs(found.pop("clock_skew_s")) < 60
    assert found.pop("put_s") >= 0
    assert found.pop("get_s") >= 0
    assert found.pop("put_if_absent") is kind.honours_if_absent
    assert all(found.values()), found
    assert keys(store) == []


def test_a_bucket_that_vanishes_is_named_and_is_not_an_empty_store(kind: Kind, place: str) -> None:
    if kind.server is None:
        assert "bucket" not in place
        return
    bucket = f"gone{random.randrange(10**9)}"  # no hyphen: for gs it is sent as %2D, which moto does not read
    kind.server.make_bucket(bucket)
    store = storage.open(f"{kind.scheme}://{bucket}/run", settings=replace(settings.read_settings(), retry_s=5.0))
    store.put("k", [b"x"])
    store.delete(["k"])
    kind.server.remove_bucket(bucket)
    attempts: list[Callable[[], object]] = [
        lambda: store.put("k", [b"x"]),
        lambda: store.get("k", 10),
        lambda: store.get_range("k", 0, 1),
        lambda: store.head("k"),
        lambda: keys(store),
    ]
    for attempt in attempts:
        with pytest.raises(StorageError, match=r"bucket") as caught:
            attempt()
        assert not isinstance(caught.value, NotFound)
    store.close()

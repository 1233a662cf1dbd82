"""Latency and bandwidth of a store, at several object sizes and numbers of threads, and what it really does."""

from __future__ import annotations

import math
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from ckpt.bench.bare import Bare
from ckpt.bench.figures import Figure, in_turns, run_all
from ckpt.storage import Backend
from ckpt.storage.probe import probe
from ckpt.threads import Tasks

SECTION = "store"
SMALL_BYTES = 1 << 10
SMALL_CALLS = 20
SIZES = (256 << 10, 4 << 20, 32 << 20)
THREADS = (1, 4, 16)
ROUND_BYTES_MAX = 128 << 20  # in one round of one size and number of threads
ROUNDS = 3
TEXTS = {
    "put": "put of 1 KiB",
    "get": "get of 1 KiB",
    "head": "head",
    "list": f"list of {SMALL_CALLS} objects",
    "delete": "delete",
}
PART_SIZES = (1 << 20, 5 << 20)  # of a multipart upload; S3 asks for 5 MiB
LIMIT_S = 3.0  # for each size and number of threads, of puts and of gets


def behaviour(url: str, store: Backend) -> dict[str, Any]:
    """What the store does, by trying it: see `storage.probe.Probe`, and the smallest part of a multipart upload."""
    found: dict[str, Any] = asdict(probe(store))
    found["multipart_part_bytes_min"] = _smallest_part(url)
    return found


def _smallest_part(url: str) -> int | None:
    """The smallest of PART_SIZES that the store takes as a part; None for stores without multipart uploads, or if it
    takes none."""
    from ckpt.storage.url import scheme_of

    if scheme_of(url) not in ("s3", "gs", "az"):
        return None
    import obstore
    from obstore.exceptions import BaseError

    from ckpt.backends.cloud import open_obstore

    direct = open_obstore(url)
    for size in PART_SIZES:
        content = secrets.token_bytes(2 * size + 1)
        try:
            obstore.put(direct, "parts", content, use_multipart=True, chunk_size=size)
            if bytes(obstore.get(direct, "parts").bytes()) == content:
                return size
        except BaseError:
            continue
        finally:
            obstore.delete(direct, ["parts"])
    return None


def latency(store: Backend, bare: Bare | None) -> Iterator[Figure]:
    """The medians and the 95th percentiles of small requests, one after another."""
    content = memoryview(secrets.token_bytes(SMALL_BYTES))
    calls: dict[str, tuple[Callable[[str], object], Callable[[str], object] | None]] = {
        "put": (lambda key: store.put(key, [content]), None if bare is None else lambda key: bare.put(key, content)),
        "get": (
            lambda key: store.get(key, SMALL_BYTES),
            None if bare is None else lambda key: bare.get(key, SMALL_BYTES),
        ),
        "head": (store.head, None),
        "list": (lambda key: list(store.list("")), None),
        "delete": (lambda key: store.delete([key]), None),
    }
    for name, (ours, theirs) in calls.items():
        spent = sorted(_spent_s(ours))
        ceiling = None
        if theirs is not None:
            ceiling = 1e3 * statistics.median(_spent_s(theirs))
        text = TEXTS[name]
        yield Figure(SECTION, text, 1e3 * statistics.median(spent), "ms", "lower", ceiling)
        slow = spent[math.ceil(0.95 * SMALL_CALLS) - 1]
        yield Figure(SECTION, f"{text}, 95th percentile", 1e3 * slow, "ms", "lower")


def _spent_s(call: Callable[[str], object]) -> list[float]:
    """Of one call for each of SMALL_CALLS keys."""
    spent = []
    for number in range(SMALL_CALLS):
        began_s = time.perf_counter()
        call(f"small-{number}")
        spent.append(time.perf_counter() - began_s)
    return spent


def bandwidth(store: Backend, bare: Bare | None, nbytes_max: int) -> Iterator[Figure]:
    """MB/s of puts and gets. `nbytes_max`: the largest object."""
    for size in (each for each in SIZES if each <= max(nbytes_max, SIZES[0])):
        for threads in THREADS:
            count = max(threads, min(4 * threads, ROUND_BYTES_MAX // size))
            if count * size > 2 * ROUND_BYTES_MAX:
                continue
            yield from _bandwidth(store, bare, size, threads, count)


def _bandwidth(store: Backend, bare: Bare | None, size: int, threads: int, count: int) -> Iterator[Figure]:
    content = memoryview(os.urandom(size))
    keys = [f"block-{number}" for number in range(count)]
    for key in keys:
        # Some servers fail if two puts make one folder at once (rclone), and the ceiling has no retries.
        store.put(key, [b""])
    with Tasks("bench", threads) as pool:
        puts: dict[str, Callable[[], object]] = {
            "ours": lambda: run_all(pool, lambda key: store.put(key, [content]), keys)
        }
        gets: dict[str, Callable[[], object]] = {
            "ours": lambda: run_all(pool, lambda key: len(store.get_range(key, 0, size)), keys)
        }
        if bare is not None:
            puts["bare"] = lambda: run_all(pool, lambda key: bare.put(key, content), keys)
            gets["bare"] = lambda: run_all(pool, lambda key: bare.get(key, size), keys)
        for name, works in (("put", puts), ("get", gets)):
            found = in_turns(works, ROUNDS, LIMIT_S)
            rates = {way: count * size / 1e6 / seconds for way, seconds in found.items()}
            text = f"{name} of {_size_text(size)}, {threads} at once"
            at = {"bytes": size, "threads": threads}
            yield Figure(SECTION, text, rates["ours"], "MB/s", "higher", rates.get("bare"), at)
    store.delete(keys)


def _size_text(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def measure(store: Backend, bare: Bare | None, nbytes_max: int) -> Iterator[Figure]:
    """Errors: those of the backend."""
    yield from latency(store, bare)
    yield from bandwidth(store, bare, nbytes_max)

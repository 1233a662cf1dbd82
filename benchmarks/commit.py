"""Committing to and restoring from a real server, raw codec, against obstore's own calls on the same bytes.

    python -m benchmarks.commit [--small] [--server ceph|rclone ...] [--json FILE]

A commit takes frames of 4 MiB that lie together in memory, as an arena holds them, makes packs and a record; obstore
puts the same bytes in as many parts, as many at once. A restore reads the record and fills memory that is warm, hashes
included; obstore gets the same ranges, as many at once, into memory of its own. They take turns in every round;
figures are medians. Where a server answers a ranged get with 200 (rclone) obstore cannot read in ranges, and only the
commit is compared. CPU is this process's.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import obstore

from benchmarks.report import Row, forget_peak, parser, peak_bytes, report
from benchmarks.store import direct_store
from ckpt import storage
from ckpt.format.frames import hash_frames
from ckpt.format.manifest import EXTENT, FRAME, Manifest, TensorSpec
from ckpt.layout.layout import STAGED_FRAME
from ckpt.store.commit import Committed, Committer
from ckpt.store.packs import PUTS_MAX
from ckpt.store.reader import GET_BYTES, GETS_MAX, FrameReader, open_record
from ckpt.types import DTYPE_CODE, FRAME_BYTES, Box, Epoch, Identity, Version
from tests import ceph, servers
from tests.servers import Server

PUT_BAR, CPU_BAR, GET_BAR = 0.9, 1.5, 0.85
# A commit puts what lies in memory: a copy of one pack of each put under way would be PUTS_MAX x 64 MiB. A restore may
# hold what it got and has not yet copied.
EXTRA_BYTES_MAX = {"commit": 64 << 20, "restore": 256 << 20}
SERVERS: dict[str, Callable[[], AbstractContextManager[Server]]] = {"ceph": ceph.ceph, "rclone": servers.rclone}


@dataclass(frozen=True)
class Size:
    state_bytes: int
    pack_bytes: int
    frame_bytes: int
    rounds: int


FULL = Size(512 << 20, 64 << 20, FRAME_BYTES, 7)
SMALL = Size(4 << 20, 1 << 20, 256 << 10, 2)


@dataclass(frozen=True)
class Cost:
    seconds: float
    cpu_s: float
    extra_bytes: int


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--server", action="append", choices=sorted(SERVERS), help="by default all that can be started")
    args = made.parse_args()
    size = SMALL if args.small else FULL
    rows: list[Row] = []
    for name in args.server or [name for name in SERVERS if name != "ceph" or ceph.why_not() is None]:
        with SERVERS[name]() as server:
            rows += measure(server, size)
    return report("commit", rows, args)


def measure(server: Server, size: Size) -> list[Row]:
    os.environ.update(server.environment())
    bench = Bench(server, size)
    try:
        for number in range(size.rounds + 1):  # the first warms up, and rows_of leaves it out
            bench.round(number)
    finally:
        bench.close()
    return rows_of(server.name, bench.costs, size.state_bytes, bench.has_ranges)


class Bench:
    """One server, one state, and what each call on it has cost so far."""

    def __init__(self, server: Server, size: Size) -> None:
        self.direct = direct_store(server, "obstore")
        obstore.put(self.direct, "first", b"")  # rclone answers 500 when two puts make one folder at once
        self.ours = storage.open(f"s3://{server.bucket}/ckpt")
        self.size = size
        self.manifest, self.memory = state(size)
        self.target = mmap.mmap(-1, size.state_bytes)
        self.target[:] = bytes(size.state_bytes)  # warm
        self.has_ranges = server.name != "rclone"
        self.costs: dict[str, list[Cost]] = {"commit": [], "put": [], "restore": [], "get": []}
        self._pool = ThreadPoolExecutor(max(PUTS_MAX, GETS_MAX))
        self._done: Committed | None = None

    def close(self) -> None:
        self._pool.shutdown()
        self.ours.close()

    def round(self, number: int) -> None:
        """Whoever comes first meets a server in another state: they take turns."""
        steps: list[list[tuple[str, Callable[[int], object]]]] = [[("commit", self.commit), ("put", self.put)]]
        steps.append([("restore", self.restore), ("get", self.get)] if self.has_ranges else [("restore", self.restore)])
        for step in steps:
            for name, call in step if number % 2 else reversed(step):
                self.costs[name].append(cost(call, number))
        assert self.target[:] == self.memory[:], "what came back is not what was committed"
        self.ours.delete([info.key for info in self.ours.list("")])
        obstore.delete(self.direct, self._keys(number))

    def commit(self, number: int) -> None:
        view, length = memoryview(self.memory), self.size.frame_bytes
        committer = Committer(self.ours, f"w{number}", "raw", pack_bytes=self.size.pack_bytes)
        identity = Identity(Epoch(1, "0" * 16), Version(number))
        self._done = committer.commit(
            identity, self.manifest, lambda i: view[i * length : (i + 1) * length], check=lambda: None
        )

    def put(self, number: int) -> None:
        def one(i: int) -> None:
            at = i * self.size.pack_bytes
            part = memoryview(self.memory)[at : at + self.size.pack_bytes]
            obstore.put(self.direct, self._keys(number)[i], part, use_multipart=False)

        self._together(one, range(len(self._keys(number))), PUTS_MAX)

    def restore(self, number: int) -> None:
        assert self._done is not None
        view, length = memoryview(self.target), self.size.frame_bytes
        record = open_record(self.ours, self._done.ref)
        FrameReader(self.ours, record).read(
            range(len(record.manifest.frames)), lambda i: None, lambda i: view[i * length : (i + 1) * length]
        )

    def get(self, number: int) -> None:
        step = min(GET_BYTES, self.size.pack_bytes)
        ranges = [(key, at) for key in self._keys(number) for at in range(0, self.size.pack_bytes, step)]
        self._together(lambda r: len(obstore.get_range(self.direct, r[0], start=r[1], length=step)), ranges, GETS_MAX)

    def _keys(self, number: int) -> list[str]:
        return [f"{number}-{i}" for i in range(self.size.state_bytes // self.size.pack_bytes)]

    def _together(self, call: Callable[[Any], object], items: Sequence[Any], width: int) -> None:
        left = iter(items)
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    item = next(left, None)
                if item is None:
                    return
                call(item)

        for future in [self._pool.submit(work) for _ in range(width)]:
            future.result()


def state(size: Size) -> tuple[Manifest, mmap.mmap]:
    """One tensor of random bytes in frames that follow one another."""
    memory = mmap.mmap(-1, size.state_bytes)
    rng = np.random.default_rng(1)
    for at in range(0, size.state_bytes, size.frame_bytes):
        memory[at : at + size.frame_bytes] = rng.bytes(size.frame_bytes)
    number = size.state_bytes // size.frame_bytes
    staged = np.zeros(number, STAGED_FRAME)
    staged["offset"], staged["length"] = np.arange(number) * size.frame_bytes, size.frame_bytes
    hashes = hash_frames(memoryview(memory), staged)
    frames = np.zeros(number, FRAME)
    frames["hash_hi"], frames["hash_lo"] = hashes[:, 0], hashes[:, 1]
    frames["length"], frames["dtype"] = size.frame_bytes, DTYPE_CODE["float32"]
    extents = np.zeros(number, EXTENT)
    extents["start"], extents["length"], extents["frame"] = staged["offset"], size.frame_bytes, np.arange(number)
    shape = (size.state_bytes // 4,)
    spec = TensorSpec("model.weight", "float32", shape)
    return Manifest((spec,), ((0, Box.whole(shape)),), frames, extents, ("rank=0",)), memory


def cost(call: Callable[[int], object], number: int) -> Cost:
    forget_peak()
    before_bytes, cpu_s, began_s = peak_bytes(), time.process_time(), time.perf_counter()
    call(number)
    seconds = time.perf_counter() - began_s
    return Cost(seconds, time.process_time() - cpu_s, peak_bytes() - before_bytes)


def rows_of(server: str, costs: dict[str, list[Cost]], total: int, has_ranges: bool) -> list[Row]:
    rows: list[Row] = []
    pairs = [("commit", "put", PUT_BAR), ("restore", "get", GET_BAR)]
    for ours, theirs, bar in pairs if has_ranges else pairs[:1]:
        a, b = costs[ours][1:], costs[theirs][1:]
        ratio = statistics.median(y.seconds / x.seconds for x, y in zip(a, b, strict=True))
        speed, ceiling = (total / 1e9 / statistics.median(each.seconds for each in found) for found in (a, b))
        rows.append(Row(f"{server}: {ours}", speed, "GB/s", f"at least {bar:g} x", ratio >= bar, ceiling, ratio))
        cpu, their_cpu = (statistics.median(each.cpu_s for each in found) / (total / 1e9) for found in (a, b))
        times = cpu / their_cpu if their_cpu else 0.0
        met, words = (times <= CPU_BAR, f"at most {CPU_BAR:g} x") if ours == "commit" else (None, "none")
        rows.append(Row(f"{server}: {ours}, CPU", cpu, "s/GB", words, met, their_cpu, times))
        extra = max(each.extra_bytes for each in a)
        bar_bytes = EXTRA_BYTES_MAX[ours]
        words = f"at most {bar_bytes >> 20}"
        rows.append(Row(f"{server}: {ours}, memory besides the state", extra / 2**20, "MiB", words, extra <= bar_bytes))
    return rows


if __name__ == "__main__":
    sys.exit(main())

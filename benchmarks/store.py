"""How fast is an object put and got through our backend, against obstore's own calls on the same bytes?

    python -m benchmarks.store [--small] [--server sink|rclone|ceph ...] [--json FILE]

Each round does all of it in turn: several threads put one object each, as one buffer ("put") and as the 4 MiB frames
of a pack ("frames"), then get it back in ranges. "ours" is Backend.put and Backend.get_range with the retries around
them; "obstore" is obstore.put and obstore.get_range on a store with the same options. CPU is this process's (each
server is a process of its own); memory is what the peak rises above the buffers. The bars: put at least 0.9 x, get at
least 0.85 x, CPU at most 1.5 x, and no further copy of the buffers.

`sink` answers at once and keeps nothing: it shows what the client could do. rclone answers a ranged get with 200, which
obstore refuses: there the objects are got whole.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import obstore
from obstore.store import S3Store

from benchmarks.report import Row, forget_peak, parser, peak_bytes, report
from ckpt import storage
from tests import ceph, servers
from tests.servers import Server

PUT_BAR, GET_BAR, CPU_BAR = 0.9, 0.85, 1.5
FRAME_BYTES = 4 << 20


@dataclass(frozen=True)
class Size:
    objects: int
    object_bytes: int
    range_bytes: int
    rounds: int


FULL = Size(objects=4, object_bytes=64 << 20, range_bytes=16 << 20, rounds=7)
SMALL = Size(objects=2, object_bytes=2 << 20, range_bytes=1 << 20, rounds=2)


@dataclass(frozen=True)
class Cost:
    seconds: float
    cpu_s: float
    extra_bytes: int


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--server", action="append", choices=SERVERS, help="by default all that can be started here")
    made.add_argument("--serve-sink", type=int, help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.serve_sink is not None:
        serve_sink(args.serve_sink)
        return 0
    size = SMALL if args.small else FULL
    rows: list[Row] = []
    for name in args.server or [name for name in SERVERS if name != "ceph" or ceph.why_not() is None]:
        with SERVERS[name]() as server:
            rows += measure(server, size)
    print(f"{size.objects} x {size.object_bytes >> 20} MiB at once, medians of {size.rounds}")
    return report("store", rows, args)


def direct_store(server: Server, prefix: str) -> S3Store:
    """obstore's own store of that server, below `prefix`: without retries, as ours has its own around it."""
    options = {"client_options": {"allow_http": True, "timeout": "600s"}, "retry_config": {"max_retries": 0}}
    return S3Store(server.bucket, prefix=prefix, unsigned_payload=True, **options)  # type: ignore[arg-type]


def measure(server: Server, size: Size) -> list[Row]:
    for name, value in server.environment().items():
        os.environ[name] = value
    direct = direct_store(server, "bench")
    ours = storage.open(f"s3://{server.bucket}/bench")
    data = [memoryview(bytearray(os.urandom(size.object_bytes))) for _ in range(size.objects)]
    keys = [f"data/{n}" for n in range(size.objects)]
    step = size.object_bytes if server.name == "rclone" else size.range_bytes
    ranges = [(key, at) for key in keys for at in range(0, size.object_bytes, step)]

    def get_whole(key: str, _: int) -> int:
        return len(obstore.get(direct, key).bytes())

    def get_part(key: str, at: int) -> int:
        return len(obstore.get_range(direct, key, start=at, length=step))

    def frames(view: memoryview) -> list[memoryview]:
        return [view[at : at + FRAME_BYTES] for at in range(0, len(view), FRAME_BYTES)]

    calls: dict[str, Callable[[ThreadPoolExecutor], object]] = {
        "put obstore": lambda pool: list(
            pool.map(lambda key, view: obstore.put(direct, key, view, use_multipart=False), keys, data)
        ),
        "put ours": lambda pool: list(pool.map(lambda key, view: ours.put(key, [view]), keys, data)),
        "frames ours": lambda pool: list(pool.map(lambda key, view: ours.put(key, frames(view)), keys, data)),
        "get obstore": lambda pool: sum(
            pool.map(lambda part: (get_whole if step == size.object_bytes else get_part)(*part), ranges)
        ),
        "get ours": lambda pool: sum(pool.map(lambda part: len(ours.get_range(part[0], part[1], step)), ranges)),
    }
    for key in keys:  # rclone answers 500 when two puts make one folder at once, and obstore is not to retry here
        ours.put(key, [b""])
    found: dict[str, list[Cost]] = {name: [] for name in calls}
    with ThreadPoolExecutor(size.objects) as pool:
        for number in range(size.rounds + 1):
            # Whoever comes first in a round meets a server in another state: they take turns.
            puts = sorted(list(calls)[:3], reverse=bool(number % 2))
            gets = sorted(list(calls)[3:], reverse=bool(number % 2))
            for name in (*puts, *gets):
                cost = _cost(lambda name=name: calls[name](pool))
                if number:  # the first round warms up
                    found[name].append(cost)
    ours.close()
    rows: list[Row] = []
    for what, by, bar in (("put", "put", PUT_BAR), ("frames", "put", PUT_BAR), ("get", "get", GET_BAR)):
        label, ceiling = f"{server.name}: {what}", found[f"{by} obstore"]
        rows += _rows(label, bar, what != "get", found[f"{what} ours"], ceiling, size)
    return rows


def _rows(label: str, bar: float, keeps: bool, ours: list[Cost], theirs: list[Cost], size: Size) -> list[Row]:
    """`keeps`: whether what is moved lies in buffers already, so that no further memory is needed."""
    total = size.objects * size.object_bytes
    ratio = statistics.median(b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True))
    speed, ceiling = (total / 1e9 / statistics.median(each.seconds for each in costs) for costs in (ours, theirs))
    cpu, their_cpu = (statistics.median(each.cpu_s for each in costs) / (total / 1e9) for costs in (ours, theirs))
    extra, their_extra = (statistics.median(each.extra_bytes for each in costs) / 2**20 for costs in (ours, theirs))
    times = cpu / their_cpu if their_cpu else 0.0
    if label.startswith("sink"):  # no server: it shows what the client could do
        return [
            Row(label, speed, "GB/s", "printed", None, ceiling, ratio),
            Row(f"{label}, CPU", cpu, "s/GB", "printed", None, their_cpu, times),
            Row(f"{label}, memory besides", extra, "MiB", "printed", None, their_extra),
        ]
    room = size.object_bytes / 2**20
    words, met = (f"at most {room:g} MiB", extra <= room) if keeps else ("printed", None)
    return [
        Row(label, speed, "GB/s", f"at least {bar:g} x", ratio >= bar, ceiling, ratio),
        Row(f"{label}, CPU", cpu, "s/GB", f"at most {CPU_BAR:g} x", times <= CPU_BAR, their_cpu, times),
        Row(f"{label}, memory besides", extra, "MiB", words, met, their_extra),
    ]


def _cost(call: Callable[[], object]) -> Cost:
    forget_peak()
    before_bytes, cpu_s, began_s = peak_bytes(), time.process_time(), time.perf_counter()
    call()
    seconds = time.perf_counter() - began_s
    return Cost(seconds, time.process_time() - cpu_s, peak_bytes() - before_bytes)


@contextlib.contextmanager
def sink() -> Iterator[Server]:
    port = servers.free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.store", "--serve-sink", str(port)], cwd=Path(__file__).parents[1]
    )
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield Server("sink", f"http://127.0.0.1:{port}", "bucket")
    finally:
        process.kill()
        process.wait()


def serve_sink(port: int) -> None:
    """Takes any body and drops it; gives zeros of any range."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_sink_one, args=(connection,), daemon=True).start()


def _sink_one(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    space = memoryview(bytearray(1 << 20))
    always = 'ETag: "x"\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n'
    while head := _head(connection):
        lines = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        left = int(lines.get("content-length", 0))
        while left:
            left -= connection.recv_into(space[: min(left, len(space))])
        if "range" not in lines:
            connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n{always}\r\n".encode())
            continue
        start, stop = (int(number) for number in lines["range"].removeprefix("bytes=").split("-"))
        left = stop + 1 - start
        named = f"Content-Length: {left}\r\nContent-Range: bytes {start}-{stop}/{1 << 40}\r\n"
        connection.sendall(f"HTTP/1.1 206 OK\r\n{named}{always}\r\n".encode())
        while left:
            left -= connection.send(space[: min(left, len(space))])


def _head(connection: socket.socket) -> str:
    """The head of one request, and nothing of its body. Empty at the end."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        seen = connection.recv(4096, socket.MSG_PEEK)
        if not seen:
            return ""
        end = seen.find(b"\r\n\r\n")
        head += connection.recv(len(seen) if end < 0 else end + 4)
    return head.decode()


SERVERS = {"sink": sink, "rclone": servers.rclone, "ceph": ceph.ceph}

if __name__ == "__main__":
    sys.exit(main())

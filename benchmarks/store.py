"""How fast is an object put and got through our backend, against obstore's own calls on the same bytes?

    python benchmarks/store.py [--small] [--server sink|rclone|ceph ...] [--json FILE]

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
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import obstore
from obstore.store import S3Store

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


@dataclass(frozen=True)
class Row:
    """Medians over the rounds; GB/s and CPU-seconds per GB. `ratio`: our rate by obstore's in the same round."""

    server: str
    what: str
    ours_gb_s: float
    obstore_gb_s: float
    ratio: float
    ours_cpu_s_gb: float
    obstore_cpu_s_gb: float
    ours_extra_mib: float
    obstore_extra_mib: float
    bar: float
    is_met: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a few MiB, to see that it runs")
    parser.add_argument("--server", action="append", choices=SERVERS, help="by default all that can be started here")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--serve-sink", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_sink is not None:
        serve_sink(options.serve_sink)
        return 0
    size = SMALL if options.small else FULL
    rows: list[Row] = []
    for name in options.server or [name for name in SERVERS if name != "ceph" or ceph.why_not() is None]:
        with SERVERS[name]() as server:
            rows += measure(server, size)
    report(rows, size, options.json)
    return 0


def measure(server: Server, size: Size) -> list[Row]:
    for name, value in server.environment().items():
        os.environ[name] = value
    options = {"client_options": {"allow_http": True, "timeout": "600s"}, "retry_config": {"max_retries": 0}}
    direct = S3Store(server.bucket, prefix="bench", unsigned_payload=True, **options)
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
    total = size.objects * size.object_bytes
    pairs = (("put", "put", PUT_BAR), ("frames", "put", PUT_BAR), ("get", "get", GET_BAR))
    return [
        _row(server.name, what, bar, found[f"{what} ours"], found[f"{by} obstore"], total) for what, by, bar in pairs
    ]


def _row(server: str, what: str, bar: float, ours: list[Cost], theirs: list[Cost], total: int) -> Row:
    ratio = statistics.median(b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True))
    cpu, their_cpu = (statistics.median(each.cpu_s for each in costs) / (total / 1e9) for costs in (ours, theirs))
    extra, their_extra = (statistics.median(each.extra_bytes for each in costs) / 2**20 for costs in (ours, theirs))
    return Row(
        server=server,
        what=what,
        ours_gb_s=round(total / 1e9 / statistics.median(each.seconds for each in ours), 3),
        obstore_gb_s=round(total / 1e9 / statistics.median(each.seconds for each in theirs), 3),
        ratio=round(ratio, 3),
        ours_cpu_s_gb=round(cpu, 3),
        obstore_cpu_s_gb=round(their_cpu, 3),
        ours_extra_mib=round(extra, 1),
        obstore_extra_mib=round(their_extra, 1),
        bar=bar,
        is_met=ratio >= bar and cpu <= CPU_BAR * their_cpu,
    )


def _cost(call: Callable[[], object]) -> Cost:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew at what is resident now
    before_bytes, cpu_s, began_s = _peak_bytes(), time.process_time(), time.perf_counter()
    call()
    seconds = time.perf_counter() - began_s
    return Cost(seconds, time.process_time() - cpu_s, _peak_bytes() - before_bytes)


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def report(rows: list[Row], size: Size, path: Path | None) -> None:
    machine = {"name": platform.node(), "cpu": _cpu(), "cores": os.cpu_count(), "kernel": platform.release()}
    body = {"benchmark": "store", "machine": machine, "size": asdict(size), "rows": [asdict(row) for row in rows]}
    print(f"{machine['name']}: {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}")
    print(f"{size.objects} x {size.object_bytes >> 20} MiB at once, medians of {size.rounds}")
    print(f"{'server':8} {'':6} {'ours':>6} {'obstore':>8} {'ratio':>6} {'bar':>5}   CPU-s/GB     extra MiB")
    for row in rows:
        print(
            f"{row.server:8} {row.what:6} {row.ours_gb_s:6.2f} {row.obstore_gb_s:8.2f} {row.ratio:6.2f} {row.bar:5.2f}"
            f"   {row.ours_cpu_s_gb:.2f} / {row.obstore_cpu_s_gb:.2f}"
            f"  {row.ours_extra_mib:5.0f} / {row.obstore_extra_mib:.0f}"
            f"{'' if row.is_met else '   below the bar'}"
        )
    print(json.dumps(body))
    if path is not None:
        path.write_text(json.dumps(body, indent=2))


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@contextlib.contextmanager
def sink() -> Iterator[Server]:
    port = servers.free_port()
    process = subprocess.Popen([sys.executable, __file__, "--serve-sink", str(port)])
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

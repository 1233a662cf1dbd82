"""How fast is state staged in a peer's memory, against two plain sockets, and what does it cost both sides together?

    python -m benchmarks.peer [--small] [--json FILE]

Two processes on loopback. One offers memory, as an agent offers an arena; the other fetches it into warm memory of its
own: authenticated connections, every frame's hash checked where it landed, at the lowest priority. In turns with it two
plain connections move the same bytes between the same buffers: sendall of 1 MiB pieces, recv_into, no hash. They run at
the same priority: what else the machine does slows both alike. CPU is user and system time of both processes.

In the same turns parity is made of those bytes, as its holder does: XOR of them, and Q as of the second member of a
stripe, in memory that is warm; against copying them.
"""

from __future__ import annotations

import multiprocessing
import operator
import resource
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.report import Row as Figure
from benchmarks.report import parser, report
from ckpt.agent.net.tcp_receiver import lower_thread_priority
from ckpt.agent.net.transport import Frames
from ckpt.agent.replication.parity_worker import FrameOrigin, ParityWorker
from ckpt.agent.snapshots.described import ParityChunkName
from ckpt.format.frames import frame_hash
from ckpt.format.parity import Row
from ckpt.ipc.addresses import Address
from ckpt.ipc.arena import Arena
from ckpt.placement.rebuild import Source, StagedRun, Striped
from ckpt.types import FRAME_BYTES, Epoch, Identity, Version
from tests.agent.net.loop import Node, TurnedLoop

SPEED_BAR, CPU_BAR = 0.85, 0.4
PIECE_BYTES = 1 << 20
NAME = "benchmark"


def main() -> int:
    args = parser(__doc__).parse_args()
    nbytes, rounds = (32 << 20, 2) if args.small else (1 << 30, 9)
    ours, plain, costs, plain_costs = [], [], [], []
    parities: dict[Row, list[float]] = {Row.P: [], Row.Q: []}
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=offer, args=(there, nbytes))
    child.start()
    there.close()
    loop = TurnedLoop()
    node = Node(loop, "receiver")
    arena = Arena.create(nbytes)
    target = arena.view[:nbytes]
    kept = Arena.create(nbytes)
    try:
        address, port, blob = here.recv()
        frames = Frames.decode(blob, nbytes)
        arena.warm()
        for turn in range(rounds + 1):
            both = [
                (
                    ours,
                    costs,
                    lambda: node.transport.fetch("sender", [address], NAME, target, frames).completion.result(300),
                ),
                (plain, plain_costs, lambda: receive_plainly(target, address.host, port)),
            ]
            both += [
                (seconds, [], lambda row=row: _make_parity(node, address, frames, row, nbytes, kept))  # type: ignore[misc]
                for row, seconds in parities.items()
            ]
            for seconds, cpu, work in both if turn % 2 else both[::-1]:
                took, cost = _measured(here, work)
                if turn:  # the first one warms up
                    seconds.append(took)
                    cpu.append(cost)
            target[:: 1 << 16] = bytes(len(target[:: 1 << 16]))  # so that each has to bring the bytes
    finally:
        here.close()
        child.join(30)
        node.close()
        loop.close()
        target.release()
        arena.close()
        kept.close()
    gb = nbytes / 1e9
    speed, ceiling = gb / statistics.median(ours), gb / statistics.median(plain)
    ratio = statistics.median(b / a for a, b in zip(ours, plain, strict=True))
    cost, plain_cost = statistics.median(costs) / gb, statistics.median(plain_costs) / gb
    rows = [
        Figure("staging to a peer", speed, "GB/s", f"at least {SPEED_BAR} x", ratio >= SPEED_BAR, ceiling, ratio),
        Figure("CPU of both sides", cost, "s/GB", f"at most {CPU_BAR} s/GB", cost <= CPU_BAR, plain_cost),
    ]
    for row, seconds in parities.items():
        figure, ratio = gb / statistics.median(seconds), statistics.median(map(operator.truediv, ours, seconds))
        rows.append(Figure(f"parity {row.name} of a peer's memory", figure, "GB/s", "printed", None, speed, ratio))
    return report("peer", rows, args)


def _make_parity(node: Node, address: Address, frames: Frames, row: Row, nbytes: int, kept: Arena) -> None:
    sources: tuple[Source, ...] = ((StagedRun(0, 0, nbytes),),)
    if row is Row.Q:  # of the first member Q is the same as P; here that one has nothing but a byte of the second
        sources = ((StagedRun(0, 0, 1),), (StagedRun(0, 0, nbytes),))
    name = ParityChunkName(Identity(Epoch(1, "0" * 16), Version(1)), row, Striped(nbytes, sources))
    origin = FrameOrigin(NAME, frames, "sender", (address,))
    ParityWorker(node.transport).encode_chunk(name, 1, {0: origin}, {}, kept)


def _measured(there: Connection, work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and CPU-seconds of both processes."""
    before = _cpu_s() + _asked(there)
    started = time.perf_counter()
    work()
    took = time.perf_counter() - started
    return took, _cpu_s() + _asked(there) - before


def _asked(there: Connection) -> float:
    there.send("cpu")
    return float(there.recv())


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def receive_plainly(target: memoryview, host: str, port: int, nice: bool = True) -> None:
    """From what `offer` listens at, over two connections. `nice`: at the lowest priority, on both sides."""
    half = len(target) // 2
    threads = [
        threading.Thread(target=_receive, args=(target[at : at + half], host, port, at // half, nice))
        for at in (0, half)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _receive(target: memoryview, host: str, port: int, half: int, nice: bool) -> None:
    if nice:
        lower_thread_priority()
    with socket.create_connection((host, port)) as sock:
        sock.sendall(bytes([half, nice]))
        while target:
            target = target[sock.recv_into(target[:PIECE_BYTES], 0, socket.MSG_WAITALL) :]


# -- the other process


def offer(there: Connection, nbytes: int) -> None:
    """A process that offers as many bytes, to `Node` under NAME and to `receive_plainly`: says where, and what frames.
    Answers each question with its CPU-seconds."""
    arena = Arena.create(nbytes)
    source = arena.view[:nbytes]
    block = np.random.default_rng(1).bytes(FRAME_BYTES)
    for number, at in enumerate(range(0, nbytes, FRAME_BYTES)):
        source[at : at + FRAME_BYTES] = block
        source[at : at + 8] = number.to_bytes(8, "little")
    offsets = np.arange(0, nbytes, FRAME_BYTES, dtype=np.uint64)
    lengths = np.full(len(offsets), FRAME_BYTES, np.uint64)
    hashes = np.array([frame_hash(source[at : at + FRAME_BYTES]) for at in offsets.tolist()], np.uint64)
    frames = Frames.from_columns(offsets, lengths, hashes, nbytes)
    loop = TurnedLoop()
    node = Node(loop, "sender")
    node.transport.offer(NAME, source, frames)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_send_to_all, args=(listener, source), daemon=True).start()
        there.send((Address("127.0.0.1", node.address.port), listener.getsockname()[1], frames.encode()))
        answers = threading.Thread(target=_answer, args=(there, loop), daemon=True)
        answers.start()
        while answers.is_alive():
            loop.turn(1.0)
    node.close()
    loop.close()


def _answer(there: Connection, loop: TurnedLoop) -> None:
    try:
        while there.recv():
            there.send(_cpu_s())
    except EOFError:
        loop.post(lambda: None)


def _send_to_all(listener: socket.socket, source: memoryview) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_send, args=(sock, source), daemon=True).start()


def _send(sock: socket.socket, source: memoryview) -> None:
    with sock:
        half = len(source) // 2
        number, nice = sock.recv(2, socket.MSG_WAITALL)
        if nice:
            lower_thread_priority()
        at = number * half
        for start in range(at, at + half, PIECE_BYTES):
            sock.sendall(source[start : start + PIECE_BYTES])


if __name__ == "__main__":
    sys.exit(main())

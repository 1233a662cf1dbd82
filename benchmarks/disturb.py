"""How much slower is training while other nodes get a copy?

    python -m benchmarks.disturb [--small] [--json FILE]

A torch loop of one thread, and beside it a transfer between two agents' transports, each in a process and a session of
its own, as agents are: at 1 Gbit/s, which is what `Limits(peer_bandwidth=125e6)` or a link of that speed leaves, and
with no limit. Both ends are on this machine, of which a node of a job has one. Windows with a transfer and without take
turns; each is compared with the mean of those beside it. The same between windows without one says what this machine
does by itself.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection

import torch

from benchmarks import peer
from benchmarks.report import Row, parser, report
from ckpt.agent.net.transport import Frames
from ckpt.ipc.addresses import Address
from ckpt.ipc.arena import Arena
from tests.agent.net.loop import Node, TurnedLoop

BAR = 0.03
GBIT_S = 125e6  # bytes


def sends(there: Connection, nbytes: int) -> None:
    os.setsid()
    peer.offer(there, nbytes)


def receives(there: Connection, nbytes: int, address: Address, blob: bytes) -> None:
    """Fetches again and again from a rate (bytes/s; 0: no limit) to "off", which it answers with that of what came."""
    os.setsid()
    loop = TurnedLoop()
    node = Node(loop, "receiver")
    arena = Arena.create(nbytes)
    target = arena.view[:nbytes]
    frames = Frames.decode(blob, nbytes)
    arena.warm()
    there.send("ready")
    while (rate := there.recv()) is not None:
        node.transport.set_rate(rate or None)
        came, began_s = 0, time.monotonic()
        while not there.poll():
            target[:: 1 << 16] = bytes(len(target[:: 1 << 16]))  # so that each has to bring the bytes
            fetch = node.transport.fetch("sender", [address], peer.NAME, target, frames)
            while not fetch.completion.done() and not there.poll(0.02):
                pass
            came += nbytes - sum(int(frames.lengths[each]) for each in fetch.missing())
            fetch.cancel()
        there.recv()
        there.send(came / (time.monotonic() - began_s))
    node.close()
    loop.close()
    target.release()
    arena.close()


class Training:
    """Products of small matrices, backward, and Adam."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
        self._optimizer = torch.optim.Adam(self._model.parameters())
        self._batch = torch.randn(64, 256)

    def steps_s(self, seconds: float) -> float:
        """So many a second, for so long."""
        began_s, count = time.perf_counter(), 0
        while (gone_s := time.perf_counter() - began_s) < seconds:
            self._model(self._batch).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            count += 1
        return count / gone_s


def slower(training: Training, receiver: Connection, rate: float, turns: int, window_s: float) -> tuple[float, ...]:
    """The part by which training is slower, and how many bytes a second came; and the part without any transfer."""
    without, with_, speeds = [training.steps_s(window_s)], [], []
    for _ in range(turns):
        receiver.send(rate)
        training.steps_s(0.5)  # connections are made
        with_.append(training.steps_s(window_s))
        receiver.send("off")
        speeds.append(receiver.recv())
        without += [training.steps_s(window_s), training.steps_s(window_s)]
    parts = [1 - each / statistics.mean(without[2 * n : 2 * n + 2]) for n, each in enumerate(with_)]
    noise = [1 - b / a for a, b in itertools.pairwise(without)]
    return statistics.median(parts), statistics.median(speeds), statistics.median(map(abs, noise))


def main() -> int:
    args = parser(__doc__).parse_args()
    nbytes, turns, window_s = (32 << 20, 1, 0.3) if args.small else (512 << 20, 25, 1.5)
    spawn = multiprocessing.get_context("spawn")
    sender, there = multiprocessing.Pipe()
    processes = [spawn.Process(target=sends, args=(there, nbytes))]
    processes[0].start()
    address, _, blob = sender.recv()
    receiver, other = multiprocessing.Pipe()
    processes.append(spawn.Process(target=receives, args=(other, nbytes, address, blob)))
    processes[1].start()
    receiver.recv()
    training = Training()
    training.steps_s(window_s)
    rows = []
    try:
        for name, rate, bar in (("at 1 Gbit/s", GBIT_S, BAR), ("without a limit", 0.0, None)):
            part, speed, noise = slower(training, receiver, rate, turns, window_s)
            words, met = ("printed", None) if bar is None else (f"at most {100 * bar:g} %", part <= bar)
            rows += [
                Row(f"a transfer {name}: training is slower by", 100 * part, "%", words, met),
                Row("... which came at", speed / 1e6, "MB/s", "shown", None),
                Row("... two windows without one differ by", 100 * noise, "%", "shown", None),
            ]
    finally:
        receiver.send(None)
        sender.close()
        for each in processes:
            each.join(30)
    return report("disturb", rows, args)


if __name__ == "__main__":
    sys.exit(main())

"""The training job of the suite, a process of its own: `python -m ckpt.bench.job`.

It reads its order, a JSON object, from standard input, and writes its findings, a JSON object, to standard output. An
order names `work`: "save" (train and save, then die as a lost process does) or "restore" (enter, say how long it took,
and die). The state is a model with Adam's two moments, all of them noise, since equal numbers would be coded away.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import psutil
import torch
from torch import nn

import ckpt
from ckpt.bench.figures import timed

LAYERS = 24
STEPS_WARM = 3
STEPS = 4  # of a timed loop
STEP_S = 0.1
COPY_ROUNDS = 5


def make_state(nbytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Weights and two moments of about `nbytes` together, in layers of equal size, after their first update."""
    side = max(8, int((nbytes / 3 / 4 / LAYERS) ** 0.5))
    model = nn.Sequential(*(nn.Linear(side, side) for _ in range(LAYERS)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.full_like(parameter, 1e-4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    optimizer.step()
    for kept in optimizer.state.values():
        kept["exp_avg"].normal_(std=1e-3)
        kept["exp_avg_sq"].uniform_(to=1e-6)
    return model, optimizer


class _Training:
    """Steps of about STEP_S: a fixed number of matrix products, then the optimizer's update."""

    def __init__(self, nbytes: int) -> None:
        self.model, self.optimizer = make_state(nbytes)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self._factor = torch.ones(512, 512)
        self.tensors = [
            *self.model.parameters(),
            *(kept[name] for kept in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")),
        ]
        product_s = timed(lambda: self._multiply(50)) / 50
        self._products = max(1, int(STEP_S / product_s))

    def step(self, ck: ckpt.Checkpointer) -> None:
        self._multiply(self._products)
        self.optimizer.step()
        ck.step()

    def steps(self, ck: ckpt.Checkpointer) -> None:
        """Enough of them that a checkpoint of this size is copied and on its way meanwhile."""
        for _ in range(STEPS):
            self.step(ck)

    def copy_s(self) -> float:
        """The seconds that copying all tensors into warm memory takes: no snapshot can stall for less time than its
        copy, unless it copies beside training."""
        targets = [torch.empty_like(each).copy_(each) for each in self.tensors]

        def copy() -> None:
            for target, source in zip(targets, self.tensors, strict=True):
                target.copy_(source)

        return statistics.median(timed(copy) for _ in range(COPY_ROUNDS))

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._factor, self._factor)


class _AgentWatch:
    """What the agent of this job has used so far: requests, bytes, CPU seconds and memory."""

    def __init__(self, url: str) -> None:
        from ckpt.ipc.client import Connection, connect_nowait, make_agent_paths
        from ckpt.settings import read_settings
        from ckpt.storage import canonical
        from ckpt.threads import Tasks

        sock = connect_nowait(make_agent_paths(canonical(url), read_settings()))
        assert sock is not None, "the job's agent is gone"
        self._tasks = Tasks("bench")
        self._connection = Connection(sock, self._tasks, lambda message: message.close(), lambda why: None, role="tool")
        self.agent_pid = self._connection.agent_pid
        self._process = psutil.Process(self.agent_pid)

    def used(self) -> dict[str, Any]:
        status, times = self._connection.status(), self._process.cpu_times()
        return {
            "requests": status["store_requests"],
            "bytes": status["store_bytes"],
            "cpu_s": times.user + times.system,
            "private_bytes": self._process.memory_full_info().uss,
            "arena_bytes": self._arena_bytes(),
        }

    def _arena_bytes(self) -> int:
        with open(f"/proc/{self._process.pid}/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["RssShmem"].split()[0]) << 10


def save(url: str, nbytes: int, codec: Literal["auto", "raw"], rounds: int) -> dict[str, Any]:
    """Trains with a checkpoint now and then, and the same steps without."""
    work = _Training(nbytes)
    found: dict[str, Any] = {"state_bytes": sum(each.nbytes for each in work.tensors), "copy_s": work.copy_s()}
    ck = ckpt.Checkpointer(url, work.state, policy=ckpt.Every(steps=10**9), codec=codec)
    ck.__enter__()
    for _ in range(STEPS_WARM):
        work.step(ck)
    watch = _AgentWatch(url)
    commits_s: list[float] = []
    with_s: list[float] = []
    without_s: list[float] = []
    stalls_ms: list[float] = []
    before = watch.used()
    for _ in range(rounds + 1):
        stalled_s = ck.receipt["stall_s_total"]
        commits_s.append(timed(lambda: ck.save().wait("store")))
        stalls_ms.append(1e3 * (ck.receipt["stall_s_total"] - stalled_s))
        began_s = time.perf_counter()
        work.step(ck)
        handle = ck.save()
        work.steps(ck)
        with_s.append(time.perf_counter() - began_s)
        handle.wait("store")
        began_s = time.perf_counter()
        work.step(ck)
        work.steps(ck)
        without_s.append(time.perf_counter() - began_s)
    after = watch.used()
    receipt = ck.receipt
    saves = len(commits_s) + len(with_s)
    return {
        **found,
        "first_stall_ms": stalls_ms[0],
        "stall_ms": statistics.median(stalls_ms[1:]),
        "lost_s": statistics.median(with_s[1:]) - statistics.median(without_s[1:]),
        "commit_s": statistics.median(commits_s[1:]),
        "stored_bytes": receipt["bytes"]["store"] / saves,
        "requests": {
            name: (after["requests"].get(name, 0) - before["requests"].get(name, 0)) / saves
            for name in sorted(after["requests"])
        },
        "sent_bytes": (after["bytes"]["put"] - before["bytes"]["put"]) / saves,
        "agent_cpu_s": (after["cpu_s"] - before["cpu_s"]) / saves,
        "agent_private_bytes": after["private_bytes"],
        "arena_bytes": after["arena_bytes"],
    }


def restore(url: str, nbytes: int) -> dict[str, Any]:
    """Enters the block with a fresh state."""
    work = _Training(nbytes)
    ck = ckpt.Checkpointer(url, work.state, policy=ckpt.Every(steps=10**9))
    entered_s = timed(ck.__enter__)
    return {"entered_s": entered_s, "level": ck.restored.level, "agent_pid": _AgentWatch(url).agent_pid}


def main() -> None:
    order = json.loads(sys.stdin.read())
    works: dict[str, Callable[..., dict[str, Any]]] = {"save": save, "restore": restore}
    work = works[order.pop("work")]
    # Prints by anything else must not get into the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer.write(json.dumps(work(**order)))
    answer.flush()
    # As a process that is killed: nothing more is saved, and the agent keeps the state.
    os._exit(0)


if __name__ == "__main__":
    main()

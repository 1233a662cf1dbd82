"""Runs a script as `runs.Script` does, in processes forked from a server that has imported the framework already.

Importing a framework takes longer than all that a test does. Each rank is still a process of its own, and is killed
for good.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from tests.integrations.runs import Life, Script
from tests.servers import free_port


@contextlib.contextmanager
def server(*modules: str) -> Iterator[None]:
    """Has a server that forks, and that has imported these modules, torch and ckpt."""
    forkserver.set_forkserver_preload(["torch._dynamo", "ckpt.checkpointer", *modules])
    forkserver.ensure_running()
    try:
        yield
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@dataclass
class Forked(Script):
    """A Script whose ranks are forked. Without torchrun: a signal goes to each rank."""

    def start(self) -> Life:
        self.records.mkdir(parents=True, exist_ok=True)
        recorded = {rank: len(self.steps(rank)) for rank in range(max(1, self.world))}
        number = len(list(self.records.glob("log-*")))
        env = {**os.environ, "CKPT_LAUNCH": "forked", **self.env, "RECORDS": str(self.records)}
        if self.world:
            port = str(free_port())
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(self.world), "NODE_RANK": "0"}
        context = multiprocessing.get_context("forkserver")
        ranks = []
        for rank in range(max(1, self.world)):
            own = (
                {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.world)} if self.world else {}
            )
            log = self.records / f"log-{number + rank}.txt"
            log.touch()
            process = context.Process(target=_run, args=([str(self.path), *self.args], env | own, str(log)))
            process.start()
            ranks.append(process)
        return ForkedLife(self, Group(ranks), self.records / f"log-{number}.txt", recorded)


class ForkedLife(Life):
    """One run of a Forked: its processes have no parent in common but the server."""

    def kill(self) -> None:
        assert isinstance(self.process, Group)
        for each in self.process.ranks:
            # Its children are workers of loaders, and the agent.
            Life(self.script, Group([each]), self.log, {}).kill()


class Group(subprocess.Popen[bytes]):
    """The ranks of one life, as if they were one process: it ends when all have, with the largest code."""

    def __init__(self, ranks: list[BaseProcess]) -> None:
        self.ranks = ranks
        self.pid = ranks[0].pid or 0
        self.returncode: Any = None

    def __del__(self) -> None:
        pass

    def poll(self) -> int | None:
        codes = [each.exitcode for each in self.ranks]
        if None not in codes:
            self.returncode = max(codes, key=lambda code: abs(code or 0))
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        for each in self.ranks:
            each.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("forked", timeout or 0)
        return int(self.returncode)

    def send_signal(self, sig: int) -> None:
        for each in self.ranks:
            os.kill(each.pid or 0, sig)


def _run(argv: list[str], env: dict[str, str], log: str) -> None:
    os.environ.update(env)
    sys.argv = argv
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method("fork", force=True)  # of loaders' workers, as in a process that was not forked
    torch.set_num_threads(1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    runpy.run_path(argv[0], run_name="__main__")

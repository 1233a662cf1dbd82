"""The agent's process: `python -m ckpt.agent.node.main --url URL --socket PATH --lock PATH --log PATH --ready-fd N`.

Started by the first trainer, in a session of its own. Says one line on the ready descriptor: "ok" once it serves,
"busy" if another agent of this URL still lives, else what went wrong. Leaves nothing behind when it ends.

`lend` runs the agent of a memory-only node in the foreground.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.agent.runtime.event_loop import ENDS, EventLoop
from ckpt.agent.runtime.priority import Priority
from ckpt.errors import AgentError, UsageError
from ckpt.settings import Settings, read
from ckpt.storage.names import shown

if TYPE_CHECKING:
    from ckpt.agent.node.memory_node import MemoryNodeOptions

LENT_BYTES_MIN = 1 << 20  # each arena has at least that


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parse(arguments)
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # heard once the server runs: so nothing is left
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    loud = _Loud()
    logging.getLogger().addHandler(loud)
    lock = _lock(given.lock)
    if lock is None:
        _say(given.ready_fd, "busy")
        return 0
    try:
        _use_all_cores()
        _have_room()
        _serve(given)
        if not loud.spoke and read().agent_log is None:
            given.log.unlink(missing_ok=True)  # while the lock is ours: the next agent writes to the same file
        for path in (given.lock, given.lock.with_suffix(".start")):
            path.unlink(missing_ok=True)
    except OSError as exc:
        _say(given.ready_fd, f"{exc}")
        raise
    finally:
        os.close(lock)
    return 0


def _serve(given: argparse.Namespace) -> None:
    from ckpt.agent.node.agent import Agent

    settings = read()
    for number in settings.warnings:
        signal.signal(number, signal.SIG_IGN)  # a notice to every process here; heard once the server runs
    server = EventLoop(given.socket)
    _log_in_words(server)
    node = Agent(given.url, settings, server)
    _say(given.ready_fd, "ok")
    node.priority = Priority()  # only now: until then the trainers wait for us, and for so long
    try:
        server.run(node, settings.warnings)
    finally:
        node.close()
        server.close()


def lend(url: str, settings: Settings, terms: MemoryNodeOptions, listening: Callable[[list[str]], None]) -> None:
    """Runs the agent of a memory-only node in this process until it is told to end. `listening`: told where it can be
    reached, once it can be; an OSError of it ends the agent. Errors: AgentError, UsageError, and that OSError."""
    from ckpt.agent.node.memory_node import MemoryNode
    from ckpt.agent.runtime import memory_plan
    from ckpt.ipc.client import places

    if terms.memory_bytes < LENT_BYTES_MIN:
        raise UsageError(f"no snapshot fits into {terms.memory_bytes} bytes; give a unit, such as 64GiB")
    free = memory_plan.free_bytes()
    if terms.memory_bytes > free:
        raise UsageError(
            f"{terms.memory_bytes >> 20:,} MiB cannot be lent: this machine, or its control group, has "
            f"{free >> 20:,} MiB left; lend less, or free some"
        )
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    _have_room()
    place = places(url, settings)
    lock = _lock(place.run_lock)
    if lock is None:
        raise AgentError(
            f"an agent of {shown(url)} runs on this machine already: that of a job, or another `ckpt agent`. Lend "
            "memory on another machine, or set CKPT_RUNTIME_DIR"
        )
    try:
        server = EventLoop(place.socket)
        _log_in_words(server)
        try:
            node = MemoryNode(url, settings, server, terms)
            unsaid: list[OSError] = []

            def say() -> None:
                try:
                    listening([str(each) for each in node.addresses])
                except OSError as exc:
                    unsaid.append(exc)
                    server.end_asked = True

            try:
                server.post(say)  # once it heeds signals
                server.run(node)
                if unsaid:
                    raise unsaid[0]
            finally:
                node.close()
        finally:
            server.close()
    finally:
        place.socket.unlink(missing_ok=True)
        place.run_lock.unlink(missing_ok=True)
        os.close(lock)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ckpt.agent.node.main")
    parser.add_argument("--url", required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    return parser.parse_args(arguments)


def _lock(path: Path) -> int | None:
    """The run lock, held until the descriptor is closed; None where another agent holds it. An agent that ends takes
    its lock file away, so that a file that was locked may be one that has no name any more."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)


def _say(fd: int, line: str) -> None:
    """One line, once: whoever started us stops listening after it, or has gone."""
    with contextlib.suppress(OSError):
        os.write(fd, line.encode() + b"\n")
        os.close(fd)


def _log_in_words(server: EventLoop) -> None:
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_InWords(server))


def _use_all_cores() -> None:
    """A launcher may have bound the trainer, and us with it, to a few cores."""
    with contextlib.suppress(OSError):  # the container allows less: then that is what we keep
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def _have_room() -> None:
    """For a connection to each of many nodes: as many open files as this user may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class _InWords(logging.Formatter):
    """Nodes are called what people call them."""

    def __init__(self, server: EventLoop) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._called = server.called

    def format(self, record: logging.LogRecord) -> str:
        return self._called.said(super().format(record))


class _Loud(logging.Handler):
    """Notes whether anything was worth keeping the log for: what no trainer was told."""

    spoke = False

    def emit(self, record: logging.LogRecord) -> None:
        self.spoke = self.spoke or not getattr(record, "told", False)


if __name__ == "__main__":
    sys.exit(main())

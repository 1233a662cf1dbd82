"""The agent's process: `python -m ckpt.agent.node.main --url URL --socket PATH --lock PATH --log PATH --ready-fd N`.

The first trainer starts the process, in a session of its own. The process writes one line to the ready descriptor: "ok"
once it serves, "busy" if another agent of this URL still lives, else what went wrong. At its end it removes its files;
only a log with messages that no trainer was told stays.

`run_memory_node` runs the agent of a memory-only node in the foreground.
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

from ckpt.agent.runtime.event_loop import END_SIGNALS, EventLoop
from ckpt.agent.runtime.priority import Priority
from ckpt.errors import AgentError, UsageError
from ckpt.settings import Settings, read_settings
from ckpt.storage.names import redact_url

if TYPE_CHECKING:
    from ckpt.agent.node.memory_node import MemoryNodeOptions

LENT_MEMORY_BYTES_MIN = 1 << 20  # the least size of an arena


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parse(arguments)
    # These signals wait until the event loop runs: an earlier end would leave files behind.
    signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    loud = _Loud()
    logging.getLogger().addHandler(loud)
    lock = _take_run_lock(given.lock)
    if lock is None:
        _write_ready_line(given.ready_fd, "busy")
        return 0
    try:
        _use_all_cores()
        _raise_open_files_limit()
        _serve(given)
        if not loud.has_unreported_record and read_settings().agent_log is None:
            # The lock is still held here: the next agent writes to the same file.
            given.log.unlink(missing_ok=True)
        for path in (given.lock, given.lock.with_suffix(".start")):
            path.unlink(missing_ok=True)
    except OSError as exc:
        _write_ready_line(given.ready_fd, f"{exc}")
        raise
    finally:
        os.close(lock)
    return 0


def _serve(given: argparse.Namespace) -> None:
    from ckpt.agent.node.agent import Agent

    settings = read_settings()
    for number in settings.warning_signals:
        # A launcher may send this notice to every process of a job: it must not kill the agent before the loop runs.
        signal.signal(number, signal.SIG_IGN)
    server = EventLoop(given.socket)
    node = Agent(given.url, settings, server)
    _write_ready_line(given.ready_fd, "ok")
    # Lowered only now: until "ok" the trainers wait for this process.
    node.priority = Priority()
    try:
        server.run(node, settings.warning_signals)
    finally:
        node.close()
        server.close()


def run_memory_node(
    url: str, settings: Settings, terms: MemoryNodeOptions, listening: Callable[[list[str]], None]
) -> None:
    """Runs the agent of a memory-only node in this process, until a signal asks the agent to end. `listening` is called
    with the agent's addresses once peers can connect; its OSError ends the agent and is raised. Errors: AgentError,
    UsageError, OSError."""
    from ckpt.agent.node.memory_node import MemoryNode
    from ckpt.agent.runtime import memory_plan
    from ckpt.ipc.client import make_agent_paths

    if terms.memory_bytes < LENT_MEMORY_BYTES_MIN:
        raise UsageError(f"no snapshot fits into {terms.memory_bytes} bytes; give a unit, such as 64GiB")
    free = memory_plan.free_bytes()
    if terms.memory_bytes > free:
        raise UsageError(
            f"{terms.memory_bytes >> 20:,} MiB cannot be lent: this machine, or its control group, has "
            f"{free >> 20:,} MiB left; lend less, or free some"
        )
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    _raise_open_files_limit()
    place = make_agent_paths(url, settings)
    lock = _take_run_lock(place.run_lock)
    if lock is None:
        raise AgentError(
            f"an agent of {redact_url(url)} runs on this machine already: that of a job, or another `ckpt agent`. Lend "
            "memory on another machine, or set CKPT_RUNTIME_DIR to another folder for this agent's socket"
        )
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, lock)
        for path in (place.run_lock, place.socket):
            stack.callback(path.unlink, missing_ok=True)
        server = stack.enter_context(contextlib.closing(EventLoop(place.socket)))
        node = stack.enter_context(contextlib.closing(MemoryNode(url, settings, server, terms)))
        unsaid: list[OSError] = []

        def say() -> None:
            try:
                listening([str(each) for each in node.addresses])
            except OSError as exc:
                unsaid.append(exc)
                server.is_end_requested = True

        # Posted, so that `say` runs only once the loop handles signals.
        server.post(say)
        server.run(node)
        if unsaid:
            raise unsaid[0]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ckpt.agent.node.main")
    parser.add_argument("--url", required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    return parser.parse_args(arguments)


def _take_run_lock(path: Path) -> int | None:
    """The descriptor that holds the run lock until it is closed; None if another agent holds the lock. An agent deletes
    its lock file at its end, so a locked file may have lost its name: then the lock is taken anew."""
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


def _write_ready_line(fd: int, line: str) -> None:
    """Writes the one line that the starting process waits for. That process may be gone."""
    with contextlib.suppress(OSError):
        os.write(fd, line.encode() + b"\n")
        os.close(fd)


def _use_all_cores() -> None:
    """Undoes the binding to a few cores that the agent may inherit from a launcher and its trainer."""
    # If the container allows fewer cores, the agent keeps the inherited ones.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def _raise_open_files_limit() -> None:
    """Raises the limit of open files to the user's hard limit: each other node needs a connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class _Loud(logging.Handler):
    """A log handler whose `has_unreported_record` is true once a record was logged that no trainer was told: then the
    log is kept."""

    has_unreported_record = False

    def emit(self, record: logging.LogRecord) -> None:
        self.has_unreported_record = self.has_unreported_record or not getattr(record, "told", False)


if __name__ == "__main__":
    sys.exit(main())

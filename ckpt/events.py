"""Events: facts that a person may want to know, each as one JSON object; and `JsonLines`, which writes them to a file.

No decision depends on an event. Sinks are called on the thread that emits, and must not block. A sink that raises is
not called again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import queue
import re
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt.errors import is_injected
from ckpt.threads import Tasks
from ckpt.types import format_count

log = logging.getLogger("ckpt")

FILE_BYTES_MAX = 64 << 20  # a full file is renamed; one older file is kept
# Events that each snapshot or save may repeat. The receipt counts the repetitions, which are no warnings.
REPEATED_EVENTS = frozenset({"metric.dropped", "save.failed", "snapshot.abandoned", "snapshot.failed"})
REPEATED_MESSAGES_MAX = 1000  # messages of REPEATED that are remembered
QUEUED_LINES_MAX = 1000  # lines that wait for the disk; further ones are counted, not written
FLUSH_S = 2.0  # how long closing waits for a disk that hangs


@dataclass(frozen=True, slots=True)
class Event:
    """One fact. `name`: stable and dotted ("commit.failed"). `loud`: it is logged as a warning. `by_agent`: it happened
    in the agent, which has sent it here."""

    name: str
    message: str
    loud: bool = False
    data: dict[str, Any] = field(default_factory=dict)
    time_s: float = field(default_factory=time.time)  # wall clock, for people only
    by_agent: bool = False

    def to_json(self, about: Mapping[str, Any] | None = None) -> str:
        """One line of JSON. `about`: further entries. A float that JSON cannot express becomes null."""
        body = {
            "event": self.name,
            "message": self.message,
            "time": self.time_s,
            "loud": self.loud,
            **(about or {}),
            **self.data,
        }
        return json.dumps(replace_nonfinite(body), default=str)


Sink = Callable[[Event], None]


class Events:
    """Hands each event to every sink and to the log.

    An event of REPEATED is a warning once. When it comes again with the same message, but for its numbers, it is not.
    """

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = list(sinks)
        self._repeated_messages: set[tuple[str, str]] = set()

    def add(self, sink: Sink) -> None:
        self._sinks.append(sink)

    def remove(self, sink: Sink) -> None:
        # A sink that failed is gone already.
        with contextlib.suppress(ValueError):
            self._sinks.remove(sink)

    def emit(self, name: str, message: str, *, loud: bool = False, **data: Any) -> None:
        """Makes an event and hands it out."""
        self.emit_event(Event(name, message, loud, data))

    def emit_event(self, event: Event) -> None:
        """Hands out an event. Errors: only an exception from outside (Ctrl-C, sys.exit()) on the main thread."""
        if event.loud and event.name in REPEATED_EVENTS:
            said = event.name, re.sub(r"\d+", "#", event.message)
            event = replace(event, loud=said not in self._repeated_messages)
            if len(self._repeated_messages) < REPEATED_MESSAGES_MAX:
                self._repeated_messages.add(said)
        name, message, loud = event.name, event.message, event.loud
        # A program that does not set up logging prints only the message, so the message names ckpt.
        log.log(logging.WARNING if loud else logging.INFO, "ckpt: %s", message.removeprefix("ckpt: "))
        for sink in list(self._sinks):
            try:
                sink(event)
            except BaseException as exc:
                # On the main thread Ctrl-C and sys.exit() must reach the user. On others they would end a ckpt thread.
                if is_injected(exc) and threading.current_thread() is threading.main_thread():
                    raise
                log.exception("ckpt: a sink failed at the event %s; it is not called any more", name)
                self.remove(sink)


class JsonLines:
    """A sink that appends each event to a file, one JSON object a line.

    Several processes may append to one file on a disk of this host: each line is one write. At FILE_BYTES_MAX bytes the
    file is renamed to PATH.1, which replaces an older one. A thread writes. If the disk hangs, is full or is gone,
    lines are lost and nothing else; the log and the next line that can be written report the loss. `about`: entries of
    every line; `add_entries` adds those that are known later."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.common_entries = dict(about)
        self._queued_lines: queue.Queue[bytes | None] = queue.Queue(QUEUED_LINES_MAX)
        self._lost_count = 0
        self._has_warned = False
        self._has_torn_line = False
        self._tasks = Tasks("events")
        self._tasks.start("write", self._write_lines)

    def add_entries(self, **about: Any) -> None:
        """Adds entries to every line from now on."""
        self.common_entries = {**self.common_entries, **about}

    def __call__(self, event: Event) -> None:
        if event.by_agent:
            return  # the agent writes its own events
        line = event.to_json(self.common_entries).encode() + b"\n"
        try:
            self._queued_lines.put_nowait(line)
        except queue.Full:
            self._lost_count += 1

    def close(self) -> None:
        """Writes the waiting lines, for at most FLUSH_S. If the disk hangs, the thread stays until the process ends."""
        self._tasks.stopping.set()
        # If the queue is full, the thread ends after the lines that wait, since `stopping` is set.
        with contextlib.suppress(queue.Full):
            self._queued_lines.put(None, timeout=FLUSH_S)
        try:
            self._tasks.close(FLUSH_S)
        except Exception as exc:
            log.warning("ckpt: not all events were written to %s: %s", self.path, exc)

    def _write_lines(self) -> None:
        while (line := self._queued_lines.get()) is not None:
            try:
                if self._lost_count:
                    lost, self._lost_count = self._lost_count, 0
                    text = f"{format_count(lost, 'event')} could not be written here"
                    self._append(
                        Event("events.lost", text, data={"lost": lost}).to_json(self.common_entries).encode() + b"\n"
                    )
                self._append(line)
                self._has_warned = False
            except OSError as exc:
                self._lost_count += 1
                if not self._has_warned:
                    self._has_warned = True
                    log.warning("ckpt: events cannot be written to %s now: %s", self.path, exc)
            if self._tasks.stopping.is_set() and self._queued_lines.empty():
                return

    def _append(self, line: bytes) -> None:
        """Writes one line. Errors: OSError."""
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        try:
            if self._rotate(fd, len(line)):
                return self._append(line)
            line = b"\n" + line if self._has_torn_line else line
            self._has_torn_line = False
            if os.write(fd, line) < len(line):
                # The next event begins a new line.
                self._has_torn_line = True
                raise OSError(errno.ENOSPC, "only a part of a line could be written")
        finally:
            os.close(fd)

    def _rotate(self, fd: int, count: int) -> bool:
        """Renames a full file. Returns whether the path now names another file, which has to be opened."""
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or not info.st_size or info.st_size + count <= FILE_BYTES_MAX:
            return False
        # Other processes hold the lock only for a rename.
        fcntl.flock(fd, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), info):
                os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))
        return True


def replace_nonfinite(tree: Any) -> Any:
    """The same tree for JSON: infinite and NaN floats become None, dict keys strings, and tuples lists."""
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else None
    if isinstance(tree, dict):
        return {str(key): replace_nonfinite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [replace_nonfinite(value) for value in tree]
    return tree

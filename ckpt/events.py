"""Events: what happened that a person may want to know, as one JSON object each.

An event never influences what is decided. Sinks are called on the thread that emits and must not block; one that
raises is not called again. `JsonLines` is the one that writes them to a file.
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

from ckpt.errors import is_from_outside
from ckpt.threads import Tasks
from ckpt.types import counted

log = logging.getLogger("ckpt")

FILE_BYTES_MAX = 64 << 20  # then the file is renamed, and one older one is kept
# What each snapshot or save may say again. The receipt counts what was not said loudly.
REPEATED = frozenset({"metric.dropped", "save.failed", "snapshot.abandoned", "snapshot.failed"})
SAID_MAX = 1000  # of their texts are remembered
WAITING_MAX = 1000  # events that the disk has not taken yet; further ones are counted, not written
FLUSH_S = 2.0  # how long closing waits for a disk that does not answer


@dataclass(frozen=True, slots=True)
class Event:
    """`name` is stable and dotted ("commit.failed"); `loud` events also go to the log as warnings. `by_agent`: it
    happened in the agent, and is told here."""

    name: str
    message: str
    loud: bool = False
    data: dict[str, Any] = field(default_factory=dict)
    time_s: float = field(default_factory=time.time)  # wall clock, for people only
    by_agent: bool = False

    def to_json(self, about: Mapping[str, Any] | None = None) -> str:
        """One line. `about`: further entries. What JSON has no number for is null."""
        body = {
            "event": self.name,
            "message": self.message,
            "time": self.time_s,
            "loud": self.loud,
            **(about or {}),
            **self.data,
        }
        return json.dumps(finite(body), default=str)


Sink = Callable[[Event], None]


class Events:
    """Hands each event to every sink, and to the log. One of REPEATED is loud once: when it comes again, and says the
    same but for its numbers, it is not."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = list(sinks)
        self._said: set[tuple[str, str]] = set()

    def add(self, sink: Sink) -> None:
        self._sinks.append(sink)

    def remove(self, sink: Sink) -> None:
        with contextlib.suppress(ValueError):  # it had failed, and is gone already
            self._sinks.remove(sink)

    def emit(self, name: str, message: str, *, loud: bool = False, **data: Any) -> None:
        self.tell(Event(name, message, loud, data))

    def tell(self, event: Event) -> None:
        if event.loud and event.name in REPEATED:
            said = event.name, re.sub(r"\d+", "#", event.message)
            event = replace(event, loud=said not in self._said)
            if len(self._said) < SAID_MAX:
                self._said.add(said)
        name, message, loud = event.name, event.message, event.loud
        # Where a program has no logging of its own the message is all that is printed: it says who speaks.
        log.log(logging.WARNING if loud else logging.INFO, "ckpt: %s", message.removeprefix("ckpt: "))
        for sink in list(self._sinks):
            try:
                sink(event)
            except BaseException as exc:
                # Ctrl-C and sys.exit() are the user's where they end the process; elsewhere a thread of ours would end.
                if is_from_outside(exc) and threading.current_thread() is threading.main_thread():
                    raise
                log.exception("ckpt: a sink failed at the event %s; it is not called any more", name)
                self.remove(sink)


class JsonLines:
    """A sink that appends each event to a file, one JSON object a line.

    Several processes may append to one file, as long as it lies on a disk of this host: each line is one write. The
    file is renamed to PATH.1, over the one before, when it has FILE_BYTES_MAX bytes. Writing is done by a thread: a
    disk that hangs, is full or gone costs lines, of which the log and the next line that can be written tell, and
    nothing else. `about`: entries of every line; those that are known later only are set with `also`."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.about = dict(about)
        self._waiting: queue.Queue[bytes | None] = queue.Queue(WAITING_MAX)
        self._lost = 0
        self._told = False
        self._torn = False
        self._tasks = Tasks("events")
        self._tasks.start("write", self._write)

    def also(self, **about: Any) -> None:
        """Entries of every line from now on."""
        self.about = {**self.about, **about}

    def __call__(self, event: Event) -> None:
        if event.by_agent:
            return  # it writes its own
        self._put(event)

    def close(self) -> None:
        """What waits is written, for FLUSH_S at most; a disk that hangs keeps its thread until the process ends."""
        self._tasks.stopping.set()
        with contextlib.suppress(queue.Full):  # then the thread finds nothing more after what waits
            self._waiting.put(None, timeout=FLUSH_S)
        try:
            self._tasks.close(FLUSH_S)
        except Exception as exc:
            log.warning("ckpt: not all events were written to %s: %s", self.path, exc)

    def _put(self, event: Event) -> None:
        line = event.to_json(self.about).encode() + b"\n"
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def _write(self) -> None:
        while (line := self._waiting.get()) is not None:
            try:
                if self._lost:
                    lost, self._lost = self._lost, 0
                    text = f"{counted(lost, 'event')} could not be written here"
                    self._append(Event("events.lost", text, data={"lost": lost}).to_json(self.about).encode() + b"\n")
                self._append(line)
                self._told = False
            except OSError as exc:
                self._lost += 1
                if not self._told:
                    self._told = True
                    log.warning("ckpt: events cannot be written to %s now: %s", self.path, exc)
            if self._tasks.stopping.is_set() and self._waiting.empty():
                return

    def _append(self, line: bytes) -> None:
        """Errors: OSError."""
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        try:
            if self._rotate(fd, len(line)):
                return self._append(line)
            line = b"\n" + line if self._torn else line
            self._torn = False
            if os.write(fd, line) < len(line):
                self._torn = True  # the next one begins a line of its own
                raise OSError(errno.ENOSPC, "only a part of a line could be written")
        finally:
            os.close(fd)

    def _rotate(self, fd: int, count: int) -> bool:
        """Whether the path names another file now, to be opened anew."""
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or not info.st_size or info.st_size + count <= FILE_BYTES_MAX:
            return False
        fcntl.flock(fd, fcntl.LOCK_EX)  # held by others for as long as a rename takes
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), info):
                os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))
        return True


def finite(tree: Any) -> Any:
    """As JSON may have it: what it has no number for (infinite, not a number) is null."""
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else None
    if isinstance(tree, dict):
        return {str(key): finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [finite(value) for value in tree]
    return tree

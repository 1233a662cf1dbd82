"""The listener for a file: a notice stands while the file exists. It serves every system that ckpt does not know.

The content may be a time: RFC 3339 ("2030-01-31T12:00:00Z"), Unix seconds ("1896091200"), or seconds after the file was
written ("+120"). With any other content, or none, the configured lead counts from when the file was first seen.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ckpt.events import Events
from ckpt.preemption.metadata import iso_time_s, printable_field
from ckpt.preemption.notice import FirstDeadlines, KnownNotices, Notice, OnNoticeChange
from ckpt.preemption.poll import Fault, poll_until_stopped

POLL_S = 1.0
LEAD_S = 30.0
CONTENT_BYTES_MAX = 256
_NUMBER = re.compile(r"(\+\d{1,9}|\d{9,12})(\.\d{1,9})?")  # a small number without a sign is neither


class FileListener:
    """Looks for `path` every second. Put the file on a local file system: one that hangs keeps the listener from
    ending.

    Any kind of file counts, also a folder or a pipe. Only a regular file is read, and only its first 256 bytes. Write
    the file under another name and rename it. If it is written again, the later time replaces the earlier one.
    """

    name = "file"

    def __init__(
        self,
        path: Path,
        *,
        events: Events | None = None,
        now_s: Callable[[], float] = time.time,
        first: FirstDeadlines | None = None,
    ) -> None:
        self._path = path
        self._events = events
        self._now_s = now_s
        self._first_deadlines = first

    def listen(self, stop: threading.Event, tell: OnNoticeChange) -> None:
        known = KnownNotices(self.name, tell, self._first_deadlines)
        key = printable_field(os.fspath(self._path))
        written_s = seen_s = 0.0

        def ask() -> float:
            nonlocal written_s, seen_s
            found = self._read()
            if found is None:
                written_s = 0.0
                known.set_standing([])
                return POLL_S
            is_another = not written_s and found[1] > known.first_deadlines.get(key, math.inf) - LEAD_S
            if found[1] != written_s:
                written_s, seen_s = found[1], self._now_s()
            deadline_s = deadline_of(found[0], min(seen_s, written_s))
            if deadline_s is None:
                # The file is another one than an earlier listener saw.
                if is_another:
                    known.set_standing([])
                deadline_s = known.earliest_deadline(key, seen_s + LEAD_S)
            known.set_standing([Notice(deadline_s, self.name, True, key, f"the file {key} has appeared")])
            return POLL_S

        poll_until_stopped(self.name, stop, ask, self._events)

    def _read(self) -> tuple[str, float] | None:
        """The file's content and the time when it was written; None where there is no file. Errors: Fault."""
        try:
            found = os.stat(self._path)
            if not stat.S_ISREG(found.st_mode):
                return "", found.st_mtime
            # Without O_NONBLOCK the open would hang if a pipe has just replaced the file.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                return os.read(descriptor, CONTENT_BYTES_MAX).decode(errors="replace"), os.fstat(descriptor).st_mtime
            finally:
                os.close(descriptor)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError:
            with contextlib.suppress(OSError):
                # The file exists, though its content cannot be read.
                return "", os.lstat(self._path).st_mtime
            raise Fault(f"{self._path} cannot be read: permission denied") from None
        except OSError as exc:
            raise Fault(f"{self._path} cannot be read: {exc}") from exc


def deadline_of(content: str, written_s: float) -> float | None:
    """The time that the content names, in Unix seconds; None where it names none."""
    text = content.strip()
    if (number := _NUMBER.fullmatch(text)) is not None:
        return float(number[0]) + (written_s if text.startswith("+") else 0.0)
    # ISO 8601 knows more forms than RFC 3339: eight digits would be a date, long past.
    if "-" not in text:
        return None
    try:
        return iso_time_s(text)
    except Fault:
        return None

"""A machine that gives no more threads, as one does whose memory is full, or whose control group has as many as it may
have (pids.max)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def without_threads(named: str = "ckpt-") -> Iterator[None]:
    """None whose name begins so is started."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(named):
            raise RuntimeError("can't start new thread")  # as CPython says it
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield

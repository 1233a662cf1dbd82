"""What a thread calls, as the interpreter tells it: that it does not wait, or tries only once, needs no clock."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# What may stand still: every wait of Python's own ends in one of these. A lock that is taken by `with` is not among
# them: the interpreter does not tell of that.
WAITS = frozenset({"lock.acquire", "RLock.acquire", "sleep", "select", "poll.poll", "epoll.poll", "flock", "waitpid"})
WAITS |= {f"socket.{name}" for name in ("accept", "connect", "recv", "recv_into", "recvmsg", "recvmsg_into")}


@contextlib.contextmanager
def calls_watched() -> Iterator[list[str]]:
    """The qualified names of the functions that this thread calls inside the block: ckpt's, and those in C."""
    called = list[str]()

    def look(frame: FrameType, event: str, what: Any) -> None:
        if event == "c_call":
            called.append(what.__qualname__)
        elif event == "call" and "/ckpt/" in frame.f_code.co_filename:
            called.append(frame.f_code.co_qualname)

    before: Callable[[FrameType, str, Any], object] | None = sys.getprofile()
    sys.setprofile(look)
    try:
        yield called
    finally:
        sys.setprofile(before)

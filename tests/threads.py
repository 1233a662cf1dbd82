"""A machine that gives no more threads, as one does whose memory is full, or whose control group has as many as it may
have (pids.max); and Ctrl-C, in each place where the interpreter may hear it."""

from __future__ import annotations

import contextlib
import dis
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from types import CodeType, FrameType
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


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


def running(named: str = "ckpt-") -> list[str]:
    """The threads whose name begins so. CPython lists one for ever whose start Ctrl-C ended before it began."""
    return [each.name for each in threading.enumerate() if each.name.startswith(named) and each.is_alive()]


def interrupted_anywhere(files: Collection[str], make: Callable[[], T], use: Callable[[T], object]) -> Iterator[T]:
    """What was made, after Ctrl-C has ended its use: each time one place later in these files, and at last in none."""
    place, interrupted = 0, True
    while interrupted:
        place, interrupted = place + 1, False
        made, traced = make(), sys.gettrace()
        sys.settrace(_Interrupt(files, place))
        try:
            use(made)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(traced)
        yield made
    assert place > 10


class _Interrupt:
    """Behind the `place`-th call, or before the first line of what is called: there the interpreter hears it. What is
    raised behind a call seems to come from the next instruction; so not where that, as in `return f()` inside `with`,
    has another handler: the interpreter has the handler of the call."""

    def __init__(self, files: Collection[str], place: int) -> None:
        self._files = files
        self._left = place
        self._places: dict[CodeType, dict[int, tuple[str, int | None]]] = {}
        self._before: dict[FrameType, tuple[str, int | None]] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = True
        if event == "call":
            self._hear()
        elif event == "opcode":
            if code not in self._places:
                self._places[code] = dict(_places(code))
            name, handler = self._before.get(frame, ("", None))
            self._before[frame] = self._places[code][frame.f_lasti]
            if name.startswith("CALL") and handler == self._before[frame][1]:
                self._hear()
        return self

    def _hear(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


def _places(code: CodeType) -> Iterator[tuple[int, tuple[str, int | None]]]:
    """Each instruction: its name, and where its handler is."""
    found = dis.Bytecode(code)
    for each in found:
        inside = [e.target for e in found.exception_entries if e.start <= each.offset < e.end]
        yield each.offset, (each.opname, inside[0] if inside else None)

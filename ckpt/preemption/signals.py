"""The listener for signals: SIGTERM and SIGUSR1 as notices, by a handler on the main thread.

- The handler sets a flag and writes a byte to a pipe, then calls the previous handler. It takes no lock, and sends and
  saves nothing.
- Python runs handlers only between bytecodes of the main thread, which may sit in a collective for minutes. So the pipe
  is also the interpreter's wake-up descriptor: its byte comes at once, and `listen` reads it. If other code sets
  another wake-up descriptor inside the block (an event loop), only the handler's byte comes.
- One signal thus writes two bytes. The handler's byte is marked, and counts only where the first byte is missing.
- On exit the handlers and the wake-up descriptor are restored. A signal that was neither consumed nor seen by a
  previous handler is delivered again. With the default action it ends the process, as without ckpt.
- A forked child (a loader's worker, which is ended by SIGTERM) gets back the previous handlers. Its signals are no
  notices for its parent.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from ckpt.errors import CkptError, UsageError
from ckpt.events import Events
from ckpt.preemption.notice import Notice, OnNoticeChange

SLICE_S = 0.25
CLOSE_S = 5.0
REPEAT_S = 2.0
HANDLER_BIT = 0x80  # marks the handler's byte; signal numbers are smaller
LEADS_S: Mapping[signal.Signals, float] = {signal.SIGTERM: 30.0, signal.SIGUSR1: 30.0}  # torchrun, Kubernetes, Slurm


class Signals:
    """A context manager for the main thread, and a Listener for another thread while it is entered.

    `leads_s`: the signals to listen to, and the seconds from each signal to the end, which no signal states. Ignored
    signals are left alone. So are signals with a handler outside Python (`faulthandler.register`, a C library), which
    Python can neither call nor restore: a warning says that their notices are missed. Several Signals may be entered at
    once; each hears every signal. Errors: UsageError if entered on another thread.
    """

    name = "signals"

    def __init__(
        self,
        leads_s: Mapping[signal.Signals, float] = LEADS_S,
        *,
        events: Events | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._leads_s = dict(leads_s)
        self._events = events or Events()
        self._now_s = now_s
        self._received: dict[int, bool] = dict.fromkeys(self._leads_s, False)
        # Signals reported by the wake-up descriptor whose handler has not run since.
        self._pending_wakeups: set[int] = set()
        self._consumed_signals: set[int] = set()
        self._previous_handlers: dict[int, Any] = {}
        # One object for comparisons: each access to a bound method makes a new one.
        self._handler = self._handle
        self._is_open = False
        self._read_fd, self._write_fd, self._previous_wakeup_fd = -1, -1, -1
        self._listen_lock = threading.Lock()

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "signals can be listened to only from the main thread; enter the block there, or listen to no signals"
            )
        if self._is_open:
            raise UsageError("this Signals is in use; make another one for a second block")
        self._received = dict.fromkeys(self._leads_s, False)
        self._pending_wakeups.clear()
        self._consumed_signals.clear()
        self._previous_handlers.clear()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._is_open = True
        _entered.append(self)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in self._leads_s:
            previous = signal.getsignal(number)
            if previous is None or (previous is signal.SIG_DFL and is_caught(number)):
                self._warn_unheard(number)
            elif previous is not signal.SIG_IGN:
                self._previous_handlers[number] = previous
                signal.signal(number, self._handler)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Ends `listen`, restores the handlers, then delivers the unconsumed signals again.
        Errors: CkptError if `listen` still runs five seconds later."""
        # In a forked child everything was restored already.
        if not self._is_open:
            return
        left = [
            number for number, came in self._restore_handlers().items() if came and number not in self._consumed_signals
        ]
        try:
            os.write(self._write_fd, b"\0")
            if not self._listen_lock.acquire(timeout=CLOSE_S):
                raise CkptError(
                    f"Signals.listen did not end within {CLOSE_S:g} s; set its stop event before the block ends"
                )
            self._drain_pipe()
            os.close(self._read_fd)
            os.close(self._write_fd)
            self._listen_lock.release()
        finally:
            for number in left:
                signal.raise_signal(number)

    def consume(self, number: signal.Signals) -> None:
        """Marks the signal as handled: it is not delivered again on exit. Any thread, at any time."""
        self._consumed_signals.add(number)

    def wake(self) -> None:
        """Makes `listen` check at once whether to stop. Any thread, inside the block."""
        with contextlib.suppress(OSError):
            os.write(self._write_fd, b"\0")

    def listen(
        self,
        stop: threading.Event,
        tell: OnNoticeChange,
        again: Callable[[signal.Signals], None] = lambda number: None,
    ) -> None:
        """Implements Listener.listen. Each signal is reported once, with its first deadline.
        `again` is called if the signal comes again REPEAT_S or later: the sender insists. A sooner repeat is the same
        request on a second path (Slurm signals torchrun and its workers, and torchrun its workers). Errors: UsageError
        outside the block."""
        told: dict[int, float] = {}
        with self._listen_lock:
            if not self._is_open:
                raise UsageError("Signals.listen works only inside the with block")
            poll = select.poll()
            poll.register(self._read_fd, select.POLLIN)
            while self._is_open and not stop.is_set():
                poll.poll(SLICE_S * 1000)
                for number in self._drain_pipe():
                    if number not in self._previous_handlers:
                        continue
                    if number not in told:
                        told[number] = time.monotonic()
                        tell(self._notice(signal.Signals(number)))
                    elif time.monotonic() - told[number] >= REPEAT_S:
                        again(signal.Signals(number))

    def _warn_unheard(self, number: signal.Signals) -> None:
        told = (
            f"ckpt: {number.name} is not used as a preemption notice, since a handler outside Python is installed for "
            f"it. To use it, call signal.signal(signal.{number.name}, signal.SIG_DFL) before the block"
        )
        self._events.emit("signals.unheard", told, loud=True)

    def _notice(self, number: signal.Signals) -> Notice:
        lead_s = self._leads_s[number]
        told = f"{number.name} was received; {lead_s:g} s are assumed to be left"
        return Notice(self._now_s() + lead_s, "signal", True, number.name, told)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous_handlers.get(number, signal.SIG_DFL)
        if self._is_open:
            self._received[number] = True
            with contextlib.suppress(OSError):  # the pipe is full: `listen` wakes anyway
                os.write(self._write_fd, bytes((number | HANDLER_BIT,)))
        elif signal.getsignal(number) is self._handler:
            # Other code found this handler installed and put it back after the exit. Remove it for good.
            signal.signal(number, previous)
            signal.raise_signal(number)
            return
        if callable(previous):
            previous(number, frame)

    def _drain_pipe(self) -> bytes:
        """The numbers of the signals that came. Also wakes the previous wake-up descriptor (asyncio)."""
        try:
            read = os.read(self._read_fd, 512).replace(b"\0", b"")
        except BlockingIOError:
            return b""
        came = bytes(byte & ~HANDLER_BIT for byte in read if self._is_first(byte))
        if self._previous_wakeup_fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._previous_wakeup_fd, came)
        return came

    def _is_first(self, byte: int) -> bool:
        """Whether this byte is the first one of its signal."""
        number = byte & ~HANDLER_BIT
        is_first = byte == number or number not in self._pending_wakeups
        if byte == number:
            self._pending_wakeups.add(number)
        else:
            self._pending_wakeups.discard(number)
        return is_first

    def _restore_handlers(self) -> dict[int, bool]:
        """Restores the handlers. Returns for each signal whether it came and had no previous handler.
        Handlers that other code installed over ours stay."""
        for number, previous in self._previous_handlers.items():
            if signal.getsignal(number) is self._handler:
                signal.signal(number, previous)
        # Set only now: a signal until here is recorded.
        self._is_open = False
        _entered.remove(self)
        # Others that were entered inside this block and stay longer.
        for other in _entered:
            for number, previous in self._previous_handlers.items():
                if other._previous_handlers.get(number) is self._handler:
                    other._previous_handlers[number] = previous
            if other._previous_wakeup_fd == self._write_fd:
                other._previous_wakeup_fd = self._previous_wakeup_fd
        if (current := signal.set_wakeup_fd(-1)) == self._write_fd:
            current = self._previous_wakeup_fd
        with contextlib.suppress(OSError, ValueError):  # the descriptor was closed: there is nothing to wake
            signal.set_wakeup_fd(current)
        return {n: came and not callable(self._previous_handlers.get(n)) for n, came in self._received.items()}


def is_caught(number: int) -> bool:
    """Whether the process has a handler for the signal, also one that is not Python's (proc(5), SigCgt)."""
    with contextlib.suppress(OSError):  # without /proc
        for line in Path("/proc/self/status").read_bytes().splitlines():
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


_entered: list[Signals] = []


_mask_before = threading.local()


def _block_signals() -> None:
    """Blocks the signals before a fork: until the child has its previous handlers, a signal to the child would run ours
    and wake its parent."""
    numbers = {number for each in _entered for number in each._leads_s}
    _mask_before.value = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask_before.value)


def _reset_child() -> None:
    for each in reversed(_entered.copy()):
        each._is_open = False
        with contextlib.suppress(ValueError, OSError):
            each._restore_handlers()
        os.close(each._read_fd)
        os.close(each._write_fd)
    _unblock_signals()


os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_reset_child)

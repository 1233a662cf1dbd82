"""The exit codes, in one table. `docs/commands.md` shows it, and a test compares the two."""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ckpt import errors


class Exit(enum.IntEnum):
    """The exit codes of the command line. MEANING describes each."""

    OK = 0
    DIFFERENT = 1
    USAGE = 2
    NO_CHECKPOINT = 3
    STORAGE = 4
    IN_USE = 5
    AGENT = 6
    FAILED = 7
    UNEXPECTED = 8
    # As for a process that a signal has ended: 128 plus its number.
    HUNG_UP = 129
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


MEANING: dict[Exit, str] = {
    Exit.OK: "it was done, and nothing is wrong",
    Exit.DIFFERENT: "data is damaged, or what was compared differs",
    Exit.USAGE: "the command, an option or a URL is wrong",
    Exit.NO_CHECKPOINT: "there is no such checkpoint, or none at all",
    Exit.STORAGE: "the store did not answer or refused (network, permission, disk full)",
    Exit.IN_USE: "a living job owns the URL",
    Exit.AGENT: "no agent runs here for the URL, or it could not be understood",
    Exit.FAILED: "anything else that went wrong, such as a save that did not arrive or a script that failed",
    Exit.UNEXPECTED: "a fault of ckpt itself: please report it with what is on standard error",
    Exit.HUNG_UP: "ended by SIGHUP: its terminal is gone",
    Exit.INTERRUPTED: "interrupted by Ctrl-C",
    Exit.BROKEN_PIPE: "the reader of its output has closed it, as in `ckpt ls URL | head`",
    Exit.TERMINATED: "ended by SIGTERM",
}

# The first matching class counts.
_OF_ERROR: tuple[tuple[type[errors.CkptError], Exit], ...] = (
    (errors.UsageError, Exit.USAGE),
    (errors.NoCheckpoint, Exit.NO_CHECKPOINT),
    (errors.StorageError, Exit.STORAGE),
    (errors.DamagedData, Exit.DIFFERENT),
    (errors.StateMismatch, Exit.DIFFERENT),
    (errors.RunInUse, Exit.IN_USE),
    (errors.Superseded, Exit.IN_USE),
    (errors.AgentError, Exit.AGENT),
    (errors.CkptError, Exit.FAILED),
)


def exit_code_of(error: errors.CkptError) -> Exit:
    """The exit code of an error."""
    return next(code for kind, code in _OF_ERROR if isinstance(error, kind))


_OF_SIGNAL = {signal.SIGHUP: Exit.HUNG_UP, signal.SIGTERM: Exit.TERMINATED}


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt, so that cleanup runs.

    Further signals do not interrupt the cleanup. A signal that was ignored before (by nohup) stays ignored.
    """

    def end(number: int, _: FrameType | None) -> None:
        for each in former:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(_OF_SIGNAL[signal.Signals(number)])

    former = {each: signal.getsignal(each) for each in _OF_SIGNAL if signal.getsignal(each) is not signal.SIG_IGN}
    try:
        for each in former:
            signal.signal(each, end)
        yield
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)

"""Every error that ckpt raises on purpose.

    CkptError
    |- UsageError          the call or the option is wrong; the message says which choice there is
    |- StateMismatch       the state and the checkpoint do not fit; every difference is named in one message
    |- StorageError        the store did not do what it was asked
    |  |- NotFound           no such object
    |  |- AlreadyExists      put-if-absent found the key taken
    |  |- AccessDenied       credentials or permission
    |  |- TransientError     may succeed when tried again (503, reset, timeout); retried in one place only
    |  `- Unsettled          nobody knows whether it happened; settle it by reading back
    |- DamagedData         bytes that do not hash to what was recorded, or do not parse: names the object
    |  |- MissingData        an object that a record names is not there, or not visible yet
    |  `- NewerFormat        sound, but written by a newer ckpt: a start does not fall back behind it
    |- NoCheckpoint        nothing restorable where it was looked for
    |- SaveFailed          a checkpoint did not reach the level that was waited for
    |  |- NotStaged          ... nor will it ever reach any: that snapshot was given up; another one may
    |  `- CommitFailed       ... at the end of the run
    |- Superseded          a newer start of the run owns the URL
    |- RunInUse            another living job writes to the URL
    `- AgentError          the agent could not be reached, started or understood
       |- OtherVersion        ... it is of another release, and ends as soon as it may
       `- NotLed             ... or waits for that of rank 0's node: later it may be

`Leave` is no error but a SystemExit: the job has been asked to go, and everything it could save is saved.
Every class has a stable `kind`, which messages and JSON carry, so that an error crosses a process boundary.
Foreign exceptions are translated where they enter (a backend, a socket), with `from exc`.
"""

from __future__ import annotations

import signal
import traceback


class CkptError(Exception):
    kind = "error"


class UsageError(CkptError, ValueError):
    kind = "usage"


class StateMismatch(CkptError):
    kind = "state-mismatch"


class StorageError(CkptError):
    kind = "storage"


class NotFound(StorageError):
    kind = "not-found"


class AlreadyExists(StorageError):
    kind = "already-exists"


class AccessDenied(StorageError):
    kind = "access-denied"


class TransientError(StorageError):
    kind = "transient"


class Unsettled(StorageError):
    kind = "unsettled"


class DamagedData(CkptError):
    kind = "damaged"


class MissingData(DamagedData):
    kind = "missing"


class NewerFormat(DamagedData):
    kind = "newer-format"


class NoCheckpoint(CkptError):
    kind = "no-checkpoint"


class SaveFailed(CkptError):
    kind = "save-failed"


class NotStaged(SaveFailed):
    kind = "not-staged"


class CommitFailed(SaveFailed):
    kind = "commit-failed"


class Superseded(CkptError):
    kind = "superseded"


class RunInUse(CkptError):
    kind = "in-use"


class AgentError(CkptError):
    kind = "agent"


class OtherVersion(AgentError):
    kind = "other-version"


class NotLed(AgentError):
    kind = "not-led"


class Leave(SystemExit):
    """Raised out of the `with` block when the job is to go (a notice, or a newer start of the same run).

    `code` is the exit status (143 after a notice, 75 after being superseded).
    """


def _tree(cls: type[CkptError]) -> dict[str, type[CkptError]]:
    found = {kind: each for sub in cls.__subclasses__() for kind, each in _tree(sub).items()}
    return {**found, cls.kind: cls}  # last: a subclass without a kind of its own is not what its parent is told as


def from_kind(kind: str, message: str) -> CkptError:
    """The error of that kind, as it came over a socket; an unknown kind gives a plain CkptError."""
    return _tree(CkptError).get(kind, CkptError)(message)


def is_from_outside(error: BaseException) -> bool:
    """Whether it has come into the midst of what was done, and not of it: Ctrl-C, an exit, or whatever a handler of a
    signal has raised (a watchdog's alarm). Whoever waits for it is outside as well: no failure of ours may hide it."""
    if not isinstance(error, Exception):
        return True
    handlers = filter(callable, map(signal.getsignal, signal.valid_signals()))
    plain = [getattr(each, "func", each) for each in handlers]  # one may be a functools.partial
    codes = {getattr(each, "__code__", None) or getattr(type(each).__call__, "__code__", None) for each in plain}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))

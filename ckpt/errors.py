"""The errors that ckpt raises on purpose, as one tree.

    CkptError
    |- UsageError          the call or an option is wrong; the message names the choices
    |- StateMismatch       the state and the checkpoint do not fit; one message names every difference
    |- StorageError        an operation of the store failed
    |  |- NotFound           there is no such object
    |  |- AlreadyExists      a put-if-absent found that the key exists
    |  |- AccessDenied       wrong credentials or a missing permission
    |  |- TransientError     a retry may succeed (503, reset, timeout); only one place in the code retries
    |  `- Unsettled          unknown whether the operation was done; settle it by reading back
    |- DamagedData         bytes that differ from the recorded hash, or do not parse; the message names the object
    |  |- MissingData        an object that a record names does not exist, or is not visible yet
    |  `- NewerFormat        sound, but written by a newer ckpt: a start does not fall back to an older checkpoint
    |- NoCheckpoint        there is nothing to restore
    |- SaveFailed          a checkpoint did not reach the level that was waited for
    |  |- NotStaged          ... nor will it reach any level: its snapshot was given up; another one may succeed
    |  `- CommitFailed       ... at the end of the run
    |- Superseded          a newer start of the run owns the URL
    |- RunInUse            another living job writes to the URL
    `- AgentError          the agent could not be reached, started or understood
       |- OtherVersion        ... it is of another release, and ends as soon as it can
       `- NotLed             ... it waits for the agent of rank 0's node; a retry may succeed

`Leave` is a SystemExit and no error: the job was asked to leave, and everything it could save is saved.
Every class has a stable `kind`. Messages and JSON carry the kind, so that an error can cross a process boundary.
Foreign exceptions are translated, with `from exc`, at the place where they enter: a backend or a socket.
"""

from __future__ import annotations

import signal
import traceback


class CkptError(Exception):
    """The base of all errors of ckpt. `kind`: a stable name of the class."""

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


class NoCoordinator(AgentError):
    kind = "not-led"


class Leave(SystemExit):
    """Raised out of the `with` block when the job has to leave, because of a notice or a newer start of the same run.

    `code` is the exit status: 143 after a notice, 75 after a newer start."""


def _classes_by_kind(cls: type[CkptError]) -> dict[str, type[CkptError]]:
    found = {kind: each for sub in cls.__subclasses__() for kind, each in _classes_by_kind(sub).items()}
    # The class itself comes last, and so wins over a subclass that has no kind of its own.
    return {**found, cls.kind: cls}


def from_kind(kind: str, message: str) -> CkptError:
    """The error of that kind, which came over a socket. An unknown kind gives a plain CkptError."""
    return _classes_by_kind(CkptError).get(kind, CkptError)(message)


def is_injected(error: BaseException) -> bool:
    """Whether the exception was injected (Ctrl-C, an exit, a signal handler such as a watchdog's alarm) rather than
    raised by the interrupted operation. An injected exception must reach the user: no failure of ckpt may hide it."""
    if not isinstance(error, Exception):
        return True
    handlers = filter(callable, map(signal.getsignal, signal.valid_signals()))
    # A handler may be a functools.partial.
    plain = [getattr(each, "func", each) for each in handlers]
    codes = {getattr(each, "__code__", None) or getattr(type(each).__call__, "__code__", None) for each in plain}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))

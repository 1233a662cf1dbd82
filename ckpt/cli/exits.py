"""Exit codes: the one table. `docs/commands.md` shows it, and a test holds the two together."""

from __future__ import annotations

import enum

from ckpt import errors


class Exit(enum.IntEnum):
    OK = 0
    DIFFERENT = 1
    USAGE = 2
    NO_CHECKPOINT = 3
    STORAGE = 4
    IN_USE = 5
    AGENT = 6
    FAILED = 7
    INTERRUPTED = 130
    UNREAD = 141  # as of a process that SIGPIPE has ended


MEANING: dict[Exit, str] = {
    Exit.OK: "it was done, and nothing is wrong",
    Exit.DIFFERENT: "data is damaged, or what was compared differs",
    Exit.USAGE: "the command, an option or a URL is wrong",
    Exit.NO_CHECKPOINT: "there is no such checkpoint, or none at all",
    Exit.STORAGE: "the store did not answer or refused (network, permission, disk full)",
    Exit.IN_USE: "a living job owns the URL",
    Exit.AGENT: "no agent runs here for the URL, or it could not be understood",
    Exit.FAILED: "anything else that went wrong, such as a save that did not arrive or a script that failed",
    Exit.INTERRUPTED: "interrupted by Ctrl-C",
    Exit.UNREAD: "whoever read what it printed has seen enough, as in `ckpt ls URL | head`",
}

# The first class that fits counts.
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


def exit_of(error: errors.CkptError) -> Exit:
    return next(code for kind, code in _OF_ERROR if isinstance(error, kind))

"""The run's secret: who knows it may read and write the memory of the run's agents, nobody else.

32 random bytes. Written as 64 hexadecimal digits, in a file that only its owner can read or in one line of standard
input. Where neither is given rank 0 makes one at the first start, which travels with the job's own rendezvous; the next
starts take that of the newest start that an agent of theirs was part of, so that those which are late for a start, or
missing, can still be asked what they hold.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

from ckpt.errors import UsageError
from ckpt.settings import Settings

SECRET_BYTES = 32
_TEXT_MAX = 256  # of what is read: nobody's log file is mistaken for a secret and read whole
_MAKE = "make one with: (umask 077; openssl rand -hex 32 > FILE)"


def make() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def for_run(settings: Settings, former: bytes) -> bytes:
    """That of the file which the settings name, else that of a former start; a new one where that is b"". Errors: as
    those of `read_file`."""
    return read_file(settings.secret_file) if settings.secret_file is not None else former or make()


def told_apart(settings: Settings) -> str:
    """By which others see whether they have the same, and which gives it away to nobody; "": no file is named."""
    if settings.secret_file is None:
        return ""
    try:
        return hashlib.blake2b(read_file(settings.secret_file), digest_size=8).hexdigest()
    except UsageError:  # it is one where this rank's counts
        return "cannot be read"


def read_file(path: Path) -> bytes:
    """Errors: UsageError where it cannot be read, is no regular file, belongs to another user, is open to others
    than its owner, or holds no secret. The message never shows the content."""
    try:
        # Without O_NONBLOCK, opening a FIFO that nobody writes to would never return.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as exc:
        raise UsageError(f"the secret cannot be read from {path}: {exc.strerror}; {_MAKE}") from exc
    try:
        status = os.fstat(fd)  # of what was opened, not of what the name means by now
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path} is no regular file, so the secret is not read from it; {_MAKE}")
        if status.st_uid != os.geteuid():
            raise UsageError(f"{path} belongs to user {status.st_uid}, not to us ({os.geteuid()}): chown it")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise UsageError(f"{path} has mode {mode:04o}, so others can read the secret: chmod 600 {path}")
        text = os.read(fd, _TEXT_MAX)
    finally:
        os.close(fd)
    return _parse(text, str(path))


def read_stream(stream: BinaryIO) -> bytes:
    """The first line of standard input. Errors: UsageError where it is no secret."""
    return _parse(stream.readline(_TEXT_MAX), "standard input")


def _parse(text: bytes, source: str) -> bytes:
    match = re.fullmatch(rb"\s*([0-9a-fA-F]{64})\s*", text)
    if match is None:
        raise UsageError(f"{source} holds no secret: 64 hexadecimal digits and nothing else are expected; {_MAKE}")
    return bytes.fromhex(match[1].decode())

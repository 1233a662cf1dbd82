"""The secret of a run: a process must know it to read or write the memory of the run's agents.

The secret is 32 random bytes, written as 64 hexadecimal digits: in a file that only its owner can read, or in one line
of standard input. If neither is given, rank 0 makes a secret at the first start and shares it over the job's
rendezvous. Later starts reuse the secret of the newest start that one of their agents took part in. So they can still
survey agents that join late or missed a start.
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
_READ_BYTES_MAX = 256  # bytes that are read, so that a large file given by mistake is not read whole
_MAKE_HINT = "make one with: (umask 077; openssl rand -hex 32 > FILE)"


def make_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def choose_secret(settings: Settings, former: bytes) -> bytes:
    """The secret of the file that the settings name; else `former`, the secret of an earlier start; else a new one.
    Errors: those of `read_file`."""
    return read_file(settings.secret_file) if settings.secret_file is not None else former or make_secret()


def secret_fingerprint(settings: Settings) -> str:
    """A short hash of the secret file, by which ranks check that they have the same one; "" if no file is named. The
    hash does not reveal the secret."""
    if settings.secret_file is None:
        return ""
    try:
        return hashlib.blake2b(read_file(settings.secret_file), digest_size=8).hexdigest()
    except UsageError:  # raised later, where the secret of this rank is needed
        return "cannot be read"


def read_file(path: Path) -> bytes:
    """The secret in that file. Error messages never show the content. Errors: UsageError if the file cannot be read, is
    no regular file, or holds no secret; also if it belongs to another user, or others can access it."""
    try:
        # Without O_NONBLOCK, opening a FIFO that nobody writes to would never return.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as exc:
        raise UsageError(f"the secret cannot be read from {path}: {exc.strerror}; {_MAKE_HINT}") from exc
    try:
        # The open file is checked, not the path, which may name another file by now.
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path} is not a regular file, so the secret is not read from it; {_MAKE_HINT}")
        if status.st_uid != os.geteuid():
            raise UsageError(f"{path} belongs to user {status.st_uid}, not to this user: chown {os.geteuid()} {path}")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise UsageError(f"{path} has mode {mode:04o}, so others can read the secret: chmod 600 {path}")
        text = os.read(fd, _READ_BYTES_MAX)
    finally:
        os.close(fd)
    return _parse(text, str(path))


def read_stream(stream: BinaryIO) -> bytes:
    """The secret in the first line of the stream. Errors: UsageError if the line holds no secret."""
    return _parse(stream.readline(_READ_BYTES_MAX), "standard input")


def _parse(text: bytes, source: str) -> bytes:
    match = re.fullmatch(rb"\s*([0-9a-fA-F]{64})\s*", text)
    if match is None:
        raise UsageError(f"{source} does not hold a secret of exactly 64 hexadecimal digits; {_MAKE_HINT}")
    return bytes.fromhex(match[1].decode())

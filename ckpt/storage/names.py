"""Valid keys, and URLs in messages. Every backend checks its keys here, so that no key leads out of its URL."""

from __future__ import annotations

import re

from ckpt.errors import UsageError
from ckpt.types import PATH_NAME

PARTS_MAX = 8
# Begins the name of an unfinished file. Because of its dot such a name is not a key.
TEMPORARY_PREFIX = ".ckpt-tmp-"

# What follows a user name (me@corp.com). A port is not a password.
_PASSWORD = re.compile(r"(://[^/:]*):(?!\d+(?:/|$)).*@", re.DOTALL)


def redact_url(url: str) -> str:
    """The URL for messages, without its password; also if the password has slashes that should be %2F."""
    return _PASSWORD.sub(r"\1:***@", url)


def problem_text(key: str, what: str) -> str:
    """A problem with an object, for messages: with the key in front unless `what` begins with it."""
    return what if what.startswith(key) else f"{key}: {what}"


def is_key(text: str) -> bool:
    """Whether the text is a key: 1 to 8 parts, each matching PATH_NAME. Other objects in a store are foreign."""
    parts = text.split("/")
    return len(parts) <= PARTS_MAX and all(PATH_NAME.fullmatch(part) for part in parts)


def check_key(key: str) -> str:
    """The key itself. Errors: UsageError if it is not a key."""
    if not is_key(key):
        raise UsageError(
            f"{key[:200]!r} is not a key. A key has at most {PARTS_MAX} parts, separated by /. A part has at most 64 "
            "characters of A-Z a-z 0-9 . _ - and does not begin with a dot"
        )
    return key


def check_prefix(prefix: str) -> str:
    """The prefix itself: "" or a key with a / behind it. Errors: UsageError."""
    if prefix and not (prefix.endswith("/") and is_key(prefix[:-1])):
        raise UsageError(f"{prefix[:200]!r} is not a prefix: give an empty text, or a key with a / at its end")
    return prefix


def check_range(start: int, length: int) -> None:
    """Errors: UsageError if it is not a range."""
    if start < 0 or length < 0:
        raise UsageError(f"start={start}, length={length}: give numbers of at least 0")

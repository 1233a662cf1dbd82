"""What a key may look like, and a URL in a message. Every backend checks keys here, so that nothing escapes its URL."""

from __future__ import annotations

import re

from ckpt.errors import UsageError
from ckpt.types import PATH_NAME

PARTS_MAX = 8
TEMPORARY = ".ckpt-tmp-"  # begins the name of an unfinished file; the dot keeps it from being a key

_PASSWORD = re.compile(r"(://[^/:]*):(?!\d+(?:/|$)).*@", re.DOTALL)  # behind a user (me@corp.com); a port is none


def shown(url: str) -> str:
    """The URL for messages: a password in it is left out, also one whose slashes should have been written as %2F."""
    return _PASSWORD.sub(r"\1:***@", url)


def naming(key: str, what: str) -> str:
    """What is wrong with an object, for messages: most errors name it themselves."""
    return what if what.startswith(key) else f"{key}: {what}"


def is_key(text: str) -> bool:
    """Whether it is a key: 1 to 8 parts, each matching PATH_NAME. What a store holds besides is none of ours."""
    parts = text.split("/")
    return len(parts) <= PARTS_MAX and all(PATH_NAME.fullmatch(part) for part in parts)


def check_key(key: str) -> str:
    """The key itself. Errors: UsageError where it is none."""
    if not is_key(key):
        raise UsageError(
            f"not a key: {key[:200]!r}; a key is at most {PARTS_MAX} parts separated by /, "
            "each of at most 64 of A-Z a-z 0-9 . _ - and not beginning with a dot"
        )
    return key


def check_prefix(prefix: str) -> str:
    """The prefix itself: "" or a key with a / behind it. Errors: UsageError."""
    if prefix and not (prefix.endswith("/") and is_key(prefix[:-1])):
        raise UsageError(f"not a prefix: {prefix[:200]!r}; a prefix is empty, or a key with a / behind it")
    return prefix


def check_range(start: int, length: int) -> None:
    """Errors: UsageError where it is no range."""
    if start < 0 or length < 0:
        raise UsageError(f"not a range: {length} bytes from {start}")

"""A msgpack decoder with bounded memory, for blobs that other processes packed."""

from __future__ import annotations

from typing import Any

import msgpack

from ckpt.errors import AgentError
from ckpt.format.msgpack_headers import check_headers

OBJECTS_MAX = 1 << 20  # values in one blob, all levels together: at most about 100 MiB of Python objects
DEPTH_MAX = 500  # msgpack's own limit is at least that


def unpack_bounded(blob: bytes, what: str, objects_max: int = OBJECTS_MAX) -> Any:
    """The value that a blob holds. `what`: names the blob in errors. `objects_max`: limit of values, nested ones too.

    Errors: AgentError if the blob is malformed, has too many values, an extension type, or a map key that is neither
    text nor bytes."""
    try:
        check_headers(blob, objects_max, DEPTH_MAX)
        return msgpack.unpackb(blob)
    except (ValueError, msgpack.UnpackException) as exc:
        raise AgentError(f"{what} cannot be decoded: {exc}") from exc

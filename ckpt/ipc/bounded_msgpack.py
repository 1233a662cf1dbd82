"""A msgpack decoder with bounded memory, for blobs that other processes packed.

The limits of msgpack itself hold for one array or map. Nested empty lists can still take sixty times the memory of the
blob, and an array header can reserve memory for values that never come. So this module first reads all headers, and
counts both the values present and the values promised. The format: https://github.com/msgpack/msgpack/spec
"""

from __future__ import annotations

from typing import Any

import msgpack

from ckpt.errors import AgentError

OBJECTS_MAX = 1 << 20  # values in one blob, all levels together: at most about 100 MiB of Python objects


def unpack_bounded(blob: bytes, what: str, objects_max: int = OBJECTS_MAX) -> Any:
    """The value that a blob holds. `what`: names the blob in errors. `objects_max`: limit of values, nested ones too.

    Errors: AgentError if the blob is malformed, has too many values, an extension type, or a map key that is neither
    text nor bytes."""
    if not _is_within_limit(blob, objects_max):
        raise AgentError(f"{what} is incomplete, has more than {objects_max} values, or has a type that is not allowed")
    try:
        return msgpack.unpackb(blob, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as exc:
        raise AgentError(f"{what} cannot be decoded") from exc


def _is_within_limit(blob: bytes, objects_max: int) -> bool:
    """Whether the blob is exactly one whole value of at most `objects_max` values. Reads at most that many headers."""
    at, end, left, count = 0, len(blob), 1, 1
    while left and at < end and count <= objects_max:
        head = blob[at]
        at += 1
        left -= 1
        more = 0
        if head < 0x80 or head >= 0xE0:  # a small integer
            continue
        if head < 0x90:
            more = 2 * (head & 15)
        elif head < 0xA0:
            more = head & 15
        elif head < 0xC0:
            at += head & 31
        elif (width := _CONTAINER_WIDTHS.get(head)) is not None:
            more = int.from_bytes(blob[at : at + width], "big") * (2 if head >= 0xDE else 1)
            at += width
        elif (width := _STRING_WIDTHS.get(head)) is not None:
            at += width + int.from_bytes(blob[at : at + width], "big")
        elif (width := _SCALAR_WIDTHS.get(head)) is not None:
            at += width
        else:
            return False  # an extension type, or an unused header byte
        left += more
        count += more
    return not left and at == end and count <= objects_max


# By header byte, the width in bytes of the length field: of arrays and maps; of bytes and text. Of fixed-size values,
# the bytes that follow the header.
_CONTAINER_WIDTHS = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_STRING_WIDTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_SCALAR_WIDTHS = {
    0xC0: 0,
    0xC2: 0,
    0xC3: 0,
    0xCA: 4,
    0xCB: 8,
    0xCC: 1,
    0xCD: 2,
    0xCE: 4,
    0xCF: 8,
    0xD0: 1,
    0xD1: 2,
    0xD2: 4,
    0xD3: 8,
}

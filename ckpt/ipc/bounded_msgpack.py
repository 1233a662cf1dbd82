"""What another agent has packed into a blob, taken out of it within bounds.

msgpack's own limits are for one array or map: a blob of empty lists within lists becomes some sixty times as much
memory, and an array may say of itself that it is long, and have memory set aside, before one of its values is there. So
the heads are read first: all that is there, and all that is promised, counts. https://github.com/msgpack/msgpack/spec
"""

from __future__ import annotations

from typing import Any

import msgpack

from ckpt.errors import AgentError

OBJECTS_MAX = 1 << 20  # in one blob, all levels together: some 100 MiB of Python's objects at most


def unpacked(blob: bytes, what: str, objects_max: int = OBJECTS_MAX) -> Any:
    """What was packed: at most so many values, those within others counted, no extension types, and keys that are text
    or bytes. `what` it is to be. Errors: AgentError that names it."""
    if not _within(blob, objects_max):
        raise AgentError(f"{what} has more than {objects_max} values, others than may be, or is not all there")
    try:
        return msgpack.unpackb(blob, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as exc:
        raise AgentError(f"{what} does not parse") from exc


def _within(blob: bytes, objects_max: int) -> bool:
    """Whether it is one value, and no more come with it. Looks at no more heads than that, whatever is said."""
    at, end, left, count = 0, len(blob), 1, 1
    while left and at < end and count <= objects_max:
        head = blob[at]
        at += 1
        left -= 1
        more = 0
        if head < 0x80 or head >= 0xE0:  # a small number
            continue
        if head < 0x90:
            more = 2 * (head & 15)
        elif head < 0xA0:
            more = head & 15
        elif head < 0xC0:
            at += head & 31
        elif (width := _COUNTED.get(head)) is not None:
            more = int.from_bytes(blob[at : at + width], "big") * (2 if head >= 0xDE else 1)
            at += width
        elif (width := _SIZED.get(head)) is not None:
            at += width + int.from_bytes(blob[at : at + width], "big")
        elif (width := _FIXED.get(head)) is not None:
            at += width
        else:
            return False  # an extension type: what of it is a value is not looked at
        left += more
        count += more
    return not left and at == end and count <= objects_max


_COUNTED = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}  # arrays and maps: bytes of their length
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bytes and text
_FIXED = {
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

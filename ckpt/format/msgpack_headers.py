"""Reads the headers of msgpack data before msgpack itself does, so that hostile data cannot take much memory.

The limits of msgpack hold for one array or map. Nested empty lists can still take sixty times the memory of the data,
and an array header can reserve memory for values that never come. So all headers are read first, and both the values
present and the values promised are counted. The format: https://github.com/msgpack/msgpack/spec
"""

from __future__ import annotations


def check_headers(data: bytes | memoryview, values_max: int, depth_max: int, *, tags: bool = False) -> None:
    """Errors: ValueError unless `data` is exactly one whole value, which holds at most `values_max` values (itself
    among them), nested at most `depth_max` deep, and none of them an extension or a float of 32 bits. `tags`: an array
    may begin with an empty extension."""
    at, end, left, count = 0, len(data), 1, 1
    # For each array or map around the next value: how many values are left when it ends.
    ends: list[int] = []
    while left and at < end:
        head = data[at]
        at += 1
        left -= 1
        skip = _SKIPPED[head]
        if skip >= 0:
            at += skip
            continue
        if (width := _STRING_WIDTHS.get(head)) is not None:
            at += width + int.from_bytes(data[at : at + width], "big")
            continue
        if 0x80 <= head < 0xA0:
            more = head & 15
        elif (width := _CONTAINER_WIDTHS.get(head)) is not None:
            more = int.from_bytes(data[at : at + width], "big")
            at += width
        else:
            raise ValueError(f"no value begins with 0x{head:02x}, at byte {at - 1}")
        is_map = head < 0x90 or head >= 0xDE
        more += more * is_map
        while ends and left < ends[-1]:
            ends.pop()
        ends.append(left)
        count += more
        left += more
        if count > values_max or len(ends) > depth_max:
            raise ValueError(f"a list or dict of {more} values at depth {len(ends)}, byte {at}, is too large or deep")
        if tags and more and not is_map and data[at : at + 1] == _EMPTY_EXT:
            if data[at + 1 : at + 2] != b"\0":
                raise ValueError(f"an extension is not empty, at byte {at}")
            at += 3
            left -= 1
    if left or at != end or count > values_max:
        raise ValueError(f"{count} values, {left} of them not there, take {at} bytes of {end}")


# By header byte, the width in bytes of the length field: of arrays and maps; of bytes and text.
_CONTAINER_WIDTHS = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_STRING_WIDTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_NUMBER_WIDTHS = {0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_EMPTY_EXT = b"\xc7"
# By header byte, how many bytes follow it: in small integers, nil, bools, short texts and numbers. -1 for all else.
_SKIPPED = [-1] * 256
_SKIPPED[:0x80] = [0] * 0x80
_SKIPPED[0xA0:0xC0] = range(0x20)
_SKIPPED[0xE0:] = [0] * 0x20
for _head, _width in {0xC0: 0, 0xC2: 0, 0xC3: 0, **_NUMBER_WIDTHS}.items():
    _SKIPPED[_head] = _width

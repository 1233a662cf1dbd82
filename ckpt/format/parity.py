"""Parity of several members' bytes, and recovery: one lost member from P or Q, two from both.

    P = d_1 ^ d_2 ^ ... ^ d_n              Q = 1 d_1 ^ 2 d_2 ^ ... ^ n d_n

The sums are byte by byte, in GF(2^8) with the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d), as in RAID-6 (Anvin 2004,
"The mathematics of RAID-6"). RAID-6 weights by powers of 2: one doubling per member, if all arrive from the last to the
first. Here the weights are 1 .. n, distinct and not 0, which is all that the algebra needs. So a member's bytes can be
added at any time, in any order, and only the sum is kept. Members added together share the doublings, by Horner's rule
over the bits of the weights: log2(n) for all of them, and one XOR for each bit that is set. A shorter member counts as
if followed by zeros, which are never written or added.

Recovery is addition, too. The parity minus the survivors' part is the lost members' part. So the survivors are added to
the parity, in any order, and `solve_lost` turns the rest into the lost bytes, in place.

NumPy's operations on bytes run outside the GIL, vectorised, as fast as on words, at any alignment. All work is done in
blocks that stay in the cache, in the buffers of a `ParityScratch`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckpt.errors import UsageError

Buffer = bytes | bytearray | memoryview
Bytes = npt.NDArray[np.uint8]

MEMBERS_MAX = 255  # weights other than 0
BLOCK_BYTES = 128 << 10  # three blocks fit the second-level cache; smaller ones need more calls
_REDUCE = np.uint8(0x1D)  # x^8, reduced


class Row(enum.IntEnum):
    """Which parity. The numbers are written into chunks: append only."""

    P = 0
    Q = 1


class ParityScratch:
    """The blocks of one thread."""

    def __init__(self) -> None:
        self.sum = np.empty(BLOCK_BYTES, np.uint8)
        self.carry = np.empty(BLOCK_BYTES, np.uint8)


@dataclass(frozen=True, slots=True)
class StripePiece:
    """`length` bytes of frame number `frame` from `offset` on. They lie at byte `at` of the stripe."""

    frame: int
    offset: int
    length: int
    stripe_offset: int


def weight(row: Row, member: int) -> int:
    """The factor of the `member`-th member (from 0). Errors: UsageError from MEMBERS_MAX on."""
    if not 0 <= member < MEMBERS_MAX:
        raise UsageError(f"member {member} does not exist: a stripe has at most {MEMBERS_MAX} members")
    return 1 if row is Row.P else member + 1


def add_data(target: Buffer, at: int, data: Mapping[int, Buffer], row: Row, scratch: ParityScratch) -> None:
    """Adds bytes of members (by number) to the parity in `target`, from byte `at` on. Adding them again removes them. A
    parity begins as zeros. Add each byte of a member exactly once. Two threads may add to one target only at different
    bytes, each with its own scratch. Errors: UsageError if the data reaches beyond the target."""
    into, raws = _array(target), [_array(each) for each in data.values()]
    factors = [weight(row, member) for member in data]
    longest = max(map(len, raws), default=0)
    if not 0 <= at <= len(into) - longest:
        raise UsageError(f"{longest} bytes from byte {at} on reach beyond the {len(into)} bytes of the parity")
    into = into[at : at + longest]
    for start in range(0, longest, BLOCK_BYTES):
        block = into[start : start + BLOCK_BYTES]
        parts = [raw[start : start + BLOCK_BYTES] for raw in raws]
        if row is Row.P:
            for part in parts:
                _xor(block, part)
        else:
            _xor(block, _weighted_sum(parts, factors, len(block), scratch))


def solve_lost(lost: Sequence[int], left: Mapping[Row, Buffer], scratch: ParityScratch) -> list[Buffer]:
    """The bytes of the `lost` members, in the order of `lost`, each padded with zeros to the stripe's length, in the
    buffers given.

    `left`: parities to which every member that is not lost was added. One lost member needs either parity, two need
    both. A parity that is not needed is not changed. Errors: UsageError if more are lost than there are parities, or
    the buffers differ in length."""
    if len(set(lost)) != len(lost) or len(lost) > len(left):
        raise UsageError(f"the lost members {list(lost)} cannot be rebuilt from {len(left)} parities")
    if len({len(_array(buffer)) for buffer in left.values()}) > 1:
        raise UsageError("the parities of one stripe have different lengths")
    weights = [weight(Row.Q, member) for member in lost]
    if not lost:
        return []
    if len(lost) == 1:
        if Row.P in left:
            return [left[Row.P]]
        _divide(_array(left[Row.Q]), weights[0], scratch)
        return [left[Row.Q]]
    # P = a + b and Q = u a + v b give b = (Q + u P) / (u + v), and a = P + b.
    p, q = _array(left[Row.P]), _array(left[Row.Q])
    one, other = weights
    for start in range(0, len(q), BLOCK_BYTES):
        block = q[start : start + BLOCK_BYTES]
        _xor(block, _weighted_sum([p[start : start + BLOCK_BYTES]], [one], len(block), scratch))
    _divide(q, one ^ other, scratch)
    np.bitwise_xor(p, q, out=p)
    return [left[Row.P], left[Row.Q]]


def pieces(lengths: npt.ArrayLike, start: int, stop: int) -> Iterator[StripePiece]:
    """The pieces of frames that make up bytes [start, stop), if frames of these lengths are laid end to end. Errors:
    UsageError if the frames end before."""
    ends = np.cumsum(np.asarray(lengths, np.int64))
    if not 0 <= start <= stop <= (int(ends[-1]) if len(ends) else 0):
        raise UsageError(f"bytes {start} to {stop} do not lie within the {len(ends)} frames")
    at = start
    frame = int(np.searchsorted(ends, start, side="right"))
    while at < stop:
        begin = int(ends[frame - 1]) if frame else 0
        end = min(int(ends[frame]), stop)
        if end > at:  # an empty frame has no bytes
            yield StripePiece(frame, at - begin, end - at, at - start)
        at, frame = max(at, end), frame + 1


def product(a: int, b: int) -> int:
    """The product of two elements of the field."""
    found = 0
    while b:
        found ^= a if b & 1 else 0
        a = (a << 1) ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return found


def inverse(a: int) -> int:
    """The element with product(a, inverse(a)) = 1: a^254. Errors: UsageError for 0."""
    if not 0 < a < 256:
        raise UsageError(f"{a} has no inverse in GF(256)")
    found, power = 1, a
    for _ in range(7):  # 254 = 2 + 4 + ... + 128
        power = product(power, power)
        found = product(found, power)
    return found


def _array(buffer: Buffer) -> Bytes:
    return np.frombuffer(buffer, np.uint8)


def _xor(into: Bytes, data: Bytes) -> None:
    """XORs the data into the beginning of `into`."""
    beginning = into[: len(data)]
    np.bitwise_xor(beginning, data, out=beginning)


def _weighted_sum(parts: Sequence[Bytes], factors: Sequence[int], length: int, scratch: ParityScratch) -> Bytes:
    """The weighted sum of one block's parts, each of at most `length` bytes; lies in the scratch. Goes from the
    factors' highest bit to the lowest: doubles the sum so far, and adds the parts that have that bit."""
    found, carry = scratch.sum[:length], scratch.carry[:length]
    found.fill(0)
    top = max(factors).bit_length() - 1
    for bit in range(top, -1, -1):
        if bit < top:
            # Shift left, and reduce the bytes that lose a highest bit: as signed bytes they are < 0.
            np.less(found.view(np.int8), 0, out=carry.view(np.bool_))
            np.multiply(carry, _REDUCE, out=carry)
            np.add(found, found, out=found)
            np.bitwise_xor(found, carry, out=found)
        for part, factor in zip(parts, factors, strict=True):
            if factor >> bit & 1:
                _xor(found, part)
    return found


def _divide(data: Bytes, divisor: int, scratch: ParityScratch) -> None:
    """Divides in place."""
    if divisor == 1:
        return
    factor = inverse(divisor)
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        np.copyto(block, _weighted_sum([block], [factor], len(block), scratch))

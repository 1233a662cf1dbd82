"""What a parity chunk says of itself: of which checkpoint, which parity, and of which frames of whom.

A chunk is written once and never changed: it is good for exactly the frames whose hashes it names, which have to be
those of the checkpoint that is being restored. What was recovered with it is checked frame by frame against them.

    8 bytes magic and version, u1 row, u2 sources, u8 length, 16 bytes hash of the parity, u1 + identity
    each source: u1 + name, u8 start, u8 length, u4 frames, then its frames: u8 hash high, u8 hash low, u4 length
    16 bytes: xxh3-128 of everything before

Little-endian; hashes of bytes are big-endian, as xxhsum prints them. Reading trusts nothing: every number is bounded
before anything is allocated, and nothing may be left over.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt.errors import DamagedData, UsageError
from ckpt.format.parity import MEMBERS_MAX, Row
from ckpt.types import FRAME_BYTES_MAX, FRAMES_MAX, Identity

MAGIC = b"CKPTPAR\x01"  # the last byte is the version
LENGTH_MAX = 1 << 60
NAME_BYTES_MAX = 255

MADE_OF = np.dtype([("hash_hi", "<u8"), ("hash_lo", "<u8"), ("length", "<u4")])
_HEADER = struct.Struct("<8sBHQ16sB")
_SOURCE = struct.Struct("<QQI")
_HASH_BYTES = 16
_BYTES_MAX = _HEADER.size + 255 + MEMBERS_MAX * (1 + NAME_BYTES_MAX + _SOURCE.size) + FRAMES_MAX * MADE_OF.itemsize + 16


@dataclass(frozen=True, slots=True)
class Source:
    """One member of a stripe. `frames`: array of MADE_OF, whose bytes laid end to end hold the member's `length` bytes
    from byte `start` of the first one on; all of them are needed."""

    member: str
    start: int
    length: int
    frames: npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Chunk:
    """`length` bytes of parity with the xxh3-128 `parity_hash` (its canonical 16 bytes). The weight of a source in Q is
    its place in `sources`, from 1 on."""

    identity: Identity
    row: Row
    length: int
    parity_hash: bytes
    sources: tuple[Source, ...]


def encode(chunk: Chunk) -> bytes:
    """Errors: UsageError where it is not one that `decode` would take."""
    identity = str(chunk.identity).encode()
    head = (MAGIC, chunk.row, len(chunk.sources), chunk.length, chunk.parity_hash, len(identity))
    if len(chunk.parity_hash) != _HASH_BYTES:
        raise UsageError(f"a hash of {len(chunk.parity_hash)} bytes, where {_HASH_BYTES} belong")
    try:
        parts = [_HEADER.pack(*head), identity]
        for source in chunk.sources:
            name = source.member.encode()
            frames = np.ascontiguousarray(source.frames, MADE_OF)
            parts += [
                bytes([len(name)]),
                name,
                _SOURCE.pack(source.start, source.length, len(frames)),
                frames.tobytes(),
            ]
    except (struct.error, ValueError) as exc:
        raise UsageError(f"a parity chunk with a number or a name beyond its limits: {exc}") from exc
    body = b"".join(parts)
    data = body + xxhash.xxh3_128_digest(body)
    try:
        decode(data, "a parity chunk")
    except DamagedData as exc:
        raise UsageError(str(exc)) from exc
    return data


def decode(data: bytes | memoryview, what: str = "a parity chunk") -> Chunk:
    """Errors: DamagedData that begins with `what`."""
    body = memoryview(data)[:-_HASH_BYTES]
    if len(data) > _BYTES_MAX or len(body) < _HEADER.size or bytes(body[:7]) != MAGIC[:7]:
        raise DamagedData(f"{what}: no description of parity")
    if body[7] != MAGIC[7]:
        raise DamagedData(f"{what}: version {body[7]}, and this ckpt reads version {MAGIC[7]}")
    if xxhash.xxh3_128_digest(body) != bytes(data[-_HASH_BYTES:]):
        raise DamagedData(f"{what}: its bytes do not hash to what was written (xxh3-128)")
    return _Reader(body, what).chunk()


class _Reader:
    def __init__(self, body: memoryview, what: str) -> None:
        self._left = body
        self._what = what

    def chunk(self) -> Chunk:
        _, row, count, length, parity_hash, identity_bytes = _HEADER.unpack(self._take(_HEADER.size))
        if row not in (Row.P, Row.Q) or not 0 < count <= MEMBERS_MAX or not 0 < length <= LENGTH_MAX:
            raise self._damaged(f"parity {row} of {count} members, {length} bytes")
        named = self._text(identity_bytes)
        try:
            identity = Identity.parse(named)
        except ValueError as exc:
            raise self._damaged("no identity of a checkpoint") from exc
        if str(identity) != named:
            raise self._damaged("no identity of a checkpoint")
        sources = tuple(self._source(length) for _ in range(count))
        if self._left:
            raise self._damaged(f"{len(self._left)} bytes too many")
        if len({source.member for source in sources}) != count:
            raise self._damaged("a member is there twice")
        if sum(len(source.frames) for source in sources) > FRAMES_MAX:
            raise self._damaged(f"more than {FRAMES_MAX} frames")
        return Chunk(identity, Row(row), length, parity_hash, sources)

    def _source(self, stripe_bytes: int) -> Source:
        member = self._text(self._take(1)[0])
        start, length, count = _SOURCE.unpack(self._take(_SOURCE.size))
        if not member or not 0 < length <= stripe_bytes or not 0 < count <= FRAMES_MAX:
            raise self._damaged(f"member {member!r}: {length} bytes in {count} frames, of {stripe_bytes}")
        frames = np.frombuffer(bytes(self._take(count * MADE_OF.itemsize)), MADE_OF)
        sizes = frames["length"].astype(np.int64)
        if sizes.min() < 1 or sizes.max() > FRAME_BYTES_MAX:
            raise self._damaged(f"member {member!r}: a frame that is empty or has more than {FRAME_BYTES_MAX} bytes")
        whole = int(sizes.sum())
        if start >= sizes[0] or start + length > whole or start + length <= whole - int(sizes[-1]):
            raise self._damaged(f"member {member!r}: bytes {start} to {start + length} are not those of its frames")
        return Source(member, start, length, frames)

    def _take(self, nbytes: int) -> memoryview:
        if nbytes > len(self._left):
            raise self._damaged("it ends too early")
        found, self._left = self._left[:nbytes], self._left[nbytes:]
        return found

    def _text(self, nbytes: int) -> str:
        try:
            return bytes(self._take(nbytes)).decode()
        except UnicodeDecodeError as exc:
            raise self._damaged("a name that is not UTF-8") from exc

    def _damaged(self, message: str) -> DamagedData:
        return DamagedData(f"{self._what}: {message}")

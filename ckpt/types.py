"""The words of the design as values: the names of checkpoints (Epoch, Version, Identity), boxes of tensors, dtypes,
sizes.

Nothing here does I/O or imports torch.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

# Bytes per element by dtype name (torch's names without "torch."). A dtype's position in this table is its code in the
# durable format: only append.
ITEMSIZE: dict[str, int] = {
    "uint8": 1, "int8": 1, "bool": 1,
    "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "uint16": 2, "uint32": 4, "uint64": 8,
    "float4_e2m1fn_x2": 1,
}  # fmt: skip
DTYPES: tuple[str, ...] = tuple(ITEMSIZE)
DTYPE_CODE: dict[str, int] = {name: code for code, name in enumerate(DTYPES)}

CodecOption = Literal["auto", "raw", "zstd", "planes"]  # what a user may ask for
CODEC_OPTIONS: tuple[CodecOption, ...] = get_args(CodecOption)

FRAME_BYTES = 4 << 20  # a frame's usual size; larger only if a checkpoint would have more than FRAMES_MAX frames
FRAME_BYTES_MAX = 1 << 30
FRAMES_MAX = 1 << 18
SMALL_BYTES = 1 << 20  # tensors below this are packed together into frames

OWN_NODE = ""  # the name of this node among the nodes of a job

PATH_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")  # one part of a key, or a file name


def format_count(count: int, noun: str) -> str:
    """A count with its noun, for people: "1 step", "2 steps"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def split_by_bytes(lengths: Iterable[int], bytes_max: int) -> Iterator[slice]:
    """Consecutive runs of the items with these lengths, each of at most `bytes_max` or one item."""
    start = stop = size = 0
    for length in lengths:
        if stop > start and size + length > bytes_max:
            yield slice(start, stop)
            start, size = stop, 0
        stop += 1
        size += length
    if stop > start:
        yield slice(start, stop)


@dataclass(frozen=True, order=True, slots=True)
class Epoch:
    """The branch of training that one start or restart begins: a number and a nonce. Written
    `00000007-0123456789abcdef`.

    The nonce keeps two starts apart that took the same number without seeing each other. It begins with the Unix time
    in units of 2**-16 s. So the later one of two such starts is the newer, unless their clocks differ by more than the
    time between them. Without the time, the claim of a dead start could land late and be the newer one by chance: the
    commits of the next start would then be on a branch."""

    number: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.number:08d}-{self.nonce}"

    @staticmethod
    def parse(text: str) -> Epoch:
        """Errors: ValueError."""
        match = re.fullmatch(r"([0-9]{8})-([0-9a-f]{16})", text)
        if match is None:
            raise ValueError(f"not an epoch: {text[:80]!r}")
        return Epoch(int(match[1]), match[2])

    @staticmethod
    def new(number: int) -> Epoch:
        time_ticks = int(time.time() * 2**16) & 0xFFFF_FFFF_FFFF
        return Epoch(number, f"{time_ticks:012x}{secrets.token_hex(2)}")


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """A version: (step, sub). `step`: the last ended step. `sub`: a count of polls, saves and exit since that step
    ended. Written `000000001200.0000`."""

    step: int
    sub: int = 0

    def __str__(self) -> str:
        return f"{self.step:012d}.{self.sub:04d}"

    @property
    def label(self) -> str:
        """For people: "300", or "300.1" for the first save, poll or exit after step 300 has ended."""
        return f"{self.step}.{self.sub}" if self.sub else str(self.step)

    @staticmethod
    def parse(text: str) -> Version:
        """Errors: ValueError."""
        match = re.fullmatch(r"([0-9]{12})\.([0-9]{4,9})", text)
        if match is None:
            raise ValueError(f"not a version: {text[:80]!r}")
        return Version(int(match[1]), int(match[2]))


@dataclass(frozen=True, order=True, slots=True)
class Identity:
    """The name of one checkpoint, at every level. Written `<epoch>-<version>`, which is fit for a key."""

    epoch: Epoch
    version: Version

    def __str__(self) -> str:
        return f"{self.epoch}-{self.version}"

    @staticmethod
    def parse(text: str) -> Identity:
        """Errors: ValueError."""
        if text[25:26] != "-":
            raise ValueError(f"not an identity: {text[:80]!r}")
        return Identity(Epoch.parse(text[:25]), Version.parse(text[26:]))


@dataclass(frozen=True, order=True, slots=True)
class Box:
    """A rectangular part of one tensor, in elements of its global coordinates. The box of a 0-d tensor is ((), ())."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        return Box((0,) * len(shape), tuple(shape))

    def intersect(self, other: Box) -> Box | None:
        """The common part, in global coordinates; None if there is none. An empty box has no common part with any
        box."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(b - a for a, b in zip(low, high, strict=True))
        return Box(low, shape) if all(n > 0 for n in shape) else None

    def within(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside a tensor of that global shape. The numbers of dimensions must be equal."""
        return len(self.offset) == len(self.shape) == len(shape) and all(
            o >= 0 and n >= 0 and o + n <= s for o, n, s in zip(self.offset, self.shape, shape, strict=True)
        )

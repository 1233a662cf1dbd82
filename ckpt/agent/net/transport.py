"""The transfers between agents: frames go from one agent's memory to another's. This module has their pure parts.

The receiver drives a transfer. The sender offers frames under a name. The receiver fetches them into its own memory,
asks for missing frames and verifies each frame's hash in place. Only the receiver knows which frames it has. So it
resumes a transfer by asking for the rest, from the same peer or another, and the sender keeps no state. Names, lengths
and hashes come over the authenticated control channel, and so does the receiver's message that it holds all frames.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckpt.errors import AgentError, DamagedData
from ckpt.types import FRAME_BYTES_MAX, FRAMES_MAX

STREAM_FRAMES = 512  # the most frames of one stream, which asks for all of them at once
WRONG_MAX = 3  # a transfer fails when one frame has arrived this often with a wrong hash

U64 = npt.NDArray[np.uint64]
_COUNT = struct.Struct("<4sI")
_MAGIC = b"CKFR"


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of a transfer, by number: offset in this side's memory, length (both in bytes), and xxh3-128 hash.
    `hashes`: shape (n, 2), high half first. Make it by `from_columns` or `decode`, which check the values."""

    offsets: U64
    lengths: U64
    hashes: U64

    def __len__(self) -> int:
        return len(self.lengths)

    @staticmethod
    def from_columns(offsets: U64, lengths: U64, hashes: U64, room_bytes: int) -> Frames:
        """Frames in a memory of `room_bytes`. Errors: AgentError if a frame is empty, too long, reaches beyond the
        memory, or overlaps another one. An overlap would overwrite bytes that were already verified."""
        offsets, lengths = offsets.astype(np.uint64), lengths.astype(np.uint64)
        count = len(lengths)
        if count > FRAMES_MAX or offsets.shape != (count,) or hashes.shape != (count, 2):
            raise AgentError(f"a transfer of {count} frames is malformed or too large")
        room = np.uint64(room_bytes)
        if count and (lengths.min() == 0 or lengths.max() > min(FRAME_BYTES_MAX, room_bytes)):
            raise AgentError("a transfer has a frame that is empty or too long")
        if (offsets > room - lengths).any():
            raise AgentError("a transfer has a frame beyond the memory that it is for")
        order = np.argsort(offsets)
        starts, stops = offsets[order], (offsets + lengths)[order]
        if (starts[1:] < stops[:-1]).any():
            raise AgentError("a transfer has frames that overlap")
        return Frames(offsets, lengths, hashes.astype(np.uint64))

    def with_offsets(self, offsets: U64, room_bytes: int) -> Frames:
        """The same frames at other offsets. Errors: those of `from_columns`."""
        return Frames.from_columns(offsets, self.lengths, self.hashes, room_bytes)

    def byte_ranges(self) -> list[tuple[int, int]]:
        """(offset, length) of each frame, in bytes."""
        return list(zip(self.offsets.tolist(), self.lengths.tolist(), strict=True))

    def encode(self) -> bytes:
        """The frames as a blob of a message, 32 bytes per frame."""
        columns = (self.offsets, self.lengths, self.hashes)
        return _COUNT.pack(_MAGIC, len(self)) + b"".join(column.astype("<u8").tobytes() for column in columns)

    @staticmethod
    def decode(blob: bytes, room_bytes: int) -> Frames:
        """The frames that `encode` wrote. Errors: AgentError if the blob is malformed; those of `from_columns`."""
        if len(blob) < _COUNT.size:
            raise AgentError("a list of frames is cut short")
        magic, count = _COUNT.unpack_from(blob)
        if magic != _MAGIC or count > FRAMES_MAX or len(blob) != _COUNT.size + 32 * count:
            raise AgentError("a list of frames is malformed")
        flat = np.frombuffer(blob, "<u8", offset=_COUNT.size)
        return Frames.from_columns(flat[:count], flat[count : 2 * count], flat[2 * count :].reshape(-1, 2), room_bytes)


class Ledger:
    """The state of one transfer: which frames are in place, missing, or not requested yet. Not thread-safe."""

    def __init__(self, name: str, frames: Frames) -> None:
        self._name = name
        self._lengths = frames.lengths.tolist()
        self._expected_hashes = frames.hashes.tolist()
        self._missing = set(range(len(frames)))
        self._unrequested = collections.deque(range(len(frames)))
        self._wrong_counts: collections.Counter[int] = collections.Counter()

    @property
    def is_complete(self) -> bool:
        return not self._missing

    @property
    def missing(self) -> list[int]:
        return sorted(self._missing)

    @property
    def unrequested_count(self) -> int:
        """The number of missing frames that are not requested on any connection."""
        return len(self._unrequested)

    def take_frames(self, count: int, nbytes: int) -> list[int]:
        """The next frames to request: at most `count`, and no further one once `nbytes` are reached; at least one if
        any is waiting."""
        taken: list[int] = []
        while self._unrequested and len(taken) < count and (nbytes > 0 or not taken):
            taken.append(self._unrequested.popleft())
            nbytes -= self._lengths[taken[-1]]
        return taken

    def return_frames(self, numbers: Iterable[int]) -> None:
        """Puts back requested frames whose connection is gone. `take_frames` returns them first."""
        self._unrequested.extendleft(sorted((number for number in numbers if number in self._missing), reverse=True))

    def verify_frame(self, number: int, value: tuple[int, int]) -> bool:
        """Whether an arrived frame has the expected hash; `value`: its hash. If so, it counts as in place. Errors:
        DamagedData once the frame was wrong WRONG_MAX times."""
        if list(value) == self._expected_hashes[number]:
            self._missing.discard(number)
            return True
        self._wrong_counts[number] += 1
        if self._wrong_counts[number] >= WRONG_MAX:
            raise DamagedData(
                f"frame {number} of {self._name} arrived {WRONG_MAX} times with another hash than was announced"
            )
        return False

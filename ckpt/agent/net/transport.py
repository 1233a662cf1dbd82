"""The transport interface, which moves frames from one agent's memory to another's, and its pure parts.

The receiver drives a transfer. The sender offers frames under a name. The receiver fetches them into its own memory,
asks for missing frames and verifies each frame's hash in place. Only the receiver knows which frames it has. So it
resumes a transfer by asking for the rest, from the same peer or another, and the sender keeps no state. Names, lengths
and hashes come over the authenticated control channel, and so does the receiver's message that it holds all frames.
"""

from __future__ import annotations

import collections
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ckpt.errors import AgentError, DamagedData
from ckpt.ipc.addresses import Address
from ckpt.types import FRAME_BYTES_MAX, FRAMES_MAX

if TYPE_CHECKING:
    from ckpt.agent.net.handshake import Dialler, Session

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

    def __init__(self, name: str, frames: Frames, only: Iterable[int] | None = None) -> None:
        """`only`: the numbers of the wanted frames; all by default. Errors: AgentError if one is out of range."""
        self._name = name
        self._lengths = frames.lengths.tolist()
        self._expected_hashes = frames.hashes.tolist()
        self._missing = set(range(len(frames)) if only is None else only)
        if self._missing and not 0 <= min(self._missing) <= max(self._missing) < len(frames):
            raise AgentError(f"{name} has {len(frames)} frames, and others are wanted of it")
        self._unrequested = collections.deque(sorted(self._missing))
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


class Fetch(Protocol):
    """One transfer under way into this agent's memory."""

    @property
    def completion(self) -> Future[None]:
        """Settled once all frames are in place and verified, or with the error (AgentError, DamagedData). By then all
        connections are closed and nothing writes to the memory, so the memory may be used again."""
        ...

    def missing(self) -> list[int]:
        """The frames that are not in place and verified. The other frames stay valid if the transfer fails. Any
        thread."""
        ...

    def cancel(self) -> None:
        """Ends the transfer soon, with AgentError in `completion`; does nothing after its end. Does not wait. Any
        thread."""
        ...


class Transport(Protocol):
    """Moves frames between this agent and others. Thread-safe; only `close` blocks."""

    def offer(self, name: str, source: memoryview, frames: Frames, urgent: bool = False) -> None:
        """Lets agents of the run fetch these frames of `source`, which must not change until `withdraw` has settled.

        `urgent`: a start waits for the frames, so they are sent at normal priority and without the rate limit.
        Errors: AgentError if the name is taken or too long, or a frame is not in `source`."""
        ...

    def withdraw(self, name: str) -> Future[None]:
        """Ends an offer and cuts its readers off. Settled when nothing reads `source` any more; at once if the offer is
        unknown."""
        ...

    def fetch(
        self,
        peer: str,
        addresses: Sequence[Address],
        name: str,
        target: memoryview,
        frames: Frames,
        only: Iterable[int] | None = None,
        landed: Callable[[int], None] | None = None,
        urgent: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> Fetch:
        """Fetches the frames (or `only` these) of the offer `name` of agent `peer` into `target`.

        `addresses`: where the peer listens, best first. `landed`: called with the number of each frame that is in place
        and verified, on a thread of the transport. `urgent`: as in `offer`. `numbers`: the offer's number of each of
        `frames`, if `frames` is a part of the offer. Cut connections are reopened while frames keep arriving.
        Errors: AgentError."""
        ...

    def stream(
        self, peer: str, addresses: Sequence[Address], name: str, numbers: Sequence[int]
    ) -> Future[socket.socket]:
        """A connection that delivers the bytes of these frames of the offer `name` of agent `peer`, in this order, and
        nothing else. At most STREAM_FRAMES frames.

        It serves a rank that reads the frames into its own memory and verifies them while a start waits; so it is
        urgent. The connection may end early; then fetch the rest. The caller owns the socket, whose calls have the
        transport's time-out. The future fails with AgentError or OSError if there is no connection; a transport that
        does not use sockets always fails so. Errors: CkptError if the transport is closed."""
        ...

    def accept(self, sock: socket.socket, session: Session) -> None:
        """Takes over a data connection that another agent made to this agent's listener. Does not wait. A transport
        that does not use sockets closes it."""
        ...

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Limits the bytes per second in each direction, over all transfers that are not urgent. None: no limit."""
        ...

    def close(self) -> None:
        """Ends all transfers and offers, and waits for their threads."""
        ...


class MakeTransport(Protocol):
    """Makes an agent's transport."""

    def __call__(self, greet: Callable[[str, str], Dialler]) -> Transport:
        """`greet(name of an offer, peer)`: makes the handshake for a connection to that peer's listener."""
        ...

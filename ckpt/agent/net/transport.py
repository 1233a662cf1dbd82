"""Moving frames from one agent's memory to another's: what any transport has to do, and the pure part of doing it.

The receiver drives. Whoever has frames offers them under a name; whoever wants them fetches them into its own memory,
asks for what is missing, checks each frame's hash where it landed, and knows alone what it has. So a transfer is
resumed by asking on, from the same peer or another one, and the sender keeps no account of it. The names, lengths and
hashes come over the control channel, under its MAC; so does the receiver's word that it holds all of them.
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

STREAM_FRAMES = 512  # of one stream, which asks for all of them at once
WRONG_MAX = 3  # how often one frame may arrive with another hash

U64 = npt.NDArray[np.uint64]
_COUNT = struct.Struct("<4sI")
_MAGIC = b"CKFR"


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of a transfer, by number: where each lies in the memory of the side at hand (bytes from its start),
    how long it is, and its xxh3-128, shape (n, 2), high half first. Make it by `placed` or `decode`, which check."""

    offsets: U64
    lengths: U64
    hashes: U64

    def __len__(self) -> int:
        return len(self.lengths)

    @staticmethod
    def placed(offsets: U64, lengths: U64, hashes: U64, room_bytes: int) -> Frames:
        """Errors: AgentError where a frame is empty, too long, reaches beyond `room_bytes` or into another frame: what
        was checked in one frame must not be overwritten by the next."""
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

    def at(self, offsets: U64, room_bytes: int) -> Frames:
        """The same frames elsewhere. Errors: as `placed`."""
        return Frames.placed(offsets, self.lengths, self.hashes, room_bytes)

    def places(self) -> list[tuple[int, int]]:
        """Offset and length of each."""
        return list(zip(self.offsets.tolist(), self.lengths.tolist(), strict=True))

    def encode(self) -> bytes:
        """As a blob of a message: 32 bytes a frame."""
        columns = (self.offsets, self.lengths, self.hashes)
        return _COUNT.pack(_MAGIC, len(self)) + b"".join(column.astype("<u8").tobytes() for column in columns)

    @staticmethod
    def decode(blob: bytes, room_bytes: int) -> Frames:
        """Errors: AgentError for what is malformed, and as `placed`."""
        if len(blob) < _COUNT.size:
            raise AgentError("a list of frames is cut short")
        magic, count = _COUNT.unpack_from(blob)
        if magic != _MAGIC or count > FRAMES_MAX or len(blob) != _COUNT.size + 32 * count:
            raise AgentError("a list of frames is malformed")
        flat = np.frombuffer(blob, "<u8", offset=_COUNT.size)
        return Frames.placed(flat[:count], flat[count : 2 * count], flat[2 * count :].reshape(-1, 2), room_bytes)


class Ledger:
    """What one transfer has and lacks. Not thread-safe."""

    def __init__(self, name: str, frames: Frames, only: Iterable[int] | None = None) -> None:
        """`only`: the numbers of the frames that are wanted; all by default."""
        self._name = name
        self._lengths = frames.lengths.tolist()
        self._expected = frames.hashes.tolist()
        self._missing = set(range(len(frames)) if only is None else only)
        if self._missing and not 0 <= min(self._missing) <= max(self._missing) < len(frames):
            raise AgentError(f"{name} has {len(frames)} frames, and others are wanted of it")
        self._todo = collections.deque(sorted(self._missing))
        self._wrong: collections.Counter[int] = collections.Counter()

    @property
    def complete(self) -> bool:
        return not self._missing

    @property
    def missing(self) -> list[int]:
        return sorted(self._missing)

    @property
    def waiting(self) -> int:
        """How many frames nobody has been asked for."""
        return len(self._todo)

    def take(self, count: int, nbytes: int) -> list[int]:
        """What to ask for next: up to so many frames, of so many bytes, or one."""
        taken: list[int] = []
        while self._todo and len(taken) < count and (nbytes > 0 or not taken):
            taken.append(self._todo.popleft())
            nbytes -= self._lengths[taken[-1]]
        return taken

    def give_back(self, numbers: Iterable[int]) -> None:
        """They were asked for on a connection that is gone; they come first next time."""
        self._todo.extendleft(sorted((number for number in numbers if number in self._missing), reverse=True))

    def landed(self, number: int, value: tuple[int, int]) -> bool:
        """Whether the frame that has arrived is the right one. Errors: DamagedData when it was wrong too often."""
        if list(value) == self._expected[number]:
            self._missing.discard(number)
            return True
        self._wrong[number] += 1
        if self._wrong[number] >= WRONG_MAX:
            raise DamagedData(
                f"frame {number} of {self._name} arrived {WRONG_MAX} times with another hash than was announced"
            )
        return False


class Fetch(Protocol):
    """One transfer under way into this agent's memory."""

    @property
    def done(self) -> Future[None]:
        """Settled once all frames are in place and checked, or with what went wrong (AgentError, DamagedData). By then
        nothing writes to the memory any more, and every connection that did is closed: it may be used again."""
        ...

    def missing(self) -> list[int]:
        """The frames that are not in place and checked; the others stay good when the transfer fails. Any thread."""
        ...

    def cancel(self) -> None:
        """Ends it soon, with AgentError in `done`; does nothing after its end. Does not wait. Any thread."""
        ...


class Transport(Protocol):
    """Thread-safe; only `close` waits for anything."""

    def offer(self, name: str, source: memoryview, frames: Frames, urgent: bool = False) -> None:
        """From here on agents of the run may fetch these frames of `source`, which must not change. `urgent`: a start
        waits for them: at normal priority, and outside the rate.
        Errors: AgentError where the name is taken or too long, or a frame is not in `source`."""
        ...

    def withdraw(self, name: str) -> Future[None]:
        """Ends an offer and cuts off who reads it; settled when nobody reads it any more. At once if there is none."""
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
        """Brings the frames (or `only` these) of the offer `name` of the agent `peer` into `target`. `addresses`: where
        that listens, best first. `landed`: told of each that is in place and checked, on a thread of the transport.
        `urgent`: as of an offer. `numbers`: what the offer calls each of `frames`, where these are not all that it
        has. Cut connections are made anew as long as frames keep arriving. Errors: AgentError."""
        ...

    def stream(
        self, peer: str, addresses: Sequence[Address], name: str, numbers: Sequence[int]
    ) -> Future[socket.socket]:
        """A connection from which come the bytes of these frames of the offer `name` of the agent `peer`, in this
        order, and nothing else: for who reads them into memory of his own, and checks them. A start waits for them. It
        may end before they are all there; then the rest is fetched. At most STREAM_FRAMES. Whoever waits owns the
        socket; a call on it waits no longer than the transport's own. AgentError or OSError in the future where there
        is none to be had; a transport that moves bytes by other ways has none. Errors: CkptError once it is closed."""
        ...

    def accept(self, sock: socket.socket, session: Session) -> None:
        """Another agent's transport has connected to this agent's listener, for a transfer. Takes over the socket: one
        that moves frames by other ways closes it. Does not wait."""
        ...

    def set_rate(self, bytes_per_s: float | None) -> None:
        """How many bytes a second may leave this agent, and as many reach it, in all transfers together but urgent
        ones. None: no limit."""
        ...

    def close(self) -> None:
        """Ends everything and waits for it."""
        ...


class MakeTransport(Protocol):
    """Makes an agent's transport."""

    def __call__(self, greet: Callable[[str, str], Dialler]) -> Transport:
        """`greet(name of an offer, peer)`: how a connection to that agent's listener begins, if it needs one."""
        ...

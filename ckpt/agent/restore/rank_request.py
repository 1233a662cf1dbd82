"""A rank's request in a restore session, and which frames are awaited from which source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class StreamPeer(Protocol):
    """A local rank's connection. Sending to a rank that is gone does nothing."""

    def send(self, fields: dict[str, Any], fds: Iterable[int] = ..., blobs: Sequence[bytes] = ...) -> None: ...


class Origin(NamedTuple):
    """Where a frame came from. `number`: of its source, in the order of preference. `level`: what the rank is told.
    `cell`: its place in the window, if the rank reads it there."""

    number: int
    level: str
    cell: int | None = None


@dataclass(eq=False, slots=True)
class RankRequest:
    """One rank's request. `pending_frames`: not acknowledged as good. `contiguous_frames`: those that go into a tensor
    as one run and no other rank wanted when the ranks began. `has_begun`: it no longer waits for the other ranks.
    `given_frames`: those given to the rank and not acknowledged. `shown_regions`: numbers of the arenas that the rank
    was shown."""

    receiver: StreamPeer
    pending_frames: set[int]
    contiguous_frames: set[int]
    has_begun: bool = False
    given_frames: dict[int, Origin] = field(default_factory=dict)
    shown_regions: set[int] = field(default_factory=set)
    bytes_by_level: dict[str, int] = field(default_factory=dict)


class AwaitedFrames:
    """Which frames are awaited, each from one source, and by which ranks."""

    def __init__(self) -> None:
        self._by_frame: dict[int, tuple[int, set[RankRequest]]] = {}  # number of the source, and who waits
        self._next_sources: dict[int, int] = {}  # frame -> number of the first source that has not failed to give it

    def join(self, frames: set[int], who: RankRequest) -> set[int]:
        """Has a rank wait for those of the frames that are awaited. Returns the others."""
        rest = frames - self._by_frame.keys()
        for frame in frames - rest:
            self._by_frame[frame][1].add(who)
        return rest

    def add(self, frames: Iterable[int], number: int, who: RankRequest) -> None:
        self._by_frame.update((frame, (number, {who})) for frame in frames)

    def possible_frames(self, frames: set[int], number: int) -> set[int]:
        """Those of the frames that source `number` has not failed to give."""
        return {frame for frame in frames if self._next_sources.get(frame, 0) <= number}

    def skip_source(self, frame: int, number: int) -> None:
        """The frame comes from a source after `number` from now on."""
        self._next_sources[frame] = max(self._next_sources.get(frame, 0), number + 1)

    def of_source(self, number: int, frames: Iterable[int]) -> list[int]:
        """Those of the frames that are awaited from source `number`."""
        return [frame for frame in frames if frame in self._by_frame and self._by_frame[frame][0] == number]

    def take(self, number: int, frames: Iterable[int]) -> dict[RankRequest, set[int]]:
        """Ends the wait for those of the frames that are awaited from source `number`. Returns the frames by who waited
        for them."""
        found: dict[RankRequest, set[int]] = {}
        for frame in self.of_source(number, dict.fromkeys(frames)):
            for who in self._by_frame.pop(frame)[1]:
                found.setdefault(who, set()).add(frame)
        return found

    def drop(self, who: RankRequest) -> None:
        for _, waiting in self._by_frame.values():
            waiting.discard(who)

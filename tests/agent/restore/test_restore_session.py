"""Frames on their way to the ranks: bounded memory, every frame read once, every failure told, no wait without end."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ckpt.agent.restore.restore_session import RestoreSession
from ckpt.agent.restore.sources import open_session
from ckpt.errors import AgentError, DamagedData, NotFound, StorageError, TransientError
from ckpt.format.frames import frame_hash
from ckpt.format.manifest import FRAME, PLACE, Manifest
from ckpt.ipc.file_list import FileList
from ckpt.ipc.messages import Message
from ckpt.types import Epoch, Identity, Version
from tests.agent.nodes.staged import Turned
from tests.agent.receiver import Rank

FRAME_BYTES = 1000
IDENTITY = Identity(Epoch(1, "0" * 16), Version(5))


def raw(frame: int) -> bytes:
    return bytes([frame % 251]) * FRAME_BYTES


def manifest(count: int) -> Manifest:
    frames = np.zeros(count, FRAME)
    for frame in range(count):
        frames[frame] = (*frame_hash(raw(frame)), FRAME_BYTES, 0)
    return Manifest((), (), frames, np.zeros(0, FRAME), ("rank=0",))


@dataclass
class Reader:
    """A store's reader. `broken`: frames that it does not have right."""

    record: Any
    broken: set[int] = field(default_factory=set)
    reads: list[int] = field(default_factory=list)

    def read(self, frames: Any, deliver: Any, out: Any, failed: Any) -> None:
        for frame in frames:
            self.reads.append(frame)
            if frame in self.broken:
                failed(frame, StorageError("gone"))
                continue
            out(frame)[:] = raw(frame)
            deliver(frame)


@dataclass
class Source:
    manifest: Manifest


@dataclass
class Failing:
    """A store whose record cannot be opened."""

    error: Exception

    @property
    def record(self) -> Any:
        raise self.error


class Full(Rank):
    """A rank that cannot be given memory."""

    def send(self, fields: dict[str, Any], fds: Any = ()) -> None:
        if fields["t"] == "frame-region":
            raise OSError(errno.ENOMEM, "no memory")
        super().send(fields, fds)


class Loop(Turned):
    """The agent's main thread, and the restore that it serves."""

    def __init__(self) -> None:
        super().__init__()
        self.timers: list[Callable[[], None]] = []
        self.restore: RestoreSession
        self.ranks: list[Rank] = []

    def call_later(self, delay_s: float, what: Callable[[], None]) -> None:
        self.timers.append(what)

    def rank(self, kind: type[Rank] = Rank) -> Rank:
        self.ranks.append(kind(self.post, self))
        return self.ranks[-1]

    def ended(self, rank: Rank) -> dict[str, Any]:
        """What the rank was told in the end."""
        self.until(lambda: rank.outcome is not None)
        assert rank.outcome is not None
        return rank.outcome

    def begin(
        self, count: int, reader: Reader | Failing | None, world: int = 1, window_bytes: int = 1 << 20
    ) -> RestoreSession:
        self.restore = open_session(
            *(IDENTITY, manifest(count), world, None, (lambda: reader) if reader else None, self.workers),
            *(cast(Any, self), window_bytes),
        )
        return self.restore


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.restore.close()
    made.close()
    for rank in made.ranks:
        rank.close()


def test_all_of_a_store_passes_through_a_bounded_window_and_is_read_once_for_all_ranks(loop: Loop) -> None:
    reader = Reader(Source(manifest(100)))
    restore = loop.begin(100, reader, world=3, window_bytes=3 * 4096)
    ranks = [loop.rank() for _ in range(3)]
    for rank in ranks:
        restore.request(rank, range(100))
    loop.until(lambda: all(rank.outcome for rank in ranks))
    for rank in ranks:
        assert rank.got == {frame: raw(frame) for frame in range(100)}
        assert rank.outcome == {"t": "fetch-ended", "ok": True, "message": "", "sources": {"store": 100 * FRAME_BYTES}}
        assert [arena.size_bytes for arena in rank.regions.values()] == [3 * 4096]
    assert sorted(reader.reads) == list(range(100))


def test_a_rank_that_comes_alone_is_served_when_the_others_do_not_come(loop: Loop) -> None:
    restore = loop.begin(10, Reader(Source(manifest(10))), world=2)
    rank = loop.rank()
    restore.request(rank, [1, 2])
    assert rank.outcome is None
    loop.timers.pop()()
    assert loop.ended(rank)["ok"]
    assert set(rank.got) == {1, 2}


def test_a_rank_is_served_in_time_though_the_one_that_came_before_it_is_gone(loop: Loop) -> None:
    restore = loop.begin(10, Reader(Source(manifest(10))), world=3)
    gone, rank = loop.rank(), loop.rank()
    for each in (gone, rank):
        restore.request(each, [1, 2])
    restore.drop_request(gone)
    for what in list(loop.timers):
        what()
    assert loop.ended(rank)["ok"]
    assert set(rank.got) == {1, 2}


def test_a_frame_that_no_source_has_ends_the_fetch_with_its_name(loop: Loop) -> None:
    restore = loop.begin(10, Reader(Source(manifest(10)), broken={3}))
    rank = loop.rank()
    restore.request(rank, range(10))
    outcome = loop.ended(rank)
    assert not outcome["ok"]
    assert "frame 3" in outcome["message"]


def test_a_frame_that_arrives_damaged_from_the_last_source_ends_the_fetch(loop: Loop) -> None:
    restore = loop.begin(10, Reader(Source(manifest(10))))
    rank = loop.rank()
    rank.deaf = True
    restore.request(rank, [4])
    loop.until(lambda: bool(rank.regions) and loop.is_idle)
    restore.acknowledge_frames(rank, [], [4])
    assert rank.outcome is not None
    assert not rank.outcome["ok"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TransientError("503 Slow Down"), "storage"),
        (NotFound("there is no such record"), "missing"),
        (DamagedData("no record"), "damaged"),
        (MemoryError(), "agent"),
    ],
    ids=repr,
)
def test_only_what_is_damaged_is_told_as_damaged_where_a_record_cannot_be_opened(
    error: Exception, kind: str, loop: Loop
) -> None:
    """A checkpoint whose store does not answer now is not struck out for it."""
    restore = loop.begin(10, Failing(error))
    rank = loop.rank()
    restore.request(rank, [4])
    outcome = loop.ended(rank)
    assert (outcome["ok"], outcome["kind"]) == (False, kind)


def test_a_mistake_of_the_agents_own_is_not_told_as_damage(loop: Loop) -> None:
    restore = loop.begin(10, Reader(Source(manifest(10))))
    rank = loop.rank(Full)
    restore.request(rank, [4])
    outcome = loop.ended(rank)
    assert (outcome["ok"], outcome["kind"]) == (False, "agent")


def test_the_same_checkpoint_under_another_numbering_is_found_by_hash(loop: Loop) -> None:
    """What an agent put together anew may number its frames otherwise than the record."""
    theirs = manifest(10)
    reordered = Manifest((), (), theirs.frames[::-1].copy(), theirs.extents, theirs.coordinates)

    class Reordered(Reader):
        def read(self, frames: Any, deliver: Any, out: Any, failed: Any) -> None:
            for frame in frames:
                out(frame)[:] = raw(9 - frame)
                deliver(frame)

    restore = loop.begin(10, Reordered(Source(reordered)))
    rank = loop.rank()
    restore.request(rank, range(10))
    loop.ended(rank)
    assert rank.got == {frame: raw(frame) for frame in range(10)}


def test_a_frame_that_does_not_exist_is_refused(loop: Loop) -> None:
    restore = loop.begin(10, Reader(Source(manifest(10))))
    for frames in ([10], [-1], [0, 1 << 31]):
        with pytest.raises(AgentError):
            restore.request(loop.rank(), frames)


def test_a_rank_that_dies_does_not_hold_up_the_others(loop: Loop) -> None:
    restore = loop.begin(50, Reader(Source(manifest(50))), world=2, window_bytes=4096)
    dead, alive = loop.rank(), loop.rank()
    dead.deaf = True
    for rank in (dead, alive):
        restore.request(rank, range(50))
    loop.until(lambda: bool(dead.regions))
    restore.drop_request(dead)
    loop.ended(alive)
    assert len(alive.got) == 50
    assert dead.outcome is None


def test_closing_ends_a_read_that_waits_for_room(loop: Loop) -> None:
    restore = loop.begin(50, Reader(Source(manifest(50))), window_bytes=4096)
    rank = loop.rank()
    rank.deaf = True
    restore.request(rank, range(50))
    loop.until(lambda: bool(rank.regions))
    restore.close()  # the fixture's end of the lanes would hang otherwise


class Filed(Reader):
    """Whose record says where frames lie: all in one file, one behind the other."""

    def __init__(self, count: int) -> None:
        places = np.zeros(count, PLACE)
        places["offset"], places["length"] = np.arange(count) * FRAME_BYTES, FRAME_BYTES
        super().__init__(SimpleNamespace(manifest=manifest(count), places=places, packs=(("data/p.pack", 1 << 20),)))


class Reading(Rank):
    """A rank that reads files by itself. `wrong`: frames that it finds wrong there."""

    def __init__(self, *given: Any, wrong: Collection[int] = ()) -> None:
        super().__init__(*given)
        self.wrong, self.listed = wrong, list[FileList]()

    def send(self, fields: dict[str, Any], fds: Any = (), blobs: Any = ()) -> None:
        if fields["t"] != "frame-files":
            super().send(fields, fds)
            return
        self.listed.append(FileList.decode(Message(fields, [], list(blobs))))
        frames = self.listed[-1].rows["frame"].tolist()
        bad = [frame for frame in frames if frame in self.wrong]
        if not self.deaf:
            self._post(lambda: self.owner.restore.acknowledge_frames(self, [f for f in frames if f not in bad], bad))


def of_folder(loop: Loop, reader: Any, world: int = 1) -> RestoreSession:
    loop.restore = open_session(
        *(IDENTITY, manifest(10), world, None, lambda: reader, loop.workers, cast(Any, loop), 1 << 20),
        folder="/store",
    )
    return loop.restore


def reading(loop: Loop, wrong: Collection[int] = ()) -> Reading:
    rank = Reading(loop.post, loop, wrong=wrong)
    loop.ranks.append(rank)
    return rank


def test_ranks_read_a_folder_by_themselves_and_the_agent_reads_nothing(loop: Loop) -> None:
    reader = Filed(10)
    restore = of_folder(loop, reader, world=2)
    ranks = [reading(loop), reading(loop)]
    for rank in ranks:
        restore.request(rank, range(2, 10))
    loop.until(lambda: all(rank.outcome for rank in ranks))
    assert reader.reads == []
    for rank in ranks:
        assert rank.outcome == {"t": "fetch-ended", "ok": True, "message": "", "sources": {"store": 8 * FRAME_BYTES}}
        (listed,) = rank.listed
        assert (listed.folder, listed.names) == ("/store", ["data/p.pack"])
        assert [row[:5] for row in listed.rows.tolist()] == [
            (frame, 0, frame * FRAME_BYTES, FRAME_BYTES, FRAME_BYTES) for frame in range(2, 10)
        ]


def test_what_a_rank_cannot_read_in_the_folder_the_agent_brings(loop: Loop) -> None:
    reader = Filed(10)
    restore = of_folder(loop, reader)
    rank = reading(loop, wrong={3, 7})
    restore.request(rank, range(10))
    loop.ended(rank)
    assert rank.outcome == {"t": "fetch-ended", "ok": True, "message": "", "sources": {"store": 10 * FRAME_BYTES}}
    assert rank.got == {frame: raw(frame) for frame in (3, 7)}
    assert reader.reads == [3, 7]


def test_what_the_agent_finds_damaged_in_the_folder_too_ends_the_fetch(loop: Loop) -> None:
    reader = Filed(10)
    reader.broken = {3}
    restore = of_folder(loop, reader)
    rank = reading(loop, wrong={3})
    restore.request(rank, range(10))
    outcome = loop.ended(rank)
    assert not outcome["ok"]
    assert "frame 3" in outcome["message"]


def test_a_rank_that_is_gone_is_told_of_no_file(loop: Loop) -> None:
    restore = of_folder(loop, Filed(10))
    rank, other = reading(loop), reading(loop)
    restore.request(rank, range(10))
    restore.drop_request(rank)
    restore.request(other, range(10))
    loop.ended(other)
    assert rank.listed == []
    assert other.outcome["ok"]

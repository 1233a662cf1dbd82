"""An arena says what it holds, only once it holds it; a header that is not sound is no snapshot."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from ckpt.errors import AgentError, DamagedData
from ckpt.ipc.arena import DATA_OFFSET, PAGE, Arena, arena_bytes
from ckpt.ipc.control_page import (
    ATTEMPT_MAX,
    SLOTS_MAX,
    STEP_MAX,
    SUB_MAX,
    ControlPage,
    ControlWord,
    RankPlace,
    WordKind,
)
from ckpt.types import Epoch, Identity, Version

IDENTITY = Identity(Epoch(7, "0123456789abcdef"), Version(1200, 3))


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(arena_bytes(data_bytes=10_000, frames=3, declaration_bytes=500, values_bytes=100))
    yield made
    made.close()


def fill(arena: Arena) -> None:
    arena.begin_fill()
    arena.data(0, 10_000)[:] = bytes(range(250)) * 40
    place = arena.write_declaration(10_000, b"d" * 500)
    arena.seal(IDENTITY, 2, 4, 10_000, place, b"shared", b"own", b"")


def test_what_is_sealed_is_read_back_by_another_mapping(arena: Arena) -> None:
    fill(arena)
    other = Arena.adopt(os.dup(arena.fd))
    header = other.header()
    assert (header.identity, header.rank, header.world, header.data_bytes) == (IDENTITY, 2, 4, 10_000)
    assert bytes(other.part(header.declaration)) == b"d" * 500
    assert (bytes(other.part(header.shared)), bytes(other.part(header.own))) == (b"shared", b"own")
    assert other.hashes() is None
    hashes = np.arange(6, dtype=np.uint64).reshape(3, 2)
    other.write_hashes(header, hashes)
    assert np.array_equal(arena.hashes(), hashes)  # type: ignore[arg-type]
    assert bytes(arena.data(0, 10_000)) == bytes(range(250)) * 40
    other.close()


def test_a_fill_that_has_begun_and_not_ended_holds_nothing(arena: Arena) -> None:
    fill(arena)
    arena.write_hashes(arena.header(), np.zeros((3, 2), dtype=np.uint64))
    arena.begin_fill()
    with pytest.raises(DamagedData):
        arena.header()
    assert arena.hashes() is None


def test_that_it_is_replicated_is_said_until_it_is_filled_again_and_not_to_other_nodes(arena: Arena) -> None:
    fill(arena)
    page = arena.header_page()
    arena.mark_replicated()
    other = Arena.adopt(os.dup(arena.fd))
    assert other.is_replicated
    assert other.header() == arena.header()
    assert other.header_page() == page
    other.close()
    fill(arena)
    assert not arena.is_replicated


def test_what_is_closed_goes_with_the_last_view_of_it_though_the_arena_is_still_named(arena: Arena) -> None:
    def mappings() -> int:
        return [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")].count(memfd)

    fill(arena)
    memfd = os.path.realpath(f"/proc/self/fd/{arena.fd}")
    before = mappings()
    other = Arena.adopt(os.dup(arena.fd))
    view = other.data(0, 10_000)
    other.close()
    assert bytes(view[:250]) == bytes(range(250))
    del view
    assert mappings() == before
    other.close()


def test_every_flipped_bit_of_a_header_is_noticed(arena: Arena) -> None:
    fill(arena)
    size = struct.calcsize("<8sQ16sQIIIQ8Q") + 16
    for at in range(size):
        arena.view[at] ^= 1 << at % 8
        with pytest.raises(DamagedData):
            arena.header()
        arena.view[at] ^= 1 << at % 8
    assert arena.header().identity == IDENTITY


def test_warming_keeps_the_content(arena: Arena) -> None:
    fill(arena)
    before = bytes(arena.view)
    arena.warm()
    assert bytes(arena.view) == before


def test_warming_can_be_held_up_between_its_parts(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.ipc.arena.WARM_BYTES", PAGE)
    asked: list[int] = []
    arena.warm(lambda: asked.append(len(asked)))
    assert len(asked) == -(-len(arena.view) // PAGE) > 1


def test_an_arena_cannot_be_shrunk_and_only_such_a_one_is_adopted(arena: Arena) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, PAGE)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    with pytest.raises(AgentError, match="sealed"):
        Arena.adopt(loose)


def test_values_that_do_not_fit_are_refused_and_leave_it_unsealed(arena: Arena) -> None:
    arena.begin_fill()
    place = arena.write_declaration(10_000, b"d")
    room = arena.values_room(place, frames=3)
    with pytest.raises(AgentError, match="no room"):
        arena.seal(IDENTITY, 0, 1, 10_000, place, bytes(room + PAGE), b"", b"")
    with pytest.raises(DamagedData):
        arena.header()
    arena.seal(IDENTITY, 0, 1, 10_000, place, bytes(room - 64), b"", b"")
    assert arena.header().data_bytes == 10_000
    assert DATA_OFFSET == PAGE


def test_a_word_survives_the_control_page() -> None:
    page = ControlPage.create(3)
    other = ControlPage(os.dup(page.fd))
    poll = ControlWord(9, 3, WordKind.HOLD, 500, SUB_MAX)
    last = ControlWord(ATTEMPT_MAX, SLOTS_MAX - 1, WordKind.HOLD, STEP_MAX)
    for word in (first := ControlWord(1, 0, WordKind.TAKE, 0), last, poll):
        page.announce(word.slot, word)
    assert other.appointments() == [first, poll, last], "each slot has its own"
    page.announce(3, None)
    assert other.appointments() == [first, last]
    page.publish_leave(ATTEMPT_MAX)
    assert (other.leave_attempt(), other.appointments()) == (ATTEMPT_MAX, [first, last])
    other.publish_step(2, 77)
    assert [page.entered_step(rank) for rank in range(3)] == [0, 0, 77]
    other.publish_step(1, STEP_MAX, 2 * SUB_MAX)
    assert [page.entered_step(1), page.poll_count(1), page.poll_count(2)] == [STEP_MAX, SUB_MAX, 0]
    for slot, wrong in (
        (0, ControlWord(0, 0, WordKind.TAKE, 1)),
        (0, ControlWord(1, 0, WordKind.TAKE, 1, SUB_MAX + 1)),
        (0, ControlWord(1, 1, WordKind.TAKE, 1)),
        (SLOTS_MAX, ControlWord(1, SLOTS_MAX, WordKind.TAKE, 1)),
        (-1, None),
    ):
        with pytest.raises(AgentError):
            page.announce(slot, wrong)
    page.close()
    other.close()


def test_a_rank_knows_whether_an_appointment_is_yet_to_come() -> None:
    end = ControlWord(1, 0, WordKind.TAKE, 7)
    places = {(6, 9): RankPlace.EARLY, (7, 0): RankPlace.DUE, (7, 1): RankPlace.LATE, (8, 0): RankPlace.LATE}
    assert {at: end.place_for(*at) for at in places} == places
    poll = ControlWord.unpack(ControlWord(1, 0, WordKind.TAKE, 70_000, 3).pack())
    assert poll is not None
    assert poll.step != 70_000, "told modulo 2^16 only"
    places = {
        (69_999, 3): RankPlace.LATE,
        (70_000, 0): RankPlace.EARLY,
        (70_000, 2): RankPlace.EARLY,
        (70_000, 3): RankPlace.DUE,
        (70_000, 4): RankPlace.LATE,
        (70_001, 0): RankPlace.LATE,
    }
    assert {at: poll.place_for(*at) for at in places} == places

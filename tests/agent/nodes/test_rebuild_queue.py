"""What is made again at a node takes no more memory than there is, whoever asks for how much at once; and everybody who
has asked hears of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import pytest

from ckpt.agent.replication.parity_worker import SCRATCH_BYTES
from ckpt.agent.replication.rebuild_queue import RebuildQueue, RebuildWork
from ckpt.agent.replication.replica_store import ReplicaStore
from ckpt.agent.runtime.workers import Lane
from ckpt.placement.placement import Parity
from tests.agent.nodes.fleet import Fleet
from tests.agent.nodes.staged import identity

STEP, NEXT = identity(5), identity(10)
LOST = 8


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """One node has all ranks but three, and is lost."""
    made = Fleet({"a": [0], "b": [1], "c": [2], "lost": range(3, 3 + LOST)}, Parity(2, 2))
    assert made.protect(STEP) == ""
    made.gone = {"lost"}
    yield made
    made.close()


def bound(fleet: Fleet, made: float) -> None:
    """Each node has memory for the way to one snapshot, and for so many made again."""
    size = max(arena.size_bytes for arena in fleet.arenas[STEP].values())
    room = SCRATCH_BYTES + int(made * size)
    copies = fleet.copies
    fleet.free_bytes = lambda name: room - sum(arena.size_bytes for arena in copies[name].kept.arenas_by_key.values())


def test_of_many_ranks_that_are_asked_for_at_once_no_more_are_made_than_there_is_memory_for(fleet: Fleet) -> None:
    bound(fleet, 1.5)
    made, error = fleet.rebuild(STEP)
    assert "there is no memory" in error
    assert Counter(made.values()) == {"a": 1, "b": 1, "c": 1}, "none is refused that there is memory for, either"
    fleet.check(STEP, made)


def test_parity_takes_no_memory_that_what_is_being_made_again_will_take(fleet: Fleet) -> None:
    fleet.gone, size, filled = set(), 1 << 20, 1 << 10
    for each in fleet.parities.values():
        assert each._rebuild_queue.enqueue(RebuildWork(size, 0, False, "", lambda: filled)).is_settled
    parity = max(sum(name.stripe.length for name in copies.kept.chunks_by_name) for copies in fleet.copies.values())
    room = parity + size - filled + SCRATCH_BYTES
    fleet.free_bytes = lambda name: room - 1
    assert "of memory are missing for parity" in fleet.protect(NEXT, STEP)
    fleet.free_bytes = lambda name: room
    assert fleet.protect(NEXT, STEP) == ""


def test_who_waits_for_it_no_more_has_nothing_made_any_more(fleet: Fleet) -> None:
    bound(fleet, LOST + 0.5)
    begun, run = list[Lane](), fleet.turned.workers.run

    def noted(lane: Lane, work: Any, then: Any) -> None:
        begun.append(lane)
        run(lane, work, then)

    fleet.turned.workers.run = noted  # type: ignore[method-assign]
    _, rebuilding = fleet.begin_rebuild(STEP)
    queues = [each._rebuild_queue for each in fleet.parities.values()]
    fleet.turned.until(lambda: sum(len(queue._queued_work) for queue in queues) == LOST - 3)
    rebuilding.cancel()
    assert rebuilding.is_settled
    fleet.turned.until(lambda: not any(queue._queued_work or queue._running_work for queue in queues))
    assert begun.count(Lane.PARITY) == 3, "one at each node"


class Maker:
    """A node whose memory is counted to the byte: what is under way takes it piece by piece."""

    def __init__(self, room: int) -> None:
        self.room, self.kept = room, 0
        self.under_way: dict[int, int] = {}  # by number: bytes that are filled
        self.ended: dict[int, str] = {}
        self.works: dict[int, RebuildWork] = {}
        copies = ReplicaStore(cast(Any, None), lambda what: what())
        copies.arenas.set_limit(lambda: self.room - self.kept)
        self.making = RebuildQueue(copies.arenas, self.free)

    @property
    def filled(self) -> int:
        return sum(self.under_way.values())

    def free(self) -> int:
        return self.room - self.kept - self.filled

    def want(self, number: int, size: int, leave: int, urgent: bool) -> None:
        def begin() -> None:
            self.under_way[number] = 0
            promised = sum(self.works[each].size + SCRATCH_BYTES for each in self.under_way)
            assert self.kept + promised <= self.room, "all that is under way fits, whatever comes"

        def refuse(why: str) -> None:
            assert number not in self.ended
            assert not self.under_way or "nobody" in why, "it could have waited"
            self.ended[number] = why

        work = RebuildWork(size, leave, urgent, str(number % 3), lambda: self.under_way[number])
        self.works[number] = work
        work.turn.when_settled(lambda: refuse(str(work.turn.error)) if work.turn.error else begin())
        self.making.enqueue(work)

    def end(self, number: int, succeeds: bool) -> None:
        del self.under_way[number]
        self.kept += self.works[number].size if succeeds else 0
        self.ended[number] = ""
        self.making.end_work(self.works[number])


def test_whatever_is_asked_for_in_whatever_order_fits_and_everybody_hears_of_it_once(seed: int) -> None:
    rng = random.Random(seed)
    refused = waited = 0
    for _ in range(300):
        maker, count = Maker(rng.randrange(1, 8 * SCRATCH_BYTES)), rng.randrange(1, 12)
        for number in range(count):
            size, leave = rng.randrange(1, 2 * SCRATCH_BYTES), rng.choice([0, 0, SCRATCH_BYTES])
            maker.want(number, size, leave, urgent=rng.random() < 0.3)
            waited += number not in maker.ended and number not in maker.under_way
        while maker.under_way:
            number = rng.choice(list(maker.under_way))
            left = maker.works[number].size - maker.under_way[number]
            match rng.randrange(4):
                case 0:
                    maker.end(number, succeeds=rng.random() < 0.8)
                case 1:
                    reader = str(rng.randrange(3))
                    maker.making.refuse_queued(reader, "nobody waits for it")
                case _:
                    maker.under_way[number] += rng.randrange(left + 1)
            assert maker.making.unallocated_bytes <= maker.free()
        assert maker.ended.keys() == set(range(count)), "nobody waits for nothing"
        refused += any("no memory" in why for why in maker.ended.values())
    assert refused
    assert waited


def test_what_a_start_waits_for_comes_first(seed: int) -> None:
    maker = Maker(SCRATCH_BYTES + 100)
    for number, urgent in enumerate((False, False, False, True, True)):
        maker.want(number, 10, 0, urgent)
    order = []
    while maker.under_way:
        (number,) = maker.under_way
        order.append(number)
        maker.end(number, succeeds=True)
    assert order == [0, 3, 4, 1, 2]

"""When a slot is ready: for the plan of what is offered now, once its arena is bound, and said after that."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from ckpt.events import Event, Events
from ckpt.format.declaration import encode_layout, encode_share
from ckpt.ipc.arena import Arena, arena_bytes
from ckpt.ipc.messages import Message
from ckpt.layout.division import whole_share
from ckpt.threads import Tasks
from ckpt.trainer.link.slots import Plan, RankSlot, Slots, StateOffer
from ckpt.types import Epoch, Identity, Version
from tests.trainer.snapshots import FRAME_BYTES, walk_of


def offer_of(named: Mapping[str, torch.Tensor]) -> StateOffer:
    return StateOffer(walk_of(named).layout, b"", Version(1), 100)


ONE, TWO = offer_of({"w": torch.zeros(300)}), offer_of({"w": torch.zeros(300), "more": torch.zeros(3)})


class Made:
    """What a link would make, and an agent, which plans for ONE and gives slot 0. `bound`: for which divisions, in that
    order. `unbound`: which memory, in that order. `told`: the agent."""

    def __init__(self) -> None:
        self.seen: list[Event] = []
        self.bound: list[str] = []
        self.unbound: list[object] = []
        self.told: list[tuple[str, Any]] = []
        self.tasks = Tasks("slots", pool_size=1)
        self.slots = Slots(Events(self.seen.append), self.tasks, self.bind, self.unbind, self.tell)
        self.slots.training_running.set()
        self.arena = Arena.create(arena_bytes(1 << 16, 4, 1 << 12, 100))

    def bind(self, number: int, plan: Plan, data: memoryview) -> None:
        slot = self.slots.by_number[number]
        assert slot.plan is None, "it cannot be used before it is bound"
        assert not slot.hold(self), "nor by anybody else meanwhile"
        self.bound.append(plan.declaration.division)

    def unbind(self, number: int, view: memoryview) -> None:
        assert number == 0
        self.unbound.append(view.obj)

    def tell(self, kind: str, fields: dict[str, Any]) -> None:
        slot = self.slots.by_number[fields["slot"]]
        assert slot.hold(self), "it may be appointed at once"
        slot.release(self)
        self.told.append((kind, fields["division"]))

    def plan(self, division: str) -> None:
        fields = {"t": "staging-plan", "division": division, "frame_bytes": FRAME_BYTES}
        blobs = [encode_layout(ONE.layout), encode_share(whole_share(ONE.layout))]
        self.slots.on_staging_plan(Message(fields, [], blobs), 0, 1, "rank=0")

    def grant(self, division: str, arena: Arena | None = None) -> None:
        fds = [os.dup(arena.fd)] if arena is not None else []
        self.slots.on_grant_arena(Message({"t": "grant-arena", "slot": 0, "division": division}, fds))

    def take_back(self) -> None:
        self.slots.on_close_arena(Message({"t": "close-arena", "slot": 0}, [], []))

    def divide(self, division: str, arena: Arena | None = None) -> None:
        """All of it: the slot is warm afterwards, if it can be."""
        self.plan(division)
        self.grant(division, arena)
        self.settle()

    def settle(self) -> None:
        self.tasks.submit(lambda: None).result(60)

    def close(self) -> None:
        self.tasks.close()
        self.slots.close()
        self.arena.close()


@pytest.fixture
def made() -> Iterator[Made]:
    it = Made()
    yield it
    it.close()


def ready(made: Made) -> RankSlot:
    """Slot 0, which is warm."""
    made.slots.offer(ONE)
    made.divide("a", made.arena)
    return made.slots.by_number[0]


def test_a_slot_is_warm_once_its_arena_is_bound_for_the_plan_that_it_was_granted_for(made: Made) -> None:
    ready(made)
    assert (made.bound, made.told) == (["a"], [("arena-warm", "a")])
    slot = made.slots.by_number[0]
    assert slot.plan is not None
    assert slot.plan.offered_layout is ONE.layout
    made.divide("b")
    assert made.told == [("arena-warm", "a"), ("arena-warm", "b")]
    assert made.slots.by_number[0] is slot


def test_a_slot_that_is_granted_again_for_the_same_keeps_what_it_holds_by_now(made: Made) -> None:
    """Ranks of another node came back while this one's word that it is warm was on its way: it counts for the second
    grant, too, and what is staged then must not go when that arrives."""
    held = Identity(Epoch(1, "0" * 16), Version(5))
    made.slots.offer(ONE)
    for arena in (made.arena, None):
        made.divide("a", arena)
        if arena is not None:
            made.arena.seal(held, 0, 1, 1200, made.slots.by_number[0].declaration_place, b"", b"", b"")
    assert made.told == [("arena-warm", "a")] * 2
    assert made.arena.header().identity == held


def test_a_plan_for_a_structure_that_is_gone_makes_nothing_ready(made: Made) -> None:
    made.slots.offer(TWO)
    made.divide("a", made.arena)
    assert (made.bound, made.told) == ([], [])
    assert made.slots.by_number[0].plan is None


@pytest.mark.parametrize("how", ["another offer", "no agent"])
def test_what_was_warm_is_not_any_more(made: Made, how: str) -> None:
    ready(made)
    made.slots.offer(TWO) if how == "another offer" else made.slots.forget_plan()
    assert made.slots.by_number[0].plan is None
    made.grant("a")
    made.settle()
    assert made.told == [("arena-warm", "a")], "of a division that is over"


def test_an_offer_that_comes_while_an_arena_is_bound_leaves_it_unready(made: Made) -> None:
    made.slots.offer(ONE)
    bind = made.slots._bind

    def meanwhile(number: int, plan: Plan, data: memoryview) -> None:
        bind(number, plan, data)
        made.slots.offer(TWO)

    made.slots._bind = meanwhile
    made.divide("a", made.arena)
    assert (made.bound, made.told) == (["a"], [])
    assert made.slots.by_number[0].plan is None


def test_an_arena_that_cannot_be_made_ready_is_said_and_held_by_nobody(made: Made) -> None:
    def full(number: int, plan: Plan, data: memoryview) -> None:
        raise RuntimeError("no memory can be page-locked")

    made.slots._bind = full
    ready(made)
    assert [event.name for event in made.seen] == ["arena.failed"]
    assert made.told == []
    assert made.slots.by_number[0].hold(made)


def test_a_slot_that_is_not_in_use_any_more_is_let_go_of_at_once(made: Made) -> None:
    slot = ready(made)
    memory = slot.arena.view.obj
    made.take_back()
    assert (made.slots.by_number, made.unbound, slot.arena.fd) == ({}, [memory], -1)
    assert not slot.hold(made), "no snapshot can begin in it"
    made.take_back()
    assert made.unbound == [memory], "there is none"


def test_a_slot_into_which_a_snapshot_is_on_its_way_is_let_go_of_behind_that(made: Made) -> None:
    """The agent has taken the appointment back. By then the slot may be there again, with another arena."""
    slot = ready(made)
    memory = slot.arena.view.obj
    assert slot.hold("a snapshot")
    made.take_back()
    made.grant("a", made.arena)
    made.settle()
    again = made.slots.by_number[0]
    assert (made.unbound, made.told) == ([], [("arena-warm", "a")] * 2)
    slot.arena.seal(Identity(Epoch(1, "0" * 16), Version(5)), 0, 1, 1200, slot.declaration_place, b"", b"", b"")
    slot.release("a snapshot")
    assert (made.unbound, slot.arena.fd) == ([memory], -1)
    assert made.slots.by_number == {0: again}
    assert again.arena.fd >= 0


def test_a_slot_into_which_a_snapshot_is_on_its_way_is_made_ready_for_another_division_behind_that(made: Made) -> None:
    """The agent has taken the appointment back that this rank has kept."""
    slot = ready(made)
    assert slot.hold("a snapshot")
    former, before = slot.plan, bytes(slot.arena.view)
    made.plan("b")
    made.grant("b")
    threading.Event().wait(0.3)
    assert (slot.plan, bytes(slot.arena.view)) == (former, before)
    slot.release("a snapshot")
    made.settle()
    assert (made.bound, made.told) == (["a", "b"], [("arena-warm", "a"), ("arena-warm", "b")])


def test_what_is_being_made_ready_for_a_slot_that_is_let_go_of_ends(made: Made) -> None:
    slot = ready(made)
    assert slot.hold("a snapshot")
    made.plan("b")
    made.grant("b")
    made.take_back()
    made.settle()
    assert made.told == [("arena-warm", "a")]
    slot.release("a snapshot")
    assert slot.arena.fd == -1


def test_an_arena_that_takes_the_place_of_one_that_is_still_being_bound_is_bound_after_that(made: Made) -> None:
    """Else what was bound last would be what has gone, and the next snapshot be written there."""
    made.tasks.close()
    made.tasks = made.slots._tasks = Tasks("slots", pool_size=2)
    made.slots.offer(ONE)
    made.plan("a")
    binding, go_on, told, views = threading.Event(), threading.Event(), threading.Event(), list[object]()

    def bind(number: int, plan: Plan, view: memoryview) -> None:
        if not binding.is_set():
            binding.set()
            assert go_on.wait(60)
        views.append(view.obj)

    def tell(kind: str, fields: dict[str, Any]) -> None:
        made.tell(kind, fields)
        told.set()

    made.slots._bind, made.slots._notify = bind, tell
    made.grant("a", made.arena)
    assert binding.wait(60)
    former = made.slots.by_number[0].arena.view.obj
    made.take_back()
    made.grant("a", made.arena)
    latter = made.slots.by_number[0].arena.view.obj
    is_early = told.wait(0.2)
    go_on.set()
    assert not is_early
    assert told.wait(60)
    assert (views, made.told, made.unbound) == ([former, latter], [("arena-warm", "a")], [former])

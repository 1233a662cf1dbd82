"""One node's share of a job: what takes long there is seen to move."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from ckpt.agent.runtime import memory_plan
from ckpt.agent.runtime.coroutines import start
from ckpt.agent.runtime.event_loop import Peer
from ckpt.agent.runtime.memory_plan import WINDOW_BYTES, MemoryUse, slots_for
from ckpt.agent.snapshots import local_share
from ckpt.agent.snapshots.local_share import LocalShare
from ckpt.ipc.arena import WARM_BYTES, YIELD_S_MAX
from ckpt.policy.save_options import Every
from tests.agent.nodes.staged import Turned, identity, staged


@pytest.fixture
def share(turned: Turned) -> Iterator[LocalShare]:
    """Of a job of two ranks, both of them here."""
    made = LocalShare(2, turned.workers, MemoryUse)
    yield made
    if not made.is_dropped:
        made.drop()


def test_memory_that_is_made_and_snapshots_that_are_hashed_are_seen_to_move(turned: Turned, share: LocalShare) -> None:
    """Else who has asked for them would give up what takes long (agent.moving)."""
    heard: list[object] = []
    start(share.make_arenas(0, {0: WARM_BYTES + 1, 1: 4096}), lambda sizes, error: heard.append(error))
    turned.until(lambda: heard)
    assert heard == [""]
    assert share.progress.count >= 3, "a piece of memory each"
    before = share.progress.count
    share.arenas[1] = staged(identity(5), 2)
    start(share.hash_snapshots(1, identity(5)), lambda parts, error: heard.append(error))
    turned.until(lambda: len(heard) == 2)
    assert heard == ["", ""]
    assert share.progress.count == before + 2, "each rank's"


def test_memory_is_made_slowly_while_training_stands_still_for_a_copy(turned: Turned, share: LocalShare) -> None:
    """And not never: a rank that was killed in a copy does not take its word back."""
    heard: list[object] = []
    share.control_page.publish_copying(1, True)
    began_s = time.monotonic()
    start(share.make_arenas(0, {0: 3 * WARM_BYTES}), lambda sizes, error: heard.append(error))
    turned.until(lambda: heard)
    assert heard == [""]
    assert time.monotonic() - began_s >= 3 * YIELD_S_MAX
    share.control_page.publish_copying(1, False)
    assert not share.control_page.has_copying_rank


def test_who_makes_an_arena_waits_for_what_the_ranks_let_go_of(
    monkeypatch: pytest.MonkeyPatch, turned: Turned, share: LocalShare
) -> None:
    """The one that the slot had before, and that of a slot that is not in use any more: they are told just then."""
    told, free, heard = list[dict[str, object]](), [0, 0, 1 << 30], list[str]()
    monkeypatch.setattr(memory_plan, "free_bytes", lambda: free.pop(0) if len(free) > 1 else free[0])
    share.peers[0] = cast(Peer, SimpleNamespace(send=told.append))
    share.arenas[2] = staged(identity(5), 1)
    share.close_arenas(2)
    start(share.make_arenas(0, {0: WARM_BYTES}), lambda sizes, error: heard.append(error))
    turned.until(lambda: heard)
    assert (heard, list(share.arenas)) == ([""], [0])
    assert told == [{"t": "close-arena", "slot": 2}, {"t": "close-arena", "slot": 0}]
    monkeypatch.setattr(local_share, "RELEASE_TIMEOUT_S", 0.01)
    free[:] = [1]
    start(share.make_arenas(1, {0: WARM_BYTES}), lambda sizes, error: heard.append(error))
    turned.until(lambda: len(heard) == 2)
    assert heard[1] == "16 MiB of memory are missing for it"
    told.clear()
    share.drop()
    assert told == [], "what they have they may bring to another agent"


@pytest.mark.parametrize("again", [True, False])
def test_an_arena_that_is_made_for_a_slot_that_is_closed_or_made_anew_meanwhile_goes(
    again: bool, turned: Turned, share: LocalShare
) -> None:
    """As by a coordinator that was cut off, and does not know what has come of what it had asked for."""
    heard: list[str] = []

    def opened() -> int:
        names = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        return sum("memfd:ckpt-arena" in os.path.realpath(name) for name in names)

    before = opened()
    share.control_page.publish_copying(0, True)  # training stands still, and it waits
    start(share.make_arenas(2, {0: 2 * WARM_BYTES}), lambda sizes, error: heard.append(error))
    if again:
        start(share.make_arenas(2, {0: WARM_BYTES}), lambda sizes, error: heard.append(error))
    else:
        share.close_arenas(2)
    share.control_page.publish_copying(0, False)
    turned.until(lambda: len(heard) == 1 + again)
    assert sorted(heard) == ["", "the slot was closed meanwhile"][not again :]
    assert [arena.size_bytes for arena in share.all_arenas()] == [WARM_BYTES] * again
    share.drop()
    turned.close()
    assert opened() == before


def test_a_slot_that_ranks_have_not_brought_to_a_new_agent_yet_is_not_read_and_that_is_an_answer(
    share: LocalShare,
) -> None:
    """Not a mistake of who asks: its word was on its way, or waited, while the agent before this one died."""
    heard: list[str] = []
    start(share.hash_snapshots(1, identity(5)), lambda parts, error: heard.append(error))
    assert heard == ["there is nothing in slot 1 here"]


@pytest.mark.parametrize("steps", [1, 10])
def test_what_a_start_takes_for_a_while_leaves_the_slots_that_are_to_be_their_room(
    steps: int, monkeypatch: pytest.MonkeyPatch, share: LocalShare
) -> None:
    monkeypatch.setattr(memory_plan, "free_bytes", lambda: 64 << 30)
    slots, plans = slots_for(Every(steps=steps)), list[memory_plan.MemoryPlan | None]()
    start(share.plan_memory({0: 1 << 30}, slots, 8 << 30), lambda plan, error: plans.append(plan))
    (plan,) = plans
    assert plan is not None
    assert plan.slots == slots
    room_bytes = share.restore_budget_bytes(1 << 30, slots, 8 << 30)
    assert room_bytes + plan.slots * plan.slot_bytes + WINDOW_BYTES == 8 << 30


def test_a_slot_that_is_granted_while_a_rank_comes_back_is_sent_to_its_new_connection(share: LocalShare) -> None:
    """A node's agent takes the rank's arenas at once, and its connection when the coordinator has answered."""
    share.arenas[0] = staged(identity(5), 1)
    granted: list[tuple[str, int]] = []
    for name in ("former", "new"):
        note = lambda fields, fds, name=name: granted.append((name, len(fds)))  # noqa: E731
        share.take_arenas(0, [], [], is_new=False)
        share.offer_slot(0, "division")
        peer = SimpleNamespace(send=note, is_open=True)
        share.peers[0] = cast(Peer, peer)
        share.offer_slot(0, "division")
        peer.is_open = False  # as the rank's next connection does
    assert granted == [("former", 1), ("new", 1)]

"""A part of a committed checkpoint that memory has: what of the rest is made again from parity, and when it is left to
the store instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.restore import collect
from ckpt.agent.restore.collect import CHECK_S, CheckpointCollector
from ckpt.agent.restore.partial_match import ANSWER_TIMEOUT_S
from ckpt.agent.runtime.coroutines import start
from ckpt.agent.snapshots.manifest_gather import FramePlaces
from ckpt.agent.snapshots.memory_checkpoint import StagedReader, assemble_checkpoint
from ckpt.placement.placement import Parity
from tests.agent.nodes.fleet import Fleet
from tests.agent.nodes.staged import identity
from tests.agent.nodes.test_rebuild import Make, inventory, make

__all__ = ["make"]

STEP = identity(5)
NODES = {"a": [0, 1, 2], "b": [3], "c": [4], "d": [5], "e": [6], "f": [7]}  # the coordinator has most: others make more


class Part:
    """Of pairs that keep parity of each other, one is lost, and of another one node: who is left collects the rest."""

    def __init__(self, fleet: Fleet) -> None:
        assert fleet.protect(STEP) == ""
        self.fleet = fleet
        groups = [group.home_members for group in fleet.placed(STEP).groups if "a" not in group.home_members]
        self.beyond = {rank for name in groups[0] for rank in NODES[name]}
        (self.makeable,) = NODES[groups[1][0]]
        fleet.gone = {*groups[0], groups[1][0]}
        fleet.said.clear()
        self.inventory = inventory(fleet)
        for names in self.inventory.holders.values():
            names[:] = ["" if name == fleet.me else name for name in names]
        self.moved = 0
        self.leave: dict[str, int] = {}
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.heard: list[tuple[FramePlaces | None, str]] = []

    def begin(self, urgent: bool = False) -> None:
        fleet, me = self.fleet, self.fleet.me
        left = [node for node in fleet.nodes if node.name not in fleet.gone]
        arenas = fleet.arenas[STEP]
        manifest = assemble_checkpoint(STEP, StagedReader().read_sealed(STEP, fleet.world, arenas), arenas).manifest
        services = cast(PeerNetwork, fleet.links[me]), fleet.turned.workers, fleet.parities[me]
        held = lambda which: fleet.held(me, which)  # noqa: E731
        made = CheckpointCollector(*services, held, self.inventory, left, (), urgent)
        later: Callable[..., Any] = lambda delay_s, what: self.timers.append((delay_s, what))  # noqa: E731
        collecting = made.collect_part(STEP, manifest, self.leave, later, lambda: self.moved)
        start(collecting, lambda *found: self.heard.append(found))

    def bound(self, monkeypatch: pytest.MonkeyPatch, looks: float) -> None:
        """As if the store took so many times CHECK_S for what is to be made."""
        monkeypatch.setattr(
            collect, "REBUILD_BYTES_S_MIN", self.inventory.snapshot_bytes[STEP, self.makeable] / looks / CHECK_S
        )

    def leave_beside(self, leave_bytes: int, room_bytes: int) -> None:
        """Each node has to leave so much, and has room for so much beside what is to be made."""
        size = self.fleet.arenas[STEP][self.makeable].size_bytes
        for name in set(NODES) - self.fleet.gone:
            copies = self.fleet.copies[name]
            copies.arenas.set_limit(lambda most=copies.arenas.used_bytes + size + room_bytes: most)  # type: ignore[misc]
            self.leave[name] = leave_bytes

    def look(self) -> None:
        """The time comes to see whether it moves."""
        ((delay_s, what),) = [each for each in self.timers if each[0] != ANSWER_TIMEOUT_S]
        assert delay_s == CHECK_S
        self.timers.clear()
        what()

    def came(self) -> set[int]:
        """The ranks whose frames come from memory; of all others something is left to the store."""
        self.fleet.turned.until(lambda: self.heard)
        ((places, error),) = self.heard
        assert places is not None, error
        assert not any(link.offers for name, link in self.fleet.links.items() if name not in self.fleet.gone)
        return set(places.holders)

    @property
    def all(self) -> set[int]:
        return set(range(self.fleet.world))

    def said(self, kind: str) -> bool:
        return any(fields["t"] == kind for fields, _ in self.fleet.said)


@pytest.fixture
def part(make: Make) -> Part:
    return Part(make(NODES, Parity(1, 1)))


@pytest.mark.parametrize("urgent", [True, False])
def test_what_a_start_has_made_again_is_not_held_back_and_what_nobody_starts_with_is(part: Part, urgent: bool) -> None:
    part.fleet.moved.clear()
    part.begin(urgent)
    assert part.makeable in part.came()
    assert {each for _, each in part.fleet.moved} == {urgent}


def test_what_can_be_made_is_made_and_what_cannot_is_left_to_the_store(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    part.bound(monkeypatch, 10.0)
    part.begin()
    assert part.came() == part.all - part.beyond
    (at,) = part.inventory.holders_by_rank(STEP)[part.makeable]
    part.fleet.check(STEP, {part.makeable: at or part.fleet.me})
    part.moved += 1  # something else has
    part.look()
    assert not part.timers, "it is over"


def test_what_does_not_move_is_left_to_the_store(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    part.fleet.stuck = set(NODES)
    part.bound(monkeypatch, 10.0)
    part.begin()
    part.fleet.turned.until(lambda: part.said("rebuild"))
    part.moved += 1
    part.look()
    assert not part.heard
    part.look()
    assert part.came() == part.all - part.beyond - {part.makeable}


def test_what_takes_longer_than_the_store_would_is_left_to_it_though_it_moves(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    part.fleet.stuck = set(NODES)
    part.bound(monkeypatch, 2.5)
    part.begin()
    part.fleet.turned.until(lambda: part.said("rebuild"))
    for _ in range(3):
        assert not part.said("describe-snapshots")
        part.moved += 1
        part.look()
    assert part.came() == part.all - part.beyond - {part.makeable}


@pytest.mark.parametrize("room_bytes", [99, 100])
def test_what_would_take_the_memory_that_the_job_needs_is_left_to_the_store(part: Part, room_bytes: int) -> None:
    part.leave_beside(100, room_bytes)
    part.begin()
    assert part.came() == part.all - part.beyond - ({part.makeable} if room_bytes < 100 else set())
    assert part.said("rebuild")


@pytest.mark.parametrize("why", ["it was tried as a whole", "there is no parity"])
def test_nobody_is_asked_for_parity_where_that_makes_nothing(part: Part, why: str) -> None:
    if why == "there is no parity":
        part.inventory.parity_holders.clear()
    else:
        part.inventory.mark_unusable(STEP)
    part.begin()
    assert part.came() == part.all - part.beyond - {part.makeable}
    assert not any(fields["t"] == "publish" and fields["ranks"] is None for fields, _ in part.fleet.said)

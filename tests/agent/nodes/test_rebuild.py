"""What nodes keep of each other as parity, and what they make of it again: the same bytes or nothing, whoever is lost,
damaged or wrong."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from ckpt.agent.replication.replica_service import Where
from ckpt.agent.runtime import workers
from ckpt.agent.runtime.coroutines import Task, start
from ckpt.agent.snapshots.described import ParityChunk, ParityChunkName, chunk_frames, decode_described
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.errors import CkptError
from ckpt.format.parity import Row
from ckpt.ipc.arena import Arena
from ckpt.placement.placement import Parity, Replicas
from ckpt.types import Identity
from tests.agent.nodes.fleet import Fleet
from tests.agent.nodes.staged import WRONG, identity, spoiled

STEP, NEXT = identity(5), identity(10)
FOUR = {"a": [0], "b": [1], "c": [2], "d": [3]}
UNEVEN = {"a": [0, 1, 2], "b": [3], "c": [4, 5], "d": [6], "e": [7]}

Make = Callable[[Mapping[str, Sequence[int]], Parity | Replicas], Fleet]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:
        yield lambda ranks, option: stack.enter_context(closing(Fleet(ranks, option)))


@pytest.fixture
def protected(make: Make) -> Make:
    """As `make`, of nodes that keep parity or copies of STEP."""

    def one(ranks: Mapping[str, Sequence[int]], option: Parity | Replicas) -> Fleet:
        fleet = make(ranks, option)
        assert fleet.protect(STEP) == ""
        return fleet

    return one


@pytest.mark.parametrize("ranks", [FOUR, UNEVEN, {"a": [0, 1], "b": [2]}, {"a": [0], "b": [1, 2], "c": [3]}])
@pytest.mark.parametrize("option", [Parity(3, 1), Parity(2, 2), Parity(1, 1)])
def test_whoever_is_lost_what_they_staged_is_made_again_bit_for_bit(
    protected: Make, ranks: Mapping[str, Sequence[int]], option: Parity
) -> None:
    """Every loss of as many nodes as there are parities; and what the inventories say of it is what then happens, for
    every loss: what cannot be made keeps nothing else from it."""
    fleet = protected(ranks, option)
    for count in range(1, len(ranks)):
        for gone in itertools.combinations(ranks, count):
            fleet.gone = set(gone)
            possible = inventory(fleet).complete_checkpoints() == [STEP]
            makeable = inventory(fleet).rebuildable_ranks(STEP)
            assert possible or count > option.parity
            made, error = fleet.rebuild(STEP)
            assert (error == "") == possible, (gone, error)
            assert made.keys() == makeable.keys()
            fleet.check(STEP, made)
            for name in set(made.values()):
                kept = fleet.copies[name].kept.arenas_of(STEP)
                assert kept.keys() == {rank for rank, at in made.items() if at == name}
            fleet.forget_rebuilt()


def inventory(fleet: Fleet) -> Inventory:
    """What the nodes that are left say together, as it comes out of their messages."""
    whole = Inventory()
    for name, ranks in fleet.ranks.items():
        if name not in fleet.gone:
            own = Inventory()
            own.add_arenas(fleet.arenas[STEP][rank] for rank in ranks)
            own.add_chunks(fleet.copies[name].kept.chunks_by_name.values())
            whole.merge(Inventory.parse(msgpack.unpackb(msgpack.packb(own.fields()))), name)
    return whole


def test_lost_ranks_are_spread_over_the_nodes_that_are_left_and_work_on_them_is_seen_to_move(protected: Make) -> None:
    """Else who has asked for it would give up what takes long (agent.moving)."""
    fleet = protected({"a": [0, 1], "b": [2], "c": [3], "d": [4]}, Parity(2, 2))
    before = {name: copies.progress.count for name, copies in fleet.copies.items()}
    assert all(before.values())
    fleet.gone = {"a"}
    made = fleet.check_rebuild(STEP, 0, 1)
    assert len(set(made.values())) == 2
    assert all(fleet.copies[name].progress.count > before[name] for name in made.values())


def test_who_makes_a_rank_again_is_told_of_the_stripes_that_it_is_in_and_not_of_the_whole_job(protected: Make) -> None:
    fleet = protected({f"n{at:02}": [at] for at in range(12)}, Parity(3, 1))
    fleet.said.clear()
    fleet.gone = {"n01", "n05", "n09"}
    fleet.check_rebuild(STEP, 1, 5, 9)
    asked = [(fields, blobs) for fields, blobs in fleet.said if fields["t"] == "rebuild"]
    assert asked
    for fields, blobs in asked:
        where = Where.decode(STEP, blobs[0])
        ranks = {rank for _, name, _ in where.chunks for rank in name.stripe.ranks}
        assert fields["rank"] in ranks
        assert len(ranks) <= 4, "its group"
        assert set(where.node_by_rank) == ranks - {fields["rank"]}
        assert {each.rank for each in decode_described(blobs[1])} == ranks
        assert len(where.addresses_by_node) <= 4


@pytest.mark.parametrize("urgent", [True, False])
def test_what_a_start_waits_for_is_lent_given_fetched_and_computed_at_normal_priority_and_outside_the_limit(
    protected: Make, monkeypatch: pytest.MonkeyPatch, urgent: bool
) -> None:
    monkeypatch.setattr(workers, "NICE", 19)
    fleet, nice = protected(FOUR, Parity(2, 2)), set[int]()
    assert {each for _, each in fleet.moved} == {False}, "parity that is kept"
    fleet.moved.clear()
    run = fleet.turned.workers.run

    def noted(lane: Any, work: Callable[[], Any], then: Any) -> None:
        def do() -> Any:
            nice.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return work()

        run(lane, do, then)

    fleet.turned.workers.run = noted  # type: ignore[method-assign]
    fleet.gone = {"b", "c"}
    fleet.check_rebuild(STEP, 1, 2, urgent=urgent)
    assert {(name.split("/")[0], each) for name, each in fleet.moved} == {("copy", urgent), ("parity", urgent)}
    assert nice == {os.getpriority(os.PRIO_PROCESS, 0) if urgent else 19}


def test_the_parity_of_a_generation_goes_only_when_a_newer_one_is_whole_at_all(protected: Make) -> None:
    fleet = protected(FOUR, Parity(2, 2))
    fleet.gone = {"d"}
    assert "no connection" in fleet.protect(NEXT, STEP)
    for name in "abc":
        assert 5 in fleet.kept(name)
    fleet.check_rebuild(STEP, 3)
    fleet.gone = set()
    assert fleet.protect(identity(15), STEP) == ""
    assert all(fleet.kept(name) == {15} for name in FOUR), "the failed attempt is gone, too"


@pytest.mark.parametrize("safe", [STEP, None])
def test_parity_of_what_is_safe_that_is_made_anew_for_other_groups_replaces_the_old_only_when_it_is_whole_at_all(
    protected: Make, safe: Identity | None
) -> None:
    """As where a memory-only node has come or gone, and a node that was away is back, or the coordinator, which does
    not know what is safe."""
    fleet = protected(FOUR, Parity(3, 1))
    before = {name: set(copies.kept.chunks_by_name) for name, copies in fleet.copies.items()}
    fleet.option, fleet.gone = Parity(1, 1), {"d"}
    assert "no connection" in fleet.protect(STEP, safe)
    fleet.check_rebuild(STEP, 3)
    fleet.gone = set()
    assert fleet.protect(STEP, safe) == ""
    for name, copies in fleet.copies.items():
        assert copies.kept.chunks_by_name
        assert before[name].isdisjoint(copies.kept.chunks_by_name)


def test_parity_that_a_failed_attempt_was_to_be_replaced_by_does_not_take_the_place_of_that_which_is_whole(
    protected: Make,
) -> None:
    """Nothing was known to be safe when the first attempt was made; the second one is for other groups."""
    fleet = protected(FOUR, Parity(3, 1))
    fleet.option, fleet.gone = Parity(1, 1), {"d"}
    assert "no connection" in fleet.protect(NEXT, None)
    fleet.option, fleet.gone = Parity(3, 1), set()
    assert fleet.protect(NEXT, STEP) == ""
    fleet.gone = {"d"}
    fleet.check_rebuild(NEXT, 3)


def test_parity_of_what_is_safe_of_which_a_failed_attempt_has_left_more_gives_way_where_nobody_needs_it(
    protected: Make,
) -> None:
    """It was to be made anew for other groups; memory is for two generations, and it is in the store."""
    fleet = protected(FOUR, Parity(3, 1))
    fleet.option, fleet.gone = Parity(1, 1), {"d"}
    assert "no connection" in fleet.protect(STEP, STEP)
    fleet.gone = set()
    assert len(fleet.copies["a"].kept.chunks_by_name) > 1
    left = fleet.copies["a"].arenas.bytes
    fleet.copies["a"].arenas.set_limit(lambda: left)
    assert "there is no room" in fleet.protect(NEXT, STEP)
    assert 5 in fleet.kept("a")
    fleet.gone = {"d"}
    assert "no connection" in fleet.protect(NEXT, STEP, needed={})
    assert [5 in fleet.kept(name) for name in "abc"] == [False, True, True], "where there is room it stays"
    fleet.gone = set()
    assert fleet.protect(NEXT, STEP, needed={}) == ""
    assert all(fleet.kept(name) == {NEXT.version.step} for name in FOUR)


@pytest.mark.parametrize("option", [Parity(2, 2), Replicas(1)])
def test_no_more_is_held_than_two_generations_take_and_its_memory_is_used_again(
    make: Make, option: Parity | Replicas
) -> None:
    fleet = make(FOUR, option)
    safe = None
    for step in range(5, 40, 5):
        assert fleet.protect(identity(step), safe) == ""
        safe = identity(step)
        for copies in fleet.copies.values():
            one = sum(arena.size_bytes for arena in copies.kept.by_name.values())
            assert 0 < copies.arenas.bytes <= 2 * one
            assert copies.arenas.bytes_of(safe.epoch) == copies.arenas.bytes, "memory is planned anew without it"
    for copies in fleet.copies.values():
        copies.evict(lambda each: True)
        assert copies.arenas.bytes == 0


def test_a_node_that_gets_no_memory_for_all_its_parity_gives_back_what_it_has_got_and_keeps_the_next(
    protected: Make,
) -> None:
    """Whatever the system has said before of what is left."""
    fleet = protected(UNEVEN, Parity(2, 2))
    copies = max(fleet.copies.values(), key=lambda each: len(each.kept.chunks_by_name))
    assert len(copies.kept.chunks_by_name) > 1
    begin, used_bytes, got = copies.begin_chunk, copies.arenas.used_bytes, list[ParityChunkName]()

    def full(name: ParityChunkName) -> Arena:
        if got:
            raise OSError(errno.ENOMEM, "no more")
        got.append(name)
        return begin(name)

    copies.begin_chunk = full  # type: ignore[method-assign]
    assert "no memory for" in fleet.protect(NEXT, STEP)
    assert got
    assert copies.arenas.used_bytes == used_bytes
    copies.begin_chunk = begin  # type: ignore[method-assign]
    assert fleet.protect(NEXT, STEP) == ""


@pytest.mark.parametrize("safe", [STEP, None])
def test_attempts_for_which_there_is_no_room_leave_nothing_behind(protected: Make, safe: Identity | None) -> None:
    fleet = protected(FOUR, Parity(2, 2))
    for copies in fleet.copies.values():
        copies.arenas.set_limit(lambda: 1)
    for step in range(10, 30, 5):
        assert "there is no room" in fleet.protect(identity(step), safe)
        for copies in fleet.copies.values():
            left = {*copies._replacements, *(which for which, _ in copies._failed_transfers)}
            assert left <= {identity(step)}


@pytest.mark.parametrize("goes", ["with the checkpoint", "for other parity of it"])
def test_what_a_coordinator_that_died_had_others_offer_is_offered_no_more_than_it_is_kept(
    protected: Make, goes: str
) -> None:
    """Its memory is used again at once: who still read it would get other bytes."""
    fleet = protected(FOUR, Parity(2, 2))
    heard: list[str] = []
    wanted: list[tuple[str, Sequence[int] | None]] = [(name, None) for name in FOUR]
    if goes == "with the checkpoint":
        wanted += [(name, fleet.ranks[name]) for name in FOUR]
    for name, ranks in wanted:
        asked = {"t": "publish", "ranks": ranks, "identity": str(STEP), "reader": "gone"}
        start(fleet.parities[name].serve(asked, []), lambda blobs, error: heard.append(error))
    fleet.turned.until(lambda: len(heard) == len(wanted))
    assert not any(heard)
    lent = {name: set(link.offers) for name, link in fleet.links.items()}
    assert all(lent.values())
    if goes == "with the checkpoint":
        for copies in fleet.copies.values():
            copies.evict_older_than(NEXT)
    else:
        fleet.option = Parity(1, 1)
        assert fleet.protect(STEP, None) == ""
    for name, link in fleet.links.items():
        assert lent[name].isdisjoint(link.offers)


def test_a_member_that_gives_other_bytes_than_it_says_gets_no_parity_and_spoils_none(protected: Make) -> None:
    fleet = protected(FOUR, Parity(2, 2))

    def lie() -> None:
        fleet.arenas[NEXT][2].data(0, 8)[:] = b"\xff" * 8

    assert "another hash" in fleet.protect(NEXT, STEP, lie)
    fleet.gone = {"b", "c"}
    fleet.check_rebuild(STEP, 1, 2)


def chunk_of(fleet: Fleet, row: Row) -> tuple[str, ParityChunk]:
    """The largest such, and who keeps it."""
    kept = [(name, chunk) for name, each in fleet.copies.items() for chunk in each.kept.chunks_by_name.values()]
    return max((each for each in kept if each[1].name.row is row), key=lambda each: len(each[1].data))


@pytest.mark.parametrize("row", list(Row))
@pytest.mark.parametrize("lies", [False, True])
def test_wrong_parity_is_done_without_where_there_is_another_and_never_comes_to_anything(
    protected: Make, row: Row, lies: bool
) -> None:
    """Damaged, so that its bytes are not what its holder said; or the holder says so, too."""
    fleet = protected(FOUR, Parity(2, 2))
    name, chunk = chunk_of(fleet, row)
    chunk.data[:5] = b"wrong"
    if lies:
        changed = replace(chunk, frames=chunk_frames(chunk.data, len(chunk.data)))
        fleet.copies[name].kept.chunks_by_name[chunk.name] = changed
    outcomes = set()
    for count in (1, 2):
        for gone in itertools.combinations(sorted(set(FOUR) - {name}), count):
            fleet.gone = set(gone)
            made, error = fleet.rebuild(STEP)
            fleet.check(STEP, made)
            outcomes.add((count, error == ""))
            fleet.forget_rebuilt()
    assert (1, True) in outcomes
    assert (1, False) not in outcomes, "one loss leaves another parity"
    assert (2, False) in outcomes, "two losses need both"


@pytest.mark.parametrize(
    ("gone", "missing", "made_again"),
    [({"c"}, None, [2]), ({"c", "d"}, None, None), ({"d"}, [1, 3], [1, 3]), (set(), [1], [1])],
)
def test_what_a_survivor_holds_damaged_counts_as_lost(
    protected: Make, gone: set[str], missing: list[int] | None, made_again: list[int] | None
) -> None:
    fleet = protected(FOUR, Parity(2, 2))
    damaged = fleet.arenas[STEP][1].data(0, 8)
    before, damaged[:] = bytes(damaged), b"\xff" * 8
    fleet.gone = gone
    made, error = fleet.rebuild(STEP, missing)
    damaged[:] = before
    fleet.check(STEP, made)
    if made_again is None:
        assert "cannot be made again" in error
    else:
        assert (sorted(made), error) == (made_again, "")


def test_what_is_damaged_is_done_without_once_though_several_lost_ranks_come_upon_it(protected: Make) -> None:
    fleet = protected({"a": [0, 1], "b": [2], "c": [3], "d": [4]}, Parity(2, 2))
    kept = [chunk for each in fleet.copies.values() for chunk in each.kept.chunks_by_name.values()]
    (chunk,) = [each for each in kept if each.name.stripe.ranks == {0, 1} and each.name.row is Row.P]
    chunk.data[:5] = b"wrong"
    fleet.gone = {"a"}
    fleet.check_rebuild(STEP, 0, 1)


def test_whenever_it_is_given_up_nothing_stays_to_be_read(protected: Make) -> None:
    """After each of the messages that a rebuilding takes."""
    fleet = protected({"a": [0, 1], "b": [2], "c": [3], "d": [4]}, Parity(2, 2))
    fleet.gone, turned = {"a"}, fleet.turned
    work, original = [0], turned.workers.run

    def run(lane: Any, what: Any, then: Any) -> None:
        work[0] += 1
        original(lane, what, lambda done: (work.append(work.pop() - 1), then(done)))

    turned.workers.run = run  # type: ignore[method-assign]
    seen = set()
    for moment in itertools.count():
        rebuilding, running = fleet.begin_rebuild(STEP, [0, 1])
        left = itertools.count(moment, -1)
        turned.until(lambda left=left, running=running: running.is_settled or not next(left))
        by_itself = running.is_settled
        running.cancel()
        assert running.is_settled
        assert by_itself == (running.error is None)
        made = dict(rebuilding.node_by_rank)
        seen.add(len(made))
        turned.until(lambda: not work[0] and turned.is_idle)
        assert rebuilding.node_by_rank == made
        assert not any(link.offers for name, link in fleet.links.items() if name != "a")
        fleet.check(STEP, made)
        fleet.forget_rebuilt()
        if by_itself:
            break
    assert seen == {0, 1, 2}


def test_no_malformed_request_does_anything_but_fail(make: Make) -> None:
    """Each part of what a coordinator asks is replaced by what it cannot be. An error, or nothing that is wrong."""
    fleet = make({"a": [0], "b": [1], "c": [2]}, Parity(2, 1))
    asked: list[tuple[str, dict[str, Any], list[bytes]]] = []
    for name, parities in fleet.parities.items():
        original = parities.serve

        async def note(fields: Any, blobs: Any, name: str = name, original: Any = original) -> Any:
            asked.append((name, dict(fields), list(blobs)))
            return await original(fields, blobs)

        parities.serve = note  # type: ignore[method-assign]
    assert fleet.protect(STEP) == ""
    fleet.gone = {"c"}
    assert fleet.rebuild(STEP)[1] == ""
    expected = (CkptError, LookupError, TypeError, ValueError, OverflowError, AttributeError)
    count = 0
    for kind in ("replicate", "publish", "rebuild"):
        name, fields, blobs = next(each for each in asked if each[1]["t"] == kind and each[0] != "c")
        plan = msgpack.unpackb(blobs[0]) if blobs else None
        variants = [(each, blobs) for each in spoiled(fields) if each.get("t") == kind]
        variants += [(fields, [msgpack.packb(each), blobs[1]]) for each in [*spoiled(plan), *WRONG] if blobs]
        variants += [(fields, [blobs[0], each]) for each in (b"", b"\xc1", msgpack.packb([[1]])) if blobs]
        for wrong_fields, wrong_blobs in variants:
            serving = Task(fleet.parities[name].serve(wrong_fields, wrong_blobs))
            if serving.is_settled and serving.error is not None:
                assert isinstance(serving.error, expected)
                continue
            fleet.turned.until(lambda serving=serving: serving.is_settled)
            count += 1
            for copies in fleet.copies.values():
                for key, arena in copies.kept.arenas_by_key.items():
                    at, length = arena.tail()
                    assert bytes(arena.view[: at + length]) == bytes(fleet.arenas[STEP][key[1]].view[: at + length])
    assert count

"""Copies of snapshots that one node keeps for another: whole or not at all, no more of them than are of use, and the
newest that is safe never gives way to one that is not."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import numpy as np
import pytest

from ckpt.agent.job.job_commit import JobCommits
from ckpt.agent.net.progress import serve_request
from ckpt.agent.net.tcp_sender import Transport
from ckpt.agent.net.transport import Frames
from ckpt.agent.node.node_memory import NodeMemory
from ckpt.agent.node.snapshot_handlers import SnapshotHandlers
from ckpt.agent.replication.replica_offers import transfer_name
from ckpt.agent.replication.replica_store import ReplicaStore
from ckpt.agent.runtime.coroutines import Task, start, work_on
from ckpt.agent.runtime.memory_plan import MemoryUse
from ckpt.agent.runtime.workers import Workers
from ckpt.agent.snapshots.described import (
    COPIES_MAX,
    DescribedSnapshot,
    ParityChunk,
    ParityChunkName,
    decode_described,
    describe_snapshots,
    encode_described,
)
from ckpt.agent.snapshots.inventory import find_sealed_snapshot
from ckpt.agent.snapshots.remote_share import WriteRequest
from ckpt.errors import AgentError, DamagedData
from ckpt.format.manifest import FRAME
from ckpt.format.parity import Row
from ckpt.ipc.arena import DATA_OFFSET, PAGE
from ckpt.ipc.messages import Message
from ckpt.placement.placement import Replicas
from ckpt.placement.rebuild import StagedRun, Striped
from ckpt.store.packs import Written
from ckpt.types import Epoch, Identity, Version
from tests.agent.nodes.fleet import Fleet
from tests.agent.nodes.staged import MakeStaged, Turned, close_arenas, identity, staged
from tests.agent.parts import bare_context

HASHES_AT = 2048  # in an arena's header page, where it is said what they are


class Held:
    """Node "a", which has snapshots, and node "b", which is to keep them."""

    def __init__(self) -> None:
        self.fleet = Fleet({"a": [0, 1], "b": []}, Replicas(1))
        self.turned, self.originals = self.fleet.turned, self.fleet.arenas
        self.giver, self.keeper = self.fleet.copies["a"], self.fleet.copies["b"]

    def publish(self, which: Identity) -> list[DescribedSnapshot]:
        arenas = self.originals[which] = self.originals.get(which) or staged(which, 2)
        published = Task(self.giver.offers.publish(cast(Transport, self.fleet.links["a"]), which, arenas))
        self.turned.until(lambda: published.is_settled)
        return decode_described(encode_described(published.result()))

    def copy(self, which: Identity, broken: Sequence[int] = (), safe: Identity | None = None) -> str:
        """What is heard of it."""
        wanted = self.publish(which)
        self.fleet.broken = {transfer_name(which, rank) for rank in broken}
        self.keeper.evict_superseded(which, safe, [each.arena_bytes for each in wanted])
        heard = self.fetch(which, wanted)
        self.turned.until(lambda: heard)
        self.giver.offers.withdraw(which)
        assert not self.fleet.links["a"].offers
        return heard[0]

    def fetch(self, which: Identity, wanted: Sequence[DescribedSnapshot], source: str = "a") -> list[str]:
        """What is heard of it: nothing yet, "" or the error."""
        heard: list[str] = []
        link = cast(Transport, self.fleet.links["b"])
        start(self.keeper.fetch_replicas(link, which, source, [], wanted), lambda _, error: heard.append(error))
        return heard

    def kept(self) -> set[tuple[int, int]]:
        """Step and rank of what the keeper has."""
        return {(each.version.step, rank) for each, rank in self.keeper.kept.arenas_by_key}

    def close(self) -> None:
        self.fleet.close()


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.close()


def test_a_copy_is_an_arena_that_holds_the_same(held: Held) -> None:
    assert held.copy(identity(5)) == ""
    for (which, rank), arena in held.keeper.kept.arenas_by_key.items():
        original = held.originals[which][rank]
        assert find_sealed_snapshot(arena) == find_sealed_snapshot(original) == ((which, rank), 2)
        at, length = original.tail()
        assert bytes(arena.view[: at + length]) == bytes(original.view[: at + length])
    assert held.kept() == {(5, 0), (5, 1)}
    assert held.keeper.progress.count >= 2, "else who has asked for it would give up what takes long"
    assert held.copy(identity(5)) == "", "it is kept already"


def test_what_did_not_arrive_is_not_kept_and_the_reason_is_heard(held: Held) -> None:
    assert "does not offer" in held.copy(identity(5), broken=[1])
    assert held.kept() == {(5, 0)}
    assert held.copy(identity(5)) == "", "the next attempt brings what was missing"
    assert held.kept() == {(5, 0), (5, 1)}


def test_what_is_on_its_way_from_an_agent_that_is_gone_is_given_up_at_once(held: Held) -> None:
    which = identity(5)
    assert held.copy(which) == ""
    told = describe_snapshots(which, held.originals[which])
    held.keeper.evict(which.__eq__)
    held.fleet.unending = {transfer_name(which, 1)}
    heard = held.fetch(which, told[1:])
    held.keeper.handle_disconnect("b")
    assert not heard
    held.keeper.handle_disconnect("a")
    held.turned.until(lambda: heard)
    assert "called off" in heard[0]
    held.keeper.handle_disconnect("a")
    assert held.kept() == set()


def test_what_came_of_what_is_safe_under_an_earlier_placement_goes_where_the_next_has_no_room_beside_it(
    held: Held,
) -> None:
    """Else it would be there until something newer is safe, which never is: memory is for two generations."""
    assert held.copy(identity(5)) == ""
    size = held.keeper.kept.arenas_by_key[identity(5), 0].size_bytes
    held.keeper.arenas.set_limit(lambda: 3 * size)
    held.keeper.evict_superseded(identity(6), identity(5), [size], [1])
    assert held.kept() == {(5, 0), (5, 1)}, "there is room"
    held.keeper.evict_superseded(identity(6), identity(5), [size] * 2)
    assert held.kept() == {(5, 0), (5, 1)}, "it is not known which of them make it safe"
    held.keeper.evict_superseded(identity(5), identity(5), [size] * 2, [1])
    assert held.kept() == {(5, 0), (5, 1)}, "it is copied itself, and stays as it was until that has come"
    held.keeper.evict_superseded(identity(6), identity(5), [size] * 2, [1])
    assert held.kept() == {(5, 1)}


def test_what_attempts_under_several_placements_have_left_goes_for_the_next_once_the_store_has_something_newer(
    held: Held,
) -> None:
    """Where nothing was ever safe what arrived here stays, as it may be all that outlives a node; it would for ever,
    were it more than there is room for."""
    assert held.copy(identity(5)) == ""
    size = held.keeper.kept.arenas_by_key[identity(5), 0].size_bytes
    held.keeper.arenas.set_limit(lambda: 2 * size)
    assert "no memory for a copy" in held.copy(identity(6))
    assert "no memory for a copy" in held.copy(identity(7))
    assert held.kept() == {(5, 0), (5, 1)}
    assert held.copy(identity(7), safe=identity(6)) == ""
    assert held.kept() == {(7, 0), (7, 1)}


@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize("how", ["a newer start has a whole checkpoint", "a newer one is safe", "the job is over"])
def test_what_is_on_its_way_and_not_wanted_any_more_is_not_kept(how: str, landed: bool, held: Held) -> None:
    """Nobody would let go of it any more: the agent would stay for its sake. `landed`: all of it was there by then."""
    which = identity(5)
    wanted = held.publish(which)
    held.fleet.unending = set() if landed else {transfer_name(which, rank) for rank in (0, 1)}
    heard = held.fetch(which, wanted)
    match how:
        case "a newer start has a whole checkpoint":
            held.keeper.evict_epochs_before(replace(which.epoch, number=which.epoch.number + 1))
        case "a newer one is safe":
            held.keeper.evict_older_than(identity(6))
        case _:
            held.keeper.evict(lambda each: each.epoch <= which.epoch)
    held.turned.until(lambda: heard)
    assert "nobody goes on from" in heard[0] if landed else "called off" in heard[0]
    assert held.kept() == set()
    held.fleet.unending.clear()
    assert held.copy(which) == "" or how == "a newer start has a whole checkpoint", "if it is wanted again, it may come"
    held.giver.offers.withdraw(which)


def test_parity_takes_its_memory_where_it_is_made_and_gives_it_back_on_a_thread(turned: Turned) -> None:
    """The main thread would be silent meanwhile, half a second for each GiB, and other nodes would take it for gone."""
    size = 64 << 20
    name = ParityChunkName(identity(5), Row.P, Striped(size, ((StagedRun(0, 0, size),),)))
    with closing(ReplicaStore(turned.workers, turned.post)) as copies:
        copies.begin_chunk(name)
        assert (copies.arenas.bytes, copies.arenas.allocated_bytes) == (size, 0)
        copies.end_chunks([name], [])
        assert (copies.arenas.bytes, turned.workers.closing_bytes) == (0, size)
        turned.until(lambda: turned.workers.closing_bytes == 0)


def test_parity_that_is_being_made_and_not_wanted_any_more_is_not_kept_and_who_asked_for_it_hears_that() -> None:
    workers = cast(Workers, SimpleNamespace(close_arenas=close_arenas))
    chunks, (old, new) = ReplicaStore(workers, lambda what: what()), (identity(5), identity(6))
    made = []
    for which in (old, new):
        name = ParityChunkName(which, Row.P, Striped(8, ((StagedRun(0, 0, 8),),)))
        frames = Frames.from_columns(np.zeros(1), np.full(1, 8), np.zeros((1, 2)), 8)
        made.append(ParityChunk(name, 1, chunks.begin_chunk(name), frames, {}))
    chunks.evict(lambda each: each <= old)
    assert "nobody goes on from" in chunks.end_chunks([made[0].name], made[:1])
    assert chunks.end_chunks([made[1].name], made[1:]) == ""
    assert chunks.kept.identities == {new}
    again = replace(made[0], arena=chunks.begin_chunk(made[0].name))
    assert chunks.end_chunks([again.name], [again]) == "", "if it is wanted again, it may come"
    assert chunks.kept.identities == {old, new}
    chunks.close()


@pytest.mark.parametrize("comes", [True, False])
def test_who_asks_again_for_what_is_on_its_way_hears_when_it_is_there_or_that_it_has_not_come(
    comes: bool, held: Held
) -> None:
    """A coordinator's agent that was started again does not know what the one before it has asked for."""
    which = identity(1)
    arenas = held.originals[which] = staged(which, 1)
    wanted = describe_snapshots(which, arenas)
    held.fleet.unending = {transfer_name(which, 0)}
    first, again = held.fetch(which, wanted, "a"), held.fetch(which, wanted, "b")
    (coming,) = held.keeper._incoming.values()
    if comes:
        coming.arena.view[PAGE : arenas[0].size_bytes] = arenas[0].view[PAGE : arenas[0].size_bytes]
        assert coming.fetch is not None
        coming.fetch.completion.set_result(None)
    else:
        held.keeper.handle_disconnect("a")
    held.turned.until(lambda: again)
    assert [error == "" for error in (*first, *again)] == [comes, comes]
    assert held.kept() == ({(1, 0)} if comes else set())


@pytest.mark.parametrize("room", [2, 1])
def test_what_was_safe_stays_at_a_node_that_was_away_when_something_newer_became_so_until_it_has_its_part_of_the_next(
    held: Held, room: int
) -> None:
    """It may be kept as a whole, and what others have kept without this node in part only."""
    assert held.copy(identity(5)) == ""
    held.keeper.evict_older_than(identity(5))
    most = room * held.keeper.arenas.bytes
    held.keeper.arenas.set_limit(lambda: most)
    for step in (15, 20):
        held.copy(identity(step), broken=[1], safe=identity(10))
        assert held.kept() == {(step, 0), *([(5, 0), (5, 1)] if room > 1 else [])}
    assert held.copy(identity(25), safe=identity(10)) == ""
    held.keeper.evict_older_than(identity(25))
    assert held.kept() == {(25, 0), (25, 1)}


def test_where_nobody_knows_what_is_safe_that_stays_which_was_or_may_have_become_so(held: Held) -> None:
    """As after a restart of the coordinator's agent."""
    assert held.copy(identity(5)) == ""
    held.keeper.evict_older_than(identity(5))
    for step in (10, 15, 20):
        assert held.copy(identity(step)) == ""  # others may have had theirs, or not
    assert held.kept() == {(step, rank) for step in (5, 10, 15, 20) for rank in (0, 1)}
    for step in range(25, 60, 5):
        assert held.copy(identity(step), broken=[0])
        assert {each for each, _ in held.kept()} == {5, 15, 20, step}, "what failed here is certainly not safe"
    assert held.copy(identity(60)) == ""
    assert held.copy(identity(65)) == ""
    assert {step for step, _ in held.kept()} == {5, 20, 60, 65}
    held.keeper.evict_older_than(identity(65))
    assert {step for step, _ in held.kept()} == {65}


def test_a_copy_for_which_the_machine_has_no_memory_any_more_fails_and_what_is_kept_stays(held: Held) -> None:
    """It filled up after the copies were planned."""
    assert held.copy(identity(5)) == ""
    held.keeper.evict_older_than(identity(5))
    free = [0]
    held.keeper.arenas.set_limit(lambda: held.keeper.arenas.allocated_bytes + free[0])
    one = held.keeper.arenas.bytes
    for step in (10, 15):
        assert "are not left" in held.copy(identity(step), safe=identity(5))
        assert (held.kept(), held.keeper.arenas.bytes) == ({(5, 0), (5, 1)}, one)
    free[0] = one
    assert held.copy(identity(20), safe=identity(5)) == ""


def test_what_is_still_to_come_counts_though_no_page_of_it_is_taken_yet(held: Held) -> None:
    assert held.copy(identity(5)) == ""
    one = held.keeper.arenas.bytes
    held.keeper.arenas.set_limit(lambda: held.keeper.arenas.allocated_bytes + one + one // 2)
    held.fleet.unending = {transfer_name(identity(10), rank) for rank in (0, 1)}
    arenas = held.originals.setdefault(identity(10), staged(identity(10), 2))
    heard = held.fetch(identity(10), decode_described(encode_described(describe_snapshots(identity(10), arenas))))
    assert held.keeper.arenas.allocated_bytes < held.keeper.arenas.bytes == 2 * one
    memory = NodeMemory(bare_context())
    memory.replicas = held.keeper
    taken = memory.memory_use(identity(10).epoch)
    once = MemoryUse(0, held.keeper.arenas.allocated_bytes)
    assert taken == once, "who places copies counts it once: it is in what is free"
    assert "are not left" in held.copy(identity(15), safe=identity(5))
    held.keeper.handle_disconnect("a")
    held.turned.until(lambda: heard)


def test_while_nothing_is_safe_yet_older_attempts_give_way_where_a_third_does_not_fit(held: Held) -> None:
    assert held.copy(identity(5)) == ""
    one = held.keeper.arenas.bytes
    held.keeper.arenas.set_limit(lambda: 2 * one)
    for step in range(10, 40, 5):  # complete here, and not at some other node
        assert held.copy(identity(step)) == ""
        assert {each for each, _ in held.kept()} == {step - 5, step}
    assert held.keeper.arenas.bytes <= 2 * one


def test_what_nobody_goes_on_from_gives_way_to_what_does_not_fit_beside_it(held: Held) -> None:
    assert held.copy(identity(5)) == ""
    one = held.keeper.arenas.bytes
    held.keeper.arenas.set_limit(lambda: one)
    newer = Identity(Epoch(8, "f" * 16), Version(5))
    assert "are not left" in held.copy(newer)
    held.keeper.get_eviction_rule = lambda: identity(5).__eq__
    assert held.copy(newer) == ""
    assert held.keeper.kept.identities == {newer}


@pytest.mark.parametrize("coordinates", [False, True])
def test_copies_from_which_a_part_of_a_commit_is_written_stay_as_they_are_until_it_is(
    held: Held, coordinates: bool
) -> None:
    """Newer checkpoints become safe while it is uploaded; its bytes were checked before that."""
    which, go = identity(5), threading.Event()
    assert held.copy(which) == ""
    frame = np.zeros(1, FRAME)
    frame["length"] = held.originals[which][0].header().data_bytes
    wanted = WriteRequest(which, frame, np.zeros(1, np.int64), np.full(1, DATA_OFFSET, np.int64), "raw", None)
    seen: list[bytes] = []

    def write(identity: Identity, frames: object, frame: Callable[[int], memoryview], *rest: object) -> Written:
        data = frame(0)
        assert go.wait(30)
        seen.append(bytes(data))
        return Written((), np.zeros(1))

    store, heard = SimpleNamespace(write_packs=write), list[object]()
    services = SimpleNamespace(replicas=held.keeper, store=store, network=lambda: None)
    if coordinates:
        run = functools.partial(work_on, held.turned.workers)
        commits = JobCommits(cast(Any, SimpleNamespace(services=services, work_on=run)), *cast(Any, (None, None)))
        checkpoint, then = cast(Any, SimpleNamespace(arenas={})), lambda *found: heard.append(found)
        start(commits._write_part(checkpoint, "", wanted, threading.Event()), then)
    else:
        arenas = lambda identity, ranks: {rank: held.keeper.kept.arenas_of(identity)[rank] for rank in ranks}  # noqa: E731
        memory = SimpleNamespace(replicas=held.keeper, require_arenas=arenas)
        context = bare_context(store=store, workers=held.turned.workers)
        handlers = SnapshotHandlers(context, cast(Any, memory), cast(Any, None))
        writes = handlers._write_progress
        say = lambda *told: heard.append(told)  # noqa: E731
        channel = SimpleNamespace(peer="c", refuse=say, reply=say)
        fields = {"t": "write-frames", "id": 1, "identity": str(which), "codec": "raw", "bandwidth": None}
        asked = Message(fields, [], [wanted.encode()])
        serve_request(handlers._write_frames, writes, context.server.call_later, cast(Any, channel), asked)
    for step in (10, 15, 20):
        assert held.copy(identity(step)) == ""
        held.keeper.evict_older_than(identity(step))
    go.set()
    held.turned.until(lambda: heard)
    assert seen == [bytes(held.originals[which][0].data(0, int(frame["length"][0])))]
    assert coordinates or writes.count == 1, "who has asked for it would give up what does not move (agent.moving)"
    one = sum(arena.size_bytes for arena in held.keeper.kept.arenas_by_key.values())
    assert held.keeper.arenas.bytes <= 2 * one, "then it is let go of"


@pytest.mark.parametrize("until", [HASHES_AT, PAGE])
def test_what_holds_something_else_than_it_should_is_not_kept(until: int, held: Held, make_staged: MakeStaged) -> None:
    """The giver's first page, so much of it, says that it is another step's."""
    which, other = identity(5), make_staged(identity(6), 2)
    found = held.publish(which)
    lied = [
        replace(each, first_page=other[each.rank].header_page()[:until] + each.first_page[until:]) for each in found
    ]
    heard = held.fetch(which, lied)
    held.turned.until(lambda: heard)
    assert "something else" in heard[0]
    assert not held.keeper.kept.arenas_by_key
    with pytest.raises(DamagedData):
        describe_snapshots(which, other)


def test_what_is_described_wrong_is_refused_with_an_agent_error(make_staged: MakeStaged) -> None:
    right = describe_snapshots(identity(5), make_staged(identity(5), 2))
    rows = msgpack.unpackb(encode_described(right))
    again = decode_described(msgpack.packb(rows))
    assert [(each.rank, each.arena_bytes, each.first_page) for each in again] == [
        (e.rank, e.arena_bytes, e.first_page) for e in right
    ]
    frames = rows[0][3]
    for at, wrong in [
        *((0, each) for each in (-1, None, "x", [])),
        *((1, each) for each in (0, PAGE - 1, 1 << 43, -5, float("inf"), "x")),
        *((2, each) for each in (b"", rows[0][2][:-1], 5)),
        *((3, each) for each in (b"", frames[:-1], frames + b"\0" * 32, 7)),
    ]:
        row = [wrong if n == at else each for n, each in enumerate(rows[0])]
        with pytest.raises(AgentError):
            decode_described(msgpack.packb([row]))
    for whole in (5, None, [[]], [5], rows * COPIES_MAX, [rows[0] + [1]]):
        with pytest.raises(AgentError):
            decode_described(msgpack.packb(whole))
    within = Frames.from_columns(
        right[0].frames.offsets[:1] * 0, right[0].frames.lengths[:1], right[0].frames.hashes[:1], 1 << 20
    )
    with pytest.raises(AgentError, match="wrong"):  # the first page is written last, by the keeper itself
        decode_described(msgpack.packb([[0, 1 << 20, rows[0][2], within.encode()]]))

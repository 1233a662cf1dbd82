"""The pure parts of a job of several nodes: what is held where, what is told of it, and who keeps whose."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.net.transport import Frames
from ckpt.agent.replication.parity_worker import WORK_BYTES
from ckpt.agent.replication.replica_service import ReplicaService
from ckpt.agent.replication.replica_store import ReplicaStore
from ckpt.agent.replication.replication_manager import SLOTS_MIN, LentMemory, ReplicationManager
from ckpt.agent.runtime import memory_plan
from ckpt.agent.runtime.coroutines import Promise, Task, spawn, start
from ckpt.agent.runtime.memory_plan import MemoryPlan
from ckpt.agent.snapshots.all_shares import AllShares
from ckpt.agent.snapshots.candidates import find_candidates
from ckpt.agent.snapshots.described import DescribedSnapshot, encode_described
from ckpt.agent.snapshots.inventory import Inventory, find_sealed_snapshot, order_holders
from ckpt.agent.snapshots.manifest_gather import FramePlaces
from ckpt.agent.snapshots.memory_checkpoint import StagedReader, assemble_checkpoint
from ckpt.agent.snapshots.remote_share import WriteRequest, declaration_digest, decode_parts, encode_parts
from ckpt.errors import AgentError, CkptError
from ckpt.format.manifest import FRAME
from ckpt.ipc.arena import PAGE, Arena
from ckpt.ipc.failure_domains import HOST_PREFIX
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NodeAt
from ckpt.placement.placement import GENERATIONS, Kept, Parity, Replicas
from ckpt.store.lineage import Claim
from ckpt.types import Epoch, Identity
from tests.agent.nodes.staged import EPOCH, WRONG, MakeStaged, identity, spoiled

# --- inventories -----------------------------------------------------------------------------------------------------


def claim(epoch: Epoch = EPOCH, parent: Identity | None = None) -> Claim:
    return Claim(epoch, parent, (), "launch", "host", 0.0)


def holding(*held: tuple[int, int], world: int = 2, claimed: bool = True) -> Inventory:
    """Of a node that holds these (step, rank)."""
    found = Inventory()
    found.add_epoch(claim() if claimed else None, EPOCH, 9)
    for step, rank in held:
        found._add_snapshot((identity(step), rank), world, "", 100 + rank)
    return found


def together(**nodes: Inventory) -> Inventory:
    whole = Inventory()
    for name, each in nodes.items():
        whole.merge(each, name)
    return whole


def test_a_checkpoint_is_to_be_had_where_somebody_holds_each_of_its_ranks() -> None:
    for held in itertools.product((False, True), repeat=4):
        a = holding(*[(5, rank) for rank in range(2) if held[rank]])
        b = holding(*[(5, rank) for rank in range(2) if held[2 + rank]])
        whole = together(a=a, b=b)
        everywhere = all(held[rank] or held[2 + rank] for rank in range(2))
        assert whole.complete_checkpoints() == ([identity(5)] if everywhere else [])
        assert [each.checkpoints for each in whole.epochs_in_memory()] == [tuple(whole.complete_checkpoints())]
        if everywhere:
            by_rank = whole.holders_by_rank(identity(5))
            names = {r: sorted(each) for r, each in by_rank.items()}
            assert names == {r: [n for n, at in (("a", r), ("b", 2 + r)) if held[at]] for r in range(2)}


def test_a_checkpoint_of_an_epoch_that_nobody_knows_to_have_begun_is_no_candidate() -> None:
    unclaimed = together(a=holding((5, 0), (5, 1), claimed=False)).epochs_in_memory()
    assert [(each.claim, each.checkpoints) for each in unclaimed] == [(None, (identity(5),))]
    assert find_candidates(None, unclaimed) == []
    assert together(a=holding((5, 0), (5, 1), claimed=False), b=holding()).epochs_in_memory()[0].checkpoints == (
        identity(5),
    )


def test_who_speaks_of_another_world_than_the_first_is_not_counted() -> None:
    whole = together(a=holding((5, 0), world=2), b=holding((5, 0), world=1))
    assert whole.complete_checkpoints() == []
    assert whole.holders_by_rank(identity(5)) == {0: ["a"], 1: []}


def test_this_node_comes_first_and_what_was_refuted_is_only_a_part_any_more() -> None:
    whole = together(b=holding((5, 0), (5, 1), (4, 0)))
    whole._add_snapshot((identity(5), 1), 2, "")
    assert whole.holders_by_rank(identity(5)) == {0: ["b"], 1: ["", "b"]}
    whole.mark_unusable(identity(5))
    assert whole.complete_checkpoints() == []
    assert whole.incomplete_checkpoints() == {identity(4): [1]}, "of the other one nothing is known to be lost"
    assert whole.holders_by_rank(identity(5)) == {0: ["b"], 1: ["", "b"]}


def test_an_arena_counts_where_it_is_sealed_and_its_coordinator_saw_all_of_it(make_staged: MakeStaged) -> None:
    whole, unseen = make_staged(identity(5), 2), make_staged(identity(6), 2, hashed=False)
    found = Inventory()
    found.add_arenas([*whole.values(), *unseen.values()])
    assert set(found.holders) == {(identity(5), 0), (identity(5), 1)}
    whole[1].begin_fill()
    assert find_sealed_snapshot(whole[1]) is None


def test_an_inventory_comes_out_of_a_message_as_it_went_in() -> None:
    made = holding((5, 0), (5, 1), (6, 1))
    made.announced_replicated = identity(5)
    made.add_epoch(claim(Epoch(8, "f" * 16), identity(5)), Epoch(8, "f" * 16), 3)
    again = Inventory.parse(msgpack.unpackb(msgpack.packb(made.fields())))
    assert (again.holders, again.world_sizes, again.steps) == (made.holders, made.world_sizes, made.steps)
    assert (again.arena_bytes, again.announced_replicated) == (made.arena_bytes, made.announced_replicated)
    for epoch, each in made.claims.items():
        assert (again.claims[epoch].parent, again.claims[epoch].launch) == (each.parent, each.launch)


def test_no_inventory_that_is_malformed_is_taken_for_something_else_than_an_error_or_an_inventory() -> None:
    right = msgpack.unpackb(msgpack.packb(holding((5, 0), (5, 1)).fields()))
    expected = (CkptError, LookupError, TypeError, ValueError, OverflowError, AttributeError)
    for each in [*spoiled(right), *WRONG]:
        try:
            found = Inventory.parse(each)
        except expected:
            continue
        for key in found.holders:
            assert 0 <= key[1] < found.world_sizes[key[0]]
    with pytest.raises(AgentError, match="more than it can"):
        Inventory.parse({"epochs": [], "arenas": [None] * ((1 << 16) + 1)})
    for kind, row in (
        ("arenas", [1 << 40, 0]),
        ("arenas", [1, 1 << 50]),
        ("parities", [1 << 40, [0], 1, [[[0, 0, 1]]], [[0, 1]]]),
    ):
        told = {"epochs": [], "arenas": [], kind: [[str(identity(5)), *([0] if kind == "arenas" else []), *row]]}
        with pytest.raises(AgentError):  # else whoever looks for what is missing counts for hours
            Inventory.parse(told)


# --- parts, places and what is to be written -------------------------------------------------------------------------


def test_parts_come_out_of_a_message_as_they_went_in_and_a_known_declaration_is_not_sent_again(
    make_staged: MakeStaged,
) -> None:
    reader, declared = StagedReader(), dict[int, Any]()
    parts = reader.read(identity(5), 2, make_staged(identity(5), 2))
    first = encode_parts(parts, {}, reader.encoded_declarations())
    again = decode_parts(first, declared)
    known = {rank: digest for rank, (digest, _) in declared.items()}
    assert known == {rank: declaration_digest(data) for rank, data in reader.encoded_declarations().items()}
    second = encode_parts(parts, known, reader.encoded_declarations())
    assert len(second) < len(first)
    for found in (again, decode_parts(second, declared)):
        for one, other in zip(parts, found, strict=True):
            assert np.array_equal(one.hashes, other.hashes)
            assert replace(one, hashes=other.hashes, declaration=other.declaration) == other
            assert one.declaration.coordinate == other.declaration.coordinate
    with pytest.raises(KeyError):
        decode_parts(second, {})


def places_of(arenas: Mapping[int, Arena]) -> tuple[FramePlaces, Any]:
    made = assemble_checkpoint(identity(5), StagedReader().read(identity(5), len(arenas), arenas), arenas)
    sizes = {rank: arena.size_bytes for rank, arena in arenas.items()}
    holders = {rank: ["", "b"] if rank % 2 else ["b", "c"] for rank in arenas}
    return FramePlaces(identity(5), made.ranks, made.offsets, sizes, holders), made.manifest


def test_places_come_out_of_a_message_as_they_went_in_seen_by_another_node(make_staged: MakeStaged) -> None:
    places, manifest = places_of(make_staged(identity(5), 4))
    again = FramePlaces.parse(identity(5), places.blobs(), manifest)
    many = replace(
        places, arena_sizes=dict.fromkeys(range(4096), 1 << 40), holders=dict.fromkeys(range(4096), ["f" * 16] * 4)
    )
    assert len(msgpack.packb(many.fields())) < 100, "of as many ranks as there may be it does not fit beside the blobs"
    assert np.array_equal(again.ranks, places.ranks)
    assert np.array_equal(again.offsets, places.offsets)
    assert (again.arena_sizes, again.holders) == (places.arena_sizes, places.holders)
    seen = again.translate_holders("c", "a").holders
    assert [sorted(seen[rank]) for rank in range(4)] == [["", "b"], ["a", "b"]] * 2
    assert seen[0] == seen[2] == ["", "b"], "its own first"
    assert seen[1] == seen[3]
    numbers = np.concatenate([places.numbers(rank) for rank in range(4)])
    assert sorted(numbers.tolist()) == list(range(len(manifest.frames)))
    for rank in range(4):
        frames = places.frames(rank, manifest)
        assert frames.lengths.tolist() == manifest.frames["length"][places.numbers(rank)].tolist()


def test_places_beyond_an_arena_or_of_other_frames_are_refused(make_staged: MakeStaged) -> None:
    places, manifest = places_of(make_staged(identity(5), 2))
    for wrong in (
        replace(places, arena_sizes={0: 8192, 1: 8192}),
        replace(places, offsets=places.offsets - (1 << 40)),
        replace(places, offsets=places.offsets * 0),
    ):
        with pytest.raises(AgentError):
            wrong.frames(0, manifest)
    ranks, offsets, about = places.blobs()
    for blobs in ([ranks[4:], offsets], [ranks, offsets[8:]], [ranks, b""], [b"\x07" + ranks[1:], offsets]):
        with pytest.raises(AgentError, match="told wrong"):
            FramePlaces.parse(identity(5), [*blobs, about], manifest)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1 << 40), st.integers(1, 1 << 30)), max_size=20))
def test_what_is_to_be_written_comes_out_of_a_message_as_it_went_in(rows: list[tuple[int, int, int]]) -> None:
    frames = np.zeros(len(rows), FRAME)
    frames["length"] = [length for _, _, length in rows]
    ranks, offsets = (np.array([row[at] for row in rows], np.int64) for at in (0, 1))
    wanted = WriteRequest(identity(5), frames, ranks, offsets, "zstd", 5.0)
    blob = wanted.encode()
    again = WriteRequest.decode(identity(5), blob, "zstd", 5.0)
    assert np.array_equal(again.frames, frames)
    assert np.array_equal(again.ranks, ranks)
    assert np.array_equal(again.offsets, offsets)
    with pytest.raises(AgentError):
        WriteRequest.decode(identity(5), blob + b"\0", "zstd", 5.0)


# --- answers of several nodes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_answers_of_all_nodes_are_waited_for_and_the_first_error_is_told(order: tuple[int, ...]) -> None:
    heard: list[tuple[list[Any] | None, str]] = []
    asked: list[Promise[list[Any]]] = []

    async def ask(slot: int, which: Identity) -> list[Any]:
        asked.append(Promise())
        return await asked[-1]

    own = SimpleNamespace(world=3, hash_snapshots=ask, is_dropped=False)
    others = [SimpleNamespace(name=name, ranks=[rank], hash_snapshots=ask) for rank, name in enumerate("bc", 1)]
    shares = AllShares(cast(Any, own), cast(Any, others), "a")
    start(shares.hash_snapshots(0, identity(5)), lambda parts, error: heard.append((parts, error)))
    for number, at in enumerate(order):
        assert not heard
        asked[at].set_outcome([at], f"{at} failed" if number else "")
    assert heard == [(None, f"{order[1]} failed")]


# --- who keeps whose -------------------------------------------------------------------------------------------------

MIB = 1 << 20


class Service(ReplicaService):
    """It passes each request to `ask`, with what is to hear the answer."""

    def __init__(self, ask: Callable[..., None]) -> None:
        self._ask = ask

    def ask(self, node: str, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> Promise[list[bytes]]:
        answer = Promise[list[bytes]]()
        self._ask(node, fields, blobs, answer.set_outcome)
        return answer

    def end_offers(self, *_: Any) -> None:
        pass


def replication_manager(
    count: int,
    copies: int | None = 1,
    option: Parity | Replicas | None = None,
    memory_nodes: Callable[[], Sequence[LentMemory]] = tuple,
    nodes: Sequence[NodeAt] = (),
) -> ReplicationManager:
    every = nodes or [NodeAt(f"n{at}", (), (at,)) for at in range(count)]
    asked = option if option is not None else Replicas(copies) if copies is not None else None
    network = cast(PeerNetwork, SimpleNamespace(agent_name=every[0].name))
    return ReplicationManager(network, cast(ReplicaStore, None), cast(ReplicaService, None), every, asked, memory_nodes)


def plans(count: int, slot_mib: int, allowed_mib: int) -> dict[str, MemoryPlan]:
    made = memory_plan.make_plan(slot_mib * MIB, 0, 0, allowed_mib * MIB, 1 << 50)
    return {f"n{at}": made for at in range(count)}


def sizes(count: int, slot_mib: int) -> dict[str, int]:
    return {f"n{at}": slot_mib * MIB for at in range(count)}


@pytest.mark.parametrize("option", [Replicas(1), Parity(3, 1), Parity(2, 2), Parity(1, 1)])
@pytest.mark.parametrize("count", range(2, 9))
@pytest.mark.parametrize("allowed", [100, 250, 399, 400, 450, 500, 600, 700, 1000, 2000])
def test_replicas_never_take_more_than_is_left_beside_the_slots_and_a_third_slot_gives_way_to_them(
    option: Replicas | Parity, count: int, allowed: int
) -> None:
    """And to what making parity takes."""
    made, told = replication_manager(count, option=option), plans(count, 100, allowed)
    slots = made.update_placement(sizes(count, 100), told)
    plan, is_parity = told["n0"], isinstance(option, Parity)
    assert slots <= plan.slots
    assert made.describe()
    if count % 2 == 0 and not is_parity:  # groups of two: each keeps one other's
        assert made.has_holders == (plan.replica_bytes_max(2) // GENERATIONS >= 100 * MIB)
    if not made.has_holders:
        assert slots == plan.slots, "what replicas cannot use is not taken from the slots"
        assert "no node keeps" in made.describe()
        return
    assert slots >= SLOTS_MIN
    assert made.placement is not None
    for load in made.placement.loads:
        assert load.keeps_all_bytes + (WORK_BYTES if is_parity else 0) <= plan.replica_bytes_max(slots)
    table, states = made.placement_fields(), made.placement.protected_states
    assert [row["node"] for row in table["nodes"]] == [kept.node for kept in states]
    for row, kept in zip(table["nodes"], states, strict=True):
        assert len(row["kept_by"]) >= kept.losses_max
        assert kept.node not in row["kept_by"]
    assert ("any 0 of" not in made.describe()) == all(kept.losses_max for kept in states)


@pytest.mark.parametrize("count", range(2, 6))
@pytest.mark.parametrize("used", [3, 4])
def test_a_slot_in_use_stays_whatever_others_could_keep_for_it(count: int, used: int) -> None:
    for allowed in range(100, 1000, 50):
        made = replication_manager(count)
        assert made.update_placement(sizes(count, 100), plans(count, 100, allowed), used) == used


def test_a_third_slot_waits_where_copies_lack_the_memory_that_an_earlier_start_still_has() -> None:
    for kept, slots in ((150, 2), (0, 2)):  # with three there is room for no copy in either case
        made = replication_manager(2)
        told = {name: memory_plan.MemoryPlan(3, 100 * MIB, kept * MIB, 0, 450 * MIB, "") for name in ("n0", "n1")}
        assert made.update_placement(sizes(2, 100), told) == slots
        assert made.has_holders == (not kept)


def test_without_other_nodes_or_where_they_are_not_asked_for_nothing_is_kept() -> None:
    for made, count in ((replication_manager(1), 1), (replication_manager(4, None), 4)):
        assert made.update_placement(sizes(count, 100), plans(count, 100, 5000)) == memory_plan.SLOTS
        assert not made.has_holders
        assert "no node keeps" in made.describe()


def test_where_only_some_copies_fit_the_third_slot_gives_way_to_these_too() -> None:
    made, told = replication_manager(4), plans(4, 100, 600)
    assert made.update_placement(sizes(4, 100) | {"n2": 200 * MIB}, told) == SLOTS_MIN < told["n0"].slots
    assert made.has_holders
    assert made.placement is not None
    assert [each.node for each in made.placement.shortfalls] == ["n2"]
    assert "no node has memory for the state of n2: if that is lost" in made.describe()
    for load in made.placement.loads:
        assert load.keeps_all_bytes <= told[load.node].replica_bytes_max(SLOTS_MIN)


@pytest.mark.parametrize("allowed", [100, 5000])
@pytest.mark.parametrize("option", [Replicas(2), Parity(14, 2)])
def test_what_is_shown_of_a_job_of_many_nodes_fits_into_an_answer(option: Parity | Replicas, allowed: int) -> None:
    count = 200
    nodes = [NodeAt(f"{at:016x}", (), (at,)) for at in range(count)]
    made = replication_manager(count, option=option, nodes=nodes)
    plan = memory_plan.MemoryPlan(3, MIB, 0, 0, allowed * MIB, "")
    made.update_placement({node.name: 40 * MIB for node in nodes}, {node.name: plan for node in nodes}, 2)
    shown = made.status_fields()
    assert len(msgpack.packb(shown)) < 24 << 10
    assert len(shown["nodes"]) + shown["nodes_left_out"] == count


@pytest.mark.parametrize(("hosts", "said"), [("aa", True), ("ab", False), ("abab", False), ("aaab", False)])
def test_copies_that_would_go_with_one_machine_are_made_and_that_is_said(hosts: str, said: bool) -> None:
    count = len(hosts)
    nodes = [NodeAt(f"n{at}", (), (at,), (HOST_PREFIX + host,)) for at, host in enumerate(hosts)]
    made = replication_manager(len(nodes), nodes=nodes)
    made.update_placement(sizes(count, 100), plans(count, 100, 5000))
    assert made.has_holders
    assert bool(made.nodes_lost_with_host) == ("on one machine" in made.describe()) == said
    assert HOST_PREFIX not in made.describe(), "a machine's hash says nothing to a person"


@pytest.mark.parametrize(
    ("option", "count", "said"),
    [
        (Replicas(3), 2, "any 1 of 2 nodes may be lost, not 3 as was asked for (there are only 2 nodes)"),
        (Parity(2, 2), 2, "any 1 of 2 nodes may be lost, not 2 as was asked for (there are only 2 nodes)"),
        (Parity(2, 2), 3, "any 2 of 3 nodes may be lost; "),
        (Replicas(1), 3, "any 1 of 3 nodes may be lost; "),
    ],
)
def test_what_fewer_nodes_than_were_asked_for_bear_is_said(option: Replicas | Parity, count: int, said: str) -> None:
    made = replication_manager(count, option=option)
    made.update_placement(sizes(count, 100), plans(count, 100, 5000))
    assert said in made.describe()
    assert made.warnings == []


@pytest.mark.parametrize(
    ("zones", "said"),
    [
        ("aabb", []),
        ("____", []),
        ("aab_", ["CKPT_DOMAIN is set on other nodes and not on that of rank 3: each counts as a domain of its own"]),
        (
            "a_b_",
            ["CKPT_DOMAIN is set on other nodes and not on those of ranks 1, 3: each counts as a domain of its own"],
        ),
        ("aaab", ["if a is lost as a whole, so is state that is nowhere else"]),
    ],
)
def test_domains_that_are_named_on_some_nodes_only_or_take_state_with_them_are_told(
    zones: str, said: list[str]
) -> None:
    domains = [((zone,) if zone != "_" else ()) + (f"{HOST_PREFIX}{at}",) for at, zone in enumerate(zones)]
    nodes = [NodeAt(f"n{at}", (), (at,), each) for at, each in enumerate(domains)]
    made = replication_manager(len(nodes), nodes=nodes)
    made.update_placement(sizes(4, 100), plans(4, 100, 600))  # for one copy at each node
    assert made.warnings == said
    assert all(each in made.describe() and each in made.placement_fields()["notes"] for each in said)


def test_where_only_a_part_can_be_kept_it_stays_that_of_the_same_nodes_as_long_as_they_have_memory_for_it() -> None:
    """What is safe in part would stand in the way of another part of what is newer until the store has that."""
    made, state = replication_manager(3), {"n0": 50 * MIB, "n1": 100 * MIB, "n2": 80 * MIB}

    def kept(lends_mib: int) -> set[str]:
        """Whose parts, where the last node alone lends anything."""
        left = {"n2": lends_mib * MIB}
        told = {name: memory_plan.MemoryPlan(2, 0, 0, 0, left.get(name, 0), "") for name in state}
        made.update_placement(state, told, 2)
        assert made.placement is not None
        return {each.node for each in made.placement.protected_states if each.losses_max}

    assert kept(100) == {"n0"}
    assert kept(200) == {"n0"}, "n1's would fit as well, but not beside that"
    assert kept(300) == {"n0", "n1"}
    assert kept(200) != {"n0", "n1"}, "it does not fit any more"
    state["n1"] = 90 * MIB
    assert kept(200) == {"n1"}, "another state"


def test_nodes_with_quick_links_keep_each_others_copies_and_the_time_they_take_is_shown() -> None:
    made = replication_manager(4)
    links = [1250 * MIB, 125 * MIB, 1250 * MIB, 125 * MIB]
    made._nodes = tuple(NodeAt(f"n{at}", (), (at,), (), link) for at, link in enumerate(links))
    made.update_placement(sizes(4, 1000), plans(4, 1000, 50_000))
    assert made.placement is not None
    assert {kept.node: kept.holders for kept in made.placement.protected_states} == {
        "n0": ("n2",),
        "n2": ("n0",),
        "n1": ("n3",),
        "n3": ("n1",),
    }
    assert [row["seconds"] for row in made.placement_fields()["nodes"]] == [0.8, 8.0, 0.8, 8.0]


def regroup(made: ReplicationManager) -> None:
    """Puts the first two of four nodes together, which were apart."""
    links = [1250 * MIB, 1250 * MIB, 125 * MIB, 125 * MIB]
    made._nodes = tuple(NodeAt(f"n{at}", (), (at,), (), link) for at, link in enumerate(links))
    made.placement = None
    made.update_placement(sizes(4, 100), plans(4, 100, 5000))


def test_who_keeps_copies_of_a_checkpoint_stays_known_when_the_next_goes_elsewhere() -> None:
    """With parity nobody does: a commit makes nothing again."""
    for option, held in ((Replicas(1), [["n3"], ["n2"], ["n0"], [""]]), (Parity(3, 1), [[]] * 4)):
        made = replication_manager(4, option=option)
        made._network = SimpleNamespace(agent_name="n1")  # type: ignore[assignment]
        made._service = Service(lambda *given: None)
        made.update_placement(sizes(4, 100), plans(4, 100, 5000))
        spawn(made.replicate(identity(5), None))
        regroup(made)
        assert [made.find_holders(identity(5), name) for name in ("", "n0", "n2", "n3")] == held
        assert made.find_holders(identity(6), "n0") == []


def test_who_keeps_copies_of_what_is_safe_stays_known_until_it_has_been_copied_again_elsewhere() -> None:
    """Else nobody who has what a lost node staged would be asked to write it, where that fails."""
    made, asked, heard = replication_manager(4), list[tuple[str, Any]](), list[str]()
    frames = Frames.from_columns(*(np.zeros(0, np.uint64),) * 2, np.zeros((0, 2), np.uint64), PAGE)
    of = lambda name: encode_described([DescribedSnapshot(int(name[1:]), PAGE, bytes(PAGE), frames)])  # noqa: E731
    ask, quiet = lambda name, fields, blobs, then: asked.append((name, then)), lambda *given: None
    made._network = cast(PeerNetwork, SimpleNamespace(agent_name="n1", notify=quiet))
    made._replicas = cast(ReplicaStore, SimpleNamespace(check_eviction=quiet, evict_older_than=quiet))
    made._service = Service(ask)
    made.update_placement(sizes(4, 100), plans(4, 100, 5000))
    assert made.placement is not None
    made._placements_used[identity(5)] = made.placement  # as `replicate` does
    regroup(made)
    for error in ("it is gone", ""):
        start(made.replicate(identity(5), identity(5)), lambda _, error: heard.append(error))
        while asked:
            assert made.find_holders(identity(5), "n0") == ["n2"]
            name, then = asked.pop()
            then([] if error else [of(name)], error)
        assert (error in heard[-1], bool(heard[-1])) == (True, bool(error))
    assert made.find_holders(identity(5), "n0") != ["n2"]


@pytest.mark.parametrize("found", [False, True])
def test_who_may_keep_a_part_of_a_checkpoint_stays_known_when_it_is_copied_again_elsewhere(found: bool) -> None:
    """`found`: it was found to be safe, and the memory-only node may have part in it or not."""
    memory_nodes = [LentMemory(NodeAt("lender", (), ()), 1 << 40)]
    made = replication_manager(2, memory_nodes=lambda: memory_nodes)
    made._network = cast(PeerNetwork, SimpleNamespace(agent_name="n0"))
    made._service = Service(lambda *given: None)
    if not found:
        made.update_placement(sizes(2, 100), plans(2, 100, 400))
        spawn(made.replicate(identity(5), None))
    assert made.depends_on("lender", identity(5))
    memory_nodes.clear()
    made.update_placement(sizes(2, 100), plans(2, 100, 5000))
    for _ in range(2):
        spawn(made.replicate(identity(5), identity(5)))
        assert made.depends_on("lender", identity(5)), "it was copied there before, and may be there still"
    spawn(made.replicate(identity(6), identity(5)))
    assert [made.depends_on(name, identity(6)) for name in ("n1", "lender")] == [True, False]


@pytest.mark.parametrize("found", [False, True])
def test_a_node_that_is_to_keep_more_hears_what_it_keeps_already_that_is_needed(found: bool) -> None:
    """`found`: it was found to be safe, and who keeps what of it is not known (see Elsewhere.safe_needed)."""
    made, heard = replication_manager(2), list[Any]()
    frames = Frames.from_columns(*(np.zeros(0, np.uint64),) * 2, np.zeros((0, 2), np.uint64), PAGE)
    told = encode_described([DescribedSnapshot(1, PAGE, bytes(PAGE), frames)])
    ask = lambda name, fields, blobs, then: then([told], "") if name == "n1" else heard.append(fields)  # noqa: E731
    made._network = cast(PeerNetwork, SimpleNamespace(agent_name="n0"))
    made._service = Service(ask)
    made.update_placement(sizes(2, 100), plans(2, 100, 5000))
    kept = Kept("", 1, ("n1",)), Kept("n1", 1, ("",))
    spawn(made.replicate(identity(6), identity(5), None if found else kept))
    (asked,) = [fields for fields in heard if fields["t"] == "replicate"]
    assert (asked["identity"], asked["replicated"]) == (str(identity(6)), str(identity(5)))
    assert asked["needed_ranks"] == (None if found else [1])


def test_who_keeps_what_was_found_is_not_known_though_some_have_a_part_in_it_by_an_attempt() -> None:
    answer = Promise[Message]()
    answer.set_result(Message({"t": "reply", "id": 1}, [], [msgpack.packb(holding((5, 0), (5, 1)).fields())]))
    made = replication_manager(2)
    made._network = cast(PeerNetwork, SimpleNamespace(agent_name="n0", transport=None, request=lambda *given: answer))
    made._replicas = cast(ReplicaStore, SimpleNamespace(inventory=Inventory))
    made._service = Service(lambda *given: None)
    made.update_placement(sizes(2, 100), plans(2, 100, 5000))
    spawn(made.replicate(identity(5), None))
    assert not made.depends_on("lender", identity(5))
    found = Task(made.find_replicated(EPOCH, None, [identity(5)], 2)).result()
    assert found is not None
    assert found.newest == identity(5)
    assert made.depends_on("lender", identity(5)), "it may keep some, since before this agent was started"


@pytest.mark.parametrize("count", range(1, 6))
def test_of_several_holders_each_is_asked_first_for_as_many_ranks_and_this_node_before_all(count: int) -> None:
    names = [f"n{at}" for at in range(count)]
    first = Counter(order_holders(names[::-1], rank)[0] for rank in range(60))
    assert set(first.values()) == {60 // count}
    assert all(sorted(order_holders(names, turn)) == names for turn in range(7))
    assert [order_holders([*names, ""], turn)[0] for turn in range(7)] == [""] * 7
    assert order_holders([], 3) == []
    assert order_holders([""], 3) == [""]

    whole = together(a=holding((5, 0), (5, 1)), b=holding((5, 0), (5, 1)))
    assert whole.holders_by_rank(identity(5)) == {0: ["a", "b"], 1: ["b", "a"]}

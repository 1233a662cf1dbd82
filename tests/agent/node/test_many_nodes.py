"""A job of a thousand nodes: what grows with it travels as blobs, and no node does more for it than it has to."""

from __future__ import annotations

import resource
from collections.abc import ItemsView, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.agent.job.follower_restore import parse_holders
from ckpt.agent.net.framing import make_payloads
from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.node.candidate_service import CandidateService
from ckpt.agent.node.startup_state import Start
from ckpt.agent.runtime import memory_plan
from ckpt.agent.runtime.coroutines import Promise, start
from ckpt.agent.snapshots.all_shares import AllShares
from ckpt.agent.snapshots.local_share import LocalShare
from ckpt.agent.snapshots.remote_share import RemoteShare
from ckpt.errors import AgentError, UsageError
from ckpt.ipc import messages
from ckpt.ipc.addresses import Address
from ckpt.ipc.control_page import WORLD_MAX, ControlPage
from ckpt.ipc.node_list import (
    ADDRESSES_MAX,
    BLOB_BYTES_MAX,
    DOMAINS_MAX,
    NODES_MAX,
    NodeAt,
    coordinator_of,
    encode_nodes,
    parse_nodes,
)
from ckpt.settings import read_settings
from ckpt.store.lineage import AGENT_ADDRESSES_MAX, AGENT_TEXT_MAX, AGENTS_MAX, ANCESTORS_MAX, Ancestor, Claim
from ckpt.types import Epoch, Identity, Version
from tests.agent.fake import FakeRank

COUNT, RANKS = 1000, 4
EPOCH = Epoch(7, "0123456789abcdef")


def told(count: int = COUNT, addresses: int = 4) -> list[dict[str, Any]]:
    """As trainers say it."""
    return [
        {
            "name": f"{node:016x}",
            "addresses": [f"127.0.{node // 200}.{at}:1" for at in range(1, addresses + 1)],
            "domains": ["zone-a", f"rack-{node // 16}"],
            "ranks": list(range(RANKS * node, RANKS * (node + 1))),
            "link_bytes_s": 125_000_000 if node % 2 else 0,
        }
        for node in range(count)
    ]


def test_all_nodes_of_the_largest_job_are_named_in_one_blob() -> None:
    most = [
        {
            "name": f"{node:0100x}",
            "addresses": [f"[{at:04x}:{node:04x}:3333:4444:5555:6666:7777:8888]:65535" for at in range(ADDRESSES_MAX)],
            "domains": [f"{level:0100}" for level in range(DOMAINS_MAX)],
            "ranks": [node],
        }
        for node in range(min(WORLD_MAX, NODES_MAX))
    ]
    blob = encode_nodes(most)
    assert len(blob) <= BLOB_BYTES_MAX
    assert [node.name for node in parse_nodes(blob, len(most))] == [node["name"] for node in most]
    messages.pack({"t": "begin", "id": 1, "coordinator": coordinator_of(most)}, blobs=[blob]).close()


def test_what_is_told_of_a_thousand_nodes_is_what_is_known_of_them() -> None:
    nodes = told()
    known = parse_nodes(encode_nodes(nodes), COUNT * RANKS)
    assert [(n.name, list(map(str, n.addresses)), list(n.domains), list(n.ranks), n.link_bytes_s) for n in known] == [
        (n["name"], n["addresses"], n["domains"], n["ranks"], n["link_bytes_s"]) for n in nodes
    ]
    assert coordinator_of(nodes) == known[0].name
    assert coordinator_of([]) == ""


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"\xc1",
        msgpack.packb([]),
        msgpack.packb({}),
        msgpack.packb([1]),
        msgpack.packb([["a", [], []]]),
        msgpack.packb([["a", ["nowhere"], [], [0, 1], 0]]),
        msgpack.packb([["a", [], [], ["x"], 0]]),
        msgpack.packb([["a", [], [], [0], 0], ["a", [], [], [1], 0]]),
        msgpack.packb([["a", [], [], [1], 0], ["b", [], [], [0], 0]]),
        msgpack.packb([["a", [], [], [0], 0]]),
        msgpack.packb([["a", 7, [], [0, 1], 0]]),
        msgpack.packb([["a", [], [], [0], 0]] * (NODES_MAX + 1)),
        b"\x91" * 2000,
        bytes(BLOB_BYTES_MAX + 1),
    ],
)
def test_a_list_of_nodes_that_is_none_is_refused(wrong: bytes) -> None:
    with pytest.raises(UsageError):
        parse_nodes(wrong, 2)


def test_an_agent_takes_a_start_of_a_thousand_nodes(tmp_path: Path) -> None:
    """Which then fails, since there is nobody at the others' addresses."""
    with closing(FakeRank(str(tmp_path / "run"), 0, COUNT, "many", read_settings())) as rank:
        rank.connect()
        me = rank.listen(bytes(32))
        rank.nodes = [{**each, "ranks": [at]} for at, each in enumerate(told(addresses=1))]
        rank.nodes[0] |= {"name": me["name"], "addresses": me["addresses"]}
        with pytest.raises(AgentError, match="cannot be reached from the node of rank 0"):
            rank.begin()
        assert rank.connection is not None
        soft, hard = resource.prlimit(rank.connection.agent_pid, resource.RLIMIT_NOFILE)
        assert soft == hard, "it may have a connection to each"
        assert rank.connection.status()["job"] is None


def test_what_a_lender_is_told_of_the_longest_claim_fits_into_a_message() -> None:
    names = [f"{at:0{AGENT_TEXT_MAX}}" for at in range(AGENTS_MAX)]
    agents = tuple((name, (name,) * AGENT_ADDRESSES_MAX) for name in names)
    line = tuple(Ancestor(Epoch(at + 1, "f" * 16), None) for at in range(ANCESTORS_MAX))
    terms = CommitTerms(
        Claim(EPOCH, Identity(Epoch(6, "f" * 16), Version(5)), line, "l" * 200, "h" * 200, 1.5, "run", agents),
        "raw",
        1e9,
    )
    make_payloads({"t": "borrow-memory", "id": 1}, [terms.encode()])
    assert CommitTerms.decode(terms.encode()) == terms


def test_where_a_thousand_nodes_of_earlier_starts_are_that_hold_a_candidate_fits_into_a_message() -> None:
    nodes = [NodeAt(f"{at:016x}", (Address("10.11.12.13", at), Address("10.11.12.14", at)), ()) for at in range(COUNT)]
    places = SimpleNamespace(holders={at: [node.name] for at, node in enumerate(nodes)})
    start = cast(Start, SimpleNamespace(previous_nodes=()))
    context = SimpleNamespace(jobs=None)
    candidates = CandidateService(cast(Any, context), cast(Any, None), cast(Any, SimpleNamespace(nodes=lambda: nodes)))
    blob = candidates.encode_holders(start, cast(Any, places))
    make_payloads({"t": "reply", "id": 1, "records": []}, [blob])
    assert parse_holders(blob) == nodes


class Counted(dict[int, int]):
    """How often all of it is gone through."""

    times = 0

    def items(self) -> ItemsView[int, int]:
        self.times += 1
        return super().items()


class Share:
    """Of one rank; answers at once."""

    def __init__(self, rank: int) -> None:
        self.name, self.ranks = f"n{rank}", frozenset([rank])
        self.given: list[Mapping[int, int]] = []

    async def plan_memory(self, sizes: Mapping[int, int], slots: int, limit: int | None) -> memory_plan.MemoryPlan:
        self.given.append(sizes)
        return memory_plan.MemoryPlan(3, 1, 0, 0, 100, "")

    async def make_arenas(self, slot: int, sizes: Mapping[int, int]) -> dict[int, int]:
        self.given.append(sizes)
        return dict(sizes)

    def local(self, world: int) -> LocalShare:
        """As that of this node."""
        about = {"world": world, "is_dropped": False}
        return cast(LocalShare, SimpleNamespace(**about, plan_memory=self.plan_memory, make_arenas=self.make_arenas))


def test_what_is_said_of_each_rank_is_gone_through_once_and_not_once_for_each_node() -> None:
    shares = [Share(rank) for rank in range(1, COUNT)]
    own = Share(0)
    nodes = AllShares(own.local(COUNT), cast(Any, shares), "n0")
    sizes = Counted({rank: 100 + rank for rank in range(COUNT)})
    heard: list[Any] = []
    start(nodes.plan_memory(sizes, 3, None), lambda *found: heard.append(found))
    start(nodes.make_arenas(0, sizes), lambda *found: heard.append(found))
    assert nodes.sum_by_node(sizes) == {f"n{rank}": 100 + rank for rank in range(COUNT)}
    assert [error for _, error in heard] == ["", ""]
    assert sizes.times == 3
    assert [each.given for each in (own, *shares)] == [[{rank: 100 + rank}] * 2 for rank in range(COUNT)]


def test_what_each_node_has_room_for_is_known_as_it_was_while_one_of_them_does_not_answer() -> None:
    """Copies may be placed anew at that time: a failure is predicted, or more memory is lent."""
    own, other = Share(0), Share(1)
    nodes = AllShares(own.local(2), cast(Any, [other]), "n0")
    heard: list[Any] = []
    start(nodes.plan_memory({0: 1, 1: 1}, 3, None), lambda *found: heard.append(found))
    before = nodes.plans
    assert set(before) == {"n0", "n1"}
    gone = Promise[memory_plan.MemoryPlan]()
    gone.set_error(AgentError("the agent of that node is gone"))
    other.plan_memory = lambda *_: gone  # type: ignore[method-assign,assign,return-value]
    start(nodes.plan_memory({0: 2, 1: 2}, 3, None), lambda *found: heard.append(found))
    assert heard[1] == (None, "the agent of that node is gone")
    assert nodes.plans == before


def test_the_steps_of_all_ranks_are_those_that_each_node_has_told_and_those_of_ranks_here_on_the_page() -> None:
    world = COUNT
    with closing(ControlPage.create(world)) as page:
        others = [RemoteShare(cast(PeerNetwork, None), f"n{rank}", EPOCH, world, [rank]) for rank in range(2, world)]
        own = SimpleNamespace(world=world, control_page=page)
        nodes = AllShares(cast(LocalShare, own), others, "n0")
        assert nodes.steps() == nodes.polls() == [0] * world
        for rank in (0, 1):
            page.publish_step(rank, 5 + rank)
        page.publish_step(1, 6, 1)
        for rank in range(2, world, 2):
            others[rank - 2].record_steps({rank: (100 + rank, rank % 7), 0: (9, 9)})
        told = [100 + rank if rank % 2 == 0 else 0 for rank in range(world)]
        assert nodes.steps() == [5, 6, *told[2:]]
        assert nodes.polls() == [0, 1, *(rank % 7 if rank % 2 == 0 else 0 for rank in range(2, world))]
        assert [each is not None for each in nodes.steps_entered_s()] == [True, True]


def test_a_job_of_a_thousand_nodes_of_eight_ranks_has_a_control_page() -> None:
    with closing(ControlPage.create(8 * 1024)) as page:
        page.publish_step(8 * 1024 - 1, 7, 3)
        assert (page.entered_step(8 * 1024 - 1), page.poll_count(8 * 1024 - 1)) == (7, 3)
        assert page.leave_attempt() == 0
    with pytest.raises(AgentError, match="1 to 16384 are allowed"):
        ControlPage.create(WORLD_MAX + 1)

"""What a coordinator that was started again finds out of what is safe, so that new copies have room."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest

from ckpt.agent.job.job_replication import JobReplication
from ckpt.agent.replication.replication_manager import ReplicationManager
from ckpt.agent.replication.survey import SafeCheckpoint, find_replicated, newest_replicated
from ckpt.agent.runtime.coroutines import Promise, Task
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.agent.state.accounting import Accounting
from ckpt.agent.state.cost_model import CostModel
from ckpt.agent.state.replica_state import NO_PEER_MEMORY, SUPERSEDED, ReplicaState
from ckpt.ipc.arena import PAGE, Arena
from ckpt.ipc.node_list import NodeAt
from ckpt.placement.placement import Kept, Parity, Replicas
from ckpt.policy.adaptive import Adaptive
from ckpt.types import Epoch, Identity, Version
from tests.agent.nodes.fleet import Fleet
from tests.agent.nodes.staged import Net, identity
from tests.agent.nodes.test_rebuild import FOUR, UNEVEN, Make, make

__all__ = ["make"]

EPOCH, BEFORE = Epoch(2, "0" * 16), Epoch(1, "0" * 16)


def at(step: int) -> Identity:
    return Identity(EPOCH, Version(step))


def keeps(safe: int | None, **ranks: list[int]) -> Inventory:
    held = Inventory(announced_replicated=at(safe) if safe is not None else None)
    for step, theirs in ranks.items():
        held.add_local_snapshots(at(int(step[1:])), 3, theirs)
    return held


@pytest.mark.parametrize(
    ("nodes", "newest", "whole"),
    [
        ([keeps(None), keeps(None)], None, None),
        ([keeps(3, _3=[0, 1, 2]), keeps(5, _5=[2])], 5, None),
        ([keeps(3), keeps(5)], None, None),  # of which nothing is left
        ([keeps(3, _3=[0, 1, 2], _5=[2]), keeps(3, _3=[0, 1, 2], _5=[0, 1, 2])], 3, 3),
        ([keeps(3, _3=[0, 1, 2], _5=[0, 1, 2]), keeps(3, _3=[0, 1, 2], _5=[0, 1, 2])], 5, 5),
        ([keeps(None, _5=[0, 1, 2]), keeps(None, _5=[0, 1, 2])], 5, 5),
        ([keeps(None, _5=[0, 1, 2]), keeps(None)], None, None),
        ([keeps(None, _5=[0, 1]), keeps(None, _5=[2]), keeps(None, _5=[0, 1, 2])], 5, 5),
        (
            [keeps(5, _3=[0, 1, 2], _5=[0, 1]), keeps(3, _3=[0, 1, 2], _5=[2])],
            5,
            3,
        ),  # some was lost since that was said
        # The word that 5 is safe reached nobody, and who said it has lost what it kept: of each as much is left.
        (
            [
                keeps(None, _3=[0], _5=[0], _7=[0]),
                keeps(3, _3=[0, 1], _5=[0, 1], _7=[1]),
                keeps(3, _3=[1, 2], _5=[1, 2], _7=[2]),
            ],
            5,
            None,
        ),
        (
            [keeps(None, _3=[0], _5=[0]), keeps(3, _3=[0, 1], _5=[1]), keeps(3, _3=[1, 2], _5=[1, 2])],
            3,
            None,
        ),  # not of 0
        # Of 3 a part is lost, so that nothing of it can be restored, however many nodes have the others.
        ([keeps(None, _5=[0]), keeps(3, _3=[0, 1], _5=[1]), keeps(3, _3=[1], _5=[2])], 5, None),
        ([keeps(None, _5=[0]), keeps(3, _3=[0], _5=[1]), keeps(3, _3=[1])], 3, None),  # of both
        # Nothing was ever said to be safe, but a node has more of 5 than of 7.
        ([keeps(None, _5=[0], _7=[0]), keeps(None, _5=[0, 1], _7=[1]), keeps(None, _5=[2], _7=[2])], 5, None),
    ],
)
def test_safe_is_what_anybody_was_told_of_or_what_lies_on_as_many_nodes_as_it_should(
    nodes: list[Inventory], newest: int | None, whole: int | None
) -> None:
    named = {f"n{number}": each for number, each in enumerate(nodes)}
    expected = SafeCheckpoint(at(newest) if newest is not None else None, at(whole) if whole is not None else None)
    assert newest_replicated(named, (1, 1, 1)) == expected
    assert newest_replicated(named, (1, 1, 1, 1)).fully_replicated is None, "of another job than this one"


def test_each_rank_is_to_outlive_as_many_losses_as_its_node_was_placed_for() -> None:
    nodes = {"a": keeps(None, _5=[0, 1]), "b": keeps(None, _5=[0, 2]), "c": keeps(None, _5=[0])}
    assert newest_replicated(nodes, (2, 0, 0)).fully_replicated == at(5)
    assert newest_replicated(nodes, (2, 1, 0)).fully_replicated is None


def test_of_what_a_node_says_only_the_epoch_that_is_asked_for_counts() -> None:
    other = Inventory(announced_replicated=Identity(BEFORE, Version(9)))
    other.add_local_snapshots(Identity(BEFORE, Version(9)), 3, [0, 1, 2])
    finding = Task(find_replicated(cast(Any, SimpleNamespace(agent_name="a")), [], other, EPOCH, (1, 1, 1)))
    assert finding.result() == SafeCheckpoint(None, None)


LENT = {"a": [0], "b": [1], "m": list[int]()}  # the last is a memory-only node: of one parity it keeps all


def outlives(fleet: Fleet, which: Identity, losses: int) -> bool:
    """Whether it comes back whichever of so many nodes are lost."""
    for gone in itertools.combinations(fleet.ranks, losses):
        left = Inventory()
        for name in fleet.ranks.keys() - set(gone):
            left.merge(fleet.keeps(name), name)
        if which not in left.complete_checkpoints():
            return False
    return True


@pytest.mark.parametrize("ranks", [FOUR, UNEVEN, LENT, {"a": [0, 1], "b": [2]}])
@pytest.mark.parametrize("option", [Parity(3, 1), Parity(2, 2), Parity(1, 1), Replicas(1)])
@pytest.mark.parametrize("again", [False, True])
def test_what_is_found_is_what_outlives_the_losses_asked_for_or_as_many_as_what_others_were_told(
    make: Make, ranks: Mapping[str, Sequence[int]], option: Parity | Replicas, again: bool
) -> None:
    """The second had all its replicas when the coordinator died, and nobody was told. `again`: what that kept for
    others went with its agent, of both; else it lost no more than what it knew."""
    fleet = make(ranks, option)
    assert fleet.protect(identity(5)) == ""
    fleet.deaf = set(ranks)
    assert fleet.protect(identity(10), safe=identity(5)) == ""
    fleet.copies["a"].announced_replicated = identity(5)
    kept_some = bool(fleet.kept("a"))
    if again:
        fleet.restart("a")
    losses = min(kept.losses_max for kept in fleet.placed(identity(10)).protected_states)
    whole = max((each for each in (identity(5), identity(10)) if outlives(fleet, each, losses)), default=None)
    assert whole == (None if again and kept_some else identity(10))
    assert fleet.find(identity(10)) == SafeCheckpoint(identity(10), whole)


@pytest.mark.parametrize("option", [Parity(2, 1), Replicas(1)])
def test_a_node_that_lends_twice_the_state_takes_new_copies_of_a_coordinator_that_was_started_again(
    make: Make, option: Parity | Replicas
) -> None:
    """It died after a second checkpoint had come there, and before it could say that this is safe."""
    fleet = make({"a": [0], "m": []} if isinstance(option, Replicas) else LENT, option)
    assert fleet.protect(identity(5)) == ""
    lent_bytes = 2 * fleet.copies["m"].arenas.used_bytes
    fleet.copies["m"].arenas.set_limit(lambda: lent_bytes)
    fleet.deaf = {"b", "m"}
    assert fleet.protect(identity(10), safe=identity(5)) == ""
    fleet.restart("a")
    assert fleet.kept("m") == {5, 10}
    assert re.search("no room|not left", fleet.protect(identity(15))), "what is safe is not known, and nothing goes"
    assert fleet.find(identity(10)) == SafeCheckpoint(identity(10), identity(10))
    assert fleet.protect(identity(15), safe=identity(10)) == ""
    assert fleet.kept("m") == {10, 15}


@pytest.mark.parametrize("option", [Parity(3, 1), Replicas(1)])
def test_while_a_node_does_not_answer_nothing_is_known(make: Make, option: Parity | Replicas) -> None:
    fleet = make(FOUR, option)
    assert fleet.protect(identity(5)) == ""
    fleet.gone = {"c"}
    assert fleet.find(identity(5)) is None


def test_nothing_goes_for_replicas_that_all_came_before_the_job_says_that_they_are_safe(make: Make) -> None:
    fleet = make(FOUR, Replicas(1))
    assert fleet.protect(identity(5)) == ""
    assert "meanwhile" in fleet.protect(identity(10), identity(5), fleet.copying.lost)
    assert all(fleet.kept(name) == {5, 10} for name in FOUR)
    assert {copies.announced_replicated for copies in fleet.copies.values()} == {identity(5)}


def test_an_answer_that_cannot_be_read_is_none() -> None:
    net, nodes = Net(), [NodeAt(name, (), ()) for name in "ab"]
    finding = Task(find_replicated(cast(Any, net), nodes, keeps(None), EPOCH, (1,)))
    net.asked[0].answer({}, [msgpack.packb(5)])
    assert finding.result() is None


class Carried:
    """What a carrier does for a checkpoint that is to go to other nodes, where it was started again: the test answers
    what is safe there."""

    def __init__(self, awaits: bool = False) -> None:
        self.now_s, self.awaits = 0.0, awaits
        self.heard: list[str] = []
        self.judge: Callable[[str], str] = lambda error: error
        self.later: list[Callable[[], None]] = []
        self.finding: list[Promise[SafeCheckpoint | None]] = []
        self.evicted: list[Identity] = []
        self.account = Accounting()
        self.account.adopt_epoch(EPOCH)
        self.is_so = True
        self.replicas = SimpleNamespace(
            is_replication_on=True,
            is_survey_pending=True,
            is_placement_complete=True,
            supersedes_former=True,
            would_reduce_protection=False,
            replicated_version=None,
            replicated=None,
            retained_version=None,
            retained_placement=(),
            record_survey=self.found_safe,
            record_replication=self.replicated,
            why_not_replicated=lambda version: ReplicaState.why_not_replicated(
                cast(ReplicaState, self.replicas), version
            ),
            can_drop_older=lambda why_not: ReplicaState.can_drop_older(cast(ReplicaState, self.replicas), why_not),
        )
        self.context = SimpleNamespace(
            scheduler=SimpleNamespace(replicas=self.replicas, slots=SimpleNamespace(inherited_versions={})),
            epoch=EPOCH,
            world=1,
            nodes=(),
            checkpoints={},
            shares=SimpleNamespace(local_share=SimpleNamespace(arenas={})),
            emit=lambda *said, **data: None,
            services=SimpleNamespace(account=self.account, awaits_memory_nodes=lambda: self.awaits),
            spawn=Task,
            call_later=lambda delay_s, what: self.later.append(what),
        )
        policy = SimpleNamespace(cost_model=CostModel(Adaptive()))
        self.replication = JobReplication(cast(Any, self.context), cast(Any, policy))
        evict = lambda nodes, identity: self.evicted.append(identity)  # noqa: E731
        parts = SimpleNamespace(find_replicated=self.find_safe, replicate=self.protect, evict_older=evict)
        self.replication.manager = cast(Any, parts)

    def find_safe(self, epoch: Epoch, safe: Identity | None, held: Any, world: int) -> Promise[SafeCheckpoint | None]:
        self.known = safe
        self.finding.append(Promise())
        return self.finding[-1]

    def protect(self, identity: Identity, safe: Identity | None, _: Any) -> Promise[Sequence[NodeAt]]:
        self.heard.append(f"{identity}, safe: {safe}")
        self.ended = Promise[Sequence[NodeAt]]()
        return self.ended

    def found_safe(self, version: Version | None, kept: Sequence[Kept], whole: bool) -> bool:
        self.replicas.is_survey_pending, self.kept = False, kept
        self.replicas.replicated_version = self.replicas.retained_version = version
        return self.is_so

    def replicated(self, slot: int, error: str, now_s: float) -> str:
        self.heard.append(error)
        return self.judge(error)

    def replicate(self) -> None:
        self.replication.replicate(0, Version(7))


def test_what_is_found_to_be_safe_is_what_others_keep_and_is_shown_if_it_is_whole() -> None:
    for safe, shown in (
        (SafeCheckpoint(at(5), at(3)), 3),
        (SafeCheckpoint(at(5), None), None),
        (SafeCheckpoint(None, None), None),
    ):
        carried = Carried()
        carried.replicate()
        assert carried.heard == []
        carried.finding.pop().set_result(safe)
        assert carried.heard == [f"{at(7)}, safe: {safe.newest}"]
        found = carried.account.facts(0.0)["safe"].get("peer")
        assert (found["step"] if found else None) == shown
        assert carried.account.totals.saved_bytes.get("peer", 0) == 0, "another agent brought it there"
        carried.replicate()
        assert not carried.finding, "it is asked once"


def test_what_an_agent_has_said_that_was_lost_meanwhile_is_not_shown_to_be_safe() -> None:
    carried = Carried()
    carried.replicate()
    carried.is_so = False
    carried.finding.pop().set_result(SafeCheckpoint(at(3), at(3)))
    assert "peer" not in carried.account.facts(0.0)["safe"]


def test_what_is_safe_is_asked_again_where_that_could_not_be_found_out() -> None:
    carried = Carried()
    carried.replicate()
    carried.finding.pop().set_result(None)
    assert "has not said" in carried.heard.pop()
    carried.replicate()
    carried.finding.pop().set_result(SafeCheckpoint(at(5), None))
    assert carried.heard == [f"{at(7)}, safe: {at(5)}"]


def test_memory_only_nodes_that_may_still_come_are_waited_for_before_it_is_asked_what_is_safe() -> None:
    carried = Carried(awaits=True)
    carried.replicate()
    assert not carried.finding
    carried.awaits = False
    carried.later.pop()()
    carried.finding.pop().set_result(SafeCheckpoint(None, None))
    assert len(carried.heard) == 1


@pytest.mark.parametrize(
    ("why_not", "outdone", "goes"),
    [
        ("", True, True),
        (NO_PEER_MEMORY, True, True),
        (NO_PEER_MEMORY, False, False),
        ("an agent was lost meanwhile", True, False),
    ],
)
def test_older_ones_may_go_once_the_job_says_that_there_is_all_that_can_be_had(
    why_not: str, outdone: bool, goes: bool
) -> None:
    carried = Carried()
    carried.replicas.supersedes_former = outdone
    carried.replicate()
    carried.finding.pop().set_result(SafeCheckpoint(None, None))
    carried.judge = lambda error: why_not
    carried.ended.set_result([])
    assert carried.evicted == ([at(7)] if goes else [])


@pytest.mark.parametrize(
    ("changed", "found", "why"),
    [
        ({"would_reduce_protection": True}, SafeCheckpoint(at(5), at(5)), NO_PEER_MEMORY),
        ({"would_reduce_protection": True}, SafeCheckpoint(at(9), at(9)), SUPERSEDED),
        ({"is_replication_on": False}, SafeCheckpoint(at(5), None), "no other node has memory left"),
    ],
)
def test_what_is_found_to_be_safe_may_be_a_reason_to_copy_nothing(
    changed: dict[str, bool], found: SafeCheckpoint, why: str
) -> None:
    carried = Carried()
    carried.replicate()
    vars(carried.replicas).update(changed)
    carried.finding.pop().set_result(found)
    assert why in carried.heard.pop()


def test_whose_part_others_keep_still_is_known_of_what_is_found_though_it_is_not_whole() -> None:
    left = {"a": keeps(3, _3=[0]), "b": keeps(3, _3=[0, 1]), "c": keeps(3, _3=[2])}
    safe = newest_replicated(left, (1, 1, 1))
    assert list(safe.survived_losses) == [1, 0, 0]
    carried = Carried()
    carried.context.nodes = [SimpleNamespace(name=name, ranks=[rank]) for rank, name in enumerate("abc")]
    carried.replicate()
    arena = Arena.create(PAGE)
    carried.context.shares.local_share.arenas[1] = {0: arena}
    carried.replicas.replicated = SimpleNamespace(slot=1)
    carried.finding.pop().set_result(safe)
    assert carried.kept == [Kept("", 1), Kept("b", 0), Kept("c", 0)]
    assert arena.is_replicated
    arena.close()


def test_what_lacks_a_part_survives_nothing_and_gives_way_to_a_newer_one_that_is_whole() -> None:
    """Its primary copy was in a slot that an agent needed after a restart; then the holder of a part was lost."""
    left = {"a": keeps(3, _3=[0], _5=[0]), "b": keeps(3, _3=[0], _5=[1]), "c": keeps(3, _5=[2])}
    assert newest_replicated(left, (1, 1, 1)) == SafeCheckpoint(at(5), None)
    del left["c"]
    safe = newest_replicated(left, (1, 1, 1))
    assert (safe.newest, list(safe.survived_losses)) == (at(3), [-1, -1, -1])


def test_of_what_is_kept_in_part_it_is_found_out_what_is_left_though_nobody_was_told_that_it_is_safe() -> None:
    """A node that keeps some of it was not connected for a while."""
    carried = Carried()
    carried.replicas.replicated_version = carried.replicas.retained_version = Version(3)
    carried.replicate()
    assert carried.known == at(3)
    copies = SimpleNamespace(
        inventory=lambda: Inventory(announced_replicated=Identity(BEFORE, Version(9))),
    )
    node = NodeAt("a", (), (0, 1, 2))
    replication_manager = ReplicationManager(
        cast(Any, SimpleNamespace(agent_name="a")), cast(Any, copies), cast(Any, None), (node,), None
    )
    finding = Task(replication_manager.find_replicated(EPOCH, carried.known, [at(3)], 3))
    assert finding.result() == SafeCheckpoint(at(3), None)

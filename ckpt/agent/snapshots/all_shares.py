"""All ranks of a job, as its coordinator uses them: this node's LocalShare and the RemoteShares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ckpt.agent.runtime.memory_plan import MemoryPlan
from ckpt.agent.snapshots.local_share import LocalShare
from ckpt.agent.snapshots.memory_checkpoint import StagedPart
from ckpt.agent.snapshots.remote_share import RemotePeer, RemoteShare
from ckpt.ipc.control_page import ControlWord
from ckpt.types import Identity

T = TypeVar("T")


class Share(Protocol):
    """The methods that a coordinator calls for each node; LocalShare documents them."""

    def announce(self, slot: int, word: ControlWord | None) -> None: ...

    def announce_verdict(self, attempt: int) -> None: ...

    def plan_memory(
        self,
        sizes: Mapping[int, int],
        slots: int,
        limit_bytes: int | None,
        then: Callable[[MemoryPlan | None, str], None],
    ) -> None: ...

    def make_arenas(self, slot: int, sizes: Mapping[int, int], then: Callable[[dict[int, int], str], None]) -> None: ...

    def offer_slot(self, slot: int, division: str) -> None: ...

    def hash_snapshots(self, slot: int, identity: Identity, then: Callable[[list[StagedPart], str], None]) -> None: ...

    def close_arenas(self, slot: int) -> None: ...

    def drop(self) -> None: ...


class AllShares:
    """As LocalShare, for the ranks of all nodes. `own`: the ranks of this node. `others`: by agent name.

    An answer for several nodes is given once all have answered; the first error counts."""

    def __init__(self, own: LocalShare, others: Sequence[RemoteShare], me: str) -> None:
        """`me`: the agent name of this node; "" in a job of one node."""
        self.local_share = own
        self.world = own.world
        self.remote_shares = {each.name: each for each in others}
        self.plans: dict[str, MemoryPlan] = {}  # newest memory plan of each node
        self._agent_names = {"": me, **{each.name: each.name for each in others}}
        self._shares: dict[str, Share] = {"": own, **self.remote_shares}
        self._remote_by_rank = {rank: each for each in others for rank in each.ranks}
        self._local_ranks = [rank for rank in range(self.world) if rank not in self._remote_by_rank]
        # By rank, as the other nodes reported: the step that it entered, and its polls since the last ended one.
        self._reported_steps, self._reported_polls = [0] * self.world, [0] * self.world
        for each in others:
            each.steps_by_rank, each.polls_by_rank = self._reported_steps, self._reported_polls

    @property
    def local_rank_count(self) -> int:
        """The number of this node's ranks."""
        return self.world - len(self._remote_by_rank)

    @property
    def remote_ranks(self) -> dict[str, frozenset[int]]:
        """The ranks of the other nodes, by agent name."""
        return {name: each.ranks for name, each in self.remote_shares.items()}

    @property
    def ranks_by_node(self) -> dict[str, frozenset[int]]:
        """The ranks of all nodes, by agent name: this node, "", first."""
        return {"": frozenset(self._local_ranks), **self.remote_ranks}

    def holders(self) -> dict[int, list[str]]:
        """By rank: its node, as a list of one agent name; "" is this node."""
        return {rank: [self.node_of(rank)] for rank in range(self.world)}

    def node_of(self, rank: int) -> str:
        """The agent name of the rank's node; "": this node."""
        remote = self._remote_by_rank.get(rank)
        return remote.name if remote is not None else ""

    def steps(self) -> list[int]:
        """By rank: the step that it last entered; 0: none yet."""
        found, here = self._reported_steps.copy(), self.local_share.control_page.entered_step
        for rank in self._local_ranks:
            found[rank] = here(rank)
        return found

    def polls(self) -> list[int]:
        """By rank: its polls and saves since the last ended step."""
        found, here = self._reported_polls.copy(), self.local_share.control_page.poll_count
        for rank in self._local_ranks:
            found[rank] = here(rank)
        return found

    def steps_entered_s(self) -> list[float | None]:
        """By rank: when it entered its step, on the monotonic clock; None: unknown. Up to the last rank of this node:
        nothing is known of those behind it."""
        found: list[float | None] = [None] * (1 + max(self._local_ranks, default=-1))
        for rank in self._local_ranks:
            found[rank] = self.local_share.control_page.entry_time_s(rank)
        return found

    def connect_rank(self, rank: int, peer: object) -> list[int]:
        remote = self._remote_by_rank.get(rank)
        if remote is None:
            return self.local_share.connect_rank(rank, peer)
        assert isinstance(peer, RemotePeer)
        remote.peers[rank] = peer
        return []

    def send(self, rank: int, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        remote = self._remote_by_rank.get(rank)
        if remote is None:
            self.local_share.send(rank, fields, blobs)
        else:
            remote.peers[rank].send(fields, blobs=blobs)

    def announce(self, slot: int, word: ControlWord | None) -> None:
        # Other nodes come first: their messages take longest.
        for remote in self.remote_shares.values():
            remote.announce(slot, word)
        self.local_share.announce(slot, word)

    def announce_verdict(self, attempt: int) -> None:
        for share in self._shares.values():
            share.announce_verdict(attempt)

    def plan_memory(
        self,
        sizes: Mapping[int, int],
        slots: int,
        limit_bytes: int | None,
        then: Callable[[MemoryPlan | None, str], None],
    ) -> None:
        """As `LocalShare.plan_memory`; gives the plan of the node with the fewest slots, which all nodes have then."""

        def measured(plans: dict[str, MemoryPlan | None], error: str) -> None:
            # After an error the former plans stay: replicas may be placed anew at any time.
            if error:
                then(None, error)
                return
            self.plans = {name: plan for name, plan in plans.items() if plan is not None}
            then(min(self.plans.values(), key=lambda plan: plan.slots), "")

        answers, parts = _Answers[MemoryPlan | None](self._shares, measured), self._split_by_node(sizes)
        for name, share in self._shares.items():
            share.plan_memory(parts[name], slots, limit_bytes, answers.callback_for(name))

    def make_arenas(self, slot: int, sizes: Mapping[int, int], then: Callable[[dict[int, int], str], None]) -> None:
        def made(found: dict[str, dict[int, int]], error: str) -> None:
            if error:
                self.close_arenas(slot)
                then({}, error)
            else:
                then({rank: size for by_rank in found.values() for rank, size in by_rank.items()}, "")

        answers, parts = _Answers[dict[int, int]](self._shares, made), self._split_by_node(sizes)
        for name, share in self._shares.items():
            share.make_arenas(slot, parts[name], answers.callback_for(name))

    def offer_slot(self, slot: int, division: str) -> None:
        for share in self._shares.values():
            share.offer_slot(slot, division)

    def hash_snapshots(self, slot: int, identity: Identity, then: Callable[[list[StagedPart], str], None]) -> None:
        def read(found: dict[str, list[StagedPart]], error: str) -> None:
            then([] if error else [part for parts in found.values() for part in parts], error)

        answers = _Answers[list[StagedPart]](self._shares, read)
        for name, share in self._shares.items():
            share.hash_snapshots(slot, identity, answers.callback_for(name))

    def close_arenas(self, slot: int) -> None:
        for share in self._shares.values():
            share.close_arenas(slot)

    def drop(self) -> None:
        for share in self._shares.values():
            share.drop()

    def detach_remotes(self) -> None:
        """Detaches the other nodes: `drop` then frees the memory of this node only."""
        for remote in self.remote_shares.values():
            remote.is_dropped = True

    def sum_by_node(self, sizes: Mapping[int, int]) -> dict[str, int]:
        """The sum of bytes by rank on each node, by agent name."""
        return {self._agent_names[name]: sum(part.values()) for name, part in self._split_by_node(sizes).items()}

    def plans_by_name(self) -> dict[str, MemoryPlan]:
        return {self._agent_names[name]: plan for name, plan in self.plans.items()}

    def _split_by_node(self, sizes: Mapping[int, int]) -> dict[str, dict[int, int]]:
        """Bytes by rank, split by node."""
        found: dict[str, dict[int, int]] = {name: {} for name in self._shares}
        for rank, size in sizes.items():
            found[self.node_of(rank)][rank] = size
        return found


class _Answers(Generic[T]):
    """Collects one answer from each node; then calls `then` with all answers, and "" or the first error."""

    def __init__(self, names: Mapping[str, object], then: Callable[[dict[str, T], str], None]) -> None:
        self._pending_names = set(names)
        self._on_done = then
        self._results: dict[str, T] = {}
        self._errors: list[str] = []

    def callback_for(self, name: str) -> Callable[[T, str], None]:
        """The `then` to pass to that node's method."""

        def answered(result: T, error: str) -> None:
            self._pending_names.discard(name)
            self._results[name] = result
            self._errors += [error] if error else []
            if not self._pending_names:
                self._on_done(self._results, self._errors[0] if self._errors else "")

        return answered

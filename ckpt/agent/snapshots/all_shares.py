"""All ranks of a job, as its coordinator uses them: this node's LocalShare and the RemoteShares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from ckpt.agent.runtime.coroutines import Cancelled, Coro, gather
from ckpt.agent.runtime.memory_plan import MemoryPlan
from ckpt.agent.snapshots.local_share import LocalShare
from ckpt.agent.snapshots.memory_checkpoint import StagedPart
from ckpt.agent.snapshots.remote_share import RemoteShare
from ckpt.errors import CkptError
from ckpt.types import Identity

T = TypeVar("T")
Share = LocalShare | RemoteShare  # of one node


class AllShares:
    """The shares of all nodes. `local_share`: this node's. `remote_shares`: the others', by agent name. Iteration gives
    them all, the others first: their messages take longest. `plans`: each node's newest memory plan, by agent name."""

    def __init__(self, own: LocalShare, others: Sequence[RemoteShare], me: str) -> None:
        """`me`: the agent name of this node; "" in a job of one node."""
        self.local_share = own
        self.world = own.world
        self.remote_shares = {each.name: each for each in others}
        self.plans: dict[str, MemoryPlan] = {}
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
        return self.world - len(self._remote_by_rank)

    @property
    def remote_ranks(self) -> dict[str, frozenset[int]]:
        return {name: each.ranks for name, each in self.remote_shares.items()}

    @property
    def ranks_by_node(self) -> dict[str, frozenset[int]]:
        """The ranks of all nodes, by agent name: this node, "", first."""
        return {"": frozenset(self._local_ranks), **self.remote_ranks}

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

    def __iter__(self) -> Iterator[Share]:
        return iter([*self.remote_shares.values(), self.local_share])

    def share_of(self, rank: int) -> Share:
        return self._shares[self.node_of(rank)]

    async def plan_memory(self, sizes: Mapping[int, int], slots: int, limit_bytes: int | None) -> MemoryPlan:
        """As `LocalShare.plan_memory`. Returns the plan of the node with the fewest slots, which all nodes have then.
        Errors: CkptError. The former plans stay then: replicas may be placed anew at any time."""
        parts = self._split_by_node(sizes)
        found = await self._ask_all(lambda name, share: share.plan_memory(parts[name], slots, limit_bytes))
        self.plans = {self._agent_names[name]: plan for name, plan in found.items()}
        return min(self.plans.values(), key=lambda plan: plan.slots)

    async def make_arenas(self, slot: int, sizes: Mapping[int, int]) -> dict[int, int]:
        """As `LocalShare.make_arenas`. Errors: CkptError. No node has arenas then."""
        parts = self._split_by_node(sizes)
        try:
            found = await self._ask_all(lambda name, share: share.make_arenas(slot, parts[name]))
        except CkptError:
            self.close_arenas(slot)
            raise
        return {rank: size for each in found.values() for rank, size in each.items()}

    async def hash_snapshots(self, slot: int, identity: Identity) -> list[StagedPart]:
        """As `LocalShare.hash_snapshots`. Errors: CkptError."""
        found = await self._ask_all(lambda _, share: share.hash_snapshots(slot, identity))
        return [part for parts in found.values() for part in parts]

    async def _ask_all(self, ask: Callable[[str, Share], Coro[T]]) -> dict[str, T]:
        """Asks each node by `ask(name, share)`, and waits for all. Returns the answers by node. Errors: the first one,
        if it is a CkptError; Cancelled if the job is dropped meanwhile."""
        found: dict[str, T] = {}
        errors: list[CkptError] = []

        async def ask_one(name: str, share: Share) -> None:
            try:
                found[name] = await ask(name, share)
            except CkptError as exc:
                errors.append(exc)

        await gather(ask_one(name, share) for name, share in self._shares.items())
        if self.local_share.is_dropped:
            raise Cancelled
        if errors:
            raise errors[0]
        return found

    def close_arenas(self, slot: int) -> None:
        for share in self:
            share.close_arenas(slot)

    def drop(self) -> None:
        for share in self:
            share.drop()

    def detach_remotes(self) -> None:
        """Detaches the other nodes: `drop` then frees the memory of this node only."""
        for remote in self.remote_shares.values():
            remote.is_dropped = True

    def sum_by_node(self, sizes: Mapping[int, int]) -> dict[str, int]:
        """The sum of bytes by rank on each node, by agent name."""
        return {self._agent_names[name]: sum(part.values()) for name, part in self._split_by_node(sizes).items()}

    def _split_by_node(self, sizes: Mapping[int, int]) -> dict[str, dict[int, int]]:
        found: dict[str, dict[int, int]] = {name: {} for name in self._shares}
        for rank, size in sizes.items():
            found[self.node_of(rank)][rank] = size
        return found

"""The coordinator's part of the current job: what it tells the other nodes and the memory-only ones, what it borrows,
and the replication of the checkpoint that the job was started from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckpt.agent.job.job import Job
from ckpt.agent.job.memory_node_client import MemoryNodeClients
from ckpt.agent.node.inventory_lease import LEASE_TIMEOUT_S, InventoryLease
from ckpt.agent.node.node_context import NodeContext
from ckpt.agent.node.node_memory import NodeMemory
from ckpt.agent.node.startup_state import Start
from ckpt.agent.replication.rereplicate import Rereplication, Target
from ckpt.agent.restore.collect import CheckpointCollector
from ckpt.agent.runtime.coroutines import start
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.agent.state.slots import WorkState
from ckpt.types import OWN_NODE, Epoch

if TYPE_CHECKING:
    from ckpt.ipc.addresses import Address
    from ckpt.ipc.node_list import NodeAt

RECONNECT_S = 1.0  # pause before a broken connection to a node of a running job is dialled again


class Coordinator:
    """Main thread only. `memory_nodes`: the memory-only nodes of the current job. Nothing is said in a job of one node
    without memory-only nodes."""

    def __init__(self, context: NodeContext, memory: NodeMemory) -> None:
        self._context, self._jobs, self._memory = context, context.jobs, memory
        self._frozen_watch = FrozenWatch(memory.inventory_lease)
        self.memory_nodes = MemoryNodeClients(
            context.url,
            lambda: context.network,
            context.server.call_later,
            context.emit_event,
            self._on_memory_nodes_changed,
        )

    # -- the other nodes

    def announce_claim(self, job: Job) -> None:
        """The job has begun: other nodes learn how to commit its checkpoints, and memory-only nodes lend to it."""
        terms = job.terms
        assert terms is not None  # the job has begun
        self._notify_nodes(job, {"t": "job-state", "epoch": str(job.epoch)}, [terms.encode()])
        self.borrow_memory(job, self.memory_nodes.addresses)

    def announce_complete_checkpoint(self) -> None:
        """Once the current job has a complete checkpoint: the checkpoints of former epochs may go."""
        job = self._jobs.current
        if job is None or job.replication.has_announced_checkpoint or not job.scheduler.replicas.supersedes_former:
            return
        if self._memory.inventory_lease.is_held:
            return
        job.replication.has_announced_checkpoint = True
        job.memory.request_replan()
        # Peers keep no replicas of the restored checkpoint any more.
        job.replication.report_parent(False)
        self._memory.drop_older_epochs(job.epoch)
        fields = {"t": "evict", "what": "older-epochs", "epoch": str(job.epoch)}
        self._notify_nodes(job, fields)
        # Else the replicas of former epochs may be all that survives this node.
        if job.scheduler.replicas.replicated is not None or job.scheduler.facts.committed_version is not None:
            self.memory_nodes.broadcast_hint(fields)

    def announce_absence(self, name: str) -> None:
        """Tells the other nodes that node `name` is gone: they may have no connection to it that would show this."""
        job = self._jobs.current
        if job is None:
            return
        fields = {"t": "node-lost", "epoch": str(job.epoch), "name": name}
        for node in job.nodes[1:]:
            share = job.ranks.remote_shares.get(node.name)
            if share is not None and share.has_joined and node.name != name:
                self._context.notify(node.name, fields)
        self.memory_nodes.broadcast_hint(fields)

    def reconnect_node(self, name: str) -> None:
        """Reconnects to a node of the current job, if the job still needs the agent."""
        network, job = self._context.network, self._jobs.current
        if network is None or job is None or not job.is_needed or network.channel(name) is not None:
            return
        node: NodeAt | None = next((each for each in job.nodes if each.name == name), None)
        if node is not None:
            start(network.connect(node), lambda _, error: self.reconnect_later(name) if error else None)

    def reconnect_later(self, name: str) -> None:
        self._context.server.call_later(RECONNECT_S, lambda: self.reconnect_node(name))

    def _notify_nodes(self, job: Job, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        for node in job.nodes[1:]:
            self._context.notify(node.name, fields, blobs)

    def report_if_frozen(self, now_s: float) -> float | None:
        """Says which jobs a start on other nodes freezes, and warns if the current one takes no snapshot for long.
        Returns when to look again."""
        for job in self._jobs.coordinated():
            job.scheduler.facts.is_frozen = bool(
                job.nodes and self._memory.inventory_lease.refusal(OWN_NODE, job.epoch)
            )
        return self._frozen_watch.update(self._jobs.current, now_s)

    # -- memory-only nodes

    def borrow_memory(self, job: Job, named: Sequence[Address]) -> None:
        """Asks the memory-only nodes that a job names to lend it their memory from now on."""
        if named and job.terms is not None:
            self.memory_nodes.begin_borrowing(job.terms, named)

    def release_idle_memory_nodes(self) -> None:
        """Ends the borrowing of a job whose ranks are all gone: the memory-only nodes may lend to another job."""
        job = self._jobs.current
        if self.memory_nodes.is_borrowing and job is not None and job.scheduler.facts.all_gone:
            self.memory_nodes.broadcast_hint({"t": "start-outcome", "epoch": None})
            self.memory_nodes.stop_borrowing()

    def drop_lent_replicas(self) -> None:
        """Has the memory-only nodes drop the replicas of a job that has ended and whose newest checkpoint is stored."""
        job = self._jobs.current
        if job is not None and job.context.is_finished and job.scheduler.slots.newest_commit_state is WorkState.DONE:
            self.memory_nodes.broadcast_hint({"t": "evict", "what": "job", "epoch": str(job.epoch)})

    def _on_memory_nodes_changed(self) -> None:
        """The set of memory-only nodes changed: plans the placement of replicas anew."""
        job = self._jobs.current
        if job is not None:
            job.memory.replan_placement()
            if job.replication.rereplication is not None:
                job.replication.rereplication.survey_again()

    # -- re-replication of the restored checkpoint

    def rereplicate_restored(self, start: Start) -> None:
        """Lets the checkpoint that all ranks have restored be replicated again."""
        job = self._jobs.current
        identity = job.claim.parent if job is not None and job.claim is not None else None
        if job is not None and identity is not None:
            # Where it is not whole in memory, replicas would save only a few reads of the store.
            is_whole = identity in start.choice.gathered_manifests or self._jobs.find_checkpoint(identity) is not None
            job.replication.needs_rereplication = is_whole and len(job.nodes) > 1

    def advance_rereplication(self) -> None:
        """Re-replicates the restored checkpoint once the job's memory plan is known, until the job has a checkpoint of
        its own that supersedes it."""
        for job in self._jobs.coordinated():
            group = job.scheduler
            if job.memory.plan is None:
                continue
            if (
                job is not self._jobs.current
                or not job.replication.losses_to_survive
                or group.replicas.supersedes_former
                or group.facts.all_gone
                or group.facts.superseded_by
            ):
                job.replication.end_rereplication()
            else:
                self._begin_rereplication(job)

    def _begin_rereplication(self, job: Job) -> None:
        """Begins the re-replication of the restored checkpoint. Waits until the memory-only nodes are known, and, if
        this agent took the job over from a dead one, the job's own replicated checkpoints."""
        network, group, memory = self._context.network, job.scheduler, self._memory
        if not job.replication.needs_rereplication or self.memory_nodes.has_pending_nodes:
            return
        if group.slots.newest is not None and group.replicas.is_survey_pending:
            return
        job.replication.needs_rereplication = False
        identity = job.claim.parent if job.claim is not None else None
        if identity is None or network is None:
            return

        async def rebuild(held: Inventory) -> None:
            # Leased, since a newer checkpoint may be replicated meanwhile and evict this one.
            memory.replicas.arenas.lease(identity)
            try:
                services = network, self._context.workers, memory.replica_service, memory.arenas_of, held
                collector = CheckpointCollector(*services, job.nodes, self.memory_nodes.nodes())
                await collector.rebuild(identity, held.missing_ranks(identity), {})
            finally:
                memory.replicas.arenas.release(identity)

        def target() -> Target:
            nodes, lends = [*job.nodes, *self.memory_nodes.nodes()], job.memory.spare_bytes_by_node()
            return Target(nodes, lends, job.replication.losses_to_survive)

        job.replication.begin_rereplication(
            Rereplication(
                *(network, memory.replica_service, identity),
                target=target,
                own=lambda: memory.inventory(whole=True),
                rebuild=rebuild,
                later=self._context.server.call_later,
                emit=job.context.emit,
                report=job.replication.report_parent,
            )
        )


class FrozenWatch:
    """Emits `job.frozen` once, when the current job has been blocked for LEASE_TIMEOUT_S."""

    def __init__(self, inventory_lease: InventoryLease) -> None:
        self._inventory_lease = inventory_lease
        self._blocked: tuple[Epoch, str] | None = None  # the epoch of the blocked job, and the kind of block
        self._due_s: float | None = None  # when the warning is due; None: the job is not blocked, or it was given

    def update(self, job: Job | None, now_s: float) -> float | None:
        """`job`: the current one. Returns when to look again."""
        cut_off: list[str] = []
        kind = ""
        if job is not None and not (job.scheduler.facts.all_gone or job.scheduler.facts.superseded_by):
            cut_off = [f"node {each['node']}" for each in job.disconnected_ranks() if each["node"]]
            kind = "frozen" if job.scheduler.facts.is_frozen else "cut off" if cut_off else ""
        blocked = (job.epoch, kind) if job is not None and kind else None
        if blocked != self._blocked:
            self._blocked, self._due_s = blocked, now_s + LEASE_TIMEOUT_S if blocked is not None else None
        if job is None or self._due_s is None or now_s < self._due_s:
            return self._due_s
        self._due_s = None
        self._warn(job, kind, cut_off)
        return None

    def _warn(self, job: Job, kind: str, cut_off: list[str]) -> None:
        text = f"no snapshot of this job has been taken for {LEASE_TIMEOUT_S:.0f} s"
        if kind == "frozen":
            text += ", and none is dropped from memory"
            why = self._inventory_lease.refusal(OWN_NODE, job.epoch)
            then = (
                f"it goes on once that start has restored or failed, or its agent was gone for {LEASE_TIMEOUT_S:.0f} s"
            )
            if job.epoch < self._inventory_lease.epoch_floor:
                then = "start the job again"
        else:
            why = f"cut off from the agent of rank 0's node: {', '.join(cut_off)}"
            then = "training goes on, and saving goes on once it is connected; run ckpt watch there to see if it hangs"
        job.context.emit("job.frozen", f"{text}: {why}; {then}", True, {"reason": why})

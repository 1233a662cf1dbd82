"""A follower job: a job that another node's agent coordinates, as this node has it. It has the ranks here and their
memory.

It forwards the ranks' messages to the coordinator, and the coordinator's answers to the ranks. It handles here what
cannot leave this host: descriptors, arenas, the control page, and the death of a process. If the connection to the
coordinator breaks, the ranks' connections are closed too. The ranks then join again, as after an agent's death, so
there is one way to recover. Everything runs on the agent's main thread.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.agent.commit.store_client import StoreClient, options_from, policy_from
from ckpt.agent.job.job_context import send_event
from ckpt.agent.net.channel import Channel
from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.net.progress import ProgressReport
from ckpt.agent.preemption.notice_relay import ExitTiming, RelayedNotice
from ckpt.agent.restore.peer_source import PeerSource
from ckpt.agent.restore.restore_session import RestoreSession, decode_request, kind_of
from ckpt.agent.restore.shared_read import SharedRead, shared_read_of
from ckpt.agent.restore.sources import open_session
from ckpt.agent.runtime.event_loop import EventLoop, Peer
from ckpt.agent.runtime.memory_plan import SLOTS, MemoryPlan, MemoryUse, slots_for
from ckpt.agent.runtime.workers import Workers
from ckpt.agent.snapshots.inventory import parse_claim
from ckpt.agent.snapshots.local_share import LocalShare
from ckpt.agent.snapshots.manifest_gather import FramePlaces
from ckpt.agent.snapshots.memory_checkpoint import LocalMemory, StagedPart
from ckpt.agent.snapshots.remote_share import AnyPeer, encode_parts
from ckpt.agent.state.step_timing import REPORT_DELAY_S
from ckpt.errors import AgentError, CkptError, NoCoordinator
from ckpt.events import Event
from ckpt.ipc.addresses import Address
from ckpt.ipc.arena import Arena
from ckpt.ipc.bounded_msgpack import unpack_bounded
from ckpt.ipc.control_page import ControlWord, WordKind
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NODES_MAX, NodeAt
from ckpt.preemption.notice import Notice, Withdrawn
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.store.lineage import Claim

log = logging.getLogger("ckpt")


@dataclass(slots=True)
class FollowerNode:
    """A rank on this node. `connection_number`: of its connection. `join_request_id`, `leave_request_id`: the ids of
    its requests to join and to leave, until they are answered. `has_left`: the rank was told that it may leave, or its
    process is dead."""

    peer: Peer
    connection_number: int
    join_request_id: int | None
    leave_request_id: int | None = None
    has_left: bool = False


class FollowerJob:
    """One epoch. `nodes`: the job's nodes. `coordinator`: the coordinator's node. `ranks`: the local ranks' memory.
    `is_over`: this object may be dropped."""

    def __init__(
        self,
        epoch: Epoch,
        world: int,
        nodes: tuple[NodeAt, ...],
        network: PeerNetwork,
        server: EventLoop,
        workers: Workers,
        store: StoreClient,
        taken: Callable[[Epoch], MemoryUse],
        arenas_of: Callable[[Identity], Mapping[int, Arena]],
        standing: Iterable[tuple[Notice, ExitTiming]] = (),
    ) -> None:
        """`arenas_of`: this node's arenas with snapshots of a checkpoint, by rank. `standing`: notices heard here
        before."""
        self.epoch, self.world = epoch, world
        self.coordinator = nodes[0]
        self.is_over = False
        self.terms: CommitTerms | None = None  # the coordinator's claim and options, once it has begun
        self.pending_commit: Identity | None = None  # the commit under way, which may need this node's part
        self.local_share = LocalShare(world, workers, lambda: taken(epoch))
        self._local_ranks = next(
            (frozenset(node.ranks) for node in nodes if node.name == network.agent_name), frozenset[int]()
        )
        self._network, self._server, self._workers, self._store = network, server, workers, store
        self._connections_by_rank: dict[int, FollowerNode] = {}
        self._numbers = itertools.count(1)
        self._reported_steps: list[list[int]] = []
        self.nodes, self._arenas_of = nodes, arenas_of
        self._standing_notices = RelayedNotice()
        for notice, when in standing:
            self._standing_notices.record_notice(notice, when)
        self._restore: RestoreSession | None = None
        # Fetches that wait for the coordinator to say where the frames are; see frames_asked.
        self._pending_fetches: list[tuple[Peer, Identity, tuple[list[int], list[int]]]] = []
        self._is_locating = False  # the coordinator was asked
        self._memory_limit_bytes: int | None = None  # the user's memory limit
        self._slots_wanted = SLOTS  # wanted, if memory allows
        self._report_steps()

    # -- what the node asks

    @property
    def is_needed(self) -> bool:
        """True if a rank here is connected, or the coordinator is."""
        return not self.is_over and (self._is_coordinator_connected or self.has_ranks)

    @property
    def claim(self) -> Claim | None:
        return self.terms.claim if self.terms is not None else None

    @property
    def has_ranks(self) -> bool:
        """True if some rank of the job is connected here."""
        return any(each.peer.is_open and not each.has_left for each in self._connections_by_rank.values())

    @property
    def is_idle(self) -> bool:
        """True if no rank is here and the coordinator commits nothing."""
        return not self.has_ranks and self.pending_commit is None

    @property
    def is_leaving(self) -> bool:
        """True if the ranks were told to leave, or a hold is appointed."""
        page = self.local_share.control_page
        return bool(page.leave_attempt()) or any(word.kind is WordKind.HOLD for word in page.appointments())

    @property
    def lowest_rank(self) -> int:
        """The lowest of this node's ranks. Its environment sets the sources of notices here."""
        return min(self._local_ranks)

    @property
    def is_training(self) -> bool:
        """True if a rank here has entered a step."""
        return any(map(self.local_share.control_page.entered_step, self._local_ranks))

    def rank_of(self, peer: AnyPeer) -> int | None:
        return next((rank for rank, each in self._connections_by_rank.items() if each.peer is peer), None)

    def status(self) -> dict[str, Any]:
        return {
            "epoch": str(self.epoch),
            "launch": self.claim.launch if self.claim is not None else None,
            "coordinator": self.coordinator.name,
            "connected": self._is_coordinator_connected,
            "ranks": sorted(self._connections_by_rank),
            "steps": {
                str(rank): self.local_share.control_page.entered_step(rank)
                for rank in sorted(self._connections_by_rank)
            },
            "arena_bytes": self.local_share.arena_bytes,
        }

    def on_notice(self, word: Notice | Withdrawn, when: ExitTiming = ExitTiming.IN_TIME) -> None:
        """Passes a notice for this node, or its withdrawal, to the coordinator, which decides what follows."""
        self._standing_notices.record_notice(word, when)
        self._send_notices()

    def withdraw_operator_notice(self, source: str) -> None:
        """Withdraws what an operator asked for on any node; the coordinator passes this on."""
        self.tell_coordinator({"t": "withdraw-notice", "source": source})

    def _send_notices(self) -> None:
        self.tell_coordinator({"t": "node-notices", "notices": self._standing_notices.notice_fields()})

    def drop(self) -> None:
        """Frees the memory, and stops watching the ranks' processes."""
        self.is_over = True
        self._end_restore()
        self.local_share.drop()
        for each in self._connections_by_rank.values():
            each.peer.unwatch_death()

    # -- what the ranks say

    def join(self, peer: Peer, message: Message) -> None:
        """A rank joins, or joins again. Errors: AgentError; NotLed if the coordinator is not connected; UsageError."""
        fields = message.fields
        rank, resume = int(fields["rank"]), bool(fields["resume"])
        if rank not in self._local_ranks:
            raise AgentError(f"rank {rank} is not one of this node's in {self.epoch}")
        if not self._is_coordinator_connected:
            raise NoCoordinator(
                f"the agent of rank 0's node, which coordinates {self.epoch}, is not connected to that of this node now"
            )
        peer.watch_death()
        self._memory_limit_bytes = options_from(fields["options"]).limits.memory
        self._slots_wanted = slots_for(policy_from(fields["options"]))
        known = self._connections_by_rank.get(rank)
        if known is not None and known.peer is not peer:
            known.peer.unwatch_death()
            known.peer.disconnect()
        slots = [int(slot) for slot in fields["arenas"]] if resume else []
        self.local_share.take_arenas(rank, slots, message.fds, is_new=known is None)
        if resume and self.terms is None:  # a former agent received the terms
            options = options_from(fields["options"])
            self.terms = CommitTerms(parse_claim(self.epoch, fields), options.codec, options.limits.bandwidth)
        here = self._connections_by_rank[rank] = FollowerNode(peer, next(self._numbers), int(fields["id"]))
        # The coordinator knows the nodes, so the list is not sent again for each rank.
        message.blobs = message.blobs[:2]
        self._forward_to_coordinator(rank, here, message)

    def message(self, rank: int, peer: Peer, message: Message) -> None:
        if message.kind == "fetch":
            self._fetch(peer, message)
        elif message.kind == "frames-received":
            if self._restore is not None:
                ok, bad = ([int(n) for n in message.fields[name]] for name in ("ok", "bad"))
                self._restore.acknowledge_frames(peer, ok, bad)
        elif message.kind == "stream-ended":
            if self._restore is not None:
                self._restore.end_stream(peer, int(message.fields["stream"]))
        else:
            here = self._connections_by_rank[rank]
            if message.kind == "leave":
                here.leave_request_id = int(message.fields["id"])
            self._forward_to_coordinator(rank, here, message)

    def peer_disconnected(self, peer: AnyPeer) -> None:
        self._report_rank_gone(peer, "ended")

    def peer_died(self, peer: AnyPeer) -> None:
        self._report_rank_gone(peer, "died")

    def _report_rank_gone(self, peer: AnyPeer, how: str) -> None:
        rank = self.rank_of(peer)
        if rank is None:
            return
        here = self._connections_by_rank[rank]
        here.has_left = here.has_left or how == "died"
        if self._restore is not None:
            self._restore.drop_request(peer)
        self.tell_coordinator(
            {"t": "rank-disconnected", "rank": rank, "connection_number": here.connection_number, "cause": how}
        )

    def _forward_to_coordinator(self, rank: int, here: FollowerNode, message: Message) -> None:
        head = {"t": "from-rank", "rank": rank, "connection_number": here.connection_number, "pid": here.peer.pid}
        self.tell_coordinator({**head, "message": message.fields}, message.blobs)

    def end_uncoordinated_restore(self) -> None:
        """Ends the restore under way, unless the coordinator is connected and decides what follows. Frames that were
        read for it, here and for other nodes, are dropped."""
        if not self._is_coordinator_connected:
            self._end_restore()

    # -- what the coordinator says

    def on_coordinator_lost(self) -> None:
        """The coordinator's connection is gone: withdraws all appointments and disconnects the ranks, so open attempts
        are missed."""
        self.pending_commit = None
        self.local_share.clear_appointments()
        self._lose_ranks()

    def on_coordinator_message(self, channel: Channel, message: Message) -> None:
        """Handles a message of the coordinator. Errors: AgentError, or any exception that a malformed message causes;
        the caller reports both to the coordinator."""
        fields = message.fields
        match message.kind:
            case "to-rank":
                self._forward_to_rank(fields, message.blobs)
            case "disconnect-rank":
                if (here := self._find_connection(fields)) is not None:
                    here.peer.disconnect()
            case "control-word":
                self.local_share.announce(int(fields["slot"]), ControlWord.unpack(int(fields["word"])))
            case "leave-verdict":
                self.local_share.announce_verdict(int(fields["attempt"]))
            case "pending-commit":
                told = fields["identity"]
                self.pending_commit = Identity.parse(str(told)) if told is not None else None
            case "offer-slot":
                slot = int(fields["slot"])
                if self.local_share.has_missing_arena(slot):  # it was lost with a former agent
                    self.tell_coordinator({"t": "arenas-lost", "slot": slot})
                else:
                    self.local_share.offer_slot(slot, str(fields["division"]))
            case "close-arenas":
                self.local_share.close_arenas(int(fields["slot"]))
            case "limit-replication":
                told = fields["bandwidth"]
                self._network.set_rate_limit(float(told) if told is not None else None)
            case "epoch-claimed":
                self._set_terms(CommitTerms.decode(message.blobs[0]))
                self._end_restore()  # all ranks have restored
            case "epoch-ended":
                self.is_over = True
                self._lose_ranks()  # no agent will answer their requests
            case "plan-memory":
                self._plan_memory(channel, fields)
            case "make-arenas":
                self._make_arenas(channel, fields)
            case "hash-snapshots":
                self._hash_snapshots(channel, fields)
            case _:
                raise AgentError(f"the agent does not know the message {message.kind!r} from a coordinator")

    def _set_terms(self, terms: CommitTerms) -> None:
        if terms.claim.epoch != self.epoch:
            raise AgentError(f"the claim of {terms.claim.epoch} was told for {self.epoch}")
        self.terms = terms

    def decline_staging(self, fields: dict[str, Any], why: str) -> bool:
        """If the coordinator's message would have a rank stage now, tells the rank that it cannot and the coordinator
        that the rank missed. Returns whether that was so."""
        here, rank, body = self._find_connection(fields), int(fields["rank"]), dict(fields["message"])
        if here is None or body.get("saved") is not False:
            return False
        here.peer.send({"t": "error", "id": int(body["id"]), "kind": "not-staged", "message": why})
        self._forward_to_coordinator(
            rank, here, Message({"t": "snapshot-missed", "attempt": int(body["attempt"]), "why": why}, [], [])
        )
        return True

    def _forward_to_rank(self, fields: dict[str, Any], blobs: list[bytes]) -> None:
        here, rank, body = self._find_connection(fields), int(fields["rank"]), dict(fields["message"])
        if here is None:
            return
        fds: list[int] = []
        if body.get("t") in ("reply", "error") and body.get("id") == here.join_request_id:
            here.join_request_id = None
            if body["t"] == "reply":
                fds = self.local_share.connect_rank(rank, here.peer)
                self._send_notices()
        elif body.get("t") == "reply" and body.get("id") == here.leave_request_id:
            here.has_left = True
        # The deadline travels as seconds from now.
        if body.get("leave_deadline_s") is not None:
            body["leave_deadline_s"] = float(body["leave_deadline_s"]) + time.monotonic()
        here.peer.send(body, fds, blobs)

    def _find_connection(self, fields: dict[str, Any]) -> FollowerNode | None:
        """The rank whose connection the message names; None if that connection is gone."""
        here = self._connections_by_rank.get(int(fields["rank"]))
        return here if here is not None and here.connection_number == fields["connection_number"] else None

    def _plan_memory(self, channel: Channel, fields: dict[str, Any]) -> None:
        request_id = int(fields["id"])

        def measured(plan: MemoryPlan | None, error: str) -> None:
            answer_request(channel, request_id, {"plan": plan.table() if plan is not None else None}, error)

        limit = int(fields["limit_bytes"]) if fields["limit_bytes"] is not None else None
        self.local_share.plan_memory(self._parse_sizes(fields), int(fields["slots"]), limit, measured)

    def _make_arenas(self, channel: Channel, fields: dict[str, Any]) -> None:
        request_id, slot, sizes = int(fields["id"]), int(fields["slot"]), self._parse_sizes(fields)
        moving = ProgressReport(channel, request_id, self.local_share.progress, self._server.call_later)

        def made(sizes: dict[int, int], error: str) -> None:
            moving.end()
            answer_request(channel, request_id, {"sizes": list(sizes.items())}, error)

        self.local_share.make_arenas(slot, sizes, made)

    def _hash_snapshots(self, channel: Channel, fields: dict[str, Any]) -> None:
        request_id = int(fields["id"])
        known = {int(rank): bytes(digest) for rank, digest in fields["known"]}
        slot, identity = int(fields["slot"]), Identity.parse(str(fields["identity"]))

        def read(parts: list[StagedPart], error: str) -> None:
            moving.end()
            blobs = [] if error else [encode_parts(parts, known, self.local_share.reader.encoded_declarations())]
            answer_request(channel, request_id, {}, error, blobs)

        self.local_share.hash_snapshots(slot, identity, read)
        # Made after `ranks.read`, which may refuse by raising.
        moving = ProgressReport(channel, request_id, self.local_share.progress, self._server.call_later)

    def _parse_sizes(self, fields: dict[str, Any]) -> dict[int, int]:
        sizes = {int(rank): int(size) for rank, size in fields["sizes"]}
        if not sizes.keys() <= self._local_ranks or any(size < 0 for size in sizes.values()):
            raise AgentError("the coordinator speaks of arenas that this node has not")
        return sizes

    # -- restoring

    def _fetch(self, peer: Peer, message: Message) -> None:
        identity = Identity.parse(str(message.fields["identity"]))
        asked = decode_request(message)
        peer.reply(int(message.fields["id"]), {})
        if self._restore is not None and self._restore.identity == identity:
            self._restore.request(peer, *asked)
            return
        self._pending_fetches.append((peer, identity, asked))
        if not self._is_locating:
            self._locate_candidate(identity)

    def _locate_candidate(self, identity: Identity) -> None:
        self._is_locating = True
        fields = {"t": "locate-candidate", "epoch": str(self.epoch), "identity": str(identity)}
        self._network.request(
            self.coordinator.name, fields, (), lambda answer, error: self._on_candidate_located(identity, answer, error)
        )

    def _on_candidate_located(self, identity: Identity, answer: Message | None, error: str) -> None:
        self._is_locating = False
        if self.is_over:
            return
        waiting, self._pending_fetches = self._pending_fetches, []
        self._end_restore()
        kind = AgentError.kind  # an unreadable candidate may be as good as any
        if answer is not None:
            try:
                self._restore = self._restore_from(identity, answer)
            except Exception as exc:  # the coordinator may send anything, and ranks wait for this
                kind = kind_of(exc) if isinstance(exc, CkptError) else kind
                error = f"the coordinator's word on {identity} cannot be read: {exc!r:.500}"
        for peer, wanted, asked in waiting:
            if wanted != identity:
                self._pending_fetches.append((peer, wanted, asked))
            elif self._restore is not None:
                self._restore.request(peer, *asked)
            else:
                text = f"where {identity} is to be had is not known: {error}"
                peer.send({"t": "fetch-ended", "ok": False, "message": text, "sources": {}, "kind": kind})
        if self._pending_fetches:
            self._locate_candidate(self._pending_fetches[0][1])

    def _restore_from(self, identity: Identity, answer: Message) -> RestoreSession:
        from ckpt.format.record import decode_manifest
        from ckpt.store.lineage import CommitRef

        manifest = decode_manifest(answer.blobs[0])
        slot_bytes = int(manifest.frames["length"].sum()) * len(self._local_ranks) // self.world
        room = lambda: self.local_share.restore_budget_bytes(slot_bytes, self._slots_wanted, self._memory_limit_bytes)  # noqa: E731
        places: FramePlaces | None = None
        if "holders" in answer.fields:  # it is in memory, wholly or in part, here or on other nodes
            places = FramePlaces.parse(identity, answer.blobs[1:], manifest).translate_holders(
                self._network.agent_name, self.coordinator.name
            )
        refs = [CommitRef(identity, str(writer), int(size)) for writer, size in answer.fields["records"]]
        fan: SharedRead | None = None
        if refs and len(self.nodes) > 1:
            read = lambda: self._store.open_reader(refs)  # noqa: E731
            only = places.missing_frames if places is not None else None
            about = identity, self.epoch, manifest, self.nodes
            fan = SharedRead(*about, self._network, read, room, self._send_event, only)
        near: LocalMemory | None = None
        peers: PeerSource | None = None
        if places is not None:
            near = LocalMemory(self._arenas_of(identity), places.ranks, places.offsets)
            nodes = [*self.nodes, *_parse_holders(answer.blobs[4])]
            peers = PeerSource(places, self._network, nodes)
        return open_session(
            identity,
            manifest,
            len(self._local_ranks),
            near,
            (lambda: self._store.open_reader(refs)) if refs else None,
            self._workers,
            self._server.call_later,
            self._server.post,
            peers=peers,
            fan=fan,
            folder=self._store.folder,
        )

    def on_source_lost(self, name: str) -> None:
        """The agent of that name is disconnected."""
        if self._restore is not None:
            self._restore.handle_disconnect(name)

    def find_shared_read(self, identity: Identity, asked_by: str) -> SharedRead | None:
        """This node's part in the shared read of a checkpoint; None: it does not restore that checkpoint yet, and asks
        the coordinator about it. Errors: AgentError if `asked_by` is no node of the job."""
        if all(node.name != asked_by for node in self.nodes):
            raise AgentError(f"agent {asked_by} has no part in {self.epoch}")
        if self._restore is not None and self._restore.identity == identity:
            return shared_read_of(self._restore)
        if self._restore is None and not self._is_locating:
            self._locate_candidate(identity)
        return None

    def _send_event(self, event: Event) -> None:
        """Sends the event to one connected rank here: one rank is enough."""
        log.log(logging.WARNING if event.loud else logging.INFO, "%s", event.message)
        peer = next((here.peer for _, here in sorted(self._connections_by_rank.items()) if here.peer.is_open), None)
        if peer is not None:
            send_event(peer, event)

    def _lose_ranks(self) -> None:
        """Disconnects the ranks that were not told that they may leave. They join again and hear the present state."""
        for here in self._connections_by_rank.values():
            if not here.has_left:
                here.peer.disconnect()

    def _end_restore(self) -> None:
        if self._restore is not None:
            self._restore.close()
            self._restore = None

    # -- small steps

    @property
    def _is_coordinator_connected(self) -> bool:
        return self._network.channel(self.coordinator.name) is not None

    def tell_coordinator(self, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Sends a message to the coordinator; it is lost if the coordinator is not connected."""
        self._network.notify(self.coordinator.name, {**fields, "epoch": str(self.epoch)}, blobs)

    def _report_steps(self) -> None:
        if self.is_over:
            return
        page = self.local_share.control_page
        steps = [[rank, page.entered_step(rank), page.poll_count(rank)] for rank in sorted(self._connections_by_rank)]
        if steps != self._reported_steps:
            self._reported_steps = steps
            self.tell_coordinator({"t": "rank-steps", "steps": steps})
        self._server.call_later(REPORT_DELAY_S, self._report_steps)


def _parse_holders(blob: bytes) -> list[NodeAt]:
    """Nodes without ranks that hold part of a candidate, from the coordinator's message. Errors: AgentError,
    UsageError, TypeError, ValueError."""
    return [
        NodeAt(str(name), tuple(Address.parse(str(each)) for each in addresses), ())
        for name, addresses in unpack_bounded(blob, "the nodes that hold some of it")[:NODES_MAX]
    ]


def answer_request(
    channel: Channel, request_id: int, body: dict[str, Any], error: str, blobs: Sequence[bytes] = ()
) -> None:
    """Answers another agent's request with `body`, or refuses it if `error` is not ""."""
    if error:
        channel.refuse(request_id, AgentError(error))
    else:
        channel.reply(request_id, body, blobs)

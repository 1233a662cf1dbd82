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
from ckpt.agent.job.job_context import tell
from ckpt.agent.net.channel import Channel
from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.net.progress import ProgressReport
from ckpt.agent.preemption.deadline_strategy import When
from ckpt.agent.preemption.notice_relay import RelayedNotice
from ckpt.agent.restore.peer_source import PeerSource
from ckpt.agent.restore.restore_session import RestoreSession, frames_asked, kind_of
from ckpt.agent.restore.shared_read import SharedRead
from ckpt.agent.runtime.event_loop import EventLoop, Peer
from ckpt.agent.runtime.memory_plan import SLOTS, MemoryPlan, MemoryUse, slots_for
from ckpt.agent.runtime.workers import Workers
from ckpt.agent.snapshots.inventory import claim_told
from ckpt.agent.snapshots.local_share import LocalShare
from ckpt.agent.snapshots.manifest_gather import FramePlaces
from ckpt.agent.snapshots.memory_checkpoint import Near, StagedPart
from ckpt.agent.snapshots.remote_share import AnyPeer, encode_parts
from ckpt.agent.state.step_timing import TOLD_S
from ckpt.errors import AgentError, CkptError, NotLed
from ckpt.events import Event
from ckpt.ipc.addresses import Address
from ckpt.ipc.arena import Arena
from ckpt.ipc.bounded_msgpack import unpacked
from ckpt.ipc.control_page import SLOTS_MAX, ControlWord, WordKind
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NODES_MAX, NodeAt
from ckpt.preemption.notice import Notice, Withdrawn
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.store.lineage import Claim

log = logging.getLogger("ckpt")


@dataclass(slots=True)
class FollowerNode:
    """A rank on this node. `number`: of its connection. `joining`, `leaving`: the ids of its requests to join and to
    leave, until they are answered. `left`: the rank was told that it may leave, or its process is dead."""

    peer: Peer
    number: int
    joining: int | None
    leaving: int | None = None
    left: bool = False


class FollowerJob:
    """One epoch. `nodes`: the job's nodes. `leader`: the coordinator's node. `ranks`: the local ranks' memory. `over`:
    this object may be dropped."""

    def __init__(
        self,
        epoch: Epoch,
        world: int,
        nodes: tuple[NodeAt, ...],
        network: PeerNetwork,
        server: EventLoop,
        bulk: Workers,
        store: StoreClient,
        taken: Callable[[Epoch], MemoryUse],
        arenas_of: Callable[[Identity], Mapping[int, Arena]],
        standing: Iterable[tuple[Notice, When]] = (),
    ) -> None:
        """`arenas_of`: this node's arenas with snapshots of a checkpoint, by rank. `standing`: notices heard here
        before."""
        self.epoch, self.world = epoch, world
        self.leader = nodes[0]
        self.over = False
        self.terms: CommitTerms | None = None  # the coordinator's claim and options, once it has begun
        self.commits: Identity | None = None  # the commit under way, which may need this node's part
        self.ranks = LocalShare(world, bulk, lambda: taken(epoch))
        self._mine = next((frozenset(node.ranks) for node in nodes if node.name == network.me), frozenset[int]())
        self._network, self._server, self._bulk, self._store = network, server, bulk, store
        self._here: dict[int, FollowerNode] = {}
        self._numbers = itertools.count(1)
        self._said: list[list[int]] = []
        self.nodes, self._arenas_of = nodes, arenas_of
        self._standing = RelayedNotice()
        for notice, when in standing:
            self._standing.hear(notice, when)
        self._restore: RestoreSession | None = None
        # Fetches that wait for the coordinator to say where the frames are; see frames_asked.
        self._fetching: list[tuple[Peer, Identity, tuple[list[int], list[int]]]] = []
        self._asking = False  # the coordinator was asked
        self._limit_bytes: int | None = None  # the user's memory limit
        self._slots = SLOTS  # wanted, if memory allows
        self._tell_steps()

    # -- what the node asks

    @property
    def needed(self) -> bool:
        """True if a rank here is connected, or the coordinator is."""
        return not self.over and (self._is_led or self.has_ranks)

    @property
    def claim(self) -> Claim | None:
        return self.terms.claim if self.terms is not None else None

    @property
    def has_ranks(self) -> bool:
        """True if some rank of the job is connected here."""
        return any(each.peer.open and not each.left for each in self._here.values())

    @property
    def is_idle(self) -> bool:
        """True if no rank is here and the coordinator commits nothing."""
        return not self.has_ranks and self.commits is None

    @property
    def leaves(self) -> bool:
        """True if the ranks were told to leave, or a hold is appointed."""
        page = self.ranks.page
        return bool(page.leaves()) or any(word.kind is WordKind.HOLD for word in page.appointed())

    @property
    def lowest(self) -> int:
        """The lowest of this node's ranks. Its environment sets the sources of notices here."""
        return min(self._mine)

    @property
    def is_training(self) -> bool:
        """True if a rank here has entered a step."""
        return any(self.ranks.steps())

    def rank_of(self, peer: AnyPeer) -> int | None:
        return next((rank for rank, each in self._here.items() if each.peer is peer), None)

    def status(self) -> dict[str, Any]:
        return {
            "epoch": str(self.epoch),
            "launch": self.claim.launch if self.claim is not None else None,
            "coordinator": self.leader.name,
            "connected": self._is_led,
            "ranks": sorted(self._here),
            "steps": {str(rank): self.ranks.page.entered(rank) for rank in sorted(self._here)},
            "arena_bytes": self.ranks.arena_bytes,
        }

    def hear(self, word: Notice | Withdrawn, when: When = When.IN_TIME) -> None:
        """Passes a notice for this node, or its withdrawal, to the coordinator, which decides what follows."""
        self._standing.hear(word, when)
        self._tell_notices()

    def take_back(self, source: str) -> None:
        """Withdraws what an operator asked for on any node; the coordinator passes this on."""
        self.tell({"t": "take-back", "source": source})

    def _tell_notices(self) -> None:
        self.tell({"t": "notices", "standing": self._standing.told()})

    def drop(self) -> None:
        """Frees the memory, and stops watching the ranks' processes."""
        self.over = True
        self._end_restore()
        self.ranks.drop()
        for each in self._here.values():
            each.peer.forget()

    # -- what the ranks say

    def join(self, peer: Peer, message: Message) -> None:
        """A rank joins, or joins again. Errors: AgentError; NotLed if the coordinator is not connected; UsageError."""
        fields = message.fields
        rank, resume = int(fields["rank"]), bool(fields["resume"])
        if rank not in self._mine:
            raise AgentError(f"rank {rank} is not one of this node's in {self.epoch}")
        if not self._is_led:
            raise NotLed(
                f"the agent of rank 0's node, which coordinates {self.epoch}, is not connected to that of this node now"
            )
        peer.watch_death()
        self._limit_bytes = options_from(fields["options"]).limits.memory
        self._slots = slots_for(policy_from(fields["options"]))
        known = self._here.get(rank)
        if known is not None and known.peer is not peer:
            known.peer.forget()
            known.peer.lose()
        slots = [int(slot) for slot in fields["arenas"]] if resume else []
        if len(slots) != len(message.fds) or not set(slots) <= set(range(SLOTS_MAX)):
            raise AgentError(f"rank {rank} names {len(slots)} arenas and hands over {len(message.fds)}")
        if known is None:
            self.ranks.bring(rank, slots, message.fds)
        else:
            self.ranks.has(rank, slots, message.fds)
        if resume and self.terms is None:  # a former agent received the terms
            options = options_from(fields["options"])
            self.terms = CommitTerms(claim_told(self.epoch, fields), options.codec, options.limits.bandwidth)
        here = self._here[rank] = FollowerNode(peer, next(self._numbers), int(fields["id"]))
        # The coordinator knows the nodes, so the list is not sent again for each rank.
        message.blobs = message.blobs[:2]
        self._forward(rank, here, message)

    def message(self, rank: int, peer: Peer, message: Message) -> None:
        if message.kind == "fetch":
            self._fetch(peer, message)
        elif message.kind == "got":
            if self._restore is not None:
                ok, bad = ([int(n) for n in message.fields[name]] for name in ("ok", "bad"))
                self._restore.got(peer, ok, bad)
        elif message.kind == "streamed":
            if self._restore is not None:
                self._restore.streamed(peer, int(message.fields["stream"]))
        else:
            here = self._here[rank]
            if message.kind == "leave":
                here.leaving = int(message.fields["id"])
            self._forward(rank, here, message)

    def ended(self, peer: AnyPeer) -> None:
        self._gone(peer, "ended")

    def died(self, peer: AnyPeer) -> None:
        self._gone(peer, "died")

    def _gone(self, peer: AnyPeer, how: str) -> None:
        rank = self.rank_of(peer)
        if rank is None:
            return
        here = self._here[rank]
        here.left = here.left or how == "died"
        if self._restore is not None:
            self._restore.drop(peer)
        self.tell({"t": "gone", "rank": rank, "number": here.number, "how": how})

    def _forward(self, rank: int, here: FollowerNode, message: Message) -> None:
        head = {"t": "rank", "rank": rank, "number": here.number, "pid": here.peer.pid}
        self.tell({**head, "m": message.fields}, message.blobs)

    def end_reading_unled(self) -> None:
        """Ends the restore under way, unless the coordinator is connected and decides what follows. Frames that were
        read for it, here and for other nodes, are dropped."""
        if not self._is_led:
            self._end_restore()

    # -- what the coordinator says

    def closed(self) -> None:
        """The coordinator's connection is gone: withdraws all appointments and disconnects the ranks, so open attempts
        are missed."""
        self.commits = None
        self.ranks.appoint_nothing()
        self._lose_ranks()

    def led(self, channel: Channel, message: Message) -> None:
        """Handles a message of the coordinator. Errors: AgentError, or any exception that a malformed message causes;
        the caller reports both to the coordinator."""
        fields = message.fields
        match message.kind:
            case "to":
                self._pass_on(fields, message.blobs)
            case "lose":
                if (here := self._meant(fields)) is not None:
                    here.peer.lose()
            case "word":
                self.ranks.announce(int(fields["slot"]), ControlWord.unpack(int(fields["word"])))
            case "verdict":
                self.ranks.leave(int(fields["round"]))
            case "commits":
                told = fields["identity"]
                self.commits = Identity.parse(str(told)) if told is not None else None
            case "offer":
                slot = int(fields["slot"])
                if self.ranks.lacks(slot):  # it was lost with a former agent
                    self.tell({"t": "lacks", "slot": slot})
                else:
                    self.ranks.offer(slot, str(fields["division"]))
            case "close-arenas":
                self.ranks.close_arenas(int(fields["slot"]))
            case "limit":
                told = fields["bandwidth"]
                self._network.limit(float(told) if told is not None else None)
            case "claimed":
                self._told(CommitTerms.decode(message.blobs[0]))
                self._end_restore()  # all ranks have restored
            case "drop":
                self.over = True
                self._lose_ranks()  # no agent will answer their requests
            case "measure":
                self._measure(channel, fields)
            case "make":
                self._make(channel, fields)
            case "read":
                self._read(channel, fields)
            case _:
                raise AgentError(f"the agent does not know the message {message.kind!r} from a coordinator")

    def _told(self, terms: CommitTerms) -> None:
        if terms.claim.epoch != self.epoch:
            raise AgentError(f"the claim of {terms.claim.epoch} was told for {self.epoch}")
        self.terms = terms

    def declines(self, fields: dict[str, Any], why: str) -> bool:
        """If the coordinator's message would have a rank stage now, tells the rank that it cannot and the coordinator
        that the rank missed. Returns whether that was so."""
        here, rank, body = self._meant(fields), int(fields["rank"]), dict(fields["m"])
        if here is None or body.get("saved") is not False:
            return False
        here.peer.send({"t": "error", "id": int(body["id"]), "kind": "not-staged", "message": why})
        self._forward(rank, here, Message({"t": "missed", "round": int(body["round"]), "why": why}, [], []))
        return True

    def _pass_on(self, fields: dict[str, Any], blobs: list[bytes]) -> None:
        here, rank, body = self._meant(fields), int(fields["rank"]), dict(fields["m"])
        if here is None:
            return
        fds: list[int] = []
        if body.get("t") in ("reply", "error") and body.get("id") == here.joining:
            here.joining = None
            if body["t"] == "reply":
                fds = self.ranks.welcome(rank, here.peer)
                self._tell_notices()
        elif body.get("t") == "reply" and body.get("id") == here.leaving:
            here.left = True
        # The deadline travels as seconds from now.
        if body.get("by_s") is not None:
            body["by_s"] = float(body["by_s"]) + time.monotonic()
        here.peer.send(body, fds, blobs)

    def _meant(self, fields: dict[str, Any]) -> FollowerNode | None:
        """The rank whose connection the message names; None if that connection is gone."""
        here = self._here.get(int(fields["rank"]))
        return here if here is not None and here.number == fields["number"] else None

    def _measure(self, channel: Channel, fields: dict[str, Any]) -> None:
        request_id = int(fields["id"])

        def measured(plan: MemoryPlan | None, error: str) -> None:
            answer(channel, request_id, {"plan": plan.table() if plan is not None else None}, error)

        limit = int(fields["limit"]) if fields["limit"] is not None else None
        self.ranks.measure(self._sizes(fields), int(fields["slots"]), limit, measured)

    def _make(self, channel: Channel, fields: dict[str, Any]) -> None:
        request_id, slot, sizes = int(fields["id"]), int(fields["slot"]), self._sizes(fields)
        moving = ProgressReport(channel, request_id, self.ranks.progress, self._server.later)

        def made(sizes: dict[int, int], error: str) -> None:
            moving.end()
            answer(channel, request_id, {"sizes": list(sizes.items())}, error)

        self.ranks.make(slot, sizes, made)

    def _read(self, channel: Channel, fields: dict[str, Any]) -> None:
        request_id = int(fields["id"])
        known = {int(rank): bytes(digest) for rank, digest in fields["known"]}
        slot, identity = int(fields["slot"]), Identity.parse(str(fields["identity"]))

        def read(parts: list[StagedPart], error: str) -> None:
            moving.end()
            blobs = [] if error else [encode_parts(parts, known, self.ranks.reader.declared())]
            answer(channel, request_id, {}, error, blobs)

        self.ranks.read(slot, identity, read)
        # Made after `ranks.read`, which may refuse by raising.
        moving = ProgressReport(channel, request_id, self.ranks.progress, self._server.later)

    def _sizes(self, fields: dict[str, Any]) -> dict[int, int]:
        sizes = {int(rank): int(size) for rank, size in fields["sizes"]}
        if not sizes.keys() <= self._mine or any(size < 0 for size in sizes.values()):
            raise AgentError("the coordinator speaks of arenas that this node has not")
        return sizes

    # -- restoring

    def _fetch(self, peer: Peer, message: Message) -> None:
        identity = Identity.parse(str(message.fields["identity"]))
        asked = frames_asked(message)
        peer.reply(int(message.fields["id"]), {})
        if self._restore is not None and self._restore.identity == identity:
            self._restore.request(peer, *asked)
            return
        self._fetching.append((peer, identity, asked))
        if not self._asking:
            self._ask_where(identity)

    def _ask_where(self, identity: Identity) -> None:
        self._asking = True
        fields = {"t": "candidate", "epoch": str(self.epoch), "identity": str(identity)}
        self._network.ask(self.leader.name, fields, (), lambda answer, error: self._found(identity, answer, error))

    def _found(self, identity: Identity, answer: Message | None, error: str) -> None:
        self._asking = False
        if self.over:
            return
        waiting, self._fetching = self._fetching, []
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
                self._fetching.append((peer, wanted, asked))
            elif self._restore is not None:
                self._restore.request(peer, *asked)
            else:
                text = f"where {identity} is to be had is not known: {error}"
                peer.send({"t": "fetched", "ok": False, "message": text, "sources": {}, "kind": kind})
        if self._fetching:
            self._ask_where(self._fetching[0][1])

    def _restore_from(self, identity: Identity, answer: Message) -> RestoreSession:
        from ckpt.format.record import decode_manifest
        from ckpt.store.lineage import CommitRef

        manifest = decode_manifest(answer.blobs[0])
        slot_bytes = int(manifest.frames["length"].sum()) * len(self._mine) // self.world
        room = lambda: self.ranks.for_a_while_bytes(slot_bytes, self._slots, self._limit_bytes)  # noqa: E731
        places: FramePlaces | None = None
        if "holders" in answer.fields:  # it is in memory, wholly or in part, here or on other nodes
            places = FramePlaces.parse(identity, answer.blobs[1:], manifest).seen_by(self._network.me, self.leader.name)
        refs = [CommitRef(identity, str(writer), int(size)) for writer, size in answer.fields["records"]]
        fan: SharedRead | None = None
        if refs and len(self.nodes) > 1:
            services = self._network, self._bulk, self._server.later, self._server.post
            read = lambda: self._store.reader(refs)  # noqa: E731
            only = places.lacking if places is not None else None
            fan = SharedRead(identity, self.epoch, manifest, self.nodes, *services, read, room, self._tell_event, only)
        near: Near | None = None
        peers: PeerSource | None = None
        if places is not None:
            near = Near(self._arenas_of(identity), places.ranks, places.offsets)
            nodes = [*self.nodes, *_givers(answer.blobs[4])]
            peers = PeerSource(places, manifest, self._network, nodes, self._server.post)
        return RestoreSession(
            identity,
            manifest,
            len(self._mine),
            near,
            (lambda: self._store.reader(refs)) if refs else None,
            self._bulk,
            self._server.later,
            self._server.post,
            peers=peers,
            fan=fan,
            folder=self._store.folder,
        )

    def source_gone(self, name: str) -> None:
        """The agent of that name is disconnected."""
        if self._restore is not None:
            self._restore.source_gone(name)

    def shared(self, identity: Identity, asked_by: str) -> SharedRead | None:
        """This node's part in the shared read of a checkpoint; None: it does not restore that checkpoint yet, and asks
        the coordinator about it. Errors: AgentError if `asked_by` is no node of the job."""
        if all(node.name != asked_by for node in self.nodes):
            raise AgentError(f"agent {asked_by} has no part in {self.epoch}")
        if self._restore is not None and self._restore.identity == identity:
            return self._restore.fan
        if self._restore is None and not self._asking:
            self._ask_where(identity)
        return None

    def _tell_event(self, event: Event) -> None:
        """Sends the event to one connected rank here: one rank is enough."""
        log.log(logging.WARNING if event.loud else logging.INFO, "%s", event.message)
        peer = next((here.peer for _, here in sorted(self._here.items()) if here.peer.open), None)
        if peer is not None:
            tell(peer, event)

    def _lose_ranks(self) -> None:
        """Disconnects the ranks that were not told that they may leave. They join again and hear the present state."""
        for here in self._here.values():
            if not here.left:
                here.peer.lose()

    def _end_restore(self) -> None:
        if self._restore is not None:
            self._restore.close()
            self._restore = None

    # -- small steps

    @property
    def _is_led(self) -> bool:
        return self._network.channel(self.leader.name) is not None

    def tell(self, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Sends a message to the coordinator; it is lost if the coordinator is not connected."""
        self._network.tell(self.leader.name, {**fields, "epoch": str(self.epoch)}, blobs)

    def _tell_steps(self) -> None:
        if self.over:
            return
        page = self.ranks.page
        steps = [[rank, page.entered(rank), page.polled(rank)] for rank in sorted(self._here)]
        if steps != self._said:
            self._said = steps
            self.tell({"t": "steps", "steps": steps})
        self._server.later(TOLD_S, self._tell_steps)


def _givers(blob: bytes) -> list[NodeAt]:
    """Nodes without ranks that hold part of a candidate, from the coordinator's message. Errors: AgentError,
    UsageError, TypeError, ValueError."""
    return [
        NodeAt(str(name), tuple(Address.parse(str(each)) for each in addresses), ())
        for name, addresses in unpacked(blob, "the nodes that hold some of it")[:NODES_MAX]
    ]


def answer(channel: Channel, request_id: int, body: dict[str, Any], error: str, blobs: Sequence[bytes] = ()) -> None:
    """Answers another agent's request with `body`, or refuses it if `error` is not ""."""
    if error:
        channel.refuse(request_id, AgentError(error))
    else:
        channel.reply(request_id, body, blobs)

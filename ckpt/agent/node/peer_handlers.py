"""The handlers of messages from agents of other nodes, and of the ranks whose job has several nodes.

The senders are coordinators of jobs with ranks here, and nodes with ranks of a job that is coordinated here. Each
message is checked against net/permissions.py before it is handled. Nothing here happens in a job of one node."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from ckpt.agent.commit.distributed_write import write_part
from ckpt.agent.commit.store_client import options_from
from ckpt.agent.job.follower_job import FollowerJob, answer
from ckpt.agent.job.job import Job
from ckpt.agent.net.permissions import OF_AN_EPOCH, Who, epoch_of, who_says
from ckpt.agent.net.progress import Progress, ProgressReport
from ckpt.agent.net.transport import Frames
from ckpt.agent.node.cluster_startup import CALL_AGAIN_S, ClusterStartup
from ckpt.agent.node.inventory_lease import UNHEARD_MAX
from ckpt.agent.preemption.deadline_strategy import When
from ckpt.agent.preemption.notice_relay import OPERATOR, RelayedNotice, given_back, is_operators, words
from ckpt.agent.replication.parity_service import ranks_told
from ckpt.agent.replication.replica_store import decode_described
from ckpt.agent.replication.survey import KeptReplica
from ckpt.agent.runtime.event_loop import EventLoop, Peer
from ckpt.agent.runtime.workers import Lane, failure
from ckpt.agent.snapshots.manifest_gather import encoded_parts
from ckpt.agent.snapshots.remote_share import AnyPeer, RemotePeer, WantedPart
from ckpt.errors import AgentError, CkptError, Superseded
from ckpt.ipc.arena import Arena
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NodeAt
from ckpt.ipc.notice_sources import Sources
from ckpt.preemption.notice import Notice, Withdrawn, Word
from ckpt.settings import Settings
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.store.packs import Written

log = logging.getLogger("ckpt")


RANKS_NOTICES_MAX = 16  # notices in one message to a rank


class PeerHandlers(ClusterStartup):
    """The part of the agent that handles peers' messages (see above). Main thread only."""

    def __init__(self, url: str, settings: Settings, server: EventLoop) -> None:
        super().__init__(url, settings, server)
        self._writes = Progress()  # of the parts that this node writes for commits of other nodes
        self._writing: list[tuple[str, Identity, threading.Event]] = []  # these: who commits what; set to cancel
        self._standing = RelayedNotice()  # the notices that stand on this node

    # -- what this node's ranks say

    def _listen(self, peer: Peer, message: Message) -> None:
        """A rank of a job of several nodes has this agent listen for the other nodes."""
        from ckpt.agent.net.peer_network import link_bytes_s

        fields = message.fields
        network = self._open_network(str(fields["name"] or self.incarnation)[:100])
        addresses = network.listen(bytes(fields["secret"]), str(fields["at"]))
        self._awaiting = [each for each in self._awaiting if each.open and each is not peer] + [peer]
        told = {"name": network.me, "addresses": [str(each) for each in addresses]}
        peer.reply(int(fields["id"]), {**told, "link_bytes_s": link_bytes_s(addresses[0])})

    def _open_network(self, name: str) -> PeerNetwork:
        """The network of this agent. The first call makes it, and names this agent in it."""
        from ckpt.agent.net.peer_network import PeerNetwork

        if self.network is None:
            self.network = PeerNetwork(self._server, self._bulk, name, self)
        return self.network

    def _is_led_elsewhere(self, message: Message) -> bool:
        """Whether the job that a rank joins is coordinated on another node."""
        leader = message.fields.get("leader")
        return bool(leader) and self.network is not None and leader != self.network.me

    def _follow(self, peer: Peer, message: Message) -> None:
        """A rank joins a job that is coordinated on another node. Errors: AgentError; Superseded."""
        fields, network = message.fields, self.network
        epoch, world = Epoch.parse(str(fields["epoch"])), int(fields["world"])
        if network is None:
            raise AgentError(f"this agent was not told to listen for the coordinator of {epoch}")
        found = self._following_of(epoch)
        handed = self._given_back(message) if found is None else []
        if found is None:
            newer = [each.epoch for each in self.followings if each.epoch > epoch]
            if newer:
                raise Superseded(f"{epoch} was superseded by {newer[0]}")
            self._adopt_environment(fields)
            nodes = self._nodes_of(message)
            services = self._server, self._bulk, self._store, self._taken
            standing = self._listening.heard()
            found = FollowerJob(epoch, world, nodes, network, *services, self._arenas_of, standing)
            self.followings.append(found)
            # Before the join: if that is refused, the rank comes again, and hands over nothing then.
            self._hear_again(handed)
        found.join(peer, message)
        self._awaiting = [each for each in self._awaiting if each is not peer]
        if int(fields["rank"]) == found.lowest:
            self._listening.follow(Sources.parse(fields.get("notices")))
        self._tell_standing(peer)

    def _join(self, peer: AnyPeer, message: Message) -> None:
        handed = self._given_back(message) if isinstance(peer, Peer) and self.current is None else []
        try:
            super()._join(peer, message)
        finally:
            self._hear_again(handed if self.current is not None else [])
        if isinstance(peer, Peer):
            self._tell_standing(peer)

    def _given_back(self, message: Message) -> list[tuple[Notice, When]]:
        """The notices that stood on this node when its former agent died, as a rank hands them over."""
        handed = given_back(message.fields.get("standing") or []) if message.fields["resume"] else []
        for notice, when in handed:
            self._listening.remember(notice, when)
        return handed

    def _hear_again(self, handed: Sequence[tuple[Notice, When]]) -> None:
        for notice, when in handed:
            self._heard(notice, when)

    def _tell_standing(self, peer: Peer) -> None:
        """Tells a rank the standing notices, which it hands to the next agent if this one dies."""
        if told := self._standing.told():
            peer.send({"t": "standing", "notices": told[-RANKS_NOTICES_MAX:]})

    def _heard(self, word: Word, when: When = When.IN_TIME) -> None:
        self._standing.hear(word, when)
        body = {"t": "standing", "notices": self._standing.told()[-RANKS_NOTICES_MAX:]}
        for peer in self._server.peers:
            if peer.role == "trainer":
                peer.send(body)
        super()._heard(word, when)
        for each in self.followings:
            each.hear(word, when)

    def _take_back(self, source: str) -> None:
        """Withdraws an operator's notice from `source`, whichever node it came by."""
        self._heard(Withdrawn(source, OPERATOR))
        for each in self.followings:
            each.take_back(source)
        job = self.current
        if job is not None:
            for name in [name for name in job.group.notices if name[0] == source and is_operators(name[1])]:
                job.hear(Withdrawn(*name))
            for node in job.nodes[1:]:
                job.share_of(node.name).tell({"t": "taken-back", "source": source})

    def _following(self, peer: AnyPeer) -> tuple[FollowerJob, int] | None:
        """The followed job and the rank of that connection; None if it joined none."""
        for each in self.followings:
            rank = each.rank_of(peer)
            if rank is not None:
                return each, rank
        return None

    def _following_of(self, epoch: Epoch) -> FollowerJob | None:
        return next((each for each in self.followings if each.epoch == epoch), None)

    @property
    def _is_followed(self) -> bool:
        """Whether a followed job keeps this agent alive. Only the newest epoch does so by its mere connection: the
        coordinator of an older one may follow a newer job led from here, and the two agents would keep each other
        alive for ever."""
        epochs = [job.epoch for job in self._jobs()] + [each.epoch for each in self.followings]
        newest = max(epochs, default=None)
        return any(each.needed and (each.epoch == newest or not each.is_idle) for each in self.followings)

    def _tend_followings(self) -> None:
        for each in list(self.followings):
            if each.over:
                self.followings.remove(each)
                each.drop()
                self.copies.forget(lambda identity, epoch=each.epoch: identity.epoch == epoch)  # type: ignore[misc]

    # -- what other agents say

    def peer_message(self, channel: Channel, message: Message) -> None:
        """Handles a message from another agent. Errors: AgentError; whatever a malformed message leads to."""
        fields = message.fields
        self.fence.heard(channel.peer)
        self._check_sender(channel.peer, fields)
        match message.kind:
            case "start":
                self._start_elsewhere(channel, fields)
            case "look":
                self._tell_inventory(channel, int(fields["id"]), bool(fields.get("left")))
            case "keeps":
                keeps = KeptReplica.of(self._inventory(True), self.copies.told_safe, Epoch.parse(str(fields["epoch"])))
                channel.reply(int(fields["id"]), keeps.fields(), keeps.blobs())
            case "outcome":
                self._outcome(channel.peer, fields)
            case "parts":
                self._give_parts(channel, fields)
            case "serve":
                rank, identity = int(fields["rank"]), Identity.parse(str(fields["identity"]))
                arena = self._arenas_of(identity).get(rank)
                frames = Frames.decode(message.blobs[0], arena.bytes if arena is not None else 0)
                self._serve(identity, rank, frames, channel.peer)
            case "write":
                self._write(channel, message)
            case "unwrite":
                told = channel.peer, Identity.parse(str(fields["identity"]))
                for _, _, cancel in [each for each in self._writing if each[:2] == told]:
                    cancel.set()
            case "keep":
                self._keep(channel, message)
            case "kept":
                self.copies.before(Identity.parse(str(fields["identity"])))
            case "unkeep":
                self.copies.unkeep(Epoch.parse(str(fields["epoch"])))
            case "publish" | "stripe" | "lend" | "rebuild":
                self._asked_of_parity(channel, message)
            case "withdraw":
                self.parities.withdraw(Identity.parse(str(fields["identity"])), _reader(channel, fields))
            case "borrow":
                raise AgentError("this agent lends no memory; it is that of a job's node")
            case "bring" | "brought":
                self._share_reading(channel, message)
            case "unserve":
                self._withdraw_served(channel.peer, Identity.parse(str(fields["identity"])))
            case "forget":
                self._forget(Epoch.parse(str(fields["epoch"])))
            case "absent":
                self._source_gone(str(fields["name"]))
            case _:
                self._of_an_epoch(channel, message)

    def _of_an_epoch(self, channel: Channel, message: Message) -> None:
        """A message about a job with ranks on both nodes: from one of its nodes, or from its coordinator."""
        fields = message.fields
        epoch = Epoch.parse(str(fields["epoch"]))
        if who_says(fields) is Who.MEMBER:
            job = self._job_of(epoch)
            if job is None:
                raise AgentError(f"{epoch} is not coordinated here")
            self._from_node(job, channel, message)
            return
        if message.kind in ("failed", "pace"):
            self.foreseeing.told(message.kind, fields)
            return
        following = self._following_of(epoch)
        assert following is not None  # `_check_sender` has found it
        why = self.fence.refusal(channel.peer, epoch, time.monotonic())
        if why and message.kind == "to" and following.declines(fields, why):
            return
        match message.kind:
            case "acknowledge":
                self._acknowledge(channel, fields, why)
            case "left-by":
                self._listening.left_by(str(fields["source"]), str(fields["key"]))
            case "taken-back":
                self._heard(Withdrawn(str(fields["source"])[:200], OPERATOR))
            case _:
                following.led(channel, message)

    def _acknowledge(self, channel: Channel, fields: dict[str, Any], why_not: str) -> None:
        """Acknowledges a planned event of this machine: the job has left and its checkpoint is stored."""
        request_id = int(fields["id"])
        if why_not:
            raise AgentError(why_not)

        source, key = str(fields["source"]), str(fields["key"])
        self._listening.acknowledge(source, key, lambda error: answer(channel, request_id, {}, error))

    # -- permissions and leases

    def _check_sender(self, name: str, fields: dict[str, Any]) -> None:
        """Errors: AgentError if agent `name` may not send that message; whatever a malformed message leads to."""
        match who_says(fields):
            case Who.AWAITED if not any(peer.open for peer in self._awaiting):
                raise AgentError("no rank of this node waits for a start")
            case Who.ASKED if not self.fence.has_asked(name):
                raise AgentError(f"no start of agent {name} has asked what lies here")
            case Who.SERVES if not (self._leads(name) or self.fence.has_asked(name)):
                raise AgentError(f"agent {name} coordinates nothing that this node has a part in")
            case Who.LEADS | Who.DROPS as who:
                epoch = epoch_of(fields)
                if not self._leads(name, epoch):
                    raise AgentError(f"this node has no part in {epoch}, or agent {name} does not coordinate it")
                if fields["t"] in OF_AN_EPOCH:
                    self.fence.begun(name, epoch)
                if who is Who.DROPS:
                    self.fence.check(name, epoch, time.monotonic())

    def _leads(self, name: str, epoch: Epoch | None = None) -> bool:
        """Whether agent `name` coordinates `epoch` (None: any epoch) with ranks on this node."""
        return any(each.leader.name == name and epoch in (each.epoch, None) for each in self.followings)

    def _tell_inventory(self, channel: Channel, request_id: int, left: bool = False) -> None:
        """Answers a survey with this node's inventory, which stays as listed until the outcome. `left` and errors: see
        InventoryLease.asked."""
        self._freeze(channel.peer, left)
        packed: bytes = msgpack.packb(self._inventory(whole=True).fields())
        channel.reply(request_id, {}, [packed])

    def _freeze(self, by: str, left: bool = False) -> None:
        super()._freeze(by, left)
        for each in self.followings:
            each.ranks.appoint_nothing()

    def _outcome(self, name: str, fields: dict[str, Any]) -> None:
        """Ends the lease of agent `name`: its start has begun an epoch, or came to nothing. Errors: AgentError for an
        epoch number that no start can have reached: it would leave no larger numbers for later starts."""
        if fields["epoch"] is None:
            self.fence.over(name)
            return
        epoch, known = Epoch.parse(str(fields["epoch"])), self._newest_epoch()
        if epoch.number > known.number + UNHEARD_MAX:
            raise AgentError(f"it is not believed that {epoch} has begun: the newest that is known here is {known}")
        if self.fence.begun(name, epoch) and self.current is not None and self.current.epoch < epoch:
            self.current.supersede(f"{epoch}, begun on other nodes")

    def _asked_of_parity(self, channel: Channel, message: Message) -> None:
        """A peer asks for this node's work on parity: to publish, encode, lend or rebuild."""
        request_id = int(message.fields["id"])

        moving = ProgressReport(channel, request_id, self.copies.progress, self._server.later)

        def done(blobs: list[bytes], error: str) -> None:
            moving.end()
            if message.kind == "stripe":
                error = error or self._late_refusal(channel.peer, message.fields)
            answer(channel, request_id, {}, error, blobs)

        try:
            fields = {**message.fields, "reader": _reader(channel, message.fields)}
            self.parities.asked(fields, message.blobs, done)
        except BaseException:
            moving.end()  # the request is refused
            raise

    def _late_refusal(self, name: str, fields: dict[str, Any]) -> str:
        """Why a replica that has just arrived does not count; "" if it does. One that arrived during a survey was not
        listed, so no peer may drop older replicas for it."""
        again = bool(fields.get("again"))
        return "" if again else self.fence.refusal(name, epoch_of(fields), time.monotonic())

    def _is_read(self, identity: Identity) -> bool:
        committed = [each.commits for each in self.followings] + [each for _, each, _ in self._writing]
        return super()._is_read(identity) or identity in committed

    def _held(self, identity: Identity, ranks: Sequence[int], hashed: bool = True) -> dict[int, Arena]:
        """The arenas of these ranks' snapshots. Errors: AgentError if this node does not hold one of them."""
        found = self._arenas_of(identity, hashed)
        if not set(ranks) <= found.keys():
            raise AgentError(f"not all of the ranks {list(ranks)[:8]} of {identity} are held here")
        return {rank: found[rank] for rank in ranks}

    def _write(self, channel: Channel, message: Message) -> None:
        """Writes this node's part of a commit that another node makes. The snapshots are leased meanwhile."""
        fields = message.fields
        request_id, identity = int(fields["id"]), Identity.parse(str(fields["identity"]))
        options = options_from({"keep": {}, "limits": {"bandwidth": fields["bandwidth"]}, "codec": fields["codec"]})
        wanted = WantedPart.decode(identity, message.blobs[0], options.codec, options.limits.bandwidth)
        arenas = self._held(identity, np.unique(wanted.ranks).tolist())

        moving = ProgressReport(channel, request_id, self._writes, self._server.later)
        under_way = channel.peer, identity, threading.Event()

        def written(done: Future[Written]) -> None:
            moving.end()
            self._writing.remove(under_way)
            self.copies.release(identity)
            if error := failure(done):
                channel.refuse(request_id, AgentError(error))
            else:
                packs: bytes = msgpack.packb(done.result().packs)
                channel.reply(request_id, {}, [done.result().places.tobytes(), packs])

        # Leased, since a newer checkpoint may be replicated meanwhile and evict this one.
        self.copies.lease(identity)
        self._writing.append(under_way)
        write = functools.partial(write_part, self._store, wanted, arenas, self._writes.moved, under_way[2])
        self._bulk.run(Lane.COMMIT, write, written)

    def _keep(self, channel: Channel, message: Message) -> None:
        """Keeps replicas of another node's snapshots. They evict older ones, unless they are a re-replication."""
        from ckpt.ipc.addresses import Address

        fields, network = message.fields, self.network
        assert network is not None  # the message came through it
        request_id, identity = int(fields["id"]), Identity.parse(str(fields["identity"]))
        node = NodeAt(str(fields["source"]), tuple(Address.parse(str(text)) for text in fields["addresses"]), ())

        def kept(error: str) -> None:
            moving.end()
            answer(channel, request_id, {}, error or self._late_refusal(channel.peer, fields))

        wanted = decode_described(message.blobs[0])
        # A re-replicated checkpoint evicts nothing: it may be older than what is kept here.
        if not fields.get("again"):
            safe = fields["safe"]
            sizes = [each.size for each in wanted]
            needed = ranks_told(fields.get("needed"))
            self.copies.make_room(identity, Identity.parse(str(safe)) if safe is not None else None, sizes, needed)
        self.copies.keep(network.transport, identity, node.name, network.addresses(node), wanted, kept)
        moving = ProgressReport(channel, request_id, self.copies.progress, self._server.later)

    def _from_node(self, job: Job, channel: Channel, message: Message) -> None:
        """A message from a node with ranks of `job`, which is coordinated here."""
        fields = message.fields
        share = job.share_of(channel.peer)
        if message.kind == "candidate":
            self._say_where(job, channel, fields)
        elif message.kind == "signals":
            self.foreseeing.said(job, channel.peer, fields)
        elif message.kind == "notices":
            for word, when in words(channel.peer, fields["standing"], job.notices_left()):
                job.hear(word, when, channel.peer)
        elif message.kind == "take-back":
            self._take_back(str(fields["source"])[:200])
        elif message.kind == "lacks":
            job.group.lacks(int(fields["slot"]))
        elif message.kind == "steps":
            share.entered({int(rank): (int(step), int(polls)) for rank, step, polls in fields["steps"]})
        elif message.kind == "gone":
            peer = share.connection(int(fields["rank"]), int(fields["number"]))
            if peer is not None:
                peer.open = False
                (self.died if fields["how"] == "died" else self.ended)(peer)
        else:
            peer = share.connected(int(fields["rank"]), int(fields["number"]), int(fields["pid"]))
            self._deliver(peer, Message(dict(fields["m"]), [], message.blobs))

    def _deliver(self, peer: RemotePeer, message: Message) -> None:
        """Handles a remote rank's message as a local rank's. An error is answered to the rank or closes its connection,
        never the connection to its node."""
        try:
            self.message(peer, message)
        except CkptError as exc:
            request_id = message.fields.get("id")
            if isinstance(request_id, int):
                peer.refuse(request_id, exc)
            else:
                log.warning("%s of rank %d: %s", message.kind, peer.rank, exc)
        except Exception as exc:
            what = "the connection of rank %d was closed: its message %r is malformed: %r"
            log.warning(what, peer.rank, message.kind[:100], exc, exc_info=True)
            peer.lose()

    def _start_elsewhere(self, channel: Channel, fields: dict[str, Any]) -> None:
        """A start that another node coordinates: ends the start and the job under way here, and answers its survey."""
        launch, take_over, request_id = str(fields["launch"])[:200], bool(fields["take_over"]), int(fields["id"])
        self._refuse_superseded(launch, take_over)
        if self._start is not None:
            self._fail_start(self._start, Superseded(f"launch {launch!r} began meanwhile on another node"))
            self._end_restore()
            self._start = None
        if self.current is not None:
            self._move_aside(self.current, launch)
        for each in self.followings:
            each.end_reading_unled()
        self._tell_inventory(channel, request_id)

    def _give_parts(self, channel: Channel, fields: dict[str, Any]) -> None:
        """Answers with the declarations and hashes of the snapshots that are held here, without their data."""
        request_id, world = int(fields["id"]), int(fields["world"])
        identity, ranks = Identity.parse(str(fields["identity"])), [int(rank) for rank in fields["ranks"]]
        sealed = bool(fields.get("sealed"))
        # A dead coordinator may not have asked for hashes yet; its successor appoints nothing meanwhile.
        arenas = self._held(identity, ranks, hashed=not self._leads(channel.peer, identity.epoch))

        def read(done: Future[bytes]) -> None:
            if error := failure(done):
                channel.refuse(request_id, AgentError(error))
            else:
                sizes = [[rank, arena.bytes] for rank, arena in arenas.items()]
                channel.reply(request_id, {"sizes": sizes}, [done.result()])

        self._bulk.run(Lane.FRONT, lambda: encoded_parts(identity, world, arenas, sealed), read)

    def _say_where(self, job: Job, channel: Channel, fields: dict[str, Any]) -> None:
        """Tells a node the manifest of the candidate, and where its frames are. Errors: AgentError."""
        identity = Identity.parse(str(fields["identity"]))
        start = self._start
        if job.restore is None or job.restore.identity != identity or start is None or start.chosen is None:
            raise AgentError(f"{identity} is not being restored now")
        records = [[ref.writer, ref.size] for ref in start.chosen.records]
        found = start.places(identity)
        where = found.fields() if found is not None else {}
        # Encoded once for all nodes.
        if identity not in start.told:
            from ckpt.format.record import encode_manifest

            places = [*found.blobs(), self._givers_told(start, found)] if found is not None else []
            start.told = {identity: [encode_manifest(job.restore.manifest), *places]}
        channel.reply(int(fields["id"]), {"records": records, **where}, start.told[identity])

    def _share_reading(self, channel: Channel, message: Message) -> None:
        """A message of the shared read of the store: a node asks for frames read here, or brings frames it read."""
        epoch = Epoch.parse(str(message.fields["epoch"]))
        identity = Identity.parse(str(message.fields["identity"]))
        following, job = self._following_of(epoch), self._job_of(epoch)
        fan = following.shared(identity, channel.peer) if following is not None else None
        if job is not None:
            job.share_of(channel.peer)
            fan = job.restore.fan if job.restore is not None and job.restore.identity == identity else None
        if message.kind == "brought":
            if fan is not None:
                fan.brought(channel, message)
        # This node has not come so far yet; the other node asks again.
        elif fan is None:
            channel.reply(int(message.fields["id"]), {"ready": False})
        else:
            fan.bring(channel, message)

    def peer_closed(self, channel: Channel) -> None:
        """A connection to another agent has ended: its ranks are gone, and no frames are awaited from it."""
        if self.lenders.closed(channel.peer) and self.current is not None:
            self.current.copies_lost(channel.peer)
        if self.network is None or self.network.channel(channel.peer) is None:
            self.fence.lost(channel.peer, time.monotonic())
        self._source_gone(channel.peer)
        for following in self.followings:
            if following.leader.name == channel.peer:
                following.closed()
        for job in self._jobs():
            share = job.find_share(channel.peer)
            if share is not None:
                for peer in share.close():
                    self.ended(peer)
                job.copies_lost(channel.peer)
        if self.current is not None:
            self._tell_of_absence(self.current, channel.peer)
        self._server.later(CALL_AGAIN_S, lambda: self._call_again(channel.peer))

    def _source_gone(self, name: str) -> None:
        """Ends the wait for frames from that node that are on other nodes, or can be fetched later."""
        self.copies.source_gone(name)
        for job in self._jobs():
            if job.restore is not None:
                job.restore.source_gone(name)
        for each in self.followings:
            each.source_gone(name)

    def _tell_of_absence(self, job: Job, name: str) -> None:
        """Tells the other nodes that node `name` is gone: they may have no connection to it that would show this."""
        fields = {"t": "absent", "epoch": str(job.epoch), "name": name}
        for node in job.nodes[1:]:
            share = job.find_share(node.name)
            if self.network is not None and share is not None and share.peers:
                self.network.tell(node.name, fields)
        self.lenders.say(fields)

    # -- what happens to a rank's connection, here or on another node: see Agent

    def message(self, peer: AnyPeer, message: Message) -> None:
        raise NotImplementedError

    def ended(self, peer: AnyPeer) -> None:
        raise NotImplementedError

    def died(self, peer: AnyPeer) -> None:
        raise NotImplementedError


def _reader(channel: Channel, fields: dict[str, Any]) -> str:
    """The reader's name with its agent's before it, so that an agent ends only its own readings."""
    return f"{channel.peer}/{fields.get('reader', '')}"

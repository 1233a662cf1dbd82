"""What the agents of other nodes say: those that coordinate a job with ranks here, and those with ranks of a job that
is coordinated here. Nothing of it happens in a job of one node."""

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
from ckpt.ipc.notice_sources import Sources
from ckpt.preemption.notice import Notice, Withdrawn, Word
from ckpt.settings import Settings
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.store.packs import Written

log = logging.getLogger("ckpt")


RANKS_NOTICES_MAX = 16  # told to ranks: they go into one message


class PeerHandlers(ClusterStartup):
    """See Starts. Everything runs on the agent's main thread."""

    def __init__(self, url: str, settings: Settings, server: EventLoop) -> None:
        super().__init__(url, settings, server)
        self._writes = Progress()  # of parts of others' commits
        self._writing: list[tuple[str, Identity, threading.Event]] = []  # who has asked for them; to end it
        self._standing = RelayedNotice()  # on this node

    # -- what this node's ranks say

    def _listen(self, peer: Peer, message: Message) -> None:
        """The job has several nodes: this agent is to be reached by the others'."""
        from ckpt.agent.net.peer_network import link_bytes_s

        fields = message.fields
        network = self._open_network(str(fields["name"] or self.incarnation)[:100])
        addresses = network.listen(bytes(fields["secret"]), str(fields["at"]))
        self._awaiting = [each for each in self._awaiting if each.open and each is not peer] + [peer]
        told = {"name": network.me, "addresses": [str(each) for each in addresses]}
        peer.reply(int(fields["id"]), {**told, "link_bytes_s": link_bytes_s(addresses[0])})

    def _open_network(self, name: str) -> PeerNetwork:
        from ckpt.agent.net.peer_network import PeerNetwork

        if self.network is None:
            self.network = PeerNetwork(self._server, self._bulk, name, self)
        return self.network

    def _is_led_elsewhere(self, message: Message) -> bool:
        """Whether the job that a rank joins is coordinated on another node."""
        leader = message.fields.get("leader")
        return bool(leader) and self.network is not None and leader != self.network.me

    def _follow(self, peer: Peer, message: Message) -> None:
        """A rank joins a job that is coordinated on another node."""
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
            self._hear_again(handed)  # first: it may be refused, and comes again
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
        """What the first rank that comes to this agent knows of what stood here when a former one died."""
        handed = given_back(message.fields.get("standing") or []) if message.fields["resume"] else []
        for notice, when in handed:
            self._listening.remember(notice, when)
        return handed

    def _hear_again(self, handed: Sequence[tuple[Notice, When]]) -> None:
        for notice, when in handed:
            self._heard(notice, when)

    def _tell_standing(self, peer: Peer) -> None:
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
        """What an operator asked for, on whichever node that was and this is."""
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
        for each in self.followings:
            rank = each.rank_of(peer)
            if rank is not None:
                return each, rank
        return None

    def _following_of(self, epoch: Epoch) -> FollowerJob | None:
        return next((each for each in self.followings if each.epoch == epoch), None)

    @property
    def _is_followed(self) -> bool:
        """Whether a job that is coordinated elsewhere keeps this agent. By no more than a connection only the newest
        start does: who leads an older one may be there for a newer one that is led from here, and each for the other's
        sake for ever."""
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
        """What is of a job with ranks here and there."""
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
        assert following is not None  # it was looked for before
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
        """The job has left, and is safe: what is planned for this machine may begin."""
        request_id = int(fields["id"])
        if why_not:
            raise AgentError(why_not)

        source, key = str(fields["source"]), str(fields["key"])
        self._listening.acknowledge(source, key, lambda error: answer(channel, request_id, {}, error))

    # -- who says it, and what a start that asks has to be sure of

    def _check_sender(self, name: str, fields: dict[str, Any]) -> None:
        """Errors: AgentError where that agent may not say that; whatever a malformed message leads to."""
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
        """Whether that agent coordinates that epoch, or any, of those that this node has a part in."""
        return any(each.leader.name == name and epoch in (each.epoch, None) for each in self.followings)

    def _tell_inventory(self, channel: Channel, request_id: int, left: bool = False) -> None:
        """To a start, until whose outcome what is told stays as it is. `left` and errors: see Fence.asked."""
        self._freeze(channel.peer, left)
        packed: bytes = msgpack.packb(self._inventory(whole=True).fields())
        channel.reply(request_id, {}, [packed])

    def _freeze(self, by: str, left: bool = False) -> None:
        super()._freeze(by, left)
        for each in self.followings:
            each.ranks.appoint_nothing()

    def _outcome(self, name: str, fields: dict[str, Any]) -> None:
        """Of a start that has asked: the epoch that has begun, or none has. Errors: AgentError for one that no start
        can have come to: nothing would be left for those after it. Ranks here would know of the epoch by now."""
        if fields["epoch"] is None:
            self.fence.over(name)
            return
        epoch, known = Epoch.parse(str(fields["epoch"])), self._newest_epoch()
        if epoch.number > known.number + UNHEARD_MAX:
            raise AgentError(f"it is not believed that {epoch} has begun: the newest that is known here is {known}")
        if self.fence.begun(name, epoch) and self.current is not None and self.current.epoch < epoch:
            self.current.supersede(f"{epoch}, begun on other nodes")

    def _asked_of_parity(self, channel: Channel, message: Message) -> None:
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
            moving.end()  # it is refused
            raise

    def _late_refusal(self, name: str, fields: dict[str, Any]) -> str:
        """What came while a start asked what lies here was not listed: it must not make anything go elsewhere."""
        again = bool(fields.get("again"))
        return "" if again else self.fence.refusal(name, epoch_of(fields), time.monotonic())

    def _is_read(self, identity: Identity) -> bool:
        committed = [each.commits for each in self.followings] + [each for _, each, _ in self._writing]
        return super()._is_read(identity) or identity in committed

    def _held(self, identity: Identity, ranks: Sequence[int], hashed: bool = True) -> dict[int, Arena]:
        """Errors: AgentError where a snapshot of one of these ranks is not here."""
        found = self._arenas_of(identity, hashed)
        if not set(ranks) <= found.keys():
            raise AgentError(f"not all of the ranks {list(ranks)[:8]} of {identity} are held here")
        return {rank: found[rank] for rank in ranks}

    def _write(self, channel: Channel, message: Message) -> None:
        """Our part of a commit that is made on another node, which has us keep what is to be written."""
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

        self.copies.lease(identity)  # a newer checkpoint may become safe meanwhile
        self._writing.append(under_way)
        write = functools.partial(write_part, self._store, wanted, arenas, self._writes.moved, under_way[2])
        self._bulk.run(Lane.COMMIT, write, written)

    def _keep(self, channel: Channel, message: Message) -> None:
        """This node keeps copies of another's snapshots."""
        from ckpt.ipc.addresses import Address
        from ckpt.ipc.node_list import NodeAt

        fields, network = message.fields, self.network
        assert network is not None  # the message came by it
        request_id, identity = int(fields["id"]), Identity.parse(str(fields["identity"]))
        node = NodeAt(str(fields["source"]), tuple(Address.parse(str(text)) for text in fields["addresses"]), ())

        def kept(error: str) -> None:
            moving.end()
            answer(channel, request_id, {}, error or self._late_refusal(channel.peer, fields))

        wanted = decode_described(message.blobs[0])
        if not fields.get("again"):  # else nothing goes for it: it may be older than what is here
            safe = fields["safe"]
            sizes = [each.size for each in wanted]
            needed = ranks_told(fields.get("needed"))
            self.copies.make_room(identity, Identity.parse(str(safe)) if safe is not None else None, sizes, needed)
        self.copies.keep(network.transport, identity, node.name, network.addresses(node), wanted, kept)
        moving = ProgressReport(channel, request_id, self.copies.progress, self._server.later)

    def _from_node(self, job: Job, channel: Channel, message: Message) -> None:
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
        """As what a rank here says; what is wrong with it is that rank's affair, not its node's."""
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
        """A start that another node coordinates moves aside what is under way here."""
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
        """What another node needs to know of the snapshots that lie here, but for their bytes."""
        request_id, world = int(fields["id"]), int(fields["world"])
        identity, ranks = Identity.parse(str(fields["identity"])), [int(rank) for rank in fields["ranks"]]
        sealed = bool(fields.get("sealed"))
        # Its coordinator's agent may have died before it asked for hashes; whoever follows it appoints nothing yet.
        arenas = self._held(identity, ranks, hashed=not self._leads(channel.peer, identity.epoch))

        def read(done: Future[bytes]) -> None:
            if error := failure(done):
                channel.refuse(request_id, AgentError(error))
            else:
                sizes = [[rank, arena.bytes] for rank, arena in arenas.items()]
                channel.reply(request_id, {"sizes": sizes}, [done.result()])

        self._bulk.run(Lane.FRONT, lambda: encoded_parts(identity, world, arenas, sealed), read)

    def _say_where(self, job: Job, channel: Channel, fields: dict[str, Any]) -> None:
        """Where the frames of the candidate are that the ranks are to fetch."""
        identity = Identity.parse(str(fields["identity"]))
        start = self._start
        if job.restore is None or job.restore.identity != identity or start is None or start.chosen is None:
            raise AgentError(f"{identity} is not being restored now")
        records = [[ref.writer, ref.size] for ref in start.chosen.records]
        found = start.places(identity)
        where = found.fields() if found is not None else {}
        if identity not in start.told:  # made once, and not for each node
            from ckpt.format.record import encode_manifest

            places = [*found.blobs(), self._givers_told(start, found)] if found is not None else []
            start.told = {identity: [encode_manifest(job.restore.manifest), *places]}
        channel.reply(int(fields["id"]), {"records": records, **where}, start.told[identity])

    def _share_reading(self, channel: Channel, message: Message) -> None:
        """A node wants of us what we read for all, or has read for all what we want."""
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
        elif fan is None:  # this node has not come as far: it is asked again
            channel.reply(int(message.fields["id"]), {"ready": False})
        else:
            fan.bring(channel, message)

    def peer_closed(self, channel: Channel) -> None:
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
        """Nothing more is waited for from there that can be had elsewhere, or later."""
        self.copies.source_gone(name)
        for job in self._jobs():
            if job.restore is not None:
                job.restore.source_gone(name)
        for each in self.followings:
            each.source_gone(name)

    def _tell_of_absence(self, job: Job, name: str) -> None:
        """Other nodes have no connection to it that would tell them."""
        fields = {"t": "absent", "epoch": str(job.epoch), "name": name}
        for node in job.nodes[1:]:
            share = job.find_share(node.name)
            if self.network is not None and share is not None and share.peers:
                self.network.tell(node.name, fields)
        self.lenders.say(fields)

    # -- what the node does with what the ranks say, here or elsewhere

    def message(self, peer: AnyPeer, message: Message) -> None:
        raise NotImplementedError

    def ended(self, peer: AnyPeer) -> None:
        raise NotImplementedError

    def died(self, peer: AnyPeer) -> None:
        raise NotImplementedError


def _reader(channel: Channel, fields: dict[str, Any]) -> str:
    """What that agent calls a reader: it ends nobody else's reading."""
    return f"{channel.peer}/{fields.get('reader', '')}"

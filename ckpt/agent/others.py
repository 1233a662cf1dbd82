"""What the agents of other nodes say: those that coordinate a job with ranks here, and those with ranks of a job that
is coordinated here. Nothing of it happens in a job of one node."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ckpt.agent.following import Following
from ckpt.agent.jobs import Job
from ckpt.agent.remote import AnyPeer, RemotePeer
from ckpt.agent.server import Peer
from ckpt.agent.starts import Starts
from ckpt.agent.wire import Message
from ckpt.errors import AgentError, CkptError, Superseded
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.network import Network, NodeAt
    from ckpt.agent.peers.channel import Channel

log = logging.getLogger("ckpt")

CALL_AGAIN_S = 1.0  # after a connection to a node of a running job has broken


class Others(Starts):
    """See Starts. Everything runs on the agent's main thread."""

    # -- what this node's ranks say

    def _listen(self, peer: Peer, message: Message) -> None:
        """The job has several nodes: this agent is to be reached by the others'."""
        fields = message.fields
        network = self._open_network(str(fields["name"] or self.incarnation)[:100])
        addresses = network.listen(bytes(fields["secret"]), str(fields["at"]))
        peer.reply(int(fields["id"]), {"name": network.me, "addresses": [str(address) for address in addresses]})

    def _open_network(self, name: str) -> Network:
        from ckpt.agent.network import Network

        if self.network is None:
            self.network = Network(self._server, self._bulk, name, self)
        return self.network

    def _is_led_elsewhere(self, message: Message) -> bool:
        """Whether the job that a rank joins is coordinated on another node."""
        nodes = message.fields.get("nodes") or []
        return bool(nodes) and self.network is not None and nodes[0]["name"] != self.network.me

    def _follow(self, peer: Peer, message: Message) -> None:
        """A rank joins a job that is coordinated on another node."""
        from ckpt.agent.network import nodes_from

        fields, network = message.fields, self.network
        epoch, world = Epoch.parse(str(fields["epoch"])), int(fields["world"])
        if network is None:
            raise AgentError(f"this agent was not told to listen for the coordinator of {epoch}")
        found = next((each for each in self.followings if each.epoch == epoch), None)
        if found is None:
            newer = [each.epoch for each in self.followings if each.epoch > epoch]
            if newer:
                raise Superseded(f"{epoch} was superseded by {newer[0]}")
            nodes = nodes_from(fields["nodes"], world)
            services = self._server, self._bulk, self._store
            found = Following(epoch, world, nodes, network, *services, lambda: self._kept_bytes(None))
            self.followings.append(found)
        found.join(peer, message)

    def _following(self, peer: AnyPeer) -> tuple[Following, int] | None:
        for each in self.followings:
            rank = each.rank_of(peer)
            if rank is not None:
                return each, rank
        return None

    def _tend_followings(self) -> None:
        for each in list(self.followings):
            if each.over:
                self.followings.remove(each)
                each.drop()

    # -- what other agents say

    def peer_message(self, channel: Channel, message: Message) -> None:
        fields = message.fields
        if message.kind == "start":
            self._start_elsewhere(channel, fields)
            return
        epoch = Epoch.parse(str(fields["epoch"]))
        if message.kind in ("rank", "gone", "steps", "candidate"):
            job = next((each for each in self._jobs() if each.epoch == epoch), None)
            if job is None:
                raise AgentError(f"{epoch} is not coordinated here")
            self._from_node(job, channel, message)
            return
        following = next((each for each in self.followings if each.epoch == epoch), None)
        if following is None or following.leader.name != channel.peer:
            raise AgentError(f"this node has no part in {epoch}")
        following.led(channel, message)

    def _from_node(self, job: Job, channel: Channel, message: Message) -> None:
        fields = message.fields
        share = job.share_of(channel.peer)
        if message.kind == "candidate":
            self._say_where(job, channel, fields)
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
        launch, take_over = str(fields["launch"])[:200], bool(fields["take_over"])
        self._refuse_superseded(launch, take_over)
        if self._start is not None:
            self._fail_start(self._start, Superseded(f"launch {launch!r} began meanwhile on another node"))
            self._end_restore()
            self._start = None
        if self.current is not None:
            self._move_aside(self.current, launch)
        epochs = {*self._store.begun, *(each.epoch for each in self.followings)}
        channel.reply(int(fields["id"]), {"epochs": [str(epoch) for epoch in sorted(epochs)[-8:]]})

    def _say_where(self, job: Job, channel: Channel, fields: dict[str, Any]) -> None:
        """Where the frames of the candidate are that the ranks are to fetch."""
        identity = Identity.parse(str(fields["identity"]))
        start = self._start
        if job.restore is None or job.restore.identity != identity or start is None or start.chosen is None:
            raise AgentError(f"{identity} is not being restored now")
        from ckpt.format.record import encode_manifest

        records = [[ref.writer, ref.size] for ref in start.chosen.records]
        channel.reply(int(fields["id"]), {"records": records}, [encode_manifest(job.restore.manifest)])

    def peer_closed(self, channel: Channel) -> None:
        for following in self.followings:
            if following.leader.name == channel.peer:
                following.closed()
        for job in self._jobs():
            share = job.find_share(channel.peer)
            if share is not None:
                for peer in share.close():
                    self.ended(peer)
        self._server.later(CALL_AGAIN_S, lambda: self._call_again(channel.peer))

    def _call_again(self, name: str) -> None:
        """As long as a job that is coordinated here has ranks there."""
        network, job = self.network, self.current
        if network is None or job is None or job.group.all_gone or network.channel(name) is not None:
            return
        node: NodeAt | None = next((each for each in job.nodes if each.name == name), None)
        if node is not None:
            again = lambda error: self._server.later(CALL_AGAIN_S, lambda: self._call_again(name)) if error else None  # noqa: E731
            network.connect(node, again)

    # -- what the node does with what the ranks say, here or elsewhere

    def message(self, peer: AnyPeer, message: Message) -> None:
        raise NotImplementedError

    def ended(self, peer: AnyPeer) -> None:
        raise NotImplementedError

    def died(self, peer: AnyPeer) -> None:
        raise NotImplementedError

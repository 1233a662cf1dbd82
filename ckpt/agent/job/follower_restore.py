"""The restore on a node of a job that another node coordinates. The coordinator has chosen the candidate, and says
where its frames are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckpt.agent.job.job_context import Services
from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.restore.peer_source import PeerSource
from ckpt.agent.restore.rank_request import StreamPeer
from ckpt.agent.restore.restore_session import RestoreSession, decode_request, kind_of
from ckpt.agent.restore.shared_read import SharedRead, shared_read_of
from ckpt.agent.restore.sources import open_session
from ckpt.agent.runtime.coroutines import start
from ckpt.agent.runtime.event_loop import Peer
from ckpt.agent.snapshots.manifest_gather import FramePlaces
from ckpt.agent.snapshots.memory_checkpoint import LocalMemory
from ckpt.errors import AgentError, CkptError
from ckpt.events import Event
from ckpt.ipc.addresses import Address
from ckpt.ipc.arena import Arena
from ckpt.ipc.bounded_msgpack import unpack_bounded
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NODES_MAX, NodeAt
from ckpt.types import Epoch, Identity

Asked = tuple[list[int], list[int]]  # see decode_request


class FollowerRestore:
    """`nodes`: the job's nodes, the coordinator's first. `arenas_of`: this node's arenas with snapshots of a
    checkpoint, by rank. `room`: the bytes that the restore may take beside one slot of so many bytes. `session`: the
    restore under way."""

    def __init__(
        self,
        services: Services,
        network: PeerNetwork,
        epoch: Epoch,
        nodes: tuple[NodeAt, ...],
        arenas_of: Callable[[Identity], Mapping[int, Arena]],
        room: Callable[[int], int],
        emit: Callable[[Event], None],
    ) -> None:
        self.session: RestoreSession | None = None
        self._services, self._network, self._epoch, self._nodes = services, network, epoch, nodes
        self._arenas_of, self._room, self._emit = arenas_of, room, emit
        self._pending_fetches: list[tuple[StreamPeer, Identity, Asked]] = []  # until the coordinator has answered
        self._is_locating = False  # the coordinator was asked
        self._is_over = False

    def fetch(self, peer: Peer, message: Message) -> None:
        """A rank asks for frames of the candidate."""
        identity, asked = Identity.parse(str(message.fields["identity"])), decode_request(message)
        peer.reply(int(message.fields["id"]), {})
        if self.session is not None and self.session.identity == identity:
            self.session.request(peer, *asked)
            return
        self._pending_fetches.append((peer, identity, asked))
        if not self._is_locating:
            self._locate(identity)

    def shared_read(self, identity: Identity, asked_by: str) -> SharedRead | None:
        """This node's part in the shared read of a checkpoint; None: it does not restore that checkpoint yet, and asks
        the coordinator about it. Errors: AgentError if `asked_by` is no node of the job."""
        if all(node.name != asked_by for node in self._nodes):
            raise AgentError(f"agent {asked_by} has no part in {self._epoch}")
        if self.session is not None and self.session.identity == identity:
            return shared_read_of(self.session)
        if self.session is None and not self._is_locating:
            self._locate(identity)
        return None

    def end(self) -> None:
        """Ends the restore under way: all ranks have restored, or that candidate is given up."""
        if self.session is not None:
            self.session.close()
            self.session = None

    def end_uncoordinated(self) -> None:
        """Ends the restore under way, unless the coordinator is connected and decides what follows. Frames that were
        read for it, here and for other nodes, are dropped."""
        if self._network.channel(self._nodes[0].name) is None:
            self.end()

    def close(self) -> None:
        """Ends the restore. No answer is handled any more."""
        self._is_over = True
        self.end()

    def _locate(self, identity: Identity) -> None:
        """Asks the coordinator where the frames of that candidate are."""
        self._is_locating = True
        fields = {"t": "locate-candidate", "epoch": str(self._epoch), "identity": str(identity)}
        asked = self._network.request(self._nodes[0].name, fields)
        start(asked, lambda answer, error: self._on_located(identity, answer, error))

    def _on_located(self, identity: Identity, answer: Message | None, error: str) -> None:
        self._is_locating = False
        if self._is_over:
            return
        waiting, self._pending_fetches = self._pending_fetches, []
        self.end()
        kind = AgentError.kind  # an unreadable candidate may be as good as any
        if answer is not None:
            try:
                self.session = self._open(identity, answer)
            except Exception as exc:  # the coordinator may send anything, and ranks wait for this
                kind = kind_of(exc) if isinstance(exc, CkptError) else kind
                error = f"the coordinator's word on {identity} cannot be read: {exc!r:.500}"
        for peer, wanted, asked in waiting:
            if wanted != identity:
                self._pending_fetches.append((peer, wanted, asked))
            elif self.session is not None:
                self.session.request(peer, *asked)
            else:
                text = f"where {identity} is to be had is not known: {error}"
                peer.send({"t": "fetch-ended", "ok": False, "message": text, "sources": {}, "kind": kind})
        if self._pending_fetches:
            self._locate(self._pending_fetches[0][1])

    def _open(self, identity: Identity, answer: Message) -> RestoreSession:
        """Opens the restore as the coordinator says. Errors: whatever a malformed answer leads to."""
        from ckpt.format.record import decode_manifest
        from ckpt.store.lineage import CommitRef

        services, network, me = self._services, self._network, self._network.agent_name
        manifest = decode_manifest(answer.blobs[0])
        refs = [CommitRef(identity, str(writer), int(size)) for writer, size in answer.fields["records"]]
        read = (lambda: services.store.open_reader(refs)) if refs else None
        counts = {node.name: len(node.ranks) for node in self._nodes}
        places: FramePlaces | None = None
        near: LocalMemory | None = None
        peers: PeerSource | None = None
        if "holders" in answer.fields:  # it is in memory, wholly or in part, here or on other nodes
            told = FramePlaces.parse(identity, answer.blobs[1:], manifest)
            places = told.translate_holders(me, self._nodes[0].name)
            near = LocalMemory(self._arenas_of(identity), places.ranks, places.offsets)
            peers = PeerSource(places, network, [*self._nodes, *parse_holders(answer.blobs[4])])
        fan: SharedRead | None = None
        if read is not None and len(self._nodes) > 1:
            slot_bytes = int(manifest.frames["length"].sum()) * counts[me] // sum(counts.values())
            only = places.missing_frames if places is not None else None
            about = self._epoch, manifest, self._nodes
            fan = SharedRead(*about, network, read, lambda: self._room(slot_bytes), self._emit, only)
        lane, folder = (services.workers, services.server), services.store.folder
        return open_session(identity, manifest, counts[me], near, read, *lane, peers=peers, fan=fan, folder=folder)


def parse_holders(blob: bytes) -> list[NodeAt]:
    """Nodes without ranks that hold part of a candidate, from the coordinator's message. Errors: AgentError,
    UsageError, TypeError, ValueError."""
    return [
        NodeAt(str(name), tuple(Address.parse(str(each)) for each in addresses), ())
        for name, addresses in unpack_bounded(blob, "the nodes that hold some of it")[:NODES_MAX]
    ]

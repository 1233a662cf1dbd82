"""Committing what a job of several nodes has saved, by the nodes that are left of it: its coordinator is lost, nobody
trains on them any more, and no start comes for what lies in their memory.

The nodes wait for their turns, in the order of the job. Whose turn it is asks the others what they hold, as a start
does: until it says what came of it nothing of that goes, and nobody else begins. What is lost is made again from
parity, every node puts its frames, and one record is put where the run's line still wants it (`surviving.judge`). A
start ends the attempt: it may go on from newer memory, and commits it then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgpack

from ckpt.agent.bulk import Lane, failure
from ckpt.agent.gathering import Gathered, Gathering
from ckpt.agent.holdings import Inventory
from ckpt.agent.others import Others
from ckpt.agent.rebuilding import Made, Rebuilding
from ckpt.agent.remote import RemoteRanks, Wanted
from ckpt.agent.server import Peer, Server
from ckpt.agent.storeside import Options
from ckpt.agent.surviving import Verdict, commit_whole, judge
from ckpt.agent.writing import Parts
from ckpt.errors import Superseded
from ckpt.events import Event
from ckpt.policy.every import Limits
from ckpt.settings import Settings
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.following import Following
    from ckpt.agent.network import Network, NodeAt
    from ckpt.agent.terms import Terms
    from ckpt.agent.wire import Message
    from ckpt.store.commit import Committed
    from ckpt.store.packs import Written

log = logging.getLogger("ckpt")

AFTER_S = 30.0  # without a coordinator and ranks, until the first node's turn; as long again until the next one's
TURNS = 3  # all further nodes have the last one
AFTER_OF_LINGER = 1 / (TURNS + 1)  # at most, so that the last turn comes before the memory is given up
LOOK_S = 5.0  # nodes that were lost do not answer


def due_s(alone_s: float, turn: int, linger_s: float) -> float:
    """When the node whose turn it is, counted from 0, begins. `alone_s`: since when it has no coordinator and no ranks.
    `linger_s`: how long it keeps their memory then."""
    return alone_s + (1 + min(turn, TURNS - 1)) * min(AFTER_S, AFTER_OF_LINGER * linger_s)


@dataclass(slots=True)
class _Attempt:
    """`there`: the other nodes that have said what they hold."""

    following: Following
    terms: Terms
    network: Network
    inventory: Inventory
    silent: set[str] = field(default_factory=set)
    there: list[NodeAt] = field(default_factory=list)
    cancel: threading.Event = field(default_factory=threading.Event)


class Inheriting(Others):
    """See above. Everything runs on the agent's main thread."""

    def __init__(self, url: str, settings: Settings, server: Server) -> None:
        super().__init__(url, settings, server)
        self._attempt: _Attempt | None = None
        self._again_s = 0.0  # not before that

    def _begin(self, peer: Peer, message: Message) -> None:
        self._end_attempt()
        super()._begin(peer, message)

    def _freeze(self, by: str) -> None:
        if self.network is None or by != self.network.me:
            self._end_attempt()  # a start asks what lies here
        super()._freeze(by)

    def _tend_inheritance(self, now_s: float) -> float | None:
        """When to look again."""
        for each in self.followings:
            if each.needed or each.over:
                each.alone_s = None
            elif each.alone_s is None:
                each.alone_s = now_s
        attempt, newest = self._attempt, max(self.followings, key=lambda each: each.epoch, default=None)
        if attempt is not None:
            if newest is not attempt.following or newest.alone_s is None:
                self._end_attempt()
            return None
        network, outdone = self.network, newest is not None and any(job.epoch > newest.epoch for job in self._jobs())
        if newest is None or newest.alone_s is None or newest.terms is None or newest.settled or outdone:
            return None
        if network is None or self._start is not None or self.fence.stands(now_s):
            return None
        turn = next((n for n, node in enumerate(newest.nodes[1:]) if node.name == network.me), TURNS)
        at_s = max(due_s(newest.alone_s, turn, self._settings.linger_s), self._again_s)
        if now_s < at_s:
            return at_s
        self._again_s = now_s + AFTER_S
        self._attempt = _Attempt(newest, newest.terms, network, Inventory())
        self._freeze(network.me)
        self._look_around(self._attempt)
        return None

    def _end_attempt(self) -> None:
        """Whom it has asked hears that nothing came of it, or that it is done."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        attempt.cancel.set()
        self.fence.over(attempt.network.me)
        for node in attempt.following.nodes:
            attempt.network.tell(node.name, {"t": "outcome", "epoch": None})

    def _while(self, attempt: _Attempt, what: Callable[[], None]) -> None:
        """What goes wrong in it ends the attempt, and no other thing."""
        if self._attempt is not attempt:
            return
        try:
            what()
        except Exception as exc:
            log.exception("what %s has left in memory is not committed from here", attempt.following.epoch)
            self._fail(attempt, str(exc))

    def _fail(self, attempt: _Attempt, why: str, settled: bool = False) -> None:
        log.warning("what %s has left in memory is not committed from here: %s", attempt.following.epoch, why)
        attempt.following.settled = settled
        self._end_attempt()

    # -- what there is

    def _look_around(self, attempt: _Attempt) -> None:
        network = attempt.network
        attempt.inventory.add(self._inventory(whole=True), "")

        def look(node: NodeAt) -> None:
            def answered(answer: Message | None, error: str) -> None:
                self._while(attempt, lambda: self._said(attempt, node, answer, error))

            def connected(error: str) -> None:
                if error:
                    answered(None, error)
                else:
                    network.ask(node.name, {"t": "look"}, (), answered)

            network.connect(node, connected)

        others = [node for node in attempt.following.nodes if node.name != network.me]
        attempt.silent.update(node.name for node in others)
        for node in others:
            look(node)
        self._server.later(LOOK_S, lambda: self._while(attempt, lambda: self._choose_left(attempt)))

    def _said(self, attempt: _Attempt, node: NodeAt, answer: Message | None, error: str) -> None:
        if node.name not in attempt.silent:
            return  # too late
        if answer is None:
            log.info("agent %s cannot be asked what it holds: %s", node.name, error)
        else:
            attempt.inventory.add(Inventory.parse(msgpack.unpackb(answer.blobs[0])), node.name)
            attempt.there.append(node)
        if len(attempt.silent) > 1:
            attempt.silent.discard(node.name)
        else:
            self._choose_left(attempt)

    def _choose_left(self, attempt: _Attempt) -> None:
        """The newest that can be had, if it is still to be committed."""
        if not attempt.silent:
            return  # it was, before the time was over
        attempt.silent.clear()
        epoch, claim = attempt.following.epoch, attempt.terms.claim
        identity = max((each for each in attempt.inventory.complete() if each.epoch == epoch), default=None)
        if identity is None:
            self._fail(attempt, "no checkpoint of it is whole on the nodes that are left", settled=True)
            return

        def judged(done: Future[Verdict]) -> None:
            if error := failure(done):
                self._fail(attempt, error)
            elif done.result() in (Verdict.COMMIT, Verdict.CLAIM):
                self._gather_left(attempt, identity)
            else:
                self._fail(attempt, f"step {identity.tick.step} is {done.result().value}", settled=True)

        self._bulk.run(
            Lane.STORE,
            lambda: judge(self._store.run().view(), claim, identity),
            lambda done: self._while(attempt, lambda: judged(done)),
        )

    def _gather_left(self, attempt: _Attempt, identity: Identity) -> None:
        inventory, me = attempt.inventory, attempt.network.me

        def made(found: Made, error: str) -> None:
            for rank, name in found.items():
                inventory.made(identity, rank, "" if name == me else name)
            if error:
                self._fail(attempt, error)
            else:
                self._gather_left(attempt, identity)

        def gathered(found: Gathered | None, error: str) -> None:
            if found is None:
                self._fail(attempt, error)
            else:
                self._commit_left(attempt, found)

        missing, by_rank = inventory.missing(identity), inventory.by_rank(identity)
        if missing:
            mine = [node for node in attempt.following.nodes if node.name == me]
            holders = {rank: [name or me for name in names] for rank, names in by_rank.items()}
            nodes = [*mine, *attempt.there]
            at = {rank: [node.name for node in nodes] for rank in missing}
            then = lambda *found: self._while(attempt, lambda: made(*found))  # noqa: E731
            Rebuilding(self.parities, nodes, identity, holders, at, then, me).begin()
            return
        then_commit = lambda *found: self._while(attempt, lambda: gathered(*found))  # noqa: E731
        arenas = self._arenas_of(identity)
        Gathering(attempt.network, self._bulk, identity, by_rank, arenas, then_commit).begin()

    # -- the commit

    def _commit_left(self, attempt: _Attempt, found: Gathered) -> None:
        checkpoint, terms, step = found.checkpoint, attempt.terms, found.checkpoint.identity.tick.step
        text = (
            f"the coordinator of {checkpoint.identity.epoch} is lost: step {step}, which the nodes that are left have"
        )
        log.warning("%s in memory, is committed from here", text)
        self.copies.lease(checkpoint.identity)

        def ended(done: Future[Committed]) -> None:
            self.copies.release(checkpoint.identity)
            self._while(attempt, lambda: self._have_committed(attempt, checkpoint.identity, done))

        parts = self._parts(attempt, found)
        self._bulk.run(
            Lane.COMMIT,
            lambda: commit_whole(self._store, checkpoint, terms, "a node that was left", attempt.cancel, parts),
            ended,
        )

    def _parts(self, attempt: _Attempt, found: Gathered) -> Parts:
        checkpoint, terms, network = found.checkpoint, attempt.terms, attempt.network
        ranks, rest = shares(found.places.holders)

        def write(name: str, wanted: Wanted, then: Callable[[Written | None, str], None]) -> None:
            node = RemoteRanks(network, name, checkpoint.identity.epoch, len(found.places.holders), ())
            node.write(wanted, then)

        options = Options(codec=terms.codec, limits=Limits(bandwidth=terms.bandwidth))
        server, margin_s = self._server, self._settings.heartbeat_s
        return Parts(checkpoint, options, ranks, lambda: rest, write, server.post, server.later, margin_s)

    def _have_committed(self, attempt: _Attempt, identity: Identity, done: Future[Committed]) -> None:
        if error := failure(done):
            self._fail(attempt, error, settled=isinstance(done.exception(), Superseded))
            return
        attempt.following.settled = True
        text = f"step {identity.tick.step} is committed by a node that is left of the job that saved it"
        log.warning("%s", text)
        self._event(Event("commit.inherited", text, True, {"identity": str(identity)}))
        self._end_attempt()


def shares(holders: Mapping[int, Sequence[str]]) -> tuple[dict[str, frozenset[int]], dict[str, list[str]]]:
    """Who writes which ranks' frames, and who else has all that such a one is to write. `holders`: by rank, who has its
    snapshot, the first to be asked first; "" is this node, which writes what it has, and is not named in what comes
    back."""
    ranks: dict[str, set[int]] = {}
    for rank, names in holders.items():
        if "" not in names:
            ranks.setdefault(names[0], set()).add(rank)
    rest = {
        name: [each for each in holders[min(theirs)] if each != name and all(each in holders[rank] for rank in theirs)]
        for name, theirs in ranks.items()
    }
    return {name: frozenset(theirs) for name, theirs in ranks.items()}, rest

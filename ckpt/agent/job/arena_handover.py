"""After a restart of the agent: its trainers bring their arenas, and what is whole in them is complete again."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.agent.commit.store_client import StoreClient
from ckpt.agent.snapshots.candidates import Remembered, candidates
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint, StagedReader, put_together
from ckpt.errors import AgentError, CkptError
from ckpt.ipc.arena import Arena
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.store.lineage import Claim

log = logging.getLogger("ckpt")

RECOVERY_S = 120.0  # how long a restarted agent waits for the last rank to come with its arenas


class ArenaHandover:
    """The arenas handed over so far, by slot and rank. `slots_max`: slots are numbered below it."""

    def __init__(self, world: int, slots_max: int) -> None:
        self.world = world
        self.slots_max = slots_max
        self._arenas: dict[int, dict[int, Arena]] = {}
        self._elsewhere: dict[int, set[int]] = {}

    def take(self, rank: int, slots: Sequence[int], fds: list[int]) -> None:
        """Takes over the descriptors, one for each slot. Errors: AgentError; what was taken until then is kept, and
        replaced when the rank comes again."""
        if len(slots) != len(fds) or not set(slots) <= set(range(self.slots_max)):
            raise AgentError(f"rank {rank} names {len(slots)} arenas and hands over {len(fds)}")
        for slot in slots:
            arena = Arena.adopt(fds.pop(0))
            old = self._arenas.setdefault(slot, {}).get(rank)
            if old is not None:
                old.close()
            self._arenas[slot][rank] = arena

    def take_elsewhere(self, rank: int, slots: Sequence[int]) -> None:
        """The rank's arenas are on another node, whose agent has them."""
        for slot in set(slots) & set(range(self.slots_max)):
            self._elsewhere.setdefault(slot, set()).add(rank)

    def hand_over(self) -> dict[int, dict[int, Arena]]:
        """All that ranks have handed over until now, by slot and rank."""
        taken, self._arenas = self._arenas, {}
        return taken

    def end(self, keep: bool) -> tuple[dict[int, dict[int, Arena]], list[int]]:
        """The arenas of the slots that every rank has handed over, or has elsewhere, by rank; and the other slots that
        some have, whose arenas here are closed. keep=False: all are."""
        whole: dict[int, dict[int, Arena]] = {}
        lost: list[int] = []
        for slot in sorted({*self._arenas, *self._elsewhere}):
            by_rank = self._arenas.get(slot, {})
            if keep and len(by_rank) + len(self._elsewhere.get(slot, ())) == self.world:
                whole[slot] = dict(sorted(by_rank.items()))
                continue
            lost.append(slot)
            for arena in by_rank.values():
                arena.close()
        self._arenas.clear()
        return whole, lost


@dataclass(frozen=True, slots=True)
class RecoveredCheckpoints:
    """What a restarted agent finds: complete checkpoints by slot, and which identities are committed already."""

    checkpoints: dict[int, MemoryCheckpoint]
    committed: frozenset[Identity]


def look_for(
    epoch: Epoch, arenas: dict[int, dict[int, Arena]], reader: StagedReader, store: StoreClient
) -> RecoveredCheckpoints:
    """On a thread. Hashes everything again: what the arenas say of themselves is not taken on trust."""
    found: dict[int, MemoryCheckpoint] = {}
    for slot, by_rank in arenas.items():
        try:
            identity = by_rank[0].header().identity
            if identity.epoch == epoch:
                parts = reader.read(identity, len(by_rank), by_rank, keep_hashes=False)
                found[slot] = put_together(identity, parts, by_rank)
        except CkptError as exc:  # nothing sealed, or not by all: the round is lost, as it is for the ranks
            log.info("slot %d holds no whole snapshot: %s", slot, exc)
    return RecoveredCheckpoints(found, which_committed([checkpoint.identity for checkpoint in found.values()], store))


def which_committed(wanted: Collection[Identity], store: StoreClient) -> frozenset[Identity]:
    """On a thread: those of them that are in the store, as far as it says."""
    if not wanted:
        return frozenset()
    try:
        view = store.run(impatient=True).view()
    except CkptError as exc:
        log.warning("what is committed is not known now, and is taken for not committed: %s", exc)
        return frozenset()
    return frozenset(wanted) & {ref.identity for ref in view.commits}


def newest_stored(claim: Claim, store: StoreClient) -> Identity | None:
    """On a thread: the newest that the store has of that epoch and what it went on from; None: there is none, or it
    does not say."""
    try:
        line = candidates(store.run(impatient=True).view(), [Remembered(claim, ())])
    except CkptError as exc:
        log.warning("what the store has is not known now, and is shown once something is committed: %s", exc)
        return None
    return next((each.identity for each in line if each.records and each.identity.epoch <= claim.epoch), None)

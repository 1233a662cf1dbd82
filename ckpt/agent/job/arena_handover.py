"""The arena handover after an agent restart: trainers bring their arenas, and whole checkpoints in them are found
again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.agent.commit.store_client import StoreClient
from ckpt.agent.snapshots.candidates import MemoryEpoch, find_candidates
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint, StagedReader, assemble_checkpoint
from ckpt.errors import AgentError, CkptError
from ckpt.ipc.arena import Arena
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.store.lineage import Claim

log = logging.getLogger("ckpt")

RECOVERY_S = 120.0  # how long a restarted agent waits for the last rank to bring its arenas


class ArenaHandover:
    """The arenas handed over so far, by slot and rank. Slots are numbered below `slots_max`."""

    def __init__(self, world: int, slots_max: int) -> None:
        self.world = world
        self.slots_max = slots_max
        self._arenas: dict[int, dict[int, Arena]] = {}
        self._remote_ranks_by_slot: dict[int, set[int]] = {}

    def add_arenas(self, rank: int, slots: Sequence[int], fds: list[int]) -> None:
        """Takes over the descriptors, one for each slot. Errors: AgentError; arenas taken before the error are kept,
        and replaced if the rank comes again."""
        if len(slots) != len(fds) or not set(slots) <= set(range(self.slots_max)):
            raise AgentError(f"rank {rank} names {len(slots)} arenas and hands over {len(fds)}")
        for slot in slots:
            arena = Arena.adopt(fds.pop(0))
            old = self._arenas.setdefault(slot, {}).get(rank)
            if old is not None:
                old.close()
            self._arenas[slot][rank] = arena

    def add_remote_arenas(self, rank: int, slots: Sequence[int]) -> None:
        """Records that the agent of another node holds the rank's arenas of these slots."""
        for slot in set(slots) & set(range(self.slots_max)):
            self._remote_ranks_by_slot.setdefault(slot, set()).add(rank)

    def pop_arenas(self) -> dict[int, dict[int, Arena]]:
        """All arenas handed over so far, by slot and rank. They are removed from here."""
        taken, self._arenas = self._arenas, {}
        return taken

    def finish(self, keep: bool) -> tuple[dict[int, dict[int, Arena]], list[int]]:
        """Ends the handover. Returns two things: the whole slots, and the numbers of the other slots. A slot is whole
        if every rank handed it over or has it on another node. Whole slots come with this node's arenas by rank; the
        arenas of the others are closed here. keep=False: no slot counts as whole."""
        whole: dict[int, dict[int, Arena]] = {}
        lost: list[int] = []
        for slot in sorted({*self._arenas, *self._remote_ranks_by_slot}):
            by_rank = self._arenas.get(slot, {})
            if keep and len(by_rank) + len(self._remote_ranks_by_slot.get(slot, ())) == self.world:
                whole[slot] = dict(sorted(by_rank.items()))
                continue
            lost.append(slot)
            for arena in by_rank.values():
                arena.close()
        self._arenas.clear()
        return whole, lost


@dataclass(frozen=True, slots=True)
class RecoveredCheckpoints:
    """The complete checkpoints found after a restart, by slot, and which identities are committed already."""

    checkpoints: dict[int, MemoryCheckpoint]
    committed: frozenset[Identity]


def find_checkpoints(
    epoch: Epoch, arenas: dict[int, dict[int, Arena]], reader: StagedReader, store: StoreClient
) -> RecoveredCheckpoints:
    """Finds the complete checkpoints in the arenas. Runs on a worker thread. All bytes are hashed again; the arenas'
    own hashes are not trusted."""
    found: dict[int, MemoryCheckpoint] = {}
    for slot, by_rank in arenas.items():
        try:
            identity = by_rank[0].header().identity
            if identity.epoch == epoch:
                parts = reader.read(identity, len(by_rank), by_rank, keep_hashes=False)
                found[slot] = assemble_checkpoint(identity, parts, by_rank)
        except CkptError as exc:
            # No rank, or not every rank, sealed a snapshot: the attempt is lost, for the ranks too.
            log.info("slot %d holds no whole snapshot: %s", slot, exc)
    return RecoveredCheckpoints(found, filter_committed([checkpoint.identity for checkpoint in found.values()], store))


def filter_committed(wanted: Collection[Identity], store: StoreClient) -> frozenset[Identity]:
    """Those of the wanted checkpoints that the store has; none if the store does not answer. Runs on a worker
    thread."""
    if not wanted:
        return frozenset()
    try:
        view = store.open_run(impatient=True).view()
    except CkptError as exc:
        log.warning("what is committed is not known now, and is taken for not committed: %s", exc)
        return frozenset()
    return frozenset(wanted) & {ref.identity for ref in view.commits}


def find_newest_stored(claim: Claim, store: StoreClient) -> Identity | None:
    """The newest checkpoint in the store of that epoch or its ancestors; None: there is none, or the store does not
    answer. Runs on a worker thread."""
    try:
        line = find_candidates(store.open_run(impatient=True).view(), [MemoryEpoch(claim, ())])
    except CkptError as exc:
        log.warning("what the store has is not known now, and is shown once something is committed: %s", exc)
        return None
    return next((each.identity for each in line if each.records and each.identity.epoch <= claim.epoch), None)

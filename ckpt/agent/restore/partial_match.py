"""The partial match of a committed checkpoint: finds those frames of its record that lie in some node's memory.

These frames need not be read from the store. Two frames are the same if hash and length are equal, whatever rank staged
them; the receiver verifies the hash again. A holder that does not answer within ANSWER_TIMEOUT_S, or whose answer
contradicts the record, is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckpt.agent.restore.manifest_request import ManifestRequest
from ckpt.agent.runtime.coroutines import CallLater, race, run_on, time_out
from ckpt.agent.runtime.workers import Lane, Workers
from ckpt.agent.snapshots.manifest_gather import FramePlaces
from ckpt.agent.snapshots.memory_checkpoint import StagedPart
from ckpt.errors import AgentError
from ckpt.format.manifest import Manifest
from ckpt.ipc.arena import DATA_OFFSET, Arena
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork

log = logging.getLogger("ckpt")

ANSWER_TIMEOUT_S = 5.0  # for holders to answer; the store has all frames anyway

Numbers = npt.NDArray[np.int64]


async def match_part(
    network: PeerNetwork | None,
    workers: Workers,
    identity: Identity,
    manifest: Manifest,
    holders: Mapping[int, Sequence[str]],
    arenas: Mapping[int, Arena],
    later: CallLater,
) -> FramePlaces:
    """Asks the holders of a record's ranks where its frames lie in memory. `holders`: rank -> its holders, for ranks
    that have any. The hashes in the arenas are taken as they are: receivers verify each frame, and the store has a good
    copy. Errors: AgentError if no frame matches."""
    asked = ManifestRequest(network, workers, identity, len(manifest.coordinates), holders, arenas, is_partial=True)
    try:
        await race(asked.run(), time_out(later, ANSWER_TIMEOUT_S))
    except TimeoutError:
        silent = holders.keys() - {part.declaration.rank for part in asked.parts}
        log.warning("ranks %s of %s: who holds them does not say so", sorted(silent)[:8], identity)
    places = lambda: find_places(identity, manifest, asked.parts, asked.arena_sizes, asked.holders)  # noqa: E731
    return await run_on(workers, Lane.FRONT, places)


def find_places(
    identity: Identity,
    manifest: Manifest,
    parts: Sequence[StagedPart],
    sizes: Mapping[int, int],
    holders: Mapping[int, Sequence[str]],
) -> FramePlaces:
    """Returns where the frames of a record lie in these ranks' arenas; rank -1: in none. If several snapshots have the
    same frame, the lowest rank's is taken. Errors: AgentError if no frame matches, a part contradicts the record, or
    its frames overlap or exceed the arena."""
    for part in parts:
        told = part.declaration
        if told.world != len(manifest.coordinates) or manifest.coordinates[told.rank] != told.coordinate:
            raise AgentError(f"what is held of {told.coordinate} is not what {identity} is of")
    keys, held_by, held_at = _held_frames(sorted(parts, key=lambda part: part.declaration.rank))
    columns = [manifest.frames[name].astype(np.uint64) for name in ("hash_hi", "hash_lo", "length")]
    found = match_rows(np.column_stack(columns), keys)
    is_held = found >= 0
    if not is_held.any():
        raise AgentError(f"no frame of {identity} is held as it is in the store")
    ranks, offsets = np.full(len(found), -1, np.int64), np.zeros(len(found), np.int64)
    ranks[is_held], offsets[is_held] = held_by[found[is_held]], held_at[found[is_held]]
    used = np.unique(ranks[is_held]).tolist()
    places = FramePlaces(
        identity, ranks, offsets, {rank: sizes[rank] for rank in used}, {rank: list(holders[rank]) for rank in used}
    )
    for rank in used:
        places.frames(rank, manifest)
    return places


def match_rows(wanted: npt.NDArray[np.uint64], held: npt.NDArray[np.uint64]) -> Numbers:
    """For each row of `wanted`, the number of an equal row of `held`; -1 if there is none. A row of `held` is used at
    most once; equal rows are paired in their order."""
    left: dict[tuple[int, ...], list[int]] = {}
    for number, row in reversed(list(enumerate(held.tolist()))):  # so that the first of equal rows is taken first
        left.setdefault(tuple(row), []).append(number)
    return np.array([same.pop() if (same := left.get(tuple(row))) else -1 for row in wanted.tolist()], np.int64)


def _held_frames(parts: Sequence[StagedPart]) -> tuple[npt.NDArray[np.uint64], Numbers, Numbers]:
    """For each frame held: (hash_hi, hash_lo, length), the rank, and the byte offset in that rank's memfd."""
    keys, ranks, offsets = [np.zeros((0, 3), np.uint64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for part in parts:
        staged = part.declaration.staging.frames
        keys.append(np.column_stack([part.hashes, staged["length"].astype(np.uint64)]))
        offsets.append(DATA_OFFSET + staged["offset"].astype(np.int64))
        for blob, at in zip((part.shared_values, part.own_values), part.value_offsets, strict=True):
            halves = int.from_bytes(blob.hash[:8], "big"), int.from_bytes(blob.hash[8:], "big")
            keys.append(np.array([[*halves, blob.length]], np.uint64))
            offsets.append(np.array([at], np.int64))
        ranks.append(np.full(len(staged) + 2, part.declaration.rank, np.int64))
    return np.concatenate(keys), np.concatenate(ranks), np.concatenate(offsets)

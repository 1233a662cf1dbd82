"""Committing a checkpoint whose coordinator is lost, by a node that keeps it, or some of it.

Whatever begins meanwhile, the two do not come into each other's way:
- Every key has the name of its own writer in it, and the record refers to no other checkpoint's packs; a second record
  of one checkpoint is harmless.
- It is committed only where it is on the run's line: of the newest epoch that the store knows, or on what that one
  went on from, up to the fork. That is looked at again just before the record; one that lands later all the same is on
  no line.
- An epoch that the store does not know is claimed only where the newest that it knows is one that it went on from: a
  claim made late never takes the run from a start that knew nothing of that epoch.
"""

from __future__ import annotations

import enum
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.agent.commit.store_client import StoreClient
from ckpt.agent.snapshots.manifest_gather import read_parts
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint, put_together
from ckpt.errors import DamagedData, Superseded
from ckpt.ipc.arena import Arena
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.store.commit import Committed, OtherWriters
    from ckpt.store.lineage import Claim
    from ckpt.store.run import RunView


@dataclass(frozen=True, slots=True)
class OrphanCheckpoint:
    """A checkpoint of which every rank's snapshot is kept here. `arenas`: by rank."""

    identity: Identity
    arenas: Mapping[int, Arena]
    terms: CommitTerms


class OrphanVerdict(enum.Enum):
    COMMIT = "to be committed"
    CLAIM = "to be committed, once its epoch is claimed"
    DONE = "committed, or the line has a newer one"
    OVER = "not on the line of the run any more, or retired"


def judge(view: RunView, claim: Claim, identity: Identity) -> OrphanVerdict:
    """Whether that checkpoint, of an epoch with that claim, is still to be committed to what the store holds."""
    from ckpt.store.lineage import CommitRef, Lineage

    if identity in view.retired:
        return OrphanVerdict.OVER
    if any(ref.identity == identity for ref in view.commits):
        return OrphanVerdict.DONE
    lineage, newest = Lineage([*view.claims, claim], view.epochs), view.newest_epoch
    own = dict(lineage.chain(claim.epoch))
    claimed_late = claim.epoch not in view.epochs and (newest is None or newest in own)
    head = claim.epoch if claimed_late else newest
    chain = dict(lineage.chain(head)) if head is not None else {}
    fork = chain.get(identity.epoch)
    if identity.epoch not in chain or (fork is not None and identity.tick > fork.tick):
        return OrphanVerdict.OVER
    refs = [*view.commits, CommitRef(identity, "", 0)]
    if lineage.line(refs, view.retired, head)[-1].identity != identity:
        return OrphanVerdict.DONE
    return OrphanVerdict.CLAIM if claimed_late else OrphanVerdict.COMMIT


def check_due(store: StoreClient, claim: Claim, identity: Identity) -> None:
    """On a thread. Errors: Superseded where that checkpoint need not be committed any more; StorageError."""
    if (now := judge(store.run().view(), claim, identity)) not in (OrphanVerdict.COMMIT, OrphanVerdict.CLAIM):
        raise Superseded(f"{identity} is {now.value}")


def commit_newest(store: StoreClient, found: Sequence[OrphanCheckpoint], cancel: threading.Event) -> Identity | None:
    """On a thread: commits the newest of these that is still to be, and returns it; None where nothing is to be done.
    One that is damaged, or on no line, is passed over.

    Errors: SaveFailed; Superseded; StorageError; DamagedData where all that could be committed are damaged."""
    damaged: DamagedData | None = None
    for each in sorted(found, key=lambda each: each.identity, reverse=True):
        verdict = judge(store.run().view(), each.terms.claim, each.identity)
        if verdict is OrphanVerdict.DONE:
            return None
        if verdict is OrphanVerdict.OVER:
            continue
        try:
            parts = read_parts(each.identity, len(each.arenas), each.arenas)
            made = put_together(each.identity, parts, each.arenas)
        except DamagedData as exc:
            damaged = exc
            continue
        commit_whole(store, made, each.terms, "a memory-only node", cancel)
        return each.identity
    if damaged is not None:
        raise damaged
    return None


def commit_whole(
    store: StoreClient,
    made: MemoryCheckpoint,
    terms: CommitTerms,
    by: str,
    cancel: threading.Event,
    elsewhere: OtherWriters | None = None,
) -> Committed:
    """On a thread: commits a checkpoint that `judge` has found to be due, and claims its epoch first where that is due.
    `by`: who does it, for the record. `elsewhere`: see store.commit.Committer.commit.

    Errors: SaveFailed; Superseded where it is not due any more; StorageError."""
    claim, identity = terms.claim, made.identity

    def look() -> OrphanVerdict:
        return judge(store.run().view(), claim, identity)

    def check() -> None:
        if (now := look()) not in (OrphanVerdict.COMMIT, OrphanVerdict.DONE):
            raise Superseded(f"{identity} is {now.value}")

    if look() is OrphanVerdict.CLAIM:
        store.claim(claim)
    about: dict[str, Any] = {
        "host": socket.gethostname(),
        "launch": claim.launch,
        "world": len(made.manifest.coordinates),
        "time_s": time.time(),
        "disagreed": list(made.disagreed[:100]),
        "by": by,
    }
    return store.commit_for_another(made, terms.codec, terms.bandwidth, about, check, cancel, elsewhere)

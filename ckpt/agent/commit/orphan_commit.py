"""The orphan commit: judges whether a checkpoint without a coordinator is still needed, and commits it.

node/orphan_committer.py decides when.

An orphan commit and any start or commit at the same time are safe side by side:
- Every key contains its writer's name, and the record refers to no other checkpoint's packs. A second record of one
  checkpoint is harmless.
- A checkpoint is committed only if it is in the run's branch history: in the newest epoch in the store, or in an
  ancestor of that epoch before the fork. This is checked again just before the record is put. A record that still lands
  too late is in no branch history.
- An epoch that the store does not know is claimed only if the store's newest epoch is its ancestor. So a late claim
  never takes the run from a start that knew nothing of that epoch.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.agent.commit.store_client import StoreClient
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
from ckpt.errors import Superseded
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.store.commit import Committed, OtherWriters
    from ckpt.store.lineage import Claim
    from ckpt.store.run import RunView


class OrphanVerdict(enum.Enum):
    COMMIT = "to be committed"
    CLAIM = "to be committed, once its epoch is claimed"
    DONE = "committed, or superseded by a newer commit"
    OBSOLETE = "no longer in the history of the run, or retired"


def judge(view: RunView, claim: Claim, identity: Identity) -> OrphanVerdict:
    """Whether a checkpoint, of an epoch with that claim, is still to be committed to the store that `view` shows."""
    from ckpt.store.lineage import CommitRef, Lineage

    if identity in view.retired_at_s:
        return OrphanVerdict.OBSOLETE
    if any(ref.identity == identity for ref in view.commits):
        return OrphanVerdict.DONE
    lineage, newest = Lineage([*view.claims, claim], view.epochs), view.newest_epoch
    own = dict(lineage.ancestry(claim.epoch))
    claimed_late = claim.epoch not in view.epochs and (newest is None or newest in own)
    head = claim.epoch if claimed_late else newest
    chain = dict(lineage.ancestry(head)) if head is not None else {}
    fork = chain.get(identity.epoch)
    if identity.epoch not in chain or (fork is not None and identity.version > fork.version):
        return OrphanVerdict.OBSOLETE
    refs = [*view.commits, CommitRef(identity, "", 0)]
    if lineage.history(refs, view.retired_at_s, head)[-1].identity != identity:
        return OrphanVerdict.DONE
    return OrphanVerdict.CLAIM if claimed_late else OrphanVerdict.COMMIT


def check_due(
    store: StoreClient,
    claim: Claim,
    identity: Identity,
    due: Collection[OrphanVerdict] = (OrphanVerdict.COMMIT, OrphanVerdict.CLAIM),
) -> None:
    """Checks that the verdict on the checkpoint is one of `due`. Runs on a worker thread. Errors: Superseded if it is
    another one; StorageError."""
    if (now := judge(store.open_run().view(), claim, identity)) not in due:
        raise Superseded(f"{identity} is {now.value}")


def commit_orphan(
    store: StoreClient,
    made: MemoryCheckpoint,
    terms: CommitTerms,
    cancel: threading.Event,
    elsewhere: OtherWriters | None = None,
) -> Committed:
    """Commits a checkpoint that `judge` found due, and claims its epoch first if needed. Runs on a worker thread.
    `elsewhere`: see store.commit.Committer.commit.

    Errors: SaveFailed; Superseded if the checkpoint is no longer due; StorageError."""
    claim, identity = terms.claim, made.identity

    def check() -> None:
        check_due(store, claim, identity, (OrphanVerdict.COMMIT, OrphanVerdict.DONE))

    if judge(store.open_run().view(), claim, identity) is OrphanVerdict.CLAIM:
        store.claim(claim)
    about = {"by": "a node that was left"}
    return store.put_checkpoint(claim, made, terms.codec, terms.bandwidth, about, check, cancel, elsewhere)

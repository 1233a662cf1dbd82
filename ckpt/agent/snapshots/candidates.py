"""The candidates of a start: the checkpoints that it may continue from, newest first. Pure.

Store listing and memory are merged into one branch history. Epochs that could not be claimed while the store was down
are part of the history through what agents remember. The newest checkpoint of the history comes first. A checkpoint
with the same identity in both places is one candidate, restored from memory first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.store.lineage import Ancestor, Claim, CommitRef
    from ckpt.store.run import RunView

MEMORY = ""  # writer of a checkpoint in memory; sorts before every real writer


@dataclass(frozen=True, slots=True)
class MemoryEpoch:
    """An epoch known from memory. `held`: its complete checkpoints in memory. `claim`: how it began; None: no agent of
    the epoch is left. The store, or an epoch that continued from it, may still know."""

    claim: Claim | None
    checkpoints: tuple[Identity, ...]

    @property
    def epoch(self) -> Epoch | None:
        return self.claim.epoch if self.claim is not None else self.checkpoints[0].epoch if self.checkpoints else None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that a start may continue from. `in_memory`: whether agents hold it in memory. `records`: its commit
    records in the store, the preferred one first."""

    identity: Identity
    in_memory: bool
    records: tuple[CommitRef, ...]


def choose_epoch(view: RunView | None, remembered: Sequence[MemoryEpoch], begun: Collection[Epoch]) -> Epoch:
    """A new epoch, greater than all that the store and this agent know. `begun`: epochs that ended unclaimed."""
    from ckpt.store.lineage import next_epoch

    claims = [each.claim for each in remembered if each.claim is not None]
    known = {*begun, *(claim.epoch for claim in claims)}
    known.update(ancestor.epoch for claim in claims for ancestor in claim.ancestors)
    return view.new_epoch(known) if view is not None else next_epoch(known)


def unclaimed_ancestors(
    parent: Identity | None, claims: Iterable[Claim], is_claimed: Callable[[Epoch], bool]
) -> tuple[Ancestor, ...]:
    """The unclaimed ancestors: the known epochs from that of `parent` back to one claimed in the store, newest first.
    `claims`: of the epochs that living agents took part in; each names its own ancestors too."""
    from ckpt.store.lineage import Ancestor

    chains = [(Ancestor(claim.epoch, claim.parent), *claim.ancestors) for claim in claims]
    behind = {each.epoch: chain[at:] for chain in chains for at, each in enumerate(chain)}
    # An epoch's own claim wins over what later epochs say of it.
    behind |= {chain[0].epoch: chain for chain in chains}
    found: list[Ancestor] = []
    at = parent
    while at is not None and at.epoch in behind and not is_claimed(at.epoch):
        found += behind[at.epoch]
        parent = found[-1].parent
        # Ends at a malformed chain, too: a parent has to be of an earlier epoch.
        at = parent if parent is not None and parent.epoch < at.epoch else None
    return tuple(found)


def find_candidates(view: RunView | None, remembered: Sequence[MemoryEpoch]) -> list[Candidate]:
    """The candidates, newest first. `view`: None if the store does not answer.

    Errors: DamagedData if an unreadable claim leaves no candidate: the run is not a fresh one."""
    from ckpt.store.lineage import CommitRef, Lineage, broken_history

    told = [each.claim for each in remembered if each.claim is not None]
    claims = [*(view.claims if view is not None else ()), *told]
    lineage = Lineage(claims, view.epochs if view is not None else ())
    commits = list(view.commits) if view is not None else []
    held = {identity for each in remembered for identity in each.checkpoints}
    retired = view.retired_at_s if view is not None else {}
    line = lineage.history([*commits, *(CommitRef(identity, MEMORY, 0) for identity in held)], retired)
    newest = lineage.newest_epoch
    broken = lineage.broken_epoch(newest) if newest is not None else None
    if not line and broken is not None:
        raise broken_history(broken)
    records: dict[Identity, list[CommitRef]] = {}
    for ref in sorted(commits):
        records.setdefault(ref.identity, []).append(ref)
    return [
        Candidate(ref.identity, ref.identity in held, tuple(records.get(ref.identity, ()))) for ref in reversed(line)
    ]

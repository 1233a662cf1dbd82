"""What a start goes on from, decided from all that is known: the store's listing and what this node remembers. Pure.

One line runs through both: epochs that were never claimed in the store (it was down) are on it by what their agent
remembers. The newest checkpoint of the line wins; at equal identity this node's memory comes before the store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.store.lineage import Ancestor, Claim, CommitRef
    from ckpt.store.run import RunView

MEMORY = ""  # the writer of what no store holds: sorts before every real one


@dataclass(frozen=True, slots=True)
class Remembered:
    """An epoch that ran here, or of which something is kept. `held`: its complete checkpoints in memory. `claim`: None
    where nobody who was there is left to say how it began: the store may, or who went on from it."""

    claim: Claim | None
    held: tuple[Identity, ...]

    @property
    def epoch(self) -> Epoch | None:
        return self.claim.epoch if self.claim is not None else self.held[0].epoch if self.held else None


@dataclass(frozen=True, slots=True)
class Candidate:
    """`in_memory`: whether this node holds it. `records`: those in the store, the one to prefer first."""

    identity: Identity
    in_memory: bool
    records: tuple[CommitRef, ...]


def begin(view: RunView | None, remembered: Sequence[Remembered], begun: Collection[Epoch]) -> Epoch:
    """A new epoch, above all that the store and this agent know. `begun`: those that ended before they were claimed."""
    from ckpt.store.lineage import next_epoch

    claims = [each.claim for each in remembered if each.claim is not None]
    known = {*begun, *(claim.epoch for claim in claims)}
    known.update(ancestor.epoch for claim in claims for ancestor in claim.ancestors)
    return view.begin(known) if view is not None else next_epoch(known)


def unclaimed(
    parent: Identity | None, claims: Iterable[Claim], is_claimed: Callable[[Epoch], bool]
) -> tuple[Ancestor, ...]:
    """What is known of the epochs from that of `parent` back to one that is in the store, newest first. `claims`: of
    epochs that anybody who is there had a part in; they tell of those before, too."""
    from ckpt.store.lineage import Ancestor

    chains = [(Ancestor(claim.epoch, claim.parent), *claim.ancestors) for claim in claims]
    behind = {each.epoch: chain[at:] for chain in chains for at, each in enumerate(chain)}
    behind |= {chain[0].epoch: chain for chain in chains}  # its own claim wins
    found: list[Ancestor] = []
    at = parent
    while at is not None and at.epoch in behind and not is_claimed(at.epoch):
        found += behind[at.epoch]
        parent = found[-1].parent
        at = parent if parent is not None and parent.epoch < at.epoch else None  # whoever may have told of it
    return tuple(found)


def candidates(view: RunView | None, remembered: Sequence[Remembered]) -> list[Candidate]:
    """The line, newest first. `view`: None when the store does not answer.

    Errors: DamagedData where nothing is left of the line because a claim cannot be read: that is no fresh run."""
    from ckpt.store.lineage import CommitRef, Lineage, broken_line

    told = [each.claim for each in remembered if each.claim is not None]
    claims = [*(view.claims if view is not None else ()), *told]
    lineage = Lineage(claims, view.epochs if view is not None else ())
    commits = list(view.commits) if view is not None else []
    held = {identity for each in remembered for identity in each.held}
    retired = view.retired if view is not None else {}
    line = lineage.line([*commits, *(CommitRef(identity, MEMORY, 0) for identity in held)], retired)
    newest = lineage.newest
    broken = lineage.broken(newest) if newest is not None else None
    if not line and broken is not None:
        raise broken_line(broken)
    records: dict[Identity, list[CommitRef]] = {}
    for ref in sorted(commits):
        records.setdefault(ref.identity, []).append(ref)
    return [
        Candidate(ref.identity, ref.identity in held, tuple(records.get(ref.identity, ()))) for ref in reversed(line)
    ]

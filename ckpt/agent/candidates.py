"""What a start goes on from, decided from all that is known: the store's listing and what this node remembers. Pure.

One line runs through both: epochs that were never claimed in the store (it was down) are on it by what their agent
remembers. The newest checkpoint of the line wins; at equal identity this node's memory comes before the store.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.errors import DamagedData
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.store.lineage import Claim, CommitRef
    from ckpt.store.run import RunView

MEMORY = ""  # the writer of what no store holds: sorts before every real one


@dataclass(frozen=True, slots=True)
class Remembered:
    """An epoch that ran here. `held`: its complete checkpoints in memory."""

    claim: Claim
    held: tuple[Identity, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """`in_memory`: whether this node holds it. `records`: those in the store, the one to prefer first."""

    identity: Identity
    in_memory: bool
    records: tuple[CommitRef, ...]


def begin(view: RunView | None, remembered: Sequence[Remembered], begun: Collection[Epoch]) -> Epoch:
    """A new epoch, above all that the store and this agent know. `begun`: those that ended before they were claimed."""
    from ckpt.store.lineage import next_epoch

    known = {*begun, *(each.claim.epoch for each in remembered)}
    known.update(ancestor.epoch for each in remembered for ancestor in each.claim.ancestors)
    return view.begin(known) if view is not None else next_epoch(known)


def candidates(view: RunView | None, remembered: Sequence[Remembered]) -> list[Candidate]:
    """The line, newest first. `view`: None when the store does not answer.

    Errors: DamagedData where nothing is left of the line because a claim cannot be read: that is no fresh run."""
    from ckpt.store.lineage import CommitRef, Lineage

    claims = [*(view.claims if view is not None else ()), *(each.claim for each in remembered)]
    lineage = Lineage(claims, view.epochs if view is not None else ())
    commits = list(view.commits) if view is not None else []
    held = {identity for each in remembered for identity in each.held}
    retired = view.retired if view is not None else {}
    line = lineage.line([*commits, *(CommitRef(identity, MEMORY, 0) for identity in held)], retired)
    newest = lineage.newest
    if not line and newest is not None and lineage.broken(newest) is not None:
        raise DamagedData(
            f"the run's line cannot be followed: nothing says what epoch {lineage.broken(newest)} went on from; begin "
            "a branch at a checkpoint that is known to be good (ckpt ls --all, ckpt branch)"
        )
    records: dict[Identity, list[CommitRef]] = {}
    for ref in sorted(commits):
        records.setdefault(ref.identity, []).append(ref)
    return [
        Candidate(ref.identity, ref.identity in held, tuple(records.get(ref.identity, ()))) for ref in reversed(line)
    ]

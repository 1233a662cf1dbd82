"""Starting a branch: a new epoch that makes the run continue from an older checkpoint."""

from __future__ import annotations

from ckpt.errors import NoCheckpoint
from ckpt.store.lineage import Claim
from ckpt.store.run import Run
from ckpt.types import Identity

LAUNCH = "ckpt branch"


def branch(run: Run, at: Identity) -> Claim:
    """Claims a new epoch whose fork point is `at`, and closes it at once. Returns the claim.

    Later starts follow the new epoch's branch history. Checkpoints committed after `at` stay, as a branch. The caller
    must have checked that no living job uses the run (Run.watch_other); a job that still does is superseded.

    Errors: NoCheckpoint if `at` is not committed, or is retired; StorageError."""
    view = run.view()
    if at in view.retired_at_s or at not in {ref.identity for ref in view.commits}:
        raise NoCheckpoint(f"{run.backend.url} holds no checkpoint {at}; `ckpt ls --all` lists all")
    claim = run.begin_epoch(view, at, LAUNCH)
    run.close_epoch(claim.epoch, f"a branch at {at}")
    return claim

"""Beginning a branch: from now on the run goes on from an older checkpoint."""

from __future__ import annotations

import socket
import time

from ckpt.errors import NoCheckpoint
from ckpt.store.lineage import TEXT_MAX, Claim
from ckpt.store.run import Run
from ckpt.types import Identity

LAUNCH = "ckpt branch"


def branch(run: Run, at: Identity) -> Claim:
    """Claims a new epoch whose fork point is `at`, and closes it at once: later starts follow its line. What was
    committed after `at` stays, as a branch.

    The caller has made sure that no living job uses the run (Run.watch_other); one that does is superseded.
    Errors: NoCheckpoint where `at` is not committed, or retired; StorageError."""
    view = run.view()
    if at in view.retired or at not in {ref.identity for ref in view.commits}:
        raise NoCheckpoint(f"{at} is not committed to {run.backend.url}; see ckpt ls --all")
    claim = Claim(
        epoch=view.begin(),
        parent=at,
        launch=LAUNCH,
        host=socket.gethostname()[:TEXT_MAX],
        time_s=time.time(),
    )
    run.claim(claim)
    run.close(claim.epoch, f"a branch at {at}")
    return claim

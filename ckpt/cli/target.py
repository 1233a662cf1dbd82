"""From what the user typed (a URL, perhaps a step) to an open store and one checkpoint in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpt.errors import NoCheckpoint

if TYPE_CHECKING:
    from ckpt.storage import Backend
    from ckpt.store.lineage import CommitRef
    from ckpt.store.run import RunView


@contextmanager
def store(url: str) -> Iterator[Backend]:
    from ckpt import storage

    backend = storage.open(url)
    try:
        yield backend
    finally:
        backend.close()


def view(backend: Backend) -> RunView:
    """What is there. Errors: NoCheckpoint where nothing was ever committed."""
    from ckpt.store.run import Run

    found = Run(backend).view()
    if not found.commits and not found.epochs:
        raise NoCheckpoint(f"{backend.url}: no run has saved there; give the URL that ckpt.Checkpointer was given")
    return found


def choose(url: str, run: RunView, which: str | None) -> CommitRef:
    """None: the newest of the line. A number: that step of the line (of several, the newest). An identity: any
    checkpoint, on a branch too. Errors: NoCheckpoint."""
    line = run.line
    if which is None:
        if not line:
            raise NoCheckpoint(f"{url}: the run has no checkpoint yet{_branches(run)}")
        return line[-1]
    for ref in reversed([*run.branches, *line]):
        if which == str(ref.identity):
            return ref
    for ref in reversed(line):
        if which.isdecimal() and int(which) == ref.identity.tick.step:
            return ref
    steps = [ref.identity.tick.step for ref in line]
    near = ", ".join(str(step) for step in steps[-8:]) or "none"
    raise NoCheckpoint(f"{url}: no checkpoint {which!r} on the line of the run; the newest are {near}{_branches(run)}")


def _branches(run: RunView) -> str:
    return "; there are branches, see `ckpt ls --all`" if run.branches else ""

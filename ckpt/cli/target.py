"""From what the user typed (a URL, perhaps a step) to an open store and one checkpoint in it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from ckpt.errors import DamagedData, NewerFormat, NoCheckpoint, StorageError
from ckpt.storage.names import shown

if TYPE_CHECKING:
    from ckpt.storage import Backend
    from ckpt.store.lineage import CommitRef
    from ckpt.store.run import RunView


CONTACT_S = 15.0  # how long a person is made to wait for a store that does not answer at all


@contextmanager
def store(url: str) -> Iterator[Backend]:
    """The store. Its first answer is waited for CONTACT_S, unless CKPT_RETRY_S says something else than its default;
    from then on a failing operation is tried again as long as in a run. Errors: UsageError."""
    from ckpt import storage
    from ckpt.settings import read

    settings = read()
    contact_s = CONTACT_S if settings.retry_s == read({}).retry_s else None
    with closing(storage.open(url, settings=settings, contact_s=contact_s)) as backend:
        yield backend


def view(backend: Backend) -> RunView:
    """What is there. Errors: NoCheckpoint where nothing was ever committed."""
    from ckpt.store.run import Run

    found = Run(backend).view()
    if not found.commits and not found.epochs:
        raise NoCheckpoint(f"{backend.url}: no run has saved there; give the URL that ckpt.Checkpointer was given")
    return found


@contextmanager
def held(store: Backend, refs: Collection[CommitRef]) -> Iterator[None]:
    """While the block runs no prune deletes what these consist of. Where no lease can be left in the store (it may only
    be read, or is full) they are read all the same, and that is said."""
    from ckpt.store.prune import LEASE_IDENTITIES_MAX, Lease

    identities = sorted({ref.identity for ref in refs})
    with ExitStack() as stack:
        try:
            for start in range(0, len(identities), LEASE_IDENTITIES_MAX):
                stack.enter_context(Lease(store, identities[start : start + LEASE_IDENTITIES_MAX]))
        except StorageError as exc:
            print(f"warning: no lease can be taken, so a prune may delete what is being read: {exc}", file=sys.stderr)
        yield


@contextmanager
def or_another() -> Iterator[None]:
    """Where what is read in the block is damaged, the error says what else there is."""
    try:
        yield
    except NewerFormat:
        raise
    except DamagedData as exc:
        raise DamagedData(f"{exc}; take another step: ckpt verify says which are good") from exc


def choose(url: str, run: RunView, which: str | None) -> CommitRef:
    """None: the newest of the line. A step: that one of the line (of several, the newest). step.sub, as `name_of`
    writes it: exactly that one. An identity: any checkpoint, on a branch too. Errors: NoCheckpoint."""
    line = run.line
    if which is None:
        if not line:
            raise none_yet(url, run)
        return line[-1]
    for ref in reversed([*run.branches, *line]):
        if which == str(ref.identity):
            return ref
    for ref in reversed(line):
        tick = ref.identity.tick
        if which in (f"{tick.step}.{tick.sub}", str(tick.step)):
            return ref
    near = ", ".join(name_of(ref) for ref in line[-8:]) or "none"
    raise NoCheckpoint(
        f"{shown(url)}: no checkpoint {which!r:.80} on the line of the run; the newest are {near}{_branches(run)}"
    )


def none_yet(url: str, run: RunView) -> NoCheckpoint:
    return NoCheckpoint(f"{shown(url)}: the run has no checkpoint yet{_branches(run)}")


def name_of(ref: CommitRef) -> str:
    """As `ckpt ls` calls it: "300", or "300.1" for the first save, poll or exit after step 300 had ended."""
    return ref.identity.tick.label


def _branches(run: RunView) -> str:
    return "; there are branches, see `ckpt ls --all`" if run.branches else ""

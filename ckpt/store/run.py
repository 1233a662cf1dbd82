"""One run in a store: the listing of its objects, and an epoch's own small objects (claim, heartbeat, end).

No decision uses this machine's clock. A claim is never changed once it is written. A heartbeat is the only object that
is overwritten. `closed/<epoch>` always says the same, no matter which agent puts it.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from ckpt.clock import Clock, SystemClock
from ckpt.errors import AlreadyExists, DamagedData, NotFound, RunInUse, StorageError, Superseded, Unsettled, UsageError
from ckpt.events import Events
from ckpt.storage.contract import Backend, ObjectInfo, PutMode
from ckpt.storage.names import problem_text
from ckpt.store import keys
from ckpt.store.lineage import (
    CLAIM_BYTES_MAX,
    TEXT_MAX,
    Claim,
    CommitRef,
    Lineage,
    decode_claim,
    decode_json,
    encode_claim,
    next_epoch,
)
from ckpt.threads import Tasks
from ckpt.types import Epoch, Identity

S = TypeVar("S")
T = TypeVar("T")

HEARTBEAT_S_MAX = 300.0  # the longest period of a foreign heartbeat that is waited for
_SMALL = 64 << 10
_READERS = 16
_LOOKS = 4  # at a foreign heartbeat, within one period
# An attribute cache of a file system, or a gateway, shows a new object up to this late.
LATE_S = 3.0
PAUSE_FIRST_S = 0.1


@dataclass(frozen=True)
class RunView:
    """What one listing of a run found. `retired_at_s`: tombstones, with the store's time of their writing (Unix
    seconds; infinity if the store gives no times). `damaged`: (key, problem) of claims that could not be read."""

    claims: tuple[Claim, ...]
    epochs: frozenset[Epoch]
    commits: tuple[CommitRef, ...]
    retired_at_s: dict[Identity, float]
    closed_epochs: frozenset[Epoch]
    heartbeats: dict[Epoch, str]
    damaged_claims: tuple[tuple[str, str], ...] = field(default=())

    @cached_property
    def lineage(self) -> Lineage:
        return Lineage(self.claims, self.epochs)

    @cached_property
    def history(self) -> list[CommitRef]:
        """The branch history, oldest first."""
        return self.lineage.history(self.commits, self.retired_at_s)

    @cached_property
    def branches(self) -> list[CommitRef]:
        return self.lineage.branches(self.commits, self.retired_at_s)

    @cached_property
    def records_by_identity(self) -> dict[Identity, list[CommitRef]]:
        """All records of each checkpoint, the lowest writer's first. The others stand in for a damaged one."""
        found: dict[Identity, list[CommitRef]] = {}
        for ref in sorted(self.commits):
            found.setdefault(ref.identity, []).append(ref)
        return found

    def overlooked_commits(self, claim: Claim, seen: Collection[Identity]) -> list[CommitRef]:
        """The commits that the start with this claim has passed over unknowingly: see Lineage.overlooked."""
        lineage = Lineage([*self.claims, claim], self.epochs)
        return lineage.overlooked_commits(claim.epoch, self.commits, self.retired_at_s, seen)

    @property
    def newest_epoch(self) -> Epoch | None:
        return self.lineage.newest_epoch

    def new_epoch(self, remembered: Collection[Epoch] = ()) -> Epoch:
        """A new epoch. Its number is 1 + the largest that the store or any agent (`remembered`) knows."""
        known = {*self.epochs, *self.closed_epochs, *self.heartbeats, *remembered}
        known.update(ref.identity.epoch for ref in self.commits)
        known.update(identity.epoch for identity in self.retired_at_s)
        # Claims also name ancestors, but these have smaller numbers.
        return next_epoch(known)


class Patience:
    """Reads a missing object again, until LATE_S after the first miss of any object. All objects share one LATE_S: if
    one was deleted, the others are gone too, and waiting for each would take long. Thread-safe."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._deadline_s: float | None = None
        self._lock = threading.Lock()

    def retry_missing(self, read: Callable[[], T]) -> T:
        """The result of `read`. Errors: NotFound if time is up; all other errors of `read`."""
        pause_s = PAUSE_FIRST_S
        while True:
            try:
                return read()
            except NotFound:
                left_s = self._remaining_s()
                if left_s <= 0:
                    raise
            self._clock.sleep_s(min(pause_s, left_s))
            pause_s *= 2

    def _remaining_s(self) -> float:
        now_s = self._clock.now_s()
        with self._lock:
            if self._deadline_s is None:
                self._deadline_s = now_s + LATE_S
            return self._deadline_s - now_s


class Run:
    """The run below a URL. Thread-safe. `put_heartbeat` and `close_epoch` may be repeated at any time."""

    def __init__(self, backend: Backend, clock: Clock | None = None, events: Events | None = None) -> None:
        self.backend = backend
        self.clock = clock or SystemClock()
        self.events = events or Events()
        # One patience for all objects that the newest listing has shown.
        self.patience = Patience(self.clock)
        self._claims_by_epoch: dict[Epoch, Claim] = {}  # claims never change

    def view(self) -> RunView:
        """A new listing of the run. Commits are listed before epochs, so that no commit is seen without its claim.
        Tombstones are listed last, so that a checkpoint retired meanwhile is not offered."""
        self.patience = Patience(self.clock)
        commits = []
        for info in self.backend.list(keys.COMMITS):
            found = keys.parse_record(info.key)
            if found is not None:
                saved_s = info.modified_s if math.isfinite(info.modified_s) else None
                commits.append(CommitRef(*found, info.size, saved_s))
        epochs = self.epochs()
        claims, damaged = self._read_claims(epochs)
        return RunView(
            claims=claims,
            epochs=epochs | {ref.identity.epoch for ref in commits},
            commits=tuple(sorted(commits)),
            closed_epochs=frozenset(self._list_epochs(keys.CLOSED)),
            heartbeats={epoch: info.version for epoch, info in self._list_epochs(keys.HEARTBEATS).items()},
            retired_at_s=self._list_retired(),
            damaged_claims=damaged,
        )

    def epochs(self) -> frozenset[Epoch]:
        return frozenset(self._list_epochs(keys.EPOCHS))

    def check_not_superseded(self, epoch: Epoch) -> None:
        """Checks that the epoch is the newest. Call it right before a commit or a deletion. Errors: Superseded if a
        newer epoch is claimed."""
        newest = max(self.epochs(), default=epoch)
        if newest > epoch:
            claims, _ = self._read_claims([newest])
            by = f", launch {claims[0].launch!r} on host {claims[0].host!r}," if claims else ""
            raise Superseded(
                f"epoch {newest}{by} has taken over {self.backend.url}, so epoch {epoch} saves no more. "
                "To continue this job instead, start it again with take_over=True"
            )

    def put_claim(self, claim: Claim) -> None:
        """Puts the claim. A repetition is harmless; a lost reply is settled by reading back. Errors: UsageError if
        another claim has the key (the epoch's nonce is not new); StorageError."""
        key, body = keys.epoch_key(claim.epoch), encode_claim(claim)
        if put_once(self.backend, key, body, CLAIM_BYTES_MAX) not in (None, body):
            raise UsageError(f"{key} is claimed by another start; begin a new epoch")
        self._claims_by_epoch[claim.epoch] = claim

    def begin_epoch(self, view: RunView, parent: Identity | None, launch: str) -> Claim:
        """Claims a new epoch that goes on from `parent`. Errors: StorageError."""
        host = socket.gethostname()[:TEXT_MAX]
        claim = Claim(epoch=view.new_epoch(), parent=parent, launch=launch, host=host, time_s=time.time())
        self.put_claim(claim)
        return claim

    def delete_claim(self, epoch: Epoch) -> None:
        """Deletes a claim. Only the start that put it may do so, and only if nothing was committed under it."""
        self.backend.delete([keys.epoch_key(epoch), keys.heartbeat_key(epoch)])

    def close_epoch(self, epoch: Epoch, reason: str) -> None:
        """Says that nothing more comes from that epoch. The first such statement stands."""
        body = json.dumps({"epoch": str(epoch), "reason": reason[:1000]}).encode()
        try:
            self.backend.put(keys.closed_key(epoch), [body], PutMode.IF_ABSENT)
        except (AlreadyExists, Unsettled):
            # NotFound: the put did not happen, and the caller may close again.
            self.backend.head(keys.closed_key(epoch))
        self.backend.delete([keys.heartbeat_key(epoch)])

    def put_heartbeat(self, epoch: Epoch, count: int, heartbeat_s: float) -> None:
        """Shows that the epoch lives. Call it every `heartbeat_s` seconds with a growing `count`."""
        body = json.dumps({"epoch": str(epoch), "count": count, "heartbeat_s": heartbeat_s}).encode()
        self.backend.put(keys.heartbeat_key(epoch), [body])

    def check_not_in_use(self, view: RunView, launch: str, heartbeat_s: float, *, take_over: bool = False) -> None:
        """Checks that no other job uses the run, by watching the newest epoch for two heartbeats (of that epoch's own
        period, if longer).

        Returns at once if that epoch is closed, has the same launch, or is to be taken over. Otherwise version and
        content of its heartbeat object show whether the epoch lives; no clock does. Older epochs are superseded anyway,
        and are not watched.

        Errors: RunInUse if the heartbeat changes."""
        epoch = view.newest_epoch
        if take_over or epoch is None or epoch in view.closed_epochs:
            return
        claim = view.lineage.claims.get(epoch)
        if claim is not None and claim.launch == launch:
            return
        before, period_s = self._read_heartbeat(epoch)
        period_s = max(heartbeat_s, period_s)
        launch, host = (claim.launch, claim.host) if claim is not None else ("unknown", "unknown")
        self.events.emit(
            "run.watched",
            f"{self.backend.url}: epoch {epoch} (launch {launch!r} on {host!r}) was not closed; ckpt checks for "
            f"{2 * period_s:g} s whether it still runs (take_over=True, or --take-over, skips the check)",
            loud=True,
            watched=str(epoch),
        )
        for _ in range(2 * _LOOKS):
            self.clock.sleep_s(period_s / _LOOKS)
            if keys.closed_key(epoch) in {info.key for info in self.backend.list(keys.CLOSED)}:
                return
            if self._read_heartbeat(epoch)[0] != before:
                raise RunInUse(
                    f"{self.backend.url} is in use: launch {launch!r} on host {host!r} is running its epoch {epoch}. "
                    "Stop that job, use another URL, or supersede it: take_over=True, or --take-over of `ckpt branch`"
                )

    def _read_heartbeat(self, epoch: Epoch) -> tuple[tuple[str, bytes] | None, float]:
        """The heartbeat's version and content (None if there is no heartbeat), and its period as it states itself.
        Where the store's times are coarse or missing, the version does not change with each heartbeat; the count in the
        content does."""
        key = keys.heartbeat_key(epoch)
        beat = ("", b"")
        try:
            beat = (self.backend.head(key).version, b"")
            beat = (beat[0], self.backend.get(key, _SMALL))
            period_s = decode_json(beat[1], key).get("heartbeat_s")
        except NotFound:
            return None, 0.0
        except DamagedData:
            return beat, 0.0
        if not isinstance(period_s, (int, float)) or not 0 < period_s < HEARTBEAT_S_MAX:
            return beat, 0.0
        return beat, float(period_s)

    def _list_epochs(self, prefix: str) -> dict[Epoch, ObjectInfo]:
        found = ((keys.parse_epoch(info.key, prefix), info) for info in self.backend.list(prefix))
        return {epoch: info for epoch, info in found if epoch is not None}

    def is_retired(self, identity: Identity) -> bool:
        """Whether the checkpoint has a tombstone now. Errors: StorageError."""
        try:
            self.backend.head(keys.retired_key(identity))
        except NotFound:
            return False
        return True

    def _list_retired(self) -> dict[Identity, float]:
        found = ((keys.parse_retired(info.key), info) for info in self.backend.list(keys.RETIRED))
        return {identity: info.modified_s for identity, info in found if identity is not None}

    def _read_claims(self, epochs: Collection[Epoch]) -> tuple[tuple[Claim, ...], tuple[tuple[str, str], ...]]:
        """The claims of `epochs` by epoch; and (key, problem) of each that could not be read."""

        def read(epoch: Epoch) -> Claim | tuple[str, str]:
            key = keys.epoch_key(epoch)
            try:
                return decode_claim(self.patience.retry_missing(lambda: self.backend.get(key, CLAIM_BYTES_MAX)), key)
            except (DamagedData, NotFound) as exc:
                return key, str(exc)

        missing = sorted(set(epochs) - set(self._claims_by_epoch))
        damaged: list[tuple[str, str]] = []
        for found in map_parallel(read, missing, _READERS):
            if isinstance(found, Claim):
                self._claims_by_epoch[found.epoch] = found
            else:
                damaged.append(found)
        for key, what in damaged:
            self.events.emit("claim.damaged", f"{self.backend.url}: {problem_text(key, what)}", loud=True, key=key)
        return tuple(self._claims_by_epoch[each] for each in sorted(set(epochs) & set(self._claims_by_epoch))), tuple(
            damaged
        )


def put_once(
    backend: Backend,
    key: str,
    body: bytes,
    bytes_max: int,
    doubts: tuple[type[StorageError], ...] = (AlreadyExists, Unsettled),
) -> bytes | None:
    """Puts the object if the key is free, and returns None. After one of `doubts` the content of the key, of at most
    `bytes_max`, is read back and returned. Errors: the put's own if the key holds nothing; StorageError."""
    try:
        backend.put(key, [body], PutMode.IF_ABSENT)
        return None
    except doubts as exc:
        try:
            return backend.get(key, bytes_max)
        except NotFound:
            raise exc from None


def map_parallel(fn: Callable[[S], T], items: Sequence[S], width: int) -> list[T]:
    """fn of every item, in order, at most `width` at once. The first error is raised after all have ended."""
    if len(items) < 2:
        return [fn(item) for item in items]
    with Tasks("store-read", pool_size=min(width, len(items))) as tasks:
        return [future.result() for future in [tasks.submit(fn, item) for item in items]]

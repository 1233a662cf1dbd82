"""A lease: what a reader holds, so that it is not deleted while it is read."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from types import TracebackType
from typing import Self

from ckpt.errors import DamagedData, StorageError, UsageError
from ckpt.events import Events
from ckpt.storage.contract import Backend
from ckpt.store import keys
from ckpt.store.lineage import decode_json
from ckpt.threads import Tasks
from ckpt.types import Identity

LEASE_REFRESH_S = 30.0
LEASE_REFRESH_S_MAX = 600.0
LEASE_CLOSE_S = 180.0  # longer than a refresh is retried
LEASE_IDENTITIES_MAX = 1000
LEASE_BYTES_MAX = 64 << 10


class Lease:
    """A reader's lease: while the block runs, the packs that the checkpoints' records refer to are not deleted.

    Names at most LEASE_IDENTITIES_MAX checkpoints. Take it before opening the record: what is there then stays. A
    thread of the lease refreshes it. If the refresh fails for two periods, packs may be deleted, and the reader sees
    them as damage."""

    def __init__(
        self,
        backend: Backend,
        identities: Collection[Identity],
        *,
        refresh_s: float = LEASE_REFRESH_S,
        events: Events | None = None,
    ) -> None:
        if not 0 < refresh_s <= LEASE_REFRESH_S_MAX:
            raise UsageError(f"refresh_s={refresh_s:g}: give seconds above 0, at most {LEASE_REFRESH_S_MAX:g}")
        self.key = keys.lease_key(keys.new_writer())
        self._backend = backend
        self._identities = sorted(identities)
        self._refresh_s = refresh_s
        self._events = events or Events()
        self._tasks = Tasks("lease")
        self._count = 0

    def __enter__(self) -> Self:
        self.refresh()
        self._tasks.start("refresh", self._refresh_loop)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._tasks.close(LEASE_CLOSE_S)
        try:
            self._backend.delete([self.key])
        except StorageError as exc:
            self._events.emit(
                "lease.left", f"the lease {self.key} could not be removed, and will expire by itself: {exc}"
            )

    def refresh(self) -> None:
        self._count += 1
        body = {"identities": [str(each) for each in self._identities], "refresh_s": self._refresh_s, "n": self._count}
        self._backend.put(self.key, [json.dumps(body).encode()])

    def _refresh_loop(self) -> None:
        while not self._tasks.stopping.wait(self._refresh_s):
            try:
                self.refresh()
            except StorageError as exc:
                self._events.emit(
                    "lease.late",
                    f"the lease {self.key} could not be refreshed; the next attempt follows: {exc}",
                    loud=True,
                )


def decode_lease(data: bytes, key: str) -> tuple[float, list[Identity]]:
    body = decode_json(data, key)
    try:
        period_s = float(body["refresh_s"])
        identities = [Identity.parse(text) for text in body["identities"]]
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise DamagedData(f"{key} is not a lease: {exc!s:.200}") from exc
    # Nothing is older than NaN seconds: the lease would never go stale.
    if math.isnan(period_s):
        raise DamagedData(f"{key} is not a lease: its period is {period_s} s")
    return min(max(period_s, 0.0), LEASE_REFRESH_S_MAX), identities

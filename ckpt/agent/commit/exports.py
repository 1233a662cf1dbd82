"""The exports of one job while it trains (ckpt.Export): one at a time, from committed checkpoints.

An export reads the store, at the lowest priority, in a lane of its own. No commit and no rank waits for it. Only the
end of the block does: `finish` exports the last commit, and the epoch closes behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ckpt.agent.runtime.coroutines import Coro
from ckpt.agent.runtime.workers import error_text
from ckpt.errors import CkptError
from ckpt.policy.export_rule import ExportRule
from ckpt.types import Identity


class Exports:
    """Main thread only. `export(rule, identity, is_wanted)`: writes an export if it is due, or in any case if
    `is_wanted`; returns whether it wrote one. Errors: CkptError."""

    def __init__(
        self,
        rule: ExportRule,
        export: Callable[[ExportRule, Identity, bool], Coro[bool]],
        spawn: Callable[[Coro[None]], object],
        emit: Callable[..., None],
    ) -> None:
        self.rule = rule
        self._export = export
        self._spawn = spawn
        self._emit = emit
        self._is_running = False
        self._waiting: tuple[Identity, bool] | None = None  # the newest one that waits, and whether it is wanted
        self._newest: Identity | None = None  # the newest commit
        self._then: Callable[[], None] = lambda: None  # called once nothing runs and nothing waits

    def note_commit(self, identity: Identity) -> None:
        """A checkpoint is committed."""
        self._newest = identity
        self._request(identity, is_wanted=False)

    def finish(self, parent: Identity | None, then: Callable[[], None]) -> None:
        """Exports the newest commit, or `parent` if nothing was committed since, unless it is exported already. Then
        calls `then`, on the main thread."""
        newest = self._newest or parent
        if newest is None:
            then()
        else:
            self._then = then
            self._request(newest, is_wanted=True)

    def _request(self, identity: Identity, is_wanted: bool) -> None:
        if self._is_running:
            waits = None if self._waiting is None else self._waiting[0].version.step
            if is_wanted or waits is None or not self.rule.are_alike(waits, identity.version.step):
                self._waiting = identity, is_wanted
            return
        self._is_running = True
        self._spawn(self._run(identity, is_wanted))

    async def _run(self, identity: Identity, is_wanted: bool) -> None:
        began_s, step = time.monotonic(), identity.version.step
        path = self.rule.place(step)
        facts = {"identity": str(identity), "path": path}
        try:
            if await self._export(self.rule, identity, is_wanted):
                seconds = time.monotonic() - began_s
                self._emit("export.done", f"step {step} is exported to {path}", False, {**facts, "seconds": seconds})
        except CkptError as exc:
            self._emit("export.failed", f"step {step} was not exported to {path}: {error_text(exc)}", True, facts)
        self._is_running = False
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._request(*waiting)
        else:
            then, self._then = self._then, lambda: None
            then()

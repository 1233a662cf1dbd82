"""The exports of one job while it trains (ckpt.Export): one at a time, from committed checkpoints.

An export reads the store, at the lowest priority, in a lane of its own. No commit and no rank waits for it. Only the
end of the block does: `finish` exports the last commit, and the epoch closes behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from ckpt.agent.runtime.workers import failure
from ckpt.policy.export_rule import ExportRule
from ckpt.types import Identity

# Runs `work` in the lane of exports, then the callback on the main thread.
Run = Callable[[Callable[[], "float | None"], Callable[[Future["float | None"]], None]], None]


class Exports:
    """Main thread only. `export(rule, identity, is_wanted)`: writes an export if it is due, or in any case if
    `is_wanted`; returns whether it wrote one."""

    def __init__(
        self,
        rule: ExportRule,
        export: Callable[[ExportRule, Identity, bool], bool],
        run: Run,
        emit: Callable[..., None],
    ) -> None:
        self.rule = rule
        self._export = export
        self._run = run
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
        began_s = time.monotonic()

        def work() -> float | None:
            return time.monotonic() - began_s if self._export(self.rule, identity, is_wanted) else None

        self._run(work, lambda done: self._on_done(identity, done))

    def _on_done(self, identity: Identity, done: Future[float | None]) -> None:
        self._is_running = False
        step, path = identity.version.step, self.rule.place(identity.version.step)
        facts = {"identity": str(identity), "path": path}
        if error := failure(done):
            self._emit("export.failed", f"step {step} was not exported to {path}: {error}", True, facts)
        elif (seconds := done.result()) is not None:
            self._emit("export.done", f"step {step} is exported to {path}", False, {**facts, "seconds": seconds})
        if self._waiting is not None:
            (identity, is_wanted), self._waiting = self._waiting, None
            self._request(identity, is_wanted)
        else:
            then, self._then = self._then, lambda: None
            then()

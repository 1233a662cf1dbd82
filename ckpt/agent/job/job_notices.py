"""The preemption notices of one job: what its scheduler and people hear of them, and what follows for their sources."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from ckpt.agent.job.job_context import JobContext
from ckpt.agent.preemption.notice_listener import NoticeListeners
from ckpt.agent.preemption.notice_relay import ExitTiming, StandingNotice, strip_node
from ckpt.agent.runtime.coroutines import start
from ckpt.agent.snapshots.remote_share import RemoteShare
from ckpt.ipc import outcome_file
from ckpt.ipc.notice_sources import SIGNAL_SOURCE
from ckpt.preemption.notice import NoticeChange, Withdrawn

SOON_S = 3600.0  # a notice with more time left is not reported as a warning


class JobNotices:
    """`outcome_path`: the file for a notice's outcome; None: no file."""

    def __init__(self, context: JobContext) -> None:
        self.outcome_path = context.services.outcome_path
        self._context = context

    def handle(self, word: NoticeChange, when: ExitTiming = ExitTiming.IN_TIME, node: str = "") -> None:
        """Passes a notice on to the scheduler, which decides what follows, and reports it to people. `node`: the node
        that it concerns; "" is this one."""
        context, name = self._context, (word.source, word.key)
        known = context.scheduler.preemption.notices.get(name)
        if isinstance(word, Withdrawn):
            context.scheduler.preemption.withdraw_notice(*name)
            if known is not None:
                # An operator takes back a notice from any node.
                node = min(known.nodes)
                text = f"{word.source} {strip_node(word.key, node)}: {_machine_name(node)} stays after all"
                context.emit("notice.withdrawn", text, True, {"source": word.source, "key": word.key})
            return
        now_s, left_s = time.monotonic(), word.remaining_s
        told = StandingNotice(*name, now_s + left_s, now_s, word.certain, when, frozenset({node}))
        when = context.scheduler.preemption.add_notice(told).exit_timing
        if known is not None and word.source == SIGNAL_SOURCE:
            return  # another rank got the signal too
        what = f"{_machine_name(node)} {'goes' if word.certain else 'may go'} away"
        leaves = word.certain and when is not ExitTiming.NOT_AGAIN
        then = "the job saves and leaves before" if leaves else "one more checkpoint is taken"
        if when is ExitTiming.NOT_AGAIN:
            then = "the job has left because of this notice before, and does not leave again; " + then
        facts = {"source": word.source, "key": word.key, "left_s": round(left_s, 1), "certain": word.certain}
        text = f"{what} in {max(0.0, left_s):.1f} s ({word.message}): {then}"
        context.emit("notice", text, left_s < SOON_S, facts)

    def begin_training(self, is_resumed: bool) -> None:
        """The job begins to train, or goes on (`is_resumed`): it hears the notices that stand on this node."""
        with contextlib.suppress(OSError):
            if not is_resumed and self.outcome_path is not None and self.outcome_path.is_file():
                self.outcome_path.unlink()  # of an earlier start
        for notice, when in self._context.services.notice_listeners.list_notices():
            if (notice.source, notice.key) not in self._context.scheduler.preemption.notices:
                self.handle(notice, when)

    def left_s(self) -> dict[tuple[str, str], float]:
        """Seconds left for each notice, by source and key."""
        now_s = time.monotonic()
        return {name: each.deadline_s - now_s for name, each in self._context.scheduler.preemption.notices.items()}

    def status(self) -> dict[str, Any]:
        scheduler, now_s = self._context.scheduler, time.monotonic()
        return {
            "standing": [
                {
                    "source": each.source,
                    "key": each.key,
                    "certain": each.certain,
                    "left_s": round(each.deadline_s - now_s, 1),
                    # "" is this node.
                    "nodes": sorted(each.nodes),
                }
                for each in sorted(scheduler.preemption.notices.values(), key=lambda each: each.deadline_s)
            ],
            "needs_s": round(scheduler.facts.save_estimate.lead_time_s, 1),
            "step_s": round(scheduler.facts.step_timing.boundary_interval_s, 4),
        }

    def write_outcome(self, body: dict[str, Any]) -> None:
        """Writes the outcome of a notice to the file that launchers read."""
        if self.outcome_path is None:
            return
        try:
            outcome_file.write_outcome(self.outcome_path, self._context.epoch, self._context.launch, body)
        except OSError as exc:
            text = f"what was saved could not be written to {self.outcome_path}: {exc}"
            self._context.emit("outcome.failed", text, True, body)

    def _sources_of(self, node: str) -> NoticeListeners | RemoteShare:
        return self._context.shares.remote_shares[node] if node else self._context.services.notice_listeners

    def record_exit(self, source: str, key: str, node: str) -> None:
        """The ranks leave because of this notice of that node."""
        self._sources_of(node).record_exit(source, key)

    def acknowledge(self, source: str, key: str, node: str) -> None:
        """Has that node tell the source that its planned event may begin now."""

        def ended(_: None, error: str) -> None:
            self._context.scheduler.exit_report.record_acknowledgement()
            what = f"{source} was told that {key} may begin: the job has left, and its checkpoint is in the store"
            text = f"{source} was not told that {key} may begin: {error}" if error else what
            facts = {"source": source, "key": key, "error": error}
            self._context.emit("notice.unacknowledged" if error else "notice.acknowledged", text, not error, facts)

        start(self._sources_of(node).acknowledge_event(source, key), ended, self._context.guard)


def _machine_name(node: str) -> str:
    """The name of a node's machine, for people."""
    return f"node {node}" if node else "this machine"

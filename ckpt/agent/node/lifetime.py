"""The lifetime of the agent: when its work is done, what it still commits for jobs without trainers, and for whom it
makes way."""

from __future__ import annotations

import logging
import math
import time

from ckpt.agent.job.job import Job
from ckpt.agent.node.node_context import NodeContext
from ckpt.agent.node.node_memory import NodeMemory
from ckpt.agent.node.node_notices import NodeNotices
from ckpt.agent.node.orphan_committer import OrphanCommitter
from ckpt.agent.state.slots import WorkState
from ckpt.errors import AgentError, OtherVersion
from ckpt.ipc.client import VERSION
from ckpt.storage.names import redact_url

log = logging.getLogger("ckpt")

IDLE_S = 30.0  # how long an agent without a job waits for one
RETRY_S = 30.0  # pause before the failed commit of a job without trainers is tried again
END_RETRY_S = 2.0  # the same pause once a signal has asked the agent to end
END_RESERVE = 1 / 6  # the last part of the time from the signal to the kill, in which no commit is tried


class Lifetime:
    """Main thread only. `has_served_trainer`: whether a trainer ever came."""

    def __init__(
        self, context: NodeContext, memory: NodeMemory, notices: NodeNotices, orphans: OrphanCommitter
    ) -> None:
        self.has_served_trainer = False
        self._context, self._jobs, self._memory = context, context.jobs, memory
        self._notices, self._orphans = notices, orphans
        self._idle_since_s = time.monotonic()
        self._retry_s = 0.0  # when a failed commit is tried again
        self._deadline_s = math.inf  # when a failed commit is given up
        self._yields_to_new_release = False

    def refuse_version(self, version: int, role: str) -> None:
        """Refuses a process of another ckpt release. If nobody needs this agent, it makes way for a trainer: it commits
        what is not in the store yet, and ends. Errors: AgentError; OtherVersion if the trainer is to wait for that end.
        """
        text = describe_versions(self._context.url, version)
        used = any(not job.scheduler.facts.all_gone for job in self._jobs.coordinated())
        used = used or any(each.is_needed for each in self._jobs.followed) or self._jobs.start is not None
        if role != "trainer" or used or any(peer.role == "trainer" for peer in self._context.server.peers):
            raise AgentError(f"{text}. The agent ends with its job; start again then")
        self._yields_to_new_release = True
        raise OtherVersion(f"{text}. The agent ends as soon as what it has is in the store")

    # -- commits of jobs without trainers

    def retry_commits(self, now_s: float) -> float | None:
        """Retries the failed commits of jobs without trainers, and gives them up after `orphan_s`, or shortly before
        this process is assumed to be killed. Returns when to look again."""
        settings, jobs, kill_s = self._context.settings, self._jobs, self._notices.kill_expected_s
        left_over = self._find_orphaned_job()
        if left_over is not None and left_over.scheduler.slots.newest_commit_state is WorkState.NEW:
            left_over.scheduler.commits.retry()
        if jobs.current is not None:
            saves = [job for job in jobs.former if job is left_over or job.scheduler.slots.committing_slot is not None]
            jobs.current.scheduler.leave_requests.is_former_committing = any(
                job.scheduler.slots.newest_commit_state is not WorkState.FAILED for job in saves
            )
        orphans = [job for job in jobs.coordinated() if job.context.needs_commit_retry]
        if left_over is not None and left_over.scheduler.slots.newest_commit_state is WorkState.FAILED:
            orphans.append(left_over)
        if jobs.start is not None or not orphans:
            retries = (job.scheduler.facts.all_gone and job.scheduler.is_at_work for job in jobs.coordinated())
            if jobs.start is not None or not any(retries):
                self._deadline_s = math.inf
            return None
        again_s = min(RETRY_S, settings.linger_s / 4)
        if self._deadline_s == math.inf:
            self._deadline_s, self._retry_s = now_s + settings.orphan_s, now_s + again_s
        if kill_s < math.inf:
            self._deadline_s = min(self._deadline_s, kill_s - END_RESERVE * settings.sigterm_s)
            self._retry_s = min(self._retry_s, now_s + END_RETRY_S)
        if now_s >= self._deadline_s:
            for job in orphans:
                log.warning(
                    "the newest checkpoint of %s was not committed: %s", job.epoch, job.scheduler.facts.last_error
                )
                job.scheduler.commits.stop()
            return None
        if now_s >= self._retry_s:
            self._retry_s = now_s + again_s
            for job in orphans:
                job.scheduler.commits.retry()
        return min(self._retry_s, self._deadline_s)

    def _find_orphaned_job(self) -> Job | None:
        """The job whose newest checkpoint is not in the store though all newer starts came to nothing: it is still the
        newest of the run. None: there is none."""
        for job in reversed(self._jobs.coordinated() if self._jobs.start is None else []):
            if job.context.is_orphaned:
                return job if all(each.epoch < job.epoch for each in self._jobs.followed) else None
            if not job.context.ended_without_checkpoint:
                break
        return None

    # -- the end

    def end_due_s(self, now_s: float) -> float | None:
        """When the agent may end (monotonic seconds); None: not before something happens."""
        peers, jobs, settings = self._context.server.peers, self._jobs.coordinated(), self._context.settings
        is_end_requested = self._context.server.is_end_requested
        waiting = any(peer.role not in ("", "tool") and not self._jobs.is_involved(peer) for peer in peers)
        busy = any(job.is_needed for job in jobs) or self._jobs.has_needed_followed
        if self._jobs.start is not None or waiting or busy or self._find_orphaned_job() is not None:
            self._idle_since_s = now_s
            return None
        # A connection without its hello yet may be a trainer's. It may be a tool's, too, so the idle time goes on.
        if self._orphans.is_busy or any(not peer.role for peer in peers):
            return None
        # After a job's regular end nobody comes back for what is kept of it.
        ended = bool(jobs) and jobs[-1].context.is_finished
        ended = ended and not any(each.epoch > jobs[-1].epoch for each in self._jobs.followed)
        keeps = bool(self._jobs.followed or self._memory.replicas.kept.identities) and not ended
        linger_s = self._idle_since_s + settings.linger_s
        # The node lost its ranks and its coordinator, but still holds checkpoints that a start may want.
        if keeps and not is_end_requested:
            if self._memory.inventory_lease.is_held:
                return None  # the holder of the lease may be reading them
            return now_s if self._yields_to_new_release and self._orphans.turns.is_settled else linger_s
        hurries = is_end_requested or self._yields_to_new_release
        ahead_s = self._notices.listeners.repeat_notice_s(time.time())
        if ahead_s and not (ended or hurries):
            return min(now_s + ahead_s, linger_s)
        if not jobs:
            return now_s if self.has_served_trainer or hurries else self._idle_since_s + IDLE_S
        held = any(job.context.checkpoints or job.context.has_unread_arenas for job in jobs)
        # Only the newest job's end counts: that job supersedes the former ones.
        return now_s if jobs[-1].context.ended_cleanly or not held or hurries else linger_s


def describe_versions(url: str, version: int) -> str:
    """Says that a process speaks another version of the messages."""
    text = f"the agent of {redact_url(url)} speaks version {VERSION} of its messages, this process version {version}"
    return f"{text}: they are of two releases of ckpt"

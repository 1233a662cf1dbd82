"""The agent as a whole: dispatches the trainers' messages, shows its status, and decides when its work is done.

`Agent` inherits, from top to bottom: `OrphanCommitter`, `PeerHandlers`, `Startup`, `ClusterStartup`, `NodeMemory`.
"""

from __future__ import annotations

import logging
import math
import os
import time
from concurrent.futures import Future
from typing import Any

import msgpack

from ckpt.agent.commit.store_client import PrunePass, keep_from
from ckpt.agent.job.job import Job, parse_seconds
from ckpt.agent.node.orphan_committer import OrphanCommitter
from ckpt.agent.observability.status import job_facts
from ckpt.agent.preemption.notice_relay import OPERATOR, PAST_S, ExitTiming, RelayedNotice
from ckpt.agent.runtime.event_loop import EventLoop, Peer
from ckpt.agent.runtime.priority import Priority
from ckpt.agent.runtime.workers import Lane, failure
from ckpt.agent.snapshots.remote_share import AnyPeer
from ckpt.agent.state.job_facts import WorkState
from ckpt.errors import AgentError, OtherVersion, RunInUse
from ckpt.events import Event
from ckpt.ipc.addresses import SILENCE_S_MAX
from ckpt.ipc.client import VERSION
from ckpt.ipc.messages import Message
from ckpt.preemption.notice import Notice
from ckpt.settings import Settings
from ckpt.storage.names import redact_url
from ckpt.types import Identity

log = logging.getLogger("ckpt")

IDLE_S = 30.0  # how long an agent without a job waits for one
RETRY_S = 30.0  # pause before an orphan's failed commit is tried again
# Left out of a former job's status, since they grow with the job.
FORMER_STATUS_OMITTED: dict[str, None] = dict.fromkeys(("ranks", "steps", "peers"))
END_RETRY_S = 2.0  # the same pause once a signal has asked the agent to end
END_RESERVE = 1 / 6  # the last part of the time from the signal to the kill, in which no commit is tried


class Agent(OrphanCommitter):
    """The agent of one node. Main thread only. `priority`: tends the process's priority; None: it stays as it is."""

    def __init__(self, url: str, settings: Settings, server: EventLoop) -> None:
        super().__init__(url, settings, server)
        self.priority: Priority | None = None
        self._idle_since_s = time.monotonic()
        self._has_served_trainer = False  # whether a trainer ever came
        self._orphan_retry_s = 0.0  # when an orphan's commit is tried again
        self._orphan_deadline_s = math.inf  # when an orphan's commit is given up
        self._has_reported_end = False
        self._yields_to_new_release = False
        # Both on the monotonic clock: when this process is assumed to be killed, and the deadline of a warning signal.
        self._kill_expected_s = math.inf
        self._warning_deadline_s = -math.inf

    def close(self) -> None:
        self._end_commit_attempt()
        self._notice_listeners.close()
        self.alarms.close()
        self._drop_lent_replicas()
        for job in self._jobs():
            # Somebody may still need what other nodes hold of this job.
            unknown = self._server.is_end_requested or job.has_unread_arenas
            job.drop(leave_others=unknown and not job.ended_cleanly)
            job.abandon_commit()
        for followed_job in self.followed_jobs:
            followed_job.drop()
        self.replicas.close()
        if self.network is not None:
            self.network.close()
        self._workers.close()
        self._store.close()
        self.status_view.close()

    # -- what the event loop calls

    def message(self, peer: AnyPeer, message: Message) -> None:
        """Handles a message of a trainer or a tool. Errors: CkptError; whatever a malformed message leads to."""
        kind = message.kind
        if kind == "hello":
            self._hello(_require_local(peer), message)
        elif not peer.role:
            raise ValueError("the first message on a connection is hello")
        elif kind in ("status", "preempt", "prune"):
            self._on_tool_message(_require_local(peer), message)
        elif kind == "begin":
            self._begin(_require_local(peer), message)
        elif kind == "next-candidate":
            self._strike_candidate(_require_local(peer), message)
        elif kind == "listen":
            self._listen(_require_local(peer), message)
        elif kind == "is-stored":
            self._answer_stored(_require_local(peer), message)
        elif kind == "join" and self._has_remote_coordinator(message):
            self._join_followed_job(_require_local(peer), message)
        elif kind == "join":
            self._join(peer, message)
        elif (followed_job := self._followed_rank_of(peer)) is not None:
            followed_job[0].message(followed_job[1], _require_local(peer), message)
        elif kind == "fetch":
            self._fetch(_require_local(peer), message)
        elif kind == "restored":
            self._finish_start(_require_local(peer), message)
        else:
            job, rank = self._require_member(peer)
            self.status_view.on_rank_message(job, message)
            job.message(rank, peer, message)

    def process_suspended(self, for_s: float) -> None:
        text = f"this agent did not run for {for_s:.0f} s: it was stopped, or its machine had no time for it"
        if self.network is not None:
            text += f". Other nodes cut off one that says nothing for {SILENCE_S_MAX:g} s; their ranks join again by "
            text += "themselves"
        if self.current_job is not None:
            self.current_job.emit("agent.stood_still", text, self.network is not None, {"for_s": round(for_s, 1)})
        else:
            log.warning("%s", text)

    def settle(self) -> float | None:
        """Does what follows from the newest messages and the time. Returns when to call again (monotonic seconds)."""
        now_s = time.monotonic()
        self._convert_signals_to_notices()
        self._learnt_history.load_history(self.current_job)
        self._drop_ended_followed_jobs()
        self._release_idle_memory_nodes()
        times = [
            self._update_inventory_lease(now_s),
            self._retry_orphan_commits(now_s),
            self._schedule_orphan_commit(now_s),
            self.alarms.update(self.current_job, self.followed_jobs),
        ]
        times += [job.settle() for job in self._jobs()]
        self._advance_start()
        self._update_status_view()
        self._advance_rereplication()
        self._drop_superseded_jobs()
        times += [self._relieve_memory_pressure(now_s), self._replan_cramped_job(now_s), self._end_due_s(now_s)]
        if self.priority is not None:
            times.append(self.priority.apply_priority(self._has_urgent_save(now_s), now_s))
        return min((each for each in times if each is not None), default=None)

    def can_exit(self) -> bool:
        end_s = self._end_due_s(time.monotonic())
        waiting = self.network is not None and self.network.has_waiting_bytes
        return end_s is not None and time.monotonic() >= end_s and not waiting

    # -- small messages of trainers and tools

    def _hello(self, peer: Peer, message: Message) -> None:
        version = int(message.fields["version"])
        if version != VERSION:
            self._refuse_version(version, str(message.fields["role"]))
        peer.role = str(message.fields["role"])
        self._has_served_trainer = self._has_served_trainer or peer.role == "trainer"
        body = {"version": VERSION, "incarnation": self.incarnation, "pid": os.getpid(), "secret": None}
        if peer.role == "trainer" and self.network is not None and self.network.secret:
            body["secret"] = [str(self._newest_epoch()), self.network.secret]
        peer.reply(int(message.fields["id"]), body)

    def _refuse_version(self, version: int, role: str) -> None:
        """Refuses a process of another ckpt release. If nobody needs this agent, it makes way for a trainer: it commits
        what is not in the store yet, and ends. Errors: AgentError; OtherVersion if the trainer is to wait for that end.
        """
        text = f"the agent of {redact_url(self.url)} speaks version {VERSION} of its messages, this process version "
        text += f"{version}: they are of two releases of ckpt"
        used = any(not job.scheduler.all_gone for job in self._jobs()) or any(
            each.is_needed for each in self.followed_jobs
        )
        used = used or self._start is not None or any(peer.role == "trainer" for peer in self._server.peers)
        if role != "trainer" or used:
            raise AgentError(f"{text}. The agent ends with its job; start again then")
        self._yields_to_new_release = True
        raise OtherVersion(f"{text}. The agent ends as soon as what it has is in the store")

    def _answer_stored(self, peer: Peer, message: Message) -> None:
        """Answers whether a checkpoint is in the store, whoever put it there. The rank need not have joined."""
        fields = message.fields
        request_id, wanted = int(fields["id"]), Identity.parse(str(fields["identity"]))

        def is_stored() -> bool:
            return any(ref.identity == wanted for ref in self._store.open_run(impatient=True).view().commits)

        def looked(done: Future[bool]) -> None:
            peer.reply(request_id, {"stored": not failure(done) and done.result()})

        self._workers.run(Lane.FRONT, is_stored, looked)

    def _on_tool_message(self, peer: Peer, message: Message) -> None:
        fields, request_id = message.fields, int(message.fields["id"])
        job = self.current_job
        if message.kind == "status":
            # A blob, since the status grows with the job.
            peer.reply(request_id, {}, blobs=[msgpack.packb(self.status())])
        elif message.kind == "preempt":
            if (job is None or job.scheduler.all_gone) and not any(each.is_needed for each in self.followed_jobs):
                raise AgentError(f"no job is running on {redact_url(self.url)}")
            source = str(fields.get("source", "unknown"))[:200]
            if fields.get("cancel"):
                self._withdraw_operator_notice(source)
            else:
                left_s = parse_seconds(fields["deadline_s"], "preempt: deadline_s")
                deadline_s = time.time() + (left_s if left_s > 0 else PAST_S)
                self._on_notice(Notice(deadline_s, source, True, OPERATOR, "ckpt preempt"), ExitTiming.AT_ONCE)
            peer.reply(request_id, {})
        else:
            rule = keep_from(fields.get("keep") or {}, "keep")
            also = [Identity.parse(str(text)) for text in fields.get("also") or []]
            epoch = job.epoch if job is not None and self._store.is_claimed(job.epoch) else None
            what = PrunePass.ALL if fields["yes"] else PrunePass.REPORT
            if what is PrunePass.ALL:
                self._refuse_if_follower(job)
            self._workers.run(
                # A prune that only looks does not wait for a commit.
                Lane.FRONT if what is PrunePass.REPORT else Lane.COMMIT,
                lambda: self._store.prune(epoch, rule, also, what),
                lambda done: self._on_prune_done(peer, request_id, done),
            )

    def _refuse_if_follower(self, job: Job | None) -> None:
        """Errors: RunInUse if another node coordinates the newest job here: its agent decides what is deleted."""
        led = max((each for each in self.followed_jobs if each.is_needed), key=lambda each: each.epoch, default=None)
        if led is not None and (job is None or led.epoch > job.epoch):
            raise RunInUse(
                f"{redact_url(self.url)} is in use: its epoch {led.epoch} is coordinated by agent "
                f"{led.coordinator.name}, "
                "which alone decides what goes. Run ckpt prune on that node"
            )

    def _on_prune_done(self, peer: Peer, request_id: int, done: Future[dict[str, Any]]) -> None:
        error = done.exception()
        if error is not None:
            peer.refuse(request_id, error)
            return
        # A blob, since the result grows with the run.
        peer.reply(request_id, {}, blobs=[msgpack.packb(done.result())])

    # -- what is shown

    def status(self) -> dict[str, Any]:
        """What `ckpt watch` and the metrics page show."""
        self._update_status_view()
        job = self.current_job
        return {
            "url": self.url,
            "pid": os.getpid(),
            "incarnation": self.incarnation,
            "name": self.network.agent_name if self.network is not None else None,  # the agent's name in the network
            **self.status_view.facts(),
            "predictions": self.alarms.table(),
            "starting": self._start.launch if self._start is not None else None,
            "job": {**job.status(), **job_facts(job)} if job is not None else None,
            "peer_bandwidth": self.network.rate_limit_bytes_s if self.network is not None else None,
            "followed_jobs": [each.status() for each in self.followed_jobs],
            "former": [{**each.status(), **job_facts(each), **FORMER_STATUS_OMITTED} for each in self.former_jobs[-4:]],
            "store_requests": self._store.usage.requests(),
            "store_bytes": self._store.usage.bytes_moved(),
            "copies": self.replicas.status_fields(),
            "lenders": self.memory_nodes.table(),
            "struck": {str(identity): why[:500] for identity, why in list(self._struck_candidates.items())[-20:]},
        }

    def _update_status_view(self) -> None:
        self.status_view.update(self.current_job, self._start is not None)

    def _finish_start(self, peer: Peer, message: Message) -> None:
        start = self._start
        restore = start.job.restore if start is not None and start.job is not None else None
        level = "none"
        steps_lost = start.steps_lost if start is not None else None
        stored = start.newest_stored(self._struck_candidates) if start is not None else None
        if start is not None and restore is not None:
            level = self._level_of(start, restore.identity)
        super()._finish_start(peer, message)
        assert self.current_job is not None
        self.status_view.on_restored(self.current_job, level, restore, steps_lost, stored)

    def _emit_event(self, event: Event) -> None:
        # The current job tells `status_view` by itself.
        if self.current_job is None:
            self.status_view.record_event(event)
        super()._emit_event(event)

    # -- notices

    def _convert_signals_to_notices(self) -> None:
        """Turns signals to the agent itself into notices, if the job heeds notices. SIGTERM and its like, which stop a
        container or service, also ask the agent to end. SIGUSR1 and its like are notices only: a launcher that sends
        one to every process of a job means the machine."""
        job, now_s = self.current_job, time.monotonic()
        heeds = self._notice_listeners.sources.mode != "off"
        if self._server.is_end_requested:
            self._kill_expected_s = min(self._kill_expected_s, now_s + self._settings.sigterm_s)
        if signal_name := self._server.pending_warning:
            self._server.pending_warning = ""
            if heeds:
                self._on_warning_signal(signal_name, now_s)
        if (
            heeds
            and self._server.is_end_requested
            and not self._has_reported_end
            and (job is not None or self.followed_jobs)
        ):
            self._has_reported_end = True
            left_s = self._settings.sigterm_s
            told = f"the agent was asked to end; {left_s:g} s are taken to be left"
            self._on_notice(Notice(time.time() + left_s, "agent", True, "signal", told), ExitTiming.AT_ONCE)
        if not (job is not None and job.scheduler.heeds_notices) and not any(
            each.is_needed for each in self.followed_jobs
        ):
            self._notice_listeners.stop()  # the next job names its sources itself
            self._standing_notices = RelayedNotice()

    def _on_warning_signal(self, signal_name: str, now_s: float) -> None:
        """Hears a warning signal as a notice; further signals before its deadline are ignored."""
        if now_s >= self._warning_deadline_s:
            left_s = self._settings.sigusr1_s
            self._warning_deadline_s = now_s + left_s
            told = f"the agent got {signal_name}; {left_s:g} s are taken to be left"
            self._on_notice(Notice(time.time() + left_s, "agent", True, signal_name, told), ExitTiming.AT_ONCE)

    def _has_urgent_save(self, now_s: float) -> bool:
        """Whether this node saves something before a deadline: then the agent takes processor time from training."""
        led = any(job.is_needed and job.scheduler.is_due(now_s) for job in self._jobs())
        return (
            led
            or any(each.is_needed and each.is_leaving for each in self.followed_jobs)
            or self._kill_expected_s < math.inf
        )

    # -- the end

    def _retry_orphan_commits(self, now_s: float) -> float | None:
        """Retries the failed commits of jobs without trainers, and gives them up after `orphan_s`, or shortly before
        this process is assumed to be killed. Returns when to look again."""
        left_over = self._find_orphaned_job()
        if left_over is not None and left_over.scheduler.newest_commit_state is WorkState.NEW:
            left_over.scheduler.retry_commit()
        if self.current_job is not None:
            saves = [job for job in self.former_jobs if job is left_over or job.scheduler.committing_slot is not None]
            self.current_job.scheduler.is_former_committing = any(
                job.scheduler.newest_commit_state is not WorkState.FAILED for job in saves
            )
        orphans = [job for job in self._jobs() if job.needs_commit_retry]
        if left_over is not None and left_over.scheduler.newest_commit_state is WorkState.FAILED:
            orphans.append(left_over)
        if not orphans or self._start is not None:
            if self._start is not None or not any(
                j.scheduler.all_gone and j.scheduler.is_at_work for j in self._jobs()
            ):
                self._orphan_deadline_s = math.inf  # no retry is under way
            return None
        again_s = min(RETRY_S, self._settings.linger_s / 4)
        if self._orphan_deadline_s == math.inf:
            self._orphan_deadline_s = now_s + self._settings.orphan_s
            self._orphan_retry_s = now_s + again_s
        if self._kill_expected_s < math.inf:
            self._orphan_deadline_s = min(
                self._orphan_deadline_s, self._kill_expected_s - END_RESERVE * self._settings.sigterm_s
            )
            self._orphan_retry_s = min(self._orphan_retry_s, now_s + END_RETRY_S)
        if now_s >= self._orphan_deadline_s:
            for job in orphans:
                log.warning("the newest checkpoint of %s was not committed: %s", job.epoch, job.scheduler.last_error)
                job.scheduler.stop_commits()
            return None
        if now_s >= self._orphan_retry_s:
            self._orphan_retry_s = now_s + again_s
            for job in orphans:
                job.scheduler.retry_commit()
        return min(self._orphan_retry_s, self._orphan_deadline_s)

    def _find_orphaned_job(self) -> Job | None:
        """The job whose newest checkpoint is not in the store though all newer starts came to nothing: it is still the
        newest of the run. None: there is none."""
        for job in reversed(self._jobs() if self._start is None else []):
            if job.is_orphaned:
                return job if all(each.epoch < job.epoch for each in self.followed_jobs) else None
            if not job.ended_without_checkpoint:
                break
        return None

    def _end_due_s(self, now_s: float) -> float | None:
        """When the agent may end (monotonic seconds); None: not before something happens."""
        waiting = any(peer.role not in ("", "tool") and not self._is_involved(peer) for peer in self._server.peers)
        jobs = self._jobs()
        busy = any(job.is_needed for job in jobs) or self._has_needed_followed_job
        if self._start is not None or waiting or busy or self._find_orphaned_job() is not None:
            self._idle_since_s = now_s
            return None
        # A connection without its hello yet may be a trainer's. It may be a tool's, too, so the idle time goes on.
        if self._commit_attempt is not None or any(not peer.role for peer in self._server.peers):
            return None
        # After a job's regular end nobody comes back for what is kept of it.
        ended = bool(jobs) and jobs[-1].is_finished
        ended = ended and not any(each.epoch > jobs[-1].epoch for each in self.followed_jobs)
        keeps = bool(self.followed_jobs or self.replicas.identities) and not ended
        # The node lost its ranks and its coordinator, but still holds checkpoints that a start may want.
        if keeps and not self._server.is_end_requested:
            if self.inventory_lease.is_held:
                return None  # the holder of the lease may be reading them
            in_store = self._yields_to_new_release and self._turns.is_settled
            return now_s if in_store else self._idle_since_s + self._settings.linger_s
        ahead_s = self._notice_listeners.repeat_notice_s(time.time())
        if ahead_s and not (ended or self._server.is_end_requested or self._yields_to_new_release):
            return min(now_s + ahead_s, self._idle_since_s + self._settings.linger_s)
        if not jobs:
            wanted = not (self._has_served_trainer or self._server.is_end_requested or self._yields_to_new_release)
            return self._idle_since_s + IDLE_S if wanted else now_s
        held = any(job.checkpoints or job.has_unread_arenas for job in jobs)
        # Only the newest job's end counts: that job supersedes the former ones.
        if jobs[-1].ended_cleanly or not held or self._server.is_end_requested or self._yields_to_new_release:
            return now_s
        return self._idle_since_s + self._settings.linger_s

    def _is_involved(self, peer: AnyPeer) -> bool:
        return self._followed_rank_of(peer) is not None or any(job.involves(peer) for job in self._jobs())


def _require_local(peer: AnyPeer) -> Peer:
    """`peer` as a local connection. Errors: AgentError for a rank on another node."""
    if not isinstance(peer, Peer):
        raise AgentError("only a rank of this node can ask for that")
    return peer

"""The agent as a whole: dispatches the trainers' messages, shows its status, and decides when its work is done.

`Agent` inherits, from top to bottom: `OrphanCommitter`, `PeerHandlers`, `ClusterStartup`, `Startup`, `NodeMemory`.
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
from ckpt.agent.job.arena_handover import which_committed
from ckpt.agent.job.job import Job, finite
from ckpt.agent.node.orphan_committer import OrphanCommitter
from ckpt.agent.observability.status import job_facts
from ckpt.agent.preemption.deadline_strategy import PAST_S, When
from ckpt.agent.preemption.notice_relay import OPERATOR, RelayedNotice
from ckpt.agent.runtime.event_loop import EventLoop, Peer
from ckpt.agent.runtime.priority import Priority
from ckpt.agent.runtime.workers import Lane, failure
from ckpt.agent.snapshots.remote_share import AnyPeer
from ckpt.agent.state.job_facts import Store
from ckpt.errors import AgentError, OtherVersion, RunInUse
from ckpt.events import Event
from ckpt.ipc.addresses import SILENT_S
from ckpt.ipc.client import VERSION
from ckpt.ipc.messages import Message
from ckpt.preemption.notice import Notice
from ckpt.settings import Settings
from ckpt.storage.names import shown
from ckpt.types import Identity

log = logging.getLogger("ckpt")

IDLE_S = 30.0  # how long an agent without a job waits for one
RETRY_S = 30.0  # pause before an orphan's failed commit is tried again
# Left out of a former job's status, since they grow with the job.
NOT_OF_FORMER: dict[str, None] = dict.fromkeys(("ranks", "steps", "peers"))
END_RETRY_S = 2.0  # the same pause once a signal has asked the agent to end
END_RESERVE = 1 / 6  # the last part of the time from the signal to the kill, in which no commit is tried


class Agent(OrphanCommitter):
    """The agent of one node. Main thread only. `priority`: tends the process's priority; None: it stays as it is."""

    def __init__(self, url: str, settings: Settings, server: EventLoop) -> None:
        super().__init__(url, settings, server)
        self.priority: Priority | None = None
        self._idle_since_s = time.monotonic()
        self._served = False  # whether a trainer ever came
        self._retry_s = 0.0  # when an orphan's commit is tried again
        self._limit_s = math.inf  # when an orphan's commit is given up
        self._told_of_end = False
        self._makes_way = False
        # Both on the monotonic clock: when this process is assumed to be killed, and the deadline of a warning signal.
        self._ends_s = math.inf
        self._warned_until_s = -math.inf

    def close(self) -> None:
        self._end_attempt()
        self._listening.close()
        self.foreseeing.close()
        self._free_lenders()
        for job in self._jobs():
            # Somebody may still need what other nodes hold of this job.
            unknown = self._server.end_asked or job.holds_unread
            job.drop(leave_others=unknown and not job.ended_in_order)
            job.abandon_commit()
        for following in self.followings:
            following.drop()
        self.copies.close()
        if self.network is not None:
            self.network.close()
        self._bulk.close()
        self._store.close()
        self.showing.close()

    # -- what the event loop calls

    def message(self, peer: AnyPeer, message: Message) -> None:
        """Handles a message of a trainer or a tool. Errors: CkptError; whatever a malformed message leads to."""
        kind = message.kind
        if kind == "hello":
            self._hello(_local(peer), message)
        elif not peer.role:
            raise ValueError("the first message on a connection is hello")
        elif kind in ("status", "preempt", "prune"):
            self._tool(_local(peer), message)
        elif kind == "begin":
            self._begin(_local(peer), message)
        elif kind == "next":
            self._next(_local(peer), message)
        elif kind == "listen":
            self._listen(_local(peer), message)
        elif kind == "stored":
            self._stored(_local(peer), message)
        elif kind == "join" and self._is_led_elsewhere(message):
            self._follow(_local(peer), message)
        elif kind == "join":
            self._join(peer, message)
        elif (following := self._following(peer)) is not None:
            following[0].message(following[1], _local(peer), message)
        elif kind == "fetch":
            self._fetch(_local(peer), message)
        elif kind == "restored":
            self._restored(_local(peer), message)
        else:
            job, rank = self._member(peer)
            self.showing.heard(job, message)
            job.message(rank, peer, message)

    def ended(self, peer: AnyPeer) -> None:
        for job in self._jobs():
            job.ended(peer)
        for following in self.followings:
            following.ended(peer)
        self._give_up_start(peer)

    def died(self, peer: AnyPeer) -> None:
        for job in self._jobs():
            job.died(peer)
        for following in self.followings:
            following.died(peer)
        self._give_up_start(peer)

    def stood_still(self, for_s: float) -> None:
        text = f"this agent did not run for {for_s:.0f} s: it was stopped, or its machine had no time for it"
        if self.network is not None:
            text += (
                f". Other nodes cut off one that says nothing for {SILENT_S:g} s; their ranks join again by themselves"
            )
        if self.current is not None:
            self.current.emit("agent.stood_still", text, self.network is not None, {"for_s": round(for_s, 1)})
        else:
            log.warning("%s", text)

    def settle(self) -> float | None:
        """Does what follows from the newest messages and the time. Returns when to call again (monotonic seconds)."""
        now_s = time.monotonic()
        self._tend_notices()
        self._relearning.tend(self.current)
        self._tend_followings()
        self._tend_lenders()
        fence_s = self._tend_fence(now_s)
        times = [
            fence_s,
            self._tend_orphans(now_s),
            self._tend_inheritance(now_s),
            self.foreseeing.tend(self.current, self.followings),
        ]
        times += [job.settle() for job in self._jobs()]
        self._answer_start()
        self._see()
        self._tend_protection()
        self._drop_former()
        times += [self._tend_memory(now_s), self._tend_room(now_s), self._end_s(now_s)]
        if self.priority is not None:
            times.append(self.priority.tend(self._hurries(now_s), now_s))
        return min((each for each in times if each is not None), default=None)

    def finished(self) -> bool:
        end_s = self._end_s(time.monotonic())
        waiting = self.network is not None and self.network.waiting
        return end_s is not None and time.monotonic() >= end_s and not waiting

    # -- small messages of trainers and tools

    def _hello(self, peer: Peer, message: Message) -> None:
        version = int(message.fields["version"])
        if version != VERSION:
            self._refuse_version(version, str(message.fields["role"]))
        peer.role = str(message.fields["role"])
        self._served = self._served or peer.role == "trainer"
        body = {"version": VERSION, "incarnation": self.incarnation, "pid": os.getpid(), "secret": None}
        if peer.role == "trainer" and self.network is not None and self.network.secret:
            body["secret"] = [str(self._newest_epoch()), self.network.secret]
        peer.reply(int(message.fields["id"]), body)

    def _refuse_version(self, version: int, role: str) -> None:
        """Refuses a process of another ckpt release. If nobody needs this agent, it makes way for a trainer: it commits
        what is not in the store yet, and ends. Errors: AgentError; OtherVersion if the trainer is to wait for that end.
        """
        text = (
            f"the agent of {shown(self.url)} speaks version {VERSION} of its messages, this process version {version}: "
        )
        text += "they are of two releases of ckpt"
        used = any(not job.group.all_gone for job in self._jobs()) or any(each.needed for each in self.followings)
        used = used or self._start is not None or any(peer.role == "trainer" for peer in self._server.peers)
        if role != "trainer" or used:
            raise AgentError(f"{text}. The agent ends with its job; start again then")
        self._makes_way = True
        raise OtherVersion(f"{text}. The agent ends as soon as what it has is in the store")

    def _stored(self, peer: Peer, message: Message) -> None:
        """Answers whether a checkpoint is in the store, whoever put it there. The rank need not have joined."""
        fields = message.fields
        request_id, wanted = int(fields["id"]), Identity.parse(str(fields["identity"]))

        def looked(done: Future[frozenset[Identity]]) -> None:
            peer.reply(request_id, {"stored": not failure(done) and wanted in done.result()})

        self._bulk.run(Lane.FRONT, lambda: which_committed([wanted], self._store), looked)

    def _tool(self, peer: Peer, message: Message) -> None:
        fields, request_id = message.fields, int(message.fields["id"])
        job = self.current
        if message.kind == "status":
            # A blob, since the status grows with the job.
            peer.reply(request_id, {}, blobs=[msgpack.packb(self.status())])
        elif message.kind == "preempt":
            if (job is None or job.group.all_gone) and not any(each.needed for each in self.followings):
                raise AgentError(f"no job is running on {shown(self.url)}")
            source = str(fields.get("source", "unknown"))[:200]
            if fields.get("cancel"):
                self._take_back(source)
            else:
                left_s = finite(fields["deadline_s"], "preempt: deadline_s")
                deadline_s = time.time() + (left_s if left_s > 0 else PAST_S)
                self._heard(Notice(deadline_s, source, True, OPERATOR, "ckpt preempt"), When.AT_ONCE)
            peer.reply(request_id, {})
        else:
            rule = keep_from(fields.get("keep") or {}, "keep")
            also = [Identity.parse(str(text)) for text in fields.get("also") or []]
            epoch = job.epoch if job is not None and self._store.is_claimed(job.epoch) else None
            what = PrunePass.ALL if fields["yes"] else PrunePass.LOOK
            if what is PrunePass.ALL:
                self._refuse_led_elsewhere(job)
            self._bulk.run(
                # A prune that only looks does not wait for a commit.
                Lane.FRONT if what is PrunePass.LOOK else Lane.COMMIT,
                lambda: self._store.prune(epoch, rule, also, what),
                lambda done: self._pruned(peer, request_id, done),
            )

    def _refuse_led_elsewhere(self, job: Job | None) -> None:
        """Errors: RunInUse if another node coordinates the newest job here: its agent decides what is deleted."""
        led = max((each for each in self.followings if each.needed), key=lambda each: each.epoch, default=None)
        if led is not None and (job is None or led.epoch > job.epoch):
            raise RunInUse(
                f"{shown(self.url)} is in use: its epoch {led.epoch} is coordinated by the agent of {led.leader.name}, "
                "which alone decides what goes. Run ckpt prune on that node"
            )

    def _pruned(self, peer: Peer, request_id: int, done: Future[dict[str, Any]]) -> None:
        error = done.exception()
        if error is not None:
            peer.refuse(request_id, error)
            return
        # A blob, since the result grows with the run.
        peer.reply(request_id, {}, blobs=[msgpack.packb(done.result())])

    # -- what is shown

    def status(self) -> dict[str, Any]:
        """What `ckpt watch` and the metrics page show."""
        self._see()
        job = self.current
        return {
            "url": self.url,
            "pid": os.getpid(),
            "incarnation": self.incarnation,
            "name": self.network.me if self.network is not None else None,  # the agent's name in the network
            "nodes": self._server.called.nodes,
            **self.showing.facts(),
            "predictions": self.foreseeing.table(),
            "starting": self._start.launch if self._start is not None else None,
            "job": {**job.status(), **job_facts(job)} if job is not None else None,
            "peer_bandwidth": self.network.limit_bytes_s if self.network is not None else None,
            "following": [each.status() for each in self.followings],
            "former": [{**each.status(), **job_facts(each), **NOT_OF_FORMER} for each in self.former[-4:]],
            "copies": self.copies.shown(),
            "lenders": self.lenders.table(),
            "struck": {str(identity): why[:500] for identity, why in list(self._struck.items())[-20:]},
        }

    def _see(self) -> None:
        self.showing.look(self.current, self._start is not None)

    def _restored(self, peer: Peer, message: Message) -> None:
        start = self._start
        restore = start.job.restore if start is not None and start.job is not None else None
        level = "none"
        steps_lost = start.steps_lost if start is not None else None
        stored = start.newest_stored(self._struck) if start is not None else None
        if start is not None and restore is not None:
            level = self._level_of(start, restore.identity)
        super()._restored(peer, message)
        assert self.current is not None
        self.showing.restored(self.current, level, restore, steps_lost, stored)

    def _event(self, event: Event) -> None:
        # The current job tells `showing` by itself.
        if self.current is None:
            self.showing.told(event)
        super()._event(event)

    # -- notices

    def _tend_notices(self) -> None:
        """Turns signals to the agent itself into notices, if the job heeds notices. SIGTERM and its like, which stop a
        container or service, also ask the agent to end. SIGUSR1 and its like are notices only: a launcher that sends
        one to every process of a job means the machine."""
        job, now_s = self.current, time.monotonic()
        heeds = self._listening.sources.mode != "off"
        if self._server.end_asked:
            self._ends_s = min(self._ends_s, now_s + self._settings.sigterm_s)
        if signal_name := self._server.warned:
            self._server.warned = ""
            if heeds:
                self._warn(signal_name, now_s)
        if heeds and self._server.end_asked and not self._told_of_end and (job is not None or self.followings):
            self._told_of_end = True
            left_s = self._settings.sigterm_s
            told = f"the agent was asked to end; {left_s:g} s are taken to be left"
            self._heard(Notice(time.time() + left_s, "agent", True, "signal", told), When.AT_ONCE)
        if not (job is not None and job.group.heeds_notices) and not any(each.needed for each in self.followings):
            self._listening.stop()  # the next job names its sources itself
            self._standing = RelayedNotice()

    def _warn(self, signal_name: str, now_s: float) -> None:
        """Hears a warning signal as a notice; further signals before its deadline are ignored."""
        if now_s >= self._warned_until_s:
            left_s = self._settings.sigusr1_s
            self._warned_until_s = now_s + left_s
            told = f"the agent got {signal_name}; {left_s:g} s are taken to be left"
            self._heard(Notice(time.time() + left_s, "agent", True, signal_name, told), When.AT_ONCE)

    def _hurries(self, now_s: float) -> bool:
        """Whether this node saves something before a deadline: then the agent takes processor time from training."""
        led = any(job.needed and job.group.is_due(now_s) for job in self._jobs())
        return led or any(each.needed and each.leaves for each in self.followings) or self._ends_s < math.inf

    # -- the end

    def _tend_orphans(self, now_s: float) -> float | None:
        """Retries the failed commits of jobs without trainers, and gives them up after `orphan_s`, or shortly before
        this process is assumed to be killed. Returns when to look again."""
        left_over = self._left_over()
        if left_over is not None and left_over.group.newest_store is Store.NEW:
            left_over.group.retry_commit()
        if self.current is not None:
            saves = [job for job in self.former if job is left_over or job.group.committing is not None]
            self.current.group.former_saves = any(job.group.newest_store is not Store.FAILED for job in saves)
        orphans = [job for job in self._jobs() if job.is_orphan]
        if left_over is not None and left_over.group.newest_store is Store.FAILED:
            orphans.append(left_over)
        if not orphans or self._start is not None:
            if self._start is not None or not any(j.group.all_gone and j.group.at_work for j in self._jobs()):
                self._limit_s = math.inf  # no retry is under way
            return None
        again_s = min(RETRY_S, self._settings.linger_s / 4)
        if self._limit_s == math.inf:
            self._limit_s = now_s + self._settings.orphan_s
            self._retry_s = now_s + again_s
        if self._ends_s < math.inf:
            self._limit_s = min(self._limit_s, self._ends_s - END_RESERVE * self._settings.sigterm_s)
            self._retry_s = min(self._retry_s, now_s + END_RETRY_S)
        if now_s >= self._limit_s:
            for job in orphans:
                log.warning("the newest checkpoint of %s was not committed: %s", job.epoch, job.group.last_error)
                job.group.give_up()
            return None
        if now_s >= self._retry_s:
            self._retry_s = now_s + again_s
            for job in orphans:
                job.group.retry_commit()
        return min(self._retry_s, self._limit_s)

    def _left_over(self) -> Job | None:
        """The job whose newest checkpoint is not in the store though all newer starts came to nothing: it is still the
        newest of the run. None: there is none."""
        for job in reversed(self._jobs() if self._start is None else []):
            if job.is_left_over:
                return job if all(each.epoch < job.epoch for each in self.followings) else None
            if not job.came_to_nothing:
                break
        return None

    def _end_s(self, now_s: float) -> float | None:
        """When the agent may end (monotonic seconds); None: not before something happens."""
        waiting = any(peer.role not in ("", "tool") and not self._involved(peer) for peer in self._server.peers)
        jobs = self._jobs()
        busy = any(job.needed for job in jobs) or self._is_followed
        if self._start is not None or waiting or busy or self._left_over() is not None:
            self._idle_since_s = now_s
            return None
        # A connection without its hello yet may be a trainer's. It may be a tool's, too, so the idle time goes on.
        if self._attempt is not None or any(not peer.role for peer in self._server.peers):
            return None
        # After a job's regular end nobody comes back for what is kept of it.
        ended = bool(jobs) and jobs[-1].came_to_its_end
        ended = ended and not any(each.epoch > jobs[-1].epoch for each in self.followings)
        keeps = bool(self.followings or self.copies.identities) and not ended
        # The node lost its ranks and its coordinator, but still holds checkpoints that a start may want.
        if keeps and not self._server.end_asked:
            if self.fence.stands(now_s):
                return None  # the holder of the lease may be reading them
            in_store = self._makes_way and self._turns.settled
            return now_s if in_store else self._idle_since_s + self._settings.linger_s
        ahead_s = self._listening.left_ahead_s(time.time())
        if ahead_s and not (ended or self._server.end_asked or self._makes_way):
            return min(now_s + ahead_s, self._idle_since_s + self._settings.linger_s)
        if not jobs:
            wanted = not (self._served or self._server.end_asked or self._makes_way)
            return self._idle_since_s + IDLE_S if wanted else now_s
        held = any(job.checkpoints or job.holds_unread for job in jobs)
        # Only the newest job's end counts: that job supersedes the former ones.
        if jobs[-1].ended_in_order or not held or self._server.end_asked or self._makes_way:
            return now_s
        return self._idle_since_s + self._settings.linger_s

    def _involved(self, peer: AnyPeer) -> bool:
        return self._following(peer) is not None or any(job.involves(peer) for job in self._jobs())


def _local(peer: AnyPeer) -> Peer:
    """`peer` as a local connection. Errors: AgentError for a rank on another node."""
    if not isinstance(peer, Peer):
        raise AgentError("only a rank of this node can ask for that")
    return peer

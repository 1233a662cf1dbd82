"""The notices on this node: from its listeners, signals, ranks and operators, to the jobs and the ranks here."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from ckpt.agent.job.rank_messages import parse_seconds
from ckpt.agent.node.node_context import NodeContext
from ckpt.agent.preemption.notice_listener import NoticeListeners
from ckpt.agent.preemption.notice_relay import (
    OPERATOR,
    PAST_S,
    ExitTiming,
    RelayedNotice,
    is_operator_key,
    parse_returned_notices,
)
from ckpt.agent.runtime.event_loop import Peer
from ckpt.errors import AgentError
from ckpt.ipc.messages import Message
from ckpt.preemption.notice import Notice, NoticeChange, Withdrawn
from ckpt.storage.names import redact_url

RANKS_NOTICES_MAX = 16  # notices in one message to a rank


class NodeNotices:
    """Main thread only. `listeners`: the notice sources of this machine. `kill_expected_s`: when this process is
    assumed to be killed, on the monotonic clock."""

    def __init__(self, context: NodeContext) -> None:
        self.listeners = NoticeListeners(context.server.post, self.on_notice, context.events)
        self.kill_expected_s = math.inf
        self._context, self._jobs = context, context.jobs
        self._standing = RelayedNotice()  # the notices that stand on this node
        self._has_reported_end = False
        self._warning_deadline_s = -math.inf  # the deadline of a warning signal

    def on_notice(self, word: NoticeChange, when: ExitTiming = ExitTiming.IN_TIME) -> None:
        """A notice, or its withdrawal, was heard on this node. `when`: how a job answers a certain one."""
        self._standing.record_notice(word, when)
        for peer in self._context.server.peers:
            if peer.role == "trainer":
                self._send_standing(peer)
        if self._jobs.current is not None:
            self._jobs.current.notices.handle(word, when)
        for each in self._jobs.followed:
            each.on_notice(word, when)

    def withdraw_operator_notice(self, source: str) -> None:
        """Withdraws an operator's notice from `source`, whichever node it came by."""
        self.on_notice(Withdrawn(source, OPERATOR))
        for each in self._jobs.followed:
            each.tell_coordinator({"t": "withdraw-notice", "source": source})
        job = self._jobs.current
        if job is not None:
            for name in [
                name for name in job.scheduler.preemption.notices if name[0] == source and is_operator_key(name[1])
            ]:
                job.notices.handle(Withdrawn(*name))
            for node in job.nodes[1:]:
                job.share_of(node.name).notify({"t": "withdraw-notice", "source": source})

    def preempt(self, peer: Peer, message: Message) -> None:
        """An operator's notice, or its withdrawal. Errors: AgentError if no job runs here; UsageError."""
        fields, job = message.fields, self._jobs.current
        if (job is None or job.scheduler.facts.all_gone) and not any(each.is_needed for each in self._jobs.followed):
            raise AgentError(f"no job is running on {redact_url(self._context.url)}")
        source = str(fields.get("source", "unknown"))[:200]
        if fields.get("cancel"):
            self.withdraw_operator_notice(source)
        else:
            left_s = parse_seconds(fields["deadline_s"], "preempt: deadline_s")
            deadline_s = time.time() + (left_s if left_s > 0 else PAST_S)
            self.on_notice(Notice(deadline_s, source, True, OPERATOR, "ckpt preempt"), ExitTiming.AT_ONCE)
        peer.reply(int(fields["id"]), {})

    # -- handed over between agents, by the ranks

    def take_handed(self, message: Message) -> list[tuple[Notice, ExitTiming]]:
        """The notices that stood on this node when its former agent died, as a rank hands them over."""
        if not message.fields["resume"]:
            return []
        handed = parse_returned_notices(message.fields.get("standing_notices") or [])
        for notice, when in handed:
            self.listeners.restore_notice(notice, when)
        return handed

    def repeat(self, handed: Sequence[tuple[Notice, ExitTiming]]) -> None:
        for notice, when in handed:
            self.on_notice(notice, when)

    def hand_to_rank(self, peer: Peer) -> None:
        """Tells a rank the standing notices, which it hands to the next agent if this one dies."""
        if self._standing.notice_fields():
            self._send_standing(peer)

    def _send_standing(self, peer: Peer) -> None:
        notices: list[dict[str, Any]] = self._standing.notice_fields()[-RANKS_NOTICES_MAX:]
        peer.send({"t": "standing-notices", "notices": notices})

    # -- signals to this process

    def convert_signals(self, now_s: float) -> None:
        """Turns signals to the agent itself into notices, if the job heeds notices. SIGTERM and its like, which stop a
        container or service, also ask the agent to end. SIGUSR1 and its like are notices only: a launcher that sends
        one to every process of a job means the machine."""
        server, settings, job = self._context.server, self._context.settings, self._jobs.current
        heeds = self.listeners.sources.mode != "off"
        if server.is_end_requested:
            self.kill_expected_s = min(self.kill_expected_s, now_s + settings.sigterm_s)
        if signal_name := server.pending_warning:
            server.pending_warning = ""
            # Further signals before the deadline of the first one are ignored.
            if heeds and now_s >= self._warning_deadline_s:
                self._warning_deadline_s = now_s + settings.sigusr1_s
                self._hear_signal(signal_name, settings.sigusr1_s, f"got {signal_name}")
        has_job = job is not None or self._jobs.followed
        if heeds and server.is_end_requested and not self._has_reported_end and has_job:
            self._has_reported_end = True
            self._hear_signal("signal", settings.sigterm_s, "was asked to end")
        if not (job is not None and job.scheduler.exit_report.heeds_notices) and not any(
            each.is_needed for each in self._jobs.followed
        ):
            self.listeners.stop()  # the next job names its sources itself
            self._standing = RelayedNotice()

    def _hear_signal(self, key: str, left_s: float, what: str) -> None:
        told = f"the agent {what}; {left_s:g} s are taken to be left"
        self.on_notice(Notice(time.time() + left_s, "agent", True, key, told), ExitTiming.AT_ONCE)

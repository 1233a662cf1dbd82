"""The messages of the ranks of a job, as its coordinator handles them: each becomes a fact of the scheduler."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from ckpt.agent.job.job_context import JobContext
from ckpt.agent.job.job_memory import JobDivision
from ckpt.agent.job.job_notices import JobNotices
from ckpt.agent.preemption.notice_relay import ExitTiming
from ckpt.agent.preemption.preemption import NOTICES_MAX
from ckpt.agent.snapshots.division import RankContents, parse_hashes, parse_layout
from ckpt.agent.snapshots.remote_share import AnyPeer
from ckpt.agent.state.slots import SaveReason
from ckpt.errors import AgentError, UsageError
from ckpt.ipc.messages import Message
from ckpt.ipc.notice_sources import SIGNAL_SOURCE
from ckpt.policy.interval import not_negative
from ckpt.preemption.notice import Notice
from ckpt.types import Version

VALUES_BYTES_MAX = 1 << 40  # more than any machine's memory: a larger size is a mistake


class RankMessages:
    """`end_takeover`: called when a rank is done without the others."""

    def __init__(
        self, context: JobContext, division: JobDivision, notices: JobNotices, end_takeover: Callable[[], None]
    ) -> None:
        self._context, self._scheduler, self._division = context, context.scheduler, division
        self._notices, self._end_takeover = notices, end_takeover

    def handle(self, rank: int, peer: AnyPeer, message: Message) -> None:
        """Handles a message of a rank that has joined. Errors: AgentError; whatever a malformed message leads to."""
        HANDLERS[message.kind](self, rank, peer, message)

    def _on_layout(self, rank: int, peer: AnyPeer, message: Message) -> None:
        connection = self._context.connections.by_rank[rank]
        connection.contents = parse_contents(message, connection.contents.coordinate)
        self._division.on_layout()

    def _on_arena_warm(self, rank: int, peer: AnyPeer, message: Message) -> None:
        self._scheduler.arenas.record_warm_arena(rank, int(message.fields["slot"]), str(message.fields["division"]))

    def _on_staged(self, rank: int, peer: AnyPeer, message: Message) -> None:
        fields = message.fields
        number = int(fields["attempt"])
        if why := str(fields.get("why") or ""):
            last, every = fields.get("updates") or (0, 0)
            self._scheduler.save_attempts.record_miss(rank, number, why, (int(last), int(every)))
            return
        version, stall_s = _version(fields), not_negative("stall_s", float(fields["stall_s"]))
        self._division.compare_samples(rank, fields)
        self._scheduler.save_attempts.record_staging(
            rank, number, version, int(fields["slot"]), str(fields["division"]), stall_s
        )

    def _on_save(self, rank: int, peer: AnyPeer, message: Message) -> None:
        fields, request = message.fields, (peer, int(message.fields["id"]))
        same = Version.parse(str(fields["unchanged_since"])) if fields.get("unchanged_since") else None
        self._scheduler.save_requests.record_save_request(rank, _version(fields), _save_reason(fields), request, same)

    def _on_unsavable(self, rank: int, peer: AnyPeer, message: Message) -> None:
        self._scheduler.save_requests.record_unsavable(
            rank, _version(message.fields), str(message.fields["why"])[:1000]
        )

    def _on_hold(self, rank: int, peer: AnyPeer, message: Message) -> None:
        self._scheduler.exit_vote.record_hold(rank, int(message.fields["attempt"]), (peer, int(message.fields["id"])))

    def _on_require_commit(self, rank: int, peer: AnyPeer, message: Message) -> None:
        self._scheduler.slots.require_commit(_version(message.fields), _save_reason(message.fields))

    def _on_leave(self, rank: int, peer: AnyPeer, message: Message) -> None:
        fields, outcome = message.fields, message.fields.get("outcome")
        in_order, sent_away = outcome != "exception", outcome == "notice"
        if sent_away:
            self._context.has_left_by_notice = True
            by_s = time.monotonic() + parse_seconds(fields.get("left_s") or 0.0, "leave: left_s")
            committed = Version.parse(str(fields["committed"])) if fields.get("committed") else None
            came = [str(each)[:200] for each in list(fields.get("notices") or ())[:NOTICES_MAX]]
            self._scheduler.exit_vote.record_exit_order(str(fields.get("why") or "")[:1000], by_s, committed, came)
        self._scheduler.rank_states.record_leave_request(rank, (peer, int(fields["id"])), in_order, insists=sent_away)
        # This rank is done without the others.
        if in_order and not sent_away and self._scheduler.facts.all_gone:
            self._end_takeover()

    def _on_notice(self, rank: int, peer: AnyPeer, message: Message) -> None:
        """The rank got a signal."""
        fields = message.fields
        name, left_s = str(fields["key"])[:50], parse_seconds(fields["left_s"], "notice: left_s")
        told = Notice(time.time() + left_s, SIGNAL_SOURCE, True, name, f"rank {rank} got {name}")
        self._notices.handle(told, ExitTiming.AT_ONCE, node=self._context.shares.node_of(rank))
        peer.reply(int(fields["id"]), {})


# By kind of message.
HANDLERS: dict[str, Callable[[RankMessages, int, AnyPeer, Message], None]] = {
    "layout": RankMessages._on_layout,
    "arena-warm": RankMessages._on_arena_warm,
    "snapshot-staged": RankMessages._on_staged,
    "save": RankMessages._on_save,
    "unsavable": RankMessages._on_unsavable,
    "rank-holds": RankMessages._on_hold,
    "require-commit": RankMessages._on_require_commit,
    "leave": RankMessages._on_leave,
    "notice": RankMessages._on_notice,
}
# What a rank that has joined may send; `Job` and `FollowerJob` handle the first two.
RANK_KINDS = ("fetch", "frames-received", *HANDLERS)


def parse_contents(message: Message, coordinate: str) -> RankContents:
    """What a rank reports of its state, when it joins or its layout changes. Errors: AgentError, UsageError,
    DamagedData."""
    fields = message.fields
    if len(message.blobs) != 2:
        raise AgentError(f"{message.kind!r} comes with a layout and hashes")
    layout, hashes = parse_layout(message.blobs[0]), parse_hashes(message.blobs[1])
    values_bytes = int(fields["values_bytes"])
    if not 0 <= values_bytes <= VALUES_BYTES_MAX:
        raise UsageError(f"values_bytes is {values_bytes}, not within 0 and {VALUES_BYTES_MAX}")
    return RankContents(coordinate, layout, hashes, str(fields["version"]), values_bytes)


def _version(fields: dict[str, Any]) -> Version:
    return Version.parse(str(fields["version"]))


def _save_reason(fields: dict[str, Any]) -> SaveReason:
    return {"exit": SaveReason.EXIT, "due": SaveReason.DUE}.get(str(fields["why"]), SaveReason.SAVE)


def parse_seconds(value: Any, name: str) -> float:
    """The value as a finite number of seconds. Errors: UsageError."""
    number = float(value)
    if not math.isfinite(number):
        raise UsageError(f"{name} is {number}, not a number of seconds")
    return number

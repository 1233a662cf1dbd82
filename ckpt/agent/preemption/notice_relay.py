"""The notice relay: carries notices heard on other nodes to the coordinator. Pure but for reading the clocks.

A node sends all its standing notices whenever one changes, and when its ranks rejoin. This makes up for messages lost
with a connection. Clocks of two hosts differ and may be set: so messages carry the seconds left, not the time, and a
heard notice is timed by the monotonic clock. A deadline relayed as past was ahead when first heard: no job that hears
of it only now leaves by it.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.errors import AgentError
from ckpt.preemption.notice import MOVED_S, Notice, NoticeChange, Withdrawn

OPERATOR = "preempt"  # key of an operator's request
NOTICES_MAX = 64  # of one node
LEFT_S_MAX = 1e12  # seconds; beyond any deadline that a source can name

# A deadline that is past when first heard of may come at any moment: it is assumed to be so far ahead.
PAST_S = 10.0
# A machine and its notice may outlast the deadline by so long.
OUTLIVES_S = 60.0
ACKNOWLEDGED_SOURCES = frozenset({"azure"})  # notice sources that take an acknowledgement

Name = tuple[str, str]  # source and key


class ExitTiming(enum.Enum):
    """When a job leaves by a certain notice."""

    AT_ONCE = "at once"  # the notice is a request to leave now
    IN_TIME = "in time"  # the job leaves no earlier than it has to
    # The job does not leave: a launcher restarted it here after it had left by this notice, or the deadline has passed
    # and the machine is still here.
    NOT_AGAIN = "not again"


class RelayedNotice:
    """The standing notices of this node, for the coordinator."""

    def __init__(self) -> None:
        self._notices: dict[Name, tuple[Notice, ExitTiming, float]] = {}  # float: deadline on the monotonic clock

    def record_notice(self, word: NoticeChange, when: ExitTiming = ExitTiming.IN_TIME) -> None:
        """Records a notice or a withdrawal."""
        if isinstance(word, Notice):
            self._notices[word.source, word.key] = word, when, time.monotonic() + word.remaining_s
        else:
            self._notices.pop((word.source, word.key), None)

    def notice_fields(self) -> list[dict[str, Any]]:
        """The standing notices as message fields, the newest NOTICES_MAX of them."""
        now_s = time.monotonic()
        return [
            {
                "source": notice.source[:200],
                "key": notice.key[:200],
                "left_s": by_s - now_s,
                "certain": notice.certain,
                "message": notice.message[:500],
                "when": when.value,
            }
            for notice, when, by_s in list(self._notices.values())[-NOTICES_MAX:]
        ]


def parse_returned_notices(told: Any, now_s: float | None = None, suffix: str = "") -> list[tuple[Notice, ExitTiming]]:
    """Parses the result of `RelayedNotice.notice_fields`, which a rank hands to its node's next agent. `suffix`: is
    added to the keys. Errors: AgentError, ValueError, TypeError, LookupError."""
    now_s = time.time() if now_s is None else now_s
    if not isinstance(told, list) or len(told) > NOTICES_MAX:
        raise AgentError(f"more than {NOTICES_MAX} notices of one node")
    return [_parse_notice(each, now_s, suffix) for each in told]


def _parse_notice(each: Mapping[str, Any], now_s: float, suffix: str) -> tuple[Notice, ExitTiming]:
    left_s = float(each["left_s"])
    if math.isnan(left_s):
        raise AgentError(f"a node says that it has {left_s} s left")
    left_s = min(max(left_s, -LEFT_S_MAX), LEFT_S_MAX)
    source, key, text = str(each["source"])[:200], str(each["key"])[:200] + suffix, str(each["message"])[:500]
    when = ExitTiming.NOT_AGAIN if left_s <= 0 else ExitTiming(each["when"])
    return Notice(now_s + left_s, source, bool(each["certain"]), key, text), when


def _is_same(left_s: float, known_s: float) -> bool:
    """Whether both are the same deadline. One that is past when first heard counts as PAST_S ahead; heard again it is
    the same, and is not moved."""
    return abs(known_s - left_s) <= MOVED_S or (left_s <= 0 and known_s <= PAST_S)


def _node_suffix(node: str) -> str:
    return f" on node {node}"


def node_key(key: str, node: str) -> str:
    """The key of a notice that concerns that node. `node`: "" is the coordinator's."""
    return key + _node_suffix(node) if node else key


def strip_node(key: str, node: str) -> str:
    """The key as the source on that node named it. `node`: "" is the coordinator's."""
    return key.removesuffix(_node_suffix(node)) if node else key


def is_operator_key(key: str) -> bool:
    """Whether the key is that of an operator's request, on any node."""
    return key == OPERATOR or key.startswith(OPERATOR + _node_suffix(""))


def parse_relayed_notices(
    node: str, told: Any, known: Mapping[Name, float], now_s: float | None = None
) -> list[tuple[NoticeChange, ExitTiming]]:
    """The notices and withdrawals that are new to the coordinator in a node's message, each with when a job leaves by
    it. `known`: the standing notices of all nodes, with the seconds left. Errors: AgentError, ValueError, TypeError,
    LookupError."""
    now_s = time.time() if now_s is None else now_s
    suffix = _node_suffix(node)
    standing = {(each.source, each.key): (each, when) for each, when in parse_returned_notices(told, now_s, suffix)}
    gone = [name for name in known if name[1].endswith(suffix) and name not in standing]
    new = [
        (each, when)
        for name, (each, when) in standing.items()
        if name not in known or not _is_same(each.deadline_s - now_s, known[name])
    ]
    return [*((Withdrawn(*name), ExitTiming.IN_TIME) for name in gone), *new]


@dataclass(frozen=True, slots=True)
class StandingNotice:
    """A notice that was not withdrawn. (source, key) names it: a later one of that name replaces it. `deadline_s`,
    `received_s`: on the clock of `decide`. `nodes`: the nodes that it concerns; "" is this one."""

    source: str
    key: str
    deadline_s: float
    received_s: float
    certain: bool = True
    exit_timing: ExitTiming = ExitTiming.IN_TIME
    nodes: frozenset[str] = frozenset({""})

    @property
    def causes_exit(self) -> bool:
        """Whether the job leaves by this notice."""
        return self.certain and self.exit_timing is not ExitTiming.NOT_AGAIN

    @property
    def source_key(self) -> str:
        """The key as the source named it, without the node's name."""
        return next((key for node in self.nodes if (key := strip_node(self.key, node)) != self.key), self.key)

    def is_same_event(self, other: StandingNotice) -> bool:
        """Whether both are the same event, heard by several nodes: the end of an allocation, say."""
        same = (self.source, self.source_key, self.certain, self.exit_timing)
        same_time = abs(self.deadline_s - other.deadline_s) <= MOVED_S
        return same_time and same == (other.source, other.source_key, other.certain, other.exit_timing)


def event_to_acknowledge(
    standing: Iterable[StandingNotice], done: Collection[Name], now_s: float
) -> tuple[Name, str] | None:
    """The planned event to acknowledge next (its source, and the source's key), and the node that does it: the
    coordinator's ("") if it heard the event, else the one with the lowest agent name. `done`: events already tried.
    None: no event is left.

    An acknowledged event may begin at once, for every machine that it names. So this comes last: the ranks have left by
    a notice, their last snapshot is committed, each rank was told so, and the event still stands and lies ahead."""
    found: dict[Name, set[str]] = {}
    for each in standing:
        if each.source in ACKNOWLEDGED_SOURCES and each.certain and each.deadline_s > now_s:
            for node in each.nodes:
                found.setdefault((each.source, each.source_key), set()).add(node)
    left = sorted((planned, min(nodes)) for planned, nodes in found.items() if planned not in done)
    return left[0] if left else None

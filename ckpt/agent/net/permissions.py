"""Who may say what to another agent. That a peer knows the run's secret is proven before anything is heard of it; here
is what else is asked of it. Pure.

ANYONE may ask what only tells. AWAITED: a rank of this node waits for a start. ASKED: a start of it has asked what lies
here. LEADS: it coordinates the epoch that is named. DROPS: it does, and no newer start stands in the way (see Fence).
SERVES: it coordinates some epoch that this node has a part in, or a start that has asked what lies here. MEMBER: it has
ranks in the job that is named, which is coordinated here. OWNER: it ends only what it has begun itself.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from ckpt.types import Epoch, Identity


class Who(enum.Enum):
    ANYONE = "anyone"
    AWAITED = "awaited"
    ASKED = "asked"
    LEADS = "leads"
    DROPS = "drops"
    SERVES = "serves"
    MEMBER = "member"
    OWNER = "owner"


_SAID = {
    Who.ANYONE: ("look", "parts", "borrow"),  # the latter is refused, unless to a memory-only node
    Who.AWAITED: ("start",),
    Who.ASKED: ("outcome", "serve"),
    Who.DROPS: ("keep", "kept", "unkeep", "stripe", "forget", "drop", "word", "offer", "make", "close-arenas"),
    Who.SERVES: ("publish", "lend", "rebuild", "write", "keeps"),
    Who.MEMBER: ("rank", "gone", "lacks", "steps", "candidate", "signals", "notices", "take-back"),
    Who.OWNER: ("unserve", "unwrite", "withdraw", "bring", "brought"),  # the latter: see FanOut, whose nodes are known
}
_WHO = {kind: who for who, kinds in _SAID.items() for kind in kinds}
OF_AN_EPOCH = frozenset(("keep", "kept", "stripe", "forget"))  # who says that has begun it


def who_says(fields: Mapping[str, Any]) -> Who:
    """Errors: LookupError."""
    if fields["t"] == "keep" and fields.get("again"):
        return Who.SERVES  # of an older epoch, for which nothing goes
    if fields["t"] == "word" and fields.get("word") == 0:
        return Who.LEADS  # nothing is appointed
    return _WHO.get(str(fields["t"]), Who.LEADS)


def epoch_of(fields: Mapping[str, Any]) -> Epoch:
    """The epoch that it names. Errors: ValueError, LookupError."""
    if "epoch" in fields:
        return Epoch.parse(str(fields["epoch"]))
    return Identity.parse(str(fields["identity"])).epoch

"""The permissions of agents: which peer may send which kind of message. Pure.

The handshake has already proved that the peer knows the run's secret. Each kind of message needs one condition more:
- ANYONE: none; the message only asks for information.
- START_PENDING: a rank of this node waits for a start.
- SURVEYOR: a start of the peer has surveyed this node.
- COORDINATOR: the peer coordinates the epoch that the message names, and this node has a part in it.
- EVICTING_COORDINATOR: as COORDINATOR, and no newer start forbids it (see InventoryLease). Such messages may evict
  something.
- COORDINATOR_OR_SURVEYOR: the peer coordinates some epoch that this node has a part in, or its start has surveyed this
  node.
- FOLLOWER: the peer has ranks in the named job, which this agent coordinates.
- OWNER: none here; the message affects only what the peer itself has begun.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from ckpt.types import Epoch, Identity


class Sender(enum.Enum):
    """The condition that a message's sender must meet; see the module."""

    ANYONE = "anyone"
    START_PENDING = "start-pending"
    SURVEYOR = "surveyor"
    COORDINATOR = "coordinator"
    EVICTING_COORDINATOR = "evicting-coordinator"
    COORDINATOR_OR_SURVEYOR = "coordinator-or-surveyor"
    FOLLOWER = "follower"
    OWNER = "owner"


_KINDS_BY_SENDER = {
    Sender.ANYONE: ("survey", "describe-snapshots", "borrow-memory"),  # only memory-only nodes accept "borrow-memory"
    Sender.START_PENDING: ("start",),
    Sender.SURVEYOR: ("start-outcome", "serve-frames"),
    Sender.EVICTING_COORDINATOR: (
        "replicate",
        "replicated",
        "forget-replicas",
        "drop-older-epochs",
        "epoch-ended",
        "control-word",
        "offer-slot",
        "make-arenas",
        "close-arenas",
    ),
    Sender.COORDINATOR_OR_SURVEYOR: (
        "publish-snapshots",
        "publish-parity",
        "rebuild",
        "write-frames",
    ),
    Sender.FOLLOWER: (
        "from-rank",
        "rank-disconnected",
        "arenas-lost",
        "rank-steps",
        "locate-candidate",
        "signals",
        "node-notices",
        "withdraw-notice",
    ),
    # SharedRead, which handles the last two, knows its nodes.
    Sender.OWNER: ("cancel-write", "withdraw-published", "read-frames", "frames-read"),
}
_SENDER_BY_KIND = {kind: who for who, kinds in _KINDS_BY_SENDER.items() for kind in kinds}
# A peer that sends one of these has begun the epoch that it names.
EPOCH_KINDS = frozenset(("replicate", "replicated", "drop-older-epochs"))


def required_sender(fields: Mapping[str, Any]) -> Sender:
    """The condition for the message with these fields. Errors: LookupError if it has no type."""
    if fields["t"] == "replicate" and fields.get("rereplication"):
        # A replica of an older epoch; nothing is evicted for it.
        return Sender.COORDINATOR_OR_SURVEYOR
    if fields["t"] == "control-word" and fields.get("word") == 0:
        # The message only clears an appointment.
        return Sender.COORDINATOR
    return _SENDER_BY_KIND.get(str(fields["t"]), Sender.COORDINATOR)


def epoch_of(fields: Mapping[str, Any]) -> Epoch:
    """The epoch that a message names. Errors: ValueError, LookupError."""
    if "epoch" in fields:
        return Epoch.parse(str(fields["epoch"]))
    return Identity.parse(str(fields["identity"])).epoch

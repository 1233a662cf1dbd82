"""The actions that a job's scheduler asks the agent to carry out, as plain values.

After an action that names a fact ("then `planned`"), the agent calls that method of the scheduler with the outcome.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckpt.ipc.control_page import ControlWord
from ckpt.types import Version

# Names one request of one connection. Only handed back, in AnswerRequest, Refuse and ReportProgress.
Request = Any


class Action:
    """One action."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class SetWord(Action):
    """Publish the control word of that slot: the version it is appointed for; None: nothing."""

    slot: int
    control_word: ControlWord | None


@dataclass(frozen=True, slots=True)
class SetVerdict(Action):
    """Publish the verdict: the ranks leave by that save attempt. Written to the control page before any answer says
    so."""

    attempt_number: int


@dataclass(frozen=True, slots=True)
class Divide(Action):
    """Make a division of all ranks' layouts of that version; then `record_division` or `record_division_failure`."""

    layouts_version: int


@dataclass(frozen=True, slots=True)
class MakeArenas(Action):
    """Make one arena with warm pages for each rank, of `arena_bytes` by rank; then `record_arenas`."""

    slot: int
    arena_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OfferSlot(Action):
    """Offer a free slot: each rank binds its arena of the slot for the division; then `record_warm_arena` for each."""

    slot: int


@dataclass(frozen=True, slots=True)
class CloseArenas(Action):
    """Free the memory of a slot on every node. The slot is empty and no longer in use."""

    slot: int


@dataclass(frozen=True, slots=True)
class Assemble(Action):
    """Hash what all ranks have staged and put the checkpoint together; then `record_assembly`."""

    slot: int
    attempt_number: int
    version: Version


@dataclass(frozen=True, slots=True)
class Replicate(Action):
    """Have peers keep replicas, as the placement says; then `record_replication`."""

    slot: int
    version: Version


@dataclass(frozen=True, slots=True)
class Commit(Action):
    """Write the checkpoint to the store; then `record_commit`."""

    slot: int
    version: Version


@dataclass(frozen=True, slots=True)
class CancelCommit(Action):
    """Stop the commit under way soon: nothing more is written for it. `record_commit` then reports its outcome."""


@dataclass(frozen=True, slots=True)
class ClearSlot(Action):
    """Forget what that slot held: the slot is empty now."""

    slot: int


@dataclass(frozen=True, slots=True)
class ReplicaDegraded(Action):
    """The newest replicated checkpoint loses memory that its replication relied on, and no longer meets the
    replication target."""

    version: Version


@dataclass(frozen=True, slots=True)
class DropReplicas(Action):
    """Have peers drop their replicas of this job's checkpoints. No new replicas follow."""


@dataclass(frozen=True, slots=True)
class AnswerRequest(Action):
    request: Request
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refuse(Action):
    request: Request
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class ReportProgress(Action):
    """Tell the client that its request still waits for a slot or a rank."""

    request: Request


@dataclass(frozen=True, slots=True)
class NotifyRanks(Action):
    """Send a notification to every connected rank."""

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Emit(Action):
    name: str
    message: str
    loud: bool = False
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WriteOutcome(Action):
    """Write the outcome of a notice to the file that launchers read."""

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Acknowledge(Action):
    """Have that node ("": this one) tell the notice source that its planned event may begin now; then
    `record_acknowledgement`."""

    source: str
    key: str  # as the source names the event
    node: str


@dataclass(frozen=True, slots=True)
class RecordExit(Action):
    """Tell that node ("": this one) that the ranks leave because of this notice of its machine."""

    source: str
    key: str  # as the source names the event
    node: str


@dataclass(frozen=True, slots=True)
class Close(Action):
    """Write to the store that the epoch has ended; then `record_close`."""

    reason: str

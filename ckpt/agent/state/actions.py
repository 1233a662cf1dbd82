"""What a job's state machine asks the agent to do. Values; the agent answers each with the fact that is named."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckpt.ipc.control_page import ControlWord
from ckpt.types import Tick

Request = Any  # names one request of one connection; only handed back in Answer and Refuse


@dataclass(frozen=True, slots=True)
class SetWord:
    """What that slot is appointed for; None: nothing."""

    slot: int
    word: ControlWord | None


@dataclass(frozen=True, slots=True)
class SetVerdict:
    """The ranks leave by that round: to be written where they find it, before the answers that say so."""

    round: int


@dataclass(frozen=True, slots=True)
class Divide:
    """Make a division of all ranks' layouts; then `planned` or `unplannable`."""

    version: int


@dataclass(frozen=True, slots=True)
class MakeArenas:
    """One arena of so many bytes for each rank, with warm pages; then `made`."""

    slot: int
    bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OfferSlot:
    """The slot is free: each rank binds its arena of it for the division; then `warm` from each."""

    slot: int


@dataclass(frozen=True, slots=True)
class CloseArenas:
    """The slot is not among those in use any more, and holds nothing: its memory goes, on every node."""

    slot: int


@dataclass(frozen=True, slots=True)
class Assemble:
    """All ranks staged: hash, put together; then `assembled`."""

    slot: int
    round: int
    tick: Tick


@dataclass(frozen=True, slots=True)
class Replicate:
    """Have other nodes keep it too, where the placement says; then `replicated`."""

    slot: int
    round: int
    tick: Tick


@dataclass(frozen=True, slots=True)
class Commit:
    """Write it to the store; then `committed`."""

    slot: int
    round: int
    tick: Tick
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The commit under way is to end soon: nothing more is written for it. `committed` tells what came of it."""

    slot: int


@dataclass(frozen=True, slots=True)
class Recycle:
    """The slot holds nothing any more."""

    slot: int


@dataclass(frozen=True, slots=True)
class ReplicaDegraded:
    """That tick was the newest of which other nodes kept copies or parity, and this memory, which was part of what made
    it safe, is needed: it is not as safe any more."""

    tick: Tick


@dataclass(frozen=True, slots=True)
class Unkeep:
    """What other nodes keep of this job's checkpoints is wanted no more, and none is to come."""


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    request: Request
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refuse:
    request: Request
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class ReportProgress:
    """That request waits for a slot or a rank."""

    request: Request


@dataclass(frozen=True, slots=True)
class Tell:
    """A notification to every rank that is there."""

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Emit:
    name: str
    message: str
    loud: bool = False
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """What a notice came to: to be written where a launcher can read it."""

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Have that node ("": this one) tell the source that the event may begin now; then `acknowledged`."""

    source: str
    key: str  # as the source has it
    node: str


@dataclass(frozen=True, slots=True)
class LeftBy:
    """Have that node ("": this one) know that the ranks were told to leave by this notice of its machine."""

    source: str
    key: str  # as the source has it
    node: str


@dataclass(frozen=True, slots=True)
class Close:
    """The epoch has ended: say so in the store; then `closed`."""

    reason: str


Said = AnswerRequest | Refuse | ReportProgress | Tell | Emit | WriteOutcome
Acts = (
    SetWord
    | SetVerdict
    | Divide
    | MakeArenas
    | OfferSlot
    | CloseArenas
    | Assemble
    | Replicate
    | Commit
    | GiveUp
    | Recycle
    | ReplicaDegraded
    | Unkeep
    | Acknowledge
    | LeftBy
    | Close
)
Action = Acts | Said

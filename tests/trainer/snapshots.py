"""What the tests of snapshots share: a walk made by hand, an arena, and a copier that stops between tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from ckpt.events import Event, Events
from ckpt.layout.division import whole_share
from ckpt.layout.layout import Entry, Layout, Share, Staging
from ckpt.layout.staging import stage
from ckpt.threads import Tasks
from ckpt.trainer.snapshot.cpu_copier import Copier, CpuCopier, Ticket
from ckpt.trainer.snapshot.deferred_copy import PROOFS_NEEDED
from ckpt.trainer.snapshot.pending_copy import Snapshot
from ckpt.trainer.snapshot.snapshot import Snapshotter
from ckpt.trainer.state.pieces import CopyPiece, split_piece
from ckpt.types import Box
from tests.trainer.roundtrip import raw

FRAME_BYTES = 1 << 16
LARGE = (160, 128)  # float32: 80 KiB, more than DEFERRED_BYTES_MIN, two frames


@dataclass(frozen=True)
class HandWalk:
    layout: Layout
    tensors: tuple[tuple[Tensor, ...], ...]
    deferrable: tuple[bool, ...]


def walk_of(named: Mapping[str, Tensor], late: Collection[str] = ()) -> HandWalk:
    names = sorted(named)
    entries = tuple(
        Entry(n, str(named[n].dtype).removeprefix("torch."), tuple(named[n].shape), (Box.whole(named[n].shape),))
        for n in names
    )
    return HandWalk(Layout(entries), tuple((named[n],) for n in names), tuple(n in late for n in names))


@dataclass
class Rig:
    """Snapshots of the tensors that `state()` names, into arenas of plain memory, in turns."""

    state: Callable[[], tuple[Mapping[str, Tensor], Collection[str]]]
    copier: Copier = field(default_factory=lambda: CpuCopier(2))
    lazy: bool = True
    slots: int = 2
    share: Share | None = None
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.snapshotter = Snapshotter(self.copier, self.lazy, Events(self.events.append))
        self.arenas: list[bytearray] = []
        self.waiting = Tasks("waiting")
        self.turn = 0
        self.walk_again()

    def walk_again(self) -> None:
        """The state has changed its structure: what the session does then."""
        self.walk = walk_of(*self.state())
        self.staging: Staging = stage(self.walk.layout, self.share or whole_share(self.walk.layout), FRAME_BYTES)
        named = zip(self.walk.layout.entries, self.walk.tensors, strict=True)
        self.places = {entry.name: of_one[0].data_ptr() for entry, of_one in named}
        self.arenas = [bytearray(b"\xa5" * self.staging.data_bytes) for _ in range(self.slots)]
        for slot, arena in enumerate(self.arenas):
            self.snapshotter.bindings.bind(slot, self.walk, self.staging, memoryview(arena))

    def is_walk_stale(self) -> bool:
        """The fingerprint: other tensors, or the same in other places."""
        found = self.state()[0]
        return {name: tensor.data_ptr() for name, tensor in found.items()} != self.places

    def take(self) -> Snapshot:
        """Another thread waits for it, as the stager does."""
        self.turn += 1
        snapshot = self.snapshotter.take(self.turn % self.slots)
        self.waiting.start(f"{self.turn}", snapshot.wait)
        return snapshot

    def prove(self, *steps: Callable[[], object]) -> None:
        """After it, the next snapshot is the first late one. `steps`: those of the optimizers."""
        for _ in range(PROOFS_NEEDED):
            self.take().wait(60)
            for step in steps:
                step()
            self.snapshotter.note_boundary()
            self.settle()
        assert self.snapshotter.trust.proven()

    def settle(self) -> None:
        """What the snapshotter's own thread has to do is done: there comparisons are judged."""
        self.snapshotter._tasks.submit(lambda: None).result()

    def staged(self, slot: int) -> dict[str, Tensor]:
        """What the arena holds, read by the staging alone."""
        arena = np.frombuffer(self.arenas[slot], dtype=np.uint8)
        found = {}
        for e, entry in enumerate(self.walk.layout.entries):
            live = self.walk.tensors[e][0]
            out = torch.zeros(live.nbytes, dtype=torch.uint8)
            for s in self.staging.segments[self.staging.segments["entry"] == e]:
                part = arena[int(s["offset"]) : int(s["offset"]) + int(s["length"])]
                out[int(s["start"]) : int(s["start"]) + int(s["length"])] = torch.from_numpy(part.copy())
            found[entry.name] = out.view(live.dtype).view(live.shape)
        return found

    def stamps(self, slot: int) -> dict[str, set[float]]:
        return {name: set(tensor.unique().tolist()) for name, tensor in self.staged(slot).items()}

    def all_stamps(self, slot: int) -> set[float]:
        return set().union(*self.stamps(slot).values())

    def differing(self, slot: int) -> list[str]:
        """The tensors that have other bytes than the arena holds of them."""
        staged = self.staged(slot)
        return [name for name, tensor in self.state()[0].items() if raw(staged[name]) != raw(tensor)]

    def names(self) -> list[str]:
        return [event.name for event in self.events]


def comes_over_bit_for_bit(it: Rig) -> None:
    """Tensors of any kind, which change from one snapshot to the next as far as that is easy."""
    for _ in range(3):
        snapshot = it.take()
        snapshot.wait(60)
        assert snapshot.abandon_reason is None
        assert it.differing(snapshot.slot) == []
        for tensor in it.state()[0].values():
            if tensor.dtype is torch.float32 and tensor.stride()[:1] != (0,):
                tensor.add_(1)


@contextmanager
def rig(state: Callable[[], tuple[Mapping[str, Tensor], Collection[str]]], **options: object) -> Iterator[Rig]:
    made = Rig(state, **options)  # type: ignore[arg-type]
    with one_thread():
        try:
            yield made
        finally:
            made.snapshotter.close()
            made.waiting.close()


def train_on(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: Callable[[], Tensor], **options: object
) -> tuple[list[bytes], list[bool]]:
    """What eight snapshots hold, each of which training goes on behind; and whether each was copied late."""

    def state() -> tuple[dict[str, Tensor], set[str]]:
        moments = {f"optim.{n}.{k}": v for n, s in enumerate(optimizer.state.values()) for k, v in s.items()}
        params = dict(model.named_parameters())
        return {**params, **dict(model.named_buffers()), **moments}, {*params, *moments}

    def train() -> None:
        model(inputs()).square().mean().backward()
        optimizer.step()

    train()
    held, are_late = [], []
    with rig(state, **options) as it:
        for _ in range(8):
            snapshot = it.take()
            train()
            it.snapshotter.note_boundary()
            snapshot.done.result(60)
            assert snapshot.abandon_reason is None
            held.append(bytes(it.arenas[snapshot.slot]))
            are_late.append(snapshot.is_deferred)
        assert not it.events
    return held, are_late


@contextmanager
def one_thread() -> Iterator[None]:
    """On a busy machine torch's own threads wait, and may be fewer, which changes sums in the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class TearingCopier(CpuCopier):
    """Copies late pieces one at a time, or of large ones so many bytes, when the test says so: `copy_some(n)` from any
    place of the training step. What is left is copied by the fence, or never if nobody fences."""

    def __init__(self, nbytes_max: int = sys.maxsize) -> None:
        super().__init__(1)
        self.nbytes_max = nbytes_max
        self.open: list[TearingTicket] = []
        self.copied_late = 0
        self.on_fence: Callable[[], object] = lambda: None  # where the test stops who waits

    def prepare(self, pieces: Sequence[CopyPiece]) -> TearingJob:  # type: ignore[override]
        return TearingJob(self, [part for piece in pieces for part in split_piece(piece, self.nbytes_max)])

    def copy_some(self, count: int = 1) -> None:
        for ticket in self.open:
            for _ in range(count):
                ticket.one()


@dataclass
class TearingJob:
    copier: TearingCopier
    pieces: list[CopyPiece]

    def start_eager(self) -> Ticket:
        for piece in self.pieces:
            piece.target.copy_(piece.source)
        return TearingTicket(self.copier, [])

    def start_deferred(self) -> Ticket:
        ticket = TearingTicket(self.copier, list(self.pieces))
        self.copier.open = [ticket]
        return ticket


@dataclass
class TearingTicket:
    copier: TearingCopier
    left: list[CopyPiece]
    lock: Lock = field(default_factory=Lock)  # the test copies some while another thread may fence

    def one(self) -> None:
        with self.lock:
            if self.left:
                piece = self.left[0]
                try:
                    piece.target.copy_(piece.source)
                finally:
                    del self.left[0]
                self.copier.copied_late += 1

    def fence(self) -> None:
        self.copier.on_fence()
        while self.left:
            self.one()

    def wait(self) -> None:
        assert not self.left, "a snapshot was done before its copy"

    def stall_s(self) -> float:
        return 0.0


class Stamper(torch.optim.Optimizer):
    """Writes the number of its step into every parameter and into its state, which appears with the first step. By
    `.data`, as a fused kernel would: without moving a version counter."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__(params, {"lr": 1.0})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                param.data.fill_(self.count)
                state = self.state[param]
                if "moment" not in state:
                    state["moment"] = torch.zeros_like(param)
                    state["count"] = torch.zeros(())
                state["moment"].data.fill_(self.count)
                state["count"].data.fill_(self.count)

"""Late copies: the training thread runs into the middle of them, and every snapshot still holds one step alone."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType

import pytest
import torch
from torch import Tensor
from torch.optim import optimizer as optimizer_module

from ckpt.events import Event, Events
from ckpt.layout.division import whole_share
from ckpt.layout.staging import stage
from ckpt.trainer.snapshot.cpu_copier import UNIT_BYTES, CpuCopier, has_same_bytes
from ckpt.trainer.snapshot.deferred_copy import (
    DEFERRED_BYTES_MIN,
    PROOFS_NEEDED,
    DeferredTrust,
    Key,
    Spot,
    TensorWatch,
    owns_any_storage,
)
from ckpt.trainer.snapshot.pending_copy import Snapshot
from ckpt.trainer.state.pieces import cut_pieces
from ckpt.trainer.state.shard import storage_addresses
from tests.trainer.kinds import WITHOUT_STORAGE
from tests.trainer.roundtrip import raw
from tests.trainer.snapshots import (
    FRAME_BYTES,
    LARGE,
    Rig,
    Stamper,
    TearingCopier,
    TearingTicket,
    one_thread,
    rig,
    train_on,
    walk_of,
)


class Loop:
    """A training loop that stamps all it has with its step. The copier copies one piece at each place where training
    could run into the copy: at the start, in forward, in backward."""

    def __init__(self, layers: int = 4) -> None:
        self.params = {f"layer{n}": torch.nn.Parameter(torch.zeros(LARGE)) for n in range(layers)}
        self.optimizer = Stamper(list(self.params.values()))
        self.buffers = {"running": torch.zeros(LARGE), "tracked": torch.zeros(())}
        self.ema = {f"ema.{name}": torch.zeros(LARGE) for name in self.params}
        self.copier = TearingCopier()
        self.step = 0

    def state(self) -> tuple[dict[str, Tensor], set[str]]:
        moments = {
            f"{name}.{key}": value
            for name, param in self.params.items()
            for key, value in self.optimizer.state.get(param, {}).items()
        }
        owned = {**self.params, **moments}
        return {**owned, **self.buffers, **self.ema}, set(owned)

    def forward_backward(self) -> None:
        self.copier.copy_some()
        for buffer in self.buffers.values():
            buffer.data.fill_(self.step + 1)
        self.copier.copy_some()

    def update(self) -> None:
        self.optimizer.step()
        with torch.no_grad():
            for ema in self.ema.values():
                ema.fill_(self.optimizer.count)
        self.step += 1

    def run(self, it: Rig, steps: int = 1, micro_batches: int = 1) -> list[Snapshot]:
        """Ends each step with a snapshot, walked again where the structure changed."""
        taken = []
        for _ in range(steps):
            for _ in range(micro_batches):
                self.forward_backward()
            self.update()
            it.snapshotter.note_boundary()
            if it.is_walk_stale():
                it.walk_again()
            taken.append(it.take())
        return taken


def whole(it: Rig, snapshot: Snapshot, loop: Loop) -> bool:
    """Goes on for a step without a snapshot; whether the one before holds its own step alone."""
    step = float(loop.step)
    loop.forward_backward()
    loop.update()
    it.snapshotter.note_boundary()
    assert snapshot.done.done()
    assert snapshot.abandon_reason is None
    return it.all_stamps(snapshot.slot) == {step}


def prove(it: Rig, loop: Loop) -> None:
    """After it, the next step's snapshot is the first lazy one."""
    taken = loop.run(it, PROOFS_NEEDED)
    assert [snapshot.is_deferred for snapshot in taken] == [False] * PROOFS_NEEDED
    assert not it.events


@contextmanager
def late(layers: int = 4, loop: Loop | None = None) -> Iterator[tuple[Rig, Loop, Snapshot]]:
    """The first snapshot that is copied late, of which nothing is copied yet. `loop`: whose; by default a new one's."""
    loop = loop or Loop(layers)
    with rig(loop.state, copier=loop.copier) as it:
        prove(it, loop)
        (snapshot,) = loop.run(it)
        assert snapshot.is_deferred
        assert not snapshot.done.done()
        yield it, loop, snapshot


def test_no_snapshot_is_torn_while_training_runs_into_its_copy() -> None:
    loop = Loop()
    with rig(loop.state, copier=loop.copier) as it:
        prove(it, loop)
        for _ in range(10):
            (snapshot,) = loop.run(it)
            assert snapshot.is_deferred
            assert not snapshot.done.done()
            assert whole(it, snapshot, loop)
        assert loop.copier.copied_late > 0
        assert not it.events
        assert it.snapshotter.trust.proven() == ["lazy copies of 8 tensors"]
        assert it.snapshotter.trust.fallbacks() == []


def test_small_and_0d_tensors_are_copied_at_the_boundary() -> None:
    loop, small = Loop(), torch.nn.Parameter(torch.zeros(100))
    loop.params["small"] = small
    loop.optimizer = Stamper(list(loop.params.values()))
    with late(loop=loop) as (it, _, snapshot):
        small.data.fill_(-1)
        loop.optimizer.state[small]["count"].data.fill_(-1)
        stamps = it.stamps(snapshot.slot)
        assert stamps["small"] == stamps["small.count"] == {float(loop.step)}


def test_state_that_appears_with_the_first_step_is_saved_and_starts_unproven() -> None:
    loop = Loop()
    with rig(loop.state, copier=loop.copier) as it:
        first = it.take()
        assert "layer0.moment" not in it.stamps(first.slot)
        for step in range(1, 2 + PROOFS_NEEDED):
            (snapshot,) = loop.run(it)
            snapshot.wait()
            assert it.all_stamps(snapshot.slot) == {float(step)}
        new = torch.nn.Parameter(torch.zeros(LARGE))  # a layer is unfrozen
        loop.params["new"] = new
        loop.optimizer.add_param_group({"params": [new]})
        (snapshot,) = loop.run(it)
        assert snapshot.is_deferred
        new.data.fill_(-1)  # an eager copy does not see it, and the proof fails
        assert it.stamps(snapshot.slot)["new"] == {float(loop.step)}
        assert it.names() == []
        loop.run(it)
        assert it.names() == ["deferred_copy.changed"]
        assert it.snapshotter.trust.fallbacks() == ["new is copied at the boundary: it changed"]


def test_gradscalers_skipped_step_keeps_late_copies_on() -> None:
    param = torch.nn.Parameter(torch.ones(LARGE))
    optimizer = torch.optim.SGD([param], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    copier = TearingCopier()

    def train(scale: float) -> None:
        optimizer.zero_grad()
        scaler.scale((param * scale).sum()).backward()
        copier.copy_some()
        scaler.step(optimizer)
        scaler.update()

    with rig(lambda: ({"w": param}, {"w"}), copier=copier) as it:
        it.prove(lambda: train(1.0))
        expected = raw(param)
        snapshot = it.take()
        assert snapshot.is_deferred
        train(float("inf"))
        assert not snapshot.done.done()  # no optimizer stepped, so nobody waited for it yet
        it.snapshotter.note_boundary()
        assert snapshot.done.done()
        assert snapshot.abandon_reason is None
        assert raw(it.staged(snapshot.slot)["w"]) == expected
        assert it.take().is_deferred
        assert not it.events


def test_a_skipped_step_proves_nothing() -> None:
    loop = Loop()
    with rig(loop.state, copier=loop.copier) as it:
        loop.run(it)
        for _ in range(5):
            it.snapshotter.note_boundary()
            assert not it.take().is_deferred
        assert it.snapshotter.trust.proven() == []


def test_an_optimizer_in_backward_without_hooks_turns_late_copies_off() -> None:
    param = torch.nn.Parameter(torch.ones(LARGE))
    hooked = torch.optim.SGD([param], lr=0.1)
    copier = TearingCopier()
    with rig(lambda: ({"w": param}, {"w"}), copier=copier) as it:
        param.grad = torch.ones(LARGE)
        it.prove(hooked.step)
        param.register_post_accumulate_grad_hook(update)
        snapshot = it.take()
        assert snapshot.is_deferred
        param.sum().backward()
        it.snapshotter.note_boundary()
        assert "changed" in str(snapshot.abandon_reason)
        assert it.names() == ["deferred_copy.off", "snapshot.abandoned"]
        expected = raw(param)
        snapshot = it.take()
        assert not snapshot.is_deferred
        param.sum().backward()
        assert raw(it.staged(snapshot.slot)["w"]) == expected
        assert it.snapshotter.trust.fallbacks()[0].startswith("lazy copies off: w changed in a step")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler warns of torch itself
def test_a_compiled_step_does_not_announce_itself_and_turns_late_copies_off() -> None:
    param = torch.nn.Parameter(torch.ones(LARGE))
    optimizer = torch.optim.SGD([param], lr=0.5)
    param.grad = torch.ones(LARGE)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    with rig(lambda: ({"w": param}, {"w"})) as it:
        for _ in range(2):
            snapshot = it.take()
            stamp = param.detach()[0, 0].item()
            step()
            it.snapshotter.note_boundary()
            assert it.stamps(snapshot.slot)["w"] == {stamp}
        assert param.detach()[0, 0].item() == 0.0
        assert it.names() == ["deferred_copy.off"]


EDITS: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda p: p.add_(1),
    "through .data": lambda p: p.data.add_(1),
    "new storage": lambda p: setattr(p, "data", p.data + 1),
    "one element": lambda p: p.data[77, 99].add_(1),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_before_the_step_is_never_in_a_snapshot_that_counts(edit: str) -> None:
    with late(1) as (it, loop, snapshot):
        edited = loop.params["layer0"]
        loop.copier.open[0].left.reverse()  # what is edited comes last
        with torch.no_grad():
            EDITS[edit](edited)
        loop.run(it)
        assert snapshot.abandon_reason == "layer0 changed while the copy was under way"
        assert it.names() == ["deferred_copy.changed", "snapshot.abandoned"]
        it.walk_again()
        for _ in range(4):
            (snapshot,) = loop.run(it)
            stamp = float(loop.step)
            with torch.no_grad():
                EDITS[edit](edited)
            assert it.stamps(snapshot.slot)["layer0"] == {stamp}
            assert it.stamps(snapshot.slot)["layer0.moment"] == {stamp} or not snapshot.done.done()
        assert it.snapshotter.trust.fallbacks() == ["layer0 is copied at the boundary: it changed"]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_during_the_proof_makes_the_tensor_eager_and_costs_no_snapshot(edit: str) -> None:
    loop = Loop(2)
    with rig(loop.state, copier=loop.copier) as it:
        loop.run(it)
        (snapshot,) = loop.run(it)
        with torch.no_grad():
            EDITS[edit](loop.params["layer0"])
        assert whole(it, snapshot, loop)
        assert it.names() == ["deferred_copy.changed"]
        assert it.events[0].data["tensor"] == "layer0"
        it.walk_again()
        for _ in range(4):
            (snapshot,) = loop.run(it)
        loop.params["layer0"].data.fill_(-1)
        assert snapshot.is_deferred
        assert it.stamps(snapshot.slot)["layer0"] == {float(loop.step)}


def swapped(loop: Loop, during: Callable[[], object]) -> None:
    """Other weights for a while, by `.data` and back: the idiom of averages in an evaluation."""
    kept = {name: param.detach().clone() for name, param in loop.params.items()}
    for name, param in loop.params.items():
        param.data.copy_(loop.ema[f"ema.{name}"] - 0.5)
    during()
    for name, param in loop.params.items():
        param.data.copy_(kept[name])


@pytest.mark.parametrize("end", ["step", "poll", "boundary"])
def test_weights_swapped_and_back_while_they_are_copied_are_never_in_a_snapshot_that_counts(end: str) -> None:
    with late(2) as (it, loop, snapshot):
        stamp = float(loop.step)
        swapped(loop, loop.copier.copy_some)
        {"step": loop.update, "poll": it.snapshotter.poll, "boundary": it.snapshotter.note_boundary}[end]()
        assert it.stamps(snapshot.slot)["layer0"] == {stamp - 0.5}
        assert snapshot.abandon_reason == "layer0 changed while the copy was under way"
        assert it.names() == ["deferred_copy.changed", "snapshot.abandoned"]
        assert it.snapshotter.trust.fallbacks() == ["layer0 is copied at the boundary: it changed"]
        for _ in range(3):
            loop.run(it)
            (snapshot,) = loop.run(it)
            swapped(loop, lambda: None)
            assert snapshot.is_deferred
            assert whole(it, snapshot, loop)


@pytest.mark.parametrize("unit", range(4))
def test_a_swap_is_seen_where_one_unit_alone_was_copied_while_it_lasted(unit: int) -> None:
    param = torch.nn.Parameter(torch.zeros(4, UNIT_BYTES // 4))
    optimizer = Stamper([param])
    copier = TearingCopier(UNIT_BYTES)
    with rig(lambda: ({"w": param}, {"w"}), copier=copier) as it:
        it.prove(optimizer.step)
        snapshot = it.take()
        copier.copy_some(unit)
        param.data.add_(7)
        copier.copy_some()
        param.data.sub_(7)
        optimizer.step()
        assert snapshot.is_deferred
        assert it.stamps(snapshot.slot)["w"] == {float(PROOFS_NEEDED), float(PROOFS_NEEDED + 7)}
        assert snapshot.abandon_reason == "w changed while the copy was under way"


@pytest.mark.parametrize("at", [None, 0, 2, 6, 8])
def test_a_swap_is_seen_wherever_in_memory_a_tensor_lies(at: int | None) -> None:
    """A part of the tensor is another one while it is copied, and back before the optimizer steps. `at`: the byte at
    which the tensor begins; None: it has rows of 12 bytes, and is not contiguous."""
    if at is None:
        param = torch.nn.Parameter(torch.zeros(3, 1 << 15).t())
        swapped = param.data[0]
    else:
        memory = bytearray(8 + 3 * DEFERRED_BYTES_MIN)
        tensor = torch.frombuffer(memory, dtype=torch.bfloat16, offset=at, count=DEFERRED_BYTES_MIN + 1)
        param = torch.nn.Parameter(tensor)
        swapped = param.data
    optimizer = Stamper([param])
    copier = TearingCopier()
    with rig(lambda: ({"w": param}, {"w"}), copier=copier) as it:
        it.prove(optimizer.step)
        for edit in (0.0, 7.0):
            snapshot = it.take()
            swapped.add_(edit)
            copier.copy_some(1 << 15)
            swapped.sub_(edit)
            optimizer.step()
            assert snapshot.is_deferred
            assert snapshot.abandon_reason == ("w changed while the copy was under way" if edit else None)


@contextmanager
def held_back(layers: int, turns: int = 0) -> Iterator[tuple[Rig, Loop, Snapshot, threading.Event]]:
    """The late snapshot after so many other ones, by the real copier. Nothing of it is copied before the event."""
    loop, copier, held = Loop(layers), CpuCopier(1), threading.Event()
    with rig(loop.state, copier=copier) as it:
        for _ in range(PROOFS_NEEDED + 1 + turns):
            loop.update()
            it.snapshotter.note_boundary()
            if it.is_walk_stale():
                it.walk_again()
            it.take()
        loop.update()
        it.snapshotter.note_boundary()
        copier.submit(held.wait, late=True)
        snapshot = it.take()
        assert snapshot.is_deferred
        yield it, loop, snapshot, held


def await_copied(it: Rig) -> None:
    """The one thread that copies late has done all by then."""
    assert isinstance(it.copier, CpuCopier)
    it.copier.submit(lambda: None, late=True).result()


@pytest.mark.parametrize("is_back", [False, True])
def test_what_is_freed_under_a_late_copy_ends_late_copies_also_where_it_came_back(is_back: bool) -> None:
    with held_back(2) as (it, loop, snapshot, held):
        storage = loop.params["layer0"].untyped_storage()
        nbytes = storage.nbytes()
        storage.resize_(0)
        held.set()
        if is_back:
            await_copied(it)
            storage.resize_(nbytes)  # often at the old address
        it.snapshotter.fence()
        storage.resize_(nbytes)
        assert str(snapshot.abandon_reason).startswith("it could not be copied")
        assert it.names() == ["deferred_copy.off", "snapshot.abandoned"]
        loop.run(it)
        it.walk_again()
        snapshot = it.take()
        assert not snapshot.is_deferred
        assert snapshot.abandon_reason is None


def test_what_is_freed_behind_a_late_copy_is_not_looked_at() -> None:
    with held_back(2) as (it, loop, snapshot, held):
        storage = loop.params["layer0"].untyped_storage()
        nbytes = storage.nbytes()
        held.set()
        await_done(snapshot)
        storage.resize_(0)
        it.snapshotter.fence()
        storage.resize_(nbytes)
        assert snapshot.abandon_reason is None
        assert not it.names()


def await_done(snapshot: Snapshot, timeout_s: float = 60.0) -> None:
    """As one that trains: from one operation to the next. Errors: TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not snapshot.done.done():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.001)
        time.sleep(0.003)


def is_in(function: FunctionType, frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def test_a_late_snapshot_is_not_done_in_the_middle_of_an_operation_which_may_be_one_that_writes() -> None:
    with held_back(1) as (it, _, snapshot, held):
        ended: list[bool] = []
        main = threading.get_ident()

        def watch() -> None:
            while not is_in(threading.Thread.join, sys._current_frames()[main]):
                time.sleep(0.01)
            time.sleep(0.1)
            held.set()
            await_copied(it)
            time.sleep(0.3)
            ended.append(snapshot.done.done())

        watching = threading.Thread(target=watch)
        watching.start()
        watching.join()  # one operation
        assert ended == [False]
        await_done(snapshot)


@pytest.mark.parametrize("edit", EDITS)
def test_a_late_snapshot_is_done_once_it_is_copied_whatever_happens_to_the_tensors_then(edit: str) -> None:
    with held_back(1) as (it, loop, snapshot, held):
        assert not snapshot.done.done()
        held.set()
        await_done(snapshot)  # though nobody ends the wait
        with torch.no_grad():
            EDITS[edit](loop.params["layer0"])
        it.snapshotter.fence()
        assert snapshot.abandon_reason is None
        stamps = it.stamps(snapshot.slot)
        assert stamps["layer0"] == stamps["layer0.moment"] == {float(loop.step)}
        assert not it.names()


@pytest.mark.parametrize("edit", EDITS)
def test_a_late_snapshot_whose_copy_met_an_edit_is_not_done_by_itself(edit: str) -> None:
    # Of the two tensors layer0 is looked at in full then.
    with held_back(1, turns=1) as (it, loop, snapshot, held):
        with torch.no_grad():
            EDITS[edit](loop.params["layer0"])
        held.set()
        await_copied(it)
        with pytest.raises(TimeoutError):  # and looked at
            await_done(snapshot, 0.3)
        it.snapshotter.fence()
        assert snapshot.abandon_reason == "layer0 changed while the copy was under way"


def test_what_is_not_copied_yet_since_the_training_thread_helps_is_not_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, helps, looked = Loop(), threading.Event(), threading.Event()
    torn = TensorWatch.find_torn

    def looking(self: TensorWatch) -> set[Key]:
        found = torn(self)
        looked.set()
        return found

    def fence() -> None:
        helps.set()
        assert looked.wait(60)
        time.sleep(0.1)  # for what the other thread does with it

    with rig(loop.state, copier=loop.copier) as it:
        prove(it, loop)
        loop.copier.on_fence = fence
        monkeypatch.setattr(TensorWatch, "find_torn", looking)
        monkeypatch.setattr(TearingTicket, "wait", lambda _: helps.wait(60))  # the other threads have done their part
        (snapshot,) = loop.run(it)
        assert whole(it, snapshot, loop)
        assert not it.events


def test_an_edit_and_back_of_what_the_spot_looks_at_is_seen_in_the_arena() -> None:
    with late(1) as (it, loop, snapshot):
        loop.params["layer0"].data[77, 99] += 1  # between the canaries
        loop.copier.copy_some()
        loop.params["layer0"].data[77, 99] -= 1
        loop.run(it)
        assert snapshot.abandon_reason == "layer0 changed while the copy was under way"


def test_a_fence_before_a_hand_written_update_is_as_good_as_a_hook() -> None:
    param = torch.nn.Parameter(torch.zeros(LARGE))
    copier = TearingCopier()
    with rig(lambda: ({"w": param}, {"w"}), copier=copier) as it:
        for step in range(6):
            snapshot = it.take()
            assert snapshot.is_deferred == (step >= PROOFS_NEEDED)
            it.snapshotter.fence()
            param.data.fill_(step + 1)
            it.snapshotter.note_boundary()
            assert it.stamps(snapshot.slot) == {"w": {float(step)}}
            assert snapshot.abandon_reason is None
        assert not it.events


def test_a_poll_ends_the_copy_and_proves_nothing() -> None:
    loop = Loop()
    with rig(loop.state, copier=loop.copier) as it:
        loop.run(it)
        for _ in range(PROOFS_NEEDED + 2):
            assert not it.take().is_deferred
            it.snapshotter.poll()
        prove(it, loop)
        (snapshot,) = loop.run(it)
        assert snapshot.is_deferred
        it.snapshotter.poll()
        assert snapshot.done.done()
        assert it.all_stamps(snapshot.slot) == {float(loop.step)}
        loop.update()
        it.snapshotter.note_boundary()
        assert not it.events


def test_the_next_snapshot_ends_the_copy_of_the_one_before() -> None:
    with late() as (it, loop, first):
        second = it.take()
        assert first.done.done()
        assert not second.done.done()
        assert it.all_stamps(first.slot) == {float(loop.step)}


def test_every_part_of_a_late_tensor_has_its_turn_to_be_compared_in_full() -> None:
    flat = torch.arange(150_001, dtype=torch.int32).to(torch.uint8)
    strided = torch.arange(160_000, dtype=torch.float64).view(400, 400).t()[:100]
    walk = walk_of({"flat": flat, "strided": strided})
    staging = stage(walk.layout, whole_share(walk.layout), FRAME_BYTES)
    pieces = cut_pieces(walk, staging, memoryview(bytearray(staging.data_bytes)))
    copier = CpuCopier(1)
    spot = Spot(pieces)
    seen = torch.zeros(flat.nbytes, dtype=torch.bool)
    turns = set()
    for turn in range(4 * len(pieces)):
        piece, staged = spot.keep_part(turn)
        assert has_same_bytes(piece.source, piece.target)
        copier.prepare(pieces).start_eager()
        assert has_same_bytes(piece.source, staged.target)
        if piece.entry == 0:
            seen[piece.source.storage_offset() :][: piece.nbytes] = True
        else:
            turns.add(turn % len(pieces))
    copier.close()
    assert seen.all()
    assert turns == set(range(1, len(pieces)))


def test_waiting_ends_the_copy_on_the_training_thread_and_waits_for_it_on_another() -> None:
    with late() as (it, loop, snapshot):
        snapshot.wait()
        assert snapshot.done.done()
        (snapshot,) = loop.run(it)
        seen: list[set[float]] = []

        def other() -> None:
            snapshot.wait(60)
            seen.append(it.all_stamps(snapshot.slot))

        thread = threading.Thread(target=other)
        thread.start()
        with pytest.raises(TimeoutError):
            snapshot.done.result(0.05)
        loop.optimizer.step()
        thread.join()
        assert seen == [{float(loop.step)}]


def test_an_optimizer_that_owns_none_of_it_neither_waits_nor_proves() -> None:
    loop = Loop()
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    with rig(loop.state, copier=loop.copier) as it:
        loop.run(it)
        for _ in range(PROOFS_NEEDED + 1):
            assert not it.take().is_deferred
            other.step()
            it.snapshotter.note_boundary()
        prove(it, loop)
        (snapshot,) = loop.run(it)
        other.step()
        assert not snapshot.done.done()
        loop.optimizer.step()
        assert snapshot.done.done()


def test_the_optimizers_of_all_threads_wait_for_the_copy_that_one_of_them_ends() -> None:
    loop, reached, go = Loop(), threading.Event(), threading.Event()
    params = list(loop.params.values())
    halves = [Stamper(params[:2]), Stamper(params[2:])]
    with rig(lambda: (loop.params, set(loop.params)), copier=loop.copier) as it:
        it.prove(*(half.step for half in halves))
        snapshot = it.take()
        assert snapshot.is_deferred
        loop.copier.on_fence = lambda: (reached.set(), go.wait(60))[0]
        threads = [threading.Thread(target=half.step) for half in halves]
        threads[0].start()
        assert reached.wait(60)
        threads[1].start()
        threads[1].join(0.2)
        assert threads[1].is_alive()  # the first has not copied anything yet
        go.set()
        for thread in threads:
            thread.join(60)
        assert snapshot.abandon_reason is None
        assert it.all_stamps(snapshot.slot) == {float(PROOFS_NEEDED)}


def test_a_step_in_a_signal_handler_in_the_middle_of_the_wait_neither_hangs_nor_is_in_the_snapshot() -> None:
    with late() as (it, loop, snapshot):
        loop.copier.on_fence = loop.optimizer.step
        loop.optimizer.step()
        assert snapshot.done.done()
        assert "changed" in str(snapshot.abandon_reason)
        assert it.names().count("snapshot.abandoned") == 1


class Idle(torch.optim.Optimizer):
    def step(self, closure: object = None) -> None:
        pass


@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested)")
@pytest.mark.parametrize("kind", ["a view", "no bytes", *WITHOUT_STORAGE])
def test_an_optimizer_owns_the_storages_of_its_tensors_if_they_have_one(kind: str) -> None:
    flat = torch.zeros(1000)
    tensors = {"a view": lambda: flat[100:200], "no bytes": lambda: torch.zeros(0), **WITHOUT_STORAGE}
    of_state, of_param = (
        Idle([torch.nn.Parameter(torch.zeros(3))], {}),
        Idle(torch.nn.ParameterList([tensors[kind]()]), {}),
    )
    of_state.state["kept"] = {"x": tensors[kind]()}
    for optimizer in (of_state, of_param):
        assert owns_any_storage(optimizer, storage_addresses([flat, torch.zeros(0)])) == (kind == "a view")
        assert not owns_any_storage(optimizer, storage_addresses([torch.zeros(1000)]))


def test_the_hook_is_there_while_it_is_needed_and_gone_after_close_and_in_a_forked_child() -> None:
    hooks = optimizer_module._global_optimizer_pre_hooks
    before = len(hooks)
    loop = Loop()
    with rig(loop.state, lazy=False) as it:
        assert len(hooks) == before
        assert not any(snapshot.is_deferred for snapshot in loop.run(it, 6))
        assert it.snapshotter.trust.proven() == it.snapshotter.trust.fallbacks() == []
    with late() as (it, loop, _):
        assert len(hooks) == before + 1
        pid = os.fork()
        if pid == 0:
            it.snapshotter.abandon_in_child()
            os._exit(len(hooks) - before)
        assert os.waitpid(pid, 0)[1] == 0
    assert len(hooks) == before


def test_closing_ends_the_copy_that_runs() -> None:
    with late() as (it, loop, snapshot):
        pass
    assert snapshot.done.done()
    assert snapshot.abandon_reason is None
    assert it.all_stamps(snapshot.slot) == {float(loop.step)}


def test_a_late_copy_that_fails_costs_the_snapshot_and_not_the_training() -> None:
    with late(1) as (it, loop, snapshot):
        loop.copier.on_fence = fail
        loop.update()
        assert snapshot.done.done()
        assert snapshot.abandon_reason == "it could not be copied: out of memory"
        assert it.names() == ["snapshot.abandoned"]
        loop.copier.on_fence = lambda: None
        loop.run(it)
        (snapshot,) = loop.run(it)
        assert whole(it, snapshot, loop)


@pytest.mark.parametrize("end", ["step", "fence", "poll", "note_boundary"])
def test_a_wait_that_ctrl_c_ends_costs_the_snapshot_and_leaves_nobody_waiting(end: str) -> None:
    with late() as (it, loop, snapshot):
        loop.copier.on_fence = interrupt
        with pytest.raises(KeyboardInterrupt):
            loop.optimizer.step() if end == "step" else getattr(it.snapshotter, end)()
        snapshot.wait(60)
        assert snapshot.abandon_reason == "interrupted"
        loop.copier.on_fence = lambda: None
        loop.run(it)
        (snapshot,) = loop.run(it)
        assert snapshot.is_deferred
        assert whole(it, snapshot, loop)
        assert it.names() == ["snapshot.abandoned"]


def test_a_close_that_ctrl_c_ends_leaves_nobody_waiting() -> None:
    held = threading.Event()
    with late() as (it, loop, snapshot):
        loop.copier.on_fence = interrupt
        it.snapshotter._tasks.submit(held.wait)  # who abandons it has to wait for that
        threading.Timer(0.1, held.set).start()
        with pytest.raises(KeyboardInterrupt):
            it.snapshotter.close()
        snapshot.wait(60)
        assert snapshot.abandon_reason == "interrupted"


def update(param: Tensor) -> None:
    param.data.sub_(0.1)


def interrupt() -> None:
    raise KeyboardInterrupt


def fail() -> None:
    raise RuntimeError("out of memory")


def test_lazy_and_eager_give_equal_bytes() -> None:
    def run(lazy: bool) -> tuple[list[bytes], list[bool]]:
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(160, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 128))
        model[2].weight = torch.nn.Parameter(torch.randn(256, 128).t())  # not contiguous
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return train_on(model, optimizer, lambda: torch.randn(16, 160), lazy=lazy)

    with one_thread():
        (lazy, are_late), (eager, are_late_too) = run(True), run(False)
    assert len(set(eager)) == 8
    assert lazy == eager
    assert are_late == [step >= PROOFS_NEEDED for step in range(8)]
    assert not any(are_late_too)


def test_a_dropped_proof_is_forgotten() -> None:
    events: list[Event] = []
    trust = DeferredTrust(Events(events.append), True)
    a, b = ("a", "", 0, 1), ("b", "", 0, 2)
    for _ in range(PROOFS_NEEDED):
        trust.add_proofs({a, b})
    assert trust.is_proven(a)
    trust.forget_all_but({b})
    assert not trust.is_proven(a)
    assert trust.is_proven(b)
    trust.distrust({b})
    assert not trust.is_candidate(("b", "", 0, 99))  # wherever it lies
    trust.turn_off("a reason")
    trust.turn_off("another")
    assert [event.name for event in events] == ["deferred_copy.changed", "deferred_copy.off"]
    assert trust.fallbacks() == ["lazy copies off: a reason", "b is copied at the boundary: it changed"]

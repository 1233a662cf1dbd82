from __future__ import annotations

import gc
import math
import mmap
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import _base as futures
from contextlib import closing
from types import FrameType

import pytest
import torch
from torch import Tensor

from ckpt import threads
from ckpt.errors import CkptError, UsageError
from ckpt.events import Events
from ckpt.layout.division import whole_share
from ckpt.layout.layout import Part
from ckpt.layout.staging import stage
from ckpt.threads import Outcome
from ckpt.trainer.snapshot import cpu_copier as copying
from ckpt.trainer.snapshot.cpu_copier import DEFERRED_NICE, CpuCopier, CpuJob, has_same_bytes
from ckpt.trainer.snapshot.cuda_copier import make_copier
from ckpt.trainer.snapshot.snapshot import Snapshotter
from ckpt.trainer.state.pieces import CopyPiece, cut_pieces
from ckpt.types import DTYPES
from tests.threads import interrupted_anywhere
from tests.trainer.roundtrip import raw
from tests.trainer.snapshots import FRAME_BYTES, LARGE, rig, walk_of

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

KINDS = [name for name in DTYPES if hasattr(torch, name)]  # float8_e8m0fnu and float4 are younger than torch 2.6


def noise(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Tensor:
    """Any bit patterns, NaN among them."""
    kind = getattr(torch, dtype)
    size = torch.empty((), dtype=kind).element_size()
    high = 2 if dtype == "bool" else 256
    flat = torch.randint(0, high, (math.prod(shape) * size,), generator=torch.Generator().manual_seed(seed))
    return flat.to(torch.uint8).view(kind).view(shape)


def odd_state(seed: int) -> dict[str, Tensor]:
    state = {f"large.{d}": noise((97, 3001), d, seed) for d in KINDS}
    state |= {f"small.{d}": noise((3, 7), d, seed + 1) for d in KINDS}
    state |= {f"zero_d.{d}": noise((), d, seed + 2) for d in KINDS if d != "float4_e2m1fn_x2"}
    state |= {f"empty.{d}": torch.empty((0, 4), dtype=getattr(torch, d)) for d in KINDS}
    base = noise((300, 512), seed=seed + 3)
    state |= {
        "transposed": noise((512, 300), seed=seed + 4).t(),
        "transposed.small": noise((5, 3), "bfloat16", seed).t(),
        "every_other": noise((400, 1000), "bfloat16", seed)[::2, 1::3],
        "channels_last": noise((32, 16, 9, 9), seed=seed).to(memory_format=torch.channels_last),
        "expanded": noise((1, 300), seed=seed).expand(200, 300),
        "tied.a": base,
        "tied.b": base,
        "tied.part": base[10:200],
        "odd_offset": noise((100_003,), "uint8", seed)[3:],
        "single_element": noise((8,), seed=seed)[3::8],  # it keeps the stride that it was cut with
    }
    return state


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_kind_of_tensor_is_staged_bit_for_bit(threads: int, seed: int) -> None:
    state = odd_state(seed)
    with rig(lambda: (state, ()), copier=CpuCopier(threads)) as it:
        snapshot = it.take()
        assert snapshot.done.done()
        assert snapshot.abandon_reason is None
        assert not snapshot.is_deferred
        assert it.differing(snapshot.slot) == []


def test_any_byte_range_of_any_tensor_is_staged(seed: int) -> None:
    rng = random.Random(seed)
    state = odd_state(seed)
    walk = walk_of(state)
    share = []
    for e, (tensor,) in enumerate(walk.tensors):
        if tensor.numel():
            cuts = sorted(rng.choices(range(tensor.numel() + 1), k=4))
            start, end, again, stop = (n * tensor.element_size() for n in cuts)
            share += [Part(e, 0, start, end), Part(e, 0, again, stop)]  # what lies between is another rank's
    with rig(lambda: (state, ()), share=tuple(share)) as it:
        staged = it.staged(it.take().slot)
        for part in share:
            name = walk.layout.entries[part.entry].name
            expected, found = raw(state[name]), raw(staged[name])
            assert found[part.start : part.stop] == expected[part.start : part.stop], name


def test_twenty_thousand_small_tensors() -> None:
    many = torch.arange(20_000 * 256, dtype=torch.float32).view(20_000, 256)
    state = {f"t{n:05d}": many[n].clone() for n in range(20_000)}
    with rig(lambda: (state, ()), slots=1) as it:
        it.take()
        staged = torch.frombuffer(it.arenas[0], dtype=torch.float32)
        assert torch.equal(staged[: many.numel()], many.flatten())
        many += 1
        for n, tensor in enumerate(state.values()):
            tensor.copy_(many[n])
        it.take()
        assert torch.equal(staged[: many.numel()], many.flatten())


def test_binding_another_walk_lets_the_old_storage_go() -> None:
    held = {"w": torch.zeros(300, 300)}
    with rig(lambda: (held, ()), slots=2) as it:
        it.take()
        old = weakref.ref(held["w"].untyped_storage())
        gone: list[int] = []
        weakref.finalize(held["w"], gone.append, 1)
        held["w"] = torch.ones(300, 300)
        it.walk = walk_of(held)
        it.snapshotter.bindings.bind(0, it.walk, it.staging, memoryview(it.arenas[0]))
        gc.collect()
        assert gone
        assert old() is None, "the old storage lives"
        with pytest.raises(UsageError, match="slot 1"):
            it.snapshotter.take(1)


def test_binding_prepares_the_copies_so_that_neither_a_snapshot_nor_the_next_binding_does() -> None:
    prepared: list[int] = []

    class Counting(CpuCopier):
        def prepare(self, pieces: Sequence[CopyPiece]) -> CpuJob:
            prepared.append(len(pieces))
            return super().prepare(pieces)

    with rig(lambda: ({"w": torch.zeros(300), "v": torch.zeros(LARGE)}, ("v",)), copier=Counting(1)) as it:
        assert prepared
        prepared.clear()
        it.take()
        it.take()
        it.snapshotter.bindings.bind(0, it.walk, it.staging, memoryview(it.arenas[0]))
        assert prepared == []
        it.snapshotter.bindings.bind(0, it.walk, it.staging, memoryview(bytearray(it.staging.data_bytes)))
        assert prepared


def test_an_unbound_arena_can_be_unmapped() -> None:
    state = {"w": torch.ones(300)}
    walk = walk_of(state)
    staging = stage(walk.layout, whole_share(walk.layout), FRAME_BYTES)
    region = mmap.mmap(-1, staging.data_bytes)
    snapshotter = Snapshotter(make_copier(), False, Events())
    snapshotter.bindings.bind(0, walk, staging, memoryview(region))
    snapshotter.take(0).wait()
    with pytest.raises(BufferError):
        region.close()
    snapshotter.bindings.unbind(0, memoryview(region))
    gc.collect()
    region.close()
    snapshotter.close()
    snapshotter.close()


def test_an_arena_that_has_taken_the_place_of_an_unbound_one_stays_bound() -> None:
    walk = walk_of({"w": torch.ones(300)})
    staging = stage(walk.layout, whole_share(walk.layout), FRAME_BYTES)
    old, new = (memoryview(bytearray(staging.data_bytes)) for _ in range(2))
    with closing(Snapshotter(make_copier(), False, Events())) as snapshotter:
        for region in (old, new):
            snapshotter.bindings.bind(0, walk, staging, region)
        snapshotter.bindings.unbind(0, old)
        assert snapshotter.bindings.is_bound(0, walk, staging)
        snapshotter.bindings.unbind(0, new)
        assert not snapshotter.bindings.is_bound(0, walk, staging)


def test_a_staging_of_another_layout_is_refused() -> None:
    walk = walk_of({"w": torch.ones(300)})
    larger = walk_of({"w": torch.ones(400)})
    staging = stage(larger.layout, whole_share(larger.layout), FRAME_BYTES)
    with pytest.raises(CkptError, match="another layout"):
        cut_pieces(walk, staging, memoryview(bytearray(staging.data_bytes)))
    fits = stage(walk.layout, whole_share(walk.layout), FRAME_BYTES)
    with pytest.raises(CkptError, match="another layout"):
        cut_pieces(walk, fits, memoryview(bytearray(fits.data_bytes - 1)))
    with pytest.raises(CkptError, match="read-only"):
        cut_pieces(walk, fits, memoryview(bytes(fits.data_bytes)))


def test_a_storage_that_shrank_abandons_the_snapshot_and_reads_nothing() -> None:
    state = {"w": torch.ones(1 << 20)}
    with rig(lambda: (state, ())) as it:
        state["w"].untyped_storage().resize_(0)
        snapshot = it.take()
        assert snapshot.done.done()
        assert "shrank" in str(snapshot.abandon_reason)
        assert it.names() == ["snapshot.abandoned"]


@pytest.mark.parametrize("mode", ["inference_mode", "no_grad", "default_device"])
def test_the_users_modes_do_not_matter(mode: str) -> None:
    state = {"w": torch.ones(300, 300), "p": torch.nn.Parameter(torch.full((200, 200), 3.0))}
    contexts: dict[str, Callable[[], object]] = {
        "inference_mode": torch.inference_mode,
        "no_grad": torch.no_grad,
        "default_device": lambda: torch.device("meta"),
    }
    with rig(lambda: (state, ("w", "p"))) as it:
        with contexts[mode]():  # type: ignore[attr-defined]
            it.walk_again()
            for _ in range(4):
                it.take()
                it.snapshotter.fence()
            snapshot = it.take()
            snapshot.wait()
        assert snapshot.is_deferred
        assert it.stamps(snapshot.slot) == {"w": {1.0}, "p": {3.0}}
        state["w"].fill_(2.0)
        snapshot = it.take()
        snapshot.wait()
        assert it.stamps(snapshot.slot)["w"] == {2.0}


def test_an_inference_tensor_is_staged_and_never_late() -> None:
    with torch.inference_mode():
        state = {"w": torch.ones(300, 300)}
    with rig(lambda: (state, ("w",))) as it:
        for _ in range(4):
            snapshot = it.take()
            assert not snapshot.is_deferred
            assert it.stamps(snapshot.slot) == {"w": {1.0}}


def test_a_copy_error_reaches_the_caller_after_all_threads_have_stopped() -> None:
    copier = CpuCopier(3)
    ran: list[int] = []
    lock = threading.Lock()

    def unit(n: int) -> Callable[[], None]:
        def run() -> None:
            with lock:
                ran.append(n)
            if n == 17:
                raise CkptError("unit 17")

        return run

    with pytest.raises(CkptError, match="unit 17"):
        CpuJob(copier, [unit(n) for n in range(50)]).start_eager()
    assert sorted(ran) == list(range(50))  # each once; the others' work was not lost
    copier.close()


def test_what_a_signals_handler_raises_while_a_copy_is_planned_is_not_swallowed() -> None:
    class Alarm(Exception): ...

    class Ringing(CpuCopier):
        rings = False

        def prepare(self, pieces: Sequence[CopyPiece]) -> CpuJob:
            if self.rings:
                self.rings = False
                signal.raise_signal(signal.SIGUSR2)
            return super().prepare(pieces)

    def ring(number: int, frame: FrameType | None) -> None:
        raise Alarm

    copier, state = Ringing(2), {"x": torch.zeros(LARGE)}
    before = signal.signal(signal.SIGUSR2, ring)
    try:
        with rig(lambda: (state, state), copier=copier) as it:
            copier.rings = True
            with pytest.raises(Alarm):
                it.walk_again()
            it.walk_again()
            it.take().wait(60)
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_ctrl_c_in_the_wait_for_a_copy_returns_when_nothing_is_copied_any_more() -> None:
    copier, ran = CpuCopier(2), list[str]()
    begun, never = threading.Event(), threading.Event()

    def unit() -> None:
        begun.set()
        never.wait(0.2)
        ran.append("to its end")

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is Outcome.wait_until_done.__code__:
            sys.setprofile(None)
            raise KeyboardInterrupt

    with closing(copier):
        ticket = CpuJob(copier, [unit]).start_deferred()
        assert begun.wait(60)  # on a thread of the copier
        sys.setprofile(interrupt)
        with pytest.raises(KeyboardInterrupt):
            ticket.fence()
        assert ran == ["to its end"]


def test_ctrl_c_anywhere_in_a_late_copy_returns_when_nothing_is_copied_any_more() -> None:
    begun: list[int] = []
    ended: list[int] = []
    never = threading.Event()

    def unit() -> None:
        begun.append(1)
        time.sleep(0.001)  # is not interrupted, where the training thread does it: its unit would not come to its end
        ended.append(1)

    def use(job: CpuJob) -> None:
        ticket = job.start_deferred()
        try:
            ticket.fence()
        except BaseException:
            ticket.cancel()
            raise

    copier = CpuCopier(2)
    files = {copying.__file__, threads.__file__, threading.__file__, futures.__file__}
    for _ in interrupted_anywhere(files, lambda: CpuJob(copier, [unit] * 4), use):
        count = len(begun)
        assert len(ended) == count
        never.wait(0.003)
        assert len(begun) == count
    copier.close()


def test_a_late_copy_is_a_little_nicer_than_training_and_never_waits_for_an_idle_core() -> None:
    """In the middle of a unit, or with the GIL, it would keep training for seconds where all cores are busy."""
    copier = CpuCopier(1)
    mine = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    seen: list[tuple[int, int]] = []

    def look() -> None:
        seen.append((os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.sched_getscheduler(0)))

    try:
        copier.submit(look, late=True).result()
        copier.submit(look).result()
    finally:
        copier.close()
    assert seen == [(min(19, mine[0] + DEFERRED_NICE), mine[1]), mine]
    assert 0 < DEFERRED_NICE <= 5


def test_same_bytes_means_same_bits() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert has_same_bytes(nan, nan.clone())
    assert not has_same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert has_same_bytes(noise((40, 30)).t(), noise((40, 30)).t().contiguous())

"""The copier on a real CUDA device: what a stand-in cannot show, which is what the device reorders."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from ckpt.errors import CkptError
from ckpt.trainer.snapshot.cuda_copier import CudaCopier, make_copier
from ckpt.trainer.snapshot.cuda_runtime import LOCK_BYTES
from ckpt.trainer.snapshot.deferred_copy import PROOFS_NEEDED
from ckpt.trainer.snapshot.pending_copy import Snapshot
from tests.trainer.snapshot.test_snapshot import odd_state
from tests.trainer.snapshots import LARGE, Rig, Stamper, comes_over_bit_for_bit, rig, train_on

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BEHIND_CYCLES = 40_000_000  # about 20 ms of device time, in which the host runs ahead


@pytest.fixture(autouse=True, scope="module")
def _device_in_use() -> None:
    """CUDA opens what it keeps for the life of the process before a test looks what it leaves behind."""
    torch.zeros(1, device="cuda").add_(1).item()
    torch.cuda.Stream().synchronize()


def made() -> CudaCopier:
    found = make_copier()
    assert isinstance(found, CudaCopier)
    return found


def parameters(count: int = 8) -> dict[str, torch.nn.Parameter]:
    """Large ones, which are read by the side stream, and small ones, which are cloned."""
    large = {f"large{n}": torch.nn.Parameter(torch.zeros(1 << 20, device="cuda")) for n in range(count)}
    return large | {f"small{n}": torch.nn.Parameter(torch.zeros(LARGE, device="cuda")) for n in range(count)}


def stay_behind() -> None:
    torch.cuda._sleep(BEHIND_CYCLES)


def step_on(stream: torch.cuda.Stream, optimizer: torch.optim.Optimizer) -> None:
    """What comes next waits for it; it waits for nothing."""
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)


def comes_over(it: Rig, snapshot: Snapshot, expected: float) -> None:
    it.snapshotter.note_boundary()
    snapshot.done.result(60)
    assert snapshot.abandon_reason is None
    assert it.all_stamps(snapshot.slot) == {expected}


def test_every_kind_of_tensor_comes_over_bit_for_bit(seed: int) -> None:
    state = {name: tensor.cuda() for name, tensor in odd_state(seed).items()}
    state |= {f"host.{name}": tensor for name, tensor in odd_state(seed + 1).items()}
    base = state["tied.a"]
    state |= {"tied.b": base, "tied.part": base[10:200], "transposed": state["transposed"].contiguous().t()}
    with rig(lambda: (state, ()), copier=made()) as it:
        comes_over_bit_for_bit(it)


@pytest.mark.parametrize("lazy", [False, True])
def test_what_is_enqueued_behind_a_snapshot_does_not_reach_it(lazy: bool) -> None:
    params = parameters()
    optimizer = Stamper(list(params.values()))
    with rig(lambda: (params, set(params)), copier=made(), lazy=lazy) as it:
        if lazy:
            it.prove(optimizer.step)
        for _ in range(20):
            stay_behind()
            snapshot = it.take()
            assert snapshot.is_deferred == lazy
            expected = float(optimizer.count)
            optimizer.step()  # the device has not read a byte yet
            comes_over(it, snapshot, expected)
        assert it.names() == []


def test_an_optimizer_on_another_stream_waits_for_late_reads() -> None:
    params = parameters()
    optimizer, other = Stamper(list(params.values())), torch.cuda.Stream()
    with rig(lambda: (params, set(params)), copier=made()) as it:
        it.prove(optimizer.step)
        for _ in range(10):
            stay_behind()
            snapshot = it.take()
            expected = float(optimizer.count)
            step_on(other, optimizer)
            comes_over(it, snapshot, expected)


def test_a_second_optimizer_on_another_stream_waits_for_late_reads_too() -> None:
    params = parameters()
    each = list(params.values())
    one, two, other = Stamper(each[::2]), Stamper(each[1::2]), torch.cuda.Stream()
    with rig(lambda: (params, set(params)), copier=made()) as it:
        it.prove(one.step, two.step)
        for _ in range(10):
            stay_behind()
            snapshot = it.take()
            expected = float(one.count)
            one.step()
            step_on(other, two)
            comes_over(it, snapshot, expected)


def test_a_second_optimizer_on_another_stream_waits_until_the_comparison_has_read() -> None:
    params = parameters()
    each = list(params.values())
    one, two, other = Stamper(each[::2]), Stamper(each[1::2]), torch.cuda.Stream()
    with rig(lambda: (params, set(params)), copier=made()) as it:
        for _ in range(PROOFS_NEEDED):
            snapshot = it.take()
            stay_behind()
            one.step()
            step_on(other, two)
            it.snapshotter.note_boundary()
            snapshot.done.result(60)
        it.settle()
        assert it.names() == []
        assert it.snapshotter.trust.proven() == [f"lazy copies of {len(params)} tensors"]


@pytest.mark.parametrize("what", ["bind", "take"])
def test_a_graph_can_be_captured_while_other_threads_work(what: str) -> None:
    params = parameters(16)
    optimizer = Stamper(list(params.values()))
    x, graph = torch.zeros(1 << 20, device="cuda"), torch.cuda.CUDAGraph()
    with rig(lambda: (params, set(params)), copier=made()) as it:
        it.prove(optimizer.step)
        stay_behind()
        snapshot = it.take()
        optimizer.step()
        go, failed = threading.Event(), list[Exception]()

        def bind() -> None:
            try:
                go.wait()
                arena = memoryview(bytearray(it.staging.data_bytes))
                it.snapshotter.bindings.bind(2, it.walk, it.staging, arena)
                it.snapshotter.bindings.unbind(2, arena)
            except Exception as exc:
                failed.append(exc)

        thread = threading.Thread(target=bind if what == "bind" else lambda: None)
        thread.start()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            go.set()
            x.add_(1)
            thread.join()
            snapshot.done.result(60)
            graph.capture_end()
        assert failed == []
        assert snapshot.abandon_reason is None
        graph.replay()
        assert x.unique().tolist() == [1.0]
        assert it.names() == []


def test_arenas_larger_than_what_is_locked_at_once_come_over_bit_for_bit(seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = [LOCK_BYTES * 2 + 12, 5, LOCK_BYTES - 4096, 1 << 20, 3 * LOCK_BYTES, 700_001]
    state = {f"w{n}": torch.empty(size, dtype=torch.uint8, device="cuda") for n, size in enumerate(sizes)}
    state |= {f"s{n}": torch.empty(900_000, dtype=torch.uint8, device="cuda") for n in range(80)}  # cloned: 72 MB
    copier = made()
    with rig(lambda: (state, ()), copier=copier) as it:
        for _ in range(3):
            for tensor in state.values():
                tensor.random_(generator=generator)
            snapshot = it.take()
            snapshot.wait(60)
            assert snapshot.abandon_reason is None
            assert it.differing(snapshot.slot) == []
            assert copier.start_comparison(it.snapshotter.bindings._bindings_by_slot[snapshot.slot].pieces)() == []


def test_memory_that_is_freed_behind_a_late_snapshot_is_not_handed_out_while_it_is_read() -> None:
    params = parameters()
    optimizer = Stamper(list(params.values()))
    with rig(lambda: (params, set(params)), copier=made()) as it:
        it.prove(optimizer.step)
        for param in params.values():
            param.data.fill_(7)
        stay_behind()
        snapshot = it.take()
        assert snapshot.is_deferred
        sizes = [param.shape for param in params.values()]
        it.snapshotter.bindings._bindings_by_slot = {}  # no view of ours holds the memory
        for param in params.values():
            param.data = torch.zeros(1, device="cuda")
        over = [torch.full(size, 9.0, device="cuda") for size in sizes]
        it.snapshotter.fence()
        snapshot.done.result(60)
        torch.cuda.synchronize()
        arena = np.frombuffer(it.arenas[snapshot.slot], np.uint8)
        parts = [arena[s["offset"] : s["offset"] + s["length"]].view(np.float32) for s in it.staging.segments]
        assert np.unique(np.concatenate(parts)).tolist() == [7.0], "what was freed was written anew before it was read"
        del over


def test_a_comparison_finds_one_flipped_bit_and_nan_is_equal_to_itself(seed: int) -> None:
    params = parameters()
    generator = torch.Generator("cuda").manual_seed(seed)
    for param in params.values():
        bits = torch.randint(-(1 << 31), 1 << 31, param.shape, dtype=torch.int32, device="cuda", generator=generator)
        param.data.copy_(bits.view(torch.float32))
    copier = made()
    with rig(lambda: (params, ()), copier=copier) as it:
        it.take().wait(60)
        pieces = it.snapshotter.bindings._bindings_by_slot[1].pieces
        assert copier.start_comparison(pieces)() == []
        params["large5"].data.view(torch.int32).view(-1)[-1] ^= 1
        params["small2"].data.view(torch.int32).view(-1)[0] ^= 1 << 20
        names = {it.walk.layout.entries[pieces[n].entry].name for n in copier.start_comparison(pieces)()}
        assert names == {"large5", "small2"}


def test_pages_are_locked_in_place_and_what_cannot_be_locked_breaks_no_kernel() -> None:
    copier = made()
    params = parameters(2)
    with rig(lambda: (params, ()), copier=copier) as it:
        arena = torch.frombuffer(it.arenas[0], dtype=torch.uint8)
        assert arena.is_pinned()
        with pytest.raises(CkptError, match="already"):
            copier.pin(memoryview(it.arenas[0]))
        torch.ones(3, device="cuda").sum().item()
        assert arena.is_pinned()
        it.snapshotter.bindings.unbind(0, memoryview(it.arenas[0]))
        assert not arena.is_pinned()
        del arena


def test_stalls_are_measured_on_the_device() -> None:
    params = parameters(32)  # 128 MiB: milliseconds to read
    with rig(lambda: (params, ()), copier=made()) as it:
        it.take().wait(60)
        stay_behind()
        snapshot = it.take()
        returned_s = snapshot.stall_s
        snapshot.wait(60)
        assert snapshot.stall_s - returned_s > 1e-3


def test_lazy_and_eager_give_equal_bytes() -> None:
    def run(lazy: bool) -> list[bytes]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(900, 900), torch.nn.BatchNorm1d(900)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        inputs = lambda: torch.randn(64, 900, device="cuda")  # noqa: E731
        held, are_late = train_on(model, optimizer, inputs, lazy=lazy, copier=made())
        assert are_late[-1] == lazy
        return held

    assert run(True) == run(False)

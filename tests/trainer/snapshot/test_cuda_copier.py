"""The CUDA copier with a stand-in for the device: host tensors, streams that do at once what they are given, and a log
of what waits for what. What a device would reorder is checked on the log; the bytes are checked as they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from ckpt.errors import CkptError
from ckpt.trainer.snapshot import cuda_copier, cuda_runtime
from ckpt.trainer.snapshot.cpu_copier import CpuCopier, Ticket
from ckpt.trainer.snapshot.cuda_copier import CudaCopier, CudaJob
from ckpt.trainer.snapshot.deferred_copy import PROOFS_NEEDED
from ckpt.trainer.state.pieces import CopyPiece
from tests.trainer.snapshot.test_snapshot import odd_state
from tests.trainer.snapshots import LARGE, Rig, Stamper, comes_over_bit_for_bit, rig, walk_of

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


@dataclass
class Device:
    """Stands in for torch.cuda: one device, with a current stream "main" and side streams. The log is of what the
    training thread does. Other threads begin on another device, where nothing of the state lies: `strays` is what they
    ask for there."""

    log: list[str] = field(default_factory=list)
    locked: dict[int, int] = field(default_factory=dict)
    status: int = 0
    is_lost: bool = False
    is_hanging: bool = False
    is_full: bool = False
    events: int = 0
    strays: list[str] = field(default_factory=list)
    on_register: Callable[[], object] = lambda: None
    on_query: Callable[[], object] = lambda: None
    on_wait: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        self.main = Stream(self, "main")
        self.trainer = threading.get_ident()
        self.current = threading.local()

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self, "side")

    def Event(self, enable_timing: bool = False) -> Event:
        self.events += 1
        return Event(self, self.events)

    def note(self, line: str) -> None:
        if threading.get_ident() == self.trainer:
            self.log.append(line)

    @property
    def now(self) -> Stream:
        return getattr(self.current, "stream", self.main)

    @now.setter
    def now(self, stream: Stream) -> None:
        self.current.stream = stream

    def current_stream(self, device: torch.device) -> Stream:
        return self.now

    @contextmanager
    def device(self, device: torch.device | None) -> Iterator[None]:
        is_here = self.is_here
        self.current.is_here = is_here or device is not None
        yield
        self.current.is_here = is_here

    @property
    def is_here(self) -> bool:
        return getattr(self.current, "is_here", threading.get_ident() == self.trainer)

    def asked(self, what: str) -> None:
        if not self.is_here:
            self.strays.append(what)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.asked("stream")
        self.now, before = stream, self.now
        self.note(f"on {stream.name}")
        yield
        self.now = before
        self.note(f"on {before.name}")

    def cudart(self) -> Device:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.asked("lock")
        self.on_register()
        if not self.status:
            self.locked[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.asked("unlock")
        self.note("unlock")
        del self.locked[address]
        return self.status

    def cudaGetErrorString(self, status: int) -> str:
        return "no memory can be locked"


@dataclass
class Stream:
    device: Device
    name: str

    def wait_stream(self, other: Stream) -> None:
        self.device.note(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        assert event.stream is not None
        self.device.note(f"{self.name} waits for event {event.number} of {event.stream.name}")


@dataclass
class Event:
    device: Device
    number: int
    stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        assert self.stream is not None
        self.device.asked("wait")
        self.device.on_wait()

    def query(self) -> bool:
        assert self.stream is not None
        self.device.asked("query")
        self.device.note(f"host waits for {self.stream.name}")
        self.device.on_query()
        return not self.device.is_hanging

    def elapsed_time(self, other: Event) -> float:
        if self.device.is_lost:
            raise RuntimeError("device lost")
        assert self.stream is other.stream
        return 1.0


def copier(device: Device, kind: type[CudaCopier] = CudaCopier) -> CudaCopier:
    return kind(CpuCopier(1), cuda=device, device_type="cpu")


NAMES = ("w0", "w1", "w2", "cloned")  # all but the last are above what is cloned


@contextmanager
def job(
    device: Device | None = None, late: Collection[str] = NAMES, kind: type[CudaCopier] = CudaCopier, **options: object
) -> Iterator[tuple[Rig, Device, dict[str, torch.nn.Parameter], Stamper]]:
    """Snapshots of parameters that one optimizer trains. `late`: those that may be copied late."""
    device = device or Device()
    params = {name: torch.nn.Parameter(torch.zeros(LARGE if name == "cloned" else (800, 500))) for name in NAMES}
    with rig(lambda: (params, late), copier=copier(device, kind), **options) as it:
        yield it, device, params, Stamper(list(params.values()))


def test_every_kind_of_tensor_comes_over_bit_for_bit(seed: int) -> None:
    state = odd_state(seed)
    with rig(lambda: (state, ()), copier=copier(Device())) as it:
        comes_over_bit_for_bit(it)


def test_an_eager_copy_makes_the_current_stream_wait_for_its_reads() -> None:
    with job(late=()) as (it, device, *_):
        device.log.clear()
        device.events = 0
        it.take().wait(60)
        assert [line for line in device.log if "waits" in line or line.startswith("on")] == [
            "main waits for side",
            "side waits for main",
            "on side",
            "on main",
            "main waits for event 2 of side",
        ]


def test_a_late_copy_leaves_the_waiting_to_the_optimizer_step() -> None:
    with job() as (it, device, _, optimizer):
        it.prove(optimizer.step)
        assert it.snapshotter.trust.proven() == ["lazy copies of 4 tensors"]
        device.log.clear()
        snapshot = it.take()
        assert snapshot.is_deferred
        assert device.log[-4:] == ["main waits for side", "side waits for main", "on side", "on main"]
        device.log.clear()
        optimizer.step()
        assert device.log[0].startswith("main waits for event")
        assert device.log[0].endswith("of side")
        snapshot.done.result(60)
        assert snapshot.abandon_reason is None
        assert it.all_stamps(snapshot.slot) == {float(PROOFS_NEEDED)}
        assert snapshot.stall_s >= 2e-3  # two pairs of events of the stand-in, a millisecond each
        assert not it.events


@pytest.mark.parametrize("proven", [False, True])
def test_optimizers_on_other_streams_wait_for_the_reads_too_until_they_are_over(proven: bool) -> None:
    """Those of a late copy, and those of the comparison before."""
    go = threading.Event()
    with job() as (it, device, params, _):
        one, other = Stamper([params["w0"]]), Stamper([params["w1"], params["w2"], params["cloned"]])
        if proven:
            it.prove(one.step, other.step)
        snapshot = it.take()
        if not proven:
            snapshot.wait(60)
        assert snapshot.is_deferred == proven
        it.snapshotter._tasks.submit(go.wait)  # the device takes its time
        one.step()
        was_done = snapshot.done.done()
        device.log.clear()
        device.now = Stream(device, "other")
        other.step()
        go.set()
        assert was_done != proven
        assert [line.split(" event ")[0] for line in device.log] == ["other waits for"]
        assert device.log[0].endswith("of main")  # which waits for the reads, and looks itself
        snapshot.done.result(60)
        it.settle()
        device.log.clear()
        other.step()
        assert device.log == []


def test_closing_waits_for_what_the_device_still_works_on() -> None:
    arrived, go = threading.Event(), threading.Event()
    with job(late=()) as (it, *_):
        it.snapshotter._tasks.submit(lambda: (arrived.set(), go.wait())[0])
        snapshot = it.take()
        arrived.wait()
        assert not snapshot.done.done()
        closing = threading.Thread(target=it.snapshotter.close)
        closing.start()
        closing.join(0.2)
        go.set()
        closing.join()
        assert snapshot.done.done()
        assert snapshot.abandon_reason is None


def test_an_error_of_the_device_abandons_the_snapshot_that_it_concerns() -> None:
    with job(late=()) as (it, device, *_):
        device.is_lost = True
        snapshot = it.take()
        snapshot.done.result(60)
        assert snapshot.abandon_reason == "it could not be copied: device lost"


def test_a_comparison_names_what_differs() -> None:
    with job(late=()) as (it, _, params, _):
        it.take().wait(60)
        pieces = it.snapshotter.bindings._bindings_by_slot[1].pieces
        assert it.copier.start_comparison(pieces)() == []
        params["w1"].data[-1, -1] += 1
        (changed,) = it.copier.start_comparison(pieces)()
        assert it.walk.layout.entries[pieces[changed].entry].name == "w1"


def test_pages_are_locked_once_and_unlocked_with_the_binding() -> None:
    device = Device()
    state = {"w": torch.zeros(300)}
    with rig(lambda: (state, ()), copier=copier(device)) as it:
        each = it.staging.data_bytes
        assert sum(device.locked.values()) == 2 * each
        it.snapshotter.bindings.bind(0, it.walk, it.staging, memoryview(it.arenas[0]))
        assert sum(device.locked.values()) == 2 * each
        it.snapshotter.bindings.unbind(0, memoryview(it.arenas[0]))
        assert sum(device.locked.values()) == each
        it.walk_again()
        assert sum(device.locked.values()) == 2 * each
    assert not device.locked


def test_pages_that_cannot_be_locked_are_copied_to_all_the_same_and_it_is_said() -> None:
    with job(Device(status=2), late=(), slots=1) as (it, device, *_):
        assert it.names() == ["snapshot.unpinned"]
        assert it.events[0].message.endswith("no memory can be locked")
        snapshot = it.take()
        snapshot.wait(60)
        assert it.all_stamps(snapshot.slot) == {0.0}
    assert not device.locked


def test_pages_are_locked_a_part_at_a_time_and_no_transfer_crosses_a_seam(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(cuda_runtime, "LOCK_BYTES", 1 << 14)
    state = odd_state(seed)
    device, transfers = Device(), list[tuple[int, int]]()
    with rig(lambda: (state, ()), copier=copier(device), slots=1) as it:
        assert len(device.locked) > 100
        assert sum(device.locked.values()) == it.staging.data_bytes
        assert all(address // (1 << 14) == (address + n - 1) // (1 << 14) for address, n in device.locked.items())
        (part,) = it.snapshotter.bindings._bindings_by_slot[0].plan().eager_job._device_parts
        targets = [target for _, parts in part._direct_copies for _, target in parts]
        targets += [target for _, target in part._mirror.transfers]
        transfers += [(target.data_ptr(), target.nbytes) for target in targets]
        assert sum(n for _, n in transfers) == sum(
            piece.nbytes for piece in it.snapshotter.bindings._bindings_by_slot[0].pieces
        )
        assert all(address // (1 << 14) == (address + n - 1) // (1 << 14) for address, n in transfers)
        it.take().wait(60)
        assert it.differing(0) == []
        assert it.copier.start_comparison(it.snapshotter.bindings._bindings_by_slot[0].pieces)() == []


def test_clones_take_little_of_a_device_the_smallest_first_and_all_arenas_share_them(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(cuda_copier, "CLONE_BYTES_MAX", 1000)
    state = odd_state(seed)
    with rig(lambda: (state, ()), copier=copier(Device())) as it:
        plans = [each.plan() for each in it.snapshotter.bindings._bindings_by_slot.values()]
        parts = [part for plan in plans for part in (*plan.eager_job._device_parts, *plan.deferred_job._device_parts)]
        assert len({part._clone_buffer.data_ptr() for part in parts if part._clone_buffer.nbytes}) == 1
        (part,) = plans[0].eager_job._device_parts
        gathered = [source.nbytes for sources, _ in part._mirror.concatenated for source in sources]
        assert 500 < sum(gathered) <= 1000
        assert max(gathered) <= min(whole.nbytes for whole, _ in part._direct_copies)
        comes_over_bit_for_bit(it)


def test_other_threads_ask_cuda_for_something_only_on_a_device_of_the_state() -> None:
    with job(slots=1) as (it, device, _, optimizer):
        it.prove(optimizer.step)
        it.take().wait(60)
        optimizer.step()
        it.settle()
        arena = memoryview(bytearray(it.staging.data_bytes))
        thread = threading.Thread(target=it.snapshotter.bindings.bind, args=(1, it.walk, it.staging, arena))
        thread.start()
        thread.join()
        assert it.snapshotter.bindings.is_bound(1, it.walk, it.staging)
        thread = threading.Thread(target=it.snapshotter.bindings.unbind, args=(1, arena))
        thread.start()
        thread.join()
    assert device.strays == []


def test_a_plan_is_given_out_once_its_buffers_hold_what_they_begin_with() -> None:
    had_to_wait: list[bool] = []
    with job(slots=1) as (it, device, *_):
        binding, trust = it.snapshotter.bindings._bindings_by_slot[0], it.snapshotter.trust

        def meanwhile() -> None:
            device.on_query = lambda: None
            other = threading.Thread(target=binding.plan)
            other.start()
            other.join(0.2)
            had_to_wait.append(other.is_alive())

        trust.version += 1
        device.on_query = meanwhile
        it.snapshotter._tasks.submit(it.snapshotter.bindings.replan_all).result()
        assert had_to_wait == [True]


class Full(CudaCopier):
    """Of a device that may have no memory left."""

    def prepare(self, pieces: Sequence[CopyPiece]) -> CudaJob:
        if self.cuda.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().prepare(pieces)

    def start_comparison(self, pieces: Sequence[CopyPiece]) -> Callable[[], list[int]]:
        if self.cuda.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().start_comparison(pieces)


def test_a_device_that_is_full_while_a_plan_is_made_ahead_costs_no_snapshot() -> None:
    with job(kind=Full) as (it, device, *_):
        device.is_full = True
        it.walk_again()
        snapshot = it.take()
        snapshot.wait(60)
        assert snapshot.abandon_reason == "it could not be copied: CUDA out of memory"
        device.is_full = False
        snapshot = it.take()
        snapshot.wait(60)
        assert snapshot.abandon_reason is None
        assert it.all_stamps(snapshot.slot) == {0.0}


def test_a_comparison_that_fails_costs_no_snapshot_that_is_being_copied() -> None:
    go = threading.Event()
    with job(kind=Full) as (it, device, _, optimizer):
        it.snapshotter._tasks.submit(go.wait)
        snapshot = it.take()
        device.is_full = True
        optimizer.step()
        go.set()
        snapshot.done.result(60)
        assert snapshot.abandon_reason is None
        assert it.names() == ["deferred_copy.off"]


class Mixed(CudaCopier):
    """What lies first lies in host memory."""

    def _divide_by_device(
        self, pieces: Sequence[CopyPiece]
    ) -> tuple[list[CopyPiece], dict[torch.device, list[CopyPiece]]]:
        host = [piece for piece in pieces if piece.entry == 0]
        return host, super()._divide_by_device([piece for piece in pieces if piece.entry > 0])[1]


def test_what_fails_on_the_host_is_over_once_no_device_writes_any_more() -> None:
    device = Device()
    state = {"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)}
    with rig(lambda: (state, ()), copier=copier(device, Mixed)) as it:
        state["a"].untyped_storage().resize_(0)
        device.log.clear()
        device.events = 0
        snapshot = it.take()
        assert device.log[-2:] == ["main waits for event 2 of side", "host waits for side"]
        assert snapshot.done.done()
        assert "shrank" in str(snapshot.abandon_reason)


class NeverLate(CudaCopier):
    def prepare(self, pieces: Sequence[CopyPiece]) -> CudaJob:
        job = super().prepare(pieces)

        def late() -> Ticket:
            raise RuntimeError("no event")

        job.start_deferred = late  # type: ignore[method-assign]
        return job


def test_a_late_copy_that_does_not_begin_abandons_once_the_eager_one_has_landed() -> None:
    go = threading.Event()
    with job(late=NAMES[:3], kind=NeverLate) as (it, device, _, optimizer):
        it.prove(optimizer.step)
        device.on_wait = go.wait
        snapshot = it.take()
        was_done = snapshot.done.done()
        go.set()
        snapshot.done.result(60)
        assert not was_done
        assert snapshot.abandon_reason == "it could not be copied: no event"


def test_pages_are_unlocked_once_no_device_uses_them_any_more() -> None:
    with job(slots=1) as (it, device, *_):
        it.take().wait(60)
        device.log.clear()
        it.copier.start_comparison(it.snapshotter.bindings._bindings_by_slot[0].pieces)
        assert device.log == ["main waits for side", "side waits for main"]  # what reads the pages too, so
        device.log.clear()
        it.snapshotter.bindings.unbind(0, memoryview(it.arenas[0]))
        assert device.log[0] == "host waits for side"
        assert set(device.log[1:]) == {"unlock"}  # a part at a time, as it lies


def interrupt() -> None:
    raise KeyboardInterrupt


def test_whatever_ends_a_lock_or_an_unlock_leaves_no_page_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runtime, "LOCK_BYTES", 1 << 14)
    device, region = Device(), memoryview(bytearray(1 << 17))
    locks = cuda_runtime.PageLocks(device, "cpu")
    device.on_register = lambda: interrupt() if len(device.locked) == 3 else None
    with pytest.raises(KeyboardInterrupt):
        locks.lock(region)
    assert not device.locked
    device.on_register = lambda: None
    locks.lock(region)
    locked = dict(device.locked)
    assert sum(locked.values()) == region.nbytes
    for status, fails in ((712, locks.lock), (999, lambda region: locks.unlock(region, lambda: None))):
        assert device.locked == locked
        device.status = status
        with pytest.raises(CkptError, match="no memory can be locked"):
            fails(region)
        device.status = 0
    assert not device.locked


def test_closing_on_a_device_that_is_lost_ends_all_the_rest() -> None:
    device = Device()

    def lost() -> None:
        raise RuntimeError("device lost")

    made = copier(device)
    arena = bytearray(1 << 16)
    made.pin(memoryview(arena))
    made.side_stream(torch.device("cpu"))
    device.on_query = lost
    with pytest.raises(RuntimeError, match="device lost"):
        made.close()
    assert not device.locked
    assert made.host_copier._tasks.stopping.is_set()
    made.pin(memoryview(arena))  # a thread that was about to
    assert not device.locked


def test_a_bind_that_ends_after_that_of_a_newer_walk_leaves_it_bound() -> None:
    device = Device()
    with rig(lambda: ({"w": torch.zeros(1 << 16)}, ("w",)), copier=copier(device)) as it:
        newer = walk_of(*it.state())

        def meanwhile() -> None:
            it.snapshotter.bindings.bind(1, newer, it.staging, memoryview(it.arenas[1]))

        device.on_register = meanwhile
        it.snapshotter.bindings.bind(0, it.walk, it.staging, memoryview(bytearray(it.staging.data_bytes)))
        assert it.snapshotter.bindings.is_bound(1, newer, it.staging)
        assert not it.snapshotter.bindings.is_bound(0, it.walk, it.staging)


def test_ctrl_c_is_heard_while_a_device_hangs() -> None:
    device = Device()
    made = copier(device)
    asked: list[None] = []

    def hang() -> None:
        asked.append(None)
        if len(asked) == 3:
            raise KeyboardInterrupt

    device.on_query, device.is_hanging = hang, True
    with pytest.raises(KeyboardInterrupt), made.background_context({torch.device("cpu")}):
        pass
    assert len(asked) == 3
    made.close()


def test_the_runtime_is_known_by_the_name_that_torch_loads_it_by() -> None:
    assert [cuda_runtime._runtime_file_name(v) for v in ("11.8", "12.6", "13.0")] == [
        "libcudart.so.11.0",
        "libcudart.so.12",
        "libcudart.so.13",
    ]

"""How long does training stand still for a snapshot, the trainer's side alone?

    python -m benchmarks.snapshot [--small] [--json FILE]

Into warm memfds, with no agent: an eager snapshot of 1 GiB against a memcpy of the same tensors with as many threads;
what 20,000 small tensors add; a lazy snapshot where the step is longer than the copy, its stall and what a loop of
matrix products (a fixed number, on all cores) loses to it altogether. Figures are medians, taken in turns in one run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.memcpy import Pieces, Whole, memfd
from benchmarks.report import Row, parser, report, timed
from ckpt.events import Events
from ckpt.layout.division import whole_share
from ckpt.layout.staging import frame_bytes_for, stage
from ckpt.trainer.snapshot.cpu_copier import CpuCopier
from ckpt.trainer.snapshot.deferred_copy import PROOFS_NEEDED
from ckpt.trainer.snapshot.snapshot import Snapshotter
from ckpt.trainer.state.mesh_coordinate import Coordinate
from ckpt.trainer.state.state_walk import StateWalker

LAYER_BYTES = 16 << 20
SMALL_TENSOR_BYTES = 1024


class Layers(torch.nn.Module):
    def __init__(self, count: int, nbytes: int) -> None:
        super().__init__()
        self.of = torch.nn.ParameterList(torch.full((nbytes // 64, 16), float(n)) for n in range(count))


class Touch(torch.optim.Optimizer):
    """Costs next to nothing, so that a step is the matrix products alone; but every parameter changes."""

    def __init__(self, params: Iterator[torch.nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        torch._foreach_add_([p[:1] for group in self.param_groups for p in group["params"]], 1.0)


class Bound:
    """One state with a warm memfd, as the session would bind it."""

    def __init__(self, layers: Layers, threads: int, lazy: bool) -> None:
        self.optimizer = Touch(layers.parameters())
        state = {"model": layers, "optim": self.optimizer}
        self.walker = StateWalker(state, Coordinate(()), generators=False)
        self.walk = self.walker.walk()
        total = sum(t.nbytes for of_one in self.walk.tensors for t in of_one)
        self.staging = stage(self.walk.layout, whole_share(self.walk.layout), frame_bytes_for(total))
        self.data = memfd(self.staging.data_bytes)
        self.snapshotter = Snapshotter(CpuCopier(threads), lazy, Events())
        self.snapshotter.bindings.bind(0, self.walk, self.staging, self.data)

    def take(self) -> None:
        self.snapshotter.take(0).wait()

    def take_checked(self) -> None:
        assert not self.walker.has_changed(self.walk)
        self.take()


@contextmanager
def bound(layers: Layers, threads: int, lazy: bool) -> Iterator[Bound]:
    made = Bound(layers, threads, lazy)
    try:
        yield made
    finally:
        made.snapshotter.close()


def in_turns(rounds: int, *works: Callable[[], object]) -> list[float]:
    """The median seconds of each, after one round that does not count."""
    times = [[timed(work) for work in works] for _ in range(rounds + 1)][1:]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def eager(total_bytes: int, threads: int, rounds: int) -> tuple[list[Row], float]:
    count = total_bytes // LAYER_BYTES
    with (
        bound(Layers(count, LAYER_BYTES), threads, lazy=False) as one,
        Pieces([LAYER_BYTES] * count, threads) as copy,
        Whole(total_bytes, threads) as whole,
    ):
        stall_s, copy_s, whole_s = in_turns(rounds, one.take, copy, whole)
    ratio = stall_s / copy_s
    name = f"eager stall, {total_bytes >> 20} MiB, {threads} threads"
    return [
        Row(name, 1e3 * stall_s, "ms", "at most 1.2", ratio <= 1.2, 1e3 * copy_s, ratio),
        Row("... against one memcpy a thread", 1e3 * stall_s, "ms", "shown", None, 1e3 * whole_s, stall_s / whole_s),
    ], stall_s


def many_small(count: int, threads: int, rounds: int) -> Row:
    with (
        bound(Layers(count, SMALL_TENSOR_BYTES), threads, lazy=False) as one,
        Whole(count * SMALL_TENSOR_BYTES, threads) as copy,
    ):
        stall_s, copy_s = in_turns(rounds, one.take_checked, copy)
    added_ms = 1e3 * (stall_s - copy_s)
    return Row(f"added by {count} small tensors, fingerprint included", added_ms, "ms", "at most 30 ms", added_ms <= 30)


def lazy(total_bytes: int, threads: int, rounds: int, eager_s: float) -> list[Row]:
    a = torch.ones(512, 512)

    def step(products: int) -> None:
        for _ in range(products):
            torch.mm(a, a)

    products = max(1, int((3 * eager_s + 0.05) / (timed(lambda: step(50)) / 50)))
    stalls: list[float] = []
    with bound(Layers(total_bytes // LAYER_BYTES, LAYER_BYTES), threads, lazy=True) as one:

        def loop(saves: bool) -> None:
            snapshot = one.snapshotter.take(0) if saves else None
            step(products)
            one.optimizer.step()
            one.snapshotter.note_boundary()
            if snapshot is not None:
                assert snapshot.abandon_reason is None
                stalls.append(snapshot.stall_s)

        for _ in range(PROOFS_NEEDED):
            loop(True)
        stalls.clear()
        with_s, without_s = in_turns(rounds, lambda: loop(True), lambda: loop(False))
        assert one.snapshotter.trust.proven()
    stall_s, lost_s = statistics.median(stalls), with_s - without_s
    share = stall_s / eager_s
    return [
        Row("lazy stall", 1e3 * stall_s, "ms", "at most 0.05 of eager", share <= 0.05, 1e3 * eager_s, share),
        Row("lazy, loop with - loop without", 1e3 * lost_s, "ms", "shown", None, 1e3 * eager_s, lost_s / eager_s),
    ]


def main() -> int:
    args = parser(__doc__).parse_args()
    total_bytes, count, rounds = (64 << 20, 2000, 3) if args.small else (1 << 30, 20_000, 15)
    threads = min(torch.get_num_threads(), 8)
    eager_rows, eager_s = eager(total_bytes, threads, rounds)
    rows = [*eager_rows, many_small(count, threads, rounds), *lazy(total_bytes, threads, rounds, eager_s)]
    return report("snapshot", rows, args)


if __name__ == "__main__":
    sys.exit(main())

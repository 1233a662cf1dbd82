"""How fast is parity made, and data recovered from it, on one core?

Bars: XOR at least 0.5 x memcpy (bytes of data per second, both into memory that is warm); two parities, P and Q
together, at least 1 GB/s a core, to make and to recover lost members with.

    python -m benchmarks.parity [--small] [--json FILE]

Data comes in frames of 4 MiB: one of each member at a time, or in turns from the members, as it may arrive. Recovering
counts the bytes of the whole stripe, lost and left: the survivors are added to a copy of the parities, and the lost
members solved for. One thread, whose CPU time counts; medians of rounds in turn with memcpy. What is recovered is
compared with the data once.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.report import Row, parser, report
from ckpt.format import parity
from ckpt.format.parity import add_data, solve_lost
from ckpt.types import FRAME_BYTES

XOR_BAR, GB_S_BAR = 0.5, 1.0
MEMBERS = (2, 6, 14)

Bytes = npt.NDArray[np.uint8]


class Stripe:
    """Members of `member_bytes` of random data, and room for two parities and for recovering."""

    def __init__(self, members: int, member_bytes: int, frame_bytes: int) -> None:
        rng = np.random.default_rng(0)
        self.data: list[Bytes] = [rng.integers(0, 256, member_bytes, np.uint8) for _ in range(members)]
        self.made = {row: np.zeros(member_bytes, np.uint8) for row in parity.Row}
        self.left = {row: np.zeros(member_bytes, np.uint8) for row in parity.Row}
        self.frames = range(0, member_bytes, frame_bytes)
        self.frame_bytes = frame_bytes
        self.scratch = parity.ParityScratch()

    def add(self, targets: dict[parity.Row, Bytes], row: parity.Row, members: Sequence[int]) -> None:
        for at in self.frames:
            frames = {member: self.data[member][at : at + self.frame_bytes].data for member in members}
            add_data(targets[row].data, at, frames, row, self.scratch)

    def make(self, *rows: parity.Row, in_turns: bool = False) -> None:
        for row in rows:
            self.made[row].fill(0)
            for members in [[member] for member in range(len(self.data))] if in_turns else [range(len(self.data))]:
                self.add(self.made, row, members)

    def recover(self, lost: list[int], *rows: parity.Row) -> list[Bytes]:
        for row in rows:
            np.copyto(self.left[row], self.made[row])
            self.add(self.left, row, [member for member in range(len(self.data)) if member not in lost])
        found = solve_lost(lost, {row: self.left[row].data for row in rows}, self.scratch)
        return [np.frombuffer(data, np.uint8) for data in found]

    def copy(self) -> None:
        """Each member's bytes into one warm buffer: what XOR has to do at least."""
        for member in self.data:
            np.copyto(self.left[parity.Row.P], member)


def measure(members: int, member_bytes: int, rounds: int, frame_bytes: int) -> list[Row]:
    stripe = Stripe(members, member_bytes, frame_bytes)
    p, q = parity.Row
    lost = [members - 1, members // 2 - 1]
    ways: dict[str, Callable[[], object]] = {
        "memcpy": stripe.copy,
        "make P": lambda: stripe.make(p),
        "make P, in turns": lambda: stripe.make(p, in_turns=True),
        "make Q": lambda: stripe.make(q),
        "make P and Q": lambda: stripe.make(p, q),
        "make P and Q, in turns": lambda: stripe.make(p, q, in_turns=True),
        "recover 1 of P": lambda: stripe.recover(lost[:1], p),
        "recover 1 of Q": lambda: stripe.recover(lost[:1], q),
        "recover 2 of P and Q": lambda: stripe.recover(lost, p, q),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    stripe.make(p, q)
    for found, member in zip(stripe.recover(lost, p, q), lost, strict=True):
        if not np.array_equal(found, stripe.data[member]):
            raise AssertionError(f"member {member} was recovered wrongly")
    for _ in range(rounds):
        for name, work in ways.items():
            started = time.thread_time()
            work()
            times[name].append(max(time.thread_time() - started, 1e-6))
    gb_s = {name: members * member_bytes / 1e9 / statistics.median(all_s) for name, all_s in times.items()}
    rows = [Row(f"{members} members: memcpy", gb_s.pop("memcpy"), "GB/s", "the ceiling", None)]
    ceiling = rows[0].figure
    for name, figure in gb_s.items():
        ratio = figure / ceiling
        bar, met = "none", None
        if name.startswith("make P") and " and " not in name:
            bar, met = f"ratio at least {XOR_BAR}", ratio >= XOR_BAR
        elif "P and Q" in name or name == "recover 1 of Q":
            bar, met = f"at least {GB_S_BAR} GB/s", figure >= GB_S_BAR
        rows.append(Row(f"{members} members: {name}", figure, "GB/s", bar, met, ceiling, ratio))
    return rows


def main(argv: list[str] | None = None) -> int:
    args = parser(__doc__).parse_args(argv)
    member_bytes, rounds, frame_bytes = (1 << 20, 1, 1 << 18) if args.small else (128 << 20, 5, FRAME_BYTES)
    rows = [row for members in MEMBERS for row in measure(members, member_bytes, rounds, frame_bytes)]
    return report("parity", rows, args)


if __name__ == "__main__":
    sys.exit(main())

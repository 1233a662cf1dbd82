"""What does a save of 20,000 small tensors add to the stall, through the whole of ckpt?

    python -m benchmarks.many [--small] [--json FILE]

Added: what training stands still for, less a memcpy of as many bytes. Appointed snapshots, the agent idle: the first
one of a run and the later ones; and ck.save(), whose time has the agent's answer in it and a second look at the
structure, since ranks may have waited for each other. Medians, of several runs for the first.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from typing import Any

import torch

import ckpt
from benchmarks.memcpy import Whole
from benchmarks.report import Row, parser, report, timed
from benchmarks.walk import make_state

BAR_MS = 30.0


def appointed(state: dict[str, Any], count: int) -> list[float]:
    """The stalls of the first `count` snapshots of a run, in seconds."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        ckpt.Checkpointer(folder, state, policy=ckpt.Every(steps=1), codec="raw") as ck,
    ):
        stalls_s = ck._receipt.stalls_s
        while len(stalls_s) < count:
            taken = len(stalls_s)
            state["optim"].step()
            ck.step()
            if len(stalls_s) > taken:
                ck.wait("store")
        return list(stalls_s)


def explicit(state: dict[str, Any], count: int) -> list[float]:
    """Seconds of each call of save()."""
    found = []
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        ckpt.Checkpointer(folder, state, policy=ckpt.Every(steps=10**8), codec="raw") as ck,
    ):
        for _ in range(count + 3):  # the first ones wait for their arenas
            state["optim"].step()
            ck.step()
            found.append(timed(ck.save))
            ck.wait("store")
    return found[3:]


def main() -> int:
    args = parser(__doc__).parse_args()
    tensors, runs, count = (400, 2, 4) if args.small else (20_000, 3, 6)
    state = make_state(tensors)
    total = sum(t.nbytes for t in state["model"].state_dict().values()) * 3
    firsts: list[float] = []
    later: list[float] = []
    copies: list[float] = []
    with Whole(total, min(torch.get_num_threads(), 8)) as copy:
        for _ in range(runs):
            first, *others = appointed(state, count)
            firsts.append(first)
            later += others
            copies += [timed(copy) for _ in range(count)]
        saves = explicit(state, count)
    copy_ms = 1e3 * statistics.median(copies)
    rows = []
    for question, stalls_s, has_bar in (
        ("a later snapshot", later, True),
        ("the first one", firsts, True),
        ("a call of save()", saves, False),
    ):
        ms = 1e3 * statistics.median(stalls_s) - copy_ms
        bar, met = (f"at most {BAR_MS:g} ms", ms <= BAR_MS) if has_bar else ("printed", None)
        rows.append(Row(f"added by {tensors} tensors to {question}", ms, "ms", bar, met))
    rows.append(Row(f"a memcpy of their {total / 2**20:.1f} MiB", copy_ms, "ms", "printed", None))
    return report("many", rows, args)


if __name__ == "__main__":
    sys.exit(main())

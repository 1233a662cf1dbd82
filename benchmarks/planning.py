"""How long does planning take, for a state of 20,000 tensors on 8 ranks?

Bar: at most 1.5 s in all, once per structure of the state. Beside it: what each checkpoint needs again (assembling),
what a restore needs (cutting), and the largest number of frames that a checkpoint is meant to have.

    python -m benchmarks.planning [--small] [--json FILE]

Medians; one process, one thread. Encoding and staging happen in every trainer at once, the rest in the agent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.report import Row, median_s, parser, report
from ckpt.format.declaration import decode_layout, encode_layout
from ckpt.plan.assemble import Blob, Staged, assemble
from ckpt.plan.division import agree, divide, division_id, undivided
from ckpt.plan.layout import Declaration, Entry, Layout, Share
from ckpt.plan.reshard import Want, cuts, match
from ckpt.plan.staging import stage
from ckpt.types import FRAME_BYTES, Box

BAR_S = 1.5
WORLD = 8
PLANNING, SAVE, RESTORE = "part of planning", "none; at each save", "none; at a restore"


def main(argv: list[str] | None = None) -> int:
    args = parser(__doc__).parse_args(argv)
    rounds = 1 if args.small else 5
    tensors, frames = (200, 1 << 10) if args.small else (20_000, 1 << 17)
    rows = many_tensors(tensors, rounds)
    planning = sum(row.figure for row in rows if row.bar == PLANNING)
    total = Row(
        f"{tensors} tensors x {WORLD} ranks: planning in all", planning, "s", f"at most {BAR_S} s", planning <= BAR_S
    )
    report("planning", [total, *rows, *many_frames(frames, rounds)], args)
    return 0


def many_tensors(count: int, rounds: int) -> list[Row]:
    """Replicated small tensors, as DDP has them: all ranks declare all, and divide them."""
    shape = (300,)
    entries = [Entry(f"model.layers.{i:06d}.weight", "float32", shape, (Box.whole(shape),)) for i in range(count)]
    layouts = [Layout(tuple(entries)) for _ in range(WORLD)]
    hashes = [np.ones((count, 2), np.uint64)] * WORLD
    label = f"{count} tensors x {WORLD} ranks"
    rows: list[Row] = []

    def timed(question: str, bar: str, work: Callable[[], Any]) -> Any:
        rows.append(Row(f"{label}: {question}", median_s(work, rounds), "s", bar, None))
        return work()

    blob = timed("encode a layout", PLANNING, lambda: encode_layout(layouts[0]))
    timed("decode all layouts", PLANNING, lambda: [decode_layout(blob) for _ in layouts])
    agreed, _ = timed("compare the hashes", PLANNING, lambda: agree(layouts, hashes))
    shares = timed("divide", PLANNING, lambda: divide(layouts, agreed, FRAME_BYTES))
    timed("name the division", PLANNING, lambda: division_id(layouts, shares))
    whole = undivided(layouts[0])
    timed("stage one rank, undivided", PLANNING, lambda: stage(layouts[0], whole, FRAME_BYTES))
    divided, copies = staged(layouts, shares), staged(layouts, [whole] * WORLD)
    manifest = timed("assemble, divided", SAVE, lambda: assemble(divided)).manifest
    timed("assemble, undivided", SAVE, lambda: assemble(copies))
    wants = [Want(entry.name, "", entry.dtype, entry.shape, entry.boxes[0]) for entry in entries]
    timed("match", RESTORE, lambda: match(manifest, wants))
    timed("cut all", RESTORE, lambda: cuts(manifest, wants))
    return rows


def many_frames(count: int, rounds: int) -> list[Row]:
    """Large tensors in shards of 16 frames, as FSDP has them."""
    tensors, elements = count // WORLD // 16, 16 * FRAME_BYTES // 4
    layouts = [
        Layout(
            tuple(
                Entry(f"model.{i:06d}", "float32", (WORLD * elements,), (Box((rank * elements,), (elements,)),))
                for i in range(tensors)
            )
        )
        for rank in range(WORLD)
    ]
    snapshots = staged(layouts, [undivided(layout) for layout in layouts])
    manifest = assemble(snapshots).manifest
    entries = layouts[0].entries
    half = Box((0,), (WORLD * elements // 2,))
    wants = [Want(entry.name, "", entry.dtype, entry.shape, half) for entry in entries]
    save, restore = (lambda: assemble(snapshots)), (lambda: cuts(manifest, wants))
    return [
        Row(f"{count} frames on {WORLD} ranks: assemble", median_s(save, rounds), "s", SAVE, None),
        Row(
            f"{count} frames on {WORLD} ranks: cut for one of two ranks", median_s(restore, rounds), "s", RESTORE, None
        ),
    ]


def staged(layouts: list[Layout], shares: list[Share]) -> list[Staged]:
    """As if all frames had hashed to their own number: equal copies on all ranks."""
    division = division_id(layouts, shares)
    values = Blob(bytes(16), 100)
    found = []
    for rank, (layout, share) in enumerate(zip(layouts, shares, strict=True)):
        staging = stage(layout, share, FRAME_BYTES)
        hashes = np.repeat(np.arange(len(staging.frames), dtype=np.uint64)[:, None], 2, axis=1)
        declaration = Declaration(rank, len(layouts), f"rank={rank}", division, layout, staging)
        found.append(Staged(declaration, hashes, values, values))
    return found


if __name__ == "__main__":
    sys.exit(main())

"""How long does planning take, for a state of 20,000 tensors on 8 ranks?

Bar: at most 1.5 s in all, once per structure of the state: from the walk in each trainer (all at once) to the plans
that they have understood. Beside it: what each checkpoint needs again (assembling), what a restore needs (cutting),
and the largest number of frames that a checkpoint is meant to have.

    python -m benchmarks.planning [--small] [--json FILE]

Medians; one process, one trainer, one agent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from benchmarks.report import Row, median_s, parser, report
from benchmarks.walk import make_state
from ckpt.agent.snapshots.division import Division, RankContents, make_division, parse_layout
from ckpt.format.declaration import decode_layout, decode_share, encode, encode_layout
from ckpt.gc_pause import pause_gc
from ckpt.layout.assemble import Blob, Staged, assemble
from ckpt.layout.division import Hashes, divide, division_id, find_agreed, whole_share
from ckpt.layout.layout import Declaration, Entry, Layout, Share
from ckpt.layout.reshard import Want, plan_cuts
from ckpt.layout.staging import stage
from ckpt.trainer.state.mesh_coordinate import find_coordinate
from ckpt.trainer.state.state_walk import StateWalker
from ckpt.trainer.state.tensor_hashes import hash_replicas
from ckpt.types import FRAME_BYTES, Box

BAR_S = 1.5
WORLD = 8
SAVE, RESTORE = "none; at each save", "none; at a restore"


def main(argv: list[str] | None = None) -> int:
    args = parser(__doc__).parse_args(argv)
    rounds = 1 if args.small else 5
    tensors, frames = (200, 1 << 10) if args.small else (20_000, 1 << 17)
    rows = [*planning(tensors, rounds), *many_tensors(tensors, rounds), *many_frames(frames, rounds)]
    return report("planning", rows, args)


def planning(count: int, rounds: int) -> list[Row]:
    """Small tensors and Adam, in a real trainer: replicated, as DDP has them, so that all ranks declare all and divide
    them; and sharded, as FSDP has them, so that no layout is another's. Arenas are made and filled with nothing here:
    that is not planning, and training goes on meanwhile."""
    state = make_state(count)
    walker = StateWalker(state, find_coordinate(state, 0, WORLD))
    walk = walker.walk()
    walk_s = median_s(walker.walk, rounds)
    hash_s = median_s(lambda: hash_replicas(walk.tensors, walk.may_have_replicas), rounds)
    rows: list[Row] = []
    for kind, layouts, hashed in (
        ("replicated", [walk.layout] * WORLD, hash_replicas(walk.tensors, walk.may_have_replicas)),
        ("sharded", [sharded(walk.layout, rank) for rank in range(WORLD)], np.zeros((0, 2), np.uint64)),
    ):
        blobs = [encode_layout(layout) for layout in layouts]
        encode_s = median_s(lambda layouts=layouts: encode_layout(layouts[0]), rounds)  # type: ignore[misc]

        def held(blobs: list[bytes] = blobs, hashed: Hashes = hashed) -> list[RankContents]:
            return [
                RankContents(f"rank={rank}", parse_layout(blob), hashed, "1", 1 << 16)
                for rank, blob in enumerate(blobs)
            ]

        decode_s = median_s(held, rounds)  # before anybody keeps what is decoded: then it is not decoded again
        ranks = held()
        division = make_division(ranks, None)
        divide_s = median_s(lambda ranks=ranks: make_division(ranks, None), rounds)  # type: ignore[misc]

        @pause_gc()  # as the trainer does
        def understand(division: Division = division) -> None:
            layout, share = decode_layout(division.encoded_plans[0][0]), decode_share(division.encoded_plans[0][1])
            staging = stage(layout, share, division.frame_bytes)
            encode(Declaration(0, WORLD, "rank=0", division.id, layout, staging))

        label = f"{count} tensors x {WORLD} ranks, {kind}"
        parts = [
            ("each trainer: walk", walk_s),
            ("each trainer: hashes of replicas", hash_s if len(hashed) else 0.0),
            ("each trainer: encode its layout", encode_s),
            ("agent: decode all layouts", decode_s),
            ("agent: compare, divide, size, encode", divide_s),
            ("each trainer: read its plan, stage, declare", median_s(understand, rounds)),
        ]
        total = sum(seconds for _, seconds in parts)
        met, bar = (total <= BAR_S, f"at most {BAR_S} s") if kind == "replicated" else (None, "printed")
        rows.append(Row(f"{label}: planning in all", total, "s", bar, met))
        rows += [Row(f"{label}: {part}", seconds, "s", "part of it", None) for part, seconds in parts]
    return rows


def sharded(layout: Layout, rank: int) -> Layout:
    """Each tensor as if it were one of WORLD rows of a larger one."""
    return Layout(
        tuple(
            Entry(e.name, e.dtype, (WORLD, *e.shape), (Box((rank, *(0 for _ in e.shape)), (1, *e.shape)),))
            for e in layout.entries
        )
    )


def many_tensors(count: int, rounds: int) -> list[Row]:
    """What comes after planning, for replicated small tensors."""
    shape = (300,)
    entries = [Entry(f"model.layers.{i:06d}.weight", "float32", shape, (Box.whole(shape),)) for i in range(count)]
    layouts = [Layout(tuple(entries))] * WORLD
    agreed, _ = find_agreed(layouts, [np.ones((count, 2), np.uint64)] * WORLD)
    divided = staged(layouts, divide(layouts, agreed, FRAME_BYTES))
    copies = staged(layouts, [whole_share(layouts[0])] * WORLD)
    manifest = assemble(divided).manifest
    wants = [Want(entry.name, "", entry.dtype, entry.shape, entry.boxes[0]) for entry in entries]
    questions: list[tuple[str, str, Callable[[], object]]] = [
        ("assemble, divided", SAVE, lambda: assemble(divided)),
        ("assemble, undivided", SAVE, lambda: assemble(copies)),
        ("cut all", RESTORE, lambda: plan_cuts(manifest, wants)),
    ]
    label = f"{count} tensors x {WORLD} ranks"
    return [Row(f"{label}: {question}", median_s(work, rounds), "s", bar, None) for question, bar, work in questions]


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
    snapshots = staged(layouts, [whole_share(layout) for layout in layouts])
    manifest = assemble(snapshots).manifest
    entries = layouts[0].entries
    half = Box((0,), (WORLD * elements // 2,))
    wants = [Want(entry.name, "", entry.dtype, entry.shape, half) for entry in entries]
    save, restore = (lambda: assemble(snapshots)), (lambda: plan_cuts(manifest, wants))
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

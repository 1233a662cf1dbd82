"""How do planning, the record, messages and the coordinator's CPU grow from 1 to 1,024 nodes of 8 ranks? And how do a
listing, a start and a prune grow with the checkpoints in the store?

    python -m benchmarks.scale [--small] [--server rclone] [--only planning|saves|store ..] [--json FILE]

- planning: what the coordinator computes for 1,000 tensors on each rank, sharded as FSDP2 does and replicated: once per
  structure (plan, read the declarations), at each save (assemble, encode the record), at a restore (read the record
  from a folder). One record holds the sharded tensors of 256 nodes; so the growth to 1,024 is shown with 128 tensors.
- saves: a job in a simulated world (benchmarks/simulated.py), with the real agent as its coordinator: its messages and
  bytes to and from other nodes, and its CPU time, for one save that is replicated and committed. The ranks hold 10
  tensors each: what depends on tensors is in planning.
- store: runs with 100, 1,000 and 10,000 checkpoints of a tiny state in a folder, or on rclone.

The bars: nothing grows faster than in proportion to the nodes (the slope of the logarithms is at most 1.1). The record
of 256 nodes takes at most 10 MB, and is read within 1 s. All seconds are CPU time but those of the store.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ParamSpec, TypeVar

import numpy as np

from benchmarks.report import Row, environment, parser, report, timed
from benchmarks.simulated import RANKS, Saved, sharded_layout, simulated_job
from ckpt import storage
from ckpt.agent.snapshots.division import RankContents, make_division, parse_layout
from ckpt.format import record
from ckpt.format.declaration import decode, decode_layout, decode_share, encode, encode_layout
from ckpt.format.frames import frame_hash
from ckpt.format.manifest import EXTENT, FRAME, PLACE, Manifest, Record, TensorSpec
from ckpt.layout.assemble import Blob, Staged, assemble
from ckpt.layout.layout import Declaration, Entry, Layout
from ckpt.layout.staging import stage
from ckpt.policy.save_options import Keep
from ckpt.store import keys
from ckpt.store.commit import Committer
from ckpt.store.lineage import Claim, CommitRef
from ckpt.store.prune import Pruner
from ckpt.store.reader import candidates, open_record
from ckpt.store.run import Run
from ckpt.types import DTYPE_CODE, Box, Epoch, Identity, Version
from tests import servers

P = ParamSpec("P")
T = TypeVar("T")

NODES = (1, 4, 16, 64, 256, 1024)
TENSORS = 1000
SPARSE = 128  # tensors of which one record holds those of 1,024 nodes
CONTROL = 10  # tensors in the simulated job
COLUMNS = 64
GROWTH_MAX = 1.1
RECORD_BYTES_MAX, READ_S_MAX = 10_000_000, 1.0
JUDGED_NODES = 256
CHECKPOINTS = (100, 1_000, 10_000)
INTERVAL_S = 20.0  # between two saves of the simulated job
IDLE_S = 4.0
EPOCH = Epoch(1, "0123456789abcdef")
PARTS = ("planning", "saves", "store")

Figures = dict[str, tuple[float, str]]  # by name: the figure and its unit


def main(argv: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--only", action="append", choices=PARTS, help="by default all")
    made.add_argument("--server", choices=("rclone",), help="also measure the store part there")
    args = made.parse_args(argv)
    rows: list[Row] = []
    for part in args.only or PARTS:
        rows += {"planning": planning, "saves": saves, "store": store}[part](args)
    return report("scale", rows, args)


# --- planning and the record ------------------------------------------------------------------------------------


def planning(args: argparse.Namespace) -> list[Row]:
    sizes = NODES[:2] if args.small else NODES
    series: list[tuple[str, int, tuple[int, ...]]] = [("replicated", TENSORS, sizes)]
    series.append(("sharded", TENSORS, tuple(n for n in sizes if n <= JUDGED_NODES)))
    series.append(("sharded", SPARSE, sizes[:2] if args.small else (64, 256, 1024)))
    rows: list[Row] = []
    for kind, tensors, nodes in series:
        found = {count: plan_and_record(count, tensors, kind == "sharded") for count in nodes}
        rows += growth(f"{tensors} tensors per rank, {kind}", found)
    return rows


def plan_and_record(nodes: int, tensors: int, sharded: bool) -> Figures:
    """What a coordinator computes for a job of so many nodes, each step with the results of the one before."""
    world = RANKS * nodes
    hashes = np.zeros((0, 2), np.uint64) if sharded else np.ones((tensors, 2), np.uint64)
    blobs = [layout_blob(rank, world, tensors, sharded) for rank in range(world if sharded else 1)]

    def parse() -> list[RankContents]:
        named = enumerate(blobs if sharded else blobs * world)
        return [RankContents(f"rank={rank}", parse_layout(blob), hashes, "1", 1 << 16) for rank, blob in named]

    figures: Figures = {}
    declared = declare(figures, parse)
    made = recorded(measure(figures, "assemble, at each save", assemble, staged(figures, declared)).manifest)
    body = measure(figures, "encode the record, at each save", record.encode, made)
    figures["record"] = len(body), "B"
    ref = CommitRef(made.identity, made.writer, len(body))
    with tempfile.TemporaryDirectory(prefix="ckpt-scale-") as folder, opened(folder) as run:
        run.backend.put(keys.record_key(ref.identity, ref.writer), [body])
        measure(figures, "read the record", open_record, run.backend, ref)
    return figures


def declare(figures: Figures, parse: Callable[[], list[RankContents]]) -> list[bytes]:
    """What each trainer says of its share. How long that takes for one rank is in the benchmark of planning."""
    ranks = measure(figures, "read the layouts", parse)
    division = measure(figures, "divide", make_division, ranks, None)
    found = []
    for rank, plan in enumerate(division.encoded_plans):
        layout, share = decode_layout(plan[0]), decode_share(plan[1])
        staging = stage(layout, share, division.frame_bytes)
        found.append(encode(Declaration(rank, len(ranks), f"rank={rank}", division.id, layout, staging)))
    return found


def staged(figures: Figures, declared: list[bytes]) -> list[Staged]:
    """Frames that no other rank has, values that all have."""
    known = measure(figures, "read the declarations", lambda: [decode(blob, "a declaration") for blob in declared])
    rng, found = np.random.default_rng(0), []
    for each in known:
        table = rng.integers(0, 1 << 63, (len(each.staging.frames), 2), dtype=np.uint64)
        found.append(Staged(each, table, Blob(bytes(16), 100), Blob(rng.bytes(16), 100)))
    return found


def layout_blob(rank: int, world: int, tensors: int, sharded: bool) -> bytes:
    if sharded:
        return encode_layout(sharded_layout(rank, world, tensors, COLUMNS))
    shape = (world, COLUMNS)
    whole = (Box.whole(shape),)
    names = [f"model.layers.{i:05d}.weight" for i in range(tensors)]
    return encode_layout(Layout(tuple(Entry(name, "float32", shape, whole) for name in names)))


def recorded(manifest: Manifest) -> Record:
    """As a commit records it whose nodes have each written one pack."""
    identity = Identity(EPOCH, Version(5))
    lengths = manifest.frames["length"].astype(np.int64)
    nodes = max(1, len(manifest.coordinates) // RANKS)
    places = np.zeros(len(lengths), PLACE)
    places["pack"] = np.arange(len(lengths)) * nodes // max(1, len(lengths))
    places["length"] = lengths
    bounds = np.searchsorted(places["pack"], np.arange(nodes + 1))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    sizes = np.add.reduceat(lengths, bounds[:-1])
    places["offset"] = starts - np.repeat(starts[bounds[:-1]], np.diff(bounds))
    packs = [(keys.pack_key(identity, f"n{node:04d}", "w", 0), int(size)) for node, size in enumerate(sizes)]
    return Record(identity, "w", manifest, tuple(packs), places, {"loss": 0.5}, {"world": len(manifest.coordinates)})


def measure(figures: Figures, name: str, work: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
    """CPU seconds, once: these are seconds where it matters."""
    gc.collect()
    began_s = time.process_time()
    found = work(*given, **named)
    figures[name] = time.process_time() - began_s, "s"
    return found


# --- messages and CPU of a save ---------------------------------------------------------------------------------


def saves(args: argparse.Namespace) -> list[Row]:
    found: dict[int, Figures] = {}
    for nodes in NODES[:2] if args.small else NODES:
        with simulated_job(nodes, CONTROL, INTERVAL_S) as job:
            (saved,) = job.saves(1, IDLE_S)
        found[nodes] = save_figures(saved)
    return growth("a save", found)


def save_figures(saved: Saved) -> Figures:
    figures: Figures = {
        "CPU": (saved.cpu_s, "s"),
        "CPU of a second without a save": (saved.idle_cpu_s, "s"),
        "CPU of a start": (saved.start_cpu_s, "s"),
        "messages": (float(sum(saved.traffic.messages.values())), ""),
        "bytes": (float(sum(saved.traffic.bytes.values())), "B"),
        "turns of the loop": (float(saved.turns), ""),
    }
    for kind, count in sorted(saved.traffic.messages.items()):
        figures[f"messages {kind!r}"] = float(count), ""
        figures[f"bytes {kind!r}"] = float(saved.traffic.bytes[kind]), "B"
    return figures


# --- many checkpoints in a store --------------------------------------------------------------------------------


def store(args: argparse.Namespace) -> list[Row]:
    counts = (10, 20) if args.small else CHECKPOINTS
    with tempfile.TemporaryDirectory(prefix="ckpt-scale-") as folder:
        rows = growth("a folder", {n: checkpoint_figures(f"{folder}/{n}", n) for n in counts}, "checkpoints")
    if args.server:
        with servers.rclone() as server, environment(server.environment()):
            url = f"s3://{server.bucket}"
            rows += growth("rclone", {n: checkpoint_figures(f"{url}/{n}", n) for n in counts}, "checkpoints")
    return rows


def checkpoint_figures(url: str, count: int) -> Figures:
    """Wall time, with all that the file system or server does."""
    figures: Figures = {}
    with opened(url) as run:
        fill(run, count)
    for words in (["ls"], ["ls", "--quick"]):
        command = [sys.executable, "-m", "ckpt", *words, url]
        took_s = timed(lambda command=command: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))  # type: ignore[misc]
        figures[f"ckpt {' '.join(words)}"] = took_s, "s"
    with opened(url) as run:
        figures["list the run, as a start does"] = timed(run.view), "s"
        view = run.view()
        figures["choose, and read the newest record"] = (
            timed(lambda: open_record(run.backend, candidates(view)[0])),
            "s",
        )
        figures["look whether a newer start owns the run"] = timed(lambda: run.check_not_superseded(EPOCH)), "s"
        pruner = Pruner(run, EPOCH)
        keep = Keep(last=max(1, count // 2))
        figures["plan a prune: the first pass"] = timed(lambda: pruner.plan(view, keep)), "s"
        figures["plan a prune: a later pass"] = timed(lambda: pruner.plan(run.view(), keep)), "s"
        plan = pruner.plan(view, Keep(last=count - 1))
        assert len(plan.retire) == 1, plan
        figures["prune one checkpoint"] = timed(lambda: pruner.execute(plan)), "s"
    return figures


def fill(run: Run, count: int) -> None:
    """Commits so many checkpoints of a state of 4 KiB, a few at once, each by a writer of its own."""
    run.put_claim(Claim(EPOCH, None))

    def commit(numbers: Sequence[int]) -> None:
        committer = Committer(run.backend, keys.new_writer(), "raw")
        for number in numbers:
            raw = np.full(1024, number, "<f4").tobytes()
            hi, lo = frame_hash(raw)
            frames = np.array([(hi, lo, len(raw), DTYPE_CODE["float32"])], FRAME)
            extents = np.array([(0, 0, len(raw), 0, 0)], EXTENT)
            whole = ((0, Box((0,), (1024,))),)
            manifest = Manifest((TensorSpec("weight", "float32", (1024,)),), whole, frames, extents, ("rank=0",))
            identity = Identity(EPOCH, Version(number))
            frame: Callable[[int], memoryview] = lambda _, raw=raw: memoryview(raw)  # type: ignore[misc]  # noqa: E731
            committer.commit(identity, manifest, frame, check=lambda: None, metrics={"loss": 1 / number})

    writers = [threading.Thread(target=commit, args=(range(1 + at, count + 1, 4),)) for at in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(run.view().commits) == count, "not all checkpoints were committed"


@contextlib.contextmanager
def opened(url: str) -> Iterator[Run]:
    backend = storage.open(url)
    try:
        yield Run(backend)
    finally:
        backend.close()


# --- what is printed --------------------------------------------------------------------------------------------


def growth(label: str, found: Mapping[int, Figures], what: str = "nodes") -> list[Row]:
    """A row for each size and figure, and one for how the figure grows: the slope between the logarithms of 64 nodes
    (or the smallest size) and of the largest."""
    rows = [
        Row(f"{label}: {name}, {size:,} {what}", figure, unit, *bar_of(label, name, size, figure))
        for size, figures in found.items()
        for name, (figure, unit) in figures.items()
    ]
    last = max(found)
    first = 64 if 64 in found and last > 64 else min(found)
    for name, (figure, _) in found[last].items():
        before = found[first].get(name, (0.0, ""))[0]
        if before > 0 and figure > 0 and last > first:
            slope = math.log(figure / before) / math.log(last / first)
            title = f"{label}: {name}, growth from {first:,} to {last:,} {what}"
            rows.append(Row(title, slope, "", f"at most {GROWTH_MAX}", slope <= GROWTH_MAX))
    return rows


def bar_of(label: str, name: str, size: int, figure: float) -> tuple[str, bool | None]:
    if label == f"{TENSORS} tensors per rank, sharded" and size == JUDGED_NODES:
        if name == "record":
            return "at most 10 MB", figure <= RECORD_BYTES_MAX
        if name == "read the record":
            return f"at most {READ_S_MAX:g} s", figure <= READ_S_MAX
    return "printed", None


if __name__ == "__main__":
    sys.exit(main())

"""A job without torch: global tensors, ranks that hold boxes of them, arenas that are byte arrays."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from ckpt.layout.assemble import DATA, OWN, SHARED, Assembled, Blob, Staged
from ckpt.layout.division import divide, division_id
from ckpt.layout.layout import Declaration, Entry, Layout, Share
from ckpt.layout.reshard import Want, apply_cuts, plan_cuts, split_dimensions
from ckpt.layout.staging import stage
from ckpt.types import ITEMSIZE, Box

UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def numpy_dtype(dtype: str) -> np.dtype:
    return np.dtype(UINT[ITEMSIZE[dtype]])


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


def random_array(rng: random.Random, dtype: str, shape: Sequence[int]) -> np.ndarray:
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(rng.randbytes(count * ITEMSIZE[dtype]), numpy_dtype(dtype)).reshape(shape)


@dataclass
class Rank:
    """`held`: per (name, owner) the dtype, the global shape, and the local contents of each box."""

    coordinate: str
    held: dict[tuple[str, str], tuple[str, tuple[int, ...], list[tuple[Box, np.ndarray]]]] = field(default_factory=dict)
    shared: bytes = b"shared values"
    own: bytes = b"own values"

    def layout(self) -> Layout:
        return Layout(
            tuple(
                Entry(name, dtype, shape, tuple(box for box, _ in boxes), owner)
                for (name, owner), (dtype, shape, boxes) in sorted(self.held.items())
            )
        )

    def contents(self) -> list[list[bytes]]:
        return [[np.ascontiguousarray(array).tobytes() for _, array in self.held[key][2]] for key in sorted(self.held)]

    def hashes(self) -> np.ndarray:
        rows = [halves(data) for entry in self.contents() for data in entry]
        return np.array(rows, np.uint64).reshape(-1, 2)


def halves(data: bytes) -> tuple[int, int]:
    digest = xxhash.xxh3_128_intdigest(data)
    return digest >> 64, digest & (1 << 64) - 1


@dataclass
class Snapshot:
    """All ranks' arenas of one version."""

    ranks: list[Rank]
    staged: list[Staged]
    data: list[bytearray]

    def read(self, rank: int, offset: int, length: int) -> memoryview:
        return memoryview(self.data[rank])[offset : offset + length]

    def frame(self, assembled: Assembled, number: int) -> np.ndarray:
        """The raw bytes of a frame of the manifest, from where `sources` says, checked against its hash."""
        rank, region_, frame = assembled.sources[number].tolist()
        if region_ == DATA:
            offset, length, _ = self.staged[rank].declaration.staging.frames[frame].tolist()
            raw = bytes(self.read(rank, offset, length))
        else:
            raw = self.ranks[rank].shared if region_ == SHARED else self.ranks[rank].own
            assert region_ in (SHARED, OWN)
        hi, lo, length, _ = assembled.manifest.frames[number].tolist()
        assert halves(raw) == (hi, lo)
        assert len(raw) == length
        return np.frombuffer(raw, np.uint8)


def take(
    ranks: list[Rank],
    agreed: object = None,
    frame_bytes: int = 256,
    shares: list[Share] | None = None,
    drop: object = None,
) -> Snapshot:
    """Stages all ranks: divided by `agreed` (None: undivided), or by the given shares. `drop`: (rank, part number)."""
    layouts = [rank.layout() for rank in ranks]
    if shares is None:
        shares = divide(layouts, agreed or set(), frame_bytes)
    division = division_id(layouts, shares)
    if drop is not None:
        rank, number = drop
        shares[rank] = shares[rank][:number] + shares[rank][number + 1 :]
    staged, data = [], []
    for r, (rank, layout, share) in enumerate(zip(ranks, layouts, shares, strict=True)):
        staging = stage(layout, share, frame_bytes)
        buffer = bytearray(staging.data_bytes)
        contents = rank.contents()
        for entry, box, start, length, offset, _ in staging.segments.tolist():
            buffer[offset : offset + length] = contents[entry][box][start : start + length]
        hashes = [halves(bytes(buffer[o : o + n])) for o, n, _ in staging.frames.tolist()]
        declaration = Declaration(r, len(ranks), rank.coordinate, division, layout, staging)
        staged.append(
            Staged(declaration, np.array(hashes, np.uint64).reshape(-1, 2), blob(rank.shared), blob(rank.own))
        )
        data.append(buffer)
    return Snapshot(ranks, staged, data)


def blob(data: bytes) -> Blob:
    return Blob(xxhash.xxh3_128_digest(data), len(data))


def fetch(snapshot: Snapshot, assembled: Assembled, wants: Sequence[Want]) -> list[np.ndarray]:
    """The wanted boxes, put together from frames."""
    outs = [np.zeros(want.box.shape, numpy_dtype(want.dtype)) for want in wants]
    filled = [np.zeros(want.box.shape, np.uint8) for want in wants]
    plan = plan_cuts(assembled.manifest, wants)
    assert [cut.frame for cut in plan] == sorted(cut.frame for cut in plan)
    for frame, group in itertools.groupby(plan, key=lambda cut: cut.frame):
        some = list(group)
        apply_cuts(some, frame, snapshot.frame(assembled, frame), outs)
        for cut in some:
            for part in split_dimensions(cut, wants[cut.want].box.shape, 1):
                filled[cut.want][tuple(slice(a, a + n) for a, n in zip(part.box_offset, part.shape, strict=True))] += 1
    assert all((count == 1).all() for count in filled), "each element is filled exactly once"
    return outs


def grid(rng: random.Random, shape: Sequence[int], pieces: int) -> list[Box]:
    """The boxes of a random grid over the shape, at most `pieces` of them, uneven, none empty."""
    edges = [[0, n] for n in shape]
    for _ in range(8):
        candidates = [d for d, n in enumerate(shape) if len(edges[d]) <= n]
        if not candidates:
            break
        d = rng.choice(candidates)
        at = rng.choice([x for x in range(1, shape[d]) if x not in edges[d]] or [0])
        grown = [*edges]
        grown[d] = sorted({*edges[d], at})
        if np.prod([len(e) - 1 for e in grown]) > pieces:
            break
        edges = grown
    spans = [list(itertools.pairwise(e)) for e in edges]
    return [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*spans)]


DTYPES = ("uint8", "bfloat16", "float32", "float64", "complex128", "bool")


def random_state(rng: random.Random, tensors: int) -> dict[str, tuple[str, np.ndarray]]:
    """Global tensors of 0 to 4 dimensions; some empty, some 0-d, some of many frames of 256 bytes."""
    state = {}
    for i in range(tensors):
        dtype = rng.choice(DTYPES)
        shape = tuple(rng.choice((0, 1, 1, 2, 3, 5, 8)) for _ in range(rng.randrange(5)))
        if rng.random() < 0.3:
            shape = (*shape[:2], rng.randrange(1, 200))
        state[f"t{i:02d}"] = (dtype, random_array(rng, dtype, shape))
    return state


def random_ranks(rng: random.Random, state: dict[str, tuple[str, np.ndarray]], world: int) -> list[Rank]:
    """Each tensor is cut by a grid of its own; each box is held by one, some or all ranks."""
    ranks = [Rank(f"rank={r}", own=f"own values of {r}".encode()) for r in range(world)]
    for name, (dtype, array) in state.items():
        held: list[list[Box]] = [[] for _ in ranks]
        boxes = grid(rng, array.shape, rng.choice((1, 1, world, 2 * world)))
        for box in boxes:
            for r in rng.sample(range(world), rng.choice((1, 1, rng.randint(1, world), world))):
                held[r].append(box)
        for rank, mine in zip(ranks, held, strict=True):
            if mine or rng.random() < 0.5:  # a rank without a part may or may not list the tensor
                rank.held[name, ""] = (dtype, array.shape, [(box, array[region(box)]) for box in mine])
    return ranks


def wants_of(rng: random.Random, state: dict[str, tuple[str, np.ndarray]], world: int) -> list[Want]:
    """Another cut of every tensor: the boxes of a random grid, and one random box inside."""
    wants = []
    for name, (dtype, array) in state.items():
        boxes = grid(rng, array.shape, world)
        offset = tuple(rng.randrange(n + 1) for n in array.shape)
        boxes.append(Box(offset, tuple(rng.randrange(n - o + 1) for n, o in zip(array.shape, offset, strict=True))))
        wants += [Want(name, "", dtype, array.shape, box) for box in boxes]
    return wants

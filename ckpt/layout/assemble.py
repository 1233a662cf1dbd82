"""The assembly of a manifest: combines the snapshots that all ranks staged for one version into one manifest.

Guarantees:
- Complete by coverage. Each byte of each declared box must be staged by some rank. The declared boxes of each tensor of
  the job must cover its global shape. Otherwise Incomplete names the tensors or ranks that are missing.
- Only equal copies are merged. If several ranks staged the same box whole, one copy is kept only if all are equal byte
  for byte. Otherwise the tensor is stored once per rank, owned by the rank, and named in `differing_tensors`. The same
  is done if boxes of a tensor overlap in part, or ranks declare different dtypes or global shapes.
- Deterministic. The source of a box is the lowest rank that staged it whole, so equal input gives equal manifests.

If a rank holds all of a tensor that it owns, this is one tensor with that owner. If it holds only parts, each part is a
tensor of the part's shape, with the owner "<coordinate>@<offset>" (`part_owner`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckpt.errors import CkptError, DamagedData, UsageError
from ckpt.format.manifest import EXTENT, FRAME, RANK_VALUES, VALUES, Manifest, TensorSpec
from ckpt.gc_pause import pause_gc
from ckpt.layout.coverage import BoxCells, Ints, Read, Rows, differing_cells, rows_of
from ckpt.layout.layout import Array, Declaration, are_disjoint, covers
from ckpt.types import DTYPE_CODE, FRAME_BYTES_MAX, FRAMES_MAX, ITEMSIZE, Box

SOURCE = np.dtype([("rank", "<u4"), ("region", "u1"), ("frame", "<u4")])
# Regions: a data frame of the rank's staging; the rank's blob of shared values; its blob of own values.
DATA, SHARED, OWN = 0, 1, 2

NAMED_MAX = 20


class Incomplete(CkptError):
    """Some bytes that ranks declared for this version are not staged. `missing`: up to 20 names of tensors or ranks."""

    kind = "incomplete"

    def __init__(self, message: str, missing: Sequence[str] = ()) -> None:
        self.missing = tuple(missing[:NAMED_MAX])
        more = f" and {len(missing) - NAMED_MAX} more" if len(missing) > NAMED_MAX else ""
        super().__init__(f"{message}: {', '.join(self.missing)}{more}" if missing else message)


@dataclass(frozen=True, slots=True)
class Blob:
    """A values blob, which is a frame of its own. `hash`: its xxh3-128, 16 bytes big-endian. `length`: in bytes."""

    hash: bytes
    length: int


@dataclass(frozen=True, slots=True)
class Staged:
    """The snapshot that one rank staged. `hashes`: the frames' xxh3-128 as (hi, lo), shape (frames, 2), uint64."""

    declaration: Declaration
    hashes: npt.NDArray[np.uint64]
    shared_values: Blob
    own_values: Blob


@dataclass(frozen=True, slots=True)
class Assembled:
    """A manifest and where its frames are. `sources`: array of SOURCE, one per frame of the manifest.
    `differing_tensors`: the names of tensors that are stored per rank because the ranks' copies differ."""

    manifest: Manifest
    sources: Array
    differing_tensors: tuple[str, ...]


def part_owner(coordinate: str, box: Box) -> str:
    """The owner of one part of a rank's own tensor, such as "rank=3@0,128"."""
    return f"{coordinate}@{','.join(map(str, box.offset))}"


@pause_gc()
def assemble(staged: Sequence[Staged], read: Read | None = None) -> Assembled:
    """The manifest of one version. `staged`: one per rank, in any order.

    `read` returns staged bytes. It is called only for a box that several ranks staged whole into frames with different
    hashes: other bytes of these frames may be the ones that differ. Without `read` the box counts as differing.
    Errors: Incomplete; UsageError if two ranks have one coordinate; CkptError if ranks used different divisions or a
    declaration is not allowed; DamagedData if a declaration contradicts itself.
    """
    ranks = _by_rank(staged)
    tensors, cells = _declared_tensors(ranks)
    rows = rows_of([rank.declaration.staging for rank in ranks], [rank.hashes for rank in ranks], cells)
    differing = set(differing_cells(rows, read))
    kinds: dict[tuple[str, str], int] = {}
    for tensor in tensors:
        kinds[tensor.name, tensor.owner] = kinds.get((tensor.name, tensor.owner), 0) + 1

    out = _Output(rows)
    lacking: list[str] = []
    disagreed: set[str] = set()
    for tensor in sorted(tensors, key=lambda t: (t.name, t.owner)):
        boxes = [box for box in tensor.cells if box.size]
        several = kinds[tensor.name, tensor.owner] > 1
        if tensor.owner or several or not are_disjoint(boxes) or not differing.isdisjoint(tensor.cells.values()):
            if not tensor.owner:
                disagreed.add(tensor.name)
            for rank, entry in tensor.entries:
                declaration = ranks[rank].declaration
                if not out.add_owned(tensor, rank, declaration.coordinate, declaration.layout.entries[entry].boxes):
                    lacking.append(f"{tensor.name} ({declaration.coordinate})")
        elif not covers(boxes, tensor.shape) or not out.add_shared(tensor, boxes):
            lacking.append(tensor.name)
    if lacking:
        raise Incomplete("not all bytes of these tensors are staged", lacking)
    out.add_values(ranks)
    manifest, sources = out.finish(tuple(rank.declaration.coordinate for rank in ranks))
    return Assembled(manifest, sources, tuple(sorted(disagreed)))


def _by_rank(staged: Sequence[Staged]) -> list[Staged]:
    """The snapshots in order of rank. Checks that every rank is there once, with one division and its own
    coordinate."""
    if not staged:
        raise Incomplete("no rank has staged anything")
    ranks = sorted(staged, key=lambda s: s.declaration.rank)
    first = ranks[0].declaration
    seen: set[int] = set()
    by_coordinate: dict[str, int] = {}
    for declaration in (s.declaration for s in ranks):
        rank = declaration.rank
        if declaration.world != first.world or not 0 <= rank < first.world:
            raise CkptError(
                f"rank {rank} of {declaration.world} does not fit rank {first.rank} of {first.world}: the worlds differ"
            )
        if rank in seen:
            raise CkptError(f"rank {rank} staged two snapshots for one version")
        if declaration.division != first.division:
            raise CkptError(
                f"rank {rank} staged under division {declaration.division}, rank {first.rank} under {first.division}; "
                "all ranks of a checkpoint need the same division"
            )
        other = by_coordinate.setdefault(declaration.coordinate, rank)
        if other != rank:
            raise UsageError(
                f"ranks {other} and {rank} both have the coordinate {declaration.coordinate!r}; "
                "give mesh= a mesh in which each rank has its own coordinate"
            )
        seen.add(rank)
    if len(ranks) < first.world:
        raise Incomplete("some ranks have staged nothing", [f"rank {r}" for r in range(first.world) if r not in seen])
    return ranks


# --- what was declared ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Tensor:
    """One (name, owner, dtype, shape) that ranks declare. `cells`: the cell number of each box that any rank holds.
    `entries`: (rank, entry) of each declaration."""

    name: str
    owner: str
    dtype: str
    shape: tuple[int, ...]
    cells: dict[Box, int] = field(default_factory=dict)
    entries: list[tuple[int, int]] = field(default_factory=list)


def _declared_tensors(ranks: Sequence[Staged]) -> tuple[list[_Tensor], BoxCells]:
    found: dict[tuple[str, str, str, tuple[int, ...]], _Tensor] = {}
    size: list[int] = []
    of_box: list[Ints] = []
    first_box: list[Ints] = []
    for rank, staged in enumerate(ranks):
        coordinate = staged.declaration.coordinate
        boxes: list[int] = []
        firsts: list[int] = []
        for e, entry in enumerate(staged.declaration.layout.entries):
            if entry.owner and entry.owner != coordinate:
                raise CkptError(
                    f"{coordinate} declares {entry.name} as owned by {entry.owner}; a rank may declare only its own"
                )
            key = (entry.name, entry.owner, entry.dtype, entry.shape)
            tensor = found.get(key)
            if tensor is None:
                tensor = found[key] = _Tensor(*key)
            tensor.entries.append((rank, e))
            firsts.append(len(boxes))
            for box in entry.boxes:
                cell = tensor.cells.get(box)
                if cell is None:
                    if not box.within(entry.shape):
                        raise DamagedData(f"{coordinate} declares {box} of {entry.name}, whose shape is {entry.shape}")
                    cell = tensor.cells[box] = len(size)
                    size.append(box.size * ITEMSIZE[entry.dtype])
                boxes.append(cell)
        of_box.append(np.array(boxes, np.int64))
        first_box.append(np.array([*firsts, len(boxes)], np.int64))
    return list(found.values()), BoxCells(np.array(size, np.int64), tuple(of_box), tuple(first_box))


# --- what comes out ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _BlobAt:
    blob: Blob
    rank: int
    region: int


# The source of a box: a group of rows (one rank's copy), rows of several ranks, a values blob, or None (no bytes).
_Fill = int | Ints | _BlobAt | None


class _Output:
    """Collects tensors, their boxes and the source of each box; `finish` numbers them."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._lowest_groups: list[int] = rows.lowest.tolist()
        self._tensors: list[tuple[TensorSpec, list[tuple[Box, _Fill]]]] = []

    def add_shared(self, tensor: _Tensor, boxes: Sequence[Box]) -> bool:
        """Adds a tensor of the job with these boxes. False if some of their bytes are not staged."""
        return self._add(
            tensor, tensor.shape, "", [(box, box) for box in (sorted(boxes) if boxes[1:] else boxes)], None
        )

    def add_owned(self, tensor: _Tensor, rank: int, coordinate: str, boxes: Sequence[Box]) -> bool:
        """Adds a tensor as this rank holds it. False if some of its bytes are not staged."""
        boxes = sorted(box for box in boxes if box.size)
        if are_disjoint(boxes) and covers(boxes, tensor.shape):
            return self._add(tensor, tensor.shape, coordinate, [(box, box) for box in boxes], rank)
        return all(
            self._add(tensor, box.shape, part_owner(coordinate, box), [(Box.whole(box.shape), box)], rank)
            for box in boxes
        )

    def add_values(self, ranks: Sequence[Staged]) -> None:
        """Adds the shared values, once if they are equal on all ranks, else per rank; and each rank's own values."""
        do_differ = any(other.shared_values != ranks[0].shared_values for other in ranks)
        for rank, staged in enumerate(ranks):
            coordinate = staged.declaration.coordinate
            self._add_blob(RANK_VALUES, coordinate, _BlobAt(staged.own_values, rank, OWN))
            if do_differ:
                self._add_blob(VALUES, coordinate, _BlobAt(staged.shared_values, rank, SHARED))
            elif rank == 0:
                self._add_blob(VALUES, "", _BlobAt(staged.shared_values, rank, SHARED))

    def finish(self, coordinates: tuple[str, ...]) -> tuple[Manifest, Array]:
        self._tensors.sort(key=lambda item: (item[0].values, item[0].name, item[0].owner))
        boxes: list[tuple[int, Box]] = []
        groups: list[tuple[int, int]] = []
        tiles: list[tuple[int, Ints]] = []
        blobs: list[tuple[int, _BlobAt]] = []
        before = None
        for place, (spec, filled) in enumerate(self._tensors):
            if (spec.values, spec.name, spec.owner) == before:
                raise CkptError(
                    f"{spec.name} of {spec.owner} is declared twice; a rank declares each of its parts once"
                )
            before = (spec.values, spec.name, spec.owner)
            for box, fill in filled:
                if isinstance(fill, _BlobAt):
                    blobs.append((len(boxes), fill))
                elif isinstance(fill, int):
                    groups.append((len(boxes), fill))
                elif fill is not None:
                    tiles.append((len(boxes), fill))
                boxes.append((place, box))

        by_group = np.array(groups, np.int64).reshape(-1, 2)
        row, count = self._rows.group_rows(by_group[:, 1])
        box_of_row = np.concatenate([np.repeat(by_group[:, 0], count), *(np.full(len(r), box) for box, r in tiles)])
        row = np.concatenate([row, *(r for _, r in tiles)])
        frames, sources, extents = _gather(self._rows, row, box_of_row, blobs)
        if len(frames) > FRAMES_MAX:
            raise CkptError(
                f"the checkpoint has {len(frames)} frames; at most {FRAMES_MAX} are allowed. Stage larger frames"
            )
        specs = tuple(spec for spec, _ in self._tensors)
        return Manifest(specs, tuple(boxes), frames, extents, coordinates), sources

    def _add(
        self, tensor: _Tensor, shape: tuple[int, ...], owner: str, boxes: Sequence[tuple[Box, Box]], rank: int | None
    ) -> bool:
        """Adds a tensor. `boxes`: pairs (box in the manifest, declared box). The source of a box is `rank` if it staged
        the box whole, else the ranks that staged it. False if some bytes are not staged."""
        filled: list[tuple[Box, _Fill]] = []
        for box, declared in boxes:
            cell = tensor.cells[declared]
            group = -1 if rank is None else self._rows.whole_group(cell, rank)
            group = self._lowest_groups[cell] if group < 0 else group
            fill = group if group >= 0 else self._rows.tiles.get(cell)
            if fill is None:
                return False
            filled.append((box, fill))
        spec = TensorSpec(tensor.name, tensor.dtype, shape, owner)
        self._tensors.append((spec, filled or [(Box.whole(shape), None)]))
        return True

    def _add_blob(self, name: str, owner: str, at: _BlobAt) -> None:
        length = at.blob.length
        if length > FRAME_BYTES_MAX:
            raise UsageError(
                f"the {name} of rank {at.rank} take {length:,} bytes; at most {FRAME_BYTES_MAX:,} are allowed: "
                "hold large data in tensors"
            )
        spec = TensorSpec(name, "uint8", (length,), owner, values=True)
        self._tensors.append((spec, [(Box.whole((length,)), at if length else None)]))


def _gather(rows: Rows, row: Ints, box: Ints, blobs: Sequence[tuple[int, _BlobAt]]) -> tuple[Array, Array, Array]:
    """(frames, sources, extents) of the rows and the blobs. Each row fills a part of its box, each blob a whole box."""
    used = np.zeros(len(rows.frames), np.bool_)
    used[rows.frame[row]] = True
    kept = np.flatnonzero(used)
    rank = np.searchsorted(rows.frame_base, kept, side="right") - 1

    frames = np.zeros(len(kept) + len(blobs), FRAME)
    frames[: len(kept)] = rows.frames[kept]
    sources = np.zeros(len(frames), SOURCE)
    sources["rank"][: len(kept)] = rank
    sources["frame"][: len(kept)] = kept - rows.frame_base[rank]
    extents = np.zeros(len(row) + len(blobs), EXTENT)
    extents["box"][: len(row)] = box
    extents["start"][: len(row)] = rows.start[row]
    extents["length"][: len(row)] = rows.length[row]
    extents["frame"][: len(row)] = (np.cumsum(used) - 1)[rows.frame[row]]
    extents["offset"][: len(row)] = rows.offset[row]
    for i, (place, at) in enumerate(blobs):
        hi, lo = int.from_bytes(at.blob.hash[:8], "big"), int.from_bytes(at.blob.hash[8:], "big")
        frames[len(kept) + i] = (hi, lo, at.blob.length, DTYPE_CODE["uint8"])
        sources[len(kept) + i] = (at.rank, at.region, 0)
        extents[len(row) + i] = (place, 0, at.blob.length, len(kept) + i, 0)
    return frames, sources, extents[np.lexsort((extents["start"], extents["box"]))]

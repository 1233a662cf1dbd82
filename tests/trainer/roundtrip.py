"""A checkpoint without agent or store: what ranks walked, assembled by the real plan, and back into another state.

Frames are small, so that little states have many of them. Values go through the real format.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ckpt.format import values
from ckpt.format.frames import frame_hash, hash_frames
from ckpt.format.manifest import Manifest
from ckpt.layout.assemble import Blob, Staged, assemble
from ckpt.layout.division import find_agreed, make_owned, whole_share
from ckpt.layout.layout import Array, Declaration
from ckpt.layout.staging import stage
from ckpt.trainer.restore.fill import Filler
from ckpt.trainer.restore.restore import make_plan as restore_plan
from ckpt.trainer.restore.restore_plan import RestorePlan
from ckpt.trainer.state.mesh_coordinate import Axis, Coordinate, find_coordinate
from ckpt.trainer.state.state_walk import StateWalker, Walk
from ckpt.trainer.state.tensor_hashes import hash_replicas

FRAME_BYTES = 4096


@dataclass(frozen=True)
class RankSave:
    """What one rank gives to a checkpoint."""

    declaration: Declaration
    hashes: Any  # of its boxes
    data: bytes
    shared: bytes
    own: bytes


@dataclass(frozen=True)
class Checkpoint:
    manifest: Manifest
    sources: Array
    ranks: list[RankSave]
    disagreed: tuple[str, ...]

    def frame(self, number: int) -> bytes:
        rank, region, frame = self.sources[number].tolist()
        save = self.ranks[rank]
        if region:
            return (save.shared, save.own)[region - 1]
        offset, length, _ = save.declaration.staging.frames[frame].tolist()
        return save.data[offset : offset + length]

    def blobs(self, name: str) -> dict[str, Any]:
        """The value trees of that name, by owner."""
        return {owner: values.decode(blob) for owner, blob in self.raw_blobs(name).items()}

    def raw_blobs(self, name: str) -> dict[str, bytes]:
        found = {}
        for box, frame in zip(
            self.manifest.extents["box"].tolist(), self.manifest.extents["frame"].tolist(), strict=True
        ):
            spec = self.manifest.tensors[self.manifest.boxes[box][0]]
            if spec.values and spec.name == name:
                found[spec.owner] = self.frame(frame)
        return found


def walker_of(state: dict[str, Any], generators: bool = False, rank: int = 0, world: int = 1) -> StateWalker:
    return StateWalker(state, find_coordinate(state, rank, world), generators)


def walked(state: dict[str, Any]) -> tuple[StateWalker, Walk]:
    walker = walker_of(state)
    return walker, walker.walk()


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, read row-major."""
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def save_rank(walker: StateWalker, rank: int = 0, world: int = 1) -> RankSave:
    walk = walker.walk()
    staging = stage(walk.layout, whole_share(walk.layout), FRAME_BYTES)
    data = bytearray(staging.data_bytes)
    for segment in staging.segments:
        box = raw(walk.tensors[segment["entry"]][segment["box"]])
        start, length, offset = int(segment["start"]), int(segment["length"]), int(segment["offset"])
        data[offset : offset + length] = box[start : start + length]
    shared, own = walker.values(walk)
    declaration = Declaration(rank, world, walker.coordinate.text, "0" * 16, walk.layout, staging)
    return RankSave(
        declaration,
        hash_replicas(walk.tensors, walk.may_have_replicas),
        bytes(data),
        values.encode(shared),
        values.encode(own),
    )


def assemble_ranks(ranks: list[RankSave], differed: Collection[str] = ()) -> Checkpoint:
    """As the agent does it: tensors whose hashes differ, or once `differed`, become the ranks' own."""
    _, differing = find_agreed([r.declaration.layout for r in ranks], [r.hashes for r in ranks])
    names = {name for name, _ in differing} | set(differed)
    staged = []
    for rank in ranks:
        layout = make_owned(rank.declaration.layout, names, rank.declaration.coordinate)
        hashes = hash_frames(memoryview(rank.data), rank.declaration.staging.frames)
        staged.append(
            Staged(replace(rank.declaration, layout=layout), hashes, _blob(rank.shared), _blob(rank.own)),
        )
    done = assemble(staged, lambda rank, offset, length: ranks[rank].data[offset : offset + length])
    return Checkpoint(done.manifest, done.sources, ranks, done.differing_tensors)


def _blob(data: bytes) -> Blob:
    hi, lo = frame_hash(data)
    return Blob(hi.to_bytes(8, "big") + lo.to_bytes(8, "big"), len(data))


def save(state: dict[str, Any], generators: bool = False) -> Checkpoint:
    return assemble_ranks([save_rank(walker_of(state, generators))])


@dataclass(frozen=True)
class _Stored:
    """As restore.StoredValues reads it."""

    checkpoint: Checkpoint

    def read_values(self, name: str, owner: str) -> bytes | None:
        return self.checkpoint.raw_blobs(name).get(owner)

    def read_frames(self, numbers: Collection[int]) -> Mapping[int, bytes]:
        return {number: self.checkpoint.frame(number) for number in numbers}


def plan(walker: StateWalker, checkpoint: Checkpoint, strict: bool = True, step: int = 1) -> RestorePlan:
    return restore_plan(walker, checkpoint.manifest, _Stored(checkpoint), strict, step)  # type: ignore[arg-type]


def named(targets: RestorePlan, kind: str) -> tuple[str, ...]:
    """The names of which that kind of difference is noted: missing, reshaped or retyped."""
    return tuple(sorted(name for noted, name in targets.requests.differences if noted == kind))


def fill(targets: RestorePlan, checkpoint: Checkpoint) -> None:
    """Fetches every frame into a buffer that is scribbled over afterwards: nothing may alias it."""
    filler = Filler(checkpoint.manifest, targets.wants, targets.tensors)
    for number in filler.frames:
        frame = bytearray(checkpoint.frame(number))
        assert filler(number, memoryview(frame))
        frame[:] = b"\xa5" * len(frame)
    filler.check_overlaps()


def restore(
    state: dict[str, Any], checkpoint: Checkpoint, strict: bool = True, generators: bool = False, step: int = 1
) -> RestorePlan:
    walker = walker_of(state, generators)
    return finish(plan(walker, checkpoint, strict, step), checkpoint, strict)


def finish(targets: RestorePlan, checkpoint: Checkpoint, strict: bool = True) -> RestorePlan:
    if strict:
        assert (targets.difference_lines, targets.extra_names) == ([], ())
    fill(targets, checkpoint)
    targets.install()
    return targets


def contents(walk: Walk) -> Iterator[tuple[str, str, tuple[int, ...], list[Any], list[bytes]]]:
    """What a walk holds, to compare two."""
    for entry, tensors in zip(walk.layout.entries, walk.tensors, strict=True):
        yield entry.name, entry.dtype, entry.shape, list(entry.boxes), [raw(t) for t in tensors]


def assert_same_state(one: dict[str, Any], two: dict[str, Any]) -> None:
    a, b = walker_of(one), walker_of(two)
    walk_a, walk_b = a.walk(), b.walk()
    for x, y in itertools.zip_longest(contents(walk_a), contents(walk_b)):
        assert x == y, (x and x[0], y and y[0])
    assert walk_a.layout.entries
    assert values.encode(a.values(walk_a)[0]) == values.encode(b.values(walk_b)[0])


def on(mesh: dict[str, int], index: int) -> Coordinate:
    axes = []
    for name, size in reversed(mesh.items()):
        axes.append(Axis(name, index % size, size))
        index //= size
    return Coordinate(tuple(reversed(axes)))


def save_on(mesh: dict[str, int], states: list[dict[str, Any]]) -> Checkpoint:
    walkers = [StateWalker(state, on(mesh, rank), False) for rank, state in enumerate(states)]
    return assemble_ranks([save_rank(w, rank, len(states)) for rank, w in enumerate(walkers)])


def planned(
    state: dict[str, Any], checkpoint: Checkpoint, mesh: dict[str, int], rank: int = 0, strict: bool = True
) -> RestorePlan:
    return plan(StateWalker(state, on(mesh, rank), False), checkpoint, strict)


def restored(state: dict[str, Any], checkpoint: Checkpoint, mesh: dict[str, int], rank: int = 0) -> dict[str, Any]:
    targets = planned(state, checkpoint, mesh, rank)
    assert not targets.difference_lines, targets.difference_lines
    finish(targets, checkpoint, strict=False)
    return state

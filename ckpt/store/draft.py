"""`ckpt.Draft`: a checkpoint that processes write straight to the store, without a training loop and without an agent.

1. One process begins it: `draft = ckpt.Draft.begin(url)`. This claims an epoch, so the checkpoint has an identity.
2. Each process writes its boxes: `part = draft.write(rank, boxes, read)`. This puts packs; no reader sees them yet.
3. The process that began it commits: `draft.commit(parts)`. This puts the record, which makes the checkpoint exist.

Drafts and parts can be pickled; how they travel between the processes is the caller's business. A draft that never
commits leaves packs that no record refers to; `ckpt prune` deletes them. Each draft is a start of the run, so the
newest draft wins: an older one that is still being written fails at its commit, and so does a training job's next save.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import SaveFailed, UsageError
from ckpt.events import Events
from ckpt.format import values as value_trees
from ckpt.format.frames import frame_hash, hash_bytes
from ckpt.format.manifest import FRAME, PLACE
from ckpt.layout.assemble import DATA, Blob, Incomplete, Staged, assemble
from ckpt.layout.layout import Array, Declaration, Entry, Layout, Part, Staging, are_disjoint
from ckpt.layout.staging import frame_bytes_for, stage
from ckpt.settings import read_settings
from ckpt.storage.url import check_not_dcp
from ckpt.storage.url import open as open_store
from ckpt.store import keys
from ckpt.store.commit import Committer
from ckpt.store.packs import PACK_BYTES, Indices, Written
from ckpt.store.run import Run, RunView
from ckpt.types import CODEC_OPTIONS, ITEMSIZE, Box, CodecOption, Identity, Version, split_by_bytes

LAUNCH = "ckpt.Draft"
BATCH_BYTES = 2 * PACK_BYTES  # of frames that are put together: two packs at once
_DIVISION = "draft"


@dataclass(frozen=True, slots=True)
class DraftBox:
    """A box of a tensor: the tensor's name, dtype (torch's name of it) and global shape, and where the box lies in the
    tensor. `offset` and `size` are in elements, with one number per dimension.
    Errors: UsageError for a dtype that ckpt does not know, or a box outside the tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            known = ", ".join(ITEMSIZE)
            raise UsageError(f"{self.name}: the dtype {self.dtype} cannot be stored; the dtypes are {known}")
        if not Box(self.offset, self.size).within(self.shape):
            raise UsageError(f"{self.name}: a box of {self.size} at {self.offset} does not lie in {self.shape}")

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class DraftPart:
    """The result of one `Draft.write`, for `Draft.commit`. Can be pickled."""

    identity: Identity
    rank: int
    layout: Layout
    staging: Staging
    hashes: npt.NDArray[np.uint64]
    written: Written


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint that is being written straight to the store. Use `begin`; see the module for the three calls."""

    url: str
    identity: Identity
    frame_bytes: int
    codec: CodecOption

    @staticmethod
    def begin(
        url: str, *, step: int | None = None, total_bytes: int = 0, codec: CodecOption = "auto", take_over: bool = False
    ) -> Draft:
        """Claims an epoch at `url` and returns the draft of its one checkpoint.

        `step`: the checkpoint's step; default: the newest step in the store + 1. Checkpoints of that step and of later
        ones become a branch. `total_bytes`: about the size of all tensors; needed above 128 GiB, where frames have to
        be larger. `take_over`: begin even if a living job writes to the URL.

        Errors: UsageError; RunInUse; StorageError."""
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**12):
            raise UsageError(f"step={step!r}: a whole number, 0 or more")
        if codec not in CODEC_OPTIONS:
            raise UsageError(f"codec={codec!r}: one of {', '.join(CODEC_OPTIONS)}")
        frame_bytes = frame_bytes_for(total_bytes)
        check_not_dcp(url)
        settings = read_settings()
        with closing(open_store(url, settings=settings)) as backend:
            run = Run(backend, events=Events())
            view = run.view()
            run.check_not_in_use(view, LAUNCH, settings.heartbeat_s, take_over=take_over)
            version, parent = _place(view, step)
            epoch = run.begin_epoch(view, parent, LAUNCH).epoch
            return Draft(backend.url, Identity(epoch, version), frame_bytes, codec)

    def write(self, rank: int, boxes: Sequence[DraftBox], read: Callable[[int], Any]) -> DraftPart:
        """Puts the bytes of these boxes into packs, and returns the part for `commit`. Each process passes another
        `rank` (0, 1, ...). Each call writes new objects, so a failed call may be repeated.

        `read(i)`: the bytes of boxes[i], row-major, as an object with a contiguous buffer. It is called once for each
        box that is not empty, in this thread. Its buffer is let go once the box is stored. Memory: BATCH_BYTES twice,
        and the buffer of one box.

        Errors: UsageError for a box that cannot be stored; SaveFailed; StorageError; those of `read`."""
        layout, order = _make_layout(boxes)
        share = tuple(Part(*at, 0, boxes[i].bytes) for at, i in order.items())
        staging = stage(layout, share, self.frame_bytes)
        contents = _frames(staging, order, boxes, read)
        hashes = np.zeros((len(staging.frames), 2), np.uint64)
        places: Array = np.zeros(len(staging.frames), PLACE)
        packs: list[tuple[str, int]] = []
        owner, writer, cancel = f"rank-{rank}", keys.new_writer(), threading.Event()
        with closing(open_store(self.url, settings=read_settings())) as backend:
            committer = Committer(backend, writer, self.codec)
            for batch in split_by_bytes(staging.frames["length"].tolist(), BATCH_BYTES):
                raw = list(islice(contents, batch.stop - batch.start))
                hashes[batch] = [frame_hash(each) for each in raw]
                frames: Array = np.zeros(len(raw), FRAME)
                for field in ("length", "dtype"):
                    frames[field] = staging.frames[field][batch]
                frames["hash_hi"], frames["hash_lo"] = hashes[batch].T
                its, at = range(len(raw)), raw.__getitem__
                put = committer.write(self.identity, frames, its, at, owner, writer, cancel, len(packs))
                places[batch] = put.places
                places["pack"][batch] += len(packs)
                packs += put.packs
        return DraftPart(self.identity, rank, layout, staging, hashes, Written(tuple(packs), places))

    def commit(
        self,
        parts: Sequence[DraftPart],
        *,
        values: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> str:
        """Puts the record; returns the checkpoint's identity. The parts together must hold every element of every
        tensor. Boxes of two parts are equal, with the same bytes, or do not overlap.

        `values`: plain values that are not tensors. `metrics`: numbers, as of ck.save(). `about`: small JSON facts.
        Errors: SaveFailed: no record was put, or its outcome is unknown and harmless; UsageError; StorageError."""
        parts = sorted(parts, key=lambda part: part.rank)
        if foreign := {str(part.identity) for part in parts if part.identity != self.identity}:
            raise SaveFailed(f"{self.identity}: a part belongs to another checkpoint, {min(foreign)}")
        shared = memoryview(value_trees.encode(dict(values or {}), "values"))
        blob = Blob(hash_bytes(*frame_hash(shared)), len(shared))
        none = Blob(hash_bytes(*frame_hash(b"")), 0)
        staged = [
            Staged(
                Declaration(number, len(parts), f"rank={part.rank}", _DIVISION, part.layout, part.staging),
                part.hashes,
                blob,
                none,
            )
            for number, part in enumerate(parts)
        ]
        try:
            assembled = assemble(staged)
        except Incomplete as exc:
            raise SaveFailed(f"{self.identity}: {exc}") from exc
        if differing := assembled.differing_tensors:
            raise SaveFailed(f"{self.identity}: the parts differ in {', '.join(differing[:8])}, or their boxes overlap")
        facts = {"host": socket.gethostname(), "launch": LAUNCH, "world": len(parts), "time_s": time.time()}
        with closing(open_store(self.url, settings=read_settings())) as backend:
            run = Run(backend, events=Events())
            Committer(backend, keys.new_writer(), self.codec).commit(
                self.identity,
                assembled.manifest,
                lambda number: shared,
                check=lambda: run.check_not_superseded(self.identity.epoch),
                owner="values",
                metrics=metrics,
                about=facts | dict(about or {}),
                elsewhere=_Stored(parts, assembled.sources),
            )
            run.close_epoch(self.identity.epoch, "the draft is committed")
        return str(self.identity)


def _place(view: RunView, step: int | None) -> tuple[Version, Identity | None]:
    """The version of a new checkpoint, and the checkpoint that it goes on from: the newest one of an earlier step."""
    history = [ref.identity for ref in view.history]
    if step is None:
        step = history[-1].version.step + 1 if history else 0
    older = [identity for identity in history if identity.version.step < step]
    return Version(step), older[-1] if older else None


def _make_layout(boxes: Sequence[DraftBox]) -> tuple[Layout, dict[tuple[int, int], int]]:
    """The layout of these boxes; and by (entry, box), in order, the index of each box that is not empty. Errors:
    UsageError."""
    by_name: dict[str, list[int]] = {}
    for index, each in enumerate(boxes):
        by_name.setdefault(each.name, []).append(index)
    entries: list[Entry] = []
    order: dict[tuple[int, int], int] = {}
    for name, indices in sorted(by_name.items()):
        first = boxes[indices[0]]
        if any((boxes[i].dtype, boxes[i].shape) != (first.dtype, first.shape) for i in indices):
            raise UsageError(f"{name}: its boxes differ in dtype or global shape")
        filled = {Box(boxes[i].offset, boxes[i].size): i for i in indices if math.prod(boxes[i].size)}
        if not are_disjoint(list(filled)):
            raise UsageError(f"{name}: its boxes overlap")
        order.update(((len(entries), number), i) for number, i in enumerate(filled.values()))
        entries.append(Entry(name, first.dtype, first.shape, tuple(filled)))
    return Layout(tuple(entries)), order


def _frames(
    staging: Staging, order: Mapping[tuple[int, int], int], boxes: Sequence[DraftBox], read: Callable[[int], Any]
) -> Iterator[memoryview]:
    """The bytes of each frame, in order. A box is read when the first frame needs it, and let go after the last one."""
    segments: dict[int, list[tuple[int, int, int]]] = {}
    for entry, box, start, length, _, frame in staging.segments.tolist():
        segments.setdefault(frame, []).append((order[entry, box], start, length))
    uses = Counter(index for found in segments.values() for index, _, _ in found)
    held: dict[int, memoryview] = {}
    for number in range(len(staging.frames)):
        parts = []
        for index, start, length in segments.pop(number):
            if index not in held:
                held[index] = _checked(boxes[index], read(index))
            parts.append(held[index][start : start + length])
            uses[index] -= 1
            if not uses[index]:
                del held[index]
        yield parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _checked(box: DraftBox, data: Any) -> memoryview:
    view = memoryview(data)
    if not view.c_contiguous or view.nbytes != box.bytes:
        raise UsageError(
            f"{box.name}: a box of {list(box.size)} has {box.bytes} contiguous bytes, but {view.nbytes} were given"
        )
    return view.cast("B")


class _Stored:
    """The frames that the parts have put already, as the other writers of a commit."""

    def __init__(self, parts: Sequence[DraftPart], sources: Array) -> None:
        self._parts, self._sources = parts, sources

    def __call__(self, todo: Indices) -> list[tuple[Indices, Future[Written]]]:
        found: list[tuple[Indices, Future[Written]]] = []
        for number, part in enumerate(self._parts):
            its = todo[(self._sources["region"][todo] == DATA) & (self._sources["rank"][todo] == number)]
            if len(its):
                future: Future[Written] = Future()
                future.set_result(part.written.of_frames(self._sources["frame"][its]))
                found.append((its, future))
        return found

    def end_commit(self) -> None:
        pass

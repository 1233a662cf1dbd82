"""Deduplication: where each frame of a checkpoint lies in packs, and which frames must be written. Pure.

A frame is not written if the base has an equal one, or if it occurs twice in the checkpoint. One or several writers may
write the rest.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ckpt.format.manifest import FRAME, PLACE, Record
from ckpt.layout.layout import Array
from ckpt.store.packs import Indices, Written, raw_bytes_of

# The share of a base's pack that must still be wanted. Packs below it are not referred to, so that they can be deleted.
REFERRED_SHARE_MIN = 0.5


class Placing:
    """The places of a checkpoint's frames, filled in as its packs are written.

    `frames`: the manifest's. `base`: the record to whose packs unchanged frames may refer, except packs with a key in
    `lost`. `todo`: the numbers of the frames to write; pass each to `add_written` once. After the last `add_written`,
    `places` and `packs` are those of the record. Before the first, `packs` are the base's packs that are referred
    to."""

    def __init__(self, frames: Array, base: Record | None, lost: Collection[str] = ()) -> None:
        self.places: Array = np.zeros(len(frames), PLACE)
        self.packs: list[tuple[str, int]] = []
        self._frames = frames
        new = np.arange(len(frames)) if base is None else self._refer_to_base(base, lost)
        self.frames_to_write, self._duplicates = _split_duplicates(frames, new)

    @property
    def raw_bytes(self) -> int:
        return raw_bytes_of(self._frames)

    @property
    def referred_bytes(self) -> int:
        """Raw bytes of the frames that need not be written."""
        return self.raw_bytes - raw_bytes_of(self._frames[self.frames_to_write])

    def add_written(self, numbers: Indices, written: Written) -> None:
        """Records that one writer has written these frames, in this order."""
        places = written.places.copy()
        places["pack"] += len(self.packs)
        self.packs += written.packs
        self.places[numbers] = places
        for copy, original in self._duplicates:
            self.places[copy] = self.places[original]

    def _refer_to_base(self, base: Record, lost: Collection[str]) -> Indices:
        """Places the frames that `base` holds with equal bytes. Returns the numbers of all other frames."""
        known = {key: i for i, key in enumerate(_frame_keys(base.manifest.frames))}
        found = np.array([known.get(key, -1) for key in _frame_keys(self._frames)], np.int64)
        held = found >= 0
        once = base.places[np.unique(found[held])]
        wanted = np.bincount(once["pack"], once["length"], minlength=len(base.packs))
        worth = wanted >= REFERRED_SHARE_MIN * np.array([size for _, size in base.packs])
        worth &= np.array([key not in lost for key, _ in base.packs], bool)
        held[held] = worth[base.places["pack"][found[held]]]
        referred = Written(base.packs, base.places).of_frames(found[held])
        self.packs, self.places[held] = list(referred.packs), referred.places
        return np.flatnonzero(~held)


def _frame_keys(frames: Array) -> list[bytes]:
    """One key per frame: raw hash, length and dtype. Frames with equal keys have interchangeable encoded bytes."""
    keys_of: list[bytes] = np.ascontiguousarray(frames).view(f"V{FRAME.itemsize}").tolist()
    return keys_of


def _split_duplicates(frames: Array, todo: Indices) -> tuple[Indices, list[tuple[int, int]]]:
    """The number of the first of each set of equal frames; and (number, first) for each of the others."""
    first: dict[bytes, int] = {}
    same_as = []
    for i, key in zip(todo.tolist(), _frame_keys(frames[todo]), strict=True):
        if first.setdefault(key, i) != i:
            same_as.append((i, first[key]))
    return np.array(list(first.values()), np.int64), same_as

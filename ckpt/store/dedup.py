"""Where the frames of one checkpoint lie in packs: what the base holds already, what is there twice, and what has to be
written, by one writer or by several. Pure."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ckpt.format.manifest import FRAME, PLACE, Record
from ckpt.layout.layout import Array
from ckpt.store.packs import Indices, Written, bytes_of

REFERRED_SHARE_MIN = 0.5  # a pack of which less is still wanted is not referred to, so that it can be deleted


class Placing:
    """`frames`: the manifest's. `base`: the record to whose packs unchanged frames may refer, but for those whose keys
    are `lost`. `todo`: the numbers of those that have to be written, each of them in one `add`; after it `places` and
    `packs` are the record's; before, `packs` are those of the base that are referred to."""

    def __init__(self, frames: Array, base: Record | None, lost: Collection[str] = ()) -> None:
        self.places: Array = np.zeros(len(frames), PLACE)
        self.packs: list[tuple[str, int]] = []
        self._frames = frames
        new = np.arange(len(frames)) if base is None else self._refer(base, lost)
        self.todo, self._same_as = _distinct(frames, new)

    @property
    def raw_bytes(self) -> int:
        return bytes_of(self._frames)

    @property
    def referred_bytes(self) -> int:
        """Of the frames that need not be written."""
        return self.raw_bytes - bytes_of(self._frames[self.todo])

    def add(self, numbers: Indices, written: Written) -> None:
        """These frames were written by one writer, in this order."""
        places = written.places.copy()
        places["pack"] += len(self.packs)
        self.packs += written.packs
        self.places[numbers] = places
        for copy, original in self._same_as:
            self.places[copy] = self.places[original]

    def _refer(self, base: Record, lost: Collection[str]) -> Indices:
        """Gives the frames that `base` holds with equal bytes their places there; returns the other frames' numbers."""
        known = {key: i for i, key in enumerate(_keys_of(base.manifest.frames))}
        found = np.array([known.get(key, -1) for key in _keys_of(self._frames)], np.int64)
        held = found >= 0
        once = base.places[np.unique(found[held])]
        wanted = np.bincount(once["pack"], once["length"], minlength=len(base.packs))
        worth = wanted >= REFERRED_SHARE_MIN * np.array([size for _, size in base.packs])
        worth &= np.array([key not in lost for key, _ in base.packs], bool)
        held[held] = worth[base.places["pack"][found[held]]]
        places = base.places[found[held]]
        packs = np.unique(places["pack"])
        self.packs = [base.packs[pack] for pack in packs.tolist()]
        places["pack"] = np.searchsorted(packs, places["pack"])
        self.places[held] = places
        return np.flatnonzero(~held)


def _keys_of(frames: Array) -> list[bytes]:
    """What makes two frames' encoded bytes interchangeable: raw hash, length, dtype."""
    keys_of: list[bytes] = np.ascontiguousarray(frames).view(f"V{FRAME.itemsize}").tolist()
    return keys_of


def _distinct(frames: Array, todo: Indices) -> tuple[Indices, list[tuple[int, int]]]:
    """The first of each set of equal frames; (other, first) for the rest."""
    first: dict[bytes, int] = {}
    same_as = []
    for i, key in zip(todo.tolist(), _keys_of(frames[todo]), strict=True):
        if first.setdefault(key, i) != i:
            same_as.append((i, first[key]))
    return np.array(list(first.values()), np.int64), same_as

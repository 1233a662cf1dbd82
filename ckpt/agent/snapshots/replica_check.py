"""The replica check: compares samples of replicated tensors between the ranks that hold them. Pure.

One rank stages a replicated tensor for all. Each rank sends hashes of samples of its own copy with its staged snapshot;
different samples show that the tensor is not replicated after all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckpt.errors import AgentError
from ckpt.format.declaration import SAMPLE
from ckpt.layout.layout import Layout


@dataclass(frozen=True, slots=True)
class SharedBoxes:
    """Which boxes of different ranks are the same box. `of_rank`: for each rank, in the order of its entries and boxes,
    the number of the shared box, an index of `names`; -1 if the tensor is the rank's own."""

    numbers_by_rank: tuple[npt.NDArray[np.int64], ...]
    tensor_names: tuple[str, ...]


def find_shared_boxes(layouts: Sequence[Layout], differing: Collection[str]) -> SharedBoxes:
    """The shared boxes of these layouts. `differing`: the tensors that are each rank's own. Equal layouts that are one
    object are processed once."""
    numbers: dict[object, int] = {}
    names: list[str] = []
    made: dict[int, npt.NDArray[np.int64]] = {}
    for layout in layouts:
        if id(layout) in made:
            continue
        found: list[int] = []
        for entry in layout.entries:
            if entry.owner or entry.name in differing:
                found += [-1] * len(entry.boxes)
                continue
            for box in entry.boxes:
                number = numbers.setdefault((entry.name, entry.dtype, entry.shape, box), len(names))
                if number == len(names):
                    names.append(entry.name)
                found.append(number)
        made[id(layout)] = np.array(found, np.int64)
    return SharedBoxes(tuple(made[id(layout)] for layout in layouts), tuple(names))


class ReplicaCheck:
    """Compares the samples of one save attempt at a time, the one of the newest call. `differing`: the tensors that
    were seen to differ, in any attempt."""

    def __init__(self) -> None:
        self.differing: frozenset[str] = frozenset()
        self._attempt: tuple[int, SharedBoxes] | None = None
        self._sample_hashes: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._has_sample: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        # The number of the save attempt, and the hashes by tensor and box.
        self._long_samples: tuple[int, dict[tuple[str, tuple[int, ...]], bytes]] = 0, {}

    def find_differing(
        self, number: int, places: SharedBoxes | None, rank: int, samples: object, long_sample: object = None
    ) -> list[str]:
        """The tensors that are seen to differ for the first time: samples of this rank differ from those of another
        one, in save attempt `number`. `places`: None if the rank staged by another division. `samples`: an array of
        SAMPLE. `long_sample`: of one box the name of its tensor, its offset and shape, and a hash.
        Errors: AgentError for malformed samples."""
        found: set[str] = set()
        if places is not None and isinstance(samples, bytes):
            found = self._compare(number, places, rank, samples)
        if isinstance(long_sample, list) and len(long_sample) == 3 and isinstance(long_sample[2], bytes):
            name, box, digest = str(long_sample[0]), tuple(int(each) for each in long_sample[1]), long_sample[2]
            if self._long_samples[0] != number:
                self._long_samples = number, {}
            if self._long_samples[1].setdefault((name, box), digest) != digest:
                found.add(name)
        new = found - self.differing
        self.differing |= new
        return sorted(new)

    def _compare(self, number: int, places: SharedBoxes, rank: int, data: bytes) -> set[str]:
        of_rank = places.numbers_by_rank[rank]
        if len(data) % SAMPLE.itemsize:
            raise AgentError(f"samples of {len(data)} bytes: not a whole number of them")
        found = np.frombuffer(data, SAMPLE)
        if len(found) and int(found["box"].max()) >= len(of_rank):
            raise AgentError(f"a sample of box {int(found['box'].max())}, where the rank has {len(of_rank)}")
        if self._attempt is None or self._attempt[0] != number or self._attempt[1] is not places:
            self._attempt = number, places
            self._sample_hashes = np.zeros(len(places.tensor_names), np.uint64)
            self._has_sample = np.zeros(len(places.tensor_names), np.bool_)
        box = of_rank[found["box"]]
        is_shared = box >= 0
        box, said = box[is_shared], found["hash"][is_shared].astype(np.uint64)
        wrong = self._has_sample[box] & (self._sample_hashes[box] != said)
        new = ~self._has_sample[box]
        self._sample_hashes[box[new]] = said[new]
        self._has_sample[box[new]] = True
        return {places.tensor_names[each] for each in box[wrong].tolist()}

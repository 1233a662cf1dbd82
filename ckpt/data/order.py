"""The order of the samples, and the position in it: pure functions, without torch and without ranks that talk.

Guarantees:

- The order of an epoch is a function of (seed, epoch, size) alone. No version of ckpt changes it (a test pins it).
- The job's position is one number in an epoch: how many samples of the order all ranks together have been handed.
- Each batch of the job is the next run of the order, and the ranks divide it. So any sequence of world sizes, batch
  sizes and restarts hands out each index once an epoch.

The order of a large dataset is a keyed permutation, computed for one batch at a time: a Feistel network over the
smallest number of bits that holds the size, repeated until the value lies within the size (Black and Rogaway 2002,
"Ciphers with Arbitrary Finite Domains", cycle walking). It takes no memory, whatever the size. Few bits permute badly,
so a small dataset is sorted by hashes.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.uint64]
ROUNDS = 6
SORTED_MAX = 1 << 16  # the largest dataset whose order is held in memory, 8 bytes for each index


@dataclass(frozen=True, slots=True)
class Position:
    """Where the job stands: `samples` of the order of `epoch` were handed out. `samples` passes the epoch's size if the
    last batch took samples of the next epoch."""

    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """The order of `size` indices in each epoch. Without `shuffle` it is 0, 1, 2, ..."""

    size: int
    seed: int = 0
    shuffle: bool = True

    def indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """The indices at places `start` to `stop` of an epoch. Places beyond its size lie in the next epochs."""
        found: list[int] = []
        while start < stop:
            later, first = divmod(start, self.size)
            last = min(self.size, first + stop - start)
            found += self._within(epoch + later, first, last)
            start += last - first
        return found

    def _within(self, epoch: int, start: int, stop: int) -> list[int]:
        if self.shuffle and self.size <= SORTED_MAX:
            in_order: list[int] = _sort_by_hashes(self.size, self.seed, epoch)[start:stop].tolist()
            return in_order
        places = np.arange(start, stop, dtype=np.uint64)
        if self.shuffle:
            keys, bits = _round_keys(self.seed, epoch), (self.size - 1).bit_length()
            places = _permute(places, keys, bits)
            while (outside := np.flatnonzero(places >= self.size)).size:
                places[outside] = _permute(places[outside], keys, bits)
        found: list[int] = places.tolist()
        return found


@dataclass(frozen=True, slots=True)
class Batches:
    """How the job's batches divide an epoch of `size` samples: `batch_size` samples for each of `world` ranks.

    The last batch of an epoch is short, and the ranks divide it evenly. A last batch with fewer samples than ranks
    takes one sample for each rank, the missing ones from the next epoch, which then lacks them. With `drop_last` what
    is left of an epoch is dropped if it fills no whole batch."""

    size: int
    batch_size: int
    world: int = 1
    drop_last: bool = False

    def next_samples(self, position: Position) -> int:
        """The number of samples in the job's next batch; 0: the epoch has ended."""
        left, whole = self.size - position.samples, self.batch_size * self.world
        if left <= 0 or (self.drop_last and left < whole):
            return 0
        return max(self.world, min(left, whole))

    def share(self, position: Position, rank: int) -> tuple[int, int]:
        """The places (start, stop) of the next batch that a rank gets."""
        count = self.next_samples(position)
        return position.samples + count * rank // self.world, position.samples + count * (rank + 1) // self.world

    def advance(self, position: Position) -> Position:
        """The position after the next batch."""
        return Position(position.epoch, position.samples + self.next_samples(position))

    def begin_next_epoch(self, position: Position) -> Position:
        """The position where the epoch after the one of `position` begins."""
        ended, ahead = divmod(position.samples, self.size)
        return Position(position.epoch + ended, ahead) if ended else Position(position.epoch + 1, 0)


@functools.lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return tuple(np.frombuffer(digest, "<u8"))


@functools.lru_cache(maxsize=4)
def _sort_by_hashes(size: int, seed: int, epoch: int) -> npt.NDArray[np.intp]:
    first, second, *_ = _round_keys(seed, epoch)
    return np.argsort(_mix(_mix(np.arange(size, dtype=np.uint64) + first) + second), kind="stable")


def _permute(numbers: Numbers, keys: tuple[np.uint64, ...], bits: int) -> Numbers:
    """Permutes the numbers of `bits` bits: the two halves are changed in turn, each by a function of the other."""
    half = np.uint64(bits // 2)
    low_mask, high_mask = (np.uint64(1) << half) - np.uint64(1), np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = numbers >> half, numbers & low_mask
    for high_key, low_key in zip(keys[::2], keys[1::2], strict=True):
        high ^= _mix(low + high_key) & high_mask
        low ^= _mix(high + low_key) & low_mask
    return (high << half) | low


def _mix(x: Numbers) -> Numbers:
    """Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators": the finalizer mix64variant13."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

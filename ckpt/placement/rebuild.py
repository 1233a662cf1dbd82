"""Which ranks' snapshots can be made again from parity, and from which bytes: what plan.stripes does for a placement,
carried over to one checkpoint.

What a rank staged is a row of bytes (its frames, end to end). What a node has is those of its ranks, one after the
other; a part of a stripe is bytes of that, which are `Run`s of one rank or several. A stripe says of itself what it is
made of, so that nobody has to know any more who was where: a byte of it is known where its rank is held by somebody,
and unknown where not; and as many unknown bytes come back as there are parities.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt.errors import UsageError
from ckpt.placement.stripes import Stripe, StripePart

STRIPE_BYTES_MAX = 1 << 60


@dataclass(frozen=True, order=True, slots=True)
class StagedRun:
    """Bytes [start, stop) of what that rank staged."""

    rank: int
    start: int
    stop: int


Source = tuple[StagedRun, ...]  # laid end to end from the stripe's first byte on, and followed by zeros


@dataclass(frozen=True, order=True, slots=True)
class Striped:
    """A stripe of `length` bytes. The place of a source among `sources` is its weight in the parity. Errors: UsageError
    for what cannot be: so no message makes one."""

    length: int
    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        if not 0 < self.length <= STRIPE_BYTES_MAX or not self.sources or not all(self.sources):
            raise UsageError(f"a stripe of {self.length} bytes and {len(self.sources)} members")
        runs = [run for source in self.sources for run in source]
        if any(run.rank < 0 or not 0 <= run.start < run.stop for run in runs):
            raise UsageError("a stripe with bytes that no rank can have")
        if any(sum(run.stop - run.start for run in source) > self.length for source in self.sources):
            raise UsageError("a stripe with more bytes of a member than it is long")

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(run.rank for source in self.sources for run in source)

    def rows(self) -> list[list[list[int]]]:
        """Its sources, for a message."""
        return [[[run.rank, run.start, run.stop] for run in source] for source in self.sources]

    @staticmethod
    def of(length: int, rows: Sequence[Sequence[Sequence[int]]]) -> Striped:
        """Errors: UsageError, ValueError, TypeError, OverflowError."""
        return Striped(int(length), tuple(tuple(StagedRun(*map(int, run)) for run in source) for source in rows))


@dataclass(frozen=True, slots=True)
class StripeWindow:
    """Bytes [start, stop) of a stripe, within which no run begins or ends. `runs`: by the place of their source, what
    lies there; sources that ended before are zeros. `unknown`: places of those whose rank nobody holds."""

    striped: Striped
    start: int
    stop: int
    runs: Mapping[int, StagedRun]
    unknown: tuple[int, ...]

    def cut(self, most: int) -> Iterator[StripeWindow]:
        """In parts of at most so many bytes."""
        for start in range(self.start, self.stop, most):
            stop, past = min(start + most, self.stop), start - self.start
            runs = {
                place: StagedRun(run.rank, run.start + past, run.start + past + stop - start)
                for place, run in self.runs.items()
            }
            yield StripeWindow(self.striped, start, stop, runs, self.unknown)


def stripes_of(
    planned: Sequence[Stripe], sizes: Sequence[Sequence[tuple[int, int]]]
) -> list[tuple[Striped, tuple[int, ...]]]:
    """The stripes of one checkpoint, each with its holders, from those that were planned for a group. `sizes`: of each
    member, (rank, bytes) in order: no more in all than was planned for, since what is planned is what is kept free.

    Errors: UsageError where a member has more."""
    room = [0] * len(sizes)
    for stripe in planned:
        for part in stripe.parts:
            room[part.member] = max(room[part.member], part.stop)
    for member, ranks in enumerate(sizes):
        total = sum(size for _, size in ranks)
        if total > room[member]:
            raise UsageError(f"ranks {[rank for rank, _ in ranks][:8]} staged {total} bytes, of {room[member]} planned")
    found = []
    for stripe in planned:
        sources = tuple(source for part in stripe.parts if (source := _runs(part, sizes[part.member])))
        if sources:
            length = max(sum(run.stop - run.start for run in source) for source in sources)
            found.append((Striped(length, sources), stripe.holders))
    return found


def _runs(part: StripePart, sizes: Sequence[tuple[int, int]]) -> Source:
    found, at = [], 0
    for rank, size in sizes:
        start, stop = max(part.start - at, 0), min(part.stop - at, size)
        if start < stop:
            found.append(StagedRun(rank, start, stop))
        at += size
    return tuple(found)


def windows(striped: Striped, missing: Collection[int]) -> Iterator[StripeWindow]:
    """All of a stripe, where these ranks are held by nobody."""
    begins: list[tuple[int, int, StagedRun]] = []  # (first byte of the stripe, place of the source, run)
    bounds = {0}
    for place, source in enumerate(striped.sources):
        at = 0
        for run in source:
            begins.append((at, place, run))
            at += run.stop - run.start
            bounds.add(at)
    begins.sort(reverse=True)
    here: dict[int, tuple[int, StagedRun]] = {}  # the last one of each source that has begun
    for start, stop in itertools.pairwise(sorted(bounds)):
        while begins and begins[-1][0] == start:
            first, place, run = begins.pop()
            here[place] = first, run
        runs = {
            place: StagedRun(run.rank, run.start + start - first, run.start + stop - first)
            for place, (first, run) in sorted(here.items())
            if start < first + run.stop - run.start
        }
        yield StripeWindow(striped, start, stop, runs, tuple(p for p, run in runs.items() if run.rank in missing))


def solvable(missing: Collection[int], rows: Mapping[Striped, Collection[int]]) -> Iterator[StripeWindow]:
    """Where bytes of these ranks can be made again. `rows`: which parities of each stripe are held."""
    missing = frozenset(missing)
    for striped, held in rows.items():
        if missing.isdisjoint(striped.ranks):
            continue
        for window in windows(striped, missing):
            if 0 < len(window.unknown) <= len(held):
                yield window


def rebuildable(
    missing: Collection[int], sizes: Mapping[int, int], rows: Mapping[Striped, Collection[int]]
) -> frozenset[int]:
    """Which of these ranks, that nobody holds, can be made again as a whole. `sizes`: bytes that a rank staged, of all
    that are known; of others nothing can."""
    found: dict[int, list[tuple[int, int]]] = {rank: [] for rank in missing}
    for window in solvable(missing, rows):
        for place in window.unknown:
            run = window.runs[place]
            found[run.rank].append((run.start, run.stop))
    return frozenset(rank for rank, parts in found.items() if rank in sizes and _covers(parts, sizes[rank]))


def protected(
    holders: Mapping[int, Collection[str]],
    sizes: Mapping[int, int],
    rows: Mapping[Striped, Mapping[int, Collection[str]]],
    losses: int,
) -> frozenset[int]:
    """Ranks that any so many nodes may be lost of, by parity alone. `holders`: by rank, which nodes have what it
    staged; `rows`: of each stripe, which nodes keep which parity. It may leave out ranks of which that is so, too."""
    found: dict[int, list[tuple[int, int]]] = {}
    for striped, held in rows.items():
        at = Counter(name for names in held.values() for name in set(names))
        for source in sorted(striped.sources, key=lambda source: max(len(holders.get(run.rank, ())) for run in source)):
            at.update(_needed(source, holders, losses, at))
        worst = sum(count for _, count in at.most_common(losses))
        if all(holders.get(rank) for rank in striped.ranks) and worst <= len(held):
            for run in (run for source in striped.sources for run in source):
                found.setdefault(run.rank, []).append((run.start, run.stop))
    return frozenset(rank for rank, parts in found.items() if rank in sizes and _covers(parts, sizes[rank]))


def _needed(
    source: Source, holders: Mapping[int, Collection[str]], losses: int, at: Mapping[str, int]
) -> frozenset[str]:
    """Nodes of which one is lost wherever so many are and bytes of the source with them. Of several that have a rank's
    snapshot, as where it was made again though its node is there, that is one; the one with the least of the stripe,
    by `at`."""
    found: frozenset[str] = frozenset()
    weak = [names for run in source if 0 < len(names := frozenset(holders.get(run.rank, ()))) <= losses]
    for names in [frozenset.intersection(*weak), *weak] if weak else []:
        if names and found.isdisjoint(names):
            found |= {min(names, key=lambda name: (at.get(name, 0), name))}
    return found


def _covers(parts: Sequence[tuple[int, int]], size: int) -> bool:
    at = 0
    for start, stop in sorted(parts):
        if start > at:
            return False
        at = max(at, stop)
    return at >= size

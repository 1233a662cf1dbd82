"""The rebuild plan: decides which ranks' snapshots can be rebuilt from parity, and from which bytes. Pure.

It applies the stripes of a placement (placement/stripes.py) to one checkpoint. The staged frames of a rank, end to end,
are a row of bytes. The data of a node is the rows of its ranks, one after the other. So a part of a stripe consists of
`StagedRun`s of one or more ranks. A stripe names its own sources, so a rebuild does not need to know which rank was on
which node. A byte of a source is known if some node holds the rank's snapshot. At one place of a stripe, as many
unknown bytes can be rebuilt as parities are held.
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
    """The bytes [start, stop) of the data that a rank staged."""

    rank: int
    start: int
    stop: int


# Runs laid end to end from the stripe's first byte on, padded with zeros.
Source = tuple[StagedRun, ...]


@dataclass(frozen=True, order=True, slots=True)
class Striped:
    """A stripe of `length` bytes. The index of a source in `sources` determines its weight in the parity. Errors:
    UsageError for impossible values, so that no message can create such a stripe."""

    length: int
    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        if not 0 < self.length <= STRIPE_BYTES_MAX or not self.sources or not all(self.sources):
            raise UsageError(f"a stripe cannot have {self.length} bytes and {len(self.sources)} members")
        runs = [run for source in self.sources for run in source]
        if any(run.rank < 0 or not 0 <= run.start < run.stop for run in runs):
            raise UsageError("a stripe names bytes that no rank can have")
        if any(sum(run.stop - run.start for run in source) > self.length for source in self.sources):
            raise UsageError("a stripe has more bytes of one member than its length")

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(run.rank for source in self.sources for run in source)

    def source_rows(self) -> list[list[list[int]]]:
        """Its sources, as fields of a message."""
        return [[[run.rank, run.start, run.stop] for run in source] for source in self.sources]

    @staticmethod
    def from_rows(length: int, rows: Sequence[Sequence[Sequence[int]]]) -> Striped:
        """The stripe whose `rows` came in a message. Errors: UsageError, ValueError, TypeError, OverflowError."""
        return Striped(int(length), tuple(tuple(StagedRun(*map(int, run)) for run in source) for source in rows))


@dataclass(frozen=True, slots=True)
class StripeWindow:
    """The bytes [start, stop) of a stripe, within which no run begins or ends.

    `runs`: by index of the source, the bytes that lie there; sources that ended before are left out (zeros).
    `unknown_sources`: indices of the sources whose rank no node holds."""

    stripe: Striped
    start: int
    stop: int
    runs: Mapping[int, StagedRun]
    unknown_sources: tuple[int, ...]

    def split(self, most: int) -> Iterator[StripeWindow]:
        """The window in parts of at most `most` bytes."""
        for start in range(self.start, self.stop, most):
            stop, past = min(start + most, self.stop), start - self.start
            runs = {
                place: StagedRun(run.rank, run.start + past, run.start + past + stop - start)
                for place, run in self.runs.items()
            }
            yield StripeWindow(self.stripe, start, stop, runs, self.unknown_sources)


def stripes_of(
    planned: Sequence[Stripe], sizes: Sequence[Sequence[tuple[int, int]]]
) -> list[tuple[Striped, tuple[int, ...]]]:
    """The stripes of one checkpoint with their holders, from the stripes `planned` for a group.

    `sizes`: for each member, (rank, staged bytes) in order. Errors: UsageError if a member staged more bytes than were
    planned for it, since only the planned memory is kept free."""
    room = [0] * len(sizes)
    for stripe in planned:
        for part in stripe.parts:
            room[part.member] = max(room[part.member], part.stop)
    for member, ranks in enumerate(sizes):
        total = sum(size for _, size in ranks)
        if total > room[member]:
            raise UsageError(
                f"ranks {[rank for rank, _ in ranks][:8]} staged {total} bytes; {room[member]} bytes were planned"
            )
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
    """The windows that make up a stripe. `missing`: the ranks that no node holds."""
    begins: list[tuple[int, int, StagedRun]] = []  # (first byte of the stripe, place of the source, run)
    bounds = {0}
    for place, source in enumerate(striped.sources):
        at = 0
        for run in source:
            begins.append((at, place, run))
            at += run.stop - run.start
            bounds.add(at)
    begins.sort(reverse=True)
    here: dict[int, tuple[int, StagedRun]] = {}  # by source, the last run that has begun, with its first byte
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


def solvable_windows(missing: Collection[int], rows: Mapping[Striped, Collection[int]]) -> Iterator[StripeWindow]:
    """The windows in which bytes of the `missing` ranks can be rebuilt. `rows`: for each stripe, the parities held."""
    missing = frozenset(missing)
    for striped, held in rows.items():
        if missing.isdisjoint(striped.ranks):
            continue
        for window in windows(striped, missing):
            if 0 < len(window.unknown_sources) <= len(held):
                yield window


def rebuildable_ranks(
    missing: Collection[int], sizes: Mapping[int, int], rows: Mapping[Striped, Collection[int]]
) -> frozenset[int]:
    """The ranks among `missing` whose snapshots can be rebuilt whole. `missing`: the ranks that no node holds. `sizes`:
    staged bytes by rank; a rank without a known size cannot be rebuilt. `rows`: as in `solvable_windows`."""
    found: dict[int, list[tuple[int, int]]] = {rank: [] for rank in missing}
    for window in solvable_windows(missing, rows):
        for place in window.unknown_sources:
            run = window.runs[place]
            found[run.rank].append((run.start, run.stop))
    return frozenset(rank for rank, parts in found.items() if rank in sizes and _covers(parts, sizes[rank]))


def protected_ranks(
    holders: Mapping[int, Collection[str]],
    sizes: Mapping[int, int],
    rows: Mapping[Striped, Mapping[int, Collection[str]]],
    losses: int,
) -> frozenset[int]:
    """The ranks whose snapshots survive the loss of any `losses` nodes by parity alone. It may miss some of them.

    `holders`: by rank, the nodes that have its snapshot. `sizes`: staged bytes by rank. `rows`: for each stripe and
    parity, the nodes that keep it."""
    found: dict[int, list[tuple[int, int]]] = {}
    for striped, held in rows.items():
        at = Counter(name for names in held.values() for name in set(names))
        for source in sorted(striped.sources, key=lambda source: max(len(holders.get(run.rank, ())) for run in source)):
            at.update(_critical_nodes(source, holders, losses, at))
        worst = sum(count for _, count in at.most_common(losses))
        if all(holders.get(rank) for rank in striped.ranks) and worst <= len(held):
            for run in (run for source in striped.sources for run in source):
                found.setdefault(run.rank, []).append((run.start, run.stop))
    return frozenset(rank for rank, parts in found.items() if rank in sizes and _covers(parts, sizes[rank]))


def _critical_nodes(
    source: Source, holders: Mapping[int, Collection[str]], losses: int, at: Mapping[str, int]
) -> frozenset[str]:
    """Nodes of which at least one is lost whenever `losses` nodes are lost and bytes of the source with them.

    A rank's snapshot may be on several nodes, as after a rebuild. Then one of them suffices: the node with the least
    of the stripe, by `at`."""
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

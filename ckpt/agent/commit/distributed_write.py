"""The parts of a commit of several nodes: each writes the frames that it holds, or who has copies of them does, or who
makes them again from parity. That of the node that commits is one of them: where its own way to the store is the slow
one, another writes that part too.

Every try at a part has keys of its own (StoreSide.write), so that two may be under way at once. Which of them counts is
decided on the main thread; nothing refers to what the other has put, and prune deletes it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckpt.agent.commit.store_client import StoreClient
from ckpt.agent.commit.write_timeout import overdue_s
from ckpt.agent.snapshots.remote_share import WantedPart
from ckpt.clock import Clock, SystemClock
from ckpt.errors import AgentError
from ckpt.ipc.arena import Arena

if TYPE_CHECKING:
    from ckpt.agent.commit.store_client import JobOptions
    from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
    from ckpt.store.packs import Indices, Written

log = logging.getLogger("ckpt")

# Who has copies of what that node staged, or can make them now, best first: (its name; whether also while it is there,
# but is slow, or its store refuses it).
Others = Callable[[str, bool], Sequence[str]]
# What hears what was written, or why nothing was.
Then = Callable[["Written | None", str], None]
# Has a node write these frames: (its name, "" for this one; what; slow; cancel; then). `slow`: nodes that have enough
# to do, and of which nothing is wanted for it. `cancel` is set once nobody waits for it any more. This node heeds it:
# what is being put is broken off, and nothing more is; other nodes are told of a whole commit only (see give_up).
Ask = Callable[[str, WantedPart, frozenset[str], threading.Event, Then], None]


def write_part(
    store: StoreClient,
    wanted: WantedPart,
    arenas: Mapping[int, Arena],
    moved: Callable[[], None] = lambda: None,
    cancel: threading.Event | None = None,
) -> Written:
    """On a thread: puts these frames into packs of this node's. `moved`: told of each frame as its turn comes.
    `cancel`: set it to give up; the arenas may be filled anew then, since nobody refers to what is put still.
    Errors: AgentError where a frame lies outside its arena; SaveFailed; StorageError."""
    lengths = wanted.frames["length"].astype(np.int64)
    for rank, arena in arenas.items():
        ours = wanted.ranks == rank
        offsets, ends = wanted.offsets[ours], wanted.offsets[ours] + lengths[ours]
        if len(offsets) and (offsets.min() < 0 or ends.max() > arena.bytes):
            raise AgentError(f"a frame lies outside the arena of rank {rank}")

    def frame(i: int) -> memoryview:
        moved()
        return arenas[int(wanted.ranks[i])].part((int(wanted.offsets[i]), int(lengths[i])))

    return store.write(wanted.identity, wanted.frames, frame, wanted.codec, wanted.bandwidth, cancel)


@dataclass(slots=True)
class _Part:
    """What one node was asked to write. `names`: who else may be asked, best first."""

    name: str
    wanted: WantedPart
    nbytes: int
    future: Future[Written]
    names: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)  # who has not answered
    failed: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    is_timed: bool = False  # it will be looked at
    is_refused: bool = False  # by a node that is there
    cancel: threading.Event = field(default_factory=threading.Event)


class DistributedWrite:
    """The parts of one commit: see store.commit.Elsewhere. `ranks`: of each node, by its name, "" for this one.
    `others`: see Others: they write a node's part if that one cannot, or has taken too long by `overdue_s`, with this
    margin; who is first counts. Once a node has failed, those are asked anew that could not while it was only slow.
    `ask`: see Ask. Both run on the main thread, as `post` makes it; so does what `later` is given."""

    def __init__(
        self,
        checkpoint: MemoryCheckpoint,
        options: JobOptions,
        ranks: Mapping[str, frozenset[int]],
        others: Others,
        ask: Ask,
        post: Callable[[Callable[[], None]], None],
        later: Callable[[float, Callable[[], None]], None],
        margin_s: float,
        clock: Clock | None = None,
        spared: frozenset[str] = frozenset(),
        safe: Callable[[], bool | None] = lambda: True,
    ) -> None:
        """`spared`: nodes that may be gone before they have written anything: who has copies is asked first. `safe`:
        whether all copies, or parity, are where they should be; None: they are on their way. Before that nobody else
        is asked while a node has not failed, since he may have none yet; and while they are on their way those that
        have failed are asked once more when they are there."""
        self._spared, self._safe = spared, safe
        self._checkpoint, self._options = checkpoint, options
        self._ranks, self._others, self._ask, self._post = ranks, others, ask, post
        self._later, self._margin_s, self._clock = later, margin_s, clock or SystemClock()
        self._began_s = 0.0
        self._parts: list[_Part] = []
        self._over = False
        self._written: list[tuple[float, int]] = []  # of the parts that are, those by which others are late

    def __call__(self, todo: Indices) -> list[tuple[Indices, Future[Written]]]:
        """On the thread that commits."""
        made = self._checkpoint
        found: list[tuple[Indices, Future[Written]]] = []
        self._began_s = self._clock.now_s()
        for name, numbers in _by_node(self._ranks, made.ranks, todo).items():
            frames, at = made.manifest.frames[numbers], (made.ranks[numbers], made.offsets[numbers])
            codec, bandwidth = self._options.codec, self._options.limits.bandwidth
            wanted = WantedPart(made.identity, frames, *at, codec, bandwidth)
            future: Future[Written] = Future()
            part = _Part(name, wanted, int(frames["length"].sum()), future)
            self._parts.append(part)
            found.append((numbers, future))
        if self._over:
            self._fail("it was given up")
        for part in self._parts:
            self._post(functools.partial(self._begin, part))
        return found

    def ended(self) -> None:
        for part in self._parts:
            part.cancel.set()  # at once: at the agent's end nobody posts any more, and the threads are waited for
        self._post(self._end)

    def abandon(self, why: str) -> None:
        """On the main thread: whatever is not written yet is not waited for."""
        self._over = True
        self._fail(why)

    def give_up(self) -> set[str]:
        """The same, for another commit: who still writes some of it is to be told, by name."""
        self.abandon("it was given up")
        return {name for part in self._parts for name in part.asked} - {""}

    # -- inside; on the main thread

    def _end(self) -> None:
        self._over = True

    def _fail(self, why: str) -> None:
        for part in self._parts:
            part.cancel.set()
            with contextlib.suppress(InvalidStateError):  # it is written
                part.future.set_exception(AgentError(why))

    def _begin(self, part: _Part) -> None:
        if self._over:
            return
        spared = part.name in self._spared and self._safe()
        others = [name for name in self._left(part, slow=False) if name not in self._spared] if spared else []
        if others:
            part.names = [*others[1:], part.name]
            self._have_written(part, others[0])
        else:
            self._have_written(part, part.name)

    def _have_written(self, part: _Part, name: str) -> None:
        def answered(result: Written | None, error: str) -> None:
            part.asked.discard(name)
            if part.future.done() or self._over:
                return  # another one was first, or nobody waits any more
            if result is not None:
                part.cancel.set()
                part.future.set_result(result)
                self._is_written(part.nbytes)
                return
            part.failed.add(name)
            why = f"{_node(name)} has not written {'its' if name == part.name else 'that'} part: {error}"
            if name == part.name:
                part.errors.insert(0, why)  # it says more than why nobody else could
                part.names = self._left(part, slow=False)
            else:
                part.errors.append(why)
            if not self._have_another_write(part, why):
                self._give_up_or_wait()

        # Once the node itself has failed no other is left out: the part may need all that there is.
        slow = frozenset({part.name}) if part.is_refused or part.name in part.asked else frozenset[str]()
        if part.name in part.asked:
            slow |= self._slow()
        part.asked.add(name)
        self._ask(name, part.wanted, slow, part.cancel, answered)

    def _have_another_write(self, part: _Part, why: str) -> bool:
        """The next who has a copy, or can make one; False where there is none."""
        if not part.names:
            return False
        log.warning("%s; another one that has a copy, or makes one, does", why)
        self._have_written(part, part.names.pop(0))
        return True

    def _give_up_or_wait(self) -> None:
        """Of the parts that nobody writes any more. What a node that is there cannot write, and of which nobody has
        copies, is made in its place only once the store has taken any part: else it may well be the store that refuses
        all, and each node's would be made for nothing. The node that commits has the record to put as well: where the
        store takes nothing of it that is not waited for."""
        for part in self._parts:
            if part.future.done() or part.asked or not part.errors:
                continue
            is_open = part.name != "" and any(self._is_under_way(each) for each in self._parts)
            may_take = bool(self._written) or is_open
            if may_take and self._safe() is None and self._left(part, slow=True):
                part.failed.clear()  # who had no copy may have one then
                self._look_again(part, self._margin_s)
                continue
            part.names = self._untried(part, slow=False)
            part.is_refused = not part.names
            if part.is_refused and may_take:
                part.names = self._untried(part, slow=True)
                if part.names and not self._written:
                    continue
            if not self._have_another_write(part, part.errors[0]):
                part.future.set_exception(AgentError(part.errors[0]))

    def _untried(self, part: _Part, slow: bool) -> list[str]:
        return [name for name in self._left(part, slow) if name not in part.failed]

    @staticmethod
    def _is_under_way(part: _Part) -> bool:
        return not part.future.done() and bool(part.asked or not part.errors)

    def _left(self, part: _Part, slow: bool) -> list[str]:
        """Who else may be asked for it now, best first: those that are slow themselves last."""
        names = [name for name in self._others(part.name, slow) if name not in part.asked]
        return sorted(names, key=self._slow().__contains__) if slow else names

    def _slow(self) -> frozenset[str]:
        """The nodes that should have answered by now and have not, be it that another one was first."""
        return frozenset(
            part.name
            for part in self._parts
            if part.name in part.asked and (part.future.done() or len(part.asked) > 1 or self._is_overdue(part))
        )

    def _is_written(self, nbytes: int) -> None:
        """So much is, and by that others may be late: by the slowest, or by the slowest for its bytes (overdue_s)."""
        if nbytes:
            written = [*self._written, (self._since_s, nbytes)]
            self._written = [max(written), max(written, key=lambda each: each[0] / each[1])]
        for part in self._parts:
            self._look(part)
        self._give_up_or_wait()

    def _look(self, part: _Part) -> None:
        due_s = self._due_s(part)
        if self._over or part.future.done() or due_s is None or part.errors or len(part.asked) > 1:
            return  # whoever failed has been followed by another; and of those that are slow one is enough
        left_s = max(due_s - self._since_s, 0.0 if self._safe() else self._margin_s)
        if left_s > 0:
            self._look_again(part, left_s)
            return
        part.names = part.names or self._left(part, slow=True)
        slow = f"{_node(part.name)} takes longer than {due_s:.1f} s for its part"
        self._have_another_write(part, slow)

    def _look_again(self, part: _Part, after_s: float) -> None:
        def look() -> None:
            part.is_timed = False
            self._look(part)
            if not self._over:
                self._give_up_or_wait()

        if not part.is_timed:  # it is due no earlier by what is written meanwhile
            part.is_timed = True
            self._later(after_s, look)

    def _is_overdue(self, part: _Part) -> bool:
        due_s = self._due_s(part)
        return due_s is not None and due_s <= self._since_s

    def _due_s(self, part: _Part) -> float | None:
        return overdue_s(self._written, part.nbytes, self._margin_s)

    @property
    def _since_s(self) -> float:
        return self._clock.now_s() - self._began_s


def _node(name: str) -> str:
    return f"node {name}" if name else "this node"


def _by_node(
    ranks: Mapping[str, frozenset[int]], of_frames: npt.NDArray[np.int64], todo: Indices
) -> dict[str, Indices]:
    """Which of the frames `todo` lie on each of these nodes, in that order; without those on which none do. `ranks`: of
    each node. In one pass over the frames, however many nodes there are."""
    names, world = list(ranks), 1 + max(int(of_frames.max(initial=0)), *map(max, ranks.values()), 0)
    node_of = np.full(world, len(names))
    for number, name in enumerate(names):
        node_of[list(ranks[name])] = number
    nodes = node_of[of_frames[todo]]
    order = np.argsort(nodes, kind="stable")
    bounds = np.searchsorted(nodes[order], np.arange(len(names) + 1))
    found = {name: todo[order[bounds[number] : bounds[number + 1]]] for number, name in enumerate(names)}
    return {name: numbers for name, numbers in found.items() if len(numbers)}

"""The distributed write of one commit: each node writes the frames that it holds. If a node fails or is slow, a holder
of its replica writes that part, or a node that rebuilds the part from parity. This applies to the committing node's own
part too.

Each attempt at a part has keys of its own (StoreClient.write), so two attempts may run at once. The main thread decides
which attempt counts. Nothing refers to the packs of the other attempt, and prune deletes them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckpt.agent.commit.store_client import StoreClient
from ckpt.agent.commit.write_timeout import overdue_s
from ckpt.agent.snapshots.remote_share import WriteRequest
from ckpt.clock import Clock, SystemClock
from ckpt.errors import AgentError
from ckpt.ipc.arena import Arena

if TYPE_CHECKING:
    from ckpt.agent.commit.store_client import JobOptions
    from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
    from ckpt.store.packs import Indices, Written

log = logging.getLogger("ckpt")

# Returns the nodes that have a replica of a node's part, or can rebuild it now, best first. Arguments: the node's name;
# True to include rebuilds while that node is reachable but slow or failing.
FindProviders = Callable[[str, bool], Sequence[str]]
# Called with what was written, or with None and the reason.
OnWritten = Callable[["Written | None", str], None]
# Has a node write frames. Arguments: its name ("" for this node), the frames, `slow`, `cancel`, the callback. `slow`:
# busy nodes that a rebuild should not use. `cancel`: set once nobody waits for the result. This node then stops its
# puts at once. Other nodes are told only if the whole commit is given up (see give_up).
RequestWrite = Callable[[str, WriteRequest, frozenset[str], threading.Event, OnWritten], None]


def write_part(
    store: StoreClient,
    wanted: WriteRequest,
    arenas: Mapping[int, Arena],
    moved: Callable[[], None] = lambda: None,
    cancel: threading.Event | None = None,
) -> Written:
    """Puts these frames into packs of this node. Runs on a worker thread. `moved`: called as each frame's turn comes.
    `cancel`: set it to give up; the arenas may then be refilled at once, since nothing refers to packs still under way.

    Errors: AgentError if a frame lies outside its arena; SaveFailed; StorageError."""
    lengths = wanted.frames["length"].astype(np.int64)
    for rank, arena in arenas.items():
        ours = wanted.ranks == rank
        offsets, ends = wanted.offsets[ours], wanted.offsets[ours] + lengths[ours]
        if len(offsets) and (offsets.min() < 0 or ends.max() > arena.size_bytes):
            raise AgentError(f"a frame lies outside the arena of rank {rank}")

    def frame(i: int) -> memoryview:
        moved()
        return arenas[int(wanted.ranks[i])].part((int(wanted.offsets[i]), int(lengths[i])))

    return store.write_packs(wanted.identity, wanted.frames, frame, wanted.codec, wanted.bandwidth, cancel)


@dataclass(slots=True)
class _Part:
    """The part that one node was asked to write. `names`: other nodes to ask, best first."""

    owner: str
    request: WriteRequest
    nbytes: int
    future: Future[Written]
    next_nodes: list[str] = field(default_factory=list)
    pending_nodes: set[str] = field(default_factory=set)  # nodes that have not answered
    failed_nodes: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    has_timer: bool = False  # a check of it is scheduled
    is_refused: bool = False  # by a reachable node
    cancel: threading.Event = field(default_factory=threading.Event)


class DistributedWrite:
    """The parts of one commit: an OtherWriters of store.commit. The first node that has written a part counts.

    `ranks`: by node name, "" for this node. `others`: see Others. These nodes write a part if its own node fails, or is
    overdue by `overdue_s` with `margin_s`. Once that node fails, nodes that refused while it was only slow are asked
    again. `ask`: see Ask. `others`, `ask` and the callbacks of `later` run on the main thread, reached by `post`."""

    def __init__(
        self,
        checkpoint: MemoryCheckpoint,
        options: JobOptions,
        ranks: Mapping[str, frozenset[int]],
        others: FindProviders,
        ask: RequestWrite,
        post: Callable[[Callable[[], None]], None],
        later: Callable[[float, Callable[[], None]], None],
        margin_s: float,
        clock: Clock | None = None,
        safe: Callable[[], bool | None] = lambda: True,
    ) -> None:
        """`safe`: True if all replicas or parity are in place; None: they are on their way. Until it is True, no slow
        node's part goes to another node, since that one may have no replica yet. While it is None, nodes that failed
        are asked once more."""
        self._is_replicated = safe
        self._checkpoint, self._options = checkpoint, options
        self._ranks_by_node, self._find_providers, self._request_write, self._post = ranks, others, ask, post
        self._call_later, self._margin_s, self._clock = later, margin_s, clock or SystemClock()
        self._began_s = 0.0
        self._parts: list[_Part] = []
        self._is_over = self._has_failed_part = False
        # No part with a timer is overdue before this: parts that are written meanwhile make it due no earlier.
        self._first_due_s = 0.0
        self._slowest_written: list[
            tuple[float, int]
        ] = []  # of written parts: the two that decide when others are overdue

    def __call__(self, todo: Indices) -> list[tuple[Indices, Future[Written]]]:
        """The futures of all parts that cover `todo`. Called on the committing thread."""
        made = self._checkpoint
        found: list[tuple[Indices, Future[Written]]] = []
        self._began_s = self._clock.now_s()
        for name, numbers in _group_by_node(self._ranks_by_node, made.ranks, todo).items():
            frames, at = made.manifest.frames[numbers], (made.ranks[numbers], made.offsets[numbers])
            codec, bandwidth = self._options.codec, self._options.limits.bandwidth
            wanted = WriteRequest(made.identity, frames, *at, codec, bandwidth)
            future: Future[Written] = Future()
            part = _Part(name, wanted, int(frames["length"].sum()), future)
            self._parts.append(part)
            found.append((numbers, future))
        if self._is_over:
            self._fail_parts("it was given up")
        for part in self._parts:
            self._post(functools.partial(self._begin_part, part))
        return found

    def end_commit(self) -> None:
        """The commit is over; all attempts are cancelled. Called on the committing thread."""
        for part in self._parts:
            # Set here, since nothing is posted any more when the agent ends, and the worker threads are joined.
            part.cancel.set()
        self._post(self._end)

    def abandon(self, why: str) -> None:
        """Fails each part that is not written yet, with `why`. Main thread."""
        self._is_over = True
        self._fail_parts(why)

    def give_up(self) -> set[str]:
        """Abandons this commit for another one. Returns the names of other nodes that still write, to be told to
        stop."""
        self.abandon("it was given up")
        return {name for part in self._parts for name in part.pending_nodes} - {""}

    # -- inside; on the main thread

    def _end(self) -> None:
        self._is_over = True

    def _fail_parts(self, why: str) -> None:
        for part in self._parts:
            part.cancel.set()
            with contextlib.suppress(InvalidStateError):  # it is written
                part.future.set_exception(AgentError(why))

    def _begin_part(self, part: _Part) -> None:
        if not self._is_over:
            self._assign_part(part, part.owner)

    def _assign_part(self, part: _Part, name: str) -> None:
        def answered(result: Written | None, error: str) -> None:
            part.pending_nodes.discard(name)
            if part.future.done() or self._is_over:
                return  # another node was first, or nobody waits any more
            if result is not None:
                part.cancel.set()
                part.future.set_result(result)
                self._record_written(part.nbytes)
                return
            part.failed_nodes.add(name)
            self._has_failed_part = True
            why = f"{_node_label(name)} has not written {'its' if name == part.owner else 'that'} part: {error}"
            if name == part.owner:
                part.errors.insert(0, why)  # the owner's own error says most
                part.next_nodes = self._available_nodes(part, slow=False)
            else:
                part.errors.append(why)
            if not self._assign_next_node(part, why):
                self._handle_failed_parts()

        # If the node itself has failed, no other node is left out: a rebuild may need all of them.
        slow = frozenset({part.owner}) if part.is_refused or part.owner in part.pending_nodes else frozenset[str]()
        if part.owner in part.pending_nodes:
            slow |= self._slow_nodes()
        part.pending_nodes.add(name)
        self._request_write(name, part.request, slow, part.cancel, answered)

    def _assign_next_node(self, part: _Part, why: str) -> bool:
        """Asks the next node in `part.names`; returns False if there is none."""
        if not part.next_nodes:
            return False
        log.warning("%s; another node that has a copy, or makes one, writes it", why)
        self._assign_part(part, part.next_nodes.pop(0))
        return True

    def _handle_failed_parts(self) -> None:
        """Handles parts that no node writes any more: asks other nodes, waits, or fails the part.

        A part of a reachable node without replicas is rebuilt only after the store has taken another part. Otherwise
        the store itself is probably failing, and each rebuild would be wasted. The committing node's own part does not
        even wait for other parts, since that node must also put the record."""
        for part in self._parts if self._has_failed_part else ():
            if part.future.done() or part.pending_nodes or not part.errors:
                continue
            is_open = part.owner != "" and any(self._is_under_way(each) for each in self._parts)
            may_take = bool(self._slowest_written) or is_open
            if may_take and self._is_replicated() is None and self._available_nodes(part, slow=True):
                part.failed_nodes.clear()  # nodes without a replica may have one by then
                self._schedule_check(part, self._margin_s)
                continue
            part.next_nodes = self._untried_nodes(part, slow=False)
            part.is_refused = not part.next_nodes
            if part.is_refused and may_take:
                part.next_nodes = self._untried_nodes(part, slow=True)
                if part.next_nodes and not self._slowest_written:
                    continue
            if not self._assign_next_node(part, part.errors[0]):
                part.future.set_exception(AgentError(part.errors[0]))

    def _untried_nodes(self, part: _Part, slow: bool) -> list[str]:
        return [name for name in self._available_nodes(part, slow) if name not in part.failed_nodes]

    @staticmethod
    def _is_under_way(part: _Part) -> bool:
        return not part.future.done() and bool(part.pending_nodes or not part.errors)

    def _available_nodes(self, part: _Part, slow: bool) -> list[str]:
        """Other nodes to ask for this part now, best first; with `slow`, nodes that are slow themselves come last."""
        names = [name for name in self._find_providers(part.owner, slow) if name not in part.pending_nodes]
        return sorted(names, key=self._slow_nodes().__contains__) if slow else names

    def _slow_nodes(self) -> frozenset[str]:
        """Nodes that should have written their own part by now and have not, even if another node has written it."""
        return frozenset(
            part.owner
            for part in self._parts
            if part.owner in part.pending_nodes
            and (part.future.done() or len(part.pending_nodes) > 1 or self._is_overdue(part))
        )

    def _record_written(self, nbytes: int) -> None:
        """Records a written part of `nbytes`. Only two written parts matter to `overdue_s`: the slowest, and the
        slowest per byte."""
        elapsed_s = self._elapsed_s
        if nbytes:
            written = [*self._slowest_written, (elapsed_s, nbytes)]
            self._slowest_written = [max(written), max(written, key=lambda each: each[0] / each[1])]
        if self._slowest_written and elapsed_s >= self._first_due_s:  # else none is overdue, and each has its timer
            self._first_due_s = math.inf
            for part in self._parts:
                self._check_overdue(part)
        self._handle_failed_parts()

    def _check_overdue(self, part: _Part) -> None:
        due_s = self._due_s(part)
        if self._is_over or part.future.done() or due_s is None or part.errors or len(part.pending_nodes) > 1:
            # A failed node was already followed by another, and a slow one needs only one other.
            return
        left_s = max(due_s - self._elapsed_s, 0.0 if self._is_replicated() else self._margin_s)
        if left_s > 0:
            self._first_due_s = min(self._first_due_s, due_s)
            self._schedule_check(part, left_s)
            return
        part.next_nodes = part.next_nodes or self._available_nodes(part, slow=True)
        slow = f"{_node_label(part.owner)} takes longer than {due_s:.1f} s for its part"
        self._assign_next_node(part, slow)

    def _schedule_check(self, part: _Part, after_s: float) -> None:
        def look() -> None:
            part.has_timer = False
            self._check_overdue(part)
            if not self._is_over:
                self._handle_failed_parts()

        if not part.has_timer:  # parts written meanwhile make it due no earlier
            part.has_timer = True
            self._call_later(after_s, look)

    def _is_overdue(self, part: _Part) -> bool:
        due_s = self._due_s(part)
        return due_s is not None and due_s <= self._elapsed_s

    def _due_s(self, part: _Part) -> float | None:
        return overdue_s(self._slowest_written, part.nbytes, self._margin_s)

    @property
    def _elapsed_s(self) -> float:
        return self._clock.now_s() - self._began_s


def _node_label(name: str) -> str:
    return f"node {name}" if name else "this node"


def _group_by_node(
    ranks: Mapping[str, frozenset[int]], of_frames: npt.NDArray[np.int64], todo: Indices
) -> dict[str, Indices]:
    """Which of the frames `todo` lie on each node, in the order of `ranks`. Nodes without frames are left out. `ranks`:
    by node. It makes one pass over the frames, however many nodes there are."""
    names, world = list(ranks), 1 + max(int(of_frames.max(initial=0)), *map(max, ranks.values()), 0)
    node_of = np.full(world, len(names))
    for number, name in enumerate(names):
        node_of[list(ranks[name])] = number
    nodes = node_of[of_frames[todo]]
    order = np.argsort(nodes, kind="stable")
    bounds = np.searchsorted(nodes[order], np.arange(len(names) + 1))
    found = {name: todo[order[bounds[number] : bounds[number + 1]]] for number, name in enumerate(names)}
    return {name: numbers for name, numbers in found.items() if len(numbers)}

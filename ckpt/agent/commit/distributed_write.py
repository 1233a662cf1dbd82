"""The distributed write of one commit: each node writes the frames that it holds. If a node fails or is overdue, a
holder of its replica writes that part. This applies to the committing node's own part too. A part that nobody writes
fails the commit.

All parts begin together. A part is overdue only by comparison with the parts that are already written: their time,
scaled by bytes, plus a margin. If no part is written yet, the store may be slow for all nodes, and no part is overdue.

Each attempt at a part has keys of its own (StoreClient.write), so two attempts may run at once. The main thread decides
which attempt counts. Nothing refers to the packs of the other attempt, and prune deletes them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckpt.agent.commit.store_client import StoreClient
from ckpt.agent.runtime.coroutines import sleep, spawn
from ckpt.agent.runtime.workers import error_text
from ckpt.agent.snapshots.remote_share import WriteRequest
from ckpt.clock import Clock, SystemClock
from ckpt.errors import AgentError
from ckpt.ipc.arena import Arena

if TYPE_CHECKING:
    from ckpt.agent.commit.job_options import JobOptions
    from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
    from ckpt.store.packs import Indices, Written

log = logging.getLogger("ckpt")

SLOWDOWN_MAX = 3.0  # times the slowest written part: encoding and uploading vary that much between equal nodes

# Returns the nodes that keep a replica of the named node's part, best first.
FindHolders = Callable[[str], Sequence[str]]
# Has a node write frames. Given: its name ("" for this node), the frames, `cancel`. Errors: CkptError. A node without
# a verified replica refuses. `cancel`: set once nobody waits for the result. This node then stops its puts at once.
# Other nodes are told only if the whole commit is given up (see give_up).
RequestWrite = Callable[[str, WriteRequest, threading.Event], Awaitable["Written"]]


def overdue_s(written: Sequence[tuple[float, int]], nbytes: int, margin_s: float) -> float:
    """Seconds after the common beginning from which a part of `nbytes` is overdue. `written`: (seconds, bytes) of each
    part that is written; at least one, and none without bytes.

    A part with more bytes than a written one may take longer in proportion. A smaller part gets no shorter time, since
    a part takes time beyond that for its bytes."""
    return SLOWDOWN_MAX * max(seconds * max(1.0, nbytes / size) for seconds, size in written) + margin_s


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
    """The part that one node was asked to write. `next_nodes`: holders of its replica to ask, best first. `error`: why
    the owner has failed; "" if it has not."""

    owner: str
    request: WriteRequest
    nbytes: int
    future: Future[Written]
    next_nodes: list[str] = field(default_factory=list)
    pending_nodes: set[str] = field(default_factory=set)  # nodes that have not answered
    error: str = ""
    cancel: threading.Event = field(default_factory=threading.Event)


class DistributedWrite:
    """The parts of one commit: an OtherWriters of store.commit. The first node that has written a part counts.

    `ranks`: by node name, "" for this node. `holders`: these nodes write a part, one after the other, if its own node
    fails or is overdue by `overdue_s` with `margin_s`. `holders`, `ask` and the callbacks of `later` run on the main
    thread, reached by `post`."""

    def __init__(
        self,
        checkpoint: MemoryCheckpoint,
        options: JobOptions,
        ranks: Mapping[str, frozenset[int]],
        holders: FindHolders,
        ask: RequestWrite,
        post: Callable[[Callable[[], None]], None],
        later: Callable[[float, Callable[[], None]], None],
        margin_s: float,
        clock: Clock | None = None,
    ) -> None:
        self._checkpoint, self._options = checkpoint, options
        self._ranks_by_node, self._find_holders, self._request_write, self._post = ranks, holders, ask, post
        self._call_later, self._margin_s, self._clock = later, margin_s, clock or SystemClock()
        self._began_s = 0.0
        self._parts: list[_Part] = []
        self._is_over = False
        self._written: list[tuple[float, int]] = []  # (seconds, bytes) of the parts that are written

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
            spawn(self._assign_part(part, part.owner))

    async def _assign_part(self, part: _Part, name: str) -> None:
        part.pending_nodes.add(name)
        written, error = None, ""
        try:
            written = await self._request_write(name, part.request, part.cancel)
        except Exception as exc:  # the committing thread waits, whatever happens
            error = error_text(exc)
        part.pending_nodes.discard(name)
        if part.future.done() or self._is_over:
            return  # another node was first, or nobody waits any more
        if written is not None:
            part.cancel.set()
            part.future.set_result(written)
            self._record_written(part.nbytes)
            return
        why = f"{_node_label(name)} has not written {'its' if name == part.owner else 'that'} part: {error}"
        if name == part.owner:
            part.error = why
            # All are asked, also those that had no replica while the owner was only slow.
            part.next_nodes = self._other_holders(part)
            if part.pending_nodes:
                return
        self._assign_next_holder(part, why)

    def _assign_next_holder(self, part: _Part, why: str) -> None:
        """Asks the next holder. If there is none, the owner is waited for, or the part has failed."""
        if part.next_nodes:
            log.warning("%s; another node that has a copy writes it", why)
            spawn(self._assign_part(part, part.next_nodes.pop(0)))
        elif not part.pending_nodes:
            part.future.set_exception(AgentError(part.error))

    def _other_holders(self, part: _Part) -> list[str]:
        return [name for name in self._find_holders(part.owner) if name not in part.pending_nodes]

    def _record_written(self, nbytes: int) -> None:
        """Records a part that is written. Later ones make none overdue earlier, so the first one sets all timers."""
        if not nbytes:
            return
        self._written.append((self._elapsed_s, nbytes))
        for part in self._parts if len(self._written) == 1 else ():
            spawn(self._watch_part(part))

    async def _watch_part(self, part: _Part) -> None:
        """Asks another holder once the part is overdue. That time moves with each part that is written."""
        while not (self._is_over or part.future.done() or part.error):
            due_s = overdue_s(self._written, part.nbytes, self._margin_s)
            if (left_s := due_s - self._elapsed_s) <= 0:
                part.next_nodes = self._other_holders(part)
                why = f"{_node_label(part.owner)} takes longer than {due_s:.1f} s for its part"
                self._assign_next_holder(part, why)
                return
            await sleep(self._call_later, left_s)

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

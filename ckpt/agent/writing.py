"""The parts of a commit that nodes other than its coordinator's write: whoever holds the frames does it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from ckpt.agent.arena import Arena
from ckpt.agent.remote import Wanted
from ckpt.agent.storeside import StoreSide
from ckpt.errors import AgentError

if TYPE_CHECKING:
    from ckpt.agent.checkpoint import Checkpoint
    from ckpt.agent.storeside import Options
    from ckpt.store.packs import Indices, Written

log = logging.getLogger("ckpt")

# Has a node write its frames: (its name, what, then), where `then` hears what was written, or why nothing was.
Ask = Callable[[str, Wanted, Callable[["Written | None", str], None]], None]


def write_part(store: StoreSide, wanted: Wanted, arenas: Mapping[int, Arena]) -> Written:
    """On a thread: puts these frames into packs of this node's. Errors: AgentError where one lies outside its arena;
    SaveFailed; StorageError."""
    lengths = wanted.frames["length"].astype(np.int64)
    for rank, arena in arenas.items():
        ours = wanted.ranks == rank
        offsets, ends = wanted.offsets[ours], wanted.offsets[ours] + lengths[ours]
        if len(offsets) and (offsets.min() < 0 or ends.max() > arena.bytes):
            raise AgentError(f"a frame lies outside the arena of rank {rank}")

    def frame(i: int) -> memoryview:
        return arenas[int(wanted.ranks[i])].part((int(wanted.offsets[i]), int(lengths[i])))

    return store.write(wanted.identity, wanted.frames, frame, wanted.codec, wanted.bandwidth)


class Parts:
    """The parts of one commit. `ranks`: of each other node, by its name. `holders`: who keeps copies of a node's
    snapshots, and writes them if that one cannot. `ask`: see Ask; it runs on the main thread, as `post` makes it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: Options,
        ranks: Mapping[str, frozenset[int]],
        holders: Mapping[str, Sequence[str]],
        ask: Ask,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._checkpoint, self._options = checkpoint, options
        self._ranks, self._holders, self._ask, self._post = ranks, holders, ask, post

    def __call__(self, todo: Indices) -> list[tuple[Indices, Future[Written]]]:
        """On the thread that commits: see store.commit.Elsewhere."""
        made = self._checkpoint
        found: list[tuple[Indices, Future[Written]]] = []
        for name, ranks in self._ranks.items():
            numbers = todo[np.isin(made.ranks[todo], list(ranks))]
            if not len(numbers):
                continue
            frames, at = made.manifest.frames[numbers], (made.ranks[numbers], made.offsets[numbers])
            codec, bandwidth = self._options.codec, self._options.limits.bandwidth
            wanted = Wanted(made.identity, frames, *at, codec, bandwidth)
            future: Future[Written] = Future()
            self._begin([name, *self._holders.get(name, ())], wanted, future, "")
            found.append((numbers, future))
        return found

    def _begin(self, names: Sequence[str], wanted: Wanted, future: Future[Written], why: str) -> None:
        if not names:
            future.set_exception(AgentError(why))
            return

        def written(result: Written | None, error: str) -> None:
            if result is not None:
                future.set_result(result)
                return
            text = f"the node of agent {names[0] or 'here'} has not written its part: {error}"
            if len(names) > 1:
                log.warning("%s; another one that has a copy does", text)
            self._begin(names[1:], wanted, future, why or text)

        self._post(lambda: self._ask(names[0], wanted, written))

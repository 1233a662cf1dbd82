"""The state as it was offered to the agent: the present walk, and when the agent has to hear of another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from ckpt.errors import SaveFailed, UsageError, is_injected
from ckpt.events import Events
from ckpt.layout.layout import Layout
from ckpt.trainer.link.slots import StateOffer, encode_hashes
from ckpt.trainer.snapshot.samples import Samples
from ckpt.trainer.state import names, state_nodes
from ckpt.trainer.state.state_walk import StateWalker, Walk
from ckpt.trainer.state.tensor_hashes import hash_replicas
from ckpt.types import Version

MOVES_MIN = 2  # a tensor that has moved so often is reported as a new one at each step
UNSETTLED_MAX = 3  # a warning after so many missed appointments in a row, each with another structure


class OfferedState:
    """For the training thread. `tell(offer)` sends an offer. `may_have_replicas`: whether other ranks may hold
    replicas.

    `walk`: the present walk. `checked_step`: the step after which `walk` was last seen to match the state."""

    def __init__(
        self, walker: StateWalker, tell: Callable[[StateOffer], None], events: Events, may_have_replicas: bool
    ) -> None:
        self.walker = walker
        self.walk: Walk = walker.walk()
        self.checked_step = -1
        self.may_have_replicas = may_have_replicas
        self._tell = tell
        self._events = events
        self._is_offered = True  # whether the agent knows the present walk, or will learn it at the join
        self._has_stale_hashes = False  # whether the replica hashes that the agent has may be out of date
        self._move_counts: Counter[str] = Counter()  # how often each tensor was found in other memory
        self._unsettled_misses = 0  # missed appointments in a row, since the structure had changed
        self._samples: Samples | None = None  # for the present walk and plan

    def make_offer(self, version: Version, positions: bool = True) -> StateOffer:
        """The present walk, as it is described to the agent. It has hashes only if other ranks may hold replicas.
        `positions`: whether loaders are asked for theirs, which is forbidden before they are restored."""
        shared, own = self.walker.values(self.walk, positions)
        size = sum(map(len, state_nodes.encode_trees(shared, own, self.walk.scan.constants)))
        hashes = (
            encode_hashes(hash_replicas(self.walk.tensors, self.walk.may_have_replicas))
            if self.may_have_replicas
            else b""
        )
        return StateOffer(self.walk.layout, hashes, version, size)

    def mark_hashes_stale(self) -> None:
        """Has replicas hashed anew before the next snapshot: tensors that were equal on all ranks may differ from now
        on. That is so after a restore, and after the first step."""
        self._has_stale_hashes = self.may_have_replicas

    def offer_changes(self, version: Version) -> bool:
        """Tells the agent of a changed structure, or of doubted replicas. Returns whether there was anything to tell.
        Tensors of the same names and shapes in other memory need no message: the next snapshot reads them there.

        Errors: SaveFailed if the state cannot be saved as it is now."""
        try:
            if self.walker.has_changed(self.walk):
                self._adopt(self.walker.walk())
            self.checked_step = version.step
            if self._is_offered and not self._has_stale_hashes:
                return False
            self._is_offered = False
            self._tell(self.make_offer(version))
        except UsageError as exc:
            raise SaveFailed(f"the state has become one that cannot be saved: {exc}") from exc
        except Exception as exc:
            # An object of the user's has failed in its state_dict().
            if is_injected(exc):
                raise
            raise SaveFailed(f"the state could not be read: {type(exc).__name__}: {exc}") from exc
        self._is_offered, self._has_stale_hashes = True, False
        return True

    def offer_for_snapshot(self, version: Version) -> bool:
        """`offer_changes` before a snapshot, which is missed if it returns True. It counts those in a row that were
        missed since the structure had changed, and warns once."""
        before = self.walk.layout
        if not self.offer_changes(version):
            self._unsettled_misses = 0
            return False
        self._unsettled_misses = self._unsettled_misses + 1 if self.walk.layout is not before else 0
        if self._unsettled_misses == UNSETTLED_MAX:
            changed = names.shorten_names(sorted({e.name for e in set(self.walk.layout.entries) ^ set(before.entries)}))
            text = f"ckpt: no checkpoint is taken while the structure of the state changes each time ({changed}). Keep "
            text += "the shapes and the number of its tensors, or call ck.save(), which waits"
            self._events.emit("state.unsettled", text, loud=True)
        return True

    def _adopt(self, walk: Walk) -> None:
        """Takes over a new walk: the state has another structure, or lies in other memory. With the same structure the
        granted slots stay valid; else the state has to be offered anew. It also is if a tensor that other ranks may
        hold too has moved for the first time: it may differ from now on (`load_state_dict` on one rank only)."""
        before = self.walk
        moved = _find_moved(before, walk)
        alike = walk.layout == before.layout and walk.may_have_replicas == before.may_have_replicas
        entries = zip(walk.layout.entries, walk.may_have_replicas, strict=True)
        shared = {entry.name for entry, replica in entries if replica}
        if not alike or (self.may_have_replicas and not moved & shared <= self._move_counts.keys()):
            self._is_offered = False
        self.walk = replace(walk, layout=before.layout) if alike else walk
        self._move_counts.update(moved)

    def moving_names(self) -> list[str]:
        """The tensors that were found in other memory again and again."""
        return sorted(name for name, count in self._move_counts.items() if count >= MOVES_MIN)

    def samples(self, layout: Layout) -> Samples:
        """A few elements of the tensors that other ranks should hold alike; the same elements on all ranks. `layout`:
        of the plan. Any thread may call it ahead of the snapshot."""
        known, walk = self._samples, self.walk
        if known is None or known.walk is not walk or known.layout is not layout:
            known = self._samples = Samples(walk, layout)
        return known


def _find_moved(before: Walk, now: Walk) -> set[str]:
    """The names of tensors that exist in both walks, in different memory. Both walks keep their tensors alive, so that
    equal addresses mean the same memory."""
    places = dict(zip((entry.name for entry in before.layout.entries), before.tensors, strict=True))
    names_now = (entry.name for entry in now.layout.entries)
    pairs = ((name, places.get(name), live) for name, live in zip(names_now, now.tensors, strict=True))
    return {name for name, old, new in pairs if old is not None and _addresses(old) != _addresses(new)}


def _addresses(tensors: Collection[torch.Tensor]) -> list[int]:
    return [torch.Tensor.data_ptr(tensor) for tensor in tensors]

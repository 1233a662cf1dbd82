"""Getting one candidate back into the live state: values first, since they say what else to expect; then tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from ckpt.errors import DamagedData
from ckpt.format import values
from ckpt.format.frames import frame_hash
from ckpt.format.manifest import RANK_VALUES, VALUES, Manifest
from ckpt.tasks import Tasks
from ckpt.trainer.fetch import fetch
from ckpt.trainer.fill import Filler
from ckpt.trainer.link import Link
from ckpt.trainer.saved import merge_shared
from ckpt.trainer.targets import Targets, plan_targets
from ckpt.trainer.walk import StateWalker
from ckpt.types import Identity


def read_targets(
    link: Link, tasks: Tasks, walker: StateWalker, identity: Identity, manifest: Manifest, strict: bool
) -> tuple[Targets, dict[str, int]]:
    """Fetches the value trees and plans what the state wants of the checkpoint; no tensor is touched. Bytes by level.

    Errors: DamagedData, UsageError, AgentError."""
    here = walker.coordinate
    trees = _Values(link, tasks, identity, manifest)
    if here.is_on(manifest.coordinates):
        shared, own = trees.shared([here.text]), trees.own(here.text)
        others: list[Any] = []
    else:
        shared, own = trees.shared(manifest.coordinates), None
        others = [trees.own(coordinate) for coordinate in manifest.coordinates]
    targets = plan_targets(walker, manifest, shared, own, others, strict, identity.tick.step)
    return targets, trees.sources


def fill(link: Link, tasks: Tasks, identity: Identity, manifest: Manifest, targets: Targets) -> dict[str, int]:
    """Fills the wanted tensors in place; what else the checkpoint holds is applied by `Targets.finish`, after all
    ranks agreed. Bytes by level. Errors: DamagedData, AgentError; StateMismatch of `Filler.check`."""
    filler = Filler(manifest, targets.wants, targets.tensors)
    with link.standing_still():
        sources = fetch(link, tasks, identity, filler.frames, filler, filler)
    filler.check()
    return sources


class _Values:
    """The value blobs of a checkpoint, each one frame."""

    def __init__(self, link: Link, tasks: Tasks, identity: Identity, manifest: Manifest) -> None:
        self._frames: dict[tuple[str, str], int | None] = {}
        first: dict[int, int] = {}
        for box, frame in zip(manifest.extents["box"].tolist(), manifest.extents["frame"].tolist(), strict=True):
            first.setdefault(box, frame)
        for number, (tensor, _) in enumerate(manifest.boxes):
            spec = manifest.tensors[tensor]
            if spec.values:
                self._frames[spec.name, spec.owner] = first.get(number)
        self._bytes: dict[int, bytes] = {}
        lock = threading.Lock()
        hi, lo = manifest.frames["hash_hi"], manifest.frames["hash_lo"]

        def deliver(number: int, raw: memoryview) -> bool:
            copy = bytes(raw)
            if frame_hash(copy) != (int(hi[number]), int(lo[number])):
                return False
            with lock:
                self._bytes[number] = copy
            return True

        wanted = {frame for frame in self._frames.values() if frame is not None}
        self.sources = fetch(link, tasks, identity, wanted, deliver)

    def shared(self, coordinates: Iterable[str]) -> Any:
        """What all ranks had in common; or, where they differed, what these ranks had, joined."""
        if (VALUES, "") in self._frames:
            return self._tree(VALUES, "")
        return merge_shared([self._tree(VALUES, coordinate) for coordinate in coordinates])

    def own(self, coordinate: str) -> Any:
        return self._tree(RANK_VALUES, coordinate)

    def _tree(self, name: str, owner: str) -> Any:
        if (name, owner) not in self._frames:
            raise DamagedData(f"the checkpoint has no {name} of {owner or 'the job'}")
        frame = self._frames[name, owner]
        return values.decode(self._bytes[frame]) if frame is not None else {}

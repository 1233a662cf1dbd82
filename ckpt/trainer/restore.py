"""Getting one candidate back into the live state: values first, since they say what else to expect; then tensors."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import Any

import msgpack
import torch

from ckpt.errors import DamagedData, StateMismatch
from ckpt.events import Events
from ckpt.format import values
from ckpt.format.frames import frame_hash
from ckpt.format.manifest import RANK_VALUES, VALUES, Manifest
from ckpt.plan.reshard import cuts
from ckpt.tasks import Tasks
from ckpt.trainer import collective
from ckpt.trainer.asked import Asked
from ckpt.trainer.fetch import fetch
from ckpt.trainer.fill import Filler
from ckpt.trainer.link import Link
from ckpt.trainer.names import some
from ckpt.trainer.saved import merge_shared
from ckpt.trainer.targets import Targets, plan_targets
from ckpt.trainer.walk import StateWalker
from ckpt.trainer.wants import ONLY
from ckpt.types import Identity

LINES_MAX = 50  # differences named in one message


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


def check_match(
    group: collective.Group,
    targets: Targets,
    asked: Asked,
    events: Events,
    identity: Identity,
    overwritten: Overwritten,
) -> None:
    """What is only in the checkpoint is extra where no rank wants it. Errors: StateMismatch names all differences; or
    what this candidate would leave as one that failed has left it, be that on one rank only."""
    mine = [list(targets.extra), list(targets.mismatch.lines), overwritten.beside(targets), overwritten.names]
    every = [msgpack.unpackb(data) for data in group.gather(msgpack.packb(mine))]
    extra = sorted(set.intersection(*(set(names) for names, *_ in every)))
    lines = sorted({line for _, found, *_ in every for line in found if not line.startswith(ONLY)})
    lines += [f"{ONLY}{name}" for name in extra]
    beside = sorted({name for *_, names, _ in every for name in names})
    spoilt = sorted({name for *_, names in every for name in names})
    more = f"; and {len(lines) - LINES_MAX} more" if len(lines) > LINES_MAX else ""
    text = "; ".join(lines[:LINES_MAX]) + more
    does_not_match = f"the state does not match the checkpoint of step {identity.tick.label}: {text}. "
    if beside or (spoilt and lines and asked.strict):
        raise StateMismatch(
            f"{does_not_match if lines else ''}A newer one was tried before and is damaged: {some(beside or spoilt)} "
            "now hold what could be read of that, and what they held is lost. Run "
            f"`ckpt branch {asked.url} --at {identity}`, so that the damaged one is not tried again, and start a new "
            "process, with a state that matches this one, or with strict=False"
        )
    if lines and asked.strict:
        raise StateMismatch(
            f"{does_not_match}Nothing was changed. Register the same state, or pass strict=False to go on with what "
            "fits"
        )
    if lines and group.rank == 0:
        events.emit("restore.mismatch", f"ckpt: strict=False: {text}", loud=True, lines=lines)


def fill(
    link: Link, tasks: Tasks, identity: Identity, manifest: Manifest, targets: Targets, written: set[int]
) -> dict[str, int]:
    """Fills the wanted tensors in place; what else the checkpoint holds is applied by `Targets.finish`, after all
    ranks agreed. Bytes by level. `written` gets each frame before anything of it is copied: where this fails, or
    another rank does, see Overwritten. Errors: DamagedData, AgentError; StateMismatch of `Filler.check`."""
    filler = Filler(manifest, targets.wants, targets.tensors, written)
    with link.standing_still():
        sources = fetch(link, tasks, identity, filler.frames, filler, filler)
    filler.check()
    return sources


class Overwritten:
    """What candidates that failed have left in the state's own tensors, on this rank. They keep no copy of what was
    there before: the next candidate fills all of these anew, or the state would be of two steps.

    Tensors that were made for a candidate do not count: they went with it."""

    def __init__(self, walker: StateWalker) -> None:
        self._walker = walker
        self._names: dict[_Place, str] = {}

    @property
    def names(self) -> list[str]:
        return sorted(set(self._names.values()))

    def add(self, manifest: Manifest, targets: Targets, written: Collection[int]) -> None:
        """A candidate failed after `fill` had got these frames, right or wrong."""
        if not written:
            return
        live = {_memory(local) for _, pieces in self._walker.scan().tensors.values() for local in pieces.locals}
        for want in {cut.want for cut in cuts(manifest, targets.wants) if cut.frame in written}:
            tensor = targets.tensors[want]
            if _memory(tensor) in live:
                self._names.setdefault(_place(tensor), targets.wants[want].name)

    def beside(self, targets: Targets) -> list[str]:
        """Names of those that these targets do not fill."""
        filled = set(map(_place, targets.tensors))
        return sorted({name for place, name in self._names.items() if place not in filled})


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


_Place = tuple[str, int, tuple[int, ...], tuple[int, ...]]


def _memory(tensor: torch.Tensor) -> tuple[str, int]:
    """Where the memory begins that the tensor is a part of. No two that are alive have the same."""
    return str(tensor.device), torch.Tensor.untyped_storage(tensor).data_ptr()


def _place(tensor: torch.Tensor) -> _Place:
    """Which elements of memory the tensor is."""
    return str(tensor.device), torch.Tensor.data_ptr(tensor), tuple(tensor.shape), tensor.stride()

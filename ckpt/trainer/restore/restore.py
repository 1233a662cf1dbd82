"""The restore of one candidate into the live state: first its values, which tell what else to expect; then tensors."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

import msgpack
import torch

from ckpt.errors import DamagedData, StateMismatch
from ckpt.events import Events
from ckpt.format import values
from ckpt.format.frames import frame_hash
from ckpt.format.manifest import RANK_VALUES, VALUES, Manifest
from ckpt.layout.replica_match import alike, first_owners
from ckpt.layout.reshard import cuts
from ckpt.storage.names import shown
from ckpt.threads import Tasks
from ckpt.trainer.link import collective
from ckpt.trainer.link.link import Link
from ckpt.trainer.link.options import UserOptions
from ckpt.trainer.restore.fetch import fetch
from ckpt.trainer.restore.fill import Filler
from ckpt.trainer.restore.restore_plan import RestorePlan, plan_targets
from ckpt.trainer.restore.tensor_requests import ONLY
from ckpt.trainer.state.names import some
from ckpt.trainer.state.saved_values import Shared, differing, merge_shared
from ckpt.trainer.state.state_nodes import DataNode, ModuleNode, ObjectNode, OptimizerNode
from ckpt.trainer.state.state_walk import Scan, StateWalker
from ckpt.types import Identity

LINES_MAX = 50  # differences named in one message


def read_targets(
    link: Link, tasks: Tasks, walker: StateWalker, identity: Identity, manifest: Manifest, strict: bool
) -> tuple[RestorePlan, dict[str, int]]:
    """Fetches the value trees, and plans what the state wants of the checkpoint. Touches no tensor. Returns the plan,
    and the bytes by level that they came from. Errors: DamagedData, UsageError, AgentError."""
    stored = _FromAgent(link, tasks, identity, manifest)
    return plan(walker, manifest, stored, strict, identity.tick.step), stored.sources


class Stored(Protocol):
    """Reads a checkpoint before it is known which tensors are wanted."""

    def values(self, name: str, owner: str) -> bytes | None:
        """The value blob of that name and owner; None if there is none. Errors: DamagedData."""
        ...

    def frames(self, numbers: Collection[int]) -> Mapping[int, bytes]:
        """The raw bytes of these frames. All ranks ask for the same. Errors: DamagedData."""
        ...


def plan(walker: StateWalker, manifest: Manifest, stored: Stored, strict: bool, step: int) -> RestorePlan:
    """What the state wants of this checkpoint. Errors: DamagedData, UsageError.

    - On the mesh that saved it: this rank's own values. If they lack something (pipeline stages were split otherwise),
      the other ranks' values are merged into them.
    - On another mesh: the values that all ranks have in common, or their values merged.
    """
    here = walker.coordinate
    if here.is_on(manifest.coordinates):
        trees, own = _shared(stored, [here.text]), _own(stored, here.text)
        more: list[Any] = []
        if stored.values(VALUES, "") is None and _lacks(Shared.parse(trees[0]), walker.scan(), manifest):
            more = _shared(stored, [owner for owner in manifest.coordinates if owner != here.text])
        shared, taken = merge_shared([*trees, *more]), differing(more, trees)
        return plan_targets(walker, manifest, shared, own, [], strict, step, differing=taken)
    trees = _shared(stored, manifest.coordinates)
    others = [_own(stored, coordinate) for coordinate in manifest.coordinates]
    same = alike(manifest, stored.frames)
    buffers = first_owners(manifest, walker.scan().buffers() - same.keys())
    taken = differing(trees) | buffers.keys()
    return plan_targets(walker, manifest, merge_shared(trees), None, others, strict, step, {**buffers, **same}, taken)


def _lacks(saved: Shared, scan: Scan, manifest: Manifest) -> bool:
    """Whether these values of one rank lack a part of the state."""
    names = {spec.name for spec in manifest.tensors} | saved.aliases.keys()
    for node in scan.nodes:
        if isinstance(node, ModuleNode):
            if not node.payload()["extra"].keys() <= saved.modules.get(node.path, {}).keys():
                return True
        elif isinstance(node, OptimizerNode):
            held = saved.optimizers.get(node.path)
            params = {param.name for line in scan.views[node.path].params for param in line}
            if held is None or not params <= held.home.keys():
                return True
        elif isinstance(node, (ObjectNode, DataNode)):
            kind = saved.kind_of(node.path)
            if kind is None or (
                isinstance(node, ObjectNode) and kind == "value" and saved.data[node.path].value is None
            ):
                return True
    return any(name not in names for name in scan.tensors)


def _shared(stored: Stored, coordinates: Iterable[str]) -> list[Any]:
    """The values that all ranks had in common; if they differed, the different ones of these ranks, each once."""
    common = stored.values(VALUES, "")
    found = [common] if common is not None else [_there(stored, VALUES, owner) for owner in coordinates]
    trees = [values.decode(blob) if blob else {} for blob in dict.fromkeys(found)]
    # Each tree is checked before any are compared and merged.
    for tree in trees:
        Shared.parse(tree)
    return trees


def _own(stored: Stored, coordinate: str) -> Any:
    blob = _there(stored, RANK_VALUES, coordinate)
    return values.decode(blob) if blob else {}


def _there(stored: Stored, name: str, owner: str) -> bytes:
    blob = stored.values(name, owner)
    if blob is None:
        raise DamagedData(f"the checkpoint has no {name} of {owner}")
    return blob


def check_match(
    group: collective.RankGroup,
    targets: RestorePlan,
    asked: UserOptions,
    events: Events,
    identity: Identity,
    overwritten: Overwritten,
) -> None:
    """Agrees with all ranks whether the state matches the checkpoint; a collective. A name that only the checkpoint has
    is extra if no rank wants it. A tensor that only one rank could restore is extra if that rank does not want it.
    Errors: StateMismatch names all differences. It is also raised if this candidate would leave tensors as a failed one
    has left them, even on one rank only. Without `strict`, differences are a warning."""
    mine = {
        "extra": list(targets.extra),
        "own": list(targets.own_extra),
        "lines": list(targets.mismatch.lines),
        "beside": overwritten.beside(targets),
        "spoilt": overwritten.names,
        "firsts": list(targets.firsts),
    }
    every = [msgpack.unpackb(data) for data in group.gather(msgpack.packb(mine))]

    def any_of(key: str) -> list[str]:
        return sorted({name for each in every for name in each[key]})

    extra = sorted(set.intersection(*(set(each["extra"]) for each in every)))
    lines = [line for line in any_of("lines") if not line.startswith(ONLY)]
    lines += [f"{ONLY}{name}" for name in extra]
    own = {name: rank for rank, each in reversed(list(enumerate(every))) for name in each["own"]}
    lines += [f"{ONLY}{name} of rank {rank}" for name, rank in sorted(own.items()) if name not in extra]
    beside, spoilt, firsts = any_of("beside"), any_of("spoilt"), any_of("firsts")
    more = f"; and {len(lines) - LINES_MAX} more" if len(lines) > LINES_MAX else ""
    text = "; ".join(lines[:LINES_MAX]) + more
    does_not_match = f"the state does not match the checkpoint of step {identity.tick.label}: {text}. "
    if beside or (spoilt and lines and asked.strict):
        raise StateMismatch(
            f"{does_not_match if lines else ''}A newer checkpoint was tried before and is damaged: "
            f"{some(beside or spoilt)} now hold what could be read of it, and what they held is lost. Run "
            f"`ckpt branch {shown(asked.url)} --at {identity}`, so that the damaged one is not tried again. Then start "
            f"a new process, with a state that matches step {identity.tick.label}, or with strict=False"
        )
    if lines and asked.strict:
        raise StateMismatch(
            f"{does_not_match}Nothing was changed. Register the same state, pass strict=False to go on with what fits, "
            "or use another URL to begin anew"
        )
    if lines and group.rank == 0:
        events.emit("restore.mismatch", f"ckpt: strict=False: {text}", loud=True, lines=lines)
    if firsts and group.rank == 0:
        text = (
            f"ckpt: the values of {some(firsts)} were not the same on the ranks that saved step {identity.tick.label}. "
            "These ranks are not the present ones, or held other parts of the state: the first rank's values are taken"
        )
        events.emit("restore.differed", text, loud=True, names=firsts)


def tell_overruled(events: Events, lines: list[str]) -> None:
    """Emits one warning, on entry: restored hyper-parameters replace those that the script gives."""
    more = f"; and {len(lines) - LINES_MAX} more" if len(lines) > LINES_MAX else ""
    text = (
        f"ckpt: restored hyper-parameters hold where the script gives others: {'; '.join(lines[:LINES_MAX])}{more}. To "
        'change one on purpose, set it in the block (docs/start.md, "What holds after a restart")'
    )
    events.emit("restore.overridden", text, loud=True, lines=lines)


def fill(
    link: Link, tasks: Tasks, identity: Identity, manifest: Manifest, targets: RestorePlan, written: set[int]
) -> dict[str, int]:
    """Fills the wanted tensors in place; returns the bytes by level. `RestorePlan.finish` applies all else, after all
    ranks agreed. `written` gets each frame before any of its bytes is copied; see Overwritten for when this rank or
    another fails. Errors: DamagedData, AgentError; StateMismatch of `Filler.check`."""
    filler = Filler(manifest, targets.wants, targets.tensors, written)
    with link.standing_still():
        sources = fetch(link, tasks, identity, filler.frames, filler, filler)
    filler.check()
    return sources


class Overwritten:
    """The state's own tensors that failed candidates have overwritten on this rank. Their former content is lost. The
    next candidate must fill all of them anew, or the state would be a mixture of two steps. Tensors that were made for
    a candidate do not count: they were dropped with it."""

    def __init__(self, walker: StateWalker) -> None:
        self._walker = walker
        self._names: dict[_Place, str] = {}

    @property
    def names(self) -> list[str]:
        """The names of the overwritten tensors."""
        return sorted(set(self._names.values()))

    def add(self, manifest: Manifest, targets: RestorePlan, written: Collection[int]) -> None:
        """Notes what a candidate has overwritten that failed after `fill` got the frames `written`, right or wrong."""
        if not written:
            return
        live = {_memory(local) for _, pieces in self._walker.scan().tensors.values() for local in pieces.locals}
        for want in {cut.want for cut in cuts(manifest, targets.wants) if cut.frame in written}:
            tensor = targets.tensors[want]
            if _memory(tensor) in live:
                self._names.setdefault(_place(tensor), targets.wants[want].name)

    def beside(self, targets: RestorePlan) -> list[str]:
        """The names of overwritten tensors that `targets` do not fill."""
        filled = set(map(_place, targets.tensors))
        return sorted({name for place, name in self._names.items() if place not in filled})


class _FromAgent:
    """A Stored that reads through the agent. It fetches all value blobs, each one frame, at once."""

    def __init__(self, link: Link, tasks: Tasks, identity: Identity, manifest: Manifest) -> None:
        self._link, self._tasks, self._identity = link, tasks, identity
        self._hashes = manifest.frames["hash_hi"], manifest.frames["hash_lo"]
        self.sources: dict[str, int] = {}
        self._frames: dict[tuple[str, str], int | None] = {}
        first: dict[int, int] = {}
        for box, frame in zip(manifest.extents["box"].tolist(), manifest.extents["frame"].tolist(), strict=True):
            first.setdefault(box, frame)
        for number, (tensor, _) in enumerate(manifest.boxes):
            spec = manifest.tensors[tensor]
            if spec.values:
                self._frames[spec.name, spec.owner] = first.get(number)
        self._values = self.frames({frame for frame in self._frames.values() if frame is not None})

    def values(self, name: str, owner: str) -> bytes | None:
        if (name, owner) not in self._frames:
            return None
        frame = self._frames[name, owner]
        return self._values[frame] if frame is not None else b""

    def frames(self, numbers: Collection[int]) -> Mapping[int, bytes]:
        found: dict[int, bytes] = {}
        lock = threading.Lock()
        hi, lo = self._hashes

        def deliver(number: int, raw: memoryview) -> bool:
            copy = bytes(raw)
            if frame_hash(copy) != (int(hi[number]), int(lo[number])):
                return False
            with lock:
                found[number] = copy
            return True

        if numbers:
            for level, size in fetch(self._link, self._tasks, self._identity, numbers, deliver).items():
                self.sources[level] = self.sources.get(level, 0) + size
        return found


_Place = tuple[str, int, tuple[int, ...], tuple[int, ...]]


def _memory(tensor: torch.Tensor) -> tuple[str, int]:
    """The device and address of a tensor's storage. No two living storages have the same."""
    return str(tensor.device), torch.Tensor.untyped_storage(tensor).data_ptr()


def _place(tensor: torch.Tensor) -> _Place:
    """The elements of memory that a tensor covers."""
    return str(tensor.device), torch.Tensor.data_ptr(tensor), tuple(tensor.shape), tensor.stride()

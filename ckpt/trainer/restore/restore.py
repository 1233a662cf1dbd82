"""The restore of one candidate into the live state: first its values, which tell what else to expect; then tensors."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgpack
import torch

from ckpt.errors import DamagedData, StateMismatch
from ckpt.events import Events
from ckpt.format import values
from ckpt.format.frames import frame_hash
from ckpt.format.manifest import RANK_VALUES, VALUES, Manifest
from ckpt.layout.replica_match import first_owners, match_replicas
from ckpt.storage.names import redact_url
from ckpt.threads import Tasks
from ckpt.trainer.link import collective
from ckpt.trainer.link.link import Link
from ckpt.trainer.link.options import UserOptions
from ckpt.trainer.restore.fetch import fetch
from ckpt.trainer.restore.fill import Filler
from ckpt.trainer.restore.restore_plan import RestorePlan, plan_targets
from ckpt.trainer.restore.tensor_requests import extra_lines
from ckpt.trainer.state.names import shorten_names
from ckpt.trainer.state.saved_values import SharedValues, find_differing, merge_shared
from ckpt.trainer.state.shard import storage_address, storage_addresses
from ckpt.trainer.state.state_nodes import DataNode, ModuleNode, ObjectNode, OptimizerNode
from ckpt.trainer.state.state_walk import Scan, StateWalker
from ckpt.types import Identity

LINES_MAX = 50  # differences named in one message


def read_targets(
    link: Link, tasks: Tasks, walker: StateWalker, identity: Identity, manifest: Manifest, strict: bool
) -> tuple[RestorePlan, dict[str, int]]:
    """Fetches the value trees, and plans what the state wants of the checkpoint. Touches no tensor. Returns the plan,
    and the bytes by level that they came from. Errors: DamagedData, UsageError, AgentError."""
    stored = StoredValues(link, tasks, identity, manifest)
    return make_plan(walker, manifest, stored, strict, identity.version.step), stored.bytes_by_level


def make_plan(walker: StateWalker, manifest: Manifest, stored: StoredValues, strict: bool, step: int) -> RestorePlan:
    """What the state wants of this checkpoint. Errors: DamagedData, UsageError.

    - On the mesh that saved it: this rank's own values. If they lack something (pipeline stages were split otherwise),
      the other ranks' values are merged into them.
    - On another mesh: the values that all ranks have in common, or their values merged.
    """
    here = walker.coordinate
    if here.is_in_mesh_of(manifest.coordinates):
        trees, own = _read_shared(stored, [here.text]), _read_own(stored, here.text)
        more: list[Any] = []
        if stored.read_values(VALUES, "") is None and _lacks_values(
            SharedValues.parse(trees[0]), walker.scan(), manifest
        ):
            more = _read_shared(stored, [owner for owner in manifest.coordinates if owner != here.text])
        shared, taken = merge_shared([*trees, *more]), find_differing(more, trees)
        return plan_targets(walker, manifest, shared, own, [], strict, step, differing=taken)
    trees = _read_shared(stored, manifest.coordinates)
    others = [_read_own(stored, coordinate) for coordinate in manifest.coordinates]
    same = match_replicas(manifest, stored.read_frames)
    buffers = first_owners(manifest, walker.scan().buffer_names() - same.keys())
    taken = find_differing(trees) | buffers.keys()
    return plan_targets(walker, manifest, merge_shared(trees), None, others, strict, step, {**buffers, **same}, taken)


def _lacks_values(saved: SharedValues, scan: Scan, manifest: Manifest) -> bool:
    """Whether these values of one rank lack a part of the state."""
    names = {spec.name for spec in manifest.tensors} | saved.aliases.keys()
    for node in scan.nodes:
        if isinstance(node, ModuleNode):
            if not scan.payloads[node.path]["extra"].keys() <= saved.modules.get(node.path, {}).keys():
                return True
        elif isinstance(node, OptimizerNode):
            held = saved.optimizers.get(node.path)
            params = {param.name for line in scan.views[node.path].params_by_group for param in line}
            if held is None or not params <= held.group_indices.keys():
                return True
        elif isinstance(node, (ObjectNode, DataNode)):
            kind = saved.kind_of(node.path)
            if kind is None or (
                isinstance(node, ObjectNode) and kind == "value" and saved.data[node.path].value is None
            ):
                return True
    return any(name not in names for name in scan.tensors)


def _read_shared(stored: StoredValues, coordinates: Iterable[str]) -> list[Any]:
    """The values that all ranks had in common; if they differed, the different ones of these ranks, each once."""
    common = stored.read_values(VALUES, "")
    found = [common] if common is not None else [_read_required(stored, VALUES, owner) for owner in coordinates]
    trees = [values.decode(blob) if blob else {} for blob in dict.fromkeys(found)]
    # Each tree is checked before any are compared and merged.
    for tree in trees:
        SharedValues.parse(tree)
    return trees


def _read_own(stored: StoredValues, coordinate: str) -> Any:
    blob = _read_required(stored, RANK_VALUES, coordinate)
    return values.decode(blob) if blob else {}


def _read_required(stored: StoredValues, name: str, owner: str) -> bytes:
    blob = stored.read_values(name, owner)
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
    hint: str = "",
) -> None:
    """Agrees with all ranks whether the state matches the checkpoint; a collective. A name that only the checkpoint has
    is extra if no rank wants it. A tensor that only one rank could restore is extra if that rank does not want it.
    Errors: StateMismatch names all differences. It is also raised if this candidate would leave tensors as a failed one
    has left them, even on one rank only. Without `strict`, differences are a warning. `hint`: a sentence for the
    error, or ""."""
    mine = {
        "extra": list(targets.extra_names),
        "own": list(targets.own_extra_names),
        "subtrees": dict(targets.extra_subtrees),
        "lines": targets.difference_lines,
        "beside": overwritten.find_unfilled(targets),
        "spoilt": overwritten.names,
        "firsts": list(targets.first_rank_paths),
    }
    every = [msgpack.unpackb(data) for data in group.gather(msgpack.packb(mine))]

    def any_of(key: str) -> list[str]:
        return sorted({name for each in every for name in each[key]})

    extra = sorted(set.intersection(*(set(each["extra"]) for each in every)))
    lines = any_of("lines")
    # A subtree is whole only if every rank lacks all of it: the longest prefix of all ranks counts.
    subtrees: dict[str, str] = {}
    for name, subtree in (item for each in every for item in each["subtrees"].items()):
        subtrees[name] = max(subtrees.get(name, ""), subtree, key=len)
    lines += extra_lines(extra, subtrees)
    own = {name: rank for rank, each in reversed(list(enumerate(every))) for name in each["own"]}
    for rank in range(len(every)):
        names = [name for name, first in own.items() if first == rank and name not in extra]
        lines += extra_lines(names, subtrees, f" of rank {rank}")
    beside, spoilt, firsts = any_of("beside"), any_of("spoilt"), any_of("firsts")
    more = f"; and {len(lines) - LINES_MAX} more" if len(lines) > LINES_MAX else ""
    text = "; ".join(lines[:LINES_MAX]) + more
    does_not_match = f"the state does not match the checkpoint of step {identity.version.label}: {text}. "
    if beside or (spoilt and lines and asked.strict):
        raise StateMismatch(
            f"{does_not_match if lines else ''}A newer checkpoint was tried before and is damaged: "
            f"{shorten_names(beside or spoilt)} now hold what could be read of it, and what they held is lost. Run "
            f"`ckpt branch {redact_url(asked.url)} --at {identity}`, so that the damaged one is not tried again. Then "
            "start "
            f"a new process, with a state that matches step {identity.version.label}, or with strict=False"
        )
    if lines and asked.strict:
        raise StateMismatch(
            f"{does_not_match}{hint}Nothing was changed. Register the same state, pass strict=False to go on with what "
            "fits, or use another URL to begin anew"
        )
    if lines and group.rank == 0:
        events.emit("restore.mismatch", f"ckpt: strict=False: {text}", loud=True, lines=lines)
    if firsts and group.rank == 0:
        text = (
            f"ckpt: the values of {shorten_names(firsts)} were not the same on the ranks that saved step "
            f"{identity.version.label}. "
            "These ranks are not the present ones, or held other parts of the state: the first rank's values are taken"
        )
        events.emit("restore.differed", text, loud=True, names=firsts)


def warn_overruled(events: Events, lines: list[str]) -> None:
    """Emits one warning, on entry: restored hyper-parameters replace those that the script gives."""
    more = f"; and {len(lines) - LINES_MAX} more" if len(lines) > LINES_MAX else ""
    text = (
        f"ckpt: restored hyper-parameters hold where the script gives others: {'; '.join(lines[:LINES_MAX])}{more}. To "
        'change one on purpose, set it in the block (docs/start.md, "What holds after a restart")'
    )
    events.emit("restore.overridden", text, loud=True, lines=lines)


def fill(
    link: Link, tasks: Tasks, identity: Identity, manifest: Manifest, targets: RestorePlan, overwritten: Overwritten
) -> dict[str, int]:
    """Fills the wanted tensors in place; returns the bytes by level. `RestorePlan.install` applies all else, after all
    ranks agreed. See Overwritten for when this rank or another fails. Errors: DamagedData, AgentError; StateMismatch of
    `Filler.check_overlaps`."""
    filler = Filler(manifest, targets.wants, targets.tensors)
    overwritten.begin(targets, filler)
    with link.training_paused():
        sources = fetch(link, tasks, identity, filler.frames, filler, filler)
    filler.check_overlaps()
    return sources


class Overwritten:
    """The state's own tensors that failed candidates may have overwritten on this rank. Their former content is lost.
    The next candidate must fill all of them anew, or the state would be a mixture of two steps. Tensors that were made
    for a candidate do not count: they were dropped with it."""

    def __init__(self, walker: StateWalker) -> None:
        self._walker = walker
        self._names_by_place: dict[_Place, str] = {}
        self._candidate: tuple[RestorePlan, Filler] | None = None  # the present one

    @property
    def names(self) -> list[str]:
        """The names of the overwritten tensors."""
        return sorted(set(self._names_by_place.values()))

    def begin(self, targets: RestorePlan, filler: Filler) -> None:
        """Notes that the tensors of a candidate are to be filled."""
        self._candidate = targets, filler

    def add_failed(self) -> None:
        """Notes what the present candidate may have overwritten: it has failed on this rank or another one."""
        if self._candidate is None or not self._candidate[1].has_written:
            return
        targets, _ = self._candidate
        scan = self._walker.scan()
        live = storage_addresses(local for _, pieces in scan.tensors.values() for local in pieces.local_views)
        for want, tensor in zip(targets.wants, targets.tensors, strict=True):
            if storage_address(tensor) in live:
                self._names_by_place.setdefault(_elements_key(tensor), want.name)

    def find_unfilled(self, targets: RestorePlan) -> list[str]:
        """The names of overwritten tensors that `targets` do not fill."""
        filled = set(map(_elements_key, targets.tensors))
        return sorted({name for place, name in self._names_by_place.items() if place not in filled})


_Place = tuple[str, int, tuple[int, ...], tuple[int, ...]]


def _elements_key(tensor: torch.Tensor) -> _Place:
    """The elements of memory that a tensor covers."""
    return str(tensor.device), torch.Tensor.data_ptr(tensor), tuple(tensor.shape), tensor.stride()


class StoredValues:
    """Reads a checkpoint through the agent before it is known which tensors are wanted. It fetches all value blobs,
    each one frame, at once."""

    def __init__(self, link: Link, tasks: Tasks, identity: Identity, manifest: Manifest) -> None:
        self._link, self._tasks, self._identity = link, tasks, identity
        self._hashes = manifest.frames["hash_hi"], manifest.frames["hash_lo"]
        self.bytes_by_level: dict[str, int] = {}
        self._frame_by_blob: dict[tuple[str, str], int | None] = {}
        first: dict[int, int] = {}
        for box, frame in zip(manifest.extents["box"].tolist(), manifest.extents["frame"].tolist(), strict=True):
            first.setdefault(box, frame)
        for number, tensor in enumerate(manifest.tensor_by_box):
            spec = manifest.tensors[tensor]
            if spec.values:
                self._frame_by_blob[spec.name, spec.owner] = first.get(number)
        self._blob_by_frame = self.read_frames({frame for frame in self._frame_by_blob.values() if frame is not None})

    def read_values(self, name: str, owner: str) -> bytes | None:
        """The value blob of that name and owner; None if there is none."""
        if (name, owner) not in self._frame_by_blob:
            return None
        frame = self._frame_by_blob[name, owner]
        return self._blob_by_frame[frame] if frame is not None else b""

    def read_frames(self, numbers: Collection[int]) -> Mapping[int, bytes]:
        """The raw bytes of these frames. All ranks ask for the same. Errors: DamagedData."""
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
                self.bytes_by_level[level] = self.bytes_by_level.get(level, 0) + size
        return found

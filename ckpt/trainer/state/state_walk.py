"""The walk: turns a rank's state into a layout, the live tensors that it describes, and two trees of values.

Guarantees:
- Names are canonical (names.py): the same state has the same names under FSDP2, DDP or no wrapper.
- A tensor that the state holds under several names (tied parameters) is walked once, under the first name.
- The views are of live memory, and keep it alive. `has_changed()` tells when the state no longer holds that memory.
- Nothing is stepped, copied or moved. FSDP2 modules left gathered (after evaluation) are resharded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ckpt.errors import UsageError
from ckpt.format import values
from ckpt.gc_pause import pause_gc
from ckpt.layout.layout import Entry, Layout
from ckpt.trainer.state import composites, generators, names, optimizers, state_nodes, value_trees
from ckpt.trainer.state.fingerprint import Fingerprint, describe_answer
from ckpt.trainer.state.loaders import read_loader_state
from ckpt.trainer.state.mesh_coordinate import Coordinate
from ckpt.trainer.state.optimizers import OptimizerView, Owners
from ckpt.trainer.state.shard import (
    Cutter,
    Pieces,
    Shard,
    is_dtensor,
    memory_order,
    storage_addresses,
)
from ckpt.trainer.state.state_checks import check_trained_saved
from ckpt.trainer.state.state_nodes import (
    DataNode,
    GeneratorNode,
    LoaderNode,
    ModuleNode,
    NamedTensor,
    ObjectNode,
    OptimizerNode,
    Read,
    StateNode,
)
from ckpt.trainer.state.tensor_hashes import hash_base
from ckpt.types import SMALL_BYTES


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Walk:
    """One walk of a state. Per entry of `layout`:

    - `tensors`: the live local tensor of each box, on any device, maybe not contiguous. Its row-major bytes are the
      box's.
    - `deferrable`: whether it may be copied during the next step once that is verified to be safe. True for what a
      registered optimizer trains, and its state, unless small.
    - `may_have_replicas`: whether other ranks may hold equal boxes.

    `scan`: the structure that was walked. The rest is what `StateWalker.has_changed` compares: the signatures of all
    nodes, the fingerprint of plain containers and tensors, and the answers of `Scan.readers`. FSDP2 modules that may be
    left gathered are resharded before.
    """

    layout: Layout
    tensors: tuple[tuple[torch.Tensor, ...], ...]
    deferrable: tuple[bool, ...]
    may_have_replicas: tuple[bool, ...]
    scan: Scan
    _node_signatures: list[tuple[Any, ...]]
    _fingerprint: Fingerprint
    _answers: list[Any]
    _gathered_modules: list[Any]

    @property
    def has_loaders(self) -> bool:
        """Whether the state has a loader with a position."""
        return any(isinstance(node, LoaderNode) for node in self.scan.nodes)

    @property
    def storages(self) -> frozenset[int]:
        """The addresses of the storages that the tensors lie in."""
        return storage_addresses(tensor for line in self.tensors for tensor in line)


@dataclass(frozen=True, slots=True)
class Scan:
    """The structure of a state.

    - By path of a node: `tensors_by_node`, its tensors under all their names; `fixed_payloads`, a payload without any
      value that could change; `readers`, how a node is read that must be asked which tensors and values it holds;
      `payloads`, the values of its newest answer, which `StateWalker.values` takes. So what is saved refers to no
      tensor that was not there when the structure was compared.
    - By name of a tensor: `tensors`, each tensor once; `aliases`, the other names, each with the name that the tensor
      is saved under; `orders`, the dimensions in memory of a tensor that is not row-major (shard.order_of).
    - `composites`: by path of a module, its tensors that are saved in parts, by name.
    - `frozen`: by name, the frozen parameters that are left out (StateWalker), and what a custom module adds to them.
    - `constants`: the parts of the values that never change.
    """

    nodes: list[StateNode]
    tensors_by_node: dict[str, list[NamedTensor]]
    views: dict[str, OptimizerView]
    fixed_payloads: dict[str, dict[str, Any]]
    readers: dict[str, Callable[[], Read]]
    payloads: dict[str, dict[str, Any]]
    tensors: dict[str, tuple[NamedTensor, Pieces]]
    aliases: dict[str, str]
    orders: dict[str, list[int]]
    constants: values.Constants
    composites: dict[str, dict[str, torch.Tensor]]
    frozen: dict[str, torch.Tensor]

    def pieces(self, name: str) -> Pieces:
        """The Pieces of a tensor of the state, under any of its names."""
        return self.tensors[self.aliases.get(name, name)][1]

    def buffer_names(self) -> set[str]:
        """The names of the modules' tensors that are not parameters. Where they differ between ranks (a BatchNorm's
        statistics), DDP keeps rank 0's."""
        held: set[str] = set()
        for node in (node for node in self.nodes if isinstance(node, ModuleNode)):
            found = self.tensors_by_node[node.path]
            # The state_dict() of a custom module may give copies, also of parameters.
            if names.is_custom(node.value):
                own = {id(site.tensor) for site in names.sites(node.value)}
                found = [named for named in found if id(named.tensor) in own]
            held |= {named.name for named in found if not isinstance(named.tensor, nn.Parameter)}
        return held & self.tensors.keys()

    def take_payload(self, node: StateNode) -> dict[str, Any] | None:
        """The values of a node, as of its newest answer; None for a node that belongs to the rank."""
        known = self.payloads.pop(node.path, None)
        payload = self.fixed_payloads.get(node.path, known)
        if payload is None and node.path in self.readers:
            payload = self.readers[node.path]()[1]
        elif payload is None and node.path in self.views:
            payload = self.views[node.path].payload()
        if node.path in self.composites:
            told = {name: composites.describe(tensor) for name, tensor in self.composites[node.path].items()}
            return {**(payload or {}), "composites": told}
        return payload


class StateWalker:
    """Walks `state`, the live dict that the user registered. For the training thread only.

    - `generators`: whether the process's own random number generators belong to the state.
    - `trainable_only`: frozen parameters of modules that have trainable ones do not belong to it.
    - `saved_base`: hashes of the frozen ones in the restored checkpoint.

    Errors: UsageError names what cannot be saved, and a remedy."""

    def __init__(
        self, state: dict[str, Any], coordinate: Coordinate, generators: bool = True, trainable_only: bool = False
    ) -> None:
        self.state = state
        self.coordinate = coordinate
        self.has_process_generators = generators
        self.trainable_only = trainable_only
        self.saved_base: Mapping[str, str] = {}
        self._base: dict[str, str] = {}

    @pause_gc()
    def walk(self) -> Walk:
        """Walks the whole state, without its values. Once per structure; takes about 15 us a tensor."""
        scan, answers = self._scan()
        modules = [m for node in scan.nodes if isinstance(node, ModuleNode) for _, m in names.modules(node.value)]
        fingerprint = Fingerprint(
            modules=[module for module in modules if isinstance(vars(module).get("_parameters"), dict)],
            optimizers=[view.optimizer for view in scan.views.values()],
            dicts=[held for view in scan.views.values() for held in view.plain_states],
            distributed=[n.tensor for found in scan.tensors_by_node.values() for n in found if is_dtensor(n.tensor)],
            composites=[each for held in scan.composites.values() for each in held.values()],
            live=[tensor for _, pieces in scan.tensors.values() for tensor in pieces.live_tensors],
        )
        order = sorted(scan.tensors)
        chosen = [scan.tensors[name] for name in order]
        return Walk(
            layout=Layout(tuple(Entry(n, p.dtype, p.shape, p.boxes) for n, (_, p) in zip(order, chosen, strict=True))),
            tensors=tuple(pieces.local_views for _, pieces in chosen),
            deferrable=tuple(_is_deferrable(named, pieces) for named, pieces in chosen),
            may_have_replicas=tuple(pieces.may_have_replicas for _, pieces in chosen),
            scan=scan,
            _node_signatures=list(map(_signature, scan.nodes)),
            _fingerprint=fingerprint,
            _answers=list(map(describe_answer, answers)),
            _gathered_modules=names.find_fsdp_modules(modules),
        )

    def has_changed(self, walk: Walk) -> bool:
        """Whether walk() would now find other names, dtypes, shapes, boxes or memory. Takes about 10 ms for 20,000
        tensors. It calls state_dict() of objects and custom modules, and get_extra_state() of modules that have it. It
        reshards FSDP2 modules that are left gathered."""
        walk.scan.payloads.clear()
        for module in walk._gathered_modules:
            module.reshard()
        now = list(map(_signature, state_nodes.find_nodes(self.state)))
        if len(now) != len(walk._node_signatures) or not all(map(_is_same_signature, now, walk._node_signatures)):
            return True
        try:
            if walk._fingerprint.is_stale() or any(tensor.requires_grad for tensor in walk.scan.frozen.values()):
                return True
            answers = {path: read() for path, read in walk.scan.readers.items()}
            walk.scan.payloads.update((path, payload) for path, (_, payload) in answers.items())
            return [*map(describe_answer, answers.values())] != walk._answers
        except RuntimeError:
            # A tensor has lost its storage. The next walk refuses it by name.
            return True

    def find_changed_base(self) -> list[str]:
        """The frozen parameters whose hashes are not those of `saved_base`. From now on these hashes are saved."""
        self._base = hash_base(self.scan().frozen)
        return sorted(name for name, told in self._base.items() if self.saved_base.get(name, told) != told)

    def values(self, walk: Walk, positions: bool = True) -> tuple[Any, Any]:
        """(shared, own): the values for the structure of `walk`. Those of objects are as of the walk, or of a later
        `has_changed`; call that just before. `shared` is by its nature the same on all ranks; `own` is this rank's.
        They may hold live objects: encode them before the next step. `positions`: whether loaders are asked for their
        state. That begins an epoch in a loader not iterated yet, so ask only after the restore."""
        scan = walk.scan
        payloads = ((node.path, scan.take_payload(node)) for node in scan.nodes)
        objects = {path: payload for path, payload in payloads if payload is not None}
        loaders = [node for node in scan.nodes if positions and isinstance(node, LoaderNode)]
        here = self.coordinate
        own = {
            "coordinate": here.text,
            "mesh": here.mesh,
            "data": here.data,
            "data_rank": here.data_rank,
            "data_world": here.data_world,
            "generators": generators.read_states(self.find_streams(scan.nodes)),
            **({"base": self._read_base(scan, positions)} if self.trainable_only else {}),
            "loaders": {
                node.path: value_trees.embed_tensors(read_loader_state(node.value), node.path) for node in loaders
            },
        }
        return {"objects": objects, "aliases": scan.aliases, "orders": scan.orders}, own

    def _read_base(self, scan: Scan, is_loaded: bool) -> dict[str, str]:
        """The hashes of the frozen parameters, made once: nothing trains them. `is_loaded`: whether they have their
        values by now, and not only after the restore."""
        if is_loaded and self._base.keys() != scan.frozen.keys():
            self._base = hash_base(scan.frozen)
        return self._base

    def find_streams(self, found: Sequence[StateNode]) -> dict[str, generators.RandomStream]:
        """The generators that belong to the state."""
        objects = {node.path: node.value for node in found if isinstance(node, GeneratorNode)}
        return generators.find_streams(objects, self.has_process_generators)

    def scan(self) -> Scan:
        """The structure of the state now."""
        return self._scan()[0]

    def _scan(self) -> tuple[Scan, list[Read]]:
        """The structure, and what each node of `readers` has that the fingerprint does not watch."""
        all_nodes = state_nodes.find_nodes(self.state)
        owners = Owners()
        found: dict[str, list[NamedTensor]] = {}
        views: dict[str, OptimizerView] = {}
        fixed: dict[str, dict[str, Any]] = {}
        readers: dict[str, Callable[[], Read]] = {}
        payloads: dict[str, dict[str, Any]] = {}
        answers: list[Read] = []
        parted: dict[str, dict[str, torch.Tensor]] = {}
        frozen: dict[str, torch.Tensor] = {}
        for node in all_nodes:
            if isinstance(node, ModuleNode):
                for module in names.find_fsdp_modules([m for _, m in names.modules(node.value)]):
                    module.reshard()
                found[node.path], payload = node.read()
                payloads[node.path] = payload
                owners.add_module(node.path, node.value, found[node.path])
                if self.trainable_only:
                    found[node.path], left = _part_frozen(node.value, found[node.path])
                    frozen |= left
                if whole := {n.name: n.tensor for n in found[node.path] if composites.is_composite(n.tensor)}:
                    parted[node.path] = whole  # type: ignore[assignment]
                    found[node.path] = [part for named in found[node.path] for part in named.parts()]
                if not payload["extra"]:
                    fixed[node.path] = payload
                if names.is_custom(node.value):
                    readers[node.path] = node.read
                    answers.append((found[node.path], payload))
                elif payload["extra"]:
                    readers[node.path] = functools.partial(node.read_extra, names.find_extra_state(node.value))
                    inner = {name for body in payload["extra"].values() for _, name in body["tensors"]}
                    answers.append(([named for named in found[node.path] if named.name in inner], payload))
            elif isinstance(node, (ObjectNode, DataNode)):
                readers[node.path] = node.read
                found[node.path], payloads[node.path] = said = node.read()
                answers.append(said)
        for node in all_nodes:
            if isinstance(node, DataNode):
                owners.add_tensors(found[node.path])
        for node in all_nodes:
            if isinstance(node, OptimizerNode):
                view = views[node.path] = optimizers.make_view(node.path, node.value, owners)
                found[node.path] = view.tensors
                if view.is_mixed:
                    readers[node.path], payloads[node.path] = view.read, view.payload()
                    answers.append((view.tensors, payloads[node.path]))
        tensors, aliases = _deduplicate(all_nodes, found, owners, views, Cutter(self.coordinate.world))
        check_trained_saved(all_nodes, found, views)
        orders = _find_orders(tensors)
        parts = [*fixed.values(), aliases, orders, *(part for view in views.values() for part in view.constants())]
        constants = values.Constants(parts)
        by_path = found, views, fixed, readers, payloads
        return Scan(all_nodes, *by_path, tensors, aliases, orders, constants, parted, frozen), answers


def _part_frozen(root: nn.Module, found: Sequence[NamedTensor]) -> tuple[list[NamedTensor], dict[str, torch.Tensor]]:
    """The tensors of a module without its frozen parameters; and these by name. A module without a trainable parameter
    keeps all: it may be an average."""
    if not any(param.requires_grad for param in root.parameters()):
        return list(found), {}
    held = {named.name for named in found if isinstance(named.tensor, nn.Parameter) and not named.tensor.requires_grad}
    # What a quantised weight adds to the state_dict() of its module has names below that of the weight.
    left = {
        named.name: named.tensor
        for named in found
        if isinstance(named.tensor, torch.Tensor)
        and (named.name in held or any(prefix in held for prefix in names.prefixes(named.name)))
    }
    return [named for named in found if named.name not in left], left


def _deduplicate(
    all_nodes: Sequence[StateNode],
    found: dict[str, list[NamedTensor]],
    owners: Owners,
    views: dict[str, OptimizerView],
    cutter: Cutter,
) -> tuple[dict[str, tuple[NamedTensor, Pieces]], dict[str, str]]:
    """Each tensor once, under the first of its names, with its Pieces; and the aliases."""
    trained = {
        id(p.tensor) for view in views.values() for line in view.params_by_group for p in line if p.tensor.requires_grad
    }
    tensors: dict[str, tuple[NamedTensor, Pieces]] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    refused = values.Refused()
    for named in (named for node in all_nodes for named in found.get(node.path, ())):
        bare = named.tensor.tensor if isinstance(named.tensor, Shard) else named.tensor
        name = first.setdefault(id(bare), named.name)
        if named.name in tensors or named.name in aliases:
            why = "rename one: a key may have a dot, or be a number beside the same number as a text"
            raise UsageError(f"two tensors of the state have the name {named.name!r}; {why}")
        if name != named.name:
            aliases[named.name] = name
            continue
        names.check_name(name)
        shard = owners.shard_by_id.get(id(bare), named.tensor)
        try:
            pieces = cutter.pieces(shard, name)
        except UsageError as exc:
            refused.add(functools.partial(str, name), str(exc).removeprefix(f"{name}: "))
            continue
        tensors[name] = (NamedTensor(name, shard, named.is_trained or id(bare) in trained), pieces)
    refused.raise_if_any()
    return tensors, aliases


def _find_orders(tensors: Mapping[str, tuple[NamedTensor, Pieces]]) -> dict[str, list[int]]:
    with torch._C.DisableTorchFunctionSubclass():
        found = (
            (name, memory_order(pieces.live_tensors[0])) for name, (_, pieces) in tensors.items() if pieces.live_tensors
        )
        return {name: list(order) for name, order in found if order is not None}


def _is_deferrable(named: NamedTensor, pieces: Pieces) -> bool:
    return named.is_trained and bool(pieces.shape) and sum(t.nbytes for t in pieces.local_views) >= SMALL_BYTES


def _signature(node: StateNode) -> tuple[Any, ...]:
    """What identifies a node. Plain data may be replaced freely: its content is compared when it is read."""
    return (type(node), node.path, None if isinstance(node, DataNode) else node.value)


def _is_same_signature(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return a[0] is b[0] and a[1] == b[1] and a[2] is b[2]

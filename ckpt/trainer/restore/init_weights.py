"""Initial weights (`init=`): fills the modules if the run has no checkpoint.

The source is a .safetensors file, a folder of them, or the newest checkpoint of another ckpt URL. Only modules are
filled. Names are canonical ("model.0.weight") or the module's own. A tied weight is found under any of its names. A
custom module (names.is_custom) gets its state by its own load_state_dict().
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ckpt.errors import DamagedData, NoCheckpoint, StateMismatch, UsageError
from ckpt.format.manifest import Record, TensorSpec
from ckpt.format.safetensors import SafetensorsReader, TensorHead
from ckpt.layout.layout import Entry
from ckpt.layout.replica_match import first_owners
from ckpt.layout.reshard import Want
from ckpt.storage import open as open_store
from ckpt.store.reader import FrameReader, load_values, use_newest_readable
from ckpt.store.run import Run
from ckpt.trainer.restore.fill import Filler
from ckpt.trainer.restore.tensor_requests import empty_like
from ckpt.trainer.state import names
from ckpt.trainer.state.saved_values import SharedValues, merge_shared
from ckpt.trainer.state.shard import Cutter, allow_in_place
from ckpt.trainer.state.state_nodes import ModuleNode
from ckpt.trainer.state.state_walk import StateWalker, Walk

LINES_MAX = 20


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The outcome of load_weights.

    - `unfit_reasons`: by name, why a tensor was left as it was.
    - `casts_text`: conversions to another dtype, in words; "" for none.
    - `first_rank_buffers`: buffers that differed between the ranks that saved them. The first rank's were taken.
    - `versions`: by module, its format versions at the save.
    """

    unfit_reasons: Mapping[str, str]
    has_filled: bool
    casts_text: str = ""
    first_rank_buffers: tuple[str, ...] = ()
    versions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def load_weights(where: str, walker: StateWalker, strict: bool, is_base: bool = False) -> LoadedWeights:
    """Fills every tensor of every module in the state from `where`; if not `strict`, those that fit. If the state has
    only trainable parameters, the frozen ones must fit, and the trainable ones are filled if they are there; if
    `is_base`, they are left. Errors: StateMismatch names tensors that are missing there or have another shape;
    UsageError, DamagedData, StorageError."""
    frozen = walker.scan().frozen if walker.trainable_only else None
    if frozen is not None:
        walker = StateWalker(walker.state, walker.coordinate, walker.has_process_generators)
    walk = walker.walk()
    modules = [node for node in walk.scan.nodes if isinstance(node, ModuleNode)]
    if not modules:
        raise UsageError("init= fills modules, and there is none in state=")
    wanted = list(_find_wanted(modules, walker, walk))
    if frozen is not None:
        wanted = [
            replace(each, is_optional=not {each.entry.name, *names.prefixes(each.entry.name)} & frozen.keys())
            for each in wanted
        ]
        wanted = [each for each in wanted if not (is_base and each.is_optional)]
    path = Path(where)
    files = _find_files(path) if path.exists() else []
    loaded = _from_files(where, files, wanted, strict) if files else _from_run(where, wanted, strict)
    for node in modules:
        if names.is_custom(node.value):
            its = [each for each in wanted if each.module == node.path and each.entry.name not in loaded.unfit_reasons]
            held = {each.key: each.tensor for each in its}
            with torch.no_grad():
                node.load(held, loaded.versions.get(node.path, {}))
    return loaded


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor of a module, the names that it may have in the source, and the local tensors to fill. `is_buffer`: any
    one rank's value will do. `is_optional`: the source may lack it. For a custom module: its path `module`, and a new
    `tensor` for a `key` of its state_dict()."""

    entry: Entry
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    is_buffer: bool
    module: str = ""
    key: str = ""
    tensor: torch.Tensor | None = None
    is_optional: bool = False


def _find_wanted(modules: Sequence[ModuleNode], walker: StateWalker, walk: Walk) -> Iterator[_Wanted]:
    places = {entry.name: (entry, its) for entry, its in zip(walk.layout.entries, walk.tensors, strict=True)}
    found = [(node.path, named.name) for node in modules for named in walk.scan.tensors_by_node[node.path]]
    known: dict[str, list[str]] = {}  # all names of a tensor, by the name that it is saved under

    def home(name: str) -> str:
        return walk.scan.aliases.get(name, name)

    for _, name in found:
        known.setdefault(home(name), []).append(name)
    for path, name in found:
        known[home(name)].append(name[len(path) + 1 :])

    def known_as(name: str) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(
                each
                for known_name in (name, home(name), *known[home(name)])
                for each in (known_name, _base_name(known_name))
            )
        )

    filled: set[str] = set()
    buffers = walk.scan.buffer_names()
    cutter = Cutter(walker.coordinate.world)
    for node in modules:
        if not names.is_custom(node.value):
            for named in walk.scan.tensors_by_node[node.path]:
                if home(named.name) not in filled:
                    filled.add(home(named.name))
                    entry, tensors = places[home(named.name)]
                    is_buffer = home(named.name) in buffers
                    yield _Wanted(replace(entry, name=named.name), known_as(named.name), tensors, is_buffer)
            continue
        for name, key, value in names.CustomStateDict.read(node.value).items:
            if isinstance(value, torch.Tensor):
                full, new = names.join(node.path, name), empty_like(value)
                pieces = cutter.pieces(new, full)
                entry = Entry(full, pieces.dtype, pieces.shape, pieces.boxes)
                yield _Wanted(entry, known_as(full), pieces.local_views, home(full) in buffers, node.path, key, new)


def _base_name(name: str) -> str:
    """The name that a parameter has in the base model, without what PEFT puts around its modules."""
    name = name.replace("base_model.model.", "")
    return re.sub(r"\.(base_layer|original_module|modules_to_save\.[^.]+)\.", ".", name)


def _find_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def _match_names(
    wanted: list[_Wanted], there: Callable[[_Wanted, str], tuple[int, ...] | None], where: str, strict: bool
) -> tuple[list[tuple[_Wanted, str]], dict[str, str]]:
    """The tensors to fill, each with its name in the source; and why others cannot be filled, by name. `there`: the
    shape of what the source has under a name; None for nothing. Optional tensors may lack one. Errors: StateMismatch if
    `strict` and any other cannot be filled."""
    found: list[tuple[_Wanted, str]] = []
    unfit: dict[str, str] = {}
    for each in wanted:
        entry = each.entry
        name = next((name for name in each.names if there(each, name) is not None), None)
        if each.is_optional and (name is None or there(each, name) != entry.shape):
            continue
        if name is None:
            unfit[entry.name] = f"{entry.name} is not there"
        elif (shape := there(each, name)) != entry.shape:
            unfit[entry.name] = f"{entry.name} has shape {list(shape or ())} there and {list(entry.shape)} here"
        else:
            found.append((each, name))
    if unfit and strict:
        lines = join_reasons(unfit.values())
        raise StateMismatch(f"init={where!r} does not fit the modules: {lines}. strict=False begins with what fits")
    return found, unfit


def join_reasons(unfit: Iterable[str]) -> str:
    lines = list(unfit)
    more = f" (and {len(lines) - LINES_MAX} more)" if len(lines) > LINES_MAX else ""
    return f"{'; '.join(lines[:LINES_MAX])}{more}"


def _from_files(where: str, files: list[Path], wanted: list[_Wanted], strict: bool) -> LoadedWeights:
    cast: list[str] = []
    with ExitStack() as stack:
        homes: dict[str, tuple[SafetensorsReader, TensorHead]] = {}
        for file in files:
            reader = stack.enter_context(_open_safetensors(where, file))
            homes.update((name, (reader, head)) for name, head in reader.tensors.items())
        shapes = {name: head.shape for name, (_, head) in homes.items()}
        found, unfit = _match_names(wanted, lambda _, name: shapes.get(name), where, strict)
        for each, name in found:
            entry, (reader, head) = each.entry, homes[name]
            if not head.bytes:
                continue
            dtype = getattr(torch, head.dtype, None)
            if dtype is None:
                lacks = f"which torch {torch.__version__} does not have"
                raise StateMismatch(f"init={where!r}: {name} is {head.dtype}, {lacks}")
            if head.dtype != entry.dtype:
                cast.append(f"{entry.name} from {head.dtype} to {entry.dtype}")
            whole = torch.frombuffer(bytearray(reader.data(name)), dtype=dtype).view(head.shape)
            for box, tensor in zip(entry.boxes, each.tensors, strict=True):
                cut = tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))
                with torch.no_grad(), allow_in_place(tensor):
                    tensor.copy_(whole[cut])
    more = f" and {len(cast) - 5} more" if len(cast) > 5 else ""
    return LoadedWeights(unfit, bool(found), casts_text=f"{', '.join(cast[:5])}{more}")


def _open_safetensors(where: str, file: Path) -> SafetensorsReader:
    try:
        return SafetensorsReader(file)
    except DamagedData as exc:
        if file.suffix == ".safetensors":
            raise
        raise UsageError(
            f"init={where!r} is no .safetensors file; what torch.save wrote is not read, since a pickle may run code: "
            "make one with safetensors.torch.save_file(torch.load(FILE, weights_only=True), NEW)"
        ) from exc


def _from_run(where: str, wanted: list[_Wanted], strict: bool) -> LoadedWeights:
    store = open_store(where)

    def use(record: Record) -> LoadedWeights:
        manifest = record.manifest
        specs = {(spec.name, spec.owner): spec for spec in manifest.tensors if not spec.values}
        owners = first_owners(manifest, {name for each in wanted if each.is_buffer for name in each.names})

        def spec_of(each: _Wanted, name: str) -> TensorSpec | None:
            own = specs.get((name, owners.get(name, ""))) if each.is_buffer else None
            return specs.get((name, ""), own)

        def there(each: _Wanted, name: str) -> tuple[int, ...] | None:
            spec = spec_of(each, name)
            return None if spec is None else spec.shape

        wants: list[Want] = []
        tensors: list[torch.Tensor] = []
        firsts: list[str] = []
        found, unfit = _match_names(wanted, there, where, strict)
        for each, name in found:
            entry, spec = each.entry, spec_of(each, name)
            assert spec is not None
            if spec.dtype != entry.dtype:
                raise StateMismatch(
                    f"init={where!r}: {entry.name} is {spec.dtype} there and {entry.dtype} here; export it with "
                    "`ckpt restore --dtype` first"
                )
            wants += [Want(name, spec.owner, entry.dtype, entry.shape, box) for box in entry.boxes]
            tensors += each.tensors
            firsts += [entry.name] if spec.owner else []
        filler = Filler(manifest, wants, tensors)
        lengths = manifest.frames["length"]
        held: dict[int, bytearray] = {}

        def out(frame: int) -> memoryview:
            held[frame] = bytearray(int(lengths[frame]))
            return memoryview(held[frame])

        def deliver(frame: int) -> None:
            if not filler(frame, memoryview(held.pop(frame))):
                raise DamagedData(f"init={where!r}: frame {frame} changed in this host's memory while it was copied")

        reader = FrameReader(store, record)
        reader.read(filler.frames, deliver, out)
        filler.check_overlaps()
        versions = _read_versions(reader) if any(each.module for each in wanted) else {}
        return LoadedWeights(unfit, bool(found), first_rank_buffers=tuple(firsts), versions=versions)

    try:
        return use_newest_readable(Run(store), use)
    except NoCheckpoint as exc:
        raise UsageError(f"init={where!r} is no .safetensors file or folder, and no ckpt run: {exc}") from exc
    finally:
        store.close()


def _read_versions(reader: FrameReader) -> Mapping[str, Mapping[str, int]]:
    held = load_values(reader)
    trees = [tree for tree in (held.shared, *held.shared_by_coordinate.values()) if tree is not None]
    return SharedValues.parse(merge_shared(trees)).versions if trees else {}

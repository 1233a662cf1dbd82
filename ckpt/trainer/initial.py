"""`init=`: weights to begin with, where the run has no checkpoint: a .safetensors file, a folder of them, or the newest
checkpoint of another ckpt URL. Only modules are filled; names are canonical ("model.0.weight") or the module's own. A
tied weight is found under any of its names; a module that says itself how it is loaded gets its state that way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ckpt.errors import DamagedData, NoCheckpoint, StateMismatch, UsageError
from ckpt.format.manifest import Record
from ckpt.format.safetensors import SafetensorsReader, TensorHead
from ckpt.plan.layout import Entry
from ckpt.plan.reshard import Want
from ckpt.storage import open as open_store
from ckpt.store.reader import FrameReader, newest_readable
from ckpt.store.run import Run
from ckpt.trainer import names
from ckpt.trainer.fill import Filler
from ckpt.trainer.nodes import ModuleNode
from ckpt.trainer.shard import Cutter, changing
from ckpt.trainer.walk import StateWalker, Walk
from ckpt.trainer.wants import empty_like

Place = tuple[Entry, str, tuple[torch.Tensor, ...]]  # an entry, the name it has in the source, its local tensors


def load_weights(where: str, walker: StateWalker) -> str:
    """Fills every tensor of every module in the state from `where`. Says in words what was converted to another dtype;
    "" where nothing was.

    Errors: StateMismatch names what is missing there or has another shape; UsageError, DamagedData, StorageError."""
    walk = walker.walk()
    modules = [node for node in walk.scan.nodes if isinstance(node, ModuleNode)]
    if not modules:
        raise UsageError("init= fills modules, and there is none in state=")
    wanted = list(_wanted(modules, walker, walk))
    path = Path(where)
    files = _files(path) if path.exists() else []
    cast = _from_files(files, wanted) if files else _from_run(where, wanted)
    for node in modules:
        if names.is_custom(node.value):
            held = {each.key: each.tensor for each in wanted if each.module == node.path}
            with torch.no_grad():
                names.load_state_dict(node.value, held)
    return cast


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor of a module, the names that it may have in the source, and the local tensors to be filled. Of a `module`
    with its own way of loading: a new `tensor`, for that `key` of its state_dict()."""

    entry: Entry
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    module: str = ""
    key: str = ""
    tensor: torch.Tensor | None = None


def _wanted(modules: Sequence[ModuleNode], walker: StateWalker, walk: Walk) -> Iterator[_Wanted]:
    places = {entry.name: (entry, its) for entry, its in zip(walk.layout.entries, walk.tensors, strict=True)}
    found = [(node.path, named.name) for node in modules for named in walk.scan.found[node.path]]
    known: dict[str, list[str]] = {}  # by the name that it is saved under

    def home(name: str) -> str:
        return walk.scan.aliases.get(name, name)

    for _, name in found:
        known.setdefault(home(name), []).append(name)
    for path, name in found:
        known[home(name)].append(name[len(path) + 1 :])

    def known_as(name: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys((name, home(name), *known[home(name)])))

    filled: set[str] = set()
    cutter = Cutter(math.prod(size for _, size in walker.coordinate.mesh))
    for node in modules:
        if not names.is_custom(node.value):
            for named in walk.scan.found[node.path]:
                if home(named.name) not in filled:
                    filled.add(home(named.name))
                    entry, tensors = places[home(named.name)]
                    yield _Wanted(replace(entry, name=named.name), known_as(named.name), tensors)
            continue
        for name, key, value in names.state_dict_items(node.value):
            if isinstance(value, torch.Tensor):
                full, new = names.join(node.path, name), empty_like(value)
                pieces = cutter.pieces(new, full)
                entry = Entry(full, pieces.dtype, pieces.shape, pieces.boxes)
                yield _Wanted(entry, known_as(full), pieces.locals, node.path, key, new)


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def _places(wanted: list[_Wanted], there: Callable[[str], tuple[int, ...] | None], where: str) -> list[Place]:
    """What to fill and from which name. `there`: the shape of a tensor in the source; None where it has none."""
    found: list[Place] = []
    wrong: list[str] = []
    for each in wanted:
        entry = each.entry
        name = next((name for name in each.names if there(name) is not None), None)
        if name is None:
            wrong.append(f"{entry.name} is not there")
        elif (shape := there(name)) != entry.shape:
            wrong.append(f"{entry.name} has shape {list(shape or ())} there and {list(entry.shape)} here")
        else:
            found.append((entry, name, each.tensors))
    if wrong:
        more = f" (and {len(wrong) - 20} more)" if len(wrong) > 20 else ""
        raise StateMismatch(f"init={where!r} does not fit the modules: {'; '.join(wrong[:20])}{more}")
    return found


def _from_files(files: list[Path], wanted: list[_Wanted]) -> str:
    cast: list[str] = []
    with ExitStack() as stack:
        homes: dict[str, tuple[SafetensorsReader, TensorHead]] = {}
        for file in files:
            reader = stack.enter_context(SafetensorsReader(file))
            homes.update((name, (reader, head)) for name, head in reader.tensors.items())
        shapes = {name: head.shape for name, (_, head) in homes.items()}
        for entry, name, tensors in _places(wanted, shapes.get, str(files[0].parent)):
            reader, head = homes[name]
            if not head.bytes:
                continue
            dtype = getattr(torch, head.dtype, None)
            if dtype is None:
                lacks = f"which torch {torch.__version__} does not have"
                raise StateMismatch(f"init={str(files[0].parent)!r}: {name} is {head.dtype}, {lacks}")
            if head.dtype != entry.dtype:
                cast.append(f"{entry.name} from {head.dtype} to {entry.dtype}")
            whole = torch.frombuffer(bytearray(reader.data(name)), dtype=dtype).view(head.shape)
            for box, tensor in zip(entry.boxes, tensors, strict=True):
                cut = tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))
                with torch.no_grad(), changing(tensor):
                    tensor.copy_(whole[cut])
    more = f" and {len(cast) - 5} more" if len(cast) > 5 else ""
    return f"{', '.join(cast[:5])}{more}"


def _from_run(where: str, wanted: list[_Wanted]) -> str:
    store = open_store(where)

    def use(record: Record) -> None:
        manifest = record.manifest
        specs = {spec.name: spec for spec in manifest.tensors if not spec.values and not spec.owner}
        places = _places(wanted, lambda name: specs[name].shape if name in specs else None, where)
        wants: list[Want] = []
        tensors: list[torch.Tensor] = []
        for entry, name, live in places:
            if specs[name].dtype != entry.dtype:
                raise StateMismatch(
                    f"init={where!r}: {entry.name} is {specs[name].dtype} there and {entry.dtype} here; export it with "
                    "`ckpt restore --dtype` first"
                )
            wants += [Want(name, "", entry.dtype, entry.shape, box) for box in entry.boxes]
            tensors += live
        filler = Filler(manifest, wants, tensors)
        lengths = manifest.frames["length"]
        held: dict[int, bytearray] = {}

        def out(frame: int) -> memoryview:
            held[frame] = bytearray(int(lengths[frame]))
            return memoryview(held[frame])

        def deliver(frame: int) -> None:
            if not filler(frame, memoryview(held.pop(frame))):
                raise DamagedData(f"init={where!r}: frame {frame} changed in this host's memory while it was copied")

        FrameReader(store, record).read(filler.frames, deliver, out)
        filler.check()

    try:
        newest_readable(Run(store), use)
    except NoCheckpoint as exc:
        raise UsageError(f"init={where!r} is no .safetensors file or folder, and no ckpt run: {exc}") from exc
    finally:
        store.close()
    return ""

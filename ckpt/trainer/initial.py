"""`init=`: weights to begin with, where the run has no checkpoint: a .safetensors file, a folder of them, or the newest
checkpoint of another ckpt URL. Only modules are filled; names are canonical ("model.0.weight") or the module's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from ckpt.errors import DamagedData, NoCheckpoint, StateMismatch, UsageError
from ckpt.format.manifest import Record
from ckpt.format.safetensors import SafetensorsReader, TensorHead
from ckpt.plan.layout import Entry
from ckpt.plan.reshard import Want
from ckpt.storage import open as open_store
from ckpt.store.reader import FrameReader, newest_readable
from ckpt.store.run import Run
from ckpt.trainer.fill import Filler
from ckpt.trainer.walk import StateWalker, Walk

Place = tuple[Entry, str, tuple[torch.Tensor, ...]]  # an entry, the name it has in the source, its local tensors


def load_weights(where: str, walker: StateWalker) -> None:
    """Fills every tensor of every module in the state from `where`.

    Errors: StateMismatch names what is missing there or has another shape; UsageError, DamagedData, StorageError."""
    walk = walker.walk()
    modules = [key for key, value in walker.state.items() if isinstance(value, nn.Module)]
    if not modules:
        raise UsageError("init= fills modules, and there is none in state=")
    path = Path(where)
    files = _files(path) if path.exists() else []
    if files:
        _from_files(files, walk, modules)
    else:
        _from_run(where, walk, modules)


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def _places(walk: Walk, modules: list[str], there: Callable[[str], tuple[int, ...] | None], where: str) -> list[Place]:
    """What to fill and from which name. `there`: the shape of a tensor in the source; None where it has none."""
    found: list[Place] = []
    wrong: list[str] = []
    for entry, tensors in zip(walk.layout.entries, walk.tensors, strict=True):
        key = next((key for key in modules if entry.name.startswith(f"{key}.")), None)
        if key is None:
            continue
        names = (entry.name, entry.name[len(key) + 1 :])
        name = next((name for name in names if there(name) is not None), None)
        if name is None:
            wrong.append(f"{entry.name} is not there")
        elif (shape := there(name)) != entry.shape:
            wrong.append(f"{entry.name} has shape {list(shape or ())} there and {list(entry.shape)} here")
        else:
            found.append((entry, name, tensors))
    if wrong:
        more = f" (and {len(wrong) - 20} more)" if len(wrong) > 20 else ""
        raise StateMismatch(f"init={where!r} does not fit the modules: {'; '.join(wrong[:20])}{more}")
    return found


def _from_files(files: list[Path], walk: Walk, modules: list[str]) -> None:
    with ExitStack() as stack:
        homes: dict[str, tuple[SafetensorsReader, TensorHead]] = {}
        for file in files:
            reader = stack.enter_context(SafetensorsReader(file))
            homes.update((name, (reader, head)) for name, head in reader.tensors.items())
        shapes = {name: head.shape for name, (_, head) in homes.items()}
        for entry, name, tensors in _places(walk, modules, shapes.get, str(files[0].parent)):
            reader, head = homes[name]
            if not head.bytes:
                continue
            dtype = getattr(torch, head.dtype, None)
            if dtype is None:
                lacks = f"which torch {torch.__version__} does not have"
                raise StateMismatch(f"init={str(files[0].parent)!r}: {name} is {head.dtype}, {lacks}")
            whole = torch.frombuffer(bytearray(reader.data(name)), dtype=dtype).view(head.shape)
            for box, tensor in zip(entry.boxes, tensors, strict=True):
                cut = tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))
                with torch.no_grad():
                    tensor.copy_(whole[cut])


def _from_run(where: str, walk: Walk, modules: list[str]) -> None:
    store = open_store(where)

    def use(record: Record) -> None:
        manifest = record.manifest
        specs = {spec.name: spec for spec in manifest.tensors if not spec.values and not spec.owner}
        places = _places(walk, modules, lambda name: specs[name].shape if name in specs else None, where)
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

    try:
        newest_readable(Run(store), use)
    except NoCheckpoint as exc:
        raise UsageError(f"init={where!r} is no .safetensors file or folder, and no ckpt run: {exc}") from exc
    finally:
        store.close()

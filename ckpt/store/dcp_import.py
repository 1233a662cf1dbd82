"""An existing folder of torch.distributed.checkpoint (DCP) becomes a checkpoint of ckpt. Needs no torch.

A DCP folder holds `.metadata`, a pickle that says which file holds each part of each tensor, and `.distcp` files. A
part of a tensor is a zip file as torch.save writes it, within a .distcp file. Both are read without unpickling anything
(docs/decisions/0044). Large parts are read in slabs, so memory stays bounded; one that is not row-major is read whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.errors import CkptError, DamagedData, NoCheckpoint, UsageError
from ckpt.storage.url import DCP_METADATA
from ckpt.store.draft import Draft, DraftBox
from ckpt.store.dtypes import bits_dtype
from ckpt.store.pickle_reader import Made, read_pickle
from ckpt.store.saved_tensor import Place, as_dtype, as_size, as_text, check_storage, find_tensor, read_range
from ckpt.types import ITEMSIZE, Identity

KEY = "dcp"  # of DCP's part in a checkpoint's values and about; see ckpt/integrations/dcp.py
SLAB_BYTES = 64 << 20
METADATA_BYTES_MAX = 1 << 30
_METADATA = "torch.distributed.checkpoint.metadata."
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_ALLOWED = {
    *(_METADATA + name for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *(_METADATA + name for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    _METADATA + "_MEM_FORMAT_ENCODING",
    _STORAGE_INFO,
    "torch.Size",
    "torch.serialization._get_layout",
    *(f"pathlib{inner}.{name}" for inner in ("", "._local") for name in ("PosixPath", "WindowsPath")),
}


@dataclass(frozen=True, slots=True)
class DcpFolder:
    """What a DCP folder holds. `chunks`: each part of a tensor, with its place. `values`: the place of each other item,
    by name. `mappings`: the planner's: the path in the nested state of each name."""

    chunks: tuple[tuple[DraftBox, Place], ...]
    values: Mapping[str, Place]
    mappings: Mapping[str, tuple[str | int, ...]]

    @property
    def bytes(self) -> int:
        return sum(box.bytes for box, _ in self.chunks)


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an import. `bytes`: of the tensors."""

    identity: str
    tensors: int
    values: int
    bytes: int

    @property
    def label(self) -> str:
        return Identity.parse(self.identity).version.label


def import_dcp(
    path: str | os.PathLike[str],
    url: str,
    *,
    step: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Imported:
    """Makes a checkpoint at `url` of the DCP folder. `step`: see Draft.begin. `progress(done, total)`: bytes.

    Errors: NoCheckpoint if the folder holds no DCP checkpoint; UsageError if it holds what ckpt cannot store;
    DamagedData names the file; those of Draft."""
    folder = open_folder(path)
    boxes, places = _split(folder.chunks)
    draft = Draft.begin(url, step=step, total_bytes=folder.bytes)
    done = 0

    def read(number: int) -> Any:
        nonlocal done
        data = places[number].read()
        done += len(data)
        if progress is not None:
            progress(done, folder.bytes)
        return data

    part = draft.write(0, boxes, read)
    values = {name: read_range(place) for name, place in folder.values.items()}
    identity = draft.commit(
        [part],
        values={KEY: {"bytes": values, "mappings": dict(folder.mappings)}},
        about={KEY: {"checkpoint_id": os.fspath(path), "imported": True}},
    )
    return Imported(identity, len({box.name for box in boxes}), len(values), folder.bytes)


def open_folder(path: str | os.PathLike[str]) -> DcpFolder:
    """Reads the metadata of a DCP folder, and checks that each item lies in its file. Errors: see import_dcp."""
    folder = Path(path)
    file = folder / DCP_METADATA
    if not file.is_file():
        ranks = "; it was saved with use_collectives=False" if (folder / f"__0{DCP_METADATA}").exists() else ""
        raise NoCheckpoint(f"{folder} holds no {DCP_METADATA}, so it is not a checkpoint of torch's DCP{ranks}")
    if file.stat().st_size > METADATA_BYTES_MAX:
        raise DamagedData(f"{file} has {file.stat().st_size} bytes; at most {METADATA_BYTES_MAX} are read")
    tree = read_pickle(file.read_bytes(), _is_allowed, str(file))
    try:
        return _parse(folder, tree)
    except CkptError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise DamagedData(f"{file} is not the metadata of a DCP checkpoint: {type(exc).__name__}: {exc}") from exc


def _is_allowed(name: str) -> bool:
    return name in _ALLOWED or (name.startswith("torch.") and name.removeprefix("torch.") in ITEMSIZE)


def _parse(folder: Path, tree: Any) -> DcpFolder:
    state = _made(tree, _METADATA + "Metadata")
    places = {}
    for index, info in state["storage_data"].items():
        key = _made(index, _METADATA + "MetadataIndex")
        place = _place(folder, _made(info, _STORAGE_INFO))
        places[as_text(key["fqn"]), None if key.get("offset") is None else as_size(key["offset"])] = place
    chunks: list[tuple[DraftBox, Place]] = []
    values: dict[str, Place] = {}
    sizes: dict[Path, int] = {}
    for name, entry in state["state_dict_metadata"].items():
        if entry.name == _METADATA + "BytesStorageMetadata":
            values[as_text(name)] = places[name, None]
            _check_place(values[name], name, sizes)
            continue
        body = _made(entry, _METADATA + "TensorStorageMetadata")
        dtype = as_dtype(_made(body["properties"], _METADATA + "TensorProperties")["state"][0])
        shape = as_size(body["size"])
        for chunk in body["chunks"]:
            its = _made(chunk, _METADATA + "ChunkStorageMetadata")
            box = DraftBox(as_text(name), dtype, shape, as_size(its["offsets"]), as_size(its["sizes"]))
            place = places[name, box.offset]
            _check_place(place, name, sizes)
            chunks.append((box, place))
    return DcpFolder(tuple(chunks), values, _mappings(state.get("planner_data")))


def _made(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Made) or value.name != name:
        raise TypeError(f"a {name.rpartition('.')[2]} is expected")
    return value.state


def _mappings(value: Any) -> dict[str, tuple[str | int, ...]]:
    mappings = value or {}
    for name, keys in mappings.items():
        if not isinstance(name, str) or not isinstance(keys, tuple) or any(type(k) not in (str, int) for k in keys):
            raise TypeError("the planner's data is not that of DefaultSavePlanner")
    return dict(mappings)


def _place(folder: Path, info: Mapping[str, Any]) -> Place:
    name, offset, length = as_text(info["relative_path"]), info["offset"], info["length"]
    if Path(name).name != name:
        raise ValueError(f"{name!r:.200} is not the name of a file in the folder")
    if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise ValueError(f"bytes {offset!r:.40} of {name!r:.200} are no place")
    if info.get("transform_descriptors"):
        raise UsageError(f"{folder / name} was written with an extension of DCP (compression); load it with dcp.load")
    return Place(folder / name, offset, length)


def _check_place(place: Place, item: str, sizes: dict[Path, int]) -> None:
    if place.file not in sizes:
        try:
            sizes[place.file] = place.file.stat().st_size
        except OSError as exc:
            raise DamagedData(f"{place.file} cannot be read: {exc.strerror}; it holds {item}") from exc
    if place.offset + place.length > sizes[place.file]:
        raise DamagedData(
            f"{place.file} is cut short: it has {sizes[place.file]} bytes, and {item} ends at byte "
            f"{place.offset + place.length}"
        )


@dataclass(slots=True)
class _Slab:
    """A part of a chunk: rows of it, as [start, start + length) of its row-major bytes."""

    box: DraftBox  # the whole chunk
    place: Place
    start: int
    length: int

    def read(self) -> memoryview:
        found = find_tensor(self.place, self.box)
        if self.start == 0:
            # The slabs after the first one follow at once, so the second read comes from the page cache.
            check_storage(self.place.file, found, self.box.name)
        if found.is_row_major:
            return memoryview(read_range(Place(self.place.file, found.data + self.start, self.length)))
        raw = np.frombuffer(read_range(Place(self.place.file, found.data, found.bytes)), bits_dtype(self.box.dtype))
        # Bounds were checked in find_tensor.
        strides = tuple(n * raw.itemsize for n in found.stride)
        whole = np.lib.stride_tricks.as_strided(raw, self.box.size, strides)
        return memoryview(np.ascontiguousarray(whole).tobytes())[self.start : self.start + self.length]


def _split(chunks: Sequence[tuple[DraftBox, Place]]) -> tuple[list[DraftBox], list[_Slab]]:
    """The boxes to write, and where each is read: chunks, and slabs of those that are large."""
    boxes, slabs = [], []
    for whole, place in chunks:
        for box, start in _rows(whole):
            boxes.append(box)
            slabs.append(_Slab(whole, place, start, box.bytes))
    return boxes, slabs


def _rows(whole: DraftBox) -> Iterator[tuple[DraftBox, int]]:
    """Slabs of about SLAB_BYTES along the first dimension, each with its first byte in the chunk."""
    if not whole.size or whole.bytes <= SLAB_BYTES:
        yield whole, 0
        return
    row_bytes = whole.bytes // whole.size[0]
    rows = max(1, SLAB_BYTES // row_bytes)
    for first in range(0, whole.size[0], rows):
        offset = (whole.offset[0] + first, *whole.offset[1:])
        size = (min(rows, whole.size[0] - first), *whole.size[1:])
        yield DraftBox(whole.name, whole.dtype, whole.shape, offset, size), first * row_bytes

"""An existing folder of torch.distributed.checkpoint (DCP) becomes a checkpoint of ckpt. Needs no torch.

A DCP folder holds `.metadata`, a pickle that says which file holds each part of each tensor, and `.distcp` files. A
part of a tensor is a zip file as torch.save writes it, within a .distcp file. Both are read without unpickling anything
(docs/decisions/0044). Large parts are read in slabs, so memory stays bounded for parts of any size.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.errors import CkptError, DamagedData, NoCheckpoint, UsageError
from ckpt.storage.url import DCP_METADATA
from ckpt.store.draft import Draft, DraftBox
from ckpt.store.dtypes import bits_dtype
from ckpt.store.pickle_reader import Made, Name, PersistentId, read_pickle
from ckpt.types import ITEMSIZE, Identity

KEY = "dcp"  # of DCP's part in a checkpoint's values and about; see ckpt/integrations/dcp.py
SLAB_BYTES = 64 << 20
CHECKED_BYTES = 1 << 20  # at once, for the CRC-32
METADATA_BYTES_MAX = 1 << 30
PICKLE_BYTES_MAX = 1 << 20  # of the pickle that describes one tensor
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
_STORAGE_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
_REBUILD = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_ALLOWED_OF_TENSOR = {*_REBUILD, "collections.OrderedDict", "torch.storage.UntypedStorage"} | {
    f"torch.{name}Storage" for name in _STORAGE_DTYPES
}


@dataclass(frozen=True, slots=True)
class Place:
    """The bytes [offset, offset + length) of a file, which hold one item."""

    file: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpFolder:
    """What a DCP folder holds. `chunks`: each part of a tensor, with its place. `values`: the place of each other item,
    by name. `mappings`: the planner's: the path in the nested state of each name."""

    path: Path
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
    values = {name: _read_range(place) for name, place in folder.values.items()}
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
        places[_text(key["fqn"]), None if key.get("offset") is None else _size(key["offset"])] = place
    chunks: list[tuple[DraftBox, Place]] = []
    values: dict[str, Place] = {}
    sizes: dict[Path, int] = {}
    for name, entry in state["state_dict_metadata"].items():
        if entry.name == _METADATA + "BytesStorageMetadata":
            values[_text(name)] = places[name, None]
            _check_place(values[name], name, sizes)
            continue
        body = _made(entry, _METADATA + "TensorStorageMetadata")
        dtype = _dtype(_made(body["properties"], _METADATA + "TensorProperties")["state"][0])
        shape = _size(body["size"])
        for chunk in body["chunks"]:
            its = _made(chunk, _METADATA + "ChunkStorageMetadata")
            box = DraftBox(_text(name), dtype, shape, _size(its["offsets"]), _size(its["sizes"]))
            place = places[name, box.offset]
            _check_place(place, name, sizes)
            chunks.append((box, place))
    return DcpFolder(folder, tuple(chunks), values, _mappings(state.get("planner_data")))


def _made(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Made) or value.name != name:
        raise TypeError(f"a {name.rpartition('.')[2]} is expected")
    return value.state


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a name is expected")
    return value


def _size(value: Any) -> tuple[int, ...]:
    """The numbers of a torch.Size, or of a tuple or list."""
    items = value.args[0] if isinstance(value, Made) and value.name == "torch.Size" else value
    if not isinstance(items, tuple | list) or not all(type(n) is int and 0 <= n < 1 << 60 for n in items):
        raise TypeError("a size is expected")
    return tuple(items)


def _dtype(value: Any) -> str:
    if not isinstance(value, Name) or (name := value.name.removeprefix("torch.")) not in ITEMSIZE:
        raise TypeError("a dtype is expected")
    return name


def _mappings(value: Any) -> dict[str, tuple[str | int, ...]]:
    mappings = value or {}
    for name, keys in mappings.items():
        if not isinstance(name, str) or not isinstance(keys, tuple) or any(type(k) not in (str, int) for k in keys):
            raise TypeError("the planner's data is not that of DefaultSavePlanner")
    return dict(mappings)


def _place(folder: Path, info: Mapping[str, Any]) -> Place:
    name, offset, length = _text(info["relative_path"]), info["offset"], info["length"]
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
        found = _find_tensor(self.place, self.box)
        if self.start == 0:
            # The slabs after the first one follow at once, so the second read comes from the page cache.
            _check_storage(self.place.file, found, self.box.name)
        if found.is_row_major:
            return memoryview(_read_range(Place(self.place.file, found.data + self.start, self.length)))
        raw = np.frombuffer(_read_range(Place(self.place.file, found.data, found.bytes)), bits_dtype(self.box.dtype))
        # Bounds were checked in _find_tensor.
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


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor within its file: `data`: the first byte of its first element. `bytes`: from there to the storage's end.
    `stride`: in elements. `storage`: the first byte of its storage. `crc`: the storage's CRC-32, as the file says."""

    data: int
    bytes: int
    storage: int
    crc: int
    stride: tuple[int, ...]
    is_row_major: bool


def _find_tensor(place: Place, box: DraftBox) -> _StoredTensor:
    """Where the bytes of a tensor lie that torch.save wrote. Errors: DamagedData names the file."""
    what = f"{place.file}: {box.name} at byte {place.offset}"
    try:
        with open(place.file, "rb") as file, zipfile.ZipFile(_View(file, place)) as archive:
            # Each name begins with one folder, the archive's.
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            tree = read_pickle(_read_record(archive, records["data.pkl"]), _is_allowed_of_tensor, what)
            storage, offset, shape, stride = _parse_tensor(tree, box)
            info = _checked_record(records[f"data/{storage}"])
            if "byteorder" in records and _read_record(archive, records["byteorder"]) != b"little":
                raise ValueError("its bytes are big-endian")
            header = os.pread(file.fileno(), 30, place.offset + info.header_offset)
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError, IndexError, EOFError, NotImplementedError) as exc:
        raise DamagedData(f"{what} is not a tensor as torch.save writes it: {type(exc).__name__}: {exc}") from exc
    skip = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    itemsize = ITEMSIZE[box.dtype]
    storage_at = info.header_offset + 30 + skip
    first = storage_at + offset * itemsize
    size = info.file_size - offset * itemsize
    needed = (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))) * itemsize
    if shape != box.size or needed > size or first + size > place.length:
        raise DamagedData(f"{what}: its shape is {list(shape)} in {size} bytes; the metadata says {list(box.size)}")
    plain = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    row_major = all(n == 1 or a == b for n, a, b in zip(shape, stride, plain, strict=True))
    size = size // itemsize * itemsize
    return _StoredTensor(place.offset + first, size, place.offset + storage_at, info.CRC, stride, row_major)


def _check_storage(file: Path, tensor: _StoredTensor, name: str) -> None:
    """Compares the storage with its CRC-32. Errors: DamagedData."""
    crc, at, stop = 0, tensor.storage, tensor.data + tensor.bytes
    while at < stop:
        crc = zlib.crc32(_read_range(Place(file, at, min(CHECKED_BYTES, stop - at))), crc)
        at += CHECKED_BYTES
    if crc != tensor.crc:
        raise DamagedData(
            f"{file}: the numbers of {name} do not match their CRC-32, so the file is damaged (or was written under "
            "torch.serialization.set_crc32_options(False))"
        )


def _read_record(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.file_size > PICKLE_BYTES_MAX:
        raise ValueError(f"the record {info.filename} has {info.file_size} bytes; at most {PICKLE_BYTES_MAX} are read")
    return archive.read(_checked_record(info))


def _checked_record(info: zipfile.ZipInfo) -> zipfile.ZipInfo:
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise ValueError(f"the record {info.filename} is compressed")
    return info


def _is_allowed_of_tensor(name: str) -> bool:
    return name in _ALLOWED_OF_TENSOR or (name.startswith("torch.") and name.removeprefix("torch.") in ITEMSIZE)


def _parse_tensor(tree: Any, box: DraftBox) -> tuple[str, int, tuple[int, ...], tuple[int, ...]]:
    """(name of the storage, first element, shape, stride). Errors: TypeError; ValueError."""
    if not isinstance(tree, Made) or tree.name not in _REBUILD:
        raise TypeError("a tensor is expected")
    storage, offset, size, stride, *rest = tree.args
    if not isinstance(storage, PersistentId):
        raise TypeError("a storage is expected")
    _, kind, key, _, _ = storage.value
    if tree.name == _REBUILD[1]:
        dtype, extra = _dtype(rest[2]), rest[3:]
    else:
        dtype = _STORAGE_DTYPES[_checked_name(kind).removeprefix("torch.").removesuffix("Storage")]
        extra = rest[2:]
    if dtype != box.dtype or any(extra):
        raise ValueError(f"it is {dtype}{' with extra state' if any(extra) else ''}; the metadata says {box.dtype}")
    (offset,) = _size((offset,))
    return _text(key), offset, _size(size), _size(stride)


def _checked_name(value: Any) -> str:
    if not isinstance(value, Name):
        raise TypeError("the kind of a storage is expected")
    return value.name


def _read_range(place: Place) -> bytearray:
    out = bytearray(place.length)
    view, at = memoryview(out), 0
    with open(place.file, "rb", buffering=0) as file:
        file.seek(place.offset)
        while at < place.length:
            count = file.readinto(view[at:])
            if not count:
                raise DamagedData(f"{place.file} ends at byte {place.offset + at}; it became shorter meanwhile")
            at += count
    return out


class _View(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, file: io.BufferedReader, place: Place) -> None:
        self._fd, self._place, self._at = file.fileno(), place, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._place.length}[whence]
        if base + offset < 0:
            raise ValueError("a position before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._place.length - self._at))
        data = os.pread(self._fd, count, self._place.offset + self._at)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

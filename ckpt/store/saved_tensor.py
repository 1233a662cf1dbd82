"""Tensors as torch.save writes them: a zip file within a file. They are found without torch and without unpickling.

The zip file holds `data.pkl`, a pickle that describes the tensor, and `data/0`, its storage. Records are stored, not
compressed, so a part of a tensor is a part of the file.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.errors import DamagedData
from ckpt.store.draft import DraftBox
from ckpt.store.pickle_reader import Made, Name, PersistentId, read_pickle
from ckpt.types import ITEMSIZE

PICKLE_BYTES_MAX = 1 << 20  # of the pickle that describes one tensor
CHECKED_BYTES = 1 << 20  # at once, for the CRC-32
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
class StoredTensor:
    """A tensor within its file: `data`: the first byte of its first element. `bytes`: from there to the storage's end.
    `stride`: in elements. `storage`: the first byte of its storage. `crc`: the storage's CRC-32, as the file says."""

    data: int
    bytes: int
    storage: int
    crc: int
    stride: tuple[int, ...]
    is_row_major: bool


def find_tensor(place: Place, box: DraftBox) -> StoredTensor:
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
    return StoredTensor(place.offset + first, size, place.offset + storage_at, info.CRC, stride, row_major)


def check_storage(file: Path, tensor: StoredTensor, name: str) -> None:
    """Compares the storage with its CRC-32. Errors: DamagedData."""
    crc, at, stop = 0, tensor.storage, tensor.data + tensor.bytes
    while at < stop:
        crc = zlib.crc32(read_range(Place(file, at, min(CHECKED_BYTES, stop - at))), crc)
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
        dtype, extra = as_dtype(rest[2]), rest[3:]
    else:
        dtype = _STORAGE_DTYPES[_checked_name(kind).removeprefix("torch.").removesuffix("Storage")]
        extra = rest[2:]
    if dtype != box.dtype or any(extra):
        raise ValueError(f"it is {dtype}{' with extra state' if any(extra) else ''}; the metadata says {box.dtype}")
    (offset,) = as_size((offset,))
    return as_text(key), offset, as_size(size), as_size(stride)


def _checked_name(value: Any) -> str:
    if not isinstance(value, Name):
        raise TypeError("the kind of a storage is expected")
    return value.name


def read_range(place: Place) -> bytearray:
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


def as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a name is expected")
    return value


def as_size(value: Any) -> tuple[int, ...]:
    """The numbers of a torch.Size, or of a tuple or list."""
    items = value.args[0] if isinstance(value, Made) and value.name == "torch.Size" else value
    if not isinstance(items, tuple | list) or not all(type(n) is int and 0 <= n < 1 << 60 for n in items):
        raise TypeError("a size is expected")
    return tuple(items)


def as_dtype(value: Any) -> str:
    if not isinstance(value, Name) or (name := value.name.removeprefix("torch.")) not in ITEMSIZE:
        raise TypeError("a dtype is expected")
    return name

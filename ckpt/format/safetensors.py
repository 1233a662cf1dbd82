"""The .safetensors file format: 8 bytes little-endian length, a JSON header, the tensors' bytes without gaps.

The writer takes tensors in any order and in pieces, so it needs no memory beyond the caller's piece. The reader maps
the file. Source of the format: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ckpt.errors import DamagedData, UsageError
from ckpt.types import ITEMSIZE

HEADER_BYTES_MAX = 100_000_000  # the limit of the reference implementation
BYTES_MAX = 1 << 60
NDIM_MAX = 64
_METADATA = "__metadata__"

DTYPE_NAMES: dict[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float4_e2m1fn_x2": "F4",
}  # fmt: skip
_DTYPE_BY_NAME = {theirs: ours for ours, theirs in DTYPE_NAMES.items()}
# Two numbers per byte. The format counts numbers in a shape, torch counts bytes.
_FLOAT4 = "float4_e2m1fn_x2"


@dataclass(frozen=True, slots=True)
class TensorHead:
    """Name, dtype and shape of a tensor. `dtype`: torch's name. `shape`: as torch counts."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class SafetensorsWriter:
    """A writer of one file with the given tensors: call `write` for pieces in any order, then leave the `with` block.

    The file has its full size from the start. It is complete, and on disk, when `close` has returned. It is removed if
    the block is left by an exception, or before every byte was written.

    Errors: UsageError for a dtype that the format lacks, a repeated name, or a piece beyond its tensor; OSError."""

    def __init__(
        self, path: str | os.PathLike[str], tensors: Sequence[TensorHead], metadata: Mapping[str, str] | None = None
    ) -> None:
        header, self._spans = _header(tensors, metadata or {})
        self._unwritten_bytes = sum(stop - start for start, stop in self._spans.values())
        self.path = Path(path)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        with self._remove_on_error():
            _write_all(self._file, header, 0)
            os.ftruncate(self._file, len(header) + self._unwritten_bytes)

    def write(self, name: str, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Writes bytes [offset, offset + len(data)) of that tensor, row-major. Write every byte exactly once."""
        start, stop = self._spans[name]
        piece = memoryview(data).cast("B")
        if offset < 0 or start + offset + len(piece) > stop:
            raise UsageError(f"{len(piece)} bytes at {offset} do not lie within the {stop - start} bytes of {name!r}")
        _write_all(self._file, piece, start + offset)
        self._unwritten_bytes -= len(piece)

    def close(self) -> None:
        with self._remove_on_error():
            if self._unwritten_bytes:
                raise UsageError(
                    f"{self.path}: each byte of its tensors must be written once (unwritten: {self._unwritten_bytes})"
                )
            os.fsync(self._file)
        os.close(self._file)

    def abandon(self) -> None:
        """Closes and removes the file."""
        os.close(self._file)
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    @contextlib.contextmanager
    def _remove_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abandon()
            raise


class SafetensorsReader:
    """A .safetensors file, mapped. `tensors`: by name, in the order of the header. `metadata`: its strings. Errors:
    DamagedData for a file that is not well-formed; OSError."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(HEADER_BYTES_MAX, size - 8):
                raise self._damaged(
                    f"it is not a .safetensors file: a header of {length} bytes does not fit into {size} bytes"
                )
            header = _parse(file.read(length), self._damaged)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.metadata, self.tensors, self._spans = _check_header(header, size - 8 - length, self._damaged)
        except DamagedData:
            self._map.close()
            raise
        self._start = 8 + length

    def data(self, name: str) -> memoryview:
        """The tensor's bytes, read-only and mapped. Release every view before `close`."""
        start, stop = self._spans[name]
        return memoryview(self._map)[self._start + start : self._start + stop]

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _damaged(self, message: str) -> DamagedData:
        return DamagedData(f"{self.path}: {message}")


def check_heads(tensors: Sequence[TensorHead], metadata: Mapping[str, str]) -> None:
    """Checks that SafetensorsWriter can write these tensors. Errors: UsageError if it cannot."""
    _header(tensors, metadata)


def _header(tensors: Sequence[TensorHead], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The file up to its data, and each tensor's span in the file. Wide dtypes come first, so that all are aligned."""
    head: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    spans: dict[str, tuple[int, int]] = {}
    at = 0
    for tensor in sorted(tensors, key=lambda tensor: (-ITEMSIZE[tensor.dtype], tensor.name)):
        name = DTYPE_NAMES.get(tensor.dtype)
        if name is None:
            raise UsageError(
                f"{tensor.name!r} is {tensor.dtype}, which .safetensors cannot hold: write a .pt file, or choose other "
                "tensors with --only"
            )
        if tensor.name in head or tensor.name == _METADATA:
            raise UsageError(f"the name {tensor.name!r} is used twice or reserved; rename the tensor")
        shape = list(tensor.shape)
        if tensor.dtype == _FLOAT4:
            if not shape:
                raise UsageError(
                    f"{tensor.name!r} is a scalar {_FLOAT4}, which .safetensors cannot hold; write a .pt file"
                )
            shape[-1] *= 2
        head[tensor.name] = {"dtype": name, "shape": shape, "data_offsets": [at, at + tensor.bytes]}
        spans[tensor.name] = (at, at + tensor.bytes)
        at += tensor.bytes
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES_MAX:
        raise UsageError(
            f"the header has {len(text)} bytes; .safetensors allows {HEADER_BYTES_MAX}: write several files"
        )
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {key: (a + start, b + start) for key, (a, b) in spans.items()}


def _parse(text: bytes, damaged: Any) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key appears twice")
        return found

    try:
        header = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as exc:
        raise damaged(f"its header is not valid JSON: {exc}") from exc
    if not isinstance(header, dict):
        raise damaged("its header is not a JSON object")
    return header


def _check_header(
    header: dict[str, Any], data_bytes: int, damaged: Any
) -> tuple[dict[str, str], dict[str, TensorHead], dict[str, tuple[int, int]]]:
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged("its metadata is not an object of strings")
    tensors: dict[str, TensorHead] = {}
    spans: dict[str, tuple[int, int]] = {}
    for name, entry in header.items():
        match entry:
            case {"dtype": str() as theirs, "shape": list() as shape, "data_offsets": [int() as start, int() as stop]}:
                pass
            case _:
                raise damaged(f"the entry of {name[:80]!r} is not well-formed")
        dtype = _DTYPE_BY_NAME.get(theirs)
        if dtype is None:
            raise damaged(f"{name[:80]!r} has the dtype {theirs[:40]!r}, which this ckpt does not know")
        if len(shape) > NDIM_MAX or any(type(n) is not int or not 0 <= n <= BYTES_MAX for n in shape):
            raise damaged(f"the shape of {name[:80]!r} is not valid")
        if dtype == _FLOAT4:
            if not shape or shape[-1] % 2:
                raise damaged(f"{name[:80]!r} has an odd number of half bytes")
            shape = [*shape[:-1], shape[-1] // 2]
        tensors[name] = TensorHead(name, dtype, tuple(shape))
        if not 0 <= start <= stop <= data_bytes or stop - start != tensors[name].bytes:
            raise damaged(f"the bytes of {name[:80]!r} do not fit its shape, or lie outside the file")
        spans[name] = (start, stop)
    at = 0
    for start, stop in sorted(spans.values()):
        if start != at:
            raise damaged("its tensors overlap, or leave a gap")
        at = stop
    if at != data_bytes:
        raise damaged(f"{data_bytes - at} bytes at its end belong to no tensor")
    return metadata, tensors, spans


def _write_all(file: int, data: bytes | memoryview, at: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, at)
        left, at = left[written:], at + written

"""The .safetensors file format: 8 bytes little-endian length, a JSON header, the tensors' bytes without gaps.

Source of the format: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
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


def file_order(tensor: TensorHead) -> tuple[int, str]:
    """The key that sorts tensors as a file holds them: wide dtypes come first, so that all are aligned."""
    return -ITEMSIZE[tensor.dtype], tensor.name


def encode_header(tensors: Sequence[TensorHead], metadata: Mapping[str, str]) -> bytes:
    """A file up to its data. The bytes of the tensors follow, row-major, in the order of `tensors` (see `file_order`).
    Errors: UsageError for a dtype that the format lacks, or a repeated name."""
    head: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    at = 0
    for tensor in tensors:
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
        at += tensor.bytes
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES_MAX:
        raise UsageError(
            f"the header has {len(text)} bytes; .safetensors allows {HEADER_BYTES_MAX}: write several files"
        )
    return len(text).to_bytes(8, "little") + text


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

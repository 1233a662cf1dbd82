""".safetensors: what we write the reference library reads, and the other way round; what is not one is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ckpt.errors import DamagedData, UsageError
from ckpt.format.safetensors import DTYPE_NAMES, SafetensorsReader, TensorHead, encode_header, file_order
from ckpt.types import DTYPES, ITEMSIZE

# The reference library writes these, and does not read them again into torch.
WRITE_ONLY = ("float8_e8m0fnu", "float4_e2m1fn_x2")


def heads() -> list[tuple[TensorHead, bytes]]:
    rng = random.Random(5)
    made = []
    for i, dtype in enumerate(DTYPE_NAMES):
        for shape in ((3, i % 4, 2), (5,), ()):
            if dtype == "float4_e2m1fn_x2" and not shape:
                continue
            head = TensorHead(f"model.{dtype}.{len(shape)} ☃", dtype, shape)
            data = rng.randbytes(head.bytes)
            made.append((head, bytes(b & 1 for b in data) if dtype == "bool" else data))
    return made


def write(path: Path, tensors: list[tuple[TensorHead, bytes]], **metadata: str) -> None:
    tensors = sorted(tensors, key=lambda each: file_order(each[0]))
    path.write_bytes(encode_header([head for head, _ in tensors], metadata) + b"".join(data for _, data in tensors))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_the_reference_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors = [(head, data) for head, data in heads() if head.dtype not in WRITE_ONLY]
    write(tmp_path / "x.safetensors", tensors, format="pt")
    found = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert len(found) == len(tensors)
    for head, data in tensors:
        tensor = found[head.name]
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{head.dtype}", head.shape)
        assert bits(tensor) == data
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_we_read_what_the_reference_library_writes(tmp_path: Path) -> None:
    known = [(head, data) for head, data in heads() if hasattr(torch, head.dtype)]  # torch 2.6 has no float8_e8m0fnu
    tensors = {}
    for head, data in known:
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
        tensors[head.name] = flat.view(getattr(torch, head.dtype)).reshape(head.shape)
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    with SafetensorsReader(tmp_path / "x.safetensors") as file:
        assert file.metadata == {"format": "pt"}
        assert file.tensors == {head.name: head for head, _ in known}
        for head, data in known:
            assert file.data(head.name).tobytes() == data


def test_every_dtype_is_known_or_refused_by_name(tmp_path: Path) -> None:
    for dtype in DTYPES:
        head = TensorHead("x", dtype, (2, 2))
        if dtype in DTYPE_NAMES:
            write(tmp_path / "y", [(head, bytes(4 * ITEMSIZE[dtype]))])
            with SafetensorsReader(tmp_path / "y") as file:
                assert file.tensors == {"x": head}
        else:
            with pytest.raises(UsageError, match=f"'x' is {dtype}, which .safetensors cannot hold"):
                encode_header([head], {})


def test_a_name_twice_or_reserved_is_refused() -> None:
    head = TensorHead("a", "float32", ())
    for tensors in ([head, head], [TensorHead("__metadata__", "float32", ())]):
        with pytest.raises(UsageError, match="is used twice or reserved"):
            encode_header(tensors, {})
    with pytest.raises(UsageError, match="is a scalar float4"):
        encode_header([TensorHead("a", "float4_e2m1fn_x2", ())], {})


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: Any, start: Any, stop: Any, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a .safetensors file"),
        (b"\x01", "not a .safetensors file"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "not a .safetensors file"),
        (file_of({"a": entry([4], 0, 4)}, bytes(4))[:-1], "lie outside the file"),
        (file_of({"a": entry([4], 0, 4)}, bytes(5)), "belong to no tensor"),
        (file_of({"a": entry([4], 0, 4), "b": entry([4], 2, 6)}, bytes(6)), "overlap, or leave a gap"),
        (file_of({"a": entry([4], 1, 5)}, bytes(5)), "overlap, or leave a gap"),
        (file_of({"a": entry([5], 0, 4)}, bytes(4)), "do not fit its shape"),
        (file_of({"a": entry([1 << 32, 1 << 32], 0, 0)}), "do not fit its shape"),
        (file_of({"a": entry([-1], 0, 0)}), "is not valid"),
        (file_of({"a": entry([True], 0, 1)}, bytes(1)), "is not valid"),
        (file_of({"a": entry([1.0], 0, 1)}, bytes(1)), "is not valid"),
        (file_of({"a": entry([1] * 65, 0, 1)}, bytes(1)), "is not valid"),
        (file_of({"a": entry([1], -1, 0)}), "do not fit its shape"),
        (file_of({"a": entry([3], 0, 2, "F4")}, bytes(2)), "odd number"),
        (file_of({"a": entry([1], 0, 1, "Q9")}, bytes(1)), "'Q9', which this ckpt does not know"),
        (file_of({"a": [1]}), "not well-formed"),
        (file_of({"a": {"dtype": "U8"}}), "not well-formed"),
        (file_of(b'{"a": 1, "a": 2}'), "twice"),
        (file_of(b"[]"), "not a JSON object"),
        (file_of(b"{"), "not valid JSON"),
        (file_of(b"\xff"), "not valid JSON"),
        (file_of(b"[" * 100_000), "not valid JSON"),
        (file_of({"__metadata__": {"a": 1}}), "not an object of strings"),
        (file_of({"__metadata__": 1}), "not an object of strings"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(DamagedData, match=rf"x\.safetensors: .*{says}"):
        SafetensorsReader(path)

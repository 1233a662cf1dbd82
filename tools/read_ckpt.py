#!/usr/bin/env python3
"""Reads checkpoints of a local store folder without ckpt: a second implementation of docs/format.md, in one file.

    read_ckpt.py DIR --list              the checkpoints of the run, oldest first, and those on branches
    read_ckpt.py DIR [--step N]          checks every frame of the newest one (or of step N), prints what it holds
    read_ckpt.py DIR --out x.npz         also writes its tensors (bfloat16 as float32, which is exact; other dtypes
                                         that NumPy lacks as their bits)

Needs Python 3.11, NumPy and zstandard. With xxhash it also checks that every byte is the one that was written. It is
meant for folders that you trust: what is damaged is found, but it does not keep to the limits of docs/format.md.
"""

from __future__ import annotations

import argparse
import collections
import io
import json
import re
import struct
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

try:
    import xxhash
except ImportError:
    xxhash = None

VERSIONS = (1,)
MAGIC = b"\x89ckpt\r\n\x1a"
RECORD = 1
RAW, ZSTD, PLANES = 0, 1, 2
NUMPY_OF = {
    "uint8": "u1", "int8": "i1", "bool": "?", "int16": "<i2", "int32": "<i4", "int64": "<i8",
    "float16": "<f2", "bfloat16": "<u2", "float32": "<f4", "float64": "<f8",
    "complex32": "<u4", "complex64": "<c8", "complex128": "<c16",
    "float8_e4m3fn": "u1", "float8_e4m3fnuz": "u1", "float8_e5m2": "u1", "float8_e5m2fnuz": "u1",
    "float8_e8m0fnu": "u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8", "float4_e2m1fn_x2": "u1",
}  # fmt: skip
DTYPES = list(NUMPY_OF)  # the position is the dtype's code
EPOCH = r"\d{8}-[0-9a-f]{16}"
IDENTITY = rf"{EPOCH}-\d{{12}}\.\d{{4,9}}"
CLAIM_BYTES_MAX = 64 << 10


class Damaged(Exception):
    pass


def xxh3(data: Any) -> bytes | None:
    return xxhash.xxh3_128_digest(data) if xxhash else None


# --- the container -------------------------------------------------------------------------------------------------


def read_columns(data: bytes, kind: int, name: str) -> dict[str, np.ndarray]:
    """The sections of a file by name."""
    if data[:8] != MAGIC:
        raise Damaged(f"{name}: not a file of ckpt")
    version, found, _, count = struct.unpack_from("<HBBI", data, 8)
    if version not in VERSIONS:
        raise Damaged(f"{name}: format version {version}; this reads {VERSIONS}")
    if found != kind:
        raise Damaged(f"{name}: kind {found}, not {kind}")
    if xxhash and xxh3(data[:-16]) != data[-16:]:
        raise Damaged(f"{name}: its hash is wrong")
    at = 16 + count * 53
    columns = {}
    for i in range(count):
        title, dtype, coding, elements, stored = struct.unpack_from("<32s4sBQQ", data, 16 + i * 53)
        title, dtype = title.rstrip(b"\0").decode(), dtype.rstrip(b"\0").decode()
        raw = data[at : at + stored]
        at += stored
        if coding:
            raw = unzstd(raw, elements * np.dtype(dtype).itemsize)
        column = np.frombuffer(raw, dtype)
        if coding == 2:
            column = np.cumsum(column, dtype=dtype)
        if len(column) != elements:
            raise Damaged(f"{name}: section {title} has {len(column)} elements, not {elements}")
        columns[title] = column
    if at != len(data) - 16:
        raise Damaged(f"{name}: truncated")
    return columns


def unzstd(data: bytes, size: int) -> bytes:
    try:
        if zstandard.frame_content_size(data) != size:
            raise Damaged("a zstd frame of another size than recorded")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
    except zstandard.ZstdError as exc:
        raise Damaged(f"zstd: {exc}") from exc


def strings(columns: dict[str, np.ndarray], name: str) -> list[str]:
    data = columns[name].tobytes()
    ends = np.cumsum(columns[f"{name}.len"], dtype=np.int64).tolist()
    return [data[a:b].decode() for a, b in zip([0, *ends], ends, strict=False)]


# --- the record ----------------------------------------------------------------------------------------------------


@dataclass
class Tensor:
    name: str
    owner: str
    dtype: str
    shape: tuple[int, ...]
    is_values: bool
    boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]]  # number of the box, offset, shape

    @property
    def label(self) -> str:
        return f"{self.name}@{self.owner}" if self.owner else self.name


class Record:
    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        c = self.columns = read_columns((folder / key).read_bytes(), RECORD, key)
        self.identity, self.writer = strings(c, "identity")
        if key != f"commits/{self.identity}-{self.writer}":
            raise Damaged(f"{key}: it is the record of {self.identity} by {self.writer}")
        self.packs = strings(c, "packs")
        self.metrics = dict(zip(strings(c, "metrics"), c["metrics.value"].tolist(), strict=True))
        self.about = json.loads(c["about"].tobytes())
        self.coordinates = strings(c, "coordinates")
        shapes = iter(c["tensors.shape"].tolist())
        ndims = c["tensors.ndim"].tolist()
        columns = zip(
            strings(c, "tensors"), strings(c, "owners"), c["tensors.dtype"].tolist(), ndims,
            c["tensors.values"].tolist(), strict=True,
        )  # fmt: skip
        self.tensors = [
            Tensor(name, owner, DTYPES[code], tuple(next(shapes) for _ in range(ndim)), bool(values), [])
            for name, owner, code, ndim, values in columns
        ]
        offsets, box_shapes = iter(c["boxes.offset"].tolist()), iter(c["boxes.shape"].tolist())
        for number, index in enumerate(c["boxes.tensor"].tolist()):
            offset = tuple(next(offsets) for _ in range(ndims[index]))
            self.tensors[index].boxes.append((number, offset, tuple(next(box_shapes) for _ in range(ndims[index]))))
        self.extents: dict[int, list[tuple[int, int, int, int]]] = collections.defaultdict(list)
        fields = ("box", "start", "length", "frame", "offset")
        for box, *rest in zip(*(c[f"extents.{field}"].tolist() for field in fields), strict=True):
            self.extents[box].append(tuple(rest))
        self._last: tuple[int, bytes] = (-1, b"")

    def frame(self, number: int) -> bytes:
        """The raw bytes of a frame, read from its pack, decoded and checked. The last one is kept."""
        if self._last[0] == number:
            return self._last[1]
        c = self.columns
        place = {field: int(c[f"places.{field}"][number]) for field in ("pack", "offset", "length", "codec")}
        key = self.packs[place["pack"]]
        if re.fullmatch(rf"data/{IDENTITY}/[\w-][\w.-]*/[\w-][\w.-]*\.pack", key, re.ASCII) is None:
            raise Damaged(f"{self.key}: {key!r} is not the key of a pack")
        with open(self.folder / key, "rb") as file:
            file.seek(place["offset"])
            data = file.read(place["length"])
        if len(data) != place["length"]:
            raise Damaged(f"{key}: truncated")
        raw = decode_frame(place["codec"], data, int(c["frames.length"][number]))
        if xxhash:
            expected = int(c["frames.hash_hi"][number]) << 64 | int(c["frames.hash_lo"][number])
            if xxhash.xxh3_128_intdigest(raw) != expected:
                raise Damaged(f"{key}: bytes {place['offset']}.. do not hash to what was recorded (frame {number})")
        self._last = (number, raw)
        return raw

    def read(self, tensor: Tensor) -> np.ndarray:
        whole = np.empty(tensor.shape, NUMPY_OF[tensor.dtype])
        filled = 0
        for number, offset, shape in tensor.boxes:
            data = bytearray(int(np.prod(shape, dtype=np.int64)) * whole.itemsize)
            at = 0
            for start, length, frame, within in self.extents[number]:
                if start != at:
                    raise Damaged(f"{self.key}: the extents of {tensor.label} leave a gap")
                data[start : start + length] = self.frame(frame)[within : within + length]
                at += length
            if at != len(data):
                raise Damaged(f"{self.key}: the extents of {tensor.label} do not cover it")
            box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            whole[box] = np.frombuffer(data, whole.dtype).reshape(shape)
            filled += len(data)
        if filled != whole.nbytes:
            raise Damaged(f"{self.key}: the boxes of {tensor.label} do not cover it")
        return whole


def decode_frame(codec: int, data: bytes, size: int) -> bytes:
    if codec == RAW:
        return data
    if codec == ZSTD:
        return unzstd(data, size)
    if codec != PLANES:
        raise Damaged(f"codec {codec}, which this does not know")
    planes = [struct.unpack_from("<BBI", data, 1 + 6 * i) for i in range(data[0])]
    unit = sum(width for width, _, _ in planes)
    elements = np.zeros((size // unit, unit), np.uint8)
    at = -(-(1 + 6 * len(planes)) // 8) * 8
    low = 0
    for width, coding, stored in planes:
        plane = data[at : at + stored]
        plane = unzstd(plane, len(elements) * width) if coding else plane
        elements[:, low : low + width] = np.frombuffer(plane, np.uint8).reshape(-1, width)
        at, low = at + stored, low + width
    return elements.tobytes()


# --- values: msgpack with tags -------------------------------------------------------------------------------------


def read_values(data: bytes) -> Any:
    value, at = unpack(data, 0)
    if at != len(data):
        raise Damaged("bytes after the end of the values")
    return value


def unpack(data: bytes, at: int) -> tuple[Any, int]:
    """One value and where the next begins."""
    head = data[at]
    at += 1
    if head < 0x80 or head >= 0xE0:
        return (head if head < 0x80 else head - 256), at
    if head in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[head], at
    numbers = {
        0xCB: ">d",
        0xCC: ">B",
        0xCD: ">H",
        0xCE: ">I",
        0xCF: ">Q",
        0xD0: ">b",
        0xD1: ">h",
        0xD2: ">i",
        0xD3: ">q",
    }
    if head in numbers:
        form = numbers[head]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    lengths = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
    if head in lengths:
        length = int.from_bytes(data[at : at + lengths[head]], "big")
        at += lengths[head]
    elif head < 0xC0:
        length = head & (0x1F if head >= 0xA0 else 0x0F)
    else:
        raise Damaged(f"0x{head:02x} begins no value")
    if head in (0xC4, 0xC5, 0xC6):
        return data[at : at + length], at + length
    if 0xA0 <= head < 0xC0 or head in (0xD9, 0xDA, 0xDB):
        return data[at : at + length].decode(), at + length
    is_map = head < 0x90 or head in (0xDE, 0xDF)
    tag = None
    if not is_map and length and data[at] == 0xC7:
        tag, at, length = data[at + 2], at + 3, length - 1
    items = []
    for _ in range(2 * length if is_map else length):
        item, at = unpack(data, at)
        items.append(item)
    if is_map:
        return dict(zip(items[::2], items[1::2], strict=True)), at
    return (items if tag is None else untag(tag, items)), at


def untag(tag: int, items: list[Any]) -> Any:
    def mapping(flat: list[Any]) -> dict[Any, Any]:
        return dict(zip(flat[::2], flat[1::2], strict=True))

    readers = {
        1: lambda: tuple(items),
        2: lambda: set(items),
        3: lambda: frozenset(items),
        4: lambda: collections.OrderedDict(mapping(items)),
        5: lambda: collections.Counter(mapping(items)),
        6: lambda: mapping(items[1:]),
        7: lambda: collections.deque(items[1:], items[0]),
        8: lambda: int.from_bytes(items[0], "little", signed=True),
        9: lambda: items[0].decode("utf-8", "surrogatepass"),
        10: lambda: bytearray(items[0]),
        11: lambda: complex(*items),
        12: lambda: range(*items),
        13: lambda: slice(*items),
        14: lambda: np.frombuffer(items[2], items[0]).reshape(items[1]),
        15: lambda: np.frombuffer(items[1], items[0])[0],
        16: lambda: np.frombuffer(items[0], "<i8").tolist(),
        17: lambda: np.frombuffer(items[0], "<f8").tolist(),
        18: lambda: tuple(items),
        19: lambda: items[0],
        20: lambda: items[0],
    }
    if tag not in readers:
        raise Damaged(f"a value of tag {tag}, which this does not know")
    return readers[tag]()


# --- the line of the run -------------------------------------------------------------------------------------------


def names(folder: Path, prefix: str, pattern: str) -> list[str]:
    found = sorted(path.name for path in (folder / prefix).glob("*"))
    return [name for name in found if re.fullmatch(pattern, name, re.ASCII)]


def tick(identity: str) -> tuple[int, int]:
    step, sub = identity[26:].split(".")
    return int(step), int(sub)


def read_claim(data: bytes, name: str) -> tuple[str | None, dict[str, str | None]]:
    """The parent of that epoch, and those of its ancestors. ValueError and its like where it is no claim."""
    claim = json.loads(data)
    end = re.search(rb', "check": "([0-9a-f]{32})"\}\Z', data)
    if xxhash and end and xxhash.xxh3_128_hexdigest(data[: end.start()] + b"}").encode() != end[1]:
        raise ValueError("its hash is wrong")
    if claim["version"] != 1 or claim["epoch"] != name or len(data) > CLAIM_BYTES_MAX:
        raise ValueError(f"a claim of version {claim['version']!r:.80} and of epoch {claim['epoch']!r:.80}")
    ancestors = dict(claim["ancestors"])
    for epoch, parent in [(name, claim["parent"]), *ancestors.items()]:
        good = re.fullmatch(EPOCH, epoch, re.ASCII) and (parent is None or re.fullmatch(IDENTITY, parent, re.ASCII))
        if not good or (parent is not None and parent[:8] >= epoch[:8]):  # no chain of claims runs in a circle
            raise ValueError(f"{epoch!r:.80} cannot go on from {parent!r:.80}")
    return claim["parent"], ancestors


def line(folder: Path) -> tuple[list[str], list[str]]:
    """Keys of the records on the line, oldest first, and of all others."""
    parents: dict[str, str | None] = {}
    commits = names(folder, "commits", rf"{IDENTITY}-[0-9a-z]{{1,16}}")
    epochs = names(folder, "epochs", EPOCH)
    claims = {}
    for name in epochs:
        try:
            claims[name] = read_claim((folder / "epochs" / name).read_bytes(), name)
        except (OSError, KeyError, TypeError, ValueError, RecursionError) as exc:
            print(f"epochs/{name} is passed over: {exc}", file=sys.stderr)
    for _, ancestors in claims.values():
        parents.update(ancestors)
    parents.update({name: parent for name, (parent, _) in claims.items()})  # what a claim says of its own epoch wins
    last: dict[str, tuple[int, int]] = {}  # each epoch of the line and the newest of its ticks that belongs to it
    order: list[str] = []
    epoch = max([*epochs, *(name[:25] for name in commits)], default=None)
    fork = None
    while epoch is not None:
        order.append(epoch)
        last[epoch] = tick(fork) if fork else (1 << 62, 0)
        fork = parents.get(epoch)
        epoch = fork[:25] if fork else None
    retired = set(names(folder, "retired", IDENTITY))
    records: dict[str, str] = {}
    for name in reversed(commits):  # of several, the lowest writer's
        identity = name.rpartition("-")[0]
        if identity not in retired:
            records[identity] = f"commits/{name}"
    on_line = [identity for identity in records if tick(identity) <= last.get(identity[:25], (-1, 0))]
    on_line.sort(key=lambda identity: (-order.index(identity[:25]), tick(identity)))
    branches = sorted(set(records) - set(on_line))
    return [records[identity] for identity in on_line], [records[identity] for identity in branches]


# --- the command line ----------------------------------------------------------------------------------------------


def step_of(key: str) -> int:
    return tick(key.removeprefix("commits/").rpartition("-")[0])[0]


def for_numpy(tensor: Tensor, data: np.ndarray) -> np.ndarray:
    return (data.astype(np.uint32) << 16).view(np.float32) if tensor.dtype == "bfloat16" else data


def show(record: Record, out: Path | None) -> None:
    print(f"{record.key}: step {step_of(record.key)}, metrics {record.metrics}, {record.about}")
    archive = zipfile.ZipFile(out, "w") if out else None
    for tensor in record.tensors:
        data = record.read(tensor)
        if tensor.is_values:
            print(f"{tensor.label}: {read_values(data.tobytes())!r:.2000}")
            continue
        print(f"{tensor.label}: {tensor.dtype} {list(tensor.shape)} in {len(tensor.boxes)} boxes, {data.nbytes} bytes")
        if archive:
            member = io.BytesIO()
            np.lib.format.write_array(member, for_numpy(tensor, data), allow_pickle=False)
            archive.writestr(f"{tensor.label}.npy", member.getbuffer())
    if archive:
        archive.close()
        print(f"wrote {out}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--step", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if xxhash is None:
        print("xxhash is not installed: hashes were not checked", file=sys.stderr)
    try:
        found, branches = line(options.dir)
        if options.list:
            for key in found:
                print(f"step {step_of(key)}: {key}")
            for key in branches:
                print(f"step {step_of(key)}: {key} (on a branch)")
            return 0
        wanted = [key for key in found if options.step in (None, step_of(key))]
        if not wanted:
            print(f"{options.dir}: no such checkpoint; --list shows what is there", file=sys.stderr)
            return 1
        show(Record(options.dir, wanted[-1]), options.out)
    except (Damaged, OSError, KeyError, TypeError, ValueError, IndexError, ArithmeticError, struct.error) as exc:
        print(f"damaged: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The container of every durable binary file: named, typed columns, compressed, limited in size, and hashed.

    header      8 bytes magic, u2 version, u1 kind, u1 zero, u4 number of sections
    directory   one SECTION a section: name, type, coding, elements, stored bytes
    sections    their stored bytes, one after the other
    hash        16 bytes: xxh3-128 of everything before, big-endian

All numbers are little-endian. A section is a one-dimensional array of one of `TYPES`. Coding 0: its bytes; 1: zstd of
its bytes; 2: zstd of the differences between neighbours (modulo the type). A reader ignores unknown sections, so a
section may be added without a new version. Any other change needs a new version.

Decoding trusts nothing. Sizes are checked against the caps and against each other before memory is allocated, and the
caps of the kind bound the memory. Every fault is a DamagedData that names the object.
"""

from __future__ import annotations

import enum
import itertools
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from ckpt.errors import DamagedData, NewerFormat, UsageError

MAGIC = b"\x89ckpt\r\n\x1a"
VERSION = 1

HEADER = struct.Struct("<8sHBBI")
SECTION = np.dtype([("name", "S32"), ("type", "S4"), ("coding", "u1"), ("count", "<u8"), ("stored", "<u8")])
TYPES = ("|u1", "<u2", "<u4", "<u8", "<i8", "<f8")
HASH_BYTES = 16
SECTIONS_MAX = 128
STRING_BYTES_MAX = 1024

RAW, ZSTD, ZSTD_DELTA = 0, 1, 2
_ZSTD_LEVEL = 3
_ZSTD_WINDOW_BYTES_MAX = 1 << 27

AnyArray = npt.NDArray[np.generic]
Ints = npt.NDArray[np.int64]


class ColumnKind(enum.IntEnum):
    """Kind numbers of the durable format: append only."""

    RECORD = 1
    MANIFEST = 2
    DECLARATION = 3
    LAYOUT = 4
    SHARE = 5


RAW_BYTES_MAX = 128 << 20  # of all sections of a file together, decompressed


def stored_bytes_max(kind: ColumnKind) -> int:
    """The largest size of a whole file."""
    return 16 << 20 if kind is ColumnKind.RECORD else 64 << 20


class ColumnWriter:
    """Collects the sections of one file; `finish` returns the file's bytes."""

    def __init__(self, kind: ColumnKind) -> None:
        self._kind = kind
        self._sections: list[tuple[str, AnyArray, bool]] = []

    def array(self, name: str, values: npt.ArrayLike, dtype: str, delta: bool = False) -> None:
        """Adds a section. `delta`: store differences of neighbours, for integers that mostly grow by equal steps."""
        self._sections.append((name, np.ascontiguousarray(values, dtype), delta))

    def struct(self, name: str, values: npt.NDArray[np.void], delta: Sequence[str] = ()) -> None:
        """Adds a structured array as one section per field, `name.field`. `delta`: the fields stored as differences."""
        fields = values.dtype.fields
        assert fields is not None
        for field, (dtype, *_) in fields.items():
            self.array(f"{name}.{field}", values[field], dtype.str, delta=field in delta)

    def blob(self, name: str, data: bytes) -> None:
        self.array(name, np.frombuffer(data, np.uint8), "|u1")

    def strings(self, name: str, texts: Iterable[str]) -> None:
        """Adds texts: concatenated UTF-8 as section `name`, and the lengths in bytes as `name.len`. Errors: UsageError
        if a text is too long, holds a NUL, or cannot be UTF-8."""
        encoded = [_utf8(text) for text in texts]
        self.blob(name, b"".join(encoded))
        self.array(f"{name}.len", [len(text) for text in encoded], "<u2")

    def finish(self) -> bytes:
        """The bytes of the file. Errors: UsageError if the file would exceed its caps."""
        directory = np.zeros(len(self._sections), SECTION)
        parts: list[bytes | memoryview] = []
        compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        raw_bytes = 0
        for entry, (name, values, delta) in zip(directory, self._sections, strict=True):
            raw = np.diff(values, prepend=values.dtype.type(0)) if delta else values
            data = raw.view(np.uint8).data
            packed = compressor.compress(data)
            small = len(packed) < data.nbytes
            coding = (ZSTD_DELTA if delta else ZSTD) if small else RAW
            parts.append(packed if small else values.view(np.uint8).data)
            raw_bytes += data.nbytes
            stored = len(packed) if small else data.nbytes
            entry["name"], entry["type"] = name.encode("ascii"), values.dtype.str.encode("ascii")
            entry["coding"], entry["count"], entry["stored"] = coding, len(values), stored
        head = HEADER.pack(MAGIC, VERSION, self._kind, 0, len(self._sections))
        body = b"".join([head, directory.tobytes(), *parts])
        stored_max = stored_bytes_max(self._kind)
        if len(body) + HASH_BYTES > stored_max or raw_bytes > RAW_BYTES_MAX:
            raise UsageError(
                f"the {self._kind.name.lower()} of this state has {len(body)} bytes ({raw_bytes} before compression); "
                f"at most {stored_max} ({RAW_BYTES_MAX}) are allowed. Reduce the number of tensors in the state"
            )
        return body + xxhash.xxh3_128_digest(body)


class ColumnReader:
    """The sections of one file, checked. Each getter decompresses one section. `what` names the file in errors. Errors,
    of all methods: DamagedData; NewerFormat for a file of a later version."""

    def __init__(self, kind: ColumnKind, data: bytes | memoryview, what: str) -> None:
        self.what = what
        self._sections = dict(self._parse(kind, memoryview(data)))

    def _parse(self, kind: ColumnKind, data: memoryview) -> Iterable[tuple[str, _Section]]:
        if data.nbytes > (stored_max := stored_bytes_max(kind)):
            raise self.damaged(f"it has {data.nbytes} bytes; at most {stored_max} are allowed")
        if data.nbytes < HEADER.size or bytes(data[: len(MAGIC)]) != MAGIC:
            raise self.damaged(f"it is not a file of ckpt (it begins with {bytes(data[:8])!r})")
        _, version, found, zero, count = HEADER.unpack_from(data)
        if version < VERSION:
            raise self.damaged(f"format version {version} does not exist")
        if xxhash.xxh3_128_digest(data[:-HASH_BYTES]) != bytes(data[-HASH_BYTES:]):
            what = f"; its header names format version {version}, which needs a newer ckpt" if version > VERSION else ""
            raise self.damaged(f"its bytes do not match their hash (xxh3-128){what}")
        # The hash is right, and every version ends with that hash, so this is no flipped bit.
        if version > VERSION:
            text = f"it has format version {version}, and this ckpt reads version {VERSION}; install a newer ckpt"
            raise NewerFormat(f"{self.what}: {text}")
        if found != kind or zero != 0:
            raise self.damaged(f"it is of kind {found}, not a {kind.name.lower()} ({int(kind)})")
        start = HEADER.size + count * SECTION.itemsize
        if count > SECTIONS_MAX or start > data.nbytes - HASH_BYTES:
            raise self.damaged(f"its directory of {count} sections does not fit into it")
        raw_left = RAW_BYTES_MAX
        seen: set[str] = set()
        for name, kind_of, coding, elements, stored in np.frombuffer(data, SECTION, count, HEADER.size).tolist():
            section = _Section(_ascii(name), _ascii(kind_of), coding, elements, data[start : start + stored])
            codings = (RAW, ZSTD) if section.type == "<f8" else (RAW, ZSTD, ZSTD_DELTA)
            if section.type not in TYPES or coding not in codings or section.name in seen:
                raise self.damaged(f"section {section.name!r} has an unknown type or coding, or appears twice")
            if start + stored > data.nbytes - HASH_BYTES:
                raise self.damaged(f"section {section.name!r} reaches beyond the end of the file")
            seen.add(section.name)
            raw_left -= elements * section.itemsize
            if raw_left < 0:
                raise self.damaged(f"it has more than {RAW_BYTES_MAX} bytes when decompressed")
            if coding == RAW and stored != elements * section.itemsize:
                raise self.damaged(f"section {section.name!r} holds {stored} bytes for {elements} elements")
            start += stored
            yield section.name, section
        if start != data.nbytes - HASH_BYTES:
            raise self.damaged("it has bytes that belong to no section")

    def damaged(self, message: str) -> DamagedData:
        return DamagedData(f"{self.what}: {message}")

    def count(self, name: str) -> int:
        return self._section(name).count

    def array(self, name: str, dtype: str, count: int | None = None) -> AnyArray:
        """The section as an array of exactly that type; of exactly `count` elements if given."""
        section = self._section(name)
        if section.type != dtype:
            raise self.damaged(f"section {name!r} is of type {section.type}, not {dtype}")
        if count is not None and section.count != count:
            raise self.damaged(f"section {name!r} has {section.count} elements instead of {count}")
        if section.coding == RAW:
            return np.frombuffer(section.data, dtype)
        raw = self._decompress(section)
        values = np.frombuffer(raw, dtype)
        return np.cumsum(values, dtype=dtype) if section.coding == ZSTD_DELTA else values

    def ints(self, name: str, dtype: str, count: int | None = None, top: int = (1 << 63) - 1) -> Ints:
        """An unsigned section as int64, each element at most `top`."""
        values = self.array(name, dtype, count)
        if len(values) and int(values.max()) > top:
            raise self.damaged(f"section {name!r} holds {int(values.max())}; at most {top} is allowed")
        return values.astype(np.int64)

    def struct(self, name: str, dtype: np.dtype[np.void], count_max: int) -> npt.NDArray[np.void]:
        """The sections `name.field` as one structured array of at most `count_max` elements."""
        fields = dtype.fields
        assert fields is not None
        count = self.count(f"{name}.{next(iter(fields))}")
        if count > count_max:
            raise self.damaged(f"it has {count} {name}; at most {count_max} are allowed")
        whole = np.empty(count, dtype)
        for field, (kind_of, *_) in fields.items():
            whole[field] = self.array(f"{name}.{field}", kind_of.str, count)
        return whole

    def blob(self, name: str, bytes_max: int) -> bytes:
        if self.count(name) > bytes_max:
            raise self.damaged(f"section {name!r} has {self.count(name)} bytes; at most {bytes_max} are allowed")
        return self.array(name, "|u1").tobytes()

    def strings(self, name: str, count: int) -> list[str]:
        """`count` texts. Errors: DamagedData, also for a text that is longer than STRING_BYTES_MAX, holds a NUL or is
        not UTF-8."""
        lengths = self.ints(f"{name}.len", "<u2", count, top=STRING_BYTES_MAX)
        stops = np.cumsum(lengths)
        data = self.array(name, "|u1", int(stops[-1]) if count else 0).tobytes()
        if b"\0" in data:
            raise self.damaged(f"section {name!r} holds a NUL")
        bounds = [0, *stops.tolist()]
        try:
            return [data[a:b].decode() for a, b in itertools.pairwise(bounds)]
        except UnicodeDecodeError as exc:
            raise self.damaged(f"section {name!r} is not UTF-8") from exc

    def _section(self, name: str) -> _Section:
        section = self._sections.get(name)
        if section is None:
            raise self.damaged(f"section {name!r} is missing")
        return section

    def _decompress(self, section: _Section) -> bytes:
        size = section.count * section.itemsize
        try:
            declared = zstandard.get_frame_parameters(section.data)
            if declared.content_size != size or declared.window_size > _ZSTD_WINDOW_BYTES_MAX:
                raise self.damaged(f"section {section.name!r} has {declared.content_size} bytes instead of {size}")
            return zstandard.ZstdDecompressor().decompress(section.data, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as exc:
            raise self.damaged(f"section {section.name!r} does not decompress: {exc}") from exc


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    type: str
    coding: int
    count: int
    data: memoryview

    @property
    def itemsize(self) -> int:
        return int(self.type[-1]) if self.type in TYPES else 8


def _ascii(text: bytes) -> str:
    return text.decode("ascii", "backslashreplace")


def _utf8(text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError as exc:
        raise UsageError(f"the name {text!r} cannot be written as UTF-8; rename it") from exc
    if len(data) > STRING_BYTES_MAX or b"\0" in data:
        raise UsageError(f"the name {text[:80]!r} is longer than {STRING_BYTES_MAX} bytes or holds a NUL; rename it")
    return data

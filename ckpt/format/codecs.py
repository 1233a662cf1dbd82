"""Codecs of a frame: raw, zstd, or byte planes with entropy coding.

Trained floating-point numbers hardly repeat, but they have few exponents. PLANES cuts every element into planes, from
its low bytes to its high ones. Each plane is stored as zstd, tuned to Huffman coding alone; or raw, if a sample shows
that coding gains nothing. Layout of a PLANES frame, little-endian:

    u1 number of planes; for each, from the low bytes up: u1 width (bytes of each element), u1 coding (0 raw, 1 zstd),
    u4 stored bytes; zeros up to a multiple of 8; then the planes' stored bytes in that order

The sign stays in the top plane: moving it elsewhere saves 1 % of bf16 weights, and costs a fifth of the speed. All
heavy work runs outside the GIL, in the buffers of a `CodecScratch`: fresh memory for every frame would halve the speed.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from ckpt.errors import DamagedData, NewerFormat, UsageError
from ckpt.format.manifest import Codec
from ckpt.types import DTYPES, ITEMSIZE, CodecOption

Buffer = bytes | bytearray | memoryview
Bytes = npt.NDArray[np.uint8]
UInts = npt.NDArray[np.unsignedinteger[Any]]

ZSTD_LEVEL = 3
WINDOW_BYTES_MAX = 1 << 27
ENTROPY_BITS_MAX = 7.85  # of a byte: above, a plane stays raw
SAMPLES = 1 << 13
BLOCK_ELEMENTS = 1 << 16

_COUNT = struct.Struct("<B")
_PLANE = struct.Struct("<BBI")

# How numbers are cut into planes: the bytes of one number (a complex one is two), and the planes' widths from the low
# end.
_FLOAT_BYTES = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 2, "complex64": 4, "complex128": 8,
}  # fmt: skip
_WIDTHS = {2: (1, 1), 4: (2, 1, 1), 8: (4, 2, 1, 1)}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class CodecScratch:
    """The buffers and coders of one thread. What `encode` returns lies in here until its next call."""

    def __init__(self) -> None:
        huffman = zstandard.ZstdCompressionParameters(
            compression_level=1,
            window_log=17,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            strategy=zstandard.STRATEGY_FAST,
        )
        self.huffman = zstandard.ZstdCompressor(compression_params=huffman)
        self.zstd = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
        self._buffers: dict[str, Bytes] = {}

    def buffer(self, name: str, size: int) -> Bytes:
        """The first `size` bytes of the buffer of that name. Its content is lost if it has to grow."""
        held = self._buffers.get(name)
        if held is None or len(held) < size:
            held = self._buffers[name] = np.empty(max(size, 1 << 16), np.uint8)
        return held[:size]


def choose(dtype_code: int, option: CodecOption) -> int:
    """The codec to try for a frame of that dtype. Errors: UsageError names the possible options."""
    name = DTYPES[dtype_code]
    if option == "auto":
        return Codec.PLANES if name in _FLOAT_BYTES else Codec.ZSTD
    if option == "planes":
        return Codec.PLANES if ITEMSIZE[name] > 1 else Codec.ZSTD
    if option == "zstd":
        return Codec.ZSTD
    if option == "raw":
        return Codec.RAW
    raise UsageError(f'codec={option!r} is not known; give "auto", "raw", "zstd" or "planes"')


def encode(option: CodecOption, dtype_code: int, raw: Buffer, scratch: CodecScratch) -> tuple[int, Buffer]:
    """The codec taken and the bytes to store; RAW and `raw` itself if coding gains nothing. The bytes lie in `scratch`
    until its next use. Errors: UsageError for an unknown option."""
    codec = choose(dtype_code, option)
    size = memoryview(raw).nbytes
    data = np.frombuffer(raw, np.uint8)
    if codec == Codec.PLANES and size % _element_bytes(dtype_code):
        # Not a whole number of elements, so there are no planes.
        codec = Codec.ZSTD
    if codec == Codec.ZSTD:
        packed = scratch.buffer("packed", size)
        stored = _compress(scratch.zstd, data, packed)
    elif codec == Codec.PLANES:
        packed, stored = _encode_planes(data, _WIDTHS[_element_bytes(dtype_code)], scratch)
    else:
        stored = 0
    return (codec, packed[:stored].data) if 0 < stored < size else (Codec.RAW, raw)


def decode(codec: int, dtype_code: int, data: Buffer, out: memoryview, scratch: CodecScratch) -> None:
    """Decodes a frame into `out`, which must have exactly the frame's raw length. `data` may be hostile. It then gives
    wrong bytes (which the frame's hash shows) or an error, and uses no memory beyond that length. Errors: DamagedData;
    NewerFormat for an unknown codec."""
    target = np.frombuffer(out, np.uint8)
    source = np.frombuffer(data, np.uint8)
    if codec == Codec.RAW:
        if len(source) != len(target):
            raise DamagedData(f"an uncompressed frame of {len(target)} bytes is stored in {len(source)} bytes")
        target[:] = source
    elif codec == Codec.ZSTD:
        _decompress(source, target, scratch)
    elif codec == Codec.PLANES:
        _decode_planes(source, target, scratch)
    else:
        raise NewerFormat(
            f"a frame of {DTYPES[dtype_code]} is in codec {codec}, which this ckpt does not know; install a newer ckpt"
        )


def _element_bytes(dtype_code: int) -> int:
    name = DTYPES[dtype_code]
    return _FLOAT_BYTES.get(name, min(ITEMSIZE[name], 8))


def _encode_planes(raw: Bytes, widths: tuple[int, ...], scratch: CodecScratch) -> tuple[Bytes, int]:
    unit = sum(widths)
    count = len(raw) // unit
    head = _head_bytes(len(widths))
    packed = scratch.buffer("packed", head + len(raw))
    packed[:head] = 0
    dense = _dense_planes(raw, widths)
    # Raw planes at the low end are cut directly to where they are stored; the others go through "planes".
    loose = scratch.buffer("planes", len(raw))
    places: list[Bytes] = []
    direct, used = head, 0
    for i, width in enumerate(widths):
        if all(dense[: i + 1]):
            places.append(packed[direct : direct + count * width])
            direct += count * width
        else:
            places.append(loose[used : used + count * width])
            used += count * width
    _split(raw, widths, places, scratch)
    at = head
    for i, (width, plane) in enumerate(zip(widths, places, strict=True)):
        target = packed[at : at + len(plane)]
        stored = 0 if dense[i] else _compress(scratch.huffman, plane, target)
        coded = 0 < stored < len(plane)
        if not coded and at >= direct:
            target[:] = plane
        stored = stored if coded else len(plane)
        _PLANE.pack_into(packed.data, _COUNT.size + i * _PLANE.size, width, int(coded), stored)
        at += stored
    _COUNT.pack_into(packed.data, 0, len(widths))
    return packed, at


def _dense_planes(raw: Bytes, widths: tuple[int, ...]) -> list[bool]:
    """Which planes are not worth coding, by the entropy of a sample with a stride."""
    elements = raw.reshape(-1, sum(widths))
    sample = np.ascontiguousarray(elements[:: max(1, len(elements) // SAMPLES) | 1])
    dense, at = [], 0
    for width in widths:
        counts = np.bincount(sample[:, at : at + width].ravel(), minlength=256)
        share = counts[counts > 0] / max(1, counts.sum())
        dense.append(float(-(share * np.log2(share)).sum()) > ENTROPY_BITS_MAX)
        at += width
    return dense


def _split(raw: Bytes, widths: tuple[int, ...], places: list[Bytes], scratch: CodecScratch) -> None:
    unit = sum(widths)
    whole = raw.view(_UNSIGNED[unit])
    shifted = scratch.buffer("block", BLOCK_ELEMENTS * unit).view(_UNSIGNED[unit])
    planes = [place.view(_UNSIGNED[width]) for place, width in zip(places, widths, strict=True)]
    for start in range(0, len(whole), BLOCK_ELEMENTS):
        block = whole[start : start + BLOCK_ELEMENTS]
        shift = 0
        for plane, width in zip(planes, widths, strict=True):
            part = np.right_shift(block, shift, out=shifted[: len(block)]) if shift else block
            np.copyto(plane[start : start + len(block)], part, casting="unsafe")
            shift += 8 * width


def _decode_planes(data: Bytes, out: Bytes, scratch: CodecScratch) -> None:
    head = _plane_head(data, len(out))
    unit = sum(width for width, _, _ in head)
    count = len(out) // unit
    at = _head_bytes(len(head))
    loose = scratch.buffer("planes", len(out))
    planes, used = [], 0
    for width, coding, stored in head:
        part = data[at : at + stored]
        if coding:
            plane = loose[used : used + count * width]
            _decompress(part, plane, scratch)
            used += count * width
            part = plane
        planes.append(part.view(_UNSIGNED[width]))
        at += stored
    _merge(planes, [width for width, _, _ in head], out.view(_UNSIGNED[unit]), scratch)


def _head_bytes(planes: int) -> int:
    return -(-(_COUNT.size + planes * _PLANE.size) // 8) * 8


def _plane_head(data: Bytes, raw_bytes: int) -> list[tuple[int, int, int]]:
    """(width, coding, stored bytes) of every plane, checked. Errors: DamagedData."""
    count = int(data[0]) if len(data) else 0
    start = _head_bytes(count)
    if len(data) < start:
        raise DamagedData(f"a frame of {len(data)} bytes is too short for its {count} byte planes")
    head = [_PLANE.unpack_from(data.data, _COUNT.size + i * _PLANE.size) for i in range(count)]
    unit = sum(width for width, _, _ in head)
    if unit not in _UNSIGNED or raw_bytes % unit or any(width not in _UNSIGNED for width, _, _ in head):
        raise DamagedData(f"byte planes of {[width for width, _, _ in head]} do not make a frame of {raw_bytes} bytes")
    for width, coding, stored in head:
        if coding > 1 or (coding == 0 and stored != raw_bytes // unit * width):
            raise DamagedData(f"a byte plane of coding {coding} cannot have {stored} bytes")
    if start + sum(stored for _, _, stored in head) != len(data):
        raise DamagedData("the byte planes of a frame do not fill it")
    return head


def _merge(planes: list[UInts], widths: list[int], out: UInts, scratch: CodecScratch) -> None:
    """out = (...(top << 8 * width | next) << ...) | lowest, in blocks that stay in the cache."""
    buffer = scratch.buffer("block", BLOCK_ELEMENTS * out.itemsize).view(out.dtype)
    for start in range(0, len(out), BLOCK_ELEMENTS):
        target = out[start : start + BLOCK_ELEMENTS]
        whole = buffer[: len(target)] if len(planes) > 1 else target
        np.copyto(whole, planes[-1][start : start + len(target)])
        for i in reversed(range(len(planes) - 1)):
            np.left_shift(whole, 8 * widths[i], out=whole)
            np.bitwise_or(whole, planes[i][start : start + len(target)], out=whole if i else target)


def _compress(compressor: zstandard.ZstdCompressor, data: Bytes, out: Bytes) -> int:
    """The compressed length; 0 if `out` is too small. Writes one zstd frame that states its content size."""
    if not len(data):
        return 0
    with compressor.stream_reader(data.data, size=len(data), read_size=len(data)) as reader:
        length = int(reader.readinto(out.data))
    return length if length < len(out) else 0


def _decompress(data: Bytes, out: Bytes, scratch: CodecScratch) -> None:
    try:
        if zstandard.frame_content_size(data.data) != len(out):
            raise DamagedData(f"a zstd frame does not hold the recorded {len(out)} bytes")
        with scratch.decompressor.stream_reader(data.data, read_size=max(1, len(data))) as reader:
            length = int(reader.readinto(out.data)) if len(out) else 0
    except zstandard.ZstdError as exc:
        raise DamagedData(f"a zstd frame does not decompress: {exc}") from exc
    if length != len(out):
        raise DamagedData(f"a zstd frame ends after {length} of {len(out)} bytes")

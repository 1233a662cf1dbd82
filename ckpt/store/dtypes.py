"""Conversion of all stored dtypes, also those that NumPy lacks: as bit patterns and as floats.

bfloat16 is the upper half of a float32. The float8 kinds (1 byte) are read through tables of 256 values, built from
their definitions: Micikevicius et al., FP8 Formats for Deep Learning, 2022 (e4m3fn, e5m2); Noune et al., 8-bit
Numerical Formats for Deep Neural Networks, 2022 (the fnuz kinds); OCP Microscaling Formats 1.0, 2023 (e8m0).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import UsageError
from ckpt.types import ITEMSIZE

_NUMPY = {
    "uint8": "u1", "int8": "i1", "bool": "u1", "int16": "<i2", "int32": "<i4", "int64": "<i8",
    "uint16": "<u2", "uint32": "<u4", "uint64": "<u8",
    "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8", "complex128": "<c16",
}  # fmt: skip
# Exponent bits, mantissa bits, bias, meaning of the special patterns.
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
}
INTEGERS = frozenset(name for name in _NUMPY if "int" in name)
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64", "float8_e8m0fnu", *_FLOAT8})
TARGET_DTYPES = ("float16", "bfloat16", "float32", "float64")

Bits = npt.NDArray[Any]


def bits_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy dtype of arrays that hold this dtype's elements: NumPy's own if it exists, else bit patterns."""
    size = ITEMSIZE[dtype]
    return np.dtype(_NUMPY.get(dtype, f"<u{size}" if size <= 8 else f"V{size}"))


def to_float64(bits: Bits, dtype: str) -> npt.NDArray[Any] | None:
    """The numbers as float64 (complex128 for complex kinds); None if the dtype is not one of numbers."""
    # Ignored: a signalling NaN becomes a quiet one.
    with np.errstate(invalid="ignore"):
        if dtype in FLOATS:
            return to_numpy_floats(bits, dtype).astype(np.float64)
        if dtype == "complex32":
            parts = np.ascontiguousarray(bits)[..., None].view(np.float16).astype(np.float64)
            return parts[..., 0] + 1j * parts[..., 1]
        if dtype not in _NUMPY:
            return None
        return bits.astype(np.complex128 if dtype.startswith("complex") else np.float64)


def distances(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The distance between each pair of numbers, rounded once; at most the largest float64. Exact before rounding, also
    for integers."""
    if a.dtype.kind in "iu":
        # The difference may wrap; read as an unsigned integer it is correct.
        wrapped = np.where(a > b, a - b, b - a)
        return np.asarray(wrapped.view(f"u{a.itemsize}"), np.float64)
    with np.errstate(over="ignore"):
        return np.asarray(np.minimum(np.abs(a - b), np.finfo(np.float64).max), np.float64)


def convert_floats(bits: Bits, dtype: str, target: str) -> Bits:
    """The same numbers as `target` (one of TARGETS), rounded to nearest even. `dtype` is one of FLOATS. Errors:
    UsageError for any other dtype."""
    if target not in TARGET_DTYPES or dtype not in FLOATS:
        raise UsageError(
            f"cannot convert {dtype} to {target}; floating-point tensors can become {', '.join(TARGET_DTYPES)}"
        )
    if dtype == target:
        return bits
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = to_numpy_floats(bits, dtype)
        if target == "bfloat16":
            return _to_bfloat16(numbers)
        return numbers.astype(_NUMPY[target])


def to_numpy_floats(bits: Bits, dtype: str) -> npt.NDArray[Any]:
    """The same numbers in a dtype that NumPy has. `dtype` is one of FLOATS."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype in _NUMPY:
        return bits
    return _float8_values(dtype)[bits]


def _to_bfloat16(exact: npt.NDArray[Any]) -> Bits:
    """The numbers as bfloat16. A float64 is first rounded to float32 towards odd, so that rounding twice equals
    rounding once."""
    single = exact.astype(np.float32)
    word = single.view(np.uint32)
    if exact.dtype == np.float64:
        back = single.astype(np.float64)
        beyond = np.isfinite(exact) & (np.abs(back) > np.abs(exact))
        # Now rounded towards zero.
        word = np.where(beyond, word - 1, word)
        word = np.where(word.view(np.float32).astype(np.float64) != exact, word | 1, word)
        word = np.where(np.isfinite(exact), word, single.view(np.uint32)).astype(np.uint32)
    rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
    quiet_nan = ((word >> 16) & 0x8000) | 0x7FC0
    return np.where(np.isnan(exact), quiet_nan, rounded).astype(np.uint16)


@functools.cache
def _float8_values(dtype: str) -> npt.NDArray[np.float32]:
    code = np.arange(256)
    if dtype == "float8_e8m0fnu":
        table = np.ldexp(1.0, code - 127)
        table[255] = np.nan
        return np.asarray(table, np.float32)
    exponent_bits, mantissa_bits, bias, kind = _FLOAT8[dtype]
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    scale = 2.0**-mantissa_bits
    table = np.where(
        exponent == 0,
        np.ldexp(mantissa * scale, 1 - bias),
        np.ldexp(1.0 + mantissa * scale, exponent - bias),
    )
    table = np.where(code & 0x80, -table, table)
    top = exponent == (1 << exponent_bits) - 1
    if kind == "fnuz":
        table[0x80] = np.nan
    elif kind == "fn":
        table[top & (mantissa == (1 << mantissa_bits) - 1)] = np.nan
    else:
        table[top] = np.where(mantissa[top] == 0, np.copysign(np.inf, table[top]), np.nan)
    return np.asarray(table, np.float32)

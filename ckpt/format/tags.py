"""The types that msgpack lacks: their tags in the durable format, and what a tagged array is read as.

A tagged value is an array whose first element is an empty extension of type Tag. msgpack's own array is a list, and its
map a dict, in order."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from typing import Any

import msgpack
import numpy as np

from ckpt.types import ITEMSIZE

NDIM_MAX = 64
# The most keys of a dict, or items of a set, with one hash: each is compared with all before it. An attacker can choose
# the hash of numbers and of tuples of them (equal modulo 2^61 - 1 is enough), but not that of texts.
SAME_HASH_MAX = 128
# Of an int in two's complement. Python refuses to print a much longer one, and multiplying such ints takes long.
INT_BYTES_MAX = 1024
DEVICE_MAX = 80  # characters of a torch device's name


class Tag:
    """Tag numbers of the durable format: append only. Each comment says what follows the tag in the array."""

    TUPLE = 1  # the items
    SET = 2  # the items
    FROZENSET = 3  # the items
    ORDERED_DICT = 4  # key, value, key, value, ...
    COUNTER = 5  # key, value, ...
    DEFAULT_DICT = 6  # the factory's name or nil, then key, value, ...
    DEQUE = 7  # maxlen or nil, then the items
    INT = 8  # bytes: two's complement, little-endian; for what 64 bits do not hold
    STR = 9  # bytes: UTF-8 with surrogates; for what strict UTF-8 does not hold
    BYTEARRAY = 10  # bytes
    COMPLEX = 11  # real, imaginary
    RANGE = 12  # start, stop, step
    SLICE = 13  # start, stop, step
    ARRAY = 14  # dtype as NumPy writes it ("<f4"), list of dimensions, bytes in row-major order
    SCALAR = 15  # dtype, bytes: a NumPy scalar
    INTS = 16  # bytes: a list of ints, 8 bytes each, little-endian
    FLOATS = 17  # bytes: a list of floats, 8 bytes each, little-endian
    TORCH_SIZE = 18  # the items; read as a tuple where torch is not loaded
    TORCH_DTYPE = 19  # "float32"; read as that string where torch is not loaded
    TORCH_DEVICE = 20  # "cuda:0"; read as that string where torch is not loaded


FACTORIES: dict[str, Callable[[], Any]] = {"list": list, "dict": dict, "int": int, "float": float, "set": set}
NUMPY_DTYPE = re.compile(r"\|[biu]1|[<>]([iuf][248]|c8|c16)")
TORCH = {"Size": Tag.TORCH_SIZE, "dtype": Tag.TORCH_DTYPE, "device": Tag.TORCH_DEVICE}


def list_or_tagged(items: list[Any]) -> Any:
    """What an array is read as: a hook of msgpack. Errors: those of `_untag`."""
    if items and type(items[0]) is msgpack.ExtType:
        return _untag(items[0].code, items[1:])
    return items


def make_dict(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A hook of msgpack. Errors: ValueError for a key that appears twice, and for too many keys with one hash."""
    return _fill({}, pairs)


def _fill(empty: dict[Any, Any], pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Fills `empty` (any kind of dict but an ordered one). Returns it."""
    if len(pairs) > SAME_HASH_MAX:
        _refuse_hash_collisions([key for key, _ in pairs])
    dict.update(empty, pairs)
    if len(empty) != len(pairs):
        raise ValueError("a key appears twice")
    return empty


def _pairs(flat: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def has_hash_collisions(keys: Collection[Any]) -> bool:
    """Whether more than SAME_HASH_MAX of the keys have the same hash."""
    if len(keys) <= SAME_HASH_MAX:
        return False
    hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
    hashes.sort()
    return bool((hashes[SAME_HASH_MAX:] == hashes[:-SAME_HASH_MAX]).any())


def _refuse_hash_collisions(keys: Collection[Any]) -> None:
    if has_hash_collisions(keys):
        raise ValueError(f"more than {SAME_HASH_MAX} keys have the same hash")


def _untag(tag: int, items: list[Any]) -> Any:
    """The value that a tagged array stands for. Errors: ValueError or TypeError for an array that `encode` does not
    write."""
    match tag, items:
        case (Tag.TUPLE, _):
            return tuple(items)
        case (Tag.SET | Tag.FROZENSET, _):
            _refuse_hash_collisions(items)
            found = set(items) if tag == Tag.SET else frozenset(items)
            if len(found) != len(items):
                raise ValueError("an item appears twice")
            return found
        case (Tag.ORDERED_DICT, _):
            _refuse_hash_collisions(items[::2])
            return OrderedDict(_pairs(items))
        case (Tag.COUNTER, _):
            return _fill(Counter(), _pairs(items))
        case (Tag.DEFAULT_DICT, [None | str() as name, *flat]) if name is None or name in FACTORIES:
            return _fill(defaultdict(None if name is None else FACTORIES[name]), _pairs(flat))
        case (Tag.DEQUE, [None | int() as maxlen, *flat]):
            return deque(flat, maxlen)
        case (Tag.INT, [bytes() as data]) if len(data) <= INT_BYTES_MAX:
            return int.from_bytes(data, "little", signed=True)
        case (Tag.STR, [bytes() as data]):
            return data.decode("utf-8", "surrogatepass")
        case (Tag.BYTEARRAY, [bytes() as data]):
            return bytearray(data)
        case (Tag.COMPLEX, [float() as real, float() as imaginary]):
            return complex(real, imaginary)
        case (Tag.RANGE, [int(), int(), int()]):
            return range(*items)
        case (Tag.SLICE, [_, _, _]):
            return slice(*items)
        case (Tag.ARRAY, [str() as dtype, list() as shape, bytes() as data]) if _is_shape(shape):
            return _array(dtype, shape, data).copy()
        case (Tag.SCALAR, [str() as dtype, bytes() as data]):
            return _array(dtype, [], data)[()]
        case (Tag.INTS, [bytes() as data]):
            return np.frombuffer(data, "<i8").tolist()
        case (Tag.FLOATS, [bytes() as data]):
            return np.frombuffer(data, "<f8").tolist()
    return _untag_torch(tag, items)


def _is_shape(shape: list[Any]) -> bool:
    return len(shape) <= NDIM_MAX and all(type(n) is int and 0 <= n < 1 << 63 for n in shape)


def _array(dtype: str, shape: list[int], data: bytes) -> np.ndarray[Any, Any]:
    if NUMPY_DTYPE.fullmatch(dtype) is None:
        raise ValueError(f"an array has the unknown dtype {dtype[:40]!r}")
    if math.prod(shape) * np.dtype(dtype).itemsize != len(data):
        raise ValueError(f"an array of shape {str(shape)[:80]} cannot have {len(data)} bytes")
    if dtype == "|b1" and data.translate(None, b"\0\1"):
        raise ValueError("a bool is neither 0 nor 1")
    return np.frombuffer(data, dtype).reshape(shape)


def _untag_torch(tag: int, items: list[Any]) -> Any:
    # A trainer has torch loaded. A tool that only looks does not load it for this.
    torch: Any = sys.modules.get("torch")
    if tag == Tag.TORCH_SIZE and all(type(n) is int and abs(n) < 1 << 63 for n in items):
        return torch.Size(items) if torch else tuple(items)
    match tag, items:
        case (Tag.TORCH_DTYPE, [str() as name]) if name in ITEMSIZE:
            if torch and not hasattr(torch, name):
                raise ValueError(f"torch {torch.__version__} has no {name}; install a newer torch")
            return getattr(torch, name) if torch else name
        case (Tag.TORCH_DEVICE, [str() as name]) if len(name) <= DEVICE_MAX:
            return torch.device(name) if torch else name
    raise ValueError(f"this ckpt does not know tag {tag} with these {len(items)} items")

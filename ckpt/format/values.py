"""All values of a state that are not tensors, as bytes and back: msgpack, with tags for types that msgpack lacks.

A decoded value equals the encoded one, in types and order too. Nothing is unpickled and no class is looked up. A value
of an unknown type (see Tag) is refused, and the error gives its path in the tree. The same tree gives the same bytes in
every process (sets are sorted by their encoding), so ranks can compare their trees by hash.

A tagged value is an array whose first element is an empty extension of type Tag. msgpack's own array is a list, and its
map a dict, in order. `decode` accepts hostile bytes. Depth, elements and sizes are capped: memory is at most
ELEMENTS_MAX small objects and a few times the length of the data. Keys with one hash are capped too, which bounds the
time. Types are checked before a value is used, and every fault is DamagedData.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgpack
import numpy as np

from ckpt.errors import DamagedData, UsageError, is_injected
from ckpt.types import FRAME_BYTES_MAX, ITEMSIZE

VALUES_BYTES_MAX = FRAME_BYTES_MAX  # a blob of values is one frame
ELEMENTS_MAX = 1 << 22
DEPTH_MAX = 128
NDIM_MAX = 64
# The most keys of a dict, or items of a set, with one hash: each is compared with all before it. An attacker can choose
# the hash of numbers and of tuples of them (equal modulo 2^61 - 1 is enough), but not that of texts.
SAME_HASH_MAX = 128
# Of an int in two's complement. Python refuses to print a much longer one, and multiplying such ints takes long.
INT_BYTES_MAX = 1024
DEVICE_MAX = 80  # characters of a torch device's name
# The most kinds of refused values that an error names, and the most places of each kind.
NAMED_MAX = 5
_PACKED_MIN = 32  # a list of at least so many ints, or floats, is written as one block


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


_FACTORIES: dict[str, Callable[[], Any]] = {"list": list, "dict": dict, "int": int, "float": float, "set": set}
_NUMPY_DTYPE = re.compile(r"\|[biu]1|[<>]([iuf][248]|c8|c16)")
_TORCH = {"Size": Tag.TORCH_SIZE, "dtype": Tag.TORCH_DTYPE, "device": Tag.TORCH_DEVICE}


class Constants:
    """Parts of trees that never change, such as the lists of names that every save repeats. Each is encoded once, and
    its bytes are copied whenever `encode` meets that very object. The parts are kept alive, so that no other object
    takes their id."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self.parts = {id(part): _Constant(part) for part in parts}


class _Constant:
    """One constant part. `items`: its number of elements, as `_count` counts."""

    __slots__ = "data", "items", "value"

    def __init__(self, value: Any) -> None:
        self.value = value
        # Empty until the part is met.
        self.data = b""
        self.items = 0


class Refused:
    """The values that cannot be stored: their places, by reason. Bounded: beyond NAMED_MAX they are only counted."""

    def __init__(self) -> None:
        self._places_by_reason: dict[str, dict[str, None]] = {}
        self._more_by_reason: Counter[str] = Counter()
        self._reasons_more = 0

    def __bool__(self) -> bool:
        return bool(self._places_by_reason)

    def add(self, where: Callable[[], str], why: str) -> None:
        if why not in self._places_by_reason and len(self._places_by_reason) == NAMED_MAX:
            self._reasons_more += 1
            return
        places = self._places_by_reason.setdefault(why, {})
        if len(places) < NAMED_MAX:
            places[where()] = None
        else:
            self._more_by_reason[why] += 1

    def raise_if_any(self) -> None:
        """Errors: UsageError names all refused values, if there are any."""
        if not self:
            return
        said = []
        for why, places in self._places_by_reason.items():
            more = f" and {self._more_by_reason[why]} more" if self._more_by_reason[why] else ""
            said.append(f"{', '.join(places)}{more}: {why}")
        raise UsageError("; ".join(said) + (f"; and {self._reasons_more} more" if self._reasons_more else ""))


def encode(tree: Any, root: str = "state", constants: Constants | None = None, refused: Refused | None = None) -> bytes:
    """The bytes of a tree of plain values.

    `root`: the tree's name in messages. `constants`: parts that may have been encoded before. `refused`: collects the
    values that cannot be stored; nothing is raised for them then, and the bytes are useless if there are any.

    Errors: UsageError with the paths of the values that cannot be stored; also if a value nests deeper than DEPTH_MAX
    (as a tree that contains itself does), or the whole exceeds VALUES_BYTES_MAX."""
    found = Refused() if refused is None else refused
    encoder = _Encoder(root, constants.parts if constants is not None else {}, found)
    encoder.value(tree)
    if refused is None:
        found.raise_if_any()
    data = b"".join(encoder.out)
    if len(data) > VALUES_BYTES_MAX:
        raise UsageError(
            f"the plain values of {root} have {len(data)} bytes; at most {VALUES_BYTES_MAX} are stored. "
            "Give large arrays as tensors"
        )
    return data


def decode(data: bytes | memoryview, what: str = "values") -> Any:
    """The tree that `encode` was given. Arrays are new and writable. Errors: only DamagedData, which begins with
    `what`, for anything that `encode` does not write."""
    if memoryview(data).nbytes > VALUES_BYTES_MAX:
        raise DamagedData(f"{what}: it has {memoryview(data).nbytes} bytes; at most {VALUES_BYTES_MAX} are allowed")
    decoder = _Decoder(memoryview(data).cast("B"))
    try:
        tree = decoder.value(0)
    except Exception as exc:
        if is_injected(exc):
            raise
        text = f"it is not well-formed at byte {decoder.position}: {type(exc).__name__}: {exc!s:.200}"
        raise DamagedData(f"{what}: {text}") from exc
    if decoder.position != len(data):
        raise DamagedData(f"{what}: {len(data) - decoder.position} bytes follow its end")
    return tree


class _Encoder:
    def __init__(self, root: str, constants: dict[int, _Constant], refused: Refused) -> None:
        self.out: list[bytes] = []
        self.refused = refused
        self._constants = constants
        self._root = root
        self._packer = msgpack.Packer()
        # Keys; made into text only if something is refused.
        self._path: list[Any] = []
        self._elements_left = ELEMENTS_MAX

    def value(self, value: Any) -> None:
        kind = type(value)
        if kind is str:
            self._str(value)
        elif value is None or kind is bool or kind is float or kind is bytes:
            self._plain(value)
        elif kind is int:
            self._int(value)
        elif (constant := self._constants.get(id(value))) is not None:
            self._copy(constant)
        else:
            self._container(kind, value)

    def _copy(self, constant: _Constant) -> None:
        if not constant.data:
            at, left = len(self.out), self._elements_left
            self._container(type(constant.value), constant.value)
            # Otherwise the refused value may be a part of this constant.
            if not self.refused:
                constant.data, constant.items = b"".join(self.out[at:]), left - self._elements_left
            return
        self._count(constant.items)
        self.out.append(constant.data)

    def _container(self, kind: type, value: Any) -> None:
        if kind is dict:
            self._enter_container()
            self._count(2 * len(value))
            self._check_hashes(value)
            self.out.append(self._packer.pack_map_header(len(value)))
            self._pairs(value.items())
            self._path.pop()
        elif kind is list:
            self._list(value)
        elif kind is tuple:
            self._items(Tag.TUPLE, value)
        else:
            self._encode_rare(kind, value)

    def _plain(self, value: Any) -> None:
        self.out.append(self._packer.pack(value))

    def _encode_rare(self, kind: type, value: Any) -> None:
        if kind is Counter:
            self._mapping(Tag.COUNTER, value)
        elif kind is OrderedDict:
            self._mapping(Tag.ORDERED_DICT, value)
        elif kind is defaultdict:
            factory = value.default_factory
            name = None if factory is None else getattr(factory, "__name__", "")
            if name is not None and _FACTORIES.get(name) is not factory:
                self._refuse(f"a defaultdict of {factory!r} cannot be stored; use {', '.join(_FACTORIES)}")
                name = None
            self._mapping(Tag.DEFAULT_DICT, value, name)
        elif kind is deque:
            self._items(Tag.DEQUE, value, value.maxlen)
        elif kind is set or kind is frozenset:
            self._set(Tag.SET if kind is set else Tag.FROZENSET, value)
        elif kind is bytearray:
            self._tagged(Tag.BYTEARRAY, bytes(value))
        elif kind is complex:
            self._tagged(Tag.COMPLEX, value.real, value.imag)
        elif kind is range or kind is slice:
            self._items(Tag.RANGE if kind is range else Tag.SLICE, (value.start, value.stop, value.step))
        elif kind is np.ndarray:
            self._count(value.ndim)
            if dtype := self._dtype(value):
                self._tagged(Tag.ARRAY, dtype, list(value.shape), value.tobytes())
        elif isinstance(value, np.generic):
            if dtype := self._dtype(value):
                self._tagged(Tag.SCALAR, dtype, value.tobytes())
        elif kind.__module__ == "torch" and kind.__name__ in _TORCH:
            tag = _TORCH[kind.__name__]
            name = str(value).removeprefix("torch.")
            if tag == Tag.TORCH_SIZE:
                self._items(tag, value)
            elif tag == Tag.TORCH_DTYPE and name not in ITEMSIZE:
                self._refuse(f"the dtype {value} cannot be stored; give its name as a string")
            else:
                self._tagged(tag, name)
        else:
            self._refuse_kind(kind)

    def _int(self, value: int) -> None:
        if -(1 << 63) <= value < 1 << 64:
            self._plain(value)
        elif value.bit_length() < 8 * INT_BYTES_MAX:
            self._tagged(Tag.INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        else:
            self._refuse(f"an int of {value.bit_length()} bits cannot be stored; give it as bytes")

    def _str(self, value: str) -> None:
        try:
            self._plain(value)
        except UnicodeEncodeError:
            self._tagged(Tag.STR, value.encode("utf-8", "surrogatepass"))

    def _list(self, value: list[Any]) -> None:
        kinds = set(map(type, value)) if len(value) >= _PACKED_MIN else set()
        if kinds == {float}:
            self._tagged(Tag.FLOATS, np.array(value, "<f8").tobytes())
            return
        if kinds == {int} and min(value) >= -(1 << 63) and max(value) < 1 << 63:
            self._tagged(Tag.INTS, np.array(value, "<i8").tobytes())
            return
        self._enter_container()
        self._count(len(value))
        self.out.append(self._packer.pack_array_header(len(value)))
        self._encode_items(value)
        self._path.pop()

    def _items(self, tag: int, items: Any, *first: Any) -> None:
        self._enter_container()
        self._head(tag, len(first) + len(items))
        for value in first:
            self._plain(value)
        self._encode_items(items)
        self._path.pop()

    def _set(self, tag: int, items: Collection[Any]) -> None:
        encoded = []
        out = self.out
        self._check_hashes(items)
        self._enter_container()
        for value in items:
            self._path[-1] = _SetItem(value)
            self.out = []
            self.value(value)
            encoded.append(b"".join(self.out))
        self._path.pop()
        self.out = out
        self._head(tag, len(encoded))
        self.out.extend(sorted(encoded))

    def _mapping(self, tag: int, value: dict[Any, Any], *first: Any) -> None:
        self._enter_container()
        self._head(tag, len(first) + 2 * len(value))
        self._check_hashes(value)
        for item in first:
            self._plain(item)
        self._pairs(value.items())
        self._path.pop()

    def _tagged(self, tag: int, *items: Any) -> None:
        self._head(tag, len(items))
        for item in items:
            self._plain(item)

    def _head(self, tag: int, items: int) -> None:
        self._count(1 + items)
        self.out.append(self._packer.pack_array_header(1 + items))
        self.out.append(self._packer.pack_ext_type(tag, b""))

    def _pairs(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        for key, value in pairs:
            self._path[-1] = key
            self.value(key)
            self.value(value)

    def _encode_items(self, items: Iterable[Any]) -> None:
        for i, value in enumerate(items):
            self._path[-1] = i
            self.value(value)

    def _count(self, items: int) -> None:
        """Counts elements as the decoder does, so that all that is written can be read."""
        self._elements_left -= items
        if self._elements_left < 0:
            raise self._error(
                f"there are more than {ELEMENTS_MAX} plain values; give large collections as arrays or tensors"
            )

    def _check_hashes(self, keys: Collection[Any]) -> None:
        """Refuses keys that a reader would refuse."""
        if _has_hash_collisions(keys):
            raise self._error(
                f"more than {SAME_HASH_MAX} keys have the same hash (such as ints that are equal modulo 2**61 - 1); "
                "give the keys as strings"
            )

    def _enter_container(self) -> None:
        if len(self._path) >= DEPTH_MAX:
            where = self._path_text(3)
            raise UsageError(f"{where}... is nested deeper than {DEPTH_MAX} levels, or contains itself; flatten it")
        self._path.append(_NO_KEY)

    def _dtype(self, value: np.generic | np.ndarray[Any, Any]) -> str:
        """The dtype as it is written; "" if it is refused."""
        name: str = value.dtype.str
        if _NUMPY_DTYPE.fullmatch(name) is not None:
            return name
        self._refuse(f"NumPy values of dtype {value.dtype} cannot be stored; convert them to numbers")
        return ""

    def _refuse_kind(self, kind: type) -> None:
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        if any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in kind.__mro__):
            self._refuse("a tensor cannot be stored as a value; register the object that holds the tensor in state=")
            return
        self._refuse(
            f"objects of type {name} cannot be stored as values; give plain numbers, strings, lists, tuples, dicts, "
            "sets or arrays, or an object with state_dict() and load_state_dict()"
        )

    def _refuse(self, why: str) -> None:
        """Notes that the current value is refused. Encoding goes on, so that all refused values are named at once."""
        self.refused.add(self._path_text, why)

    def _error(self, message: str) -> UsageError:
        return UsageError(f"{self._path_text()}: {message}")

    def _path_text(self, levels: int = DEPTH_MAX) -> str:
        keys = [key for key in self._path[:levels] if key is not _NO_KEY]
        return self._root + "".join(str(key) if type(key) is _SetItem else f"[{_repr_text(key, 80)}]" for key in keys)


# In a collection, before its first item.
_NO_KEY = object()


class _SetItem:
    """An item of a set, as a step of the path to it."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __str__(self) -> str:
        return f"{{{_repr_text(self._value, 60)}}}"


def _repr_text(value: Any, length: int) -> str:
    try:
        return repr(value)[:length]
    # The value holds an int of too many digits.
    except ValueError:
        return f"<{type(value).__name__}>"


# msgpack's fixed-size numbers: first byte -> how to read the rest.
_NUMBERS = {
    0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"), 0xCD: struct.Struct(">H"), 0xCE: struct.Struct(">I"), 0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"), 0xD1: struct.Struct(">h"), 0xD2: struct.Struct(">i"), 0xD3: struct.Struct(">q"),
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
# Lengths: first byte -> (kind of the value, bytes of the length).
_LENGTHS = {
    0xC4: ("bin", 1), 0xC5: ("bin", 2), 0xC6: ("bin", 4),
    0xD9: ("str", 1), 0xDA: ("str", 2), 0xDB: ("str", 4),
    0xDC: ("array", 2), 0xDD: ("array", 4), 0xDE: ("map", 2), 0xDF: ("map", 4),
}  # fmt: skip
_EMPTY_EXT = 0xC7


class _Decoder:
    """Reads one value after the other, and checks each length against the bytes that are left."""

    def __init__(self, data: memoryview) -> None:
        self.position = 0
        self._data = data
        self._elements_left = ELEMENTS_MAX

    def value(self, depth: int) -> Any:
        head = self._data[self.position]
        self.position += 1
        if head < 0x80:
            return head
        if head >= 0xE0:
            return head - 0x100
        if head in _CONSTANTS:
            return _CONSTANTS[head]
        number = _NUMBERS.get(head)
        if number is not None:
            (found,) = number.unpack(self._take(number.size))
            return found
        kind, length = self._length(head)
        if kind == "str":
            return str(self._take(length), "utf-8")
        if kind == "bin":
            return bytes(self._take(length))
        return self._container(kind, length, depth + 1)

    def _length(self, head: int) -> tuple[str, int]:
        if head < 0x90:
            return "map", head & 0x0F
        if head < 0xA0:
            return "array", head & 0x0F
        if head < 0xC0:
            return "str", head & 0x1F
        if head not in _LENGTHS:
            raise ValueError(f"no value begins with 0x{head:02x}")
        kind, size = _LENGTHS[head]
        return kind, int.from_bytes(self._take(size), "big")

    def _container(self, kind: str, length: int, depth: int) -> Any:
        items = 2 * length if kind == "map" else length
        self._elements_left -= items
        if depth > DEPTH_MAX + 2 or self._elements_left < 0 or items > len(self._data) - self.position:
            raise ValueError(f"a {kind} of length {length} at depth {depth} is too large or too deep")
        if kind == "map":
            return _pairs({}, [self.value(depth) for _ in range(items)])
        if not items or self._data[self.position] != _EMPTY_EXT:
            return [self.value(depth) for _ in range(items)]
        zero, tag = self._take(3)[1:]
        if zero:
            raise ValueError("an extension is not empty")
        return _untag(tag, [self.value(depth) for _ in range(items - 1)])

    def _take(self, size: int) -> memoryview:
        if size > len(self._data) - self.position:
            raise ValueError(f"{size} bytes are needed and {len(self._data) - self.position} are left")
        self.position += size
        return self._data[self.position - size : self.position]


def _pairs(empty: dict[Any, Any], flat: list[Any]) -> dict[Any, Any]:
    """Fills `empty` (any kind of dict) from key, value, key, value. Returns it."""
    _refuse_hash_collisions(flat[::2])
    dict.update(empty, zip(flat[::2], flat[1::2], strict=True))
    if 2 * len(empty) != len(flat):
        raise ValueError("a key appears twice")
    return empty


def _has_hash_collisions(keys: Collection[Any]) -> bool:
    """Whether more than SAME_HASH_MAX of the keys have the same hash."""
    if len(keys) <= SAME_HASH_MAX:
        return False
    hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
    hashes.sort()
    return bool((hashes[SAME_HASH_MAX:] == hashes[:-SAME_HASH_MAX]).any())


def _refuse_hash_collisions(keys: Collection[Any]) -> None:
    if _has_hash_collisions(keys):
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
            ordered: OrderedDict[Any, Any] = OrderedDict()
            for key, value in zip(items[::2], items[1::2], strict=True):
                ordered[key] = value
            return ordered
        case (Tag.COUNTER, _):
            return _pairs(Counter(), items)
        case (Tag.DEFAULT_DICT, [None | str() as name, *flat]) if name is None or name in _FACTORIES:
            return _pairs(defaultdict(None if name is None else _FACTORIES[name]), flat)
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
    if _NUMPY_DTYPE.fullmatch(dtype) is None:
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

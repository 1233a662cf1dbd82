"""All values of a state that are not tensors, as bytes and back: msgpack, with tags for types that msgpack lacks.

A decoded value equals the encoded one, in types and order too. Nothing is unpickled and no class is looked up. A value
of an unknown type (see Tag) is refused, and the error gives its path in the tree. The same tree gives the same bytes in
every process (sets are sorted by their encoding), so ranks can compare their trees by hash.

`decode` accepts hostile bytes. Depth, elements and sizes are capped: memory is at most ELEMENTS_MAX small objects and a
few times the length of the data. Keys with one hash are capped too, which bounds the time. Types are checked before a
value is used, and every fault is DamagedData.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from ckpt.errors import DamagedData, UsageError, is_injected
from ckpt.format.msgpack_headers import check_headers
from ckpt.format.tags import (
    FACTORIES,
    INT_BYTES_MAX,
    NUMPY_DTYPE,
    SAME_HASH_MAX,
    TORCH,
    Tag,
    has_hash_collisions,
    list_or_tagged,
    make_dict,
)
from ckpt.types import FRAME_BYTES_MAX, ITEMSIZE

VALUES_BYTES_MAX = FRAME_BYTES_MAX  # a blob of values is one frame
ELEMENTS_MAX = 1 << 22
DEPTH_MAX = 128
# The most kinds of refused values that an error names, and the most places of each kind.
NAMED_MAX = 5
_PACKED_MIN = 32  # a list of at least so many ints, or floats, is written as one block


class Constants:
    """Parts of trees that never change, such as the lists of names that every save repeats. Each is encoded once, and
    its bytes are copied whenever `encode` meets that very object. The parts are kept alive, so that no other object
    takes their id."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self.parts = {id(part): _Constant(part) for part in parts}


@dataclass(slots=True)
class _Constant:
    """One constant part. `data`: its encoding; empty until it is met. `items`: its elements, as `_count` counts."""

    value: Any
    data: bytes = b""
    items: int = 0


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
    try:
        check_headers(data if isinstance(data, bytes) else data.cast("B"), ELEMENTS_MAX + 1, DEPTH_MAX + 2, tags=True)
        return msgpack.unpackb(data, strict_map_key=False, object_pairs_hook=make_dict, list_hook=list_or_tagged)
    except Exception as exc:
        if is_injected(exc):
            raise
        raise DamagedData(f"{what}: it is not well-formed: {type(exc).__name__}: {exc!s:.200}") from exc


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
            if name is not None and FACTORIES.get(name) is not factory:
                self._refuse(f"a defaultdict of {factory!r} cannot be stored; use {', '.join(FACTORIES)}")
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
        elif kind.__module__ == "torch" and kind.__name__ in TORCH:
            tag = TORCH[kind.__name__]
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
        if has_hash_collisions(keys):
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
        if NUMPY_DTYPE.fullmatch(name) is not None:
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

"""A reader of pickles that never unpickles: it turns the opcodes into plain values and inert `Made` records.

No class is looked up, nothing is called and nothing is imported. A pickle that names a class or function which the
caller has not allowed is refused. Memory is a small multiple of the pickle's size. The opcodes are those that Python's
own pickler writes in protocols 2 to 5, without sets, frozen sets and buffers.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import DamagedData

_PUSHED = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


@dataclass(frozen=True)
class Name:
    """A class or function that the pickle names, such as "torch.Size"."""

    name: str


@dataclass(eq=False)
class Made:
    """An object that the pickle describes: the name of its class or function, the arguments, and the state that it
    would get."""

    name: str
    args: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PersistentId:
    """A reference to something outside the pickle, such as a tensor's storage."""

    value: Any


def read_pickle(data: bytes, allowed: Callable[[str], bool], what: str) -> Any:
    """The value that the pickle describes. `allowed`: whether it may name this class or function. `what`: the source,
    for messages. Errors: DamagedData."""
    machine = _Machine(allowed, what)
    try:
        for opcode, arg, _ in pickletools.genops(data):
            machine.run(opcode.name, arg)
        (value,) = machine.stack
    except DamagedData:
        raise
    except Exception as exc:
        raise DamagedData(f"{what} is not a pickle of this kind: {type(exc).__name__}: {exc!s:.200}") from exc
    return value


class _Machine:
    def __init__(self, allowed: Callable[[str], bool], what: str) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._allowed, self._what = allowed, what

    def run(self, name: str, arg: Any) -> None:
        stack = self.stack
        if name in _PUSHED:
            stack.append(arg)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[arg] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[arg])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name == "TUPLE":
            stack.append(tuple(self._pop_mark()))
        elif name in _TUPLES:
            self._pop_into_tuple(_TUPLES[name])
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else self._pop_mark()
            _checked(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            self._pop_into_tuple(2) if name == "SETITEM" else stack.append(self._pop_mark())
            flat = stack.pop()
            _checked(stack[-1], dict).update(zip(flat[::2], flat[1::2], strict=True))
        elif name not in ("PROTO", "FRAME", "STOP"):
            self._run_object(name, arg)

    def _run_object(self, name: str, arg: Any) -> None:
        stack = self.stack
        if name == "GLOBAL":
            self._push_name(*arg.split(" "))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            self._push_name(_checked(module, str), _checked(attribute, str))
        elif name in ("REDUCE", "NEWOBJ"):
            args, made = _checked(stack.pop(), tuple), _checked(stack.pop(), Name)
            stack.append(Made(made.name, args))
        elif name == "BUILD":
            state = stack.pop()
            made = _checked(stack[-1], Made)
            made.state = state if isinstance(state, dict) else {"state": state}
        elif name == "BINPERSID":
            stack.append(PersistentId(stack.pop()))
        else:
            raise ValueError(f"it uses the opcode {name}")

    def _push_name(self, module: str, name: str) -> None:
        full = f"{module}.{name}"
        if not self._allowed(full):
            raise DamagedData(f"{self._what} names {full!r:.200}, which does not belong there; nothing of it was run")
        self.stack.append(Name(full))

    def _pop_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("a mark is missing")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def _pop_into_tuple(self, count: int) -> None:
        if len(self.stack) < count:
            raise ValueError("the stack is empty")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(items)


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {kind.__name__} is expected, not {type(value).__name__}")
    return value

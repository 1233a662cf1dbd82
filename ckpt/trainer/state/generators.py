"""Random number generators: each rank's own, brought back so that the run goes on as if it had not stopped.

On the mesh they were saved on, every generator is restored exactly, by coordinate. On another mesh there is nothing to
restore exactly; each is then seeded anew from (seed, step, coordinate), where the coordinate leaves out
- every axis along which the saved generators were equal (tensor-parallel ranks that must draw the same numbers), and
- every new axis along which ranks work on the same data (coords.SAME_DATA);
and if they were equal on all ranks, they are equal on all ranks again. The seed is the first rank's.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckpt.errors import DamagedData, is_from_outside
from ckpt.trainer.state.mesh_coordinate import Axis, Coordinate
from ckpt.trainer.state.saved_values import Own


@dataclass(frozen=True, slots=True)
class RandomStream:
    """One generator: how its state is read, written, and made from a seed (64 bits). A stored state consists of
    plain values; what a torch generator was seeded with is stored beside it."""

    read: Callable[[], dict[str, Any]]
    write: Callable[[Any], object]
    reseed: Callable[[int], object]


def streams(objects: Mapping[str, Any]) -> dict[str, RandomStream]:
    """The process's own generators (Python, NumPy, torch, every CUDA device) and those registered in the state, by
    path. Reading them waits for no device."""
    found = dict(_PROCESS)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found |= {f"cuda:{i}": _torch(g) for i, g in enumerate(torch.cuda.default_generators)}
    return found | registered(objects)


def registered(objects: Mapping[str, Any]) -> dict[str, RandomStream]:
    return {f"state:{path}": of(value) for path, value in objects.items()}


def is_generator(value: object) -> bool:
    return isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random))


def of(value: Any) -> RandomStream:
    if isinstance(value, torch.Generator):
        return _torch(value)
    if isinstance(value, np.random.Generator):
        return _numpy(value.bit_generator)
    if isinstance(value, np.random.RandomState):
        return _numpy_legacy(value)
    return _python(value)


def _torch(generator: torch.Generator) -> RandomStream:
    def write(state: bytes) -> None:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def read() -> dict[str, Any]:
        state = generator.get_state()  # in host memory, of a device's generator too
        return {"state": ctypes.string_at(state.data_ptr(), state.nbytes), "seed": generator.initial_seed()}

    return RandomStream(read, write, generator.manual_seed)


def _python(source: Any) -> RandomStream:
    """Its words as an array: at each snapshot training stands still while they are encoded, which one by one takes a
    quarter of a millisecond. NumPy takes them from an array.array three times as fast as from a list."""

    def read() -> dict[str, Any]:
        version, words, *rest = source.getstate()
        return {"state": (version, np.frombuffer(array("I", words), np.uint32), *rest)}

    def write(state: Any) -> None:
        version, words, *rest = state
        source.setstate((version, tuple(map(int, words)), *rest))

    if source is random or type(source).getstate is random.Random.getstate:
        return RandomStream(read, write, source.seed)
    return RandomStream(
        lambda: {"state": source.getstate()}, source.setstate, source.seed
    )  # a subclass has one of its own


def _numpy_legacy(source: Any) -> RandomStream:
    return RandomStream(
        lambda: {"state": source.get_state(legacy=False)},
        source.set_state,
        lambda seed: source.seed([seed & 0xFFFFFFFF, seed >> 32]),
    )


def _numpy(bits: Any) -> RandomStream:
    def write(state: Any) -> None:
        bits.state = state

    return RandomStream(lambda: {"state": bits.state}, write, lambda seed: write(type(bits)(seed).state))


_PROCESS = {"python": _python(random), "numpy": _numpy_legacy(np.random), "torch": _torch(torch.default_generator)}


def read(found: Mapping[str, RandomStream]) -> dict[str, dict[str, Any]]:
    return {name: stream.read() for name, stream in found.items()}


def is_like(stream: RandomStream, state: Any) -> bool:
    """Whether a stored state is of the kind that this generator has."""
    return bool(_form(stream.read()["state"]) == _form(state))


def _form(state: Any) -> Any:
    if isinstance(state, Mapping):
        kind = state.get("bit_generator")
        return set(state), kind if isinstance(kind, str) else None
    return type(state), len(state) if isinstance(state, (bytes, tuple)) else 0


def restore(
    found: Mapping[str, RandomStream], own: Own | None, others: Sequence[Own], here: Coordinate, step: int
) -> None:
    """Writes every generator of which something was saved.

    `own`: what this coordinate saved on the same mesh; None on another one. `others`: what all ranks saved, needed on
    another mesh. Errors: DamagedData for a stored state that its generator refuses.
    """
    for name, stream in found.items():
        if own is not None and name in own.generators:
            try:
                stream.write(own.generators[name]["state"])
            except Exception as exc:
                if is_from_outside(exc):
                    raise
                raise DamagedData(f"the stored state of the generator {name} is not one: {exc}") from exc
            continue
        saved = {rank.axes: rank.generators[name] for rank in others if name in rank.generators}
        if saved:
            stream.reseed(derive(name, saved, here, step))


def derive(name: str, saved: Mapping[tuple[Axis, ...], Mapping[str, Any]], here: Coordinate, step: int) -> int:
    """The new 64-bit seed of one generator at `here`, from what was saved of it at each place of the old mesh."""
    digests = {axes: _digest(stored["state"]) for axes, stored in saved.items()}
    first = min(saved, key=lambda axes: [axis.index for axis in axes])
    seed = saved[first].get("seed", digests[first])
    equal = {axis.name: _equal_along(axis.name, digests) for axis in first}
    part = [
        f"{axis.name}={axis.index}"
        for axis in here.axes
        if len(set(digests.values())) > 1 and not equal.get(axis.name, axis.same_data)
    ]
    material = repr((name, seed, step, ",".join(part))).encode()
    return int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "big")


def _equal_along(name: str, digests: Mapping[tuple[Axis, ...], str]) -> bool:
    lines: dict[tuple[Axis, ...], set[str]] = {}
    for axes, digest in digests.items():
        lines.setdefault(tuple(axis for axis in axes if axis.name != name), set()).add(digest)
    return all(len(line) == 1 for line in lines.values())


def _digest(tree: Any) -> str:
    return hashlib.blake2b(_flat(tree).encode(), digest_size=16).hexdigest()


def _flat(tree: Any) -> str:
    if isinstance(tree, np.ndarray):
        return tree.tobytes().hex()
    if isinstance(tree, Mapping):
        return "{" + ",".join(f"{key!r}:{_flat(tree[key])}" for key in sorted(tree, key=repr)) + "}"
    if isinstance(tree, (list, tuple)):
        return "[" + ",".join(map(_flat, tree)) + "]"
    return tree.hex() if isinstance(tree, bytes) else repr(tree)

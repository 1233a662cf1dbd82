"""Random number generators: each rank saves its own, and a restart continues their sequences.

On the mesh that saved them, every generator is restored exactly, by coordinate. On another mesh there is no exact
match. There each generator gets a new seed from (name, seed, step, coordinate), where the seed is the first rank's. The
coordinate leaves out:
- every axis along which the saved generators were equal (tensor-parallel ranks must draw the same numbers);
- every new axis along which ranks work on the same data (mesh_coordinate.SAME_DATA).

If the generators were equal on all ranks, they are equal on all ranks again.
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

from ckpt.errors import DamagedData, is_injected
from ckpt.format import values
from ckpt.trainer.state.mesh_coordinate import Axis, Coordinate
from ckpt.trainer.state.saved_values import RankValues


@dataclass(frozen=True, slots=True)
class RandomStream:
    """One generator: how its state is read, written, and made from a 64-bit seed. A stored state consists of plain
    values. The initial seed of a torch generator is stored beside its state."""

    read: Callable[[], dict[str, Any]]
    write: Callable[[Any], object]
    reseed: Callable[[int], object]


def find_streams(objects: Mapping[str, Any], of_process: bool = True) -> dict[str, RandomStream]:
    """The registered generators by name; if `of_process`, also the process's own (Python, NumPy, torch, each CUDA
    device once CUDA is in use). `objects`: the registered generators by path. Reading the states waits for no
    device."""
    found = dict(_PROCESS) if of_process else {}
    if of_process and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found |= {f"cuda:{i}": _torch(g) for i, g in enumerate(torch.cuda.default_generators)}
    return found | {f"state:{path}": stream_of(value) for path, value in objects.items()}


def is_generator(value: object) -> bool:
    return isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random))


def stream_of(value: Any) -> RandomStream:
    """The stream of a generator object."""
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
        # The state is in host memory, also for a device's generator.
        state = generator.get_state()
        return {"state": ctypes.string_at(state.data_ptr(), state.nbytes), "seed": generator.initial_seed()}

    return RandomStream(read, write, generator.manual_seed)


def _python(source: Any) -> RandomStream:
    """The stream of a Python generator; the 32-bit words of its state are stored as an array. Training pauses while the
    words are encoded, which takes 0.25 ms if done one by one. NumPy converts an array.array three times as fast as a
    list."""

    def read() -> dict[str, Any]:
        version, words, *rest = source.getstate()
        return {"state": (version, np.frombuffer(array("I", words), np.uint32), *rest)}

    def write(state: Any) -> None:
        version, words, *rest = state
        source.setstate((version, tuple(map(int, words)), *rest))

    return RandomStream(read, write, source.seed)


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


def read_states(found: Mapping[str, RandomStream]) -> dict[str, dict[str, Any]]:
    return {name: stream.read() for name, stream in found.items()}


def is_same_kind(stream: RandomStream, state: Any) -> bool:
    """Whether a stored state is of the same kind as the generator's."""
    return bool(_state_form(stream.read()["state"]) == _state_form(state))


def _state_form(state: Any) -> Any:
    if isinstance(state, Mapping):
        kind = state.get("bit_generator")
        return set(state), kind if isinstance(kind, str) else None
    return type(state), len(state) if isinstance(state, (bytes, tuple)) else 0


def restore_streams(
    found: Mapping[str, RandomStream], own: RankValues | None, others: Sequence[RankValues], here: Coordinate, step: int
) -> None:
    """Restores every generator in `found` that was saved; leaves the others as they are. `own`: what this coordinate
    saved on the same mesh; None on another mesh. `others`: what all ranks saved, needed on another mesh. Errors:
    DamagedData if a generator refuses its stored state."""
    for name, stream in found.items():
        if own is not None and name in own.generators:
            try:
                stream.write(own.generators[name]["state"])
            except Exception as exc:
                if is_injected(exc):
                    raise
                raise DamagedData(f"the stored state of the generator {name} is not one: {exc}") from exc
            continue
        saved = {rank.axes: rank.generators[name] for rank in others if name in rank.generators}
        if saved:
            stream.reseed(derive_seed(name, saved, here, step))


def derive_seed(name: str, saved: Mapping[tuple[Axis, ...], Mapping[str, Any]], here: Coordinate, step: int) -> int:
    """The new 64-bit seed of one generator at `here`. `saved`: its stored states, by coordinate of the old mesh."""
    digests = {axes: _digest(stored["state"]) for axes, stored in saved.items()}
    first = min(saved, key=lambda axes: [axis.index for axis in axes])
    seed = saved[first].get("seed", digests[first])
    equal = {axis.name: _equal_along(axis.name, digests) for axis in first}
    differ = len(set(digests.values())) > 1
    axes = (axis for axis in here.axes if differ and not equal.get(axis.name, axis.is_same_data))
    part = [f"{axis.name}={axis.index}" for axis in axes]
    material = repr((name, seed, step, ",".join(part))).encode()
    return int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "big")


def _equal_along(name: str, digests: Mapping[tuple[Axis, ...], str]) -> bool:
    lines: dict[tuple[Axis, ...], set[str]] = {}
    for axes, digest in digests.items():
        lines.setdefault(tuple(axis for axis in axes if axis.name != name), set()).add(digest)
    return all(len(line) == 1 for line in lines.values())


def _digest(state: Any) -> str:
    return hashlib.blake2b(values.encode(state), digest_size=16).hexdigest()

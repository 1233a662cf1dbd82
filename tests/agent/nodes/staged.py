"""Ranks' arenas as their agent has them once a snapshot is staged and hashed, and a network that a test answers for."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt.agent.runtime.coroutines import Promise
from ckpt.agent.runtime.workers import Workers
from ckpt.agent.snapshots.memory_checkpoint import StagedReader
from ckpt.errors import AgentError
from ckpt.format import values
from ckpt.format.declaration import encode
from ckpt.ipc.addresses import Address
from ckpt.ipc.arena import Arena, arena_bytes
from ckpt.ipc.messages import Message
from ckpt.layout.division import divide
from ckpt.layout.layout import Declaration, Entry, Layout
from ckpt.layout.staging import stage
from ckpt.types import Box, Epoch, Identity, Version

EPOCH = Epoch(7, "0123456789abcdef")
ROWS, COLUMNS = 64, 256
FRAME_BYTES = 8192


def identity(step: int) -> Identity:
    return Identity(EPOCH, Version(step))


MakeStaged = Callable[..., dict[int, Arena]]


def staged(which: Identity, world: int, hashed: bool = True) -> dict[int, Arena]:
    """By rank. The one tensor is divided among the ranks by rows, and holds the step."""
    rows = ROWS // world
    layouts = [
        Layout((Entry("w", "float32", (ROWS, COLUMNS), (Box((rank * rows, 0), (rows, COLUMNS)),)),))
        for rank in range(world)
    ]
    made: dict[int, Arena] = {}
    for rank, (layout, share) in enumerate(zip(layouts, divide(layouts, set(), FRAME_BYTES), strict=True)):
        staging = stage(layout, share, FRAME_BYTES)
        told = encode(Declaration(rank, world, f"rank={rank}", "d", layout, staging))
        arena = made[rank] = Arena.create(arena_bytes(staging.data_bytes, len(staging.frames), len(told), 100))
        data = np.frombuffer(arena.data(0, staging.data_bytes), np.float32)
        data[:] = np.arange(len(data), dtype=np.float32) + which.version.step + 1000 * rank
        del data
        at = arena.write_declaration(staging.data_bytes, told)
        about = values.encode({"metrics": {"loss": 0.5}})
        shared, own = values.encode({"step": which.version.step}), values.encode({"rank": rank})
        arena.seal(which, rank, world, staging.data_bytes, at, shared, own, about)
    if hashed:
        StagedReader().read(which, world, made)
    return made


@dataclass
class Asked:
    """A request that waits for the test's answer. Answering raises what a channel would hear."""

    name: str
    fields: dict[str, Any]
    blobs: Sequence[bytes]
    reply: Promise[Message] = field(default_factory=Promise)

    def answer(self, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        self.reply.set_result(Message({"t": "reply", "id": 1, **fields}, [], list(blobs)))

    def refuse(self, why: str = "refused") -> None:
        self.reply.set_error(AgentError(why))


@dataclass
class Net:
    """A Network whose other agents are played by the test."""

    agent_name: str = "a"
    asked: list[Asked] = field(default_factory=list)
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    transport: Any = None

    def request(self, name: str, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> Promise[Message]:
        self.asked.append(Asked(name, fields, blobs))
        return self.asked[-1].reply

    def notify(self, name: str, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        self.told.append((name, fields))

    def addresses(self, node: Any) -> list[Address]:
        return list(node.addresses)


def close_arenas(arenas: Iterable[Arena]) -> None:
    """As Bulk, at once."""
    for arena in arenas:
        arena.close()


class Turned:
    """The agent's main thread, turned by the test, and its lanes."""

    def __init__(self) -> None:
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.workers = Workers(self.post)
        self.done = 0  # what it has done

    def post(self, what: Callable[[], None]) -> None:
        self._posted.put(what)

    def until(self, holds: Callable[[], object]) -> None:
        while not holds():
            self._posted.get(timeout=30)()
            self.done += 1

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits for it."""
        return self._posted.empty()

    def close(self) -> None:
        self.workers.close()


WRONG: list[Any] = [
    *(None, True, -1, 0, 1.5, math.inf, math.nan, (1 << 63), (1 << 64) - 1, -(1 << 63)),
    *("", "x", b"", b"x", [], [None], [[]], {}, {"a": 1}, {1: 2}),
]


def spoiled(value: Any) -> Iterator[Any]:
    """The same with one part of it replaced by each of WRONG, left out, or there twice; deep down too."""
    if isinstance(value, dict):
        for name in value:
            for part in [*spoiled(value[name]), *WRONG]:
                yield {**value, name: part}
            yield {other: part for other, part in value.items() if other != name}
    elif isinstance(value, list):
        for at, each in enumerate(value):
            for part in [*spoiled(each), *WRONG]:
                yield [*value[:at], part, *value[at + 1 :]]
            yield [*value[:at], *value[at + 1 :]]
            yield [*value, each]
    elif isinstance(value, bytes):
        yield value[:-1]
        yield value + b"\0"
        yield bytes(len(value))
        yield b"\xff" * len(value)

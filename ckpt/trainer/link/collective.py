"""Collectives of the ranks, only inside `__enter__`: gathers of bytes, never of pickled objects.

They run on a gloo group of ckpt's own, with its own deadline. So a long restore on one rank trips no watchdog of the
user's group. Nor can a collective of the user's be mixed up with one of ckpt's.
"""

from __future__ import annotations

import datetime
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import msgpack
import torch
import torch.distributed as dist

from ckpt.errors import CkptError, UsageError, from_kind, is_injected
from ckpt.events import Events
from ckpt.trainer.state.names import shorten_names

T = TypeVar("T")

ENTER_TIMEOUT_S = 1800.0
MISSING_RANKS_S = 60.0  # after this wait the missing ranks are named


class RankGroup(Protocol):
    """The ranks that enter together."""

    rank: int
    world: int

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, in the order of ranks, on every rank."""
        ...


class SingleRank:
    """A job of one process."""

    rank = 0
    world = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]


class TorchGroup:
    """The ranks of a torch process group. All of them construct this object together."""

    def __init__(self, process_group: dist.ProcessGroup | None, events: Events) -> None:
        ranks = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
        self.world = len(ranks)
        self.rank = ranks.index(dist.get_rank())
        missing = self._wait_for_ranks(ranks)
        # The lowest rank that has entered emits the event.
        if missing and missing[: self.rank] == list(range(self.rank)):
            events.emit("enter.waiting", _missing_ranks_text(missing, self.world), loud=True, ranks=missing)
        with self._translate_errors():
            self._group = _get_gloo_group(ranks)
        _ENTRY_COUNTS[ranks] += 1

    def _wait_for_ranks(self, ranks: tuple[int, ...]) -> list[int]:
        """Waits until all ranks have entered, for MISSING_RANKS_S at most, and returns those that have not. Making the
        gloo group would wait for ENTER_TIMEOUT_S without a message. The list is empty if torch's store cannot tell.
        Errors: UsageError if the ranks have made different numbers of process groups."""
        store: Any = dist.distributed_c10d._get_default_store()
        if store is None:  # MPI has none
            return []
        entry = f"ckpt/{hash(ranks)}/{_ENTRY_COUNTS[ranks]}"
        keys, alike = [f"{entry}/{rank}" for rank in range(self.world)], f"{entry}/named/{_next_group_name(ranks)}"
        try:
            store.add(alike, 1)
            store.set(keys[self.rank], "")
            store.wait(keys, datetime.timedelta(seconds=MISSING_RANKS_S))
            if store.add(alike, 0) < self.world:
                how = "have made" if _are_all(ranks) else "are in"
                raise UsageError(
                    f"the ranks that enter {how} different numbers of torch process groups. torch names a new group "
                    "after that number, so these ranks would wait for each other in vain. Enter before the other "
                    "groups are made, or make equally many groups on each of these ranks"
                )
            return []
        except RuntimeError as exc:
            if is_injected(exc):
                raise
        try:
            return [rank for rank, key in enumerate(keys) if not store.check([key])]
        except RuntimeError:
            # The store is gone: making the group will report it.
            return []

    def gather(self, data: bytes) -> list[bytes]:
        # gloo and NumPy need the CPU, whatever the user's default device is.
        with self._translate_errors(), torch.device("cpu"):
            mine = torch.tensor([len(data)], dtype=torch.int64)
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
            dist.all_gather(sizes, mine, group=self._group)
            longest = max(1, max(int(size) for size in sizes))
            padded = torch.zeros(longest, dtype=torch.uint8)
            if data:
                padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
            dist.all_gather(parts, padded, group=self._group)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as exc:
            raise CkptError(
                f"the {self.world} ranks could not agree while entering ckpt.Checkpointer: {exc}. "
                "A rank died or never entered; the launcher's output says which"
            ) from exc


def _missing_ranks_text(missing: list[int], world: int) -> str:
    named = shorten_names([str(rank) for rank in missing])
    return (
        f"ckpt: {MISSING_RANKS_S:g} s after this rank, {len(missing)} of the {world} ranks have not entered "
        f"ckpt.Checkpointer: {named}. They are waited for, {ENTER_TIMEOUT_S / 60:g} minutes at most: look whether they "
        "run, and what they said last. All ranks have to enter the block, not only the first"
    )


# How often these ranks have entered. The keys are of numbers, whose hash is the same in all processes.
_ENTRY_COUNTS: Counter[tuple[int, ...]] = Counter()

# ckpt's own groups, by the job's default group and by ranks. torch keeps them until the user destroys its groups, and
# they are not made again meanwhile: torch names a group after its ranks, and a group that is made again would find the
# addresses of the destroyed one in the store. The references are weak: a group's threads have to end before the
# interpreter does.
_Groups = weakref.WeakValueDictionary[tuple[int, ...], Any]
_GROUPS: weakref.WeakKeyDictionary[Any, _Groups] = weakref.WeakKeyDictionary()


def _get_gloo_group(ranks: tuple[int, ...]) -> Any:
    groups = _own_groups()
    group = groups.get(ranks)
    if group is None:
        timeout = datetime.timedelta(seconds=ENTER_TIMEOUT_S)
        # torch names a group that only some ranks make after the number of groups its ranks are in. That number differs
        # between ranks if the user has groups of some ranks: they would wait for each other.
        group = dist.new_group(list(ranks), timeout, backend="gloo", use_local_synchronization=not _are_all(ranks))
        groups[ranks] = group
    return group


def _own_groups() -> _Groups:
    return _GROUPS.setdefault(dist.group.WORLD, weakref.WeakValueDictionary())


def _next_group_name(ranks: tuple[int, ...]) -> str:
    """The number after which torch names ckpt's group of these ranks; "" if the group exists already."""
    if ranks in _own_groups():
        return ""
    world: Any = dist.distributed_c10d._world
    return str(world.group_count if _are_all(ranks) else len(world.pg_names))


def _are_all(ranks: tuple[int, ...]) -> bool:
    return ranks == tuple(range(dist.get_world_size()))


def open_group(process_group: dist.ProcessGroup | None, events: Events) -> RankGroup:
    """The job's ranks: `process_group`, else the default group, else this process alone. `events`: gets the warning
    about missing ranks. Errors: UsageError."""
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None:
            raise UsageError("process_group= was given, but torch.distributed is not initialized")
        return SingleRank()
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise UsageError(
            f"process_group={process_group!r} on rank {dist.get_rank()}: a torch ProcessGroup that this rank is in "
            "(dist.new_group() gives -100 to those that are not), or None for all ranks"
        )
    if process_group is None and dist.get_world_size() == 1:
        return SingleRank()
    return TorchGroup(process_group, events)


def run_on_all_ranks(group: RankGroup, work: Callable[[], T]) -> T:
    """Runs `work` on every rank. All ranks return, or all raise: a rank that failed raises its own error, the others
    that of the lowest failed rank. So no rank waits in a gather for a rank that has left with an exception."""
    result: T | None = None
    failure: Exception | None = None
    verdict = b""
    try:
        result = work()
    except Exception as exc:
        failure = exc
        kind = exc.kind if isinstance(exc, CkptError) else "error"
        verdict = msgpack.packb([kind, str(exc) if isinstance(exc, CkptError) else f"{type(exc).__name__}: {exc}"])
    verdicts = group.gather(verdict)
    if failure is not None:
        raise failure
    for rank, said in enumerate(verdicts):
        if said:
            kind, text = msgpack.unpackb(said)
            raise from_kind(str(kind), f"rank {rank}: {text}")
    return result  # type: ignore[return-value]


def broadcast_from_first(group: RankGroup, work: Callable[[], bytes]) -> bytes:
    """Runs `work` on rank 0. Every rank returns its bytes, or all raise its error."""
    data = run_on_all_ranks(group, work if group.rank == 0 else bytes)
    return group.gather(data if group.rank == 0 else b"")[0]

"""When to save and what to keep, as values. The functions on them are pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ckpt.errors import UsageError


@dataclass(frozen=True, slots=True)
class Every:
    """Save every `steps` steps, or every `seconds` seconds. Exactly one of the two.

    steps: each multiple of it is saved, as by ck.save(). A save that finds no free slot waits for the store to take an
    earlier one, at most ckpt.Limits(exit_s=). While the store fails nothing waits for it, and the newest is tried.
    An agent that hangs stops training once, for 10 s, or about 30 s on another node.
    seconds: never makes a step wait. What is due while no slot is free is passed over, and the receipt counts it.

    Errors: UsageError."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise UsageError("ckpt.Every takes steps= or seconds=, one of the two")
        _whole("ckpt.Every(steps=)", self.steps, 1)
        _positive("ckpt.Every(seconds=)", self.seconds)


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the checkpoint whose `metric` (given to ck.save(metrics=)) is lowest ("min") or highest ("max")."""

    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or self.mode not in ("min", "max"):
            raise UsageError(f'ckpt.Best({self.metric!r}, {self.mode!r}): the name of a metric, and "min" or "max"')


@dataclass(frozen=True, slots=True)
class Keep:
    """Which committed checkpoints stay: those of the `last` newest steps of the line, those whose step is a multiple of
    `every`, and the `best` one. Of several at one step the newest counts. The newest of all is never deleted. None: no
    such rule; with no rule at all, or only `best` by a metric that none has, everything stays."""

    last: int | None = None
    every: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        _whole("ckpt.Keep(last=)", self.last, 1)
        _whole("ckpt.Keep(every=)", self.every, 1)
        if self.best is not None and not isinstance(self.best, Best):
            raise UsageError(f'ckpt.Keep(best={self.best!r}): a ckpt.Best("metric", "min")')


STEPS_APART = 3  # snapshots that go by the clock, at least: one is announced two steps ahead, after the one before

# A connection has to move 16 KiB in 30 s, or counts as stuck, and 64 of them may share what there is (agent/net).
PEER_BANDWIDTH_MIN = 1 << 16

LEAST, MOST = 1e-9, 1e18  # of a limit by which intervals are chosen: what follows from one beyond is no number


@dataclass(frozen=True, slots=True)
class Limits:
    """What is rare. `memory`: bytes the agent may hold for this job (None: what the machine or its cgroup allows).
    `bandwidth`: bytes per second to the store (None: no limit). `peer_bandwidth`: bytes per second that copies on their
    way to other nodes' memory may take, from each node and to it, at least PEER_BANDWIDTH_MIN (None: no limit).
    `exit_s`: how long leaving waits for the last commit. `unsaved_s`: leave with an error when no commit landed for so
    long (None: never); ckpt.Adaptive has them land at least twice as often, where they can."""

    memory: int | None = None
    bandwidth: float | None = None
    exit_s: float = 600.0
    unsaved_s: float | None = None
    peer_bandwidth: float | None = None

    def __post_init__(self) -> None:
        _whole("ckpt.Limits(memory=), in bytes", self.memory, 1)
        _positive("ckpt.Limits(bandwidth=), in bytes per second", self.bandwidth)
        _positive("ckpt.Limits(peer_bandwidth=), in bytes per second", self.peer_bandwidth)
        if self.peer_bandwidth is not None and self.peer_bandwidth < PEER_BANDWIDTH_MIN:
            raise UsageError(
                f"ckpt.Limits(peer_bandwidth=), in bytes per second: {self.peer_bandwidth!r} is less than "
                f"{PEER_BANDWIDTH_MIN}, and copies that slow could not be told from such as are stuck; give more, or "
                "peers=None for no copies"
            )
        if self.exit_s is None:
            raise UsageError("ckpt.Limits(exit_s=None): a number of seconds")
        _positive("ckpt.Limits(exit_s=)", self.exit_s)
        if self.unsaved_s is not None and not is_limit(self.unsaved_s):
            raise UsageError(f"ckpt.Limits(unsaved_s={self.unsaved_s!r}): seconds, from {LEAST:g} to {MOST:g}, or None")


def is_limit(value: object, most: float = MOST) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and LEAST <= value <= most


def _whole(what: str, value: object, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{what}: {value!r} is no whole number of at least {least}")


def _positive(what: str, value: object) -> None:
    if value is None:
        return
    right = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    if not right:
        raise UsageError(f"{what}: {value!r} is no number above 0")

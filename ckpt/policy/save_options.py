"""The save options: when to save, what to keep, and limits, as values that users give. Functions on them are pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ckpt.errors import UsageError


@dataclass(frozen=True, slots=True)
class Every:
    """Save every `steps` steps, or every `seconds` seconds. Give exactly one of the two.

    steps: each multiple of it is saved, as by ck.save(). If no slot is free, the save waits until the store has an
    earlier checkpoint, at most ckpt.Limits(exit_s=). While the store fails, no step waits for it, and the newest
    checkpoint is tried. A hung agent stops training once, for 10 s, or about 30 s if it is on another node.
    seconds: a step never waits. A save that is due while no slot is free is skipped, and the receipt counts it.

    Errors: UsageError.
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise UsageError("ckpt.Every: give exactly one of steps= and seconds=")
        _whole("ckpt.Every(steps=)", self.steps, 1)
        _positive("ckpt.Every(seconds=)", self.seconds)


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the checkpoint whose `metric` (given to ck.save(metrics=)) is lowest ("min") or highest ("max"). Errors:
    UsageError."""

    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or self.mode not in ("min", "max"):
            raise UsageError(
                f'ckpt.Best({self.metric!r}, {self.mode!r}): give the name of a metric, and "min" or "max"'
            )


@dataclass(frozen=True, slots=True)
class Keep:
    """Which committed checkpoints stay: those of the `last` newest steps of the branch history, those whose step is a
    multiple of `every`, and the `best` one. Of several at one step the newest counts. The newest checkpoint is never
    deleted. None: no such rule. Without any rule everything stays, also with only `best` by a metric that no checkpoint
    has. Errors: UsageError."""

    last: int | None = None
    every: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        _whole("ckpt.Keep(last=)", self.last, 1)
        _whole("ckpt.Keep(every=)", self.every, 1)
        if self.best is not None and not isinstance(self.best, Best):
            raise UsageError(f'ckpt.Keep(best={self.best!r}): give a ckpt.Best, such as ckpt.Best("loss", "min")')


# The least distance of snapshots that go by the clock: a snapshot is announced two steps ahead, after the one before.
STEPS_APART = 3

EXIT_SLACK = 1.5  # factor on the measured time of the last save
# Kept free before a deadline: clocks differ, stores have slow moments, machines go early.
EXIT_RESERVE_S = 10.0

# A connection that moves less than 16 KiB in 30 s counts as stuck, and 64 of them may share the bandwidth (agent/net).
PEER_BANDWIDTH_MIN = 1 << 16

# The range of a limit that decides intervals: beyond it results would leave the range of floats.
LEAST, MOST = 1e-9, 1e18


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that are rarely needed. Errors: UsageError.

    `memory`: bytes the agent may hold for this job (None: what the machine or its cgroup allows).
    `bandwidth`: bytes per second to the store (None: no limit).
    `peer_bandwidth`: bytes per second of replication to other nodes, from each node and to it, at least
    PEER_BANDWIDTH_MIN (None: no limit).
    `exit_s`: seconds that leaving the block waits for the last commit.
    `unsaved_s`: leave with an error if no commit landed for so many seconds (None: never). ckpt.Adaptive commits at
    least twice as often where it can.
    """

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
                f"{PEER_BANDWIDTH_MIN}. So slow a transfer cannot be told from a stuck one; give more, or peers=None "
                "for no replicas"
            )
        if self.exit_s is None:
            raise UsageError("ckpt.Limits(exit_s=None): give a number of seconds")
        _positive("ckpt.Limits(exit_s=)", self.exit_s)
        if self.unsaved_s is not None and not is_limit(self.unsaved_s):
            raise UsageError(
                f"ckpt.Limits(unsaved_s={self.unsaved_s!r}): give seconds, from {LEAST:g} to {MOST:g}, or None"
            )


def exit_lead_s(save_s: float) -> float:
    """Seconds before the deadline of a certain notice at which a job takes its last snapshot. `save_s`: the expected
    seconds from its appointment until it is committed."""
    return save_s * EXIT_SLACK + EXIT_RESERVE_S


def is_limit(value: object, most: float = MOST) -> bool:
    """Whether the value is a number from LEAST to `most`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and LEAST <= value <= most


def _whole(what: str, value: object, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{what}: {value!r} is not a whole number of at least {least}")


def _positive(what: str, value: object) -> None:
    if value is None:
        return
    right = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    if not right:
        raise UsageError(f"{what}: {value!r} is not a number above 0")

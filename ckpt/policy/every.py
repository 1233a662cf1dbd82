"""When to save and what to keep, as values. The functions on them are pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckpt.errors import UsageError


@dataclass(frozen=True, slots=True)
class Every:
    """Save every `steps` steps (at multiples of it), or every `seconds` seconds. Exactly one of the two.

    Errors: UsageError."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise UsageError("ckpt.Every takes steps= or seconds=, one of the two")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"ckpt.Every(steps={self.steps}): at least 1")
        if self.seconds is not None and not self.seconds > 0:
            raise UsageError(f"ckpt.Every(seconds={self.seconds}): more than 0")


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the checkpoint whose `metric` (given to ck.save(metrics=)) is lowest ("min") or highest ("max")."""

    metric: str
    mode: Literal["min", "max"] = "min"


@dataclass(frozen=True, slots=True)
class Keep:
    """Which committed checkpoints stay: the `last` newest of the line, those whose step is a multiple of `every`,
    and the `best` one. The newest is never deleted. None: no such rule; with no rule at all everything stays."""

    last: int | None = None
    every: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise UsageError(f"ckpt.Keep(last={self.last}): at least 1")
        if self.every is not None and self.every < 1:
            raise UsageError(f"ckpt.Keep(every={self.every}): at least 1")


@dataclass(frozen=True, slots=True)
class Limits:
    """What is rare. `memory`: bytes the agent may hold for this job (None: what the machine or its cgroup allows).
    `bandwidth`: bytes per second to the store (None: no limit). `exit_s`: how long leaving waits for the last commit.
    `unsaved_s`: leave with an error when no commit landed for so long (None: never)."""

    memory: int | None = None
    bandwidth: float | None = None
    exit_s: float = 600.0
    unsaved_s: float | None = None

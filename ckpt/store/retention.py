"""Which checkpoints of a branch history a `Keep` lets go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from ckpt.errors import UsageError
from ckpt.policy.save_options import Keep
from ckpt.types import Identity


def retention(line: Sequence[Identity], keep: Keep, metrics: Mapping[Identity, Mapping[str, float]]) -> set[Identity]:
    """The checkpoints of a branch history (oldest first) that stay. `metrics`: needed only for keep.best. The newest
    always stays. All stay if `keep` has no rule, or only `best` with a metric that no checkpoint has. If one step has
    several checkpoints (a save, then the exit), `last` and `every` count the newest of them."""
    best = None if keep.best is None else best_checkpoint(line, keep.best.metric, keep.best.mode, metrics)
    if keep.last is None and keep.every is None and best is None:
        return set(line)
    newest = {identity.version.step: identity for identity in line}
    kept = set(list(newest.values())[-(keep.last or 1) :])
    if keep.every is not None:
        kept.update(identity for step, identity in newest.items() if step % keep.every == 0)
    if best is not None:
        kept.add(best)
    return kept


def best_checkpoint(
    line: Iterable[Identity], metric: str, mode: Literal["min", "max"], metrics: Mapping[Identity, Mapping[str, float]]
) -> Identity | None:
    """The checkpoint with the best value of the metric; the newest among equals. NaN counts as no value. None: no
    checkpoint has one."""
    sign = 1.0 if mode == "min" else -1.0
    found, lowest = None, float("inf")
    for identity in line:
        value = sign * metrics.get(identity, {}).get(metric, float("nan"))
        if value <= lowest:
            found, lowest = identity, value
    return found


def unknown_metric_error(metric: str, known: Iterable[Mapping[str, float]]) -> UsageError:
    """The error that no checkpoint has this metric. `known`: the metrics of each checkpoint."""
    names = sorted({name for metrics in known for name in metrics})
    there = f"give one of {', '.join(names[:20])}" if names else "save with ck.save(metrics=) first"
    return UsageError(f"no checkpoint has the metric {metric!r}; {there}")

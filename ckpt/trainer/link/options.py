"""The user's options: checked before anything begins, and turned into plain values for the agent."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from typing import Any

from ckpt.errors import UsageError
from ckpt.events import Events
from ckpt.format.columns import STRING_BYTES_MAX
from ckpt.format.record import METRICS_MAX
from ckpt.placement.placement import Parity, Replicas
from ckpt.policy.adaptive import Adaptive
from ckpt.policy.export_rule import Export
from ckpt.policy.save_options import Every, Keep, Limits
from ckpt.settings import Settings
from ckpt.storage import canonical
from ckpt.storage.url import check_not_dcp
from ckpt.types import CODEC_OPTIONS

NAMES_BYTES_MAX = 32 << 10  # names of all metrics of a save: they have to fit into a message


@dataclass(frozen=True, slots=True)
class UserOptions:
    """The options of a Checkpointer. `options`: what the agent needs of policy, keep, limits, codec and peers, as plain
    values. Errors: UsageError."""

    url: str
    state: dict[str, Any]
    options: dict[str, Any]
    mesh: Any
    process_group: Any
    init: str | None
    lazy: bool
    strict: bool
    generators: bool
    take_over: bool
    export: Export | None = None
    trainable_only: bool = False

    def __post_init__(self) -> None:
        for name in ("lazy", "strict", "generators", "take_over", "trainable_only"):
            if not isinstance(value := getattr(self, name), bool):
                raise UsageError(f"{name}={value!r}: a bool, True or False")


def find_url(url: object, settings: Settings) -> str:
    """The run's URL in its one canonical form. Errors: UsageError."""
    if not isinstance(url, (str, os.PathLike)) or not isinstance(os.fspath(url), str):
        raise UsageError(f"url={url!r}: a folder, or a URL such as s3://bucket/run")
    found = settings.redirect_url(canonical(str(os.fspath(url))))
    if found.startswith(("memory:", "fsspec+memory:")):
        raise UsageError("memory:// is forgotten with the process that holds it: give a folder, or another store")
    check_not_dcp(found)
    return found


def find_init(init: object) -> str | None:
    """The value of init= as a string, or None. Errors: UsageError."""
    where = os.fspath(init) if isinstance(init, os.PathLike) else init
    if where is None or isinstance(where, str):
        return where
    raise UsageError(
        f"init= takes a .safetensors file, a folder of them, or the URL of another run, not {type(init).__name__}"
    )


def make_options(
    policy: Every | Adaptive, keep: Keep, limits: Limits, codec: str, peers: Replicas | Parity | None
) -> dict[str, Any]:
    """The options for the agent as plain values, as they are sent. Errors: UsageError."""
    if codec not in CODEC_OPTIONS:
        raise UsageError(f"codec={codec!r}: one of {', '.join(CODEC_OPTIONS)}")
    if not isinstance(policy, Every | Adaptive):
        raise UsageError(f"policy={policy!r}: a ckpt.Adaptive(...) or a ckpt.Every(...)")
    for name, value, kind in (("keep", keep, Keep), ("limits", limits, Limits)):
        if not isinstance(value, kind):
            raise UsageError(f"{name}={value!r}: a ckpt.{kind.__name__}(...)")
    if peers is not None and not isinstance(peers, Replicas | Parity):
        raise UsageError(f"peers={peers!r}: a ckpt.Replicas(...), a ckpt.Parity(...), or None for none")
    best = keep.best
    return {
        "policy": {"kind": type(policy).__name__.lower(), **asdict(policy)},
        "keep": {**asdict(keep), "best": None if best is None else [best.metric, best.mode]},
        "limits": {name: getattr(limits, name) for name in ("memory", "bandwidth", "peer_bandwidth", "unsaved_s")},
        "codec": codec,
        "peers": _peers(peers),
    }


def advise_interval(policy: Every | Adaptive, limits: Limits, events: Events) -> None:
    """Warns if the given interval is so long that the job leaves (Limits(unsaved_s=)) before the next commit.
    ckpt.Adaptive itself keeps within the limit."""
    seconds = policy.seconds if isinstance(policy, Every) else None
    if limits.unsaved_s is not None and seconds is not None and seconds >= limits.unsaved_s:
        every = f"a commit every {seconds:g} s (ckpt.Every), and this job leaves after {limits.unsaved_s:g} s without "
        text = f"ckpt: {every}one (ckpt.Limits(unsaved_s=)): give a shorter interval, or ckpt.Adaptive()"
        events.emit("policy.seldom", text, loud=True)


def check_metrics(metrics: dict[str, Any] | None, events: Events) -> dict[str, float]:
    """The metrics as floats. Those that are not finite are left out, with an event: a loss that diverged must not
    prevent a save. Errors: UsageError for a value that is no number, and for more than a checkpoint keeps."""
    found, name = {}, None
    try:
        for name, value in (metrics or {}).items():
            number = float(value)
            if not isinstance(name, str):
                raise TypeError
            if math.isfinite(number):
                found[name] = number
            else:
                events.emit("metric.dropped", f"ckpt: {name}={number} is not kept with the checkpoint", loud=True)
    # RuntimeError: a tensor of several numbers.
    except (TypeError, ValueError, AttributeError, OverflowError, RuntimeError):
        which = f"; {name!r} has none" if isinstance(name, str) else ""
        raise UsageError(f"ck.save(metrics=): a dict of names and numbers that a float can hold{which}") from None
    sizes = [len(name.encode(errors="surrogatepass")) for name in found]
    if len(found) > METRICS_MAX or sum(sizes) > NAMES_BYTES_MAX or max(sizes, default=0) > STRING_BYTES_MAX:
        raise UsageError(
            f"ck.save(metrics=) of {len(found)} numbers whose names have {sum(sizes)} bytes: at most {METRICS_MAX} "
            f"numbers, {NAMES_BYTES_MAX} bytes of names and {STRING_BYTES_MAX} of one are kept"
        )
    return found


def _peers(peers: Replicas | Parity | None) -> dict[str, Any] | None:
    if isinstance(peers, Parity):
        return {"data": peers.data, "parity": peers.parity}
    return None if peers is None else {"replicas": peers.n}

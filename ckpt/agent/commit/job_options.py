"""The user's options of a job, as they arrive in the message of a rank that joins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import UsageError
from ckpt.placement.placement import Parity, Replicas
from ckpt.policy.adaptive import Adaptive
from ckpt.policy.export_rule import ExportRule
from ckpt.policy.save_options import Best, Every, Keep, Limits
from ckpt.types import CODEC_OPTIONS, CodecOption


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The user's options, as far as the agent needs them. `peers`: replicas or parity on other nodes, if there are
    several nodes; None: neither."""

    keep: Keep = field(default_factory=Keep)
    limits: Limits = field(default_factory=Limits)
    codec: CodecOption = "auto"
    peers: Replicas | Parity | None = field(default_factory=Replicas)
    export: ExportRule | None = None


def options_from(given: Any) -> JobOptions:
    """The options in a join message. Errors: UsageError names the field."""
    keep = keep_from(fields_of(given, "options").get("keep"), "options.keep")
    limits = fields_of(given.get("limits"), "options.limits")
    codec = given.get("codec")
    if codec not in CODEC_OPTIONS:
        raise UsageError(f"options.codec is {codec!r:.80}, none of {', '.join(CODEC_OPTIONS)}")
    return JobOptions(
        keep,
        Limits(
            memory=limits.get("memory"),
            bandwidth=limits.get("bandwidth"),
            peer_bandwidth=limits.get("peer_bandwidth"),
            unsaved_s=limits.get("unsaved_s"),
        ),
        codec,
        _peers_from(given.get("peers")),
        _export_from(given.get("export")),
    )


def policy_from(options: Any) -> Every | Adaptive:
    """The save policy in a join message. Errors: UsageError names the field."""
    policy = fields_of(fields_of(options, "options").get("policy"), "options.policy")
    if policy.get("kind") == "adaptive":
        given = [policy.get(name) for name in ("overhead", "store_mb_s", "at_risk_s")]
        return Adaptive(*given)  # type: ignore[arg-type]
    return Every(steps=policy.get("steps"), seconds=policy.get("seconds"))


def option_fields(policy: Every | Adaptive, peers: Replicas | Parity | None) -> dict[str, float]:
    """How often the job saves and what it keeps at peers, as numbers for a commit record: `every_steps` or `every_s`,
    neither with ckpt.Adaptive; `replicas`, or `data` and `parity`."""
    found: dict[str, float | None] = {}
    if isinstance(policy, Every):
        found |= {"every_steps": policy.steps, "every_s": policy.seconds}
    if isinstance(peers, Replicas):
        found["replicas"] = peers.n
    elif peers is not None:
        found |= {"data": peers.data, "parity": peers.parity}
    return {name: value for name, value in found.items() if value is not None}


def _peers_from(given: Any) -> Replicas | Parity | None:
    """Errors: UsageError names the field."""
    if given is None:
        return None
    peers = fields_of(given, "options.peers")
    if "replicas" in peers:
        return Replicas(peers["replicas"])
    return Parity(peers.get("data"), peers.get("parity"))  # type: ignore[arg-type]


def _export_from(given: Any) -> ExportRule | None:
    """Errors: UsageError names the field."""
    if given is None:
        return None
    rule = fields_of(given, "options.export")
    texts: dict[str, Any] = {name: rule.get(name) for name in ("to", "repository", "strip", "format", "beside")}
    only, names, every = rule.get("only"), rule.get("names"), rule.get("every")
    for name, value in (*texts.items(), *(("only", each) for each in only or ())):
        if not isinstance(value, str):
            raise UsageError(f"options.export.{name} is {value!r:.80}, not a text")
    if every is not None and not (isinstance(every, int) and every > 0):
        raise UsageError(f"options.export.every is {every!r:.80}, not a number of steps")
    pairs = tuple((str(pattern), str(new)) for pattern, new in names or ())
    return ExportRule(only=tuple(only or ()), names=pairs, every=every, dtype=rule.get("dtype"), **texts)


def keep_from(given: Any, name: str) -> Keep:
    """The retention options in a message. Errors: UsageError names the field."""
    told = fields_of(given, name)
    best = told.get("best")
    if best is not None and not (isinstance(best, list) and len(best) == 2):
        raise UsageError(f"{name}.best is {best!r:.80}, not the name of a metric and a mode")
    return Keep(told.get("last"), told.get("every"), Best(*best) if best else None)


def fields_of(given: Any, name: str) -> dict[str, Any]:
    """The map at this place of a message. Errors: UsageError if it is no map."""
    if not isinstance(given, dict):
        raise UsageError(f"{name} is {given!r:.80}, not a map")
    return given

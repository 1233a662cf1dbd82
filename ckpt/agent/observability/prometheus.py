"""The agent's metrics page, in Prometheus' text exposition format 0.0.4. Pure: made from `Agent.status()`.

It is made by hand, since prometheus-client (0.26, measured) would cost each agent 11 MiB and 60 ms to count again what
is counted already. The metrics' names are an interface: docs/guides/watching.md lists them, and a test compares the
two. A metric with an unknown value has no sample.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.agent.state.accounting import PARTS, Phase
from ckpt.storage.names import redact_url

Facts = Mapping[str, Any]
Samples = Iterable[tuple[Mapping[str, str], float | None]]
Read = Callable[[Facts], Samples]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `read(status)`: its samples, each the labels and a value; None: no sample."""

    name: str
    help: str
    read: Read

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"


def page(status: Facts, unix_s: float) -> bytes:
    """The page of that status at that Unix time."""
    status = {**status, "unix_s": unix_s}
    lines: list[str] = []
    for metric in METRICS:
        samples = [(labels, value) for labels, value in metric.read(status) if value is not None]
        if not samples:
            continue
        lines.append(f"# HELP {metric.name} {_escape(metric.help)}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        lines += [f"{metric.name}{_format_labels(labels)} {_format_number(value)}" for labels, value in samples]
    return "".join(f"{line}\n" for line in lines).encode()


# -- how each metric is read

NONE: Mapping[str, str] = {}


def _at(path: str, label: str = "", field: str = "") -> Read:
    """Reads the value at that path of the status, if the status has one. `label`: the value is a mapping; each of its
    entries is a sample, with the key as that label. `field`: the entry of such a value that is the sample's."""

    def read(status: Facts) -> Samples:
        found: Any = status
        for name in path.split("."):
            found = found.get(name) if found else None
        if not label:
            return [(NONE, found)]
        return [({label: key}, each[field] if field else each) for key, each in sorted((found or {}).items())]

    return read


def _info(status: Facts) -> Samples:
    return [({"version": str(status["version"]), "url": redact_url(str(status["url"]))}, 1)]


def _seconds(status: Facts) -> Samples:
    return [({"part": part}, status["account"][f"{part}_s"]) for part in PARTS]


def _phase(status: Facts) -> Samples:
    return [({"phase": each.value}, float(status["account"]["phase"] == each.value)) for each in Phase]


def _safe_at(status: Facts) -> Samples:
    safe = sorted(status["account"]["safe"].items())
    return [({"level": level}, status["unix_s"] - at["age_s"]) for level, at in safe if at["age_s"] is not None]


def _alarms(status: Facts) -> Samples:
    found = status.get("predictions") or {"sources": {}, "standing": []}
    standing = Counter[str](each["source"] for each in found["standing"])
    return [({"source": name}, standing[name]) for name in sorted(found["sources"])]


def _from_job(read: Read) -> Read:
    """Reads from the current job; no samples without one."""
    return lambda status: read(status["job"]) if status.get("job") else []


def _ranks(job: Facts) -> Samples:
    counts = Counter[str](job["ranks"])
    return [({"state": state}, counts[state]) for state in ("here", "left", "dead")]


def _under_way(job: Facts) -> Samples:
    levels = [each["level"] for each in job["under_way"] if each["state"] != "failed"]
    return [({"level": level}, levels.count(level)) for level in sorted(job["intervals"])]


def _notices(job: Facts) -> Samples:
    certain = [bool(each["certain"]) for each in job["notices"]["standing"]]
    return [({"certain": "yes"}, certain.count(True)), ({"certain": "no"}, certain.count(False))]


def _memory(job: Facts) -> Samples:
    plan = job["memory"]
    if plan is None:
        return []
    names = {"slots": plan["slots"] * plan["slot_bytes"], "kept": plan["kept_bytes"], "commit": plan["commit_bytes"]}
    return [({"use": name}, count) for name, count in names.items()]


METRICS: tuple[Metric, ...] = (
    Metric("ckpt_agent_info", "Always 1; labels: ckpt's version and the run's URL.", _info),
    Metric("ckpt_phase", "1 for the present phase of the run, 0 for the others.", _phase),
    Metric("ckpt_goodput_ratio", "Productive seconds over elapsed seconds.", _at("account.goodput")),
    Metric("ckpt_elapsed_seconds_total", "Seconds since the first start on this agent.", _at("account.elapsed_s")),
    Metric("ckpt_time_seconds", "Elapsed seconds by part; a failure moves some to lost.", _seconds),
    Metric("ckpt_starts_total", "Starts that reached training.", _at("account.starts")),
    Metric("ckpt_failures_total", "Interruptions of training, preemptions included.", _at("account.failures")),
    Metric("ckpt_lost_steps_total", "Ended steps that failures lost.", _at("account.lost_steps")),
    Metric("ckpt_lost_seconds_total", "Seconds of training that failures lost.", _at("account.lost_s")),
    Metric("ckpt_recoveries_total", "Recoveries after a failure.", _at("account.recoveries.number")),
    Metric("ckpt_recovery_seconds_total", "Seconds from failures to recoveries.", _at("account.recoveries.seconds")),
    Metric("ckpt_snapshots_total", "Checkpoints complete in memory.", _at("account.snapshots.number")),
    Metric("ckpt_snapshots_abandoned_total", "Snapshots begun and abandoned.", _at("account.given_up")),
    Metric(
        "ckpt_snapshot_stall_seconds_total",
        "Time that training paused for snapshots, as the slowest rank reports.",
        _at("account.snapshots.seconds"),
    ),
    Metric("ckpt_commits_total", "Commits that reached the store.", _at("account.commits.number")),
    Metric("ckpt_commits_failed_total", "Commits that failed; some were tried again.", _at("account.commits_failed")),
    Metric("ckpt_commit_seconds_total", "Seconds that commits took.", _at("account.commits.seconds")),
    Metric(
        "ckpt_committed_raw_bytes_total", "Bytes of committed checkpoints before encoding.", _at("account.raw_bytes")
    ),
    Metric(
        "ckpt_saved_bytes_total", "Bytes saved by level; store: after encoding.", _at("account.saved_bytes", "level")
    ),
    Metric("ckpt_restored_bytes_total", "Bytes that starts read, by level.", _at("account.restored_bytes", "level")),
    Metric(
        "ckpt_store_requests_total",
        "Requests of this agent to the store, each attempt among them.",
        _at("store_requests", "operation"),
    ),
    Metric(
        "ckpt_store_bytes_total",
        "Bytes that this agent sent to the store or received from it.",
        _at("store_bytes", "direction"),
    ),
    Metric("ckpt_restores_total", "Starts by the level that they restored from.", _at("account.restores", "level")),
    Metric("ckpt_step", "Newest step that all ranks ended.", _at("account.ended_step")),
    Metric("ckpt_step_seconds", "Seconds of a step now.", _at("job.step_s")),
    Metric("ckpt_safe_step", "Newest step that is complete at a level.", _at("account.safe", "level", "step")),
    Metric("ckpt_safe_timestamp_seconds", "When that step was taken, Unix time.", _safe_at),
    Metric("ckpt_under_way", "Checkpoints on their way to a level.", _from_job(_under_way)),
    Metric(
        "ckpt_interval_seconds", "Present interval of a level, seconds.", _at("job.intervals", "level", "interval_s")
    ),
    Metric("ckpt_failures_per_second", "Learnt failure rate by class.", _at("job.rates", "class", "per_s")),
    Metric("ckpt_saving_ratio", "Expected share of the run's time that saving takes.", _at("job.saving")),
    Metric("ckpt_ranks", "Ranks of the current job, by state.", _from_job(_ranks)),
    Metric("ckpt_notices", "Standing notices, by whether they are certain.", _from_job(_notices)),
    Metric("ckpt_predictions", "Standing alarms of all nodes, by source.", _alarms),
    Metric(
        "ckpt_prediction_precision_ratio",
        "Lower bound of the precision, by source.",
        _at("predictions.sources", "source", "precision"),
    ),
    Metric(
        "ckpt_prediction_recall_ratio",
        "Lower bound of the recall; 0 if not proven.",
        _at("predictions.sources", "source", "recall"),
    ),
    Metric("ckpt_memory_bytes", "Planned memory of this node, by use.", _from_job(_memory)),
    Metric("ckpt_memory_allowed_bytes", "Limit of the planned memory.", _at("job.memory.allowed_bytes")),
    Metric("process_resident_memory_bytes", "Resident memory of the agent, with shared memory.", _at("resident_bytes")),
    Metric("process_cpu_seconds_total", "CPU seconds of the agent.", _at("cpu_s")),
    Metric("process_start_time_seconds", "Start of the agent, Unix time.", _at("began_at")),
)


# -- the format


def _format_labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    inside = ",".join(f'{name}="{_escape(value, quotes=True)}"' for name, value in labels.items())
    return "{" + inside + "}"


def _escape(text: str, quotes: bool = False) -> str:
    text = text.encode(errors="replace").decode().replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _format_number(value: float) -> str:
    value = float(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)

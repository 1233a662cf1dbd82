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
from typing import Any, Literal

from ckpt.agent.state.accounting import PARTS
from ckpt.storage.names import redact_url

Sample = tuple[Mapping[str, str], float | None]
Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `read(status, unix_s)`: its samples, each the labels and a value; None: no sample."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    read: Callable[[Facts, float], Iterable[Sample]]


def page(status: Facts, unix_s: float) -> bytes:
    """The page of that status at that Unix time."""
    lines: list[str] = []
    for metric in METRICS:
        samples = [(labels, value) for labels, value in metric.read(status, unix_s) if value is not None]
        if not samples:
            continue
        lines.append(f"# HELP {metric.name} {_escape(metric.help)}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        lines += [f"{metric.name}{_format_labels(labels)} {_format_number(value)}" for labels, value in samples]
    return "".join(f"{line}\n" for line in lines).encode()


# -- how each metric is read

NONE: Mapping[str, str] = {}


def _from_status(name: str) -> Callable[[Facts, float], Iterable[Sample]]:
    return lambda status, unix_s: [(NONE, status.get(name))]


def _account(*path: str) -> Callable[[Facts, float], Iterable[Sample]]:
    def read(status: Facts, unix_s: float) -> Iterable[Sample]:
        found: Any = status["account"]
        for name in path:
            found = found.get(name) if found is not None else None
        return [(NONE, found)]

    return read


def _by_level(name: str) -> Callable[[Facts, float], Iterable[Sample]]:
    return lambda status, unix_s: [({"level": k}, v) for k, v in sorted(status["account"][name].items())]


def _info(status: Facts, unix_s: float) -> Iterable[Sample]:
    return [({"version": str(status["version"]), "url": redact_url(str(status["url"]))}, 1)]


def _seconds(status: Facts, unix_s: float) -> Iterable[Sample]:
    return [({"part": part}, status["account"][f"{part}_s"]) for part in PARTS]


def _phase(status: Facts, unix_s: float) -> Iterable[Sample]:
    from ckpt.agent.state.accounting import Phase

    return [({"phase": each.value}, float(status["account"]["phase"] == each.value)) for each in Phase]


def _safe_step(status: Facts, unix_s: float) -> Iterable[Sample]:
    return [({"level": level}, found["step"]) for level, found in sorted(status["account"]["safe"].items())]


def _safe_at(status: Facts, unix_s: float) -> Iterable[Sample]:
    safe = sorted(status["account"]["safe"].items())
    return [({"level": level}, unix_s - found["age_s"]) for level, found in safe if found["age_s"] is not None]


def _from_job(read: Callable[[Facts], Iterable[Sample]]) -> Callable[[Facts, float], Iterable[Sample]]:
    """Reads from the current job; no samples without one."""
    return lambda status, unix_s: read(status["job"]) if status.get("job") else []


def _by_label(name: str, label: str) -> Callable[[Facts, float], Iterable[Sample]]:
    return lambda status, unix_s: [({label: k}, v) for k, v in sorted(status[name].items())]


def _ranks(job: Facts) -> Iterable[Sample]:
    counts = Counter[str](job["ranks"])
    return [({"state": state}, counts[state]) for state in ("here", "left", "dead")]


def _under_way(job: Facts) -> Iterable[Sample]:
    levels = [each["level"] for each in job["under_way"] if each["state"] != "failed"]
    return [({"level": level}, levels.count(level)) for level in sorted(job["intervals"])]


def _intervals(job: Facts) -> Iterable[Sample]:
    return [({"level": level}, found["interval_s"]) for level, found in sorted(job["intervals"].items())]


def _rates(job: Facts) -> Iterable[Sample]:
    return [({"class": name}, found["per_s"]) for name, found in sorted(job["rates"].items())]


def _notices(job: Facts) -> Iterable[Sample]:
    standing = job["notices"]["standing"]
    return [({"certain": text}, sum(n["certain"] is known for n in standing)) for text, known in _CERTAIN]


def _memory(job: Facts) -> Iterable[Sample]:
    plan = job["memory"]
    if plan is None:
        return []
    names = {"slots": plan["slots"] * plan["slot_bytes"], "kept": plan["kept_bytes"], "commit": plan["commit_bytes"]}
    return [({"use": name}, count) for name, count in names.items()]


def _sources(name: str) -> Callable[[Facts, float], Iterable[Sample]]:
    def read(status: Facts, unix_s: float) -> Iterable[Sample]:
        return [({"source": k}, each[name]) for k, each in sorted(_predictions(status)["sources"].items())]

    return read


def _alarms(status: Facts, unix_s: float) -> Iterable[Sample]:
    found = _predictions(status)
    standing = Counter[str](each["source"] for each in found["standing"])
    return [({"source": name}, standing[name]) for name in sorted(found["sources"])]


def _predictions(status: Facts) -> Facts:
    found: Facts = status.get("predictions") or {"sources": {}, "standing": []}
    return found


_CERTAIN = (("yes", True), ("no", False))

METRICS: tuple[Metric, ...] = (
    Metric("ckpt_agent_info", "gauge", "Always 1; labels: ckpt's version and the run's URL.", _info),
    Metric("ckpt_phase", "gauge", "1 for the present phase of the run, 0 for the others.", _phase),
    Metric("ckpt_goodput_ratio", "gauge", "Productive seconds over elapsed seconds.", _account("goodput")),
    Metric(
        "ckpt_elapsed_seconds_total", "counter", "Seconds since the first start on this agent.", _account("elapsed_s")
    ),
    Metric("ckpt_time_seconds", "gauge", "Elapsed seconds by part; a failure moves some to lost.", _seconds),
    Metric("ckpt_starts_total", "counter", "Starts that reached training.", _account("starts")),
    Metric("ckpt_failures_total", "counter", "Interruptions of training, preemptions included.", _account("failures")),
    Metric("ckpt_lost_steps_total", "counter", "Ended steps that failures lost.", _account("lost_steps")),
    Metric("ckpt_lost_seconds_total", "counter", "Seconds of training that failures lost.", _account("lost_s")),
    Metric("ckpt_recoveries_total", "counter", "Recoveries after a failure.", _account("recoveries", "number")),
    Metric(
        "ckpt_recovery_seconds_total",
        "counter",
        "Seconds from failures to recoveries.",
        _account("recoveries", "seconds"),
    ),
    Metric("ckpt_snapshots_total", "counter", "Checkpoints complete in memory.", _account("snapshots", "number")),
    Metric("ckpt_snapshots_abandoned_total", "counter", "Snapshots begun and abandoned.", _account("given_up")),
    Metric(
        "ckpt_snapshot_stall_seconds_total",
        "counter",
        "Time that training paused for snapshots, as the slowest rank reports.",
        _account("snapshots", "seconds"),
    ),
    Metric("ckpt_commits_total", "counter", "Commits that reached the store.", _account("commits", "number")),
    Metric(
        "ckpt_commits_failed_total",
        "counter",
        "Commits that failed; some were tried again.",
        _account("commits_failed"),
    ),
    Metric("ckpt_commit_seconds_total", "counter", "Seconds that commits took.", _account("commits", "seconds")),
    Metric(
        "ckpt_committed_raw_bytes_total",
        "counter",
        "Bytes of committed checkpoints before encoding.",
        _account("raw_bytes"),
    ),
    Metric(
        "ckpt_saved_bytes_total", "counter", "Bytes saved by level; store: after encoding.", _by_level("saved_bytes")
    ),
    Metric("ckpt_restored_bytes_total", "counter", "Bytes that starts read, by level.", _by_level("restored_bytes")),
    Metric(
        "ckpt_store_requests_total",
        "counter",
        "Requests of this agent to the store, each attempt among them.",
        _by_label("store_requests", "operation"),
    ),
    Metric(
        "ckpt_store_bytes_total",
        "counter",
        "Bytes that this agent sent to the store or received from it.",
        _by_label("store_bytes", "direction"),
    ),
    Metric("ckpt_restores_total", "counter", "Starts by the level that they restored from.", _by_level("restores")),
    Metric("ckpt_step", "gauge", "Newest step that all ranks ended.", _account("ended_step")),
    Metric("ckpt_step_seconds", "gauge", "Seconds of a step now.", _from_job(lambda job: [(NONE, job["step_s"])])),
    Metric("ckpt_safe_step", "gauge", "Newest step that is complete at a level.", _safe_step),
    Metric("ckpt_safe_timestamp_seconds", "gauge", "When that step was taken, Unix time.", _safe_at),
    Metric("ckpt_under_way", "gauge", "Checkpoints on their way to a level.", _from_job(_under_way)),
    Metric("ckpt_interval_seconds", "gauge", "Present interval of a level, seconds.", _from_job(_intervals)),
    Metric("ckpt_failures_per_second", "gauge", "Learnt failure rate by class.", _from_job(_rates)),
    Metric(
        "ckpt_saving_ratio",
        "gauge",
        "Expected share of the run's time that saving takes.",
        _from_job(lambda job: [(NONE, job.get("saving"))]),
    ),
    Metric("ckpt_ranks", "gauge", "Ranks of the current job, by state.", _from_job(_ranks)),
    Metric("ckpt_notices", "gauge", "Standing notices, by whether they are certain.", _from_job(_notices)),
    Metric("ckpt_predictions", "gauge", "Standing alarms of all nodes, by source.", _alarms),
    Metric(
        "ckpt_prediction_precision_ratio", "gauge", "Lower bound of the precision, by source.", _sources("precision")
    ),
    Metric("ckpt_prediction_recall_ratio", "gauge", "Lower bound of the recall; 0 if not proven.", _sources("recall")),
    Metric("ckpt_memory_bytes", "gauge", "Planned memory of this node, by use.", _from_job(_memory)),
    Metric(
        "ckpt_memory_allowed_bytes",
        "gauge",
        "Limit of the planned memory.",
        _from_job(lambda job: [(NONE, job["memory"]["allowed_bytes"] if job["memory"] else None)]),
    ),
    Metric(
        "process_resident_memory_bytes",
        "gauge",
        "Resident memory of the agent, with shared memory.",
        _from_status("resident_bytes"),
    ),
    Metric("process_cpu_seconds_total", "counter", "CPU seconds of the agent.", _from_status("cpu_s")),
    Metric("process_start_time_seconds", "gauge", "Start of the agent, Unix time.", _from_status("began_at")),
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

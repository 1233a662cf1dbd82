"""The agent's status, for `ckpt watch` and the metrics page, and the agent's file of events.

It only observes: no decision depends on it, and a job runs the same without it. Main thread only; the file has a thread
of its own.
"""

from __future__ import annotations

import collections
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpt.agent.state.accounting import Accounting, Phase
from ckpt.agent.state.slots import SaveAttempt, SaveReason, SlotState, WorkState
from ckpt.events import Event, JsonLines
from ckpt.policy.failures import Failure
from ckpt.settings import Settings
from ckpt.storage.names import redact_url
from ckpt.types import Identity, Version, format_count

if TYPE_CHECKING:
    from ckpt.agent.job.job import Job
    from ckpt.agent.observability.metrics_http import MetricsHttp
    from ckpt.agent.restore.restore_session import RestoreSession
    from ckpt.agent.runtime.event_loop import EventLoop
    from ckpt.format.manifest import Record

RECENT_EVENTS_MAX = 8  # events that are shown
TEXT_MAX = 300  # characters of each event's message
_HIDDEN_EVENTS = (
    "commit.done",
    "snapshot.done",
    "policy.changed",
    "job.account",
)  # events that are shown as figures instead
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Status:
    """Owns the account of the run's time, the file of events and the HTTP server of the metrics. `status`: returns all
    that is shown. `tell`: takes the events of errors in here."""

    def __init__(
        self,
        url: str,
        settings: Settings,
        server: EventLoop,
        status: Callable[[], dict[str, Any]],
        tell: Callable[[Event], None],
    ) -> None:
        self.account = Accounting()
        self.url = url
        self._settings = settings
        self._server = server
        self._read_status = status
        self._emit_event = tell
        self._began_s, self._began_at = time.monotonic(), time.time()
        self._recent_events: collections.deque[tuple[float, Event]] = collections.deque(maxlen=RECENT_EVENTS_MAX)
        self._metrics_http: MetricsHttp | None = None
        self._has_opened_metrics = False
        self._event_log: JsonLines | None = None
        if settings.events is not None:
            about = {
                "by": "agent",
                "url": redact_url(url),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "launch": None,
            }
            self._event_log = JsonLines(settings.events, about)

    def close(self) -> None:
        if self._metrics_http is not None:
            self._metrics_http.close()
        if self._event_log is not None:
            self._event_log.close()

    # -- what the agent calls

    def record_event(self, event: Event) -> None:
        """An event happened: it is shown, counted, and written to the file."""
        # A prediction of an unproven source is counted, and not shown.
        noise = event.name == "prediction" and not event.loud
        if event.name not in _HIDDEN_EVENTS and not noise:
            self._recent_events.append((time.monotonic(), event))
        if event.name == "save.abandoned":
            self.account.totals.given_up += 1
        if self._event_log is not None:
            self._event_log(event)
            if event.name == "commit.done":
                self._write_account()

    def on_restored(
        self, job: Job, level: str, restore: RestoreSession | None, steps_lost: int | None, stored: Identity | None
    ) -> None:
        """Training begins. `level`: where the restored checkpoint was found. `restore`: its session; None: there was
        none. `steps_lost`: see `Start`. `stored`: the newest stored checkpoint, up to the restored one."""
        self._mark_launch(job)
        account, now_s = self.account, time.monotonic()
        parent = job.claim.parent if job.claim is not None else None
        lost_s, lost_steps, recovered = account.lost_s, account.totals.lost_steps, account.totals.recoveries.number
        level = level if parent is not None else "none"
        taken_s = _taken_s(restore.record) if restore is not None else None
        age_s = time.time() - taken_s if taken_s is not None else None
        read_bytes = restore.bytes_by_level if restore is not None else {}
        version = parent.version if parent is not None else Version(0)
        account.record_start(now_s, job.epoch, version, level, read_bytes, age_s, steps_lost or 0)
        if stored is not None:
            account.record_level("store", stored.epoch, stored.version)
        if account.totals.recoveries.number > recovered:
            took_s = account.totals.recoveries.last_s or 0.0
            facts = {
                "step": version.step,
                "level": level,
                "lost_steps": account.totals.lost_steps - lost_steps,
                "lost_s": account.lost_s - lost_s,
                "recovery_s": took_s,
            }
            lost = format_count(account.totals.lost_steps - lost_steps, "step")
            text = (
                f"training goes on after step {version.step}: {lost} lost ({facts['lost_s']:.1f} s), and "
                f"{took_s:.1f} s until it did"
            )
            job.context.emit("job.recovered", text, data=facts)
        self._write_account()

    def update(self, job: Job | None, starting: bool) -> None:
        """Called after every change. `job`: the current one. `starting`: whether a start is under way."""
        before = self.account.phase
        self._mark_launch(job)
        if job is not None:
            parent = job.claim.parent if job.claim is not None else None
            self.account.adopt_epoch(job.epoch, parent.version if parent is not None else None)
        self.account.update(
            time.monotonic(), self._phase(job, starting), job.local_share.ended_step() if job is not None else 0
        )
        if self.account.phase is not before and self.account.phase in (Phase.DOWN, Phase.IDLE):
            self._write_account()
        if not self._has_opened_metrics and self._settings.metrics is not None and (job is not None or starting):
            self._has_opened_metrics = True
            self._open_metrics(*self._settings.metrics)

    def _mark_launch(self, job: Job | None) -> None:
        """Marks the lines of the file with the job's launch from now on; None without a job."""
        launch = job.context.launch if job is not None else None
        if self._event_log is not None and self._event_log.common_entries["launch"] != launch:
            self._event_log.add_entries(launch=launch)

    def _phase(self, job: Job | None, starting: bool) -> Phase | None:
        if starting:
            return Phase.STARTING
        if job is None or job.claim is None:
            return None
        group = job.scheduler
        ranks = group.rank_states.summary
        if job.context.internal_error or ranks.first_failed is not None or group.facts.superseded_by:
            return Phase.DOWN
        if group.facts.all_gone:
            return Phase.IDLE if job.context.is_finished else Phase.DOWN
        leaves = ranks.any_gone or any(attempt.reason is SaveReason.EXIT for attempt in group.slots.attempts())
        return Phase.ENDING if leaves else Phase.TRAINING

    def _write_account(self) -> None:
        if self._event_log is not None:
            now_s = time.monotonic()
            self._event_log(Event("job.account", self.account.text(now_s), data=self.account.facts(now_s)))

    # -- what is shown

    def facts(self) -> dict[str, Any]:
        """The part of the status about the agent and the whole run; `job_facts` has that of each job."""
        import ckpt

        now_s = time.monotonic()
        return {
            "version": ckpt.__version__,
            "host": socket.gethostname(),
            "up_s": now_s - self._began_s,
            # Unix time, constant: monitors take a change for a restart.
            "began_at": self._began_at,
            "resident_bytes": _resident_bytes(),
            "cpu_s": time.process_time(),
            "metrics": self._metrics_http.address if self._metrics_http is not None else None,
            "account": self.account.facts(now_s),
            "events": [
                {"event": e.name, "message": e.message[:TEXT_MAX], "loud": e.loud, "age_s": now_s - at_s}
                for at_s, e in self._recent_events
            ],
        }

    def _open_metrics(self, host: str, port: int) -> None:
        from ckpt.agent.observability.metrics_http import MetricsHttp

        try:
            self._metrics_http = MetricsHttp(self._server, host, port, self._render_page)
        except OSError as exc:
            text = f"ckpt: no metrics at {host}:{port}: {exc}; another agent of this host may have that port"
            self._emit_event(Event("metrics.failed", text, True))

    def _render_page(self) -> bytes:
        from ckpt.agent.observability.prometheus import page

        return page(self._read_status(), time.time())


def job_facts(job: Job) -> dict[str, Any]:
    """The facts of one job: which checkpoints are on their way to which level, how often it saves, and why."""
    now_s, group = time.monotonic(), job.scheduler
    facts: dict[str, Any] = {"step_s": group.facts.step_timing.boundary_interval_s, "under_way": []}

    def add(attempt: SaveAttempt, level: str, state: str, since_s: float | None, **more: int) -> None:
        about = {"step": attempt.version.step, "version": str(attempt.version), "asked": attempt.reason.value, **more}
        for_s = now_s - since_s if since_s is not None else None
        facts["under_way"].append({"level": level, "state": state, **about, "for_s": for_s})

    for attempt in group.slots.attempts():
        if attempt.state is SlotState.GRANTED:
            add(
                attempt,
                "local",
                "appointed",
                attempt.times.opened_s,
                staged=len(attempt.staged_ranks),
                of=job.context.world,
            )
        elif attempt.state is SlotState.STAGED:
            add(attempt, "local", "hashed", attempt.times.staged_s)
        elif attempt.slot == group.replicas.replicating_slot:
            add(attempt, "peer", "copied", None)
        if attempt.state is SlotState.COMPLETE and attempt.commit_state in (WorkState.RUNNING, WorkState.FAILED):
            is_running = attempt.commit_state is WorkState.RUNNING
            add(attempt, "store", "committed" if is_running else "failed", attempt.times.commit_began_s)
    learning, policy = job.cost_model, group.clock.policy
    levels = ("local", "peer", "store") if group.replicas.is_replication_on else ("local", "store")
    facts["rates"] = {
        each.value: {
            "per_s": learning.measurements.rate_of(each).current_rate.mean,
            "seen": learning.measurements.rate_of(each).failure_count,
        }
        for each in Failure
    }
    if not job.policy.is_adaptive:
        every = {"interval_s": policy.seconds, "interval_steps": policy.steps, "by": "every"}
        facts["intervals"] = {level: dict(every) for level in levels}
        return facts
    decision = learning.decision
    # Every snapshot is replicated, hence one interval for both levels.
    often = {"interval_s": decision.local_s, "interval_steps": None, "by": decision.local_by}
    facts["intervals"] = {level: dict(often) for level in levels}
    facts["intervals"]["store"] |= {"interval_s": decision.store_s, "by": decision.store_by}
    facts["saving"], facts["overhead"] = decision.saving_share, decision.overhead
    facts["unmet"] = list(decision.unmet_limits)
    return facts


def _taken_s(record: Record | None) -> float | None:
    """About when a record's checkpoint was taken (Unix time), as the record says; None if unknown or in the future."""
    found = record.taken_s if record is not None else None
    return found if found is not None and found <= time.time() else None


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES

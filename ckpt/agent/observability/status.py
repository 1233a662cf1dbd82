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
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt.agent.state.accounting import Accounting, Phase
from ckpt.agent.state.job_facts import State, Store, Why
from ckpt.agent.state.rank_presence import Presence
from ckpt.events import Event, JsonLines
from ckpt.ipc.messages import Message
from ckpt.policy.failures import Failure
from ckpt.settings import Settings
from ckpt.storage.names import shown
from ckpt.types import Identity, Tick, counted

if TYPE_CHECKING:
    from ckpt.agent.job.job import Job
    from ckpt.agent.observability.metrics_http import MetricsHttp
    from ckpt.agent.restore.restore_session import RestoreSession
    from ckpt.agent.runtime.event_loop import EventLoop
    from ckpt.format.manifest import Record

RECENT = 8  # events that are shown
TEXT_MAX = 300  # characters of each event's message
_UNSAID = ("commit.done", "snapshot.done", "policy.changed", "job.account")  # events that are shown as figures instead
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
        self._status = status
        self._tell = tell
        self._began_s, self._began_at = time.monotonic(), time.time()
        self._recent: collections.deque[tuple[float, Event]] = collections.deque(maxlen=RECENT)
        self._interrupted: set[str] = set()  # epochs whose ranks left because of a notice
        self._scrape: MetricsHttp | None = None
        self._opened = False
        self._lines: JsonLines | None = None
        if settings.events is not None:
            about = {"by": "agent", "url": shown(url), "host": socket.gethostname(), "pid": os.getpid(), "launch": None}
            self._lines = JsonLines(settings.events, about)

    def close(self) -> None:
        if self._scrape is not None:
            self._scrape.close()
        if self._lines is not None:
            self._lines.close()

    # -- what the agent calls

    def told(self, event: Event) -> None:
        """An event happened: it is shown, counted, and written to the file."""
        event = replace(event, message=self._server.called.said(event.message))
        # A prediction of an unproven source is counted, and not shown.
        noise = event.name == "prediction" and not event.loud
        if event.name not in _UNSAID and not noise:
            self._recent.append((time.monotonic(), event))
        if event.name == "save.abandoned":
            self.account.abandoned()
        if self._lines is not None:
            self._lines(event)
            if event.name == "commit.done":
                self._tell_account()

    def heard(self, job: Job, message: Message) -> None:
        """A rank sent a message. A rank that leaves because of a notice shows an interrupted run, not an ended one."""
        if message.kind == "leave" and message.fields.get("outcome") == "notice":
            self._interrupted.add(str(job.epoch))

    def restored(
        self, job: Job, level: str, restore: RestoreSession | None, steps_lost: int | None, stored: Identity | None
    ) -> None:
        """Training begins. `level`: where the restored checkpoint was found. `restore`: its session; None: there was
        none. `steps_lost`: see `Start`. `stored`: the newest stored checkpoint, up to the restored one."""
        self._is_of(job)
        account, now_s = self.account, time.monotonic()
        parent = job.claim.parent if job.claim is not None else None
        lost_s, lost_steps, recovered = account.lost_s, account.lost_steps, account.recoveries.number
        level = level if parent is not None else "none"
        taken_s = _taken_s(restore.record) if restore is not None else None
        age_s = time.time() - taken_s if taken_s is not None else None
        read_bytes = restore.sources if restore is not None else {}
        tick = parent.tick if parent is not None else Tick(0)
        account.started(now_s, job.epoch, tick, level, read_bytes, age_s, steps_lost or 0)
        if stored is not None:
            account.found("store", stored.epoch, stored.tick)
        if account.recoveries.number > recovered:
            took_s = account.recoveries.last_s or 0.0
            facts = {
                "step": tick.step,
                "level": level,
                "lost_steps": account.lost_steps - lost_steps,
                "lost_s": account.lost_s - lost_s,
                "recovery_s": took_s,
            }
            text = (
                f"training goes on after step {tick.step}: {counted(account.lost_steps - lost_steps, 'step')} lost "
                f"({facts['lost_s']:.1f} s), and {took_s:.1f} s until it did"
            )
            job.emit("job.recovered", text, data=facts)
        self._tell_account()

    def look(self, job: Job | None, starting: bool) -> None:
        """Called after every change. `job`: the current one. `starting`: whether a start is under way."""
        before = self.account.phase
        self._is_of(job)
        if job is not None:
            parent = job.claim.parent if job.claim is not None else None
            self.account.follow(job.epoch, parent.tick if parent is not None else None)
        self.account.look(time.monotonic(), self._phase(job, starting), job.ranks.ended() if job is not None else 0)
        if self.account.phase is not before and self.account.phase in (Phase.DOWN, Phase.IDLE):
            self._tell_account()
        if not self._opened and self._settings.metrics is not None and (job is not None or starting):
            self._opened = True
            self._open(*self._settings.metrics)

    def _is_of(self, job: Job | None) -> None:
        """Marks the lines of the file with the job's launch from now on; None without a job."""
        launch = job.launch if job is not None else None
        if self._lines is not None and self._lines.about["launch"] != launch:
            self._lines.also(launch=launch)

    def _phase(self, job: Job | None, starting: bool) -> Phase | None:
        if starting:
            return Phase.STARTING
        if job is None or job.claim is None:
            return None
        group = job.group
        broken = job.failed or any(m.presence is Presence.DEAD or m.broke for m in group.members)
        if broken or group.superseded_by:
            return Phase.DOWN
        if group.all_gone:
            return Phase.DOWN if str(job.epoch) in self._interrupted else Phase.IDLE
        leaves = any(m.presence is Presence.LEFT for m in group.members)
        leaves = leaves or any(s.round is not None and s.round.why is Why.EXIT for s in group.slots)
        return Phase.ENDING if leaves else Phase.TRAINING

    def _tell_account(self) -> None:
        if self._lines is not None:
            now_s = time.monotonic()
            self._lines(Event("job.account", self.account.text(now_s), data=self.account.facts(now_s)))

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
            "metrics": self._scrape.address if self._scrape is not None else None,
            "account": self.account.facts(now_s),
            "events": [
                {"event": e.name, "message": e.message[:TEXT_MAX], "loud": e.loud, "age_s": now_s - at_s}
                for at_s, e in self._recent
            ],
        }

    def _open(self, host: str, port: int) -> None:
        from ckpt.agent.observability.metrics_http import MetricsHttp

        try:
            self._scrape = MetricsHttp(self._server, host, port, self._page)
        except OSError as exc:
            text = f"ckpt: no metrics at {host}:{port}: {exc}; another agent of this host may have that port"
            self._tell(Event("metrics.failed", text, True))

    def _page(self) -> bytes:
        from ckpt.agent.observability.prometheus import page

        return page(self._status(), time.time())


def job_facts(job: Job) -> dict[str, Any]:
    """The facts of one job: which checkpoints are on their way to which level, how often it saves, and why."""
    now_s, group = time.monotonic(), job.group
    facts: dict[str, Any] = {"step_s": group.pace.step_s, "under_way": [], "rates": {}}
    for slot in group.slots:
        round_ = slot.round
        if round_ is None:
            continue
        about = {"step": round_.tick.step, "tick": str(round_.tick), "asked": round_.why.value}
        if slot.state is State.GRANTED:
            about |= {"staged": len(round_.staged), "of": job.world, "for_s": now_s - round_.opened_s}
            facts["under_way"].append({"level": "local", "state": "appointed", **about})
        elif slot.state is State.STAGED:
            since_s = round_.all_staged_s
            about |= {"for_s": now_s - since_s if since_s is not None else None}
            facts["under_way"].append({"level": "local", "state": "hashed", **about})
        elif slot.number == group.replicating:
            facts["under_way"].append({"level": "peer", "state": "copied", **about, "for_s": None})
        if slot.state is State.COMPLETE and round_.store in (Store.RUNNING, Store.FAILED):
            since_s = round_.commit_began_s
            about |= {"for_s": now_s - since_s if since_s is not None else None}
            state = "committed" if round_.store is Store.RUNNING else "failed"
            facts["under_way"].append({"level": "store", "state": state, **about})
    learning, policy = job.learning, group.policy
    levels = ("local", "peer", "store") if group.replicates else ("local", "store")
    if learning is not None:
        facts["rates"] = {
            each.value: {"per_s": learning.known.rate_of(each).now.mean, "seen": learning.known.rate_of(each).seen}
            for each in Failure
        }
    if learning is None or not job.is_adaptive:
        what = {"interval_s": policy.seconds, "interval_steps": policy.steps, "by": "every"}
        facts["intervals"] = {level: dict(what) for level in levels}
        return facts
    decision = learning.decision
    chosen: dict[str, tuple[float, str]] = {}
    # Every snapshot is replicated, hence one interval for both levels.
    for level in levels:
        chosen[level] = decision.local_s, decision.local_by
    chosen["store"] = decision.store_s, decision.store_by
    facts["intervals"] = {
        level: {"interval_s": seconds, "interval_steps": None, "by": by} for level, (seconds, by) in chosen.items()
    }
    facts["saving"], facts["overhead"] = decision.saving, decision.overhead
    facts["unmet"] = list(decision.unmet)
    return facts


def _taken_s(record: Record | None) -> float | None:
    """About when a record's checkpoint was taken (Unix time), as the record says; None if unknown or in the future."""
    found = record.taken_s if record is not None else None
    return found if found is not None and found <= time.time() else None


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES

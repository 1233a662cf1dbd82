"""The listener for the end of a Slurm allocation, from SLURM_JOB_END_TIME or by asking squeue for the time left.

The end is the moment of the first SIGTERM. KillWait (30 s by default) passes between SIGTERM and SIGKILL and is not
relied on. Preemption by Slurm comes as a signal; signals.py listens to it.

Sources: sbatch(1), SLURM_JOB_END_TIME (Unix seconds; set by Slurm 22.05 and later); squeue(1), format %L.
"""

from __future__ import annotations

import re
import select
import subprocess
import threading
import time
from collections.abc import Callable

from ckpt.errors import UsageError
from ckpt.events import Events
from ckpt.preemption.notice import MOVED_S, KnownNotices, Notice, OnNoticeChange
from ckpt.preemption.poll import Fault, poll_until_stopped

POLL_S = 300.0  # each question goes to the one controller of the cluster
POLL_NEAR_S = 60.0  # in the last NEAR_S
NEAR_S = 900.0
OUTPUT_BYTES_MAX = 4096
SLICE_S = 0.25
ENDLESS = frozenset({"UNLIMITED", "NOT_SET"})
JOB_ID = re.compile(r"[0-9]{1,20}(_[0-9]{1,10})?")
_LEFT = re.compile(r"(?:(\d{1,6})-)?(?:(\d{1,3}):)?(\d{1,3}):(\d{2})")  # [days-][hours:]minutes:seconds


class SlurmListener:
    """Reports the end of one job's allocation.

    `end_s`: the value of SLURM_JOB_END_TIME, or None where it is not set. If it is set, squeue is asked once, NEAR_S
    before the end, whether the time limit was changed, and once more after each change. If squeue does not answer, the
    end stays. A listener that starts within NEAR_S of the end asks before it reports. It waits at most a quarter of the
    time that the variable leaves, since the variable is as old as the job. Slurm's clock and this host's are assumed to
    agree.

    Errors: UsageError for an invalid job id.
    """

    name = "slurm"

    def __init__(
        self,
        job_id: str,
        end_s: float | None = None,
        *,
        squeue: str = "squeue",
        events: Events | None = None,
        timeout_s: float = 30.0,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        if not JOB_ID.fullmatch(job_id):
            raise UsageError(f"{job_id!r} is not a Slurm job id")
        self._job_id = job_id
        self._end_s = end_s
        self._command = [squeue, "--noheader", "--jobs", job_id, "--format", "%L"]
        self._events = events
        self._timeout_s = timeout_s
        self._now_s = now_s

    def listen(self, stop: threading.Event, tell: OnNoticeChange) -> None:
        known = KnownNotices(self.name, tell)
        if self._end_s is not None:
            self._follow_end(self._end_s, known, stop)
            stop.wait()
            return

        def ask() -> float:
            asked_s = self._now_s()
            left_s = time_left_s(self._run_squeue(stop, self._timeout_s))
            known.set_standing([] if left_s is None else [self._notice(asked_s + left_s)])
            return POLL_NEAR_S if left_s is not None and left_s < NEAR_S else POLL_S

        poll_until_stopped(self.name, stop, ask, self._events)

    def _follow_end(self, end_s: float, known: KnownNotices, stop: threading.Event) -> None:
        while True:
            if (wait_s := end_s - NEAR_S - self._now_s()) > 0:
                known.set_standing([self._notice(end_s)])
                if stop.wait(wait_s):
                    return
            asked_s, before_s = self._now_s(), end_s
            ahead_s = end_s - asked_s
            timeout_s = min(self._timeout_s, ahead_s / 4) if ahead_s > 0 else self._timeout_s
            try:
                left_s = time_left_s(self._run_squeue(stop, timeout_s))
            except Fault:
                known.set_standing([self._notice(end_s)])
                return
            if left_s is None:
                known.set_standing([])
                return
            end_s = asked_s + left_s
            known.set_standing([self._notice(end_s)])
            if abs(end_s - before_s) <= MOVED_S:
                return

    def _notice(self, end_s: float) -> Notice:
        return Notice(end_s, self.name, True, self._job_id, f"the allocation of Slurm job {self._job_id} ends")

    def _run_squeue(self, stop: threading.Event, timeout_s: float) -> str:
        """The output of squeue, bounded in bytes and time. The process has ended when this returns. Errors: Fault."""
        try:
            process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
            )
        except OSError as exc:
            raise Fault(f"{self._command[0]} cannot be started: {exc}") from exc
        try:
            text = self._read_all(process, stop, timeout_s)
            code = process.wait(timeout=1.0)
        except subprocess.TimeoutExpired as exc:
            raise Fault(f"{self._command[0]} closed its output and did not end") from exc
        finally:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
        if code:
            raise Fault(f"{self._command[0]} ended with status {code}")
        return text

    def _read_all(self, process: subprocess.Popen[bytes], stop: threading.Event, timeout_s: float) -> str:
        assert process.stdout is not None
        until_s = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        out = b""
        while time.monotonic() < until_s and not stop.is_set() and len(out) <= OUTPUT_BYTES_MAX:
            if not poll.poll(SLICE_S * 1000):
                continue
            if not (more := process.stdout.read(OUTPUT_BYTES_MAX)):
                return out.decode(errors="replace")
            out += more
        raise Fault(
            f"{self._command[0]} did not answer within {timeout_s:g} s, or with more than {OUTPUT_BYTES_MAX} bytes"
        )


def time_left_s(text: str) -> float | None:
    """Seconds in squeue's "1-02:03:04", "2:03:04" or "3:04"; None without a limit. Of several lines (an array, a job of
    several parts) the smallest counts. Errors: Fault."""
    lines = text.split()
    if lefts := [found for line in lines if (found := _LEFT.fullmatch(line)) is not None]:
        return min(_seconds(left) for left in lefts)
    if not lines or not ENDLESS.issuperset(lines):
        raise Fault(f"squeue answered {text.strip()[:50]!r}, which is not a time")
    return None


def _seconds(left: re.Match[str]) -> float:
    days, hours, minutes, seconds = (int(part or 0) for part in left.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)

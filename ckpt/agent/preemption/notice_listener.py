"""The notice listeners of this node's agent: one thread per notice source of the machine.

Every notice is passed on on the main thread. Rank 0 names the sources when it joins, from its environment, since the
agent may have been started by another job. The cloud is read from the firmware's tables, on a thread, and never probed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.agent.preemption.notice_relay import OUTLIVES_S, PAST_S, ExitTiming
from ckpt.agent.runtime.coroutines import Promise
from ckpt.errors import AgentError, CkptError, UsageError
from ckpt.events import Events
from ckpt.ipc.notice_sources import Sources
from ckpt.threads import Tasks

if TYPE_CHECKING:
    from ckpt.preemption.azure import AzureListener
    from ckpt.preemption.notice import FirstDeadlines, Listener, Notice, NoticeChange

ACKNOWLEDGE_TRIES = 3
ACKNOWLEDGE_RETRY_S = 1.0
PASSED_MAX = 100  # notices whose deadlines are remembered


class NoticeListeners:
    """Owns the listener threads; all methods are for the main thread. `post`: runs a function on the main thread.
    `tell`: called there with each notice or withdrawal. `standing_notices`: the notices not withdrawn, by (source,
    key). Their deadlines were ahead when first heard."""

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        tell: Callable[[NoticeChange, ExitTiming], None],
        events: Events,
    ) -> None:
        self.sources = Sources()
        self.standing_notices: dict[tuple[str, str], Notice] = {}
        self._post = post
        self._on_notice = tell
        self._events = events
        self._tasks: Tasks | None = None
        self._stopping_tasks: list[Tasks] = []
        self._deadlines_s: dict[tuple[str, str], float] = {}  # deadlines of notices not withdrawn
        # The notices by which a job has left. Their deadlines stay as they were.
        self._exit_notices: set[tuple[str, str]] = set()
        # First deadlines. They outlive `stop`: a machine with 10 s left must not have 30 s for the next job.
        self._first_deadlines: FirstDeadlines = {}
        self._azure_listener: AzureListener | None = None  # set by the thread "begin"

    def listen_to(self, sources: Sources) -> None:
        """Listens to these sources from now on. Does nothing if it listens to them already."""
        if sources == self.sources and self._tasks is not None:
            return
        self.stop()
        self.sources = sources
        if sources.mode == "off":
            return
        tasks = self._tasks = Tasks("notices")
        tasks.start("begin", lambda: self._start_listeners(tasks, sources))

    def stop(self) -> None:
        """Stops telling, and forgets the standing notices but for their first deadlines. Does not wait: the threads end
        within about a second."""
        self.standing_notices.clear()
        if self._tasks is not None:
            self._tasks.stopping.set()
            self._stopping_tasks.append(self._tasks)
            self._tasks = None

    def list_notices(self) -> list[tuple[Notice, ExitTiming]]:
        """The standing notices, and when a job leaves by each."""
        return [(notice, self._exit_timing(notice)) for notice in self.standing_notices.values()]

    def record_exit(self, source: str, key: str) -> None:
        """A job leaves by that notice. If the job is restarted here, it gains nothing by leaving again. So the notice
        counts as NOT_AGAIN until its source withdraws it, or names a later time."""
        if (source, key) in self.standing_notices:
            self._deadlines_s[source, key] = self.standing_notices[source, key].deadline_s
            self._exit_notices.add((source, key))

    def repeat_notice_s(self, now_s: float) -> float:
        """Seconds for which a restarted job may still meet a notice by which it left. This agent alone knows of that.
        0: there is no such notice. `now_s`: Unix time."""
        return max(
            0.0, max((self._deadlines_s[name] for name in self._exit_notices), default=-math.inf) + OUTLIVES_S - now_s
        )

    def restore_notice(self, notice: Notice, when: ExitTiming) -> None:
        """Takes over a notice that a former agent heard. A deadline counted from the first sight is not counted anew;
        if the notice no longer stands, its withdrawal is told."""
        self._first_deadlines.setdefault(notice.source, {})[notice.key] = notice.deadline_s
        self._deadlines_s[notice.source, notice.key] = notice.deadline_s
        if when is ExitTiming.NOT_AGAIN:
            self._exit_notices.add((notice.source, notice.key))

    async def acknowledge_event(self, source: str, key: str) -> None:
        """Tells the source that its planned event, which stands here, may begin now; retries a few times. Errors:
        CkptError with the reason, if the source does not agree."""
        azure, tasks, answer = self._azure_listener, self._tasks, Promise[None]()
        if not self.sources.acknowledge:
            raise AgentError("this node's user does not let it (CKPT_ACKNOWLEDGE)")
        if azure is None or tasks is None or source != azure.name or (source, key) not in self.standing_notices:
            raise AgentError("it does not stand here")
        tasks.start("acknowledge", lambda: self._send_acknowledgement(azure, tasks, key, answer))
        await answer

    def close(self) -> None:
        """Stops, and waits for the threads. Errors: CkptError if a thread does not end."""
        self.stop()
        while self._stopping_tasks:
            self._stopping_tasks.pop().close()

    # -- on threads

    def _start_listeners(self, tasks: Tasks, sources: Sources) -> None:
        from ckpt.preemption.detect import Endpoints, listeners, which_cloud

        cloud = which_cloud() if sources.mode == "auto" else None

        def refused(source: str, exc: CkptError) -> None:
            text = f"notices of one kind are not listened to: {exc}"
            self._events.emit("notices.failed", text, loud=True, source=source)

        found = listeners(
            cloud,
            Endpoints.from_variables(dict(sources.named)),
            slurm_job=sources.slurm_job,
            slurm_end_s=sources.slurm_end_s,
            file=Path(sources.file) if sources.file else None,
            events=self._events,
            refused=refused,
            first=self._first_deadlines,
        )
        from ckpt.preemption.azure import AzureListener

        self._azure_listener = next((each for each in found if isinstance(each, AzureListener)), None)
        for listener in found:
            try:
                tasks.start(listener.name, lambda each=listener: self._listen(tasks, each))  # type: ignore[misc]
            except CkptError:
                return  # stopped meanwhile

    def _listen(self, tasks: Tasks, listener: Listener) -> None:
        try:
            listener.listen(tasks.stopping, lambda word: self._post(lambda: self._handle_notice(tasks, word)))
        except Exception as exc:
            text = f"{listener.name} is not listened to any more: {type(exc).__name__}: {exc}"
            self._events.emit("notices.failed", text, loud=True, source=listener.name)

    def _send_acknowledgement(self, azure: AzureListener, tasks: Tasks, key: str, answer: Promise[None]) -> None:
        error = ""
        for _ in range(ACKNOWLEDGE_TRIES):
            try:
                error = "" if azure.acknowledge(key, tasks.stopping) else "the service did not say yes"
            except UsageError as exc:
                error = str(exc)  # the event was withdrawn
                break
            if not error or tasks.stopping.wait(ACKNOWLEDGE_RETRY_S):
                break
        self._post(lambda: answer.set_outcome(None, error))

    # -- on the main thread

    def _handle_notice(self, tasks: Tasks, word: NoticeChange) -> None:
        from ckpt.preemption.notice import MOVED_S, Notice

        if tasks is not self._tasks:
            return  # stopped meanwhile
        name = (word.source, word.key)
        if isinstance(word, Notice):
            if name in self._exit_notices and word.deadline_s > self._deadlines_s[name] + MOVED_S:
                self._exit_notices.remove(name)
            word = self.standing_notices[name] = self._with_future_deadline(word)
            self._on_notice(word, self._exit_timing(word))
        else:
            self.standing_notices.pop(name, None)
            self._exit_notices.discard(name)
            self._deadlines_s.pop(name, None)
            self._on_notice(word, ExitTiming.IN_TIME)

    def _with_future_deadline(self, notice: Notice) -> Notice:
        """The notice with a deadline ahead. One that is past when first heard counts as PAST_S ahead; hearing it again
        does not move that."""
        name, now_s = (notice.source, notice.key), time.time()
        if notice.deadline_s <= now_s:
            notice = replace(notice, deadline_s=min(now_s + PAST_S, self._deadlines_s.get(name, math.inf)))
        if name not in self._exit_notices:
            self._deadlines_s[name] = notice.deadline_s
            if len(self._deadlines_s) - len(self._exit_notices) > PASSED_MAX:
                del self._deadlines_s[
                    min(self._deadlines_s.keys() - self._exit_notices, key=self._deadlines_s.__getitem__)
                ]
        return notice

    def _exit_timing(self, notice: Notice) -> ExitTiming:
        left = (notice.source, notice.key) in self._exit_notices
        return ExitTiming.NOT_AGAIN if left or notice.deadline_s <= time.time() else ExitTiming.IN_TIME

"""The trainer's link to its agent: what it tells the agent, and what the agent tells it.

The arenas (slots.py), the control page (control_view.py), the reached levels (levels.py), the membership and the
connection are parts of their own. A message of the agent goes to one handler, by its kind.
"""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ckpt.errors import AgentError, CkptError, Superseded
from ckpt.events import Event, Events
from ckpt.format.declaration import encode_layout
from ckpt.ipc import agent_process, client, messages
from ckpt.settings import Settings
from ckpt.threads import Tasks
from ckpt.trainer.link.agent_connection import AgentConnection
from ckpt.trainer.link.control_view import ControlView
from ckpt.trainer.link.levels import Levels
from ckpt.trainer.link.membership import JoinTerms, Membership
from ckpt.trainer.link.slots import Plan, Slots, StateOffer
from ckpt.types import Epoch, Identity, Version

FETCH_KINDS = ("frame-region", "frame-places", "frame-stream", "frame-files", "progress", "fetch-ended")


@dataclass(frozen=True, slots=True)
class EndOrder:
    """The agent's message that no further boundary can be expected: end the process where it is.
    `is_after_saves`: first wait for running saves. `deadline_s`: on the monotonic clock."""

    reason: str
    is_after_saves: bool
    deadline_s: float


class Link:
    """One rank's end of the connection. `bind`, `unbind`: see Slots. `wait_for_copies()` returns once no snapshot is
    being written. All three come from the snapshot side.

    `handlers`: by kind of a message, the function that handles it, on the thread that reads the socket. `fetch_inbox`:
    gets the messages of a fetch; None if the agent is gone. `superseded_by`: the newer start that owns the run now.
    `on_deadline(by_s)`: called when a deadline comes, maybe with an `end_order`."""

    def __init__(
        self,
        url: str,
        settings: Settings,
        events: Events,
        tasks: Tasks,
        bind: Callable[[int, Plan, memoryview], None],
        unbind: Callable[[int, memoryview], None],
        wait_for_copies: Callable[[], None],
    ) -> None:
        self._events = events
        self.superseded_by: str | None = None
        self.end_order: EndOrder | None = None
        self.on_deadline: Callable[[float], None] = lambda by_s: None
        self.fetch_inbox: queue.SimpleQueue[messages.Message | None] | None = None
        self.levels = Levels()
        self.view = ControlView()
        self.slots = Slots(events, tasks, bind, unbind, self.notify)
        self.membership = Membership(settings, self.slots)
        connect = functools.partial(
            agent_process.connect_or_replace, url, settings, tasks, events, self._on_message, self._on_lost
        )
        fail_all = functools.partial(self.levels.fail_all, "the agent could not be started again")
        self.agent = AgentConnection(connect, self._rejoin, wait_for_copies, fail_all, events, tasks)
        self.handlers: dict[str, Callable[[messages.Message], None]] = {
            "staging-plan": self._on_staging_plan,
            "grant-arena": self.slots.on_grant_arena,
            "close-arena": self.slots.on_close_arena,
            "checkpoint-level": self._on_level,
            "known-versions": self._on_known_versions,
            "superseded": lambda message: self._mark_superseded(str(message.fields.get("by", "a newer start"))),
            "standing-notices": lambda message: self.membership.keep_notices(list(message.fields["notices"])),
            "end-process": self._on_deadline,
            "leave-deadline": self._on_deadline,
            "event": self._on_event,
        }

    # -- entering

    def join(self, terms: JoinTerms, offer: StateOffer) -> None:
        """Makes this rank a member of the epoch. Errors: AgentError."""
        self.membership.terms = terms
        self.slots.offer(offer)
        self.slots.training_running.set()
        self.agent.is_wanted = True
        self._join(terms, resume=False)

    def _join(self, terms: JoinTerms, resume: bool) -> None:
        page = self.membership.join(self.connection, self.view.leave_attempt, resume)
        self.view.use(page, terms.rank)
        if (unsavable := self.membership.unsavable) is not None:
            self.notify("unsavable", unsavable)

    def _rejoin(self) -> None:
        """Joins another agent. Errors: CkptError, OSError."""
        self.agent.connect()
        terms = self.membership.terms
        assert terms is not None
        try:
            self.membership.listen_again(self.connection)
            self._check_awaited_stored(terms)
            self._join(terms, resume=True)
        except Superseded as exc:
            self._mark_superseded(str(exc))
            raise

    def _check_awaited_stored(self, terms: JoinTerms) -> None:
        """Looks whether a version that somebody waits for is in the store, before an agent is joined that may know
        nothing of it: the agent that stored the version may be dead."""
        wanted = self.membership.awaited_version
        if wanted is None or self.levels.level(wanted[0]) == "store":
            return
        with contextlib.suppress(CkptError):
            identity = Identity(Epoch.parse(terms.epoch), wanted[0])
            if self.connection.request("is-stored", {"identity": str(identity)}).fields["stored"]:
                self.levels.record(wanted[0], "store", True)

    # -- what this rank tells

    @property
    def terms(self) -> JoinTerms | None:
        return self.membership.terms

    @property
    def connection(self) -> client.Connection:
        """The present connection. Errors: AgentError if there is no agent."""
        return self.agent.connection

    def request(self, kind: str, fields: dict[str, Any], timeout_s: float | None) -> messages.Message:
        """Sends a request and returns the answer. Errors: AgentError; the error with which the agent answers."""
        return self.connection.request(kind, fields, timeout_s=timeout_s)

    def notify(self, kind: str, fields: dict[str, Any], blobs: list[bytes] | None = None) -> None:
        """Sends a message. If the agent dies the message is lost. The next agent counts a version as missed whose
        `snapshot-staged` was lost."""
        if (present := self.agent.present) is not None:
            # `_on_lost` handles the loss of the agent.
            with contextlib.suppress(AgentError):
                present.notify(kind, fields, blobs=blobs or [])

    @contextlib.contextmanager
    def training_paused(self) -> Iterator[None]:
        """In the block, while training stands still for a copy or a restore, threads that prepare other arenas pause,
        here and in the agent: they would take half of the memory bandwidth."""
        self.slots.training_running.clear()
        try:
            with self.view.training_paused():
                yield
        finally:
            self.slots.training_running.set()

    def offer(self, offer: StateOffer) -> None:
        """Tells the agent of another structure, or other replicas. No slot is warm for it until the agent has divided
        it."""
        self.slots.offer(offer)
        told = {"version": str(offer.version), "values_bytes": offer.values_bytes}
        self.notify("layout", told, blobs=[encode_layout(offer.layout), offer.hashes])

    def report_unsavable(self, version: Version, why: str) -> None:
        """Says that this rank does not come to that save, or has stopped waiting for it: the other ranks must not wait
        for it. A later agent is told as well."""
        self.membership.unsavable = told = {"version": str(version), "why": why[:1000]}
        self.notify("unsavable", told)

    def announce_wait(self, version: Version, why: str) -> None:
        """Tells the agent that somebody waits for that version to reach the store. It is a hint, repeated to the next
        agent. `why`: as for `Saver.save`."""
        self.membership.awaited_version = version, why
        self.notify("require-commit", {"version": str(version), "why": why})

    # -- what the agent tells

    def _on_message(self, message: messages.Message) -> None:
        if message.kind in FETCH_KINDS and (inbox := self.fetch_inbox) is not None:
            inbox.put(message)
            return
        if (handle := self.handlers.get(message.kind)) is not None:
            handle(message)
        message.close()

    def _on_staging_plan(self, message: messages.Message) -> None:
        if (terms := self.terms) is not None:
            self.slots.on_staging_plan(message, terms.rank, terms.world, terms.coordinate)

    def _on_level(self, message: messages.Message) -> None:
        fields = message.fields
        if not fields.get("repeated"):
            self.agent.note_progress()
        version, text = Version.parse(fields["version"]), str(fields.get("message", ""))
        self.levels.record(version, fields["level"], bool(fields["ok"]), text)

    def _on_known_versions(self, message: messages.Message) -> None:
        known = {Version.parse(str(version)) for version in message.fields["versions"]}
        self.levels.fail_unknown(known, "the agent was lost before it was in the store")
        if (awaited := self.membership.awaited_version) is not None:
            self.announce_wait(*awaited)

    def _on_deadline(self, message: messages.Message) -> None:
        fields, by_s = message.fields, float(message.fields["leave_deadline_s"])
        if message.kind == "end-process":
            self.end_order = EndOrder(str(fields["why"]), bool(fields["wait_for_saves"]), by_s)
        self.on_deadline(by_s)

    def _on_event(self, message: messages.Message) -> None:
        fields = message.fields
        told, data = (str(fields["name"]), str(fields["message"])), dict(fields.get("data") or {})
        self._events.emit_event(Event(*told, bool(fields.get("loud")), data, by_agent=True))

    def _mark_superseded(self, by: str) -> None:
        """A newer start owns the run. This job leaves at its next step: it needs no other agent."""
        self.superseded_by = by
        self.agent.is_wanted = False
        self.levels.fail_all(f"a newer start owns the run now: {by}")

    def _on_lost(self, why: str) -> None:
        self.view.drop_appointments()
        self.slots.forget_plan()
        self.agent.on_lost(why, is_follower=self.terms is not None and self.terms.is_follower)
        if (inbox := self.fetch_inbox) is not None:
            inbox.put(None)
        if not self.agent.is_wanted:
            self.levels.fail_all(f"the agent is gone ({why})")

    # -- the end

    def leave(self, outcome: str, timeout_s: float, **more: Any) -> messages.Message:
        """Tells the agent that this rank leaves, and waits for running saves. From here on the agent's end is expected.
        Errors: as `request`."""
        self.agent.is_wanted = False
        return self.connection.request("leave", {"outcome": outcome, **more}, timeout_s=timeout_s)

    def give_up(self) -> None:
        """Tells the agent that entering has failed, and does not wait."""
        with contextlib.suppress(CkptError):
            self.leave("exception", 0.0)

    def close(self) -> None:
        """Ends the connection, and releases the arenas and control pages."""
        self.agent.is_wanted = False
        self.agent.drop()
        self.slots.close()
        self.view.close()

    def abandon_in_child(self) -> None:
        """In a forked child: closes what would keep the socket and the arenas alive."""
        self.agent.abandon_in_child()
        self.view.abandon_in_child()
        self.slots.abandon_in_child()

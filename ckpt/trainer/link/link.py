"""The trainer's link to its agent: what it tells the agent, what the agent tells it, and how it gets another agent.

Guarantees:
- The step path reads a few words of shared memory and never waits for the agent.
- When the agent dies, nothing is appointed until another one serves. The first trainer that notices starts it. The
  arenas are handed over to the new agent as empty slots.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

from ckpt.errors import AgentError, CkptError, NoCoordinator, Superseded
from ckpt.events import Event, Events
from ckpt.format.declaration import encode_layout
from ckpt.ipc import agent_process, client, messages
from ckpt.ipc.addresses import Address
from ckpt.ipc.control_page import SLOTS_MAX, ControlPage, ControlWord, RankPlace
from ckpt.ipc.failure_domains import find_own_domains
from ckpt.ipc.node_list import coordinator_of, encode_nodes
from ckpt.ipc.notice_sources import Sources
from ckpt.settings import Settings, store_environment
from ckpt.threads import Tasks
from ckpt.trainer.link.levels import Levels
from ckpt.trainer.link.slots import Plan, Slots, StateOffer, mark_differing_hashes
from ckpt.types import Epoch, Identity, Version

RECONNECT_TRIES = 20
CUT_OFF_S_MAX = 600.0  # how long this node's agent may be cut off from rank 0's before saving is given up
FAILED_RESTARTS_MAX = 8  # agents are given up after so many deaths in a row without progress
SERVED_S = 60.0  # an agent that has served for so long counts as progress, even if nothing was saved
_NOTHING_APPOINTED = memoryview(bytearray(8 * SLOTS_MAX)).cast("Q")


@dataclass(frozen=True, slots=True)
class JoinTerms:
    """What this rank tells each agent that it joins. `peers`: the addresses of memory-only nodes. `nodes`: see
    `Link.listen`; empty if all ranks are on one node, with neither memory-only nodes nor a secret file."""

    epoch: str
    rank: int
    world: int
    coordinate: str
    options: dict[str, Any]
    launch: str
    parent: str | None
    ancestors: list[Any]
    nodes: list[dict[str, Any]]
    peers: list[str]

    @property
    def is_follower(self) -> bool:
        """Whether the coordinator is the agent of another node, that of rank 0."""
        return bool(self.nodes) and self.rank not in self.nodes[0]["ranks"]


@dataclass(frozen=True, slots=True)
class EndOrder:
    """The agent's message that no further boundary can be expected: end the process where it is.
    `is_after_saves`: first wait for running saves. `deadline_s`: on the monotonic clock."""

    reason: str
    is_after_saves: bool
    deadline_s: float


@dataclass(slots=True)
class Link:
    """One rank's end of the connection. `bind`, `unbind`: see Slots. `wait_for_copies()` returns once no snapshot is
    being written. All three come from the snapshot side."""

    url: str
    settings: Settings
    events: Events
    tasks: Tasks
    bind: InitVar[Callable[[int, Plan, memoryview], None]]
    unbind: InitVar[Callable[[int, memoryview], None]]
    wait_for_copies: Callable[[], None]
    levels: Levels = field(default_factory=Levels)
    control_words: memoryview = _NOTHING_APPOINTED
    superseded_by: str | None = None
    end_order: EndOrder | None = None
    # A deadline came, maybe with an `end_order`.
    on_deadline: Callable[[float], None] = lambda by_s: None
    on_late: Callable[[int, int], None] = lambda attempt, step: None  # see Saver.report_late
    slots: Slots = field(init=False)
    fetch_inbox: queue.SimpleQueue[messages.Message | None] | None = None
    terms: JoinTerms | None = None
    agent_restarts: int = 0
    _failed_restarts: int = 0  # restarts of the agent since it last reported on a checkpoint, or served for long
    _connected_since_s: float = 0.0  # since when the present agent is connected
    _lost_incarnation: str = ""  # the incarnation of the agent that was lost last; it may still live
    _connection: client.Connection | None = None
    _listen_request: dict[str, Any] | None = None  # the fields of the last `listen` request
    _control_page: ControlPage | None = None
    _old_control_pages: list[ControlPage] = field(default_factory=list)
    _position: tuple[int, int] = (0, 0)
    _awaited_version: tuple[Version, str] | None = None  # the version that somebody waits for in the store, and why
    _unsavable: dict[str, str] | None = None  # the newest save that this rank cannot do, or has given up
    _last_boundary: tuple[int, int, list[int]] = (0, 0, [])  # the last boundary, and the control words seen there
    _standing_notices: tuple[float, list[dict[str, Any]]] = (0.0, [])  # when they were told, and the notices
    _leave_attempt: int = 0  # the save attempt after which an agent that has died told the ranks to leave
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _is_closed: bool = False
    _has_given_up: bool = False
    _is_reconnecting: bool = False

    def __post_init__(
        self, bind: Callable[[int, Plan, memoryview], None], unbind: Callable[[int, memoryview], None]
    ) -> None:
        self.slots = Slots(self.events, self.tasks, bind, unbind, self.notify)

    # -- entering

    def connect(self) -> None:
        """Connects to this node's agent, and starts one if there is none. Errors: AgentError."""
        self.slots.training_running.set()
        say = self._on_message, self._on_lost
        self._connection = agent_process.connect_or_replace(self.url, self.settings, self.tasks, self.events, *say)

    @property
    def connection(self) -> client.Connection:
        """The present connection. Errors: AgentError if there is no agent."""
        if self._connection is None:
            state = "it could not be started again" if self._has_given_up else "it is being started again"
            raise AgentError(f"there is no agent at present; {state}")
        return self._connection

    def listen(self, secret: bytes) -> dict[str, Any]:
        """Has the agent take part in a job of several nodes. Returns this node: its name, addresses, failure domains,
        link speed and host. Errors: AgentError, UsageError."""
        if self.settings.listen:
            Address.parse(self.settings.listen, "CKPT_LISTEN")
        wanted = {"secret": secret, "address": self.settings.listen, "name": ""}
        answer = self.connection.request("listen", wanted).fields
        node = {
            "name": str(answer["name"]),
            "addresses": [str(each) for each in answer["addresses"]],
            "domains": find_own_domains(self.settings.domain),
            "link_bytes_s": int(answer["link_bytes_s"]),
        }
        host = self.settings.listen.rpartition(":")[0] or "0.0.0.0"
        port = str(answer["addresses"][0]).rpartition(":")[2]
        self._listen_request = {**wanted, "address": f"{host}:{port}", "name": node["name"]}
        return node

    def join(self, terms: JoinTerms, offer: StateOffer) -> None:
        """Makes this rank a member of the epoch. Errors: AgentError."""
        self.terms = terms
        self.slots.offer(offer)
        self._join(resume=False)

    def _join(self, resume: bool) -> None:
        terms, offer = self.terms, self.slots.present_offer
        assert terms is not None
        assert offer is not None
        slots = sorted(self.slots.by_number) if resume else []
        fields = {
            **{name: getattr(terms, name) for name in terms.__slots__ if name != "nodes"},
            "coordinator": coordinator_of(terms.nodes),
            "version": str(offer.version),
            "values_bytes": offer.values_bytes,
            "resume": resume,
            "arenas": slots,
            "leave_attempt": self._decided_attempt,
            "standing_notices": self._remaining_notices() if resume else [],
            "notice_sources": Sources.from_settings(self.settings).fields(),
            "store_env": store_environment(),
        }
        answer = self.connection.request(
            "join",
            fields,
            fds=[self.slots.by_number[number].arena.fd for number in slots],
            blobs=[
                encode_layout(offer.layout),
                mark_differing_hashes(offer, self.slots.differing_tensors, terms.rank),
                *([encode_nodes(terms.nodes)] if terms.nodes else []),
            ],
        )
        self._use_control_page(ControlPage(answer.fds.pop()))
        self._publish_position()
        if self._unsavable is not None:
            self.notify("unsavable", self._unsavable)

    def _use_control_page(self, page: ControlPage) -> None:
        with self._lock:
            old, self._control_page = self._control_page, page
            self.control_words = page.control_words
            if old is not None:
                self._leave_attempt = old.leave_attempt() or self._leave_attempt
                # Closed later: the training thread may be reading it.
                self._old_control_pages.append(old)

    def _remaining_notices(self) -> list[dict[str, Any]]:
        """The notices that the agent had heard on this node: the next agent may not hear them again."""
        told_s, notices = self._standing_notices
        gone_s = time.monotonic() - told_s
        return [{**each, "left_s": float(each["left_s"]) - gone_s} for each in notices]

    @property
    def _decided_attempt(self) -> int:
        """The save attempt after which an agent has told this rank to leave; 0: none has."""
        with self._lock:
            return (self._control_page.leave_attempt() if self._control_page is not None else 0) or self._leave_attempt

    # -- what the step path needs

    def enter(self, step: int, sub: int = 0) -> None:
        """Shows on the control page that this rank is in `step`, and how often it has polled or saved since the step
        before."""
        self._position = step, sub
        page = self._control_page
        if page is not None and self.terms is not None:
            page.publish_step(self.terms.rank, step, sub)

    @contextlib.contextmanager
    def training_paused(self) -> Iterator[None]:
        """In the block, while training stands still for a copy or a restore, threads that prepare other arenas pause,
        here and in the agent: they would take half of the memory bandwidth."""
        page, terms = self._control_page, self.terms
        self.slots.training_running.clear()
        try:
            if page is not None and terms is not None:
                page.publish_copying(terms.rank, True)
            yield
        finally:
            if page is not None and terms is not None:
                page.publish_copying(terms.rank, False)
            self.slots.training_running.set()

    def read_control_words(self, step: int, sub: int) -> list[int]:
        """The control words at that boundary, after `enter`."""
        words: list[int] = self.control_words.tolist()
        self._last_boundary = step, sub, words
        return words

    def _on_hold_awaited(self, word: int) -> None:
        """Other ranks hold at that appointment. If this rank is past it and has not seen it, it answers that it is
        late."""
        step, sub, seen = self._last_boundary
        told = ControlWord.unpack(word)
        if told is not None and word not in seen and told.place_for(step, sub) is not RankPlace.EARLY:
            self.on_late(told.attempt_number, told.step)

    def _publish_position(self) -> None:
        """Shows this rank's position on the page of a new agent. It may not come to another step, where the other ranks
        wait for that agent. The training thread may enter a step meanwhile, so this repeats until the position stands.
        """
        page, terms, told = self._control_page, self.terms, (0, 0)
        while page is not None and terms is not None and told != self._position:
            told = self._position
            page.publish_step(terms.rank, *told)

    def offer(self, offer: StateOffer) -> None:
        """Tells the agent of another structure, or other replicas. No slot is warm for it until the agent has divided
        it."""
        self.slots.offer(offer)
        told = {"version": str(offer.version), "values_bytes": offer.values_bytes}
        self.notify("layout", told, blobs=[encode_layout(offer.layout), offer.hashes])

    def report_unsavable(self, version: Version, why: str) -> None:
        """Says that this rank does not come to that save, or has stopped waiting for it: the other ranks must not wait
        for it. A later agent is told as well."""
        self._unsavable = {"version": str(version), "why": why[:1000]}
        self.notify("unsavable", self._unsavable)

    def request(
        self, kind: str, fields: dict[str, Any], timeout_s: float | None, blobs: Sequence[bytes] = ()
    ) -> messages.Message:
        """Sends a request and returns the answer. Errors: AgentError; the error with which the agent answers."""
        return self.connection.request(kind, fields, blobs=blobs, timeout_s=timeout_s)

    def start_request(self, kind: str, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> client.Pending:
        """As `request`, but returns at once; the caller waits for the pending answer."""
        return self.connection.start_request(kind, fields, blobs=blobs)

    def leave(self, outcome: str, timeout_s: float, **more: Any) -> messages.Message:
        """Tells the agent that this rank leaves, and waits for running saves. From here on the agent's end is expected.
        Errors: as `request`."""
        with self._lock:
            self._is_closed = True
        return self.connection.request("leave", {"outcome": outcome, **more}, timeout_s=timeout_s)

    def leave_after_notice(
        self, why: str, until_s: float, by_s: float, notices: list[str], save_again: Callable[[float], None]
    ) -> messages.Message:
        """As `leave`, because of a notice: the machine may be gone soon, so nobody comes later for what is staged. If
        the agent dies meanwhile another one is started, and `save_again(until_s)` is called.
        `why`: why the process is ended; "" if it leaves in order. `until_s`: how long to wait; `by_s`: the deadline;
        both on the monotonic clock. `notices`: those that came here.
        Errors: as `request`; AgentError too if no other agent can be had."""
        while True:
            connection, now_s = self._connection, time.monotonic()
            newest = self.levels.newest("store")
            committed = str(newest) if newest is not None else None
            told = {"why": why, "left_s": by_s - now_s, "committed": committed, "notices": notices}
            try:
                return self.leave("notice", max(0.0, until_s - now_s), **told)
            except AgentError as exc:
                if (connection is not None and connection.is_open) or time.monotonic() >= until_s:
                    # The agent lives, and is too slow or refuses.
                    raise
                self._reconnect_to_leave(until_s, exc)
                save_again(until_s)

    def give_up(self) -> None:
        """Tells the agent that entering has failed, and does not wait."""
        with contextlib.suppress(CkptError):
            self.leave("exception", 0.0)

    def has_leave_verdict(self, attempt: int) -> bool:
        """Whether the agent, dead or alive, has decided that the ranks leave after that save attempt."""
        return attempt == self._decided_attempt

    def announce_wait(self, version: Version, why: str) -> None:
        """Tells the agent that somebody waits for that version to reach the store. It is a hint, repeated to the next
        agent. `why`: as for `Saver.save`."""
        self._awaited_version = version, why
        self.notify("require-commit", {"version": str(version), "why": why})

    def notify(self, kind: str, fields: dict[str, Any], blobs: list[bytes] | None = None) -> None:
        """Sends a message. If the agent dies the message is lost. The next agent counts a version as missed of which
        `snapshot-staged` and `snapshot-missed` were lost."""
        connection = self._connection
        if connection is not None:
            # `_on_lost` handles the loss of the agent.
            with contextlib.suppress(AgentError):
                connection.notify(kind, fields, blobs=blobs or [])

    # -- what the agent says

    def _on_message(self, message: messages.Message) -> None:
        fields = message.fields
        if message.kind in ("frame-region", "frame-places", "frame-stream", "frame-files", "progress", "fetch-ended"):
            if self.fetch_inbox is not None:
                self.fetch_inbox.put(message)
                return
        elif message.kind == "staging-plan":
            if (terms := self.terms) is not None:
                self.slots.on_staging_plan(message, terms.rank, terms.world, terms.coordinate)
        elif message.kind == "grant-arena":
            self.slots.on_grant_arena(message)
        elif message.kind == "close-arena":
            self.slots.on_close_arena(message)
        elif message.kind == "checkpoint-level":
            self._failed_restarts = self._failed_restarts if fields.get("repeated") else 0
            version, text = Version.parse(fields["version"]), str(fields.get("message", ""))
            self.levels.record(version, fields["level"], bool(fields["ok"]), text)
        elif message.kind == "superseded":
            self.superseded_by = str(fields.get("by", "a newer start"))
            self.levels.fail_all(f"a newer start owns the run now: {self.superseded_by}")
        elif message.kind == "standing-notices":
            self._standing_notices = time.monotonic(), list(fields["notices"])
        elif message.kind in ("end-process", "leave-deadline"):
            by_s = float(fields["leave_deadline_s"])
            if message.kind == "end-process":
                self.end_order = EndOrder(str(fields["why"]), bool(fields["wait_for_saves"]), by_s)
            self.on_deadline(by_s)
        elif message.kind == "hold-awaited":
            self._on_hold_awaited(int(fields["word"]))
        elif message.kind == "known-versions":
            known = {Version.parse(str(version)) for version in fields["versions"]}
            self.levels.fail_unknown(known, "the agent was lost before it was in the store")
            if self._awaited_version is not None:
                self.announce_wait(*self._awaited_version)
        elif message.kind == "event":
            told, data = (str(fields["name"]), str(fields["message"])), dict(fields.get("data") or {})
            self.events.emit_event(Event(*told, bool(fields.get("loud")), data, by_agent=True))
        message.close()

    # -- the agent's death

    @property
    def is_rejoined(self) -> bool:
        """Whether an agent is connected that knows this rank."""
        with self._lock:
            return self._connection is not None and self._connection.is_open and not self._is_reconnecting

    @property
    def has_agent(self) -> bool:
        """Whether an agent is connected, even one that knows nothing of this rank."""
        connection = self._connection
        return connection is not None and connection.is_open

    @property
    def is_given_up(self) -> bool:
        """Whether no agent will be connected again."""
        return self._has_given_up or self._is_closed or self.superseded_by is not None

    def _on_lost(self, why: str) -> None:
        with self._lock:
            self.control_words = _NOTHING_APPOINTED
            if self._connection is not None and not self._is_reconnecting:
                self._lost_incarnation = self._connection.incarnation
            self._connection = None
            self.slots.forget_plan()
            # A superseded job leaves at its next step: it needs no other agent.
            restart = not (
                self._is_closed or self._is_reconnecting or self.terms is None or self.superseded_by is not None
            )
            self._is_reconnecting = self._is_reconnecting or restart
            if restart and time.monotonic() >= self._connected_since_s + SERVED_S:
                self._failed_restarts = 0
        if self.fetch_inbox is not None:
            self.fetch_inbox.put(None)
        if self._is_closed or self.superseded_by is not None:
            self.levels.fail_all(f"the agent is gone ({why})")
        if restart:
            text = f"the agent is gone ({why}); starting it again"
            # An agent also closes the connection when it has lost rank 0's agent.
            if self.terms is not None and self.terms.is_follower:
                text = f"the agent is gone, or cut off from that of rank 0's node ({why}); connecting again"
            self.events.emit("agent.lost", f"ckpt: {text}. Training goes on", loud=True)
            self.tasks.start("reconnect", self._reconnect)

    def _reconnect(self) -> None:
        """Connects to another agent. Only one such thread runs at a time: two would take each other's place at the
        agent for ever. It ends when this rank leaves."""
        self.wait_for_copies()
        self._failed_restarts += 1
        delay_s = 0.05 * 2 ** (self._failed_restarts - 1)
        if self._failed_restarts > 1:
            self.tasks.stopping.wait(min(delay_s, 10.0))
        tries = RECONNECT_TRIES if self._failed_restarts <= FAILED_RESTARTS_MAX else 0
        until_s = time.monotonic() + CUT_OFF_S_MAX
        while tries:
            tries -= 1
            if self._is_closed or self.superseded_by is not None or self.tasks.stopping.is_set():
                break
            try:
                self._rejoin()
            except (CkptError, OSError) as exc:
                what = "serves no rank" if isinstance(exc, NoCoordinator) else "could not be started again"
                self.events.emit("agent.restart_failed", f"ckpt: the agent {what} yet: {exc}")
                self._drop_connection()
                tries += isinstance(exc, NoCoordinator) and time.monotonic() < until_s
                self.tasks.stopping.wait(delay_s)
                delay_s = min(10.0, 2 * delay_s)
                continue
            with self._lock:
                connection = self._connection
                if connection is None or not connection.is_open:
                    # The agent is gone again, and `_on_lost` has left it to this thread.
                    continue
                self._is_reconnecting, self._connected_since_s = False, time.monotonic()
            self.agent_restarts += 1
            how = "is the same as before" if connection.incarnation == self._lost_incarnation else "was started again"
            self.events.emit("agent.restarted", f"ckpt: the agent {how} and has the arenas", loud=True)
            return
        with self._lock:
            self._is_reconnecting = False
            self._has_given_up = True
        self.levels.fail_all("the agent could not be started again")
        if not self._is_closed:
            text = "ckpt: the agent, which saves for this job, could not be started again. This job saves nothing more"
            self.events.emit("agent.given_up", f"{text}: start it again", loud=True)

    def _check_awaited_stored(self) -> None:
        """Looks whether a version that somebody waits for is in the store, before an agent is joined that may know
        nothing of it: the agent that stored the version may be dead."""
        wanted, terms, connection = self._awaited_version, self.terms, self._connection
        if wanted is None or terms is None or connection is None or self.levels.level(wanted[0]) == "store":
            return
        version, _ = wanted
        with contextlib.suppress(CkptError):
            identity = Identity(Epoch.parse(terms.epoch), version)
            if connection.request("is-stored", {"identity": str(identity)}).fields["stored"]:
                self.levels.record(version, "store", True)

    def _rejoin(self) -> None:
        self.connect()
        # The same address and name, by which the other nodes know this one.
        if self._listen_request is not None:
            self.connection.request("listen", self._listen_request)
        self._check_awaited_stored()
        self._join(resume=True)

    def _reconnect_to_leave(self, until_s: float, why: AgentError) -> None:
        """Connects to another agent for a rank that leaves. Errors: AgentError if there is none by then; Superseded."""
        text = f"ckpt: the agent is gone ({why}); starting it again, so that the last step is saved"
        self.events.emit("agent.lost", text, loud=True)
        delay_s = 0.05
        for _ in range(RECONNECT_TRIES):
            try:
                # Else the reconnecting thread is about to see that this rank leaves, and ends.
                if not self._is_reconnecting:
                    if not self.is_rejoined:
                        self._rejoin()
                        self.agent_restarts += 1
                    return
            except Superseded:
                raise
            except (CkptError, OSError) as exc:
                self.events.emit("agent.restart_failed", f"ckpt: the agent could not be started again yet: {exc}")
                self._drop_connection()
            if time.monotonic() + delay_s >= until_s or self.tasks.stopping.wait(delay_s):
                break
            delay_s = min(10.0, 2 * delay_s)
        raise AgentError("the agent is gone, and none could be started again before the end")

    # -- the end

    def _drop_connection(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.close()
            self._connection = None

    def close(self) -> None:
        """Ends the connection, and releases the arenas and control pages."""
        with self._lock:
            self._is_closed = True
            self.control_words = _NOTHING_APPOINTED
        self._drop_connection()
        self.slots.close()
        for page in (*self._old_control_pages, *([self._control_page] if self._control_page is not None else [])):
            page.close()
        self._old_control_pages.clear()
        self._control_page = None

    def abandon_in_child(self) -> None:
        """In a forked child: closes what would keep the socket and the arenas alive."""
        self._is_closed = True
        self.control_words = _NOTHING_APPOINTED
        self._control_page = None
        if self._connection is not None:
            self._connection.abandon_in_child()
        self.slots.abandon_in_child()

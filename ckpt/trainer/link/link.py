"""The trainer's link to its agent: what it tells the agent, what the agent tells it, and how it gets another agent.

Guarantees:
- The step path reads a few words of shared memory and never waits for the agent.
- When the agent dies, nothing is appointed until another one serves. The first trainer that notices starts it. The
  arenas are handed over to the new agent, and what they hold is not lost.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

from ckpt.errors import AgentError, CkptError, NotLed, Superseded
from ckpt.events import Event, Events
from ckpt.format.declaration import encode_layout
from ckpt.ipc import agent_process, client, messages
from ckpt.ipc.addresses import Address
from ckpt.ipc.control_page import SLOTS_MAX, ControlPage, ControlWord, RankPlace
from ckpt.ipc.failure_domains import domains_here
from ckpt.ipc.node_list import encode_nodes, leader_of
from ckpt.ipc.notice_sources import Sources
from ckpt.settings import Settings, store_environment
from ckpt.threads import Tasks
from ckpt.trainer.link.levels import Levels
from ckpt.trainer.link.slots import Plan, Slots, StateOffer, hashes_but
from ckpt.types import Epoch, Identity, Tick

RECONNECT_TRIES = 20
AWAY_S = 600.0  # how long this node's agent may be cut off from rank 0's before saving is given up
RESTARTS_IN_VAIN = 8  # agents are given up after so many deaths in a row without progress
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
    def is_led(self) -> bool:
        """Whether the coordinator is the agent of another node, that of rank 0."""
        return bool(self.nodes) and self.rank not in self.nodes[0]["ranks"]


@dataclass(frozen=True, slots=True)
class End:
    """The agent's message that no further boundary can be expected: end the process where it is. `wait`: first wait for
    running saves. `by_s`: the deadline, on the monotonic clock."""

    why: str
    wait: bool
    by_s: float


@dataclass(slots=True)
class Link:
    """One rank's end of the connection. `bind`, `unbind`: see Slots. `quiet()` returns once no snapshot is being
    written. All three come from the snapshot side."""

    url: str
    settings: Settings
    events: Events
    tasks: Tasks
    bind: InitVar[Callable[[int, Plan, memoryview], None]]
    unbind: InitVar[Callable[[int, memoryview], None]]
    quiet: Callable[[], None]
    levels: Levels = field(default_factory=Levels)
    words: memoryview = _NOTHING_APPOINTED
    superseded_by: str | None = None
    end: End | None = None
    on_end: Callable[[End], None] = lambda end: None
    on_leave_by: Callable[[float], None] = lambda by_s: None
    on_late: Callable[[int, int], None] = lambda round_, step: None  # see Saver.late
    slots: Slots = field(init=False)
    fetching: queue.SimpleQueue[messages.Message | None] | None = None
    terms: JoinTerms | None = None
    restarts: int = 0
    _in_vain: int = 0  # restarts of the agent since it last reported on a checkpoint, or served for long
    _back_s: float = 0.0  # since when the present agent is connected
    _left: str = ""  # the incarnation of the agent that was lost last; it may still live
    _connection: client.Connection | None = None
    _listening: dict[str, Any] | None = None  # the fields of the last `listen` request
    _page: ControlPage | None = None
    _old_pages: list[ControlPage] = field(default_factory=list)
    _entered: tuple[int, int] = (0, 0)
    _wanted: tuple[Tick, str] | None = None  # the version that somebody waits for in the store, and why
    _gave_up: dict[str, str] | None = None  # the newest save that this rank cannot do, or has given up
    _looked: tuple[int, int, list[int]] = (0, 0, [])  # the last boundary, and the control words seen there
    _standing: tuple[float, list[dict[str, Any]]] = (0.0, [])  # when the notices below were told, and the notices
    _left_by: int = 0  # the save attempt after which an agent that has died told the ranks to leave
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _closed: bool = False
    _given_up: bool = False
    _reconnecting: bool = False

    def __post_init__(
        self, bind: Callable[[int, Plan, memoryview], None], unbind: Callable[[int, memoryview], None]
    ) -> None:
        self.slots = Slots(self.events, self.tasks, bind, unbind, self._notify)

    # -- entering

    def connect(self) -> None:
        """Connects to this node's agent, and starts one if there is none. Errors: AgentError."""
        self.slots.calm.set()
        say = self._on_message, self._on_lost
        self._connection = agent_process.meet(self.url, self.settings, self.tasks, self.events, *say)

    @property
    def connection(self) -> client.Connection:
        """The present connection. Errors: AgentError if there is no agent."""
        if self._connection is None:
            state = "it could not be started again" if self._given_up else "it is being started again"
            raise AgentError(f"there is no agent at present; {state}")
        return self._connection

    @property
    def agent(self) -> str:
        """The incarnation of the connected agent. Errors: AgentError."""
        return self.connection.incarnation

    @property
    def secret(self) -> list[Any] | None:
        """What the agent knows of earlier starts on several nodes: the newest epoch, and the run's secret."""
        return self.connection.secret

    def listen(self, secret: bytes) -> dict[str, Any]:
        """Has the agent take part in a job of several nodes. Returns this node: its name, addresses, failure domains,
        link speed and host. Errors: AgentError, UsageError."""
        if self.settings.listen:
            Address.parse(self.settings.listen, "CKPT_LISTEN")
        wanted = {"secret": secret, "at": self.settings.listen, "name": ""}
        answer = self.connection.request("listen", wanted).fields
        node = {
            "name": str(answer["name"]),
            "addresses": [str(each) for each in answer["addresses"]],
            "domains": domains_here(self.settings.domain),
            "link_bytes_s": int(answer["link_bytes_s"]),
            "host": socket.gethostname(),
        }
        host = self.settings.listen.rpartition(":")[0] or "0.0.0.0"
        port = str(answer["addresses"][0]).rpartition(":")[2]
        self._listening = {**wanted, "at": f"{host}:{port}", "name": node["name"]}
        return node

    def join(self, terms: JoinTerms, offer: StateOffer) -> None:
        """Makes this rank a member of the epoch. Errors: AgentError."""
        self.terms = terms
        self.slots.offer(offer)
        self._join(resume=False)

    def _join(self, resume: bool) -> None:
        terms, offer = self.terms, self.slots.offered
        assert terms is not None
        assert offer is not None
        slots = sorted(self.slots.by_number) if resume else []
        fields = {
            **{name: getattr(terms, name) for name in terms.__slots__ if name != "nodes"},
            "leader": leader_of(terms.nodes),
            "tick": str(offer.tick),
            "values_bytes": offer.values_bytes,
            "resume": resume,
            "arenas": slots,
            "verdict": self._verdict,
            "standing": self._still_standing() if resume else [],
            "notices": Sources.of(self.settings).fields(),
            "store_env": store_environment(),
        }
        answer = self.connection.request(
            "join",
            fields,
            fds=[self.slots.by_number[number].arena.fd for number in slots],
            blobs=[
                encode_layout(offer.layout),
                hashes_but(offer, self.slots.differing, terms.rank),
                *([encode_nodes(terms.nodes)] if terms.nodes else []),
            ],
        )
        self._turn_to(ControlPage(answer.fds.pop()))
        self._publish()
        if self._gave_up is not None:
            self._notify("unsavable", self._gave_up)

    def _turn_to(self, page: ControlPage) -> None:
        with self._lock:
            old, self._page = self._page, page
            self.words = page.words
            if old is not None:
                self._left_by = old.leaves() or self._left_by
                # Closed later: the training thread may be reading it.
                self._old_pages.append(old)

    def _still_standing(self) -> list[dict[str, Any]]:
        """The notices that the agent had heard on this node: the next agent may not hear them again."""
        told_s, notices = self._standing
        gone_s = time.monotonic() - told_s
        return [{**each, "left_s": float(each["left_s"]) - gone_s} for each in notices]

    @property
    def _verdict(self) -> int:
        """The save attempt after which an agent has told this rank to leave; 0: none has."""
        with self._lock:
            return (self._page.leaves() if self._page is not None else 0) or self._left_by

    # -- what the step path needs

    def enter(self, step: int, sub: int = 0) -> None:
        """Shows on the control page that this rank is in `step`, and how often it has polled or saved since the step
        before."""
        self._entered = step, sub
        page = self._page
        if page is not None and self.terms is not None:
            page.enter(self.terms.rank, step, sub)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """In the block, while training stands still for a copy or a restore, threads that prepare other arenas pause,
        here and in the agent: they would take half of the memory bandwidth."""
        page, terms = self._page, self.terms
        self.slots.calm.clear()
        try:
            if page is not None and terms is not None:
                page.copy(terms.rank, True)
            yield
        finally:
            if page is not None and terms is not None:
                page.copy(terms.rank, False)
            self.slots.calm.set()

    def look(self, step: int, sub: int) -> list[int]:
        """The control words at that boundary, after `enter`."""
        words: list[int] = self.words.tolist()
        self._looked = step, sub, words
        return words

    def _awaited(self, word: int) -> None:
        """Other ranks hold at that appointment. If this rank is past it and has not seen it, it answers that it is
        late."""
        step, sub, seen = self._looked
        told = ControlWord.unpack(word)
        if told is not None and word not in seen and told.place(step, sub) is not RankPlace.EARLY:
            self.on_late(told.round, told.step)

    def _publish(self) -> None:
        """Shows this rank's position on the page of a new agent. It may not come to another step, where the other ranks
        wait for that agent. The training thread may enter a step meanwhile, so this repeats until the position stands.
        """
        page, terms, told = self._page, self.terms, (0, 0)
        while page is not None and terms is not None and told != self._entered:
            told = self._entered
            page.enter(terms.rank, *told)

    def offer(self, offer: StateOffer) -> None:
        """Tells the agent of another structure, or other replicas. No slot is warm for it until the agent has divided
        it."""
        self.slots.offer(offer)
        self._notify(
            "layout",
            {"tick": str(offer.tick), "values_bytes": offer.values_bytes},
            blobs=[encode_layout(offer.layout), offer.hashes],
        )

    def report(self, kind: str, fields: dict[str, Any]) -> None:
        """Sends `staged` or `missed`. If the agent dies the message is lost, and the next agent counts the version as
        missed."""
        self._notify(kind, fields)

    def cannot_save(self, tick: Tick, why: str) -> None:
        """Says that this rank does not come to that save, or has stopped waiting for it: the other ranks must not wait
        for it. A later agent is told as well."""
        self._gave_up = {"tick": str(tick), "why": why[:1000]}
        self._notify("unsavable", self._gave_up)

    def request(
        self, kind: str, fields: dict[str, Any], timeout_s: float | None, blobs: Sequence[bytes] = ()
    ) -> messages.Message:
        """Sends a request and returns the answer. Errors: AgentError; the error with which the agent answers."""
        return self.connection.request(kind, fields, blobs=blobs, timeout_s=timeout_s)

    def ask(self, kind: str, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> client.Pending:
        """As `request`, but returns at once; the caller waits for the pending answer."""
        return self.connection.ask(kind, fields, blobs=blobs)

    def leave(self, outcome: str, timeout_s: float, **more: Any) -> messages.Message:
        """Tells the agent that this rank leaves, and waits for running saves. From here on the agent's end is expected.
        Errors: as `request`."""
        with self._lock:
            self._closed = True
        return self.connection.request("leave", {"outcome": outcome, **more}, timeout_s=timeout_s)

    def leave_saved(self, why: str, until_s: float, by_s: float, notices: list[str]) -> messages.Message:
        """As `leave`, because of a notice: the machine may be gone soon, so nobody comes later for what is staged. If
        the agent dies meanwhile another one is started, gets the arenas, and saves what they hold.
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
                self._find_agent(until_s, exc)

    def give_up(self) -> None:
        """Tells the agent that entering has failed, and does not wait."""
        with contextlib.suppress(CkptError):
            self.leave("exception", 0.0)

    def is_verdict(self, round_: int) -> bool:
        """Whether the agent, dead or alive, has decided that the ranks leave after that save attempt."""
        with self._lock:
            return round_ in (self._left_by, self._page.leaves() if self._page is not None else 0)

    def want(self, tick: Tick, why: str) -> None:
        """Tells the agent that somebody waits for that version to reach the store. It is a hint, repeated to the next
        agent. `why`: as for `Saver.save`."""
        self._wanted = tick, why
        self._notify("wanted", {"tick": str(tick), "why": why})

    def _notify(self, kind: str, fields: dict[str, Any], blobs: list[bytes] | None = None) -> None:
        connection = self._connection
        if connection is not None:
            # `_on_lost` handles the loss of the agent.
            with contextlib.suppress(AgentError):
                connection.notify(kind, fields, blobs=blobs or [])

    # -- what the agent says

    def _on_message(self, message: messages.Message) -> None:
        fields = message.fields
        if message.kind in ("region", "frames", "stream", "files", "moving", "fetched"):
            if self.fetching is not None:
                self.fetching.put(message)
                return
        elif message.kind == "plan":
            if (terms := self.terms) is not None:
                self.slots.on_plan(message, terms.rank, terms.world, terms.coordinate)
        elif message.kind == "arena":
            self.slots.on_arena(message)
        elif message.kind == "close-arena":
            self.slots.on_close_arena(message)
        elif message.kind == "level":
            self._in_vain = self._in_vain if fields.get("again") else 0
            self.levels.put(
                Tick.parse(fields["tick"]), fields["level"], bool(fields["ok"]), str(fields.get("message", ""))
            )
        elif message.kind == "superseded":
            self.superseded_by = str(fields.get("by", "a newer start"))
            self.levels.fail_all(f"a newer start owns the run now: {self.superseded_by}")
        elif message.kind == "standing":
            self._standing = time.monotonic(), list(fields["notices"])
        elif message.kind == "end":
            self.end = End(str(fields["why"]), bool(fields["wait"]), float(fields["by_s"]))
            self.on_end(self.end)
        elif message.kind == "leave-by":
            self.on_leave_by(float(fields["by_s"]))
        elif message.kind == "awaited":
            self._awaited(int(fields["word"]))
        elif message.kind == "recovered":
            known = {Tick.parse(str(tick)) for tick in fields["ticks"]}
            self.levels.fail_unknown(known, "the agent was lost before all ranks had staged it")
            # Repeated only now: before the recovery the new agent would not know the version.
            if self._wanted is not None:
                self.want(*self._wanted)
        elif message.kind == "event":
            told, data = (str(fields["name"]), str(fields["message"])), dict(fields.get("data") or {})
            self.events.tell(Event(*told, bool(fields.get("loud")), data, by_agent=True))
        message.close()

    # -- the agent's death

    @property
    def is_back(self) -> bool:
        """Whether an agent is connected that knows this rank."""
        with self._lock:
            return self._connection is not None and self._connection.is_open and not self._reconnecting

    @property
    def has_agent(self) -> bool:
        """Whether an agent is connected, even one that knows nothing of this rank."""
        connection = self._connection
        return connection is not None and connection.is_open

    @property
    def is_given_up(self) -> bool:
        """Whether no agent will be connected again."""
        return self._given_up or self._closed or self.superseded_by is not None

    def _on_lost(self, why: str) -> None:
        with self._lock:
            self.words = _NOTHING_APPOINTED
            if self._connection is not None and not self._reconnecting:
                self._left = self._connection.incarnation
            self._connection = None
            self.slots.forget_plan()
            # A superseded job leaves at its next step: it needs no other agent.
            restart = not (self._closed or self._reconnecting or self.terms is None or self.superseded_by is not None)
            self._reconnecting = self._reconnecting or restart
            if restart and time.monotonic() >= self._back_s + SERVED_S:
                self._in_vain = 0
        if self.fetching is not None:
            self.fetching.put(None)
        if self._closed or self.superseded_by is not None:
            self.levels.fail_all(f"the agent is gone ({why})")
        if restart:
            text = f"the agent is gone ({why}); starting it again"
            # An agent also closes the connection when it has lost rank 0's agent.
            if self.terms is not None and self.terms.is_led:
                text = f"the agent is gone, or cut off from that of rank 0's node ({why}); connecting again"
            self.events.emit("agent.lost", f"ckpt: {text}. Training goes on", loud=True)
            self.tasks.start("reconnect", self._reconnect)

    def _reconnect(self) -> None:
        """Connects to another agent. Only one such thread runs at a time: two would take each other's place at the
        agent for ever. It ends when this rank leaves."""
        self.quiet()
        self._in_vain += 1
        delay_s = 0.05 * 2 ** (self._in_vain - 1)
        if self._in_vain > 1:
            self.tasks.stopping.wait(min(delay_s, 10.0))
        tries, until_s = RECONNECT_TRIES if self._in_vain <= RESTARTS_IN_VAIN else 0, time.monotonic() + AWAY_S
        while tries:
            tries -= 1
            if self._closed or self.superseded_by is not None or self.tasks.stopping.is_set():
                break
            try:
                self._rejoin()
            except (CkptError, OSError) as exc:
                what = "serves no rank" if isinstance(exc, NotLed) else "could not be started again"
                self.events.emit("agent.restart_failed", f"ckpt: the agent {what} yet: {exc}")
                self._look_for_wanted()
                self._drop_connection()
                tries += isinstance(exc, NotLed) and time.monotonic() < until_s
                self.tasks.stopping.wait(delay_s)
                delay_s = min(10.0, 2 * delay_s)
                continue
            with self._lock:
                connection = self._connection
                if connection is None or not connection.is_open:
                    # The agent is gone again, and `_on_lost` has left it to this thread.
                    continue
                self._reconnecting, self._back_s = False, time.monotonic()
            self.restarts += 1
            how = "is the same as before" if connection.incarnation == self._left else "was started again"
            self.events.emit("agent.restarted", f"ckpt: the agent {how} and has the arenas", loud=True)
            self._look_for_wanted()
            return
        with self._lock:
            self._reconnecting = False
            self._given_up = True
        self.levels.fail_all("the agent could not be started again")
        if not self._closed:
            text = "ckpt: the agent, which saves for this job, could not be started again. This job saves nothing more"
            self.events.emit("agent.given_up", f"{text}: start it again", loud=True)

    def _look_for_wanted(self) -> None:
        """Looks whether a version that somebody waits for is in the store, with no process left to report it. The agent
        that stored it may be dead. The next agent knows of it only through the other ranks, and these may have left."""
        wanted, terms, connection = self._wanted, self.terms, self._connection
        if wanted is None or terms is None or connection is None or self.levels.level(wanted[0]) == "store":
            return
        tick, _ = wanted
        with contextlib.suppress(CkptError):
            identity = Identity(Epoch.parse(terms.epoch), tick)
            if connection.request("stored", {"identity": str(identity)}).fields["stored"]:
                self.levels.put(tick, "store", True)

    def _rejoin(self) -> None:
        self.connect()
        # The same address and name, by which the other nodes know this one.
        if self._listening is not None:
            self.connection.request("listen", self._listening)
        self._join(resume=True)

    def _find_agent(self, until_s: float, why: AgentError) -> None:
        """Connects to another agent for a rank that leaves. Errors: AgentError if there is none by then; Superseded."""
        text = f"ckpt: the agent is gone ({why}); starting it again, so that what is staged is saved"
        self.events.emit("agent.lost", text, loud=True)
        delay_s = 0.05
        for _ in range(RECONNECT_TRIES):
            try:
                # Else the reconnecting thread is about to see that this rank leaves, and ends.
                if not self._reconnecting:
                    if not self.is_back:
                        self._rejoin()
                        self.restarts += 1
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
            self._closed = True
            self.words = _NOTHING_APPOINTED
        self._drop_connection()
        self.slots.close()
        for page in (*self._old_pages, *([self._page] if self._page is not None else [])):
            page.close()
        self._old_pages.clear()
        self._page = None

    def abandon_in_child(self) -> None:
        """In a forked child: closes what would keep the socket and the arenas alive."""
        self._closed = True
        self.words = _NOTHING_APPOINTED
        self._page = None
        if self._connection is not None:
            self._connection.abandon_in_child()
        self.slots.abandon_in_child()

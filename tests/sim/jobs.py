"""Jobs in a world: ranks that train in lock-step, find another agent where theirs has died, and leave when told to."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ckpt.errors import AgentError, CkptError, NotStaged
from ckpt.ipc import messages
from ckpt.ipc.control_page import ControlPage, ControlWord, RankPlace, WordKind
from ckpt.preemption.notice import FirstDeadlines, KnownNotices, Notice
from ckpt.preemption.notice import NoticeChange as Told
from ckpt.types import Version
from tests.agent.fake import FakeRank
from tests.sim.agents import Fabric, SimConnection

AWAY_S = 60.0  # so long another agent is looked for
LATER_S = 0.05
ASKED_S = 1.0  # how often a machine's owner is


class SimRank(FakeRank):
    """On a thread of the world. `node`: where it is. What it does where its agent dies is what ckpt.trainer.link.link
    and ckpt.trainer.loop.shutdown do."""

    def __init__(self, fabric: Fabric, node: int, rank: int, world: int, launch: str) -> None:
        super().__init__(fabric.url, rank, world, launch, fabric.settings(node))
        self.inbox = queue.Queue()
        self.node, self.fabric, self.pid = node, fabric, fabric.pid()
        self.reconnecting = False
        self.sub = 0  # polls since the last step
        self.over = self.gone = False  # gone: no agent is to be had any more
        self.on_hold: Callable[[str], None] = lambda what: None  # told when it holds, hears the verdict, asks to leave
        self._left_by = 0  # the round by which an agent that has died told the ranks to leave
        self.offered, self.hashed = (-1, 0), b""

    def hashes(self) -> bytes:
        """Of what it was when its layout was, as all ranks' of that version."""
        if self.offered != (self.layout_step, self.extra):
            self.offered, self.hashed = (self.layout_step, self.extra), super().hashes()
        return self.hashed

    # -- its agent, and another where that dies

    def connect(self) -> None:
        lost = self.lost = threading.Event()
        agent = self.fabric.agent_of(self.node)
        time.sleep(self.fabric.local_delay_s)
        while agent.over:  # it has ended just now
            agent = self.fabric.agent_of(self.node)
        made = SimConnection(agent, self.pid, self.on_message, lambda *_: self.on_lost(lost))
        self.connection = made

    def join(self, epoch: str, resume: bool = False) -> None:
        super().join(epoch, resume)
        self.enter(self.step + 1)

    @property
    def verdict(self) -> int:
        return super().verdict or self._left_by

    def turned_from(self, page: ControlPage) -> None:
        self._left_by = page.leave_attempt() or self._left_by
        super().turned_from(page)

    def on_lost(self, lost: threading.Event) -> None:
        super().on_lost(lost)
        if self.epoch and not (self.over or self.reconnecting):  # two would take each other's place at the agent
            self.reconnecting = True
            self.tasks.start("reconnect", self._reconnect)

    @property
    def is_back(self) -> bool:
        """Whether an agent is there that knows this rank."""
        return self.is_open and not self.reconnecting

    @property
    def is_open(self) -> bool:
        return self.connection is not None and self.connection.is_open and not self.lost.is_set()

    def _reconnect(self) -> None:
        delay_s, until_s = LATER_S, time.monotonic() + AWAY_S
        while not self.over:
            try:
                with self.changed:
                    self.warm.clear()
                self.connect()
                if self.known is not None:
                    self.request("listen", self.known)
                self.join(self.epoch, resume=True)
                if self.over:
                    self._hang_up()
                elif not self.is_open:
                    continue
                self.reconnecting = False
                return
            except ValueError:
                assert self.over, "its page is closed, and it is not over"
                self._hang_up()
            except CkptError:
                self._hang_up()
                if time.monotonic() > until_s:
                    self.gone = True
                    return
                time.sleep(delay_s)
                delay_s = min(10.0, 2 * delay_s)

    def die(self) -> None:
        if not self.over:
            self.over = True
            self.fabric.world.kill(self)
            if self.is_open:
                self.connection.died()

    def _hang_up(self) -> None:
        if self.connection is not None:
            self.connection.close()

    def notify(self, kind: str, fields: dict[str, Any], blobs: Any = ()) -> None:
        """A hint, as ckpt.trainer.link.link sends it."""
        with contextlib.suppress(AgentError):
            super().notify(kind, fields, blobs)

    def on_message(self, message: messages.Message) -> None:
        if message.kind == "hold-awaited":
            word = ControlWord.unpack(int(message.fields["word"]))
            if word and word not in self.answered and word.place_for(self.step, self.sub) is not RankPlace.EARLY:
                self._is_late(word)  # it was not announced yet when this rank was there
        super().on_message(message)

    # -- what a step ends with

    def boundary(self) -> bool:
        """Whether to leave."""
        self.sub = 0
        return self._serve()

    def poll(self) -> bool:
        """The same between two steps."""
        page = self.page
        assert page is not None
        self.sub += 1
        page.publish_step(self.rank, self.step + 1, self.sub)
        return self._serve()

    def _serve(self) -> bool:
        page = self.page
        assert page is not None
        words = page.appointments() if self.is_back else []
        here = [word for word in words if word.place_for(self.step, self.sub) is not RankPlace.EARLY]
        new = [word for word in here if word not in self.answered]
        self.answered = set(here)
        held = [self.keep(word) for word in new]
        return any(held)

    def keep(self, word: ControlWord) -> bool:
        if word.place_for(self.step, self.sub) is RankPlace.LATE:
            self._is_late(word)
            return False
        before = len(self.taken)
        self.take(word.attempt_number, word.slot, Version(self.step, self.sub))
        return word.kind is WordKind.HOLD and len(self.taken) > before and self.hold(word.attempt_number)

    def _is_late(self, word: ControlWord) -> None:
        self.notify(
            "snapshot-staged", {"attempt": word.attempt_number, "version": str(Version(word.step)), "why": "late"}
        )

    def hold(self, attempt: int) -> bool:
        """The verdict: as ckpt.trainer.loop.shutdown asks for it."""
        self.on_hold("holds")
        while True:
            try:
                leave = bool(self.request("rank-holds", {"attempt": attempt}, timeout_s=None).fields["leave"])
                self.on_hold("told")
                return leave
            except AgentError:
                if self._is_verdict(attempt):
                    return True
                while not self.is_back:
                    if self.gone:
                        return len(self.nodes) > 1
                    time.sleep(LATER_S)

    def _is_verdict(self, attempt: int) -> bool:
        return attempt in (self._left_by, super().verdict)

    # -- the end

    def leave_for(self, outcome: str, until_s: float) -> dict[str, Any]:
        """Until it is answered, by whichever agent; nothing where none is to be had any more."""
        while not self.gone:
            told = {"why": "", "left_s": until_s - time.monotonic(), "committed": None} if outcome == "notice" else {}
            self.on_hold("asks")
            try:
                answer = self.request("leave", {"outcome": outcome, **told}, timeout_s=None)
                return dict(answer.fields)
            except AgentError:
                self._find()
                if outcome == "notice" and not self.gone:
                    self.sub += 1
                    with contextlib.suppress(CkptError):
                        self.save(Version(self.step, self.sub), "exit")
        return {}

    def save_last(self) -> None:
        """The last step; again where its agent went away or a snapshot of it was given up."""
        for sub in range(1, 50):
            if self.gone:
                return
            try:
                self.save(Version(self.step, sub), "exit")
                return
            except (AgentError, NotStaged):
                self._find()
            except CkptError:
                return
        raise AssertionError("the last step is not saved")

    def _find(self) -> None:
        while not (self.is_back or self.gone):
            time.sleep(LATER_S)
        time.sleep(LATER_S)


class SimListener:
    """What a machine's owner says to its node; asked now and then, as services are. `stands`: by key."""

    name = "owner"

    def __init__(self, stands: dict[str, Notice], first: FirstDeadlines) -> None:
        self._stands, self._first = stands, first

    def listen(self, stop: threading.Event, tell: Callable[[Told], None]) -> None:
        known = KnownNotices(self.name, tell, self._first)
        while not stop.is_set():
            known.set_standing(list(self._stands.values()))
            stop.wait(ASKED_S)


class SimJob:
    """One start: `spread` is the node of each rank. `left`: by rank, whether it was told to leave, and its last step.
    `answers`: by rank, to its last words."""

    def __init__(
        self, fabric: Fabric, spread: Sequence[int], secret: bytes, options: dict[str, Any], launch: str = "test"
    ) -> None:
        self.fabric, self.secret = fabric, secret
        self.ranks = [SimRank(fabric, node, rank, len(spread), launch) for rank, node in enumerate(spread)]
        self.left: dict[int, tuple[bool, int]] = {}
        self.answers: dict[int, dict[str, Any]] = {}
        self.restored: set[int] = set()
        self.left_s = 0.0  # when the last of them had
        self._meet = threading.Barrier(len(spread))
        self._told: dict[str, dict[str, Any]] = {}
        self._decision: Any = None
        self._entered = 0
        for rank in self.ranks:
            rank.options = options

    @property
    def restored_step(self) -> int:
        """That all have restored."""
        (step,) = self.restored
        return step

    @property
    def trains(self) -> bool:
        """Whether all have entered, and none has come to its end."""
        return self._entered == len(self.ranks) and not self.left

    @property
    def is_over(self) -> bool:
        return len(self.answers) == len(self.ranks)

    def start(
        self,
        steps: int,
        pace: Callable[[SimRank], float],
        polls_s: Callable[[SimRank], Sequence[float]] = lambda rank: (),
    ) -> None:
        """Trains so many steps. `pace`: the seconds of a rank's next one. `polls_s`: of its evaluation before that the
        seconds up to each poll; none: there is no evaluation."""
        world = self.fabric.world
        for rank in self.ranks:
            with world.owned_by(rank):
                world.spawn(f"rank {rank.rank}", lambda rank=rank: self._live(rank, steps, pace, polls_s))

    def die(self, within_s: float) -> None:
        """All of its processes."""
        world = self.fabric.world
        for rank in self.ranks:
            world.at(world.rng.uniform(0.0, within_s), rank.die)

    def _live(
        self, rank: SimRank, steps: int, pace: Callable[[SimRank], float], polls_s: Callable[[SimRank], Sequence[float]]
    ) -> None:
        self._enter(rank)
        last = rank.step + steps
        leave = False
        while rank.step < last and not leave:
            rank.enter(rank.step + 1)
            leave = self._evaluate(rank, polls_s(rank))
            if leave:
                break
            time.sleep(pace(rank))
            self._meet.wait()
            rank.train(rank.step + 1)
            leave = rank.boundary()
            if rank.is_due and not leave:
                rank.save_due()
        self.left[rank.rank] = leave, rank.step
        self.left_s = time.monotonic()
        if not leave:
            rank.save_last()
        self.answers[rank.rank] = rank.leave_for("notice" if leave else "normal", time.monotonic() + 60.0)
        rank.over = True
        rank.close()

    def _evaluate(self, rank: SimRank, polls_s: Sequence[float]) -> bool:
        """Whether to leave."""
        for wait_s in polls_s:
            time.sleep(wait_s)
            if rank.poll():
                return True
        return False

    def _enter(self, rank: SimRank) -> None:
        rank.connect()
        told = rank.listen(self.secret)
        known = self._told.setdefault(told["name"], {**told, "ranks": []})
        known["ranks"].append(rank.rank)
        self._meet.wait()
        known["ranks"].sort()
        rank.nodes = sorted(self._told.values(), key=lambda each: min(each["ranks"])) if len(self._told) > 1 else []
        rank.known = {"secret": self.secret, "address": known["addresses"][0], "name": known["name"]}
        if rank.rank == 0:
            self._decision = rank.begin()
        self._meet.wait()
        rank.join(self._decision.fields["epoch"])
        identity = rank.restore(self._decision)
        rank.check(rank.step)
        self.restored.add(rank.step)
        self._meet.wait()
        rank.branch = int(rank.epoch.split("-")[0])
        if rank.rank == 0:
            rank.request("restored", {"epoch": rank.epoch, "identity": str(identity) if identity else None})
        rank.wait_warm()
        self._meet.wait()
        self._entered += 1

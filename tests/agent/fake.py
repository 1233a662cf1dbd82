"""A trainer without torch: one rank that speaks the whole protocol, with arrays whose bytes follow from the step.

As a class it is a rank on a thread of the test; as a program (`python -m tests.agent.fake JSON`) one in a process of
its own, which can be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.errors import AgentError, CkptError, from_kind
from ckpt.format import values
from ckpt.format.declaration import decode_layout, decode_share, encode, encode_layout
from ckpt.format.frames import frame_hash
from ckpt.format.manifest import VALUES, Manifest
from ckpt.format.record import decode_manifest
from ckpt.ipc import client, messages
from ckpt.ipc.arena import Arena
from ckpt.ipc.control_page import ControlPage, ControlWord, WordKind
from ckpt.ipc.failure_domains import find_own_domains
from ckpt.ipc.file_list import FileList
from ckpt.ipc.node_list import coordinator_of, encode_nodes
from ckpt.ipc.notice_sources import Sources
from ckpt.layout.layout import Declaration, Entry, Layout
from ckpt.layout.reshard import Want, apply_cuts, plan_cuts
from ckpt.layout.staging import stage
from ckpt.settings import Settings, read_settings, store_environment
from ckpt.threads import Flag, Tasks
from ckpt.trainer.loop.due_saves import SavePatience
from ckpt.trainer.restore.file_reads import read_frames as read_files
from ckpt.types import Box, Epoch, Identity, Version

ROWS = 512
DUE_S = 600.0  # how long a save that the policy names may wait for a slot
OPTIONS = {
    "policy": {"steps": 5, "seconds": None},
    "keep": {"last": None, "every": None, "best": None},
    "limits": {"memory": None, "bandwidth": None},
    "codec": "raw",
}


def full(name: str, step: int) -> np.ndarray[Any, Any]:
    """What the tensor of that name holds after `step`: a replicated one, or the whole of a sharded one."""
    base = np.arange(ROWS * 300, dtype=np.float32).reshape(ROWS, 300)
    return base * (1 if name == "replicated" else -1) + np.float32(step)


@dataclass
class Plan:
    declaration: Declaration
    encoded: bytes


class FakeRank:
    """`start` begins or joins an epoch and restores; `steps` trains; `save`, `leave` as a Checkpointer would."""

    def __init__(self, url: str, rank: int, world: int, launch: str = "test", settings: Settings | None = None) -> None:
        self.url, self.rank, self.world, self.launch = url, rank, world, launch
        self.settings = settings or read_settings()
        self.tasks = Tasks(f"fake-{rank}")
        self.first = ROWS * rank // world  # of its rows of what is sharded
        self.rows = ROWS * (rank + 1) // world - self.first
        self.step = 0
        self.branch = 0  # of training: what it holds after a step is another on each
        self.epoch = ""
        self.tensors = {name: self.mine(name, 0) for name in ("replicated", "sharded")}
        self.extra = 0  # a further tensor of this many elements: another layout
        self.layout_step = 0
        self.plan: Plan | None = None
        self.slots: dict[int, Arena] = {}
        self.warm: dict[int, str] = {}
        self.declared: dict[int, tuple[int, int]] = {}
        self.inbox: queue.SimpleQueue[messages.Message | None] = queue.SimpleQueue()
        self.levels: dict[tuple[str, str], tuple[bool, str]] = {}
        self.changed = threading.Condition()
        self.events: list[dict[str, Any]] = []
        self.superseded: str | None = None
        self.lost = threading.Event()
        self.page: ControlPage | None = None
        self.connection: client.Connection | None = None
        self.answered: set[ControlWord] = set()  # at the last boundary; the next agent may give a round the same number
        self.looked: tuple[int, set[ControlWord]] = 0, set()  # that boundary, and these
        self.spoil: Callable[[int, memoryview], bool] = lambda frame, raw: False  # True: report the frame as bad
        self.fetched: dict[str, int] = {}
        self.taken: list[int] = []
        self.patience = SavePatience()
        self.gave_up: dict[str, Any] | None = None  # the newest save that it waits for no longer
        self.options: dict[str, Any] = OPTIONS
        self.notices: dict[str, Any] | None = None  # what its node is to listen to
        self.standing: list[dict[str, Any]] = []  # as its agent said
        self.peers: list[str] = []  # where memory-only nodes listen
        self.parent: str | None = None
        self.ancestors: list[Any] = []
        self.nodes: list[dict[str, Any]] = []  # where the ranks are, if on several nodes
        self.known: dict[str, Any] | None = None  # how a new agent is to listen, where and as whom the others know it

    # -- what it holds

    def mine(self, name: str, step: int) -> np.ndarray[Any, Any]:
        whole = full(name, step) + np.float32(self.branch / 4)
        return whole if name == "replicated" else whole[self.first : self.first + self.rows].copy()

    def box(self, name: str) -> Box:
        return Box.whole((ROWS, 300)) if name == "replicated" else Box((self.first, 0), (self.rows, 300))

    def layout(self) -> Layout:
        entries = [Entry(name, "float32", (ROWS, 300), (self.box(name),)) for name in self.tensors]
        if self.extra:
            entries.append(Entry("extra", "float32", (self.extra,), (Box.whole((self.extra,)),)))
        return Layout(tuple(sorted(entries, key=lambda e: e.name)))

    def array(self, name: str) -> np.ndarray[Any, Any]:
        return np.full(self.extra, self.step, np.float32) if name == "extra" else self.tensors[name]

    def hashes(self) -> bytes:
        rows = [frame_hash(np.ascontiguousarray(self.array(e.name)).data.cast("B")) for e in self.layout().entries]
        return np.array(rows, "<u8").tobytes()

    def train(self, step: int) -> None:
        self.step = step
        for name in self.tensors:
            self.tensors[name] = self.mine(name, step)

    def check(self, step: int) -> None:
        for name, array in self.tensors.items():
            np.testing.assert_array_equal(array, self.mine(name, step))

    # -- entering

    def connect(self) -> None:
        self.lost = threading.Event()
        lost = self.lost
        sock = client.connect(self.url, self.settings)
        self.connection = client.Connection(sock, self.tasks, self.on_message, lambda *_: self.on_lost(lost))

    def disconnect(self) -> None:
        """What that connection's agent granted is nothing to the next one."""
        assert self.connection is not None
        self.connection.close()
        with self.changed:
            self.warm.clear()
            self.plan = None

    def listen(self, secret: bytes) -> dict[str, Any]:
        """Has this node's agent take part in a job of several; how it is told of to the others."""
        answer = self.request("listen", {"secret": secret, "address": self.settings.listen, "name": ""}).fields
        told = {key: answer[key] for key in ("name", "addresses", "link_bytes_s")}
        return {**told, "domains": find_own_domains(self.settings.domain)}

    def nodes_told(self) -> list[bytes]:
        return [encode_nodes(self.nodes)] if self.nodes else []

    def begin(self, take_over: bool = False) -> messages.Message:
        fields: dict[str, Any] = {"launch": self.launch, "world": self.world, "take_over": take_over, "strict": True}
        fields["store_env"] = store_environment()
        if self.nodes:
            fields |= {"coordinator": coordinator_of(self.nodes), "peers": self.peers}
        return self.request("begin", fields, blobs=self.nodes_told())

    def join(self, epoch: str, resume: bool = False) -> None:
        self.epoch = epoch
        slots = sorted(self.slots) if resume else []
        fields = {
            "epoch": epoch,
            "rank": self.rank,
            "world": self.world,
            "coordinate": f"rank={self.rank}",
            "options": self.options,
            "launch": self.launch,
            "parent": self.parent,
            "ancestors": self.ancestors,
            "version": str(Version(self.layout_step)),
            "values_bytes": 100,
            "resume": resume,
            "arenas": slots,
            "standing_notices": self.standing if resume else [],
            "leave_attempt": self.verdict,
            "coordinator": coordinator_of(self.nodes),
            "peers": self.peers,
            "notice_sources": self.notices,
        }
        fds = [self.slots[slot].fd for slot in slots]
        answer = self.request("join", fields, fds, [encode_layout(self.layout()), self.hashes(), *self.nodes_told()])
        page, self.page = self.page, ControlPage(answer.fds.pop())
        if page is not None:
            self.turned_from(page)
        if self.gave_up is not None:
            self.notify("unsavable", self.gave_up)

    @property
    def verdict(self) -> int:
        """The round by which an agent has told this rank to leave; 0: none has."""
        return self.page.leave_attempt() if self.page is not None else 0

    def turned_from(self, page: ControlPage) -> None:
        """That of an agent that has died."""
        page.close()

    def restore(self, decision: messages.Message) -> Identity | None:
        """Fetches the candidate into the tensors. Errors: AgentError; DamagedData when no source has a frame."""
        candidate = decision.fields["candidate"]
        self.parent, self.ancestors = decision.fields["parent"], list(decision.fields["ancestors"])
        if candidate is None:
            return None
        identity = Identity.parse(candidate["identity"])
        manifest = decode_manifest(decision.blobs[0])
        shared = values.decode(self.fetch_shared(identity, manifest))
        self.step, self.branch = int(shared["step"]), int(shared["branch"])
        for name in self.tensors:
            self.tensors[name] = np.zeros_like(self.tensors[name])
        wants = [Want(name, "", "float32", (ROWS, 300), self.box(name)) for name in self.tensors]
        outs = list(self.tensors.values())
        wanted: dict[int, list[Any]] = {}
        for cut in plan_cuts(manifest, wants):
            wanted.setdefault(cut.frame, []).append(cut)

        def deliver(frame: int, raw: memoryview) -> bool:
            if frame_hash(raw) != (int(manifest.frames["hash_hi"][frame]), int(manifest.frames["hash_lo"][frame])):
                return False
            apply_cuts(wanted[frame], frame, np.frombuffer(raw, np.uint8), outs)
            return True

        self.fetch(identity, set(wanted), deliver)
        return identity

    def fetch_shared(self, identity: Identity, manifest: Manifest) -> bytes:
        found: dict[int, bytes] = {}
        boxes = [b for b, (t, _) in enumerate(manifest.boxes) if manifest.tensors[t].name == VALUES]
        frames = {int(e["frame"]) for e in manifest.extents if int(e["box"]) in boxes}

        def deliver(frame: int, raw: memoryview) -> bool:
            found[frame] = bytes(raw)
            return frame_hash(raw) == (int(manifest.frames["hash_hi"][frame]), int(manifest.frames["hash_lo"][frame]))

        self.fetch(identity, frames, deliver)
        return found[min(frames)]

    def fetch(self, identity: Identity, frames: set[int], deliver: Callable[[int, memoryview], bool]) -> None:
        blob = np.array(sorted(frames), "<u4").tobytes()
        self.request("fetch", {"identity": str(identity)}, blobs=[blob])
        regions: dict[int, Arena] = {}
        try:
            while True:
                message = self.inbox.get(timeout=60)
                if message is None:
                    raise AgentError("lost")
                if message.kind == "frame-region":
                    regions[message.fields["region"]] = Arena.adopt(message.fds.pop())
                elif message.kind == "frame-places":
                    good, bad = [], []
                    for frame, region, offset, length in message.fields["places"]:
                        raw = regions[region].view[offset : offset + length]
                        right = not self.spoil(frame, raw) and deliver(frame, raw)
                        (good if right else bad).append(frame)
                    self.tell_got(good, bad)
                elif message.kind == "frame-files":
                    right = lambda frame, raw: not self.spoil(frame, raw) and deliver(frame, raw)  # noqa: E731
                    read_files(FileList.decode(message), right, None, self.tell_got, Flag())
                else:
                    for level, count in message.fields["sources"].items():
                        self.fetched[level] = self.fetched.get(level, 0) + count
                    if not message.fields["ok"]:
                        raise from_kind(message.fields["kind"], message.fields["message"])
                    return
        finally:
            for arena in regions.values():
                arena.close()

    def tell_got(self, good: list[int], bad: list[int]) -> None:
        self.notify("frames-received", {"ok": good, "bad": bad})

    # -- training

    def await_word(self, kind: WordKind = WordKind.TAKE, timeout_s: float = 100) -> int:
        """The step beyond this one that is appointed, once one is. It comes through shared memory, which wakes nobody.
        Which one it is depends on how fast the ranks were so far."""
        assert self.page is not None
        deadline = time.monotonic() + timeout_s
        while not (found := [w.step for w in self.page.appointments() if w.step > self.step and w.kind is kind]):
            assert time.monotonic() < deadline, "nothing is appointed"
            threading.Event().wait(0.005)
        return min(found)

    def enter(self, step: int) -> None:
        assert self.page is not None
        self.page.publish_step(self.rank, step)

    def boundary(self) -> bool:
        """After a step: serves the words; whether to leave."""
        assert self.page is not None
        words = self.page.appointments()
        self.looked = self.step, {word for word in words if word.step <= self.step}
        new = [word for word in words if word not in self.answered and word.step <= self.step]
        self.answered = self.looked[1]
        held = [self.keep(word) for word in new]
        return any(held)

    def keep(self, word: ControlWord) -> bool:
        if word.step < self.step:
            self.notify(
                "snapshot-staged", {"attempt": word.attempt_number, "version": str(Version(word.step)), "why": "late"}
            )
            return False
        self.take(word.attempt_number, word.slot, Version(self.step))
        if word.kind is WordKind.HOLD:
            return bool(self.request("rank-holds", {"attempt": word.attempt_number}, timeout_s=60).fields["leave"])
        return False

    def take(self, number: int, slot: int, version: Version) -> None:
        with self.changed:
            plan = self.plan
            warm = plan is not None and self.warm.get(slot) == plan.declaration.division
        if plan is None or not warm:
            self.notify("snapshot-staged", {"attempt": number, "version": str(version), "why": "not granted"})
            return
        arena, declaration = self.slots[slot], plan.declaration
        arena.begin_fill()
        for segment in declaration.staging.segments:
            entry = declaration.layout.entries[int(segment["entry"])]
            raw = np.ascontiguousarray(self.array(entry.name)).data.cast("B")
            start, length = int(segment["start"]), int(segment["length"])
            arena.data(int(segment["offset"]), length)[:] = raw[start : start + length]
        shared, own = values.encode({"step": self.step, "branch": self.branch}), values.encode({"rank": self.rank})
        about = values.encode({"metrics": {"loss": 1.0 / (1 + self.step)}, "ancestors": self.ancestors})
        identity = Identity(Epoch.parse(self.epoch), version)
        data_bytes = declaration.staging.data_bytes
        arena.seal(identity, self.rank, self.world, data_bytes, self.declared[slot], shared, own, about)
        self.taken.append(version.step)
        fields = {"attempt": number, "version": str(version), "slot": slot, "division": declaration.division}
        self.notify("snapshot-staged", {**fields, "stall_s": 0.001, "lazy": False, "why": ""})

    @property
    def is_due(self) -> bool:
        """Whether the policy names the step that has just ended: all ranks ask for it then, each on a thread."""
        every = self.options["policy"].get("steps")
        return bool(every) and self.step % every == 0

    def await_next(self) -> int:
        """The next step that is saved: the policy names it, or it is appointed, once one is."""
        every = self.options["policy"].get("steps")
        return (self.step // every + 1) * every if every else self.await_word()

    def save_due(self) -> None:
        """Where it fails training goes on, as a trainer's does, and the other ranks do not wait for this one."""
        try:
            self.save(Version(self.step), "due", DUE_S)
        except CkptError as exc:
            self.gave_up = {"version": str(Version(self.step)), "why": str(exc)}
            with contextlib.suppress(CkptError):
                self.notify("unsavable", self.gave_up)

    def save(self, version: Version, why: str = "save", timeout_s: float = 60) -> dict[str, Any]:
        fields = {"version": str(version), "why": why, "values_bytes": 0}
        if why == "due":
            assert self.connection is not None
            asked = self.connection
            answer = self.patience.request_save(
                lambda: asked.start_request("save", fields), time.monotonic() + timeout_s
            )
        else:
            answer = self.request("save", fields, timeout_s=timeout_s).fields
        if not answer["saved"]:
            self.take(answer["attempt"], answer["slot"], version)
        return answer

    def wait_level(self, version: Version, level: str, timeout_s: float = 60) -> bool:
        """As a trainer's: what failed to reach this host's memory reaches nothing else."""
        with self.changed:
            failed = lambda: not self.levels.get((str(version), "local"), (True, ""))[0]  # noqa: E731
            told = lambda: (str(version), level) in self.levels or failed()  # noqa: E731
            assert self.changed.wait_for(told, timeout_s), (version, level)
            return not failed() and self.levels[str(version), level][0]

    def leave(self, outcome: str = "normal") -> dict[str, Any]:
        told = {"why": "", "left_s": 30.0, "committed": None} if outcome == "notice" else {}
        return self.request("leave", {"outcome": outcome, **told}).fields

    def leave_at_once(self) -> None:
        """As who fails, and waits for nothing. Errors: AgentError always: there is no time for an answer."""
        self.request("leave", {"outcome": "exception"}, timeout_s=0)

    def relayout(self, extra: int) -> None:
        self.extra, self.layout_step = extra, self.step
        with self.changed:
            self.warm.clear()
            self.plan = None
        blobs = [encode_layout(self.layout()), self.hashes()]
        self.notify("layout", {"version": str(Version(self.step)), "values_bytes": 100}, blobs=blobs)

    def wait_warm(self, timeout_s: float = 60) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: bool(self.warm), timeout_s)

    # -- messages

    def request(self, kind: str, fields: dict[str, Any], fds: Any = (), blobs: Any = (), timeout_s: float = 60) -> Any:
        assert self.connection is not None
        return self.connection.request(kind, fields, fds, blobs, timeout_s)

    def notify(self, kind: str, fields: dict[str, Any], blobs: Any = ()) -> None:
        assert self.connection is not None
        self.connection.notify(kind, fields, blobs=blobs)

    def on_lost(self, lost: threading.Event) -> None:
        self.inbox.put(None)
        lost.set()

    def on_message(self, message: messages.Message) -> None:
        fields = message.fields
        if message.kind in ("frame-region", "frame-places", "frame-files", "fetch-ended"):
            self.inbox.put(message)
            return
        with self.changed:
            if message.kind == "staging-plan":
                layout, share = decode_layout(message.blobs[0]), decode_share(message.blobs[1])
                if len(layout.entries) == len(self.layout().entries):
                    staging = stage(layout, share, fields["frame_bytes"])
                    coordinate = f"rank={self.rank}"
                    told = Declaration(self.rank, self.world, coordinate, fields["division"], layout, staging)
                    self.plan = Plan(told, encode(told))
            elif message.kind == "grant-arena":
                self.on_grant_arena(fields, message)
            elif message.kind == "close-arena":
                self.warm.pop(fields["slot"], None)
                if fields["slot"] in self.slots:
                    self.slots.pop(fields["slot"]).close()
            elif message.kind == "checkpoint-level":
                self.levels[fields["version"], fields["level"]] = bool(fields["ok"]), fields["message"]
            elif message.kind == "standing-notices":
                self.standing = fields["notices"]
            elif message.kind == "superseded":
                self.superseded = fields["by"]
            elif message.kind == "hold-awaited":
                self.on_hold_awaited(ControlWord.unpack(fields["word"]))
            elif message.kind == "event":
                self.events.append(fields)
            self.changed.notify_all()
        message.close()

    def on_hold_awaited(self, word: ControlWord | None) -> None:
        """Others wait at the end of that step. This rank has passed it and had not been told: it does not come."""
        step, answered = self.looked
        if word is not None and word not in answered and word.step <= step:
            self.notify(
                "snapshot-staged", {"attempt": word.attempt_number, "version": str(Version(word.step)), "why": "late"}
            )

    def on_grant_arena(self, fields: dict[str, Any], message: messages.Message) -> None:
        slot = fields["slot"]
        if message.fds:
            if slot in self.slots:
                self.slots[slot].close()
            self.warm.pop(slot, None)
            self.slots[slot] = Arena.adopt(message.fds.pop())
        plan = self.plan
        if plan is None or plan.declaration.division != fields["division"]:
            return
        if self.warm.get(slot) == fields["division"]:  # it is granted again, and may hold a snapshot by now
            self.notify("arena-warm", {"slot": slot, "division": fields["division"]})
            return
        self.slots[slot].begin_fill()
        data_bytes = plan.declaration.staging.data_bytes
        self.declared[slot] = self.slots[slot].write_declaration(data_bytes, plan.encoded)
        self.warm[slot] = fields["division"]
        self.notify("arena-warm", {"slot": slot, "division": fields["division"]})

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        for arena in self.slots.values():
            arena.close()
        if self.page is not None:
            self.page.close()
        self.tasks.close()


def run(given: dict[str, Any]) -> None:
    """One rank in a process of its own: trains until it is told to stop, saying each step; dies at `die_at`."""
    rank = FakeRank(given["url"], given["rank"], given["world"], given.get("launch", "test"))
    rank.notices = Sources.from_settings(rank.settings).fields()
    rank.connect()
    said = lambda **what: print(json.dumps(what), flush=True)  # noqa: E731
    if rank.rank == 0:
        decision = rank.begin()
        said(epoch=decision.fields["epoch"])
    else:
        decision = None
    rank.join(given.get("epoch") or decision.fields["epoch"])
    if decision is not None:
        identity = rank.restore(decision)
        rank.request("restored", {"epoch": rank.epoch, "identity": str(identity) if identity else None})
        said(restored=str(identity) if identity else None, sources=rank.fetched)
    rank.wait_warm()
    for line in sys.stdin:  # one line a step, so that ranks go in step with one another and with the test
        asked = json.loads(line)
        if asked["do"] == "await":
            said(step=rank.await_next())
        elif asked["do"] == "step":
            rank.enter(rank.step + 1)
            rank.train(rank.step + 1)
            rank.boundary()
            if rank.is_due:
                rank.save_due()
            said(step=rank.step, taken=rank.taken[-1:])
        elif asked["do"] == "wait":
            said(ok=rank.wait_level(Version(asked["step"]), asked["level"]))
        elif asked["do"] == "die":
            os.kill(os.getpid(), 9)
        elif asked["do"] == "leave":
            said(left=rank.leave())
            break
    rank.close()


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))

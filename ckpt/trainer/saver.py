"""Taking this rank's snapshots: at appointments, explicit saves and the exit.

One thread of its own (the stager) waits for copies that still run, seals the arena and reports; so the training thread
stands still only for what must be copied at the boundary. Every round is answered once: `staged` or `missed`.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.agent.arena import Arena
from ckpt.errors import CkptError, SaveFailed, UsageError
from ckpt.events import Events
from ckpt.format import values
from ckpt.format.frames import frame_hash, hash_bytes
from ckpt.plan.layout import Layout, Staging
from ckpt.settings import Settings
from ckpt.tasks import Tasks
from ckpt.trainer.link import Link, Offer, Plan, Terms, hashes_blob
from ckpt.trainer.receipt import Receipt
from ckpt.trainer.replicas import Replicas
from ckpt.trainer.snapshot import Snapshot, Snapshotter
from ckpt.trainer.walk import StateWalker, Walk, hash_walk
from ckpt.types import Epoch, Identity, Tick


@dataclass(frozen=True, slots=True)
class _Filling:
    """A snapshot on its way into an arena."""

    round: int
    number: int
    arena: Arena
    declared: tuple[int, int]
    plan: Plan
    tick: Tick
    snapshot: Snapshot
    shared: bytes
    own: bytes
    about: bytes
    sample: list[Any] | None


SAMPLE_BYTES = 64 << 10  # of one replicated tensor, hashed at each snapshot so that all ranks' can be compared


class Saver:
    """Owns the link, the walk and the stager thread of one rank. Its methods are called by the training thread only.

    `terms` is set once the epoch is known; before that nothing can be appointed.
    """

    def __init__(
        self,
        url: str,
        settings: Settings,
        walker: StateWalker,
        snapshotter: Snapshotter,
        tasks: Tasks,
        events: Events,
        receipt: Receipt,
        replicated: bool,
    ) -> None:
        self.walker = walker
        self.walk: Walk = walker.walk()
        self.events = events
        self.receipt = receipt
        self.link = Link(url, settings, events, tasks, self._bind, self.quiet)
        self._snapshotter = snapshotter
        self._replicated = replicated
        self._replicas = Replicas()
        self._fillings: queue.SimpleQueue[_Filling | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._open = 0
        self._last: Tick | None = None
        self._offered = True  # whether the agent was told of the present walk, or will be when it is joined
        self.thread = threading.current_thread()
        self.forked = False
        self.restarts_follow = settings.restarts_left > 0
        tasks.start("stager", self._stage)

    def make_offer(self, tick: Tick, positions: bool = True) -> Offer:
        """The present walk, as the agent is told of it. Hashes only where other ranks may hold the same.
        positions: whether loaders are asked for theirs, which must not be before they were restored."""
        shared, own = self.walker.values(positions)
        size = len(_encode(shared)) + len(_encode(own))
        hashes = hashes_blob(hash_walk(self.walk)) if self._replicated else b""
        return Offer(self.walk, hashes, tick, size)

    def settle(self, tick: Tick) -> bool:
        """Tells the agent of a changed structure; whether it had changed.

        Errors: SaveFailed when the state cannot be saved as it is now."""
        try:
            if self.walker.changed():
                self._offered = False
                self.walk = self.walker.walk()
            if self._offered:
                return False
            self.link.offer(self.make_offer(tick))
        except UsageError as exc:
            raise SaveFailed(f"the state has become one that cannot be saved: {exc}") from exc
        except Exception as exc:  # of an object of the user's, in its state_dict()
            raise SaveFailed(f"the state could not be read: {type(exc).__name__}: {exc}") from exc
        self._offered = True
        return True

    def take(self, round_: int, number: int, tick: Tick, metrics: dict[str, float] | None = None) -> str:
        """Takes the snapshot of `tick` into slot `number`. Why it was not taken; "" when it was."""
        try:
            why = self._take(round_, number, tick, metrics or {})
        except Exception as exc:  # a save that fails never fails training
            why = str(exc) if isinstance(exc, CkptError) else f"{type(exc).__name__}: {exc}"
            self.events.emit("snapshot.failed", f"ckpt: step {tick.step} was not staged: {why}", loud=True)
        except BaseException:  # Ctrl-C: the others must not wait for us
            self.missed(round_, tick, "interrupted")
            raise
        if why:
            self.missed(round_, tick, why)
        return why

    def _take(self, round_: int, number: int, tick: Tick, metrics: dict[str, float]) -> str:
        started_s = time.perf_counter()
        assert self.link.terms is not None
        if self.settle(tick):
            return "layout"
        slot, plan = self.link.granted(number)
        if slot is None or plan is None or plan.walk is not self.walk:
            return "not granted"
        declared = slot.declared
        shared, own = (_encode(tree) for tree in self.walker.values())
        about = values.encode({"metrics": metrics, "ancestors": self.link.terms.ancestors})
        room = slot.arena.values_room(declared, len(plan.staging.frames))
        if len(shared) + len(own) + len(about) + 256 > room:
            self.link.offer(self.make_offer(tick))
            return "values"
        slot.arena.begin_fill()
        self.link.calm.clear()  # threads that prepare other arenas would take half of the memory's bandwidth
        try:
            snapshot = self._snapshotter.take(number)
        finally:
            self.link.calm.set()
        sample = self._sample(tick, plan.declaration.layout) if self._replicated else None
        filling = _Filling(round_, number, slot.arena, declared, plan, tick, snapshot, shared, own, about, sample)
        self.receipt.stalls_s.append(time.perf_counter() - started_s)
        self.link.levels.expect(tick)
        self._last = tick
        with self._idle:
            self._open += 1
        self._fillings.put(filling)
        return ""

    def late(self, round_: int, step: int) -> None:
        """Answers an appointment whose tick has passed."""
        self.missed(round_, Tick(step), "late")

    def missed(self, round_: int, tick: Tick, why: str) -> None:
        """Answers an appointment that is not kept."""
        self.receipt.missed += 1
        self.link.report("missed", {"round": round_, "tick": str(tick), "why": why[:500]})

    def boundary(self) -> None:
        """A step has ended: copies that ran under it are looked at and done."""
        self._snapshotter.boundary()

    def quiet(self) -> None:
        """Returns once no snapshot is on its way into an arena. On another thread it waits for the training thread to
        come to its next boundary."""
        if threading.current_thread() is self.thread:
            self._snapshotter.poll()
        with self._idle:
            self._idle.wait_for(lambda: self._open == 0)

    @property
    def last(self) -> Tick | None:
        """The newest tick taken here, whatever became of it."""
        return self._last

    def poll(self) -> None:
        """Ends copies that run under the step; says nothing of what comes next."""
        self._snapshotter.poll()

    def fence(self) -> None:
        """Waits for copies that run under the step."""
        self._snapshotter.fence()

    def prove(self, receipt: Receipt) -> None:
        """Puts down what was trusted, and what was not and why."""
        hashed = ["the hashes of all frames read"] if receipt.read_bytes else []
        receipt.proven = [*hashed, *self._snapshotter.proven(), *self._replicas.proven()]
        receipt.fell_back = [*self._snapshotter.fell_back(), *self._replicas.fell_back(), *receipt.fallen]

    def close(self) -> None:
        """Lets what is under way into the arenas finish, then ends the stager, the copies and the link."""
        self.quiet()
        self._fillings.put(None)
        self._snapshotter.close()
        self.link.close()

    def abandon_in_child(self) -> None:
        self.forked = True
        self.link.abandon_in_child()

    # -- inside

    def _bind(self, number: int, walk: Walk, staging: Staging, data: memoryview) -> None:
        self._snapshotter.bind(number, walk, staging, data)

    def _sample(self, tick: Tick, layout: Layout) -> list[Any] | None:
        """[name, box, hash] of a part of one box that whoever else declares it should hold alike: in turns, and at all
        ranks the same part of the same box, as it was at the boundary."""
        entries = zip(layout.entries, self.walk.tensors, self.walk.replica, strict=True)
        shared = [(e, live[0]) for e, live, replica in entries if replica and not e.owner and live]
        if not shared:
            return None
        turn = zlib.crc32(str(tick).encode())  # scattered: steps that are saved have factors in common
        entry, live = shared[turn % len(shared)]
        flat = live.detach().reshape(-1)
        count = min(flat.numel(), max(1, SAMPLE_BYTES // live.element_size()))
        start = turn % (flat.numel() - count + 1)
        part = flat[start : start + count].cpu().contiguous().view(torch.uint8)
        box = [*entry.boxes[0].offset, *entry.boxes[0].shape]
        return [entry.name, box, hash_bytes(*frame_hash(part.numpy().data))]

    def _stage(self) -> None:
        while (filling := self._fillings.get()) is not None:
            with self._closing():
                self._finish(filling)

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._idle:
                self._open -= 1
                self._idle.notify_all()

    def _finish(self, filling: _Filling) -> None:
        filling.snapshot.wait()
        why = filling.snapshot.abandoned or ""
        if not why and self.link.terms is not None:
            why = self._seal(filling, self.link.terms)
        if why:
            self.receipt.missed += 1
            self.link.levels.put(filling.tick, "local", False, why)
        else:
            self.receipt.snapshots += 1
            values_bytes = len(filling.shared) + len(filling.own) + len(filling.about)
            self.receipt.staged_bytes += filling.plan.staging.data_bytes + values_bytes
            self._replicas.note(filling.plan.declaration)
        self.link.report(
            "staged",
            {
                "round": filling.round,
                "tick": str(filling.tick),
                "slot": filling.number,
                "division": filling.plan.declaration.division,
                "stall_s": filling.snapshot.stall_s,
                "lazy": filling.snapshot.lazy,
                "why": why,
                "sample": filling.sample,
            },
        )

    def _seal(self, filling: _Filling, terms: Terms) -> str:
        identity = Identity(Epoch.parse(terms.epoch), filling.tick)
        try:
            filling.arena.seal(
                identity,
                terms.rank,
                terms.world,
                filling.plan.staging.data_bytes,
                filling.declared,
                filling.shared,
                filling.own,
                filling.about,
            )
        except CkptError as exc:
            self.events.emit("snapshot.failed", f"ckpt: step {filling.tick.step} was not staged: {exc}", loud=True)
            return str(exc)
        return ""


def _encode(tree: Any) -> bytes:
    return values.encode(tree)


def check_metrics(metrics: dict[str, Any] | None, events: Events) -> dict[str, float]:
    """Leaves out what is not finite, with an event: a loss that diverged is no reason not to save.
    Errors: UsageError for what is no number."""
    found = {}
    try:
        for name, value in (metrics or {}).items():
            number = float(value)
            if not isinstance(name, str):
                raise TypeError
            if math.isfinite(number):
                found[name] = number
            else:
                events.emit("metric.dropped", f"ckpt: {name}={number} is not kept with the checkpoint", loud=True)
    except (TypeError, ValueError, AttributeError):
        raise UsageError(f"ck.save(metrics={metrics!r}): a dict of names and numbers") from None
    return found

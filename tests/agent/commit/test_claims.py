"""Two starts that know nothing of each other, in every order that a few hundred schedules find: the steps of one fall
between the requests that the other one makes to the store."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from ckpt.agent.commit.job_options import JobOptions
from ckpt.errors import Superseded
from ckpt.storage.contract import Buffer, ObjectInfo, PutMode
from ckpt.store.lineage import Claim
from ckpt.store.run import Run
from ckpt.types import Epoch, Identity, Version
from tests.agent.commit.test_store_client import Side, complete
from tests.store.sim import Sim
from tests.store.test_run import Beating

PARENT = Identity(Epoch(1, "0" * 16), Version(20))
SCHEDULES = 200


class Watched(Sim):
    """Says when a request is about to be made."""

    before: Callable[[], None] = staticmethod(lambda: None)

    def put(self, key: str, chunks: Sequence[Buffer], mode: PutMode = PutMode.OVERWRITE, cancel: object = None) -> None:
        self.before()
        super().put(key, chunks, mode)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.before()
        return super().list(prefix)


class Start:
    """One job from its listing to its end. `saved`: the steps that it was told to be committed. `refused`: why it
    leaves. `knows`: it has listed the other one, and would not have begun."""

    def __init__(self, store: Sim, epoch: Epoch, launch: str, sleeps: Callable[[], None] = lambda: None) -> None:
        self.side = Side(store, Beating(sleeps))
        self.claim = Claim(epoch, PARENT, launch=launch)
        self.saved: list[int] = []
        self.refused = ""
        self.beats = 0
        self.ended = self.knows = False

    def work(self) -> list[Callable[[], None]]:
        return [self.look, self.enter, lambda: self.save(30), lambda: self.save(35), self.end]

    def look(self) -> None:
        view = self.side.open_run().view()
        self.knows = view.newest_epoch != PARENT.epoch
        self.side.claims.record_start(self.claim.epoch, view, insists=False)

    def enter(self) -> None:
        self._unless_refused(lambda: self.side.claim(self.claim))

    def save(self, step: int) -> None:
        def commit() -> None:
            self.side.commit(self.claim, complete(self.claim.epoch, step), JobOptions(codec="raw"), {})
            assert not self.refused, "whoever was refused commits nothing more"
            self.saved.append(step)

        self._unless_refused(commit)

    def end(self) -> None:
        self.ended = True
        self.side.close_epoch(self.claim.epoch, "it came to its end")

    def beat(self) -> None:
        """As long as it lives."""
        if not (self.ended or self.refused):
            self.beats += 1
            self.side.heartbeat(self.claim.epoch, self.beats)

    def _unless_refused(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Superseded as exc:
            self.refused = str(exc)


def before() -> Watched:
    store = Watched()
    side = Side(store.client())
    first = Claim(PARENT.epoch, None, launch="first")
    side.commit(first, complete(PARENT.epoch, 20), JobOptions(codec="raw"), {})
    side.close_epoch(PARENT.epoch, "it came to its end")
    return store


def lives(at: Sequence[int], epochs: Sequence[Epoch]) -> tuple[Start, Start, Watched, int]:
    """`at`: before which request of the slow start each step of the other one is made."""
    store = before()
    swift, count, inside = Start(store.client(), epochs[0], "swift"), 0, False
    left = list(zip(at, swift.work(), strict=True))

    def asks() -> None:
        nonlocal count, inside
        if inside:
            return
        inside = True
        while left and left[0][0] <= count:
            left.pop(0)[1]()
        count, inside = count + 1, False

    def sleeps() -> None:
        if len(left) < 4:
            swift.beat()
        asks()

    store.before = asks
    slow = Start(store, epochs[1], "slow", sleeps)
    for step in slow.work():
        step()
    requests = count
    for _, step in left:
        step()
    return swift, slow, store, requests


@pytest.mark.parametrize("nonces", ["ab", "ba"])
def test_of_two_starts_at_one_moment_none_that_goes_on_loses_what_it_saved(nonces: str, seed: int) -> None:
    epochs = [Epoch(2, nonce * 16) for nonce in nonces]
    rng, kinds = random.Random(seed), set()
    requests = lives([10**6] * 5, epochs)[3]
    for _ in range(SCHEDULES):
        most = rng.choice((20, requests + 20))  # the former: before the slow one has claimed, or just after
        at = [0, *sorted(rng.randrange(most) for _ in range(4))]
        swift, slow, store, _ = lives(at, epochs)
        if slow.knows:
            continue
        line = [ref.identity for ref in Run(store.client()).view().history]
        for job in (swift, slow):
            lost = [step for step in job.saved if Identity(job.claim.epoch, Version(step)) not in line]
            in_flight = bool(job.refused) and len(lost) == 1  # when the other one claimed and committed
            assert not lost or in_flight, f"{job.claim.launch} has lost {lost} at {at}"
        saved = [Identity(job.claim.epoch, Version(step)) for job in (swift, slow) for step in job.saved]
        assert not saved or line[-1] in saved, f"what was saved is on no line at {at}"
        kinds.add((bool(swift.saved), bool(slow.saved), bool(swift.refused), bool(slow.refused)))
    assert len(kinds) >= 2, kinds

"""Whoever asks a home for frames hears of each of them once, whatever is lost on the way; what a home does not give is
read elsewhere; and while nothing goes wrong nothing is read twice."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ckpt.agent.restore.shared_read_state import ALIVE_S, Given, HomeRequest
from ckpt.types import OWN_NODE

NODES, FRAMES = 4, 30


def test_a_frame_that_several_want_is_read_once_and_each_of_them_is_told_once() -> None:
    given = Given()
    assert given.add_requests([1, 2], "a") == [1, 2]
    assert given.add_requests([2, 3], "b") == [3]
    assert given.add_requests([3], OWN_NODE) == []
    assert given.add_requests([1], "b") == []
    for frame in (1, 2):
        given.mark_read(frame)
    given.mark_unavailable(3)
    assert given.take_reports(0.0) == {"a": ([1, 2], []), "b": ([1, 2], [3]), OWN_NODE: ([], [3])}
    assert given.take_reports(0.0) == {}


def test_what_is_here_or_is_not_to_be_had_is_told_at_once_to_whoever_asks_later() -> None:
    given = Given()
    given.add_requests([1, 2], "a")
    given.mark_read(1)
    given.mark_unavailable(2)
    given.mark_unavailable(1)  # a pass ends with all that it has not read
    assert given.add_requests([1, 2], "b") == []
    assert given.take_reports(0.0)["b"] == ([1], [2])


def test_who_waits_hears_now_and_then_that_reading_goes_on() -> None:
    given = Given()
    given.add_requests([1, 2], "a")
    given.add_requests([2], OWN_NODE)
    assert given.take_reports(10.0) == {"a": ([], [])}
    assert given.take_reports(10.0 + ALIVE_S / 2) == {}
    assert given.take_reports(10.0 + ALIVE_S) == {"a": ([], [])}


def test_what_a_home_says_that_it_was_not_asked_or_has_said_before_changes_nothing() -> None:
    asked = HomeRequest(0.0)
    assert asked.add_frames([1, 2], 0.0) == [1, 2]
    assert asked.record_answer([1, 9], [8], 0.0) == ([1], [])
    assert asked.record_answer([1], [1], 0.0) == ([], [])
    assert asked.add_frames([1], 0.0) == []
    assert asked.record_answer([1], [1, 2], 0.0) == ([], [2])
    assert asked.pending_frames == {1}


def test_a_home_is_silent_only_while_it_has_something_to_say() -> None:
    asked = HomeRequest(0.0)
    assert asked.silent_s(100.0) == 0.0
    asked.add_frames([1], 100.0)
    assert asked.silent_s(110.0) == 10.0
    asked.record_answer([1], [], 111.0)
    assert asked.silent_s(200.0) == 0.0
    asked.add_frames([2], 200.0)
    assert asked.silent_s(201.0) == 1.0


def test_a_home_that_is_given_up_hands_back_all_that_is_not_here_once() -> None:
    asked = HomeRequest(0.0)
    asked.add_frames([1, 2, 3, 4], 0.0)
    asked.record_answer([1, 2], [], 0.0)
    asked.pending_frames.discard(1)
    assert asked.give_up() == [2, 3, 4]
    assert asked.give_up() == []
    assert asked.given_up
    assert asked.record_answer([3], [4], 0.0) == ([], [])


class Nodes:
    """Some nodes that all want something, with a network between them that delivers in any order across connections,
    and in order on one; in `faulty` ones connections end and homes die."""

    def __init__(self, seed: int, faulty: bool) -> None:
        self.random, self.faulty = random.Random(seed), faulty
        self.given = [Given() for _ in range(NODES)]
        self.asked = {(a, b): HomeRequest(0.0) for a in range(NODES) for b in range(NODES) if a != b}
        self.wires: dict[tuple[int, int], list[tuple[str, list[int], list[int]]]] = {pair: [] for pair in self.asked}
        self.ready: dict[tuple[int, int], list[int]] = {pair: [] for pair in self.asked}
        self.to_read: list[list[int]] = [[] for _ in range(NODES)]
        self.has: list[Counter[int]] = [Counter() for _ in range(NODES)]
        self.reads: Counter[int] = Counter()
        self.own: Counter[int] = Counter()  # read for one node alone
        self.dead: set[int] = set()
        self.now_s = 0.0
        self.wanted = [self.random.sample(range(FRAMES), self.random.randint(0, FRAMES)) for _ in range(NODES)]

    def want(self, node: int, frames: list[int]) -> None:
        for home in range(NODES):
            mine = [frame for frame in frames if frame % NODES == home]
            if home == node:
                self.to_read[node] += self.given[node].add_requests(mine, OWN_NODE)
            elif self.asked[node, home].given_up:
                self.alone(node, mine)
            elif new := self.asked[node, home].add_frames(mine, self.now_s):
                self.wires[node, home].append(("read-frames", new, []))

    def alone(self, node: int, frames: list[int]) -> None:
        self.own.update(frames)
        self.has[node].update(frames)

    def read(self, node: int) -> None:
        given = self.given[node]
        while self.to_read[node]:
            frame = self.to_read[node].pop()
            self.reads[frame] += 1
            (given.mark_unavailable if self.faulty and self.random.random() < 0.05 else given.mark_read)(frame)

    def tell(self, node: int) -> None:
        for who, (here, lacking) in self.given[node].take_reports(self.now_s).items():
            if who == OWN_NODE:
                self.has[node].update(here)
                self.alone(node, lacking)
            else:
                self.wires[node, int(who)].append(("frames-read", here, lacking))

    def deliver(self, source: int, to: int) -> None:
        if self.wires[source, to]:
            kind, first, second = self.wires[source, to].pop(0)
            if to in self.dead:
                return
            if kind == "read-frames":
                self.to_read[to] += self.given[to].add_requests(first, str(source))
            else:
                ready, lost = self.asked[to, source].record_answer(first, second, self.now_s)
                self.ready[to, source] += ready
                self.alone(to, lost)

    def fetch(self, node: int, home: int) -> None:
        asked = self.asked[node, home]
        if not self.ready[node, home]:
            return
        frame = self.ready[node, home].pop(0)
        if home in self.dead:
            self.alone(node, asked.give_up())
        elif frame in asked.pending_frames:
            asked.pending_frames.discard(frame)
            assert frame in self.given[home].read_frames
            self.has[node][frame] += 1

    def cut(self, one: int, other: int) -> None:
        """What is on its way is lost; both notice, and whoever waits asks again."""
        for a, b in ((one, other), (other, one)):
            self.wires[a, b].clear()
        for a, b in ((one, other), (other, one)):
            if a not in self.dead and b in self.dead:
                self.alone(a, self.asked[a, b].give_up())
            elif a not in self.dead and not self.asked[a, b].given_up:
                self.wires[a, b].append(("read-frames", sorted(self.asked[a, b].unanswered_frames), []))

    def step(self) -> None:
        alive = [node for node in range(NODES) if node not in self.dead]
        node = self.random.choice(alive)
        other = self.random.choice([each for each in range(NODES) if each != node])
        self.now_s += self.random.random()
        what = self.random.random()
        if what < 0.2 and self.wanted[node]:
            count = self.random.randint(1, len(self.wanted[node]))
            now, self.wanted[node] = self.wanted[node][:count], self.wanted[node][count:]
            self.want(node, now)
        elif what < 0.35:
            self.read(node)
        elif what < 0.5:
            self.tell(node)
        elif what < 0.75:
            self.deliver(node, other)
        elif what < 0.96 or not self.faulty:
            self.fetch(node, other)
        elif what < 0.99:
            self.cut(node, other)
        elif len(self.dead) < NODES - 1:
            self.dead.add(other)
            for each in range(NODES):
                if each != other:
                    self.cut(each, other)

    def settle(self) -> None:
        """Until nothing happens any more."""
        for _ in range(4 * FRAMES):
            for node in (each for each in range(NODES) if each not in self.dead):
                self.want(node, self.wanted[node])
                self.wanted[node] = []
                self.read(node)
                self.tell(node)
            for pair in self.asked:
                self.deliver(*pair)
                if pair[0] not in self.dead:
                    self.fetch(*pair)


@pytest.mark.parametrize("faulty", [False, True])
def test_every_living_node_has_each_frame_that_it_wanted_once_in_any_order_of_events(faulty: bool) -> None:
    for seed in range(300):
        nodes = Nodes(seed, faulty)
        wanted = [Counter(frames) for frames in nodes.wanted]
        for _ in range(nodes.random.randint(0, 400)):
            nodes.step()
        nodes.settle()
        for node in range(NODES):
            if node not in nodes.dead:
                assert nodes.has[node] == wanted[node], (seed, node)
        assert set(nodes.reads.values()) <= {1}, seed
        if not faulty:
            assert not nodes.own, seed
            assert nodes.reads.keys() == set().union(*wanted), seed

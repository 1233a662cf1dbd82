"""The world itself: whoever waits does so by its clock, one at a time, and a seed gives the same life again."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

from tests.sim.test_notices_sim import live
from tests.sim.world import BEGIN_S, Stuck, living


def test_what_waits_goes_on_when_it_is_told_to_or_when_its_time_is_up() -> None:
    said: list[tuple[str, float, bool]] = []
    with living(1) as world:
        event, answer = threading.Event(), Future[int]()

        def wait(name: str, timeout_s: float) -> None:
            told = event.wait(timeout_s)
            said.append((name, round(time.monotonic() - BEGIN_S), told))

        def tell() -> None:
            time.sleep(100.0)
            event.set()
            answer.set_result(7)
            said.append(("told", round(time.monotonic() - BEGIN_S), True))

        world.spawn("short", lambda: wait("short", 50.0))
        world.spawn("long", lambda: wait("long", 500.0))
        world.spawn("asks", lambda: said.append(("asks", answer.result(200.0), True)))
        world.spawn("tells", tell)
        world.run(lambda: len(said) == 4, 1000.0)
    assert said[:2] == [("short", 50, False), ("told", 100, True)]
    assert sorted(said[2:]) == [("asks", 7, True), ("long", 100, True)]


def test_a_world_in_which_nothing_more_can_happen_says_who_waits() -> None:
    with living(1) as world:
        never = threading.Event()
        world.spawn("the one", never.wait)
        with pytest.raises(Stuck, match="the one waits"):
            world.run(never.is_set, 10.0)


def mistaken() -> None:
    with living(1) as world:
        world.spawn("it", lambda: [][0])
        over = world.spawn("other", lambda: time.sleep(1.0))
        world.run(lambda: over.done, 10.0)


def test_a_mistake_on_any_thread_is_one_of_the_test() -> None:
    with pytest.raises(AssertionError, match=r"(?s)it: .*IndexError"):
        mistaken()


def test_nothing_of_a_world_is_left_after_it() -> None:
    monotonic, threads = time.monotonic, threading.active_count()
    with living(1) as world:
        waits = world.spawn("it", lambda: time.sleep(1000.0))
        world.run(lambda: waits.waiting, 10.0)
    assert waits.done
    assert threading.active_count() == threads
    assert time.monotonic is monotonic, "the clock is the machine's again"


def test_a_seed_gives_the_same_life_again() -> None:
    assert live(2) == live(2)

"""The world itself: whoever waits does so by its clock, one at a time, and a seed gives the same life again."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

from ckpt.ipc.control_page import ControlPage
from ckpt.threads import Tasks
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


def test_the_page_on_which_a_rank_shows_where_it_is_has_its_clock() -> None:
    with living(1) as world:
        page = ControlPage.create(1)

        def train() -> None:
            time.sleep(5.0)
            page.publish_step(0, 7)

        world.spawn("rank", train)
        world.run(lambda: page.entered_step(0) == 7, 100.0)
        assert page.entry_time_s(0) == pytest.approx(BEGIN_S + 5.0, abs=0.1)


def test_threads_and_pools_of_the_package_live_in_it() -> None:
    with living(1) as world:
        done: list[str] = []

        def work() -> None:
            with Tasks("test", pool_size=2) as tasks:
                tasks.start("loop", lambda: done.append("stopped") if tasks.stopping.wait() else None)
                futures = [tasks.submit(time.sleep, 10.0) for _ in range(4)]
                for each in futures:
                    each.result(60.0)
                done.append(f"{time.monotonic() - BEGIN_S:.0f} s for four on two threads")

        world.spawn("owner", work)
        world.run(lambda: len(done) == 2, 100.0)
    assert done == ["20 s for four on two threads", "stopped"]


def test_a_world_in_which_nothing_more_can_happen_says_who_waits() -> None:
    with living(1) as world:
        never = threading.Event()
        world.spawn("the one", never.wait)
        with pytest.raises(Stuck, match="the one waits"):
            world.run(never.is_set, 10.0)


def test_one_in_which_time_stands_still_says_so() -> None:
    with living(1) as world:

        def again() -> None:
            world.at(0.0, again)

        again()
        with pytest.raises(Stuck, match="time does not go on"):
            world.run(lambda: False, 10.0)


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


def test_what_a_killed_process_had_in_memory_goes_with_it_and_what_others_have_stays() -> None:
    with living(1) as world:
        pages: list[ControlPage] = []
        for owner in ("killed", "lives"):
            world.owner = owner
            world.spawn(owner, lambda: pages.append(ControlPage.create(1)))
        world.owner = None
        world.run(lambda: len(pages) == 2, 10.0)
        world.kill("killed")
        assert [page.fd >= 0 for page in pages] == [False, True]


def test_a_seed_gives_the_same_life_again() -> None:
    assert live(2) == live(2)

"""The window: of bounded memory, and of no use once it is closed. How its cells are used again, test_restore_session
and test_peer_source show."""

from __future__ import annotations

import threading

import pytest

from ckpt.agent.restore.window import Window
from ckpt.agent.runtime import memory_plan
from ckpt.errors import AgentError
from ckpt.threads import Tasks


def test_a_windows_memory_is_bounded_whatever_the_frames() -> None:
    for frame_bytes in (1, 4096, 4 << 20, 200 << 20):
        window = Window(frame_bytes)
        try:
            assert window.arena.size_bytes <= memory_plan.WINDOW_BYTES
        finally:
            window.close()


def test_a_wait_for_a_cell_ends_with_the_window_and_nobody_gets_one_any_more() -> None:
    window = Window(memory_plan.WINDOW_BYTES)
    assert window.wait_for_cell(5)[1].nbytes == 5
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        window.wait_for_cell(5)

    with Tasks("cell", pool_size=1) as tasks:
        second = tasks.submit(wait)
        assert waiting.wait(60)
        window.close()
        with pytest.raises(AgentError):
            second.result(60)
    assert window.free_count == 0
    assert window.take_cell_nowait() is None

"""What the ranks bring to an agent that was started again."""

from __future__ import annotations

from ckpt.agent.job.arena_handover import ArenaHandover
from ckpt.ipc.arena import Arena


def test_a_slot_of_which_only_ranks_elsewhere_have_arenas_is_lost_too() -> None:
    """It was closed here and not there yet, or granted there and not here: whoever waits for it would wait for ever."""
    recovery = ArenaHandover(2, 5)
    fds = [Arena.create(4096).fd for _ in range(2)]
    recovery.add_arenas(0, [0, 1], fds)
    recovery.add_remote_arenas(1, [1, 2])
    whole, lost = recovery.finish(keep=True)
    assert (list(whole), lost) == ([1], [0, 2])
    for arena in whole[1].values():
        arena.close()

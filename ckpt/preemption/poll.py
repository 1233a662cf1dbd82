"""The loop that every polling listener runs: ask, pause, ask again; after a fault with growing pauses.

A source that stays mute is said so once, loudly, since a notice from it would be missed; and once more when it answers.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from ckpt.events import Events

PAUSE_FIRST_S = 1.0
PAUSE_MAX_S = 10.0  # the shortest lead is 30 s, and half a minute of deafness would use it up
MUTE_FAULTS = 5  # after about ten seconds


class Fault(Exception):
    """The source gave no answer that can be used. Never leaves a listener: it means asking again later."""


def keep_asking(name: str, stop: threading.Event, ask: Callable[[], float], events: Events | None = None) -> None:
    """Calls `ask` until `stop` is set; it returns the pause before the next call in seconds, or raises Fault.

    After the n-th fault in a row the pause is drawn evenly from [half, whole] of 1 s x 2^(n-1), at most 10 s, so that
    many hosts do not ask in step. A pause ends at once when `stop` is set.
    """
    said = events or Events()
    faults = 0
    while not stop.is_set():
        try:
            pause_s = ask()
            if faults >= MUTE_FAULTS:
                said.emit("notices.answered", f"{name} answers again", source=name)
            faults = 0
        except Fault as exc:
            if stop.is_set():
                return
            faults += 1
            if faults == MUTE_FAULTS:
                told = f"{name} does not answer, and its notices would be missed; it is asked again: {exc}"
                said.emit("notices.silent", told, loud=True, source=name)
            whole_s = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2 ** min(faults - 1, 10))
            pause_s = whole_s * random.uniform(0.5, 1.0)
        stop.wait(pause_s)

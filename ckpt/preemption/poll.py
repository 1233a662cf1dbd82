"""The loop of every polling listener: ask, pause, ask again. After a fault the pauses grow.

If a source stays silent, one warning is emitted, because its notices would be missed. One event follows when it answers
again.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from ckpt.events import Events

PAUSE_FIRST_S = 1.0
# The shortest lead of a notice is 30 s; a pause of that length would use it up.
PAUSE_MAX_S = 10.0
MUTE_FAULTS = 5  # in a row; reached after about ten seconds


class Fault(Exception):
    """The source gave no usable answer. It never leaves a listener, which asks again later."""


def poll_until_stopped(
    name: str, stop: threading.Event, ask: Callable[[], float], events: Events | None = None
) -> None:
    """Calls `ask` until `stop` is set. `ask` returns the seconds to pause before the next call, or raises Fault.

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
                told = f"{name} does not answer, so ckpt may miss its notices. ckpt keeps asking: {exc}"
                said.emit("notices.silent", told, loud=True, source=name)
            whole_s = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2 ** min(faults - 1, 10))
            pause_s = whole_s * random.uniform(0.5, 1.0)
        stop.wait(pause_s)

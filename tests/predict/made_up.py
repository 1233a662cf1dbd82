"""Recorded signals that were made up: nodes that fail, with or without a sign of it before."""

from __future__ import annotations

import json
import random
from pathlib import Path

PERIOD_S = 5.0


def write(path: Path, seed: int, nodes: int, hours: float, failures: int, sign: float) -> Path:
    """Each node has so many failures in so many hours. From 5 minutes before one `io.some` is that much higher, as it
    now and then is for a moment without one. `net.drops` means nothing."""
    rng = random.Random(seed)
    with open(path, "w") as file:
        for number in range(nodes):
            about = {"node": f"n{number}", "url": "/run", "pid": 7}
            say = lambda event, at_s, **more: file.write(  # noqa: E731
                json.dumps({"event": event, "message": "", "time": at_s, "loud": False, **about, **more}) + "\n"  # noqa: B023
            )
            usual = rng.uniform(0.3, 0.6)
            spaced = 3600 * hours / (failures + 1)
            fails = [spaced * (k + 1) + rng.uniform(-0.2, 0.2) * spaced for k in range(failures)]
            left = list(fails)
            say("signals.begin", 0.0)
            at_s = 0.0
            while at_s < 3600 * hours:
                at_s += PERIOD_S
                if left and at_s >= left[0]:
                    say("signals.failure", left.pop(0))
                near = bool(left) and left[0] - at_s <= 300
                high = sign if near or rng.random() < 0.01 else 0.0
                values = {
                    "memory.used": usual + rng.gauss(0, 0.02),
                    "io.some": abs(rng.gauss(0, 0.03)) + high,
                    "net.drops": float(rng.randrange(5)),
                }
                say("signals", at_s, values=values)
            say("signals.end", at_s)
    return path

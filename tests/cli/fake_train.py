"""Stands in for a user's script: saves steps 1, 2, ... to a URL and goes on where it was. Without torch or an agent.

    fake_train.py URL STEPS HOW

The run that is to be killed waits for that after step 2 with a child process, so no test depends on timing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from ckpt.store.reader import FrameReader, load_values, open_record
from ckpt.store.run import Run
from tests.cli.stores import arrays, begin, opened, save


def main(url: str, steps: int, how: str) -> None:
    with opened(url) as store:
        line = Run(store).view().history
        unseeded = os.urandom(8)
        if line:
            restored = load_values(FrameReader(store, open_record(store, line[-1])))
            unseeded = restored.own_by_coordinate["rank=0"]["generators"].get("python")
    parent = line[-1].identity if line else None
    if parent and how == "is not started again":
        return
    if parent and how == "had ended in memory":  # as an agent would have committed it
        parent = save(url, parent.epoch, steps, arrays(steps), own={"loader": {"position": steps}, **_drawn(steps)})
    epoch = begin(url, parent)
    for step in range(parent.version.step + 1 if parent else 1, steps + 1):
        tensors, own = arrays(step), {"loader": {"position": step}, **_drawn(step)}
        if how.startswith("unseeded"):
            own["generators"]["python"] = unseeded
        if how == "unseeded":
            tensors["model.bias"][0] = int.from_bytes(unseeded[:2], "big")
        if parent and how == "loses a tensor":
            tensors["model.bias"][3] += 1
        if parent and how == "skips data":
            own["loader"]["position"] += 1
        save(url, epoch, step, tensors, own=own)
        if url.endswith("/killed") and parent is None and step == 2 and how != "ends early":
            subprocess.Popen(["sleep", "600"])
            threading.Event().wait()
    print("done")
    if how == "fails":
        raise SystemExit(9)


def _drawn(step: int) -> dict[str, dict[str, bytes]]:
    return {"generators": {"torch": bytes([step] * 40)}}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])

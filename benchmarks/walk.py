"""Walking a state of many tensors: the walk (once per structure), and what each save asks again.

    python benchmarks/walk.py [--tensors 20000] [--repeats 9] [--small] [--json]

The bar: planning at most 1.5 s, once; a save adds at most 30 ms to the stall (the fingerprint is its larger part).
The ceiling in the same run: one pass in Python over the same tensors that reads each one's address.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ckpt.format import values
from ckpt.trainer.coords import coordinate
from ckpt.trainer.walk import StateWalker, hash_walk


def make_state(tensors: int) -> dict[str, Any]:
    """Linear layers and Adam: 8 tensors a layer."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(max(1, tensors // 8))])
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.step()
    return {"model": model, "optim": optim, "sched": torch.optim.lr_scheduler.StepLR(optim, 10), "best": 0.5}


def measure(run: Callable[[], object], repeats: int) -> float:
    """Median milliseconds."""
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        taken.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(taken)


def results(tensors: int, repeats: int) -> dict[str, Any]:
    state = make_state(tensors)
    walker = StateWalker(state, coordinate(state, 0, 1))
    walk = walker.walk()
    every = [tensor for line in walk.tensors for tensor in line]
    assert not walker.changed()

    def encode() -> None:
        for tree in walker.values():
            values.encode(tree)

    return {
        "machine": f"{platform.node()}, {platform.processor() or platform.machine()}, torch {torch.__version__}",
        "tensors": len(every),
        "one pass over the tensors (ceiling), ms": measure(lambda: [t.data_ptr() for t in every], repeats),
        "walk, ms": measure(walker.walk, max(3, repeats // 3)),
        "changed, ms": measure(walker.changed, repeats),
        "values, ms": measure(walker.values, repeats),
        "values encoded, ms": measure(encode, repeats),
        "hashes of replicas, ms": measure(lambda: hash_walk(walk), max(3, repeats // 3)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="200 tensors, 3 repeats: does it run at all")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = results(*((200, 3) if options.small else (options.tensors, options.repeats)))
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:42} {value:10.2f}" if isinstance(value, float) else f"{name:42} {value}")


if __name__ == "__main__":
    main()

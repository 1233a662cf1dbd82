"""Walking a state of 20,000 tensors: the walk (once per structure), and what each save asks again.

    python -m benchmarks.walk [--small] [--json FILE]

Against one pass in Python over the same tensors that reads each one's address. The bars are of the whole: planning.py
and many.py have them. Medians; one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.report import Row, median_s, parser, report
from ckpt.trainer.state import state_nodes
from ckpt.trainer.state.mesh_coordinate import find_coordinate
from ckpt.trainer.state.state_walk import StateWalker
from ckpt.trainer.state.tensor_hashes import hash_replicas


def make_state(tensors: int) -> dict[str, Any]:
    """Linear layers and Adam: 8 tensors a layer."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(max(1, tensors // 8))])
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.step()
    return {"model": model, "optim": optim, "sched": torch.optim.lr_scheduler.StepLR(optim, 10), "best": 0.5}


def rows_of(tensors: int, repeats: int) -> list[Row]:
    state = make_state(tensors)
    walker = StateWalker(state, find_coordinate(state, 0, 1))
    walk = walker.walk()
    every = [tensor for line in walk.tensors for tensor in line]
    assert not walker.has_changed(walk)

    def encode() -> None:
        state_nodes.encode_trees(*walker.values(walk), walk.scan.constants)

    pass_ms = 1e3 * median_s(lambda: [t.data_ptr() for t in every], repeats)
    questions: list[tuple[str, str, Callable[[], object]]] = [
        ("the walk", "part of planning", walker.walk),
        ("hashes of replicas", "part of planning", lambda: hash_replicas(walk.tensors, walk.may_have_replicas)),
        ("has it changed?", "part of a save", lambda: walker.has_changed(walk)),
        ("values, read and encoded", "part of a save", encode),
    ]
    rows = []
    for question, bar, work in questions:
        ms = 1e3 * median_s(work, repeats)
        rows.append(Row(f"{len(every)} tensors: {question}", ms, "ms", bar, None, pass_ms, ms / pass_ms))
    return rows


def main() -> int:
    args = parser(__doc__).parse_args()
    return report("walk", rows_of(*((200, 3) if args.small else (20_000, 9))), args)


if __name__ == "__main__":
    sys.exit(main())

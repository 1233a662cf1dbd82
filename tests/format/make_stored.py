"""Writes the store folder of the current format version that tests/format/stored keeps:
`python -m tests.format.make_stored DIR`.

Run it once for a new format version, and keep every older folder as it is: later versions must read them all.

    epoch 1: steps 1 (retired), 2, 4        epoch 2, forked at step 2: step 3, which refers to frames of step 2
    so the line is 2, 3, and 4 is a branch
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np

from ckpt.format import record
from ckpt.store import keys, lineage
from ckpt.types import Box, Epoch, Identity, Version
from tests.format.build import Tensor
from tests.format.build import manifest as build_manifest
from tests.format.build import record as build_record

FIRST = Epoch(1, "00000000000000a1")
SECOND = Epoch(2, "00000000000000b2")
LINE = [Identity(FIRST, Version(2)), Identity(SECOND, Version(3))]
BRANCH = Identity(FIRST, Version(4))
RETIRED = Identity(FIRST, Version(1))
COORDINATES = ("rank=0", "rank=1")


def tensors(step: int) -> list[Tensor]:
    """What the checkpoint of that step holds, the same on every machine: no random numbers, no rounding."""
    noise = (np.arange(40 * 150, dtype=np.int64) * 2654435761 + step * 97) % 4093
    weight = ((noise - 2046) / 65536).astype(np.float32).reshape(40, 150)
    half = (((noise - 2046) / 4096).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(60, 100)
    return [
        Tensor("model.embed.weight", "float32", weight.copy() if step == 4 else np.abs(weight) * 0 + 0.25),
        Tensor("model.proj.weight", "bfloat16", half, boxes=(Box((0, 0), (25, 100)), Box((25, 0), (35, 100)))),
        Tensor("model.out.weight", "float32", weight, boxes=(Box((0, 0), (40, 70)), Box((0, 70), (40, 80)))),
        Tensor("model.tokens", "int64", np.arange(7, dtype=np.int64) * step),
        Tensor("model.mask", "bool", np.arange(12).reshape(3, 4) % (step + 1) == 0),
        Tensor("model.scale", "float32", np.array(step / 4, np.float32)),
        Tensor("model.empty", "float16", np.zeros((0, 5), np.float16)),
        Tensor("model.phase", "complex64", np.array([1 + 2j, step - 0.5j], np.complex64)),
        Tensor("model.f8", "float8_e4m3fn", np.arange(9, dtype=np.uint8)),
        Tensor("model.expert", "int32", np.array([step, 1], np.int32), owner="rank=0"),
        Tensor("model.expert", "int32", np.array([step, 2], np.int32), owner="rank=1"),
    ]


def shared_values(step: int) -> dict[object, object]:
    return {
        "step": step,
        "scheduler": {"milestones": Counter({30: 1, 80: 2}), "last_lr": [0.1, float("inf")], "betas": (0.9, 0.999)},
        "order": OrderedDict(b=1, a=None),
        "big": 1 << 100,
        3: {1.5, -2},
        "table": np.arange(6, dtype="<i2").reshape(2, 3),
        "losses": [i / 8 for i in range(40)],
        "text": "héllo ☃",
        "raw": b"\x00\xff",
    }


def own_values(step: int, rank: int) -> dict[str, object]:
    return {"python": (3, tuple(range(rank, rank + 40)), None), "position": step * 10 + rank, "done": rank == 1}


def write(folder: Path) -> None:
    def put(key: str, data: bytes) -> None:
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    for epoch, parent in ((FIRST, None), (SECOND, LINE[0])):
        claim = lineage.Claim(epoch, parent, (), launch="job-1", host="node0", time_s=1.75e9 + epoch.number)
        put(keys.epoch_key(epoch), lineage.encode_claim(claim))
    put(keys.closed_key(FIRST), b"{}")
    put(keys.retired_key(RETIRED), b"{}")
    base = None
    for identity in (RETIRED, LINE[0], BRANCH, LINE[1]):
        step = identity.version.step
        made, frames = build_manifest(
            tensors(step), COORDINATES, (shared_values(step), [own_values(step, 0), own_values(step, 1)])
        )
        done, pack = build_record(
            identity,
            made,
            frames,
            options=("auto", "zstd", "raw", "planes"),
            base=base if identity == LINE[1] else None,
            metrics={"val_loss": 1 / step},
            about={"host": "node0", "world": 2},
        )
        base = done if identity == LINE[0] else base
        put(done.packs[-1][0], pack)
        put(keys.record_key(identity, done.writer), record.encode(done))


if __name__ == "__main__":
    write(Path(sys.argv[1]))

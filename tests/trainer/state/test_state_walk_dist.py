from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.trainer.dist_layouts import WORLD

TIMEOUT_S = 240
ROOT = Path(__file__).parents[3]


def test_every_layout_has_canonical_names_and_restores_into_others_and_one_process(tmp_path: Path) -> None:
    """What the ranks assert themselves (dist_layouts.py): FSDP2, DDP, tensor parallel, HSDP, FSDP2 with tensor
    parallel, uneven shards; structure is stable over steps and evaluation; coordinates."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainer.dist_layouts"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    outputs = [tmp_path / f"out.{rank}" for rank in range(WORLD)]
    ranks = []
    try:
        for rank, output in enumerate(outputs):
            with output.open("wb") as out:
                args = [*command, str(rank), str(tmp_path)]
                ranks.append(subprocess.Popen(args, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT))
        statuses = [rank.wait(TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = [output.read_text()[-3000:] for output, status in zip(outputs, statuses, strict=True) if status]
    assert not said, said[0]

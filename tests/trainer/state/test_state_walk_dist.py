from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.trainer.roundtrip as rt
from tests.trainer import dist_layouts

TIMEOUT_S = 240
ROOT = Path(__file__).parents[3]


def launch(world: int, folder: Path) -> None:
    """All ranks of one group; fails with what the first failing rank said."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainer.dist_layouts"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = []
    try:
        for rank in range(world):
            with (folder / f"out{world}.{rank}").open("wb") as out:
                ranks.append(
                    subprocess.Popen(
                        [*command, str(rank), str(world), str(folder)],
                        cwd=ROOT,
                        env=environment,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                    )
                )
        statuses = [rank.wait(TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = [(folder / f"out{world}.{rank}").read_text()[-3000:] for rank in range(world) if statuses[rank]]
    assert not said, said[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the checkpoints that four ranks made, under every layout, and restored into every layout."""
    folder = tmp_path_factory.mktemp("layouts")
    launch(4, folder)
    return folder


def test_every_layout_has_canonical_names_and_restores_into_every_layout(saved: Path) -> None:
    """What the ranks assert themselves (dist_layouts.py): FSDP2, DDP, tensor parallel, HSDP, FSDP2 with tensor
    parallel, uneven shards; structure is stable over steps and evaluation; coordinates."""
    for kind in dist_layouts.SIZES:
        assert list(read(saved, kind)) == list(dist_layouts.LAYOUTS[kind, 4])


def test_checkpoints_of_four_ranks_restore_into_three(saved: Path) -> None:
    launch(3, saved)


@pytest.mark.parametrize("kind", dist_layouts.SIZES)
def test_checkpoints_of_four_ranks_restore_into_one_process_without_any_wrapper(saved: Path, kind: str) -> None:
    for checkpoint, reference in read(saved, kind).values():
        state = dist_layouts.build("plain", dist_layouts.SIZES[kind], 1, seed=4)
        rt.restore(state, checkpoint)
        found = dist_layouts.full(rt.walker_of(state))
        assert found.keys() == reference.keys()
        assert all(torch.equal(found[name], reference[name]) for name in reference)


def read(folder: Path, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = pickle.loads((folder / f"{kind}.pickle").read_bytes())
    return found

"""A state saved under any layout comes back under any other world size and layout, from the store and from memory."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.session.scripts import Script, torchrun

MODULE = "tests.session.layouts"
PAIRS = 4 * 4 + 2  # four layouts of one model restored as four; two others as themselves


def launch(log: Path, ranks: int, *args: str, **env: str) -> Script:
    if ranks == 1:
        return Script([sys.executable, "-m", MODULE, *args], log, env)
    return torchrun(log, ranks, MODULE, *args, **env)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.mark.torchrun
def test_four_ranks_save_every_layout(saved: Path, tmp_path: Path) -> None:
    lines = launch(tmp_path / "log", 4, "save", str(saved), "store").end(240)
    assert lines[-1] == {"rank": 0, "done": True}


@pytest.mark.torchrun
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_other_worlds_restore_every_layout_from_the_store(saved: Path, tmp_path: Path, ranks: int) -> None:
    mine = shutil.copytree(saved, tmp_path / "copy")
    lines = launch(tmp_path / "log", ranks, "load", str(mine), "store").end(280)
    assert len([line for line in lines if "target" in line]) == PAIRS


@pytest.mark.torchrun
def test_another_world_restores_every_layout_from_memory(tmp_path: Path) -> None:
    env = {"CKPT_LINGER_S": "120"}
    folder = tmp_path / "runs"
    folder.mkdir()
    launch(tmp_path / "1.log", 4, "save", str(folder), "memory", **env).end(240)
    lines = launch(tmp_path / "2.log", 2, "load", str(folder), "memory", **env).end(240)
    assert len([line for line in lines if "target" in line]) == PAIRS

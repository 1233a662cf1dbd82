"""Every layout's tensors are copied under the next step, which runs into the copy; each checkpoint is of one step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpointer.late_layouts import KINDS, LATE
from tests.checkpointer.scripts import torchrun

RANKS = 4


@pytest.mark.torchrun
def test_what_is_copied_late_is_of_one_step_in_every_layout(tmp_path: Path) -> None:
    lines = torchrun(tmp_path / "log", RANKS, "tests.checkpointer.late_layouts", str(tmp_path), CKPT_LINGER_S="0").end(
        240
    )
    found = {(line["kind"], line["rank"]): line for line in lines if "kind" in line}
    assert found.keys() == {(kind, rank) for kind in KINDS for rank in range(RANKS)}
    for where, line in found.items():
        assert (line["wrong"], line["fell_back"]) == ([], []), where
        assert line["late"] >= LATE, where

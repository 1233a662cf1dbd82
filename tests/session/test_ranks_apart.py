"""Ranks that do not do alike: nobody waits for one that does not come (tests/session/apart.py, two in one launch)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.session.scripts import torchrun

pytestmark = pytest.mark.torchrun


def test_ranks_that_do_not_do_alike_are_named_and_nobody_waits_for_them(tmp_path: Path) -> None:
    lines = torchrun(tmp_path / "log", 2, "tests.session.apart", str(tmp_path)).end(300)
    saw = {(line["check"], line["rank"]): line["saw"] for line in lines if "check" in line}
    for rank in (0, 1):
        bad = saw["a_state_that_cannot_be_read", rank]
        assert [text == "saved" for text in bad["said"]] == [True, False, True]
        assert "no state today" in bad["said"][1]
        assert "no state today" in bad["end"]
        assert bad["step"] == 6
        dies = saw["an_agent_that_dies_in_a_save", rank]
        assert dies["step"] == 4
        assert dies["took_s"] < 100
        early = saw["an_early_break", rank]
        assert early["ended"] == (3 if rank else 8)
        assert early["took_s"] < 100  # ckpt.Limits(exit_s=) is 600
        kind, text = saw["a_failure_after_the_restore", rank]["error"]
        assert kind == "SaveFailed"
        assert "no state today" in text
    assert "rank 1 cannot save" in saw["a_state_that_cannot_be_read", 0]["said"][1]
    assert "rank 1 cannot save" in saw["an_agent_that_dies_in_a_save", 0]["said"]
    ends = saw["an_early_break", 0]["end"], saw["an_early_break", 1]["end"]
    if "rank 1 left" in ends[0]:
        assert "rank 1 ended the block after step 3, and rank 0 went past that" in ends[1]
    else:  # rank 0 came to its end before anybody had looked
        assert all("the block has to be ended by all ranks at the same step" in end for end in ends)

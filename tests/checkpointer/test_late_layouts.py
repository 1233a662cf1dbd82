"""Every layout's tensors are copied under the next step, which runs into the copy; each checkpoint is of one step."""

from __future__ import annotations

import pytest

from tests.checkpointer import late_layouts
from tests.checkpointer.conftest import Saw

RANKS, CHECKS = 4, (late_layouts,)
pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(600)]


def test_what_is_copied_late_is_of_one_step_in_every_layout(saw: Saw) -> None:
    for rank, found in enumerate(saw(late_layouts.late_copies)):
        for kind in late_layouts.KINDS:
            assert (found[kind]["wrong"], found[kind]["fell_back"]) == ([], []), (rank, kind)
            assert found[kind]["late"] >= late_layouts.LATE, (rank, kind)

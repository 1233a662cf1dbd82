"""How far a checkpoint has come, asked for by a thread that is interrupted."""

from __future__ import annotations

import threading

import pytest

from ckpt import threads
from ckpt.errors import SaveFailed
from ckpt.trainer.link import levels
from ckpt.trainer.link.levels import Levels
from ckpt.types import Version
from tests.threads import interrupted_anywhere

ONE, TWO = Version(1), Version(2)


def use(it: Levels) -> None:
    it.expect(TWO)
    it.forget_failures(TWO)
    it.record(ONE, "store", True)
    it.wait(ONE, "store", 1.0)
    with pytest.raises(SaveFailed, match="within"):
        it.wait(TWO, "store", 0.001)
    assert (it.level(ONE), it.newest("store"), it.has_pending_versions, it.level(TWO)) == ("store", ONE, True, "none")


def test_an_interrupt_anywhere_leaves_nothing_locked() -> None:
    for it in interrupted_anywhere({levels.__file__, threads.__file__, threading.__file__}, Levels, use):
        thread = threading.Thread(target=it.fail_all, args=("the end",), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()


def test_nothing_is_open_any_more_where_nothing_more_is_reported() -> None:
    """As of a job whose place another has taken: it does not say that it waits."""
    it = Levels()
    it.expect(ONE)
    assert it.has_pending_versions
    it.fail_all("another start owns the run now")
    assert not it.has_pending_versions

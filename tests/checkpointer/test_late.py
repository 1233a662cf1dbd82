"""A rank that passed a boundary before it could see that it was appointed, while others hold there."""

from __future__ import annotations

from pathlib import Path

import ckpt
from ckpt.ipc.control_page import ControlWord, WordKind
from ckpt.ipc.messages import Message
from tests.checkpointer.loops import make


def test_a_rank_that_others_wait_for_says_at_once_that_it_is_past_their_boundary(tmp_path: Path) -> None:
    """In the next collective, which those have not entered, it would wait for them, and they for it."""
    with ckpt.Checkpointer(tmp_path, make().state, policy=ckpt.Every(steps=1000)) as ck:
        ck.step()
        ck.step()
        link = ck._block.saver.link

        def missed(word: ControlWord) -> int:
            before = ck._receipt.missed_snapshots
            link._on_message(Message({"t": "hold-awaited", "word": word.pack()}))
            return ck._receipt.missed_snapshots - before

        assert missed(ControlWord(7, 0, WordKind.HOLD, 3)) == 0, "it will come there"
        assert missed(ControlWord(7, 0, WordKind.HOLD, 2, 1)) == 0, "a poll that is yet to come"
        assert missed(ControlWord(7, 0, WordKind.HOLD, 2)) == 1
        assert missed(ControlWord(7, 0, WordKind.HOLD, 1)) == 1
        word, page = ControlWord(7, 0, WordKind.HOLD, 2), link.view.words
        link.view.words = memoryview(bytearray(word.pack().to_bytes(8, "little"))).cast("Q")
        assert link.view.read_words(2, 0) == [word.pack()]
        assert missed(word) == 0, "it has seen it there, and answers itself"
        assert missed(ControlWord(8, 0, WordKind.HOLD, 2)) == 1
        link.view.words = page

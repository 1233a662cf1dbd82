"""A receipt says what a run came to: steps lost, stalls, bytes per level, what was proven, what fell back and why."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

import ckpt
from ckpt.events import Event
from ckpt.trainer.loop.run_report import FALLBACK_MESSAGES_MAX, MESSAGE_CHARS_MAX, RunReport
from tests.checkpointer.loops import make
from tests.checkpointer.runs import LATER, run, saving


def test_at_the_exit_it_says_what_reached_each_level(tmp_path: Path) -> None:

    def at(ck: ckpt.Checkpointer, step: int) -> None:
        saving(step)(ck, step)
        assert ck.receipt["commits"] == step, "whoever waited for a commit finds it in the receipt"

    ended = run(tmp_path, 3, make(), at, {"frozen": nn.Linear(600, 600)}, policy=LATER, codec="raw")
    said, frozen_bytes = ended.ck.receipt, 4 * (600 * 600 + 600)
    assert json.loads(json.dumps(said)) == said
    assert said["commits"] == said["snapshots"] == 3  # the exit finds the last step saved
    assert said["bytes"].keys() == {"local", "store"}
    assert said["bytes"]["local"] > 3 * frozen_bytes
    packs = sum(path.stat().st_size for path in tmp_path.rglob("*.pack"))
    assert 0.9 * packs < said["bytes"]["store"] <= packs
    assert said["committed_referred_bytes"] >= 2 * (frozen_bytes - 4096 * 4)
    assert said["committed_raw_bytes"] > 3 * frozen_bytes
    assert said["steps_lost"] is None
    (line,) = [event.message for event in ended.seen.named("receipt")]
    assert "\n" not in line
    for part in (
        "started at step 0; ended at step 3; 3 checkpoints, training paused ",
        "step 3 is committed",
        "iB stored",
    ):
        assert part in line


def test_a_restore_says_what_it_came_to(tmp_path: Path) -> None:
    run(tmp_path, 3, codec="raw")
    seen = run(tmp_path, 3).seen
    (event,) = seen.named("restored")
    said = event.data
    assert said["steps_lost"] is None, "nobody who is left knows how far the former run came"
    assert said["bytes"].keys() == {"restored from store"}
    assert said["bytes"]["restored from store"] > 0
    assert said["entry_s"] > 0
    assert said["proven"] == ["the hashes of all frames read"]
    assert said["fell_back"] == []
    for part in ("resumed at step 3 from the store", ", in "):
        assert part in event.message


def test_what_fell_back_is_bounded_and_in_one_line() -> None:
    receipt = RunReport()
    for number in range(2 * FALLBACK_MESSAGES_MAX):
        receipt.told(Event("restore.skipped", f"ckpt: {number}\n{'x' * 2 * MESSAGE_CHARS_MAX}", True))
    receipt.told(Event("restore.skipped", "quiet"))
    assert len(receipt.told.fallback_messages) == FALLBACK_MESSAGES_MAX
    receipt.fallbacks = receipt.told.fallback_messages
    assert "\n" not in receipt.line() + receipt.restored_line()
    assert all(len(text) <= MESSAGE_CHARS_MAX and text.endswith("x ...") for text in receipt.told.fallback_messages)

"""The file that says what a notice came to."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.ipc import outcome_file


def test_a_folder_in_its_place_is_not_replaced_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match=f"this path is not a regular file, so it is not replaced: '{tmp_path}'"):
        outcome_file.write_outcome(tmp_path, "epoch", "launch", {"version": None})
    assert list(tmp_path.iterdir()) == []

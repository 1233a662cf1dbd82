"""Which stores are said to list late."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.storage.late import late_listing_cause


def test_a_folder_on_a_local_disk_is_prompt(tmp_path: Path) -> None:
    assert late_listing_cause(str(tmp_path)) is None
    assert late_listing_cause(str(tmp_path / "not" / "there yet")) is None


@pytest.mark.parametrize("url", ["s3://b/r", "gs://b/r", "az://b/r", "memory://r", "fsspec+s3://b/r", "sftp://host/r"])
def test_object_stores_and_what_asks_a_server_each_time_are_prompt(url: str) -> None:
    assert late_listing_cause(url) is None


@pytest.mark.parametrize("url", ["smb://host/r", "fsspec+dropbox://r", "late://r"])
def test_a_file_system_that_nothing_is_known_of_may_be_late(url: str) -> None:
    assert late_listing_cause(url) is not None

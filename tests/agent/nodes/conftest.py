"""Several agents on one machine. An agent that has lost its coordinator and its ranks stays as long as a test takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.storage import canonical
from tests.agent.nodes.cluster import Cluster


@pytest.fixture
def url(tmp_path: Path) -> str:
    return canonical(str(tmp_path / "store"))


@pytest.fixture
def cluster(url: str, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("CKPT_LINGER_S", "120")
    made = Cluster(url, runtime_dir)
    yield made
    made.close()

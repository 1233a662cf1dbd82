"""Several agents on one machine. An agent that has lost its coordinator and its ranks stays as long as a test takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.storage import canonical
from tests.agent.nodes.cluster import Cluster


@pytest.fixture
def url(tmp_path: Path) -> str:
    return canonical(str(tmp_path / "store"))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where agents find their modules compiled, also where Python is told to write no bytecode: compiling them takes
    half of the time that a start takes, and these tests start several hundred."""
    return tmp_path_factory.getbasetemp() / "compiled"


@pytest.fixture
def cluster(url: str, runtime_dir: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("CKPT_LINGER_S", "120")
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", os.fspath(compiled))
    made = Cluster(url, runtime_dir)
    yield made
    made.close()

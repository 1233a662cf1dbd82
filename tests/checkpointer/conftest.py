"""S3 servers for the tests of the session, to which the environment leads; and launches of several ranks."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import servers
from tests.checkpointer import proxy as proxies
from tests.checkpointer.proxy import Proxy
from tests.checkpointer.runs import empty
from tests.checkpointer.scripts import lines_of, torchrun
from tests.servers import Server

Saw = Callable[[Callable[..., Any]], list[Any]]


@pytest.fixture(scope="module")
def rclone() -> Iterator[Server]:
    with servers.rclone() as server:
        yield server


@pytest.fixture
def store(rclone: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The proxy to an empty bucket; the environment leads to it, and what fails is tried again for a second only."""
    with proxies.proxy(rclone) as made:
        for name, value in made.at.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("CKPT_RETRY_S", "1")
        empty(rclone)
        yield made


@pytest.fixture
def moto(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("CKPT_RETRY_S", "0.5")
    with servers.moto() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture(scope="module")
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a launch of RANKS ranks that have made all CHECKS, both named by the test module. It has ended. It had
    a folder for sockets to itself, where nothing is left."""
    folder = tmp_path_factory.mktemp("ranks")
    runtime = Path(tempfile.mkdtemp(prefix="ckpt-t", dir="/tmp"))
    try:
        env = {"CKPT_RUNTIME_DIR": str(runtime), "CKPT_LINGER_S": "0", "CKPT_LAUNCH": "ranks", "CKPT_NOTICES": "off"}
        names = [module.__name__ for module in request.module.CHECKS]
        options = {"CKPT_SIGNALS": "off", **env}
        ranks = request.module.RANKS
        script = torchrun(folder / "log", ranks, "tests.checkpointer.ranks", str(folder), *names, **options)
        try:
            script.process.wait(560)
        except subprocess.TimeoutExpired:
            script.process.terminate()  # torchrun ends its workers
            script.process.wait(60)
        left = [path.name for path in runtime.iterdir() if not path.name.endswith(".outcome.json")]  # which stays
        assert script.process.returncode != 0 or left == []
    finally:
        shutil.rmtree(runtime, ignore_errors=True)
    return folder / "log"


@pytest.fixture
def saw(launched: Path, request: pytest.FixtureRequest) -> Saw:
    """What each rank saw of a check, by rank."""

    def find(check: Callable[..., Any]) -> list[Any]:
        lines = [line for line in lines_of(launched) if line.get("check") == check.__name__]
        text = launched.read_text(errors="replace")[-4000:]
        assert sorted(line["rank"] for line in lines) == list(range(request.module.RANKS)), text
        return [line["saw"] for line in sorted(lines, key=lambda line: line["rank"])]

    return find

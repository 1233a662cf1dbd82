"""S3 servers for the tests of the session: what leads to them is in the environment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import servers
from tests.checkpointer import proxy as proxies
from tests.checkpointer.proxy import Proxy
from tests.checkpointer.runs import empty
from tests.servers import Server


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

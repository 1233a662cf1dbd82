"""The stores that the contract suite runs over: each kind is a real one, with what is to be expected of it."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ckpt import settings, storage
from tests import ceph, clouds, servers
from tests.servers import Server


@dataclass(frozen=True)
class Kind:
    """`honours_if_absent`: whether a taken key is refused. `keeps_uploads`: whether an unfinished upload can be left
    behind, and is then found by abort_uploads. `dates_uploads`: whether it says when one began (moto says 2010).
    `server`: the server behind it."""

    name: str
    scheme: str
    honours_if_absent: bool = True
    keeps_uploads: bool = False
    dates_uploads: bool = True
    server: Server | None = None

    def url(self, folder: Path) -> str:
        """A place of its own within the store."""
        here = secrets.token_hex(6)
        if self.server is not None:
            return f"{self.scheme}://{self.server.bucket}/runs/{here}"
        return f"memory://{here}" if self.scheme == "memory" else f"{self.scheme}{folder}/{here}/store"


KINDS = {
    kind.name: kind
    for kind in (
        Kind("local", "", keeps_uploads=True),
        Kind("memory", "memory"),
        Kind("fsspec-memory", "fsspec+memory://"),
        Kind("fsspec-file", "fsspec+file://", keeps_uploads=True),
        Kind("rclone", "s3", honours_if_absent=False, keeps_uploads=True),
        Kind("moto", "s3", keeps_uploads=True, dates_uploads=False),
        Kind("s3fs-moto", "fsspec+s3"),
        Kind("ceph", "s3", keeps_uploads=True),
        Kind("azurite", "az"),
        Kind("gcs", "gs", honours_if_absent=False),
    )
}
SERVERS: dict[str, Callable[[], contextlib.AbstractContextManager[Server]]] = {
    "rclone": servers.rclone,
    "moto": servers.moto,
    "s3fs-moto": servers.moto,
    "ceph": ceph.ceph,
    "azurite": clouds.azurite,
    "gcs": clouds.gcs,
}
WHY_NOT = {"ceph": ceph.why_not, "azurite": clouds.why_no_azurite}


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    found = KINDS[request.param]
    if found.name in WHY_NOT and (why := WHY_NOT[found.name]()):
        pytest.skip(why)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(SERVERS[found.name]()) if found.name in SERVERS else None
        yield replace(found, server=server)


@pytest.fixture
def place(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A URL in that store where nothing is yet, with the environment that reaches it."""
    for name, value in (kind.server.environment() if kind.server else {}).items():
        monkeypatch.setenv(name, value)
    with tempfile.TemporaryDirectory(prefix="ckpt-store-") as folder:
        yield kind.url(Path(folder))


@pytest.fixture
def store(place: str) -> Iterator[storage.Backend]:
    backend = storage.open(place, settings=replace(settings.read_settings(), retry_s=60.0))
    yield backend
    backend.close()

"""A whole run over Ceph's, Azure's and Google's object storage, and through s3fs: saved, lost from memory, and restored
bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ckpt
from tests import ceph, clouds, servers
from tests.checkpointer.loops import make
from tests.checkpointer.runs import goes_on, run
from tests.cli.stores import opened
from tests.servers import Server

SERVERS = {
    "s3": (ceph.why_not, ceph.ceph),
    "az": (clouds.why_no_azurite, clouds.azurite),
    "gs": (lambda: None, clouds.gcs),
    "fsspec+s3": (lambda: None, servers.moto),
}


@pytest.fixture(scope="module", params=SERVERS)
def cloud(request: pytest.FixtureRequest) -> Iterator[tuple[str, Server]]:
    why_not, server = SERVERS[request.param]
    if why := why_not():
        pytest.skip(why)
    with server() as made:
        yield request.param, made


@pytest.fixture
def url(cloud: tuple[str, Server], monkeypatch: pytest.MonkeyPatch) -> str:
    scheme, server = cloud
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return f"{scheme}://{server.bucket}/runs/one"


def test_a_run_goes_on_bit_for_bit_from_that_cloud(url: str) -> None:
    first = run(url, 4, make(), policy=ckpt.Every(steps=2), keep=ckpt.Keep(last=1))
    assert goes_on(url, first.losses).ck.restored.level == "store"
    with opened(url) as backend:
        assert len(list(backend.list("commits/"))) >= 1


@pytest.mark.parametrize("cloud", ["s3"], indirect=True)
def test_wrong_credentials_are_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another one")
    with pytest.raises(ckpt.AccessDenied, match="credentials"):
        run(url, 8)

"""A real server behind TLS with a certificate of an authority of one's own: what is trusted, and what is signed."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt import storage
from ckpt.backends.cloud import CloudBackend
from ckpt.errors import StorageError, UsageError
from ckpt.settings import read_settings
from ckpt.storage.retry import Retrying
from tests import servers
from tests.checkpointer import proxy as proxies
from tests.checkpointer.proxy import Proxy
from tests.checkpointer.runs import run
from tests.servers import Server
from tests.storage.certificates import authority

UNSIGNED = "UNSIGNED-PAYLOAD"
URL = "s3://bucket/run"


@pytest.fixture(scope="module")
def rclone() -> Iterator[Server]:
    """Answers a ranged get with 200, so that both of our ways to ask it are used."""
    with servers.rclone() as server:
        yield server


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    return authority(tmp_path_factory.mktemp("trust"))


@contextmanager
def front(server: Server, context: ssl.SSLContext | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """What the server is asked for, over TLS or not; the environment leads there. In capitals the name of the loopback
    is not taken for one, which a payload is not signed to, TLS or not."""
    with proxies.proxy(server) as made:
        if context is not None:
            made.socket = context.wrap_socket(made.socket, server_side=True)
        scheme = "http" if context is None else "https"
        made.at = replace(made.at, endpoint=f"{scheme}://LOCALHOST:{made.server_address[1]}")
        for name, value in made.at.environment().items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.fixture
def over_tls(rclone: Server, trust: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setenv("AWS_CA_BUNDLE", os.fspath(trust[0]))
    with front(rclone, trust[1], monkeypatch) as made:
        yield made


@contextmanager
def opened() -> Iterator[tuple[storage.Backend, CloudBackend]]:
    backend = storage.open(URL, settings=replace(read_settings(), retry_s=0.0))
    try:
        assert isinstance(backend, Retrying)
        assert isinstance(backend.inner, CloudBackend)
        yield backend, backend.inner
    finally:
        backend.close()


def use(parts: bool = True) -> None:
    """Every operation once, a put in parts among them."""
    with opened() as (backend, inner):
        backend.put("data/small", [b"abc", b"def"])
        if parts:
            inner.single_bytes_max, inner.part_bytes = 1 << 20, 5 << 20
            backend.put("data/large", [bytes(11 << 20)])
            assert backend.head("data/large").size == 11 << 20
        assert backend.get("data/small", 10) == b"abcdef"
        assert bytes(backend.get_range("data/small", 2, 3)) == b"cde"
        assert "data/small" in {info.key for info in backend.list("")}
        assert backend.abort_uploads(0) == 0
        assert backend.now_s() > 0
        backend.delete(["data/small", "data/large"])


def test_over_tls_no_payload_is_signed(over_tls: Proxy) -> None:
    use()
    said = {(method, key): signed for method, key, signed in over_tls.heard if key.startswith("run/data/")}
    puts = [signed for (method, _), signed in said.items() if method == "PUT"]
    assert len(puts) >= 2
    assert set(puts) == {UNSIGNED}


def test_over_a_bare_network_every_payload_is_signed(rclone: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with front(rclone, None, monkeypatch) as made:
        use(parts=False)
    puts = [signed for method, _, signed in made.heard if method == "PUT"]
    assert puts
    assert all(len(signed) == 64 for signed in puts)


def test_a_store_that_nobody_vouches_for_is_refused_with_the_way_out(
    over_tls: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_CA_BUNDLE")
    with opened() as (backend, _), pytest.raises(StorageError, match="AWS_CA_BUNDLE") as caught:
        backend.put("data/small", [b"abc"])
    assert "AWS_ENDPOINT_URL" in str(caught.value)
    assert over_tls.heard == []


@pytest.mark.parametrize("content", [None, b"", b"no certificate", b"\xff"])
def test_a_bundle_that_is_none_is_refused_by_the_name_of_its_variable(
    tmp_path: Path, content: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "bundle").write_bytes(content)
    monkeypatch.setenv("AWS_CA_BUNDLE", os.fspath(tmp_path / "bundle"))
    with pytest.raises(UsageError, match="AWS_CA_BUNDLE"):
        storage.open(URL)


def test_a_job_saves_and_restores_over_tls(over_tls: Proxy) -> None:
    """Its agent, too, is told whom to trust."""
    run("s3://bucket/job", 3)
    assert run("s3://bucket/job", 5).from_step == 3
    puts = [signed for method, key, signed in over_tls.heard if method == "PUT" and key.startswith("job/")]
    assert puts
    assert set(puts) == {UNSIGNED}

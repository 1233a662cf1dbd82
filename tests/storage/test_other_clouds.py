"""gs and az, where they are not like s3: over the emulators of tests/clouds.py."""

from __future__ import annotations

import re
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from ckpt import settings, storage
from ckpt.backends.cloud import open_cloud
from ckpt.errors import AccessDenied, StorageError, TransientError
from tests import clouds
from tests.clouds import Azurite, Gcs


@pytest.fixture(scope="module")
def azurite() -> Iterator[Azurite]:
    if why := clouds.why_no_azurite():
        pytest.skip(why)
    with clouds.azurite() as server:
        yield server


@pytest.fixture(scope="module")
def gcs() -> Iterator[Gcs]:
    with clouds.gcs() as server:
        yield server


def opened(url: str) -> storage.Backend:
    return storage.open(url, settings=replace(settings.read_settings(), retry_s=5.0))


def test_a_wrong_key_of_an_azure_account_is_named_as_such(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**azurite.environment(), "AZURE_STORAGE_ACCOUNT_KEY": "d3Jvbmc="}.items():
        monkeypatch.setenv(name, value)
    store = opened("az://bucket/run")
    attempts = (
        lambda: store.put("k", [b"x"]),
        lambda: store.get("k", 1),
        lambda: list(store.list("")),
        lambda: store.delete(["k", "l"]),
    )
    for attempt in attempts:
        with pytest.raises(AccessDenied, match="credentials"):
            attempt()
    store.close()


class _Busy(BaseHTTPRequestHandler):
    """Takes a batch of deletions, and says of each that it is too busy for it."""

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        parts = [
            f"--b\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
            "HTTP/1.1 503 Server Busy\r\nx-ms-error-code: ServerBusy\r\nContent-Length: 0\r\n\r\n\r\n"
            for number in re.findall(r"Content-ID: ?(\d+)", asked, re.IGNORECASE)
        ]
        body = ("".join(parts) + "--b--\r\n").encode()
        self.send_response(202)
        self.send_header("Content-Type", "multipart/mixed; boundary=b")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_what_an_azure_batch_says_of_one_deletion_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), _Busy) as busy:
        serving = threading.Thread(target=busy.serve_forever)
        serving.start()
        server = Azurite("busy", f"http://127.0.0.1:{busy.server_port}", "bucket")
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        backend = open_cloud("az://bucket/run")
        try:
            with pytest.raises(TransientError, match="503"):
                backend.delete(["k", "l"])
        finally:
            backend.close()
            busy.shutdown()
            serving.join()


def test_azures_emulator_is_reached_by_its_own_variables_too(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", azurite.endpoint)
    assert settings.store_environment()["AZURITE_BLOB_STORAGE_URL"] == azurite.endpoint
    store = opened("az://bucket/emulated")
    store.put("k", [b"x"])
    assert store.get("k", 1) == b"x"
    store.close()


def test_deleting_in_a_container_that_is_not_there_is_an_error(
    azurite: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in azurite.environment().items():
        monkeypatch.setenv(name, value)
    store = opened("az://nowhere/run")
    with pytest.raises(StorageError, match="no bucket nowhere"):
        store.delete(["k"])
    store.close()


def test_the_time_of_a_gs_store_is_asked_without_a_signature(gcs: Gcs, monkeypatch: pytest.MonkeyPatch) -> None:
    """To sign without a private key is to ask Google, by a name that only its machines know."""
    asked: list[str] = []
    resolve = socket.getaddrinfo

    def seen(host: str, *rest: object, **more: object) -> object:
        asked.append(host)
        return resolve(host, *rest, **more)  # type: ignore[arg-type]

    for name, value in gcs.environment().items():
        monkeypatch.setenv(name, value)
    store = opened("gs://bucket/run")
    monkeypatch.setattr(socket, "getaddrinfo", seen)
    assert store.now_s() > 1.7e9
    assert asked == [urllib.parse.urlsplit(gcs.endpoint).hostname]
    assert list(store.list("")) == []
    store.close()

"""Emulators of the object storage of Azure and Google on the loopback, like the S3 servers of tests/servers.py.

azurite()    Microsoft's own (npm: azurite, put into .venv/azurite by `make emulators`)
gcs()        moto's S3, spoken to as Google's XML API, which S3's is so like; it knows no generations
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hmac
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.servers import Server, free_port, moto, running

# Azurite's, in its documentation; no secret.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
API_VERSION = "2021-08-06"


@dataclass(frozen=True)
class Azurite(Server):
    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ENDPOINT": f"{self.endpoint}/{ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
        }

    def make_bucket(self, name: str) -> None:
        self._ask("PUT", name)

    def remove_bucket(self, name: str) -> None:
        self._ask("DELETE", name)

    def _ask(self, method: str, container: str) -> None:
        """One request about a container, signed by the account's key (Shared Key, version 2015-02-21 and later)."""
        date = email.utils.formatdate(usegmt=True)
        resource = f"/{ACCOUNT}/{ACCOUNT}/{container}\nrestype:container"
        text = "\n".join([method, *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{API_VERSION}", resource])
        signature = base64.b64encode(hmac.digest(base64.b64decode(ACCOUNT_KEY), text.encode(), "sha256")).decode()
        request = urllib.request.Request(
            f"{self.endpoint}/{ACCOUNT}/{container}?restype=container",
            method=method,
            headers={
                "x-ms-date": date,
                "x-ms-version": API_VERSION,
                "Content-Length": "0",
                "Authorization": f"SharedKey {ACCOUNT}:{signature}",
            },
        )
        urllib.request.urlopen(request, timeout=30).close()


@dataclass(frozen=True)
class Gcs(Server):
    """`environment` is for the client that speaks XML to it; buckets are made as those of S3."""

    def environment(self) -> dict[str, str]:
        # With a token at hand nobody is asked for one.
        return {"GOOGLE_BASE_URL": self.endpoint, "GOOGLE_BEARER_TOKEN": "any"}


def why_no_azurite() -> str | None:
    """Why it cannot be started here; None where it can."""
    if _azurite() is None or shutil.which("node") is None:
        return "azurite not found: `make emulators` installs it (needs node and npm)"
    return None


@contextlib.contextmanager
def azurite() -> Iterator[Azurite]:
    """All in memory; strict about API versions and preconditions, and about signatures. No word to its makers."""
    port = free_port()
    words = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--silent"]
    words += ["--disableTelemetry", "--skipApiVersionCheck"]
    with (
        tempfile.TemporaryDirectory(prefix="ckpt-azurite-") as at,
        running([_azurite() or "azurite-blob", *words], port, cwd=at),
    ):
        server = Azurite("azurite", f"http://127.0.0.1:{port}", "bucket")
        server.make_bucket(server.bucket)
        yield server


@contextlib.contextmanager
def gcs() -> Iterator[Gcs]:
    with moto() as server:
        yield Gcs("gcs", server.endpoint, server.bucket)


def _azurite() -> str | None:
    beside = Path(sys.prefix, "azurite/node_modules/.bin/azurite-blob")
    return str(beside) if beside.exists() else shutil.which("azurite-blob")

"""Real S3 servers on the loopback, as context managers that end what they started.

`with rclone() as server:` sets nothing in the environment; `server.environment()` is what a client needs to reach it.
A bucket named `server.bucket` exists. Each server's fault model is its own: they are the real thing.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from obstore.store import S3Store

KEY_ID, SECRET, REGION = "testing-key-id", "testing-secret", "us-east-1"
START_S = 90.0


@dataclass(frozen=True)
class Server:
    name: str
    endpoint: str
    bucket: str

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def objects(self, bucket: str) -> S3Store:
        """One of its buckets, past every proxy."""
        at = {"endpoint": self.endpoint, "access_key_id": KEY_ID, "secret_access_key": SECRET, "region": REGION}
        return S3Store(bucket, config=at, client_options={"allow_http": True})

    def make_bucket(self, name: str) -> None:
        _signed(self, "PUT", f"/{name}")

    def remove_bucket(self, name: str) -> None:
        """Only an empty one."""
        _signed(self, "DELETE", f"/{name}")


@contextlib.contextmanager
def rclone() -> Iterator[Server]:
    """`rclone serve s3` over a temporary folder: ignores If-None-Match, answers a ranged get with 200."""
    at = tempfile.mkdtemp(prefix="ckpt-rclone-")
    Path(at, "bucket").mkdir()
    port = free_port()
    words = ["serve", "s3", at, "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY_ID},{SECRET}"]
    try:
        with running([program("rclone"), "--config", os.devnull, *words], port):
            yield Server("rclone", f"http://127.0.0.1:{port}", "bucket")
    finally:
        shutil.rmtree(at, ignore_errors=True)


@contextlib.contextmanager
def moto() -> Iterator[Server]:
    """moto's server in a process of its own: strict about preconditions, blind to credentials."""
    port = free_port()
    with running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port):
        server = Server("moto", f"http://127.0.0.1:{port}", "bucket")
        server.make_bucket(server.bucket)
        yield server


def start_upload(server: Server, key: str) -> None:
    """Begins a multipart upload that nobody will end."""
    _signed(server, "POST", f"/{server.bucket}/{key}", "uploads=")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def program(name: str) -> str:
    """From the environment's scripts, else from PATH."""
    beside = Path(sysconfig.get_path("scripts"), name)
    return str(beside) if beside.exists() else name


@contextlib.contextmanager
def running(words: list[str], port: int, cwd: str | None = None) -> Iterator[None]:
    """A program from when it answers on that port until the end of the block."""
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=cwd)
        try:
            deadline_s = time.monotonic() + START_S
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    out.seek(0)
                    raise RuntimeError(f"{words} did not start: {out.read().decode()[-2000:]}")
                time.sleep(0.05)
            yield
        finally:
            process.kill()
            process.wait(60)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _signed(server: Server, method: str, path: str, query: str = "") -> None:
    """One request without a body, signed by AWS Signature Version 4."""
    host = server.endpoint.removeprefix("http://")
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    empty = hashlib.sha256(b"").hexdigest()
    headers = {"host": host, "x-amz-content-sha256": empty, "x-amz-date": now}
    names = ";".join(headers)
    canonical = "\n".join([method, path, query, *(f"{k}:{v}" for k, v in headers.items()), "", names, empty])
    scope = f"{now[:8]}/{REGION}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{SECRET}".encode()
    for part in (now[:8], REGION, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={KEY_ID}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    request = urllib.request.Request(f"{server.endpoint}{path}?{query}".rstrip("?"), method=method, headers=headers)
    urllib.request.urlopen(request, timeout=30).close()

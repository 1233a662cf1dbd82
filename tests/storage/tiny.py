"""A very small S3 server on the loopback whose failures are planned.

Fault model: each request takes the next of `plan` that is meant for its method, and meets it before anything is done
(`status`, RESET, SILENT), or after it (LOST_REPLY), or in the body of the reply (CUT). `ranges` says how a ranged get
is answered: PARTIAL (206), NAMED (200 with Content-Range, as rclone does), WHOLE (200 with all of the object).
Signatures and preconditions are not looked at. `requests` is the log.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import ClassVar

from tests.handlers import FaultyHandler
from tests.servers import Server

RESET, SILENT, LOST_REPLY, CUT = "reset", "silent", "lost reply", "cut"
PARTIAL, NAMED, WHOLE = "partial", "named", "whole"


class TinyS3(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.plan: list[tuple[str, int | str]] = []  # (method, status or fault)
        self.body = ""  # what a planned status carries
        self.ranges = PARTIAL
        self.requests: list[str] = []
        self.lock = threading.Lock()
        self.open_sockets: set[socket.socket] = set()
        self.ending = threading.Event()

    @property
    def at(self) -> Server:
        return Server("tiny", f"http://127.0.0.1:{self.server_address[1]}", "bucket")

    def fault(self, method: str) -> int | str | None:
        with self.lock:
            for number, (meant_for, fault) in enumerate(self.plan):
                if meant_for in (method, "*"):
                    del self.plan[number]
                    return fault
        return None

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that break off are what this is for


@contextlib.contextmanager
def tiny() -> Iterator[TinyS3]:
    server = TinyS3()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="tiny-s3")
    thread.start()
    try:
        yield server
    finally:
        server.ending.set()
        server.shutdown()
        server.server_close()
        for each in list(server.open_sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        thread.join(10)


class _Handler(FaultyHandler):
    server: TinyS3
    statuses: ClassVar = {"PUT": 200, "DELETE": 204}

    def do_GET(self) -> None:
        parsed = urllib.parse.urlsplit(self.path)
        self.key = parsed.path.removeprefix("/bucket/")
        self.query = urllib.parse.parse_qs(parsed.query, keep_blank_values=True)
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked = "&".join(sorted(set(self.query) & {"uploads", "uploadId", "partNumber", "delete"}))
        self.server.requests.append(f"{self.command} {self.key} {asked}".strip())
        fault = self.server.fault(self.command)
        if fault == RESET:
            self.reset()
        elif fault == SILENT:
            self.server.ending.wait()
            self.close_connection = True
        elif isinstance(fault, int):
            self._reply(fault, self.server.body.encode())
        else:
            self._serve(data, fault)

    do_PUT = do_HEAD = do_POST = do_DELETE = do_GET

    def _serve(self, data: bytes, fault: str | None) -> None:
        objects, uploads = self.server.objects, self.server.uploads
        upload = self.query.get("uploadId", [""])[0]
        if self.command == "POST" and "uploads" in self.query:
            uploads["u"] = {}
            self._reply(200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
            return
        if self.command == "PUT" and upload:
            uploads[upload][int(self.query["partNumber"][0])] = data
        elif self.command == "PUT":
            objects[self.key] = data
        elif self.command == "POST" and upload:
            objects[self.key] = b"".join(part for _, part in sorted(uploads.pop(upload).items()))
            self._reply(200, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")
            return
        elif self.command == "DELETE" and upload:
            uploads.pop(upload, None)
        if fault == LOST_REPLY:
            self.lose_reply()
        elif self.command in ("PUT", "DELETE"):
            self._reply(self.statuses[self.command], b"")
        elif self.key not in objects:
            self._reply(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self._give(objects[self.key], fault)

    def _give(self, data: bytes, fault: str | None) -> None:
        asked = self.headers.get("Range")
        if asked is None or self.server.ranges == WHOLE:
            self._reply(200, data, fault=fault)
            return
        start, stop = (int(number) for number in asked.removeprefix("bytes=").split("-"))
        named = {"Content-Range": f"bytes {start}-{min(stop, len(data) - 1)}/{len(data)}"}
        if start >= len(data):
            self._reply(416, b"<Error><Code>InvalidRange</Code></Error>")
        else:
            self._reply(206 if self.server.ranges == PARTIAL else 200, data[start : stop + 1], named, fault)

    def _reply(self, status: int, data: bytes, headers: dict[str, str] | None = None, fault: str | None = None) -> None:
        self.send_response(status)
        all_headers = {"Content-Length": str(len(data)), "ETag": '"x"', "Last-Modified": self.date_time_string()}
        for name, value in {**all_headers, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault == CUT:
            self.write_half(data)
            return
        self.wfile.write(data)

"""A very small S3 server on the loopback whose failures are planned.

Fault model: each request takes the next of `plan` that is meant for its method, and meets it before anything is done
(`status`, RESET, SILENT), or after it (LOST_REPLY), or in the body of the reply (CUT). `ranges` says how a ranged get
is answered: PARTIAL (206), NAMED (200 with Content-Range, as rclone does), WHOLE (200 with all of the object).
Signatures and preconditions are not looked at. `requests` is the log, `given` the bytes of each object that were given
out. `gate(key)` is called before any of them is.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
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
        self.given: Counter[str] = Counter()
        self.gate: Callable[[str], None] = lambda key: None
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
        elif self.command == "POST" and "delete" in self.query:
            keys = re.findall(r"<Key>([^<]*)</Key>", data.decode())
            for key in keys:
                objects.pop(key, None)
            done = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            self._reply(200, f"<DeleteResult>{done}</DeleteResult>".encode())
            return
        elif self.command == "DELETE" and upload:
            uploads.pop(upload, None)
        elif self.command == "GET" and "list-type" in self.query:
            self._list(*(self.query.get(name, [""])[0] for name in ("prefix", "delimiter", "start-after")))
            return
        if fault == LOST_REPLY:
            self.lose_reply()
        elif self.command in ("PUT", "DELETE"):
            self._reply(self.statuses[self.command], b"")
        elif self.key not in objects:
            self._reply(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self._give(objects[self.key], fault)

    def _list(self, prefix: str, delimiter: str, after: str) -> None:
        """All of it in one page."""
        keys = sorted(key for key in list(self.server.objects) if key.startswith(prefix) and key > after)
        ends = {key: key.find(delimiter, len(prefix)) if delimiter else -1 for key in keys}
        folders = sorted({key[: end + 1] for key, end in ends.items() if end >= 0})
        at = "2026-01-01T00:00:00.000Z"
        files = [
            f"<Contents><Key>{key}</Key><Size>{len(self.server.objects[key])}</Size>"
            f"<LastModified>{at}</LastModified><ETag>x</ETag></Contents>"
            for key in keys
            if ends[key] < 0
        ]
        folded = [f"<CommonPrefixes><Prefix>{each}</Prefix></CommonPrefixes>" for each in folders]
        body = "".join(["<IsTruncated>false</IsTruncated>", *files, *folded])
        self._reply(200, f"<ListBucketResult>{body}</ListBucketResult>".encode())

    def _give(self, data: bytes, fault: str | None) -> None:
        if self.command == "GET":
            self.server.gate(self.key)
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
        if self.command == "GET" and self.key in self.server.objects:
            with self.server.lock:
                self.server.given[self.key] += len(data)

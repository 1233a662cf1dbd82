"""What fake-gcs-server lacks of the XML API of Google Cloud Storage, as a front of it: a process of its own.

    python tests/gcs_front.py PORT BACKEND_PORT

obstore speaks the XML API. fake-gcs-server answers its gets, heads and listings, and they go there as they are. It has
no such put, no delete and no multipart upload: these are made of its JSON API here, so what is seen of them through
this front says that the client and this reading of Google's documentation agree, and not more.

- put: an insert; x-goog-if-generation-match becomes ifGenerationMatch, whose refusal (412) is the backend's.
- multipart upload: parts lie here until the upload is completed, and then are one insert.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import secrets
import socket
import sys
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOP_BY_HOP = {"connection", "content-length", "date", "server", "transfer-encoding"}


class Front(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, backend_port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.backend_port = backend_port
        self.uploads: dict[str, dict[int, bytes]] = {}

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that broke off


class _Handler(BaseHTTPRequestHandler):
    server: Front
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._pass(self.command, self.path)

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        bucket, key, query = self._asked()
        if "uploadId" in query:
            self.server.uploads.pop(query["uploadId"], None)
            self._reply(204)
        else:
            self._pass("DELETE", f"/storage/v1/b/{bucket}/o/{_quoted(key)}")

    def do_PUT(self) -> None:
        bucket, key, query = self._asked()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "partNumber" in query:
            parts = self.server.uploads.get(query["uploadId"])
            if parts is None:
                return self._reply(404, b"<Error><Code>NoSuchUpload</Code></Error>")
            parts[int(query["partNumber"])] = body
            return self._reply(200, headers={"ETag": f'"{query["partNumber"]}"'})
        return self._insert(bucket, key, body)

    def do_POST(self) -> None:
        bucket, key, query = self._asked()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "uploads" in query:
            upload = secrets.token_hex(8)
            self.server.uploads[upload] = {}
            reply = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            return self._reply(200, reply.encode())
        parts = self.server.uploads.pop(query.get("uploadId", ""), None)
        if parts is None:
            return self._reply(404, b"<Error><Code>NoSuchUpload</Code></Error>")
        numbers = [int(each) for each in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
        whole = b"".join(parts[number] for number in numbers)
        return self._insert(
            bucket, key, whole, "<CompleteMultipartUploadResult><ETag>{}</ETag></CompleteMultipartUploadResult>"
        )

    def _asked(self) -> tuple[str, str, dict[str, str]]:
        """The bucket, the object and the query."""
        path, _, query = self.path.partition("?")
        bucket, _, key = path.removeprefix("/").partition("/")
        return bucket, urllib.parse.unquote(key), dict(urllib.parse.parse_qsl(query, keep_blank_values=True))

    def _insert(self, bucket: str, key: str, content: bytes, told: str = "") -> None:
        """One object. `told`: the body of the reply, around the ETag."""
        wanted = {"uploadType": "multipart", "name": key}
        if (generation := self.headers.get("x-goog-if-generation-match")) is not None:
            wanted["ifGenerationMatch"] = generation
        boundary = secrets.token_hex(16)
        part = f"--{boundary}\r\nContent-Type: {{}}\r\n\r\n"
        meta = json.dumps({"name": key, "contentType": "application/octet-stream"})
        head = part.format("application/json") + meta + "\r\n" + part.format("application/octet-stream")
        status, _, said = self._ask(
            "POST",
            f"/upload/storage/v1/b/{bucket}/o?{urllib.parse.urlencode(wanted)}",
            {"Content-Type": f"multipart/related; boundary={boundary}"},
            head.encode() + content + f"\r\n--{boundary}--\r\n".encode(),
        )
        if status != 200:
            return self._reply(status, said)
        made = json.loads(said)
        tags = {"ETag": made["etag"], "x-goog-generation": made["generation"]}
        return self._reply(200, told.format(made["etag"]).encode(), tags)

    def _pass(self, method: str, path: str) -> None:
        given = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        status, headers, body = self._ask(method, path, given)
        size = headers.get("content-length") if self.command == "HEAD" else None
        kept = {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}
        self._reply(status, body, kept, size)

    def _ask(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        backend = http.client.HTTPConnection("127.0.0.1", self.server.backend_port, timeout=30)
        with contextlib.closing(backend):
            backend.request(method, path, body, headers)
            reply = backend.getresponse()
            return reply.status, reply.headers, reply.read()

    def _reply(
        self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, size: str | None = None
    ) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            if status != 204:
                self.send_header("Content-Length", size or str(len(body)))
            self.end_headers()
            self.wfile.write(body)


def _quoted(key: str) -> str:
    return urllib.parse.quote(key, safe="")


if __name__ == "__main__":
    socket.setdefaulttimeout(None)
    Front(int(sys.argv[1]), int(sys.argv[2])).serve_forever()

"""The parts of the Hugging Face Hub that an upload asks for, on loopback: it keeps the files of each commit."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REPOSITORY, TOKEN = "someone/model", "hf_right"


@dataclass
class Hub:
    """`commits`: the title and the files of each commit. `refuses`: commits are answered by an error."""

    url: str = ""
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    refuses: bool = False


@contextlib.contextmanager
def hub() -> Iterator[Hub]:
    made = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == f"/api/models/{REPOSITORY}/auth-check/write":
                self.answer(200 if self.headers["Authorization"] == f"Bearer {TOKEN}" else 403, {})
            else:
                self.answer(404, {"error": "Repository not found"})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == f"/api/models/{REPOSITORY}/preupload/main":
                paths = [each["path"] for each in json.loads(body)["files"]]
                how = {"uploadMode": "regular", "shouldIgnore": False}
                self.answer(200, {"files": [{"path": path, **how} for path in paths]})
            elif self.path.startswith(f"/api/models/{REPOSITORY}/commit/main") and not made.refuses:
                lines = [json.loads(line) for line in body.splitlines()]
                files = [each["value"] for each in lines if each["key"] == "file"]
                (title,) = [each["value"]["summary"] for each in lines if each["key"] == "header"]
                made.commits.append((title, {each["path"]: base64.b64decode(each["content"]) for each in files}))
                url = f"{made.url}/{REPOSITORY}/commit/{len(made.commits):040x}"
                self.answer(200, {"success": True, "commitOid": url[-40:], "commitUrl": url})
            else:
                self.answer(403, {"error": "the quota is used up"})

        def answer(self, status: int, what: Any) -> None:
            text = json.dumps(what).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            if "error" in what:
                self.send_header("X-Error-Message", what["error"])
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *given: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()

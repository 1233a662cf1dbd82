"""A proxy in front of a real S3 server, whose failures the test plans while a job runs.

Fault model, for each request that a rule of `fail` picks (the newest rule that fits counts):

    answer(status, code)  it is answered with that error, and the server never hears of it
    RESET                 the connection is reset before the server hears of it
    LOST_REPLY            the server does it, and the connection ends without a reply
    HELD                  it waits until `heal()`, and is passed on then, even if its client is dead: it lands late

`met` is the log of the requests that met a fault, as "PUT run/commits/x" lines; `heard` of all. Everything
else passes unchanged, Host and signature included.

`limit` makes the way to the server a link of so many bytes per second, which all requests share; replies are not
slowed. What meets no fault goes on to the server as it comes; a fault is for requests that begin after it was planned.
"""

from __future__ import annotations

import contextlib
import fnmatch
import http.client
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from http.server import ThreadingHTTPServer

from tests.handlers import FaultyHandler
from tests.servers import Server

UPSTREAM_TIMEOUT_S = 30.0

Headers = list[tuple[str, str]]
Reply = tuple[int, Headers, bytes]  # status, headers, body


@dataclass(frozen=True)
class Fault:
    name: str
    status: int = 0
    code: str = ""


SLICE_BYTES = 256 << 10  # of what goes through a limited link at once

RESET, LOST_REPLY, HELD = Fault("reset"), Fault("lost reply"), Fault("held")


def answer(status: int, code: str) -> Fault:
    return Fault(f"{status} {code}", status, code)


@dataclass
class _Rule:
    fault: Fault
    method: str
    key: str
    left: float
    who: str


class Proxy(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, server: Server) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.at = replace(server, endpoint=f"http://127.0.0.1:{self.server_address[1]}")
        self.upstream = urllib.parse.urlsplit(server.endpoint).netloc
        self.bucket = server.bucket
        self.met: list[str] = []
        self.heard: list[tuple[str, str, str]] = []  # method, key, x-amz-content-sha256
        self.open_sockets: set[socket.socket] = set()
        self._rules: list[_Rule] = []
        self._changed = threading.Condition()
        self._healed = threading.Event()
        self._held = 0
        self._ending = False
        self._bytes_per_s = float("inf")
        self.carried = 0  # bytes
        self._free_s = 0.0  # when the link has carried what was put on it

    def fail(
        self, fault: Fault, method: str = "*", key: str = "*", count: float = float("inf"), *, who: str = "*"
    ) -> None:
        """The next `count` requests of `method` whose key matches the glob meet the fault. `who`: only those that are
        signed with that access key id."""
        with self._changed:
            self._rules.append(_Rule(fault, method, key, count, who))

    def limit(self, bytes_per_s: float) -> None:
        """From now on; inf: no more."""
        with self._changed:
            self._bytes_per_s = bytes_per_s
            self._changed.notify_all()

    def carry(self, count: int) -> None:
        """Waits until so many bytes have come over the link."""
        with self._changed:
            done_s = self._free_s = max(self._free_s, time.monotonic()) + count / self._bytes_per_s
            while not self._ending and self._bytes_per_s < float("inf") and (left_s := done_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            self.carried += count
            self._changed.notify_all()

    def wait_carried(self, count: int, timeout_s: float = 60.0) -> None:
        """Waits until so many bytes have come over the link, now or before."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.carried >= count, timeout_s), f"{self.carried} bytes have come"

    def heal(self) -> None:
        """No request meets a fault any more. Returns once those that were held have been passed on."""
        with self._changed:
            self._rules.clear()
            self._healed.set()
            self._healed = threading.Event()
            assert self._changed.wait_for(lambda: self._held == 0, UPSTREAM_TIMEOUT_S), "what was held is held still"

    def wait_met(self, key: str, count: int = 1, timeout_s: float = 60.0) -> None:
        """Waits until `count` requests of that key met a fault, now or before."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(fnmatch.filter(self.met, f"* {key}")) >= count, timeout_s), (
                f"only these met a fault: {self.met}"
            )

    def judge(self, method: str, key: str, who: str) -> tuple[Fault | None, threading.Event]:
        with self._changed:
            rule = self._rule(method, key, who)
            if rule is None:
                return None, self._healed
            rule.left -= 1
            self.met.append(f"{method} {key}")
            self._held += rule.fault == HELD
            self._changed.notify_all()
            return rule.fault, self._healed

    def plans(self, method: str, key: str, who: str) -> bool:
        """Whether such a request would meet a fault."""
        with self._changed:
            return self._rule(method, key, who) is not None

    def _rule(self, method: str, key: str, who: str) -> _Rule | None:
        for rule in reversed(self._rules):
            if rule.method not in ("*", method) or rule.who not in ("*", who):
                continue
            if rule.left > 0 and fnmatch.fnmatchcase(key, rule.key):
                return rule
        return None

    def let_go(self) -> None:
        """A request that was held is dealt with."""
        with self._changed:
            self._held -= 1
            self._changed.notify_all()

    @property
    def is_ending(self) -> bool:
        return self._ending

    def end(self) -> None:
        self._ending = True
        self.limit(float("inf"))
        self.heal()
        self.shutdown()
        self.server_close()
        for each in list(self.open_sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that break off are what this is for


@contextlib.contextmanager
def proxy(server: Server) -> Iterator[Proxy]:
    made = Proxy(server)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, name="proxy")
    thread.start()
    try:
        yield made
    finally:
        made.end()
        thread.join(60)


class _ClientGone(Exception):
    """It died in the middle of what it sent."""


class _Handler(FaultyHandler):
    server: Proxy

    def do_GET(self) -> None:
        try:
            self._pass()
        except _ClientGone:  # the server never has all of it
            self.close_connection = True

    do_PUT = do_HEAD = do_POST = do_DELETE = do_GET

    def _pass(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        who = self.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]
        key = path.removeprefix(f"/{self.server.bucket}/")
        asked = self.command, key, who
        if not self.server.plans(*asked):
            done = self._ask_server(self._body())  # as it comes: the link does not wait for the server
            self._note(key)
            self._reply(*done)
            return
        data = b"".join(self._body())
        self._note(key)
        fault, healed = self.server.judge(*asked)
        if fault is None:
            self._reply(*self._ask_server([data]))
        elif fault == HELD:
            healed.wait()
            try:
                done = None if self.server.is_ending else self._ask_server([data])
            finally:
                self.server.let_go()
            if done is None:
                self.close_connection = True
            else:
                self._reply(*done)
        elif fault == RESET:
            self.reset()
        elif fault.status:
            body = f"<Error><Code>{fault.code}</Code><Message>planned</Message></Error>".encode()
            self._reply(fault.status, [], body)
        else:
            self._ask_server([data])
            self.lose_reply()

    def _note(self, key: str) -> None:
        self.server.heard.append((self.command, key, self.headers.get("x-amz-content-sha256", "")))

    def _body(self) -> Iterator[bytes]:
        """As the link brings it. Errors: _ClientGone where that ends in the middle."""
        left = int(self.headers.get("Content-Length", 0))
        while left:
            part = self.rfile.read(min(SLICE_BYTES, left))
            if not part:
                raise _ClientGone
            left -= len(part)
            self.server.carry(len(part))
            yield part

    def _ask_server(self, body: Iterable[bytes]) -> Reply:
        with contextlib.closing(http.client.HTTPConnection(self.server.upstream, timeout=UPSTREAM_TIMEOUT_S)) as to:
            to.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    to.putheader(name, value)
            to.endheaders()
            for part in body:
                to.send(part)
            reply = to.getresponse()
            return reply.status, reply.getheaders(), reply.read()

    def _reply(self, status: int, headers: Headers, body: bytes) -> None:
        self.send_response_only(status)
        is_head = self.command == "HEAD"
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding") and (
                is_head or name.lower() != "content-length"
            ):
                self.send_header(name, value)
        if not is_head:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not is_head:
            self.wfile.write(body)

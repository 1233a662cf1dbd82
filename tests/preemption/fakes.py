"""A metadata service on the loopback, and what drives a listener through a script without waiting.

The fault model comes first: what a service may do instead of answering.
"""

from __future__ import annotations

import contextlib
import enum
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

from ckpt.preemption.metadata import Reply, Service
from ckpt.preemption.notice import Listener, Notice, Withdrawn
from ckpt.threads import Tasks

S = TypeVar("S", bound="FakeService")

NOW_S = 1_900_000_000.0  # our clock in all scripts
BOUND_S = 20.0
PATIENT_S = 60.0  # of a request that is answered: that this machine stands still for a while is no fault of the service
BRIEF_S = 1.5  # of one that hangs, which is waited for so long
TRIES = 5
NONE: Mapping[str, str] = {}


class Bad(enum.Enum):
    """What happens to one request. All but SLOW and DRIP take no time."""

    UNAUTHORISED = 401  # also: the token has expired
    FORBIDDEN = 403
    NO_SUCH_PATH = 404
    BUSY = 429
    BROKEN = 500
    UNAVAILABLE = 503
    SLOW = "no byte of an answer until the server closes"
    DRIP = "one byte of a header line every 20 ms, without end"
    CUT = "half of the body that was announced"
    CUT_HEAD = "half of the headers"
    NOTHING = "the connection is closed before any byte"
    GARBAGE = "bytes that are no text"
    NOT_HTTP = "an answer of another protocol"
    NEST = "JSON, 20,000 lists deep"
    OVERSIZED = "a body of 10 MiB"
    ENDLESS_HEAD = "headers that do not end"
    CLAIMS_HUGE = "a Content-Length of 1 TiB, and then nothing"
    REDIRECT = "to another host"


def timeout_s(bad: Bad | None = None) -> float:
    """For the requests of a listener, some of which are spoiled like that."""
    return BRIEF_S if bad in (Bad.SLOW, Bad.DRIP) else PATIENT_S


def is_within(bound_s: float, took_s: Callable[[], float]) -> bool:
    """Whether the quickest of a few tries took less: this machine may stand still for a while in any of them."""
    return any(took_s() < bound_s for _ in range(TRIES))


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Says:
    status: int = 200
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


NOT_THERE = Says(404, "not found")


class FakeService:
    """Answers by `answer(asked)`. `skew_s`: how far its clock is ahead of ours (`now_s`); None: it sends no Date.

    `bad(fault, count, path)` spoils the next `count` requests whose path contains that text. `asked` is what came.
    """

    def __init__(self) -> None:
        self.answer: Callable[[Asked], Says] = lambda asked: NOT_THERE
        self.skew_s: float | None = 0.0
        self.now_s: Callable[[], float] = lambda: NOW_S
        self.asked: list[Asked] = []
        self.elsewhere = "http://192.0.2.1/"  # where redirects lead
        self.closing = threading.Event()
        self.came = threading.Semaphore(0)
        self.port = 0
        self._bad: deque[tuple[Bad, str]] = deque()
        self._lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def bad(self, what: Bad, count: int = 1, path: str = "") -> None:
        with self._lock:
            self._bad.extend([(what, path)] * count)

    def mend(self) -> None:
        """Nothing is spoiled any more."""
        with self._lock:
            self._bad.clear()

    def paths(self) -> list[str]:
        return [f"{each.method} {each.path}" for each in self.asked]

    def take(self, asked: Asked) -> Bad | None:
        with self._lock:
            self.asked.append(asked)
            self.came.release()
            for at, (what, path) in enumerate(self._bad):
                if path in asked.path:
                    del self._bad[at]
                    return what
        return None


@contextlib.contextmanager
def serving(made: S | None = None) -> Iterator[S]:
    """A FakeService, or the given one, on a port of its own."""
    service: S = FakeService() if made is None else made  # type: ignore[assignment]

    class Handler(BaseHTTPRequestHandler):
        timeout = BOUND_S
        wbufsize = -1  # what is said goes out as a whole, with its headers
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            with contextlib.suppress(ConnectionError):  # a client that has left
                super().handle_one_request()

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked = Asked(self.command, self.path, dict(self.headers), body)
            bad = service.take(asked)
            if bad is None:
                says = service.answer(asked)
                self.say(says)
            else:
                self.close_connection = True
                self.spoil(bad)

        do_PUT = do_POST = do_GET

        def say(self, says: Says, length: int | None = None) -> None:
            body = says.body.encode("latin-1")
            self.send_response_only(says.status)
            if service.skew_s is not None:
                self.send_header("Date", formatdate(service.now_s() + service.skew_s, usegmt=True))
            for name, value in says.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

        def spoil(self, bad: Bad) -> None:
            if isinstance(bad.value, int):
                self.say(Says(bad.value, "no"))
            elif bad is Bad.SLOW:
                service.closing.wait(BOUND_S)
            elif bad is Bad.DRIP:
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-A: ")
                while not service.closing.wait(0.02):
                    self.wfile.write(b"a")
                    self.wfile.flush()
            elif bad is Bad.CUT:
                self.say(Says(200, "TRU"), length=6)
            elif bad is Bad.CUT_HEAD:
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Le")
            elif bad is Bad.GARBAGE:
                self.say(Says(200, "\x00\xff\xfe{]garbage"))
            elif bad is Bad.NOT_HTTP:
                self.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n" * 10)
            elif bad is Bad.NEST:
                self.say(Says(200, "[" * 20_000 + "]" * 20_000))
            elif bad is Bad.OVERSIZED:
                self.say(Says(200, "a" * (10 << 20)))
            elif bad is Bad.ENDLESS_HEAD:
                while True:  # until the client leaves
                    self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)
            elif bad is Bad.CLAIMS_HUGE:
                self.say(Says(200, "a"), length=1 << 40)
            elif bad is Bad.REDIRECT:
                self.say(Says(302, "", {"Location": service.elsewhere}))

        def log_message(self, *args: object) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = False  # so that closing waits for them

    server = Server(("127.0.0.1", 0), Handler)
    service.port = server.server_address[1]
    with Tasks("fake-service") as tasks:
        tasks.start("serve", lambda: server.serve_forever(0.005))
        try:
            yield service
        finally:
            service.closing.set()
            server.shutdown()
            server.server_close()


def ask(endpoint: str, method: str = "GET", path: str = "/", headers: Mapping[str, str] = NONE, **more: Any) -> Reply:
    """The reply to one request."""
    more = {"stop": threading.Event(), "timeout_s": PATIENT_S} | more
    return Service(endpoint).request(method, path, headers, **more)


class Clock:
    """Our wall clock: stands still unless somebody waits."""

    def __init__(self) -> None:
        self.now = NOW_S

    def now_s(self) -> float:
        return self.now


class Turns(threading.Event):
    """A `stop` whose waits end at once, and move the clock: each does the next thing of the script, and the one after
    the last stops. `pauses` are the waits in seconds."""

    def __init__(self, clock: Clock, *script: Callable[[], object]) -> None:
        super().__init__()
        self.pauses: list[float] = []
        self._clock = clock
        self._script = deque(script)

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None or not self._script:
            self.set()
        else:
            self.pauses.append(timeout)
            self._clock.now += timeout
            self._script.popleft()()
        return self.is_set()


def same() -> None:
    """A turn in which nothing changes."""


def heard(listener: Listener, clock: Clock, *script: Callable[[], object]) -> list[Notice | Withdrawn]:
    """All that is told in len(script) + 1 turns."""
    told: list[Notice | Withdrawn] = []
    listener.listen(Turns(clock, *script), told.append)
    return told


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[tuple[threading.Event, list[Notice | Withdrawn], threading.Event]]:
    """On a thread of its own: (stop, what is told, that something was). Stopped in the end, with a bound."""
    stop, told, has_told = threading.Event(), list[Notice | Withdrawn](), threading.Event()

    def tell(word: Notice | Withdrawn) -> None:
        told.append(word)
        has_told.set()

    with Tasks("listening") as tasks:
        tasks.start("listen", lambda: listener.listen(stop, tell))
        try:
            yield stop, told, has_told
        finally:
            stop.set()


def stopped_s(listener: Listener, has_begun: Callable[[threading.Event], object], *words: Notice | Withdrawn) -> float:
    """How long it listens on once it is stopped, which it is when `has_begun`, given what is set as something is told,
    is true. By then it has told these words and no others."""
    with listening(listener) as (stop, told, has_told):
        assert has_begun(has_told)
        began_s = time.monotonic()
        stop.set()
    took_s = time.monotonic() - began_s
    assert told == [*words]
    return took_s


_watchers: list[list[tuple[object, ...]]] = []
_is_hooked = False


@contextlib.contextmanager
def connections() -> Iterator[set[object]]:
    """Every address that this process looks up or connects to inside the block, as the interpreter audits it."""
    global _is_hooked

    def audit(event: str, args: tuple[object, ...]) -> None:
        if _watchers and event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
            for each in _watchers:
                each.append(args)

    if not _is_hooked:  # a hook stays for the life of the process
        sys.addaudithook(audit)
        _is_hooked = True
    seen: list[tuple[object, ...]] = []
    found: set[object] = set()
    _watchers.append(seen)
    try:
        yield found
    finally:
        _watchers.remove(seen)
        # connect has (socket, address), the look-ups (host, port, ...)
        found.update(a[1] if isinstance(a[1], tuple) else a[:2] for a in seen)

"""The metrics page: its format, its names, and that a stranger at its port can do no harm."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.agent.observability import metrics_http, prometheus
from ckpt.agent.observability.metrics_http import CONNECTIONS_MAX, REQUEST_MAX, MetricsHttp
from ckpt.agent.state.accounting import Accounting, Phase
from ckpt.types import Epoch, Version
from tests.agent.net.loop import TurnedLoop

ROOT = Path(__file__).parents[3]
Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = rf'({_NAME})="((?:[^"\\\n]|\\\\|\\"|\\n)*)"'
_SAMPLE = re.compile(rf"({_NAME})(?:\{{((?:{_LABEL},?)*)\}})? (\S+)")


def parse(text: str) -> Samples:
    """The text format 0.0.4, as strictly as its description has it: every sample under the TYPE of its name."""
    assert text.endswith("\n")
    found: Samples = {}
    name = kind = ""
    helped: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ")[2]
            assert name not in helped
            helped.add(name)
        elif line.startswith("# TYPE "):
            assert line.split(" ")[2] == name
            kind = line.split(" ")[3]
            assert kind in ("counter", "gauge")
            found[name] = {}
        else:
            match = _SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] == name
            labels = tuple((key, value) for key, value in re.findall(_LABEL, match[2] or ""))
            assert labels not in found[name]
            found[name][labels] = float(match[5])
            assert kind == "gauge" or found[name][labels] >= 0
    return found


def a_status(**job: Any) -> dict[str, Any]:
    account = Accounting()
    account.update(0.0, Phase.STARTING)
    account.record_start(2.0, Epoch(1, "0" * 16), Version(5), "store", {"store": 100}, 30.0, 0)
    account.record_staging(10.0, Version(9), 0.25)
    account.record_completion(Epoch(1, "0" * 16), Version(9), 1000)
    account.update(12.0, Phase.TRAINING, 11)
    return {
        "url": 's3://bucket/a "run"\\',
        "version": "0.1.0",
        "up_s": 12.0,
        "began_at": 988.5,
        "resident_bytes": 50 << 20,
        "cpu_s": 0.5,
        "account": account.facts(12.0),
        "job": job or None,
        "store_requests": {"put": 3, "get": 1},
        "store_bytes": {"put": 1000, "get": 100},
        "predictions": {
            "sources": {
                "io": {"precision": 0.0, "recall": 0.0},
                "memory": {"precision": 0.75, "recall": 0.5},
            },
            "standing": [{"source": "memory"}, {"source": "memory"}],
        },
    }


JOB: dict[str, Any] = {
    "ranks": ["here", "here", "dead"],
    "step_s": 0.25,
    "under_way": [{"level": "store", "state": "committed"}, {"level": "store", "state": "failed"}],
    "intervals": {"local": {"interval_s": 30.0}, "store": {"interval_s": None}},
    "rates": {"node": {"per_s": 1e-7, "seen": 0}},
    "notices": {"standing": [{"certain": True}]},
    "memory": {"slots": 3, "slot_bytes": 10, "kept_bytes": 1, "commit_bytes": 2, "allowed_bytes": 100},
    "saving": 0.01,
}


def test_the_page_is_of_the_text_format_and_says_what_the_status_does() -> None:
    found = parse(prometheus.page(a_status(**JOB), 1000.0).decode())
    assert found["ckpt_agent_info"] == {(("version", "0.1.0"), ("url", r"s3://bucket/a \"run\"\\")): 1}
    assert found["ckpt_safe_step"] == {(("level", "local"),): 9, (("level", "store"),): 5}
    assert found["ckpt_safe_timestamp_seconds"] == {(("level", "local"),): 998, (("level", "store"),): 960}
    assert found["ckpt_goodput_ratio"] == {(): pytest.approx(9.75 / 12)}
    parts = found["ckpt_time_seconds"]
    assert sum(parts.values()) == pytest.approx(found["ckpt_elapsed_seconds_total"][()])
    assert parts[("part", "stall"),] == 0.25
    assert found["ckpt_phase"][("phase", "training"),] == 1
    assert sum(found["ckpt_phase"].values()) == 1
    assert found["ckpt_ranks"] == {(("state", "here"),): 2, (("state", "left"),): 0, (("state", "dead"),): 1}
    assert found["ckpt_under_way"] == {(("level", "local"),): 0, (("level", "store"),): 1}
    assert found["ckpt_interval_seconds"] == {(("level", "local"),): 30}
    assert found["ckpt_memory_bytes"][("use", "slots"),] == 30
    assert found["ckpt_notices"] == {(("certain", "yes"),): 1, (("certain", "no"),): 0}
    assert found["ckpt_restored_bytes_total"] == {(("level", "store"),): 100}
    assert found["ckpt_store_requests_total"] == {(("operation", "get"),): 1, (("operation", "put"),): 3}
    assert found["ckpt_store_bytes_total"] == {(("direction", "get"),): 100, (("direction", "put"),): 1000}
    assert found["ckpt_predictions"] == {(("source", "io"),): 0, (("source", "memory"),): 2}
    assert found["ckpt_prediction_precision_ratio"][("source", "memory"),] == 0.75
    assert found["ckpt_prediction_recall_ratio"][("source", "io"),] == 0.0


def test_an_agent_without_a_job_has_a_page_too() -> None:
    found = parse(prometheus.page(a_status(), 1000.0).decode())
    assert "ckpt_ranks" not in found
    assert found["process_resident_memory_bytes"] == {(): 50 << 20}
    assert found["process_start_time_seconds"] == {(): 988.5}
    nothing = {**a_status(), "account": Accounting().facts(0.0)}
    assert "ckpt_goodput_ratio" not in parse(prometheus.page(nothing, 1000.0).decode())


def test_units_stand_in_the_names() -> None:
    for metric in prometheus.METRICS:
        assert not re.search(r"_(ms|mib|s|mb)(_|$)", metric.name), metric.name


def test_the_guide_lists_each_metric_and_no_other() -> None:
    text = (ROOT / "docs/guides/watching.md").read_text()
    listed = re.findall(r"^\| `((?:ckpt|process)_\w+)(?:\{\w+\})?` \| (\w+) \|", text, re.MULTILINE)
    assert listed == [(metric.name, metric.kind) for metric in prometheus.METRICS]


# -- over HTTP


class Served:
    """The server on a loop that the test turns. `body`: of its page. `pages`: how many were made."""

    def __init__(self) -> None:
        self.loop = TurnedLoop()
        self.pages, self.body = 0, b"ckpt_x 1\n"
        self.scrape = MetricsHttp(self.loop, "127.0.0.1", 0, self.page)

    def page(self) -> bytes:
        self.pages += 1
        return self.body

    def connect(self, request: bytes = b"") -> socket.socket:
        host, port = self.scrape.address.split(":")
        sock = socket.create_connection((host, int(port)), 30)
        sock.sendall(request)
        sock.setblocking(False)
        return sock

    def read_all(self, sock: socket.socket) -> bytes:
        """All that is answered until the connection is closed."""
        found, deadline_s = b"", time.monotonic() + 30
        with sock, contextlib.suppress(ConnectionResetError):
            while time.monotonic() < deadline_s:
                self.loop.turn(0.001)
                with contextlib.suppress(BlockingIOError):
                    part = sock.recv(65536)
                    if not part:
                        return found
                    found += part
            raise AssertionError("the connection stays")
        return found

    def say(self, request: bytes) -> bytes:
        return self.read_all(self.connect(request))


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.scrape.close()
    assert made.loop.watched() == 0
    made.loop.close()


GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


def test_a_scraper_gets_the_page_which_is_not_made_more_often_than_it_changes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_http, "PAGE_S", 3600.0)
    for _ in range(20):
        head, _, body = served.say(GET).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n" in head
        assert body == served.body
    assert served.pages == 1


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/../../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics?x=1 HTTP/1.0\r\n\r\n", 200),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 405),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", 405),
        (b"get /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET /metrics\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\n\n", 400),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),  # someone speaks TLS
        (b"GET /metrics HTTP/2.0\r\n\r\n", 400),
        (b"\xff" * 100 + b"\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * REQUEST_MAX, 431),
        (b"x" * (REQUEST_MAX + 1), 431),
    ],
)
def test_what_is_not_asked_as_it_should_be_is_refused_and_nothing_breaks(
    request_: bytes, status: int, served: Served
) -> None:
    answer = served.say(request_)
    if answer or len(request_) <= REQUEST_MAX + 1:  # else the kernel may cut the answer off: not all was read
        assert answer.split(b" ")[1] == str(status).encode()
    assert served.say(GET).endswith(served.body)


def test_who_connects_and_says_nothing_or_half_is_let_go_and_others_are_served_meanwhile(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_http, "CONNECTION_S", 0.2)
    silent = [served.connect(GET[:10] if number == 1 else b"") for number in range(4)]
    assert served.say(GET).endswith(served.body)
    assert [served.read_all(each) for each in silent] == [b""] * 4  # closed by the other end
    assert served.say(GET).endswith(served.body)


def test_a_crowd_that_holds_its_connections_keeps_nobody_out(served: Served) -> None:
    crowd = [served.connect() for _ in range(3 * CONNECTIONS_MAX)]
    served.loop.turn()
    assert len(served.scrape.listener.guests) == CONNECTIONS_MAX
    assert served.say(GET).endswith(served.body)
    assert served.read_all(crowd.pop(0)) == b""  # the oldest made room
    for each in crowd:
        each.close()


def test_who_asks_and_does_not_read_holds_nobody_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_http, "CONNECTION_S", 0.2)
    served.body = b"x" * (64 << 20)  # more than any socket buffer takes
    lazy = served.connect(GET)
    served.loop.until(lambda: served.pages and not served.scrape.listener.guests)
    assert len(served.read_all(lazy)) < len(served.body)


def test_who_hangs_up_at_once_is_no_trouble(served: Served) -> None:
    for _ in range(50):
        with served.connect() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset, not an end
            sock.send(GET)
    assert served.say(GET).endswith(served.body)


def test_a_page_that_cannot_be_made_closes_the_connection_and_nothing_else(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_http, "PAGE_S", 0.0)
    served.body = None  # type: ignore[assignment]
    assert served.say(GET) == b""
    assert "could not be shown" in caplog.text
    served.body = b"again\n"
    assert served.say(GET).endswith(b"again\n")

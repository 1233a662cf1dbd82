"""The client of a metadata service: what is a whole reply, what is none, and what is too much."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from ckpt.preemption.metadata import BODY_BYTES_MAX
from ckpt.preemption.poll import Fault
from ckpt.threads import Tasks
from tests.preemption.fakes import ask, serving

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE = {
    "with a length": (OK + b"Content-Length: 4\r\nETag: v1\r\n\r\nTRUE", 200, b"TRUE"),
    "empty": (OK + b"Content-Length: 0\r\n\r\n", 200, b""),
    "without a body by its status": (b"HTTP/1.1 204 No Content\r\nETag: v1\r\n\r\n", 204, b""),
    "without a reason": (b"HTTP/1.1 404\r\nContent-Length: 2\r\n\r\nno", 404, b"no"),
    "in chunks": (CHUNKED + b"2\r\nTR\r\n2;a=b\r\nUE\r\n0\r\nX-A: b\r\n\r\n", 200, b"TRUE"),
    "after 100 Continue": (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length:4\r\n\r\nTRUE", 200, b"TRUE"),
    "by HTTP/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nTRUE", 200, b"TRUE"),
}


@contextlib.contextmanager
def saying(replies: list[bytes]) -> Iterator[str]:
    """The endpoint of a service that sends one of these to each connection, and ends the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, Tasks("raw-service") as tasks:

        def serve() -> None:
            for reply in replies:
                connection, _ = server.accept()
                with connection, contextlib.suppress(ConnectionError):
                    connection.recv(1 << 16)
                    connection.sendall(reply)

        tasks.start("serve", serve)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("form", WHOLE)
def test_a_whole_reply_is_read_and_one_cut_anywhere_before_its_end_is_a_fault(form: str) -> None:
    came, status, body = WHOLE[form]
    end = came.rindex(b"0\r\nX-A") if form == "in chunks" else len(came)  # a cut trailer costs nothing
    with saying([*(came[:count] for count in range(end)), came]) as endpoint:
        for _ in range(end):
            with pytest.raises(Fault):
                ask(endpoint)
        reply = ask(endpoint)
    assert (reply.status, reply.body) == (status, body)


@pytest.mark.parametrize(
    "came",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 \xb2\xb2\xb2 OK\r\n\r\n",
        OK + b"Content-Length: %d\r\n\r\n" % (BODY_BYTES_MAX + 1),
        CHUNKED + b"TRUE\r\n",
        CHUNKED + b"1\r\na\r\n" * (BODY_BYTES_MAX + 1),
        CHUNKED + b"ffffffff\r\n" + b"a" * (8 * BODY_BYTES_MAX),
        OK + b"\r\n" + b"a" * (BODY_BYTES_MAX + 1),
        OK + b"\r\n" + b"a" * (8 * BODY_BYTES_MAX),
        OK + b"a" * (8 * BODY_BYTES_MAX),
        OK + b"a: b\r\n" * BODY_BYTES_MAX,
        b"HTTP/1.1 100 Continue\r\n\r\n" * BODY_BYTES_MAX,
    ],
    ids=lambda came: repr(came[:40]),
)
def test_what_no_right_answer_says_is_a_fault(came: bytes) -> None:
    with saying([came]) as endpoint, pytest.raises(Fault):
        ask(endpoint)


def test_a_body_may_have_no_length_and_as_many_bytes_as_are_allowed() -> None:
    with saying([OK + b"\r\n" + b"a" * BODY_BYTES_MAX]) as endpoint:
        assert len(ask(endpoint).body) == BODY_BYTES_MAX


@pytest.mark.parametrize(("method", "length"), [("GET", None), ("PUT", "0"), ("POST", "0")])
def test_a_request_asks_for_a_body_as_it_is_and_says_how_long_its_own_is(method: str, length: str | None) -> None:
    with serving() as service:
        ask(service.endpoint, method, "/x", {"A": "b"})
        (asked,) = service.asked
    expected = {"Host": f"127.0.0.1:{service.port}", "Accept-Encoding": "identity", "Connection": "close", "A": "b"}
    assert dict(asked.headers) == expected | ({} if length is None else {"Content-Length": length})

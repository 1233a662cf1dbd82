"""Replies as bytes: what is a whole one, what is none, and what is too much; and the connection that they come over."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.preemption.http_connection import BODY_BYTES_MAX, HEAD_BYTES_MAX, HttpResponse, Unheard, parse_response
from ckpt.preemption.metadata import Service
from ckpt.preemption.poll import Fault
from tests.preemption.fakes import Says, serving

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE = {
    "with a length": (OK + b"Content-Length: 4\r\nETag: v1\r\n\r\nTRUE", 200, b"TRUE"),
    "empty": (OK + b"Content-Length: 0\r\n\r\n", 200, b""),
    "without a body by its status": (b"HTTP/1.1 204 No Content\r\nETag: v1\r\n\r\n", 204, b""),
    "without a reason": (b"HTTP/1.1 404\r\nContent-Length: 2\r\n\r\nno", 404, b"no"),
    "in chunks": (CHUNKED + b"2\r\nTR\r\n2\r\nUE\r\n0\r\n\r\n", 200, b"TRUE"),
    "in chunks, with all that these may have": (
        CHUNKED + b"00002;a=b\r\n\r\n\r\nA ; c\r\n0123456789\r\n0\r\nX-A: b\r\n\r\n",
        200,
        b"\r\n0123456789",
    ),
    "after word that it goes on": (
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length:4\r\n\r\nTRUE",
        200,
        b"TRUE",
    ),
    "with bare line feeds": (b"HTTP/1.1 200 OK\nContent-Length: 4\n\nTRUE", 200, b"TRUE"),
    "by HTTP/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nTRUE", 200, b"TRUE"),
}


@pytest.mark.parametrize("form", WHOLE)
def test_a_reply_is_one_when_its_last_byte_is_there_and_a_fault_when_it_ends_before(form: str) -> None:
    came, status, body = WHOLE[form]
    for count in range(len(came)):
        assert parse_response(came[:count], is_end=False) is None
        with pytest.raises(Fault):
            parse_response(came[:count], is_end=True)
    for is_end in (False, True):
        answer = parse_response(came, is_end=is_end)
        assert answer is not None
        assert (answer.status, answer.body) == (status, body)
        assert answer.is_last == (form == "by HTTP/1.0")


def test_a_body_without_a_length_ends_with_its_connection_and_its_headers_do_not() -> None:
    came = OK + b"Date: Sun, 17 Mar 2030 17:46:40 GMT\r\n\r\nTRUE"
    assert parse_response(came, is_end=False) is None
    assert parse_response(came, is_end=True) == HttpResponse(
        200, {"date": "Sun, 17 Mar 2030 17:46:40 GMT"}, b"TRUE", True
    )
    with pytest.raises(Fault, match="the connection ended within the headers"):
        parse_response(came[:40], is_end=True)
    with pytest.raises(Unheard):
        parse_response(b"", is_end=True)


@pytest.mark.parametrize(
    ("head", "is_last"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close", True),
        (b"HTTP/1.1 200 OK\r\nconnection: Close", True),
        (b"HTTP/1.1 200 OK\r\nConnection: keep-alive", False),
        (b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive", False),
    ],
)
def test_the_service_says_whether_the_connection_stays_open(head: bytes, is_last: bool) -> None:
    came = head + b"\r\nContent-Length: 1\r\n\r\na"
    answer = parse_response(came, is_end=False)
    assert answer is not None
    assert answer.is_last is is_last
    more = parse_response(came + b"b", is_end=False)
    assert more is not None
    assert more.is_last, "what comes after the reply would be taken for the next one"


@pytest.mark.parametrize(
    "came",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 \xb2\xb2\xb2 OK\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: 1e3\r\n\r\n",
        OK + b"Content-Length: \xb2\r\n\r\n",
        OK + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nTRUE",
        OK + b"Content-Length: %d\r\n\r\n" % (BODY_BYTES_MAX + 1),
        OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
        OK + b"Transfer-Encoding: gzip\r\n\r\n",
        CHUNKED + b"TRUE\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"123456789\r\n",
        CHUNKED + b"2\r\nTRUE\r\n",
        CHUNKED + b"2\r\nTRUE0\r\n\r\n",
        CHUNKED + b"1\r\na\r\n" * BODY_BYTES_MAX,
        CHUNKED + b"ffffffff\r\n" + b"a" * (2 * BODY_BYTES_MAX + 1),
        OK + b"\r\n" + b"a" * (2 * BODY_BYTES_MAX + 1),
        OK + b"a" * HEAD_BYTES_MAX,
        b"HTTP/1.1 100 Continue\r\n\r\n" * HEAD_BYTES_MAX,
    ],
    ids=lambda came: repr(came[:40]),
)
def test_what_no_right_answer_says_is_a_fault_at_once(came: bytes) -> None:
    with pytest.raises(Fault):
        parse_response(came, is_end=False)


@given(st.binary(max_size=200), st.sampled_from([b"", OK, CHUNKED, OK + b"Content-Length: 3\r\n"]), st.booleans())
def test_whatever_bytes_come_they_are_a_reply_or_a_fault_or_want_more(tail: bytes, head: bytes, is_end: bool) -> None:
    try:
        answer = parse_response(head + tail, is_end=is_end)
    except Fault:
        return
    assert answer is not None or not is_end


@pytest.mark.parametrize(("method", "length"), [("GET", None), ("PUT", "0"), ("POST", "0")])
def test_a_request_asks_for_a_body_as_it_is_and_says_how_long_its_own_is(method: str, length: str | None) -> None:
    with serving() as service:
        Service(service.endpoint).request(method, "/x", {"A": "b"}, threading.Event(), timeout_s=60)
        (asked,) = service.asked
    expected = {"Host": f"127.0.0.1:{service.port}", "Accept-Encoding": "identity", "A": "b", "Connection": "close"}
    assert dict(asked.headers) == expected | ({} if length is None else {"Content-Length": length})


def test_a_request_that_does_not_fit_into_the_sockets_buffers_is_sent_all_the_same() -> None:
    body = b"a" * (16 << 20)
    with serving() as service:
        service.answer = lambda asked: Says(body=str(len(asked.body)))
        reply = Service(service.endpoint).request("POST", "/", {}, threading.Event(), timeout_s=60, body=body)
    assert int(reply.text()) == len(body)


def test_hosts_are_named_as_http_has_it() -> None:
    for endpoint, named in (("http://[fd00:ec2::254]", "[fd00:ec2::254]"), ("[::1]:81", "[::1]:81"), ("a:80", "a")):
        assert Service(endpoint)._host_header == named

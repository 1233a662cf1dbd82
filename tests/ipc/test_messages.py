"""What crosses the Unix socket arrives as it was sent; what is not sound closes that connection and nothing else."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterator

import msgpack
import pytest

from ckpt.errors import AgentError, CkptError, NotFound, NotStaged, SaveFailed, UsageError, from_kind
from ckpt.ipc import messages

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        yield left, right


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_message_arrives_with_its_descriptors_and_blobs(pair: Pair) -> None:
    left, right = pair
    before = open_fds()
    reading, writing = os.pipe()
    blobs = [b"", b"x" * 300_000]
    messages.send(left, {"t": "join", "id": 3, "rank": 1}, fds=[reading], blobs=blobs)
    got = messages.receive(right)
    assert got is not None
    assert got.fields == {"t": "join", "id": 3, "rank": 1}
    assert got.blobs == blobs
    os.write(writing, b"hi")
    assert os.read(got.fds[0], 2) == b"hi"
    got.close()
    os.close(reading)
    os.close(writing)
    assert open_fds() == before


def test_descriptors_that_arrive_are_not_inherited_by_programs_that_are_started(pair: Pair) -> None:
    messages.send(pair[0], {"t": "x"}, fds=[pair[0].fileno()], blobs=[b"b"])
    got = messages.receive(pair[1])
    assert got is not None
    assert [os.get_inheritable(fd) for fd in got.fds] == [False]
    got.close()


def test_the_end_of_the_connection_is_none(pair: Pair) -> None:
    pair[0].close()
    assert messages.receive(pair[1]) is None


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        b"not msgpack at all",
        msgpack.packb(["t"]),
        msgpack.packb({"id": 1}),
        msgpack.packb({"t": 7}),
        msgpack.packb({"t": "x", "_blobs": 1}),
        msgpack.packb({"t": "x", "_blobs": -1}),
        msgpack.packb({"t": "x", "_blobs": "many"}),
        b"\x81\xa1t" + b"\x91" * 4000,
        b"\xdf\xff\xff\xff\xff",
    ],
)
def test_what_does_not_parse_is_an_error_and_leaks_no_descriptor(pair: Pair, data: bytes) -> None:
    left, right = pair
    before = open_fds()
    with open("/dev/null") as extra:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [extra.fileno()]))
        left.sendmsg([data], [] if b"_blobs" in data else [rights])
        with pytest.raises(AgentError):
            messages.receive(right)
    assert open_fds() == before


def test_a_blob_that_could_change_or_is_no_memfd_is_refused(pair: Pair) -> None:
    left, right = pair
    before = open_fds()
    unsealed = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.write(unsealed, b"abc")
    with open("/dev/null") as null:
        for fd in (unsealed, null.fileno()):
            socket.send_fds(left, [msgpack.packb({"t": "x", "_blobs": 1})], [fd])
            with pytest.raises(AgentError, match="blob"):
                messages.receive(right)
    os.close(unsealed)
    assert open_fds() == before


def test_a_message_that_is_too_large_is_refused_where_it_is_made() -> None:
    with pytest.raises(AgentError, match="bytes"):
        messages.pack({"t": "x", "s": "y" * messages.MESSAGE_BYTES_MAX})
    with pytest.raises(AgentError, match="descriptors"):
        messages.pack({"t": "x"}, blobs=[b""] * (messages.FDS_MAX + 1))


def test_an_error_keeps_its_class_across_the_socket(pair: Pair) -> None:
    messages.send(pair[0], messages.error_fields(4, UsageError("say it so")))
    got = messages.receive(pair[1])
    assert got is not None
    with pytest.raises(UsageError, match="say it so"):
        messages.raise_error(got)
    assert messages.error_fields(1, NotFound("x"))["kind"] == "not-found"
    assert "ZeroDivisionError" in messages.error_fields(1, ZeroDivisionError("x"))["message"]


def test_an_error_comes_over_a_socket_as_the_class_whose_kind_it_has() -> None:
    class WithoutAKind(SaveFailed):
        """As modules have of their own."""

    assert type(from_kind("save-failed", "why")) is SaveFailed
    assert type(from_kind(WithoutAKind.kind, "why")) is SaveFailed
    assert type(from_kind("not-staged", "why")) is NotStaged
    assert type(from_kind("never heard of", "why")) is CkptError

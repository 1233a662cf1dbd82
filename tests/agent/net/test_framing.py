"""A control message arrives as it was sent, blobs and all; what is not sound is an error and holds bounded memory."""

from __future__ import annotations

import msgpack
import pytest

from ckpt.agent.net import framing
from ckpt.agent.net.framing import ALIVE, MESSAGE, PART, Assembler, make_payloads
from ckpt.agent.net.handshake import PAYLOAD_BYTES_MAX
from ckpt.errors import AgentError
from ckpt.ipc.messages import Message


def assemble(parts: list[tuple[int, bytes]]) -> list[Message]:
    assembler = Assembler()
    return [made for kind, payload in parts if (made := assembler.add(kind, bytes(payload))) is not None]


@pytest.mark.parametrize(
    "blobs",
    [[], [b""], [b"", b"a", b""], [b"x" * PAYLOAD_BYTES_MAX], [b"y" * (2 * PAYLOAD_BYTES_MAX + 1), b"z" * 5]],
)
def test_a_message_arrives_with_its_blobs(blobs: list[bytes]) -> None:
    made = make_payloads({"t": "layout", "id": 3}, blobs)
    (got,) = assemble([(ALIVE, b""), *made])
    assert got.fields == {"t": "layout", "id": 3}
    assert got.blobs == blobs
    assert [each.kind for each in assemble([*made, (ALIVE, b""), *make_payloads({"t": "next-candidate"})])] == [
        "layout",
        "next-candidate",
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb(["t"]),
        msgpack.packb({"id": 1}),
        msgpack.packb({"t": 7}),
        msgpack.packb({"t": "x", "_blobs": 1}),
        msgpack.packb({"t": "x", "_blobs": [-1]}),
        msgpack.packb({"t": "x", "_blobs": [True]}),
        msgpack.packb({"t": "x", "_blobs": [1.0]}),
        msgpack.packb({"t": "x", "_blobs": [1] * (framing.BLOBS_MAX + 1)}),
        msgpack.packb({"t": "x", "_blobs": [framing.BLOB_BYTES_MAX, 1]}),
        msgpack.packb({"t": "x", "_blobs": [1 << 62]}),
        msgpack.packb({"t": "x", "a": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}),
        msgpack.packb({"t": "x", "a": msgpack.ExtType(1, b"x")}),
        b"\x82\xa1t\xa1x\xa1a" + b"\x91" * 4000,
        b"\xdf\xff\xff\xff\xff",
        msgpack.packb({"t": "x", "a": bytes(framing.MESSAGE_BYTES_MAX)}),
    ],
)
def test_what_is_not_sound_is_an_error(data: bytes) -> None:
    with pytest.raises(AgentError, match="a peer"):
        Assembler().add(MESSAGE, data)


@pytest.mark.parametrize(
    "parts",
    [
        [(PART, b"x")],
        [(ALIVE, b"x")],
        [(7, b"")],
        [*make_payloads({"t": "x"}, [b"abc"])[:1], (PART, b"abcd")],
        [*make_payloads({"t": "x"}, [b"abc"])[:1], (PART, b"")],
        [*make_payloads({"t": "x"}, [b"abc"])[:1], (ALIVE, b"")],
        [*make_payloads({"t": "x"}, [b"abc"])[:1], *make_payloads({"t": "y"})],
        [*make_payloads({"t": "x"}, [b"abc"]), (PART, b"d")],
    ],
)
def test_records_that_are_not_due_are_an_error(parts: list[tuple[int, bytes]]) -> None:
    with pytest.raises(AgentError):
        assemble(parts)


def test_a_message_that_is_too_large_is_refused_where_it_is_made() -> None:
    with pytest.raises(AgentError, match="at most"):
        make_payloads({"t": "x", "a": bytes(framing.MESSAGE_BYTES_MAX)})
    with pytest.raises(AgentError, match="too much"):
        make_payloads({"t": "x"}, [b""] * (framing.BLOBS_MAX + 1))
    with pytest.raises(AgentError, match="too much"):
        make_payloads({"t": "x"}, [memoryview(bytes(framing.BLOB_BYTES_MAX)), b"x"])


def test_nothing_is_copied_to_send_a_blob() -> None:
    blob = bytearray(b"a" * 10)
    made = make_payloads({"t": "x"}, [memoryview(blob)])
    blob[0] = ord("b")
    assert bytes(made[1][1]) == b"b" + b"a" * 9

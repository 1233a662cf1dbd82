"""Whoever does not know the run's secret gets nothing from a handshake, and what is changed, repeated, moved, cut or
sent back afterwards does not open. The adversary works byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter

import pytest

from ckpt.agent.net import handshake
from ckpt.agent.net.handshake import Answerer, Dialler, NotAuthentic, Opener, Role, Sealer, Session, hkdf

RUN = "00000007-0123456789abcdef"
SECRET = bytes(range(32))
KEY = bytes(32)


def dialler(secret: bytes = SECRET, run: str = RUN, role: Role = Role.DATA, **given: str) -> Dialler:
    return Dialler(secret, run, role, given.pop("me", "node-a"), **given)


def answerer(secret: bytes = SECRET, me: str = "node-b") -> Answerer:
    return Answerer({RUN: secret}.get, me)


def greet(one: Dialler, other: Answerer, at: int = -1, change: Callable[[bytes], bytes] = bytes) -> list[bytes]:
    """All four messages as they arrived; `change` is what happens to message number `at`. Errors: NotAuthentic."""
    seen, message = list[bytes](), one.hello
    for number in range(4):
        seen.append(change(message) if number == at else message)
        message = (one if number % 2 else other).step(seen[-1])
    assert message == b""
    return seen


def sessions() -> tuple[Session, Session]:
    one, other = dialler(about="move"), answerer()
    greet(one, other)
    assert one.session is not None
    assert other.session is not None
    return one.session, other.session


@pytest.mark.parametrize(
    ("secret", "salt", "info", "length", "expected"),
    [  # RFC 5869, appendix A.1 to A.3
        (
            "0b" * 22,
            "000102030405060708090a0b0c",
            "f0f1f2f3f4f5f6f7f8f9",
            42,
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            "".join(f"{i:02x}" for i in range(0x50)),
            "".join(f"{i:02x}" for i in range(0x60, 0xB0)),
            "".join(f"{i:02x}" for i in range(0xB0, 0x100)),
            82,
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
            "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
        ),
        (
            "0b" * 22,
            "",
            "",
            42,
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
)
def test_keys_are_derived_as_the_rfc_says(secret: str, salt: str, info: str, length: int, expected: str) -> None:
    assert hkdf(*map(bytes.fromhex, (secret, salt, info)), length).hex() == expected


def test_a_handshake_ends_in_two_sessions_that_understand_each_other() -> None:
    mine, theirs = sessions()
    assert (mine.role, mine.secret_id, mine.peer, mine.subject) == (Role.DATA, RUN, "node-b", "move")
    assert (theirs.role, theirs.secret_id, theirs.peer, theirs.subject) == (Role.DATA, RUN, "node-a", "move")
    for sender, receiver in ((mine, theirs), (theirs, mine)):
        for number in range(3):
            payload = bytes([number]) * number
            assert receiver.opener.open(sender.sealer.seal(number, payload)) == (number, payload)


def test_any_byte_that_is_changed_in_the_handshake_ends_it() -> None:
    lengths = [len(message) for message in greet(dialler(about="x"), answerer())]
    for at, length in enumerate(lengths):
        for place in range(length):
            for flip in (0x01, 0x80):
                one, other = dialler(about="x"), answerer()
                with pytest.raises(NotAuthentic):
                    greet(one, other, at, partial(flipped, place=place, flip=flip))
                assert one.session is None
                assert other.session is None or at == 3, "the listener has sent its last message by then"


def flipped(message: bytes, place: int, flip: int) -> bytes:
    return message[:place] + bytes([message[place] ^ flip]) + message[place + 1 :]


def test_a_message_of_the_handshake_that_is_cut_or_longer_ends_it() -> None:
    for at in range(4):
        length = len(greet(dialler(), answerer())[at])
        for kept in range(length):
            one, other = dialler(), answerer()
            with pytest.raises(NotAuthentic):
                greet(one, other, at, itemgetter(slice(kept)))
            assert one.session is None
        with pytest.raises(NotAuthentic):
            greet(dialler(), answerer(), at, lambda message: message + b"\0")


def test_another_secret_or_run_gets_nothing() -> None:
    one, other = dialler(secret=bytes(32)), answerer()
    with pytest.raises(NotAuthentic, match="does not know this run's secret"):
        greet(one, other)
    assert one.session is None
    assert other.session is None
    with pytest.raises(NotAuthentic, match="not known here: its secret is another one"):
        greet(dialler(run="another"), answerer())


def test_a_listener_that_does_not_know_the_secret_is_noticed() -> None:
    one, other = dialler(), answerer()
    proof = one.step(other.step(one.hello))
    with pytest.raises(NotAuthentic, match="secret"):
        one.step(proof[:4] + bytes([4]) + proof[5:])  # the proof sent back as the listener's own
    assert one.session is None


def test_messages_of_an_earlier_handshake_do_not_open_another() -> None:
    hello, _, proof, accept = greet(dialler(), answerer())
    again = answerer()
    again.step(hello)
    with pytest.raises(NotAuthentic):
        again.step(proof)
    fresh = dialler()
    fresh.step(answerer().step(fresh.hello))
    with pytest.raises(NotAuthentic):
        fresh.step(accept)


def test_the_purpose_of_a_connection_cannot_be_changed_on_the_way() -> None:
    one, other = dialler(role=Role.CONTROL), answerer()
    place = handshake.HEADER_BYTES + handshake.NONCE_BYTES
    hello = one.hello[:place] + bytes([Role.DATA]) + one.hello[place + 1 :]
    with pytest.raises(NotAuthentic):
        other.step(one.step(other.step(hello)))
    with pytest.raises(NotAuthentic, match="purpose 9"):
        answerer().step(one.hello[:place] + b"\x09" + one.hello[place + 1 :])


def test_messages_out_of_turn_are_refused() -> None:
    one, other = dialler(), answerer()
    hello, challenge, proof, accept = greet(one, other)
    for late in (hello, proof):
        with pytest.raises(NotAuthentic, match="over"):
            other.step(late)
    with pytest.raises(NotAuthentic, match="over"):
        one.step(accept)
    for wrong in (hello, proof, accept):
        with pytest.raises(NotAuthentic):
            dialler().step(wrong)
    for wrong in (challenge, proof, accept):
        with pytest.raises(NotAuthentic):
            answerer().step(wrong)


def test_two_versions_do_not_talk_and_both_say_why() -> None:
    old = bytearray(dialler().hello)
    old[6] += 1
    with pytest.raises(NotAuthentic, match="version 2 of the protocol, this one 1") as caught:
        answerer().step(bytes(old))
    told = bytearray(caught.value.answer)
    told[6] = 2  # as the other version would have said it
    with pytest.raises(NotAuthentic, match="same ckpt on all nodes") as caught:
        dialler().step(bytes(told))
    assert caught.value.answer == b""


def test_a_stranger_learns_no_name_and_nobody_of_another_program_is_answered() -> None:
    other = answerer(me="secret-name")
    challenge = other.step(dialler().hello)
    assert b"secret-name" not in challenge
    with pytest.raises(NotAuthentic, match="no ckpt agent") as caught:
        handshake.body_bytes(b"GET / HTTP/1.1"[: handshake.HEADER_BYTES])
    assert caught.value.answer == b""


def test_an_agent_notices_itself_and_another_than_it_expected() -> None:
    one, other = dialler(me="node-b"), answerer()
    proof = one.step(other.step(one.hello))
    with pytest.raises(NotAuthentic, match="itself") as caught:
        other.step(proof)
    with pytest.raises(NotAuthentic, match="back to this agent itself"):
        one.step(caught.value.answer)
    assert one.session is None
    assert other.session is None
    with pytest.raises(NotAuthentic, match="node-b, not node-c"):
        greet(dialler(expect="node-c"), answerer())
    greet(dialler(expect="node-b"), answerer())


def test_hostile_names_and_lengths_in_the_handshake_are_refused() -> None:
    hello = dialler().hello
    body = hello[handshake.HEADER_BYTES :]
    for end in (b"", b"\x05ab", b"\xff" + b"a" * 255, b"\x02\xff\xfe", body[33:] + b"x"):
        changed = body[:33] + end
        with pytest.raises(NotAuthentic):
            answerer().step(hello[:7] + len(changed).to_bytes(2, "big") + changed)
    with pytest.raises(NotAuthentic, match="at most"):
        handshake.body_bytes(hello[:7] + b"\xff\xff")
    with pytest.raises(ValueError, match="name"):
        dialler(about="x" * 201)


def test_any_byte_that_is_changed_in_a_record_keeps_it_shut() -> None:
    record = Sealer(KEY).seal(1, b"held")
    assert Opener(KEY).open(record) == (1, b"held")
    for place in range(len(record)):
        for bit in range(8):
            data = bytearray(record)
            data[place] ^= 1 << bit
            with pytest.raises(NotAuthentic):
                Opener(KEY).open(data)
    for kept in range(len(record)):
        with pytest.raises(NotAuthentic):
            Opener(KEY).open(record[:kept])
    with pytest.raises(NotAuthentic):
        Opener(KEY).open(record + b"\0")


def test_records_that_are_repeated_left_out_or_moved_do_not_open() -> None:
    sealer = Sealer(KEY)
    first, second, third = (sealer.seal(1, bytes([number])) for number in range(3))
    opener = Opener(KEY)
    opener.open(first)
    with pytest.raises(NotAuthentic, match="came again"):
        opener.open(first)
    with pytest.raises(NotAuthentic, match="after one that was not authentic"):
        opener.open(second)
    opener = Opener(KEY)
    opener.open(first)
    with pytest.raises(NotAuthentic, match="out of order"):
        opener.open(third)


def test_a_record_opens_only_at_the_other_end_of_its_own_connection() -> None:
    mine, theirs = sessions()
    _, others = sessions()
    record = mine.sealer.seal(1, b"committed")
    for opener in (mine.opener, others.opener):
        with pytest.raises(NotAuthentic, match="not sent by the peer"):
            opener.open(record)
    assert theirs.opener.open(record) == (1, b"committed")


def test_a_hostile_length_is_refused_before_anything_is_allocated() -> None:
    for length in (handshake.PAYLOAD_BYTES_MAX + 1, 2**32 - 1):
        with pytest.raises(NotAuthentic, match="at most"):
            Opener(KEY).rest_bytes(length.to_bytes(4, "big") + bytes(9))
    with pytest.raises(ValueError, match="at most"):
        Sealer(KEY).seal(1, bytes(handshake.PAYLOAD_BYTES_MAX + 1))

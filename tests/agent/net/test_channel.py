"""Control connections between agents carry messages in order and unharmed, or end and say why, in bounded time and
memory; a stranger gets a closed connection. Over real sockets; time is moved by the test."""

from __future__ import annotations

import logging
import resource
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from ckpt.agent.net import dialer, framing, handshake
from ckpt.agent.net.channel import BEAT_S, OUTBOX_BYTES_MAX, Channel
from ckpt.agent.net.dialer import CONNECT_S, HALF_OPEN_MAX, HANDSHAKE_S, PeerListener, dial
from ckpt.agent.net.handshake import Dialler, Role
from ckpt.agent.runtime import connections
from ckpt.clock import ManualClock
from ckpt.errors import AgentError, UsageError
from ckpt.ipc.addresses import SILENCE_S_MAX, Address, SocketAddress, resolve
from ckpt.ipc.messages import Message
from tests.agent.net.loop import RUN, SECRET, Node, TurnedLoop

Made = Callable[..., Node]


class MovedLoop(TurnedLoop):
    """A loop whose timers run when the test moves the clock."""

    clock: ManualClock

    def move(self, seconds: float) -> None:
        """In small steps, so that each timer runs when it is due and all that it leads to happens."""
        end_s = self.clock.now_s() + seconds
        while self.clock.now_s() < end_s:
            self.clock.sleep_s(min(0.5, end_s - self.clock.now_s()))
            for _ in range(4):
                self.turn(0.001)


@pytest.fixture
def loop() -> Iterator[MovedLoop]:
    made = MovedLoop(ManualClock())
    yield made
    assert made.watched() == 0, "every socket was taken from the loop"
    made.close()


@pytest.fixture
def node(loop: MovedLoop) -> Iterator[Made]:
    with ExitStack() as stack:
        yield lambda *given, **more: stack.enter_context(closing(Node(loop, *given, **more)))


@pytest.fixture
def pair(node: Made) -> tuple[Node, Node]:
    one, other = node("a"), node("b")
    one.connect(other)
    return one, other


def raw(listener: Node) -> socket.socket:
    sock = socket.create_connection((listener.address.host, listener.address.port))
    sock.settimeout(0)
    return sock


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_messages_and_blobs_arrive_in_order_both_ways(node: Made, loop: MovedLoop, host: str) -> None:
    one, other = node("a", host), node("b", host)
    mine, theirs = one.connect(other)
    assert (mine.peer, theirs.peer, mine.secret_id) == ("b", "a", RUN)
    blobs = [b"", bytes(range(256)) * 8192, b"x"]
    for number in range(200):
        mine.send({"t": "rank-holds", "id": number}, blobs if number == 100 else ())
    theirs.send({"t": "layout"}, [memoryview(b"abc")])
    loop.until(lambda: len(other.noted.messages) == 200 and one.noted.messages)
    assert [message.fields["id"] for message in other.noted.messages] == list(range(200))
    assert other.noted.messages[100].blobs == blobs
    assert one.noted.messages[0].blobs == [b"abc"]
    assert mine.waiting_bytes == 0


def test_a_connection_that_is_reset_as_its_handshake_ends_closes_itself(
    pair: tuple[Node, Node], loop: MovedLoop
) -> None:
    one, _ = pair
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        sock, _ = listener.accept()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    sock.setblocking(False)
    made = Channel(loop, sock, one.channels[0]._session, one.noted)
    assert made.host == ""
    loop.until(lambda: not made.is_open)


def test_what_was_said_before_an_end_is_heard_by_who_finds_out_about_the_end_by_sending(
    pair: tuple[Node, Node], loop: MovedLoop
) -> None:
    one, other = pair
    mine, theirs = one.channels[0], other.channels[0]
    mine.send({"t": "unread"})  # so that the end is a reset
    theirs.send({"t": "epoch-ended", "number": 1}, [b"x" * (4 << 20)])
    while theirs.waiting_bytes:
        theirs._flush()
        mine._read()
    theirs.send({"t": "epoch-ended", "number": 2})
    theirs.close()
    for _ in range(3):
        mine.send({"t": "rank-steps"})
    assert mine.is_open
    loop.until(lambda: one.noted.ends)
    assert [message.fields["number"] for message in one.noted.messages] == [1, 2]
    assert "cannot be sent to" in str(one.noted.ends[0]) or "closed it" in str(one.noted.ends[0])
    assert not mine.waiting_bytes
    loop.move(2 * SILENCE_S_MAX)
    assert len(one.noted.ends) == 1


def test_small_messages_are_not_delayed_and_dead_hosts_are_noticed(pair: tuple[Node, Node]) -> None:
    for each in pair:
        sock = each.channels[0]._sock
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENCE_S_MAX * 1000


def test_an_idle_connection_stays(pair: tuple[Node, Node], loop: MovedLoop) -> None:
    loop.move(10 * SILENCE_S_MAX)
    one, other = pair
    assert one.noted.ends == other.noted.ends == []
    one.channels[0].send({"t": "still"})
    loop.until(lambda: other.noted.messages)


def test_a_silent_peer_is_let_go_in_time(node: Made, loop: MovedLoop) -> None:
    listener = node("a")
    with _handshaken(loop, listener) as (sock, _):
        sock.setblocking(False)
        loop.move(SILENCE_S_MAX - 2 * BEAT_S)
        assert listener.noted.ends == []
        loop.move(3 * BEAT_S)
        assert "has been silent" in str(listener.noted.ends[0])
        assert not listener.channels[0].is_open


def test_who_stood_still_takes_nobody_to_have_been_silent_and_goes_on_to_see_who_is(
    pair: tuple[Node, Node], node: Made, loop: MovedLoop
) -> None:
    """As an agent that was stopped by a signal, or with its whole machine: nobody was heard since nobody listened."""
    one, other = pair
    one.channels[0].send({"t": "large"}, [bytes(framing.BLOB_BYTES_MAX)])  # and nobody took anything
    loop.clock.sleep_s(3 * SILENCE_S_MAX)
    loop.move(SILENCE_S_MAX)
    assert one.noted.ends == other.noted.ends == []
    assert [message.kind for message in other.noted.messages] == ["large"]
    listener = node("c")
    with _handshaken(loop, listener):
        loop.clock.sleep_s(3 * SILENCE_S_MAX)
        loop.move(SILENCE_S_MAX + BEAT_S)
        assert "has been silent for 2" in str(listener.noted.ends[0])


def test_a_peer_that_does_not_read_is_let_go_by_time_and_by_bytes(node: Made, loop: MovedLoop) -> None:
    listener = node("a")
    with _handshaken(loop, listener) as (sock, session):
        held = listener.channels[0]
        held.send({"t": "x"}, [bytes(framing.BLOB_BYTES_MAX)])
        loop.turn()
        assert held.is_open
        while not listener.noted.ends:  # it lives, but takes nothing
            sock.sendall(session.sealer.seal(framing.ALIVE, b""))
            loop.move(BEAT_S)
        assert "has taken nothing of what it was sent" in str(listener.noted.ends[0])
    with _handshaken(loop, listener):
        held = listener.channels[1]
        for _ in range(2):
            held.send({"t": "x"}, [bytes(OUTBOX_BYTES_MAX // 2)])
        held.send({"t": "x"}, [bytes(framing.BLOB_BYTES_MAX)])
        assert not held.is_open
        assert held.waiting_bytes == 0
        loop.until(lambda: len(listener.noted.ends) == 2)
        assert "does not take what it is sent" in str(listener.noted.ends[1])


def test_a_connection_that_is_cut_anywhere_gives_whole_messages_only(node: Made, loop: MovedLoop) -> None:
    listener = node("a")
    for kept in range(0, 60, 7):
        with _handshaken(loop, listener) as (sock, session):
            records = b"".join(session.sealer.seal(framing.MESSAGE, b"\x81\xa1t\xa1x") for _ in range(2))
            sock.sendall(records[:kept])
        loop.until(lambda: not listener.channels[-1].is_open)
        loop.turn()
        assert len(listener.noted.messages) == kept // (len(records) // 2)
        listener.noted.messages.clear()
        why = "in the middle of a message" if kept % (len(records) // 2) else "closed it"
        assert why in str(listener.noted.ends[-1])


def test_a_message_that_is_repeated_is_not_heard_twice(node: Made, loop: MovedLoop) -> None:
    listener = node("a")
    with _handshaken(loop, listener) as (sock, session):
        sock.sendall(2 * session.sealer.seal(framing.MESSAGE, b"\x81\xa1t\xa1x"))
        loop.until(lambda: listener.noted.ends)
    assert len(listener.noted.messages) == 1
    assert "came again" in str(listener.noted.ends[0])


def test_what_a_peer_says_wrongly_is_answered_or_ends_its_connection(pair: tuple[Node, Node], loop: MovedLoop) -> None:
    one, other = pair

    def refuse(held: Channel, message: Message) -> None:
        raise UsageError("say it so") if message.kind == "ask" else KeyError("step")

    other.noted.on_message = refuse
    one.channels[0].send({"t": "ask", "id": 4})
    one.channels[0].send({"t": "ask"})  # has nobody to answer to
    loop.until(lambda: one.noted.messages)
    assert one.noted.messages[0].fields == {"t": "error", "id": 4, "kind": "usage", "message": "say it so"}
    assert other.channels[0].is_open
    one.channels[0].send({"t": "malformed"})
    loop.until(lambda: other.noted.ends and one.noted.ends)
    assert "malformed" in str(other.noted.ends[0])
    assert "closed it" in str(one.noted.ends[0])


def test_closing_is_quiet_for_us_and_told_to_the_peer(pair: tuple[Node, Node], loop: MovedLoop) -> None:
    one, other = pair
    one.channels[0].close()
    one.channels[0].close()
    one.channels[0].send({"t": "late"})
    loop.until(lambda: other.noted.ends)
    assert one.noted.ends == []
    assert other.noted.messages == []


def test_a_receiver_may_close_while_it_is_told(pair: tuple[Node, Node], loop: MovedLoop) -> None:
    one, other = pair
    other.noted.on_message = lambda held, message: held.close()
    for _ in range(3):
        one.channels[0].send({"t": "x"})
    loop.until(lambda: one.noted.ends)
    assert len(other.noted.messages) == 1


def test_a_stranger_gets_a_closed_connection_and_no_byte(node: Made, loop: MovedLoop) -> None:
    listener = node("a")
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(100), bytes(5000), b"CKPT\x01\x00\x01\xff\xff"):
        with raw(listener) as sock:
            sock.sendall(said)
            loop.until(lambda: is_closed(sock))
    assert listener.listener.half_open_count == 0
    assert listener.channels == []


def test_who_says_nothing_or_says_it_slowly_is_let_go(node: Made, loop: MovedLoop) -> None:
    listener = node("a")
    hello = Dialler(SECRET, RUN, Role.CONTROL, "b").hello
    with raw(listener) as silent, raw(listener) as slow:
        loop.until(lambda: listener.listener.half_open_count == 2)
        for byte in hello[:20]:
            slow.sendall(bytes([byte]))
            loop.move(HANDSHAKE_S / 25)
        assert not is_closed(slow)
        loop.move(HANDSHAKE_S / 4)
        loop.until(lambda: is_closed(silent) and is_closed(slow))
    assert listener.listener.half_open_count == 0


def test_half_open_connections_are_bounded_and_keep_nobody_out(
    node: Made, loop: MovedLoop, caplog: pytest.LogCaptureFixture
) -> None:
    listener, other = node("a"), node("b")
    knocking = [raw(listener) for _ in range(HALF_OPEN_MAX + 20)]
    loop.until(lambda: sum(map(is_closed, knocking)) == 20)
    assert listener.listener.half_open_count == HALF_OPEN_MAX
    other.connect(listener)
    for sock in knocking:
        sock.close()
    loop.until(lambda: listener.listener.half_open_count == 0)
    assert len(caplog.messages) == 1, "strangers do not fill the log"


def test_another_secret_is_refused_and_said(node: Made, loop: MovedLoop) -> None:
    listener, other = node("a"), node("b", secret=bytes(32))
    other.dial(listener.address)
    loop.until(lambda: other.failures)
    assert "is the secret the same?" in str(other.failures[0])
    assert listener.channels == []


def test_a_caller_of_another_version_hears_which_one_is_spoken(node: Made, loop: MovedLoop) -> None:
    listener = node("a")
    hello = bytearray(Dialler(SECRET, RUN, Role.CONTROL, "b").hello)
    hello[6] = 2
    with raw(listener) as sock:
        sock.sendall(hello)
        loop.turn()
        loop.turn()
        assert sock.recv(100) == b"CKPT\x02\x00\x01\x00\x00"
        assert is_closed(sock)


def test_an_address_where_nobody_answers_fails_in_time(node: Made, loop: MovedLoop) -> None:
    one = node("a")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = Address("127.0.0.1", gone.getsockname()[1])
    one.dial(address)
    loop.until(lambda: one.failures)
    assert "refused" in str(one.failures[0])
    with socket.create_server(("127.0.0.1", 0)) as mute:  # connects, says nothing
        one.dial(Address("127.0.0.1", mute.getsockname()[1]))
        loop.turn()
        loop.move(CONNECT_S + HANDSHAKE_S)
        loop.until(lambda: len(one.failures) == 2)
    assert "in time" in str(one.failures[1])
    exchange = Dialler(SECRET, RUN, Role.CONTROL, "a")
    with pytest.raises(AgentError, match="cannot be connected to"):
        dial(loop, SocketAddress(socket.AF_INET, ("255.255.255.255", 9)), exchange, one._greeted, one.failures.append)


def test_dialling_that_is_called_off_is_told_to_nobody(node: Made, loop: MovedLoop) -> None:
    one, other = node("a"), node("b")
    exchange = Dialler(SECRET, RUN, Role.CONTROL, "a")
    under_way = dial(loop, resolve(other.address)[0], exchange, one._greeted, one.failures.append)
    loop.turn()
    under_way.cancel()
    under_way.cancel()
    loop.until(lambda: other.listener.half_open_count == 0)
    loop.move(CONNECT_S + HANDSHAKE_S + 1)
    assert one.channels == one.failures == []


def test_a_listener_without_descriptors_rests_and_goes_on(
    node: Made, loop: MovedLoop, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = node("a"), node("b")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sock = raw(other)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (sock.fileno(), hard))
        for _ in range(5):
            loop.turn(0.001)
        assert other.listener.half_open_count == 0
        assert len(caplog.messages) == 1, "it does not try again at once"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    loop.move(connections.RETRY_S + 1)
    loop.until(lambda: other.listener.half_open_count == 1)
    sock.close()
    one.connect(other)


def test_a_place_that_is_taken_or_not_ours_is_an_error(node: Made, loop: MovedLoop) -> None:
    one = node("a")
    for address in (one.address, Address("192.0.2.1", 0), Address("nowhere.invalid", 0)):
        with pytest.raises(AgentError, match=r"cannot listen on .*CKPT_LISTEN"):
            PeerListener(loop, address, one.answerer, one._greeted)


def test_addresses_are_read_and_written() -> None:
    for text in ("node-1:80", "127.0.0.1:9", "[::1]:65535", "[fe80::1%eth0]:1"):
        assert str(Address.parse(text)) == text
    for text in ("", "host", "host:", ":80", "::1:80", "[::1]", "host:70000", "a b:1", "host:-1", "http://x:1", "*:0"):
        with pytest.raises(UsageError, match="HOST:PORT"):
            Address.parse(text)
    with pytest.raises(AgentError, match="looked up"):
        resolve(Address("x" * 300, 1))


def test_strangers_are_logged_again_after_a_while(
    node: Made, loop: MovedLoop, caplog: pytest.LogCaptureFixture
) -> None:
    listener = node("a")
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        with raw(listener) as sock:
            sock.sendall(bytes(9))
            loop.until(lambda: is_closed(sock))
        loop.move(dialer.LOG_INTERVAL_S / 2)
    said = ["1 connection from other hosts was refused", "2 connections from other hosts were refused"]
    assert [message.partition(", the last")[0] for message in caplog.messages] == said


@contextmanager
def _handshaken(loop: TurnedLoop, listener: Node) -> Iterator[tuple[socket.socket, handshake.Session]]:
    """A peer named b whose connection to `listener` is made, and which does what the test says."""
    made: list[tuple[socket.socket, handshake.Session]] = []
    before = len(listener.channels)
    exchange = Dialler(SECRET, RUN, Role.CONTROL, "b")
    place = resolve(listener.address)[0]
    dial(loop, place, exchange, lambda sock, session: made.append((sock, session)), lambda error: None)
    loop.until(lambda: made and len(listener.channels) > before)
    ((sock, session),) = made
    with sock:
        sock.settimeout(10)
        yield sock, session

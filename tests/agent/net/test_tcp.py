"""Frames arrive in the peer's memory byte for byte, whatever happens to the connections; what is wrong is never taken
for right; and whoever stops leaves no thread and no connection behind."""

from __future__ import annotations

import os
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from ckpt.agent.net import tcp_receiver
from ckpt.agent.net.handshake import Dialler, Role, Session
from ckpt.agent.net.tcp_receiver import NUMBER, WANT, Fetch
from ckpt.agent.net.tcp_sender import Transport
from ckpt.agent.net.transport import WRONG_MAX, Frames
from ckpt.agent.replication.replica_offers import transfer_name
from ckpt.agent.replication.replica_store import ReplicaStore
from ckpt.agent.runtime import workers
from ckpt.clock import ManualClock
from ckpt.errors import AgentError, CkptError, DamagedData
from ckpt.format.frames import frame_hash
from ckpt.ipc.addresses import SILENCE_S_MAX, Address, SocketReceiver, set_call_timeout
from ckpt.threads import Tasks
from ckpt.types import Epoch, Identity, Version
from tests.agent.net.loop import BOUND_S, RUN, SECRET, Node, TurnedLoop
from tests.agent.net.proxy import Fault, Proxy
from tests.threads import without_threads

STEP = Identity(Epoch(7, "0123456789abcdef"), Version(12))
NAME = "00000007-0123456789abcdef-000000000012.0000/rank0"
LENGTHS = (100, 1, 70_000, 3_000_000, 5, 65_536)  # small ones, odd ones, and one of more than a piece
ROOM = sum(LENGTHS) + 64 * len(LENGTHS)

Made = Callable[..., Node]


@pytest.fixture
def loop() -> Iterator[TurnedLoop]:
    made = TurnedLoop()
    yield made
    made.close()


@pytest.fixture
def node(loop: TurnedLoop) -> Iterator[Made]:
    """Makes agents, whose transports have short bounds unless said otherwise."""
    with ExitStack() as stack:

        def make(name: str, host: str = "127.0.0.1", secret: bytes = SECRET, **given: object) -> Node:
            given = {"connections": 1, "stall_s": 10.0, "patience_s": 10.0, **given}
            return stack.enter_context(closing(Node(loop, name, host, secret, partial(Transport, **given))))

        yield make


def content(seed: int = 1) -> tuple[bytearray, Frames]:
    """Memory with gaps between its frames."""
    data = bytearray(random.Random(seed).randbytes(ROOM))
    offsets, at = [], 0
    for length in LENGTHS:
        offsets.append(at)
        at += length + 64
    hashes = [frame_hash(data[start : start + length]) for start, length in zip(offsets, LENGTHS, strict=True)]
    return data, Frames.from_columns(*(np.array(each, np.uint64) for each in (offsets, LENGTHS, hashes)), ROOM)


class Transfer:
    """What `receiver` fetches from `sender`, through `address` where it is given. `numbers`: of which frames."""

    def __init__(
        self,
        sender: Node,
        receiver: Node,
        address: Address | None = None,
        numbers: list[int] | None = None,
        **given: object,
    ) -> None:
        self.loop = sender.loop
        self.source, self.frames = content()
        self.target = bytearray(ROOM)
        self.landed: list[int] = []
        sender.transport.offer(NAME, memoryview(self.source), self.frames)
        columns = self.frames.offsets, self.frames.lengths, self.frames.hashes
        self.fetch = receiver.transport.fetch(
            sender.name,
            [address or sender.address],
            NAME,
            memoryview(self.target),
            self.frames if numbers is None else Frames.from_columns(*(each[numbers] for each in columns), ROOM),
            numbers=numbers,
            landed=given.pop("landed", self.landed.append),
            **given,
        )

    def result(self) -> None:
        self.loop.until(self.fetch.completion.done)
        self.fetch.completion.result()

    def is_right(self, *numbers: int) -> bool:
        """Those frames are in place (all by default), and nothing was written beside them."""
        expected = bytearray(ROOM)
        for number, (at, length) in enumerate(self.frames.byte_ranges()):
            if not numbers or number in numbers:
                expected[at : at + length] = self.source[at : at + length]
        return self.target == expected


def offering(node: Made, urgent: bool = False, **given: object) -> tuple[Node, bytearray, Frames]:
    """An agent "a" that offers frames of that memory under NAME."""
    sender = node("a", **given)
    source, frames = content()
    sender.transport.offer(NAME, memoryview(source), frames, urgent)
    return sender, source, frames


def joined(source: bytearray, frames: Frames, numbers: list[int]) -> bytes:
    """Those frames, one after the other."""
    places = frames.byte_ranges()
    return b"".join(source[at : at + length] for at, length in (places[number] for number in numbers))


def error_of(loop: TurnedLoop, fetch: Fetch) -> str:
    loop.until(fetch.completion.done)
    return str(fetch.completion.exception())


def finished(loop: TurnedLoop, future: Future[None], bound_s: float = BOUND_S) -> None:
    loop.until(future.done, bound_s)
    future.result()


@pytest.mark.parametrize(("host", "connections"), [("127.0.0.1", 1), ("::1", 5)])
def test_all_frames_arrive_byte_for_byte(node: Made, host: str, connections: int) -> None:
    transfer = Transfer(node("a", host), node("b", host, connections=connections))
    transfer.result()
    assert transfer.is_right()
    assert sorted(transfer.landed) == list(range(len(LENGTHS)))
    assert transfer.fetch.missing() == []


def test_some_frames_of_an_offer_are_fetched_by_whoever_has_room_for_them_only(node: Made, loop: TurnedLoop) -> None:
    (sender, source, frames), receiver = offering(node), node("b")
    numbers = [4, 2]
    lengths = frames.lengths[numbers]
    target = bytearray(int(lengths.sum()))
    offsets = np.array([0, lengths[0]], np.uint64)
    mine = Frames.from_columns(offsets, lengths, frames.hashes[numbers], len(target))
    given = "a", [sender.address], NAME, memoryview(target), mine
    finished(loop, receiver.transport.fetch(*given, numbers=numbers).completion)
    assert target == joined(source, frames, numbers)
    with pytest.raises(AgentError, match="numbers"):
        receiver.transport.fetch(*given, numbers=[4])
    with pytest.raises(DamagedData):
        finished(loop, receiver.transport.fetch(*given, numbers=[2, 4]).completion)


def test_nothing_to_fetch_is_done_at_once(node: Made) -> None:
    transfer = Transfer(node("a"), node("b"), numbers=[])
    assert transfer.fetch.completion.result(0) is None


def test_a_cut_at_any_frame_boundary_or_within_a_frame_loses_nothing(node: Made) -> None:
    ends = np.cumsum(LENGTHS).tolist()
    for after in sorted({0, *ends, *(end - 1 for end in ends), ends[2] + 1_500_000}):
        sender, receiver = node("a"), node("b")
        with Proxy(sender.address, "a", [Fault(after)]) as proxy:
            transfer = Transfer(sender, receiver, proxy.address)
            transfer.result()
        assert transfer.is_right()
        assert transfer.landed == list(range(len(LENGTHS)))
        whole = sum(1 for end in ends if end <= after)
        again = sum(LENGTHS[whole:])
        assert proxy.passed == [after, again] if again else [after], "only what had not landed was sent again"


def test_a_bit_that_flips_on_the_way_is_noticed_and_the_frame_sent_again(node: Made) -> None:
    for after in (0, 99, 100, 80_000, 2_000_000, sum(LENGTHS) - 1):
        sender, receiver = node("a"), node("b")
        with Proxy(sender.address, "a", [Fault(after, flip=True)]) as proxy:
            transfer = Transfer(sender, receiver, proxy.address)
            transfer.result()
        assert transfer.is_right()
        assert len(proxy.passed) == 2


def test_a_frame_that_is_always_wrong_is_an_error_and_the_others_stay_good(node: Made) -> None:
    sender, receiver = node("a"), node("b")
    with Proxy(sender.address, "a", [], every=Fault(50, flip=True)) as proxy:
        transfer = Transfer(sender, receiver, proxy.address, numbers=[0])
        with pytest.raises(DamagedData, match=f"frame 0 of {NAME} arrived {WRONG_MAX} times"):
            transfer.result()
        assert len(proxy.passed) == WRONG_MAX
    assert transfer.fetch.missing() == [0]
    assert transfer.landed == []


def test_connections_that_never_bring_a_whole_frame_end_in_an_error(
    node: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_receiver, "CUTS_MAX", 3)
    sender, receiver = node("a"), node("b")
    with Proxy(sender.address, "a", [], every=Fault(2_500_000)) as proxy:
        transfer = Transfer(sender, receiver, proxy.address, numbers=[3])
        with pytest.raises(AgentError, match="3 connections were cut without a whole frame"):
            transfer.result()


@pytest.mark.parametrize(
    ("peer", "name", "secret", "why"),
    [
        ("nobody", NAME, SECRET, "refused"),
        ("a", "another", SECRET, "closed the connection"),
        ("c", NAME, SECRET, "is a, not c"),
        ("a", NAME, bytes(32), "closed the connection"),
    ],
)
def test_a_peer_that_is_not_there_is_another_or_offers_nothing_is_an_error_in_time(
    peer: str, name: str, secret: bytes, why: str, node: Made, loop: TurnedLoop
) -> None:
    (sender, _, frames), receiver = offering(node), node("b", secret=secret, patience_s=0.2)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        nobody = Address("127.0.0.1", gone.getsockname()[1])
    target, address = bytearray(ROOM), nobody if peer == "nobody" else sender.address
    fetch = receiver.transport.fetch(peer, [address], name, memoryview(target), frames)
    assert re.search(f"nothing has come for .*{why}.*CKPT_LISTEN", error_of(loop, fetch))
    assert target == bytearray(ROOM)


def test_an_address_that_leads_nowhere_is_tried_once_and_not_for_each_transfer(node: Made, loop: TurnedLoop) -> None:
    """It may take CONNECT_S, and a restore makes many transfers. Nor is it again where the other one is busy."""
    (sender, _, frames), receiver = offering(node, served_max=1, stall_s=1000.0), node("b", patience_s=1.0)
    tried: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as nowhere, Tasks("nowhere") as tasks:

        def refuse() -> None:
            while not tasks.stopping.is_set():
                sock, _ = nowhere.accept()
                tried.append(sock)
                sock.close()

        tasks.start("refuse", refuse)
        addresses = [Address("127.0.0.1", nowhere.getsockname()[1]), sender.address]
        with _greeted(loop, sender) as (first, session):
            receive_go(first, session)
            fetch = receiver.transport.fetch("a", addresses, NAME, memoryview(bytearray(ROOM)), frames)
            assert "serves others" in error_of(loop, fetch)
        for _ in range(3):
            target = bytearray(ROOM)
            finished(loop, receiver.transport.fetch("a", addresses, NAME, memoryview(target), frames).completion)
        stream = receiver.transport.stream("a", addresses, NAME, [0])
        loop.until(stream.done)
        stream.result().close()
        count = len(tried)
        tasks.stopping.set()
        socket.create_connection(nowhere.getsockname()).close()
    assert count == 1


def test_a_sender_that_falls_silent_is_given_up_and_asked_anew(node: Made) -> None:
    sender, receiver = node("a"), node("b", stall_s=0.3)
    with Proxy(sender.address, "a", [Fault(1_000_000, hang=True)]) as proxy:
        transfer = Transfer(sender, receiver, proxy.address)
        transfer.result()
    assert transfer.is_right()
    assert len(proxy.passed) == 2


def test_cancel_ends_a_transfer_and_the_memory_is_free(node: Made, loop: TurnedLoop) -> None:
    """Cut off in the middle of a frame, by a network that hangs."""
    before = threading.active_count()
    sender, receiver = node("a"), node("b", stall_s=60.0, connections=2)
    with Proxy(sender.address, "a", [], every=Fault(40_000, hang=True)) as proxy:
        transfer = Transfer(sender, receiver, proxy.address)
        loop.until(lambda: max(proxy.passed, default=0) == 40_000)
        transfer.fetch.cancel()
        transfer.fetch.cancel()
        with pytest.raises(AgentError, match="was cancelled"):
            transfer.result()
        transfer.target.extend(b"x")  # raises where a view is left
    finished(loop, sender.transport.withdraw(NAME))
    loop.until(lambda: threading.active_count() == before)


def test_cancel_does_not_wait_for_a_connection_that_is_not_made(node: Made, loop: TurnedLoop) -> None:
    """A listener whose queue is full answers nothing."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = Address("127.0.0.1", full.getsockname()[1])
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex((address.host, address.port))
        _, frames = content()
        fetch = node("b").transport.fetch("a", [address], NAME, memoryview(bytearray(ROOM)), frames)
        loop.turn()
        fetch.cancel()
        loop.until(fetch.completion.done, 3.0)
        assert fetch.completion.exception() is not None
        for sock in waiting:
            sock.close()


def test_an_offer_that_is_withdrawn_is_read_by_nobody(node: Made, loop: TurnedLoop) -> None:
    sender, receiver = node("a", stall_s=1000.0), node("b")
    with Proxy(sender.address, "a", [], every=Fault(40_000, hang=True)) as proxy:
        transfer = Transfer(sender, receiver, proxy.address)
        loop.until(lambda: proxy.passed == [40_000])
        finished(loop, sender.transport.withdraw(NAME), 5.0)
        transfer.source.extend(b"x")  # raises where a view is left
        transfer.fetch.cancel()
        with pytest.raises(AgentError):
            transfer.result()
    finished(loop, sender.transport.withdraw(NAME))


def test_a_reader_that_stalls_is_let_go(node: Made, loop: TurnedLoop) -> None:
    """It asks for everything many times over and reads nothing."""
    before = threading.active_count()
    sender, *_ = offering(node, stall_s=0.3)
    with _greeted(loop, sender) as (sock, session):
        for _ in range(20):
            sock.sendall(session.sealer.seal(WANT, NUMBER.pack(3)))
        loop.until(lambda: threading.active_count() > before)
        loop.until(lambda: threading.active_count() == before, SILENCE_S_MAX / 2)  # before the kernel notices


@pytest.mark.parametrize(
    "request_",
    [
        lambda session: session.sealer.seal(WANT, NUMBER.pack(len(LENGTHS))),
        lambda session: session.sealer.seal(WANT, b"abc"),
        lambda session: session.sealer.seal(WANT, NUMBER.pack(0) * (tcp_receiver.REQUEST_FRAMES_MAX + 1)),
        lambda session: session.sealer.seal(WANT + 1, NUMBER.pack(0)),
        lambda session: b"\xff" * 100,
        lambda session: session.sealer.seal(WANT, NUMBER.pack(0))[:-1] + b"\0",
    ],
)
def test_a_request_that_is_forged_or_malformed_gets_no_bytes(
    node: Made, loop: TurnedLoop, request_: Callable[..., bytes]
) -> None:
    sender, *_ = offering(node)
    with _greeted(loop, sender) as (sock, session):
        receive_go(sock, session)
        sock.sendall(request_(session))
        with pytest.raises((EOFError, ConnectionResetError)):
            SocketReceiver(sock, BOUND_S).receive(1)


def receive_go(sock: socket.socket, session: Session) -> None:
    tcp_receiver._receive_go(SocketReceiver(sock, BOUND_S), session)


@contextmanager
def _greeted(loop: TurnedLoop, sender: Node) -> Iterator[tuple[socket.socket, Session]]:
    """A data connection to `sender` whose handshake has ended; its receiver is up to the test."""
    with socket.create_connection((sender.address.host, sender.address.port)) as sock:
        set_call_timeout(sock, BOUND_S)
        handshake = Dialler(SECRET, RUN, Role.DATA, "b", NAME)
        message = handshake.hello
        while handshake.session is None:
            sock.sendall(message)
            sock.setblocking(False)
            reply = b""
            while len(reply) < 9 or len(reply) < 9 + int.from_bytes(reply[7:9], "big"):
                try:
                    reply += sock.recv(1)
                except BlockingIOError:
                    loop.turn(0.01)
            set_call_timeout(sock, BOUND_S)
            message = handshake.step(reply)
        yield sock, handshake.session


def test_more_connections_than_are_served_wait_their_turn(node: Made, loop: TurnedLoop) -> None:
    (sender, _, frames), receiver = offering(node, stall_s=1000.0, served_max=1), node("b", connections=4)
    with _greeted(loop, sender) as (first, session), _greeted(loop, sender) as (second, other):
        receive_go(first, session)
        with pytest.raises(tcp_receiver._SenderBusy):
            receive_go(second, other)
        target = bytearray(ROOM)
        fetch = receiver.transport.fetch("a", [sender.address], NAME, memoryview(target), frames)
        loop.turn()
        assert not fetch.completion.done()
    finished(loop, fetch.completion)
    assert fetch.missing() == []


def test_as_long_as_others_are_served_nobody_runs_out_of_patience(node: Made, loop: TurnedLoop) -> None:
    """Twelve want all of it of a sender that serves two connections at a time, and each of them is patient for a
    quarter of the time that all of it takes."""
    total_s, many = 4.0, 12
    sender, source, frames = offering(node, served_max=2, bytes_per_s=many * sum(LENGTHS) / total_s)
    targets = [bytearray(ROOM) for _ in range(many)]
    fetches = [
        node(f"b{number}", connections=2, patience_s=total_s / 4).transport.fetch(
            "a", [sender.address], NAME, memoryview(target), frames
        )
        for number, target in enumerate(targets)
    ]
    for fetch, target in zip(fetches, targets, strict=True):
        finished(loop, fetch.completion)
        for at, length in frames.byte_ranges():
            assert target[at : at + length] == source[at : at + length]


@pytest.mark.parametrize(
    "word",
    [
        lambda session: session.sealer.seal(tcp_receiver.GO, b"x"),
        lambda session: session.sealer.seal(tcp_receiver.BUSY, b""),
        lambda session: session.sealer.seal(tcp_receiver.BUSY, bytes(9)),
        lambda session: session.sealer.seal(WANT, b""),
        lambda session: session.sealer.seal(tcp_receiver.GO, b"")[:-1] + b"\0",
        lambda session: b"\xff" * 100,
    ],
)
def test_a_first_word_that_is_forged_or_malformed_is_no_turn(
    node: Made, loop: TurnedLoop, word: Callable[[Session], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = node("a"), node("b", patience_s=0.1)

    def accept(sock: socket.socket, session: Session) -> None:
        sock.send(word(session))
        sock.close()

    monkeypatch.setattr(sender.transport, "accept", accept)
    _, frames = content()
    fetch = receiver.transport.fetch("a", [sender.address], NAME, memoryview(bytearray(ROOM)), frames)
    assert re.search("malformed|message|not authentic", error_of(loop, fetch))
    assert fetch.missing() == list(range(len(LENGTHS)))


def test_close_ends_what_is_under_way(node: Made, loop: TurnedLoop) -> None:
    sender, receiver = node("a", stall_s=1000.0), node("b", stall_s=1000.0)
    with Proxy(sender.address, "a", [], every=Fault(40_000, hang=True)) as proxy:
        transfer = Transfer(sender, receiver, proxy.address)
        loop.until(lambda: proxy.passed == [40_000])
        receiver.close()
        with pytest.raises(AgentError, match="cancelled"):
            transfer.fetch.completion.result(0)
        sender.close()


def test_a_sender_that_gets_no_thread_turns_its_callers_away_and_serves_them_later(
    node: Made, loop: TurnedLoop
) -> None:
    sender, receiver = node("a"), node("b")
    accepted: list[str] = []
    accept = sender.transport.accept

    def counted(sock: socket.socket, session: Session) -> None:
        accepted.append(session.subject)
        accept(sock, session)

    sender.transport.accept = counted  # type: ignore[method-assign]
    with without_threads("ckpt-peers-serve"):
        transfer = Transfer(sender, receiver)
        loop.until(lambda: len(accepted) >= 2)
        finished(loop, sender.transport.withdraw(NAME))
        sender.transport.offer(NAME, memoryview(transfer.source), transfer.frames)
    transfer.result()
    assert transfer.is_right()


def test_a_receiver_that_gets_no_thread_is_told_so_and_its_memory_is_free(node: Made, loop: TurnedLoop) -> None:
    sender, receiver = node("a"), node("b", connections=2)
    with without_threads("ckpt-peers-fetch-1"):
        transfer = Transfer(sender, receiver)
        with pytest.raises(CkptError, match="no further thread"):
            transfer.result()
    sender.transport.withdraw(NAME)
    again = Transfer(sender, receiver)
    again.result()
    assert again.is_right()


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_limited_side_moves_bytes_no_faster(node: Made, side: str) -> None:
    clock = ManualClock()
    limit = {"bytes_per_s": 1e6, "clock": clock}
    transfer = Transfer(node("a", **(limit if side == "a" else {})), node("b", **(limit if side == "b" else {})))
    transfer.result()
    assert transfer.is_right()
    assert sum(LENGTHS) / 1e6 - 0.2 < clock.now_s() < sum(LENGTHS) / 1e6 + 0.2


@pytest.mark.parametrize("urgent", [True, False])
def test_what_a_start_waits_for_is_at_normal_priority_and_outside_the_limit(
    node: Made, loop: TurnedLoop, monkeypatch: pytest.MonkeyPatch, urgent: bool
) -> None:
    monkeypatch.setattr(workers, "NICE", 19)
    clock, nice = ManualClock(), set[int]()
    limit = {"bytes_per_s": 1e6, "clock": clock}
    (sender, _, frames), receiver = offering(node, urgent, **limit), node("b", **limit)
    note = lambda number: nice.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))  # noqa: E731
    target = memoryview(bytearray(ROOM))
    fetch = receiver.transport.fetch("a", [sender.address], NAME, target, frames, note, urgent)
    finished(loop, fetch.completion)
    assert nice == {os.getpriority(os.PRIO_PROCESS, 0) if urgent else 19}
    assert (clock.now_s() > 0.1) != urgent


def test_what_others_read_already_is_given_to_a_start_outside_the_limit_and_to_them_too(
    node: Made, loop: TurnedLoop
) -> None:
    """Of one snapshot there is one offer, whoever reads it."""
    sender, name = node("a", bytes_per_s=1000.0), transfer_name(STEP, 0)
    source, frames = content()
    copies = ReplicaStore(cast(Any, None), lambda what: what())
    offer = partial(copies.offers.add, sender.transport, name, memoryview(source), frames)
    offer("training")
    targets, landed = [bytearray(ROOM) for _ in range(2)], list[int]()

    def fetch(number: int, urgent: bool) -> Fetch:
        receiver, target = node(f"b{number}").transport, memoryview(targets[number])
        return receiver.fetch("a", [sender.address], name, target, frames, landed=landed.append, urgent=urgent)

    slow = fetch(0, urgent=False)
    loop.until(lambda: landed)
    assert not slow.completion.done()
    offer("start", urgent=True)
    finished(loop, fetch(1, urgent=True).completion)
    finished(loop, slow.completion)
    for at, length in frames.byte_ranges():
        assert all(target[at : at + length] == source[at : at + length] for target in targets)


def test_who_is_told_of_frames_and_fails_ends_the_transfer(node: Made, caplog: pytest.LogCaptureFixture) -> None:
    def told(number: int) -> None:
        raise ZeroDivisionError

    transfer = Transfer(node("a"), node("b"), landed=told)
    with pytest.raises(ZeroDivisionError):
        transfer.result()
    assert "made a mistake" in caplog.text


def test_names_are_offered_once_and_nothing_goes_after_close(node: Made, loop: TurnedLoop) -> None:
    sender, source, frames = offering(node)
    with pytest.raises(AgentError, match="already"):
        sender.transport.offer(NAME, memoryview(source), frames)
    with pytest.raises(AgentError, match="name"):
        sender.transport.offer("x" * 201, memoryview(source), frames)
    with pytest.raises(AgentError, match="beyond"):
        sender.transport.offer("short", memoryview(source)[:-100], frames)
    sender.close()
    fetch = sender.transport.fetch("b", [sender.address], NAME, memoryview(source), frames)
    with pytest.raises(CkptError, match="closed"):
        fetch.completion.result(0)


def test_lists_of_frames_survive_the_wire_and_hostile_ones_are_refused() -> None:
    _, frames = content()
    again = Frames.decode(frames.encode(), ROOM)
    assert again.byte_ranges() == frames.byte_ranges()
    assert (again.hashes == frames.hashes).all()
    assert len(Frames.decode(Frames.from_columns(*_columns([], []), 0).encode(), 0)) == 0
    blob = frames.encode()
    for bad in (b"", blob[:-1], blob + b"\0", b"XXXX" + blob[4:], blob[:4] + b"\xff" * 4 + blob[8:]):
        with pytest.raises(AgentError):
            Frames.decode(bad, ROOM)
    top = 2**64
    for offsets, lengths in [([0], [0]), ([0], [101]), ([1], [100]), ([top - 50], [100]), ([0, 9], [10, 10])]:
        with pytest.raises(AgentError):
            Frames.from_columns(*_columns(offsets, lengths), 100)
    Frames.from_columns(*_columns([10, 0], [90, 10]), 100)


def _columns(offsets: list[int], lengths: list[int]) -> tuple[np.ndarray, ...]:
    return np.array(offsets, np.uint64), np.array(lengths, np.uint64), np.zeros((len(offsets), 2), np.uint64)


@pytest.mark.parametrize("numbers", [[3, 0, 5], list(range(len(LENGTHS)))])
def test_a_stream_gives_the_bytes_of_the_frames_asked_for_in_that_order_and_nothing_else(
    numbers: list[int], node: Made, loop: TurnedLoop
) -> None:
    (sender, source, frames), receiver = offering(node, urgent=True, stall_s=1.0), node("b")
    opened = receiver.transport.stream("a", [sender.address], NAME, numbers)
    loop.until(opened.done)
    wanted = joined(source, frames, numbers)
    with opened.result() as sock:
        sock.shutdown(socket.SHUT_WR)
        assert bytes(SocketReceiver(sock, BOUND_S).receive(len(wanted))) == wanted
        assert sock.recv(1) == b""


def test_a_stream_that_nobody_gives_is_an_error_and_none_is_left_by_who_closes(node: Made, loop: TurnedLoop) -> None:
    sender, receiver = node("a", served_max=1, stall_s=1000.0), node("b")
    source, frames = content()
    unknown = receiver.transport.stream("a", [sender.address], NAME, [0])
    loop.until(unknown.done)
    assert isinstance(unknown.exception(), AgentError | OSError)
    sender.transport.offer(NAME, memoryview(source), frames)
    first = receiver.transport.stream("a", [sender.address], NAME, [0])
    loop.until(first.done)
    second = receiver.transport.stream("a", [sender.address], NAME, [0])
    loop.until(second.done)
    assert isinstance(second.exception(), AgentError), "it serves as many as it can"
    first.result().close()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        third = receiver.transport.stream("a", [Address("127.0.0.1", silent.getsockname()[1])], NAME, [0])
        receiver.transport.close()
        assert third.exception(BOUND_S) is not None
    with pytest.raises(CkptError):
        receiver.transport.stream("a", [sender.address], NAME, [0])

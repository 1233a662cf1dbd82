"""What a connection between agents brings into memory, and when it is given up."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from ckpt.ipc.addresses import CALL_BYTES_MIN, SocketReceiver
from ckpt.threads import Tasks

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ends of a connection over TCP; the second one's buffers are small."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as here:
            there, _ = listener.accept()
            with there:
                yield here, there


def test_pieces_come_whole_whatever_their_size_and_that_of_the_kernels_buffers(pair: Pair) -> None:
    here, there = pair
    pieces = [bytes([n]) * size for n, size in enumerate((1, 5, 1 << 20, 3, 300_000, CALL_BYTES_MIN - 1))]
    receiver = SocketReceiver(there, 60)
    with Tasks("sending", pool_size=1) as tasks:
        sent = tasks.submit(here.sendall, b"".join(pieces))
        for piece in pieces:
            room = bytearray(len(piece))
            receiver.fill(memoryview(room))
            assert room == piece
        sent.result(60)


def test_the_end_of_a_connection_in_the_middle_of_a_piece_is_no_silence(pair: Pair) -> None:
    here, there = pair
    here.sendall(b"half")
    here.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        SocketReceiver(there, 60).fill(memoryview(bytearray(8)))


@pytest.mark.parametrize(("sent", "said"), [(b"", "nothing"), (b"a few", "too little")])
def test_a_peer_that_is_silent_or_dribbles_is_given_up(pair: Pair, sent: bytes, said: str) -> None:
    here, there = pair
    here.sendall(sent)
    with pytest.raises(TimeoutError, match=said):
        SocketReceiver(there, 0.05).fill(memoryview(bytearray(1 << 20)))


def test_a_message_that_comes_a_byte_at_a_time_is_given_up(pair: Pair) -> None:
    """Or a stranger at the address of a node that is gone could hold up who fetches from there, for as long as he
    likes."""
    here, there = pair
    over = threading.Event()

    def drip() -> None:
        while not over.wait(0.02):
            here.send(b"x")

    with Tasks("dripping", pool_size=1) as tasks:
        dripping = tasks.submit(drip)
        try:
            with pytest.raises(TimeoutError):
                SocketReceiver(there, 0.2).receive(512)
        finally:
            over.set()
        dripping.result(60)


def test_a_signal_in_the_midst_of_a_message_ends_nothing(pair: Pair) -> None:
    here, there = pair
    heard, never = threading.Event(), threading.Event()

    def disturb() -> None:
        here.sendall(b"a" * 100)
        never.wait(0.1)  # until it has come, and the rest is waited for
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
        assert heard.wait(60)
        here.sendall(b"b" * 412)

    before = signal.signal(signal.SIGUSR2, lambda *_: heard.set())
    try:
        with Tasks("disturbing", pool_size=1) as tasks:
            disturbing = tasks.submit(disturb)
            assert SocketReceiver(there, 10.0).receive(512) == b"a" * 100 + b"b" * 412
            disturbing.result(60)
    finally:
        signal.signal(signal.SIGUSR2, before)

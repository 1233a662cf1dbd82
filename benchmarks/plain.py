"""One end of plain sockets between network namespaces, for `benchmarks.recover`: what the kernel and this machine need
for the same bytes, without anything of ours.

    python -c 'from benchmarks.plain import main; main()' OWN GIVE COPY ADDRESS=BYTES ...

Listens at OWN, has GIVE bytes for whoever connects, and says "ready". Once a line has come on standard input it gets
that many BYTES from each ADDRESS, over two connections each, into new memory, and at the same time copies COPY bytes
from shared memory into new memory, as a rank does with what lies on its own node, and then what has come. Says how many
seconds that took.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
import time

import numpy as np

PORT = 29500
CONNECTIONS = 2
PIECE_BYTES = 1 << 20


def main() -> int:
    own, give, copy = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    wanted = [(at, int(count)) for at, _, count in (each.partition("=") for each in sys.argv[4:])]
    given, kept = bytearray(max(1, give)), _shared(copy)
    with socket.create_server((own, PORT)) as listener:
        threading.Thread(target=_serve, args=(listener, memoryview(given)), daemon=True).start()
        print("ready", flush=True)
        sys.stdin.readline()
        began_s = time.monotonic()
        threads = [threading.Thread(target=_copy, args=(kept,))]
        for address, count in wanted:
            threads.append(threading.Thread(target=_get_and_copy, args=(address, count)))
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        print(time.monotonic() - began_s, flush=True)
        sys.stdin.readline()  # others may still be given something
    return 0


def _shared(count: int) -> np.ndarray:
    fd = os.memfd_create("plain")
    os.ftruncate(fd, max(1, count))
    kept = np.frombuffer(mmap.mmap(fd, max(1, count)), np.uint8)
    os.close(fd)
    kept[:: mmap.PAGESIZE] = 1  # its pages are there
    return kept


def _copy(kept: np.ndarray) -> None:
    np.copyto(np.empty_like(kept), kept)


def _get_and_copy(address: str, count: int) -> None:
    room = _shared(count)
    part = -(-count // CONNECTIONS)
    threads = [
        threading.Thread(target=_get, args=(address, memoryview(room)[at : at + part]))
        for at in range(0, count, max(1, part))
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    _copy(room)


def _get(address: str, room: memoryview) -> None:
    with socket.create_connection((address, PORT)) as sock:
        sock.sendall(len(room).to_bytes(8, "big"))
        while room:
            got = sock.recv_into(room, min(len(room), PIECE_BYTES), socket.MSG_WAITALL)
            assert got, "the other end is gone"
            room = room[got:]


def _serve(listener: socket.socket, given: memoryview) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_give, args=(sock, given), daemon=True).start()


def _give(sock: socket.socket, given: memoryview) -> None:
    with sock:
        count = int.from_bytes(sock.recv(8, socket.MSG_WAITALL), "big")
        for at in range(0, count, PIECE_BYTES):
            sock.sendall(given[at : min(at + PIECE_BYTES, count)])

"""A process in the place of an agent: python -m tests.agent.stub MODE SOCKET LOCK [WORD ..].

It holds the run lock and listens. "hangs": never answers, and sleeps; "is-busy": never answers, and works;
"makes-way": tells the first who says hello that it is of another release, and ends; "wakes-up": hangs until SIGUSR1,
takes all that wait by then, says so, and makes way.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys

from ckpt.ipc import messages

BACKLOG = 8


def main(mode: str, path: str, lock: str) -> None:
    fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(BACKLOG)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        signal.alarm(120)  # it ends by itself, whatever becomes of the test
        print("ready", flush=True)
        while mode == "is-busy":
            pass
        while mode == "hangs":
            signal.pause()
        if mode == "wakes-up":
            signal.sigwait([signal.SIGUSR1])
            for _ in range(BACKLOG + 1):  # the kernel lets one more wait
                listener.accept()[0].close()
            print("awake", flush=True)
        message = None
        while message is None:  # who only looks whether it takes connections says nothing
            sock, _ = listener.accept()
            message = messages.receive(sock)
        body = {"kind": "other-version", "message": "version 7"}
        messages.send(sock, {"t": "error", "id": message.fields["id"], **body})
        sock.close()


if __name__ == "__main__":
    main(*sys.argv[1:4])

"""The agent is its user's alone: neither its socket nor the folder of it serves anybody else."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

import ckpt
from ckpt.errors import AgentError
from ckpt.ipc import client, messages
from ckpt.settings import read_settings
from tests.checkpointer.loops import losses, make
from tests.checkpointer.runs import run, saving

NOBODY = 65534
CLOSED, ANSWERED, REFUSED = 10, 11, 12  # how the other user's process ends


@pytest.mark.skipif(os.geteuid() != 0, reason="only as root: another user has to be at hand")
def test_another_user_who_reaches_the_socket_is_not_served_and_the_job_goes_on(
    tmp_path: Path, runtime_dir: Path
) -> None:
    """Even where the permissions of the files would let them in."""

    def at(ck: ckpt.Checkpointer, step: int) -> None:
        if step == 2:
            place = client.make_agent_paths(str(tmp_path), read_settings()).socket
            runtime_dir.chmod(0o711)
            place.chmod(0o777)
            assert knock_as(NOBODY, place) == CLOSED
            assert knock_as(0, place) == ANSWERED
            runtime_dir.chmod(0o700)
        saving(2)(ck, step)

    ended = run(tmp_path, 3, make(), at)
    assert ended.losses == losses(3)
    assert (ended.ck.receipt["committed_step"], ended.ck.receipt["agent_restarts"]) == (3, 0)


def knock_as(user: int, place: Path) -> int:
    """Says hello from a process of that user: whether it is answered, or cut off."""
    pid = os.fork()
    if pid == 0:
        code = REFUSED
        try:
            os.seteuid(user)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(20)
                sock.connect(str(place))
                code = CLOSED
                messages.send(sock, {"t": "hello", "id": 1, "version": client.VERSION, "role": "tool"})
                if messages.receive(sock) is not None:
                    code = ANSWERED
        except (ConnectionError, AgentError):
            pass
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path, runtime_dir: Path) -> None:
    runtime_dir.chmod(0o701)
    with pytest.raises(ckpt.AgentError, match="0700"), ckpt.Checkpointer(tmp_path, make().state):
        raise AssertionError("it was entered")
    assert list(runtime_dir.iterdir()) == []

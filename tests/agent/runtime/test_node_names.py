"""What people are told a node is called, and where they are told it: see also cli/test_view.py."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ckpt.agent.runtime.event_loop import EventLoop, Peer
from ckpt.agent.runtime.node_names import NodeNames, replace_agent_names
from ckpt.ipc.addresses import Address
from ckpt.ipc.messages import receive
from ckpt.ipc.node_list import NODES_MAX, NodeAt

ONE, TWO, STABLE, STRANGER = (f"{number:016x}" for number in (1, 0xA2, 3, 4))
AT = (Address("10.0.0.3", 4123),)


@pytest.fixture
def called() -> NodeNames:
    made = NodeNames()
    made.add_nodes([NodeAt(ONE, AT, (0,), host="gpu-17"), NodeAt(TWO, AT, (4, 5, 6, 7)), NodeAt(STABLE, AT, ())])
    return made


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (f"agent {ONE} is gone", "the agent of node gpu-17 (rank 0) is gone"),
        (f"coordinated by the agent of {ONE}, which", "coordinated by the agent of node gpu-17 (rank 0), which"),
        (f"nobody keeps {ONE}, {TWO}", "nobody keeps node gpu-17 (rank 0), node 10.0.0.3 (ranks 4-7)"),
        (f"slurm 7 on node {TWO}: word", "slurm 7 on node 10.0.0.3 (ranks 4-7): word"),
        (f"to agent {STABLE}", "to the agent of node 10.0.0.3:4123"),
        (f"agent {STRANGER} is gone", f"agent {STRANGER} is gone"),
    ],
)  # fmt: skip
def test_people_read_a_nodes_host_and_ranks_or_where_it_listens(called: NodeNames, text: str, read: str) -> None:
    assert called.translate_text(text) == read


@pytest.mark.parametrize("text", [f"data/e-t/gpu/{ONE}-3.pack", f"commits/00000001-{TWO}-{ONE}", f"00000001-{ONE}"])
def test_keys_and_identities_stay_what_they_are(called: NodeNames, text: str) -> None:
    assert called.translate_text(text) == text


def test_of_many_ranks_only_some_runs_are_named() -> None:
    made = NodeNames()
    made.add_nodes([NodeAt(ONE, AT, (9, 0, 1, 2, 4, 6, 8, 11))])
    assert made.names_by_agent[ONE] == "node 10.0.0.3 (ranks 0-2, 4, 6, 8-9, ...)"


def test_who_is_known_by_its_ranks_stays_so_and_a_newer_start_counts(called: NodeNames) -> None:
    called.add_nodes([NodeAt(TWO, AT, ())])
    assert called.names_by_agent[TWO] == "node 10.0.0.3 (ranks 4-7)"
    called.add_nodes([NodeAt(TWO, AT, (2,))])
    assert called.names_by_agent[TWO] == "node 10.0.0.3 (rank 2)"


def test_an_agent_that_sees_ever_new_nodes_forgets_the_oldest(called: NodeNames) -> None:
    called.add_nodes(NodeAt(f"{number:016x}", AT, (number,)) for number in range(100, 2 * NODES_MAX + 100))
    assert len(called.names_by_agent) == 2 * NODES_MAX
    assert ONE not in called.names_by_agent


def test_what_a_trainer_is_sent_is_put_so_and_what_machines_read_is_not(tmp_path: Path, called: NodeNames) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = EventLoop(tmp_path / "s")
    try:
        server.node_names = called
        peer = Peer(server, here, 1)
        peer.send({"t": "event", "message": f"agent {ONE} is gone", "data": {"agent": ONE}, "error": None})
        fields = receive(there).fields
        assert fields["message"] == "the agent of node gpu-17 (rank 0) is gone"
        assert fields["data"] == {"agent": ONE}
        assert replace_agent_names(f"agent {ONE}", {}) == f"agent {ONE}"
    finally:
        server.close()
        here.close()
        there.close()

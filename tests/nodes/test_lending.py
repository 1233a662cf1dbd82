"""A memory-only node is the only peer of a job under torchrun. The trainers' node is lost without a word: the
memory-only node commits what it keeps, and the state comes back from its memory, on other nodes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.agent.nodes.cluster import line
from tests.nodes.jobs import ELASTIC, Elastic, check_memory
from tests.nodes.lan import Lan, Place

pytestmark = ELASTIC

PORT = 7700
STORE_BYTES_S = 400e3  # so slow that the newest checkpoints are in memory only
COMMITTED_S = 120.0


def lose(lan: Lan, job: Elastic, name: str) -> float:
    """The node is gone from the network, and nobody is told; when, Unix time."""
    lan.plug(job.places[name], connected=False)
    return job.kill(name)


def test_what_a_lost_trainers_node_had_is_committed_by_a_memory_only_node_and_comes_back_from_its_memory(
    lan: Lan, tmp_path: Path, secret_file: Path
) -> None:
    stable = lan.node()
    peers = {"CKPT_PEERS": f"{stable.at['own']}:{PORT}", "CKPT_SECRET_FILE": str(secret_file)}
    slowly = ("--mib", "3", "--bandwidth", str(STORE_BYTES_S))
    first = Elastic(lan, tmp_path, 100_000, *slowly, nodes=(1, 1), apart=True)
    lend(stable, first.url, secret_file, tmp_path / "lending.log")
    first.env = peers
    (node,) = first.start()
    first.safe_after(0.0, world=1)
    safe = first.safe_after(time.time(), world=1)
    killed = lose(lan, first, node)
    safe = max(safe, first.safe_step())

    deadline = time.monotonic() + COMMITTED_S
    while not any(identity.version.step >= safe for identity in line(first.url)):
        assert time.monotonic() < deadline, (tmp_path / "lending.log").read_text()
        time.sleep(0.2)

    (tmp_path / "again").mkdir()
    again = Elastic(lan, tmp_path / "again", 100_000, "--mib", "3", nodes=(2, 2), apart=True)
    again.url, again.env = first.url, peers
    again.start(2)
    check_memory(again.restored(2, killed), at_least=safe)
    again.safe_after(killed, world=2)
    again.finish(*first.lines())


def lend(node: Place, url: str, secret: Path, log: Path) -> None:
    command = [sys.executable, "-m", "ckpt.cli.main", "agent", url, "--listen", f"{node.at['own']}:{PORT}"]
    env = {"CKPT_RUNTIME_DIR": str(node.folder), "CKPT_SECRET_FILE": str(secret)}
    node.start([*command, "--memory", "64MiB", "--commit-after-s", "2"], log, env)
    deadline = time.monotonic() + 60
    while "lending" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)

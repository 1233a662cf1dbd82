"""How fast does a state come back from another node's memory into warm tensors, against two plain sockets?

    python -m benchmarks.peer_restore [--small] [--json FILE]

A job with a memory-only node, all on loopback: what it saved is in that node's memory when its trainer and its agent
are killed. A job with an agent of its own then restores it: the agent fetches it over authenticated connections, and
the trainer copies it into its tensors while it comes, and hashes what it copies. Only that is timed, not finding out
what there is. In turns with it two plain connections of another process move as many bytes into warm memory: sendall of
1 MiB pieces, recv_into, no hash, no copy. Nothing can come from the store, which takes 1 MB/s.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

import ckpt
from benchmarks import peer, restore
from benchmarks.report import Row, parser, report, timed
from benchmarks.stall import job
from tests.checkpointer.runs import agent_status
from tests.checkpointer.scripts import ROOT

BAR = 0.8


def save(url: str, total: int) -> None:
    """Leaves a checkpoint in the memory-only node's memory only: this process and its agent are killed."""
    ck = _checkpointer(url, total)
    ck.__enter__()
    ck.step()
    ck.save().wait("peer")
    _kill_agent(url)
    os._exit(0)


def load(url: str, total: int) -> None:
    """Says how long that took, and which level it came from."""
    ck = _checkpointer(url, total)
    with restore.timed_fill() as spent:
        ck.__enter__()
    print(json.dumps({"seconds": spent[0], "level": ck.restored.level}), flush=True)
    _kill_agent(url)
    os._exit(0)


def _checkpointer(url: str, total: int) -> ckpt.Checkpointer:
    model, optim = job(total)
    limits, policy = ckpt.Limits(bandwidth=1e6), ckpt.Every(steps=10**8)
    return ckpt.Checkpointer(url, {"model": model, "optim": optim}, policy=policy, codec="raw", limits=limits)


def _kill_agent(url: str) -> None:
    os.kill(agent_status(url)["pid"], signal.SIGKILL)


def once(total: int) -> float:
    """Seconds to fetch, copy and check the tensors."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        url, secret = str(folder / "run"), folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        base = {**os.environ, "PYTHONPATH": str(ROOT), "CKPT_SECRET_FILE": str(secret), "CKPT_LAUNCH": "bench"}
        lending = subprocess.Popen(
            [
                *(sys.executable, "-m", "ckpt.cli.main", "agent", url, "--json", "--commit-after-s", "3600"),
                *("--listen", "127.0.0.1:0", "--memory", str(4 * total + (64 << 20))),
            ],
            env={**base, "CKPT_RUNTIME_DIR": str(folder / "lender")},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert lending.stdout is not None
            (at,) = json.loads(lending.stdout.readline())["listen"]
            for what in ("save", "load"):
                code = f"from benchmarks.peer_restore import {what}; {what}({url!r}, {total})"
                env = {**base, "CKPT_PEERS": at, "CKPT_RUNTIME_DIR": str(folder / what)}
                call = [sys.executable, "-c", code]
                done = subprocess.run(call, env=env, check=True, text=True, stdout=subprocess.PIPE)
        finally:
            lending.send_signal(signal.SIGKILL)
            psutil.wait_procs([lending], timeout=10)
        shutil.rmtree(url)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["level"] == "peer", told
    return float(told["seconds"])


def main() -> int:
    args = parser(__doc__).parse_args()
    total, rounds = (32 << 20, 1) if args.small else (1 << 30, 5)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=peer.offer, args=(there, total))
    child.start()
    address, port, _ = here.recv()
    room = memoryview(bytearray(total))
    ours, plain = [], []
    try:
        for _ in range(rounds):
            ours.append(once(total))
            plain += [timed(lambda: peer.receive_plainly(room, address.host, port, nice=False)) for _ in range(3)]
    finally:
        here.close()
        child.join(30)
    spent, plain_s = statistics.median(ours), statistics.median(plain)
    ratio = plain_s / spent
    question = "restore from another node's memory"
    rows = [Row(question, total / spent / 1e9, "GB/s", f"at least {BAR}", ratio >= BAR, total / plain_s / 1e9, ratio)]
    return report("peer_restore", rows, args)


if __name__ == "__main__":
    sys.exit(main())

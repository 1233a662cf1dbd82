"""How long does it take from kill -9 of a node to the next training step, and what of that is ours?

    python -m benchmarks.recover [--small] [--mbit N] [--json FILE]

Four nodes, each a network namespace with torchrun, one rank and its agent; the agents have links of their own of
--mbit. One node is killed, everything in it at once; the three that are left go on from their memory. The parts are
those of whoever took longest: until the ranks saw that one is gone (detect), until torchrun had all of them started
again and connected (rendezvous), until it was known what is restored and where it lies (plan), until all had arrived
(fetch) and was copied and hashed (copy). The ceiling: the most bytes that one agent's link carried one way for it, at
the link's speed: who has the lost node's copies gives them to all others. And in the same run, once all else is over,
plain sockets move as many bytes from there to the same namespaces, while a process in each copies as much as its rank
did: what this machine's cores leave of the link's speed.

As root only: it makes network namespaces. The store takes 1 MB/s, so that nothing that is restored can come from there.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Row, parser, report
from tests.nodes.jobs import Elastic, check_memory
from tests.nodes.lan import lan, why_not

NODES = 4
FACTOR, FIXED_S = 1.5, 0.5


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--mbit", type=int, default=1000, help="of the agents' links")
    args = made.parse_args()
    if why := why_not():
        print(f"recover is skipped: {why}")
        return 0
    mib = 16 if args.small else 1024
    with lan() as net, tempfile.TemporaryDirectory() as folder:
        options = ("--every", "40", "--pace", "0.1", "--mib", str(mib), "--bandwidth", "1e6", "--parts")
        job = Elastic(net, Path(folder), 100_000, *options, nodes=(NODES - 1, NODES), apart=True)
        try:
            for _ in range(NODES):
                job.start()
                net.slow(list(net.nodes.values())[-1], args.mbit)
            job.safe_after(0.0, NODES, timeout_s=400)
            safe = job.safe_after(job.lines()[-1]["at"], NODES, timeout_s=400)
            killed = job.kill(job.node_of(1))
            job.wait_for(lambda line: "ready" in line, killed)  # what was under way at the kill is over
            before = _carried(job)
            came = job.restored(NODES - 1, killed)
            after = _carried(job)  # before much of it is copied again
            check_memory(came, at_least=safe)
            since = came[0]["at"]
            steps = job.wait_for_all([_step_of(rank) for rank in range(NODES - 1)], since)
            lines = job.lines()
            carried = {name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in before}
            plain = _plain(job, carried, mib << 20)
        finally:
            net.clear()
    broke = max(line["at"] for line in lines if "broke" in line and line["at"] > killed)
    ready = max(line["at"] for line in lines if "ready" in line and line["at"] > killed)
    parts = [line["parts"] for line in lines if "parts" in line and line["at"] > killed]
    slowest = max(parts, key=lambda each: each["plan"] + each["fetch"] + each["copy"])
    most = max(line["bytes"].get("restored from peer", 0) for line in came)
    busiest = max(max(each) for each in carried.values())
    ours, ceiling = slowest["plan"] + slowest["fetch"] + slowest["copy"], busiest * 8 / (args.mbit * 1e6)
    fetched = slowest["fetch"] + slowest["copy"]
    bar = FACTOR * ceiling + FIXED_S
    rows = [
        Row("from kill -9 to the next step", max(line["at"] for line in steps) - killed, "s", "printed", None),
        Row("... detect", broke - killed, "s", "printed", None),
        Row("... rendezvous, with the start of the ranks", ready - broke, "s", "printed", None),
        Row("... plan", slowest["plan"], "s", "printed", None),
        Row("... ... of that the agents", slowest["asked"], "s", "printed", None),
        Row("... fetch", slowest["fetch"], "s", "printed", None),
        Row("... copy", slowest["copy"], "s", "printed", None),
        Row("... agree on the outcome", slowest["agree"], "s", "printed", None),
        Row("got from other nodes, at most", most / 2**20, "MiB", "printed", None),
        Row("one way over one agent's link, at most", busiest / 2**20, "MiB", "printed", None),
        Row("plain sockets and copies, as many bytes", plain, "s", "printed", None),
        Row("fetch + copy", fetched, "s", "printed", None, plain, fetched / plain),
        Row("plan + fetch + copy", ours, "s", f"{FACTOR} x + {FIXED_S} s", ours <= bar, ceiling, ours / ceiling),
    ]
    return report("recover", rows, args)


def _carried(job: Elastic) -> dict[str, list[int]]:
    """By node: bytes that its agent's link has carried out and in."""
    command = ["cat", *(f"/sys/class/net/own/statistics/{way}_bytes" for way in ("tx", "rx"))]
    return {
        name: [int(word) for word in subprocess.check_output(["ip", "netns", "exec", place.name, *command]).split()]
        for name, place in job.places.items()
    }


def _plain(job: Elastic, carried: dict[str, list[int]], state_bytes: int) -> float:
    """Seconds that the slowest node takes with plain sockets: it gets as much as it got, from who gave most."""
    giver = max(carried, key=lambda name: carried[name][0])
    for place in job.places.values():
        place.kill()
    logs, ends = {}, {}
    for name, place in job.places.items():
        logs[name] = job.folder / f"{name}.plain"
        wants = [] if name == giver else [f"{job.places[giver].at['own']}={carried[name][1]}"]
        command = [sys.executable, "-c", "from benchmarks.plain import main; main()"]
        command += [place.at["own"], str(max(map(max, carried.values())))]
        command += [str(max(1, state_bytes // len(carried) - carried[name][1])), *wants]
        ends[name] = place.start(command, logs[name], stdin=subprocess.PIPE)
    _say(ends, logs, 1)  # all are ready
    _say(ends, logs, 2)  # and have done
    for end in ends.values():
        end.wait(30)
    return max(float(log.read_text().split()[1]) for log in logs.values())


def _say(ends: dict[str, subprocess.Popen[bytes]], logs: dict[str, Path], lines: int) -> None:
    """A line to all, once each has said so many."""
    deadline = time.monotonic() + 120
    while any(len(log.read_text().split()) < lines for log in logs.values()):
        assert time.monotonic() < deadline, [log.read_text() for log in logs.values()]
        time.sleep(0.02)
    for end in ends.values():
        assert end.stdin is not None
        end.stdin.write(b"\n")
        end.stdin.flush()
        if lines == 2:
            end.stdin.close()


def _step_of(rank: int):
    return lambda line: "step" in line and line["rank"] == rank


if __name__ == "__main__":
    sys.exit(main())

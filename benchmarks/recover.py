"""How long does it take from kill -9 of a node to the next training step, and what of that is ours?

    python -m benchmarks.recover [--small] [--mbit N] [--json FILE]

Four nodes, each a network namespace with torchrun, one rank and its agent; the agents have links of their own of
--mbit. One node is killed, everything in it at once; the three that are left go on from their memory. The parts are
those of whoever took longest: until the ranks saw that one is gone (detect), until torchrun had all of them started
again and connected (rendezvous), until it was known what is restored and where it lies (plan), until all had arrived
(fetch) and was copied and hashed (copy). The ceiling: the most bytes that one rank got from other nodes, at the speed
of its agent's link.

As root only: it makes network namespaces. The store takes 1 MB/s, so that nothing that is restored can come from there.
"""

from __future__ import annotations

import sys
import tempfile
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
            came = job.restored(NODES - 1, killed)
            check_memory(came, at_least=safe)
            since = came[0]["at"]
            steps = job.wait_for_all([_step_of(rank) for rank in range(NODES - 1)], since)
            lines = job.lines()
        finally:
            net.clear()
    broke = max(line["at"] for line in lines if "broke" in line and line["at"] > killed)
    ready = max(line["at"] for line in lines if "ready" in line and line["at"] > killed)
    parts = [line["parts"] for line in lines if "parts" in line and line["at"] > killed]
    slowest = max(parts, key=lambda each: each["plan"] + each["fetch"] + each["copy"])
    most = max(line["bytes"].get("restored from peer", 0) for line in came)
    ours, ceiling = slowest["plan"] + slowest["fetch"] + slowest["copy"], most * 8 / (args.mbit * 1e6)
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
        Row("plan + fetch + copy", ours, "s", f"{FACTOR} x + {FIXED_S} s", ours <= bar, ceiling, ours / ceiling),
    ]
    return report("recover", rows, args)


def _step_of(rank: int):
    return lambda line: "step" in line and line["rank"] == rank


if __name__ == "__main__":
    sys.exit(main())

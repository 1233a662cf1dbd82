"""Do nodes that are killed one after the other, at random moments of a torchrun job, cost it nothing but time?

    python -m benchmarks.soak [--kills N] [--nodes N] [--seed S] [--small] [--json FILE]

One job of several nodes, each a network namespace with torchrun, one rank and its agent. Again and again one of them is
killed, everything in it at once, at a random moment of training or saving, and another takes its place, or none does
for a while. Each time: where the job went on from (never older than what was known to be safe), what that was read from
(memory only), and how long it took; in the end every loss against those of an uninterrupted run, bit for bit. The seed
is printed, and gives the same victims and delays. Now and then torch's rendezvous store leaves one torchrun without an
answer for a minute, and that torchrun ends: its node is lost too, another takes its place, and it is counted.

As root only: it makes network namespaces. --kills 100 is the campaign; it takes about an hour.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from benchmarks.report import Row, parser, report
from ckpt.ipc.secret import make_secret
from tests.nodes.jobs import Elastic, Ended, check_losses, check_memory
from tests.nodes.lan import lan, why_not
from tests.nodes.train import losses

T = TypeVar("T")

EVERY = 20


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--kills", type=int)
    made.add_argument("--nodes", type=int, default=3)
    made.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    args = made.parse_args()
    if why := why_not():
        print(f"soak is skipped: {why}")
        return 0
    kills = args.kills or (1 if args.small else 10)
    nodes = 2 if args.small else args.nodes
    dice = random.Random(args.seed)
    print(f"seed {args.seed}: {kills} kills, {nodes} nodes", flush=True)
    back_s, lost, far = [], [], 0
    with lan() as net, tempfile.TemporaryDirectory() as folder:
        end = Path(folder, "end")
        options = ("--every", str(EVERY), "--mib", "2", "--bandwidth", "100e3", "--end", str(end))
        job = Elastic(net, Path(folder), 10_000_000, *options, nodes=(max(1, nodes - 1), nodes))
        secret = Path(folder, "secret")  # so that new nodes, where they start alone, find what is left of the others
        secret.touch(mode=0o600)
        secret.write_text(make_secret().hex())
        job.env["CKPT_SECRET_FILE"] = str(secret)
        patience = Patience(job)
        try:
            job.start(nodes)
            since, world = 0.0, nodes
            print("kill  node rank  of replaced   safe   from  back s  read")
            for number in range(1, kills + 1):
                patience.wait(lambda at, world=world: job.safe_after(at, world), since)
                # where two are left, another has to come: one alone has nobody to keep its state
                rank, replaced = dice.randrange(world), world < nodes or world == 2 or dice.random() < 0.7
                victim = job.node_of(rank)
                time.sleep(dice.uniform(0.0, 3.0))
                safe = job.safe_step()
                killed = job.kill(victim)
                if replaced:
                    job.start(nodes - world + 1)
                came = patience.wait(lambda _, killed=killed: job.restored_by_any(killed), killed)
                check_memory(came, at_least=safe)
                of, world = world, nodes if replaced else world - 1
                since = patience.wait(lambda at, world=world: job.restored(world, at), killed)[0]["at"]
                back_s.append(came[-1]["at"] - killed)
                lost.append(max((line["lost"] or 0) for line in came))
                levels = {level for line in came for level in line["bytes"]}
                read = {level: sum(line["bytes"].get(level, 0) for line in came) for level in levels}
                far += sum(count for level, count in read.items() if level.endswith("store"))
                shown = ", ".join(f"{count / 2**20:.1f} MiB {level}" for level, count in sorted(read.items()))
                print(
                    f"{number:4} {victim:>5} {rank:4} {of:3} {replaced!s:>8} {safe:6} {came[0]['restored']:6} "
                    f"{back_s[-1]:7.1f}  {shown}",
                    flush=True,
                )
            patience.wait(lambda at: job.safe_after(at, world), since)
            end.touch()
            lines = job.end()
            check_losses(lines, losses(job.last_step()))
        except BaseException:
            print(job.tail(), file=sys.stderr)
            raise
        finally:
            net.clear()
    rows = [
        Row("kills", len(back_s), "", "printed", None),
        Row("torchruns that ended without an answer of torch's store", patience.replaced, "", "printed", None),
        Row("read from the store", far / 2**20, "MiB", "nothing", not far),
        Row("back after, the median", sorted(back_s)[len(back_s) // 2], "s", "printed", None),
        Row("steps lost, at most", max(lost), "steps", "printed", None),
    ]
    return report("soak", rows, args)


class Patience:
    """Waits, and where a torchrun has ended meanwhile because torch's store gave it no answer, puts another in its
    place and waits for what comes after that. `replaced`: how many. Where such a one was still able to close the
    rendezvous nobody can come to it any more: that is an error, and to be done once more."""

    def __init__(self, job: Elastic) -> None:
        self.job, self.replaced = job, 0

    def wait(self, what: Callable[[float], T], since: float) -> T:
        while True:
            try:
                return what(since)
            except Ended as exc:
                if self.job.is_closed() or not all(map(self.job.lost_its_store, exc.names)):
                    raise
                for name in exc.names:
                    since = self.job.kill(name)
                self.job.start(len(exc.names))
                self.replaced += len(exc.names)


if __name__ == "__main__":
    sys.exit(main())

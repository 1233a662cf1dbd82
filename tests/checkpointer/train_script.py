"""A training script for tests that kill it: python -m tests.checkpointer.train_script URL STEPS [--every N] [--pace S]
...

Prints one JSON object a line: where it came from, each loss, the receipt.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt
from tests.checkpointer import loops, moving
from tests.checkpointer.scripts import say_line
from tests.uncompiled import leave_compiler_out


def make_job(kind: str | None, seed: int) -> loops.Job | moving.Job:
    if kind is None:
        return loops.make(seed)
    return moving.KINDS[kind]().begin()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("steps", type=int)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--at-risk", type=float, help="seconds: the policy is learnt, within this limit")
    parser.add_argument("--pace", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--job", choices=moving.KINDS, help="what is trained, and its state")
    parser.add_argument("--take-over", action="store_true")
    parser.add_argument("--stuck-at", type=int, default=0, help="after that step, and its last save, nothing happens")
    parser.add_argument("--busy-at", type=int, default=0, help="rank 1 holds the GIL for 6 s in that step")
    parser.add_argument("--die-at", type=int, default=0, help="rank 1 is killed there, in the first attempt")
    parser.add_argument("--raise-at", type=int, default=0, help="rank 1 raises there, in the first attempt")
    parser.add_argument("--fork-at", type=int, default=0, help="it is killed there; a process that it forked lives on")
    parser.add_argument("--bandwidth", type=float, help="to the store, bytes/s")
    parser.add_argument("--handler", action="store_true", help="there is a handler of SIGTERM before the block")
    parser.add_argument("--save-at", type=int, nargs="*", default=(), help="explicit saves, not waited for")
    parser.add_argument("--workers", type=int, default=0, help="batches come from a loader that has so many")
    parser.add_argument("--mib", type=int, default=0, help="so much more state, all of which changes in every step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    distributed = dist.is_torchelastic_launched()
    if distributed:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if distributed else 0
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    job = make_job(args.job, args.seed + attempt)
    noise = torch.Generator().manual_seed(args.seed)
    more = torch.randint(-(1 << 31), 1 << 31, (args.mib << 18,), dtype=torch.int32, generator=noise)
    more[:1] = 0

    def say(**fields: object) -> None:
        say_line({"rank": rank, **fields})

    order = range(1 << 20)
    own = {"generator": torch.Generator(), "num_workers": args.workers, "batch_size": None}
    loader = StatefulDataLoader(order, **own) if args.workers else None
    if args.handler:
        signal.signal(signal.SIGTERM, lambda number, frame: say(handled=number))
    if args.raise_at and rank == 1:
        sys.excepthook = lambda *what: (say(raised=True), sys.__excepthook__(*what))  # the block is left by then
    with ckpt.Checkpointer(
        args.url,
        {**job.state, **({"more": more} if args.mib else {}), **({"loader": loader} if loader else {})},
        policy=ckpt.Adaptive(at_risk_s=args.at_risk) if args.at_risk else ckpt.Every(steps=args.every),
        take_over=args.take_over,
        limits=ckpt.Limits(bandwidth=args.bandwidth),
        sinks=(lambda event: say(event=event.name, message=event.message),),
    ) as ck:
        assert not args.mib or int(more[0]) == ck.restored.step, "it holds another step than it says"
        say(restored=ck.restored.step, level=ck.restored.level, attempt=attempt, pid=os.getpid())
        drawn = iter(loader or order[ck.restored.step :])
        saved: ckpt.Handle | None = None
        for step in ck.steps(args.steps):
            assert next(drawn) == step - 1, "the loader goes on where it was"
            loss = job.train(step, ck.state)
            more.add_(1)
            say(step=step, loss=loss, **({"bits": moving.bits(job, ck.state)} if isinstance(job, moving.Job) else {}))
            if step in args.save_at:
                ck.step()
                saved = ck.save()
            time.sleep(args.pace)
            if saved is not None and step in (args.die_at, args.fork_at, args.raise_at, args.stuck_at) and not attempt:
                saved.wait("local", timeout_s=60)  # however slowly it is copied and hashed
            if step == args.die_at and rank == 1 and not attempt:
                say(dies=step)
                os.kill(os.getpid(), signal.SIGKILL)
            if step == args.fork_at:
                libc = ctypes.PyDLL(None)
                worker = libc.fork()  # what the interpreter does after os.fork(), to let go of it, does not happen
                if worker == 0:
                    libc.sleep(300)
                    libc._exit(0)
                say(worker=worker)
                os.kill(os.getpid(), signal.SIGKILL)
            if step == args.raise_at and rank == 1 and not attempt:
                raise RuntimeError("as told")
            if step == args.busy_at and rank == 1 and not attempt:
                say(busy=step)
                ctypes.PyDLL(None).sleep(6)
            if step == args.stuck_at and not attempt:
                say(stuck=step)
                threading.Event().wait(90)  # an evaluation, a compilation; longer than any test waits
            if distributed:
                dist.barrier()
    say(receipt=ck.receipt)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    leave_compiler_out()
    main()

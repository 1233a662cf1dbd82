"""How much longer does torchrun take to restart a job whose worker failed, with ckpt than without?

Measured from the failure of one worker to the end of the restarted ones' first step, with and without in turns. Twice:
where the other worker's collective ends with an error, as gloo's do, and where it never ends, as NCCL's do until their
watchdog looks: then torchrun's SIGTERM ends it.

torchrun lends its rendezvous store to the workers and keeps it for the next attempt, where gloo may then connect to the
addresses of the former one and fail, with ckpt or without. So each attempt gets a store of its own here.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.report import Row, parser, report

FAIL_AT = 30


def worker(folder: str, use_ckpt: bool, ends: bool) -> None:
    """Rank 1 kills itself once; both say when they did their first step after that. `ends`: the collective without it
    does, with an error."""
    import ckpt

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, again = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"]) > 0
    model = torch.nn.Linear(256, 256)
    optim = torch.optim.Adam(model.parameters())

    def train(step: int) -> None:
        optim.zero_grad()
        loss = model(torch.ones(4, 256)).square().mean()
        loss.backward()
        if not ends and not again and rank == 0 and step > FAIL_AT:
            ctypes.CDLL(None).sleep(600)  # in C, as who waits for a collective is
        dist.all_reduce(loss.detach())
        optim.step()
        if again and rank == 0:
            Path(folder, "again").write_text(repr(time.time()))
            os._exit(0)
        if again:
            os._exit(0)
        time.sleep(0.01)
        if step == FAIL_AT and rank == 1:
            Path(folder, "failed").write_text(repr(time.time()))
            os.kill(os.getpid(), 9)

    if use_ckpt:
        state = {"model": model, "optim": optim}
        with ckpt.Checkpointer(f"{folder}/run", state, policy=ckpt.Every(steps=10)) as ck:
            for step in ck.steps(10_000):
                train(step)
    else:
        for step in range(1, 10_000):
            train(step)


def once(use_ckpt: bool, ends: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "w.py")
        script.write_text(f"from benchmarks.restart import worker\nworker({folder!r}, {use_ckpt}, {ends})\n")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("--max-restarts", "1", str(script)),
        ]
        root = Path(__file__).parents[1]
        env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CKPT_RUNTIME_DIR": f"{folder}/agent"}
        env |= {"CKPT_LINGER_S": "5", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=180)
        if not Path(folder, "again").exists():
            raise RuntimeError(f"the job did not come back:\n{done.stderr[-4000:]}")
        return float(Path(folder, "again").read_text()) - float(Path(folder, "failed").read_text())


def main() -> int:
    args = parser(__doc__).parse_args()
    rounds = 1 if args.small else 5
    rows: list[Row] = []
    for ends, what in ((True, "a collective that fails"), (False, "one that never ends")):
        pairs = [(once(True, ends), once(False, ends)) for _ in range(rounds)]
        with_s, without_s = (statistics.median(times) for times in zip(*pairs, strict=True))
        rows += [
            Row(f"{what}: restart with ckpt", with_s, "s", "printed", None),
            Row(f"{what}: restart without", without_s, "s", "printed", None),
            Row(f"{what}: longer with ckpt", with_s - without_s, "s", "at most 1 s", with_s - without_s <= 1),
        ]
    return report("restart", rows, args)


if __name__ == "__main__":
    sys.exit(main())

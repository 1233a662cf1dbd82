"""How fast does a state come back from a local folder, with no page of it cached, beside torch's DCP and a bare read?

    python -m benchmarks.folder [--small] [--json FILE]

A trainer in a process of its own has its state in memory, enters the block, and gets it back; no agent runs before.
Entering is timed whole: the agent's start, the listing, the claim, the reading. DCP loads the same tensors in place.
The bare read is pread of the same packs into warm memory by two threads, in pieces of a frame. All take turns; medians.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckpt
from benchmarks.report import Row, parser, report
from benchmarks.stall import job

TIMES, ENTERING_S = 1.1, 0.3
PIECE_BYTES = 4 << 20
CODECS = ("raw", "auto")


def state(total: int) -> dict[str, nn.Module | torch.optim.Optimizer]:
    """Whose moments are noise, as those of training are: equal numbers would be coded away."""
    model, optim = job(total)
    for kept in optim.state.values():
        kept["exp_avg"].normal_(std=1e-3)
        kept["exp_avg_sq"].uniform_(to=1e-6)
    return {"model": model, "optim": optim}


def tensors(total: int) -> dict[str, object]:
    return {name: each.state_dict() for name, each in state(total).items()}


def save(folder: str, total: int) -> None:
    """Once with each codec, and once by DCP."""
    for codec in CODECS:
        policy = ckpt.Every(steps=10**8)
        with ckpt.Checkpointer(f"{folder}/{codec}", state(total), policy=policy, codec=codec) as ck:  # type: ignore[arg-type]
            ck.step()
    dcp.save(tensors(total), checkpoint_id=f"{folder}/dcp")


def forget(folder: str) -> None:
    """No page of these files is cached any more."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def load(folder: str, total: int) -> None:
    """Prints the seconds."""
    live = state(total)
    forget(folder)
    began_s = time.perf_counter()
    with ckpt.Checkpointer(folder, live, policy=ckpt.Every(steps=10**8)) as ck:
        print(time.perf_counter() - began_s, flush=True)
        assert ck.restored.level == "store", ck.restored
        os._exit(0)  # nothing more is saved


def load_dcp(folder: str, total: int) -> None:
    """Prints the seconds."""
    live = tensors(total)
    forget(folder)
    began_s = time.perf_counter()
    dcp.load(live, checkpoint_id=folder)
    print(time.perf_counter() - began_s, flush=True)
    os._exit(0)


def bare_s(folder: str) -> float:
    packs = [(path, path.stat().st_size) for path in sorted(Path(folder).rglob("*.pack"))]
    target = memoryview(torch.ones(sum(size for _, size in packs), dtype=torch.uint8).numpy())
    forget(folder)
    began_s = time.perf_counter()
    pieces: list[tuple[int, int, memoryview]] = []
    fds, done = [], 0
    for path, size in packs:
        fds.append(os.open(path, os.O_RDONLY))
        for at in range(0, size, PIECE_BYTES):
            length = min(PIECE_BYTES, size - at)
            pieces.append((fds[-1], at, target[done : done + length]))
            done += length
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_read, pieces))
    spent_s = time.perf_counter() - began_s
    for fd in fds:
        os.close(fd)
    return spent_s


def _read(piece: tuple[int, int, memoryview]) -> None:
    fd, at, target = piece
    done = 0
    while done < len(target):
        done += os.preadv(fd, [target[done:]], at + done)


def run(call: str, runtime: str) -> float:
    """The seconds that a process of its own prints; its agent ends after it, and is waited for."""
    env = {**os.environ, "CKPT_RUNTIME_DIR": runtime, "CKPT_LINGER_S": "0"}
    code = f"from benchmarks.folder import load, load_dcp, save; {call}"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, check=True, cwd=Path(__file__).parents[1], env=env, stdout=subprocess.PIPE)
    while any(Path(runtime).glob("*.sock")):
        time.sleep(0.05)
    return float(done.stdout or 0)


def main() -> int:
    args = parser(__doc__).parse_args()
    total, rounds = (32 << 20, 1) if args.small else (1 << 30, 5)
    warnings.simplefilter("ignore")  # DCP: one process is none of a group
    with tempfile.TemporaryDirectory() as folder:
        run(f"save({folder!r}, {total})", f"{folder}/agent")
        found: dict[str, list[float]] = {name: [] for name in ("bare", "dcp", *CODECS)}
        for number in range(rounds):
            found["bare"].append(bare_s(f"{folder}/raw"))
            found["dcp"].append(run(f"load_dcp({folder + '/dcp'!r}, {total})", f"{folder}/agent"))
            for codec in CODECS:
                call = f"load({folder + '/' + codec!r}, {total})"
                found[codec].append(run(call, f"{folder}/agent{number}{codec}"))
    spent = {name: statistics.median(times) for name, times in found.items()}
    limit_s = TIMES * spent["bare"] + ENTERING_S
    rows = [
        Row(
            f"{total >> 20} MiB, codec {codec}: entering, cold",
            *(spent[codec], "s", f"at most {TIMES:g} x bare + {ENTERING_S:g} s"),
            *(spent[codec] <= limit_s if codec == "raw" else None, spent["bare"], spent[codec] / spent["bare"]),
        )
        for codec in CODECS
    ]
    rows.append(Row("... by DCP", spent["dcp"], "s", "shown", None, spent["bare"], spent["dcp"] / spent["bare"]))
    return report("folder", rows, args)


if __name__ == "__main__":
    sys.exit(main())

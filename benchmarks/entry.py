"""How long does a start take to get its state back: from a local folder, from S3, and from this host's memory?

    python -m benchmarks.entry [--small] [--server rclone|ceph] [--only s3 --mbit M] [--json FILE]

A trainer in a process of its own has its state in memory, enters the block, and gets it back. Entering is timed whole:
the agent's start (not for memory, where it lives), the listing, the claim, the reading. Beside each in the same run is
what the bytes alone cost: pread of the same packs with no page cached, obstore's gets of the same packs in ranges, and
copying and hashing each frame from shared memory; and torch's DCP, which loads the same tensors from a folder in place.
All take turns; medians. With --mbit the link to S3 carries so many Mbit/s, in a network namespace (as root).
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

import obstore
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckpt
from benchmarks.memcpy import memfd
from benchmarks.report import Row, parser, report
from benchmarks.stall import job
from benchmarks.store import SERVERS, direct_store
from ckpt.format.frames import frame_hash
from tests import ceph
from tests.servers import Server

ENTERING_S = 0.3
LIMITED = "BENCHMARK_LINK_IS_LIMITED"
TIMES = {"folder": 1.1, "s3": 1.2, "memory": 1.3}  # of what the bytes alone cost
PIECE_BYTES = 4 << 20  # a frame
GET_BYTES = 16 << 20
CODECS = ("raw", "auto")
THREADS = 2


def state(total: int) -> dict[str, nn.Module | torch.optim.Optimizer]:
    """Whose moments are noise, as those of training are: equal numbers would be coded away."""
    model, optim = job(total)
    for kept in optim.state.values():
        kept["exp_avg"].normal_(std=1e-3)
        kept["exp_avg_sq"].uniform_(to=1e-6)
    return {"model": model, "optim": optim}


def tensors(total: int) -> dict[str, object]:
    return {name: each.state_dict() for name, each in state(total).items()}


def save(url: str, total: int, codec: str) -> None:
    """Ends without leaving the block: the agent keeps the checkpoint in memory for as long as it lingers."""
    ck = ckpt.Checkpointer(url, state(total), policy=ckpt.Every(steps=10**8), codec=codec)  # type: ignore[arg-type]
    ck.__enter__()
    ck.step()
    ck.save().wait("store")
    os._exit(0)


def save_dcp(folder: str, total: int) -> None:
    dcp.save(tensors(total), checkpoint_id=folder)


def forget(folder: str) -> None:
    """No page of these files is cached any more."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def load(url: str, total: int, level: str) -> None:
    """Prints the seconds."""
    live = state(total)
    if "://" not in url:
        forget(url)
    began_s = time.perf_counter()
    with ckpt.Checkpointer(url, live, policy=ckpt.Every(steps=10**8)) as ck:
        print(time.perf_counter() - began_s, flush=True)
        assert ck.restored.level == level, ck.restored
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
    with ThreadPoolExecutor(THREADS) as pool:
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


def gets_s(server: Server, prefix: str) -> float:
    """obstore's own gets of the packs below `prefix`: in ranges, or whole where the server knows none."""
    store = direct_store(server, prefix)
    packs = [(each["path"], each["size"]) for part in obstore.list(store) for each in part]
    packs = [(path, size) for path, size in packs if path.endswith(".pack")]
    step = max(size for _, size in packs) if server.name == "rclone" else GET_BYTES
    parts = [(path, at, min(step, size - at)) for path, size in packs for at in range(0, size, step)]

    def get(part: tuple[str, int, int]) -> int:
        path, at, length = part
        if server.name == "rclone":
            return len(obstore.get(store, path).bytes())
        return len(obstore.get_range(store, path, start=at, length=length))

    began_s = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(get, parts)) == sum(size for _, size in packs)
    return time.perf_counter() - began_s


class HashAndCopy:
    """Frames in warm shared memory, each copied into warm memory and hashed there, by two threads."""

    def __init__(self, total: int) -> None:
        self._source, self._target = memfd(total), memoryview(torch.ones(total, dtype=torch.uint8).numpy())

    def seconds(self) -> float:
        began_s = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(self._piece, range(0, len(self._source), PIECE_BYTES)))
        return time.perf_counter() - began_s

    def _piece(self, at: int) -> None:
        target = self._target[at : at + PIECE_BYTES]
        target[:] = self._source[at : at + PIECE_BYTES]
        frame_hash(target)


def run(call: str, runtime: str, linger_s: int = 0) -> float:
    """The seconds that a process of its own prints. Its agent ends after it, unless it lingers, and is waited for."""
    env = {**os.environ, "CKPT_RUNTIME_DIR": runtime, "CKPT_LINGER_S": str(linger_s)}
    code = f"from benchmarks.entry import load, load_dcp, save, save_dcp; {call}"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, check=True, cwd=Path(__file__).parents[1], env=env, stdout=subprocess.PIPE)
    while not linger_s and any(Path(runtime).glob("*.sock")):
        time.sleep(0.05)
    return float(done.stdout or 0)


def of_folder(folder: str, total: int, rounds: int) -> list[Row]:
    found: dict[str, list[float]] = {name: [] for name in ("bare", "dcp", *CODECS)}
    for codec in CODECS:
        run(f"save({folder + '/' + codec!r}, {total}, {codec!r})", f"{folder}/agent")
    run(f"save_dcp({folder + '/dcp'!r}, {total})", f"{folder}/agent")
    for _ in range(rounds):
        found["bare"].append(bare_s(f"{folder}/raw"))
        found["dcp"].append(run(f"load_dcp({folder + '/dcp'!r}, {total})", f"{folder}/agent"))
        for codec in CODECS:
            found[codec].append(run(f"load({folder + '/' + codec!r}, {total}, 'store')", f"{folder}/agent"))
    spent = {name: statistics.median(times) for name, times in found.items()}
    return [
        *(_row("folder", f"folder, cold, codec {codec}", spent[codec], spent["bare"]) for codec in CODECS),
        Row("... by DCP", spent["dcp"], "s", "shown", None, spent["bare"], spent["dcp"] / spent["bare"]),
    ]


def of_s3(name: str, folder: str, total: int, rounds: int) -> list[Row]:
    rows = []
    with SERVERS[name]() as server:
        os.environ.update(server.environment())
        for codec in CODECS:
            url = f"s3://{server.bucket}/{codec}"
            run(f"save({url!r}, {total}, {codec!r})", f"{folder}/agent")
            bare, spent = [], []
            for _ in range(rounds):
                bare.append(gets_s(server, codec))
                spent.append(run(f"load({url!r}, {total}, 'store')", f"{folder}/agent"))
            rows.append(_row("s3", f"S3 ({name}), codec {codec}", *map(statistics.median, (spent, bare))))
    return rows


def of_memory(folder: str, total: int, rounds: int) -> list[Row]:
    bare, spent, work = [], [], HashAndCopy(total)
    for number in range(rounds):
        url, runtime = f"{folder}/memory{number}", f"{folder}/agent{number}"
        run(f"save({url!r}, {total}, 'auto')", runtime, linger_s=15)
        spent.append(run(f"load({url!r}, {total}, 'local')", runtime))
        bare.append(work.seconds())
    return [_row("memory", "this host's memory", *map(statistics.median, (spent, bare)))]


def _row(kind: str, question: str, spent_s: float, bare_s: float) -> Row:
    bar = f"at most {TIMES[kind]:g} x + {ENTERING_S:g} s"
    return Row(question, spent_s, "s", bar, spent_s <= TIMES[kind] * bare_s + ENTERING_S, bare_s, spent_s / bare_s)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--server", choices=("rclone", "ceph"), help="by default Ceph, where it can be started")
    made.add_argument("--only", choices=TIMES, help="one of the places")
    made.add_argument("--mbit", type=int, help="of the link to S3; by default this machine's loopback")
    args = made.parse_args()
    if args.mbit and LIMITED not in os.environ:
        limit = f"ip link set lo up && tc qdisc add dev lo root tbf rate {args.mbit}mbit burst 2mb latency 100ms"
        again = ["sh", "-c", f'{limit} && exec "$@"', "sh", sys.executable, "-m", "benchmarks.entry", *sys.argv[1:]]
        return subprocess.run(["unshare", "--net", *again], env={**os.environ, LIMITED: "1"}).returncode
    total, rounds = (32 << 20, 1) if args.small else (1 << 30, 3)
    warnings.simplefilter("ignore")  # DCP: one process is none of a group
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        if args.only in (None, "folder"):
            rows += of_folder(folder, total, rounds)
        if args.only in (None, "memory"):
            rows += of_memory(folder, total, rounds)
        if args.only in (None, "s3"):
            server = args.server or ("rclone" if args.small or ceph.why_not() else "ceph")
            rows += of_s3(server, folder, total, rounds)
    print(f"{total >> 20} MiB, medians of {rounds}")
    return report("entry", rows, args)


if __name__ == "__main__":
    sys.exit(main())

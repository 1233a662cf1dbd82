"""How long does an agent take to serve, how much memory has it, and how much of a core does it use when idle?"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time

import psutil

from benchmarks.report import Row, parser, report
from ckpt.ipc import client
from ckpt.settings import read_settings
from ckpt.threads import Tasks


def main() -> int:
    args = parser(__doc__).parse_args()
    attempts, idle_s = (2, 1.0) if args.small else (7, 10.0)
    starts, resident, idle = [], [], []
    for _ in range(attempts):
        with tempfile.TemporaryDirectory() as folder, Tasks("bench") as tasks:
            os.environ["CKPT_RUNTIME_DIR"] = f"{folder}/run"
            started = time.perf_counter()
            sock = client.connect(f"{folder}/store", read_settings())
            connection = client.Connection(sock, tasks, lambda m: m.close(), lambda why: None, role="tool")
            starts.append(time.perf_counter() - started)
            process = psutil.Process(connection.agent_pid)
            memory = process.memory_info()
            resident.append((memory.rss - memory.shared) / 2**20)
            before = sum(process.cpu_times()[:2])
            time.sleep(idle_s)
            idle.append(100 * (sum(process.cpu_times()[:2]) - before) / idle_s)
            connection.close()
            process.terminate()
            psutil.wait_procs([process], timeout=10)
    start, mib, share = statistics.median(starts), statistics.median(resident), statistics.median(idle)
    rows = [
        Row("spawn to first answer", start, "s", "at most 0.5 s", start <= 0.5),
        Row("resident, without shared pages", mib, "MiB", "at most 80 MiB", mib <= 80),
        Row("CPU when idle", share, "%", "0 %", share < 0.1),
    ]
    return report("agent", rows, args)


if __name__ == "__main__":
    sys.exit(main())

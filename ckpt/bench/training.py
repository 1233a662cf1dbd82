"""A small training job against the store: stall, time lost, commit, requests, and restores. See job.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ckpt.bench.bare import Bare
from ckpt.bench.figures import Figure, in_turns, run_all
from ckpt.errors import CkptError
from ckpt.simulate.scenario import StorePrices
from ckpt.storage import Backend
from ckpt.threads import Tasks

SECTION_SAVE, SECTION_RESTORE = "save", "restore"
CODECS = ("auto", "raw")
SAVES = 3
RESTORES = 3
PACK_BYTES = 64 << 20
THREADS = 8
JOB_LIMIT_S = 1800.0
LINGER_S = 60  # how long an agent waits for the start that finds the state in memory
AGENT_END_S = 60.0
CEILING_ROUNDS, CEILING_LIMIT_S = 3, 60.0


class JobFailed(CkptError):
    """The job of the suite ended with an error."""

    kind = "bench"


def measure_saves(url: str, store: Backend, bare: Bare | None, nbytes: int, prices: StorePrices) -> Iterator[Figure]:
    """Figures of saves with each codec. Errors: JobFailed; those of the backend."""
    for codec in CODECS:
        with _runtime(linger_s=0) as env:
            found = _run_job(
                env, {"work": "save", "url": f"{url}/{codec}", "nbytes": nbytes, "codec": codec, "rounds": SAVES}
            )
        yield from _save_figures(codec, found, bare, prices)


def measure_restores(url: str, store: Backend, bare: Bare | None, nbytes: int) -> Iterator[Figure]:
    """Figures of restores of what `measure_saves` saved. Errors: JobFailed; those of the backend."""
    for codec in CODECS:
        stored = [info.size for info in store.list(f"{codec}/data/")]
        yield from _restore_figures(f"{url}/{codec}", codec, sum(stored), bare, nbytes)


def _save_figures(codec: str, found: dict[str, Any], bare: Bare | None, prices: StorePrices) -> Iterator[Figure]:
    def figure(name: str, value: float, unit: str, better: Any = "lower", ceiling: float | None = None) -> Figure:
        return Figure(SECTION_SAVE, f"{name}, codec {codec}", value, unit, better, ceiling)

    copy_ms = 1e3 * found["copy_s"]
    stored, requests = found["stored_bytes"], found["requests"]
    yield figure("training paused by a checkpoint", found["stall_ms"], "ms", "lower", copy_ms)
    yield figure("training paused by the first checkpoint", found["first_stall_ms"], "ms", "lower", copy_ms)
    yield figure("training time lost to a checkpoint, all in all", 1e3 * found["lost_s"], "ms", "", copy_ms)
    yield figure("from the save until it is committed", found["commit_s"], "s", "lower", _put_s(bare, int(stored)))
    yield figure("state / stored bytes", found["state_bytes"] / max(stored, 1), "x", "higher")
    yield figure("bytes sent for a checkpoint", found["sent_bytes"] / 1e6, "MB")
    yield figure("puts for a checkpoint", requests.get("put", 0), "requests")
    others = sum(count for name, count in requests.items() if name != "put")
    yield figure("other requests for a checkpoint", others, "requests")
    yield figure("CPU seconds of the agent for a checkpoint", found["agent_cpu_s"], "s")
    yield figure("private memory of the agent", found["agent_private_bytes"] / 2**20, "MiB")
    yield figure("arenas", found["arena_bytes"] / 2**20, "MiB")
    puts = requests.get("put", 0) + requests.get("list", 0)
    gets = requests.get("get", 0) + requests.get("head", 0)
    yield figure("requests of 10,000 checkpoints", 1e4 * prices.requests_usd(puts, gets), "USD")
    yield figure("ten checkpoints kept for a month", 10 * stored / 1e9 * prices.gb_month, "USD")


def _put_s(bare: Bare | None, nbytes: int) -> float | None:
    """The seconds that putting as many bytes takes, in packs, several at once."""
    if bare is None:
        return None
    content = memoryview(os.urandom(min(PACK_BYTES, nbytes)))
    sizes = _pack_sizes(nbytes)

    # See store_speed: the first put makes the folder.
    bare.put("pack-0", content[:1])

    def put(pack: tuple[int, int]) -> None:
        bare.put(f"pack-{pack[0]}", content[: pack[1]])

    return _ceiling_s(put, sizes)


def _get_s(bare: Bare, nbytes: int) -> float:
    """The seconds that getting as many bytes takes."""
    # The packs that are got.
    _put_s(bare, nbytes)
    return _ceiling_s(lambda pack: bare.get(f"pack-{pack[0]}", pack[1]), _pack_sizes(nbytes))


def _ceiling_s(work: Callable[[tuple[int, int]], object], sizes: list[int]) -> float:
    """The seconds for all packs, each a number and a size, THREADS at once."""
    with Tasks("bench", THREADS) as pool:
        works = {"bare": lambda: run_all(pool, work, enumerate(sizes))}
        return in_turns(works, CEILING_ROUNDS, CEILING_LIMIT_S)["bare"]


def _pack_sizes(nbytes: int) -> list[int]:
    return [min(PACK_BYTES, nbytes - at) for at in range(0, nbytes, PACK_BYTES)]


def _restore_figures(url: str, codec: str, stored: int, bare: Bare | None, nbytes: int) -> Iterator[Figure]:
    entered: list[float] = []
    for _ in range(RESTORES):
        with _runtime(linger_s=0) as env:
            entered.append(_restore(env, url, nbytes, "store")["entered_s"])
    ceiling = None if bare is None else _get_s(bare, stored)
    name = f"a start from the store, codec {codec}"
    yield Figure(SECTION_RESTORE, name, sorted(entered)[len(entered) // 2], "s", "lower", ceiling)
    with _runtime(linger_s=LINGER_S) as env:
        # A start that saves, and one that finds what that left in memory.
        order = {"work": "save", "url": url, "nbytes": nbytes, "codec": codec, "rounds": 1}
        copy_s = _run_job(env, order)["copy_s"]
        found = _restore(env, url, nbytes, "local")
        # It would wait for another start.
        os.kill(found["agent_pid"], signal.SIGTERM)
    yield Figure(SECTION_RESTORE, f"a start from memory, codec {codec}", found["entered_s"], "s", "lower", copy_s)


def _restore(env: dict[str, str], url: str, nbytes: int, level: str) -> dict[str, Any]:
    found = _run_job(env, {"work": "restore", "url": url, "nbytes": nbytes})
    if found["level"] != level:
        raise JobFailed(f"the start was to restore from {level}, and restored from {found['level']}")
    return found


@contextmanager
def _runtime(linger_s: int) -> Iterator[dict[str, str]]:
    """The environment of jobs that share an agent, and nothing with any other. The agent has ended after the block,
    however that ends: it would go on writing to a store that is being cleaned."""
    with TemporaryDirectory(prefix="ckpt-bench-") as folder:
        try:
            yield {
                **os.environ,
                "CKPT_RUNTIME_DIR": folder,
                "CKPT_LINGER_S": str(linger_s),
                "CKPT_NOTICES": "off",
                "CKPT_SIGNALS": "off",
            }
        except BaseException:
            _kill_agents(folder)
            raise
        deadline_s = time.monotonic() + AGENT_END_S
        while any(Path(folder).glob("*.sock")) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        _kill_agents(folder)


def _kill_agents(folder: str) -> None:
    """Kills the agents whose sockets are in that folder."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "ckpt.agent.node.main" in words and any(word.startswith(f"{folder}/") for word in words):
            with suppress(psutil.Error):
                process.kill()
                process.wait(10)


def _run_job(env: dict[str, str], order: dict[str, Any]) -> dict[str, Any]:
    """Errors: JobFailed with the end of what the job printed."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "ckpt.bench.job"],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            env=env,
            timeout=JOB_LIMIT_S,
        )
    except subprocess.TimeoutExpired as exc:
        raise JobFailed(f"the job did not end within {JOB_LIMIT_S:.0f} s") from exc
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise JobFailed(f"the job failed: {last[0]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found

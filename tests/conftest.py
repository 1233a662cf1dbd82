"""What every test gets: a runtime folder of its own, a seed that is printed, and a check that nothing is left behind.

Leaked threads, descriptors and processes fail the test that leaked them. In CI (CI=true) a skip whose reason is not
in SKIPS_ALLOWED fails as well: a silent skip means that nothing was tested.
"""

from __future__ import annotations

import gc
import os
import random
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from ckpt.agent.runtime import workers

# Parts of skip reasons that CI accepts. Everything else must run there.
SKIPS_ALLOWED = (
    "needs a CUDA device",
    "needs network namespaces",  # a container without CAP_NET_ADMIN
    "needs a control group for memory",  # making one needs root, and a file system of them that may be written
    "needs a file system that can fill up",  # mounting one needs CAP_SYS_ADMIN
    "needs an NFS server in the kernel",
    "needs FUSE",  # and root
    "needs Slurm",  # and root
    "needs Ray",  # 433 MB of packages that nothing else needs
    "needs a pid namespace",  # making one needs CAP_SYS_ADMIN
    "not as root",  # root passes every permission check
    "only as root",  # another user has to be at hand
    "needs the public traces",  # CKPT_TRACES names their folder; ckpt ships none
    "so much else to do",  # a load that is far above the number of cores
)

# What `make test` leaves to `make test-all`, by how a test's id begins: real nodes, real torchrun jobs, long
# simulations, benchmarks run small. MATTERS_MOST are the exceptions: kills, one save of all ranks, one preemption.
SLOW = (
    "tests/agent/adaptive/test_alarms.py",
    "tests/agent/scheduler/test_scheduler_sim.py",
    "tests/agent/net/",
    "tests/agent/node/test_hostile.py",
    "tests/agent/node/test_many_nodes.py",
    "tests/agent/node/test_orphans.py",
    "tests/agent/node/test_paced.py",
    "tests/agent/node/test_signalled_agent.py",
    "tests/agent/node/test_two_starts.py",
    "tests/agent/nodes/",
    "tests/agent/preemption/test_deadlines.py",
    "tests/agent/preemption/test_preemption_exhaustive.py",
    "tests/agent/preemption/test_preemption_sim.py",
    "tests/agent/state/test_cost_model.py",
    "tests/agent/state/test_replica_state_sim.py",
    "tests/checkpointer/test_adaptive.py",
    "tests/checkpointer/test_benchmarks.py",
    "tests/checkpointer/test_deadlines.py",
    "tests/checkpointer/test_endings.py",
    "tests/checkpointer/test_falling_back.py",
    "tests/checkpointer/test_faults.py",
    "tests/checkpointer/test_folder_faults.py",
    "tests/checkpointer/test_given_up.py",
    "tests/checkpointer/test_gradients.py::test_a_request_to_leave_in_an_evaluation",
    "tests/checkpointer/test_half_steps.py",
    "tests/checkpointer/test_hosts.py",
    "tests/checkpointer/test_initial.py",
    "tests/checkpointer/test_late_layouts.py",
    "tests/checkpointer/test_late_mounts.py",
    "tests/checkpointer/test_launchers.py",
    "tests/checkpointer/test_layouts.py",
    "tests/checkpointer/test_limits.py",
    "tests/checkpointer/test_moving.py",
    "tests/checkpointer/test_notices.py",
    "tests/checkpointer/test_other_clouds.py",
    "tests/checkpointer/test_ranks_",
    "tests/checkpointer/test_retention.py",
    "tests/checkpointer/test_state_kinds.py",
    "tests/checkpointer/test_store_",
    "tests/checkpointer/test_structure.py",
    "tests/checkpointer/test_superseded.py",
    "tests/cli/test_agent.py",
    "tests/cli/test_doctor.py",
    "tests/cli/test_rehearse_real.py",
    "tests/cli/test_restore_memory.py",
    "tests/cli/test_servers.py",
    "tests/data/test_restarts.py",
    "tests/examples/",
    "tests/integrations/",
    "tests/ipc/test_agent_process.py",
    "tests/nodes/",
    "tests/policy/test_adaptive.py",
    "tests/policy/test_benchmark.py",
    "tests/preemption/test_each_path.py",
    "tests/predict/test_training.py",
    "tests/sim/",
    "tests/storage/test_contract.py::test_the_folders_of_one_level",
    "tests/storage/test_nfs.py",
    "tests/trainer/loop/test_calling_framework.py",
    "tests/trainer/loop/test_worker_signals.py",
    "tests/trainer/restore/test_hostile_values.py",
    "tests/trainer/snapshot/test_snapshot_benchmark.py",
    "tests/trainer/state/test_state_walk_dist.py",
)
MATTERS_MOST = (
    "tests/checkpointer/test_crash.py",
    "tests/agent/nodes/test_kills.py",
    "tests/checkpointer/test_ranks_together.py::test_ranks_that_save_together_are_those_of_their_process_group",
    "tests/checkpointer/test_launchers.py::test_a_torchrun_that_is_signalled_ends_though_it_has_restarts_left",
    "tests/sim/test_losses_sim.py::test_lives[0]",
    "tests/sim/test_losses_sim.py::test_lives[1]",
)

# Threads that libraries start once and keep for the life of the process, by the beginning of their name.
LIBRARY_THREADS = (
    "fsspecIO",  # fsspec: one event loop for all its file systems
    "asyncio_",  # the executor of that loop
    "pin_memory",  # torch
    "pydevd",  # a debugger
    "tqdm",
    "execnet",  # pytest-xdist
    "Thread-auto-grad",  # torch
)

# Descriptors that a test must not leave: the others (epoll, eventfd, socket pairs, TCP pools) belong to the event
# loops of obstore and fsspec, which live as long as the process.
OURS: tuple[str, ...] = ("/", "anon_inode:[pidfd]", "pipe:")  # files and memfds; pidfds; pipes
if Path("/dev/nvidiactl").exists():  # CUDA opens pipes, whenever a test first asks for it, and keeps them
    OURS = OURS[:-1]
NOT_OURS = ("/dev/", "/proc/", "/sys/", "/usr/", "/opt/", "/lib")
FONTS = "/matplotlib/mpl-data/fonts/"  # matplotlib opens each font once, and keeps it open

SETTLE_S = 60.0  # how long what was closed may take to be gone; only a failing test waits for it
SETTLE_FAILED_S = 1.0  # the same of a test that has failed: nobody has told that to end, and it starves other tests

FAILED = pytest.StashKey[bool]()

# Continuous integration says CKPT_TEST_SEED: what passed there passes there again. Elsewhere each run explores anew.
REPEATS = bool(os.environ.get("CKPT_TEST_SEED"))
hypothesis.settings.register_profile("ckpt", deadline=None, print_blob=True, max_examples=100, derandomize=REPEATS)
hypothesis.settings.load_profile("ckpt")

# A shell that starts us in the background has us ignore Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

SEED = int(os.environ.get("CKPT_TEST_SEED") or random.SystemRandom().getrandbits(31))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SLOW) and not item.nodeid.startswith(MATTERS_MOST):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Thousands of tests are objects, too: a collection of garbage does not look through them again and again."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    return f"seed: {SEED} (CKPT_TEST_SEED={SEED} replays it)"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        _refuse_skip(report)
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    # A test of strings that are not UTF-8 may log them; between the processes of pytest-xdist only UTF-8 travels.
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    if report.skipped:
        _refuse_skip(report)
    return report


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    if os.environ.get("CI") == "true" and not any(allowed in reason for allowed in SKIPS_ALLOWED):
        report.outcome = "failed"
        report.longrepr = f"{reason}\nA skip fails in CI unless tests/conftest.py allows its reason."


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", disk], capture_output=True).returncode:
        pytest.skip("needs a file system that can fill up")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed for this test: the same for one CKPT_TEST_SEED, and printed when the test fails."""
    value = random.Random(f"{SEED} {request.node.nodeid}").getrandbits(31)
    print(f"seed of this test: {value} (CKPT_TEST_SEED={SEED})")
    return value


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    """The secret of a run, for CKPT_SECRET_FILE."""
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    return file


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for sockets and locks that no other test shares; agents do not linger. Short: it holds a socket."""
    folder = Path(tempfile.mkdtemp(prefix="ckpt-t", dir="/tmp"))
    monkeypatch.setenv("CKPT_RUNTIME_DIR", os.fspath(folder))
    monkeypatch.setenv("CKPT_LINGER_S", "0")
    monkeypatch.setenv("CKPT_NOTICES", "off")  # the firmware may name a real cloud: its service is never asked here
    monkeypatch.setenv("CKPT_SIGNALS", "off")
    named = (
        "CKPT_SIGNALS_LOG",
        "CKPT_PREDICTOR",
        "CKPT_LAUNCH",
        "CKPT_NOTICE_FILE",
        "CKPT_OUTCOME_FILE",
        "CKPT_ACKNOWLEDGE",
        "CKPT_EVENTS",
        "CKPT_METRICS",
    )
    for name in (*named, "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def own_niceness(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of agents in the test's own process are as nice as the test: nicer ones would hardly run beside other
    tests."""
    monkeypatch.setattr(workers, "NICE", os.getpriority(os.PRIO_PROCESS, 0))


@pytest.fixture(autouse=True)
def nothing_left_behind(runtime_dir: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads, descriptors, child processes and agents that the test began are gone after it. Of a test that has failed
    anyway nothing is said: processes are killed."""
    threads = set(threading.enumerate())
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    descriptors = _descriptors()
    yield
    failed = request.node.stash.get(FAILED, False)
    deadline = time.monotonic() + (SETTLE_FAILED_S if failed else SETTLE_S)
    left = [
        *_threads_left(threads, deadline),
        *_processes_left(children, runtime_dir, deadline),
        *_descriptors_left(descriptors, deadline),
    ]
    assert failed or not left, "the test left behind: " + "; ".join(left)


def _threads_left(before: set[threading.Thread], deadline: float) -> list[str]:
    left = []
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith(LIBRARY_THREADS) or thread.ident is None:  # Ctrl-C came before it was started
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            left.append(f"thread {thread.name}")
    return left


def _processes_left(before: set[int], runtime_dir: Path, deadline: float) -> list[str]:
    """Children of this process, and everything that was started with this test's runtime folder (an agent lives in a
    session of its own). What is left at the deadline is killed, so that it does not disturb the next test."""
    found = {child.pid: child for child in psutil.Process().children(recursive=True) if child.pid not in before}
    found |= {process.pid: process for process in _with_environment(f"CKPT_RUNTIME_DIR={runtime_dir}")}
    _, alive = psutil.wait_procs(list(found.values()), timeout=max(0.0, deadline - time.monotonic()))
    left = []
    for process in alive:
        try:
            left.append(f"process {process.pid} ({' '.join(process.cmdline())[:200]})")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=30)
    return left


def _with_environment(entry: str) -> Iterator[psutil.Process]:
    needle = entry.encode() + b"\0"
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if needle in (folder / "environ").read_bytes():
                yield psutil.Process(int(folder.name))
        except (OSError, psutil.NoSuchProcess):
            continue


def _descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return found


def _descriptors_left(before: dict[str, str], deadline: float) -> list[str]:
    def leaked() -> list[str]:
        return [
            f"descriptor {number} -> {target}"
            for number, target in _descriptors().items()
            if before.get(number) != target and target.startswith(OURS) and not target.startswith(NOT_OURS)
            if FONTS not in target
        ]

    left = leaked()
    while left:
        gc.collect()  # only then: it takes long
        left = leaked()
        if time.monotonic() >= deadline:
            break
    return left

"""The command `ckpt rehearse`: runs the user's script once undisturbed, once killed and restarted, and compares both.

Both runs save to scratch URLs beside the given one, so the real run is never touched. The scratch URL replaces the
given one in the command. CKPT_REDIRECT carries the replacement to a script that has the URL in its own text.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt import reader
from ckpt.cli import live, out
from ckpt.cli.exits import Exit
from ckpt.cli.run_diff import Compared, compare
from ckpt.errors import AgentError, CkptError, UsageError
from ckpt.types import format_count

if TYPE_CHECKING:
    import psutil

    from ckpt.types import Epoch, Identity

STDERR = 2  # the file descriptor
MORE_TIME = "let it run more steps, or give a smaller --at"
STORE_POLL_S = 0.1  # between two queries of the store


def rehearse(
    url: out.UrlArgument,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What starts the script.")],
    at: Annotated[
        int | None, typer.Option("--at", metavar="STEP", help="Kill after it; default: half way.", min=1)
    ] = None,
    lose_memory: Annotated[bool, typer.Option("--lose-memory", help="Kill the agent too: a lost host.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep what both runs saved.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", help="How long each run may take.", min=0.0, callback=out.check_seconds)
    ] = 3600.0,
    json: out.JsonOption = False,
) -> None:
    """Prove that your own script restarts exactly.

    It is run undisturbed, and again with a kill in mid-run and another start; then both are compared bit for bit.
    Neither touches what is at URL: they save beside it."""
    from ckpt import storage

    scratch = scratch_for(storage.canonical(url))
    straight, killed = (Rehearsal(url, f"{scratch}/{name}", command) for name in ("undisturbed", "killed"))
    with tempfile.TemporaryDirectory(prefix="ckpt-r-", dir="/tmp") as runtime:
        try:
            print_progress(f"undisturbed: {shlex.join(straight.command)}")
            wait_script(straight.start(runtime), timeout_s)
            last = straight.last_saved_step()
            at = max(1, last // 2) if at is None else at
            print_progress(f"to be killed: {shlex.join(killed.command)}")
            killed_at = kill_after(killed, runtime, at, lose_memory, timeout_s)
            print_progress(f"killed when step {killed_at} was saved; starting it again")
            before, in_memory = killed.epochs(), snapshots_in_memory(killed.url, runtime)
            wait_script(killed.start(runtime), timeout_s)
            back = find_restart_point(killed, before, in_memory)
            compared = compare(straight.url, killed.url, back.step)
            if back.step >= compared.step:
                raise CkptError(
                    f"nothing is proven: the restart came back at step {back.step}, its last, so that it ran no step; "
                    + MORE_TIME
                )
        finally:
            for process in _processes_with(runtime):
                process.kill()
            if not keep:
                delete_scratch(scratch)
    if json:
        restart = {"came_back_at": back.step, "came_back_from": back.source, "steps_run": compared.step - back.step}
        facts = {"killed_after": killed_at, "memory_lost": lose_memory, **restart, **asdict(compared)}
        out.print_json(
            {
                "url": storage.canonical(url),
                "equal": not compared.differences,
                **facts,
                "kept": scratch if keep else None,
            }
        )
    else:
        ran = format_count(compared.step - back.step, "step")
        out.print_text(f"came back at step {back.step} from {back.source}, and ran {ran} from there")
        _print_comparison(compared)
    if compared.differences:
        raise typer.Exit(Exit.DIFFERENT)


def _print_comparison(compared: Compared) -> None:
    for part in compared.unused:
        out.print_text(f"not compared, since neither run used it: {part}")
    if compared.before_the_kill:
        out.print_text(
            "both runs differed already before the kill, so it is not the restart: is everything seeded? First:"
        )
        out.print_text(compared.before_the_kill[0])
    elif compared.differences:
        out.print_text(f"DIFFERENT in {format_count(len(compared.differences), 'place')}; the first:")
        out.print_text(compared.differences[0])
    else:
        out.print_text(f"equal bit for bit at step {compared.step}: tensors, values, generators, positions")


def print_progress(text: str) -> None:
    """Prints a line of progress on standard error."""
    print(f"rehearse: {text}", file=sys.stderr, flush=True)


def scratch_for(url: str) -> str:
    """An unused URL beside a canonical one; inside it if that is a whole bucket."""
    name = f"rehearsal-{secrets.token_hex(4)}"
    _, mark, path = url.partition("://")
    return f"{url}/{name}" if mark and "/" not in path else f"{url}-{name}"


@dataclass(frozen=True)
class Rehearsal:
    """One run of the user's command, with the URL `real_url` replaced by `url`."""

    real_url: str
    url: str
    original_command: Sequence[str]

    @property
    def command(self) -> list[str]:
        there = re.compile(rf"\{{url\}}|(?<![\w./-]){re.escape(self.real_url)}(?![\w.-])")
        return [there.sub(lambda _: self.url, word) for word in self.original_command]

    def start(self, runtime: str, hold_at: int = 0) -> subprocess.Popen[bytes]:
        """Starts the script. `hold_at`: the script saves that step and then waits to be killed. Errors: UsageError."""
        from ckpt.storage import canonical

        # env(1) adds to this process's environment. The script's output goes to standard error, so that --json stays
        # clean.
        added = [
            f"CKPT_RUNTIME_DIR={runtime}",
            f"CKPT_LAUNCH=rehearsal-{self.url[-80:]}",
            f"CKPT_REDIRECT={dumps([canonical(self.real_url), self.url])}",
            f"CKPT_HOLD_AT={hold_at}",
        ]
        if shutil.which(self.command[0]) is None:
            is_file = os.path.isfile(self.command[0])
            wrong = "this file is no program; put python before it" if is_file else "there is no such program"
            raise UsageError(f"cannot start {self.command[0]!r}: {wrong}")
        return subprocess.Popen(["env", *added, *self.command], stdout=STDERR, start_new_session=True)

    def saved_steps(self) -> list[int]:
        """The steps in the store, in order."""
        from ckpt.store import keys

        with contextlib.closing(reader.open_store(self.url)) as store:
            found = (keys.parse_record(info.key) for info in store.list(keys.COMMITS))
            return sorted(each[0].version.step for each in found if each is not None)

    def epochs(self) -> frozenset[Epoch]:
        """The epochs that the store knows: one per start."""
        from ckpt.store.run import Run as StoredRun

        with contextlib.closing(reader.open_store(self.url)) as store:
            return StoredRun(store).epochs()

    def last_saved_step(self) -> int:
        """The last saved step. Errors: UsageError if the script saved elsewhere."""
        saved = self.saved_steps()
        if not saved:
            raise UsageError(
                f"the script saved nothing to {self.url}: write the URL in the command exactly as it is given to "
                "rehearse, or put {url} where the script takes it; in the script's own text it must be the same URL"
            )
        return saved[-1]


def wait_script(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Waits for the script. Errors: CkptError if it fails, or takes too long and is killed."""
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired as exc:
        raise CkptError(f"the script did not end within {timeout_s:g} s; give it fewer steps, or --timeout-s") from exc
    finally:
        if process.poll() is None:
            kill_all(process.pid, agents=True)
            process.wait()
    if status != 0:
        raise CkptError(f"the script failed with exit status {status}; first make it run to its end by itself")


def kill_after(run: Rehearsal, runtime: str, at: int, lose_memory: bool, timeout_s: float) -> int:
    """Starts the script, and kills all its processes once a step of at least `at` is in the store. The script waits
    there (CKPT_HOLD_AT). Returns that step. Errors: CkptError if the script ends too early, or takes too long."""
    process = run.start(runtime, hold_at=at)
    deadline = time.monotonic() + timeout_s
    try:
        while not (saved := [step for step in run.saved_steps() if step >= at]) and process.poll() is None:
            if time.monotonic() > deadline:
                raise CkptError(f"no step from {at} on was saved within {timeout_s:g} s; see --at and --timeout-s")
            time.sleep(STORE_POLL_S)
        if process.poll() is not None:
            raise CkptError(
                f"the script ended (status {process.returncode}) before it could be killed: it did not end step {at}, "
                f"or not within ckpt.Checkpointer; {MORE_TIME}"
            )
    finally:
        kill_all(process.pid, agents=lose_memory)
        process.wait()
    if lose_memory:
        for agent in _processes_with(runtime):
            agent.kill()
    return saved[-1]


def snapshots_in_memory(url: str, runtime: str) -> frozenset[Identity]:
    """The snapshots in the memory of the run's agent, complete or staged; none if no agent runs."""
    from ckpt.types import Epoch, Identity, Version

    try:
        sock = live.find_agent(url, Path(runtime))
        if sock is None:
            return frozenset()
        with live.connect_agent(sock) as agent:
            status = agent.status()
    except AgentError:
        return frozenset()
    jobs = [job for job in (status["job"], *status["former"]) if job is not None]
    return frozenset(
        Identity(Epoch.parse(job["epoch"]), Version.parse(slot["version"]))
        for job in jobs
        for slot in job["slots"]
        if slot["version"] is not None and slot["state"] in ("complete", "staged")
    )


@dataclass(frozen=True)
class Back:
    """Where a restart continued. `step`: 0 for a start from nothing. `source`: "memory", "store" or "nothing"."""

    step: int
    source: str


def find_restart_point(run: Rehearsal, before: frozenset[Epoch], in_memory: frozenset[Identity]) -> Back:
    """Where the restart continued: its claim names the checkpoint.

    `before`: the epochs before the restart. `in_memory`: the snapshots that an agent held then; memory is preferred to
    the store. Errors: CkptError if the restart made no claim.
    """
    from ckpt.store.run import Run as StoredRun

    with contextlib.closing(reader.open_store(run.url)) as store:
        claims = sorted(StoredRun(store).view().claims, key=lambda claim: claim.epoch)
    new = [claim for claim in claims if claim.epoch not in before]
    if not new:
        raise CkptError("nothing is proven: the script, started again, did not enter its ckpt.Checkpointer")
    parent = new[0].parent
    if parent is None:
        return Back(0, "nothing")
    return Back(parent.version.step, "memory" if parent in in_memory else "store")


def delete_scratch(url: str) -> None:
    """Deletes everything at a scratch URL."""
    from ckpt import storage

    with contextlib.closing(reader.open_store(url)) as store:
        store.delete([info.key for info in store.list("")])
    if storage.canonical(url).startswith("/"):
        shutil.rmtree(url, ignore_errors=True)


def kill_all(pid: int, *, agents: bool) -> None:
    """Sends SIGKILL to the process, its group and all its descendants. Agents are in sessions of their own. They are
    killed only if asked: a machine's memory outlives a job."""
    import psutil

    # Stop the group first: a quick script could end while its processes are looked up.
    _signal_group(pid, signal.SIGSTOP)
    with contextlib.suppress(psutil.NoSuchProcess):
        for victim in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if agents or not any("ckpt.agent" in word for word in victim.cmdline()):
                    victim.send_signal(signal.SIGKILL)
    _signal_group(pid, signal.SIGKILL)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _processes_with(runtime: str) -> Iterator[psutil.Process]:
    """Every process with this runtime folder in its environment. Agents are in sessions of their own."""
    import psutil

    for process in psutil.process_iter():
        try:
            if process.environ().get("CKPT_RUNTIME_DIR") == runtime:
                yield process
        except psutil.Error:
            continue

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
from copy import copy
from dataclasses import asdict, dataclass, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt import reader
from ckpt.cli import live, out, target
from ckpt.cli.exits import Exit
from ckpt.errors import AgentError, CkptError, UsageError
from ckpt.types import format_count

if TYPE_CHECKING:
    import psutil

    from ckpt.ipc.client import Connection
    from ckpt.store.lineage import CommitRef
    from ckpt.store.run import Run as StoredRun
    from ckpt.types import Epoch, Identity

STDERR = 2  # the file descriptor
MORE_TIME = "let it run more steps, or give a smaller --at"
STORE_POLL_S = 0.1  # between two queries of the store
# Between two queries of the agent: a snapshot is in memory earlier than in the store, when more steps remain.
AGENT_POLL_S = 0.005


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

        with target.store(self.url) as store:
            found = (keys.parse_record(info.key) for info in store.list(keys.COMMITS))
            return sorted(each[0].version.step for each in found if each is not None)

    def epochs(self) -> frozenset[Epoch]:
        """The epochs that the store knows: one per start."""
        from ckpt.store.run import Run as StoredRun

        with target.store(self.url) as store:
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
    """Starts the script and kills all its processes once a step of at least `at` is saved. Returns that step.

    A step counts as saved if it is in the store, or complete in the agent's memory unless that is to be lost. Errors:
    CkptError if the script ends too early, or takes too long.
    """
    process = run.start(runtime, hold_at=at)
    deadline = time.monotonic() + timeout_s
    try:
        while not (saved := _wait_saved_steps(run, runtime, at, lose_memory, process)):
            if time.monotonic() > deadline:
                raise CkptError(f"no step from {at} on was saved within {timeout_s:g} s; see --at and --timeout-s")
            if process.poll() is not None:
                break
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


def _wait_saved_steps(
    run: Rehearsal, runtime: str, at: int, lose_memory: bool, process: subprocess.Popen[bytes]
) -> list[int]:
    """The saved steps from `at` on, after waiting STORE_POLL_S at most."""
    found = [step for step in run.saved_steps() if step >= at]
    until = time.monotonic() + STORE_POLL_S
    with contextlib.ExitStack() as stack, contextlib.suppress(AgentError):
        agent = None
        while not found and time.monotonic() < until:
            if agent is None and not lose_memory:
                agent = _connect_run_agent(run.url, runtime, stack)
            if agent is not None:
                found = sorted(
                    each.version.step for each in _agent_snapshots(agent, complete=True) if each.version.step >= at
                )
            if not found:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(AGENT_POLL_S)
                    break
    return found


def snapshots_in_memory(url: str, runtime: str) -> frozenset[Identity]:
    """The snapshots in the memory of the run's agent, complete or staged; none if no agent runs."""
    with contextlib.ExitStack() as stack, contextlib.suppress(AgentError):
        agent = _connect_run_agent(url, runtime, stack)
        return frozenset() if agent is None else _agent_snapshots(agent, complete=False)
    return frozenset()


def _connect_run_agent(url: str, runtime: str, stack: contextlib.ExitStack) -> Connection | None:
    from ckpt.ipc.client import connect_nowait, make_agent_paths
    from ckpt.settings import read_settings
    from ckpt.storage import canonical

    sock = connect_nowait(make_agent_paths(canonical(url), replace(read_settings(), runtime_dir=Path(runtime))))
    return None if sock is None else stack.enter_context(live.connect_agent(sock))


def _agent_snapshots(agent: Connection, *, complete: bool) -> frozenset[Identity]:
    from ckpt.types import Epoch, Identity, Version

    status = agent.status()
    jobs = [job for job in (status["job"], *status["former"]) if job is not None]
    return frozenset(
        Identity(Epoch.parse(job["epoch"]), Version.parse(slot["version"]))
        for job in jobs
        for slot in job["slots"]
        if slot["version"] is not None and (slot["state"] == "complete" or (slot["state"] == "staged" and not complete))
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

    with target.store(run.url) as store:
        claims = sorted(StoredRun(store).view().claims, key=lambda claim: claim.epoch)
    new = [claim for claim in claims if claim.epoch not in before]
    if not new:
        raise CkptError("nothing is proven: the script, started again, did not enter its ckpt.Checkpointer")
    parent = new[0].parent
    if parent is None:
        return Back(0, "nothing")
    return Back(parent.version.step, "memory" if parent in in_memory else "store")


@dataclass(frozen=True)
class Compared:
    """The result of the comparison. `differences`: one line each, tensors first. `unused`: values that differ although
    neither run changed them after its first checkpoint, such as generators without a seed that nothing used.
    `before_the_kill`: what differed before the kill already, so that the restart is not the cause."""

    step: int
    differences: list[str]
    unused: list[str]
    before_the_kill: list[str]


def compare(straight: str, killed: str, back_at: int) -> Compared:
    """Compares the newest checkpoints of both runs bit for bit. Also compares the first checkpoints that both have, if
    they are from before the restart: at step `back_at` at the latest."""
    with reader.open(straight) as left, reader.open(killed) as right:
        lines = [run.view.history for run in (left, right)]
        first_steps = [{ref.identity.version: ref for ref in line} for line in lines]
        both = first_steps[0].keys() & first_steps[1].keys()
        common = min((version for version in both if version.step <= back_at), default=None)
        ends = [_Checkpoint(run.run, line[-1]) for run, line in zip((left, right), lines, strict=True)]
        steps = [end.step for end in ends]
        found = [f"step: {steps[0]} undisturbed, {steps[1]} after the kill"] if steps[0] != steps[1] else []
        found += _tensor_differences(*ends)
        unchanged = set(ends[0].values_by_path)
        # A run with only one checkpoint proves nothing.
        for run, line, end in zip((left, right), lines, ends, strict=True):
            unchanged &= (
                set(end.values_by_path) - set(_value_differences(_Checkpoint(run.run, line[0]), end))
                if len(line) > 1
                else set()
            )
        values = _value_differences(*ends)
        unused = [part for part in values if part in unchanged]
        early: list[str] = []
        if common is not None:
            begun = [_Checkpoint(run.run, refs[common]) for run, refs in zip((left, right), first_steps, strict=True)]
            early = [
                *_tensor_differences(*begun),
                *(f"value {path}" for part, path in _value_differences(*begun).items() if part not in unused),
            ]
        found += [f"value {path}" for part, path in values.items() if part not in unused]
    return Compared(steps[0], found, unused, early if found else [])


class _Checkpoint:
    """A checkpoint's tensors and values. `values_by_path`: the values, two levels deep, such as
    "rank=0['generators']['torch']", and the keys of the dicts above them."""

    def __init__(self, run: StoredRun, ref: CommitRef) -> None:
        from ckpt.store.reader import FrameReader, load_values, open_record

        self.step = ref.identity.version.step
        self.reader = FrameReader(run.backend, open_record(run.backend, ref, run.patience), run.patience)
        values = load_values(self.reader)
        others = {f"{coordinate} shared": tree for coordinate, tree in values.shared_by_coordinate.items()}
        trees = {"shared": values.shared, **others, **values.own_by_coordinate}
        self.values_by_path = {
            part: leaf for name, tree in trees.items() for part, leaf in _split_values(tree, name, 2)
        }


def _split_values(tree: Any, path: str, levels: int) -> Iterator[tuple[str, Any]]:
    from ckpt.format.values import encode
    from ckpt.store.diff import ORDER

    if not levels or not isinstance(tree, dict):
        yield path, tree
        return
    for key, branch in tree.items():
        yield from _split_values(branch, f"{path}[{key!r}]", levels - 1)
    keys = copy(tree)
    dict.update(keys, dict.fromkeys(tree))
    yield f"{path}{ORDER}", encode(keys)  # the order of the keys, and the kind of dict


def _tensor_differences(here: _Checkpoint, there: _Checkpoint) -> list[str]:
    from ckpt.store.diff import diff

    found = diff(here.reader, there.reader)
    lines = [f"tensor {name}: only in the undisturbed run" for name in found.removed]
    lines += [f"tensor {name}: only in the run that was killed" for name in found.added]
    lines += [f"tensor {name}: {mine} undisturbed, {other} after the kill" for name, mine, other in found.retyped]
    return lines + [f"tensor {each.name}: {each.elements} of {each.size} elements differ" for each in found.changed]


def _value_differences(here: _Checkpoint, there: _Checkpoint) -> dict[str, str]:
    """The parts that differ, each with the first differing path in it."""
    from ckpt.store.diff import differences

    found = {}
    for part in [*here.values_by_path, *(part for part in there.values_by_path if part not in here.values_by_path)]:
        if part not in here.values_by_path or part not in there.values_by_path:
            found[part] = part
        elif first := next(differences(here.values_by_path[part], there.values_by_path[part], part), None):
            found[part] = first
    return found


def delete_scratch(url: str) -> None:
    """Deletes everything at a scratch URL."""
    from ckpt import storage

    with target.store(url) as store:
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

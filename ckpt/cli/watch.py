"""The command `ckpt watch`: shows what a run's agent is doing, as a live view for people or as JSON objects for
programs.

It only reads. If no agent runs, it shows the store and keeps looking for an agent.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.cli import out
from ckpt.cli.live import connect_agent, find_agent
from ckpt.errors import AgentError, CkptError, NoCheckpoint, UsageError
from ckpt.storage.names import redact_url

if TYPE_CHECKING:
    from ckpt.ipc.client import Connection

EVERY_MIN_S, EVERY_MAX_S = 0.1, 86_400.0
ANSWER_S = 10.0  # a busy agent still answers at once
STORE_EVERY_S = 10.0  # a listing costs requests, and its result changes rarely


def watch(
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="Where the run saves; without it, the job that runs here.")
    ] = None,
    job: Annotated[
        str | None, typer.Option("--job", metavar="LAUNCH", help="The job of that launch id that runs here.")
    ] = None,
    every_s: Annotated[float, typer.Option("--every-s", help="Seconds between two updates, .1 to 86400.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
    json: out.JsonOption = False,
) -> None:
    """Show what a run's agent is doing: levels, rates, what it costs and why. Ctrl-C ends it."""
    if url is not None and job is not None:
        raise UsageError("give a URL or --job, not both")
    if not EVERY_MIN_S <= every_s <= EVERY_MAX_S:
        raise UsageError(f"--every-s {every_s}: give {EVERY_MIN_S:g} to {EVERY_MAX_S:g} seconds")
    found = url if url is not None else _find_job_url(job)
    with contextlib.closing(Looker(found)) as looker, _status_printer(json, once) as show:
        while True:
            show(looker.read_status(patient=not once))
            if once:
                return
            threading.Event().wait(every_s)


class Looker:
    """Reads the status of a URL's agent, or of the store if no agent runs."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._connection_stack = contextlib.ExitStack()
        self._connection: Connection | None = None
        self._store: tuple[float, dict[str, Any]] | None = None
        self._pid = 0  # of the last connected agent

    def close(self) -> None:
        self._connection = None
        self._connection_stack.close()

    def read_status(self, patient: bool) -> dict[str, Any]:
        """The status now. `patient`: an error that may pass becomes part of the status. Errors: otherwise CkptError."""
        try:
            status = self._ask_agent()
        except AgentError as exc:
            self.close()
            is_silent = isinstance(exc.__cause__, TimeoutError)
            said = AgentError(f"{exc}. {_silent_agent_hint(self._pid)}") if is_silent else exc
            if not patient:
                raise said from exc
            silent = {"silent": self._pid} if is_silent else {}
            return {"url": redact_url(self.url), "pid": None, "job": None, **silent, "error": str(said)}
        if status is not None:
            self._store = None
            return status
        return {"url": redact_url(self.url), "pid": None, "job": None, **self._read_store(patient)}

    def _ask_agent(self) -> dict[str, Any] | None:
        """The agent's status; None if no agent runs. Errors: AgentError, from a TimeoutError if the agent does not
        answer; UsageError for an invalid URL."""
        from ckpt.ipc.agent_process import peer_pid

        # If the known agent has ended, try once more: another one may run.
        for _ in range(2):
            known = self._connection is not None
            if self._connection is None:
                sock = find_agent(self.url)
                if sock is None:
                    return None
                self._pid = peer_pid(sock)
                self._connection = self._connection_stack.enter_context(connect_agent(sock, ANSWER_S))
            try:
                status = self._connection.status(ANSWER_S)
                return {**status, "url": redact_url(str(status.get("url", self.url)))}
            except AgentError:
                ended = known and not self._connection.is_open
                self.close()
                if not ended:
                    raise
        return None

    def _read_store(self, patient: bool) -> dict[str, Any]:
        if self._store is None or time.monotonic() - self._store[0] >= STORE_EVERY_S:
            try:
                found = store_facts(self.url)
            except CkptError as exc:
                if not patient or isinstance(exc, UsageError):
                    raise
                found = {"error": "nothing is saved there yet" if isinstance(exc, NoCheckpoint) else str(exc)}
            self._store = time.monotonic(), found
        return self._store[1]


def store_facts(url: str) -> dict[str, Any]:
    """The checkpoint that a start would continue from, and the run's state. Errors: NoCheckpoint; StorageError."""
    from ckpt import reader

    with reader.open(url) as opened:
        run = opened.view
    newest, line = run.newest_epoch, run.history
    return {
        "store": {
            "checkpoints": len(line),
            "branches": len(run.branches),
            "step": line[-1].identity.version.step if line else None,
            "identity": str(line[-1].identity) if line else None,
            "saved": line[-1].saved_s if line else None,
            "epoch": str(newest) if newest else None,
            "closed": newest in run.closed_epochs,
        }
    }


def _find_job_url(launch: str | None) -> str:
    """The URL of the job on this host. Errors: AgentError if there is none; UsageError if there are several."""
    silent: list[int] = []
    running = sorted((str(status["url"]), _launches(status)) for status in _agent_statuses(silent))
    found = [(url, its) for url, its in running if launch is None or launch in its]
    if not found:
        named = f" with the launch id {launch!r}" if launch is not None else ""
        others = "; ".join(f"{redact_url(url)} (launch {', '.join(its) or 'none'})" for url, its in running)
        none = f"no agent of yours {'on this host answers' if silent else 'runs on this host'}{named}"
        none += " (an agent is the process beside a job that saves its checkpoints)" if not (running or silent) else ""
        none += f"; there is {others}" if others else ""
        raise AgentError(f"{none}{_silent_text(silent)}. Name the URL")
    if len(found) > 1 or (silent and launch is None):
        names = "; ".join(f"{redact_url(url)} (launch {', '.join(its) or 'none'})" for url, its in found)
        several = f"several agents run on this host; name one by its URL, or by its launch with --job: {names}"
        raise UsageError(f"{several}{_silent_text(silent)}")
    return found[0][0]


def _silent_agent_hint(pid: int) -> str:
    """What a person can do about a silent agent. `pid`: 0 if its process is not visible from here."""
    it = str(pid) if pid else "PID"
    return (
        f"Its process{f' {pid}' if pid else ''} was stopped, hangs or is overloaded: a job trains on beside it, but "
        f"saves nothing. `kill -CONT {it}` wakes a stopped process. If that does not help, `kill -KILL {it}` ends it. "
        "Then what only its memory holds is lost, and the ranks of a job start a new agent"
    )


def _silent_text(pids: list[int]) -> str:
    return f"; silent: process {', '.join(map(out.process_id, pids))}" if pids else ""


def _launches(status: dict[str, Any]) -> list[str]:
    """The launch ids of the current or starting job; if there is none, of the newest former one."""
    job, former = status.get("job"), status.get("former") or []
    found = [status.get("starting"), job["launch"] if job else None] if job or status.get("starting") else []
    # Jobs that another node's agent coordinates.
    found = found or [each.get("launch") for each in status.get("followed_jobs") or []]
    found = found or [former[-1]["launch"] if former else None]
    return sorted({str(each) for each in found if each is not None})


def _agent_statuses(silent: list[int]) -> Iterator[dict[str, Any]]:
    """The status of each agent of this user on this host; none of an agent that is ending. `silent`: receives the
    process ids of agents that accept the connection and do not answer."""
    from ckpt.ipc.agent_process import peer_pid
    from ckpt.ipc.client import connect_nowait, make_agent_paths
    from ckpt.settings import read_settings

    place = make_agent_paths("", read_settings())
    for path in sorted(place.folder.glob("agent-*.sock")):
        pid = 0
        try:
            sock = connect_nowait(replace(place, socket=path))
            if sock is not None:
                pid = peer_pid(sock)
                with connect_agent(sock, ANSWER_S) as agent:
                    yield agent.status(ANSWER_S)
        except AgentError as exc:
            if isinstance(exc.__cause__, TimeoutError):
                silent.append(pid)


@contextmanager
def _status_printer(json: bool, once: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """How a status is shown: as JSON, in place on a terminal, otherwise as text after text."""
    if json:

        def as_json(status: dict[str, Any]) -> None:
            out.print_json(status)
            sys.stdout.flush()

        yield as_json
        return
    from ckpt.cli import view

    console = out.console(sys.stdout)
    # Nothing can be redrawn here.
    if once or not sys.stdout.isatty() or console.is_dumb_terminal:

        def as_text(status: dict[str, Any]) -> None:
            out.print_text(view.text(status, None if sys.stdout.isatty() else out.WIDTH_MAX))
            if not once:
                out.print_text()
            sys.stdout.flush()

        yield as_text
        return
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        yield lambda status: live.update(view.Fitted(status), refresh=True)

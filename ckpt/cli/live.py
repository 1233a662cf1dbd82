"""The connection to a running job's agent on this host, and the command `ckpt preempt`, which asks the job to leave."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.cli import out
from ckpt.errors import AgentError
from ckpt.storage.names import redact_url

if TYPE_CHECKING:
    from ckpt.ipc.client import Connection


def find_agent(url: str, runtime_dir: Path | None = None) -> socket.socket | None:
    """A socket to the agent that serves `url` for this user on this host; None if none runs. It starts no agent.
    `runtime_dir`: the folder of its socket; None: as the environment says."""
    from ckpt.ipc.client import connect_nowait, make_agent_paths
    from ckpt.settings import read_settings
    from ckpt.storage import canonical

    settings = read_settings()
    if runtime_dir is not None:
        settings = replace(settings, runtime_dir=runtime_dir)
    return connect_nowait(make_agent_paths(canonical(url), settings))


@contextmanager
def connect_agent(sock: socket.socket, hello_s: float = 120.0) -> Iterator[Connection]:
    """A connection to the agent. Errors: AgentError if the agent answers nothing for `hello_s` seconds."""
    from ckpt.ipc.client import Connection
    from ckpt.threads import Tasks

    with Tasks("cli") as tasks:
        connection = Connection(
            sock, tasks, lambda message: message.close(), lambda why: None, role="tool", hello_s=hello_s
        )
        try:
            yield connection
        finally:
            connection.close()


def require_agent(url: str) -> socket.socket:
    """A socket to the agent of `url`. Errors: AgentError if none runs."""
    sock = find_agent(url)
    if sock is None:
        raise AgentError(
            f"no agent serves {redact_url(url)} for you on this host (an agent is the process beside a job that saves "
            "its "
            "checkpoints). Run this command on the job's host, as the job's user"
        )
    return sock


def preempt(
    url: out.UrlArgument,
    deadline_s: Annotated[
        float, typer.Option("--deadline-s", help="Seconds that the job has left.", min=0.0, callback=out.check_seconds)
    ] = 30.0,
    cancel: Annotated[bool, typer.Option("--cancel", help="Withdraw the request: the job goes on.")] = False,
    json: out.JsonOption = False,
) -> None:
    """Ask the running job to save and leave, as a notice of preemption would."""
    fields = {"deadline_s": deadline_s, "source": "operator", "cancel": cancel}
    with connect_agent(require_agent(url)) as agent:
        answer = agent.request("preempt", fields).fields
    body = {key: value for key, value in answer.items() if key not in ("t", "id")}
    if json:
        out.print_json(body)
    elif cancel:
        out.print_text("told the job to go on, unless it is leaving already")
    else:
        out.print_text(f"asked the job to save and leave within {deadline_s:g} s")

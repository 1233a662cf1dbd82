"""The command `ckpt agent`: a memory-only node in the foreground. A job's own agents start automatically, without a
command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ckpt.cli import out
from ckpt.errors import UsageError
from ckpt.storage.names import redact_url


def agent(
    url: out.UrlArgument,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where the job's nodes reach it; port 0: any.")
    ],
    memory: Annotated[str, typer.Option("--memory", metavar="SIZE", help="What it lends at most, such as 64GiB.")],
    domain: Annotated[
        str | None,
        typer.Option("--domain", metavar="ZONE/RACK", help="Its failure domains, widest first [CKPT_DOMAIN]."),
    ] = None,
    secret_file: Annotated[
        str | None,
        typer.Option("--secret-file", metavar="FILE", help="The run's secret; -: standard input [CKPT_SECRET_FILE]."),
    ] = None,
    commit_after_s: Annotated[
        float,
        typer.Option(
            "--commit-after-s",
            help="Seconds without the job's coordinator until it commits by itself.",
            min=0.0,
            callback=out.check_seconds,
        ),
    ] = 30.0,
    json: out.JsonOption = False,
) -> None:
    """Lend this machine's memory to the run's jobs: a node that trains nothing. Ctrl-C or SIGTERM ends it.

    It needs the run's secret, and a job names it with CKPT_PEERS=HOST:PORT."""
    from ckpt.agent.node.main import run_memory_node
    from ckpt.agent.node.memory_node import MemoryNodeOptions
    from ckpt.ipc.failure_domains import find_own_domains
    from ckpt.settings import read_settings
    from ckpt.storage import canonical

    settings, url = read_settings(), canonical(url)
    known = _read_secret(secret_file, settings.secret_file)
    named = settings.domain if domain is None else domain
    domains = tuple(find_own_domains(named))
    terms = MemoryNodeOptions(known, listen, out.parse_size("--memory", memory), domains, commit_after_s)

    def listening(addresses: list[str]) -> None:
        if json:
            out.print_json({"url": redact_url(url), "listen": addresses, "memory_bytes": terms.memory_bytes})
        else:
            out.print_text(
                f"lending up to {out.format_size(terms.memory_bytes)} to {redact_url(url)} at {', '.join(addresses)}"
            )
        sys.stdout.flush()  # the command prints nothing more

    run_memory_node(url, settings, terms, listening)


def _read_secret(named: str | None, usual: Path | None) -> bytes:
    """The run's secret. `named`: the file from the command line; `usual`: from the environment. Errors: UsageError."""
    from ckpt.ipc.secret import read_file, read_stream

    if named == "-":
        return read_stream(sys.stdin.buffer)
    path = usual if named is None else Path(named)
    if path is None:
        raise UsageError(
            "a memory-only node knows the run by its secret: name a file that holds that of the job's nodes with "
            "--secret-file or CKPT_SECRET_FILE; make one with: (umask 077; openssl rand -hex 32 > FILE)"
        )
    return read_file(path)

"""The `ckpt` command: its table of commands, and how errors become exit codes.

Start-up time is part of the interface: nothing heavy is imported until a command needs it. Each command is a thin
function: it opens the store, calls one use case of ckpt/store, and prints. The exit codes are in exits.py. An error of
ckpt is one line on standard error; only an unforeseen exception prints a traceback.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from keyword import iskeyword
from typing import Annotated, Any, TextIO, cast

import typer

from ckpt.cli import out
from ckpt.cli.exits import MEANING, Exit, exit_code_of, exit_on_signals
from ckpt.errors import CkptError, StorageError, UsageError

EXITS = "Exit codes: " + "; ".join(f"{code.value} {text}" for code, text in MEANING.items()) + "."

# Each command, and the module of this package with the function of the same name (import_ for `import`, a keyword).
MODULE = {
    "ls": "listing",
    "show": "listing",
    "verify": "checking",
    "diff": "checking",
    "restore": "restoring",
    "cp": "copying",
    "import": "importing",
    "branch": "managing",
    "prune": "managing",
    "rehearse": "rehearse",
    "watch": "watch",
    "agent": "agent",
    "preempt": "live",
    "predict": "predicting",
    "simulate": "simulating",
    "doctor": "doctor",
    "bench": "benching",
}


def make_app(words: Sequence[str]) -> typer.Typer:
    """The command line for these arguments: only the named command, if they begin with one, else all (for the help).

    Importing and describing the other commands would take longer than most commands run.
    """
    app = typer.Typer(
        name="ckpt",
        help="Look at, check, move and mend the checkpoints of a training run.",
        epilog=EXITS,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_options)
    for name in words[:1] if words and words[0] in MODULE else MODULE:
        settings = {"ignore_unknown_options": True} if name == "rehearse" else None
        work = getattr(import_module(f"ckpt.cli.{MODULE[name]}"), f"{name}_" if iskeyword(name) else name)
        if isinstance(work, typer.Typer):  # it has subcommands
            app.add_typer(work, name=name)
        else:
            app.command(name, context_settings=settings)(work)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"ckpt {version('multilevel-ckpt')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# click's exception for a wrong option or argument. It is found by name, because typer may bring its own click.
_CLICK_ERROR: Any = next(each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException")


def main() -> None:
    """Runs the command line, then exits with its status."""
    for name in ("stdout", "stderr"):
        # The parent process closed the stream: its output goes nowhere.
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As on standard error: any name can be printed.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with redirect_stdout(cast(TextIO, out.Printed(sys.stdout))):
            with exit_on_signals():
                status = _run()
            sys.stdout.flush()
    except OSError as error:
        # The rest of the buffer goes there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = Exit.BROKEN_PIPE
        if not isinstance(error, BrokenPipeError):
            print(f"error: {error}", file=sys.stderr)
            status = Exit.STORAGE
    sys.exit(status)


def _run() -> int:
    """Runs the command and returns the exit status. Errors: BrokenPipeError if the reader of its output has gone;
    Unwritten if the output cannot be written."""
    try:
        app = make_app(sys.argv[1:])
        # The status that a command ends with, or None.
        status = int(app(standalone_mode=False) or Exit.OK)
        if status == Exit.INTERRUPTED:  # typer's result for Ctrl-C
            raise KeyboardInterrupt
        return status
    except CkptError as error:
        return _report_error(error.kind, str(error), exit_code_of(error))
    except (typer.Abort, KeyboardInterrupt):
        _print_json_error("interrupted", "interrupted by Ctrl-C")
        return Exit.INTERRUPTED
    except (out.Unwritten, BrokenPipeError):
        raise
    except OSError as error:
        return _report_error(StorageError.kind, str(error), Exit.STORAGE)
    except _CLICK_ERROR as error:
        error.show()  # on standard error, with the usage
        _print_json_error(UsageError.kind, error.format_message())
        return Exit.USAGE
    except Exception as error:
        traceback.print_exc()
        return _report_error("unforeseen", f"{type(error).__name__}: {error}; please report it", Exit.UNEXPECTED)


def _report_error(kind: str, message: str, status: Exit) -> Exit:
    out.print_text(f"error: {message}", sys.stderr)
    _print_json_error(kind, message)
    return status


def _print_json_error(kind: str, message: str) -> None:
    """Prints the error on standard output if the user gave --json. Arguments after -- belong to another program."""
    ours = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    if "--json" in ours:
        print(json.dumps({"error": {"kind": kind, "message": message}}))


if __name__ == "__main__":
    main()

"""Repositories of the Hugging Face Hub (hf://USER/NAME) as targets of exports. The export is written to a folder of
this machine, and the folder is uploaded by the package huggingface_hub, with its token (`hf auth login`, HF_TOKEN)."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from ckpt.errors import StorageError, UsageError

UPLOAD = """
import sys, huggingface_hub
try:
    huggingface_hub.HfApi().upload_folder(repo_id=sys.argv[1], folder_path=sys.argv[2], commit_message=sys.argv[3])
except Exception as exc:
    sys.exit(" ".join(str(exc).split()) or repr(exc))
"""


def check_repository(repository: str) -> None:
    """Errors: UsageError, if the Hub says that the repository does not exist or may not be written to. If the Hub does
    not answer, training starts anyway, and the exports say so."""
    try:
        import huggingface_hub
    except ImportError as exc:
        raise UsageError(f"hf://{repository} needs a package: pip install huggingface_hub") from exc
    try:
        huggingface_hub.HfApi().auth_check(repository, write=True)
    except Exception as exc:  # its HTTP library raises errors of its own where there is no network
        status = getattr(getattr(exc, "response", None), "status_code", 0)
        if isinstance(exc, ValueError) or status in (401, 403, 404):
            raise UsageError(
                f"hf://{repository}: {_first_line(str(exc))}. Log in (`hf auth login`, or HF_TOKEN); a repository is "
                f"made by `hf repos create {repository} --private`"
            ) from exc


def upload(folder: Path, repository: str, title: str) -> None:
    """Uploads the files of a folder to the top of a repository, as one commit, in a process of its own. Errors:
    StorageError."""
    command = [sys.executable, "-P", "-c", UPLOAD, repository, os.fspath(folder), title]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise StorageError(f"the upload failed: {said[-1]}")


def folder_of(repository: str, url: str = "") -> Path:
    """Where a run's exports to this repository are written on this machine before they are uploaded."""
    run = [hashlib.sha256(url.encode()).hexdigest()[:16]] if url else []
    return Path.home().joinpath(".cache", "ckpt", "exports", repository.replace("/", "--"), *run)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0].rstrip(".") if text.strip() else "no answer"

"""The outcome file: tells a launcher how the job reacted to a preemption notice.

Launchers such as torchrun do not pass on the exit code of a worker, so they read this file. The agent writes it; the
trainer writes it if no agent is left."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

from ckpt.types import Epoch


def describe_outcome(body: dict[str, Any]) -> str:
    """The outcome as one line for people. `body`: as given to `write_outcome`."""
    what = {
        "left": "the job leaves",
        "ended": "the job was ended without another snapshot",
        "stayed": "the deadline has passed",
    }
    committed = body["committed_step"]
    in_store = f"step {committed}" if committed is not None else "no step of this start"
    peer = body["peer_step"]
    also = f", and step {peer} is in the memory of nodes that stay" if peer is not None else ""
    saved = {
        "store": f"step {body['step']} is in the store",
        "peer": f"step {body['step']} is in the memory of nodes that stay, and {in_store} is in the store",
        "local": f"step {body['step']} is in this host's memory only; {in_store} is in the store{also}",
        "none": "nothing is saved",
    }
    why = f" ({body['why']})" if body["why"] else ""
    return (
        f"ckpt: {what[str(body['how'])]} by {', '.join(body['notices'])}{why}: {saved[str(body['level'])]}, "
        f"{body['left_s']:.1f} s before the deadline"
    )


def write_outcome(path: Path, epoch: Epoch | str, launch: str, body: dict[str, Any]) -> None:
    """Writes the outcome file atomically, before it returns: the machine may end right after the answer. Errors:
    OSError; FileExistsError if `path` exists and is no regular file, which is never replaced."""
    version = body["version"]
    identity = f"{epoch}-{version}" if version is not None else None
    # In the file "version" is that of its format; `identity` has that of the checkpoint.
    about = {**body, "version": 1, "launch": launch, "identity": identity, "time_s": time.time()}
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():
            raise FileExistsError(
                errno.EEXIST, "this path is not a regular file, so it is not replaced", os.fspath(path)
            )
        part.write_text(json.dumps(about) + "\n")
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise

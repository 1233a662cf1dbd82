"""The file that says what a notice came to, where a launcher finds it: torchrun, for one, passes no worker's exit code
on. The agent writes it, or the trainer where no agent is to be had any more."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

from ckpt.types import Epoch


def text_of(body: dict[str, Any]) -> str:
    """One line for people. `body`: what `write` is given."""
    what = {
        "left": "the job leaves",
        "ended": "the job was ended where it was",
        "pushed": "there is no time for another snapshot",
        "stayed": "the deadline has passed",
    }
    committed = body["committed_step"]
    in_store = f"step {committed}" if committed is not None else "nothing of this start"
    peer = body["peer_step"]
    also = f", in the memory of nodes that stay step {peer}" if peer is not None else ""
    saved = {
        "store": f"step {body['step']} is in the store",
        "peer": f"step {body['step']} is in the memory of nodes that stay; in the store is {in_store}",
        "local": f"step {body['step']} is in this host's memory only; in the store is {in_store}{also}",
        "none": "nothing is saved",
    }
    why = f" ({body['why']})" if body["why"] else ""
    return (
        f"ckpt: {what[str(body['how'])]} by {', '.join(body['notices'])}{why}: {saved[str(body['level'])]}, "
        f"{body['left_s']:.1f} s before the deadline"
    )


def write(path: Path, epoch: Epoch | str, launch: str, body: dict[str, Any]) -> None:
    """Here and now: whoever waits for the answer may end the machine after it. Errors: OSError; FileExistsError where
    something else than a regular file is there, which is not replaced."""
    tick = body["tick"]
    identity = f"{epoch}-{tick}" if tick is not None else None
    about = {"version": 1, "launch": launch, "identity": identity, "time_s": time.time()}
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():
            raise FileExistsError(errno.EEXIST, "it is no regular file, and is not replaced", os.fspath(path))
        part.write_text(json.dumps({**about, **body}) + "\n")
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise

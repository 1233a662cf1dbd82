"""A rank that is given a checkpoint's frames, as its agent sees it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ckpt.ipc.arena import Arena


class Rank:
    """Copies what it is sent, and acknowledges it to the `restore` of its agent, `owner`, on whose main thread `post`
    runs what it is given. `deaf`: it does not, yet. `outcome`: what it was told in the end."""

    def __init__(self, post: Callable[[Callable[[], None]], None], owner: Any) -> None:
        self._post, self.owner = post, owner
        self.regions: dict[int, Arena] = {}
        self.got: dict[int, bytes] = {}
        self.outcome: dict[str, Any] | None = None
        self.deaf = False

    def send(self, fields: dict[str, Any], fds: Any = ()) -> None:
        if fields["t"] == "frame-region":
            self.regions[fields["region"]] = Arena.adopt(os.dup(next(iter(fds))))
        elif fields["t"] == "frame-places" and not self.deaf:
            for frame, region, offset, length in fields["places"]:
                self.got[frame] = bytes(self.regions[region].view[offset : offset + length])
            done = [each[0] for each in fields["places"]]
            self._post(lambda: self.owner.restore.acknowledge_frames(self, done, []))
        elif fields["t"] == "fetch-ended":
            self.outcome = fields

    def close(self) -> None:
        for arena in self.regions.values():
            arena.close()

"""The transfer of frames from a peer's memory into cells of a restore's window. Main thread only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckpt.agent.net.tcp_receiver import Fetch
from ckpt.agent.restore.window import Window
from ckpt.agent.snapshots.manifest_gather import place_frames
from ckpt.errors import CkptError
from ckpt.format.manifest import Manifest

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.ipc.node_list import NodeAt


def fetch_frames(
    network: PeerNetwork,
    post: Callable[[Callable[[], None]], None],
    window: Window,
    node: NodeAt,
    name: str,
    manifest: Manifest,
    cells: Mapping[int, int],
    offered: npt.NDArray[np.int64],
    landed: Callable[[int, int], None],
    ended: Callable[[Fetch, list[int], BaseException | None], None],
) -> Fetch:
    """Begins a transfer of frames that `node` offers as `name`. `cells`: frame -> offset of its cell in `window`.
    `offered`: all frames of the offer, ascending. `landed(frame, cell)`: a verified frame is in its cell, now the
    caller's. `ended(fetch, frames, error)`: called at the end; `frames` have not come, and their cells are
    free. Errors: CkptError, OSError; then all cells are free."""
    frames, left = list(cells), dict(cells)

    def has_landed(frame: int) -> None:
        landed(frame, left.pop(frame))

    def has_ended(done: Future[None]) -> None:
        for cell in left.values():
            window.release(cell)
        ended(fetch, list(left), done.exception())

    try:
        fetch = network.transport.fetch(
            node.name,
            network.addresses(node),
            name,
            window.arena.view,
            place_frames(manifest, frames, [cells[frame] for frame in frames], window.arena.size_bytes),
            lambda at: post(lambda: has_landed(frames[at])),
            urgent=True,
            numbers=np.searchsorted(offered, frames).tolist(),
        )
    except (CkptError, OSError):
        for cell in cells.values():
            window.release(cell)
        raise
    fetch.completion.add_done_callback(lambda done: post(lambda: has_ended(done)))
    return fetch

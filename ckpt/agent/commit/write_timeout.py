"""The time-out of a node's part of a commit: one pure rule.

All parts begin together. A part is overdue only by comparison with the parts that are already written: their time,
scaled by bytes, plus a margin. If no part is written yet, the store may be slow for all nodes, and no part is overdue.
"""

from __future__ import annotations

from collections.abc import Sequence

SLOWDOWN_MAX = 3.0  # times the slowest written part: encoding and uploading vary that much between equal nodes


def overdue_s(written: Sequence[tuple[float, int]], nbytes: int, margin_s: float) -> float | None:
    """Seconds after the common beginning from which a part of `nbytes` is overdue; None: unknown yet. `written`:
    (seconds, bytes) of each part that is written.

    A part with more bytes than a written one may take longer in proportion. A smaller part gets no shorter time, since
    a part takes time beyond that for its bytes."""
    scaled = [seconds * max(1.0, nbytes / size) for seconds, size in written if size]
    return SLOWDOWN_MAX * max(scaled) + margin_s if scaled else None

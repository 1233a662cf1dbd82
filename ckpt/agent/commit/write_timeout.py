"""When a node's part of a commit has taken too long: one pure rule.

Parts begin together. A part that is not written yet is late by comparison only: with what the others took, for as many
bytes, and a margin. As long as none of them is written the store may be slow for everybody, and nobody is late.
"""

from __future__ import annotations

from collections.abc import Sequence

SLOWER = 3.0  # times as long as the slowest of the others: encoding and uploading vary that much between equal nodes


def overdue_s(written: Sequence[tuple[float, int]], nbytes: int, margin_s: float) -> float | None:
    """Seconds after its beginning from which a part of `nbytes` is overdue; None: not yet to be said. `written`: of the
    other parts that are, seconds and bytes. A part with more bytes than another may take longer than that by as much,
    and one with less not less: there is more to a part than its bytes."""
    scaled = [seconds * max(1.0, nbytes / size) for seconds, size in written if size]
    return SLOWER * max(scaled) + margin_s if scaled else None

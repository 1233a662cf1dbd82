"""Numbers that an optimizer counts in attributes that its state_dict() leaves out: a restart loses them."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt.events import Events
from ckpt.trainer.state.optimizers import OptimizerView


class AttributeWatch:
    """Compares the attributes of optimizers at two boundaries, with one step in between. Attributes whose names begin
    with an underscore do not count: torch and schedulers set such ones."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._seen: dict[tuple[str, str], float] = {}

    def look(self, views: Iterable[OptimizerView]) -> None:
        """Reads the attributes. At the second call it emits one event for those that have moved and are not saved."""
        now = {
            (view.path, name): value
            for view in views
            for name, value in vars(view.optimizer).items()
            if type(value) in (int, float) and not name.startswith("_") and name not in view.rest["value"]
        }
        moved = sorted(
            f"{path}.{name}" for (path, name), value in now.items() if self._seen.get((path, name), value) != value
        )
        self._seen = now
        if moved:
            text = (
                f"ckpt: the attributes {', '.join(moved)} change in training, and the optimizer's state_dict() leaves "
                "them out: they are not saved, and a restart begins with their first values. Save them as plain values "
                "of the state, and set them in the block (docs/guides/optimizers.md)"
            )
            self._events.emit("optimizer.attribute", text, loud=True, names=moved)

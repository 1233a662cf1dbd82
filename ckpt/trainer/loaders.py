"""Loaders that have a state: where they stand, and what to say on entry of those that do not come back as they were.

All of it is of torchdata's StatefulDataLoader, which takes up a sampler's position by drawing so many indices again
where the sampler itself has no state, and draws one number (its workers' seed) for every new iterator, so for one more
iterator after a restart within an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ckpt.events import Events
from ckpt.trainer.nodes import LoaderNode, Node

WAY = (
    "give it sampler=RandomSampler(data) of torchdata.stateful_dataloader.sampler and generator=torch.Generator() "
    "(docs/guides/loops.md)"
)
_STATELESS = tuple(kind.__iter__ for kind in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))


def advise(found: Sequence[Node], events: Events) -> None:
    """One loud event for each loader among the nodes of a state that would not go on bit for bit after a restart."""
    for node in found:
        if isinstance(node, LoaderNode) and (why := shortcoming(node.value)):
            events.emit("loader.inexact", f"ckpt: {node.path}: {why}: {WAY}", loud=True, loader=node.path)


def shortcoming(loader: Any) -> str:
    """What of a StatefulDataLoader a restart within an epoch changes; "" where nothing is known, and for others."""
    if not _is_torchdata(loader):
        return ""
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader if batches is None else batches, "sampler", None)
    if not hasattr(sampler, "state_dict") and getattr(type(sampler), "__iter__", None) in _STATELESS:
        return (
            f"its sampler ({type(sampler).__module__}.{type(sampler).__name__}) has no state, so that a restart within "
            "an epoch repeats some samples of it and skips others"
        )
    if loader.generator is None:
        return (
            "it has no generator, so that a restart within an epoch draws one number more from torch's, and what is "
            "random in the steps after it (dropout) is other than it would have been"
        )
    if getattr(sampler, "generator", None) is loader.generator and not loader.num_workers:
        return (
            "it shuffles by its own generator, so that after a restart within an epoch the order of the next epochs is "
            "other than it would have been"
        )
    return ""


def position(loader: Any) -> Any:
    """Its state_dict(). That of torchdata's would begin the epoch of one that was given a state and not iterated over
    since: its workers would be sent what its sampler draws now, and not what it draws once the loop has set the epoch.
    It stands where that state says."""
    given = getattr(loader, "next_iter_state", None) if _is_torchdata(loader) else None
    return loader.state_dict() if given is None else given


def _is_torchdata(loader: Any) -> bool:
    kinds = type(loader).__mro__
    return any(kind.__name__ == "StatefulDataLoader" and kind.__module__.startswith("torchdata.") for kind in kinds)

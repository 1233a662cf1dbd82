"""Loaders that have a state: where they stand, and what to say on entry of those that do not come back as they were.

All of it is of torchdata's StatefulDataLoader, which takes up a sampler's position by drawing so many indices again
where the sampler itself has no state, and draws one number (its workers' seed) for every new iterator, so for one more
iterator after a restart within an epoch. Accelerate's loaders hold one, and give as their state what it said before
they drew one batch ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ckpt.events import Events
from ckpt.trainer.state.state_nodes import LoaderNode, StateNode, held_loader

WAY = (
    "give it sampler=RandomSampler(data) of torchdata.stateful_dataloader.sampler and generator=torch.Generator() "
    "(docs/guides/loops.md)"
)
STATELESS = (
    "its dataset (an IterableDataset) has no state_dict(), so that a second restart within an epoch skips samples or "
    "fails: torchdata counts those that it reads again twice. Give the dataset a state_dict() and a load_state_dict() "
    "(docs/guides/loops.md)"
)
_STATELESS = tuple(kind.__iter__ for kind in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))


def advise(found: Sequence[StateNode], events: Events) -> None:
    """One loud event for each loader among the nodes of a state that would not go on bit for bit after a restart."""
    for node in found:
        if isinstance(node, LoaderNode) and (why := shortcoming(node.value)):
            events.emit("loader.inexact", f"ckpt: {node.path}: {why}", loud=True, loader=node.path)


def shortcoming(loader: Any) -> str:
    """What of a StatefulDataLoader a restart within an epoch changes, and the way out; "" where nothing is known, and
    for others."""
    inner = _torchdata(loader)
    if inner is None:
        return ""
    batches = getattr(inner, "batch_sampler", None)
    sampler = getattr(inner if batches is None else batches, "sampler", None)
    if not hasattr(sampler, "state_dict") and getattr(type(sampler), "__iter__", None) in _STATELESS:
        return (
            f"its sampler ({type(sampler).__module__}.{type(sampler).__name__}) has no state, so that a restart within "
            f"an epoch repeats some samples of it and skips others: {WAY}"
        )
    if inner is not loader and isinstance(sampler, RandomSampler) and hasattr(sampler, "set_epoch"):
        return (
            f"its sampler ({type(sampler).__name__}) draws by the number of the epoch, which begins at 0 again after a "
            'restart. Unless the loop calls its set_epoch(ck.state["epoch"]) before each epoch, a restart in a later '
            "one repeats some samples of it and skips others (docs/guides/loops.md)"
        )
    if inner.generator is None:
        return (
            "it has no generator, so that a restart within an epoch draws one number more from torch's, and what is "
            f"random in the steps after it (dropout) is other than it would have been: {WAY}"
        )
    if getattr(sampler, "generator", None) is inner.generator and not inner.num_workers:
        return (
            "it shuffles by its own generator, so that after a restart within an epoch the order of the next epochs is "
            f"other than it would have been: {WAY}"
        )
    return ""


def position(loader: Any) -> Any:
    """Its state. The state_dict() of torchdata's would begin the epoch of one that was given a state and not iterated
    over since: its workers would be sent what its sampler draws now, and not what it draws once the loop has set the
    epoch. It stands where that state says."""
    inner = _torchdata(loader)
    if inner is None:
        return loader.state_dict()
    given = inner.next_iter_state
    return _for_a_whole_pass(loader.state_dict()) if given is None else given


def put_back(loader: Any, state: Any) -> None:
    """Gives a loader the state that `position` gave, or that an older checkpoint has."""
    loader.load_state_dict(state if _torchdata(loader) is None else _for_a_whole_pass(state))


def _for_a_whole_pass(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state of torchdata's. One of a pass that has ended begins the next pass at its first sample.

    A StatefulDistributedSampler skips the samples that its state has yielded, at its next draw. Without workers
    torchdata draws nothing from it for the pass that has ended, so the whole next pass would be skipped."""
    if not state.get("_iterator_finished") or "_snapshot" in state:
        return state
    return {**state, **{key: _not_yielded(state[key]) for key in ("_index_sampler_state", "_sampler_iter_state")}}


def _not_yielded(part: Any) -> Any:
    """The state of a StatefulDistributedSampler within this part begins at 0."""
    if not isinstance(part, dict):
        return part
    return {"yielded": 0} if set(part) == {"yielded"} else {key: _not_yielded(each) for key, each in part.items()}


@dataclass(frozen=True, slots=True)
class LoaderPosition:
    """Where a loader of torchdata's stands: how many batches it has handed out of `one`, a pass over its data (None:
    not iterated over yet), and whether that pass has ended."""

    one: object
    batches: int
    at_end: bool = False


def place(loader: Any) -> LoaderPosition | None:
    """None for a loader of another make. Asks nothing of workers, and begins no epoch."""
    inner = _torchdata(loader)
    if inner is None:
        return None
    if (given := inner.next_iter_state) is not None:
        return LoaderPosition(None, 0 if given["_iterator_finished"] else _batches(given))
    iterator = begun(inner)
    if iterator is None:
        return LoaderPosition(None, 0)
    if inner is loader:
        return LoaderPosition(iterator._sampler_iter, iterator._num_yielded, iterator._finished)
    state = loader.state_dict()  # Accelerate's: the one within is a batch ahead
    return LoaderPosition(iterator._sampler_iter, _batches(state), state["_iterator_finished"])


def begun(loader: Any) -> Any:
    """The newest iterator over a loader of torchdata's that somebody has asked for; None where nobody has, and for
    other loaders. Where the loader was asked for its state first, that has made one."""
    inner = _torchdata(loader)
    return None if inner is None or inner._initial_iter_for_state_dict else inner._iterator


def length(loader: Any) -> int | None:
    """How many batches a pass has, where a loader of torchdata's knows it."""
    inner = _torchdata(loader)
    return None if isinstance(inner.dataset, IterableDataset) else len(inner)


def is_stateless(loader: Any) -> bool:
    """Whether neither the iterable dataset of a loader of torchdata's, which was iterated over, nor what iterates over
    it has a state."""
    if not isinstance(_torchdata(loader).dataset, IterableDataset):
        return False
    state = loader.state_dict()
    parts = state["_snapshot"]["_worker_snapshots"].values() if "_snapshot" in state else (state,)
    return all(each["dataset_state"] is None and not _iterators(each) for each in parts)


def _iterators(part: Mapping[str, Any]) -> Any:
    return (part["fetcher_state"] or {}).get("dataset_iter_state")


def _batches(state: Mapping[str, Any]) -> int:
    """Handed out, as a state says it."""
    if "_snapshot" in state:
        return int(state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"])
    return int(state["_num_yielded"])


def _torchdata(loader: Any) -> Any:
    """The StatefulDataLoader that this is, or holds; else None."""
    inner = held_loader(loader)
    kinds = type(inner).__mro__
    is_one = any(kind.__name__ == "StatefulDataLoader" and kind.__module__.startswith("torchdata.") for kind in kinds)
    return inner if is_one else None

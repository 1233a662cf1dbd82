"""Data loaders with a state: reads their positions, and tells which restarts are not exact.

What shows while the loop runs is in loop/loader_watch.py, which emits the warnings of this module, too.

All rules here are about torchdata's StatefulDataLoader. For a sampler without a state, it restores the position by
drawing as many indices again. It draws one number (its workers' seed) for every new iterator, so a restart within an
epoch draws one more. Accelerate's loaders wrap such a loader. They draw one batch ahead, and their state is the one
from before that batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ckpt.events import Events
from ckpt.trainer.state.state_nodes import LoaderNode, StateNode, held_loader

REMEDY = (
    "give it sampler=RandomSampler(data) of torchdata.stateful_dataloader.sampler and generator=torch.Generator() "
    "(docs/guides/loops.md)"
)
STATELESS = (
    "its dataset (an IterableDataset) has no state_dict(), so that a second restart within an epoch skips samples or "
    "fails: torchdata counts those that it reads again twice. Give the dataset a state_dict() and a load_state_dict() "
    "(docs/guides/loops.md)"
)
_STATELESS_ITERS = tuple(kind.__iter__ for kind in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))


def warn_inexact(found: Sequence[StateNode], events: Events) -> None:
    """Emits one warning (`loader.inexact`) for each loader in `found` that would not continue bit for bit after a
    restart."""
    for node in found:
        if isinstance(node, LoaderNode) and (why := find_inexactness(node.value)):
            events.emit("loader.inexact", f"ckpt: {node.path}: {why}", loud=True, loader=node.path)


def find_inexactness(loader: Any) -> str:
    """What a restart within an epoch changes for a StatefulDataLoader, and the remedy. "" if nothing is known to
    change, and for other loaders."""
    inner = _find_torchdata_loader(loader)
    if inner is None:
        return ""
    batches = getattr(inner, "batch_sampler", None)
    sampler = getattr(inner if batches is None else batches, "sampler", None)
    if not hasattr(sampler, "state_dict") and getattr(type(sampler), "__iter__", None) in _STATELESS_ITERS:
        return (
            f"its sampler ({type(sampler).__module__}.{type(sampler).__name__}) has no state, so that a restart within "
            f"an epoch repeats some samples of it and skips others: {REMEDY}"
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
            f"random in the steps after it (dropout) is other than it would have been: {REMEDY}"
        )
    if getattr(sampler, "generator", None) is inner.generator and not inner.num_workers:
        return (
            "it shuffles by its own generator, so that after a restart within an epoch the order of the next epochs is "
            f"other than it would have been: {REMEDY}"
        )
    return ""


def read_loader_state(loader: Any) -> Any:
    """The state of a loader, to be saved. A torchdata loader that was given a state, and not iterated since, returns
    that state unchanged. Its state_dict() would begin the epoch: its workers would get what the sampler draws now, not
    what it draws once the loop has set the epoch."""
    inner = _find_torchdata_loader(loader)
    if inner is None:
        return loader.state_dict()
    given = inner.next_iter_state
    return _rewind_ended_pass(loader.state_dict()) if given is None else given


def load_loader_state(loader: Any, state: Any) -> None:
    """Gives a loader a state from `read_loader_state`, or from an older checkpoint."""
    loader.load_state_dict(state if _find_torchdata_loader(loader) is None else _rewind_ended_pass(state))


def _rewind_ended_pass(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A torchdata state; if its pass has ended, the next pass begins at the first sample. A StatefulDistributedSampler
    skips at its next draw the samples that its state counts as yielded. Without workers, torchdata draws nothing from
    the sampler for the ended pass. So the whole next pass would be skipped."""
    if not state.get("_iterator_finished") or "_snapshot" in state:
        return state
    return {**state, **{key: _reset_yielded(state[key]) for key in ("_index_sampler_state", "_sampler_iter_state")}}


def _reset_yielded(part: Any) -> Any:
    """`part`, in which the state of each StatefulDistributedSampler says that nothing was yielded."""
    if not isinstance(part, dict):
        return part
    return {"yielded": 0} if set(part) == {"yielded"} else {key: _reset_yielded(each) for key, each in part.items()}


@dataclass(frozen=True, slots=True)
class LoaderPosition:
    """How far a torchdata loader has read. `current_pass`: the present pass over its data; None if no iterator of it
    exists yet. `batches`: how many batches of it were handed out. `is_at_end`: whether the pass has ended."""

    current_pass: object
    batches: int
    is_at_end: bool = False


def find_position(loader: Any) -> LoaderPosition | None:
    """The position of a torchdata loader, or of one with drawn_batches() (ckpt.data has it); None for another loader.
    It asks no worker, and begins no epoch."""
    inner = _find_torchdata_loader(loader)
    if inner is None:
        return LoaderPosition(*loader.drawn_batches()) if hasattr(loader, "drawn_batches") else None
    if (given := inner.next_iter_state) is not None:
        return LoaderPosition(None, 0 if given["_iterator_finished"] else _count_batches(given))
    iterator = find_iterator(inner)
    if iterator is None:
        return LoaderPosition(None, 0)
    if inner is loader:
        return LoaderPosition(iterator._sampler_iter, iterator._num_yielded, iterator._finished)
    # An Accelerate loader: the loader inside is one batch ahead.
    state = loader.state_dict()
    return LoaderPosition(iterator._sampler_iter, _count_batches(state), state["_iterator_finished"])


def find_iterator(loader: Any) -> Any:
    """The newest iterator of a torchdata loader that the loop asked for; None if there is none, and for other loaders.
    An iterator that only state_dict() has made does not count."""
    inner = _find_torchdata_loader(loader)
    return None if inner is None or inner._initial_iter_for_state_dict else inner._iterator


def batches_per_pass(loader: Any) -> int | None:
    """The number of batches of one pass of a torchdata loader; None for an iterable dataset, and for other loaders."""
    inner = _find_torchdata_loader(loader)
    return None if inner is None or isinstance(inner.dataset, IterableDataset) else len(inner)


def is_stateless(loader: Any) -> bool:
    """Whether a torchdata loader has an iterable dataset, and neither the dataset nor its iterators have a state. The
    loader must have been iterated over before."""
    inner = _find_torchdata_loader(loader)
    if inner is None or not isinstance(inner.dataset, IterableDataset):
        return False
    state = loader.state_dict()
    parts = state["_snapshot"]["_worker_snapshots"].values() if "_snapshot" in state else (state,)
    return all(each["dataset_state"] is None and not _iterator_state(each) for each in parts)


def _iterator_state(part: Mapping[str, Any]) -> Any:
    return (part["fetcher_state"] or {}).get("dataset_iter_state")


def _count_batches(state: Mapping[str, Any]) -> int:
    """The number of batches handed out, according to a state."""
    if "_snapshot" in state:
        return int(state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"])
    return int(state["_num_yielded"])


def _find_torchdata_loader(loader: Any) -> Any:
    """The StatefulDataLoader that `loader` is or holds; else None."""
    inner = held_loader(loader)
    kinds = type(inner).__mro__
    is_one = any(kind.__name__ == "StatefulDataLoader" and kind.__module__.startswith("torchdata.") for kind in kinds)
    return inner if is_one else None

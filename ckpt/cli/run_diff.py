"""The comparison of two runs of one script, bit for bit: what `ckpt rehearse` reports."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt import reader

if TYPE_CHECKING:
    from ckpt.store.lineage import CommitRef
    from ckpt.store.run import Run as StoredRun


@dataclass(frozen=True)
class Compared:
    """The result of the comparison. `differences`: one line each, tensors first. `unused`: values that differ although
    neither run changed them after its first checkpoint, such as generators without a seed that nothing used.
    `before_the_kill`: what differed before the kill already, so that the restart is not the cause."""

    step: int
    differences: list[str]
    unused: list[str]
    before_the_kill: list[str]


def compare(straight: str, killed: str, back_at: int) -> Compared:
    """Compares the newest checkpoints of both runs bit for bit. Also compares the first checkpoints that both have, if
    they are from before the restart: at step `back_at` at the latest."""
    with reader.open(straight) as left, reader.open(killed) as right:
        lines = [run.view.history for run in (left, right)]
        first_steps = [{ref.identity.version: ref for ref in line} for line in lines]
        both = first_steps[0].keys() & first_steps[1].keys()
        common = min((version for version in both if version.step <= back_at), default=None)
        ends = [_Checkpoint(run.run, line[-1]) for run, line in zip((left, right), lines, strict=True)]
        steps = [end.step for end in ends]
        found = [f"step: {steps[0]} undisturbed, {steps[1]} after the kill"] if steps[0] != steps[1] else []
        found += _tensor_differences(*ends)
        unchanged = set(ends[0].values_by_path)
        # A run with only one checkpoint proves nothing.
        for run, line, end in zip((left, right), lines, ends, strict=True):
            unchanged &= (
                set(end.values_by_path) - set(_value_differences(_Checkpoint(run.run, line[0]), end))
                if len(line) > 1
                else set()
            )
        values = _value_differences(*ends)
        unused = [part for part in values if part in unchanged]
        early: list[str] = []
        if common is not None:
            begun = [_Checkpoint(run.run, refs[common]) for run, refs in zip((left, right), first_steps, strict=True)]
            early = [
                *_tensor_differences(*begun),
                *(f"value {path}" for part, path in _value_differences(*begun).items() if part not in unused),
            ]
        found += [f"value {path}" for part, path in values.items() if part not in unused]
    return Compared(steps[0], found, unused, early if found else [])


class _Checkpoint:
    """A checkpoint's tensors and values. `values_by_path`: the values, two levels deep, such as
    "rank=0['generators']['torch']", and the keys of the dicts above them."""

    def __init__(self, run: StoredRun, ref: CommitRef) -> None:
        from ckpt.store.reader import FrameReader, load_values, open_record

        self.step = ref.identity.version.step
        self.reader = FrameReader(run.backend, open_record(run.backend, ref, run.patience), run.patience)
        values = load_values(self.reader)
        others = {f"{coordinate} shared": tree for coordinate, tree in values.shared_by_coordinate.items()}
        trees = {"shared": values.shared, **others, **values.own_by_coordinate}
        self.values_by_path = {
            part: leaf for name, tree in trees.items() for part, leaf in _split_values(tree, name, 2)
        }


def _split_values(tree: Any, path: str, levels: int) -> Iterator[tuple[str, Any]]:
    from ckpt.format.values import encode
    from ckpt.store.diff import ORDER

    if not levels or not isinstance(tree, dict):
        yield path, tree
        return
    for key, branch in tree.items():
        yield from _split_values(branch, f"{path}[{key!r}]", levels - 1)
    keys = copy(tree)
    dict.update(keys, dict.fromkeys(tree))
    yield f"{path}{ORDER}", encode(keys)  # the order of the keys, and the kind of dict


def _tensor_differences(here: _Checkpoint, there: _Checkpoint) -> list[str]:
    from ckpt.store.diff import diff

    found = diff(here.reader, there.reader)
    lines = [f"tensor {name}: only in the undisturbed run" for name in found.removed]
    lines += [f"tensor {name}: only in the run that was killed" for name in found.added]
    lines += [f"tensor {name}: {mine} undisturbed, {other} after the kill" for name, mine, other in found.retyped]
    return lines + [f"tensor {each.name}: {each.elements} of {each.size} elements differ" for each in found.changed]


def _value_differences(here: _Checkpoint, there: _Checkpoint) -> dict[str, str]:
    """The parts that differ, each with the first differing path in it."""
    from ckpt.store.diff import differences

    found = {}
    for part in [*here.values_by_path, *(part for part in there.values_by_path if part not in here.values_by_path)]:
        if part not in here.values_by_path or part not in there.values_by_path:
            found[part] = part
        elif first := next(differences(here.values_by_path[part], there.values_by_path[part], part), None):
            found[part] = first
    return found

"""Rank targets: what a rank restores of its own values, the positions of loaders and the states of generators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.errors import UsageError
from ckpt.trainer.restore.tensor_requests import TensorRequests
from ckpt.trainer.state import generators, value_trees
from ckpt.trainer.state.loaders import load_loader_state
from ckpt.trainer.state.saved_values import RankValues, is_different
from ckpt.trainer.state.state_nodes import GeneratorNode, LoaderNode, StateNode
from ckpt.trainer.state.state_walk import StateWalker


@dataclass(frozen=True, slots=True)
class RankTargets:
    """`own`: what this coordinate saved on the same mesh; None on another mesh. `others`: what every rank saved on
    another mesh."""

    walker: StateWalker
    requests: TensorRequests
    own: RankValues | None
    others: Sequence[RankValues]

    @property
    def ranks(self) -> Sequence[RankValues]:
        """The ranks whose values are known."""
        return self.others if self.own is None else [self.own]

    def plan_loader(self, node: LoaderNode, strict: bool) -> None:
        """Plans the position of a loader. If as many data-parallel ranks saved it as there are now, each takes its own
        position. Otherwise the loader's reshard() divides the positions. Errors: UsageError if `strict` and it has
        none."""
        here, loader, path = self.walker.coordinate, node.value, node.path
        saved: dict[int, RankValues] = {}
        for rank in self.ranks:
            first = saved.setdefault(rank.data_rank, rank) if path in rank.loaders else None
            if first is not None and is_different(first.loaders[path], rank.loaders[path]):
                self.requests.note_difference(
                    "reshaped",
                    path,
                    f"{path} was saved at several positions by ranks that count as one data-parallel rank "
                    f"({rank.data}): one of them would be taken for all; save with a mesh= whose axes have other names",
                )
        world = max((rank.data_world for rank in saved.values()), default=0)
        is_same = self.own is not None or world == here.data_world
        if not (here.data_rank in saved if is_same else len(saved) == world > 0):
            self.requests.note_difference(
                "missing", path, f"the position of the loader {path} is not in the checkpoint"
            )
            return
        if is_same:
            state = value_trees.extract_tensors(saved[here.data_rank].loaders[path], path)
            self.requests.installs.append(lambda: load_loader_state(loader, state))
            return
        if hasattr(loader, "reshard"):
            states = [value_trees.extract_tensors(saved[rank].loaders[path], path) for rank in sorted(saved)]
            self.requests.installs.append(lambda: loader.reshard(states, here.data_rank, here.data_world))
            return
        line = (
            f"{path} was saved by {world} data-parallel ranks and there are {here.data_world} now; "
            f"{type(loader).__name__} has no reshard(states, rank, world) that would divide the positions anew"
        )
        if strict:
            raise UsageError(
                f"{line}. Start with {world} data-parallel ranks, give the loader that method, or pass strict=False: "
                "its data then starts from the beginning, and what was trained on already repeats"
            )
        self.requests.note_difference("missing", path, f"{line}: its data starts from the beginning and repeats")

    def plan_generator(self, node: GeneratorNode) -> None:
        if not any(f"state:{node.path}" in rank.generators for rank in self.ranks):
            line = f"the state of the generator {node.path} is not in the checkpoint"
            self.requests.note_difference("missing", node.path, line)

    def plan_streams(self, nodes: Sequence[StateNode], step: int) -> set[str]:
        """Plans the generators that this process has. Returns the names of those that can be restored. `step`: of the
        checkpoint."""
        streams = self.walker.find_streams(nodes)
        found = {name: stream for name, stream in streams.items() if self._can_restore(name, stream)}
        here, own, others = self.walker.coordinate, self.own, self.others
        self.requests.installs.append(lambda: generators.restore_streams(found, own, others, here, step))
        return set(found)

    def _can_restore(self, name: str, stream: generators.RandomStream) -> bool:
        """Whether a generator can take the state that this rank saved for it, if any. Another kind is a noted
        difference."""
        saved = self.own.generators if self.own is not None else {}
        if name not in saved or generators.is_same_kind(stream, saved[name]["state"]):
            return True
        path = name.removeprefix("state:")
        self.requests.note_difference("retyped", path, f"{path} is a generator of another kind than in the checkpoint")
        return False

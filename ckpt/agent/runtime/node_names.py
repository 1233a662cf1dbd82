"""The names of nodes in texts for people. Agents address each other by random names, also in the errors that they
exchange.

A text keeps these random names until it leaves for people: a trainer, an event, the log, `ckpt watch`. There each
becomes `node gpu-17 (ranks 4-7)`. A node without ranks, such as a memory-only node, is named by its address: `node
10.0.0.9:7700`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt.ipc.node_list import NODES_MAX

if TYPE_CHECKING:
    from ckpt.ipc.node_list import NodeAt

RUNS_SHOWN = 4  # ranges of consecutive ranks
# The text fields of messages to trainers.
TEXT_FIELDS = ("message", "error", "why")
# An agent's name that stands alone. Names inside a key or an identity do not match.
_NAME = re.compile(r"(?:\b(agent) |\bnode )?(?<![\w/.-])([0-9a-f]{16})(?![\w/-])")


class NodeNames:
    """Replaces agents' names in texts. `nodes`: the readable name by agent name, of the nodes in the newest starts."""

    def __init__(self) -> None:
        self.names_by_agent: dict[str, str] = {}

    def add_nodes(self, nodes: Iterable[NodeAt]) -> None:
        for node in nodes:
            if node.ranks or node.name not in self.names_by_agent:
                # Removed first, so that the node moves to the end of the dict as the newest.
                self.names_by_agent.pop(node.name, None)
                self.names_by_agent[node.name] = _readable_name(node)
        while len(self.names_by_agent) > 2 * NODES_MAX:
            del self.names_by_agent[next(iter(self.names_by_agent))]

    def translate_text(self, text: str) -> str:
        return replace_agent_names(text, self.names_by_agent)

    def translate_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The message to a trainer, with readable names in its texts."""
        texts = {key: self.translate_text(fields[key]) for key in TEXT_FIELDS if isinstance(fields.get(key), str)}
        return {**fields, **texts} if texts else fields


def replace_agent_names(text: str, nodes: Mapping[str, str]) -> str:
    """The text with each agent's name replaced by its node's readable name. An unknown agent keeps its name."""

    def one(found: re.Match[str]) -> str:
        called = nodes.get(found[2])
        if called is None:
            return found[0]
        return f"the agent of {called}" if found[1] else called

    return _NAME.sub(one, text)


def _readable_name(node: NodeAt) -> str:
    if not node.ranks:
        return f"node {node.addresses[0]}" if node.addresses else f"agent {node.name}"
    host = node.host or (node.addresses[0].host if node.addresses else node.name)
    return f"node {host} (rank{'s' * (len(node.ranks) > 1)} {_format_ranges(sorted(node.ranks))})"


def _format_ranges(ranks: Sequence[int]) -> str:
    """Ranks as ranges: `0-3, 8`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    texts = ["-".join(map(str, run)) for run in runs[:RUNS_SHOWN]]
    return ", ".join(texts + ["..."] * (len(runs) > RUNS_SHOWN))

"""What people are told a node is called. Agents call each other by random names, and tell each other what goes wrong
before a person hears of it. So the names stay in a text until it leaves for people (a trainer, an event, the log,
`ckpt watch`), and are replaced there, by one form: `node gpu-17 (ranks 4-7)`; a node that has no ranks, as a
memory-only one, is called by where it listens: `node 10.0.0.9:7700`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt.ipc.node_list import NODES_MAX

if TYPE_CHECKING:
    from ckpt.ipc.node_list import NodeAt

RUNS_SHOWN = 4  # of ranks that follow each other
WORDS = ("message", "error", "why")  # the fields of messages to trainers that are texts
# Not where it is part of a key or of an identity.
_NAME = re.compile(r"(?:\b(agent) |\bnode )?(?<![\w/.-])([0-9a-f]{16})(?![\w/-])")


class NodeNames:
    """`nodes`: by the names of their agents; as this agent knows them, of the newest starts."""

    def __init__(self) -> None:
        self.nodes: dict[str, str] = {}

    def learn(self, nodes: Iterable[NodeAt]) -> None:
        for node in nodes:
            if node.ranks or node.name not in self.nodes:
                self.nodes.pop(node.name, None)  # it is the newest now
                self.nodes[node.name] = _form(node)
        while len(self.nodes) > 2 * NODES_MAX:
            del self.nodes[next(iter(self.nodes))]

    def said(self, text: str) -> str:
        return said(text, self.nodes)

    def sent(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A message to a trainer, with its texts as people read them."""
        texts = {key: self.said(fields[key]) for key in WORDS if isinstance(fields.get(key), str)}
        return {**fields, **texts} if texts else fields


def said(text: str, nodes: Mapping[str, str]) -> str:
    """The text with what the nodes are called instead of their agents' names. Who is not known keeps that."""

    def one(found: re.Match[str]) -> str:
        called = nodes.get(found[2])
        if called is None:
            return found[0]
        return f"the agent of {called}" if found[1] else called

    return _NAME.sub(one, text)


def _form(node: NodeAt) -> str:
    if not node.ranks:
        return f"node {node.addresses[0]}" if node.addresses else f"agent {node.name}"
    host = node.host or (node.addresses[0].host if node.addresses else node.name)
    return f"node {host} (rank{'s' * (len(node.ranks) > 1)} {_runs(sorted(node.ranks))})"


def _runs(ranks: Sequence[int]) -> str:
    """`0-3, 8`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    texts = ["-".join(map(str, run)) for run in runs[:RUNS_SHOWN]]
    return ", ".join(texts + ["..."] * (len(runs) > RUNS_SHOWN))

"""What a part of an agent is made with, where the other parts do not matter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from ckpt.agent.node.node_context import NodeContext
from ckpt.agent.node.node_jobs import NodeJobs


def bare_context(**given: Any) -> NodeContext:
    """A context without a network, store, threads or timers. `given`: what the test needs of them."""
    context = SimpleNamespace(
        jobs=NodeJobs(),
        network=None,
        server=SimpleNamespace(call_later=lambda delay_s, what: None, post=lambda what: what()),
        workers=SimpleNamespace(free_bytes=lambda: 0),
        store=SimpleNamespace(claims=SimpleNamespace(own_epochs=set(), refusal_reasons={})),
        emit_event=lambda event: None,
    )
    vars(context).update(given)
    return cast(NodeContext, context)

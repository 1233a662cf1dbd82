"""What an adapter of PEFT keeps outside its module's state_dict()."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.errors import UsageError
from ckpt.trainer.state.state_nodes import ModuleNode, ObjectNode, StateNode


def check_adapters(nodes: Sequence[StateNode]) -> None:
    """Errors: UsageError if a module has an AdaLoRA adapter, and no object of the state holds its scores."""
    held = {
        id(value)
        for node in nodes
        if isinstance(node, ObjectNode)
        for value in getattr(node.value, "__dict__", {}).values()
    }
    for node in nodes:
        for name, module in node.value.named_modules() if isinstance(node, ModuleNode) else ():
            allocator = vars(module).get("rankallocator")
            if allocator is not None and id(allocator) not in held:
                path = ".".join(filter(None, (f"state[{node.path!r}]", name, "rankallocator")))
                raise UsageError(
                    f"{path} keeps AdaLoRA's importance scores, which state_dict() leaves out, so a restart would mask "
                    "other ranks. Put ckpt.integrations.peft.AdaLoraScores(model) into the state"
                )

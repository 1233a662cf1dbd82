"""Checks of a state: what its modules and adapters would leave out without a word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt.errors import UsageError
from ckpt.trainer.state import names
from ckpt.trainer.state.optimizers import OptimizerView
from ckpt.trainer.state.shard import storage_addresses
from ckpt.trainer.state.state_nodes import ModuleNode, NamedTensor, ObjectNode, StateNode


def check_trained_saved(
    all_nodes: Sequence[StateNode], found: Mapping[str, list[NamedTensor]], views: Mapping[str, OptimizerView]
) -> None:
    """Raises UsageError for a trained parameter that the state_dict() of its module leaves out. A module is not checked
    if its state_dict() gives tensors in other memory: they may be copies of the parameter."""
    for node in (node for node in all_nodes if isinstance(node, ModuleNode) and names.is_custom(node.value)):
        sites = {id(site.tensor): site for site in names.sites(node.value)}
        if storage_addresses(named.tensor for named in found[node.path]) - storage_addresses(
            site.tensor for site in sites.values()
        ):
            continue
        kept = storage_addresses(named.tensor for each in found.values() for named in each)
        for view in views.values():
            for tensor in (param.tensor for line in view.params_by_group for param in line):
                if tensor.requires_grad and id(tensor) in sites and storage_addresses([tensor]) - kept:
                    raise UsageError(
                        f"state[{node.path!r}]: its state_dict() leaves out {sites[id(tensor)].name}, which "
                        f"state[{view.path!r}] trains; have it included, or freeze it (requires_grad_(False))"
                    )


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

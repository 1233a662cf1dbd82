"""ckpt for PEFT: what AdaLoRA keeps outside its model's state_dict().

    state = {"model": model, "optim": optim, "scores": ckpt.integrations.peft.AdaLoraScores(model)}

AdaLoRA masks the ranks that matter least, by scores that it averages over the steps. Without them, a restart masks
other ranks. Needs no import of peft.
"""

from __future__ import annotations

from typing import Any

from torch import nn

import ckpt

AVERAGES = ("ipt", "exp_avg_ipt", "exp_avg_unc")


class AdaLoraScores:
    """The importance scores and the masks of a model's AdaLoRA adapter, an object of the state.

    model: the PEFT model, wrapped (DDP) or not. Errors: UsageError if it has no such adapter."""

    def __init__(self, model: nn.Module) -> None:
        tuner = _find_tuner(model)
        if tuner is None:
            raise ckpt.UsageError(
                f"this {type(model).__name__} has no AdaLoRA adapter: leave AdaLoraScores out of the state"
            )
        self._allocator = tuner.rankallocator
        self._config = tuner.peft_config[tuner.trainable_adapter_name]

    def state_dict(self) -> dict[str, Any]:
        averages = {name: getattr(self._allocator, name) for name in AVERAGES}
        return {**averages, "rank_pattern": self._config.rank_pattern}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in AVERAGES:
            setattr(self._allocator, name, state[name])
        self._config.rank_pattern = state["rank_pattern"]


def find_scores(model: nn.Module) -> dict[str, AdaLoraScores]:
    """A part of a state: the scores of the model's AdaLoRA adapter, if it has one."""
    return {} if _find_tuner(model) is None else {"adalora": AdaLoraScores(model)}


def _find_tuner(model: nn.Module) -> Any:
    return next((each for each in model.modules() if "rankallocator" in vars(each)), None)

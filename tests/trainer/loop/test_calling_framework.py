"""A plain Checkpointer inside a framework's loop is told, on entry, what of that loop it does not save."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.checkpointer.loops import wait_agent_gone
from tests.checkpointer.runs import Seen

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own
STEPS = 3


class Loss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


def rows() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.ones(2) * n} for n in range(4)]


def train_with_transformers(folder: Path, ours: Any) -> None:
    transformers = pytest.importorskip("transformers")

    class Plain(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            self.ck = ours({"model": kw["model"]}, state).__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            self.ck.step()

        def on_train_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            self.ck.__exit__(None, None, None)

    arguments = transformers.TrainingArguments(
        folder / "out", max_steps=STEPS, per_device_train_batch_size=1, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    callback = Plain() if callable(ours) else ours
    transformers.Trainer(Loss(), arguments, train_dataset=rows(), callbacks=[callback]).train()


def train_with_lightning(folder: Path, ours: Any) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Loss()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.inner(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    class Plain(lightning.Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.ck = ours({"model": module.inner}, trainer.fit_loop).__enter__()

        def on_train_batch_end(self, *unused: Any) -> None:
            self.ck.step()

        def on_fit_end(self, *unused: Any) -> None:
            self.ck.__exit__(None, None, None)

    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=not callable(ours),
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[Plain() if callable(ours) else ours],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(rows()))


def train_with_accelerate(folder: Path, ours: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    inner = Loss()
    optim = torch.optim.SGD(inner.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(inner, optim, torch.utils.data.DataLoader(rows()))
    with ours({"model": model}, accelerator) as ck:
        for _, batch in zip(ck.steps(STEPS), loader, strict=False):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()


LOOPS: dict[str, tuple[Callable[[Path, Any], None], str]] = {
    "hf": (train_with_transformers, "Callback"),
    "lightning": (train_with_lightning, "Checkpoint"),
    "accelerate": (train_with_accelerate, "attach"),
}


def told(folder: Path, train: Callable[[Path, Any], None], more: Callable[[Any], dict[str, Any]]) -> list[str]:
    seen = Seen()

    def enter(state: dict[str, Any], own: Any) -> Any:
        return ckpt.Checkpointer(folder / "run", state | more(own), sinks=(seen,))

    train(folder, enter)
    wait_agent_gone(folder / "run")
    return [event.message for event in seen.events if event.name == "framework.unsaved"]


@pytest.mark.parametrize("name", LOOPS)
def test_a_plain_checkpointer_in_a_frameworks_loop_is_told_of_the_adapter(name: str, tmp_path: Path) -> None:
    train, way = LOOPS[name]
    (text,) = told(tmp_path, train, lambda own: {})
    assert f"ckpt.integrations.{name}.{way}(" in text
    assert "docs/guides/" in text


def test_a_state_that_has_the_frameworks_own_counts_is_not_told(tmp_path: Path) -> None:
    counts = {"hf": lambda own: {"trainer": {"global_step": 0}}, "lightning": lambda own: {"loop": own}}
    for name, more in counts.items():
        assert told(tmp_path / name, LOOPS[name][0], more) == []


@pytest.mark.parametrize("name", LOOPS)
def test_an_adapter_of_ckpt_is_not_told(name: str, tmp_path: Path) -> None:
    train, way = LOOPS[name]
    adapter = getattr(importlib.import_module(f"ckpt.integrations.{name}"), way)
    seen = Seen()
    if name == "accelerate":
        train(tmp_path, lambda state, accelerator: adapter(accelerator, tmp_path / "run", sinks=(seen,)))
    else:
        train(tmp_path, adapter(tmp_path / "run", sinks=(seen,)))
    wait_agent_gone(tmp_path / "run")
    assert [event.name for event in seen.events if event.name == "framework.unsaved"] == []
    assert [event.name for event in seen.events if event.name == "receipt"] == ["receipt"]


def test_a_loop_that_is_no_frameworks_is_not_told(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    kept = transformers.TrainerState()  # a framework that is imported, and an object of it
    model = torch.nn.Linear(1, 1)
    seen = Seen()
    with ckpt.Checkpointer(tmp_path, {"model": model, "step": kept.global_step}, sinks=(seen,)) as ck:
        ck.step()
    wait_agent_gone(tmp_path)
    assert not [event for event in seen.events if event.name.startswith("framework.")]


def test_the_locals_that_a_script_has_asked_for_stay(tmp_path: Path) -> None:
    pytest.importorskip("accelerate.accelerator")
    learning_rate = 0.1
    config = locals()
    with ckpt.Checkpointer(tmp_path / "run", {"model": torch.nn.Linear(1, 1)}) as ck:
        for _ in ck.steps(1):
            pass
    assert config["learning_rate"] == learning_rate

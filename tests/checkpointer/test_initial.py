"""init=: weights to begin with, from the files that other tools write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckpt
from ckpt.storage import open as open_store
from ckpt.store.commit import Committer
from ckpt.store.lineage import Claim
from ckpt.store.run import Run
from tests.checkpointer.runs import Seen, restore, run
from tests.store.build import Tensor, epoch, identity, snapshot


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {name: value.clone() for name, value in nn.Linear(4, 3).state_dict().items()}


def one_file(folder: Path) -> Path:
    save_file(weights(), folder / "w.safetensors")
    return folder / "w.safetensors"


def several_files(folder: Path) -> Path:
    """As large models are shared: tensors spread over files, and other files beside them."""
    (folder / "w").mkdir()
    for name, value in weights().items():
        save_file({name: value}, folder / "w" / f"{name}.safetensors")
    (folder / "w" / "config.json").write_text("{}")
    return folder / "w"


def with_our_names(folder: Path) -> Path:
    """What `ckpt restore --to` writes."""
    save_file({f"model.{name}": value for name, value in weights().items()}, folder / "ours.safetensors")
    return folder / "ours.safetensors"


@pytest.mark.parametrize("source", [one_file, several_files, with_our_names])
def test_training_begins_with_the_weights_of_a_file(tmp_path: Path, source) -> None:
    path = source(tmp_path)
    model = nn.Linear(4, 3)
    with ckpt.Checkpointer(tmp_path / "run", {"model": model, "other": torch.ones(2)}, init=path) as ck:
        assert (ck.restored.step, ck.restored.level) == (0, "none")
        assert str(path) in ck.restored.source
        for name, value in model.state_dict().items():
            assert torch.equal(value, weights()[name])
        for _ in ck.steps(1):
            with torch.no_grad():
                model.weight.fill_(7.0)
    again = nn.Linear(4, 3)
    ck = restore(tmp_path / "run", {"model": again, "other": torch.zeros(2)}, init=path)
    assert ck.restored.step == 1, "init= counts only where the run has no checkpoint"
    assert torch.all(again.weight == 7.0)


def pickled(folder: Path) -> Path:
    torch.save(weights(), folder / "model.pt")
    return folder / "model.pt"


@pytest.mark.parametrize(
    ("source", "model", "strict", "said"),
    [
        (one_file, nn.Sequential(nn.Linear(4, 5)), True, r"^init='{path}' .* model\.0\.weight is not there"),
        (several_files, nn.Linear(4, 5), True, r"model\.weight has shape \[3, 4\] there and \[5, 4\] here"),
        (one_file, nn.Linear(4, 5), True, "init='{path}' does not fit.*strict=False"),
        (one_file, nn.Linear(9, 9), False, r"nothing of init=.* fits the modules: model\.bias has shape"),
        (pickled, nn.Linear(4, 3), True, r"model\.pt' is no \.safetensors file.*save_file\(torch\.load"),
    ],
    ids=["a name", "a shape", "the file", "not strict", "pickled"],
)
def test_weights_that_do_not_fit_are_named_and_change_nothing(
    tmp_path: Path, source, model: nn.Module, strict: bool, said: str
) -> None:
    path, before = source(tmp_path), [parameter.detach().clone() for parameter in model.parameters()]
    error = ckpt.UsageError if source is pickled else ckpt.StateMismatch
    with pytest.raises(error, match=said.replace("{path}", re.escape(str(path)))):
        ckpt.Checkpointer(tmp_path / "run", {"model": model}, init=path, strict=strict).__enter__()
    assert all(map(torch.equal, model.parameters(), before))


class SaysItself(nn.Linear):
    """A module with a state_dict() of its own."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super().state_dict(*args, **kwargs)


@pytest.mark.parametrize("kind", [nn.Linear, SaysItself])
def test_without_strict_a_new_head_keeps_its_weights_and_the_rest_is_filled(tmp_path: Path, kind) -> None:
    """From a file and from a run; what is left as it was is said."""
    body = nn.Linear(4, 3)
    run(tmp_path / "source", 1, {"model": nn.ModuleDict({"body": body, "head": kind(3, 1)})})
    save_file({f"body.{name}": value for name, value in body.state_dict().items()}, tmp_path / "w.safetensors")
    for source, why in (("source", "has shape"), ("w.safetensors", "is not there")):
        seen, head = Seen(), kind(3, 5)
        model = nn.ModuleDict({"body": nn.Linear(4, 3), "head": head, "tail": kind(2, 2)})
        before = {name: value.clone() for name, value in model.state_dict().items() if not name.startswith("body")}
        url, given = tmp_path / f"from-{source}", {"init": tmp_path / source, "strict": False}
        with ckpt.Checkpointer(url, {"model": model}, sinks=(seen,), **given):
            now = model.state_dict()
        assert torch.equal(now["body.weight"], body.weight)
        assert all(torch.equal(now[name], value) for name, value in before.items())
        (event,) = seen.named("init.partial")
        assert f"model.head.weight {why}" in event.message
        assert "model.tail.bias is not there" in event.message


class Tied(nn.Module):
    """`head` is `body.weight`, under its own name too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)
        self.head.weight = self.body.weight


@pytest.mark.parametrize("name", ["body.weight", "head.weight", "model.head.weight"])
def test_a_tied_weight_is_found_under_any_of_its_names(tmp_path: Path, name: str) -> None:
    model, wanted = Tied(), weights()
    save_file({name: wanted["weight"], "body.bias": wanted["bias"]}, tmp_path / "w.safetensors")
    with ckpt.Checkpointer(tmp_path / "run", {"model": model}, init=tmp_path / "w.safetensors"):
        assert torch.equal(model.head.weight, wanted["weight"])
        assert model.head.weight is model.body.weight


@pytest.mark.parametrize("named", ["module's own", "canonical"])
def test_modules_anywhere_in_the_state_are_filled(tmp_path: Path, named: str) -> None:
    """Within lists and dicts, and what another key of the state names first."""
    model, teacher, wanted = nn.Linear(4, 3), nn.Linear(4, 3), weights()
    shards = {"w": ckpt.Shard(model.weight, (3, 4), (0, 0))}
    state = {"shards": shards, "model": model, "nets": {"teachers": [teacher]}, "again": model}
    prefixes = ("model.", "nets.teachers.0.") if named == "canonical" else ("",)
    save_file({f"{prefix}{n}": v.clone() for prefix in prefixes for n, v in wanted.items()}, tmp_path / "w.safetensors")
    with ckpt.Checkpointer(tmp_path / "run", state, init=tmp_path / "w.safetensors"):
        for module in (model, teacher):
            assert all(torch.equal(value, wanted[n]) for n, value in module.state_dict().items())
    with (
        pytest.raises(ckpt.StateMismatch, match=r"nets\.deep\.0\.weight is not there"),
        ckpt.Checkpointer(
            tmp_path / "other", {"nets": {"deep": nn.Sequential(nn.Linear(4, 3))}}, init=tmp_path / "w.safetensors"
        ),
    ):
        raise AssertionError("it was entered")


def test_weights_of_another_dtype_are_converted_and_that_is_said(tmp_path: Path) -> None:
    model, seen = nn.Linear(4, 3).to(torch.bfloat16), Seen()
    with ckpt.Checkpointer(tmp_path / "run", {"model": model}, init=one_file(tmp_path), sinks=(seen,)):
        assert torch.equal(model.weight, weights()["weight"].bfloat16())
    (event,) = seen.named("init.cast")
    assert event.loud
    assert "model.weight from float32 to bfloat16" in event.message


class Turned(nn.Linear):
    """Files of it that do not say their version are turned."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version") != 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].T
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_a_module_is_told_in_which_version_of_its_format_a_run_saved_it(tmp_path: Path) -> None:
    saved, other = nn.Sequential(Turned(3, 3)), nn.Sequential(Turned(3, 3))
    run(tmp_path / "source", 1, {"model": saved})
    with ckpt.Checkpointer(tmp_path / "run", {"model": other}, init=tmp_path / "source"):
        assert torch.equal(other[0].weight, saved[0].weight)


def a_run_whose_ranks_differed(folder: Path, **tensors: tuple[torch.Tensor, ...]) -> Path:
    """The URL of a run: each tensor once, or one of each rank's own."""
    listed = [
        (name, Tensor("float32", each.numpy(), owner=f"rank={rank}" if len(held) > 1 else ""))
        for name, held in tensors.items()
        for rank, each in enumerate(held)
    ]
    store = open_store(str(folder))
    Run(store).put_claim(Claim(epoch(1), None))
    made = snapshot(listed)
    Committer(store, "w1").commit(identity(1, 1), made.manifest, made.frame, check=lambda: None)
    store.close()
    return folder


@pytest.mark.parametrize("hooked", [False, True])
def test_buffers_that_differed_between_the_ranks_of_a_run_are_those_of_the_first(tmp_path: Path, hooked: bool) -> None:
    """The statistics of a BatchNorm under DDP."""
    model = nn.BatchNorm1d(3, affine=False)
    model.num_batches_tracked = None
    if hooked:
        model.register_state_dict_post_hook(lambda *_: None)
    means, variance = (torch.full((3,), 1.0), torch.full((3,), 2.0)), torch.full((3,), 3.0)
    tensors = {"model.running_mean": means, "model.running_var": (variance,)}
    url, seen = a_run_whose_ranks_differed(tmp_path / "source", **tensors), Seen()
    with ckpt.Checkpointer(tmp_path / "run", {"model": model}, init=url, sinks=(seen,)):
        assert torch.equal(model.running_mean, means[0])
        assert torch.equal(model.running_var, variance)
    (event,) = seen.named("restore.differed")
    assert event.loud
    assert event.data["names"] == ["model.running_mean"]


def test_parameters_that_differed_between_the_ranks_of_a_run_are_not_taken_from_one(tmp_path: Path) -> None:
    tensors = {"model.weight": (torch.ones(3, 4), torch.zeros(3, 4)), "model.bias": (torch.ones(3),)}
    url = a_run_whose_ranks_differed(tmp_path / "source", **tensors)
    with pytest.raises(ckpt.StateMismatch, match=r"model\.weight is not there"):
        ckpt.Checkpointer(tmp_path / "run", {"model": nn.Linear(4, 3)}, init=url).__enter__()

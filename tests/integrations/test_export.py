"""ckpt.Export: what is exported while training goes on is what Hugging Face's libraries load."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckpt
from tests.integrations.forked import Forked
from tests.integrations.scripts.export_train import PROBE

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft under transformers
SCRIPT = Path(__file__).parent / "scripts" / "export_train.py"
PRELOADED = ("transformers.models.llama", "peft", "torch.distributed.fsdp")


def run(folder: Path, *args: str, world: int = 0) -> Forked:
    script = Forked(SCRIPT, folder / "records", (str(folder), *args), world)
    script.run()
    return script


def exported(folder: Path) -> list[str]:
    return sorted(each.name for each in (folder / "out").iterdir() if each.name.startswith("step"))


@pytest.mark.parametrize(("model", "world"), [("plain", 0), ("tied", 0), ("fsdp", 2)])
def test_transformers_loads_an_export_to_the_last_bit(tmp_path: Path, model: str, world: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run(tmp_path, "--model", model, world=world)
    assert exported(tmp_path) == ["step-3", "step-6", "step-7"]
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "step-7")
    assert type(found).__name__ == "LlamaForCausalLM"
    assert torch.equal(found(input_ids=PROBE).logits, torch.load(tmp_path / "logits.pt"))
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "step-7").eos_token == "b"


def test_peft_loads_the_adapter_that_was_exported(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run(tmp_path, "--model", "lora")
    found = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "out/step-7")
    assert torch.equal(found(input_ids=PROBE).logits, torch.load(tmp_path / "logits.pt"))
    assert sum(each.numel() for each in load_file(tmp_path / "out/step-7/adapter_model.safetensors").values()) < 2500


def test_an_export_is_converted_and_its_config_says_so(tmp_path: Path) -> None:
    run(tmp_path, "--dtype", "bfloat16", "--steps", "3")
    folder = tmp_path / "out" / "step-3"
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert {each.dtype for each in load_file(next(folder.glob("*.safetensors"))).values()} == {torch.bfloat16}


def train(folder: Path, state: dict[str, object], export: ckpt.Export) -> list[ckpt.Event]:
    events: list[ckpt.Event] = []
    with ckpt.Checkpointer(folder / "run", state, export=export, sinks=(events.append,)) as ck:
        for _ in ck.steps(2):
            pass
    return [each for each in events if each.name.startswith("export")]


def test_a_step_that_is_saved_twice_is_exported_once_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "out" / "uploading").mkdir(parents=True)
    events: list[ckpt.Event] = []
    state, export = {"model": nn.Linear(2, 2), "n": 0}, ckpt.Export(tmp_path / "out", every=2)
    with ckpt.Checkpointer(tmp_path / "run", state, export=export, sinks=(events.append,)) as ck:
        for _ in ck.steps(2):
            pass
        ck.save().wait("store")
        while not (tmp_path / "out" / "step-2").exists():
            time.sleep(0.01)
        ck.state["n"] = 7  # so that the exit saves the step again
    assert [each.name for each in events if each.name.startswith("export")] == ["export.done"]
    assert (tmp_path / "out" / "uploading").exists()


def test_names_are_mapped_and_files_beside_keep_their_folders(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out/step-2"
    for name in ("config.json", "additional_chat_templates/tool.jinja", ".git/config"):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(name)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    names = {r"^(\d+)\.": r"layers.\1.", "weight$": "w"}
    train(tmp_path, {"ema": model}, ckpt.Export(out.parent, of="ema", names=names, beside=[base]))
    found = load_file(out / "model-00001-of-00001.safetensors")
    assert found.keys() == {"layers.0.w", "layers.0.bias", "layers.1.w", "layers.1.bias"}
    assert torch.equal(found["layers.1.w"], model[1].weight)
    assert (out / "additional_chat_templates/tool.jinja").read_text() == "additional_chat_templates/tool.jinja"
    assert (out / "config.json").read_text() == "config.json"
    assert not (out / ".git").exists()


def test_an_export_that_fails_is_said_and_loses_no_checkpoint(tmp_path: Path) -> None:
    events = train(tmp_path, {"model": nn.Linear(2, 2)}, ckpt.Export(tmp_path / "out", names={"absent": "x"}))
    assert [(each.name, each.loud) for each in events] == [("export.failed", True)]
    assert "no tensor's name matches 'absent'" in events[0].message
    with ckpt.open(tmp_path / "run") as reader:
        assert reader.newest.step == 2


def test_the_next_start_makes_up_for_an_export_that_was_killed(tmp_path: Path) -> None:
    model, out = nn.Linear(2, 2), tmp_path / "out"
    train(tmp_path, {"model": model}, ckpt.Export(out))
    (out / "step-2").rename(out / ".step-2.0a0b0c0d.part")  # as SIGKILL of the agent leaves it
    train(tmp_path, {"model": model}, ckpt.Export(out))
    assert [exported(tmp_path), list(out.glob("*.part"))] == [["step-2"], []]


def test_an_export_of_another_run_is_left_and_that_is_said(tmp_path: Path) -> None:
    first, export = nn.Linear(2, 2), ckpt.Export(tmp_path / "out")
    train(tmp_path / "a", {"model": first}, export)
    events = train(tmp_path / "b", {"model": nn.Linear(2, 2)}, export)
    assert [(each.name, each.loud) for each in events] == [("export.failed", True)]
    assert "out/step-2 is an export of another checkpoint: move it away" in events[0].message
    found = load_file(tmp_path / "out/step-2/model-00001-of-00001.safetensors")
    assert torch.equal(found["weight"], first.weight)
    assert train(tmp_path / "a", {"model": first}, export) == []


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("net", {}, "it has net"),
        ("model", {"dtype": "int3"}, "one of float16"),
        ("model", {"beside": [7]}, "has int"),
        ("model", {"beside": ["absent.json"]}, "absent.json"),
        ("model", {"beside": ["base"]}, r"base/model\.safetensors cannot be copied beside the weights"),
    ],
)
def test_an_export_that_cannot_be_made_is_refused_at_entry(
    tmp_path: Path, name: str, options: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    Path("base/model.safetensors").touch()
    with pytest.raises(ckpt.UsageError, match=says):
        train(tmp_path, {name: nn.Linear(1, 1)}, ckpt.Export(tmp_path / "out", **options))

"""ckpt as the storage of torch.distributed.checkpoint: what torch's own tests of its storage promise, and kills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.testing._internal.two_tensor import TwoTensor

import ckpt
from ckpt.integrations.dcp import Reader, Writer
from tests.cli.stores import ckpt as command
from tests.integrations.dcp_states import flat, mixed_state, zeros
from tests.integrations.runs import Script

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:ComplexHalf")


def save(url: Path, state: dict[str, object], **more: object) -> None:
    dcp.save(state, storage_writer=Writer(url), **more)


def test_what_is_loaded_equals_what_was_saved_to_the_last_bit(tmp_path: Path) -> None:
    state = mixed_state()
    save(tmp_path / "run", state)
    found = zeros(state)
    dcp.load(found, storage_reader=Reader(tmp_path / "run"))
    assert flat(found) == flat(state)


def test_a_saved_checkpoint_is_one_of_ckpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = mixed_state()
    save(tmp_path / "run", state, checkpoint_id="first")
    dcp.save({"w": torch.ones(3)}, storage_writer=Writer(tmp_path / "run", step=40))
    steps = [each["step"] for each in command(monkeypatch, "ls", tmp_path / "run", "--json").json["checkpoints"]]
    assert steps == [0, 40]
    assert command(monkeypatch, "verify", tmp_path / "run").code == 0
    to = tmp_path / "x.safetensors"
    assert command(monkeypatch, "restore", tmp_path / "run", "--step", 0, "--to", to, "--only", "large").code == 0
    with ckpt.open(tmp_path / "run") as run:
        first = run.find(0)
        assert torch.equal(first.torch_tensor("transposed"), state["transposed"])
        assert set(first.values()["dcp"]["bytes"]) == {"blob", "list.0", "list.1.text", "list.2"}


def test_another_version_of_torch_is_told_once_and_goes_on() -> None:
    code = 'import torch; torch.__version__ = "9.1.0"; from ckpt.integrations.dcp import Writer; Writer("x")'
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was tested with torch 2.13; this is 9.1.0") == 1


def test_a_part_can_be_loaded(tmp_path: Path) -> None:
    state = {"model": {"a": torch.ones(3), "b": torch.ones(4)}, "step": 7}
    save(tmp_path, state)
    part = {"model": {"b": torch.zeros(4)}}
    dcp.load(part, storage_reader=Reader(tmp_path))
    assert part["model"]["b"].tolist() == [1.0] * 4
    whole = _load_state_dict_from_keys(storage_reader=Reader(tmp_path))
    assert whole["step"] == 7
    assert whole["model"]["a"].tolist() == [1.0] * 3
    assert _load_state_dict_from_keys("model.a", storage_reader=Reader(tmp_path)).keys() == {"model"}


def test_missing_keys_and_other_shapes_are_errors_unless_allowed(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(3)})
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: b"):
        dcp.load({"b": torch.ones(3)}, storage_reader=Reader(tmp_path))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"a": torch.ones(4)}, storage_reader=Reader(tmp_path))
    found = {"a": torch.zeros(3), "b": torch.zeros(3)}
    dcp.load(found, storage_reader=Reader(tmp_path), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert (found["a"].sum(), found["b"].sum()) == (3, 0)


def test_planners_that_flatten_nothing_or_convert_are_followed(tmp_path: Path) -> None:
    class HalfPlanner(DefaultSavePlanner):
        def create_local_plan(self) -> dcp.SavePlan:
            self.state_dict = {key: each.half() for key, each in self.state_dict.items()}
            return super().create_local_plan()

    save(tmp_path, {"nested": {"x": 1}, "t": torch.ones(2)}, planner=DefaultSavePlanner(flatten_state_dict=False))
    found = {"nested": None, "t": torch.zeros(2)}
    dcp.load(found, storage_reader=Reader(tmp_path), planner=DefaultLoadPlanner(False, False))
    assert found["nested"] == {"x": 1}
    save(tmp_path, {"t": torch.full((2,), 0.1)}, planner=HalfPlanner())
    dcp.load(found := {"t": torch.zeros(2)}, storage_reader=Reader(tmp_path))
    assert found["t"].tolist() == [torch.tensor(0.1).half().item()] * 2


def test_the_newest_save_of_an_id_is_loaded_and_without_an_id_the_newest(tmp_path: Path) -> None:
    for number, name in enumerate(["a/1", "b", "a/1", None]):
        save(tmp_path, {"n": number}, checkpoint_id=name)
    for name, number in ((Path("a/1"), 2), ("b", 1), (None, 3)):
        dcp.load(found := {"n": -1}, storage_reader=Reader(tmp_path), checkpoint_id=name)
        assert found["n"] == number
    dcp.load(found := {"n": -1}, storage_reader=Reader(tmp_path, step=1))
    assert found["n"] == 1
    with pytest.raises(CheckpointException, match=r"no dcp\.save with checkpoint_id='c' is there"):
        dcp.load({"n": -1}, storage_reader=Reader(tmp_path), checkpoint_id="c")


def test_a_save_of_an_earlier_step_leaves_the_later_ones_on_a_branch(tmp_path: Path) -> None:
    for step in (10, 20, 30, 20):
        dcp.save({"n": step}, storage_writer=Writer(tmp_path, step=step))
    with ckpt.open(tmp_path) as run:
        assert [each.step for each in run.checkpoints] == [10, 20]
        assert sorted(each.step for each in run.branches) == [20, 30]


def test_the_tensors_of_a_checkpointer_and_of_dcp_go_both_ways(tmp_path: Path) -> None:
    """The script of a Checkpointer begins with the weights of dcp.save; dcp.load then reads what it saved."""
    model = torch.nn.Linear(3, 2)
    save(tmp_path / "run", {"model": model.state_dict()})
    script = Script(SCRIPTS / "dcp_init.py", tmp_path / "records", (str(tmp_path / "run"), str(tmp_path / "next")))
    assert "dcp.save or `ckpt import` saved this checkpoint" in script.run()
    found = {"model": {key: torch.zeros_like(each) for key, each in model.state_dict().items()}}
    dcp.load(found, storage_reader=Reader(tmp_path / "next"))
    assert torch.equal(found["model"]["weight"], model.weight + 1)


def test_what_cannot_be_saved_is_refused_by_its_name(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    for tensor in (sparse, TwoTensor(torch.ones(3), torch.ones(3))):
        with pytest.raises(CheckpointException, match=r"layer\.w: .* cannot be stored"):
            save(tmp_path, {"layer": {"w": tensor}})
    cached = DefaultSavePlanner(enable_plan_caching=True)
    save(tmp_path, {"a": 1}, planner=cached)
    with pytest.raises(CheckpointException, match="enable_plan_caching=False"):
        save(tmp_path, {"a": 2}, planner=cached)
    with pytest.raises(Exception, match="leave use_collectives out"):
        save(tmp_path, {"a": 1}, use_collectives=False)


def test_a_reader_says_what_is_there_instead_of_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="no run has saved there"):
        dcp.load({"a": 1}, storage_reader=Reader(tmp_path / "nothing"))
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "old")
    for work in (
        lambda: dcp.load({"a": 1}, storage_reader=Reader(tmp_path / "old")),
        lambda: save(tmp_path / "old", {"a": 1}),
        lambda: ckpt.Checkpointer(tmp_path / "old", state={"a": 1}),
    ):
        with pytest.raises((CheckpointException, ckpt.UsageError), match=r"is a checkpoint of .*`ckpt import "):
            work()
    save(tmp_path / "run", {"a": torch.randn(1000)})
    (pack,) = (tmp_path / "run").glob("data/*/rank-0/*.pack")
    pack.write_bytes(pack.read_bytes()[:-10])
    with pytest.raises(CheckpointException, match=rf"{pack.name}.* bytes"):
        dcp.load({"a": torch.zeros(1000)}, storage_reader=Reader(tmp_path / "run"))


def test_four_ranks_save_and_two_or_one_load_any_other_sharding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dcp.save, and async_save by thread and by process; DTensors on one and two dimensions, and ShardedTensors."""
    url = tmp_path / "run"
    for mode, world in (("save", 4), ("load", 2)):
        Script(SCRIPTS / "dcp_ranks.py", tmp_path / mode, (mode, str(url)), world=world).run()
    whole = torch.arange(200, dtype=torch.float32).reshape(10, 20)
    names = [f"dtensor{n}" for n in range(12)] + [f"sharded{n}" for n in range(3)]
    dcp.load(found := {name: torch.zeros(10, 20) for name in names}, storage_reader=Reader(url), checkpoint_id="sync")
    assert all(torch.equal(each, whole) for each in found.values())
    assert command(monkeypatch, "verify", url).code == 0
    with ckpt.open(url) as run:
        assert [each.about["dcp"]["checkpoint_id"] for each in run.checkpoints] == ["sync", "thread", "process"]
        assert run.find(0).ranks == ("rank=0", "rank=1", "rank=2", "rank=3")


def test_a_kill_within_a_save_costs_one_step_and_torchs_own_storage_the_run(tmp_path: Path) -> None:
    """The same command again gives the same losses and data. With torch's storage the newest folder is half written,
    and the same script fails at each start."""
    for how in ("ckpt", "own"):
        (tmp_path / how).mkdir()
    ours = Script(SCRIPTS / "dcp_train.py", tmp_path / "ours", ("ckpt", str(tmp_path / "ckpt")), world=2)
    assert ours.start().wait() != 0
    assert [each.step for each in ours.steps()] == [1, 2, 3, 4, 5]
    ours.run()
    steps = ours.steps()
    assert [each.step for each in steps] == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    assert (steps[4].loss, steps[4].samples) == (steps[5].loss, steps[5].samples)

    own = Script(SCRIPTS / "dcp_train.py", tmp_path / "records", ("own", str(tmp_path / "own")), world=2)
    assert own.start().wait() != 0
    life = own.start()
    assert life.wait() != 0
    assert ".metadata" in life.output()
    assert [each.step for each in own.steps()] == [1, 2, 3, 4, 5]
    assert [each.loss for each in own.steps()] == [each.loss for each in steps[:5]]

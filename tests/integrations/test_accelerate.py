"""Accelerate: a script that was killed gives the losses and samples of an undisturbed one; its own resume does not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.forked import Forked
from tests.integrations.runs import Script

SCRIPTS = Path(__file__).parent / "scripts"
PRELOADED = ("accelerate", "peft", "ckpt.integrations.accelerate")
ENV = {"CKPT_LINGER_S": "20", "CKPT_NOTICES": "given", "CUDA_VISIBLE_DEVICES": ""}


def forked(name: str, folder: Path, records: str, words: tuple[str, ...], world: int = 0, how: str = "ckpt") -> Forked:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    told = json.dumps({"how": how, "folder": str(folder / "data"), "words": words})
    return Forked(SCRIPTS / f"accelerate_{name}.py", folder / records, (told,), world, ENV)


def script(folder: Path, how: str, *words: str, world: int = 0) -> Forked:
    return forked("train", folder, "records", words, world, how)


def check_killed_equals_undisturbed(tmp_path: Path, *words: str, world: int = 0, kills: tuple[int, ...]) -> Forked:
    whole, killed = script(tmp_path / "whole", "ckpt", *words, world=world), None
    whole.run()
    killed = script(tmp_path / "killed", "ckpt", *words, world=world)
    for step in kills:
        killed.run_killed(step)
    killed.run()
    for rank in range(max(1, world)):
        assert killed.trajectory(rank) == whole.trajectory(rank)
        assert len({each.pid for each in killed.steps(rank)}) == len(kills) + 1
    return killed


def test_a_killed_run_has_the_losses_and_samples_of_an_undisturbed_one(tmp_path: Path) -> None:
    """Accelerate's own save_state() and load_state(), used as its guide shows, repeat and skip samples."""
    killed = check_killed_equals_undisturbed(tmp_path, kills=(3, 17))
    # No skipped sample is read: 10 batches of 4 are an epoch, and two batches of 8 and the one ahead an evaluation.
    last = killed.steps()[-1].pid
    reads = (tmp_path / "killed" / "data" / f"reads-{last}").read_text().splitlines()
    made = [each.step for each in killed.steps() if each.pid == last]
    assert len(reads) == 4 * len(made) + 2 * 3 * 8

    own = script(tmp_path / "own", "own")
    own.run_killed(3)
    own.run_killed(17)
    own.run()
    whole = killed.trajectory()
    assert own.trajectory() != whole
    assert any(len(set(epoch)) < 40 for epoch in epochs(own))
    assert all(len(set(epoch)) == 40 for epoch in epochs(killed))


def epochs(of: Forked) -> list[list[int]]:
    """The samples of each epoch of 10 steps."""
    seen = of.trajectory()
    return [[each for step in range(n, n + 10) for each in seen[step][1]] for n in (1, 11, 21)]


CASES = {
    "accumulation": (("accumulate", "seedable"), 0, (6,)),
    "ddp": (("accumulate",), 2, (3,)),
    "fsdp2": (("fsdp",), 2, (7,)),
    "stateful, peft": (("stateful", "peft"), 0, (13,)),
    "workers": (("workers",), 0, (13,)),
    "dispatch": (("dispatch",), 2, (7,)),
}


@pytest.mark.parametrize("case", CASES)
def test_so_it_is_with_other_loaders_models_and_ranks(tmp_path: Path, case: str) -> None:
    words, world, kills = CASES[case]
    check_killed_equals_undisturbed(tmp_path, *words, world=world, kills=kills)


def steps(folder: Path, *words: str, world: int = 0) -> Forked:
    return forked("steps", folder, f"records-{world}", words, world)


def test_save_state_is_a_save_of_ckpt_and_load_state_reads_nothing(tmp_path: Path) -> None:
    script = steps(tmp_path, "saves", "slow")
    out = script.run_killed(6)
    assert "saved to" in out
    assert not list((tmp_path / "data").glob("folder-*"))
    out += script.run()
    assert "restored 4" in out
    assert out.count("write and read no folder") == 2
    assert [each.step for each in script.steps()] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    assert len({each for step in script.trajectory().values() for each in step[1]}) == 32


def test_sigterm_saves_one_step_of_all_ranks(tmp_path: Path) -> None:
    script = Script(**vars(steps(tmp_path, "slow", world=2)))  # by torchrun, which hands the signal on
    code, out = script.run_signalled(3)
    assert code != 0
    saved = re.search(r"the job leaves by signal SIGTERM: step (\d) is in the store", out)
    assert saved is not None, out
    assert script.run().count(f"restored {saved[1]}\n") == 2
    for rank in (0, 1):
        assert sorted(script.trajectory(rank)) == list(range(1, 9))


@pytest.mark.parametrize("words", [(), ("split",), ("split", "dispatch")])
def test_other_numbers_of_processes_go_on_in_the_epoch(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Each sample of the epoch is seen once: by 2 processes up to a step, by 1 process after that."""
    two = steps(tmp_path, "slow", *words, world=2)
    two.run_killed(3)
    one = steps(tmp_path, *words, "steps=14")
    out = one.run()
    restored = int(out.split("restored ")[1].split()[0])
    assert restored in (2, 3)
    seen = [each for rank in (0, 1) for step in range(1, restored + 1) for each in two.trajectory(rank)[step][1]]
    per_step = 8 if not words else 4
    assert len(seen) == per_step * restored
    rest = [each for step in one.trajectory().values() for each in step[1]]
    assert sorted((seen + rest)[:48]) == list(range(48))


@pytest.mark.parametrize(
    ("words", "world", "epoch"), [(("iterable",), 0, 12), (("dispatch",), 2, 6), (("dispatch", "split"), 2, 12)]
)
def test_a_dispatcher_goes_on_after_its_epoch_on_all_ranks(
    tmp_path: Path, words: tuple[str, ...], world: int, epoch: int
) -> None:
    """It was saved after the last batch, before the loop asked for another one."""
    steps(tmp_path, *words, "rounds", f"steps={epoch}", world=world).run()
    rest = steps(tmp_path, *words, "rounds", "steps=99", world=world)
    assert f"restored {epoch}\n" in rest.run()
    made = [rest.trajectory(rank) for rank in range(max(1, world))]
    assert all(max(each) == 2 * epoch for each in made)
    second = [each for rank in made for step in range(epoch + 1, 2 * epoch + 1) for each in rank[step][1]]
    assert sorted(second) == list(range(48))


def test_another_batch_size_or_data_set_is_refused_within_an_epoch(tmp_path: Path) -> None:
    steps(tmp_path, "steps=5").run()
    for word, text in (("batch=8", "batch_size 4 and now has 8"), ("length=96", "dataset_length 48 and now has 96")):
        life = steps(tmp_path, word, "steps=12").start()
        assert life.wait() != 0
        assert text in life.output()
    steps(tmp_path, "steps=12").run()
    steps(tmp_path, "batch=8", "length=96", "steps=14").run()


def test_what_would_be_lost_or_differ_is_said_once(tmp_path: Path) -> None:
    told = {
        "zip": "a batch was drawn after the update",
        "late": "registered after attach(), so not saved: custom_objects",
        "untested": "was tested with accelerate 1.15; this is 9.1.0",
    }
    right = steps(tmp_path / "right").run()
    for word, text in told.items():
        assert steps(tmp_path / word, word).run().count(text) == 1
        assert text not in right


def test_a_loop_that_begins_its_epochs_anew_is_refused(tmp_path: Path) -> None:
    script = steps(tmp_path, "slow", "epoch", "steps=20")
    script.run_killed(14)
    life = script.start()
    assert life.wait() != 0
    assert "in the middle of epoch 1 of a loader, and the loop begins its epoch 0" in life.output()


def test_what_cannot_be_attached_is_refused() -> None:
    code = "import accelerate, ckpt.integrations.accelerate as a; a.attach(accelerate.Accelerator(cpu=True), 'x')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "call its prepare() before attach()" in done.stderr

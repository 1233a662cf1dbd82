"""ckpt verify and ckpt diff."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt.cli.exits import Exit
from ckpt.policy.save_options import Keep
from ckpt.store.commit import Committer
from ckpt.store.prune import Pruner
from ckpt.store.run import Run
from ckpt.types import Identity, Version
from tests.cli.stores import a_run, arrays, begin, flip_a_bit, opened, run_ckpt, save
from tests.store.build import floats, snapshot


def test_verify_finds_a_good_run_good(tmp_path: Path) -> None:
    a_run(tmp_path)
    said = run_ckpt("verify", tmp_path)
    assert said.code == 0
    assert "3 checkpoints, all good" in said.out
    assert len(run_ckpt("verify", tmp_path, "--all", "--json").json["checkpoints"]) == 4
    assert [c["step"] for c in run_ckpt("verify", tmp_path, "--newest", "--json").json["checkpoints"]] == [40]


def test_verify_names_a_flipped_bit(tmp_path: Path) -> None:
    a_run(tmp_path)
    pack = flip_a_bit(tmp_path)
    said = run_ckpt("verify", tmp_path, "--json")
    assert said.code == 1
    assert said.json["good"] is False
    bad = [each for each in said.json["checkpoints"] if not each["good"]]
    assert [each["step"] for each in bad] == [40]
    assert bad[0]["problems"][0]["key"] == pack.relative_to(tmp_path).as_posix()
    assert bad[0]["problems"][0]["tensors"]
    text = run_ckpt("verify", tmp_path)
    assert text.code == 1
    assert "step 40: DAMAGED" in text.out
    assert run_ckpt("verify", tmp_path, "--step", "10").code == 0


@pytest.mark.parametrize("how", ["gone", "flipped"])
def test_verify_names_a_claim_without_which_the_line_is_another(how: str, tmp_path: Path) -> None:
    a_run(tmp_path)
    claim = sorted((tmp_path / "epochs").iterdir())[-1]
    if how == "gone":
        claim.unlink()
    else:
        claim.write_bytes(claim.read_bytes().replace(b"-000000000020.0000", b"-000000000030.0000"))
    said = run_ckpt("verify", tmp_path, "--json")
    assert said.code == 1
    assert [each["key"] for each in said.json["claims"]] == [f"epochs/{claim.name}"]
    assert f"DAMAGED epochs/{claim.name}" in run_ckpt("verify", tmp_path).out


def test_verify_names_what_has_packs_and_no_record(tmp_path: Path) -> None:
    """One that others refer to was there, and is damage. Of the rest nobody knows; what is on its way is not named."""
    epoch = begin(tmp_path)
    saved = [save(tmp_path, epoch, step) for step in (10, 20, 30)]
    (newest,) = (tmp_path / "commits").glob(f"{saved[2]}-*")
    newest.unlink()
    said = run_ckpt("verify", tmp_path)
    assert said.code == 0
    assert f"step 30, {saved[2]}: 1 pack (" in said.out
    assert "a commit that never ended, or its record was removed" in said.out
    assert "step 30" in run_ckpt("verify", tmp_path, "--newest").out
    (tmp_path / "closed" / str(epoch)).unlink()
    assert "step 30" not in run_ckpt("verify", tmp_path).out, "a running job may be writing it"
    (first,) = (tmp_path / "commits").glob(f"{saved[0]}-*")
    first.unlink()
    found = run_ckpt("verify", tmp_path, "--json")
    assert (found.code, found.json["good"]) == (0, True), "each wrote its own packs"
    assert [each["identity"] for each in found.json["unrecorded"]] == [str(saved[0])]


def test_a_record_that_is_gone_is_damage_where_others_refer_to_its_packs(tmp_path: Path) -> None:
    epoch, snap = begin(tmp_path), snapshot({"frozen": floats(1000)}, shared={})
    base = None
    with opened(tmp_path) as store:
        for step in (1, 2):
            what = Identity(epoch, Version(step))
            made = Committer(store, f"w{step}").commit(what, snap.manifest, snap.frame, check=lambda: None, base=base)
            base = made.record
    (first,) = (tmp_path / "commits").glob("*000000000001.*")
    first.unlink()
    said = run_ckpt("verify", tmp_path)
    assert said.code == 1
    assert "DAMAGED step 1, " in said.out
    assert "its record was removed" in said.out
    assert "step 2: good" in said.out


def test_what_is_damaged_is_named_once_and_how_much_is_lost_with_it(tmp_path: Path) -> None:
    epoch = begin(tmp_path)
    save(tmp_path, epoch, 1, {f"w{number:02}": np.zeros(3, np.float32) for number in range(27)})
    record, claim = (next((tmp_path / name).iterdir()) for name in ("commits", "epochs"))
    pack = next(tmp_path.rglob("*.pack"))
    body = pack.read_bytes()
    pack.unlink()
    said = run_ckpt("verify", tmp_path).out
    assert f"MISSING {pack.relative_to(tmp_path)} is missing" in said
    assert "w18, w19 and 9 more\n" in said  # the values, too
    pack.write_bytes(body)
    for each in (record, claim):
        each.write_bytes(each.read_bytes()[:-7])
    said = run_ckpt("verify", tmp_path).out
    assert f"DAMAGED commits/{record.name}: its bytes" in said
    assert f"DAMAGED epochs/{claim.name} is not JSON" in said


def test_where_a_step_is_damaged_the_way_on_is_said(tmp_path: Path) -> None:
    a_run(tmp_path)
    sorted(tmp_path.rglob("*.pack"))[-1].unlink()
    record = sorted((tmp_path / "commits").iterdir())[0]
    record.write_bytes(record.read_bytes()[:-7])
    to = tmp_path / "x.safetensors"
    for words in (["diff", tmp_path, "20"], ["restore", tmp_path, "--to", to], ["show", tmp_path, "--step", "10"]):
        said = run_ckpt(*words)
        assert said.code == 1
        assert said.err.endswith("; take another step: ckpt verify says which are good\n")


def test_two_checkpoints_of_one_step_are_told_apart_as_ls_does(tmp_path: Path) -> None:
    epoch = begin(tmp_path)
    saved = [save(tmp_path, epoch, version) for version in (Version(3), Version(3, 1), Version(3, 2))]
    sorted((tmp_path / "data" / str(saved[1])).rglob("*.pack"))[0].unlink()
    said = run_ckpt("verify", tmp_path).out
    assert "step 3: good" in said
    assert "step 3.1: MISSING" in said
    assert "step 3.2: good" in said
    found = run_ckpt("verify", tmp_path, "--json").json["checkpoints"]
    assert [(each["step"], each["sub"]) for each in found] == [(3, 0), (3, 1), (3, 2)]
    assert "step 3 and step 3.2: " in run_ckpt("diff", tmp_path, "3.0", "3.2").out
    assert "step 3.2" in run_ckpt("branch", tmp_path, "--at", "3.2").out


def test_of_one_step_on_the_line_and_on_a_branch_the_start_is_said(tmp_path: Path) -> None:
    first = begin(tmp_path)
    saved = [save(tmp_path, first, step) for step in (1, 2)]
    second = begin(tmp_path, saved[0])
    save(tmp_path, second, 2)
    said = run_ckpt("verify", tmp_path, "--all").out
    assert "step 1: good" in said
    assert f"step 2 of start {first}: good" in said
    assert f"step 2 of start {second}: good" in said


@pytest.mark.parametrize("what", ["commits", "data"])
def test_a_damaged_record_costs_nothing_where_another_one_is_whole(what: str, tmp_path: Path) -> None:
    """A start takes the other one, so the commands do, too."""
    url, epoch = tmp_path / "run", begin(tmp_path / "run")
    save(url, epoch, 1)
    for writer in ("a", "b"):
        saved = save(url, epoch, 2, writer=writer)
    first = url / (f"commits/{saved}-a" if what == "commits" else f"data/{saved}/node/a-0.pack")
    first.write_bytes(first.read_bytes()[:100])
    said = run_ckpt("verify", url)
    assert said.code == 0, said.out
    assert "step 2: good" in said.out
    assert f"another record of it is damaged: {first.relative_to(url)}" in said.out
    assert "2 checkpoints, all good" in said.out
    (_, report) = run_ckpt("verify", url, "--json").json["checkpoints"]
    assert report["good"] is True
    assert report["problems"][0]["key"] == first.relative_to(url).as_posix()
    assert run_ckpt("show", url, "--json").json["step"] == 2
    assert [row["bytes"] > 0 for row in run_ckpt("ls", url, "-l", "--json").json["checkpoints"]] == [True] * 2
    assert run_ckpt("diff", url, "2", "--only", "*").code == 0
    assert run_ckpt("restore", url, "--to", tmp_path / "x.safetensors").code == 0


def test_what_retention_deleted_while_it_was_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that may not write holds no lease."""
    epoch = begin(tmp_path)
    for step in (1, 2, 3):
        save(tmp_path, epoch, step)
    with opened(tmp_path) as store:
        run = Run(store)
        view = run.view()
        for _ in range(2):
            pruner = Pruner(run, None, grace_s=-1)
            pruner.execute(pruner.plan(run.view(), Keep(last=1)))
        monkeypatch.setattr(Run, "view", lambda self: view)  # what a command had listed before
    said = run_ckpt("verify", tmp_path)
    assert said.code == 0, said.out
    assert said.out.count("retired meanwhile") == 2
    assert "1 checkpoint, all good" in said.out
    assert "DAMAGED" not in said.out
    assert [each["retired"] for each in run_ckpt("verify", tmp_path, "--json").json["checkpoints"]] == [
        True,
        True,
        False,
    ]
    for words in (["show"], ["diff"], ["restore", "--to", tmp_path / "x.safetensors", "--step"]):
        which = ["--step", "1"] if words == ["show"] else ["1"]
        said = run_ckpt(words[0], tmp_path, *words[1:], *which)
        assert said.code == Exit.NO_CHECKPOINT, words
        assert "step 1 has been retired" in said.err
    assert [row["step"] for row in run_ckpt("ls", "-l", tmp_path, "--json").json["checkpoints"]] == [3]


def test_where_no_lease_can_be_taken_it_is_said_and_all_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that is full, or may only be read, is the one that one most wants to read from."""
    url = tmp_path / "run"
    a_run(url)
    (url / "leases").write_text("in the way of a lease")
    for words in (["verify"], ["diff", "40"], ["restore", "--to", tmp_path / "x.safetensors"]):
        said = run_ckpt(words[0], url, *words[1:])
        assert said.code == 0, said.err
        assert "no lease can be taken" in caplog.text, words
        assert caplog.text.count("\n") == 1
        caplog.clear()
    assert run_ckpt("show", url).err == ""  # one request needs none


def test_bytes_behind_the_end_of_a_pack_are_named(tmp_path: Path) -> None:
    """Retention does not count on such a checkpoint, so nobody is to think that it is whole."""
    saved = a_run(tmp_path)
    (pack,) = (tmp_path / "data" / str(saved[-1])).rglob("*.pack")
    with open(pack, "ab") as file:
        file.write(b"junk")
    said = run_ckpt("verify", tmp_path)
    assert said.code == Exit.DIFFERENT
    assert f"step 40: DAMAGED {pack.relative_to(tmp_path)}: it has {pack.stat().st_size} bytes" in said.out
    said = run_ckpt("prune", tmp_path, "--last=1").out
    assert f"damaged, so not counted as kept (see ckpt verify):\n  step 40, {saved[-1]}\n" in said


def test_diff_says_which_tensors_differ_and_how_far(tmp_path: Path) -> None:
    epoch = begin(tmp_path)
    before = arrays(1)
    after = dict(before) | {"model.bias": before["model.bias"].copy(), "new": np.zeros(3, np.float32)}
    after["model.bias"][4] += 0.5
    save(tmp_path, epoch, 1, before)
    save(tmp_path, epoch, 2, after, shared={"step": 1}, own={"loader": {"position": 9}})
    said = run_ckpt("diff", tmp_path, "1", "--json")
    assert said.code == 1
    body = said.json
    assert [(each["name"], each["elements"], each["size"]) for each in body["changed"]] == [("model.bias", 1, 10)]
    assert body["changed"][0]["max_abs"] == pytest.approx(0.5, rel=1e-6)
    assert body["added"] == ["new"]
    assert body["differ"] is True
    assert body["values"] == [{"path": "rank=0 loader.position", "before": "1", "after": "9"}]
    text = run_ckpt("diff", tmp_path, "1", "2")
    assert text.code == 1
    assert "model.bias" in text.out
    assert "only in step 2: new" in text.out
    assert "rank=0 loader.position: 1 -> 9\n" in text.out


def test_diff_says_values_as_the_user_calls_them(tmp_path: Path) -> None:
    def state(lr: float, more: dict[str, Any], noise: bytes) -> dict[str, Any]:
        group = {"params": ("w",), "value": {"lr": lr, "betas": (0.9, lr)}, "tensors": []}
        extra = {"0._extra_state": {"value": {"scale": lr}, "tensors": []}}
        return {
            "objects": {
                "optim": {"kind": "optimizer", "groups": [group], "state": [-1], "skeletons": []},
                "sched": {"kind": "object", "value": {"T_max": 100, **more}, "tensors": []},
                "model": {"kind": "module", "extra": extra},
                "noise": {"kind": "data", "value": noise, "tensors": []},
            },
            "aliases": {},
        }

    epoch = begin(tmp_path)
    own = {"loaders": {"loader": {"value": {"at": 1}, "tensors": []}}, "generators": {}}
    save(tmp_path, epoch, 1, arrays(1), shared=state(0.001, {}, bytes(100)), own=own)
    moved = {"loaders": {"loader": {"value": {"at": 2}, "tensors": []}}, "generators": {}}
    save(tmp_path, epoch, 2, arrays(1), shared=state(0.0005, {"last_epoch": 7}, b"1" * 100), own=moved)
    assert run_ckpt("diff", tmp_path, "1").out.splitlines() == [
        "optim.param_groups[0].lr: 0.001 -> 0.0005",
        "optim.param_groups[0].betas[1]: 0.001 -> 0.0005",
        "sched.last_epoch: 7, only in step 2",
        "model['0._extra_state'].scale: 0.001 -> 0.0005",
        "noise: differs (100 bytes)",
        "rank=0 loader.at: 1 -> 2",
        "step 1 and step 2: 3 tensors equal, 0 differing; 6 values differing",
    ]
    only = run_ckpt("diff", tmp_path, "1", "--only", "*").out.splitlines()
    assert only == ["step 1 and step 2: 3 tensors equal, 0 differing; values not compared (--only)"]


def test_diff_tells_checkpoints_of_one_step_apart(tmp_path: Path) -> None:
    for name, more in (("a", {}), ("b", {"new": np.zeros(3, np.float32)})):
        save(tmp_path / name, begin(tmp_path / name), 5, arrays(1) | more)
    said = run_ckpt("diff", tmp_path / "a", "5", "--other", tmp_path / "b")
    assert f"only in step 5 of {tmp_path / 'b'}: new" in said.out
    old = save(tmp_path / "c", begin(tmp_path / "c"), 5, arrays(1))
    save(tmp_path / "c", begin(tmp_path / "c"), 5, arrays(1) | {"new": np.zeros(3, np.float32)})
    said = run_ckpt("diff", tmp_path / "c", str(old), "5")
    assert f"step {old} and step 00000002-" in said.out


def test_diff_of_equal_checkpoints_ends_with_0(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / name, begin(tmp_path / name), 5)
    assert run_ckpt("diff", tmp_path / "a", "5", "--other", tmp_path / "b").code == 0
    a_run(tmp_path / "c")
    assert run_ckpt("diff", tmp_path / "c", "10", "20", "--only", "*.table").code == 0
    assert run_ckpt("diff", tmp_path / "c", "10", "20").code == 1
    mistyped = run_ckpt("diff", tmp_path / "c", "10", "20", "--only", "*.tabel")
    assert mistyped.code == 2
    assert "matches *.tabel" in mistyped.err

"""Scenario files: TOML to a Scenario, and the combinations of a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.errors import UsageError
from ckpt.placement.placement import Parity, Replicas
from ckpt.policy.adaptive import Adaptive
from ckpt.policy.save_options import Every
from ckpt.simulate.scenario import NoticeModel, PeerLevel, Rejoin, StorePrices
from ckpt.simulate.scenario_file import ScenarioFile, choice_texts, read_scenario

BASE = "nodes = 8\nstep_s = 1.5\nstate_bytes = 2e9\n"


def read(tmp_path: Path, text: str) -> ScenarioFile:
    file = tmp_path / "job.toml"
    file.write_text(text)
    return read_scenario(file)


def test_every_field_and_text_form(tmp_path: Path) -> None:
    text = (
        BASE + 'nodes_min = 4\nrejoin = "wanted"\npolicy = "every 100 steps"\ncommit_every = 3\n'
        "[local]\nstall_s = 0.1\n[peers]\noption = 'parity 4+2'\nlink_bytes_s = 1e9\n"
        "[store]\nratio = 0.7\nprices = {put_1000 = 1.0}\n[notices]\nrecall = 0.9\n"
    )
    made = read(tmp_path, text).scenario({})
    assert (made.nodes, made.nodes_min, made.step_s, made.commit_every) == (8, 4, 1.5, 3)
    assert made.rejoin is Rejoin.AT_WANTED
    assert made.policy == Every(steps=100)
    assert made.peers.option == Parity(4, 2)
    assert (made.store.ratio, made.store.prices) == (0.7, StorePrices(put_1000=1.0))
    assert made.notices == NoticeModel(recall=0.9)


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ('policy = "adaptive"', "policy", Adaptive()),
        ("policy = {overhead = 0.02}", "policy", Adaptive(overhead=0.02)),
        ('policy = "every 60 s"', "policy", Every(seconds=60.0)),
        ("policy = {steps = 7}", "policy", Every(steps=7)),
        ('peers = "none"', "peers", None),
        ('store = "none"', "store", None),
        ('peers = "2 replicas"', "peers", PeerLevel(Replicas(2))),
    ],
)
def test_values_with_a_text_form(line: str, key: str, value: object, tmp_path: Path) -> None:
    assert getattr(read(tmp_path, BASE + line).scenario({}), key) == value


def test_a_sweep_is_every_combination_in_order(tmp_path: Path) -> None:
    file = read(tmp_path, BASE + "[sweep]\nnodes = [8, 16]\n'store.ratio' = [0.5, 1]\npeers = ['none', '1 replica']\n")
    assert len(file.choices) == 8
    assert file.choices[0] == {"nodes": 8, "store.ratio": 0.5, "peers": "none"}
    assert file.choices[-1] == {"nodes": 16, "store.ratio": 1, "peers": "1 replica"}
    made = file.scenario(file.choices[-2])
    assert (made.nodes, made.peers) == (16, None)
    assert made.store.ratio == 1
    assert [*choice_texts(file.choices[0])] == ["8", "0.5", "none"]
    # The choice of one run does not reach the next.
    assert file.scenario(file.choices[0]).nodes == 8


def test_a_part_of_peers_that_the_file_names_by_text_can_be_swept(tmp_path: Path) -> None:
    file = read(tmp_path, BASE + "peers = '2 replicas'\n[sweep]\n'peers.link_bytes_s' = [1e8]\n")
    made = file.scenario(file.choices[0])
    assert (made.peers.option, made.peers.link_bytes_s) == (Replicas(2), 1e8)


def test_a_swept_option_keeps_the_rest_of_its_table(tmp_path: Path) -> None:
    text = BASE + "peers.link_bytes_s = 1e7\nstore.ratio = 0.5\n[sweep]\n"
    file = read(tmp_path, text + "peers = ['none', '2 replicas']\nstore = [{kept = 5}]\n")
    one, two = (file.scenario(choice) for choice in file.choices)
    assert one.peers is None
    assert (two.peers.option, two.peers.link_bytes_s) == (Replicas(2), 1e7)
    assert (two.store.ratio, two.store.kept) == (0.5, 5)


def test_a_file_of_windows_is_read(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert read_scenario(tmp_path / "job.toml").scenario({}).nodes == 8


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nodes = ", "no TOML"),
        ("nodes = 8", "step_s, state_bytes must be given"),
        (BASE + "speed = 3", "speed is unknown"),
        (BASE + "node_min = 3", "did you mean nodes_min?"),
        (BASE.replace("2e9", "'2GB'"), "state_bytes = '2GB': give a number"),
        (BASE + "scaling = true", "scaling = True: give a number"),
        (BASE + "[store]\nratio = 'half'", "store.ratio = 'half': give a number"),
        (BASE + "[store]\nspeed = 3", "store.speed is unknown"),
        (BASE + "[store]\nratio = -1", "store.ratio"),
        (BASE + "store = 3", 'store = 3: a table, or "none"'),
        (BASE + "notices = 3", "notices = 3: a table"),
        (BASE + 'policy = "often"', "policy = 'often'"),
        (BASE + "policy = {overhead = 7}", "overhead"),
        (BASE + 'peers = "some"', "peers.option = 'some'"),
        (BASE + "peers = 3", "peers = 3"),
        (BASE + 'rejoin = "soon"', "rejoin = 'soon'"),
        (BASE + "sweep = 3", "[sweep] maps a key"),
        (BASE + "[sweep]\nnodes = 3", "[sweep] maps a key"),
        (BASE + "[sweep]\nnodes = []", "[sweep] maps a key"),
        (BASE + "[sweep]\n'nodes.x' = [3]", "nodes is 8, which has no parts"),
        (BASE + "[sweep]\nnodes = [8, 0]", "with nodes = 0"),
        (BASE + "[sweep]\n" + "\n".join(f"k{n} = [1, 2]" for n in range(20)), "1,048,576 combinations"),
    ],
)
def test_what_is_wrong_is_named(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        read(tmp_path, text)
    assert says in str(refused.value)
    assert "job.toml" in str(refused.value)

"""What comes from the environment: a value that cannot be is refused by the name of its variable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt
from ckpt.errors import UsageError
from ckpt.settings import read_settings, store_environment
from tests.servers import free_port


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "-inf", "soon", "", "1e999"])
@pytest.mark.parametrize(
    "name",
    [
        "CKPT_LINGER_S",
        "CKPT_HEARTBEAT_S",
        "CKPT_RETRY_S",
        "CKPT_HOLD_AT",
        "CKPT_SIGTERM_S",
        "CKPT_SIGUSR1_S",
        "CKPT_SIGNALS_S",
        "TORCHELASTIC_MAX_RESTARTS",
    ],
)
def test_a_number_in_the_environment_that_is_none_is_refused_by_its_name(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=name):
        read_settings({name: text})


@pytest.mark.parametrize("text", ["0", "0.0", "1e-9"])
def test_a_heartbeat_takes_some_time(text: str) -> None:
    with pytest.raises(UsageError, match="CKPT_HEARTBEAT_S"):
        read_settings({"CKPT_HEARTBEAT_S": text})
    assert read_settings({"CKPT_LINGER_S": "0", "CKPT_RETRY_S": "0"}).linger_s == 0


@pytest.mark.parametrize("text", ["5", "[1, 2]", '["a"]', '{"a": 1, "b": 2}', "x", "null"])
def test_a_redirect_that_is_no_pair_of_urls_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(UsageError, match="CKPT_REDIRECT"):
        read_settings({"CKPT_REDIRECT": text})


def test_paths_are_absolute_since_the_agent_works_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = read_settings({"CKPT_RUNTIME_DIR": "here", "CKPT_AGENT_LOG": "../log"})
    assert found.runtime_dir == tmp_path / "here"
    assert found.agent_log == tmp_path.parent / "log"
    found = read_settings({"CKPT_SIGNALS_LOG": "signals.jsonl", "CKPT_PREDICTOR": "model"})
    assert (found.signals_log, found.predictor) == (tmp_path / "signals.jsonl", tmp_path / "model")
    assert read_settings({"CKPT_EVENTS": "events.jsonl"}).events == tmp_path / "events.jsonl"
    assert read_settings({"CKPT_EVENTS": ""}).events is None
    given = {
        "AWS_CA_BUNDLE": "ca.pem",
        "AWS_CONFIG_FILE": "~/aws",
        "AWS_REGION": "r",
        "AWS_SHARED_CREDENTIALS_FILE": "",
    }
    made = {"AWS_CA_BUNDLE": str(tmp_path / "ca.pem"), "AWS_CONFIG_FILE": str(Path.home() / "aws")}
    assert store_environment(given) == given | made


def test_what_is_listened_to_is_one_of_three_and_refused_by_its_name() -> None:
    assert read_settings({}).notices == "auto"
    assert read_settings({"CKPT_NOTICES": "given"}).notices == "given"
    with pytest.raises(UsageError, match="CKPT_NOTICES"):
        read_settings({"CKPT_NOTICES": "loud"})
    assert read_settings({}).signals == "on"
    assert read_settings({"CKPT_SIGNALS": "off"}).signals == "off"
    with pytest.raises(UsageError, match="CKPT_SIGNALS"):
        read_settings({"CKPT_SIGNALS": "given"})


@pytest.mark.parametrize("text", ["", "soon", "-1", "1e9", "²", "9" * 5000])
def test_an_end_that_slurm_would_not_have_given_is_none(text: str) -> None:
    assert read_settings({"SLURM_JOB_END_TIME": text}).slurm_end_s is None
    assert read_settings({"SLURM_JOB_END_TIME": "1900000000"}).slurm_end_s == 1_900_000_000


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":9400", ("127.0.0.1", 9400)),
        ("localhost:0", ("127.0.0.1", 0)),
        ("0.0.0.0:9400", ("0.0.0.0", 9400)),
        ("[::1]:9400", ("::1", 9400)),
    ],
)
def test_metrics_are_shown_on_this_host_unless_an_address_says_otherwise(text: str, address: tuple[str, int]) -> None:
    assert read_settings({"CKPT_METRICS": text}).metrics == address
    assert read_settings({"CKPT_METRICS": ""}).metrics is None


@pytest.mark.parametrize(
    "text", ["9400", "host:9400", ":", ":70000", ":-1", "::1:9400", "[1.2.3.4]:1", ":²", "1.2.3.4", "x" * 1000]
)
def test_an_address_for_metrics_that_is_none_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(UsageError, match="CKPT_METRICS"):
        read_settings({"CKPT_METRICS": text})


def test_without_a_launcher_a_start_is_named_by_its_process_and_not_by_a_number_that_every_container_has() -> None:
    word = "import os; from ckpt.settings import read_settings as read; "
    word += "print(os.getpid(), read({}).launch, read({}).launch)"
    said = subprocess.run([sys.executable, "-c", word], capture_output=True, text=True, check=True).stdout.split()
    assert said[1] == said[2], "it is the same as long as the process lives"
    assert said[1].startswith(f"{os.uname().nodename}-pid-{said[0]}-")
    assert float(said[1].rpartition("-")[2]) > 0


def test_a_launch_is_named_by_whoever_gave_it_a_name() -> None:
    named = {"CKPT_LAUNCH": "mine", "SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "run"}
    assert read_settings(named).launch == "mine"
    assert read_settings({**named, "CKPT_LAUNCH": ""}).launch == "7"
    assert read_settings({"TORCHELASTIC_RUN_ID": "run"}).launch == "run"
    assert read_settings({"CKPT_LAUNCH": "mine\udcff"}).launch == "mine\\udcff", "agents say nothing that is no UTF-8"


def test_a_member_of_a_slurm_array_is_named_as_such_and_not_by_the_number_of_the_array() -> None:
    assert read_settings({"SLURM_JOB_ID": "7"}).slurm_job == "7"
    member = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    assert read_settings(member).slurm_job == "7_1"
    assert read_settings(member).launch == "7"
    assert read_settings({"SLURM_ARRAY_JOB_ID": "7"}).slurm_job == ""


def test_a_run_id_that_every_torchrun_has_names_no_launch_and_its_process_does() -> None:
    found = read_settings({"TORCHELASTIC_RUN_ID": "none"}).launch
    assert found.startswith(f"{os.uname().nodename}-pid-{os.getppid()}-"), "torchrun is the parent of its workers"
    assert read_settings({"TORCHELASTIC_RUN_ID": "none", "CKPT_LAUNCH": "none"}).launch == "none", (
        "who says so means it"
    )


@pytest.mark.torchrun
def test_restarts_by_one_torchrun_without_a_run_id_are_one_launch_and_another_torchrun_is_another(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "from ckpt.settings import read_settings as read\n"
        "print(os.environ['TORCHELASTIC_RUN_ID'], read().launch, flush=True)\n"
        "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
    )
    said = []
    for _ in range(2):
        at = ("--master-addr=127.0.0.1", f"--master-port={free_port()}")
        command = [sys.executable, "-m", "torch.distributed.run", *at, "--max-restarts=1", str(script)]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        said.append([line.split() for line in done.stdout.splitlines() if line.startswith("none ")])
    assert [len(lines) for lines in said] == [2, 2]
    assert [len({launch for _, launch in lines}) for lines in said] == [1, 1]
    assert said[0] != said[1]


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "CKPT_NOTICE_FILE", "GCE_METADATA_HOST"])
def test_a_variable_that_no_agent_could_be_told_is_refused_by_name_and_not_shown(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_NOTICES", "given")
    monkeypatch.setenv(name, os.fsdecode(b"/tmp/secret-\xff"))
    with (
        pytest.raises(UsageError, match=f"{name} is no UTF-8") as raised,
        ckpt.Checkpointer(tmp_path / "run", {"x": 1}),
    ):
        pass
    assert "secret-" not in str(raised.value)


@pytest.mark.parametrize("text", ["XCPU", "SIGXCPU"])
def test_the_signal_that_submitit_is_told_to_send_is_a_notice_too(text: str) -> None:
    both = (signal.SIGUSR1, signal.SIGUSR2)
    assert read_settings({"SUBMITIT_PREEMPT_SIGNAL": text}).warning_signals == (*both, signal.SIGXCPU)
    for known in ("USR1", "SIGUSR2", "TERM", "KILL", "nothing", ""):
        assert read_settings({"SUBMITIT_PREEMPT_SIGNAL": known}).warning_signals == both

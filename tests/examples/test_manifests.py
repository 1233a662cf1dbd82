"""What the YAML files of examples/launchers run, started and stopped as their systems do."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.checkpointer.scripts import Script as Launched
from tests.checkpointer.test_launchers import Container, needs_container
from tests.integrations.runs import REPOSITORY, Script, undisturbed
from tests.servers import free_port

LAUNCHERS = REPOSITORY / "examples" / "launchers"
PROGRAM = REPOSITORY / "tests" / "examples" / "launched.py"
STEPS = 400
Document = dict[str, Any]


# The fields that the examples use. They were looked up in the definitions of JobSet v1alpha2 (0.13), Kubeflow Trainer
# v1alpha1 (2.3) and SkyPilot's task (2026-08). Another field has to be looked up there first.
POD = "restartPolicy terminationGracePeriodSeconds containers image command env value valueFrom fieldRef fieldPath"
POD += " volumeMounts mountPath volumes persistentVolumeClaim claimName"
JOB_SET = f"{POD} apiVersion kind metadata name labels spec template parallelism completions backoffLimit failurePolicy"
JOB_SET += " maxRestarts replicatedJobs"
TRAIN_JOB = (
    f"{JOB_SET} trainer.kubeflow.org/framework trainer.kubeflow.org/trainjob-ancestor-step mlPolicy torch numNodes"
)
TRAIN_JOB += " runtimeRef apiGroup trainer numProcPerNode"
SKY = "name workdir num_nodes setup run envs URL CKPT_OUTCOME_FILE resources accelerators use_spot job_recovery"
SKY += " recover_on_exit_codes max_restarts_on_errors"


def fields(value: Any) -> set[str]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set(value if isinstance(value, dict) else ()).union(*map(fields, inner))


def documents(name: str) -> list[Document]:
    return list(yaml.safe_load_all((LAUNCHERS / name).read_text()))


@pytest.mark.parametrize(("name", "known"), [("jobset.yaml", JOB_SET), ("trainjob.yaml", TRAIN_JOB), ("sky.yaml", SKY)])
def test_an_example_has_only_fields_that_its_system_knows(name: str, known: str) -> None:
    assert fields(documents(name)) - set(known.split()) == set()


class Pods:
    """The pods of a manifest, each with a pid namespace of its own; `folder` is their volume."""

    def __init__(self, name: str, folder: Path, runtime_dir: Path) -> None:
        self.folder, self.runtime_dir = folder, runtime_dir
        job_set, *others = documents(name)
        self.spec = job_set["spec"]["template"]["spec"] if others else job_set["spec"]
        self.pod = self.spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        (self.container,) = self.pod["containers"]
        self.env: dict[str, str] = {}
        for job in others:
            trainer = job["spec"]["trainer"]
            self.container |= {"command": trainer["command"]}
            # What Kubeflow Trainer adds for mlPolicy.torch.
            self.env |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NODE_RANK": ""}
        self.starts = 0

    def environment(self, index: int) -> dict[str, str]:
        fields = {
            "metadata.labels['jobset.sigs.k8s.io/jobset-name']": "train",
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        }
        given = {
            each["name"]: each["value"] if "value" in each else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
            for each in self.container["env"]
        }
        given = self.env | given
        return given | {
            "PET_NODE_RANK": given["PET_NODE_RANK"] or str(index),
            "PET_NPROC_PER_NODE": "1",
            "PET_MASTER_ADDR": "127.0.0.1",
            "CKPT_OUTCOME_FILE": self.mounted(given["CKPT_OUTCOME_FILE"]),
            "CKPT_NOTICES": "given",
            "CKPT_LISTEN": "127.0.0.1:0",
            "CKPT_RUNTIME_DIR": str(self.runtime_dir / str(index)),
            "RECORDS": str(self.folder / "records"),
        }

    def mounted(self, path: str) -> str:
        """Where the file of a container lies: in the volume."""
        (mount,) = self.container["volumeMounts"]
        assert path.startswith(f"{mount['mountPath']}/")
        return str(self.folder / Path(path).relative_to(mount["mountPath"]))

    def start(self) -> list[Container]:
        self.starts += 1
        torchrun, program, url, steps = self.container["command"]
        assert (torchrun, program, steps) == ("torchrun", "examples/fsdp2.py", "--steps=10000")
        command = [sys.executable, "-m", "torch.distributed.run", str(PROGRAM), self.mounted(url)]
        port = str(free_port())
        count = int(self.environment(0)["PET_NNODES"])
        return [
            Container(
                self.folder / f"log-{self.starts}-{index}",
                *(*command, f"--steps={STEPS}", "--pace=0.1"),
                **(self.environment(index) | {"PET_MASTER_PORT": port}),
            )
            for index in range(count)
        ]


def wait_for(script: Script, step: int, by: Launched) -> None:
    deadline = time.monotonic() + 120
    while not any(each.step >= step for each in script.steps()):
        assert by.process.poll() is None, by.log.read_text()
        assert time.monotonic() < deadline, by.log.read_text()
        time.sleep(0.05)


def check_same(found: Script, wanted: Script) -> None:
    """Each rank made each step once, over both starts, with the undisturbed run's loss and samples."""
    for rank in range(2):
        assert [each.step for each in found.steps(rank)] == list(range(1, STEPS + 1))
        assert found.trajectory(rank) == wanted.trajectory(rank)


@needs_container
@pytest.mark.torchrun
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_an_evicted_pod_has_all_pods_leave_at_one_step_and_new_pods_go_on(
    name: str, tmp_path: Path, runtime_dir: Path
) -> None:
    pods = Pods(name, tmp_path, runtime_dir)
    env = pods.environment(0)
    grace_s = pods.pod["terminationGracePeriodSeconds"]
    assert float(env["CKPT_SIGTERM_S"]) == float(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace_s
    (volume,) = pods.pod["volumes"]
    assert volume["name"] == pods.container["volumeMounts"][0]["name"]

    found = Script(PROGRAM, tmp_path / "records")
    first, second = pods.start()
    wait_for(found, 20, first.script)
    assert second.stop(grace_s) not in (0, -signal.SIGKILL)
    assert first.script.process.wait(60) not in (0, -signal.SIGKILL)
    outcome = json.loads(Path(env["CKPT_OUTCOME_FILE"]).read_text())
    assert (outcome["how"], outcome["level"], outcome["launch"]) == ("left", "store", "train")
    assert outcome["step"] == len(found.steps(0)) == len(found.steps(1)) < STEPS

    for pod in pods.start():
        pod.script.end(180)
    check_same(found, undisturbed(PROGRAM, tmp_path, STEPS))


class Cloud:
    """Runs the task of sky.yaml, a process for each node."""

    def __init__(self, folder: Path, runtime_dir: Path) -> None:
        self.folder, self.runtime_dir = folder, runtime_dir
        (self.task,) = documents("sky.yaml")
        self.notice = folder / "notice"
        self.nodes = 0

    def start(self) -> list[Launched]:
        run = self.task["run"]
        for old, new in {
            "torchrun": f"{sys.executable} -m torch.distributed.run",
            "examples/fsdp2.py": str(PROGRAM),
            "--steps 10000": f"--steps {STEPS} --pace 0.1",
            "29500": str(free_port()),
        }.items():
            assert old in run
            run = run.replace(old, new)
        return [self._node(run, rank) for rank in range(self.task["num_nodes"])]

    def _node(self, run: str, rank: int) -> Launched:
        home = self.folder / f"node-{self.nodes}"
        home.mkdir()
        env = {
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NUM_GPUS_PER_NODE": "1",
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
            "SKYPILOT_TASK_ID": "sky-managed-1_train-0",
            "URL": str(self.folder / "run"),
            "CKPT_OUTCOME_FILE": str(home / "outcome.json"),
            "CKPT_NOTICES": "given",
            "CKPT_NOTICE_FILE": str(self.notice),
            "CKPT_LISTEN": "127.0.0.1:0",
            "CKPT_RUNTIME_DIR": str(self.runtime_dir / str(self.nodes)),
            "RECORDS": str(self.folder / "records"),
        }
        self.nodes += 1
        return Launched(["bash", "-c", run], home / "log", env)


@pytest.mark.torchrun
@pytest.mark.timeout(400)
def test_a_task_of_skypilot_leaves_by_a_notice_with_the_code_that_recovers_it(
    tmp_path: Path, runtime_dir: Path
) -> None:
    cloud, found = Cloud(tmp_path, runtime_dir), Script(PROGRAM, tmp_path / "records")
    first, second = cloud.start()
    wait_for(found, 20, first)
    cloud.notice.write_text("+30")
    assert first.process.wait(120) in cloud.task["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert second.process.poll() is None, "the code of the other node comes later"
    assert second.process.wait(60) not in (0, 143)
    assert len(found.steps(0)) == len(found.steps(1)) < STEPS

    cloud.notice.unlink()
    for node in cloud.start():
        node.end(180)
    check_same(found, undisturbed(PROGRAM, tmp_path, STEPS))

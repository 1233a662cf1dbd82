"""Checks of two ranks that do not do alike: tests/checkpointer/ranks.py runs them, test_ranks_apart.py says what they
should see."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.trainer.link import collective
from tests.checkpointer import moving
from tests.checkpointer.loops import wait_agent_gone
from tests.checkpointer.ranks import Job, wait_until
from tests.checkpointer.runs import LATER, Seen, kill_agent


class Trouble:
    """An object of the user's, whose state cannot be read while `is_bad`."""

    is_bad = False

    def state_dict(self) -> dict[str, int]:
        if self.is_bad:
            raise ValueError("no state today")
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["n"] != 1:
            raise ValueError("another one's state")


class Broken(Trouble):
    """Whose state cannot be read once it was restored."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.is_bad = True


class Pupil:
    """A small model that the ranks train together: they meet in every step."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
        self.model = nn.Linear(3, 3)
        self.optim = optimizer(self.model.parameters(), lr=0.1)  # type: ignore[call-arg]
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optim}

    def train(self, together: bool = True) -> None:
        self.model(torch.ones(2, 3)).sum().backward()
        if together:
            dist.all_reduce(self.model.weight.grad)
        self.optim.step()


def said_by(handle: ckpt.Handle, level: Any = "store") -> str:
    try:
        handle.wait(level, timeout_s=60)
    except ckpt.SaveFailed as exc:
        return str(exc)
    return "saved"


def a_state_that_cannot_be_read(job: Job) -> dict[str, Any]:
    """On rank 1 alone, for one save, and then at the end."""
    trouble, pupil = Trouble(), Pupil()
    found: dict[str, Any] = {"said": []}
    try:
        with ckpt.Checkpointer(job.folder / "bad", {**pupil.state, "trouble": trouble}, policy=LATER) as ck:
            for step in ck.steps(6):
                pupil.train()
                trouble.is_bad = job.rank == 1 and step in (3, 6)
                if step in (2, 3, 4):
                    ck.step()
                    found["said"].append(said_by(ck.save()))
                found["step"] = step
    except ckpt.CommitFailed as exc:
        found["end"] = str(exc)
    return found


def an_agent_that_dies_in_a_save(job: Job) -> dict[str, Any]:
    """Rank 1 has come to it and goes on without it, rank 0 comes when there is another agent."""
    pupil, over, seen = Pupil(), job.folder / "over", Seen()
    found: dict[str, Any] = {}
    with ckpt.Checkpointer(job.folder / "dies", pupil.state, policy=LATER, sinks=(seen,)) as ck:
        for step in ck.steps(4):
            pupil.train()
            if step == 2:
                ck.step()
                if job.rank == 0:
                    seen.wait("save.awaited")  # rank 1 waits for this one
                    kill_agent(job.folder / "dies")
                    seen.wait("agent.restarted")
                    wait_until(over.exists)  # it may see the death late
                handle = ck.save()
                over.touch()
                found["said"] = said_by(handle, "local")
            found["step"] = step
    return found


def an_early_break(job: Job) -> dict[str, Any]:
    """Rank 1 leaves the loop after step 3, rank 0 after step 8."""
    pupil, found = Pupil(), dict[str, Any]()
    try:
        with ckpt.Checkpointer(job.folder / "early", pupil.state, policy=LATER) as ck:
            for step in ck.steps(8):
                pupil.train(together=False)
                if job.rank == 1 and step == 3:
                    break
            found["ended"] = step
    except ckpt.CommitFailed as exc:
        found["end"] = str(exc)
    return found


def a_failure_after_the_restore(job: Job) -> dict[str, Any]:
    """What was restored cannot be read again, on rank 1 alone: no rank goes on alone."""
    for is_bad in (False, True):
        trouble, pupil = Broken() if is_bad and job.rank == 1 else Trouble(), Pupil(torch.optim.Adam)
        try:
            with ckpt.Checkpointer(job.folder / "after", {**pupil.state, "trouble": trouble}, policy=LATER) as ck:
                for _ in ck.steps(2):
                    pupil.train()
        except ckpt.CkptError as exc:
            return {"error": [type(exc).__name__, str(exc)]}
        dist.barrier()
    return {}


def a_late_start(job: Job) -> dict[str, Any]:
    """Rank 1 comes once rank 0 was told that it does not. Then both enter once more: the ranks count alike."""
    told, said, usual_s = job.folder / "told", list[Any](), collective.MISSING_RANKS_S
    collective.MISSING_RANKS_S = 0.5

    def hear(event: ckpt.Event) -> None:
        if event.name == "enter.waiting":
            said.append([event.loud, event.data["ranks"], event.message])
            told.touch()

    if job.rank == 1:
        wait_until(told.exists)
    for name in "ab":
        with ckpt.Checkpointer(job.folder / f"late-{name}", {"x": 1}, sinks=(hear,)) as ck:
            ck.step()
        collective.MISSING_RANKS_S = usual_s
    return {"said": said}


def settings_of_two_nodes(job: Job) -> dict[str, Any]:
    """Each rank has an agent of its own, as on two machines, and other settings of memory-only nodes."""
    usual, found, at = os.environ["CKPT_RUNTIME_DIR"], dict[str, Any](), "127.0.0.1:9"  # where nobody listens
    (job.folder / "secret").touch(mode=0o600)
    (job.folder / "secret").write_text("ab" * 32)
    cases = {
        "alike": ([f"{at},127.0.0.1:19", f"127.0.0.1:19,{at}"], ["secret", "secret"]),
        "peers": ([at, ""], ["secret", "secret"]),
        "files": (["", at], ["", "secret"]),
        "secrets": (["", ""], ["secret", "missing"]),
    }
    for name, (peers, secrets) in cases.items():
        dist.barrier()
        url, told = job.folder / f"run-{name}", Seen()
        os.environ["CKPT_RUNTIME_DIR"] = f"{usual}/{name}{job.rank}"
        if peers[job.rank]:
            os.environ["CKPT_PEERS"] = peers[job.rank]
        if secrets[job.rank]:
            os.environ["CKPT_SECRET_FILE"] = str(job.folder / secrets[job.rank])
        with ckpt.Checkpointer(url, {"x": 1}, sinks=(told,)) as ck:
            ck.step()
        wait_agent_gone(url)
        runtime = Path(os.environ["CKPT_RUNTIME_DIR"])
        # A log stays if it has a warning, as of a second connection that was closed since the first one served.
        wait_until(lambda runtime=runtime: all(each.suffix == ".log" for each in runtime.iterdir()))  # type: ignore[misc]
        shutil.rmtree(runtime)
        found[name] = [[each.loud, each.data["variable"], each.data["rank"]] for each in told.named("nodes.differ")]
        for variable in ("CKPT_PEERS", "CKPT_SECRET_FILE"):
            os.environ.pop(variable, None)
    os.environ["CKPT_RUNTIME_DIR"] = usual
    return found


def what_does_not_stay_the_same(job: Job) -> list[Any]:
    """300 tensors that are the same on both, and `own`, which begins so and does not stay so. No optimizer state
    appears in the first step. Each start says what it began with; the first ends after step 2, the second right after
    its restore, the third after step 20, where `own` and `late` changed in a step in which the structure stayed."""
    found = []
    for steps in (2, 2, 20, 20):
        model = nn.ParameterDict({f"w{n:03}": nn.Parameter(torch.ones(7)) for n in range(300)})
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        own, late, seen = torch.zeros(5000), torch.zeros(100), Seen()
        state, said = {"model": model, "optim": optim, "own": own, "late": late}, ""
        with ckpt.Checkpointer(job.folder / "diverging", state, policy=LATER, sinks=(seen,)) as ck:
            came = [ck.restored.step, own.unique().tolist(), late.unique().tolist()]
            if came[0]:
                ck.save().wait("store", timeout_s=60)
            for step in ck.steps(steps):
                sum(p.sum() for p in model.values()).backward()
                optim.step()
                optim.zero_grad()
                if step == 1:
                    own[job.rank * 7] = job.rank + 1.0  # one element of many, which no sample need meet
                    ck.step()
                    ck.save().wait("store", timeout_s=60)
                if step == 19:
                    late.fill_(job.rank + 1.0)
                    ck.step()
                    said = said_by(ck.save())
        dist.barrier()
        found.append({"came": came, "said": said, "differs": len(seen.named("replica.differs"))})
    return found


def a_state_that_is_made_anew_whenever_it_is_asked_for(job: Job) -> dict[str, Any]:
    """Appointed, and by a signal that one rank gets in the second start; the third one finds what then was."""
    url, found, last = job.folder / "moving", list[Any](), ""
    os.environ["CKPT_NOTICES"] = "given"
    for start, (steps, every) in enumerate(((60, 3), (10**6, 10**6), (0, 3))):
        kind = moving.KINDS["clones"]().begin()
        try:
            with ckpt.Checkpointer(url, kind.state, policy=ckpt.Every(steps=every)) as ck:
                found.append([ck.restored.step, moving.bits(kind, ck.state) == last or not start])
                for step in ck.steps(steps):
                    kind.train(step, ck.state)
                    last = moving.bits(kind, ck.state)
                    time.sleep(0.01)
                    if start == 1 and step == 72 and job.rank == 1:
                        os.kill(os.getpid(), signal.SIGTERM)
        except ckpt.Leave:
            found.append([step, ck.receipt["committed_step"]])
        dist.barrier()
    job.ended(url)
    os.environ["CKPT_NOTICES"] = "off"
    return {"found": found}


def an_evaluation_that_polls(job: Job) -> list[Any]:
    """A notice comes in the midst of it, behind step 3: the ranks leave at one poll, or one waits here for ever."""
    url, word, pupil, found = job.folder / "polls", job.folder / "word", Pupil(), list[Any]()
    os.environ |= {"CKPT_NOTICES": "given", "CKPT_NOTICE_FILE": str(word)}
    try:
        with ckpt.Checkpointer(url, pupil.state, policy=LATER) as ck:
            for step in ck.steps(10**6):
                pupil.train()
                if step == 3:
                    ck.step()
                    (job.folder / "part").write_text("+60")
                    dist.barrier()
                    if job.rank == 0:
                        os.rename(job.folder / "part", word)
                for _ in range(1800 if step == 3 else 0):
                    dist.barrier()
                    time.sleep(0.05)
                    ck.poll()
    except ckpt.Leave:
        found = [step, ck.receipt["committed_step"]]
    dist.barrier()
    word.unlink(missing_ok=True)
    job.ended(url)
    os.environ["CKPT_NOTICES"] = "off"
    del os.environ["CKPT_NOTICE_FILE"]
    return found


CHECKS = (
    a_state_that_cannot_be_read,
    an_agent_that_dies_in_a_save,
    an_early_break,
    a_failure_after_the_restore,
    a_late_start,
    settings_of_two_nodes,
    what_does_not_stay_the_same,
    a_state_that_is_made_anew_whenever_it_is_asked_for,
    an_evaluation_that_polls,
)

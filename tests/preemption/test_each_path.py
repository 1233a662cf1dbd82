"""Each path is spoiled by itself, by every fault: the others are heard meanwhile, and it is heard afterwards."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest

from ckpt.preemption.aws import AwsListener
from ckpt.preemption.azure import AzureListener
from ckpt.preemption.gcp import MAINTENANCE, PREEMPTED, GcpListener, Question
from ckpt.preemption.notice import Notice, NoticeChange, Withdrawn
from tests.preemption import test_aws, test_azure, test_gcp
from tests.preemption.fakes import (
    Bad,
    Clock,
    Turns,
    heard,
    same,
    serving,
    timeout_s,
)

ALWAYS = 1000  # requests
SAYS = {
    "aws-spot": (test_aws.SPOT, '{"action": "terminate", "time": "2030-03-17T17:48:20Z"}'),
    "aws-rebalance": (test_aws.REBALANCE, '{"noticeTime": "2030-03-17T17:46:40Z"}'),
    "aws-maintenance": (test_aws.MAINTENANCE, json.dumps([test_aws.event()])),
    "aws-lifecycle": (test_aws.LIFECYCLE, "Terminated"),
}


@contextlib.contextmanager
def ec2_that_says_all(clock: Clock, bad: Bad) -> Iterator[tuple[test_aws.Ec2, AwsListener]]:
    with serving(test_aws.Ec2()) as ec2:
        ec2.says, ec2.tokens, ec2.answer, ec2.now_s = dict(SAYS.values()), 0, ec2.reply, clock.now_s
        yield ec2, AwsListener(ec2.endpoint, timeout_s=timeout_s(bad), now_s=clock.now_s)


def drain(told: list[NoticeChange]) -> tuple[list[str], list[str]]:
    """The sources of the notices that were told since the last call, and of what was withdrawn."""
    notices = [word.source for word in told if isinstance(word, Notice)]
    withdrawn = [word.source for word in told if isinstance(word, Withdrawn)]
    told.clear()
    return notices, withdrawn


@pytest.mark.parametrize("bad", Bad, ids=lambda bad: bad.name)
@pytest.mark.parametrize("source", SAYS)
def test_a_path_of_ec2s_that_is_spoiled_hides_no_other_and_is_heard_when_it_answers(source: str, bad: Bad) -> None:
    path, body = SAYS[source]
    others = [other for other in SAYS if other != source]
    is_silence = bad is Bad.NO_SUCH_PATH  # it means that nothing stands
    clock, told = Clock(), list[NoticeChange]()
    with ec2_that_says_all(clock, bad) as (ec2, listener):

        def spoiled() -> None:
            assert drain(told) == (others, [])

        def mend() -> None:
            assert drain(told) == ([], [])
            ec2.mend()

        def spoil_again_while_the_others_end() -> None:
            assert drain(told) == ([source], [])
            ec2.bad(bad, ALWAYS, path)
            ec2.says = {path: body}

        def mend_again() -> None:
            assert drain(told) == ([], sorted([*others, *[source] * is_silence], key=list(SAYS).index))
            ec2.mend()

        ec2.bad(bad, ALWAYS, path)
        script = (spoiled, mend, spoil_again_while_the_others_end, mend_again)
        listener.listen(Turns(clock, *script), told.append)
        assert drain(told) == ([source] * is_silence, [])


@pytest.mark.parametrize("bad", Bad, ids=lambda bad: bad.name)
def test_ec2s_notices_are_heard_when_a_token_can_be_had_and_none_ends_while_it_cannot(bad: Bad) -> None:
    clock, told = Clock(), list[NoticeChange]()
    with ec2_that_says_all(clock, bad) as (ec2, listener):

        def mend() -> None:
            assert drain(told) == ([], [])
            assert {asked.method for asked in ec2.asked} == {"PUT"}, "something was asked without a token"
            ec2.mend()

        def spoil_again_while_they_end() -> None:
            assert drain(told) == (list(SAYS), [])
            ec2.tokens += 1  # the one that was given is valid no longer
            ec2.bad(bad, ALWAYS, "api/token")
            ec2.says = {}

        def mend_again() -> None:
            assert drain(told) == ([], [])
            ec2.mend()

        ec2.bad(bad, ALWAYS, "api/token")
        listener.listen(Turns(clock, same, mend, spoil_again_while_they_end, mend_again), told.append)
        assert drain(told) == ([], list(SAYS))


@pytest.mark.parametrize("bad", Bad, ids=lambda bad: bad.name)
def test_azures_events_are_heard_when_the_name_of_the_vm_is_known(bad: Bad) -> None:
    clock = Clock()
    with serving(test_azure.Azure()) as azure:
        azure.events, azure.answer, azure.now_s = [test_azure.event()], azure.reply, clock.now_s
        azure.bad(bad, 2, "compute/name")
        told = heard(AzureListener(azure.endpoint, timeout_s=timeout_s(bad), now_s=clock.now_s), clock, same, same)
        assert [type(word) for word in told] == [Notice]
        assert ["compute/name" in path for path in azure.paths()] == [True, True, True, False]


@pytest.mark.parametrize("bad", Bad, ids=lambda bad: bad.name)
@pytest.mark.parametrize("question", [PREEMPTED, MAINTENANCE], ids=lambda question: question.source)
def test_what_changes_while_a_long_poll_of_compute_engines_is_spoiled_is_heard(question: Question, bad: Bad) -> None:
    before, after = next(iter(question.meanings)), list(question.meanings)[-1]
    clock = Clock()
    with serving(test_gcp.Engine(before)) as engine:

        def change_while_deaf() -> None:
            engine.bad(bad, path="wait_for_change")
            engine.set(after)

        listener = GcpListener(question, engine.endpoint, timeout_s=timeout_s(bad), wait_s=0, now_s=clock.now_s)
        told = heard(listener, clock, change_while_deaf, same)
        assert [type(word) for word in told] == [Notice]
        assert ["wait_for_change" in path for path in engine.paths()] == [False, True, False]

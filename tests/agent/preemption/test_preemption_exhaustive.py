"""Leaving, explored without chance: every order of what two or three ranks, their agent and their launcher can do
around one notice, with a bounded number of faults. What random schedules may miss (test_preemption_sim) is met here.

What can happen: a rank comes to a boundary; a message arrives, in the order of its connection, however late; the
verdict reaches a rank; hashing ends; time passes; the notice is taken back. The faults: a message is lost or comes
twice, a connection breaks, the agent dies and the next one knows nothing, a rank dies. Where each rank is on a node of
its own, with that agent on the first one's, each has a control page of its own; what goes to another node's agent comes
there in order, or is lost with the agent that sent it; and such an agent may die, too.
CKPT_SIM_DEEP=1 adds the starts that take minutes.

After every path of choices the faults end, and everybody must come to an end or train on: nobody hangs at a hold. On
the way nobody is told another verdict on a round than the others, unless the job is broken anyway, nobody leaves in
order unless every rank has staged that step, and while all ranks are known to live they are waited for to the last.
"""

from __future__ import annotations

import marshal
import os
import pickle
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import MethodType
from typing import Any

import pytest
import xxhash

from ckpt.agent.preemption.exit_vote import END_S
from ckpt.agent.preemption.notice_relay import ExitTiming, StandingNotice
from ckpt.agent.scheduler.scheduler import Scheduler
from ckpt.agent.state import actions as do
from ckpt.agent.state.rank_presence import Presence
from ckpt.ipc.control_page import ControlWord, RankPlace, WordKind
from ckpt.ipc.notice_sources import SIGNAL_SOURCE
from ckpt.policy.save_options import Every
from ckpt.types import Version

LAST_STEP = 4  # enough for an appointment, and for another one after it
CALM_STEPS = 30
CALM_MAX = 2000  # moves; more than any path to the end takes
LEAD_S = 30.0
KEY = "SIGTERM"

FAULTS = ("lose", "repeat", "break", "die", "kill", "restart")
Move = tuple[Any, ...]


@dataclass
class Rank:
    """`page`: which agent's control page it has. `left_by`: what an earlier page said at the end."""

    step: int = 1  # entered
    phase: str = "trains"  # holds, left, dead
    attempt_number: int = 0  # it holds at
    version: Version | None = None
    seen: int = 0
    shows: bool = True
    connected: bool = True
    checked: bool = True  # it has looked at the page since its connection broke
    connection: int = 0
    page: int = 0
    left_by: int = 0
    to_agent: list[Move] = field(default_factory=list)
    to_rank: list[Move] = field(default_factory=list)


@dataclass
class World:
    """`pages`: the verdict on each agent's control page. `verdicts`: what ranks acted upon, by round."""

    group: Scheduler
    ranks: list[Rank]
    source: str
    faults: int
    waits: int  # how often time may pass
    now_s: float = 0.0
    words: dict[int, ControlWord] = field(default_factory=dict)  # by slot
    pages: list[int] = field(default_factory=lambda: [0])
    hashing: tuple[int, int] | None = None
    stands: bool = True
    told: bool = False  # the present agent
    at: list[int] = field(default_factory=list)  # by rank: the page of its node
    nodes: bool = False  # whether each rank is on one of its own
    to_node: list[list[Move]] = field(default_factory=list)
    broken: bool = False  # a rank is dead, or they were told to end
    may_withdraw: bool = True
    last_step: int = LAST_STEP
    verdicts: dict[int, set[bool]] = field(default_factory=dict)
    content: dict[tuple[int, int], int] = field(default_factory=dict)  # (slot, rank) -> round
    outcomes: list[str] = field(default_factory=list)


def begin(world: int, source: str, faults: int, waits: int, ahead: bool = False, nodes: bool = False) -> World:
    """A last appointment is made, for the end of the step that all ranks are in. `ahead`: but for the first one, which
    was past it before it could read that. `nodes`: each is on one of its own."""
    made = World(_agent(world, 1, nodes), [Rank() for _ in range(world)], source, faults, waits, nodes=nodes)
    made.to_node = [[] for _ in range(world)]
    made.at = [0] * world
    for rank in range(1, world if nodes else 1):
        made.pages.append(0)
        made.at[rank] = made.ranks[rank].page = rank
    for rank in range(world):
        made.group.record_join(rank)
        made.group.arenas.record_layout()
    made.group.appointments.record_start(0, 0.0)
    decide(made)
    _tell(made)
    (word,) = made.words.values()
    for rank in made.ranks:
        rank.step = word.step
    made.ranks[0].step += ahead
    return made


def _agent(world: int, first_attempt: int, nodes: bool) -> Scheduler:
    made = Scheduler(world, Every(steps=1000), first_attempt=first_attempt)
    made.facts.is_single_node = not nodes
    return made


# -- what can happen


def moves(w: World) -> Iterator[Move]:
    for number, rank in enumerate(w.ranks):
        if rank.phase == "trains" and _may_end_step(w, rank):
            yield "step", number
        if rank.to_agent:
            yield "arrive", number
        if rank.to_rank:
            yield "hear", number
        if w.to_node[number]:
            yield "relay", number
        if not rank.connected and rank.phase == "left" and w.nodes:
            yield "goes", number
        if not rank.connected and rank.phase in ("trains", "holds"):
            yield ("rejoin" if rank.checked or rank.phase == "trains" else "check"), number
    if w.hashing is not None:
        yield ("hashed",)
    if w.stands and not w.told and any(rank.connected for rank in w.ranks):
        yield ("tell",)
    if w.stands and w.told and w.may_withdraw:
        yield ("withdraw",)
    if w.waits > 0 and w.group.next_wake_s(w.now_s) is not None:
        yield ("wait",)


def faults(w: World) -> Iterator[Move]:
    if not w.faults:
        return
    for number, rank in enumerate(w.ranks):
        if rank.to_agent and rank.to_agent[0][0] in ("snapshot-staged", "snapshot-missed"):
            yield "lose", number
            yield "repeat", number
        if rank.connected and rank.phase in ("trains", "holds"):
            yield "break", number
        if rank.phase in ("trains", "holds"):
            yield "die", number
        if w.nodes and number and rank.phase in ("trains", "holds"):
            yield "restart", number
    yield ("kill",)


def _may_end_step(w: World, rank: Rank) -> bool:
    """Training is a chain of collectives: a step ends where all ranks are in it, or beyond. One that holds is not."""
    return (
        rank.step <= w.last_step
        and all(
            other.step + (other.phase == "trains") > rank.step
            for other in w.ranks
            if other.phase not in ("left", "dead")
        )
        and all(other.phase in ("trains", "holds") for other in w.ranks)
    )


def apply(w: World, move: Move) -> None:
    what = move[0]
    if what in FAULTS:
        w.faults -= 1
    globals()[f"_{what}"](w, *move[1:])


def _step(w: World, number: int) -> None:
    rank = w.ranks[number]
    ended = rank.step
    rank.step, rank.shows = ended + 1, rank.connected
    for word in list(w.words.values()) if rank.connected else ():
        if word.attempt_number != rank.seen and word.place_for(ended, 0) is not RankPlace.EARLY:
            _keep(w, number, ended, word)


def _keep(w: World, number: int, ended: int, word: ControlWord) -> None:
    rank = w.ranks[number]
    rank.seen = word.attempt_number
    if word.place_for(ended, 0) is RankPlace.LATE:
        rank.to_agent.append(("snapshot-missed", word.attempt_number))
        return
    assert word.kind is WordKind.HOLD
    rank.phase, rank.attempt_number, rank.version = "holds", word.attempt_number, Version(ended)
    w.content[word.slot, number] = word.attempt_number
    rank.to_agent += [
        ("snapshot-staged", word.attempt_number, word.slot),
        ("rank-holds", word.attempt_number, rank.connection),
    ]


def _arrive(w: World, number: int) -> None:
    _deliver(w, number, w.ranks[number].to_agent.pop(0))


def _repeat(w: World, number: int) -> None:
    _deliver(w, number, w.ranks[number].to_agent[0])


def _lose(w: World, number: int) -> None:
    w.ranks[number].to_agent.pop(0)


def _deliver(w: World, number: int, message: Move) -> None:
    group, rank = w.group, w.ranks[number]
    match message:
        case ("snapshot-staged", attempt, slot):
            assert rank.version is not None
            group.save_attempts.record_staging(number, attempt, rank.version, slot, group.arenas.division, 0.0)
        case ("snapshot-missed", attempt):
            group.save_attempts.record_miss(number, attempt, "late")
        case ("rank-holds", attempt, connection):
            group.exit_vote.record_hold(number, attempt, ("rank-holds", number, attempt, connection))
    decide(w)


def _hear(w: World, number: int) -> None:
    rank = w.ranks[number]
    match rank.to_rank.pop(0):
        case ("verdict", attempt, leave):
            _acts(w, number, attempt, leave)
        case ("end-process",):
            _die(w, number)
        case ("hold-awaited", word):
            past = word.place_for(rank.step - 1, 0) is not RankPlace.EARLY
            if rank.phase == "trains" and rank.seen != word.attempt_number and past:
                rank.to_agent.append(("snapshot-missed", word.attempt_number))


def _acts(w: World, number: int, attempt: int, leave: bool) -> None:
    rank = w.ranks[number]
    assert (rank.phase, rank.attempt_number) == ("holds", attempt)
    rank.to_rank.clear()
    said = w.verdicts.setdefault(attempt, set())
    said.add(leave)
    assert len(said) == 1 or w.broken, f"round {attempt}: some leave, some go on"
    if leave:
        rank.phase = "left"
        if rank.connected:
            w.group.rank_states.record_leave_request(number, ("leave", number))
            decide(w)
    else:
        rank.phase = "trains"


def _relay(w: World, number: int) -> None:
    """What the agent has sent to that rank's node."""
    match w.to_node[number].pop(0):
        case ("page", attempt):
            w.pages[w.at[number]] = attempt
        case ("verdict", connection, attempt, leave):
            _tells(w, number, connection, attempt, leave)


def _tells(w: World, number: int, connection: int, attempt: int, leave: bool) -> None:
    rank = w.ranks[number]
    if connection == rank.connection and rank.phase == "holds":
        rank.to_rank.append(("verdict", attempt, leave))


def _break(w: World, number: int) -> None:
    _disconnect(w, number)
    w.group.record_disconnect(number, w.now_s)
    decide(w)


def _disconnect(w: World, number: int) -> None:
    rank = w.ranks[number]
    rank.connected = rank.shows = rank.checked = False
    rank.to_agent.clear()
    rank.to_rank.clear()
    rank.connection += 1


def _check(w: World, number: int) -> None:
    """Its request has failed: perhaps the verdict is on the page."""
    rank = w.ranks[number]
    rank.checked = True
    if rank.attempt_number in (rank.left_by, w.pages[rank.page]):
        _acts(w, number, rank.attempt_number, True)


def _rejoin(w: World, number: int) -> None:
    rank = w.ranks[number]
    w.group.exit_vote.record_former_verdict(w.pages[rank.page] or rank.left_by)
    if rank.page != w.at[number]:
        rank.left_by, rank.page, rank.seen = w.pages[rank.page] or rank.left_by, w.at[number], 0
    rank.connected = rank.shows = True
    w.group.record_join(number)
    w.group.arenas.record_layout()
    if rank.phase == "holds":
        rank.to_agent.append(("rank-holds", rank.attempt_number, rank.connection))
    decide(w)


def _goes(w: World, number: int) -> None:
    """It leaves, and says so to the next agent: it joins, to be answered once what it staged is safe."""
    if w.group.rank_states[number].presence is Presence.HERE:
        _rejoin(w, number)
        w.group.exit_vote.record_exit_order("", LEAD_S, None)
        w.group.rank_states.record_leave_request(number, ("leave", number))
        decide(w)
    w.ranks[number].connected = True


def _restart(w: World, number: int) -> None:
    """The agent of another node: it knows nothing, and its page says nothing."""
    w.pages.append(0)
    w.at[number] = len(w.pages) - 1
    w.to_node[number].clear()
    _break(w, number)


def _die(w: World, number: int) -> None:
    """What it had sent is handled before its death is."""
    rank = w.ranks[number]
    w.broken = True
    while rank.to_agent:
        _arrive(w, number)
    rank.phase = "dead"
    rank.to_rank.clear()
    w.group.record_death(number)
    decide(w)


def _kill(w: World) -> None:
    """The agent. Who has left, or is dead, is unknown to the next one."""
    w.pages.append(0)
    w.group = _agent(len(w.ranks), 100 * len(w.pages), w.nodes)
    w.group.appointments.record_agent_restart(w.now_s)
    w.words, w.hashing, w.told = {}, None, False
    for number in range(len(w.ranks)):
        if number == 0 or not w.nodes:
            w.at[number] = len(w.pages) - 1
        w.to_node[number].clear()
        _disconnect(w, number)
    decide(w)


def _hashed(w: World) -> None:
    assert w.hashing is not None
    slot, number = w.hashing
    w.hashing = None
    w.group.save_attempts.record_assembly(slot, number, "")
    decide(w)


def _tell(w: World) -> None:
    w.told = True
    w.group.preemption.add_notice(StandingNotice(w.source, KEY, LEAD_S, w.now_s, exit_timing=ExitTiming.AT_ONCE))
    decide(w)


def _withdraw(w: World) -> None:
    w.stands = w.may_withdraw = False
    w.group.preemption.withdraw_notice(w.source, KEY)
    decide(w)


def _wait(w: World) -> None:
    wake_s = w.group.next_wake_s(w.now_s)
    assert wake_s is not None
    w.waits -= 1
    w.now_s = max(wake_s, w.now_s + 0.001)
    decide(w)


# -- the agent's hands


def decide(w: World) -> None:
    while found := w.group.decide(w.now_s, [rank.step if rank.shows else 0 for rank in w.ranks]):
        for action in found:
            _carry_out(w, action)
    w.group.check()


def _carry_out(w: World, action: do.Action) -> None:
    group, ranks = w.group, w.ranks
    match action:
        case do.SetWord(slot, word):
            w.words.pop(slot, None)
            w.words |= {slot: word} if word is not None else {}
        case do.SetVerdict(number):
            _judged(w, number)
        case do.Divide(version):
            group.arenas.record_division(version, "d", (1,) * len(ranks), 2)
        case do.MakeArenas(slot, sizes):
            group.arenas.record_arenas(slot, sizes)
        case do.OfferSlot(slot):
            for number in range(len(ranks)):
                group.arenas.record_warm_arena(number, slot, group.arenas.division)
        case do.Assemble(slot, number):
            assert {w.content[slot, rank] for rank in range(len(ranks))} == {number}
            w.hashing = slot, number
        case do.Commit(slot):
            group.commits.record_commit(slot, "", w.now_s)  # when it ends makes no difference to the verdict
        case do.AnswerRequest(("rank-holds", number, attempt, connection), body):
            if w.nodes and number:
                w.to_node[number].append(("verdict", connection, attempt, body["leave"]))
            else:
                _tells(w, number, connection, attempt, body["leave"])
        case do.NotifyRanks({"t": "end-process"}):
            all_live = not (group.rank_states.summary.first_failed or group.rank_states.summary.disconnected)
            assert w.broken or not all_live or w.now_s >= LEAD_S - END_S, "all live, and are not waited for"
            w.broken = True
            for rank in ranks:
                if rank.connected and rank.phase in ("trains", "holds"):
                    rank.to_rank.append(("end-process",))
        case do.NotifyRanks({"t": "hold-awaited", "word": packed}):
            for rank in ranks:
                if rank.connected and rank.phase in ("trains", "holds"):
                    rank.to_rank.append(("hold-awaited", ControlWord.unpack(packed)))
        case do.WriteOutcome(body):
            w.outcomes.append(body["how"])
        case do.Close():
            group.leave_requests.record_close()


def _judged(w: World, number: int) -> None:
    assert not w.pages[w.at[0]], "two verdicts"
    w.pages[w.at[0]] = number
    for other in range(1, len(w.ranks) if w.nodes else 1):
        w.to_node[other].append(("page", number))
    if not w.broken:
        assert all(rank.phase == "holds" and rank.attempt_number == number for rank in w.ranks), (
            "who does not hold leaves"
        )
        (attempt,) = (each for each in w.group.slots.attempts() if each.number == number)
        assert len(attempt.staged_ranks) == len(w.ranks), "they leave by a step that is not staged"
        assert {w.content[attempt.slot, rank] for rank in range(len(w.ranks))} == {number}


# -- exploring


def comes_to_an_end(w: World) -> str:
    """Nothing goes wrong any more. What becomes of the job."""
    w.may_withdraw, w.faults, w.waits = False, 0, 0
    in_time = w.stands and w.now_s < LEAD_S
    w.last_step += CALM_STEPS
    for _ in range(CALM_MAX):
        move = next(moves(w), None)
        if move is None and w.group.next_wake_s(w.now_s) is not None and w.now_s < 4 * LEAD_S:
            move = ("wait",)
        if move is None:
            break
        apply(w, move)
    phases = {rank.phase for rank in w.ranks}
    assert "holds" not in phases, f"somebody hangs: {w.ranks}"
    if w.broken:
        return "broken"
    assert phases in ({"left"}, {"trains"}), f"some are here, some are not: {w.ranks}"
    if phases == {"trains"}:
        assert not in_time, "the deadline has passed, and nobody has left"
        assert all(rank.step > w.last_step for rank in w.ranks), f"training stands still: {w.ranks}"
        return "stayed"
    assert w.outcomes or len(w.pages) > 1, "they left, and nobody said what was saved"
    return "left"


def explore(start: World) -> tuple[Counter[str], int]:
    """Every state that can be reached; and the end, from each where nothing more is sure to happen."""
    seen, stack, ends = {state_of(start)}, [(pickle.dumps(start), ())], Counter[str]()
    while stack:
        at, path = stack.pop()
        world = pickle.loads(at)
        follows = [*moves(world), *faults(world)]
        if all(move[0] in ("withdraw", "wait", *FAULTS) for move in follows):  # all that does not have to happen
            ends[_checked(comes_to_an_end, world, path)] += 1
        for move in follows:
            child = pickle.loads(at)
            _checked(apply, child, (*path, move), move)
            state = state_of(child)
            if state not in seen:
                seen.add(state)
                stack.append((pickle.dumps(child), (*path, move)))
    return ends, len(seen)


def state_of(w: World) -> bytes:
    """Equal for equal worlds. What pickle gives is not: there it counts, too, which of two equal values are one object,
    and of that there are up to five kinds for one state."""
    return xxhash.xxh3_128_digest(marshal.dumps(_plain(w, (), {}), 2))


def _plain(value: Any, within: tuple[int, ...], parts: dict[int, int]) -> Any:
    """Nested tuples of numbers and texts that say the same. `within`: what it is a part of; that is not said again.
    `parts`: the scheduler's parts that are said already; several others know each."""
    kind = type(value)
    if value is None or kind in (int, float, bool, str, bytes):
        return value
    if id(value) in within:
        return "within", within.index(id(value))
    if id(value) in parts:
        return "part", parts[id(value)]
    within = (*within, id(value))
    if kind in (list, tuple, deque):
        return (kind.__name__, *(_plain(each, within, parts) for each in value))
    if kind in (set, frozenset):
        return "set", *sorted((_plain(each, within, parts) for each in value), key=repr)
    if kind is dict:
        pairs = ((_plain(key, within, parts), _plain(each, within, parts)) for key, each in value.items())
        return "dict", *sorted(pairs, key=repr)
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, MethodType):
        return value.__qualname__, _plain(value.__self__, within, parts)
    if hasattr(value, "__dict__"):
        parts[id(value)] = len(parts)
    return (kind.__name__, *(_plain(getattr(value, name, None), within, parts) for name in _fields(kind, value)))


_FIELDS: dict[type, tuple[str, ...]] = {}


def _fields(kind: type, value: Any) -> tuple[str, ...]:
    slots = _FIELDS.get(kind)
    if slots is None:
        slots = _FIELDS[kind] = tuple(name for each in kind.__mro__ for name in getattr(each, "__slots__", ()))
    return (*slots, *sorted(getattr(value, "__dict__", ())))


def _checked(what: Any, world: World, path: tuple[Move, ...], *given: Any) -> Any:
    try:
        return what(world, *given)
    except Exception as exc:
        raise AssertionError(f"{exc}\nafter {list(path)}") from exc


Start = tuple[Any, ...]  # of `begin`
STARTS: list[Start] = [
    (2, "cloud", 1, 0, False),
    (2, SIGNAL_SOURCE, 1, 0, False),
    (2, "cloud", 0, 1, False),
    (2, SIGNAL_SOURCE, 1, 1, True),
    (2, SIGNAL_SOURCE, 2, 0, False),
    (3, "cloud", 0, 1, False),
    (3, SIGNAL_SOURCE, 0, 1, False),
    (3, "cloud", 1, 0, True),
    (2, "cloud", 1, 0, False, True),
    (2, SIGNAL_SOURCE, 1, 0, False, True),
    (2, "cloud", 1, 1, False, True),
    (3, "cloud", 0, 1, False, True),
]
DEEP: list[Start] = [
    (3, "cloud", 1, 0, False, True),
    (3, SIGNAL_SOURCE, 1, 0, False),
    (3, SIGNAL_SOURCE, 1, 1, True),
    (2, "cloud", 1, 2, False),
    (2, "cloud", 2, 0, False, True),
    (3, "cloud", 1, 1, False),
    (3, SIGNAL_SOURCE, 1, 1, False),
    (3, SIGNAL_SOURCE, 1, 0, False, True),
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", STARTS + (DEEP if os.environ.get("CKPT_SIM_DEEP") else []))
def test_no_order_of_things_splits_the_ranks_or_hangs_one(start: Start) -> None:
    ends, states = explore(begin(*start))
    print(f"{states} states; {dict(ends)}")
    assert ends["left"]
    assert ends["stayed"]

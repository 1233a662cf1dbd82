"""The entry into the block: the ranks find their agents, agree on what to restore, and fill their state from it.

All collectives of a job happen here: one gather of facts, one broadcast of each decision, one agreement on each
outcome. Once a candidate was tried, the entry ends in a restored checkpoint or in an error, never in a fresh start.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgpack
import torch

from ckpt.errors import DamagedData, NewerFormat, NoCheckpoint, StateMismatch, UsageError
from ckpt.events import Events
from ckpt.format.manifest import Manifest
from ckpt.format.record import decode_manifest
from ckpt.ipc import secret
from ckpt.ipc.addresses import Address
from ckpt.ipc.client import Pending
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import coordinator_of, encode_nodes
from ckpt.settings import Settings, store_environment
from ckpt.storage.failure import unrestorable_hint
from ckpt.storage.names import redact_url
from ckpt.threads import Tasks
from ckpt.trainer.link import collective
from ckpt.trainer.link.export_plan import write_companions
from ckpt.trainer.link.link import JoinTerms
from ckpt.trainer.link.options import UserOptions
from ckpt.trainer.loop.run_report import RunReport
from ckpt.trainer.loop.saver import Saver
from ckpt.trainer.loop.worker_signals import shield_loaders
from ckpt.trainer.restore import restore
from ckpt.trainer.restore.init_weights import join_reasons, load_weights
from ckpt.trainer.restore.restore_plan import RestorePlan
from ckpt.trainer.snapshot.cuda_copier import make_copier
from ckpt.trainer.snapshot.snapshot import Snapshotter
from ckpt.trainer.state.adapters import check_adapters
from ckpt.trainer.state.mesh_coordinate import Coordinate, coordinate_by_rank
from ckpt.trainer.state.mesh_coordinate import find_coordinate as find_coordinate
from ckpt.trainer.state.names import shorten_names
from ckpt.trainer.state.state_walk import StateWalker
from ckpt.types import Identity, Version

T = TypeVar("T")

ALIKE = "all ranks must construct the Checkpointer alike"
# A start fails after so long without progress. The agent lists the store, and may watch another job.
SILENCE_S = 900.0


@dataclass(frozen=True, slots=True)
class StartDecision:
    """The decision of rank 0's agent, for all ranks: which epoch begins, and from which candidate."""

    fields: dict[str, Any]
    manifest: bytes

    @property
    def epoch(self) -> str:
        return str(self.fields["epoch"])

    @property
    def candidate(self) -> dict[str, Any] | None:
        return self.fields.get("candidate")

    @staticmethod
    def encode(message: Message) -> bytes:
        manifest = message.blobs[0] if message.blobs else b""
        packed: bytes = msgpack.packb([message.fields, manifest])
        return packed

    @staticmethod
    def parse(data: bytes) -> StartDecision:
        fields, manifest = msgpack.unpackb(data, max_bin_len=1 << 28)
        return StartDecision(fields, manifest)


@dataclass(frozen=True, slots=True)
class RestoreAttempt(Generic[T]):
    """The outcome, agreed by all ranks, of one part of restoring a candidate. `failure`: "" if the part went well on
    every rank; only then there is a `value`."""

    value: T | None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What was restored. `level`: "none" if nothing was. `sources`: bytes read on this rank, by level. `steps_lost`:
    see `RunReport`. `stored`: whether the checkpoint is in the store, from wherever it was read."""

    version: Version
    level: Any
    identity: str | None
    source: str
    bytes_by_level: dict[str, int]
    steps_lost: int | None
    is_stored: bool = True


def enter(
    asked: UserOptions,
    settings: Settings,
    tasks: Tasks,
    events: Events,
    receipt: RunReport,
    ends: list[Callable[[], object]],
) -> tuple[Saver, RestoreResult]:
    """Enters the job, on every rank. `ends`: gets a function for everything that has to be ended. Errors: those of
    ckpt.Checkpointer, on all ranks."""
    group = collective.open_group(asked.process_group, events)
    coordinate = _agree_on_coordinate(group, asked, events)
    saver = collective.run_on_all_ranks(
        group, lambda: _make_saver(asked, settings, tasks, events, receipt, ends, coordinate, group.world > 1)
    )
    mine = collective.run_on_all_ranks(group, lambda: _encode_facts(asked, settings, saver, coordinate))
    facts = [msgpack.unpackb(said) for said in group.gather(mine)]
    _check_facts(facts)
    if group.rank == 0:
        _warn_differing_settings(events, facts)
    nodes = _gather_nodes(group, settings, saver, facts)
    launch = group.gather(settings.launch.encode())[0].decode()
    begin = {
        "launch": launch,
        "world": group.world,
        "take_over": asked.take_over,
        "strict": asked.strict,
        "store_env": store_environment(),
        "coordinator": coordinator_of(nodes),
        "peers": facts[0]["peers"],
    }
    decision = _request_decision(group, saver, "begin", begin, [encode_nodes(nodes)] if nodes else [])
    try:
        found = _join_and_restore(
            group, asked, tasks, events, saver, coordinate, launch, decision, nodes, begin["peers"]
        )
        receipt.read_bytes.update(found.bytes_by_level)
        receipt.steps_lost = found.steps_lost
    except BaseException:
        saver.link.give_up()
        raise
    return saver, found


def _join_and_restore(
    group: collective.RankGroup,
    asked: UserOptions,
    tasks: Tasks,
    events: Events,
    saver: Saver,
    coordinate: Coordinate,
    launch: str,
    decision: StartDecision,
    nodes: list[dict[str, Any]],
    peers: list[str],
) -> RestoreResult:
    terms = JoinTerms(
        decision.epoch,
        group.rank,
        group.world,
        coordinate.text,
        asked.options,
        launch,
        decision.fields.get("parent"),
        list(decision.fields.get("ancestors") or []),
        nodes,
        peers,
    )
    if (export := asked.export) is not None:
        collective.run_on_all_ranks(group, lambda: write_companions(export, asked.state) if group.rank == 0 else None)
    offer = saver.make_offer(Version(0), positions=False)
    collective.run_on_all_ranks(group, lambda: saver.link.join(terms, offer))
    found, last = _restore(group, asked, tasks, events, saver, decision)
    saver.link.terms = replace(
        terms, parent=last.fields.get("parent"), ancestors=list(last.fields.get("ancestors") or [])
    )
    done = {"epoch": terms.epoch, "identity": found.identity}
    collective.run_on_all_ranks(
        group, lambda: saver.link.request("restored", done, SILENCE_S) if group.rank == 0 else None
    )
    is_told = collective.run_on_all_ranks(group, lambda: saver.offer_changes(found.version))
    if not is_told and (found.identity is not None or asked.init is not None):
        # The agent has the hashes of the state before the restore.
        saver.mark_hashes_stale()
    return found


def _agree_on_coordinate(group: collective.RankGroup, asked: UserOptions, events: Events) -> Coordinate:
    """This rank's coordinate, in a mesh that all ranks share. Each rank finds a mesh in its own part of the state. If
    these differ (a pipeline of which one stage is sharded), the ranks are named by their numbers instead, at each
    start.

    Errors: UsageError if the meshes differ and mesh= was given."""
    mine = collective.run_on_all_ranks(group, lambda: find_coordinate(asked.state, group.rank, group.world, asked.mesh))
    said = [msgpack.unpackb(each) for each in group.gather(msgpack.packb([mine.mesh, asked.mesh is not None]))]
    other = next((rank for rank, (mesh, _) in enumerate(said) if mesh != said[0][0]), None)
    if other is None:
        return mine
    differ = f"rank 0 stands in the mesh {_mesh_text(said[0][0])}, rank {other} in {_mesh_text(said[other][0])}"
    if any(is_given for _, is_given in said):
        raise UsageError(f"{differ}: give mesh= to all ranks, and the same one")
    if group.rank == 0:
        text = f"{differ}, by their parts of the state; ranks are told apart by number: give mesh= to name their axes"
        events.emit("mesh.differs", f"ckpt: {text}", loud=True, rank=other)
    return coordinate_by_rank(group.rank, group.world)


def _mesh_text(mesh: list[Any]) -> str:
    return " x ".join(f"{name} {size}" for name, size in mesh)


def _make_saver(
    asked: UserOptions,
    settings: Settings,
    tasks: Tasks,
    events: Events,
    receipt: RunReport,
    ends: list[Callable[[], object]],
    coordinate: Coordinate,
    replicated: bool,
) -> Saver:
    walker = StateWalker(asked.state, coordinate, asked.generators, asked.trainable_only)
    snapshotter = Snapshotter(make_copier(), lazy=asked.lazy, events=events)
    ends.append(snapshotter.close)
    saver = Saver(asked.url, settings, walker, snapshotter, tasks, events, receipt, replicated)
    ends.append(saver.close)
    saver.begin()
    check_adapters(saver.walk.scan.nodes)
    if settings.notices != "off":
        shield = ExitStack()
        ends.append(shield.close)
        shield.enter_context(shield_loaders(saver.walk.scan.nodes, events))
    saver.link.connect()
    return saver


def _encode_facts(asked: UserOptions, settings: Settings, saver: Saver, coordinate: Coordinate) -> bytes:
    """What this rank tells all others. Errors: UsageError if the store's variables could not be sent to an agent, as
    one of the ranks will do."""
    store_environment()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Each network namespace of a machine counts as a host of its own.
    network = os.stat("/proc/self/ns/net").st_ino
    packed: bytes = msgpack.packb(
        {
            "url": asked.url,
            "host": f"{boot}-{network}",
            "agent": saver.link.agent,
            "coordinate": coordinate.text,
            "options": _compared_options(asked),
            "state": sorted(asked.state),
            "peers": list(settings.peers),
            "secret": secret.secret_fingerprint(settings),
            "known": saver.link.known_secret,
        }
    )
    return packed


def _compared_options(asked: UserOptions) -> dict[str, Any]:
    switches = {name: getattr(asked, name) for name in ("strict", "generators", "take_over", "init", "trainable_only")}
    return {**asked.options, **switches}


def _find_difference(one: Any, other: Any, name: str = "options") -> tuple[str, Any, Any] | None:
    """The first option in which two ranks differ, by name such as `limits.memory`, and both values; None: none. Options
    of different kinds are compared as a whole."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        inside = f"{name}." if name != "options" else ""
        return next(filter(None, (_find_difference(one[key], other[key], inside + key) for key in one)), None)
    return None if one == other else (name, one, other)


def _check_facts(facts: list[dict[str, Any]]) -> None:
    """Compares the ranks' facts. All ranks have the same facts, and so raise the same error. Errors: UsageError."""
    first = facts[0]
    for rank, said in enumerate(facts):
        whole = ((name, first[name], said[name]) for name in ("url", "state") if first[name] != said[name])
        found = _find_difference(first["options"], said["options"]) or next(whole, None)
        if found is not None:
            raise UsageError(f"{ALIKE}: {found[0]} is {found[1]!r} on rank 0 and {found[2]!r} on rank {rank}")
    seen: dict[str, int] = {}
    for rank, said in enumerate(facts):
        other = seen.setdefault(said["coordinate"], rank)
        if other != rank:
            raise UsageError(
                f"ranks {other} and {rank} have the same mesh coordinate {said['coordinate']!r}: give mesh= one that "
                "names every rank of the job"
            )


def _warn_differing_settings(events: Events, facts: list[dict[str, Any]]) -> None:
    """Warns of settings that differ between ranks and that only count on rank 0's node: at the next start the launcher
    may place rank 0 on any other node."""
    for name, variable in (("peers", "CKPT_PEERS"), ("secret", "CKPT_SECRET_FILE")):
        # The order of peers does not matter.
        found = [{*said[name]} if name == "peers" else said[name] for said in facts]
        rank = next((rank for rank, each in enumerate(found) if each != found[0]), None)
        if rank is not None:
            events.emit(
                "nodes.differ",
                f"ckpt: {variable} of rank {rank} is not that of rank 0, which counts. The next start may have rank 0 "
                "on another node. Then it may not find the memory-only nodes, or what other nodes hold. Set it on all "
                f"nodes, to {'the same' if name == 'peers' else 'a file of the same secret'}",
                loud=True,
                variable=variable,
                rank=rank,
            )


def _gather_nodes(
    group: collective.RankGroup, settings: Settings, saver: Saver, facts: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The job's nodes with their names, addresses and ranks, rank 0's first; the agents are told to listen. The list is
    empty for one agent without memory-only nodes (as rank 0 names them) and without a secret. With a secret, agents of
    earlier starts could be asked for their checkpoints. Errors: AgentError, UsageError."""
    _, former = max((each for said in facts if (each := said["known"])), default=("", b""))
    if len({said["agent"] for said in facts}) == 1 and not (facts[0]["peers"] or facts[0]["secret"] or former):
        return []
    hosts = {said["agent"]: said["host"] for said in facts}
    if group.rank == 0 and len(set(hosts.values())) < len(hosts):
        saver.events.emit(
            "nodes.one_host",
            "ckpt: ranks of one machine found different agents (the processes that save their checkpoints), and count "
            "as different nodes. Run all ranks of a machine as one user and with the same CKPT_RUNTIME_DIR or "
            "XDG_RUNTIME_DIR, the folder of the agents' sockets",
            loud=True,
        )
    run_secret = collective.broadcast_from_first(group, lambda: _choose_secret(settings, former))
    node = collective.run_on_all_ranks(group, lambda: saver.link.listen(run_secret))
    nodes: dict[str, dict[str, Any]] = {}
    for rank, said in enumerate(group.gather(msgpack.packb(node))):
        told = msgpack.unpackb(said)
        nodes.setdefault(told["name"], {**told, "ranks": []})["ranks"].append(rank)
    return list(nodes.values())


def _choose_secret(settings: Settings, former: bytes) -> bytes:
    """The run's secret, on rank 0. `former`: the secret of the newest start of which an agent is left; b"" if there is
    none. Errors: UsageError."""
    for each in settings.peers:
        Address.parse(each, "CKPT_PEERS")
    if settings.peers and settings.secret_file is None:
        raise UsageError(
            "CKPT_PEERS names memory-only nodes, which know the run by its secret: set CKPT_SECRET_FILE to the file "
            "that they were started with"
        )
    return secret.choose_secret(settings, former)


def _request_decision(
    group: collective.RankGroup, saver: Saver, kind: str, fields: dict[str, Any], blobs: Sequence[bytes] = ()
) -> StartDecision:
    """Asks rank 0's agent, and returns the decision on all ranks. The wait has no limit while the agent reports
    progress. The other ranks get an empty answer after each SILENCE_S, so that no collective of theirs lasts longer."""
    pending: Pending | None = None

    def wait() -> bytes:
        nonlocal pending
        pending = pending or saver.link.start_request(kind, fields, blobs)
        answer = pending.wait_while_progressing(SILENCE_S)
        return StartDecision.encode(answer) if answer is not None else b""

    try:
        while not (said := collective.broadcast_from_first(group, wait)):
            pass
    finally:
        if pending is not None:
            pending.forget()
    return StartDecision.parse(said)


@torch.inference_mode(False)
def _restore(
    group: collective.RankGroup,
    asked: UserOptions,
    tasks: Tasks,
    events: Events,
    saver: Saver,
    decision: StartDecision,
) -> tuple[RestoreResult, StartDecision]:
    """What was restored, and the decision that led to it. Inference mode is off, so that tensors made here can be
    trained, in whatever mode the block is entered."""
    failures: list[str] = []
    overwritten = restore.Overwritten(saver.walker)
    for struck in decision.fields.get("struck") or []:
        if group.rank == 0:
            verify = f"ckpt verify {redact_url(asked.url)}"
            text = f"ckpt: the checkpoint {struck} is damaged and is passed over; run `{verify}`"
            events.emit("restore.skipped", text, loud=True, identity=struck)
    while (candidate := decision.candidate) is not None:
        identity = Identity.parse(candidate["identity"])
        bad, sources = _try_candidate(group, asked, tasks, events, saver, identity, decision.manifest, overwritten)
        if not bad:
            if asked.trainable_only:
                _check_base(asked, group, events, saver)
            level = candidate["level"]
            where = {"local": "this host's memory", "peer": "the nodes' memory"}.get(level, "the store")
            source = f"step {identity.version.step} from {where}"
            lost, stored = decision.fields["steps_lost"], bool(candidate["stored"])
            return RestoreResult(identity.version, level, str(identity), source, sources, lost, stored), decision
        failures.append(f"step {identity.version.step}: {bad}")
        events.emit(
            "restore.skipped",
            f"ckpt: the checkpoint of step {identity.version.step} cannot be restored ({bad}); "
            "falling back to the one before it",
            loud=True,
            identity=str(identity),
        )
        decision = _request_decision(
            group, saver, "next-candidate", {"epoch": decision.epoch, "identity": str(identity), "why": bad[:2000]}
        )
    if failures:
        raise NoCheckpoint(
            f"{redact_url(asked.url)} has checkpoints, but none can be restored: {'; '.join(failures)}. "
            + unrestorable_hint(asked.url)
        )
    source = "nothing" if asked.init is None else f"weights of {asked.init}"
    if asked.init is not None:
        _fill_from_init(asked.init, group, asked.strict, events, saver)
    return RestoreResult(Version(0), "none", None, source, {}, decision.fields["steps_lost"]), decision


def _check_base(asked: UserOptions, group: collective.RankGroup, events: Events, saver: Saver) -> None:
    """After a restore of trainable parameters only: loads the frozen ones from `init=`, if it is given, and compares
    them with those that the checkpoint was trained with. Errors: StateMismatch if they differ; if not `strict`, that is
    an event."""
    if asked.init is not None:
        _fill_from_init(asked.init, group, asked.strict, events, saver, is_base=True)
    differing = collective.run_on_all_ranks(group, saver.walker.find_changed_base)
    every = {name for said in group.gather(msgpack.packb(differing)) for name in msgpack.unpackb(said)}
    if not every:
        return
    text = (
        f"the frozen parameters {shorten_names(sorted(every))} are not those that the checkpoint was trained with, and "
        "that trainable_only=True does not save: load the same base model"
    )
    if asked.strict:
        raise StateMismatch(f"{text}, or pass strict=False to go on with this one")
    if group.rank == 0:
        events.emit("base.differs", f"ckpt: strict=False: {text}", loud=True, names=sorted(every))


def _fill_from_init(
    init: str, group: collective.RankGroup, strict: bool, events: Events, saver: Saver, is_base: bool = False
) -> None:
    """Loads the weights of `init=`, if `is_base` only the frozen ones. Each rank may have other modules. Errors: those
    of `load_weights`; StateMismatch if none of the weights fits a module of any rank."""
    loaded = collective.run_on_all_ranks(group, lambda: load_weights(init, saver.walker, strict, is_base))
    mine = msgpack.packb([loaded.has_filled, list(loaded.unfit_reasons.values())])
    every = [msgpack.unpackb(data) for data in group.gather(mine)]
    unfit = sorted({line for _, lines in every for line in lines})
    if not any(filled for filled, _ in every):
        raise StateMismatch(f"nothing of init={init!r} fits the modules: {join_reasons(unfit)}")
    if group.rank != 0:
        return
    if unfit:
        text = f"ckpt: strict=False: init={init!r} left as they were: {join_reasons(unfit)}"
        events.emit("init.partial", text, loud=True, lines=unfit)
    if loaded.casts_text:
        events.emit("init.cast", f"ckpt: init={init!r} has other dtypes: {loaded.casts_text}", loud=True)
    if loaded.first_rank_buffers:
        text = (
            f"ckpt: init={init!r}: the values of {shorten_names(loaded.first_rank_buffers)} were not the same on the "
            "ranks that saved them: "
            "the first rank's are taken"
        )
        events.emit("restore.differed", text, loud=True, names=list(loaded.first_rank_buffers))


def _try_candidate(
    group: collective.RankGroup,
    asked: UserOptions,
    tasks: Tasks,
    events: Events,
    saver: Saver,
    identity: Identity,
    manifest_data: bytes,
    overwritten: restore.Overwritten,
) -> tuple[str, dict[str, int]]:
    """Tries one candidate. Returns why it cannot be restored ("" if it was), and the bytes read, by level."""

    def read() -> tuple[Manifest, RestorePlan, dict[str, int]]:
        manifest = decode_manifest(manifest_data)
        return manifest, *restore.read_targets(saver.link, tasks, saver.walker, identity, manifest, asked.strict)

    known = _run_attempt(group, read)
    if known.value is None:
        return known.failure, {}
    manifest, targets, sources = known.value
    lacks_option = bool(saver.walker.saved_base) and not asked.trainable_only
    hint = "It was saved with trainable_only=True, which this start does not give. " if lacks_option else ""
    restore.check_match(group, targets, asked, events, identity, overwritten, hint)
    written: set[int] = set()
    filled = _run_attempt(group, lambda: restore.fill(saver.link, tasks, identity, manifest, targets, written))
    if filled.value is None:
        collective.run_on_all_ranks(group, lambda: overwritten.add_candidate(manifest, targets, written))
        return filled.failure, {}
    collective.run_on_all_ranks(group, targets.install)
    if targets.overruled_lines and group.rank == 0:
        restore.warn_overruled(events, targets.overruled_lines)
    if targets.dropped_generators:
        names = ", ".join(targets.dropped_generators)
        text = f"ckpt: the generators {names} are not restored: this process does not have them yet. To go on with "
        events.emit("generator.dropped", f"{text}them, call torch.cuda.init() before the block", loud=True)
    return "", {level: sources.get(level, 0) + filled.value.get(level, 0) for level in {*sources, *filled.value}}


def _run_attempt(group: collective.RankGroup, work: Callable[[], T]) -> RestoreAttempt[T]:
    """Runs `work` on every rank. If data is damaged or missing on one rank, the candidate has failed on all ranks. Any
    other error is raised on all."""

    def trying() -> RestoreAttempt[T]:
        try:
            return RestoreAttempt(work())
        except NewerFormat:
            raise
        except DamagedData as exc:
            return RestoreAttempt(None, str(exc) or type(exc).__name__)

    mine = collective.run_on_all_ranks(group, trying)
    verdicts = [said.decode() for said in group.gather(mine.failure.encode())]
    bad = next((f"rank {rank}: {said}" for rank, said in enumerate(verdicts) if said), "")
    return RestoreAttempt(None, bad) if bad else mine

"""The entry into the block: the ranks find their agents, agree on what to restore, and fill their state from it.

All collectives of a job happen here: one gather of facts, one broadcast of each decision, one agreement on each
outcome. Once a candidate was tried, the entry ends in a restored checkpoint or in an error, never in a fresh start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgpack
import torch

from ckpt.errors import DamagedData, NewerFormat, NoCheckpoint, StateMismatch, UsageError
from ckpt.events import Events
from ckpt.format.manifest import Manifest
from ckpt.format.record import decode_manifest
from ckpt.ipc.client import Pending
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import coordinator_of, encode_nodes
from ckpt.settings import Settings, store_environment
from ckpt.storage.failure import unrestorable_hint
from ckpt.storage.names import redact_url
from ckpt.threads import Tasks
from ckpt.trainer.link import collective
from ckpt.trainer.link.export_plan import write_companions
from ckpt.trainer.link.membership import JoinTerms
from ckpt.trainer.link.options import UserOptions
from ckpt.trainer.loop.rank_facts import check_facts, choose_secret, find_facts, warn_differing_settings
from ckpt.trainer.loop.run_report import RunReport
from ckpt.trainer.loop.saver import Saver
from ckpt.trainer.loop.worker_signals import shield_loaders
from ckpt.trainer.restore import restore
from ckpt.trainer.restore.init_weights import join_reasons, load_weights
from ckpt.trainer.restore.restore_plan import RestorePlan
from ckpt.trainer.snapshot.cuda_copier import make_copier
from ckpt.trainer.snapshot.snapshot import Snapshotter
from ckpt.trainer.state.mesh_coordinate import Coordinate, coordinate_by_rank, find_coordinate
from ckpt.trainer.state.names import shorten_names
from ckpt.trainer.state.state_checks import check_adapters
from ckpt.trainer.state.state_walk import StateWalker
from ckpt.types import Identity, Version

T = TypeVar("T")

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
        return StartDecision(*msgpack.unpackb(data, max_bin_len=1 << 28))


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What was restored. `level`: "none" if nothing was. `is_stored`: whether the checkpoint is in the store, from
    wherever it was read."""

    version: Version
    level: Any
    identity: str | None
    source: str
    is_stored: bool = True


class JobEntry:
    """The entry of one rank. All ranks make it together, and `saver` with it. `ends`: gets a function for everything
    that has to be ended. Errors: those of ckpt.Checkpointer, on all ranks."""

    def __init__(
        self,
        asked: UserOptions,
        settings: Settings,
        tasks: Tasks,
        events: Events,
        receipt: RunReport,
        ends: list[Callable[[], object]],
    ) -> None:
        self._asked, self._settings, self._tasks, self._events = asked, settings, tasks, events
        self._receipt = receipt
        self._group = collective.open_group(asked.process_group, events)
        self._coordinate = self._agree_on_coordinate()
        self.saver = self._on_all_ranks(lambda: self._make_saver(ends))
        self._overwritten = restore.Overwritten(self.saver.offered.walker)

    def enter(self) -> RestoreResult:
        """Enters the job, and restores the state. Its figures go into the report."""
        asked, group = self._asked, self._group
        connection = self.saver.link.connection
        own = self._on_all_ranks(lambda: find_facts(asked, self._settings, connection, self._coordinate))
        facts = self._gather(own)
        check_facts(facts)
        if group.rank == 0:
            warn_differing_settings(self._events, facts)
        nodes = self._gather_nodes(facts)
        launch, peers = facts[0]["launch"], facts[0]["peers"]
        begin = {
            "launch": launch,
            "world": group.world,
            "take_over": asked.take_over,
            "strict": asked.strict,
            "store_env": store_environment(),
            "coordinator": coordinator_of(nodes),
            "peers": peers,
        }
        decision = _request_decision(group, self.saver, "begin", begin, [encode_nodes(nodes)] if nodes else [])
        here = group.rank, group.world, self._coordinate.text
        try:
            epoch, ancestry = decision.epoch, _find_ancestry(decision)
            terms = JoinTerms(epoch, *here, asked.options, launch, *ancestry, nodes, peers)
            return self._join_and_restore(terms, decision)
        except BaseException:
            self.saver.link.give_up()
            raise

    def _join_and_restore(self, terms: JoinTerms, decision: StartDecision) -> RestoreResult:
        asked, link = self._asked, self.saver.link
        if (export := asked.export) is not None:
            self._on_first_rank(lambda: write_companions(export, asked.state))
        offer = self.saver.offered.make_offer(Version(0), positions=False)
        self._on_all_ranks(lambda: link.join(terms, offer))
        found, last = self._restore(decision)
        parent, ancestors = _find_ancestry(last)
        link.membership.terms = replace(terms, parent=parent, ancestors=ancestors)
        done = {"epoch": terms.epoch, "identity": found.identity}
        self._on_first_rank(lambda: link.request("restored", done, SILENCE_S))
        is_told = self._on_all_ranks(lambda: self.saver.offered.offer_changes(found.version))
        if not is_told and (found.identity is not None or asked.init is not None):
            # The agent has the hashes of the state before the restore.
            self.saver.offered.mark_hashes_stale()
        return found

    # -- collectives

    def _on_all_ranks(self, work: Callable[[], T]) -> T:
        return collective.run_on_all_ranks(self._group, work)

    def _on_first_rank(self, work: Callable[[], object]) -> None:
        collective.run_on_all_ranks(self._group, work if self._group.rank == 0 else lambda: None)

    def _gather(self, value: Any) -> list[Any]:
        """The plain values of all ranks, in the order of ranks."""
        return [msgpack.unpackb(said) for said in self._group.gather(msgpack.packb(value))]

    def _try_on_all_ranks(self, work: Callable[[], T]) -> tuple[T | None, str]:
        """Runs `work` on every rank. Returns its value, and "". If data is damaged or missing on one rank, all ranks
        return None, and why. Any other error is raised on all."""

        def trying() -> tuple[T | None, str]:
            try:
                return work(), ""
            except NewerFormat:
                raise
            except DamagedData as exc:
                return None, str(exc) or type(exc).__name__

        value, failure = self._on_all_ranks(trying)
        bad = next((f"rank {rank}: {said}" for rank, said in enumerate(self._gather(failure)) if said), "")
        return (None, bad) if bad else (value, "")

    # -- the ranks and their agents

    def _agree_on_coordinate(self) -> Coordinate:
        """This rank's coordinate, in a mesh that all ranks share. Each rank finds a mesh in its own part of the state.
        If these differ (a pipeline of which one stage is sharded), the ranks are named by their numbers instead, at
        each start.

        Errors: UsageError if the meshes differ and mesh= was given."""
        group, asked = self._group, self._asked
        mine = self._on_all_ranks(lambda: find_coordinate(asked.state, group.rank, group.world, asked.mesh))
        said = self._gather([mine.mesh, asked.mesh is not None])
        other = next((rank for rank, (mesh, _) in enumerate(said) if mesh != said[0][0]), None)
        if other is None:
            return mine
        differ = f"rank 0 stands in the mesh {_mesh_text(said[0][0])}, rank {other} in {_mesh_text(said[other][0])}"
        if any(is_given for _, is_given in said):
            raise UsageError(f"{differ}: give mesh= to all ranks, and the same one")
        if group.rank == 0:
            text = f"{differ}, by their parts of the state; ranks are told apart by number: give mesh= to name their "
            self._events.emit("mesh.differs", f"ckpt: {text}axes", loud=True, rank=other)
        return coordinate_by_rank(group.rank, group.world)

    def _make_saver(self, ends: list[Callable[[], object]]) -> Saver:
        asked, settings, events = self._asked, self._settings, self._events
        walker = StateWalker(asked.state, self._coordinate, asked.generators, asked.trainable_only)
        snapshotter = Snapshotter(make_copier(), lazy=asked.lazy, events=events)
        ends.append(snapshotter.close)
        is_replicated = self._group.world > 1
        saver = Saver(asked.url, settings, walker, snapshotter, self._tasks, events, self._receipt, is_replicated)
        ends.append(saver.close)
        saver.begin()
        check_adapters(saver.walk.scan.nodes)
        if settings.notices != "off":
            shield = ExitStack()
            ends.append(shield.close)
            shield.enter_context(shield_loaders(saver.walk.scan.nodes, events))
        saver.link.agent.connect()
        return saver

    def _gather_nodes(self, facts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The job's nodes with their names, addresses and ranks, rank 0's first; the agents are told to listen. The
        list is empty for one agent without memory-only nodes (as rank 0 names them) and without a secret. With a
        secret, agents of earlier starts could be asked for their checkpoints. Errors: AgentError, UsageError."""
        _, former = max((each for said in facts if (each := said["known"])), default=("", b""))
        if len({said["agent"] for said in facts}) == 1 and not (facts[0]["peers"] or facts[0]["secret"] or former):
            return []
        hosts = {said["agent"]: said["host"] for said in facts}
        if self._group.rank == 0 and len(set(hosts.values())) < len(hosts):
            self._events.emit(
                "nodes.one_host",
                "ckpt: ranks of one machine found different agents (the processes that save their checkpoints), and "
                "count as different nodes. Run all ranks of a machine as one user and with the same CKPT_RUNTIME_DIR "
                "or XDG_RUNTIME_DIR, the folder of the agents' sockets",
                loud=True,
            )
        run_secret = collective.broadcast_from_first(self._group, lambda: choose_secret(self._settings, former))
        link, nodes = self.saver.link, dict[str, dict[str, Any]]()
        own = self._on_all_ranks(lambda: link.membership.listen(link.connection, run_secret))
        for rank, told in enumerate(self._gather(own)):
            nodes.setdefault(told["name"], {**told, "ranks": []})["ranks"].append(rank)
        return list(nodes.values())

    # -- the restore

    @torch.inference_mode(False)
    def _restore(self, decision: StartDecision) -> tuple[RestoreResult, StartDecision]:
        """What was restored, and the decision that led to it. Inference mode is off, so that tensors made here can be
        trained, in whatever mode the block is entered."""
        asked, events, receipt = self._asked, self._events, self._receipt
        failures: list[str] = []
        for struck in decision.fields.get("struck") or []:
            if self._group.rank == 0:
                verify = f"ckpt verify {redact_url(asked.url)}"
                text = f"ckpt: the checkpoint {struck} is damaged and is passed over; run `{verify}`"
                events.emit("restore.skipped", text, loud=True, identity=struck)
        while (candidate := decision.candidate) is not None:
            identity = Identity.parse(candidate["identity"])
            step = f"step {identity.version.step}"
            bad = self._try_candidate(identity, decision.manifest)
            if not bad:
                if asked.trainable_only:
                    self._check_base()
                level, receipt.steps_lost = candidate["level"], decision.fields["steps_lost"]
                where = {"local": "this host's memory", "peer": "the nodes' memory"}.get(level, "the store")
                source, is_stored = f"{step} from {where}", bool(candidate["stored"])
                return RestoreResult(identity.version, level, str(identity), source, is_stored), decision
            failures.append(f"{step}: {bad}")
            text = f"ckpt: the checkpoint of {step} cannot be restored ({bad}); falling back to the one before it"
            events.emit("restore.skipped", text, loud=True, identity=str(identity))
            told = {"epoch": decision.epoch, "identity": str(identity), "why": bad[:2000]}
            decision = _request_decision(self._group, self.saver, "restored", told)
        if failures:
            raise NoCheckpoint(
                f"{redact_url(asked.url)} has checkpoints, but none can be restored: {'; '.join(failures)}. "
                + unrestorable_hint(asked.url)
            )
        source = "nothing" if asked.init is None else f"weights of {asked.init}"
        if asked.init is not None:
            self._fill_from_init(asked.init)
        receipt.steps_lost = decision.fields["steps_lost"]
        return RestoreResult(Version(0), "none", None, source), decision

    def _try_candidate(self, identity: Identity, manifest_data: bytes) -> str:
        """Tries one candidate. Returns why it cannot be restored; "" if it was."""
        asked, events, saver, overwritten = self._asked, self._events, self.saver, self._overwritten

        def read() -> tuple[Manifest, RestorePlan, dict[str, int]]:
            manifest = decode_manifest(manifest_data)
            targets = restore.read_targets(
                saver.link, self._tasks, saver.offered.walker, identity, manifest, asked.strict
            )
            return manifest, *targets

        known, failure = self._try_on_all_ranks(read)
        if known is None:
            return failure
        manifest, targets, sources = known
        lacks_option = bool(saver.offered.walker.saved_base) and not asked.trainable_only
        hint = "It was saved with trainable_only=True, which this start does not give. " if lacks_option else ""
        restore.check_match(self._group, targets, asked, events, identity, overwritten, hint)
        filled, failure = self._try_on_all_ranks(
            lambda: restore.fill(saver.link, self._tasks, identity, manifest, targets, overwritten)
        )
        if filled is None:
            self._on_all_ranks(overwritten.add_failed)
            return failure
        self._on_all_ranks(targets.install)
        if targets.overruled_lines and self._group.rank == 0:
            restore.warn_overruled(events, targets.overruled_lines)
        if targets.dropped_generators:
            names = ", ".join(targets.dropped_generators)
            text = f"ckpt: the generators {names} are not restored: this process does not have them yet. To go on with "
            events.emit("generator.dropped", f"{text}them, call torch.cuda.init() before the block", loud=True)
        for part in (sources, filled):
            for level, count in part.items():
                self._receipt.read_bytes[level] = self._receipt.read_bytes.get(level, 0) + count
        return ""

    def _check_base(self) -> None:
        """After a restore of trainable parameters only: loads the frozen ones from `init=`, if it is given, and
        compares them with those that the checkpoint was trained with. Errors: StateMismatch if they differ; if not
        `strict`, that is an event."""
        asked = self._asked
        if asked.init is not None:
            self._fill_from_init(asked.init, is_base=True)
        differing = self._gather(self._on_all_ranks(self.saver.offered.walker.find_changed_base))
        every = sorted({name for said in differing for name in said})
        if not every:
            return
        text = (
            f"the frozen parameters {shorten_names(every)} are not those that the checkpoint was trained with, and "
            "that trainable_only=True does not save: load the same base model"
        )
        if asked.strict:
            raise StateMismatch(f"{text}, or pass strict=False to go on with this one")
        if self._group.rank == 0:
            self._events.emit("base.differs", f"ckpt: strict=False: {text}", loud=True, names=every)

    def _fill_from_init(self, init: str, is_base: bool = False) -> None:
        """Loads the weights of `init=`, if `is_base` only the frozen ones. Each rank may have other modules. Errors:
        those of `load_weights`; StateMismatch if none of the weights fits a module of any rank."""
        walker, strict, events = self.saver.offered.walker, self._asked.strict, self._events
        loaded = self._on_all_ranks(lambda: load_weights(init, walker, strict, is_base))
        every = self._gather([loaded.has_filled, list(loaded.unfit_reasons.values())])
        unfit = sorted({line for _, lines in every for line in lines})
        if not any(filled for filled, _ in every):
            raise StateMismatch(f"nothing of init={init!r} fits the modules: {join_reasons(unfit)}")
        if self._group.rank != 0:
            return
        if unfit:
            text = f"ckpt: strict=False: init={init!r} left as they were: {join_reasons(unfit)}"
            events.emit("init.partial", text, loud=True, lines=unfit)
        if loaded.casts_text:
            events.emit("init.cast", f"ckpt: init={init!r} has other dtypes: {loaded.casts_text}", loud=True)
        if buffers := loaded.first_rank_buffers:
            text = f"ckpt: init={init!r}: the values of {shorten_names(buffers)} were not the same on the ranks that "
            text += "saved them: the first rank's are taken"
            events.emit("restore.differed", text, loud=True, names=list(buffers))


def _find_ancestry(decision: StartDecision) -> tuple[str | None, list[Any]]:
    """The parent epoch and the ancestors of the epoch that begins."""
    return decision.fields.get("parent"), list(decision.fields.get("ancestors") or [])


def _mesh_text(mesh: list[Any]) -> str:
    return " x ".join(f"{name} {size}" for name, size in mesh)


def _request_decision(
    group: collective.RankGroup, saver: Saver, kind: str, fields: dict[str, Any], blobs: Sequence[bytes] = ()
) -> StartDecision:
    """Asks rank 0's agent, and returns the decision on all ranks. The wait has no limit while the agent reports
    progress. The other ranks get an empty answer after each SILENCE_S, so that no collective of theirs lasts longer."""
    pending: Pending | None = None

    def wait() -> bytes:
        nonlocal pending
        pending = pending or saver.link.connection.start_request(kind, fields, blobs=blobs)
        answer = pending.wait_while_progressing(SILENCE_S)
        return StartDecision.encode(answer) if answer is not None else b""

    try:
        while not (said := collective.broadcast_from_first(group, wait)):
            pass
    finally:
        if pending is not None:
            pending.forget()
    return StartDecision.parse(said)

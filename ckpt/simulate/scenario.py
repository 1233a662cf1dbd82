"""The scenario: a job, its levels with their costs, its policy, and prices, as frozen values.

Errors: UsageError for a number out of its range, or levels that do not go together. Units are in the names: seconds,
bytes, bytes per second, USD.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from ckpt.errors import UsageError
from ckpt.placement.placement import ONE_REPLICA, Parity, Replicas
from ckpt.policy.adaptive import Adaptive
from ckpt.policy.interval import not_negative, positive, within
from ckpt.policy.save_options import Every


class Rejoin(enum.Enum):
    """When a job that runs on fewer nodes than wanted takes up nodes that came since its start."""

    AT_RESTART = "at the next restart"  # as ckpt: a running job is not disturbed
    AT_WANTED = "when the wanted number is there"  # it then saves, and restarts at once


@dataclass(frozen=True, slots=True)
class LocalLevel:
    """Snapshots in the memory of the node.

    stall_s: how long one snapshot stops training.
    deferred: the snapshot is complete one step later, because its copy runs under that step.
    restore_bytes_s: each node restores its share at this speed. A host-to-device copy over PCIe 4.0 reaches 25 GB/s;
    5 GB/s leaves room for hashing and staging.
    survives_crash: False for a copy in the trainer's own process, which dies with it.
    """

    stall_s: float = 0.5
    deferred: bool = False
    restore_bytes_s: float = 5e9
    survives_crash: bool = True

    def __post_init__(self) -> None:
        not_negative("stall_s", self.stall_s)
        positive("restore_bytes_s", self.restore_bytes_s)


@dataclass(frozen=True, slots=True)
class PeerLevel:
    """Replicas in the memory of other nodes, which is taken to suffice. `option`: as ckpt places them. `link_bytes_s`:
    of each node, in and out; 10 Gbit/s is what most clouds give at least."""

    option: Replicas | Parity = ONE_REPLICA
    link_bytes_s: float = 1.25e9

    def __post_init__(self) -> None:
        positive("link_bytes_s", self.link_bytes_s)

    @property
    def copies(self) -> int:
        """How many shares each node sends for one checkpoint."""
        return self.option.n if isinstance(self.option, Replicas) else self.option.parity


@dataclass(frozen=True, slots=True)
class StorePrices:
    """USD; by default S3 Standard in us-east-1, read from the same region. A GB is 10^9 bytes, a month 730 hours."""

    gb_month: float = 0.023
    put_1000: float = 0.005
    get_1000: float = 0.0004
    egress_gb: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            not_negative(name, getattr(self, name))

    def requests_usd(self, puts: float, gets: float) -> float:
        """What so many requests cost."""
        return (puts * self.put_1000 + gets * self.get_1000) / 1000


@dataclass(frozen=True, slots=True)
class StoreLevel:
    """Object storage.

    write_bytes_s, read_bytes_s: of one node; nodes add up. A few parallel connections reach 500 MB/s.
    ratio: bytes in the store per byte of state. request_bytes: bytes of one PUT or GET.
    slowdown: the part of training's speed that a running commit takes, 0 to below 1.
    stall_s: what a commit adds to the stall of its snapshot.
    synchronous: training stands still for the whole write, as with torch.save.
    kept: how many checkpoints the store keeps.
    """

    write_bytes_s: float = 500e6
    read_bytes_s: float = 500e6
    ratio: float = 1.0
    request_bytes: float = 64e6
    slowdown: float = 0.02
    stall_s: float = 0.0
    synchronous: bool = False
    kept: int = 3
    prices: StorePrices = StorePrices()

    def __post_init__(self) -> None:
        for name in ("write_bytes_s", "read_bytes_s", "ratio", "request_bytes"):
            positive(name, getattr(self, name))
        within("slowdown", self.slowdown, 0, 0.999)
        not_negative("stall_s", self.stall_s)
        _whole("kept", self.kept, 1)


@dataclass(frozen=True, slots=True)
class NoticeModel:
    """The notices before nodes go.

    recall: the part of the removals that is announced. lead_s: how long before; the mean of an exponential distribution
    if `exponential`, else always that long. 120 s is the notice of AWS spot instances.
    false_node_hour: notices per node and hour after which the node stays.
    act_above_s: a notice is ignored while less work than that is unsaved (`policy.with_predictions` names the best).
    certain: the job leaves by a notice, as by a cloud's: it saves its last step in the store and starts on the other
    nodes. False: a notice costs one more snapshot, as a prediction does, and the job stays.
    """

    recall: float = 0.0
    lead_s: float = 120.0
    exponential: bool = False
    false_node_hour: float = 0.0
    act_above_s: float = 0.0
    certain: bool = True

    def __post_init__(self) -> None:
        within("recall", self.recall, 0, 1)
        for name in ("lead_s", "false_node_hour", "act_above_s"):
            not_negative(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A job on a cloud.

    nodes, nodes_min: the wanted and the least number of nodes; with fewer the job waits. nodes_min None: all of them.
    step_s: of one step on the wanted nodes. scaling: the part of a step that more nodes share (Amdahl 1967): on n nodes
    a step takes step_s (1 - scaling + scaling nodes / n). 1: ideal. 0: each step takes as long and does less.
    state_bytes: one checkpoint of the whole job, of which each node holds an even share.
    work_steps: the job ends after so many steps; None: it is observed to the end of the trace.
    detect_s: from a failure until every trainer is down. 30 s: a heartbeat and the launcher's grace period.
    gang_start_s: from having the nodes until training enters. 60 s: processes, imports, NCCL; large models take longer.
    local, peers, store: the levels; None: there is none.
    policy: ckpt.Every or ckpt.Adaptive. commit_every: with Every, each so-manieth snapshot is committed; ckpt's is 1.
    node_usd_hour: price of a node; None: the trace's.
    """

    nodes: int
    step_s: float
    state_bytes: float
    nodes_min: int | None = None
    scaling: float = 1.0
    work_steps: int | None = None
    detect_s: float = 30.0
    gang_start_s: float = 60.0
    rejoin: Rejoin = Rejoin.AT_RESTART
    local: LocalLevel | None = field(default_factory=LocalLevel)
    peers: PeerLevel | None = field(default_factory=PeerLevel)
    store: StoreLevel | None = field(default_factory=StoreLevel)
    policy: Every | Adaptive = field(default_factory=Adaptive)
    commit_every: int = 1
    notices: NoticeModel = NoticeModel()
    node_usd_hour: float | None = None

    def __post_init__(self) -> None:
        _whole("nodes", self.nodes, 1)
        _whole("commit_every", self.commit_every, 1)
        positive("step_s", self.step_s)
        positive("state_bytes", self.state_bytes)
        within("scaling", self.scaling, 0, 1)
        not_negative("detect_s", self.detect_s)
        not_negative("gang_start_s", self.gang_start_s)
        if self.nodes_min is not None and not 1 <= self.nodes_min <= self.nodes:
            raise UsageError(f"nodes_min={self.nodes_min}: from 1 to nodes={self.nodes}")
        if self.work_steps is not None:
            _whole("work_steps", self.work_steps, 1)
        if self.node_usd_hour is not None:
            not_negative("node_usd_hour", self.node_usd_hour)
        if self.peers is not None and self.local is None:
            raise UsageError("peers keep replicas of snapshots: they need the local level")
        if self.local is None and self.store is not None and not self.store.synchronous:
            raise UsageError("a commit in the background needs the local level: give one, or synchronous=True")
        if isinstance(self.policy, Adaptive) and (self.local is None or self.is_synchronous):
            raise UsageError("ckpt.Adaptive is for snapshots and commits in the background: give ckpt.Every")
        if isinstance(self.policy, Adaptive) and self.commit_every != 1:
            raise UsageError("ckpt.Adaptive chooses itself which snapshots are committed: leave commit_every out")

    @property
    def nodes_least(self) -> int:
        return self.nodes if self.nodes_min is None else self.nodes_min

    @property
    def is_synchronous(self) -> bool:
        return self.store is not None and self.store.synchronous

    @property
    def saves(self) -> bool:
        """Whether there is any level to save to."""
        return self.local is not None or self.store is not None

    # -- what things cost on n nodes

    def step_s_on(self, nodes: int) -> float:
        return self.step_s * (1 - self.scaling + self.scaling * self.nodes / nodes)

    @property
    def stored_bytes(self) -> float:
        """Of one checkpoint in the store."""
        return self.state_bytes * self.store.ratio if self.store is not None else 0.0

    def commit_s_on(self, nodes: int) -> float:
        return self.stored_bytes / nodes / self.store.write_bytes_s if self.store is not None else 0.0

    def replication_s_on(self, nodes: int) -> float:
        """From a snapshot until its replicas are made. Again after a loss: each node sends as much."""
        if self.peers is None or nodes < 2:
            return 0.0
        return self.peers.copies * self.state_bytes / nodes / self.peers.link_bytes_s

    def requests_on(self, nodes: int) -> int:
        """PUTs of a commit, or GETs of a restore: each node's share in packs, and the record."""
        share = self.stored_bytes / nodes
        return nodes * math.ceil(share / self.store.request_bytes) + 1 if self.store is not None else 0

    def local_restore_s_on(self, nodes: int) -> float:
        return self.state_bytes / nodes / self.local.restore_bytes_s if self.local is not None else 0.0

    def peer_restore_s_on(self, nodes: int, before: int) -> float:
        """`before`: how many nodes took the snapshot. The slowest link decides."""
        link_s = self.state_bytes / min(nodes, before) / self.peers.link_bytes_s if self.peers is not None else 0.0
        return max(link_s, self.local_restore_s_on(nodes))

    def store_restore_s_on(self, nodes: int) -> float:
        """Each byte leaves the store once."""
        return self.stored_bytes / nodes / self.store.read_bytes_s if self.store is not None else 0.0


def _whole(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name}={value!r}: a whole number of at least {least}")

"""The part of a commit that lies on the node that commits: where its own way to the store is slow, or broken, who
keeps copies of it writes it. Real agents and a real S3 server, which the first node reaches through a proxy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from ckpt.policy.save_options import Keep
from ckpt.storage import open as open_store
from ckpt.store.prune import Pruner
from ckpt.store.reader import open_record
from ckpt.store.run import Run
from ckpt.types import Version
from tests import servers
from tests.agent.nodes.cluster import Cluster, line, train
from tests.checkpointer.proxy import HELD, RESET, Proxy, answer, proxy

KEY = "runs/one"
DATA = f"{KEY}/data/*"


@pytest.fixture
def url(link: Proxy) -> str:
    return f"s3://{link.bucket}/{KEY}"


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Of the node that coordinates. The environment leads to the store past it: see `start`."""
    monkeypatch.setenv("CKPT_HEARTBEAT_S", "1")
    with servers.rclone() as server, proxy(server) as made:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield made


def start(cluster: Cluster, link: Proxy, *spread: int) -> None:
    """What leads to the store goes with a start to the agent that coordinates, and to no other."""
    cluster.connect(*spread)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", link.at.endpoint)
        cluster.enter()


def commit_with_one_in_trouble(cluster: Cluster, url: str, link: Proxy) -> Version:
    """All but the coordinator go by the proxy, where the first that puts anything meets the fault; the others pass."""
    direct = os.environ["AWS_ENDPOINT_URL"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", link.at.endpoint)
        cluster.connect(0, 1, 2)
        patch.setenv("AWS_ENDPOINT_URL", direct)
        cluster.enter()
    train(cluster.job, 1)
    version = cluster.save("peer")
    assert cluster.job[0].wait_level(version, "store"), cluster.job[0].levels
    assert len(link.met) == 1
    assert [each.version for each in line(url)] == [version]
    return version


def orphans(url: str, version: Version) -> set[str]:
    """What prune deletes; of a run that has ended. Packs of that version are all it finds."""
    with closing(open_store(url)) as store:
        run = Run(store)
        packs = set(Pruner(run, None, grace_s=-5.0).plan(run.view(), Keep()).packs)
        referred = {pack for ref in run.view().history for pack, _ in open_record(store, ref).packs}
        there = {info.key for info in store.list("data/")}
    assert packs == there - referred
    assert all(f"-{version}/" in pack for pack in packs), packs
    return packs


def check_restored(cluster: Cluster, version: Version) -> None:
    """Onto other nodes, from the store: each rank looks at every value."""
    cluster.kill(*cluster.pids)
    assert cluster.restart(5, 6)["step"] == version.step
    assert cluster.fetched()["store"], "what one node reads it gives to the other"


def test_where_the_coordinators_own_link_is_stuck_who_has_a_copy_writes_its_part(
    cluster: Cluster, url: str, link: Proxy
) -> None:
    start(cluster, link, 0, 1, 2)
    link.fail(HELD, "PUT", DATA)
    train(cluster.job, 1)
    version = cluster.save("peer")
    assert cluster.job[0].wait_level(version, "store"), cluster.job[0].levels
    assert link.met, "its own part is on its way, and held for as long as this test wants it to be"
    assert [each.version for each in line(url)] == [version]
    link.heal()
    cluster.finish()
    assert len(orphans(url, version)) == len(link.met), "what has come late is referred to by nothing"
    assert any("this node takes longer" in path.read_text() for path in (cluster.folder / "n0").rglob("*.log"))
    check_restored(cluster, version)


def test_where_another_nodes_link_is_stuck_its_part_is_written_for_it(cluster: Cluster, url: str, link: Proxy) -> None:
    link.fail(HELD, "PUT", DATA, count=1)
    version = commit_with_one_in_trouble(cluster, url, link)
    link.heal()
    cluster.finish()
    assert orphans(url, version), "what has come late is referred to by nothing; on a busy machine others are late, too"
    (told,) = [path.read_text() for path in (cluster.folder / "n0").rglob("*.log")]
    assert "takes longer" in told
    assert "has not written its" not in told, "it was there all the time"
    check_restored(cluster, version)


def test_what_the_store_refuses_of_another_node_is_written_for_it(cluster: Cluster, url: str, link: Proxy) -> None:
    link.fail(answer(403, "AccessDenied"), "PUT", DATA, count=1)
    version = commit_with_one_in_trouble(cluster, url, link)
    cluster.finish()
    check_restored(cluster, version)


def test_where_no_try_of_the_coordinator_comes_through_who_has_a_copy_writes_its_part(
    cluster: Cluster, url: str, link: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_HEARTBEAT_S", "60")  # it is not waited until it counts as slow
    monkeypatch.setenv("CKPT_RETRY_S", "5")
    cluster.options = {**cluster.options, "policy": {"steps": 100_000, "seconds": None}}  # only what is asked for
    start(cluster, link, 0, 1)
    link.fail(RESET, "PUT", DATA)
    train(cluster.job, 1)
    version = cluster.save("peer", "store")
    assert link.met
    assert [each.version for each in line(url)] == [version]
    link.heal()
    train(cluster.job, 2)
    again = cluster.save("store")
    assert [each.version for each in line(url)] == [version, again], (
        "it goes on from a record whose writer has no packs"
    )
    check_restored(cluster, again)

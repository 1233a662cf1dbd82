"""Nodes on one machine: network namespaces, each with two veth links to bridges in one more of them, the hub: "lan" for
the training job and its launcher, "own" for the agents, so that one can be slow or cut without the other.

Nothing of it is seen in this machine's own network, and all of it goes with the namespaces. What runs in a node is told
apart from everything else by its namespace, so a node can be killed as a whole; Unix sockets and files are not
separated, so each node has a folder of its own for them.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
HUB_AT = "10.77.0.1"  # in "lan", inside the namespaces only
NETS = {"lan": "10.77", "own": "10.78"}
STORE_PORT = 29400
GONE_S = 60.0  # how long what was killed may take to be gone

_STORE = (
    "import sys, torch.distributed as d; "
    f"s = d.TCPStore({HUB_AT!r}, {STORE_PORT}, is_master=True, wait_for_workers=False); "
    "print('ready', flush=True); sys.stdin.read()"
)


def why_not() -> str:
    """Why there can be no such nodes here; "": there can."""
    if os.geteuid() != 0:
        return "needs network namespaces: only root makes them"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs network namespaces: ip and tc (iproute2) are not installed"
    name = f"ckpt-try-{secrets.token_hex(4)}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "one", "type", "veth", "peer", "name", "two")
    except subprocess.CalledProcessError as exc:
        return f"needs network namespaces: {exc.stderr.strip()[:200]}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return ""


def sweep() -> None:
    """Removes what runs that were killed left behind: their namespaces name a process that is gone."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        found = re.fullmatch(r"ckpt-(\d+)-[0-9a-f]{6}-\w+", name)
        if found is not None and not Path("/proc", found[1]).exists():
            with contextlib.suppress(subprocess.CalledProcessError):  # tests beside this one sweep, too
                _kill_all(name)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _pids(name: str) -> list[int]:
    return [int(word) for word in _run("ip", "netns", "pids", name).split()]


def _kill_all(name: str) -> None:
    deadline = time.monotonic() + GONE_S
    while pids := _pids(name):
        assert time.monotonic() < deadline, f"{name}: {pids} cannot be killed"
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Place:
    """One namespace. `at`: its address in each net. `folder`: for the sockets of what runs in it."""

    def __init__(self, name: str, at: Mapping[str, str]) -> None:
        self.name, self.at = name, at
        self.folder = Path(tempfile.mkdtemp(prefix="ckpt-n", dir="/tmp"))
        self.started: list[subprocess.Popen[bytes]] = []
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def start(
        self, command: list[str], log: Path, env: Mapping[str, str] | None = None, stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],  # becomes the command itself
                stdin=stdin,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})},
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def pids(self) -> list[int]:
        return _pids(self.name)

    def kill(self) -> float:
        """SIGKILL to everything in it; when that was (Unix time). Returns once all is gone."""
        began_s = time.time()
        _kill_all(self.name)
        for process in self.started:
            process.wait(GONE_S)
        return began_s

    def remove(self) -> None:
        self.kill()
        _run("ip", "netns", "del", self.name)
        shutil.rmtree(self.folder, ignore_errors=True)


class Lan:
    """The hub, in which the launcher's rendezvous store runs, and the nodes."""

    def __init__(self) -> None:
        if why := why_not():
            raise RuntimeError(why)
        sweep()
        self._name = f"ckpt-{os.getpid()}-{secrets.token_hex(3)}"
        self._made = 0
        self.nodes: dict[str, Place] = {}
        self.hub = Place(f"{self._name}-hub", {net: f"{prefix}.0.1" for net, prefix in NETS.items()})

    def serve(self) -> None:
        """Wires the hub, and starts the rendezvous store in it. It outlives every node."""
        hub = self.hub.name
        for net in NETS:
            _run("ip", "-n", hub, "link", "add", "name", f"bridge-{net}", "type", "bridge")
            _run("ip", "-n", hub, "link", "set", f"bridge-{net}", "up")
            _run("ip", "-n", hub, "addr", "add", f"{self.hub.at[net]}/16", "dev", f"bridge-{net}")
        log = self.hub.folder / "store.log"
        self.hub.start([sys.executable, "-c", _STORE], log, stdin=subprocess.PIPE)
        deadline = time.monotonic() + 120
        while "ready" not in log.read_text():
            assert self.hub.started[-1].poll() is None, log.read_text()
            assert time.monotonic() < deadline, "the rendezvous store does not start"
            time.sleep(0.05)

    def node(self) -> Place:
        """A new one, plugged in."""
        self._made += 1
        short = f"n{self._made}"
        at = {net: f"{prefix}.{self._made >> 8}.{self._made + 16 & 255}" for net, prefix in NETS.items()}
        made = self.nodes[short] = Place(f"{self._name}-{short}", at)
        name, hub = made.name, self.hub.name
        for net in NETS:
            end = f"{short}-{net}"
            _run("ip", "link", "add", "name", net, "netns", name, "type", "veth", "peer", "name", end, "netns", hub)
            _run("ip", "-n", hub, "link", "set", end, "master", f"bridge-{net}")
            _run("ip", "-n", hub, "link", "set", end, "up")
            _run("ip", "-n", name, "addr", "add", f"{at[net]}/16", "dev", net)
            _run("ip", "-n", name, "link", "set", net, "up")
        return made

    def slow(self, node: Place, mbit: int, net: str = "own") -> None:
        """Its link carries no more than that, in each direction; 0: as much as it can."""
        for name, device in ((node.name, net), (self.hub.name, f"{self._short(node)}-{net}")):
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", device, "root"], capture_output=True, check=False)
            if mbit:
                rate = ("rate", f"{mbit}mbit", "burst", f"{max(32, mbit * 2)}kb", "latency", "200ms")
                _run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *rate)

    def plug(self, node: Place, connected: bool, net: str = "own") -> None:
        """Cuts its link, or mends it. Nobody is told."""
        _run("ip", "-n", self.hub.name, "link", "set", f"{self._short(node)}-{net}", "up" if connected else "down")

    def clear(self) -> None:
        """Kills and removes all nodes."""
        for place in list(self.nodes.values()):
            place.remove()
        self.nodes.clear()

    def close(self) -> None:
        for process in self.hub.started:
            if process.stdin is not None:
                process.stdin.close()
        self.clear()
        self.hub.remove()

    def _short(self, node: Place) -> str:
        return next(short for short, each in self.nodes.items() if each is node)


@contextlib.contextmanager
def lan() -> Iterator[Lan]:
    with contextlib.closing(Lan()) as made:
        made.serve()
        yield made

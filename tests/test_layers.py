"""The layers: each package imports only packages below it, and a leaf never imports a leaf. Read from the source by
ast.

Every import counts, wherever it stands: in a function, and for type checkers only, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def below(order: tuple[str, ...], part: str, name: str) -> set[str]:
    return {f"{part}.{each}" for each in order[order.index(name) + 1 :]}


BASE = {"errors", "types", "clock", "cgroups", "gc_pause", "threads", "events", "settings"}
LEAVES = {"format", "layout", "placement", "policy", "storage", "preemption", "predict"}
BELOW_STORE = BASE | LEAVES
BELOW_IPC = BELOW_STORE | {"store"}

# Each imports those after it of its own part, and what its part may import.
AGENT = (
    *("node", "observability", "adaptive", "job", "commit", "restore", "replication", "snapshots", "net"),
    *("scheduler", "preemption", "state", "runtime"),
)
TRAINER = ("loop", "restore", "snapshot", "link", "state")

# What each package may import of the others ("x.y": only that module, or that package within one).
MAY_IMPORT = {
    **dict.fromkeys(BASE, BASE),
    "format": BASE | {"layout.layout"},
    "layout": BASE | {"format.manifest"},
    "placement": BASE | {"format.manifest", "layout"},
    "policy": BASE,
    "storage": BASE,
    "preemption": BASE,
    "predict": BASE,
    # And its helpers.
    "backends": BASE | {f"storage.{name}" for name in ("contract", "names", "failure", "files")},
    "store": BELOW_STORE,
    "ipc": BELOW_IPC,
    **{f"agent.{name}": BELOW_IPC | {"ipc"} | below(AGENT, "agent", name) for name in AGENT},
    **{f"trainer.{name}": BELOW_IPC | {"ipc"} | below(TRAINER, "trainer", name) for name in TRAINER},
    "simulate": BASE | {"policy", "placement", "report"},
    "report": BASE,
    "bench": BELOW_IPC | {"ipc", "report", "simulate", "reader", "checkpointer", "", "backends"},
    "integrations": {"", "data"},  # the public API
    "data": {""},
    "agent": set(),  # its __init__.py
    "trainer": set(),
    "checkpointer": BELOW_IPC | {"ipc", "trainer"},
    "checkpoint": BELOW_IPC,
    "reader": BELOW_IPC | {"checkpoint"},
    "cli": BELOW_IPC
    | {
        "ipc",
        "agent",
        "trainer",
        "checkpointer",
        "",
        "backends",
        "reader",
        "checkpoint",
        "simulate",
        "report",
        "bench",
    },
    "__main__": {"cli"},
    "": BELOW_IPC | {"trainer", "checkpointer", "reader", "checkpoint"},  # ckpt/__init__.py; only lazily, see below
}
LAZY_ONLY = {"cli": {"checkpointer", "trainer", ""}, "": MAY_IMPORT[""]}

TORCH = {*(f"trainer.{name}" for name in TRAINER), "checkpointer", "integrations", "data"}
TORCH_FILES = {"ckpt/bench/job.py"}  # a process of its own
# Writing .pt and DCP folders; tensors in the dtype that was saved; ckpt predict train.
TORCH_IN_FUNCTIONS = {
    *("ckpt/store/export.py", "ckpt/store/dcp_export.py", "ckpt/store/tensors.py"),
    "ckpt/predict/training.py",
}
ENVIRONMENT = {
    "ckpt/settings.py",
    "ckpt/ipc/spawn.py",  # hands the whole environment on to the agent
    "ckpt/cli/doctor.py",  # says which credentials are set
    "ckpt/bench/training.py",  # hands the whole environment on to its jobs
}
UNSAFE = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "jsonpickle", "joblib"}


@cache
def sources() -> dict[str, ast.Module]:
    """By path below the repository: ckpt/ (not through its link to backends/) and backends/."""
    files = sorted((ROOT / "ckpt").rglob("*.py")) + sorted((ROOT / "backends").rglob("*.py"))
    paths = [file.relative_to(ROOT).as_posix() for file in files]
    return {p: ast.parse((ROOT / p).read_text(), p) for p in paths if not p.startswith("ckpt/backends/")}


def part(path: str) -> str:
    """The package that a file belongs to: "layout", "agent.net", "backends"; "" for ckpt/__init__.py."""
    first, *rest = path.removesuffix(".py").split("/")
    if first == "backends":
        return first
    return "" if rest == ["__init__"] else package(rest)


def package(names: list[str]) -> str:
    """That of a module below ckpt, by the names on the way to it."""
    return ".".join(names[: 2 if names[0] in ("agent", "trainer") and names[1:] != ["__init__"] else 1])


def imports(tree: ast.Module, path: str) -> Iterator[tuple[str, bool, int]]:
    """(module, whether it is imported in a function or for type checkers only, line) of each import.

    `from a import b` gives a.b where that is a module of ours, or where a is ckpt itself (but for __version__); else a.
    """
    package = path.replace("backends/", "ckpt/backends/", 1).split("/")[:-1]

    def walk(nodes: Iterable[ast.AST], lazy: bool) -> Iterator[tuple[str, bool, int]]:
        for node in nodes:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from walk(node.body, True)
                yield from walk(node.orelse, lazy)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, lazy, node.lineno
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
                module = ".".join(filter(None, (base, node.module)))
                for alias in node.names:
                    full = f"{module}.{alias.name}"
                    exported = module == "ckpt" and alias.name != "__version__"
                    yield (full if exported or is_ours(full) else module), lazy, node.lineno
            else:
                deeper = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(ast.iter_child_nodes(node), deeper)

    yield from walk(tree.body, False)


def is_ours(module: str) -> bool:
    if not (module == "ckpt" or module.startswith("ckpt.")):
        return False
    path = ROOT / module.replace("ckpt.backends", "backends").replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.mark.parametrize("path", sorted(sources()))
def test_each_module_imports_only_what_is_below_it(path):
    mine = part(path)
    assert mine in MAY_IMPORT, f"{path} belongs to no layer: say in tests/test_layers.py which it is"
    wrong = []
    for module, lazy, line in imports(sources()[path], path):
        if module.split(".")[0] == "backends":
            wrong.append(f"line {line}: {module} under its bare name; import ckpt.backends")
        if not module.startswith("ckpt."):  # the root itself (its place, its version) is loaded with any part
            continue
        inner = module.removeprefix("ckpt.")
        theirs = package(inner.split("."))
        theirs = theirs if theirs in MAY_IMPORT else ""  # a name that ckpt/__init__.py exports
        if theirs == mine and mine:
            continue
        names = {theirs, theirs.split(".")[0], inner}
        if not names & MAY_IMPORT[mine]:
            wrong.append(f"line {line}: {module} is not below {mine or 'ckpt'}")
        elif not lazy and names & LAZY_ONLY.get(mine, set()):
            wrong.append(f"line {line}: {module} may be imported only in a function")
    assert not wrong, f"{path}: " + "; ".join(wrong)


def test_torch_is_imported_only_where_the_trainer_runs():
    wrong = [
        f"{path}:{line}"
        for path, tree in sources().items()
        for module, lazy, line in imports(tree, path)
        if module.split(".")[0] in {"torch", "torchdata"}
        and part(path) not in TORCH
        and path not in TORCH_FILES
        and not (lazy and path in TORCH_IN_FUNCTIONS)
    ]
    assert not wrong


def test_the_ranks_talk_to_each_other_only_on_entry():
    """A collective in a step, a save or the exit would hang all ranks where one does not come to it."""
    used = {
        (module, path)
        for path, tree in sources().items()
        for module, _, _ in imports(tree, path)
        if module in ("ckpt.trainer.link.collective", "torch.distributed")
    }
    assert used == {
        # These two ask for rank and world.
        ("torch.distributed", "ckpt/data/loader.py"),
        ("torch.distributed", "ckpt/integrations/torchtitan.py"),
        ("torch.distributed", "ckpt/trainer/link/collective.py"),
        ("ckpt.trainer.link.collective", "ckpt/trainer/loop/entry.py"),
        ("ckpt.trainer.link.collective", "ckpt/trainer/restore/restore.py"),
    }
    wrong = [
        f"{path}:{node.lineno} {ast.unparse(node)}"
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        if node.attr in {"full_tensor", "redistribute"} or ast.unparse(node).startswith("torch.distributed.")
    ]
    assert not wrong


def test_the_environment_is_read_only_in_settings_and_by_backends():
    wrong = [
        f"{path}:{node.lineno}"
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv", "getenvb"})
        or (isinstance(node, ast.ImportFrom) and {a.name for a in node.names} & {"environ", "environb", "getenv"})
        if ast.unparse(node).startswith(("os.", "from os")) and path not in ENVIRONMENT and part(path) != "backends"
    ]
    assert not wrong


def test_threads_are_started_only_by_tasks():
    names = {"Thread", "Timer", "ThreadPoolExecutor", "ThreadPool", "start_new_thread"}
    wrong = []
    for path, tree in sources().items():
        for node in ast.walk(tree):
            used = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
            if path != "ckpt/threads.py" and any(ast.unparse(each).split(".")[-1] in names for each in used):
                wrong.append(f"{path}:{node.lineno}")
    assert not wrong


def test_nothing_is_unpickled_anywhere():
    wrong = []
    for path, tree in sources().items():
        wrong += [f"{path}:{n} {m}" for m, _, n in imports(tree, path) if m.split(".")[0] in UNSAFE]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in {"torch.load", "np.load", "numpy.load"}:
                wrong.append(f"{path}:{node.lineno} {ast.unparse(node)}")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                wrong.append(f"{path}:{node.value.lineno} allow_pickle")
    assert not wrong


def test_the_parts_have_no_import_cycle_through_their_init_files():
    """A leaf's __init__ imports nothing of another part, so that importing one module loads one part."""
    wrong = [
        f"{path}:{line} {module}"
        for path, tree in sources().items()
        if path.endswith("__init__.py") and part(path) in BASE | LEAVES
        for module, lazy, line in imports(tree, path)
        if is_ours(module) and not lazy and module.split(".")[1] not in BASE | {part(path)}
    ]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle():
    """Those of one package, too, and for type checkers only. A package's face (its __init__.py) hands names on."""
    below: dict[str, set[str]] = {}
    for path, tree in sources().items():
        if not path.endswith("__init__.py"):
            name = path.replace("backends/", "ckpt/backends/", 1) if path.startswith("backends/") else path
            below[name.removesuffix(".py").replace("/", ".")] = {module for module, _, _ in imports(tree, path)}
    while free := {name for name, found in below.items() if not found & below.keys() - {name}}:
        below = {name: found for name, found in below.items() if name not in free}
    assert below.keys() == set(), "these are in a circle, or import one that is"


def test_no_two_classes_have_one_name():
    found: dict[str, list[str]] = {}
    for path, tree in sources().items():
        for node in ast.walk(tree):
            # Users name those of an integration by its module: ckpt.integrations.dcp.Reader.
            if isinstance(node, ast.ClassDef) and part(path) != "integrations":
                found.setdefault(node.name, []).append(path)
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


# --- the rules themselves are tried on made-up sources ------------------------------------------------------------


def seen(source: str, path: str = "ckpt/layout/made_up.py") -> list[tuple[str, bool]]:
    return [(module, lazy) for module, lazy, _ in imports(ast.parse(source), path)]


def test_imports_are_found_wherever_they_stand():
    assert seen("import torch.nn as nn, os") == [("torch.nn", False), ("os", False)]
    assert seen("from ckpt.layout import layout") == [("ckpt.layout.layout", False)]
    assert seen("from ckpt.layout.layout import Entry") == [("ckpt.layout.layout", False)]
    assert seen("from .layout import Entry\nfrom ..types import Box") == [
        ("ckpt.layout.layout", False),
        ("ckpt.types", False),
    ]
    assert seen("def f():\n    try:\n        from ckpt import store\n    finally: pass") == [("ckpt.store", True)]
    assert seen("from ckpt import Checkpointer, __version__") == [("ckpt.Checkpointer", False), ("ckpt", False)]
    assert seen("class A:\n    import json") == [("json", False)]
    assert seen("if TYPE_CHECKING:\n    import torch\nelse:\n    import os") == [("torch", True), ("os", False)]
    assert seen("from . import local", "backends/cloud.py") == [("ckpt.backends.local", False)]

"""The sdist, the wheel made from it, and the editable install carry ckpt.backends, and nothing that is not ckpt."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _run(*command: str | os.PathLike[str], cwd: Path, **env: str) -> str:
    # A temporary folder of its own for pip, and no setting of this test run.
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV_"))} | env
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _build(hook: str, source: Path, out: Path) -> Path:
    """Calls the build backend as `python -m build` or pip would, without a network."""
    out.mkdir(exist_ok=True)
    code = f"import setuptools.build_meta as b; print('made', b.build_{hook}({str(out)!r}))"
    return out / _run(sys.executable, "-c", code, cwd=source).splitlines()[-1].removeprefix("made ")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git would give someone: builds leave files beside their source."""
    copy = tmp_path_factory.mktemp("source") / "ckpt"
    ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", "*.egg-info", "build", "dist", ".*_cache")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel made from the sdist: so what the sdist lacks, the wheel lacks."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as tar:
        tar.extractall(unpacked, filter="data")
    return _build("wheel", next(unpacked.iterdir()), tmp_path_factory.mktemp("wheel"))


def _modules_in_checkout() -> set[str]:
    found = {p.relative_to(ROOT).as_posix() for p in (ROOT / "ckpt").rglob("*.py") if "backends" not in p.parts}
    return found | {f"ckpt/backends/{p.name}" for p in (ROOT / "backends").glob("*.py")}


def test_the_wheel_has_every_module_and_no_other_top_level_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {name for name in names if name.endswith(".py")}
    assert modules == _modules_in_checkout()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"ckpt"}
    assert "ckpt/py.typed" in names


def _info(wheel: Path, name: str) -> str:
    archive = zipfile.ZipFile(wheel)
    return archive.read(next(each for each in archive.namelist() if each.endswith(f".dist-info/{name}"))).decode()


def test_the_sdist_has_no_tests(sdist: Path) -> None:
    with tarfile.open(sdist) as tar:
        names = [name.partition("/")[2] for name in tar.getnames()]
    assert "ckpt/types.py" in names
    assert [name for name in names if name.startswith(("tests", "benchmarks"))] == []


def test_each_link_of_the_text_for_an_index_page_is_absolute(wheel: Path) -> None:
    metadata = _info(wheel, "METADATA")
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    source = re.findall(r"^Project-URL: Source, (\S+)$", metadata, re.MULTILINE)[0]
    assert f"{source}/blob/main/docs/start.md" in links
    assert [link for link in links if "://" not in link and not link.startswith("#")] == []


def test_no_dependency_of_the_wheel_bounds_botocore_from_above(wheel: Path) -> None:
    """Of boto3, s3fs and aiobotocore each release takes a few of botocore's: pip finds no set of all for many users."""
    needs = re.findall(r"^Requires-Dist: ([^;\n]+)$", _info(wheel, "METADATA"), re.MULTILINE)
    assert "botocore>=1.34" in needs
    assert [need for need in needs if need.startswith(("boto3", "s3fs", "aiobotocore"))] == []


def test_the_wheel_names_its_licence_command_and_backends(wheel: Path) -> None:
    metadata, entries = _info(wheel, "METADATA"), _info(wheel, "entry_points.txt")
    assert "\nName: multilevel-ckpt\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "Apache License" in _info(wheel, "licenses/LICENSE")
    assert "ckpt = ckpt.cli.main:main" in entries
    assert "[ckpt.backends]" in entries


IMPORT_ALL = """
import importlib, pathlib, sys
import ckpt.backends
for module in sys.argv[2:]:
    importlib.import_module(module)
for name in ("backends", "tests", "benchmarks"):
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} can be imported")
root = pathlib.Path(sys.argv[1]).resolve()
for name in ("ckpt.types", *sys.argv[2:]):
    at = pathlib.Path(sys.modules[name].__file__).resolve()
    assert root in at.parents, f"{name} comes from {at}, not from {root}"
"""


def _backends() -> list[str]:
    return [f"ckpt.backends.{p.stem}" for p in sorted((ROOT / "backends").glob("*.py")) if p.stem != "__init__"]


def test_an_installed_wheel_imports_its_backends(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    _run(*pip, wheel, cwd=tmp_path)
    # -S hides the editable install of this environment; its libraries come back as a plain path.
    libraries = os.path.dirname(os.path.dirname(pytest.__file__))
    code = f"import sys; sys.path[:0] = [{str(target)!r}]; sys.path.append({libraries!r})\n" + IMPORT_ALL
    _run(sys.executable, "-S", "-c", code, target, "ckpt.types", *_backends(), cwd=tmp_path)


def test_an_editable_install_imports_its_backends(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    _run(*pip, "--target", target, "--editable", source, cwd=tmp_path)
    libraries = os.path.dirname(os.path.dirname(pytest.__file__))
    code = f"import site, sys; site.addsitedir({str(target)!r}); sys.path.append({libraries!r})\n" + IMPORT_ALL
    _run(sys.executable, "-S", "-c", code, source, "ckpt.types", *_backends(), cwd=tmp_path)

"""ckpt restore keeps what it reads ahead and one slab in memory, however large the checkpoint is: some 100 MiB."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckpt.store.tensor_stream import AHEAD_BYTES, GET_BYTES, GETS, SLAB_BYTES
from tests.cli.stores import begin, save

ROOT = Path(__file__).parents[2]
LARGE_BYTES, SMALL_BYTES = 256 << 20, 4 << 20
BYTES = LARGE_BYTES + 16 * SMALL_BYTES
# What is read ahead (to the end of a slab), what is on its way, the slab, its conversion in two steps; and what the
# heap keeps of all that for the next part, which was never seen to be more than as much again.
BOUND_BYTES = AHEAD_BYTES + SLAB_BYTES + GETS * GET_BYTES + 4 * SLAB_BYTES + (32 << 20)


@pytest.fixture(scope="module")
def large_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tensor of 256 MiB, and 16 of 4 MiB, of noise: what is fetched is as large as what it is decoded to."""
    url = tmp_path_factory.mktemp("large") / "run"
    rng = np.random.default_rng(0)
    tensors = {f"small.{n}": rng.integers(0, 256, SMALL_BYTES, dtype=np.uint8) for n in range(16)}
    tensors["large"] = rng.standard_normal(LARGE_BYTES // 4, dtype=np.float32).reshape(-1, 1024)
    save(url, begin(url), 1, tensors)
    return url


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("x.safetensors", []),
        ("bf16.safetensors", ["--dtype", "bfloat16"]),
        ("x.pt", []),
        ("folder", ["--shard-bytes", str(40 << 20)]),
    ],
)
def test_memory_does_not_grow_with_the_checkpoint(
    large_run: Path, tmp_path: Path, name: str, options: list[str]
) -> None:
    assert BOUND_BYTES <= 105 << 20, "docs/commands.md says some 100 MiB"
    command = [sys.executable, "-m", "tests.cli.peak", str(large_run), str(tmp_path / name), *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    files = [path for path in (tmp_path / name, *(tmp_path / name).glob("*")) if path.is_file()]
    assert sum(path.stat().st_size for path in files) >= BYTES // 2
    assert int(done.stdout.splitlines()[-1]) <= BOUND_BYTES

"""What `import ckpt` offers: the names are pinned, and cost nothing before they are used."""

from __future__ import annotations

import subprocess
import sys

import ckpt

EXPORTED = [
    "AccessDenied",
    "Adaptive",
    "AgentError",
    "Best",
    "Checkpoint",
    "Checkpointer",
    "CkptError",
    "CommitFailed",
    "DamagedData",
    "Draft",
    "DraftBox",
    "DraftPart",
    "Event",
    "Every",
    "Export",
    "Handle",
    "Keep",
    "Leave",
    "Limits",
    "NewerFormat",
    "NoCheckpoint",
    "Parity",
    "Reader",
    "Replicas",
    "Restored",
    "RunInUse",
    "SaveFailed",
    "Shard",
    "StateMismatch",
    "StorageError",
    "Superseded",
    "TensorInfo",
    "UsageError",
    "open",
    "shield_worker",
]


def test_the_public_names_are_these_and_each_is_there():
    assert sorted(ckpt.__all__) == EXPORTED
    assert dir(ckpt) == sorted([*EXPORTED, "__version__"])
    for name in EXPORTED:
        assert getattr(ckpt, name).__name__ == name


def test_importing_ckpt_imports_neither_torch_nor_numpy():
    code = "import sys, ckpt; ckpt.Every, ckpt.CkptError; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
